"""The command line of a configuration: its flags, `--config`, `--set`, and the command `config`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import msgspec

from options.fields import SECRET, Option, Schema
from options.load import LoadedConfig, load, read_file
from options.values import ConfigError, split_annotated


def with_flags(schema: Schema) -> Callable[[Any], Any]:
    """Decorates a command that takes all of the program's settings: `load_from_command_line` reads its parameters."""
    flags = [_click_option(option) for option in schema.options.values() if option.member.flag is not None]
    config = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        envvar=f"{schema.prefix}CONFIG",
        help=f"Settings in TOML. See `{schema.program} config`.",
    )
    setting = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Any setting of `{schema.program} config`: port=9000. May be repeated.",
    )

    def decorate(function: Any) -> Any:
        for flag in reversed([config, *flags, setting]):
            function = flag(function)
        return function

    return decorate


def load_from_command_line(schema: Schema, parameters: dict[str, Any]) -> LoadedConfig:
    """From a command's parameters, the environment and the file they name. Raises click.UsageError."""
    flags = {path: parameters[_parameter(path)] for path in schema.options if _parameter(path) in parameters}
    set_flags = {path: value for path, value in flags.items() if value is not None and value != ()}
    file = parameters["config_file"]
    try:
        return load(
            schema,
            table=None if file is None else read_file(file),
            file_name=str(file),
            environment=os.environ,
            settings=parameters["settings"],
            flags=set_flags,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def config_command(schema: Schema, finish: Callable[[LoadedConfig], Any]) -> click.Command:
    """`config`: all settings as a list, or with --check those that the file, the environment and flags give.

    `finish`: what a start makes of them; it may raise ConfigError.
    """

    @click.command(
        "config", help=f"Print every setting of `{schema.program}`; with --check: what they come to, and why."
    )
    @click.option("--check", is_flag=True, help="Print the values that a start with the same words would have.")
    @with_flags(schema)
    def command(check: bool, **parameters: Any) -> None:
        if not check:
            click.echo(listing(schema), nl=False)
            return
        effective = load_from_command_line(schema, parameters)
        try:
            effective.config = finish(effective)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        click.echo(as_toml(schema, effective), nl=False)

    return command


_SHORTER = re.compile(
    "^an? (whole number from |number from |number )?|(?<=list), each text| that is not empty"
    "|such as 4GB or 512MiB, plain numbers "
)
"""What the list leaves out of what a setting expects."""


def listing(schema: Schema) -> str:
    """Markdown with one line for each setting: what docs/configuration.md holds."""
    lines = []
    for option in _visible_options(schema):
        names = [option.path, *(option.names if option.member.flag is not None else ())]
        expected = _SHORTER.sub("", option.expected)
        details = [] if isinstance(option.default, bool) else [expected]
        if option.default is not None and not option.member.is_section:
            details.append(f"`{_toml(option.default)}`")
        text = option.member.help.replace(" May be repeated.", "").replace("\n\n", " ")
        lines.append(f"- {', '.join(f'`{name}`' for name in names)}: {text} ({'; '.join(details)})")
    return "\n".join(lines) + "\n"


def as_toml(schema: Schema, effective: LoadedConfig) -> str:
    """A file that says the same, each line with its origin. Secrets are counted, not shown."""
    lines: list[str] = []
    section, values = "", schema.values(effective.config)
    visible_options = [option for option in _visible_options(schema) if not option.member.is_section]
    for option in sorted(visible_options, key=lambda setting: setting.path.rpartition(".")[0]):
        head, _, name = option.path.rpartition(".")
        if head != section:
            lines.append(f"\n[{head}]")
            section = head
        origin = effective.origins.get(option.path, "default")
        value = values[option.path]
        if SECRET in option.member.marks and value:
            lines.append(f"# {name} is set, and not shown  # {origin}")
        elif value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {_toml(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _visible_options(schema: Schema) -> list[Option]:
    return [option for option in schema.options.values() if not (option.member.flag and option.member.flag.is_hidden)]


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _parameter(path: str) -> str:
    return path.replace(".", "__")


def _click_option(option: Option) -> Any:
    flag, member = option.member.flag, option.member
    assert flag is not None
    bare, marks = split_annotated(member.kind)
    default = option.default
    text = member.help
    if default is not None and default != () and not member.is_section:
        on, _, off = option.names[0].partition("/")
        text += f" [default: {(on if default else off)[2:] if bare is bool else default}]"
    names = (*option.names, _parameter(option.path))
    if bare is bool:
        return click.option(*names, default=None, help=text, hidden=flag.is_hidden)
    titles = [mark.title for mark in marks if isinstance(mark, msgspec.Meta) and mark.title]
    metavar = flag.metavar or (titles[-1] if titles else _metavar(member.kind))
    is_repeatable = get_origin(bare) is tuple
    return click.option(*names, multiple=is_repeatable, metavar=metavar, help=text, hidden=flag.is_hidden)


def _metavar(kind: Any) -> str:
    bare, _ = split_annotated(kind)
    if get_origin(bare) is Literal:
        return f"[{'|'.join(get_args(bare))}]"
    return {int: "N", float: "NUMBER"}.get(bare, "TEXT")
