"""The free text of a custom tool's call, out of the JSON that a model writes: `{"input": "..."}`.

Models are shown a custom tool as a function with one text, and clients get the text. What came out after a beginning of
the arguments depends on that beginning alone, however it was cut. Pure.
"""

from __future__ import annotations

import re

import msgspec

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"[dD][89abAB][0-9a-fA-F]{2}", r"[dD][c-fC-F][0-9a-fA-F]{2}"
_UNIT = re.compile(
    rf'[^"\\]+|\\u(?P<pair>{_HIGH}\\u{_LOW})|\\u(?P<high>{_HIGH})(?=.{{6}}|[^\\]|\\[^u])|\\u(?!{_HIGH})(?P<code>[0-9a-fA-F]{{4}})'
    r"|\\(?P<escape>[^u])|(?P<wrong>\\u)(?![0-9a-fA-F]{4})(?=.{4})",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


class CustomInputDecoder:
    """Of one call, while its arguments grow."""

    def __init__(self) -> None:
        self._begun = self._ended = False
        self._left = ""
        """The end of what was pushed: the beginning of an escape, or all of it where no text has begun."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, piece: str) -> str:
        """Take the next of the arguments; return what that adds to the text."""
        if self._ended:
            return ""
        self._left += piece
        at = 0
        if not self._begun:
            found = _BEGIN.match(self._left)
            if found is None:
                return ""
            self._begun, at = True, found.end()
        said = []
        while (unit := _UNIT.match(self._left, at)) is not None:
            said.append(_decoded(unit))
            at = unit.end()
        self._ended = self._left.startswith('"', at)
        self._left = self._left[at:]
        self._texts += said
        return "".join(said)

    def finish(self) -> str:
        """Nothing follows; return what of the text was held back. Arguments of another form are the text."""
        if self._begun:
            return ""
        said = self._left
        try:
            value = msgspec.json.decode(said)
            if isinstance(value, dict) and isinstance(value.get("input"), str):
                said = value["input"]
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass
        self._texts.append(said)
        return said


def _decoded(unit: re.Match[str]) -> str:
    kind = unit.lastgroup
    if kind is None:
        return unit[0]
    if kind == "pair":
        high, _, low = unit["pair"].partition("\\u")
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if kind == "escape":
        return _ESCAPES.get(unit["escape"], unit["escape"])
    if kind == "code" and not 0xDC00 <= int(unit["code"], 16) < 0xE000:
        return chr(int(unit["code"], 16))
    return unit[0] if kind == "wrong" else "\ufffd"  # half of a pair is no character
