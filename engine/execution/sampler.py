"""Logits -> tokens: penalties, masks, temperature, top-k, top-p, min-p, and logprobs, for all rows of a step at once.

A random token is drawn by inverting the cumulative distribution at one uniform number per row, which is a hash of the
request's seed and the output position (splitmix64, Steele et al., 2014). So a seeded request draws the same numbers
in whatever company it is computed; its tokens differ only where the logits themselves do.

Order of operations is vLLM's: bias and min_tokens, penalties, what a constraint allows, (greedy rows end here)
temperature, min_p, top_k, top_p.
Logprobs are of the model's raw logits. A row of NaN logits yields some token of the vocabulary, never an error.

The kernels draw (`kernels.sampling`): on a GPU everything is queued, and nothing here waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.logprobs import token_logprobs
from engine.execution.masks import CpuMasks, MaskRequest, Masks, TokenMasks
from engine.execution.penalties import Penalties, PenaltyStep, penalises, penalty_rows
from engine.types import Request, SamplingParams, Sequence
from kernels import Kernels
from kernels.counts import PenaltyRows
from kernels.interface import IntArray
from kernels.reference.backend import ReferenceKernels
from kernels.sampling import Draws, Kinds
from kernels.transfer import to_device

_GOLDEN, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_11, _27, _30, _31 = map(np.uint64, (11, 27, 30, 31))

_AHEAD = 16
"""Steps whose random numbers are made at once."""


def uniforms_at(mixed: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (mixed seed, position). A request's mixed seed is the same in all of its steps."""
    z = _mix(mixed + positions * _GOLDEN)
    z >>= _11
    return np.multiply(z, 2.0**-53, dtype=np.float64)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """In place."""
    z ^= z >> _30
    z *= _FIRST
    z ^= z >> _27
    z *= _SECOND
    z ^= z >> _31
    return z


@dataclass(slots=True)
class Batch:
    """The sampling parameters of a step's rows; reused while the same sequences come in the same order."""

    sequences: list[Sequence]
    rows: list[int]
    """Where what is kept of each sequence lies; see `Seats`."""
    prompt_lens: npt.NDArray[np.int64]
    adjusted: bool
    """Whether any row's logits are changed before anything is drawn."""
    bias: tuple[Tensor, Tensor] | None
    """(places in the flat logits, amounts) of logit_bias."""
    least: list[tuple[int, int, npt.NDArray[np.int64]]]
    """(row, min_tokens, places of the tokens that are banned so long) of each row with min_tokens and no constraint."""
    constrained: list[int]
    """Rows whose answer must match something."""
    penalised: list[int]
    penalised_rows: IntArray
    """Where what is kept of these lies."""
    penalties: PenaltyRows | None
    """Of the rows `penalised`."""
    logprobs: list[int]
    """Rows that want logprobs."""
    logprob_counts: list[int]
    """How many of the likeliest tokens each of these wants."""
    logprob_rows: Tensor | None
    """These on the device; None where all rows or none want them."""
    drawn: IntArray
    """Rows that are not greedy."""
    seeds: npt.NDArray[np.uint64]
    """Of the drawn rows, mixed."""
    draws: Draws
    """But for the numbers in [0, 1), which are each step's own."""
    ahead: tuple[IntArray, Tensor] | None = None
    """(positions, [steps, rows] of these numbers): row i is of the step that is at i more than these positions."""


@dataclass(slots=True)
class Draft:
    """What the host knows of a step's sampling before there are logits."""

    batch: Batch
    at: Tensor
    """[rows] fp64 in [0, 1): where each row's distribution is inverted in this step."""
    banned: Tensor | None
    """Places in the flat logits."""
    penalties: PenaltyStep | None
    wanted: list[MaskRequest]
    """Of the constrained rows."""
    allowed: Future[TokenMasks] | None = None
    """What these may draw, once it is being made."""


class Sampler:
    """Samples the next token of each sequence: `draft` on the host, then `sample` on the device."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        ops: Kernels | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`eos_token_ids`: the files of a checkpoint may name some that have no logit. `ops`: None: plain torch.

        `masks`: None where no answer is constrained.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._eos = tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
        self._seed = seed
        ops = ReferenceKernels(device) if ops is None else ops
        self._draw = ops.draw
        self._batch: Batch | None = None
        self._penalties = Penalties(device, ops.penalise, ops.count_drawn)
        self._masks = masks
        self._banned: tuple[list[int], Tensor | None] = ([], None)
        """The rows that min_tokens banned tokens of last, and the places of these."""

    def forget(self, rows: Rows[int] | None = None) -> None:
        """What is kept in these rows (None: in all) is not of the sequences that come there next."""
        self._penalties.forget(rows)
        if self._masks is not None:
            self._masks.forget(rows)
        self._batch = None if rows is None else self._batch

    def draft(self, sequences: list[Sequence], ends: IntArray, rows: list[int], row_count: int) -> Draft:
        """The host's part of drawing the token at position `ends[i]` of each sequence, what is kept in row `rows[i]`.

        Of a sequence that comes in every step the token before may be on the device only.
        """
        batch = self._batch
        if batch is None or batch.sequences != sequences or batch.rows != rows:  # sequences compare by identity
            batch = self._batch = self._new_batch(list(sequences), list(rows))
            self._banned = ([], None)
        positions = ends - batch.prompt_lens
        at = self._numbers(batch, positions) if len(batch.drawn) else batch.draws.at
        banned = [i for i, (row, least, _) in enumerate(batch.least) if positions[row] < least]
        if banned != self._banned[0]:
            places = to_device(np.concatenate([batch.least[i][2] for i in banned]), self._device) if banned else None
            self._banned = (banned, places)
        penalties = None
        if batch.penalised:
            penalties = self._penalties.draft(batch.penalised_rows, batch.penalised, sequences, row_count)
        return Draft(batch, at, self._banned[1], penalties, self._want(batch, ends, positions))

    def _want(self, batch: Batch, ends: IntArray, positions: npt.NDArray[np.int64]) -> list[MaskRequest]:
        wanted = []
        for i in batch.constrained:
            assert self._masks is not None, "an answer is constrained, and there are no grammars"
            seq = batch.sequences[i]
            banned = self._ends(seq.request.params) if positions[i] < seq.request.params.min_tokens else []
            wanted.append(self._masks.make_request(i, batch.rows[i], seq, int(ends[i]), banned))
        return wanted

    def _numbers(self, batch: Batch, positions: IntArray) -> Tensor:
        """[rows] fp64 in [0, 1), 0 for those that are greedy. Of a batch that comes again some are made ahead."""
        if batch.ahead is not None:
            first, numbers = batch.ahead
            step = int(positions[0] - first[0])
            if 0 <= step < len(numbers) and (positions - first == step).all():
                return numbers[step, : len(positions)]
        steps = np.arange(1 if batch.ahead is None else _AHEAD)
        # Rows of a multiple of 16 bytes: kernels are compiled anew for pointers that are aligned otherwise.
        here = np.zeros((len(steps), -(-len(positions) // 2) * 2))
        here[:, batch.drawn] = uniforms_at(batch.seeds, (positions[batch.drawn] + steps[:, None]).astype(np.uint64))
        batch.ahead = positions, to_device(here, self._device)
        return batch.ahead[1][0, : len(positions)]

    def begin(self, draft: Draft, drawn: Callable[[], Mapping[int, int]]) -> None:
        """Make what constrained rows may draw, on a thread. `drawn`: row -> the token of the step before."""
        if draft.wanted:
            assert self._masks is not None
            draft.allowed = self._masks.submit(draft.wanted, drawn)

    def failed(self, draft: Draft) -> dict[int, str]:
        """After `sample`: row -> why its answer cannot go on."""
        return {} if draft.allowed is None else draft.allowed.result().failures

    def sample(self, logits: Tensor, draft: Draft) -> tuple[Tensor, list[Tensor]]:
        """(the next token of each row, [rows] int64; `token_logprobs` of the rows `draft.batch.logprobs`).

        logits: [rows, vocab], changed unless somebody wants logprobs. Nothing is waited for where the kernels draw, but
        for what constraints allow.
        """
        batch = draft.batch
        changed = self._adjust(logits, draft) if batch.adjusted else logits
        kinds = batch.draws
        draws = Draws(
            kinds.temperature, kinds.min_p, kinds.top_k, kinds.top_p, draft.at, kinds.kinds, draft.allowed is not None
        )
        few = None if draft.allowed is None else draft.allowed.result().cpu_masks
        tokens = (
            self._draw(changed, draws) if few is None or not few.short_rows else self._draw_some(changed, draws, few)
        )
        if batch.penalties is not None:
            assert draft.penalties is not None
            self._penalties.count(tokens, batch.penalties, draft.penalties)
        if not batch.logprobs:
            return tokens, []
        raw, chosen = logits, tokens
        if batch.logprob_rows is not None:
            raw, chosen = logits.index_select(0, batch.logprob_rows), tokens.index_select(0, batch.logprob_rows)
        return tokens, token_logprobs(raw, chosen, max(batch.logprob_counts))

    def _draw_some(self, logits: Tensor, draws: Draws, masks: CpuMasks) -> Tensor:
        """[rows]: of rows in which few tokens may be drawn only these are looked at."""
        few = set(masks.short_rows)
        rest = [row for row in range(len(logits)) if row not in few]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        if rest:
            tokens[rest] = self._draw(logits[rest], draws.of(rest))
        places, ids = torch.tensor(masks.short_rows), torch.from_numpy(masks.short_row_ids)
        there = ids.clamp(min=0)
        values = logits.view(-1)[there + places[:, None] * self._vocab_size].masked_fill_(ids < 0, float("-inf"))
        drawn = self._draw(values, draws.of(places))
        tokens[places] = there.gather(1, drawn[:, None])[:, 0]
        return tokens

    def _new_batch(self, sequences: list[Sequence], rows: list[int]) -> Batch:
        params = [seq.request.params for seq in sequences]
        drawn = [i for i, p in enumerate(params) if p.temperature > 0.0]
        logprobs = [i for i, p in enumerate(params) if p.logprobs is not None]
        penalised = [i for i, p in enumerate(params) if penalises(p)]
        some = 0 < len(logprobs) < len(sequences)
        return Batch(
            sequences=sequences,
            rows=rows,
            prompt_lens=np.array([seq.prompt_len for seq in sequences]),
            adjusted=any(p.logit_bias or p.min_tokens or penalises(p) or p.constraint for p in params),
            bias=self._bias(params),
            least=[
                (i, p.min_tokens, self._places(i, self._ends(p)))
                for i, p in enumerate(params) if p.min_tokens and p.constraint is None
            ],
            constrained=[i for i, p in enumerate(params) if p.constraint is not None],
            penalised=penalised,
            penalised_rows=np.array([rows[i] for i in penalised], np.int64),
            penalties=penalty_rows(params, penalised, [rows[i] for i in penalised], self._device)
            if penalised else None,
            logprobs=logprobs,
            logprob_counts=[params[i].logprobs or 0 for i in logprobs],
            logprob_rows=to_device(np.array(logprobs, np.int64), self._device) if some else None,
            drawn=np.array(drawn, np.int64),
            seeds=_mix(np.array([self._row_seed(sequences[i].request) for i in drawn], np.uint64) + _GOLDEN),
            draws=self._draws(params),
        )  # fmt: skip

    def _row_seed(self, request: Request) -> int:
        if (seed := request.params.seed) is None:
            digest = hashlib.blake2b(f"{self._seed}/{request.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return seed & (2**64 - 1)

    def _bias(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor] | None:
        biased = [(i, p.logit_bias) for i, p in enumerate(params) if p.logit_bias]
        if not biased:
            return None
        places = np.concatenate([self._places(i, list(bias)) for i, bias in biased])
        amounts = np.array([amount for _, bias in biased for amount in bias.values()], np.float32)
        return to_device(places, self._device), to_device(amounts, self._device)

    def _ends(self, params: SamplingParams) -> list[int]:
        """Tokens that min_tokens bans."""
        return [*self._eos, *params.stop_token_ids]

    def _places(self, row: int, tokens: list[int]) -> npt.NDArray[np.int64]:
        """Of the row's tokens in the flat logits."""
        places = np.array(tokens, np.int64)
        assert not len(places) or 0 <= places.min() <= places.max() < self._vocab_size, "a token without a logit"
        return places + row * self._vocab_size

    def _draws(self, params: Rows[SamplingParams]) -> Draws:
        """Of all rows, with 0 as the number of each."""
        vocab, count = self._vocab_size, len(params)
        # Columns of a multiple of 16 bytes: kernels are compiled anew for pointers that are aligned otherwise.
        kinds = np.zeros((3, -(-count // 4) * 4), np.float32)
        kinds[0, :count] = [max(p.temperature, 1e-5) if p.temperature > 0.0 else 0.0 for p in params]
        kinds[1, :count] = [p.min_p for p in params]
        kinds[2, :count] = [p.top_p for p in params]
        temperature, min_p, top_p = to_device(kinds, self._device)[:, :count].unbind()
        top_k = np.array([self._top_k(p) or vocab for p in params], np.int32)
        return Draws(
            temperature, min_p, to_device(top_k, self._device), top_p,
            torch.zeros(count, dtype=torch.float64, device=self._device), self._kinds(params),
        )  # fmt: skip

    def _kinds(self, params: Rows[SamplingParams]) -> Kinds:
        drawn = [(i, self._top_k(p) or p.top_p < 1.0) for i, p in enumerate(params) if p.temperature > 0.0]
        return Kinds([i for i, cut in drawn if not cut], [i for i, cut in drawn if cut])

    def _top_k(self, params: SamplingParams) -> int:
        """top_k where it cuts anything, else 0."""
        return params.top_k if 0 < params.top_k < self._vocab_size else 0

    def _adjust(self, logits: Tensor, draft: Draft) -> Tensor:
        """The logits as floats, changed. Whatever changes logits before a draw has its place here, in order."""
        changed = logits.float()
        if changed is logits and draft.batch.logprobs:
            changed = logits.clone()
        batch, flat = draft.batch, changed.view(-1)
        if batch.bias is not None:
            flat.index_add_(0, *batch.bias)
        if draft.banned is not None:
            flat.index_fill_(0, draft.banned, float("-inf"))
        if batch.penalties is not None:
            assert draft.penalties is not None
            self._penalties.apply(changed, batch.penalties, draft.penalties)
        if draft.allowed is not None:
            assert self._masks is not None
            self._masks.apply(changed, draft.allowed.result())
        return changed
