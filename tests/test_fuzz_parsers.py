"""The short form of scripts/fuzz: every parser in Python, a few hundred inputs and a budget of work for each."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzzed_parsers as made
import pytest

ROOT = Path(__file__).resolve().parents[1]

PARSERS = made.parsers()


@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
def test_what_others_send_costs_what_its_bytes_pay_for(parser: made.Parser) -> None:
    are_accepted = [made.check_work(parser, example) for example in parser.examples]
    assert any(are_accepted)
    for data in made.repeat_units(parser, 300):
        made.check_work(parser, data)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(100):
        made.check_work(parser, made.mutate_example(rng, parser))


def test_a_quadratic_parser_and_one_that_raises_are_found() -> None:
    names: dict[str, Any] = {}
    source = "def read(data):\n    for i in range(len(data)):\n        for j in range(i):\n            data[j]\n"
    exec(compile(source, str(ROOT / "router" / "planted.py"), "exec"), names)
    slow = made.Parser("slow", names["read"], (b"x",))
    assert made.check_work(slow, b"x" * 10)
    with pytest.raises(made.TooMuchWork, match="1000 bytes cost"):
        made.check_work(slow, b"x" * 1_000)
    with pytest.raises(ZeroDivisionError):
        made.check_work(made.Parser("wrong", lambda data: 1 // 0, (b"x",), refuses=(ValueError,)), b"")


def test_the_command() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fuzz"), "--only", "events", "--minutes", "0.01", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, "nothing wrong" in result.stdout) == (0, True), result.stderr
