"""TLS contexts from certificate files. Errors name the flag of the file."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from options.values import ConfigError

log = logging.getLogger("tls")

Content = TypeVar("Content")


def make_server_context(
    certificate_path: str | None, key_path: str | None, client_ca_path: str | None = None
) -> ssl.SSLContext | None:
    """Make the TLS context of a listening address from files; None without a certificate. Raises ConfigError.

    `client_ca_path`: certificates of authorities (mutual TLS): clients need a certificate that one of them has signed.
    A handshake reads files anew that have changed, such as a renewed certificate. Until they are valid, the old count.
    """
    _check_pair(certificate_path, key_path, "--tls")
    if certificate_path is None or key_path is None:
        if client_ca_path is not None:
            raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key")
        return None
    newest = _ReloadedFiles(
        partial(_load_server_context, certificate_path, key_path, client_ca_path),
        (certificate_path, key_path, client_ca_path),
    )
    context = newest.get()

    def use_newest_files(connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:
        """Have a connection use the files as they are now. OpenSSL calls this at each `ClientHello`."""
        connection.context = newest.get()

    context.sni_callback = use_newest_files
    return context


def _load_server_context(certificate_path: str, key_path: str, client_ca_path: str | None) -> ssl.SSLContext:
    """Make a TLS context from the files as they are now. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate_path, key_path, "--tls")
    if client_ca_path is not None:
        _trust_authorities(context, client_ca_path, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class ServerPem(NamedTuple):
    """Contents of the TLS files of a listening address, for servers that are not of Python's `ssl`."""

    certificate_chain: bytes
    key: bytes
    client_ca: bytes | None = None


def watch_server_pem(
    certificate_path: str, key_path: str, client_ca_path: str | None = None
) -> Callable[[], ServerPem]:
    """Return a function that returns the contents of the files of `make_server_context`. Raises ConfigError.

    It reads files anew that have changed. Until they are valid, it returns the old contents.
    """

    def read_files() -> ServerPem:
        _load_server_context(certificate_path, key_path, client_ca_path)  # raises if they do not fit together
        client_ca = None if client_ca_path is None else Path(client_ca_path).read_bytes()
        return ServerPem(Path(certificate_path).read_bytes(), Path(key_path).read_bytes(), client_ca)

    return _ReloadedFiles(read_files, (certificate_path, key_path, client_ca_path)).get


class _ReloadedFiles(Generic[Content]):
    """Content of TLS files, which is loaded anew when a file has changed."""

    def __init__(self, load: Callable[[], Content], paths: Iterable[str | None]) -> None:
        """Load the files. Raises what `load` raises. `paths`: files to watch; None for one that is not used."""
        self._load = load
        self._paths = [path for path in paths if path is not None]
        self._versions = self._read_versions()
        self._content = load()

    def get(self) -> Content:
        """Return the content of the files as they are now. While they are not valid, return the old content."""
        versions = self._read_versions()
        if versions != self._versions:
            self._versions = versions
            try:
                self._content = self._load()
                log.info("%s was read anew", ", ".join(self._paths))
            except (ConfigError, OSError) as error:
                log.error("the last certificate stays in use: %s", error)
        return self._content

    def _read_versions(self) -> list[tuple[int, int]]:
        """Return what changes when files are written or replaced, also by a symbolic link; 0 for missing files."""
        versions = []
        for path in self._paths:
            try:
                status = os.stat(path)
                versions.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                versions.append((0, 0))
        return versions


def make_client_context(
    certificate_path: str | None, key_path: str | None, ca_path: str | None, flag_prefix: str
) -> ssl.SSLContext:
    """Make the TLS context of outgoing connections from files. Raises ConfigError.

    `certificate_path`: certificate for servers that require one. `ca_path`: authorities to trust; None: those of the
    system. `flag_prefix`: beginning of the flags' names in errors, such as "--worker-tls" for --worker-tls-cert.
    """
    if ca_path is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust_authorities(context, ca_path, f"{flag_prefix}-ca")
    _check_pair(certificate_path, key_path, flag_prefix)
    if certificate_path is not None:
        _load_certificate(context, certificate_path, key_path, flag_prefix)
    return context


def watch_client_files(
    context: ssl.SSLContext, certificate_path: str | None, key_path: str | None, ca_path: str | None, flag_prefix: str
) -> Callable[[float], None]:
    """Return a function, to call now and then, that reads the files of `make_client_context` anew if they changed.

    They count for connections that are opened from then on. Authorities are added, and none is removed. While a file
    cannot be used, those that were read before count. The argument of the function, the time, is ignored.
    """

    def load() -> None:
        make_client_context(certificate_path, key_path, ca_path, flag_prefix)  # raises before anything is changed
        if ca_path is not None:
            _trust_authorities(context, ca_path, f"{flag_prefix}-ca")
        if certificate_path is not None:
            _load_certificate(context, certificate_path, key_path, flag_prefix)

    files = _ReloadedFiles(load, (certificate_path, key_path, ca_path))
    return lambda _: files.get()


def _check_pair(certificate_path: str | None, key_path: str | None, flag_prefix: str) -> None:
    if (certificate_path is None) != (key_path is None):
        raise ConfigError(f"{flag_prefix}-cert and {flag_prefix}-key: expected both or neither")


def _load_certificate(context: ssl.SSLContext, certificate_path: str, key_path: str | None, flag_prefix: str) -> None:
    try:  # the empty password keeps OpenSSL from asking for a passphrase on the terminal
        context.load_cert_chain(certificate_path, key_path, password=lambda: "")
    except OSError as error:  # SSLError is an OSError
        paths = f"{flag_prefix}-cert {certificate_path}, {flag_prefix}-key {key_path}"
        raise ConfigError(f"{paths}: no certificate and its key: {error}") from error


def _trust_authorities(context: ssl.SSLContext, path: str, flag: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: no certificates of authorities: {error}") from error
