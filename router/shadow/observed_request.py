"""Requests that were answered, and which request waited for the end of which. No I/O.

A turn of a conversation waits for the turn before it. Requests under one session's or user's name wait for each other
if they never overlapped. Conversations without names wait for each other if a fixed number of users seems to hold them,
one after the other (`_is_closed_loop`).
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec

GAPS_MIN = 20
"""Fewest gaps between two conversations that prove anything."""
GAP_SHARE_MAX = 0.3
"""Longest mean gap between two conversations of a user, as a share of a conversation's length."""
BALANCE_SPREAD_MAX = 0.5
"""Largest variance of begins minus ends in short intervals, relative to begins and ends by chance."""
STEADY_BALANCE_SPREAD_MAX, STEADY_SHARE = 0.7, 0.6
"""`BALANCE_SPREAD_MAX` for a steady number of open conversations, and the share of users below which it is steady."""
CLOCK_SPREAD_MAX = 1.25
"""Largest variance of gaps, relative to that of the times between two begins of a user."""
INTERVALS_MIN = 4


class ObservedRequest(msgspec.Struct):
    """A request that `router shadow` saw, with what is known of its answer. All times are seconds of one clock."""

    serial: int
    arrival_s: float
    block_ids: array[int]
    """Digest of each block of the prompt, a partial last one included; equal for equal prefixes."""
    prompt_tokens: int
    worker: str
    cached_tokens: int | None = None
    """Cached tokens of the prompt, by its answer or by the worker's events."""
    first_token_s: float | None = None
    """Time of the first token; None if it was not seen."""
    end_s: float | None = None
    output_tokens: int | None = None
    continues: int | None = None
    """Serial of the request that this one continues."""
    user: str | None = None
    """Session or user, if the client named one."""


class PromptEnd(NamedTuple):
    """The end of a prompt that a later one may continue."""

    serial: int
    tokens: int
    digest: int
    """Digest of all tokens of the prompt."""


class PrefixLinks:
    """Finds the earlier request that a request continues, among those with the last `max_prompts` prompts."""

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._end_by_block: OrderedDict[int, PromptEnd] = OrderedDict()
        """Each prompt by its last full block, the oldest first."""

    def follow(
        self, end: PromptEnd, block_ids: Sequence[int], full_blocks: int, is_prefix: Callable[[PromptEnd], bool]
    ) -> int | None:
        """Add a prompt, and return the serial of the request that it continues; None if there is none.

        `is_prefix` returns whether the prompt begins with all of an earlier one. Equal blocks do not show that, as an
        earlier prompt may go on behind its last full block.
        """
        earlier_ends = (self._end_by_block[block] for block in reversed(block_ids) if block in self._end_by_block)
        continued_serial = next((earlier.serial for earlier in earlier_ends if is_prefix(earlier)), None)
        if full_blocks:
            last_full_block = block_ids[full_blocks - 1]
            self._end_by_block[last_full_block] = end
            self._end_by_block.move_to_end(last_full_block)
            if len(self._end_by_block) > self._max_prompts:
                self._end_by_block.popitem(last=False)
        return continued_serial


class _Conversation(NamedTuple):
    """A conversation, with the indices of its first request and of the request that ended last."""

    first_index: int
    last_index: int
    begin_s: float
    end_s: float


def find_predecessors(requests: Sequence[ObservedRequest]) -> list[int | None]:
    """Return the index of the earlier request that each request waited for, until it ended; None if there is none.

    `requests` are in the order of arrival.
    """
    index_by_serial = {request.serial: i for i, request in enumerate(requests)}
    named_predecessors = _find_named_predecessors(requests)
    predecessors: list[int | None] = []
    for i, request in enumerate(requests):
        predecessor = named_predecessors.get(i)
        if predecessor is None and request.continues is not None:
            predecessor = index_by_serial.get(request.continues)
        while predecessor is not None and not _ended_before(requests[predecessor], request):
            predecessor = predecessors[predecessor]  # it did not wait for that one, but for the one before
        predecessors.append(predecessor)
    for previous, following in _pair_conversations(_group_conversations(requests, predecessors)):
        predecessors[following.first_index] = previous.last_index
    return predecessors


def _ended_before(earlier: ObservedRequest, following: ObservedRequest) -> bool:
    return earlier.end_s is not None and earlier.end_s <= following.arrival_s


def _find_named_predecessors(requests: Sequence[ObservedRequest]) -> dict[int, int]:
    """Return the index of the previous request of the same user, for users with requests that never overlap.

    Several clients may share a name. Then their requests overlap, and the name shows nothing.
    """
    indices_by_user: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        if request.user is not None:
            indices_by_user.setdefault(request.user, []).append(i)
    predecessors: dict[int, int] = {}
    for indices in indices_by_user.values():
        if all(_ended_before(requests[previous], requests[following]) for previous, following in pairwise(indices)):
            predecessors |= zip(indices[1:], indices)
    return predecessors


def _group_conversations(
    requests: Sequence[ObservedRequest], predecessors: Sequence[int | None]
) -> list[_Conversation]:
    """Return the conversations in the order in which they begin; none if the end of any request is unknown.

    `predecessors`: index of the previous request of the conversation, for each request; None for a first request.
    """
    conversations: dict[int, _Conversation] = {}
    """Conversations by the index of their first request."""
    first_indices: list[int] = []
    """Index of the first request of the conversation of each request."""
    for i, (request, predecessor) in enumerate(zip(requests, predecessors)):
        if request.end_s is None:
            return []
        first_index = i if predecessor is None else first_indices[predecessor]
        first_indices.append(first_index)
        if first_index == i:
            conversations[i] = _Conversation(i, last_index=i, begin_s=request.arrival_s, end_s=request.end_s)
        elif request.end_s > conversations[first_index].end_s:
            conversations[first_index] = conversations[first_index]._replace(last_index=i, end_s=request.end_s)
    return list(conversations.values())


def _pair_conversations(conversations: Sequence[_Conversation]) -> list[tuple[_Conversation, _Conversation]]:
    """Return pairs (conversation, next conversation of its user), if the users seem to be a fixed number.

    The user whose conversation ended first is assumed to begin the next one.
    """
    ended_conversations = deque(sorted(conversations, key=lambda conversation: conversation.end_s))
    pairs = []
    for conversation in conversations:
        if ended_conversations[0].end_s <= conversation.begin_s:
            pairs.append((ended_conversations.popleft(), conversation))
    return pairs if _is_closed_loop(conversations, pairs) else []


def _is_closed_loop(
    conversations: Sequence[_Conversation], pairs: Sequence[tuple[_Conversation, _Conversation]]
) -> bool:
    """Return whether a fixed number of users holds the conversations, and each begins the next soon after the last.

    Three facts show it. The gaps between conversations are short. The end of a conversation predicts when the next one
    begins better than the clock does. In short intervals as many conversations begin as end, which is not so by chance.
    """
    busy_from_s, busy_until_s = _find_busy_interval(conversations)
    gaps_s = [
        following.begin_s - previous.end_s
        for previous, following in pairs
        if busy_from_s <= previous.end_s and following.begin_s <= busy_until_s
    ]
    if len(gaps_s) < GAPS_MIN:
        return False
    gap_s = fmean(gaps_s)
    length_s = fmean(conversation.end_s - conversation.begin_s for conversation in conversations)
    user_count = max(len(conversations) - len(gaps_s), 1)
    begins_s = [conversation.begin_s for conversation in conversations]
    rounds_s = [following - begin for begin, following in zip(begins_s, begins_s[user_count:])]  # between a user's two
    follows_clock = len(rounds_s) > 1 and pvariance(gaps_s) > CLOCK_SPREAD_MAX * pvariance(rounds_s)
    if gap_s > GAP_SHARE_MAX * length_s or follows_clock:
        return False
    interval_s = min(max(3.0 * gap_s, length_s / 16), length_s / 3)
    spread = _measure_balance_spread(conversations, busy_from_s, busy_until_s, interval_s)
    # The number of conversations that are open by chance would vary by its square root.
    is_steady = gap_s / length_s * user_count**0.5 < STEADY_SHARE
    return spread < (STEADY_BALANCE_SPREAD_MAX if is_steady else BALANCE_SPREAD_MAX)


def _measure_balance_spread(
    conversations: Sequence[_Conversation], from_s: float, until_s: float, interval_s: float
) -> float:
    """Return the variance of begins minus ends in intervals, relative to that of begins and ends by chance."""
    interval_count = int((until_s - from_s) / interval_s)
    balance_by_interval = [0] * interval_count
    moment_count = 0
    for moment_s, change in _list_moments(conversations):
        interval = int((moment_s - from_s) / interval_s)
        if moment_s >= from_s and interval < interval_count:
            balance_by_interval[interval] += change
            moment_count += 1
    if interval_count < INTERVALS_MIN or not moment_count:
        return math.inf
    return pvariance(balance_by_interval) * interval_count / moment_count


def _find_busy_interval(conversations: Sequence[_Conversation]) -> tuple[float, float]:
    """Return the start and the end of the interval with nearly the largest number of open conversations."""
    open_count, moments = 0, []
    for moment_s, change in _list_moments(conversations):
        open_count += change
        moments.append((moment_s, open_count))
    busy_count = (1.0 - GAP_SHARE_MAX) * max((count for _, count in moments), default=0)
    busy_times_s = [moment_s for moment_s, count in moments if count >= busy_count]
    return (busy_times_s[0], busy_times_s[-1]) if busy_times_s else (0.0, 0.0)


def _list_moments(conversations: Sequence[_Conversation]) -> list[tuple[float, int]]:
    """Return (time, change of the number of open conversations) of each begin and end, in order of time."""
    begins = [(conversation.begin_s, 1) for conversation in conversations]
    return sorted(begins + [(conversation.end_s, -1) for conversation in conversations])
