"""Loading a configuration from defaults, a file, the environment and flags. Later values replace earlier ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from options.fields import FILE, FOLDER, Schema, Setting, build_config
from options.values import ConfigError, UntypedText

_KUBERNETES_PATTERN = re.compile(r"(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes sets for a service with the name of our prefix; they are no settings."""


@dataclass
class LoadedConfig:
    """A configuration and the origins of its values."""

    config: Any
    origin_by_path: dict[str, str]
    """Origin of each value that is not a default: a file, a variable or a flag."""


@dataclass
class _ConfigLayers:
    """Values of a configuration, collected from its sources, and the origin of each. A later value wins."""

    schema: Schema
    value_by_path: dict[str, Any] = field(default_factory=dict)
    origin_by_path: dict[str, str] = field(default_factory=dict)

    def set_value(self, path: str, value: Any, label: str, origin: str) -> None:
        """Set one value, or all values of a section, which replaces those of earlier sources. Raises ConfigError.

        `origin`: the file, variable or flag that the value comes from, as "a.toml". `label`: how an error names it, as
        "a.toml: queue.fair".
        """
        setting = self.schema.setting_by_path.get(path)
        is_section = path in self.schema.section_paths
        is_unknown_table = setting is None and isinstance(value, dict) and bool(value)
        if is_section:
            self.origin_by_path[path] = origin
        if is_section or is_unknown_table:  # an error about an unknown table names the unknown setting in it
            for key, section_value in parse_section(label, value).items():
                self.set_value(f"{path}.{key}", section_value, f"{label}.{key}", origin)
            return
        if setting is None:
            raise self.schema.make_unknown_setting_error(label, path)
        self.value_by_path[path] = check_path_exists(label, setting, setting.parse_value(label, value))
        self.origin_by_path[path] = origin


def load_config(
    schema: Schema,
    *,
    table: Mapping[str, Any] | None = None,
    file_name: str = "",
    environment: Mapping[str, str] | None = None,
    settings: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Build a program's configuration. Flags win over `--set`, these over the environment, and these over a file.

    `table`: content of the TOML file `file_name`. `settings`: KEY=VALUE texts of `--set`. `flags`: value of each flag
    by the path of its setting, as text, several texts or bool. Raises ConfigError.
    """
    # A Secret of Kubernetes often ends with a newline.
    environment = {variable: value_text.strip() for variable, value_text in (environment or {}).items()}
    layers = _ConfigLayers(schema)
    for path, value in (table or {}).items():
        label = f"{file_name}: {path}" if file_name else path
        layers.set_value(path, value, label, file_name)
    for variable, path in iter_variables(schema, environment):
        layers.set_value(path, UntypedText(environment[variable]), variable, variable)
    for assignment in settings:
        path, separator, value_text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE")
        layers.set_value(path, UntypedText(value_text), f"--set {path}", "--set")
    for path, value in (flags or {}).items():
        label = schema.setting_by_path[path].label
        layers.set_value(path, UntypedText(value) if isinstance(value, str) else value, label, label)
    return LoadedConfig(build_config(schema.config_class, layers.value_by_path), layers.origin_by_path)


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}, expected a TOML file") from error
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from error


def iter_variables(schema: Schema, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each environment variable that sets a setting, and the setting's path.

    Variables with older names come first, so that the present names win. Raises ConfigError for an unknown variable
    with the program's prefix.
    """
    prefix = schema.variable_prefix
    for variable in sorted(environment, key=lambda name: name.startswith(prefix)):
        value_text = environment[variable]
        if not value_text or variable == f"{prefix}CONFIG":
            continue
        if variable == schema.make_variable_name("port") and value_text.startswith("tcp://"):
            raise ConfigError(f"{variable}: got {value_text!r}, which Kubernetes sets: use enableServiceLinks: false")
        if variable in schema.path_by_variable:
            yield variable, schema.path_by_variable[variable]
        elif variable.startswith(prefix) and not _KUBERNETES_PATTERN.fullmatch(variable.removeprefix(prefix)):
            raise schema.make_unknown_setting_error(variable, variable, [*schema.path_by_variable])


def parse_section(label: str, value: Any) -> dict[str, Any]:
    """Return a section as a table, from a file's table or from JSON text. Raises ConfigError."""
    if isinstance(value, UntypedText):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{label}: got {str(value)[:200]!r}, expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: got {value!r}, expected a table")
    return value


def check_path_exists(label: str, setting: Setting, value: Any) -> Any:
    """Return the value of a setting. Raises ConfigError if it is marked FILE or FOLDER and does not exist."""
    for mark, path_exists in ((FILE, Path.is_file), (FOLDER, Path.is_dir)):
        if mark in setting.annotation_marks and not path_exists(Path(value)):
            raise ConfigError(f"{label}: got {value!r}, expected a {mark[1:-1]} that exists")
    return value
