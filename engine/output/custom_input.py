"""Decode the free text of a custom tool's call from the JSON that the model writes, `{"input": "..."}`. No I/O.

Models see a custom tool as a function with one string argument. Clients get the string.
"""

from __future__ import annotations

import re

import msgspec

_STRING_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_COMPLETE_CHARS = re.compile(r'(?:[^"\\]+|\\[^u]|\\u(?:[0-9a-fA-F]{4}|(?![0-9a-fA-F]{0,3}\Z)))*', re.DOTALL)
"""Beginning of a JSON string, without an escape at its end that is not complete yet."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CHAR_BY_ESCAPE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "u": "\\u"}
"""Letter after a backslash -> text. A "u" without four digits is no escape, and stays as the model wrote it."""


class CustomInputDecoder:
    """Decodes the free text of one call of a custom tool, while the call's arguments grow.

    The model writes the text as a string in JSON. Of the pieces `{"input": "a` and `\\nb"}`, the first gives "a", the
    second a line break and "b". Arguments in any other form are returned as they are by `finish`.
    """

    def __init__(self) -> None:
        self._has_begun = self._has_ended = False
        self._pending_text = ""
        """Arguments that are not decoded yet: the beginning of an escape, or all of them until `{"input": "` came."""
        self._pending_surrogate = ""
        """First half of a surrogate pair, of which the second half may follow."""

    def push(self, piece: str) -> str:
        """Take the next piece of the call's JSON. Return the text that it adds to the tool's input.

        What may still grow into another character, such as half of an escape, is kept for the next piece.
        """
        if self._has_ended:
            return ""
        self._pending_text += piece
        start = 0
        if not self._has_begun:
            match = _STRING_BEGIN.match(self._pending_text)
            if match is None:
                return ""
            self._has_begun, start = True, match.end()
        match = _COMPLETE_CHARS.match(self._pending_text, start)
        assert match is not None, "it matches the empty text too"
        self._pending_text = self._pending_text[match.end() :]
        self._has_ended = self._pending_text.startswith('"')
        return self._join_surrogates(_ESCAPE.sub(_decode_escape, match[0]))

    def _join_surrogates(self, chars: str) -> str:
        """Return characters with each surrogate pair as one character, and U+FFFD for half of a pair."""
        chars = self._pending_surrogate + chars
        self._pending_surrogate = ""
        if not self._has_ended and "\ud800" <= chars[-1:] < "\udc00":
            self._pending_surrogate, chars = chars[-1], chars[:-1]
        return chars.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def finish(self) -> str:
        """Return the text that was held back, after the last piece of the arguments.

        Arguments that do not begin with `{"input": "` have given no text yet. They may be an object with other keys
        before "input". Anything else is what the model wanted to say, and is returned as it is.
        """
        if self._has_begun:
            return ""
        try:
            value = msgspec.json.decode(self._pending_text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return self._pending_text
        is_input = isinstance(value, dict) and isinstance(value.get("input"), str)
        return value["input"] if is_input else self._pending_text


def _decode_escape(escape: re.Match[str]) -> str:
    """Return the character of an escape of JSON, which may be half of a surrogate pair."""
    code, letter = escape.groups()
    return _CHAR_BY_ESCAPE.get(letter, letter) if code is None else chr(int(code, 16))
