"""The command line, as far as it needs no Ray."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from fleet import cli
from fleet.cli import cli as command


@pytest.mark.parametrize(
    ("words", "model", "flags"),
    [
        ([], "", ()),
        (["m"], "m", ()),
        (["m", "--", "--seed", "1"], "m", ("--seed", "1")),
        (["--", "--seed", "1"], "", ("--seed", "1")),
    ],
)
def test_flags_need_no_model_before_them(words: list[str], model: str, flags: tuple[str, ...]) -> None:
    params: dict[str, Any] = command.commands["up"].make_context("up", words).params
    assert cli.split_model(params["model"], params["flags"]) == (model, flags)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "--replicas", "x"], "got 'x', expected a whole number from 0 to 999999"),
        (["up", "--name", "a b"], "--name: got 'a b'"),
        (["up", "--", "--port", "1"], "--port is the fleet's"),
        (["up", "--engine", "vllm"], "MODEL is missing"),
        (["up", "--env", "NOT_SET_HERE"], "NOT_SET_HERE"),
        (["up", "--router-flags", "--admin x"], "--admin is the fleet's"),
        (["roll", "--router-flags", "--fair"], "for --routers only"),
        (["roll", "--routers", "--surge"], "takes neither MODEL nor --surge"),
        (["roll", "m", "--", "--host", "x"], "--host is the fleet's"),
        (["status", "--address", "127.0.0.1:1"], "no Ray at 127.0.0.1:1: "),
        (["down", "--address", "[::1]:99999"], "no Ray at [::1]:99999: "),
    ],
)
def test_what_cannot_be_is_said_before_ray_is_asked(words: list[str], says: str) -> None:
    result = CliRunner().invoke(command, words)
    assert result.exit_code in (1, 2)
    assert says in result.output
