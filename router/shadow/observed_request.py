"""A request that was seen, which one it goes on from, and whose end it waited for. No I/O.

Owns how users are recognised. A turn waits for the turn before it. Under a session's or user's name one thing comes
after the other. Without names, a fixed number of users shows in when conversations begin: soon after others are over,
so that what begins and what ends cancel out (`is_closed_loop`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec

PAIRS_MIN = 20
"""Fewest pairs of a conversation's end and a following begin that prove anything."""
GAP_SHARE_MAX = 0.3
"""Longest mean gap between two conversations of a user, as a share of a conversation's length."""
SPREAD_MAX = 0.5
"""Largest variance of begins minus ends in short intervals, relative to begins and ends by chance."""
SPREAD_STEADY_MAX, STEADY = 0.7, 0.6
"""`SPREAD_MAX` for a nearly constant number of open conversations, and the bound below which it counts as such."""
CLOCK_SPREAD_MAX = 1.25
"""Largest variance of gaps, relative to that of the times between two begins of a user."""


class ObservedRequest(msgspec.Struct):
    """A request that was answered. All times are seconds of one clock."""

    serial: int
    arrival_s: float
    block_ids: array[int]
    """Digest of each block of the prompt, a partial last one included; equal for equal prefixes."""
    prompt_tokens: int
    worker: str
    cached_tokens: int | None = None
    """Cached tokens of the prompt, by its answer or by the worker's events."""
    first_token_s: float | None = None
    """Time of the first token; None where it was not seen."""
    end_s: float | None = None
    output_tokens: int | None = None
    continues: int | None = None
    """Serial of the request that this one continues."""
    user: str | None = None
    """Session or user, where the client named one."""


class PromptEnd(NamedTuple):
    """The end of a prompt that a later one may continue."""

    serial: int
    tokens: int
    digest: int
    """Digest of all of its tokens."""


class PrefixLinks:
    """The last `max_prompts` prompts by their last full block, to find the one that a request continues."""

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._end_by_block: OrderedDict[int, PromptEnd] = OrderedDict()

    def follow(
        self, end: PromptEnd, block_ids: Sequence[int], full_blocks: int, is_prefix: Callable[[PromptEnd], bool]
    ) -> int | None:
        """Return the serial of the request that this one continues, if any, and remember this one. `is_prefix(end)`:
        whether the prompt begins with all of that prompt, as blocks do not show what follows the last full one."""
        predecessor = None
        for block in reversed(block_ids):
            earlier = self._end_by_block.get(block)
            if earlier is not None and is_prefix(earlier):
                predecessor = earlier.serial
                break
        if full_blocks:
            self._end_by_block[block_ids[full_blocks - 1]] = end
            self._end_by_block.move_to_end(block_ids[full_blocks - 1])
            if len(self._end_by_block) > self._max_prompts:
                self._end_by_block.popitem(last=False)
        return predecessor


def find_predecessors(requests: Sequence[ObservedRequest]) -> list[int | None]:
    """For each of `requests`, in the order of arrival, the place of the one whose end it waited for; None: it came
    when it came."""
    position: Mapping[int, int] = {request.serial: i for i, request in enumerate(requests)}
    last = _sequential_predecessors(requests)
    predecessors: list[int | None] = []
    for i, request in enumerate(requests):
        predecessor = last.get(i, position.get(request.continues) if request.continues is not None else None)
        while predecessor is not None and not _ended_before(requests[predecessor], request):
            predecessor = predecessors[predecessor]  # beside a turn: after what that one waited for
        predecessors.append(predecessor)
    for first, previous_last in _next_conversations(requests, predecessors):
        predecessors[first] = previous_last
    return predecessors


def _ended_before(earlier: ObservedRequest, following: ObservedRequest) -> bool:
    return earlier.end_s is not None and earlier.end_s <= following.arrival_s


def _sequential_predecessors(requests: Sequence[ObservedRequest]) -> dict[int, int]:
    """place -> that of the last one of the same name, of names under which nothing ever came before an end."""
    last: dict[str, int] = {}
    pairs_by_user: dict[str, dict[int, int] | None] = {}
    for i, request in enumerate(requests):
        if request.user is None:
            continue
        before, pairs = last.get(request.user), pairs_by_user.setdefault(request.user, {})
        if before is not None and pairs is not None:
            if _ended_before(requests[before], request):
                pairs[i] = before
            else:
                pairs_by_user[request.user] = None
        last[request.user] = i
    return {i: before for pairs in pairs_by_user.values() if pairs for i, before in pairs.items()}


def _next_conversations(
    requests: Sequence[ObservedRequest], predecessors: Sequence[int | None]
) -> list[tuple[int, int]]:
    """(first of a conversation, last of the one that its user held before), where users hold one after the other; who
    ended first is taken to begin first."""
    root: list[int] = []
    last_by_first: dict[int, int] = {}
    """first of a conversation -> the one of it that ended last."""
    for i, before in enumerate(predecessors):
        root.append(i if before is None else root[before])
        if requests[i].end_s is None:
            return []
        last_so_far = last_by_first.setdefault(root[i], i)
        if _end(requests[i]) > _end(requests[last_so_far]):
            last_by_first[root[i]] = i
    ends = deque(sorted(last_by_first.values(), key=lambda last: _end(requests[last])))
    pairs = []
    for first in last_by_first:  # in the order of arrival
        if _end(requests[ends[0]]) <= requests[first].arrival_s:
            pairs.append((first, ends.popleft()))
    talks = [(requests[first].arrival_s, _end(requests[last])) for first, last in last_by_first.items()]
    return (
        pairs
        if is_closed_loop(talks, [(_end(requests[last]), requests[first].arrival_s) for first, last in pairs])
        else []
    )


def _end(request: ObservedRequest) -> float:
    assert request.end_s is not None
    return request.end_s


def is_closed_loop(talks: Sequence[tuple[float, float]], pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether conversations come from a fixed number of users, each of whom begins one soon after the last.

    `talks`: (begin, end) of each, in the order of begins. `pairs`: (end, begin) of an end and the begin after it.
    Three facts show users: the gaps between conversations are short; as many begin as end in short intervals, which
    is not so where both come by chance; and an end predicts the next begin better than the clock does."""
    since_s, until_s = _busy_interval(talks)
    pairs = [(end, begin) for end, begin in pairs if since_s <= end and begin <= until_s]
    if len(pairs) < PAIRS_MIN:
        return False
    length_s = fmean(end - begin for begin, end in talks)
    gaps = [begin - end for end, begin in pairs]
    if fmean(gaps) > GAP_SHARE_MAX * length_s:
        return False
    starts, users = [begin for begin, _ in talks], max(len(talks) - len(pairs), 1)
    rounds = [following - begin for begin, following in zip(starts, starts[users:])]
    if len(rounds) > 1 and pvariance(gaps) > CLOCK_SPREAD_MAX * pvariance(rounds):
        return False  # they come by the clock
    interval_s = min(max(3.0 * fmean(gaps), length_s / 16), length_s / 3)
    interval_count = int((until_s - since_s) / interval_s)
    if interval_count < 4:
        return False
    balance, events = [0] * interval_count, 0
    for moments, sign in ((starts, 1), ([end for _, end in talks], -1)):
        for at_s in moments:
            k = int((at_s - since_s) / interval_s)
            if at_s >= since_s and k < interval_count:
                balance[k] += sign
                events += 1
    is_steady = fmean(gaps) / length_s * users**0.5 < STEADY  # a number open by chance varies by its root
    return pvariance(balance) < (SPREAD_STEADY_MAX if is_steady else SPREAD_MAX) * events / interval_count


def _busy_interval(talks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the interval in which nearly the largest number of conversations was open: users come and go."""
    moments = sorted([(begin, 1) for begin, _ in talks] + [(end, -1) for _, end in talks])
    number, numbers = 0, []
    for _, change in moments:
        number += change
        numbers.append(number)
    least = (1.0 - GAP_SHARE_MAX) * max(numbers, default=0)
    busy_times = [at_s for (at_s, _), number in zip(moments, numbers) if number >= least]
    return (busy_times[0], busy_times[-1]) if busy_times else (0.0, 0.0)
