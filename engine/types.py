"""Types that the engine's parts share: a request, a sequence, a step's plan and its result.

No tensors, no sockets, no clock. Intervals are half-open: a chunk computes the positions [start, end).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import starmap
from typing import Annotated, NamedTuple, NewType

import msgspec
from msgspec import Meta

from prompts.chat_completions import (
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
"""Number of a KV block in one group: `unit * blocks_per_unit(group) + sub_block`. Block tables hold these numbers."""


class CopyDirection(enum.IntEnum):
    """Memories between which a block is copied."""

    WITHIN_DEVICE = 0
    TO_HOST = 1
    FROM_HOST = 2


class BlockCopy(NamedTuple):
    """A copy of one block. Its kind is an attention group or, after the groups, recurrent state."""

    kind: int
    source: BlockId
    target: BlockId
    direction: CopyDirection = CopyDirection.WITHIN_DEVICE


class BlockPlace(NamedTuple):
    """Memory that holds the content of a block: on the device, or of the host."""

    kind: int
    block: BlockId
    is_on_host: bool = False


class RunnerLostError(RuntimeError):
    """Error after which no step can be computed, so that the engine must end. The message is one line."""


class FinishReason(str, enum.Enum):
    """Reason why a sequence ended. The value is OpenAI's `finish_reason`, if OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(msgspec.Struct, frozen=True):
    """A grammar that an answer must match, with the parts of the answer where it applies."""

    lark_grammar: str
    """The grammar in llguidance's dialect of Lark."""
    param: str
    """Field of the request that asks for the constraint, for errors."""
    reasoning_start_token: TokenIdField | None = None
    """First token of an answer that begins with reasoning; None: the prompt begins the reasoning, or there is none."""
    reasoning_end_token: TokenIdField | None = None
    """Token that ends the reasoning, up to which the answer is free; None: there is no reasoning."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of how a request's tokens are drawn, and when its answer ends. Names and defaults are vLLM's."""

    max_tokens: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: no limit."""
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
    """Format of the answer, such as a JSON schema, as users of the class `LLM` give it."""
    constraint: Constraint | None = None
    """Grammar of that format, which the engine uses."""


class KVSource(msgspec.Struct, frozen=True):
    """Peer that may have the KV of a prompt."""

    host: str
    port: int
    cached_tokens: int | None = None
    """Tokens of the prompt that the peer has, as far as a router knows; None: the peer is asked."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. The HTTP process makes one request for each of a client's `n` samples."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: Salt | None = None
    lora_name: str | None = None
    priority: Int64 = 0
    """Lower is served earlier."""
    resumed_output_len: int = 0
    """Number of the last `token_ids` that are the beginning of the answer, which another worker generated."""
    kv_source: KVSource | None = None
    """Peer from which blocks are pulled before the request is queued."""


_TOP_LOGPROB = struct.Struct("<id")


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log probabilities at one position of a sequence: of its token, and of the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    """1 = the likeliest token of the vocabulary."""
    packed_top_logprobs: bytes
    """`top_logprobs` as 12 bytes a pair, which takes less memory than tuples."""

    @classmethod
    def pack(cls, token_id: int, logprob: float, rank: int, top_logprobs: Iterable[tuple[int, float]]) -> TokenLogprobs:
        """Make the logprobs of a position. `top_logprobs`: (token id, logprob) of the likeliest tokens, best first."""
        return cls(token_id, logprob, rank, b"".join(starmap(_TOP_LOGPROB.pack, top_logprobs)))

    @property
    def top_logprobs(self) -> list[tuple[int, float]]:
        """(token id, logprob) of the likeliest tokens, best first."""
        return list(_TOP_LOGPROB.iter_unpack(self.packed_top_logprobs))

    @property
    def pair_count(self) -> int:
        """Number of (token, logprob) pairs, including the position's own token."""
        return 1 + len(self.packed_top_logprobs) // _TOP_LOGPROB.size


def count_logprobs(positions: Items[TokenLogprobs | None]) -> int:
    """Count the (token, logprob) pairs of these positions."""
    return sum(1 if position is None else position.pair_count for position in positions)


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one request's answer, from one forward step. The last output has a `finish_reason`."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """Token of the request's `stop_token_ids` that ended the answer; None if the model's own end token did."""
    cached_tokens: int | None = None
    """Tokens that the prefix cache had, of an answer to resume, too; only in a request's first output."""
    queue_s: float | None = None
    """Seconds that the request waited before its first step; only in its first output."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    is_client_error: bool = False
    """Whether the request caused the error, such as by a grammar that cannot be followed."""

    @classmethod
    def from_error(cls, request_id: str, message: str, *, is_client_error: bool = False) -> SequenceOutput:
        """Make the last output of a request that ends with an error. `message`: the reason, for the client."""
        return cls(
            request_id=request_id,
            token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=message,
            is_client_error=is_client_error,
        )


@dataclass(slots=True, eq=False)
class BlockKey:
    """Key of one block of a prompt in the prefix cache. Equal keys after equal prefixes mean equal KV."""

    hash: int
    """Hash of this block and of all blocks before it."""
    packed_tokens: bytes
    """Token ids of the block, packed into bytes to save memory."""
    extra_keys: tuple[str, ...] | None
    """LoRA name and cache salt as events announce them; None if the block has neither."""
    lora_name: str | None

    def equals(self, other: BlockKey) -> bool:
        """Return whether both blocks have the same tokens, LoRA and salt. Equal hashes do not prove that."""
        return self is other or (
            self.packed_tokens == other.packed_tokens
            and self.extra_keys == other.extra_keys
            and self.lora_name == other.lora_name
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine, with its tokens so far and the KV cache blocks that it holds.

    The scheduler plans steps, in each of which some more tokens are computed. A planned step counts as computed in
    `computed_tokens`, though it may still be in flight.
    """

    request: Request
    token_ids: list[int]
    """Prompt, and the answer so far."""
    prompt_len: int
    arrival_s: float
    start_s: float = 0.0
    """Time at which the request first began to run."""
    computed_tokens: int = 0
    """Leading tokens with KV in the blocks of `block_tables`: computed, or found in the prefix cache."""
    cached_tokens: int = 0
    """Tokens that the cache had when the request first began to run; an answer to resume counts, too."""
    host_tokens: int = 0
    """Tokens that came from host memory when the request last began to run."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Prefix cache keys of the leading blocks, as far as they were computed."""
    block_tables: list[list[BlockId]] = field(default_factory=list)
    """[group of attention layers][i]: the block with positions [i * block_size, (i + 1) * block_size)."""
    table_version: int = 0
    """Number of changes of `block_tables` other than appended blocks."""
    state_unit: UnitId | None = None
    """Unit of a running sequence's recurrent state; None for a model without state."""
    preemptions: int = 0
    """How often the request gave up its blocks and waited again."""

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


class Chunk(msgspec.Struct, gc=False):
    """One sequence's share of a step: compute the positions [start, end) of `seq.token_ids`."""

    seq: Sequence
    start: int
    end: int
    should_sample: bool
    """Whether the chunk reaches the end of the known tokens, so that the step samples the next token."""
    token_on_device: bool = False
    """Whether the chunk is the one token that the previous step samples, which only the device knows."""


@dataclass(slots=True)
class StepPlan:
    """Work of the runner in one step. A chunk that computes a block comes before the chunks that share it."""

    chunks: list[Chunk]
    state_resets: list[UnitId] = field(default_factory=list)
    """State units to zero before the forward pass, of sequences that start without a checkpoint."""
    state_checkpoints: list[BlockCopy] = field(default_factory=list)
    """Copies of the states of sequences to checkpoints, after the forward pass."""
    block_copies: list[BlockCopy] = field(default_factory=list)
    """Copies done in this order before everything else: of compactions, to and from host memory, and of checkpoints to
    the states of sequences."""


@dataclass(slots=True)
class StepResult:
    """Result of a step: `sampled_tokens[i]` is the token of `plan.chunks[i]`, None if that chunk samples none."""

    sampled_tokens: list[int | None]
    logprobs_by_chunk: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Chunk index -> logprobs of the sampled token, if the request wants them."""
    prompt_logprobs_by_chunk: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Chunk index -> logprobs of the prompt tokens start + 1 .. end that exist, if the request wants them."""
    failure_by_chunk: dict[int, str] = field(default_factory=dict)
    """Chunk index -> reason why the answer must end with an error; its sampled token means nothing."""
    nan_chunks: set[int] = field(default_factory=set)
    """Indices of chunks with logits that are not numbers, from which no token can be sampled."""
