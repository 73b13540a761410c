"""Messages between the ranks: a step's plan, and commands to load the model, and to copy, read and write blocks.

For a sequence of the previous plan only changes are sent: a few numbers in a decode step, however long the context.
Both ends remember the sequences of the last plan. Of a sequence that was not in it, all blocks are sent. No sockets
here.
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
    UnitId,
)


# leader -> follower
class LoadModel(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Command to load the model. The reply is `LoadDone`."""

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
class LoadDone(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """Reply to `LoadModel`. After a success, the rank joins the process group, and takes part in sizing the cache."""

    error: str | None
    """Reason why the rank cannot load its part; None: it has."""


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
    state_resets: list[UnitId]
    state_checkpoints: list[BlockCopy]
    block_copies: list[BlockCopy]


LeaderMessage = LoadModel | StartRunner | PlanMessage | CopyBlocks | ReadBlocks | WriteBlocks
FollowerReply = LoadDone | BlockParts


class _SentChunk(NamedTuple):
    """A sequence's part of the last plan, which the other ranks remember."""

    chunk_index: int
    """Index of its chunk in the plan, by which the next plan refers to it."""
    table_version: int
    """Number that changes whenever blocks of the sequence are replaced, rather than appended."""
    table_lengths: list[int]


class PlanEncoder:
    """Encodes the plan of each step (sequences, tokens, blocks) for the other tensor-parallel ranks, as changes.

    If 3 blocks of a sequence were sent and it has 4 now, only the fourth is sent. If a block was replaced, all are.
    """

    def __init__(self) -> None:
        self._last_sent: dict[Sequence, _SentChunk] = {}
        """The sequences of the last plan."""

    def encode(self, plan: StepPlan) -> PlanMessage:
        """Return the message of the next plan."""
        sent: dict[Sequence, _SentChunk] = {}
        chunk_messages = []
        for index, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            chunk_messages.append(_encode_chunk(chunk, self._last_sent.get(seq)))
            sent[seq] = _SentChunk(index, seq.table_version, [len(table) for table in seq.block_tables])
        self._last_sent = sent
        return PlanMessage(chunk_messages, plan.state_resets, plan.state_checkpoints, plan.block_copies)


def _encode_chunk(chunk: Chunk, sent: _SentChunk | None) -> ChunkMessage:
    """Return the message of a chunk: the tokens of a sequence that a step computes, and the sequence's new blocks.

    `sent`: what the last plan had of the sequence, which the other ranks remember; None: nothing, so all is sent.
    """
    seq = chunk.seq
    kept_lengths = [0] * len(seq.block_tables)
    if sent is not None and sent.table_version == seq.table_version:  # blocks were only appended
        kept_lengths = sent.table_lengths
    lengths_and_tables = zip(kept_lengths, seq.block_tables, strict=True)
    return ChunkMessage(
        previous_index=None if sent is None else sent.chunk_index,
        start=chunk.start,
        token_ids=seq.token_ids[chunk.start : chunk.end],
        tables=[TableChange(kept_length, table[kept_length:]) for kept_length, table in lengths_and_tables],
        state_unit=seq.state_unit,
        should_sample=chunk.should_sample,
        logprob_prompt_len=None if seq.request.params.prompt_logprobs is None else seq.prompt_len,
    )


class PlanDecoder:
    """Rebuilds the plan of each step from rank 0's message, on the other tensor-parallel ranks.

    A message has only the changes since the plan before, so every message must be decoded, in order.
    """

    def __init__(self) -> None:
        self._last_sequences: list[Sequence] = []
        """Sequences of the last plan, in the order of its chunks."""

    def decode(self, message: PlanMessage) -> StepPlan:
        """Return the plan of a message."""
        chunks = [self._decode_chunk(chunk) for chunk in message.chunks]
        self._last_sequences = [chunk.seq for chunk in chunks]
        return StepPlan(chunks, message.state_resets, message.state_checkpoints, message.block_copies)

    def _decode_chunk(self, message: ChunkMessage) -> Chunk:
        """Return a chunk, the tokens of a sequence that a step computes, and update the sequence by the message.

        The sequence is that of the last plan, or new. Tokens before the chunk may be zeros: they are not read here.
        """
        if message.previous_index is None:
            seq = _make_new_sequence(message)
        else:
            seq = self._last_sequences[message.previous_index]
        tokens = seq.token_ids
        tokens += [0] * (message.start - len(tokens))
        tokens[message.start :] = message.token_ids
        for table, change in zip(seq.block_tables, message.tables, strict=True):
            replaces_blocks = change.kept_blocks < len(table)
            if replaces_blocks:
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
