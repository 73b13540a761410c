"""How much of a prompt one holder could reuse: the largest p at which every group can resume.

Owns the arithmetic of full attention, sliding windows, chunks and state checkpoints over the blocks of one holder.
Refuses to know events and names. Follows what vLLM's KV cache coordinator accepts as a hit; positions are token
counts from the start of the prompt, intervals half-open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from reference.groups import Group
from reference.holder import Holder
from router.index.protocol import TIERS, Match

DEFAULT_CUT = 16
"""Block length assumed for pins on a holder that has announced nothing and declared nothing."""

Has = Callable[[Group, int, int], bool]
"""(group, position, length): does the group hold the block [position - length, position)?"""


class Pins:
    """Prompts in flight to one holder, as digests of the boundaries they will leave behind, counted."""

    def __init__(self) -> None:
        self.boundaries: dict[int, int] = {}
        self.checkpoints: dict[int, int] = {}

    def add(self, boundaries: Iterable[int], checkpoint: int | None, count: int) -> None:
        """Add (count = 1) or take back (count = -1) one prompt."""
        for key in boundaries:
            _count(self.boundaries, key, count)
        if checkpoint is not None:
            _count(self.checkpoints, checkpoint, count)

    def __bool__(self) -> bool:
        return bool(self.boundaries or self.checkpoints)


def _count(counts: dict[int, int], key: int, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if counts[key] == 0:
        del counts[key]


def cut_of(holder: Holder) -> int:
    """The block length at which a prompt in flight to `holder` will be resumable: its full attention's smallest."""
    lengths = [length for group in holder.demanding_groups() if group.role == "full" for length in group.lengths]
    block_sizes = [group.block_size for group in holder.demanding_groups() if group.block_size]
    return min(lengths) if lengths else min(block_sizes, default=DEFAULT_CUT)


def match_holder(holder: Holder, pins: Pins, prefixes: Sequence[int]) -> Match | None:
    """What `holder` can reuse; None where that is nothing. `prefixes[p]` is the digest of [0, p), p = 0..L."""
    limit = len(prefixes) - 2  # the last token of a prompt is always computed
    groups = holder.demanding_groups()
    blocks = holder.blocks

    def has_on(tiers: Collection[int]) -> Has:
        def has(group: Group, position: int, length: int) -> bool:
            held = blocks.get((prefixes[position], length))
            return held is not None and any((group.key, tier) in held for tier in tiers)

        return has

    anywhere = has_on(range(len(TIERS)))
    tokens = _longest_usable(groups, anywhere, limit, ()) if blocks else 0
    pinned_tokens = tokens
    if pins and limit > 0:
        pinned_tokens = max(tokens, _usable_pinned(holder, groups, pins, anywhere, prefixes))
    if not tokens and not pinned_tokens:
        return None
    gpu = _longest_usable(groups, has_on((0,)), tokens, ()) if tokens else 0
    return Match(holder.id, tokens, gpu, _tokens_by_tier(groups, has_on, tokens, gpu), pinned_tokens)


def _usable_pinned(holder: Holder, groups: list[Group], pins: Pins, resident: Has, prefixes: Sequence[int]) -> int:
    def has(group: Group, position: int, length: int) -> bool:
        if resident(group, position, length):
            return True
        if group.role == "state":
            return prefixes[position] in pins.checkpoints
        return not group.is_sparse and prefixes[position] in pins.boundaries

    def lands(group: Group, position: int) -> bool:
        return prefixes[position] in pins.checkpoints

    cut = cut_of(holder)
    demanding = groups or [Group(None)]
    return _longest_usable(demanding, has, len(prefixes) - 2, (cut,), lands)


def _longest_usable(
    groups: list[Group],
    has: Has,
    limit: int,
    cuts: tuple[int, ...],
    lands: Callable[[Group, int], bool] | None = None,
) -> int:
    """Largest p <= limit at which every group can resume, 0 where there is none.

    `cuts` are block lengths to try besides those a group holds; `lands(group, p)` says that a sparse window group will
    be able to resume at p whatever it holds.
    """
    full = [group for group in groups if group.role == "full"]
    other_groups = [group for group in groups if group.role != "full"]
    candidates: set[int] | None = None
    for group in full:
        ends = _tiled_ends(group, has, limit, _lengths(group, cuts))
        candidates = ends if candidates is None else candidates & ends
    if candidates is None:
        candidates = _ends(other_groups, has, limit, cuts)
    for p in sorted(candidates, reverse=True):
        if p == 0 or all(_can_resume(group, has, p, _lengths(group, cuts), lands) for group in other_groups):
            return p
    return 0


def _lengths(group: Group, cuts: tuple[int, ...]) -> list[int]:
    return sorted({*group.lengths, *cuts})


def _tiled_ends(group: Group, has: Has, limit: int, lengths: list[int]) -> set[int]:
    """Every p <= limit for which blocks of the group tile [0, p)."""
    ends, frontier = {0}, [0]
    while frontier:
        start = frontier.pop()
        for length in lengths:
            end = start + length
            if end <= limit and end not in ends and has(group, end, length):
                ends.add(end)
                frontier.append(end)
    return ends


def _ends(groups: list[Group], has: Has, limit: int, cuts: tuple[int, ...]) -> set[int]:
    """Every boundary of any group, for models without full attention."""
    pairs = [(group, length) for group in groups for length in _lengths(group, cuts)]
    return {0} | {
        p for p in range(1, limit + 1) if any(length <= p and has(group, p, length) for group, length in pairs)
    }


def _can_resume(group: Group, has: Has, p: int, lengths: list[int], lands: Callable[[Group, int], bool] | None) -> bool:
    if group.role == "state":
        return any(length <= p and has(group, p, length) for length in lengths)
    assert group.window is not None, "a window group without a window has the role full"
    if group.is_sparse and lands is not None and lands(group, p):
        return True
    # The next token looks back window - 1 tokens; in a chunk, to the chunk's start.
    first = p - p % group.window if group.role == "chunk" else max(0, p - (group.window - 1))
    starts, frontier = {p}, [p]
    while frontier:
        end = frontier.pop()
        if end <= first:
            return True
        for length in lengths:
            start = end - length
            if start >= 0 and start not in starts and has(group, end, length):
                starts.add(start)
                frontier.append(start)
    return False


def _tokens_by_tier(
    groups: list[Group], has_on: Callable[[Collection[int]], Has], tokens: int, gpu: int
) -> tuple[int, ...]:
    """Tokens of [0, tokens) by the fastest tier that holds them, judged by the first full-attention group.

    Where blocks of several lengths tile the prefix, the path is walked back from `tokens`, shortest block first.
    """
    counts = [0] * len(TIERS)
    full = [group for group in groups if group.role == "full"]
    if gpu == tokens or not full:
        counts[0], counts[1] = gpu, tokens - gpu
        return tuple(counts)
    group, lengths = full[0], sorted(full[0].lengths)
    per_tier = [has_on((tier,)) for tier in range(len(TIERS))]
    ends = _tiled_ends(group, has_on(range(len(TIERS))), tokens, lengths)
    end = tokens
    while end:
        length, tier = next(
            (length, tier)
            for length in lengths
            if end - length in ends
            for tier in range(len(TIERS))
            if per_tier[tier](group, end, length)
        )
        counts[tier] += length
        end -= length
    return tuple(counts)
