"""Interface of transfers for the step loop, which an engine without peers uses as it is, and their counters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from engine.transfer.messages import FAILURE_REASONS
from engine.types import Request


class TransferStats(msgspec.Struct, kw_only=True):
    """Counters of the KV cache blocks that an engine has pulled from other engines, or sent to them, since its start.

    Each counter is written by one thread, and read by any.
    """

    pulls: int = 0
    """Number of pulls that have ended, also by a failure."""
    pull_s: float = 0.0
    """Seconds of these pulls, with the wait for their turn."""
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    missing_blocks: int = 0
    """Blocks that were to be pulled and were not stored: the source had evicted them, or this cache had no room."""
    failures: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    """Number of pulls that ended early, by reason, such as "timeout"."""
    sent_blocks: int = 0
    sent_bytes: int = 0
    refused_connections: int = 0
    """Connections of other engines that were closed: too many, a wrong key, invalid messages, or idle for too long."""


class Transfers:
    """Interface for the step loop to exchange cached KV blocks with other engines. This class exchanges none.

    A pull fetches the blocks of a prompt from a peer, while its requests wait. Blocks are copied out of the cache and
    into it between steps. Only the thread of the step loop calls the methods.
    """

    stats: TransferStats | None = None

    def watch(self, on_copies: Callable[[], None]) -> None:
        """Have `on_copies` called, on any thread, whenever there are new blocks to copy."""

    @property
    def has_copies(self) -> bool:
        """Whether there are blocks to copy."""
        return False

    def copy_blocks(self) -> None:
        """Copy blocks that peers want out of the cache, and received blocks into it. No step may be in flight."""

    def start_pull(self, request: Request) -> Future[None] | None:
        """Begin to pull the blocks of a prompt that the cache lacks. Return a future of the pull's end.

        The request is to be queued then, whether the pull succeeded or not. None: there is nothing to wait for.
        """
        return None

    def stop_waiting(self, request_id: str) -> None:
        """Record that a request no longer waits for its pull. A pull for which no request waits is abandoned."""

    def abandon_pulls(self) -> None:
        """End all pulls, and store nothing more of them, because the cache was reset."""

    def change_weights(self, path: str | None) -> None:
        """Record that the weights in the folder `path` were loaded; None: the last folder was loaded again."""

    def close(self) -> None:
        """End all transfers. A second call does nothing."""
