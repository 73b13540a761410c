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
    """A checkpoint's config.json. Its methods check types, and raise ModelError with the file's and the field's
    name.
    """

    values: Mapping[str, Any]
    source: str = "config.json"

    @staticmethod
    def read(folder: Path) -> HfConfig:
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

    def require_supported(self, key: str, default: T, *supported_values: T) -> None:
        """Refuse a checkpoint whose `key` has a value that the model here does not implement."""
        value = self.get(key, default)
        if value not in supported_values:
            supported_text = ", ".join(repr(item) for item in supported_values)
            raise ModelError(f"{self.source}: {key}: {value!r} is not supported; expected {supported_text}")

    @property
    def dtype(self) -> str | None:
        """The dtype the checkpoint was saved for, e.g. 'bfloat16'; None if it does not say."""
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        if value is None and isinstance(self.values.get("text_config"), dict):
            return self.get_object("text_config").dtype
        return None if value is None else str(value).removeprefix("torch.")


def read_layer_types(config: HfConfig, key: str, choice_by_name: Mapping[str, Kind], default: list[str]) -> list[Kind]:
    """Return one of the choices for each layer, by the name of its type in the config.

    `key`: field with the names of all layers. `default`: names if there is no such field; if it is not empty, there
    must be as many names. Raises ModelError for unknown names, and for a wrong number of them.
    """
    names = config.get_strings(key) or default
    if not names or (default and len(names) != len(default)):
        expected = f"{len(default)} entries" if default else "at least one entry"
        raise ModelError(f"{config.source}: {key}: expected {expected}, got {len(names)}")
    unknown_names = sorted(set(names) - set(choice_by_name))
    if unknown_names:
        raise ModelError(
            f"{config.source}: {key}: {unknown_names[0]!r} is not supported; expected {', '.join(choice_by_name)}"
        )
    return [choice_by_name[name] for name in names]
