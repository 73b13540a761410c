"""Values of settings: conversion from text (environment, flags) or from the types of a file, and errors in words.

Types are those that msgspec knows, with `msgspec.Meta` for ranges and `Size` for bytes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value and what is expected."""


@dataclass(frozen=True)
class Size:
    """Marks a number of bytes that may come with a unit: 512MiB, 4GB, 4g."""

    unit_bytes: int = 1
    """Bytes of a number without a unit: 1 << 20 where the setting is in MiB."""


_UNIT_LETTERS = "kmgt"
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])([iI]?[bB])?|[bB])?", re.ASCII)


def split_annotated(annotated_type: Any) -> tuple[Any, list[Any]]:
    """Return a type without `Annotated`, and its annotations."""
    if get_origin(annotated_type) is Annotated:
        return annotated_type.__origin__, list(annotated_type.__metadata__)
    return annotated_type, []


def parse_size(text: str, unit_bytes: int) -> int | None:
    """Parse a size such as "512MiB", and return it in units of `unit_bytes`, rounded up; None for text that is no size.

    GB is 10^9 bytes and GiB 2^30. Letters alone mean what they do in vLLM: 4g is 4 * 10^9 bytes, 4G is 4 * 2^30. A
    whole number without a unit is returned as it is.
    """
    text = text.strip()
    size_match = _SIZE_PATTERN.fullmatch(text)
    if size_match is None:
        return None
    if text.isdigit():
        return int(text)
    number, letter, suffix = size_match.groups()
    if letter is None:
        is_in_bytes = text[-1].isalpha()  # "10B"; a fraction without a unit is no size
        return math.ceil(float(number) / unit_bytes) if is_in_bytes else None
    is_binary = len(suffix) == 2 if suffix else letter.isupper()
    exponent = _UNIT_LETTERS.index(letter.lower()) + 1
    scale: int = (1024 if is_binary else 1000) ** exponent
    return math.ceil(float(number) * scale / unit_bytes)


def parse_text(text: str, value_type: Any) -> Any:
    """Parse a value of a type from the text of a flag or variable: a list is JSON, or words between white space.

    Raises ValueError or MsgspecError, with messages that are not for users.
    """
    base_type, annotations = split_annotated(value_type)
    value: Any = text
    if get_origin(base_type) is tuple:
        item_type = get_args(base_type)[0]
        is_json = text.startswith("[")
        value = json.loads(text) if is_json else [parse_text(item_text, item_type) for item_text in text.split()]
    elif base_type is not str and get_origin(base_type) is not Literal and not _find_size_annotation(annotations):
        value = msgspec.convert(text, value_type, strict=False)
    return convert_value(value, value_type)


def convert_value(value: Any, value_type: Any) -> Any:
    """Check a setting's value and convert it to the setting's type, such as `Annotated[int, Meta(ge=1)]`.

    If the type is marked `Size`, a text is a size with a unit. Raises ValueError or MsgspecError for a value that has
    another type, is out of range or not finite, or is a text that is not UTF-8.
    """
    size = _find_size_annotation(split_annotated(value_type)[1])
    if size is not None and isinstance(value, str):
        value = parse_size(value, size.unit_bytes)
    converted_value = msgspec.convert(value, value_type)
    items = converted_value if isinstance(converted_value, tuple) else (converted_value,)
    for item in items:
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError("not finite")
        if isinstance(item, str):
            item.encode()  # raises UnicodeEncodeError for a variable that is not UTF-8
    return converted_value


def _find_size_annotation(annotations: list[Any]) -> Size | None:
    return next((annotation for annotation in annotations if isinstance(annotation, Size)), None)


def describe_type(value_type: Any) -> str:
    """Describe the values of a setting's type in words, for errors and help: "a whole number from 0 to 65535"."""
    base_type, annotations = split_annotated(value_type)
    if base_type is bool:
        return "true or false"
    if get_origin(base_type) is Literal:
        return "one of " + ", ".join(get_args(base_type))
    if get_origin(base_type) is tuple:
        item_type, *other_item_types = get_args(base_type)
        length = "" if other_item_types == [...] else f" of {len(other_item_types) + 1}"
        return f"a list{length}, each {describe_type(item_type)}"
    if base_type is str:
        return _describe_text(annotations)
    size = _find_size_annotation(annotations)
    noun = "a whole number" if base_type is int else "a number"
    if size is not None:
        unit = "MiB" if size.unit_bytes > 1 else "bytes"
        noun = f"a size such as 4GB or 512MiB, plain numbers in {unit},"
    return f"{noun} {_describe_range(annotations)}".strip().removesuffix(",")


def _describe_text(annotations: list[Any]) -> str:
    metas = [annotation for annotation in annotations if isinstance(annotation, msgspec.Meta)]
    examples = [example for meta in metas for example in meta.examples or ()]
    if examples:
        return f"text such as {' or '.join(examples)}"
    return "text that is not empty" if any(meta.min_length for meta in metas) else "text"


def _describe_range(annotations: list[Any]) -> str:
    low, high = "", ""
    for meta in annotations:
        if isinstance(meta, msgspec.Meta):
            low = f"from {_format_number(meta.ge)}" if meta.ge is not None else low
            low = f"above {_format_number(meta.gt)}" if meta.gt is not None else low
            high = f"to {_format_number(meta.le)}" if meta.le is not None else high
    return f"{low} {high}".strip() if high else low.replace("from", "of at least")


def _format_number(value: float) -> str:
    return f"{value:g}".replace("e+0", "e").replace("e+", "e") if abs(value) >= 1e9 else f"{value:.12g}"


def read_value(label: str, value: Any, value_type: Any, *, is_secret: bool = False) -> Any:
    """Convert a setting's value to its type: text from a flag or variable (`UntypedText`), or a value from a file.

    Raises ConfigError with a message for users, which names the setting by `label` and never contains a secret.
    """
    try:
        if isinstance(value, UntypedText):
            return parse_text(str(value), value_type)
        return convert_value(value, value_type)
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        base_type, _ = split_annotated(value_type)
        is_repeated_flag = isinstance(value, tuple) and get_origin(base_type) is tuple
        if is_repeated_flag:
            for item in value:  # the first wrong item raises an error that shows this item only
                read_value(label, item, get_args(base_type)[0], is_secret=is_secret)
        plain_value = str(value) if isinstance(value, UntypedText) else value
        shown_value = "a value that is not shown here" if is_secret else shorten_repr(plain_value)
        raise ConfigError(f"{label}: got {shown_value}, expected {describe_type(value_type)}") from None


class UntypedText(str):
    """Text from the environment or a flag, which is not yet converted to its setting's type."""

    __slots__ = ()


def shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
