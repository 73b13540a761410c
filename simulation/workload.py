"""Requests as a simulation plays them: which blocks each has, when it comes, how long its answer is. Pure values.

A block id names a whole prefix (ids are unique to what came before). Output blocks become known when a later request
continues its predecessor: they are assigned once, so that every placement sees the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TRACE_BLOCK_SIZE = 512
"""Tokens of a simulated cache block of a trace: Mooncake's; 64-token traces are coarsened to it exactly, by every
eighth id."""


@dataclass(slots=True)
class SimRequest:
    """One request of a trace. `ids` has one id a block of the prompt, a partial last one included."""

    index: int
    session: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: list[int]
    previous_index: int | None = None
    """Closed loop: sent `arrival_s` seconds (think time) after request `after` was answered."""
    block_size: int = TRACE_BLOCK_SIZE
    """Tokens of a block."""
    final_block_ids: list[int] = field(default_factory=list)
    """The full blocks of prompt and output, as far as a later request shows what the output's are called."""

    @property
    def full_block_count(self) -> int:
        return self.prompt_tokens // self.block_size


@dataclass(slots=True)
class Workload:
    """A trace, ready to be scaled. `speed` multiplies the arrival rate of what is not closed loop."""

    name: str
    requests: list[SimRequest]
    description: str
    working_set_blocks: int = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.requests[0].block_size if self.requests else TRACE_BLOCK_SIZE

    def iter_arrivals(self, speed: float) -> Iterator[tuple[float, SimRequest]]:
        """(time, request) of everything that does not wait for another."""
        for request in self.requests:
            if request.previous_index is None:
                yield request.arrival_s / speed, request
