"""Simulated requests: their blocks, arrival times and answer lengths. Pure values.

A block id stands for a whole prefix: ids are equal only where all tokens before are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRACE_BLOCK_SIZE = 512
"""Tokens of a block in Mooncake's traces. Traces with blocks of 64 tokens use every eighth id."""


@dataclass(slots=True)
class SimRequest:
    """One request of a trace, with ids of its prompt's blocks in place of tokens.

    Blocks have equal ids if they and all tokens before them are equal, so that a router and a cache see shared
    beginnings: prompts with the blocks 1 2 3 and 1 2 4 share two blocks.
    """

    index: int
    """Place of the request in its workload."""
    session: int
    """Number of the conversation that it belongs to."""
    arrival_s: float
    """When it arrives; if it follows another request, how long after that one's answer."""
    prompt_tokens: int
    output_tokens: int
    block_ids: list[int]
    """Id of each block of the prompt; the last block may be partial."""
    previous_index: int | None = None
    """Index of a request that must be answered before this one comes, as in a conversation; None if there is none."""
    block_size: int = TRACE_BLOCK_SIZE
    """Tokens of a block."""
    final_block_ids: list[int] = field(default_factory=list)
    """Ids of the full blocks that are cached after the answer.

    A trace has no ids of output blocks; a later prompt that repeats the output shows them. If the prompt had the blocks
    1 2 and the next one has 1 2 5 6, of which 5 lies within the output, they are 1 2 5.
    """

    @property
    def full_block_count(self) -> int:
        return self.prompt_tokens // self.block_size


@dataclass(slots=True)
class Workload:
    """Requests of one trace."""

    name: str
    requests: list[SimRequest]
    description: str
    working_set_blocks: int = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.requests[0].block_size if self.requests else TRACE_BLOCK_SIZE
