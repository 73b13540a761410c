"""Transfers as the step loop sees them: of an engine that has no peers, and the base of those with peers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future

from engine.transfer.settings import TransferStats
from engine.types import Request


class Transfers:
    """Pulls that requests wait for, and copies of blocks between steps. All for the thread of the steps.

    An engine without `--kv-transfer` has these, which never move a block. `KVTransfers` moves blocks.
    """

    stats: TransferStats | None = None

    @property
    def wake_sockets(self) -> Sequence[socket.socket]:
        """Sockets that are readable once there is something to copy."""
        return ()

    @property
    def has_copies(self) -> bool:
        """Whether `copy_blocks` has something to do."""
        return False

    def copy_blocks(self) -> None:
        """Copy blocks that peers have asked for out, and blocks that peers have sent in. No step may be in flight."""

    def start_pull(self, request: Request) -> Future[None] | None:
        """Pull what the cache lacks of a prompt. Returns what is done when the request need wait no longer.

        None if there is nothing to wait for. However a pull ends, the request can be queued then.
        """
        return None

    def stop_waiting(self, request_id: str) -> None:
        """A request waits for its pull no more. The pull ends when nobody does."""

    def abandon_pulls(self) -> None:
        """Store nothing more of what is under way: the cache was reset."""

    def change_weights(self, path: str | None) -> None:
        """The weights of this folder, or None: of the last one, were loaded."""

    def close(self) -> None:
        """End all transfers. Idempotent."""
