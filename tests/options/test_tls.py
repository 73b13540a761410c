"""Certificates that are renewed while a program runs."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from options.tls import make_client_context, make_server_context, watch_client_files

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def make_certificate(folder: Path, name: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", f"{name}.key", "-out",
         f"{name}.pem"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip


def shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, server_name: str) -> None:
    """Run a handshake in memory. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=server_name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    is_done = {client: False, server: False}
    while not all(is_done.values()):
        for side in is_done:
            try:
                side.do_handshake()
                is_done[side] = True
            except ssl.SSLWantReadError:
                pass


def shows_certificate(server_context: ssl.SSLContext, folder: Path, name: str) -> bool:
    """Return whether a server shows the certificate of this name."""
    try:
        shake_hands(server_context, ssl.create_default_context(cafile=str(folder / f"{name}.pem")), name)
    except ssl.SSLCertVerificationError:
        return False
    return True


def replace(folder: Path, source: str, target: str) -> None:
    """Replace a file as operators do: at once, by a new one."""
    shutil.copy(folder / source, folder / "new")
    os.replace(folder / "new", folder / target)


def test_a_renewed_certificate_is_shown_from_the_next_handshake_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("old", "new1"):
        make_certificate(tmp_path, name)
    replace(tmp_path, "old.pem", "tls.pem")
    replace(tmp_path, "old.key", "tls.key")
    context = make_server_context(str(tmp_path / "tls.pem"), str(tmp_path / "tls.key"))
    assert context is not None
    assert shows_certificate(context, tmp_path, "old")

    replace(tmp_path, "new1.pem", "tls.pem")  # and not its key yet
    assert shows_certificate(context, tmp_path, "old")
    assert "the last certificate stays in use" in caplog.text
    replace(tmp_path, "new1.key", "tls.key")
    assert shows_certificate(context, tmp_path, "new1")
    assert not shows_certificate(context, tmp_path, "old")
    assert "tls.pem" in caplog.records[-1].getMessage()

    (tmp_path / "tls.pem").unlink()
    assert shows_certificate(context, tmp_path, "new1")


def test_renewed_authorities_of_clients_count_from_the_next_handshake_on(tmp_path: Path) -> None:
    for name in ("server", "alice", "bob"):
        make_certificate(tmp_path, name)
    replace(tmp_path, "alice.pem", "ca.pem")
    context = make_server_context(*(str(tmp_path / name) for name in ("server.pem", "server.key", "ca.pem")))
    assert context is not None

    def is_let_in(name: str) -> bool:
        client_context = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        client_context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        try:
            shake_hands(context, client_context, "server")
        except ssl.SSLError:
            return False
        return True

    assert (is_let_in("alice"), is_let_in("bob")) == (True, False)
    replace(tmp_path, "bob.pem", "ca.pem")
    assert (is_let_in("alice"), is_let_in("bob")) == (False, True)


def test_a_renewed_certificate_is_shown_to_servers_and_new_authorities_are_trusted(tmp_path: Path) -> None:
    for name in ("server", "moved", "alice", "bob"):
        make_certificate(tmp_path, name)
    replace(tmp_path, "alice.pem", "tls.pem")
    replace(tmp_path, "alice.key", "tls.key")
    replace(tmp_path, "server.pem", "ca.pem")
    files = [str(tmp_path / name) for name in ("tls.pem", "tls.key", "ca.pem")]
    context = make_client_context(*files, "--worker-tls")
    reload_changed_files = watch_client_files(context, *files, "--worker-tls")

    def is_let_in(server_name: str, trusted_name: str) -> bool:
        server_context = make_server_context(
            *(str(tmp_path / name) for name in (f"{server_name}.pem", f"{server_name}.key", f"{trusted_name}.pem"))
        )
        assert server_context is not None
        try:
            shake_hands(server_context, context, server_name)
        except ssl.SSLError:
            return False
        return True

    assert is_let_in("server", "alice")
    assert not is_let_in("moved", "alice")
    replace(tmp_path, "bob.pem", "tls.pem")
    reload_changed_files(0.0)
    assert is_let_in("server", "alice"), "a certificate without its key changes nothing"
    replace(tmp_path, "bob.key", "tls.key")
    replace(tmp_path, "moved.pem", "ca.pem")
    reload_changed_files(0.0)
    assert is_let_in("moved", "bob")
    assert not is_let_in("moved", "alice")
