"""TLS on the client's side: it works, and a handshake that never ends is a connection like any other."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from router.http import listener as listening
from router.http.config import ClientTimeouts
from router.http.listener import Listener


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(the server's, a client's that trusts it)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))


def test_handshakes_count_as_connections_and_end(
    edge: Any, contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = contexts

    async def scenario() -> None:
        await edge.start()
        listener = Listener(edge.app, ClientTimeouts(), 8)
        port = await listener.bind("127.0.0.1", 0, server)
        await listener.listen()

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
            answer = await reader.read(-1)
            writer.close()
            return answer

        assert (await ask()).startswith(b"HTTP/1.1 200")
        await edge.until(lambda: not listener.connections)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        await edge.until(lambda: len(listener.handshake_tasks) == 8)
        with pytest.raises(OSError):
            await ask()
        assert len(listener.handshake_tasks) == 8
        for _, writer in silent:
            writer.close()
        await edge.until(lambda: not listener.handshake_tasks)
        assert edge.metrics.http_errors["400"] == 8
        with monkeypatch.context() as patch:
            patch.setattr(listening, "MAX_HANDSHAKE_S", 0.1)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            for reader, writer in silent:
                assert await reader.read(-1) == b"", "the router waits for it no more"
                writer.close()
        await edge.until(lambda: not listener.handshake_tasks)
        assert edge.metrics.http_errors["400"] == 16
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: r\r\n\r\n")  # not TLS
        await edge.until(lambda: edge.metrics.http_errors["400"] == 17)
        writer.close()
        assert (await ask()).startswith(b"HTTP/1.1 200")
        listener.stop_listening()
        assert not edge.metrics.crashes

    edge.run(scenario())
