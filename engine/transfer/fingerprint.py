"""Fingerprints of engines: KV may move between two engines of equal weights, cache layout and arithmetic.

Weights are told apart by samples of their files: two fine-tunes of one model have the same shapes, and reading all
bytes would take minutes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FINGERPRINT_BYTES = 16
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 4096


def compute_fingerprint(folder: Path, facts: tuple[object, ...]) -> bytes:
    """Return a digest of `facts`, and of the model's configuration and samples of the weights in `folder`."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=FINGERPRINT_BYTES)
    config_path = folder / "config.json"
    if config_path.is_file():
        digest.update(config_path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        _add_samples(digest, path)
    return digest.digest()


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    """Add a file's size and evenly spaced parts of the file, its last bytes included."""
    file_bytes = path.stat().st_size
    digest.update(file_bytes.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(SAMPLES_PER_FILE + 1):
            file.seek(max(0, file_bytes - SAMPLE_BYTES) * sample // SAMPLES_PER_FILE)
            digest.update(file.read(SAMPLE_BYTES))
