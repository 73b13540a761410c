"""Fingerprint of a model: what engines must have in common to use each other's KV."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

log = logging.getLogger("engine.transfer")

DIGEST_BYTES = 16
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 4096


class ModelFingerprint:
    """Digest of a model's weights, cache layout and arithmetic. Engines with equal digests exchange blocks."""

    def __init__(self, folder: Path, facts: tuple[object, ...]) -> None:
        """`folder`: folder of the loaded weights. `facts`: facts that the folder lacks, such as the cache's layout."""
        self._folder = folder
        self._facts = facts
        self.digest = self._compute_digest()

    def update(self, path: str | None) -> None:
        """Compute the digest of newly loaded weights. `path`: their folder; None: the last folder.

        If the files cannot be read, the digest is a random one, which no other engine has.
        """
        if path is not None:
            self._folder = Path(path)
        try:
            self.digest = self._compute_digest()
        except OSError as error:
            log.warning("no blocks move until the weights change again, because their files cannot be read: %s", error)
            self.digest = os.urandom(DIGEST_BYTES)

    def _compute_digest(self) -> bytes:
        """Return a digest of the facts, the model's config, and samples of its weights, in which fine-tunes differ."""
        digest = hashlib.blake2b(repr(self._facts).encode(), digest_size=DIGEST_BYTES)
        config_path = self._folder / "config.json"
        if config_path.is_file():
            digest.update(config_path.read_bytes())
        for weights_path in sorted(self._folder.glob("*.safetensors")):
            file_bytes = weights_path.stat().st_size
            digest.update(weights_path.name.encode())
            digest.update(file_bytes.to_bytes(8, "little"))
            with weights_path.open("rb") as file:
                for sample in range(SAMPLES_PER_FILE + 1):  # evenly spaced, the last bytes included
                    file.seek(max(0, file_bytes - SAMPLE_BYTES) * sample // SAMPLES_PER_FILE)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.digest()
