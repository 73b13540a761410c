"""Transfers of KV between simulated workers. Each worker has one link out and one link in, which transfers share.

A transfer moves at the smaller of its equal shares of both links, after a fixed time. Pure: the caller has the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Speed of the links between workers."""

    tokens_per_s: float
    """Tokens of KV that a link moves in a second."""
    floor_s: float = 0.005
    """Time before the first token moves."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """Tokens of KV that move from one worker to another."""

    source: int
    """Number of the worker from which the tokens move."""
    destination: int
    remaining_tokens: float
    on_end: Callable[[], None]
    rate: float = 0.0
    """Tokens in a second, at the present shares of both links."""


@dataclass(slots=True)
class Links:
    """Transfers of KV between workers, which share the workers' links. The caller calls `advance` at `next_end_s()`."""

    tokens_per_s: float
    _transfers: list[_Transfer] = field(default_factory=list)
    _updated_s: float = 0.0

    def start(self, source: int, destination: int, tokens: int, now: float, on_end: Callable[[], None]) -> None:
        """Begin a transfer; `advance` calls `on_end` when all tokens have moved."""
        self._move(now)
        self._transfers.append(_Transfer(source, destination, tokens, on_end))
        self._share_links()

    def advance(self, now: float) -> None:
        """End the transfers that are complete, but for rounding, and call their `on_end`."""
        self._move(now)
        ended_transfers = [transfer for transfer in self._transfers if transfer.remaining_tokens < 1e-3]
        self._transfers = [transfer for transfer in self._transfers if transfer.remaining_tokens >= 1e-3]
        self._share_links()
        for transfer in ended_transfers:
            transfer.on_end()

    def next_end_s(self) -> float | None:
        """Return when the next transfer ends; None while there is none."""
        return min(
            (self._updated_s + transfer.remaining_tokens / transfer.rate for transfer in self._transfers), default=None
        )

    def _move(self, now: float) -> None:
        """Move the tokens that all transfers have moved since the last call, at the rates since then."""
        for transfer in self._transfers:
            transfer.remaining_tokens -= transfer.rate * (now - self._updated_s)
        self._updated_s = now

    def _share_links(self) -> None:
        """Set the rate of each transfer: the smaller of its equal shares of the link out and the link in."""
        outgoing = Counter(transfer.source for transfer in self._transfers)
        incoming = Counter(transfer.destination for transfer in self._transfers)
        for transfer in self._transfers:
            transfer.rate = self.tokens_per_s / max(outgoing[transfer.source], incoming[transfer.destination])
