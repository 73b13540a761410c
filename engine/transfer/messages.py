"""Messages between two engines that move blocks. The contents of blocks travel beside a message, as its payload."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.types import BlockKey

BATCH_BYTES_MAX = 8 << 20
"""Contents of blocks in one message; a larger block goes alone."""
BATCH_BLOCKS_MAX = 4096
HASHES_MAX = 1 << 18
"""Blocks of one prompt that a source looks up."""


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
