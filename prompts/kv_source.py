"""The source of a prompt's KV, as a request names it: `kv_transfer_params.remote_kv_source`. No I/O.

The dialect of vLLM's P2P tier, and a signature under the fleet's key: an engine opens connections for its fleet only.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prompts.errors import RequestError

_PrintableText = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[!-~]+\Z")]


class RemoteKVSource(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `remote_kv_source`."""

    kv_request_id: _PrintableText
    remote_host: _PrintableText
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    signature: Annotated[str, Meta(max_length=64)] = ""
    """Hexadecimal HMAC-SHA256 of the other fields under the fleet's key."""

    def check_signature(self, fleet_key: bytes) -> None:
        """Raises RequestError 403 if the signature was made with another key or for other fields."""
        text = f"kv-source\n{self.kv_request_id}\n{self.remote_host}\n{self.remote_port}"
        expected = hmac.new(fleet_key, text.encode(), "sha256").hexdigest()
        if not hmac.compare_digest(self.signature.encode(), expected.encode()):
            raise RequestError(
                "kv_transfer_params.remote_kv_source: expected a signature under the fleet's key",
                param="kv_transfer_params",
                code="forbidden",
                status=403,
            )


def read_kv_source(kv_transfer_params: Mapping[str, Any] | None) -> RemoteKVSource | None:
    """Return the source that a body names; None where it names none. Raises RequestError."""
    value = (kv_transfer_params or {}).get("remote_kv_source")
    if value is None:
        return None
    try:
        return msgspec.convert(value, RemoteKVSource)
    except msgspec.ValidationError as error:
        message = f"kv_transfer_params.remote_kv_source: {error}"
        raise RequestError(message, param="kv_transfer_params") from None
