"""Logits to tokens: penalties, masks, temperature, top-k, top-p, min-p, and logprobs, for all rows of a step at once.

A random token is drawn by inverting the cumulative distribution at one uniform number per row. That number is a hash of
the request's seed and the output position (splitmix64, Steele et al., 2014). So a seeded request gets the same numbers
in every batch, and its tokens differ only if the logits do.

The order of operations is vLLM's: bias and min_tokens, penalties, masks of constraints, then for random rows
temperature, min_p, top_k, top_p. Logprobs are computed from the model's raw logits. A row of NaN logits yields some
token of the vocabulary, which the runner reports as one that means nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.execution.logprobs import compute_token_logprobs
from engine.execution.masks import MaskRequest, Masks, TokenMasks
from engine.execution.penalties import Penalties, PenaltyRows, PenaltyStep, make_penalty_rows
from engine.types import Request, SamplingParams, Sequence
from kernels import Kernels
from kernels.host_copies import copy_to_device
from kernels.interface import IntArray
from kernels.reference.backend import ReferenceKernels
from kernels.sampling import DrawSettings

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MIX_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)
"""(shift, factor) of each round of splitmix64."""
_FRACTION_SHIFT = np.uint64(11)
"""Bits to drop from 64, because a float has a fraction of 53 bits."""

_TEMPERATURE_MIN = 1e-5
"""Lowest positive temperature: logits divided by a lower one could overflow."""


def compute_uniforms(mixed: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a pseudo-random number in [0, 1) for each request. `mixed`: the request's seed, after `_mix`."""
    values = _mix(mixed + positions * _INCREMENT)
    values >>= _FRACTION_SHIFT
    return np.multiply(values, 2.0**-53, dtype=np.float64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each number, in place (splitmix64)."""
    for shift, factor in _MIX_ROUNDS:
        values ^= values >> shift
        values *= factor
    return values


class LogitBias(NamedTuple):
    """Amounts that are added to logits, for all rows of a batch."""

    indices: Tensor
    """[amounts] int64: indices into the flat logits."""
    amounts: Tensor
    """[amounts] fp32"""


class MinTokensBan(NamedTuple):
    """Tokens that a row may not draw before its output has `min_tokens` tokens."""

    row: int
    min_tokens: int
    banned_indices: npt.NDArray[np.int64]
    """[tokens]: indices into the flat logits."""


class LogprobRows(NamedTuple):
    """Rows of a batch that want logprobs of the drawn token and of the likeliest tokens."""

    rows: list[int]
    top_counts: list[int]
    """Number of likeliest tokens that each of the rows wants."""
    device_rows: Tensor | None
    """`rows` on the device; None if these are all rows of the batch."""


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of a step, one row for each sequence. Kept while the steps have the same sequences."""

    sequences: list[Sequence]
    table_rows: list[int]
    """Row of each sequence in tables that stay on the device from step to step."""
    prompt_lens: npt.NDArray[np.int64]
    settings: DrawSettings
    """Temperature, top_k, top_p and so on. Each step adds its uniform random numbers."""
    random_rows: IntArray
    """Rows that are not greedy."""
    mixed_seeds: npt.NDArray[np.uint64]
    """Seed of each of the `random_rows`, with its bits mixed by a hash."""
    logit_bias: LogitBias | None
    min_token_bans: list[MinTokensBan]
    """Tokens that end an answer, for each row with min_tokens and without a grammar."""
    constrained_rows: list[int]
    """Rows with an answer that must match a grammar."""
    penalty_rows: PenaltyRows | None
    logprobs: LogprobRows | None


@dataclass(slots=True)
class SamplingInputs:
    """Inputs of one step's sampling that change from step to step. Made before the logits are."""

    batch: SamplingBatch
    settings: DrawSettings
    """Settings of the batch, with this step's uniform random numbers."""
    banned_indices: Tensor | None
    """Indices into the flat logits of the tokens that min_tokens bans."""
    penalty_step: PenaltyStep | None
    token_masks: Future[TokenMasks] | None
    """Masks of constrained rows, which a thread makes beside the forward pass."""


class Sampler:
    """Draws the next token of each sequence: `prepare` on the host, then `sample` on the device."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        ops: Kernels | None = None,
        masks: Masks | None = None,
        row_count: int = 256,
        length_max: int | None = None,
    ) -> None:
        """Make a sampler, which draws the tokens of up to `row_count` sequences at a time.

        `eos_token_ids`: tokens that end an answer, which min_tokens bans. `seed`: for requests without a seed of their
        own. `ops`: the kernels that draw; None: plain PyTorch. `masks`: makes the masks of answers with a grammar;
        None: no answer has one. `length_max`: most tokens of a sequence; None: no limit.
        """
        self._vocab_size = vocab_size
        self._device = device
        # Some checkpoints name ids outside the vocabulary, which have no logit.
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
        self._seed = seed
        self._draw = (ReferenceKernels(device) if ops is None else ops).draw
        self._penalties = Penalties(row_count, vocab_size, device, length_max)
        self._masks = masks

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the state of these rows, because other sequences get them next."""
        self._penalties.reset_rows(rows)
        if self._masks is not None:
            self._masks.reset_rows(rows)

    def prepare(
        self, batch: SamplingBatch, ends: IntArray, read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> SamplingInputs:
        """Prepare, on the host, to draw the token at position `ends[i]` of sequence i of the batch.

        The token before it need not be known on the host. A thread begins to make the masks of constrained rows. It
        calls `read_last_tokens`, which waits for the previous step, and returns the token drawn for each table row.
        """
        positions = ends - batch.prompt_lens
        settings = batch.settings
        if len(batch.random_rows):
            settings = replace(settings, uniforms=self._make_uniforms(batch, positions))
        bans = [ban.banned_indices for ban in batch.min_token_bans if positions[ban.row] < ban.min_tokens]
        token_masks = None
        if batch.constrained_rows:
            assert self._masks is not None, "an answer is constrained, and there are no grammars"
            requests = [
                self._make_mask_request(self._masks, batch, row, int(ends[row])) for row in batch.constrained_rows
            ]
            token_masks = self._masks.submit(requests, read_last_tokens)
        return SamplingInputs(
            batch=batch,
            settings=settings,
            banned_indices=copy_to_device(np.concatenate(bans), self._device) if bans else None,
            penalty_step=None if batch.penalty_rows is None else self._penalties.prepare(batch.penalty_rows),
            token_masks=token_masks,
        )

    def _make_mask_request(self, masks: Masks, batch: SamplingBatch, row: int, end: int) -> MaskRequest:
        """Make the input of a constrained row's mask. `end`: position of the token that is drawn."""
        seq = batch.sequences[row]
        params = seq.request.params
        banned_tokens = self._list_banned_tokens(params) if end - seq.prompt_len < params.min_tokens else []
        return masks.make_request(row, batch.table_rows[row], seq, end, banned_tokens)

    def _make_uniforms(self, batch: SamplingBatch, positions: IntArray) -> Tensor:
        """Return uniform numbers, [rows] fp64 in [0, 1), 0 for greedy rows."""
        host_uniforms = np.zeros(len(positions))
        host_uniforms[batch.random_rows] = compute_uniforms(
            batch.mixed_seeds, positions[batch.random_rows].astype(np.uint64)
        )
        return copy_to_device(host_uniforms, self._device)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, list[Tensor]]:
        """Draw the next token of each row. logits: [rows, vocab], which may be changed.

        Returns the tokens, [rows] int64, and `compute_token_logprobs` of the rows that want logprobs: an empty list if
        none does. Both are on the device. The host waits for masks, and for nothing else.
        """
        batch = inputs.batch
        adjustments = (batch.logit_bias, inputs.banned_indices, inputs.penalty_step, inputs.token_masks)
        has_adjustments = any(adjustment is not None for adjustment in adjustments)
        tokens = self._draw(self._adjust_logits(logits, inputs) if has_adjustments else logits, inputs.settings)
        if inputs.penalty_step is not None:
            self._penalties.count_sampled(tokens, inputs.penalty_step)
        if batch.logprobs is None:
            return tokens, []
        logprob_tokens = tokens
        if batch.logprobs.device_rows is not None:
            logits = logits.index_select(0, batch.logprobs.device_rows)
            logprob_tokens = tokens.index_select(0, batch.logprobs.device_rows)
        return tokens, compute_token_logprobs(logits, logprob_tokens, max(batch.logprobs.top_counts))

    def close(self) -> None:
        """End the thread that makes masks."""
        if self._masks is not None:
            self._masks.close()

    def make_batch(self, sequences: list[Sequence], table_rows: list[int]) -> SamplingBatch:
        """Collect the sampling parameters of a batch's sequences. `table_rows`: their rows in tables on the device."""
        params = [seq.request.params for seq in sequences]
        random_rows = [row for row, p in enumerate(params) if p.temperature > 0.0]
        seeds = [self._compute_seed(sequences[row].request) for row in random_rows]
        return SamplingBatch(
            sequences=sequences,
            table_rows=table_rows,
            prompt_lens=np.array([seq.prompt_len for seq in sequences]),
            settings=self._build_draw_settings(params),
            random_rows=np.array(random_rows, np.int64),
            mixed_seeds=_mix(np.array(seeds, np.uint64) + _INCREMENT),
            logit_bias=self._build_logit_bias(params),
            min_token_bans=[
                MinTokensBan(row, p.min_tokens, self._to_flat_indices(row, self._list_banned_tokens(p)))
                for row, p in enumerate(params)
                if p.min_tokens and p.constraint is None
            ],
            constrained_rows=[row for row, p in enumerate(params) if p.constraint is not None],
            penalty_rows=make_penalty_rows(sequences, table_rows, self._device),
            logprobs=self._find_logprob_rows(params),
        )

    def _find_logprob_rows(self, params: list[SamplingParams]) -> LogprobRows | None:
        """Return the rows that want logprobs; None if no row does."""
        counts_by_row = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        if not counts_by_row:
            return None
        rows, has_all_rows = list(counts_by_row), len(counts_by_row) == len(params)
        device_rows = None if has_all_rows else copy_to_device(np.array(rows, np.int64), self._device)
        return LogprobRows(rows, list(counts_by_row.values()), device_rows)

    def _compute_seed(self, request: Request) -> int:
        """Return the request's seed as 64 bits; without one, a hash of its id and of the engine's seed."""
        seed = request.params.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._seed}/{request.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return seed & (2**64 - 1)

    def _build_logit_bias(self, params: list[SamplingParams]) -> LogitBias | None:
        """Return the logit bias of all rows; None if no request has one."""
        biased_rows = [(i, p.logit_bias) for i, p in enumerate(params) if p.logit_bias]
        if not biased_rows:
            return None
        indices = np.concatenate([self._to_flat_indices(i, list(bias)) for i, bias in biased_rows])
        amounts = np.array([amount for _, bias in biased_rows for amount in bias.values()], np.float32)
        return LogitBias(copy_to_device(indices, self._device), copy_to_device(amounts, self._device))

    def _list_banned_tokens(self, params: SamplingParams) -> list[int]:
        """Return the tokens that a request may not draw before its output has `min_tokens` tokens."""
        return [*self._eos_token_ids, *params.stop_token_ids]

    def _to_flat_indices(self, row: int, tokens: list[int]) -> npt.NDArray[np.int64]:
        """Return the indices of a row's tokens in the flat logits."""
        indices = np.array(tokens, np.int64)
        assert not len(indices) or 0 <= indices.min() <= indices.max() < self._vocab_size, "a token without a logit"
        return indices + row * self._vocab_size

    def _build_draw_settings(self, params: Rows[SamplingParams]) -> DrawSettings:
        """Copy the sampling parameters of all rows to the device, in the form that the kernels take.

        Temperature 0 means the likeliest token, and top_k as large as the vocabulary means no top_k. The uniform
        random numbers are zeros here; each step replaces them.
        """
        count = len(params)
        # Three settings go to the device in one copy. Each begins at a multiple of 16 bytes (four fp32 numbers),
        # because Triton would compile a kernel again for a pointer with another alignment.
        padded_count = ceil_div(count, 4) * 4
        host_values = np.zeros((3, padded_count), np.float32)
        host_values[0, :count] = [max(p.temperature, _TEMPERATURE_MIN) if p.temperature > 0.0 else 0.0 for p in params]
        host_values[1, :count] = [p.min_p for p in params]
        host_values[2, :count] = [p.top_p for p in params]
        temperature, min_p, top_p = copy_to_device(host_values, self._device)[:, :count].unbind()
        top_k = [p.top_k if 0 < p.top_k < self._vocab_size else self._vocab_size for p in params]
        return DrawSettings(
            temperature=temperature,
            min_p=min_p,
            top_k=copy_to_device(np.array(top_k, np.int32), self._device),
            top_p=top_p,
            uniforms=torch.zeros(count, dtype=torch.float64, device=self._device),
        )

    def _adjust_logits(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Return the logits, [rows, vocab] fp32, after logit_bias, min_tokens, penalties and grammars, as vLLM orders.

        The given logits may be changed, unless logprobs are wanted, which are computed from the raw logits.
        """
        batch = inputs.batch
        adjusted_logits = logits.float()  # a copy, unless the logits are fp32 already
        if adjusted_logits is logits and batch.logprobs is not None:
            adjusted_logits = logits.clone()
        flat_logits = adjusted_logits.view(-1)
        if batch.logit_bias is not None:
            flat_logits.index_add_(0, batch.logit_bias.indices, batch.logit_bias.amounts)
        if inputs.banned_indices is not None:
            flat_logits.index_fill_(0, inputs.banned_indices, float("-inf"))
        if inputs.penalty_step is not None:
            self._penalties.apply(adjusted_logits, inputs.penalty_step)
        if inputs.token_masks is not None:
            assert self._masks is not None
            self._masks.apply(adjusted_logits, inputs.token_masks.result())
        return adjusted_logits
