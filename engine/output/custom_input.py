"""Decode the free text of a custom tool's call from the JSON that the model writes, `{"input": "..."}`. No I/O.

Models see a custom tool as a function with one string argument. Clients get the string.
"""

from __future__ import annotations

import re

from prompts.chat_completions import decode_or_none

_STRING_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_COMPLETE_CHARS = re.compile(r'(?:[^"\\]+|\\[^u]|\\u(?:[0-9a-fA-F]{4}|(?![0-9a-fA-F]{0,3}\Z)))*', re.DOTALL)
"""Beginning of a JSON string, without an escape at its end that is not complete yet."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CHAR_BY_ESCAPE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "u": "\\u"}
"""Letter after a backslash -> text. A "u" without four digits is no escape, and stays as the model wrote it."""


class CustomInputDecoder:
    """Extracts the input of a custom tool, a tool that takes free text, from the JSON that the model is writing.

    The model is shown a function with one string argument, and writes `{"input": "..."}`. After the piece
    `{"input": "a`, `push` returns "a"; after `\\nb"}`, it returns a line break and "b". Arguments in any other form are
    returned by `finish`.
    """

    def __init__(self) -> None:
        self._is_in_string = False
        """Whether `{"input": "` has come."""
        self._has_ended = False
        self._pending_text = ""
        """JSON that is not decoded yet: the beginning of an escape, or all of it until `{"input": "` has come."""
        self._pending_surrogate = ""
        """First half of a surrogate pair, whose second half may follow."""

    def push(self, piece: str) -> str:
        """Decode the next piece of the call's JSON, and return the text that it adds to the tool's input.

        An escape that is not complete yet, such as a backslash at the end, waits for the next piece.
        """
        if self._has_ended:
            return ""
        self._pending_text += piece
        start = 0
        if not self._is_in_string:
            begin_match = _STRING_BEGIN.match(self._pending_text)
            if begin_match is None:
                return ""
            self._is_in_string = True
            start = begin_match.end()
        match = _COMPLETE_CHARS.match(self._pending_text, start)
        assert match is not None, "the pattern matches the empty text too"
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
        """Return the tool's input if the arguments do not begin with `{"input": "`; else `push` has returned it.

        The arguments may be an object with other keys before "input". Anything else is returned as the model wrote it.
        """
        if self._is_in_string:
            return ""
        value = decode_or_none(self._pending_text)
        has_input = isinstance(value, dict) and isinstance(value.get("input"), str)
        return value["input"] if has_input else self._pending_text


def _decode_escape(escape: re.Match[str]) -> str:
    """Return the character of an escape of JSON, which may be half of a surrogate pair."""
    code, letter = escape.groups()
    return _CHAR_BY_ESCAPE.get(letter, letter) if code is None else chr(int(code, 16))
