"""Requests on their way, and those that decode together: what is the same in every step while the same ones come.

Most steps decode a token for each of the same requests. What such a step needs of them is put together once, so that
in most of them nobody is looked at one by one but who needs a block or finishes one. Knows no cache and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.types import Chunk, DecodedTokens, LazyDecodeChunks, Sequence, TokenLogprobs


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A request's place in the order, and when it next needs more than a token."""

    seq: Sequence
    name: str
    """Of its request."""
    order: tuple[int, float, int]
    stops: frozenset[int]
    """Tokens that end it."""
    length_max: int
    """Tokens, prompt and output together, at which it ends."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reported: bool = False
    """Its first output, which carries the facts about the prompt, has been made."""
    last: int = 0
    """Which was the last plan with it, of all that were made: it is out until that one is applied."""
    ended: bool = False
    """Aborted or finished while a plan with it is out: it goes when the last of these is applied."""
    plain_until: int = 0
    """Decodes of positions before this one need no memory, finish no block and do not end it: nobody is asked."""
    came: int = 0
    left: int = 0
    turn: tuple[int, float, float, int] = (0, 0.0, 0.0, 0)
    """Of its prompt, these three, as `engine.turns` has them."""

    def __lt__(self, other: RequestEntry) -> bool:
        return self.order < other.order

    def decodes(self, start: int, block_size: int) -> None:
        """It has memory for the position `start`."""
        self.plain_until = min((start // block_size + 1) * block_size, self.length_max) - 1


class Decoders:
    """Those of two plans in a row, the last that were made, which have a decode of each and nothing else.

    Good until anything but the next such plan is made, or one of them goes.
    """

    def __init__(self, entries: list[RequestEntry]) -> None:
        self.entries = entries
        self._sequences = [entry.seq for entry in entries]
        self._names = [entry.name for entry in entries]
        self._texts = [seq.token_ids for seq in self._sequences]
        self._stops = frozenset().union(*{entry.stops for entry in entries})
        self._first_starts = [seq.computed_tokens for seq in self._sequences]
        """Of their chunks in the first of its steps."""
        self._steps = 0
        self.growing: list[RequestEntry] = []
        """Who needs a block for the next step, in order: those that filled one in the last."""
        self._filling: dict[int, list[RequestEntry]] = {}
        """At which of its steps who fills a block, or ends: in order."""
        self._plain_until = len(self._texts[0]) - 1 + min(e.length_max - len(e.seq.token_ids) for e in entries)
        """While the first has fewer tokens than this, nobody ends with one more: each gets one of every step."""
        for entry in entries:
            if entry.seq.computed_tokens > entry.plain_until:
                self.growing.append(entry)
            else:
                self._fills(entry)

    def grown(self) -> list[RequestEntry]:
        """Those that need a block have it now. Who fills one in the next step, or ends."""
        growing, self.growing = self.growing, []
        for entry in growing:
            self._fills(entry)
        return self._filling.get(self._steps, [])

    def chunks(self, *, fed: bool) -> Items[Chunk]:
        """Of the next step. `fed`: as Chunk has it."""
        self.growing = self._filling.pop(self._steps, [])
        steps, self._steps = self._steps, self._steps + 1
        if fed:
            return LazyDecodeChunks(self._sequences, self._first_starts, steps)
        starts = zip(self._sequences, self._first_starts)
        return [Chunk(seq, start + steps, start + steps + 1, True) for seq, start in starts]

    def _fills(self, entry: RequestEntry) -> None:
        self._filling.setdefault(self._steps + entry.plain_until - entry.seq.computed_tokens, []).append(entry)

    def outputs(self, tokens: list[int]) -> DecodedTokens | None:
        """Append a token to each, where none of them ends with that; None, and nothing done, where one may."""
        if len(self._texts[0]) >= self._plain_until or not self._stops.isdisjoint(tokens):
            return None
        for text, token in zip(self._texts, tokens):
            text.append(token)
        return DecodedTokens(self._names, tokens)
