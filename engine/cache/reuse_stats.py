"""Which cached prefix goes first: learned from when conversations come back.

A **conversation** is a path of the prefix tree that requests continue: a prompt that begins with (nearly) the whole
prompt of an earlier one is its next turn. A turn is of a **class**: how many turns it has, how much the last one added,
or that it is the shared beginning of several conversations. For every class it is counted how often its turns come back
and after how long; what has been evicted is remembered by name, so that the counts do not depend on what was kept.

A turn that was left at `age` is worth `share / max(gap, age)`: hits a block per unit of time, where `gap` is the
geometric mean of its class's and its own last one. So it is kept while it is due; when it is overdue it loses worth as
in LRU; and among turns that are equally far from being due the youngest goes, which leaves a cycle that is larger than
the cache a part that stays. Turns of equal class and gap share a queue: only the ends of queues are compared, and their
number does not grow with the cache. A path goes from its end, so a parent never goes before its child.

The clock counts blocks of prompts. Refuses to know pools, hashes' meaning, tokens and time of day.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

_TURNS_MAX = 4
"""Turns from this number on are one class."""
_HALVED_AT = 1024
"""Turns of a class that are counted before its counts are halved, so that what was long ago is forgotten."""
_OVERDUE = 2
"""Caches' worth of blocks after which a turn counts as one that does not come back. Until then it counts as nothing:
most turns are young, and would make what returns quickly look rare."""
_PRIOR = 10.0
"""Turns of a class that are taken to have been seen before the first: half of them came back."""


class ConversationTurn:
    """One request's place in its conversation, or a shared beginning (`turns` counts the conversations on it)."""

    __slots__ = ("added", "base", "before", "gap", "last", "length", "mark", "shared", "turns")

    def __init__(self, length: int, base: int, *, shared: bool = False) -> None:
        self.length = length
        """Blocks of the prompt."""
        self.base = base
        """Leading blocks that belong to others too."""
        self.shared = shared
        self.turns = 1
        self.added = length - base
        """Blocks that the prompt has more than the one before it."""
        self.gap: int | None = None
        """Blocks of other prompts between the turn before and this one; None for the first."""
        self.last = 0
        """Clock when the turn was over."""
        self.mark: int | None = None
        """Hash of the block by which its continuation is known; None where all of it is others' too."""
        self.before: ConversationTurn | None = None


class ReuseCounts:
    """How the turns of one class come back."""

    __slots__ = ("gaps", "returned", "turns")

    def __init__(self, gap_guess: int) -> None:
        self.turns = _PRIOR
        self.returned = _PRIOR / 2
        self.gaps = self.returned * math.log2(gap_guess)
        """Sum of log2 of the gaps of those that came back."""

    def left(self) -> None:
        self.turns += 1
        if self.turns > _HALVED_AT:
            self.turns, self.returned, self.gaps = self.turns / 2, self.returned / 2, self.gaps / 2

    def came_back(self, gap: int) -> None:
        self.returned += 1
        self.gaps += math.log2(max(1, gap))

    @property
    def share(self) -> float:
        return min(1.0, self.returned / self.turns)

    @property
    def gap_log2(self) -> float:
        return self.gaps / self.returned


class ReuseStats:
    """The conversations that are known, and how those of each class come back."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        """`capacity`: blocks of the cache. As many conversations are remembered, at most, as it could hold."""
        self.now = 0
        self._capacity = capacity
        self._scale = max(1, 256 // block_tokens)
        self._conversations: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Last turn of each by the mark of its prompt, oldest first."""
        self._waiting: OrderedDict[ConversationTurn, None] = OrderedDict()
        """Turns that are not counted yet, oldest first."""
        self._shared: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Shared beginnings by the hash of their last block."""
        self._counts: dict[tuple[bool, int, int], ReuseCounts] = {}
        self._mean = (-1, (0.5, math.log2(capacity)))
        """Of all classes, and when."""

    def begin(self, names: Sequence[int], hit: int) -> ConversationTurn:
        """A request came whose prompt has the blocks `names`, of which `hit` were found."""
        self.now += len(names)
        length = len(names)
        before = None
        for name in reversed(names):
            before = self._conversations.pop(name, None)
            if before is not None:
                break
        if before is None:
            turn = ConversationTurn(length, hit)
            if hit:
                self._begin_on(names[hit - 1], hit)
        else:
            turn = ConversationTurn(length, before.base)
            turn.turns = before.turns + 1
            turn.added = max(0, length - before.length)
            turn.gap = self.now - before.last
            turn.before = before
            before.before = None
            self.of(before).came_back(turn.gap)
            self._count(before)
        if length > turn.base:  # the last block but one, since a template may end a prompt otherwise than it goes on
            turn.mark = names[max(turn.base, length - 2)]
        return turn

    def _begin_on(self, name: int, length: int) -> None:
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = ConversationTurn(length, 0, shared=True)
        else:
            shared.gap = self.now - shared.last
            self.of(shared).came_back(shared.gap)
            shared.turns += 1
            self._shared.move_to_end(name)
        shared.last = self.now
        self.of(shared).left()
        if len(self._shared) > self._capacity:
            self._shared.popitem(last=False)

    def end(self, turn: ConversationTurn) -> None:
        """The request is over: from now on its continuation is waited for."""
        turn.last = self.now
        if turn.mark is None:
            self.of(turn).left()
            return
        self._waiting[turn] = None
        while (oldest := next(iter(self._waiting))).last < self.now - _OVERDUE * self._capacity:
            self._count(oldest)
        self._conversations[turn.mark] = turn
        self._conversations.move_to_end(turn.mark)
        if len(self._conversations) > self._capacity:
            self._conversations.popitem(last=False)

    def _count(self, turn: ConversationTurn) -> None:
        """It has come back, or it is overdue; once only."""
        if turn in self._waiting:
            del self._waiting[turn]
            self.of(turn).left()

    def shared_at(self, name: int, last: int) -> ConversationTurn | None:
        """What is known of the shared beginning that ends with this block, which was last used at `last`."""
        shared = self._shared.get(name)
        if shared is not None:
            shared.last = max(shared.last, last)
        return shared

    def kind(self, turn: ConversationTurn) -> tuple[bool, int, int]:
        """The class of a turn."""
        return turn.shared, min(turn.turns, _TURNS_MAX), min(5, (turn.added // self._scale).bit_length() // 2)

    def of(self, turn: ConversationTurn) -> ReuseCounts:
        kind = self.kind(turn)
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = ReuseCounts(self._capacity)
        return counts

    def mean(self) -> tuple[float, float]:
        """(share of turns that come back, log2 of the gap after which they do), of all classes when the last began."""
        at, mean = self._mean
        if at != self.now and self._counts:
            counts = self._counts.values()
            returned = sum(count.returned for count in counts)
            mean = min(1.0, returned / sum(count.turns for count in counts)), sum(c.gaps for c in counts) / returned
            self._mean = self.now, mean
        return mean

    def due(self, turn: ConversationTurn) -> float:
        """log2 of the gap after which this turn is due."""
        expected = self.of(turn).gap_log2
        return expected if turn.gap is None else (expected + math.log2(max(1, turn.gap))) / 2
