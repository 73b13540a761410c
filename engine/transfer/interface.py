"""Interface of transfers for the step loop, which an engine without peers uses as it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from engine.transfer.settings import TransferStats
from engine.types import Request


class Transfers:
    """Null object for an engine that moves no blocks to or from peers. `KVTransfers` moves blocks.

    A transfer has two parts: pulls, for which requests wait, and copies of blocks between steps. The thread of the
    steps calls all methods.
    """

    stats: TransferStats | None = None

    def watch(self, on_copies: Callable[[], None]) -> None:
        """Have `on_copies` called, on any thread, whenever there is something new to copy."""

    @property
    def has_copies(self) -> bool:
        """Whether there are blocks to copy for peers."""
        return False

    def copy_blocks(self) -> None:
        """Copy blocks that peers want out of the cache, and blocks that they have sent into it.

        No step may be in flight.
        """

    def start_pull(self, request: Request) -> Future[None] | None:
        """Begin to pull the blocks of a prompt that the cache lacks; return a future that ends when the pull does.

        The request is queued then, whether the pull succeeded or not. None: there is nothing to wait for.
        """
        return None

    def stop_waiting(self, request_id: str) -> None:
        """Record that a request no longer waits for its pull. A pull for which no request waits is abandoned."""

    def abandon_pulls(self) -> None:
        """End all pulls, and store nothing more of them, because the cache was reset."""

    def change_weights(self, path: str | None) -> None:
        """Record that the weights of the folder `path` were loaded; None: those of the last folder again."""

    def close(self) -> None:
        """End all transfers. Idempotent."""
