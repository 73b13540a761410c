"""Messages between the ranks: a step's plan, and commands to load the model, and to copy, read and write blocks.

Followers need less of a plan than the leader: they sample no tokens. For a sequence of the previous plan only changes
are sent: a few numbers in a decode step, however long the context. Both ends remember exactly the sequences of the last
plan. A sequence that was not in it is sent whole. Pure: no sockets here.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.types import (
    BlockCopy,
    BlockId,
    BlockPlace,
    Chunk,
    Request,
    SamplingParams,
    Sequence,
    StepPlan,
    UnitCopy,
    UnitId,
)


# leader -> follower
class LoadModel(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Command to load the model. The reply is `RankLoaded` or `LoadFailed`."""

    config: EngineConfig
    folder: str


class StartRunner(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """Command to make the runner and its cache. Plans follow."""

    unit_count: int


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
class RankLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The rank has loaded its part. Next it joins the process group, and takes part in sizing the cache."""


class LoadFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The rank cannot load its part. The message gives the reason."""

    message: str


class BlockParts(msgspec.Struct, tag="parts", array_like=True, frozen=True):
    """This rank's parts of the blocks that were read, one after the other."""

    contents: bytes


# Plans, leader -> follower
class TableChange(msgspec.Struct, array_like=True, frozen=True):
    """Change of a block table: its first `kept_blocks` stay, and `new_blocks` follow them."""

    kept_blocks: int
    new_blocks: list[BlockId]


class ChunkMessage(msgspec.Struct, array_like=True, frozen=True):
    """A chunk of a plan, with the changes of its sequence."""

    previous_index: int | None
    """Index of the sequence's chunk in the previous plan; None: it was not in that plan."""
    start: int
    token_ids: list[int]
    """Tokens of the chunk."""
    tables: list[TableChange]
    state_unit: UnitId | None
    should_sample: bool
    logprob_prompt_len: int | None
    """Length of the prompt, if the request wants logprobs of it; else None."""


class PlanMessage(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """A step's plan."""

    chunks: list[ChunkMessage]
    state_restores: list[UnitCopy]
    state_resets: list[UnitId]
    state_checkpoints: list[UnitCopy]
    block_copies: list[BlockCopy]


LeaderMessage = LoadModel | StartRunner | PlanMessage | CopyBlocks | ReadBlocks | WriteBlocks
FollowerReply = RankLoaded | LoadFailed | BlockParts


class _SentChunk(NamedTuple):
    """A sequence's part of the last plan, which the other ranks remember."""

    chunk_index: int
    """Index of its chunk in the plan, by which the next plan refers to it."""
    table_version: int
    table_lengths: list[int]


class PlanEncoder:
    """Encodes step plans for the other ranks, as changes against the plan before.

    If 3 blocks of a table were sent and it has 4 now, only the fourth is sent. If a block was replaced, all are.
    """

    def __init__(self) -> None:
        self._last_sent: dict[Sequence, _SentChunk] = {}

    def encode(self, plan: StepPlan) -> PlanMessage:
        """Return the message of the next plan."""
        last_sent = self._last_sent
        self._last_sent = {
            chunk.seq: _SentChunk(index, chunk.seq.table_version, [len(table) for table in chunk.seq.block_tables])
            for index, chunk in enumerate(plan.chunks)
        }
        chunks = [_encode_chunk(chunk, last_sent.get(chunk.seq)) for chunk in plan.chunks]
        return PlanMessage(chunks, plan.state_restores, plan.state_resets, plan.state_checkpoints, plan.block_copies)


def _encode_chunk(chunk: Chunk, sent: _SentChunk | None) -> ChunkMessage:
    """Return the message of a chunk. `sent`: the sequence's part of the last plan; None if the plan did not have it."""
    seq = chunk.seq
    kept_lengths = [0] * len(seq.block_tables)
    if sent is not None and sent.table_version == seq.table_version:  # blocks were only appended
        kept_lengths = sent.table_lengths
    return ChunkMessage(
        previous_index=None if sent is None else sent.chunk_index,
        start=chunk.start,
        token_ids=seq.token_ids[chunk.start : chunk.end],
        tables=[
            TableChange(kept_blocks, table[kept_blocks:])
            for kept_blocks, table in zip(kept_lengths, seq.block_tables, strict=True)
        ],
        state_unit=seq.state_unit,
        should_sample=chunk.should_sample,
        logprob_prompt_len=None if seq.request.params.prompt_logprobs is None else seq.prompt_len,
    )


class PlanDecoder:
    """Rebuilds step plans from the messages of rank 0, on the other ranks.

    A message has only the changes since the plan before, so every message must be decoded, in order.
    """

    def __init__(self) -> None:
        self._last_sequences: list[Sequence] = []
        """Sequences of the last plan, in the order of its chunks."""

    def decode(self, message: PlanMessage) -> StepPlan:
        """Return the plan of a message."""
        chunks = [self._decode_chunk(chunk) for chunk in message.chunks]
        self._last_sequences = [chunk.seq for chunk in chunks]
        return StepPlan(
            chunks, message.state_restores, message.state_resets, message.state_checkpoints, message.block_copies
        )

    def _decode_chunk(self, message: ChunkMessage) -> Chunk:
        """Return the chunk of a message, with its sequence brought up to date.

        The sequence is taken from the last plan, or is new. Tokens before the chunk may be zeros, because this rank
        reads only the tokens of the chunk.
        """
        if message.previous_index is None:
            seq = _make_new_sequence(message)
        else:
            seq = self._last_sequences[message.previous_index]
        tokens = seq.token_ids
        tokens += [0] * (message.start - len(tokens))
        tokens[message.start :] = message.token_ids
        for table, change in zip(seq.block_tables, message.tables, strict=True):
            is_replaced = change.kept_blocks < len(table)
            if is_replaced:
                seq.table_version += 1
            table[change.kept_blocks :] = change.new_blocks
        seq.state_unit = message.state_unit
        return Chunk(seq, message.start, len(tokens), should_sample=message.should_sample)


def _make_new_sequence(message: ChunkMessage) -> Sequence:
    """Return a sequence without tokens and blocks. Its request says only whether logprobs of the prompt are wanted."""
    return Sequence(
        request=_REQUEST if message.logprob_prompt_len is None else _LOGPROBS_REQUEST,
        token_ids=[],
        prompt_len=message.logprob_prompt_len or 0,
        arrival_s=0.0,
        block_tables=[[] for _ in message.tables],
    )


_REQUEST = Request(request_id="follower", token_ids=[], params=SamplingParams())
_LOGPROBS_REQUEST = Request(request_id="follower", token_ids=[], params=SamplingParams(prompt_logprobs=0))
