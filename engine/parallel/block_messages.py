"""Messages by which the ranks copy, read and write blocks between steps: each rank has a part of each block."""

from __future__ import annotations

import msgspec

from engine.types import BlockCopy, BlockPlace


# leader -> follower
class CopyBlocks(msgspec.Struct, tag="copy", array_like=True, frozen=True):
    """Command to do copies within the device and to and from host memory, in order."""

    block_copies: list[BlockCopy]


class ReadBlocks(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """Command to read blocks. The reply is `BlockParts`."""

    places: list[BlockPlace]


class WriteBlocks(msgspec.Struct, tag="write", array_like=True, frozen=True):
    """Command to write this rank's parts of blocks, one after the other."""

    places: list[BlockPlace]
    contents: bytes


# follower -> leader
class BlockParts(msgspec.Struct, tag="parts", array_like=True, frozen=True):
    """This rank's parts of the blocks that were read, one after the other."""

    contents: bytes
