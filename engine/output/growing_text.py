"""Text that arrives in pieces, and searches in it. No I/O.

Readers of growing text are generators: one that needs more text yields, and goes on after the next piece.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader of growing text: it yields whenever it needs more, and returns its result."""
SPACE = " \t\r\n"


class GrowingText:
    """A text that arrives in pieces, and that one reader takes from its front.

    What looks like markup may turn out to be text. So the reader can have a copy of all that it takes held
    (`start_holding`), and get that text back (`stop_holding`).
    """

    __slots__ = ("_held_parts", "is_complete", "position", "text")

    def __init__(self, text: str = "", *, is_complete: bool = False) -> None:
        self.text = text
        self.position = 0
        """Index in `text` of the first character that was not taken."""
        self.is_complete = is_complete
        """Whether no piece follows."""
        self._held_parts: list[str] | None = None
        """Copy of what was taken since `start_holding`; None: nothing is held."""

    def push(self, piece: str) -> None:
        """Append the next piece."""
        self.text = self.text[self.position :] + piece
        self.position = 0

    def take_to(self, end: int) -> str:
        """Return the text from `position` to `end`, which becomes the position."""
        taken_text = self.text[self.position : end]
        self.position = end
        if self._held_parts is not None:
            self._held_parts.append(taken_text)
        return taken_text

    def take_chars(self, count: int) -> str:
        """Take the next `count` characters, and return them."""
        return self.take_to(self.position + count)

    def take_all(self) -> str:
        return self.take_to(len(self.text))

    def take_spaces(self, space: str = SPACE) -> str:
        """Take the characters of `space` that come next."""
        end = self.position
        while end < len(self.text) and self.text[end] in space:
            end += 1
        return self.take_to(end)

    def may_become_any(self, texts: Sequence[str]) -> bool:
        """Return whether more text could make one of `texts` come next."""
        unread_chars = len(self.text) - self.position
        return any(
            unread_chars < len(text) and self.text.startswith(text[:unread_chars], self.position) for text in texts
        )

    def start_holding(self) -> None:
        """Hold a copy of what is taken from now on, and drop what was held before."""
        self._held_parts = []

    def stop_holding(self) -> str:
        """Return the held text, and hold nothing."""
        held_text = "".join(self._held_parts or ())
        self._held_parts = None
        return held_text

    # Steps ------------------------------------------------------------------------------------------------------------

    def wait_for_more(self) -> Steps[bool]:
        """Wait for the next piece. Return False if none follows."""
        if not self.is_complete:
            yield
        return not self.is_complete

    def peek(self) -> Steps[str]:
        """Return the next character without taking it; an empty string at the end of the text."""
        while self.position == len(self.text):
            if self.is_complete:
                return ""
            yield
        return self.text[self.position]

    def take_until(self, pattern: re.Pattern[str], emit: Callable[[str], object]) -> Steps[str]:
        """Take the text up to a character that `pattern` matches, and emit it in pieces. Return that character.

        The character is not taken. Returns an empty string at the end of the text.
        """
        while (yield from self.peek()):
            match = pattern.search(self.text, self.position)
            emit(self.take_to(len(self.text) if match is None else match.start()))
            if match is not None:
                return match[0]
        return ""

    def peek_after_spaces(self, space: str = SPACE) -> Steps[str]:
        """Take the characters of `space` that come next, and return the character after them as `peek` does."""
        while True:
            self.take_spaces(space)
            char = yield from self.peek()
            if not char or char not in space:
                return char

    def peek_any(self, texts: Sequence[str]) -> Steps[str]:
        """Return the text of `texts` that comes next, without taking it; an empty string if none of them does.

        Waits while the unread text may still become one of them.
        """
        while True:
            for text in texts:
                if self.text.startswith(text, self.position):
                    return text
            if self.is_complete or not self.may_become_any(texts):
                return ""
            yield


class DelimiterScanner:
    """Finds delimiters, such as stop strings, in a text that arrives in pieces. Holds back a tail that may become one.

    With "</think>" as a delimiter and "done </th" as the text, "done " is passed on and "</th" is held back.
    """

    __slots__ = ("_chars_max", "_inner_chars", "_pattern", "delimiters")

    def __init__(self, delimiters: Sequence[str]) -> None:
        self.delimiters = sorted(set(delimiters))
        self._pattern = re.compile("|".join(map(re.escape, self.delimiters)) or "(?!)")  # (?!) matches nothing
        self._chars_max = max(map(len, delimiters), default=0)
        self._inner_chars = frozenset(char for delimiter in delimiters for char in delimiter[:-1])
        """Characters with which an incomplete delimiter can end."""

    def take_until(self, source: GrowingText, emit: Callable[[str], object]) -> Steps[str]:
        """Take the text up to a delimiter, and emit it in pieces. Return the delimiter, which is not taken.

        Yields whenever more text is needed. Returns an empty string at the end of the text, where the beginning of a
        delimiter may be left.
        """
        has_more = True
        while has_more:
            match = self._pattern.search(source.text, source.position)
            if match is not None:
                emit(source.take_to(match.start()))
                return match[0]
            emit(source.take_to(self.find_partial(source.text, source.position)))
            has_more = yield from source.wait_for_more()
        return ""

    def find_partial(self, text: str, start: int = 0) -> int:
        """Return the start of the longest tail of `text[start:]` that may become a delimiter, or the text's end."""
        text_end = len(text)
        if text_end == start or text[-1] not in self._inner_chars:
            return text_end
        for length in range(min(self._chars_max - 1, text_end - start), 0, -1):
            tail = text[text_end - length :]
            index = bisect_left(self.delimiters, tail)  # delimiters that begin with the tail are sorted just after it
            if index < len(self.delimiters) and self.delimiters[index].startswith(tail):
                return text_end - length
        return text_end
