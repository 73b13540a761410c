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
    """A request to another load balancer that `router shadow` saw, and its answer. All times are in seconds."""

    serial: int
    """Number of the request, from 0 in the order in which they were seen."""
    arrival_s: float
    block_ids: array[int]
    """Digest of each block of the prompt, a partial last one included; equal for equal prefixes."""
    prompt_tokens: int
    worker: str
    """Id of the worker that answered."""
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


class RecordedPrompt(NamedTuple):
    """Length and digest of a prompt that a later one may continue."""

    serial: int
    """Number of the prompt's request."""
    tokens: int
    digest: int
    """Digest of all tokens of the prompt."""


class RecordedPrompts:
    """The last `max_prompts` prompts, to find the earlier turn of a conversation that a new prompt continues."""

    def __init__(self, max_prompts: int) -> None:
        self._prompt_by_last_block: BoundedDict[int, RecordedPrompt] = BoundedDict(max_prompts)
        """Digest of a prompt's last full block -> the latest prompt with that block. The oldest is dropped first."""

    def add(self, prompt: RecordedPrompt, block_ids: Sequence[int], full_block_count: int) -> None:
        """Add a prompt, unless it is shorter than a block.

        `block_ids`: digests of its blocks. The prompt fills the first `full_block_count` of them.
        """
        if full_block_count:
            last_full_block = block_ids[full_block_count - 1]
            self._prompt_by_last_block[last_full_block] = prompt

    def find_continued(self, block_ids: Sequence[int], is_prefix: Callable[[RecordedPrompt], bool]) -> int | None:
        """Return the serial number of the request with the longest prompt that begins a new one; None if none does.

        `block_ids`: digests of the blocks of the new prompt. `is_prefix` returns whether the new prompt begins with all
        tokens of an earlier one: with its last tokens too, which may fill only a part of a block.
        """
        for block in reversed(block_ids):
            earlier_prompt = self._prompt_by_last_block.get(block)
            if earlier_prompt is not None and is_prefix(earlier_prompt):
                return earlier_prompt.serial
        return None


def find_predecessors(requests: Sequence[ObservedRequest]) -> list[int | None]:
    """Return for each request the index of the earlier one that its client waited for, or None.

    `requests` are in the order of arrival. In a conversation, a client waits for the answer to the turn before. If that
    answer had not ended when the request arrived, the client waited for the same request as with that turn.
    """
    index_by_serial = {request.serial: i for i, request in enumerate(requests)}
    index_of_same_user = _find_previous_of_user(requests)
    predecessors: list[int | None] = []
    for i, request in enumerate(requests):
        predecessor = index_of_same_user.get(i)
        if predecessor is None and request.continues is not None:
            predecessor = index_by_serial.get(request.continues)
        while predecessor is not None and not _ended_before(requests[predecessor], request):
            predecessor = predecessors[predecessor]
        predecessors.append(predecessor)
    return predecessors


def _ended_before(earlier: ObservedRequest, following: ObservedRequest) -> bool:
    return earlier.end_s is not None and earlier.end_s <= following.arrival_s


def _find_previous_of_user(requests: Sequence[ObservedRequest]) -> dict[int, int]:
    """Map the index of each request to that of the user's previous request, for users with requests that never overlap.

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
