"""Sessions are recognised by every name of the table, bounded whatever a client sends, and their ends are felt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prompts.routing import RoutingRequest, parse_routing
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.learning.output_lengths import OutputLengths
from router.decide.messages import Forward, ReportedUsage, RouteRequest
from router.decide.recent_prompts import RecentPrompts
from router.decide.workers import ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import Scope
from router.prompting.encode import read_large_request
from router.prompting.sessions import MAX_NAME_CHARS, NAME_SOURCES, NameSource, Session, SessionNames

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sessions.md"
SCOPE = Scope("m")


def read(headers: dict[str, str], body: bytes = b"{}", extra_headers: tuple[str, ...] = ()) -> Session:
    encoded_headers = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    return SessionNames.make_session(
        SessionNames(extra_headers).read_headers(encoded_headers.get), parse_routing("/v1/chat/completions", body)
    )


def body_with(path: str, value: str) -> bytes:
    outer, _, inner = path.partition(".")
    return b'{"%b": %b}' % (outer.encode(), f'{{"{inner}": "{value}"}}'.encode() if inner else f'"{value}"'.encode())


@pytest.mark.parametrize("row", NAME_SOURCES, ids=[f"{row.location}-{row.name}" for row in NAME_SOURCES])
def test_every_name_of_the_table_is_recognised(row: NameSource) -> None:
    base = {} if row.meaning == "session" else {"session-id": "s"}
    if row.meaning == "parent_agent":
        base["x-claude-code-agent-id"] = "a"
    headers = {**base, row.name: "true" if row.meaning == "final" else "v"} if row.location == "header" else base
    session = read(headers, body_with(row.name, "v") if row.location == "body" else b"{}")
    expected = {
        "session": Session("v"),
        "agent": Session("s/v", "s"),
        "parent": Session("s", "v"),
        "parent_agent": Session("s/a", "s/v"),
        "final": Session("s", None, True),
    }
    assert session == expected[row.meaning]


@pytest.mark.parametrize("row", NAME_SOURCES, ids=[f"{row.location}-{row.name}" for row in NAME_SOURCES])
def test_every_name_stands_in_the_docs(row: NameSource) -> None:
    description = {"parent_agent": "parent agent", "final": "end"}.get(row.meaning, row.meaning)
    assert re.search(
        rf"^\| {row.location} \| `{re.escape(row.name)}` \| {description} \|", DOCS.read_text(), re.MULTILINE
    )


@pytest.mark.parametrize("row", [row for row in NAME_SOURCES if row.location == "body"], ids=lambda row: row.name)
def test_a_large_body_that_a_helper_reads_tells_the_same(row: NameSource) -> None:
    request = read_large_request(body_with(row.name, "v"), "chat")
    assert SessionNames.make_session({}, request) == Session("v")


def test_the_first_that_is_there_counts_and_the_operators_come_before() -> None:
    headers = {"x-session-id": "ours", "session-id": "codex", "x-chat": "chat", "x-up": "up"}
    body = b'{"user": "u", "prompt_cache_key": "k"}'
    assert read(headers, body).name == "ours"
    assert read({"x-session-id": ""}, body).name == "k"
    assert read(headers, body, ("X-Chat", "parent=x-up")) == Session("chat", "up")
    assert read({}, b'{"user": 3, "metadata": "none", "prompt_cache_key": {}}') == Session()
    assert read({"x-parent-session-id": "up", "x-dynamo-session-final": "1"}) == Session()
    assert read({"session-id": "s", "x-parent-session-id": "s", "x-dynamo-session-final": "no"}) == Session("s")


def test_codex_s_sub_agents_share_the_session_and_differ_by_their_thread() -> None:
    main = {"session-id": "s", "thread-id": "s"}
    assert read(main, b'{"prompt_cache_key": "s"}') == Session("s")
    child = {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}
    assert read(child, b'{"prompt_cache_key": "t"}') == Session("s/t", "s")
    assert read({**child, "thread-id": "u", "x-codex-parent-thread-id": "t"}) == Session("s/u", "s/t")
    assert read({"thread-id": "t"}, b'{"prompt_cache_key": "t"}') == Session("t")
    assert read({"thread-id": "t"}) == Session()


@pytest.mark.parametrize("value", ["s" * 65, "a\tb", "\x80\x81", "x" * 100_000, "a\u2028b", " " * 70])
def test_a_hostile_name_is_bounded_and_still_tells_sessions_apart(value: str) -> None:
    if value.encode("utf-8", "replace") == value.encode("latin-1", "replace"):
        headers = read({"session-id": value, "x-claude-code-agent-id": value + "!", "x-parent-session-id": value})
        assert headers.name is not None
        assert headers.parent_name is not None
        assert max(len(headers.name), len(headers.parent_name)) <= MAX_NAME_CHARS
        assert (headers.name + headers.parent_name).isprintable()
    for field in ("user", "prompt_cache_key", "metadata_user_id"):
        names: list[Any] = [
            SessionNames.make_session({}, RoutingRequest(kind="chat", **{field: text})).name
            for text in (value, value, value + "!")
        ]
        assert len(names[0]) <= MAX_NAME_CHARS
        assert names[0].isprintable()
        assert names[0] == names[1] != names[2]


def core_with(recent_prompts: RecentPrompts | None = None, **changes: Any) -> RouterCore:
    core = RouterCore(make_index(seed=1), CoreConfig(**changes), recent_prompts=recent_prompts)
    for name in "ab":
        core.add_worker(WorkerSpec(name, f"http://{name}", (ServedModel("m", "m"),), cache_tokens=100_000), 0.0)
    return core


def send(core: RouterCore, name: str, ids: list[int], now: float, **changes: Any) -> str:
    placement = core.route(RouteRequest(name, "m", SCOPE, ids, len(ids), **changes), now)
    assert isinstance(placement, Forward)
    core.finish_request(name, ReportedUsage(len(ids), 0, 100), now + 1.0)
    core.check_invariants()
    return placement.decision.worker


def test_thousands_of_names_are_forgotten_in_the_end() -> None:
    core = core_with(session_affinity=True, sessions_max=100)
    for number in range(3000):
        send(core, f"r{number}", [number] * 20, float(number), session=f"s{number}", parent=f"p{number}")
    assert len(core._chooser.session_placements) == 100


def test_a_sub_agent_goes_where_its_parent_is_and_an_ended_session_is_forgotten() -> None:
    core = core_with(session_affinity=True, policy="round_robin")
    home = send(core, "r0", [1] * 600, 0.0, session="main")
    for number in range(4):
        assert send(core, f"sub{number}", [2] * 600, 1.0, session=f"sub{number}", parent="main") == home
    assert {send(core, f"other{number}", [3] * 600, 2.0, session=f"o{number}") for number in range(2)} == {"a", "b"}
    send(core, "last", [1] * 700, 3.0, session="main", is_final=True)
    assert core._chooser.session_placements.get("main") is None


def test_what_only_an_ended_session_used_is_needed_no_more() -> None:
    core = core_with(RecentPrompts(chunk_tokens=64))
    shared_ids, load = [7] * 640, core.tracker.targets["a"].load
    for turn, name in enumerate("xyxy"):
        tail = [ord(name)] * (1280 + 64 * turn)
        worker = send(core, f"r{turn}", shared_ids + tail, float(turn), session=name, worker="a")
    assert worker == "a"
    assert load.idle_prompt_tokens == 640 + 2 * 1280 - 64, "the system prompt and what both sessions sent twice"
    send(core, "end", shared_ids + [ord("x")] * 1600, 5.0, session="x", worker="a", is_final=True)
    assert load.idle_prompt_tokens == 640 + 1280, "y's, and what both began with"


def test_a_sub_agents_answers_are_expected_to_be_like_its_parents() -> None:
    lengths = OutputLengths()
    for number in range(40):
        lengths.record_length(RouteRequest("p", "m", SCOPE, None, 10, session="main"), 900)
        lengths.record_length(RouteRequest("q", "m", SCOPE, None, 10, session=f"other{number}"), 30)
    sub, stranger = (RouteRequest("r", "m", SCOPE, None, 10, session="new", parent=up) for up in ("main", None))
    assert lengths.estimate_length(sub) > 1.5 * lengths.estimate_length(stranger)
    main_request = RouteRequest("s", "m", SCOPE, None, 10, session="main")
    before = lengths.estimate_length(main_request)
    lengths.forget_session(main_request)
    assert lengths.estimate_length(main_request) < before
