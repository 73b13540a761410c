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
_HALVE_AT_TURNS = 1024
"""Turns of a class that are counted before its counts are halved, so that what was long ago is forgotten."""
_OVERDUE_CAPACITIES = 2
"""Caches' worth of blocks after which a turn counts as one that does not come back. Until then it counts as nothing:
most turns are young, and would make what returns quickly look rare."""
_PRIOR_TURNS = 10.0
"""Turns of a class that are taken to have been seen before the first: half of them came back."""


class ConversationTurn:
    """One request's place in its conversation, or a shared beginning (`turn_count`: conversations on it)."""

    __slots__ = (
        "added_blocks",
        "continuation_hash",
        "end_clock",
        "gap_blocks",
        "is_shared_prefix",
        "previous",
        "prompt_blocks",
        "shared_blocks",
        "turn_count",
    )

    def __init__(self, prompt_blocks: int, shared_blocks: int, *, is_shared_prefix: bool = False) -> None:
        self.prompt_blocks = prompt_blocks
        """Blocks of the prompt."""
        self.shared_blocks = shared_blocks
        """Leading blocks that belong to others too."""
        self.is_shared_prefix = is_shared_prefix
        self.turn_count = 1
        self.added_blocks = prompt_blocks - shared_blocks
        """Blocks that the prompt has more than the one before it."""
        self.gap_blocks: int | None = None
        """Blocks of other prompts between the turn before and this one; None for the first."""
        self.end_clock = 0
        """Clock when the turn was over."""
        self.continuation_hash: int | None = None
        """Hash of the block by which its continuation is known; None where all of it is others' too."""
        self.previous: ConversationTurn | None = None


class ReuseCounts:
    """How the turns of one class come back."""

    __slots__ = ("gap_log2_sum", "return_count", "turn_count")

    def __init__(self, gap_estimate: int) -> None:
        self.turn_count = _PRIOR_TURNS
        self.return_count = _PRIOR_TURNS / 2
        self.gap_log2_sum = self.return_count * math.log2(gap_estimate)
        """Sum of log2 of the gaps of those that came back."""

    def record_turn(self) -> None:
        self.turn_count += 1
        if self.turn_count > _HALVE_AT_TURNS:
            self.turn_count = self.turn_count / 2
            self.return_count = self.return_count / 2
            self.gap_log2_sum = self.gap_log2_sum / 2

    def record_return(self, gap: int) -> None:
        self.return_count += 1
        self.gap_log2_sum += math.log2(max(1, gap))

    @property
    def return_share(self) -> float:
        return min(1.0, self.return_count / self.turn_count)

    @property
    def mean_gap_log2(self) -> float:
        return self.gap_log2_sum / self.return_count


class ReuseStats:
    """The conversations that are known, and how those of each class come back."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        """`capacity_blocks`: blocks of the cache. As many conversations are remembered, at most, as it could hold."""
        self.clock = 0
        self._capacity_blocks = capacity_blocks
        self._size_scale = max(1, 256 // block_tokens)
        self._last_turns: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Last turn of each conversation by its `continuation_hash`, oldest first."""
        self._uncounted_turns: OrderedDict[ConversationTurn, None] = OrderedDict()
        """Turns that are not counted yet, oldest first."""
        self._shared_prefixes: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Shared beginnings by the hash of their last block."""
        self._counts_by_class: dict[tuple[bool, int, int], ReuseCounts] = {}
        self._mean_at_clock = (-1, (0.5, math.log2(capacity_blocks)))
        """Of all classes, and when."""

    def begin_turn(self, block_hashes: Sequence[int], hit_blocks: int) -> ConversationTurn:
        """Record a request whose prompt has these blocks, of which the first `hit_blocks` were cached."""
        self.clock += len(block_hashes)
        prompt_blocks = len(block_hashes)
        previous = None
        for block_hash in reversed(block_hashes):
            previous = self._last_turns.pop(block_hash, None)
            if previous is not None:
                break
        if previous is None:
            turn = ConversationTurn(prompt_blocks, hit_blocks)
            if hit_blocks:
                self._record_shared_prefix(block_hashes[hit_blocks - 1], hit_blocks)
        else:
            turn = ConversationTurn(prompt_blocks, previous.shared_blocks)
            turn.turn_count = previous.turn_count + 1
            turn.added_blocks = max(0, prompt_blocks - previous.prompt_blocks)
            turn.gap_blocks = self.clock - previous.end_clock
            turn.previous = previous
            previous.previous = None
            self.get_counts(previous).record_return(turn.gap_blocks)
            self._count_turn(previous)
        if prompt_blocks > turn.shared_blocks:
            # The last block but one, since a template may end a prompt otherwise than it goes on.
            turn.continuation_hash = block_hashes[max(turn.shared_blocks, prompt_blocks - 2)]
        return turn

    def _record_shared_prefix(self, block_hash: int, prefix_blocks: int) -> None:
        prefix_turn = self._shared_prefixes.get(block_hash)
        if prefix_turn is None:
            prefix_turn = self._shared_prefixes[block_hash] = ConversationTurn(prefix_blocks, 0, is_shared_prefix=True)
        else:
            prefix_turn.gap_blocks = self.clock - prefix_turn.end_clock
            self.get_counts(prefix_turn).record_return(prefix_turn.gap_blocks)
            prefix_turn.turn_count += 1
            self._shared_prefixes.move_to_end(block_hash)
        prefix_turn.end_clock = self.clock
        self.get_counts(prefix_turn).record_turn()
        if len(self._shared_prefixes) > self._capacity_blocks:
            self._shared_prefixes.popitem(last=False)

    def end_turn(self, turn: ConversationTurn) -> None:
        """The request is over: from now on its continuation is waited for."""
        turn.end_clock = self.clock
        if turn.continuation_hash is None:
            self.get_counts(turn).record_turn()
            return
        self._uncounted_turns[turn] = None
        while (
            oldest := next(iter(self._uncounted_turns))
        ).end_clock < self.clock - _OVERDUE_CAPACITIES * self._capacity_blocks:
            self._count_turn(oldest)
        self._last_turns[turn.continuation_hash] = turn
        self._last_turns.move_to_end(turn.continuation_hash)
        if len(self._last_turns) > self._capacity_blocks:
            self._last_turns.popitem(last=False)

    def _count_turn(self, turn: ConversationTurn) -> None:
        """It has come back, or it is overdue; once only."""
        if turn in self._uncounted_turns:
            del self._uncounted_turns[turn]
            self.get_counts(turn).record_turn()

    def shared_prefix_turn(self, block_hash: int, last_use: int) -> ConversationTurn | None:
        """What is known of the shared beginning that ends with this block, which was last used at `last_use`."""
        prefix_turn = self._shared_prefixes.get(block_hash)
        if prefix_turn is not None:
            prefix_turn.end_clock = max(prefix_turn.end_clock, last_use)
        return prefix_turn

    def classify_turn(self, turn: ConversationTurn) -> tuple[bool, int, int]:
        """The class of a turn."""
        return (
            turn.is_shared_prefix,
            min(turn.turn_count, _TURNS_MAX),
            min(5, (turn.added_blocks // self._size_scale).bit_length() // 2),
        )

    def get_counts(self, turn: ConversationTurn) -> ReuseCounts:
        turn_class = self.classify_turn(turn)
        counts = self._counts_by_class.get(turn_class)
        if counts is None:
            counts = self._counts_by_class[turn_class] = ReuseCounts(self._capacity_blocks)
        return counts

    def compute_mean_reuse(self) -> tuple[float, float]:
        """(share of turns that come back, log2 of the gap after which they do), of all classes when the last began."""
        clock, mean = self._mean_at_clock
        if clock != self.clock and self._counts_by_class:
            counts = self._counts_by_class.values()
            return_count = sum(count.return_count for count in counts)
            mean = (
                min(1.0, return_count / sum(count.turn_count for count in counts)),
                sum(c.gap_log2_sum for c in counts) / return_count,
            )
            self._mean_at_clock = self.clock, mean
        return mean

    def expected_gap_log2(self, turn: ConversationTurn) -> float:
        """log2 of the gap after which this turn is due."""
        class_gap_log2 = self.get_counts(turn).mean_gap_log2
        return class_gap_log2 if turn.gap_blocks is None else (class_gap_log2 + math.log2(max(1, turn.gap_blocks))) / 2
