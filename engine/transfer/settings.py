"""Settings, bounds and counters of both sides of transfers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.transfer.messages import FAILURE_REASONS

BATCH_BYTES_MAX = 8 << 20
"""Contents of blocks in one message; a larger block goes alone."""
BATCH_BLOCKS_MAX = 4096
HASHES_MAX = 1 << 18
"""Blocks of one prompt that a source looks up."""
GB_S = 0.5
"""Rate of a pull between engines on GPUs, in 1e9 bytes a second: one thread on each side hashes all bytes."""
CPU_GB_S = 0.12
"""Rate of a pull between engines on CPUs, where threads that hash and copy share the cores of the steps."""
CONNECT_S_MAX = 2.0
"""Seconds to look a name up, again for a connection, and again for its greeting."""


@dataclass(slots=True, kw_only=True)
class TransferSettings:
    """Settings of transfers. They are fixed, but for the fingerprint, which changes with the weights."""

    fleet_key: bytes
    """Key that all engines and routers of the fleet have."""
    timeout_s: float
    """Longest that a request waits for its pull."""
    block_bytes_by_kind: tuple[int, ...]
    """Bytes of a block for bounds, statistics and simulated times. A simulated block has no content."""
    fingerprint: bytes
    """Digest of the loaded weights and of the cache's layout. Engines with equal digests exchange blocks."""
    gb_s: float = GB_S
    """Rate at which peers get blocks from this engine, in 1e9 bytes a second. Routers read it."""


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
