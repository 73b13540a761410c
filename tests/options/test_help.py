"""`--help` of every command: the flags that people need first, the rest under headings, each in at most two lines."""

from __future__ import annotations

import re

import click
import pytest

from engine.cli import cli as engine_cli
from engine.config import SCHEMA as ENGINE
from fleet.cli import cli as fleet_cli
from options import Schema
from options.command import MAIN_HEADING
from router.app.cli import cli as router_cli
from router.app.config import EPP_SCHEMA, SHADOW_SCHEMA
from router.app.config import SCHEMA as ROUTER

SCHEMAS = {
    ("router", "run"): ROUTER,
    ("router", "epp"): EPP_SCHEMA,
    ("router", "shadow"): SHADOW_SCHEMA,
    ("engine", "serve"): ENGINE,
}
COMMANDS = [
    pytest.param(program, name, command, id=f"{program} {name}")
    for program, group in (("router", router_cli), ("engine", engine_cli), ("fleet", fleet_cli))
    for name, command in group.commands.items()
]
_HEADING = re.compile(r"^[A-Z][A-Za-z ]+:$")
_FLAG = re.compile(r"^  (?P<flag>-\S.*?)(?:  +(?P<text>\S.*))?$")
_TEXT = re.compile(r"^ {10,}\S")


def read_help(command: click.Command) -> dict[str, dict[str, int]]:
    """heading -> flag as printed -> lines of its text, in a terminal of 80 columns, of which click uses 78."""
    lines_by_flag_by_heading: dict[str, dict[str, int]] = {}
    heading = flag = ""
    for line in command.get_help(click.Context(command, terminal_width=78)).splitlines():
        if _HEADING.match(line):
            heading, flag = line[:-1], ""
            lines_by_flag_by_heading[heading] = {}
        elif heading and (start := _FLAG.match(line)):
            flag = start["flag"]
            lines_by_flag_by_heading[heading][flag] = 0 if start["text"] is None else 1
        elif heading and flag and _TEXT.match(line):
            lines_by_flag_by_heading[heading][flag] += 1
    return lines_by_flag_by_heading


@pytest.mark.parametrize(("program", "name", "command"), COMMANDS)
def test_no_flag_takes_more_than_two_lines(program: str, name: str, command: click.Command) -> None:
    lines_by_flag = {flag: lines for flags in read_help(command).values() for flag, lines in flags.items()}
    assert lines_by_flag
    assert {flag: lines for flag, lines in lines_by_flag.items() if not 1 <= lines <= 2} == {}


@pytest.mark.parametrize(("program", "name", "command"), COMMANDS)
def test_flags_of_settings_stand_under_the_headings_of_their_program(
    program: str, name: str, command: click.Command
) -> None:
    schema = SCHEMAS.get((program, name))
    if schema is None:
        return
    flags_by_heading = read_help(command)
    assert [*flags_by_heading] == [*schema.help_sections]
    for heading, paths in schema.help_sections.items():
        printed = " ".join(flags_by_heading[heading])
        for path in paths:
            assert schema.setting_by_path[path].label in printed
        if heading != MAIN_HEADING:
            assert len(flags_by_heading[heading]) == len(paths)


def test_check_takes_all_flags_of_a_router_and_shows_those_that_it_reads() -> None:
    command = router_cli.commands["check"]
    flags = " ".join(flag for section in read_help(command).values() for flag in section)
    assert re.findall(r"--[\w-]+", flags) == [
        "--worker", "--tokenizer", "--yes", "--json", "--config", "--set", "--help",
        "--worker-api-key", "--worker-tls-ca", "--worker-tls-cert", "--worker-tls-key", "--chat-template",
    ]  # fmt: skip
    parameters = {name for option in command.params for name in option.opts}
    assert {name for option in router_cli.commands["run"].params for name in option.opts} <= parameters


def test_the_list_of_commands_cuts_no_sentence() -> None:
    for group in (router_cli, engine_cli):
        help_text = group.get_help(click.Context(group, terminal_width=78))
        assert "..." not in help_text.partition("Commands:")[2]


@pytest.mark.parametrize("schema", [ROUTER, EPP_SCHEMA, SHADOW_SCHEMA, ENGINE])
def test_a_setting_stands_under_one_heading_and_few_stand_first(schema: Schema) -> None:
    paths = [path for section in schema.help_sections.values() for path in section]
    assert len(paths) == len(set(paths))
    assert all(schema.setting_by_path[path].flag is not None for path in paths)
    assert len(schema.help_sections[MAIN_HEADING]) <= 9, "with --config these are ten"


def test_a_flag_without_a_heading_works_and_is_in_the_reference() -> None:
    paths = {path for section in ROUTER.help_sections.values() for path in section}
    rare_flags = [
        setting.label
        for path, setting in ROUTER.setting_by_path.items()
        if setting.flag is not None and path not in paths
    ]
    assert rare_flags
    help_text = router_cli.commands["run"].get_help(click.Context(router_cli.commands["run"]))
    parameters = [name for option in router_cli.commands["run"].params for name in option.opts]
    for flag in rare_flags:
        assert f"{flag} " not in help_text
        assert flag in parameters
