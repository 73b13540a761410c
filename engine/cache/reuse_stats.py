"""How often, and after how long, conversations return to their cached prefixes.

A **conversation** is a sequence of requests: a prompt that begins with (nearly) the whole prompt of an earlier request
is the next **turn** of its conversation. Turns are put into **classes**, by their number in the conversation and by the
blocks that the last one added. Prefixes that several conversations share are classes of their own. For every class, the
returns and the gaps before them are counted, also for conversations without blocks in the cache. The clock counts
blocks of prompts.

A turn has the value `return share / gap`: expected hits of a block per unit of time. The gap is the geometric mean of
the class's gap and the turn's own last gap. Once the turn ended over 1.5 gaps ago, that age takes the place of the gap.
So a turn keeps its value until its return is overdue, and loses it afterwards, as in LRU. Among turns that are equally
far from being due, the youngest is evicted first. So if requests repeat a cycle that is larger than the cache, a part
of the cycle stays cached.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from options.bounded_dict import BoundedDict

_TURNS_MAX = 4
"""Turns from this number on are in the same class."""
_ADDED_STEP_MAX = 5
"""Turns that added blocks of this step or a higher one are in the same class: see `classify_turn`."""
_HALVE_AT_TURNS = 1024
"""Counted turns of a class at which its counts are halved, so that old turns are forgotten."""
_OVERDUE_CAPACITIES = 2
"""A turn is counted as not returning once later prompts have so many times the blocks of the cache. Until then it is
not counted: most turns are young, and would make quick returns look rare."""
_RETURNS_MIN = 0.01
"""Counted returns that are not halved further, so that the mean gap is known though turns return no longer."""
_PRIOR_TURNS = 10.0
"""Turns that every class is assumed to have had at the start; half of them returned."""


class TurnClass(NamedTuple):
    """Properties that turns have in common which are counted together."""

    is_shared_prefix: bool
    turn_count: int
    """Number of turns of the conversation so far, at most _TURNS_MAX."""
    added_step: int
    """Step of the number of tokens that the last turn added: 0, 512, 2048, 8192 tokens, and so on."""


@dataclass(slots=True, eq=False)
class ConversationTurn:
    """One request of a conversation: it repeats the prompt of the previous request, and adds to it.

    Time is counted in blocks: `end_clock` and `gap_blocks` are numbers of blocks in the prompts of all conversations.
    A prefix that several conversations share, such as a system prompt, is recorded as a turn, too.
    """

    prompt_blocks: int
    """Number of blocks of the prompt."""
    shared_blocks: int
    """Number of leading blocks that other conversations have, too."""
    added_blocks: int
    """Number of blocks that neither the previous turn nor the shared prefix had."""
    turn_count: int = 1
    """Number of turns of the conversation up to this one; for a shared prefix, number of conversations."""
    is_shared_prefix: bool = False
    previous: ConversationTurn | None = None
    gap_blocks: int | None = None
    """Time between the end of the previous turn and this one; None for a first turn."""
    end_clock: int = 0
    """Time when this turn ended."""
    continuation_hash: int | None = None
    """Hash of the block by which the next turn is recognised; None if all blocks are shared."""


class ReuseCounts:
    """Counts how many conversation turns of one class were followed by a next turn ("returned"), and how soon.

    The counts are halved now and then, so that old turns are forgotten.
    """

    __slots__ = ("gap_log2_sum", "return_count", "turn_count")

    def __init__(self, gap_estimate: int) -> None:
        """Begin with a few assumed turns, half of which returned after a gap of `gap_estimate` blocks of prompts."""
        self.turn_count = _PRIOR_TURNS
        self.return_count = _PRIOR_TURNS / 2
        self.gap_log2_sum = self.return_count * math.log2(gap_estimate)
        """Sum of log2 of the gaps before the returns, from which the geometric mean of the gaps follows."""

    def record_turn(self) -> None:
        self.turn_count += 1
        if self.turn_count > _HALVE_AT_TURNS:
            self.turn_count /= 2
            if self.return_count > _RETURNS_MIN:
                self.return_count /= 2
                self.gap_log2_sum /= 2

    def record_return(self, gap_blocks: int) -> None:
        self.return_count += 1
        self.gap_log2_sum += math.log2(max(1, gap_blocks))

    @property
    def return_share(self) -> float:
        return min(1.0, self.return_count / self.turn_count)

    @property
    def mean_gap_log2(self) -> float:
        return self.gap_log2_sum / self.return_count


class MeanReuse(NamedTuple):
    """How often turns return, and after how long, in the mean."""

    return_share: float
    """Share of turns that return, 0 .. 1."""
    gap_log2: float
    """log2 of the gap before a return, in blocks of prompts."""


class ReuseStats:
    """Remembers recent conversations, and counts for each class of turns how often they return."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        """Start without conversations. A turn is one request of a conversation; it returns when the next turn comes.

        `capacity_blocks`: number of blocks in the KV cache. As many conversations are remembered.
        """
        self.clock = 0
        """Number of blocks in the prompts of all requests so far."""
        self._capacity_blocks = capacity_blocks
        self._blocks_per_256_tokens = max(1, 256 // block_tokens)
        self._last_turns: BoundedDict[int, ConversationTurn] = BoundedDict(capacity_blocks)
        """Last turn of each conversation by its `continuation_hash`, oldest first."""
        self._uncounted_turns: OrderedDict[ConversationTurn, None] = OrderedDict()
        """Turns that have not returned and may still do so, oldest first. No `ReuseCounts` has counted them yet."""
        self._shared_prefixes: BoundedDict[int, ConversationTurn] = BoundedDict(capacity_blocks)
        """Hash of the last block of a shared prefix -> the prefix, least recently used first."""
        self._counts_by_class: dict[TurnClass, ReuseCounts] = {}
        self._mean_reuse = MeanReuse(return_share=0.5, gap_log2=math.log2(capacity_blocks))
        """Last result of `compute_mean_reuse`."""
        self._mean_reuse_clock = -1
        """Clock when `_mean_reuse` was computed."""

    def begin_turn(self, block_hashes: Sequence[int], hit_blocks: int) -> ConversationTurn:
        """Record a request as a turn of the conversation that its prompt continues, or as the first turn of a new one.

        `block_hashes`: hashes of the prompt's blocks, each of which covers all blocks before it. The first `hit_blocks`
        blocks were cached.
        """
        prompt_blocks = len(block_hashes)
        self.clock += prompt_blocks
        previous_turn = self._take_previous_turn(block_hashes)
        if previous_turn is not None:
            turn = self._continue_turn(previous_turn, prompt_blocks)
        else:
            added_blocks = prompt_blocks - hit_blocks
            turn = ConversationTurn(prompt_blocks, shared_blocks=hit_blocks, added_blocks=added_blocks)
            if hit_blocks:
                self._record_shared_prefix(block_hashes[hit_blocks - 1], hit_blocks)
        if prompt_blocks > turn.shared_blocks:
            # The next turn is recognised by the second last block, because it may not repeat a prompt's last tokens.
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
        previous_turn.previous = None
        gap_blocks = self.clock - previous_turn.end_clock
        self.get_counts(previous_turn).record_return(gap_blocks)
        self._count_turn(previous_turn)
        return ConversationTurn(
            prompt_blocks,
            previous_turn.shared_blocks,
            added_blocks=max(0, prompt_blocks - previous_turn.prompt_blocks),
            turn_count=previous_turn.turn_count + 1,
            previous=previous_turn,
            gap_blocks=gap_blocks,
        )

    def _record_shared_prefix(self, block_hash: int, prefix_blocks: int) -> None:
        """Record that a new conversation begins with a shared prefix. `block_hash`: hash of the prefix's last block."""
        prefix_turn = self._shared_prefixes.get(block_hash)
        if prefix_turn is None:
            prefix_turn = ConversationTurn(prefix_blocks, 0, added_blocks=prefix_blocks, is_shared_prefix=True)
        else:
            prefix_turn.gap_blocks = self.clock - prefix_turn.end_clock
            self.get_counts(prefix_turn).record_return(prefix_turn.gap_blocks)
            prefix_turn.turn_count += 1
        prefix_turn.end_clock = self.clock
        self.get_counts(prefix_turn).record_turn()
        self._shared_prefixes[block_hash] = prefix_turn

    def end_turn(self, turn: ConversationTurn) -> None:
        """Record that a request is over: its conversation may return from now on."""
        turn.end_clock = self.clock
        if turn.continuation_hash is None:
            self.get_counts(turn).record_turn()
            return
        self._uncounted_turns[turn] = None
        self._count_overdue_turns()
        self._last_turns[turn.continuation_hash] = turn

    def _count_overdue_turns(self) -> None:
        """Count the turns that ended so long ago that they are assumed not to return."""
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

    def touch_shared_prefix(self, block_hash: int, last_use: int) -> ConversationTurn | None:
        """Record that the shared prefix which ends with this block was used at clock `last_use`, and return it.

        Returns None if no shared prefix ends there.
        """
        prefix_turn = self._shared_prefixes.get(block_hash)
        if prefix_turn is not None:
            prefix_turn.end_clock = max(prefix_turn.end_clock, last_use)
        return prefix_turn

    def classify_turn(self, turn: ConversationTurn) -> TurnClass:
        """Return the class of a turn. Turns of one class are expected to return equally often, after equal gaps."""
        added_step = min(_ADDED_STEP_MAX, (turn.added_blocks // self._blocks_per_256_tokens).bit_length() // 2)
        return TurnClass(turn.is_shared_prefix, min(turn.turn_count, _TURNS_MAX), added_step)

    def get_counts(self, turn: ConversationTurn) -> ReuseCounts:
        """Return the counts of a turn's class."""
        turn_class = self.classify_turn(turn)
        counts = self._counts_by_class.get(turn_class)
        if counts is None:
            counts = self._counts_by_class[turn_class] = ReuseCounts(self._capacity_blocks)
        return counts

    def compute_mean_reuse(self) -> MeanReuse:
        """Return how often turns of all classes return, and after how long. Computed anew only after a new prompt."""
        if self._mean_reuse_clock != self.clock and self._counts_by_class:
            all_counts = self._counts_by_class.values()
            return_count = sum(counts.return_count for counts in all_counts)
            self._mean_reuse = MeanReuse(
                return_share=min(1.0, return_count / sum(counts.turn_count for counts in all_counts)),
                gap_log2=sum(counts.gap_log2_sum for counts in all_counts) / return_count,
            )
            self._mean_reuse_clock = self.clock
        return self._mean_reuse

    def estimate_gap_log2(self, turn: ConversationTurn) -> float:
        """Return log2 of the gap after which this turn is expected to return."""
        class_gap_log2 = self.get_counts(turn).mean_gap_log2
        return class_gap_log2 if turn.gap_blocks is None else (class_gap_log2 + math.log2(max(1, turn.gap_blocks))) / 2
