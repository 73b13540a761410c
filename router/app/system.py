"""What a process asks of Python and of the operating system before it serves."""

from __future__ import annotations

import contextlib
import gc
import resource
import ssl
from collections.abc import Iterator

import zmq

from options import ConfigError


def settle_heap() -> None:
    """Take what start-up made out of the garbage collector's sight, and let it look less often.

    Requests leave no cycles behind, so what it would look for hardly exists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def raise_file_limit() -> None:
    """Two sockets a request: take as many file descriptors as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def naming(flag: str, address: str) -> Iterator[None]:
    """An address that cannot be had is told with the flag that asked for it. Raises OSError."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise OSError(f"{flag} {address}: cannot be used: {error.strerror or error}") from error


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Raises ConfigError for files that are no certificate and its key."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl's own errors are
        raise ConfigError(f"--tls-cert {certificate}, --tls-key {key}: no certificate and its key: {error}") from error
    return context
