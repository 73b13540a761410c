"""Requests that were answered, and which request waited for the end of which. No I/O.

A turn of a conversation waits for the turn before it. Requests under one session's or user's name wait for each other
if they never overlapped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from options.bounded_dict import BoundedDict


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
    """Number that identifies the prompt's request."""
    tokens: int
    digest: int
    """Digest of all tokens of the prompt."""


class PromptEnds:
    """Ends of the last `max_prompts` prompts, to find the earlier request that a new request continues."""

    def __init__(self, max_prompts: int) -> None:
        self._end_by_block: BoundedDict[int, PromptEnd] = BoundedDict(max_prompts)
        """The latest prompt that ends after each last full block, by its digest; the oldest is dropped first."""

    def add(self, end: PromptEnd, block_ids: Sequence[int], full_block_count: int) -> None:
        """Add the end of a prompt, unless it is shorter than a block.

        `block_ids`: digests of its blocks. The prompt fills the first `full_block_count` of them.
        """
        if full_block_count:
            self._end_by_block[block_ids[full_block_count - 1]] = end

    def find_continued(self, block_ids: Sequence[int], is_prefix: Callable[[PromptEnd], bool]) -> int | None:
        """Return the serial number of the request with the longest prompt that begins a new one; None if none does.

        `block_ids`: digests of the blocks of the new prompt. `is_prefix` returns whether the new prompt begins with all
        tokens of an earlier one. A shared block does not prove that: the earlier prompt may have a partial block after
        it, which differs.
        """
        candidates = (self._end_by_block[block] for block in reversed(block_ids) if block in self._end_by_block)
        return next((earlier.serial for earlier in candidates if is_prefix(earlier)), None)


def find_predecessors(requests: Sequence[ObservedRequest]) -> list[int | None]:
    """Return for each request the index of the earlier request after which the client sent it; None if there is none.

    `requests` are in the order of arrival. A request waited for the one that it continues, if that had ended before it
    arrived. Else both of them waited for the same request.
    """
    index_by_serial = {request.serial: i for i, request in enumerate(requests)}
    named_predecessors = _find_named_predecessors(requests)
    predecessors: list[int | None] = []
    for i, request in enumerate(requests):
        predecessor = named_predecessors.get(i)
        if predecessor is None and request.continues is not None:
            predecessor = index_by_serial.get(request.continues)
        while predecessor is not None and not _ended_before(requests[predecessor], request):
            predecessor = predecessors[predecessor]
        predecessors.append(predecessor)
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
