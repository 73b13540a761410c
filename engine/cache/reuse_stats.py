"""How often, and after how long, conversations return to their cached prefixes.

A **conversation** is a path of the prefix tree that requests continue: a prompt that begins with (nearly) the whole
prompt of an earlier one is its next turn. Turns are put into **classes**, by the number of turns and by how much the
last one added; shared prefixes of several conversations are classes of their own. For every class the returns and the
gaps before them are counted. Conversations are remembered after their blocks were evicted, so that the counts do not
depend on what was kept.

A turn that ended `age` ago is worth `return share / max(gap, age)`: hits of a block per unit of time. The gap is the
geometric mean of the class's gap and the turn's own last one. So a turn keeps its worth while its return is due, and
loses it afterwards, as in LRU. Of turns that are equally far from being due the youngest goes first: so a part of a
cycle that is larger than the cache stays.

The clock counts blocks of prompts. Refuses to know pools, tokens and time of day.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

_TURNS_MAX = 4
"""Conversations with at least so many turns are one class."""
_ADDED_STEP_MAX = 5
"""Last step of added blocks that makes a class of its own."""
_HALVE_AT_TURNS = 1024
"""Counted turns of a class at which its counts are halved, so that old turns are forgotten."""
_OVERDUE_CAPACITIES = 2
"""A turn counts as not returning after prompts of so many times the cache's size. Before, it does not count at all:
most turns are young, and would make quick returns look rare."""
_PRIOR_TURNS = 10.0
"""Turns that every class is assumed to have had, half of which returned."""


class ConversationTurn:
    """A request of a conversation, of which a next one may continue the prompt.

    It may also stand for a shared prefix. Then `turn_count` counts the conversations that begin with it.
    """

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
        """Leading blocks that other conversations have, too."""
        self.is_shared_prefix = is_shared_prefix
        self.turn_count = 1
        self.added_blocks = prompt_blocks - shared_blocks
        """Blocks that the prompt has more than the prompt of the previous turn."""
        self.gap_blocks: int | None = None
        """Blocks of all prompts between the previous turn and this one; None for the first turn."""
        self.end_clock = 0
        """Clock when the turn ended."""
        self.continuation_hash: int | None = None
        """Hash of a block by which the next turn is recognised; None if all blocks are shared."""
        self.previous: ConversationTurn | None = None


class ReuseCounts:
    """Counts how many turns of one class returned, and after how long. Old turns lose weight by halving."""

    __slots__ = ("gap_log2_sum", "return_count", "turn_count")

    def __init__(self, gap_estimate: int) -> None:
        self.turn_count = _PRIOR_TURNS
        self.return_count = _PRIOR_TURNS / 2
        self.gap_log2_sum = self.return_count * math.log2(gap_estimate)
        """Sum of log2 of the gaps before the returns."""

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
    """Remembers recent conversations, and counts for each class of turns how often they return."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        """`capacity_blocks`: blocks of the cache, and most conversations that are remembered."""
        self.clock = 0
        self._capacity_blocks = capacity_blocks
        self._size_scale = max(1, 256 // block_tokens)
        self._last_turns: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Last turn of each conversation by its `continuation_hash`, oldest first."""
        self._uncounted_turns: OrderedDict[ConversationTurn, None] = OrderedDict()
        """Turns that are not counted yet, oldest first."""
        self._shared_prefixes: OrderedDict[int, ConversationTurn] = OrderedDict()
        """Hash of the last block of a shared prefix -> the prefix, least recently used first."""
        self._counts_by_class: dict[tuple[bool, int, int], ReuseCounts] = {}
        self._mean_at_clock = (-1, (0.5, math.log2(capacity_blocks)))
        """(clock, result of `compute_mean_reuse` at that time)."""

    def begin_turn(self, block_hashes: Sequence[int], hit_blocks: int) -> ConversationTurn:
        """Record a request with these blocks in its prompt; the first `hit_blocks` of them were cached."""
        prompt_blocks = len(block_hashes)
        self.clock += prompt_blocks
        previous_turn = self._take_previous_turn(block_hashes)
        if previous_turn is None:
            turn = ConversationTurn(prompt_blocks, hit_blocks)
            if hit_blocks:
                self._record_shared_prefix(block_hashes[hit_blocks - 1], hit_blocks)
        else:
            turn = self._continue_turn(previous_turn, prompt_blocks)
        if prompt_blocks > turn.shared_blocks:
            # The last block but one: a template may end a prompt in another way than it continues the prompt.
            turn.continuation_hash = block_hashes[max(turn.shared_blocks, prompt_blocks - 2)]
        return turn

    def _take_previous_turn(self, block_hashes: Sequence[int]) -> ConversationTurn | None:
        """Forget and return the last turn of the conversation that a prompt continues; None for a new conversation."""
        for block_hash in reversed(block_hashes):
            previous_turn = self._last_turns.pop(block_hash, None)
            if previous_turn is not None:
                return previous_turn
        return None

    def _continue_turn(self, previous_turn: ConversationTurn, prompt_blocks: int) -> ConversationTurn:
        """Count that a turn has returned, and return the turn that follows it."""
        turn = ConversationTurn(prompt_blocks, previous_turn.shared_blocks)
        turn.turn_count = previous_turn.turn_count + 1
        turn.added_blocks = max(0, prompt_blocks - previous_turn.prompt_blocks)
        turn.gap_blocks = self.clock - previous_turn.end_clock
        turn.previous = previous_turn
        previous_turn.previous = None
        self.get_counts(previous_turn).record_return(turn.gap_blocks)
        self._count_turn(previous_turn)
        return turn

    def _record_shared_prefix(self, block_hash: int, prefix_blocks: int) -> None:
        """Count a conversation that begins with a shared prefix, which ends with the block of this hash."""
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
        """Record that a request is over: its conversation may return from now on."""
        turn.end_clock = self.clock
        if turn.continuation_hash is None:
            self.get_counts(turn).record_turn()
            return
        self._uncounted_turns[turn] = None
        self._count_overdue_turns()
        self._last_turns[turn.continuation_hash] = turn
        self._last_turns.move_to_end(turn.continuation_hash)
        if len(self._last_turns) > self._capacity_blocks:
            self._last_turns.popitem(last=False)

    def _count_overdue_turns(self) -> None:
        """Count the turns that ended so long ago that they are taken not to return."""
        overdue_clock = self.clock - _OVERDUE_CAPACITIES * self._capacity_blocks
        oldest_turn = next(iter(self._uncounted_turns))
        while oldest_turn.end_clock < overdue_clock:
            self._count_turn(oldest_turn)
            oldest_turn = next(iter(self._uncounted_turns))

    def _count_turn(self, turn: ConversationTurn) -> None:
        """Count a turn, once, which has returned or is overdue."""
        if turn in self._uncounted_turns:
            del self._uncounted_turns[turn]
            self.get_counts(turn).record_turn()

    def shared_prefix_turn(self, block_hash: int, last_use: int) -> ConversationTurn | None:
        """Return the shared prefix that ends with this block, if there is one. `last_use`: clock of its last use."""
        prefix_turn = self._shared_prefixes.get(block_hash)
        if prefix_turn is not None:
            prefix_turn.end_clock = max(prefix_turn.end_clock, last_use)
        return prefix_turn

    def classify_turn(self, turn: ConversationTurn) -> tuple[bool, int, int]:
        """Return the class of a turn: (shared prefix or not, number of turns, step of the blocks that it added).

        The steps of added blocks grow by a factor of four, for blocks of 256 tokens.
        """
        added_step = min(_ADDED_STEP_MAX, (turn.added_blocks // self._size_scale).bit_length() // 2)
        return turn.is_shared_prefix, min(turn.turn_count, _TURNS_MAX), added_step

    def get_counts(self, turn: ConversationTurn) -> ReuseCounts:
        """Return the counts of a turn's class."""
        turn_class = self.classify_turn(turn)
        counts = self._counts_by_class.get(turn_class)
        if counts is None:
            counts = self._counts_by_class[turn_class] = ReuseCounts(self._capacity_blocks)
        return counts

    def compute_mean_reuse(self) -> tuple[float, float]:
        """Return (share of turns that return, log2 of the gap before it), over all classes."""
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
        """Return log2 of the gap after which this turn is expected to return."""
        class_gap_log2 = self.get_counts(turn).mean_gap_log2
        return class_gap_log2 if turn.gap_blocks is None else (class_gap_log2 + math.log2(max(1, turn.gap_blocks))) / 2
