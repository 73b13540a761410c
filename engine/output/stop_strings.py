"""Stop strings in a growing text. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from engine.output.growing_text import DelimiterScanner


class StopStrings:
    """Cuts generated text, which arrives in pieces, at the first of a request's stop strings.

    The end of the text is held back if it may become a stop string: with "END" as a stop string and "the E" as the
    text, "E" is. The first stop string is the one that is complete earliest; of two that end at the same character, the
    longer one. The result does not depend on how the text is split into pieces.
    """

    __slots__ = ("_includes_stop", "_scanner", "pending_text")

    def __init__(self, stops: Sequence[str], includes_stop: bool) -> None:
        """`includes_stop`: whether the stop string that ends the text is part of the text."""
        assert all(stops), "an empty stop string would stop everything"
        self._scanner = DelimiterScanner(stops)
        self._includes_stop = includes_stop
        self.pending_text = ""
        """End of the text, which is held back because it may become a stop string."""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a piece. Return the text that has become final, and the stop string that was found, or None.

        Nothing may be pushed after a stop string. `may_stop`: whether a stop string that ends in this piece counts.
        """
        text = self.pending_text + piece
        match = self._find_first_stop(text, len(self.pending_text)) if may_stop else None
        if match is not None:
            start, stop = match
            end = start + len(stop) if self._includes_stop else start
            self.pending_text = ""
            return text[:end], stop
        final_chars = self._scanner.find_partial(text)
        self.pending_text = text[final_chars:]
        return text[:final_chars], None

    def flush(self) -> str:
        """Return the text that was held back."""
        text, self.pending_text = self.pending_text, ""
        return text

    def _find_first_stop(self, text: str, pending_chars: int) -> tuple[int, str] | None:
        """Return the start of the first stop string that ends after the pending text, and the stop string."""
        matches: list[tuple[int, int, str]] = []
        for stop in self._scanner.delimiters:
            start = text.find(stop, max(0, pending_chars - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)  # earliest end; then earliest start, which is the longer one
        return start, stop
