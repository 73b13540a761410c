"""The source of a prompt's KV, as a request names it: `kv_transfer_params.remote_kv_source`.

The dialect of vLLM's P2P tier, and a signature under the fleet's key: an engine opens connections for its fleet only.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from options import ConfigError
from prompts.errors import RequestError

FLEET_KEY_BYTES_MIN = 16
KV_PARAMS_FIELD = "kv_transfer_params"
"""Field of a body with the parameters by which engines move KV, in vLLM's dialects and in ours."""
_PrintableText = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[!-~]+\Z")]


class RemoteKVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Engine from which another engine can fetch the cached KV of a prompt, as the body of a request names it."""

    kv_request_id: _PrintableText
    """Id of the transfer."""
    remote_host: _PrintableText
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    signature: Annotated[str, Meta(max_length=64)] = ""
    """Hexadecimal HMAC-SHA256 of the fields above under the fleet's key."""
    cached_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Most tokens of the prompt that the source has, as far as the sender knows."""

    def sign(self, fleet_key: bytes) -> RemoteKVSource:
        """Return this source with its signature."""
        return msgspec.structs.replace(self, signature=self._compute_signature(fleet_key))

    def check_signature(self, fleet_key: bytes) -> None:
        """Raise RequestError (HTTP 403) if the signature was made with another key or for other fields."""
        if not hmac.compare_digest(self.signature.encode(), self._compute_signature(fleet_key).encode()):
            raise RequestError(
                "kv_transfer_params.remote_kv_source: expected a signature under the fleet's key",
                param=KV_PARAMS_FIELD,
                code="forbidden",
                status=403,
            )

    def _compute_signature(self, fleet_key: bytes) -> str:
        text = f"kv-source\n{self.kv_request_id}\n{self.remote_host}\n{self.remote_port}"
        return hmac.new(fleet_key, text.encode(), "sha256").hexdigest()


def read_kv_source(kv_transfer_params: Mapping[str, Any] | None) -> RemoteKVSource | None:
    """Return the source that a body names, or None. Raises RequestError for an invalid source."""
    value = (kv_transfer_params or {}).get("remote_kv_source")
    if value is None:
        return None
    try:
        return msgspec.convert(value, RemoteKVSource)
    except msgspec.ValidationError as error:
        message = f"kv_transfer_params.remote_kv_source: {error}"
        raise RequestError(message, param=KV_PARAMS_FIELD) from None


def read_fleet_key(key_file: str | None, key: str | None, variable: str) -> bytes | None:
    """Return the secret key that engines and routers share, from a file or else from `key`; None if neither is given.

    `variable`: name of the environment variable that sets `key`, for the error message. Raises ConfigError if the file
    cannot be read, or if the key is too short.
    """
    if key_file is not None:
        label = f"--kv-transfer-key-file {key_file}"
        try:
            key_bytes = Path(key_file).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{label}: {error.strerror}") from error
    elif key is not None:
        label = variable
        key_bytes = key.encode()
    else:
        return None
    if len(key_bytes) < FLEET_KEY_BYTES_MIN:
        raise ConfigError(f"{label}: a key of {len(key_bytes)} bytes, expected at least {FLEET_KEY_BYTES_MIN}")
    return key_bytes
