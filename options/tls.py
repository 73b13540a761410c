"""TLS contexts from certificate files. Errors name the flag of the file."""

from __future__ import annotations

import ssl

from options.values import ConfigError


def make_server_context(
    certificate_path: str | None, key_path: str | None, client_ca_path: str | None = None
) -> ssl.SSLContext | None:
    """Make the TLS context of a listening address from files; None without a certificate. Raises ConfigError.

    `client_ca_path`: certificates of authorities (mutual TLS): clients need a certificate that one of them has signed.
    """
    _check_pair(certificate_path, key_path, "--tls")
    if certificate_path is None:
        if client_ca_path is not None:
            raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate_path, key_path, "--tls")
    if client_ca_path is not None:
        _trust_authorities(context, client_ca_path, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


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
