"""Command line of a program: flags for its settings, `--config`, `--set`, and the command `config`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import click
import msgspec

from options.fields import SECRET, Schema, Setting, collect_values
from options.load import LoadedConfig, load_config, read_file
from options.values import ConfigError, describe_type, parse_text, split_annotated

MAIN_HEADING: Final = "Options"
"""First heading of `--help`."""


class SectionedOption(click.Option):
    """A flag that `--help` shows under a heading of its own."""

    def __init__(self, *args: Any, heading: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


class NumberType(click.ParamType):  # type: ignore[type-arg]
    """Type of a click option whose value is a number from `low` to `high`, both included.

    Unlike click's own range types, its error says what is expected: "got 'x', expected a whole number from 1 to 9".
    """

    def __init__(self, number_type: type[int] | type[float], low: float, high: float | None = None) -> None:
        self.name = "integer" if number_type is int else "float"
        self._value_type: Any = Annotated[number_type, msgspec.Meta(ge=low, le=high)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert the text of an option to a number; click calls this. A default, a number already, is returned.

        Text that is no number in the range ends the program with a usage error.
        """
        if not isinstance(value, str):
            return value
        try:
            return parse_text(value, self._value_type)
        except (ValueError, msgspec.MsgspecError):
            self.fail(f"got {value!r}, expected {describe_type(self._value_type)}", param, ctx)


class SectionedCommand(click.Command):
    """A command whose `--help` shows options under several headings.

    A SectionedOption has a heading. Plain options, such as `--config`, come last under the first heading.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of `--help` under their headings; click calls this."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        options.sort(key=lambda option: not isinstance(option, SectionedOption))  # plain options last
        rows_by_heading: dict[str, list[tuple[str, str]]] = {MAIN_HEADING: []}
        for option in options:
            heading = option.heading if isinstance(option, SectionedOption) else MAIN_HEADING
            row = option.get_help_record(ctx)
            if row is not None:  # None for a hidden flag
                rows_by_heading.setdefault(heading, []).append(row)
        for heading, rows in rows_by_heading.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class ProgramGroup(click.Group):
    """A program with commands. An unknown command is refused with the names of all commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            commands = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"{error.message} Expected one of {commands}.", ctx) from None


def add_flags(schema: Schema, shown_paths: Collection[str] | None = None) -> Callable[[Any], Any]:
    """Return a decorator that adds the flags of a program's settings, `--config` and `--set` to a click command.

    The command passes its parameters to `load_from_command_line`. `--help` shows the flags of `shown_paths`; None: all
    that have a heading in `schema.help_sections`. The others work too, but are hidden.
    """
    heading_by_path = {path: heading for heading, paths in schema.help_sections.items() for path in paths}
    shown_paths = [path for path in heading_by_path if shown_paths is None or path in shown_paths]
    ordered_paths = dict.fromkeys([*shown_paths, *schema.setting_by_path])  # without duplicates
    flag_options = [
        _make_click_option(schema.setting_by_path[path], heading_by_path.get(path), is_shown=path in shown_paths)
        for path in ordered_paths
        if schema.setting_by_path[path].flag is not None
    ]
    config_option = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        envvar=f"{schema.variable_prefix}CONFIG",
        help="Read settings from a TOML file (docs/reference/settings.md).",
    )
    settings_option = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Any setting, as `{schema.program} config` lists them all. Repeatable.",
    )

    def decorate(function: Any) -> Any:
        for flag in reversed([config_option, *flag_options, settings_option]):
            function = flag(function)
        return function

    return decorate


def load_from_command_line(schema: Schema, parameters: dict[str, Any]) -> LoadedConfig:
    """Load a program's configuration from its command line, the environment, and the file of `--config`.

    `parameters`: what click passes to a command with the flags of `add_flags`; None or () for a flag that is not given.
    Raises click.UsageError.
    """
    value_by_path = {path: parameters.get(_make_parameter_name(path)) for path in schema.setting_by_path}
    given_flags = {path: value for path, value in value_by_path.items() if value is not None and value != ()}
    config_path = parameters["config_file"]
    try:
        return load_config(
            schema,
            table=None if config_path is None else read_file(config_path),
            file_name=str(config_path),
            environment=os.environ,
            settings=parameters["settings"],
            flags=given_flags,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def make_config_command(schema: Schema, finish: Callable[[LoadedConfig], Any]) -> click.Command:
    """Make a program's command `config`, which lists all settings, or with --check prints the values in effect.

    `finish`: returns the configuration as the program completes it when it starts; it may raise ConfigError.
    """

    @click.command(
        "config",
        cls=SectionedCommand,
        help=f"Print every setting of `{schema.program}`; with --check: what they come to, and why.",
        short_help="Print all settings.",
    )
    @click.option("--check", is_flag=True, help="Print the values that a start with the same words would have.")
    @add_flags(schema)
    def command(check: bool, **parameters: Any) -> None:
        if not check:
            click.echo(render_settings_list(schema), nl=False)
            return
        loaded_config = load_from_command_line(schema, parameters)
        try:
            loaded_config.config = finish(loaded_config)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        click.echo(render_toml(schema, loaded_config), nl=False)

    return command


_OMITTED_TEXT_PATTERN = re.compile(
    "^an? (whole number from |number from |number )?|(?<=list), each text| that is not empty"
    "|such as 4GB or 512MiB, plain numbers "
)
"""Words of the expected values that the list of settings omits."""
_RANGE_PATTERN = re.compile(r"(?<!above )(?:from )?(?P<lowest>-?\d[\d.e]*) to (?=\d)")
"""A range, which the list writes as `0..10`."""


def render_settings_list(schema: Schema) -> str:
    """Return docs/reference/settings.md: Markdown with one line for each setting."""
    lines = []
    for setting in _list_visible_settings(schema):
        setting_names = [setting.path, *(setting.flag_names if setting.flag is not None else ())]
        expected = _RANGE_PATTERN.sub(r"\g<lowest>..", _OMITTED_TEXT_PATTERN.sub("", setting.expected))
        details = [] if isinstance(setting.default, bool) else [expected]
        if setting.default is not None and not setting.is_section:
            details.append(f"`{_format_toml_value(setting.default)}`")
        help_text = f"{setting.help_text} {setting.details}".strip()
        lines.append(f"- {', '.join(f'`{name}`' for name in setting_names)}: {help_text} ({'; '.join(details)})")
    return "\n".join(lines) + "\n"


def render_toml(schema: Schema, loaded_config: LoadedConfig) -> str:
    """Return a configuration as a TOML file, without secrets. Each line names where its value comes from."""
    value_by_path = collect_values(loaded_config.config)
    lines_by_section: dict[str, list[str]] = {}
    for setting in _list_visible_settings(schema):
        if setting.is_section:
            continue
        section, _, name = setting.path.rpartition(".")
        value = value_by_path[setting.path]
        origin = loaded_config.origin_by_path.get(setting.path, "default")
        if SECRET in setting.annotation_marks and value:
            line = f"# {name} is set, and not shown  # {origin}"
        elif value is None:
            line = f"# {name} is not set"
        else:
            line = f"{name} = {_format_toml_value(value)}  # {origin}"
        lines_by_section.setdefault(section, []).append(line)

    lines: list[str] = []
    for section, section_lines in sorted(lines_by_section.items()):
        heading = [f"\n[{section}]"] if section else []
        lines += heading + section_lines
    return "\n".join(lines) + "\n"


def _list_visible_settings(schema: Schema) -> list[Setting]:
    return [setting for setting in schema.setting_by_path.values() if not (setting.flag and setting.flag.is_hidden)]


def _format_toml_value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_format_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _make_parameter_name(path: str) -> str:
    return path.replace(".", "__")


def _make_click_option(setting: Setting, heading: str | None, *, is_shown: bool) -> Any:
    """Return the click decorator that adds the flag of a setting, with its `heading` in `--help`."""
    flag = setting.flag
    assert flag is not None
    make_option = partial(
        click.option,
        *setting.flag_names,
        _make_parameter_name(setting.path),
        cls=SectionedOption,
        heading=heading or MAIN_HEADING,
        help=_make_help_text(setting),
        hidden=flag.is_hidden or not is_shown,
    )
    base_type, _ = split_annotated(setting.value_type)
    if base_type is bool:
        return make_option(default=None)  # None: the flag is not on the command line
    is_list = get_origin(base_type) is tuple
    return make_option(multiple=is_list, metavar=flag.metavar or _choose_metavar(setting.value_type))


def _make_help_text(setting: Setting) -> str:
    base_type, _ = split_annotated(setting.value_type)
    default = setting.default
    help_text = setting.help_text
    if base_type is bool and default is not None:
        default = "on" if default else "off"
    if default is not None and default != () and not setting.is_section:
        help_text += f" [default: {default}]"
    return f"{help_text} Repeatable." if get_origin(base_type) is tuple else help_text


def _choose_metavar(value_type: Any) -> str:
    """Return the word that stands for a flag's value in `--help`: the title of its type, or else its kind."""
    base_type, annotations = split_annotated(value_type)
    titles = [mark.title for mark in annotations if isinstance(mark, msgspec.Meta) and mark.title]
    if titles:
        return titles[-1]
    if get_origin(base_type) is Literal:
        return f"[{'|'.join(get_args(base_type))}]"
    return {int: "N", float: "NUMBER"}.get(base_type, "TEXT")
