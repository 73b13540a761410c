"""A checkpoint's config.json, read with clear errors. Knows the spellings of transformers 4 and 5, no families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", int, float, bool, str)
Kind = TypeVar("Kind")


class ModelError(ValueError):
    """Error of a checkpoint that cannot be served. The message names file, field or tensor, and what is expected."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A checkpoint's config.json. Methods raise ModelError, with file and field, if a value has the wrong type."""

    values: Mapping[str, Any]
    source: str = "config.json"

    @staticmethod
    def read(folder: Path) -> HfConfig:
        """Read config.json of a checkpoint's folder. Raises ModelError."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; expected the folder of an HF checkpoint") from None
        except json.JSONDecodeError as error:
            raise ModelError(f"{path}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: expected a JSON object")
        return HfConfig(values, str(path))

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names:
            raise ModelError(f"{self.source}: architectures: expected a list with one name, got {names!r}")
        return str(names[0])

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get_object(self, key: str) -> HfConfig:
        """Return the nested object `key`, as a multi-modal checkpoint holds its text model's config."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise ModelError(f"{self.source}: {key}: expected an object, got {value!r}")
        return HfConfig(value, f"{self.source}: {key}")

    def get(self, key: str, default: T) -> T:
        """Return the value of `key`, of the default's type; the default where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise ModelError(f"{self.source}: {key}: expected {type(default).__name__}, got {value!r}")
        return value

    def get_integer(self, key: str) -> int:
        """Return a positive integer that must be there."""
        value = self.values.get(key)
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.source}: {key}: expected a positive integer, got {value!r}")
        return value

    def get_optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.get_integer(key)

    def get_strings(self, key: str) -> list[str] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.source}: {key}: expected a list of strings, got {value!r}")
        return value

    def require_value(self, key: str, supported_value: T) -> None:
        """Raise ModelError if `key` has another value than the one that is supported. It may be absent."""
        value = self.get(key, supported_value)
        if value != supported_value:
            raise ModelError(f"{self.source}: {key}: {value!r} is not supported; expected {supported_value!r}")

    @property
    def dtype(self) -> str | None:
        """The dtype the checkpoint was saved for, e.g. 'bfloat16'; None if it does not say."""
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        if value is None and isinstance(self.values.get("text_config"), dict):
            return self.get_object("text_config").dtype
        return None if value is None else str(value).removeprefix("torch.")


def make_layer_types(num_layers: int, full_attention_interval: int, other_type: str) -> list[str]:
    """Return the layer types of a config that has only the interval of the layers with full attention.

    With an interval of 4, the layers 3, 7, 11 and so on have full attention, and all others have `other_type`.
    """
    return ["full_attention" if (i + 1) % full_attention_interval == 0 else other_type for i in range(num_layers)]


def read_layer_types(config: HfConfig, key: str, choice_by_name: Mapping[str, Kind], default: list[str]) -> list[Kind]:
    """Read the type of each layer from the config, and return for each layer what `choice_by_name` has for its type.

    With the types ["conv", "attention"] and the choices {"conv": A, "attention": B} the result is [A, B].

    `key`: field that lists the types. `default`: types if the field is absent; if `default` is not empty, the field
    must be as long. Raises ModelError for an unknown type, and for a wrong number of types.
    """
    names = config.get_strings(key) or default
    if default and len(names) != len(default):
        raise ModelError(f"{config.source}: {key}: expected {len(default)} entries, got {len(names)}")
    if not names:
        raise ModelError(f"{config.source}: {key}: expected at least one entry, got 0")
    unknown_names = sorted(set(names) - set(choice_by_name))
    if unknown_names:
        raise ModelError(
            f"{config.source}: {key}: {unknown_names[0]!r} is not supported; expected {', '.join(choice_by_name)}"
        )
    return [choice_by_name[name] for name in names]
