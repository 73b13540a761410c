"""Starts the exchange of cached blocks with other engines, with settings from the config, the model and the cache."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from engine.cache.kv_cache import KVCache
from engine.config import EngineConfig
from engine.transfer.block_exchange import BlockExchange, BlockMemory
from engine.transfer.service import KVTransfers
from engine.transfer.settings import CPU_GB_S, GB_S, TransferSettings
from engine.transfer.simulated_link import SimulatedLink
from options import ConfigError

DEFAULT_HOST = "127.0.0.1"
FINGERPRINT_BYTES = 16
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 4096


class _ModelFingerprint:
    """Computes what engines must have in common to use each other's KV: weights, cache layout and arithmetic."""

    def __init__(self, folder: Path, facts: tuple[object, ...]) -> None:
        """`folder`: folder of the loaded weights. `facts`: facts that the folder lacks, such as the cache's layout."""
        self._folder = folder
        self._facts = facts

    def compute(self, path: str | None) -> bytes:
        """Return a digest of the facts, the model's config, and samples of its weights, in which fine-tunes differ.

        `path`: folder of newly loaded weights; None: the last folder.
        """
        if path is not None:
            self._folder = Path(path)
        digest = hashlib.blake2b(repr(self._facts).encode(), digest_size=FINGERPRINT_BYTES)
        config_path = self._folder / "config.json"
        if config_path.is_file():
            digest.update(config_path.read_bytes())
        for weights_path in sorted(self._folder.glob("*.safetensors")):
            digest.update(weights_path.name.encode())
            _add_samples(digest, weights_path)
        return digest.digest()


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    """Add a file's size and evenly spaced parts of the file, its last bytes included."""
    file_bytes = path.stat().st_size
    digest.update(file_bytes.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(SAMPLES_PER_FILE + 1):
            file.seek(max(0, file_bytes - SAMPLE_BYTES) * sample // SAMPLES_PER_FILE)
            digest.update(file.read(SAMPLE_BYTES))


def start_transfers(
    config: EngineConfig,
    folder: Path,
    cache: KVCache,
    block_memory: BlockMemory | None,
    *,
    dtype: str,
    device: str,
    simulated_link: SimulatedLink | None,
) -> KVTransfers:
    """Start to exchange cached KV blocks with other engines, which connect to this one's --kv-transfer port.

    Only engines with equal weights, `dtype` and `device` exchange blocks. `folder`: checkpoint of the loaded model.
    `block_memory`: reads and writes the contents of the blocks of `cache`; None if a simulation does not know their
    size. `simulated_link`: network of a simulated engine, else None.

    Raises ConfigError for settings that exclude each other, and for an address that cannot be used.
    """
    transfer_config = config.kv_transfer
    if not config.enable_prefix_caching:
        raise ConfigError("--kv-transfer means nothing with --no-enable-prefix-caching")
    if block_memory is None:
        raise ConfigError("--kv-transfer: with --simulate SPEC must have kv_bytes_per_token")
    exchange = BlockExchange(cache, block_memory)
    kinds = range(len(cache.spec.block_bytes_by_kind()))
    content_bytes = tuple(exchange.get_block_bytes(kind) for kind in kinds)
    facts = (cache.spec, content_bytes, f"{dtype} on {device}", config.tensor_parallel_size, config.simulate)
    fingerprint = _ModelFingerprint(folder, facts)
    if simulated_link is None:
        block_bytes = content_bytes
        gb_s = CPU_GB_S if device == "cpu" else GB_S
    else:
        block_bytes = (simulated_link.block_bytes,) * len(kinds)
        gb_s = simulated_link.bytes_per_s / 1e9
    settings = TransferSettings(
        fleet_key=transfer_config.read_key(),
        timeout_s=transfer_config.timeout_s,
        block_bytes_by_kind=block_bytes,
        fingerprint=fingerprint.compute(None),
        gb_s=gb_s,
    )
    return KVTransfers(
        _listen(transfer_config.host or DEFAULT_HOST, transfer_config.port or 0),
        exchange,
        settings,
        compute_fingerprint=fingerprint.compute,
        link=simulated_link,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(f"--kv-transfer {port}: cannot listen on {host}:{port}: {error.strerror or error}") from error
