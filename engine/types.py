"""The nouns the engine's parts share: a sequence, a step's plan, a step's result.

Owns the vocabulary between scheduler, cache, runner and server, and nothing else: no tensors, no sockets, no clock.
Intervals are half-open: a chunk computes the positions [start, end).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, NewType, overload

import msgspec
from msgspec import Meta

from prompts.schemas import (
    COUNT_MAX,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Count,
    Int64,
    LogitBias,
    LogprobCount,
    MinP,
    Penalty,
    RepetitionPenalty,
    Salt,
    Samples,
    Stop,
    StructuredOutputs,
    Temperature,
    TokenIdField,
    TopK,
    TopP,
)

UnitId = NewType("UnitId", int)
"""Index of a unit of the pool's buffer."""

BlockId = NewType("BlockId", int)
"""Physical KV block of one group: `unit * blocks_per_unit(group) + sub_block`. What block tables and kernels hold."""


class CopyDirection(enum.IntEnum):
    """From which memory to which a block is copied."""

    WITHIN_DEVICE = 0
    """The device's own."""
    TO_HOST = 1
    FROM_HOST = 2


class BlockCopy(NamedTuple):
    """A copy of one block of a kind: an attention group, or recurrent state, which comes after the groups."""

    kind: int
    source: BlockId
    target: BlockId
    direction: CopyDirection = CopyDirection.WITHIN_DEVICE


class BlockPlace(NamedTuple):
    """Where the content of a block lies: on the device, or in host memory."""

    kind: int
    block: BlockId
    is_on_host: bool = False


class RunnerLostError(RuntimeError):
    """No further step can be computed: the engine must end. The message says why, in one line."""


class FinishReason(str, enum.Enum):
    """Why a sequence ended; the value is OpenAI's `finish_reason` where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(msgspec.Struct, frozen=True):
    """Grammar that an answer must match."""

    lark_grammar: str
    """The grammar in llguidance's dialect of Lark."""
    param: str
    """Field of the request that asks for it, for errors."""
    source_json: bytes = b""
    """Format that the grammar was written from, as JSON; empty once the grammar is checked."""
    reasoning_start_token: TokenIdField | None = None
    """The token with which a thought may begin that comes first; None: one has begun, or none comes."""
    reasoning_end_token: TokenIdField | None = None
    """The token that ends it: up to there the answer is free. None: no thought comes."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to continue a sequence. Names, defaults and ranges are vLLM's; checked once by `engine.protocol.params`."""

    max_tokens: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: all."""
    min_p: MinP = 0.0
    seed: Int64 | None = None
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop: Annotated[tuple[Stop, ...], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenIdField, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    include_stop_str_in_output: bool = False
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None
    n: Samples = 1
    structured_outputs: StructuredOutputs | None = None
    """Constraint as programs write it, from which `LLM` makes `constraint`."""
    constraint: Constraint | None = None


class KVSource(msgspec.Struct, frozen=True):
    """The peer that may have the KV of a prompt: the address where it gives blocks."""

    host: str
    port: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as the HTTP side hands it to the core (n > 1 has been fanned out into several)."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: Salt | None = None
    lora_name: str | None = None
    priority: Int64 = 0
    """Lower is served earlier; ties by arrival."""
    resumed_output_len: int = 0
    """So many of the last `token_ids` are the beginning of the answer: nothing tells it from one that was preempted."""
    kv_source: KVSource | None = None
    """Peer from which blocks are pulled before the request is queued."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The logprob of one position's token and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    """1 = the likeliest token of the vocabulary."""
    top_logprobs: list[tuple[int, float]]


def count_logprobs(positions: Items[TokenLogprobs | None]) -> int:
    """Number of (token, logprob) pairs."""
    return sum(1 if position is None else 1 + len(position.top_logprobs) for position in positions)


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Output that one step added to one request. `finish_reason` is set once, on the last output."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id of `stop_token_ids` that ended it, as OpenAI-compatible servers report in `stop_reason`; None for eos."""
    cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; on the first output of a request."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    is_client_error: bool = False
    """The error is the request's own, such as a grammar that cannot be followed."""


class DecodedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of a step that added a token to each of some requests and nothing else: made when they are read."""

    request_ids: list[str]
    token_ids: list[int]

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[SequenceOutput]:
        for request_id, token in zip(self.request_ids, self.token_ids):
            yield SequenceOutput(request_id=request_id, token_ids=[token])

    def __contains__(self, output: object) -> bool:
        return any(output == decoded_output for decoded_output in self)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. The scheduler owns it; cache and runner read it and keep their own parts.

    Invariants: the KV of positions [0, computed) is in the cache blocks of `block_tables` once the steps that are out
    are computed; while running, `computed < len(token_ids)` with no step out, else `computed <= len(token_ids) + 1`.
    """

    request: Request
    token_ids: list[int]
    prompt_len: int
    arrival_s: float
    computed_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    """Tokens of the last prefix hit that came from host memory."""
    block_tables: list[list[BlockId]] = field(default_factory=list)
    """One list of physical blocks a group: entry i of group g holds [i * block_size, (i + 1) * block_size)."""
    table_version: int = 0
    """Number of changes of `block_tables` that a kernel could read, besides appended blocks."""
    state_unit: UnitId | None = None
    """The mutable recurrent-state unit of a running sequence on a model that has state; else None."""
    preemptions: int = 0

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


class Chunk(msgspec.Struct, gc=False):
    """One sequence's share of a step: compute the positions [start, end) of `seq.token_ids`."""

    seq: Sequence
    start: int
    end: int
    should_sample: bool
    """True where the chunk reaches the end of the known tokens, so that the step samples the next one."""
    token_on_device: bool = False
    """Its one token is what the step before samples, which only the device knows yet: `start` is past the rest."""


class LazyDecodeChunks(Items[Chunk]):
    """A decode of each sequence, all fed: made when they are looked at, for in most steps few are."""

    __slots__ = ("_first_starts", "_steps_taken", "sequences")

    def __init__(self, sequences: list[Sequence], first_starts: list[int], steps_taken: int) -> None:
        """Chunk i starts at `first_starts[i] + count`. Neither list changes any more."""
        self.sequences = sequences
        self._first_starts = first_starts
        self._steps_taken = steps_taken

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return list(self)[index]
        start = self._first_starts[index] + self._steps_taken
        return Chunk(self.sequences[index], start, start + 1, True, True)

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.__getitem__, range(len(self)))


@dataclass(slots=True)
class StepPlan:
    """Work of the runner in one step. A chunk that computes a block stands before the chunks that share the block."""

    chunks: Items[Chunk]
    state_restores: list[tuple[UnitId, UnitId]] = field(default_factory=list)
    """(source checkpoint, destination sequence state), copied before anything is computed."""
    state_resets: list[UnitId] = field(default_factory=list)
    """State units to zero before anything is computed: sequences that start from nothing."""
    state_checkpoints: list[tuple[UnitId, UnitId]] = field(default_factory=list)
    """(source sequence state, destination checkpoint), copied after the step's compute."""
    block_copies: list[BlockCopy] = field(default_factory=list)
    """Copies of compactions, and to and from host memory, done in this order before everything else."""
    continues_previous: bool = False
    """Whether each chunk computes the token that the same chunk of the previous plan samples."""
    table_version: int | None = None
    """Sum of all increments of `Sequence.table_version`; None: unknown."""


@dataclass(slots=True)
class StepResult:
    """Result of a step: `sampled_tokens[i]` is the token of `plan.chunks[i]`, None where that chunk samples none."""

    sampled_tokens: list[int | None]
    logprobs_by_chunk: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Chunk index -> logprobs of its sampled token, for sequences that asked."""
    prompt_logprobs_by_chunk: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Chunk index -> logprobs of the prompt tokens start + 1 .. end (those that exist), for sequences that asked."""
    failure_by_chunk: dict[int, str] = field(default_factory=dict)
    """Chunk index -> why its answer cannot go on; its token means nothing."""
