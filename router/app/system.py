"""What a process asks of Python and of the operating system before it serves."""

from __future__ import annotations

import contextlib
import gc
import resource
import ssl


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


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Raises OSError or ssl.SSLError for files that are no certificate and key."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
