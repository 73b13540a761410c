"""Interface between the step loop and transfers, and the transfers of an engine that has no peers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.transfer.settings import TransferStats
from engine.types import Request


class Transfers(Protocol):
    """Pulls that requests wait for, and copies of blocks between steps. All for the thread of the steps."""

    @property
    def stats(self) -> TransferStats | None: ...

    @property
    def wake_sockets(self) -> Sequence[socket.socket]:
        """Sockets that are readable once there is something to copy."""

    @property
    def copies_arrival(self) -> Future[None]:
        """Done once there is something to copy."""

    @property
    def has_copies(self) -> bool:
        """Whether `copy_blocks` has something to do."""

    def copy_blocks(self) -> None:
        """Copy blocks that peers have asked for out, and blocks that peers have sent in. No step may be in flight."""

    def start_pull(self, request: Request) -> Future[None] | None:
        """Pull what the cache lacks of a prompt. Returns what is done when the request need wait no longer.

        None if there is nothing to wait for. However a pull ends, the request can be queued then.
        """

    def stop_waiting(self, request_id: str) -> None:
        """A request waits for its pull no more. The pull ends when nobody does."""

    def abandon_pulls(self) -> None:
        """Store nothing more of what is under way: the cache was reset."""

    def change_weights(self, path: str | None) -> None:
        """The weights of this folder, or None: of the last one, were loaded."""

    def close(self) -> None:
        """End all transfers. Idempotent."""


class NoTransfers:
    """Null object for block transfers: an engine without `--kv-transfer` neither gives nor pulls blocks."""

    stats = None
    wake_sockets: Sequence[socket.socket] = ()
    has_copies = False

    def __init__(self) -> None:
        self.copies_arrival: Future[None] = Future()

    def copy_blocks(self) -> None:
        pass

    def start_pull(self, request: Request) -> Future[None] | None:
        return None

    def stop_waiting(self, request_id: str) -> None:
        pass

    def abandon_pulls(self) -> None:
        pass

    def change_weights(self, path: str | None) -> None:
        pass

    def close(self) -> None:
        pass
