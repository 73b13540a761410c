"""Requests on their way, and those that decode together: what is the same in every step while the same ones come.

Most steps decode a token for each of the same requests. What such a step needs of them is put together once, so that
in most of them nobody is looked at one by one but who needs a block or finishes one. Knows no cache and no budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat

from engine.types import Chunk, Sequence, SequenceOutput, TokenLogprobs


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
        self._appends = [seq.token_ids.append for seq in self._sequences]
        self._stops = frozenset().union(*{entry.stops for entry in entries})
        self._starts = [seq.computed for seq in self._sequences]
        """Of their next chunks."""
        self._steps = 0
        self._asking: dict[int, list[int]] = {}
        """At which of its steps who needs or finishes a block, or ends: in order."""
        self._tokens = self._sequences[0].token_ids
        self._plain_until = len(self._tokens) - 1 + min(e.length_max - len(e.seq.token_ids) for e in entries)
        """While the first has fewer tokens than this, nobody ends with one more: each gets one of every step."""
        for index in range(len(entries)):
            self._ask_next(index, 0)

    def asking(self) -> list[int]:
        """Who cannot decode once more without being looked at: places among the entries."""
        return self._asking.get(self._steps, [])

    def chunks(self, *, fed: bool, block_size: int) -> list[Chunk]:
        """Of the next step, which those that ask have memory for. `fed`: as Chunk has it."""
        starts = self._starts
        self._starts = ends = [start + 1 for start in starts]
        for index in self._asking.pop(self._steps, ()):
            self.entries[index].decodes(starts[index], block_size)
            self._ask_next(index, 1)
        self._steps += 1
        return list(map(Chunk, self._sequences, starts, ends, repeat(True), repeat(fed)))

    def _ask_next(self, index: int, least: int) -> None:
        """`least`: steps from this one at which it may be asked."""
        steps = self.entries[index].plain_until - self._starts[index] + least
        self._asking.setdefault(self._steps + max(least, steps), []).append(index)

    def outputs(self, tokens: list[int]) -> list[SequenceOutput] | None:
        """Append a token to each, where none of them ends with that; None, and nothing done, where one may."""
        if len(self._tokens) >= self._plain_until or not self._stops.isdisjoint(tokens):
            return None
        for append, token in zip(self._appends, tokens):
            append(token)
        return [SequenceOutput(request_id=name, token_ids=[token]) for name, token in zip(self._names, tokens)]
