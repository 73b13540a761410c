"""Settings of a configuration class: one `Setting` for each field that users may set.

A configuration is a frozen dataclass (or msgspec struct) whose fields have defaults. A field that users may set is
annotated with its type, its range, one line of help, and a second text where the reference says more than `--help`:

    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Port to listen on; 0 lets the system choose."] = 8080
    timeouts: Timeouts = Timeouts()                   # a section: timeouts.connect_s
    core: Annotated[CoreConfig, ROOT] = CoreConfig()  # its fields stand at the root: cost.congestion_weight

Only a section may have no help; it then has no variable and no line in the reference, only its fields have.
"""

from __future__ import annotations

import difflib
import types
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from options.values import ConfigError, describe_type, read_value, split_annotated

ROOT = "<root>"
"""Mark of a section without a name of its own."""
SECRET = "<secret>"
"""Mark of a setting that is never printed."""
FILE, FOLDER = "<file>", "<folder>"
"""Marks of paths that have to exist."""
_MARKS = (ROOT, SECRET, FILE, FOLDER)

Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=1e9, title="SECONDS")]
Key = Annotated[str, msgspec.Meta(min_length=1, title="KEY")]


class Flag:
    """Mark in the annotation of a configuration's field which gives the field a flag on the command line."""

    def __init__(self, *names: str, metavar: str = "", env: str | None = None, hidden: bool = False) -> None:
        """`names`: names of the flag; by default the field's name. `env`: an older variable for the same field."""
        self.names = names
        self.metavar = metavar
        self.older_variable = env
        self.is_hidden = hidden


@dataclass(frozen=True)
class Setting:
    """Field of a configuration class that users may set, with its help and flag, or a section of such fields."""

    path: str
    """Name of the setting for users, after the names of its sections, such as `client_timeouts.request_s`."""
    attributes: tuple[str, ...]
    """Names of the fields that lead from a configuration to the value. `path` has these too, except ROOT sections."""
    value_type: Any
    """Type of the field, without None."""
    annotation_marks: tuple[str, ...]
    """Marks in the annotation, out of ROOT, SECRET, FILE and FOLDER."""
    help_text: str
    """Sentence for `--help` and for the reference."""
    details: str
    """Sentences that only the reference shows."""
    flag: Flag | None
    """Option of the command line; None if the field has none."""
    is_section: bool
    """Whether the field's type is a configuration class itself."""
    default: Any = None

    def get_value(self, config: Any) -> Any:
        """Return the value of this setting in a configuration."""
        return reduce(getattr, self.attributes, config)

    @property
    def is_root(self) -> bool:
        """Whether it is a section whose name is not part of its fields' paths."""
        return ROOT in self.annotation_marks

    @property
    def flag_names(self) -> tuple[str, ...]:
        """Names of the flag; for a boolean, such as "--cache-headers/--no-cache-headers"."""
        assert self.flag is not None
        if self.flag.names:
            return self.flag.names
        name = self.attributes[-1].replace("_", "-")
        return (f"--{name}/--no-{name}",) if self.value_type is bool else (f"--{name}",)

    @property
    def label(self) -> str:
        """Name of the setting in errors: its flag, else its path."""
        return self.path if self.flag is None else self.flag_names[0].partition("/")[0]

    @property
    def expected(self) -> str:
        """Expected value in words, such as "a whole number from 0 to 65535"."""
        if self.is_section:
            return "a JSON object"
        for mark in (FILE, FOLDER):
            if mark in self.annotation_marks:
                return f"a {mark.strip('<>')}"
        return describe_type(self.value_type)

    def parse_value(self, label: str, value: Any) -> Any:
        """Convert a value to the setting's type. Raises ConfigError, which names the setting by `label`."""
        return read_value(label, value, self.value_type, is_secret=SECRET in self.annotation_marks)


class Schema:
    """All settings of a program, collected from the fields of its configuration class and of nested sections.

    Each has a path (`client_timeouts.request_s`), an environment variable (BLOCKCAST_ROUTER_PORT), and perhaps a flag.
    """

    def __init__(
        self, config_class: type, program: str, help_sections: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """Collect the settings of `config_class`.

        `help_sections`: paths of the settings under each heading of `--help`. Other flags are only in the reference.
        """
        self.config_class = config_class
        self.program = program
        self.help_sections = help_sections or {}
        self.variable_prefix = f"BLOCKCAST_{program.upper()}_"
        settings = list_settings(config_class)
        default_config = config_class()
        self.setting_by_path = {
            setting.path: replace(setting, default=setting.get_value(default_config))
            for setting in settings
            if setting.help_text
        }
        self.section_paths = {setting.path for setting in settings if setting.is_section and not setting.is_root}
        self.path_by_variable = {self.make_variable_name(path): path for path in self.setting_by_path}
        for path, setting in self.setting_by_path.items():
            if setting.flag is not None and setting.flag.older_variable is not None:
                self.path_by_variable[setting.flag.older_variable] = path

    def make_variable_name(self, path: str) -> str:
        return self.variable_prefix + path.upper().replace(".", "_")

    def make_unknown_setting_error(self, label: str, key: str, setting_names: list[str] | None = None) -> ConfigError:
        """Return the error for an unknown name `key`, with a hint at the known name that is most like it.

        If no name is like the whole key, the last words of both are compared, as users may leave out the section.
        `setting_names`: known names; by default all paths.
        """
        if setting_names is None:
            setting_names = list(self.setting_by_path)
        nearest_names = difflib.get_close_matches(key, setting_names, 1)
        if not nearest_names:
            name_by_last_word = {name.rpartition(".")[2]: name for name in reversed(setting_names)}
            nearest_words = difflib.get_close_matches(key.rpartition(".")[2], name_by_last_word, 1)
            nearest_names = [name_by_last_word[word] for word in nearest_words]
        hint = f", the nearest is {nearest_names[0]}" if nearest_names else ""
        return ConfigError(f"{label}: no such setting{hint} (`{self.program} config` lists all)")


def build_config(config_class: type, value_by_path: Mapping[str, Any]) -> Any:
    """Make a configuration with these values and defaults elsewhere. Raises ConfigError."""
    settings = list_settings(config_class)
    arguments_by_section: defaultdict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
    for setting in reversed(settings):  # so that the fields of a section come before the section
        *section, name = setting.attributes
        if setting.is_section:
            value = setting.value_type(**arguments_by_section[setting.attributes])
            arguments_by_section[tuple(section)][name] = value
        elif setting.path in value_by_path:
            arguments_by_section[tuple(section)][name] = value_by_path[setting.path]
    return config_class(**arguments_by_section[()])


def collect_values(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by path."""
    settings = list_settings(config.__class__)
    return {setting.path: setting.get_value(config) for setting in settings if not setting.is_section}


def check_config(config: Any) -> None:
    """Check that every field has its type and is in its range. Raises ConfigError."""
    for setting in list_settings(config.__class__):
        value = setting.get_value(config)
        if value is not None and not setting.is_section:
            setting.parse_value(setting.label, value)


@cache
def list_settings(config_class: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a configuration class, in the order of its fields.

    A field whose type is a configuration class is a section; its settings follow it. `prefix`: beginning of the
    settings' paths, such as "client_timeouts.".
    """
    hints = get_type_hints(config_class, include_extras=True)
    field_names = getattr(config_class, "__struct_fields__", None) or [field.name for field in fields(config_class)]
    settings: list[Setting] = []
    for name in field_names:
        setting = _make_setting(prefix + name, name, hints[name])
        settings.append(setting)
        if setting.is_section:
            section_prefix = prefix if setting.is_root else f"{setting.path}."
            for section_setting in list_settings(setting.value_type, section_prefix):
                settings.append(replace(section_setting, attributes=(name, *section_setting.attributes)))
    return tuple(settings)


def _make_setting(path: str, name: str, annotated_type: Any) -> Setting:
    """Return the setting of a field of type `Annotated[int | None, "Help.", "Details.", Meta(ge=1), Flag()]`, or alike.

    The first text in the annotation is the help, the second the details, apart from the texts that are marks
    (`_MARKS`). Annotations that are neither texts nor flags limit the value, so they stay with the type.
    """
    base_type, annotations = split_annotated(annotated_type)
    texts = [annotation for annotation in annotations if isinstance(annotation, str)]
    flags = [annotation for annotation in annotations if isinstance(annotation, Flag)]
    help_texts = [text for text in texts if text not in _MARKS]
    is_class = isinstance(base_type, type)

    value_type = base_type
    if get_origin(base_type) in (Union, types.UnionType):
        (value_type,) = (member_type for member_type in get_args(base_type) if member_type is not type(None))
    for annotation in annotations:
        if not isinstance(annotation, (str, Flag)):
            value_type = Annotated[value_type, annotation]
    return Setting(
        path=path,
        attributes=(name,),
        value_type=value_type,
        annotation_marks=tuple(text for text in texts if text in _MARKS),
        help_text=help_texts[0] if help_texts else "",
        details=help_texts[1] if len(help_texts) > 1 else "",
        flag=flags[0] if flags else None,
        is_section=is_class and (is_dataclass(base_type) or issubclass(base_type, msgspec.Struct)),
    )
