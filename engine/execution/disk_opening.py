"""Whether a disk cache can be used with these flags and this model, and what its content depends on."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from engine.cache.spec import CacheSpec
from engine.config import EngineConfig, __version__
from engine.execution.disk_files import DiskFiles
from options import ConfigError

SAMPLED_BYTES = 1024
"""Of each tensor, at its beginning, its middle and its end."""


def check_disk_flags(config: EngineConfig) -> None:
    """Raises ConfigError for what can be known before a model is loaded."""
    if config.disk_cache is None:
        return
    flag = f"--disk-cache {config.disk_cache}"
    if not config.disk_cache:
        raise ConfigError("--disk-cache: an empty name; name a folder, or leave it out")
    if config.host_cache_memory is None:
        raise ConfigError(f"{flag}: needs --host-cache-memory, through which blocks come and go")
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"{flag}: not with --tensor-parallel-size {config.tensor_parallel_size}")


def open_disk(
    config: EngineConfig, spec: CacheSpec, folder: Path, *, dtype: torch.dtype, device: torch.device,
    max_model_len: int, weights: dict[str, object],
) -> DiskFiles:  # fmt: skip
    """Take the folder and find what is there of this very model. Raises ConfigError.

    `weights`: what `weights_fingerprint` said before the weights were read.
    """
    assert config.disk_cache is not None
    if len(spec.groups) > 1 or spec.groups[0].sliding_window is not None or spec.state is not None:
        raise ConfigError(
            f"--disk-cache {config.disk_cache}: for models whose layers are all of full attention; this one has "
            "recurrent states or sliding windows"
        )
    fingerprint = kv_fingerprint(config, spec, folder, dtype=dtype, device=device, max_model_len=max_model_len)
    if fingerprint["weights"] != weights:
        raise ConfigError(f"--disk-cache {config.disk_cache}: {folder} has changed while it was loaded; start again")
    place = Path(config.disk_cache).expanduser()
    return DiskFiles(place, fingerprint, config.disk_cache_size, spec.block_bytes(0), spec.block_size)


def kv_fingerprint(
    config: EngineConfig, spec: CacheSpec, folder: Path, *, dtype: torch.dtype, device: torch.device,
    max_model_len: int,
) -> dict[str, object]:  # fmt: skip
    """Everything that decides what KV a token has and how it lies in a block; if any of it differs, so does this."""
    try:
        config_digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--disk-cache {config.disk_cache}: cannot read {folder}: {error}") from error
    group = spec.groups[0]
    return {
        "engine": __version__,
        "block_size": spec.block_size,
        "layers": list(group.layers),
        "kv_heads": group.num_kv_heads,
        "head_dim": group.head_dim,
        "dtype": str(dtype),
        "device": device.type,
        "byte_order": sys.byteorder,
        "attention_backend": config.attention_backend or "auto",
        "max_model_len": max_model_len,
        "config.json": config_digest,
        "weights": weights_fingerprint(folder),
    }


def weights_fingerprint(folder: Path) -> dict[str, object]:
    """By the name of each safetensors file. Raises ConfigError."""
    try:
        return {path.name: _of_weights(path) for path in sorted(folder.glob("*.safetensors"))}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--disk-cache: cannot read {folder}: {error}") from error


def _of_weights(path: Path) -> list[object]:
    """[bytes, time of the last change in ns, SHA-256 of the header and of samples of every tensor]."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        digest.update(length + header)
        start = 8 + len(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            for at in sorted({first, (first + end) // 2, max(first, end - SAMPLED_BYTES)}):
                file.seek(start + at)
                digest.update(file.read(min(SAMPLED_BYTES, end - at)))
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]
