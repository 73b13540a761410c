"""TLS contexts from files, for both programs: what is wrong with a file is told with the flag that named it."""

from __future__ import annotations

import ssl

from options.values import ConfigError


def make_server_context(
    certificate: str | None, key: str | None, client_ca: str | None = None
) -> ssl.SSLContext | None:
    """Make the TLS context of a listening address; None without a certificate. `client_ca`: authorities, one of which
    must have signed a client's certificate. Raises ConfigError."""
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key: expected both or neither")
    if certificate is None:
        if client_ca is not None:
            raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate, key, "--tls-cert", "--tls-key")
    if client_ca is not None:
        _trust_authorities(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(certificate: str | None, key: str | None, ca: str | None, prefix: str) -> ssl.SSLContext:
    """Make the TLS context of outgoing connections: the system's authorities, or those of `ca` alone, and our
    certificate where the other side requires one. The flags begin with `prefix`. Raises ConfigError."""
    context = ssl.create_default_context()
    if ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust_authorities(context, ca, f"{prefix}-ca")
    if (certificate is None) != (key is None):
        raise ConfigError(f"{prefix}-cert and {prefix}-key: expected both or neither")
    if certificate is not None:
        _load_certificate(context, certificate, key, f"{prefix}-cert", f"{prefix}-key")
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None, flag: str, key_flag: str) -> None:
    try:  # a key with a passphrase would be asked for on a terminal
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # ssl's own errors are
        raise ConfigError(f"{flag} {certificate}, {key_flag} {key}: no certificate and its key: {error}") from error


def _trust_authorities(context: ssl.SSLContext, path: str, flag: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: no certificates of authorities: {error}") from error
