"""Simulated requests: their blocks, arrival times and answer lengths. Pure values.

A block id stands for a whole prefix: ids are equal only where all tokens before are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TRACE_BLOCK_SIZE = 512
"""Tokens of a block in Mooncake's traces. Traces with blocks of 64 tokens use every eighth id."""


@dataclass(slots=True)
class SimRequest:
    """Request of a trace. `block_ids` has one id for each block of the prompt, a partial last one included."""

    index: int
    session: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: list[int]
    previous_index: int | None = None
    """Index of the request that this one follows, `arrival_s` after its answer; None: `arrival_s` is absolute."""
    block_size: int = TRACE_BLOCK_SIZE
    """Tokens of a block."""
    final_block_ids: list[int] = field(default_factory=list)
    """Full blocks of prompt and output, as far as a later request shows the ids of output blocks."""

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

    def iter_arrivals(self, speed: float) -> Iterator[tuple[float, SimRequest]]:
        """Yield (arrival time, request) of the requests that follow no other, `speed` times as fast as in the trace."""
        for request in self.requests:
            if request.previous_index is None:
                yield request.arrival_s / speed, request
