"""Decode the free text of a custom tool's call from the JSON that the model writes, `{"input": "..."}`. No I/O.

Models see a custom tool as a function with one string argument. Clients get the string.
"""

from __future__ import annotations

import re

import msgspec

_STRING_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"[dD][89abAB][0-9a-fA-F]{2}", r"[dD][c-fC-F][0-9a-fA-F]{2}"
_CHARS_OR_ESCAPE = re.compile(
    rf'[^"\\]+|\\u(?P<pair>{_HIGH}\\u{_LOW})|\\u(?P<high>{_HIGH})(?=.{{6}}|[^\\]|\\[^u])|\\u(?!{_HIGH})(?P<code>[0-9a-fA-F]{{4}})'
    r"|\\(?P<escape>[^u])|(?P<wrong>\\u)(?![0-9a-fA-F]{4})(?=.{4})",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


class CustomInputDecoder:
    """Decodes the free text of one call of a custom tool, while the call's arguments grow.

    The model writes the text as a string in JSON. Of the pieces `{"input": "a` and `\\nb"}`, the first gives "a", the
    second a line break and "b". Arguments in any other form are returned as they are by `finish`.
    """

    def __init__(self) -> None:
        self._has_begun = self._has_ended = False
        self._pending_text = ""
        """Arguments that are not decoded yet: the beginning of an escape, or all of them until `{"input": "` came."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Text that was decoded so far."""
        return "".join(self._texts)

    def push(self, piece: str) -> str:
        """Take the next piece of the call's JSON. Return the text that it adds to the tool's input.

        What may still grow into another character, such as half of an escape, is kept for the next piece.
        """
        if self._has_ended:
            return ""
        self._pending_text += piece
        pos = 0
        if not self._has_begun:
            match = _STRING_BEGIN.match(self._pending_text)
            if match is None:
                return ""
            self._has_begun, pos = True, match.end()
        texts = []
        while (match := _CHARS_OR_ESCAPE.match(self._pending_text, pos)) is not None:
            texts.append(_decode_match(match))
            pos = match.end()
        self._has_ended = self._pending_text.startswith('"', pos)
        self._pending_text = self._pending_text[pos:]
        self._texts += texts
        return "".join(texts)

    def finish(self) -> str:
        """Return the text that was held back, after the last piece of the arguments.

        Arguments that do not begin with `{"input": "` have given no text yet. They may be an object with other keys
        before "input". Anything else is what the model wanted to say, and is returned as it is.
        """
        if self._has_begun:
            return ""
        text = self._pending_text
        try:
            value = msgspec.json.decode(text)
            if isinstance(value, dict) and isinstance(value.get("input"), str):
                text = value["input"]
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # the text stays as the model wrote it
        self._texts.append(text)
        return text


def _decode_match(match: re.Match[str]) -> str:
    """Return the text of one match of `_CHARS_OR_ESCAPE`: plain characters, or one escape of JSON."""
    kind = match.lastgroup
    if kind is None:
        return match[0]
    if kind == "pair":
        high, _, low = match["pair"].partition("\\u")
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if kind == "escape":
        return _ESCAPES.get(match["escape"], match["escape"])
    if kind == "code" and not 0xDC00 <= int(match["code"], 16) < 0xE000:
        return chr(int(match["code"], 16))
    return match[0] if kind == "wrong" else "\ufffd"  # half of a surrogate pair is no character
