"""Bounds of what others choose, in the tables of tests/bounds.md.

Every row's setting or constant exists and has the default that the row gives. Its metric is in the table of metrics.
No bound is left out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from router.app.config import SCHEMA

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (client|worker|list|peer) \| (.+) \| `([^`]+)` \| ([\d.]+) \| `(\w+)` \|$", re.MULTILINE)
PAGE = (ROOT / "tests" / "bounds.md").read_text()
ROWS = ROW.findall(PAGE)
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
BOUNDS = re.compile(
    r"_(BYTES|CHARS|DIGITS)_MAX$|^(DIGITS|LINE|TRAILERS|MODELS|RANKS|GROUPS|PEERS|TARGETS|TOPICS|EVENTS|QUEUED|WAITING|EARLY|STREAMS|STORED|IDS|INTERIM)_MAX$"
    r"|^MAX_\w*(BYTES|CHARS|DIGITS|TOPICS|BATCHES|MESSAGES)$"
)
"""Constants of the rooms where foreign bytes come in whose names say that they are such a bound."""
ELSEWHERE = {
    "router/edge/token_recorder.py:PLAIN_EVENT_BYTES_MAX": "what is longer is read as any other event",
    "router/edge/response_redactor.py:KEY_START_BYTES_MAX": "ours: the end of a read that may begin a key",
    "router/edge/upstream.py:JOIN_BYTES_MAX": "ours: what is joined before it is written",
    "router/prompting/partial_body.py:TAIL_BYTES_MAX": "what is longer is read as any other body",
    "router/prompting/turn_pieces.py:CHARS_MAX": "what is longer is not remembered",
    "router/prompting/turn_pieces.py:EDGE_CHARS_MAX": "messages with more white space are rendered by the template",
    "router/prompting/conversation_cache.py:BODY_BYTES_MAX": "longer ones are not cached",
    "router/fleet/peers.py:POLL_BYTES_MAX": "ours: read at one beat, the rest at the next",
    "router/fleet/index_feed.py:UNSLICED_BYTES_MAX": "longer ones go in slices",
    "events/frames.py:MAX_REQUEST_BYTES": "of who follows an engine: its connection ends",
    "router/fleet/worker_responses.py:METRICS_READ_BYTES_MAX": "within the bytes of its metrics page",
    "router/fleet/worker_responses.py:LINE_CHARS_MAX": "within the bytes of its metrics page",
    "router/fleet/worker_monitor.py:REASON_CHARS_MAX": "of a reason that is shown",
    "router/commands/check.py:MAX_ANSWER_BYTES": "of a command that ends with it",
    "router/commands/top.py:MAX_ANSWER_BYTES": "of a command that ends with it",
    "router/prompting/conversation_reader.py:INLINE_BYTES_MAX": "longer ones are read elsewhere",
    "router/prompting/encode.py:INLINE_BYTES_MAX": "longer ones are read elsewhere",
    "router/fleet/peer_snapshots.py:SEED_BYTES_MAX": "asked once, at the start, of whom the operator named",
}


def constants(file: Path) -> dict[str, float]:
    """The numbers that a module gives names to, and a header."""
    text = file.read_text()
    if file.suffix == ".hpp":
        matches = re.findall(r"\b(k\w+Max) = ([^,;]+)[,;]", text)
        number = {name: re.sub(r"std::size_t\{(\w+)\}|(\d)u\b", r"\1\2", value) for name, value in matches}
        return {name: eval(value) for name, value in number.items() if re.fullmatch(r"[\d <]+", value)}
    values: dict[str, float] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target, value = node.target if isinstance(node, ast.AnnAssign) else node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        parts = value.elts if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple) else [value]
        for name, part in zip(names, parts):
            text = ast.unparse(part)
            if isinstance(name, ast.Name) and re.fullmatch(r"[\d_.e<*+ -]+", text):
                values[name.id] = eval(text)
    return values


@pytest.mark.parametrize(
    ("sender", "bound_name", "location", "default", "metric"), ROWS, ids=[f"{r[0]} {r[1]}" for r in ROWS]
)
def test_a_bound_has_a_default_and_a_metric(
    sender: str, bound_name: str, location: str, default: str, metric: str
) -> None:
    if ":" in location:
        file, _, name = location.partition(":")
        assert constants(ROOT / file)[name] == float(default)
    else:
        assert float(SCHEMA.setting_by_path[location].default) == float(default)
    if (counter_match := re.fullmatch(r"events_(\w+)_total", metric)) is not None:
        (names,) = re.findall(r"^\| `events_NAME_total` .*$", METRICS, re.MULTILINE)
        assert re.search(rf"\b{counter_match.group(1)}\b", names)
    else:
        assert re.search(rf"^\| [^|]*`{metric}`", METRICS, re.MULTILINE), f"docs/reference/metrics.md has no {metric}"


def test_no_bound_is_left_out() -> None:
    documented_locations = {location for _, _, location, _, _ in ROWS}
    assert len(ROWS) >= 40
    files = [*(ROOT / "router").rglob("*.py"), *(ROOT / "events").glob("*.py")]
    for file in files:
        for name in filter(BOUNDS.search, constants(file)):
            at = f"{file.relative_to(ROOT)}:{name}"
            assert (at in documented_locations) != (at in ELSEWHERE), (
                f"{at}: in docs/security.md or tests/bounds.md, or said why not"
            )
    settings = {
        path for path in SCHEMA.setting_by_path if re.search(r"(bytes|headers|requests|tokens|connections)_max$", path)
    }
    assert settings <= documented_locations
