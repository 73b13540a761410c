"""No pattern costs more than its text pays for: `re` holds the interpreter's lock, so one that looks through the rest
of a text again and again stops everybody. Each is tried on texts made of what stands in it, many times over.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from router.prompting.outline import _remove_thoughts

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_constants: Any = importlib.import_module("re._constants" if sys.version_info >= (3, 11) else "sre_constants")
pytestmark = pytest.mark.long
ROOMS = ("router", "prompts", "options", "events", "simulation")
BYTES = 200_000
CPU_S_MAX = 1.0
"""A pattern that is linear takes some milliseconds, a quadratic one minutes."""
SEARCHES = ("search", "sub", "subn", "split", "findall", "finditer")


def _find_patterns() -> Iterator[tuple[str, re.Pattern[Any], bool]]:
    """(name, pattern, whether it is searched for, not only matched at one place)."""
    for room in ROOMS:
        for info in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
            if info.name.endswith(("__main__", "_pb2", "_pb2_grpc")):
                continue
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # of an extra that is not installed
                continue
            for name, value in vars(module).items():
                if isinstance(value, re.Pattern):
                    source = Path(str(module.__file__)).read_text()
                    is_searched = re.search(rf"\b{name}\.({'|'.join(SEARCHES)})\(", source) or not name.startswith("_")
                    yield f"{info.name}.{name}", value, bool(is_searched)


PATTERNS = {name: (pattern, is_searched) for name, pattern, is_searched in _find_patterns()}


def _units(tree: Any) -> Iterator[str]:
    """Runs of letters that stand in a pattern, and a letter of each class."""
    run = ""
    for op, value in tree:
        if op is _constants.LITERAL:
            run += chr(value)
            continue
        if run:
            yield run
        run = ""
        if op is _constants.IN:
            yield next((chr(code_point) for kind, code_point in value if kind is _constants.LITERAL), "a")
        for part in value if isinstance(value, (tuple, list)) else ():
            for inner in part if isinstance(part, list) else (part,):
                if isinstance(inner, _parser.SubPattern):
                    yield from _units(inner)
    if run:
        yield run


@contextmanager
def _cpu_bound(description: str) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(description)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _attack(name: str, pattern: re.Pattern[Any], is_searched: bool) -> None:
    binary = isinstance(pattern.pattern, bytes)
    source = pattern.pattern.decode("latin-1") if binary else pattern.pattern
    units = sorted({*_units(_parser.parse(source, pattern.flags & ~re.UNICODE)), " ", "a", "\\", '"'})
    rng = random.Random(name)
    attack_units = [
        *units,
        *map("".join, itertools.product("\\a ", '"a')),
        *("".join(rng.choices(units, k=rng.randrange(2, 5))) for _ in range(20)),
    ]
    for unit in attack_units:
        for start, end in (("", ""), (units[0], "\x00"), ('"', "\\"), (rng.choice(units), "\x00")):
            text = start + unit * (BYTES // len(unit)) + end
            with _cpu_bound(f"{name} on {unit!r} again and again, after {start!r}, before {end!r}"):
                (pattern.findall if is_searched else pattern.match)(text.encode() if binary else text)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_costs_what_its_text_pays_for(name: str) -> None:
    _attack(name, *PATTERNS[name])


def test_patterns_that_look_again_and_again_are_found() -> None:
    assert len(PATTERNS) > 30
    for source in (r"<think>.*?</think>\s*", r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', r"(a|aa)+b"):
        with pytest.raises(TimeoutError, match="planted"):
            _attack("planted", re.compile(source, re.DOTALL), is_searched=True)


def test_thoughts_are_left_out_as_a_pattern_would() -> None:
    thought_pattern, rng = re.compile(r"<think>.*?</think>\s*", re.DOTALL), random.Random(5)
    for _ in range(2_000):
        text = "".join(rng.choices(["<think>", "</think>", " ", "\n\u3000", "a", "<", "think>"], k=rng.randrange(12)))
        assert _remove_thoughts(text) == thought_pattern.sub("", text)
    with _cpu_bound("thoughts without an end"):
        assert _remove_thoughts("<think>" * 200_000) == "<think>" * 200_000
