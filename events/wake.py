"""A bell that one thread rings and another polls together with its sockets."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """Ringing is cheap when it rang already. The owner makes sure that nobody rings a closed bell."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        """`fd` is readable while the bell rings."""
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._rang = False

    def ring(self) -> None:
        if self._rang:
            return
        self._rang = True
        with contextlib.suppress(BlockingIOError):  # a full pipe rings too
            os.write(self._write_fd, b"\0")

    def silence(self) -> None:
        """Call before looking for work: what is added afterwards rings again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        self._rang = False

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)
