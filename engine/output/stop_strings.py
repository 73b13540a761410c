"""Stop strings in a growing text. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from engine.output.growing_text import DelimiterScanner


class StopStrings:
    """Finds the first stop string in a growing text, independently of the pieces by which it grows.

    The first stop string is the one that is complete earliest; of two that end at the same character, the longer one.
    The end of the text is held back if it may become a stop string: with "END" as a stop string and "the E" as the
    text, "E" is.
    """

    __slots__ = ("_includes_stop", "_scanner", "pending_text")

    def __init__(self, stops: Sequence[str], includes_stop: bool) -> None:
        """`stops`: none is empty. `includes_stop`: a found stop string stays in the text."""
        assert all(stops), "an empty stop string would stop everything"
        self._scanner = DelimiterScanner(stops)
        self._includes_stop = includes_stop
        self.pending_text = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return (final text, stop string that was found or None). Nothing may be pushed after a stop string.

        `may_stop`: whether a stop string that this piece completes counts. Its beginning may be in earlier pieces.
        """
        text = self.pending_text + piece
        match = self._find_first_stop(text, len(self.pending_text)) if may_stop else None
        if match is not None:
            start, stop = match
            self.pending_text = ""
            return text[: start + len(stop)] if self._includes_stop else text[:start], stop
        final_chars = self._scanner.find_partial(text)
        self.pending_text = text[final_chars:]
        return text[:final_chars], None

    def flush(self) -> str:
        """Return the text that was held back."""
        text, self.pending_text = self.pending_text, ""
        return text

    def _find_first_stop(self, text: str, pending_chars: int) -> tuple[int, str] | None:
        """Return (start, stop string) of the first that ends behind the pending text; of two, the longer one."""
        stops = self._scanner.delimiters
        matches = [(text.find(stop, max(0, pending_chars - len(stop) + 1)), stop) for stop in stops]
        found_matches = [(start, stop) for start, stop in matches if start >= 0]
        return min(found_matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)
