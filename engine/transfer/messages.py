"""Messages between two engines that move blocks, and their frames. Pure: no sockets here.

A frame is two lengths (4 bytes each, big-endian), a msgpack message, a payload, and an HMAC-SHA256 of all that under a
key of the connection and the direction. The HMAC also covers the number of the frame, so none can be repeated, left out
or moved. The payload is the content of blocks, one after the other, of any kind: attention, windows, states.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple, TypeVar

import msgspec

from engine.types import BlockKey

MESSAGE_BYTES_MAX = 16 << 20
"""Bytes of a message without its payload: the hashes of a prompt of a million blocks fit."""
MAC_BYTES = 32
NONCE_BYTES = 32
BATCH_BYTES_MAX = 8 << 20
"""Contents of blocks in one message; a larger block goes alone."""
BATCH_BLOCKS_MAX = 4096
HASHES_MAX = 1 << 18
"""Blocks of one prompt that a source looks up."""
GREETING = b"blockcast-kv-02\n"
"""First bytes of a connection, from the server. Another version of the protocol has another number."""

_LENGTHS = struct.Struct(">II")
LENGTHS_BYTES = _LENGTHS.size
_FRAME_NUMBER = struct.Struct(">Q")


class TransferError(Exception):
    """A pull that ends before all blocks are here. `reason` is one word of FAILURE_REASONS, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


FAILURE_REASONS = (
    "unreachable", "unauthenticated", "timeout", "closed", "malformed", "incompatible", "failed", "busy", "recent",
)  # fmt: skip
"""Reasons why pulls fail. "failed": the source could not read its blocks. "recent": the source has failed a moment ago
and is not asked."""


# consumer -> source
class LocateBlocks(msgspec.Struct, tag="locate", array_like=True, frozen=True):
    """Question which of these blocks, the first ones of a prompt in order, the source has."""

    fingerprint: bytes
    hashes: list[int]


class WantedBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block by the hash of its prefix, and its kind."""

    hash: int
    kind: int


class FetchBlocks(msgspec.Struct, tag="fetch", array_like=True, frozen=True):
    """Request to send these blocks, up to the first that is no longer cached."""

    wanted_blocks: list[WantedBlock]


Question = LocateBlocks | FetchBlocks


# source -> consumer
class BlocksLocated(msgspec.Struct, tag="located", array_like=True, frozen=True):
    """Leading blocks of the question that the source has."""

    kind_masks: bytes
    """Byte i has bit k set if the source has the block of kind k with hash i. The bytes end before the first hash of
    which the source has no block."""


class SentBlock(msgspec.Struct, array_like=True, frozen=True):
    """Description of one KV block, which a peer sends with it: the receiver expects an equal one.

    The description has the block's tokens, too, as two blocks may share a hash.
    """

    hash: int
    """Hash of the prompt up to the end of the block."""
    kind: int
    """Index of the attention group, or of the recurrent states."""
    parent_hash: int | None
    packed_tokens: bytes
    extra_keys: tuple[str, ...] | None
    lora_name: str | None

    @staticmethod
    def describe(key: BlockKey, parent_hash: int | None, kind: int) -> SentBlock:
        """Describe a block. `parent_hash`: hash of the block before it; None for the first block of a prompt."""
        return SentBlock(key.hash, kind, parent_hash, key.packed_tokens, key.extra_keys, key.lora_name)


class BlocksSent(msgspec.Struct, tag="blocks", array_like=True, frozen=True):
    """The blocks of the payload, in the order of the request. `fingerprint`: of the source's weights and layout."""

    fingerprint: bytes
    blocks: list[SentBlock]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Refusal of a question. The reason is one of FAILURE_REASONS."""

    reason: str
    message: str


Answer = BlocksLocated | BlocksSent | Refused

QUESTION_DECODER: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
ANSWER_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

Bytes = bytes | bytearray | memoryview
Message = TypeVar("Message")


def decode_message(decoder: msgspec.msgpack.Decoder[Message], data: Bytes) -> Message:
    """Decode what a consumer asks, or what a source answers. Raises TransferError."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError("malformed", f"a message that cannot be read: {error}") from error


def encode_lengths(message: Bytes, payload: Bytes) -> bytes:
    """Return the first bytes of a frame: the sizes of its message and of its payload."""
    return _LENGTHS.pack(len(message), len(payload))


def decode_lengths(data: Bytes, payload_bytes_max: int) -> tuple[int, int]:
    """Return the bytes of a frame's message and of its payload. Raises TransferError if the reader has no room."""
    message_bytes, payload_bytes = _LENGTHS.unpack(data)
    if message_bytes > MESSAGE_BYTES_MAX or payload_bytes > payload_bytes_max:
        raise TransferError("malformed", f"a frame of {message_bytes} and {payload_bytes} bytes")
    return message_bytes, payload_bytes


class FrameSigner:
    """Signs or checks the frames that go one way over a connection, by HMACs that cover the frames' numbers.

    So no frame can be forged, repeated, left out or moved.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._frame_count = 0

    def sign(self, message: Bytes, payload: Bytes) -> bytes:
        """Return the HMAC of the next frame."""
        mac = hmac.new(self._key, _FRAME_NUMBER.pack(self._frame_count), "sha256")
        self._frame_count += 1
        for part in (encode_lengths(message, payload), message, payload):
            mac.update(part)
        return mac.digest()

    def check(self, mac: Bytes, message: Bytes, payload: Bytes) -> None:
        """Check the HMAC of the next frame. Raises TransferError if it is wrong."""
        if not hmac.compare_digest(mac, self.sign(message, payload)):
            raise TransferError("malformed", "a frame whose HMAC is wrong")


class ConnectionKeys(NamedTuple):
    """Proofs and keys that both ends of a connection derive from the fleet's key and their nonces."""

    client_proof: bytes
    server_proof: bytes
    client_frame_key: bytes
    server_frame_key: bytes

    @staticmethod
    def derive(fleet_key: bytes, server_nonce: Bytes, client_nonce: Bytes) -> ConnectionKeys:
        nonces = bytes(server_nonce) + bytes(client_nonce)
        labels = (b"client proof", b"server proof", b"client frames", b"server frames")
        return ConnectionKeys(*(hmac.digest(fleet_key, label + b"\0" + nonces, "sha256") for label in labels))
