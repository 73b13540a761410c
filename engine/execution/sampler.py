"""Logits -> tokens: penalties, masks, temperature, top-k, top-p, min-p, and logprobs, for all rows of a step at once.

A random token is drawn by inverting the cumulative distribution at one uniform number per row, which is a hash of the
request's seed and the output position (splitmix64, Steele et al., 2014). So a seeded request draws the same numbers
in whatever company it is computed; its tokens differ only where the logits themselves do.

Order of operations is vLLM's: bias and min_tokens, penalties, (greedy rows end here) temperature, min_p, top_k, top_p.
Logprobs are of the model's raw logits. A row of NaN logits yields some token of the vocabulary, never an error.

The kernels draw (`kernels.sampling`): on a GPU everything is queued and the host waits once, for the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.logprobs import read_logprobs, token_logprobs
from engine.types import SamplingParams, Sequence, TokenLogprobs
from kernels.sampling import Draws, draw
from kernels.transfer import to_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position)."""
    z = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53, np.float64)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


@dataclass(slots=True)
class Row:
    """What the sampler keeps of a sequence from step to step; rebuilt from the sequence whenever it is not there."""

    seq: Sequence
    seed: int
    counted: int
    """Output tokens that are in `counts`."""
    counts: dict[int, int] = field(default_factory=dict)
    """Output token -> how often, where a penalty needs it."""
    seen: set[int] | None = None
    """Distinct tokens of prompt and output (the counted ones), where repetition_penalty needs them."""


@dataclass(slots=True)
class Batch:
    """The sampling parameters of a step's rows; reused while the same sequences come in the same order."""

    sequences: list[Sequence]
    rows: list[Row]
    adjusted: list[int]
    """Rows whose logits are changed before anything is drawn."""
    logprobs: list[int]
    """Rows that want logprobs."""
    logprob_rows: Tensor | None
    """These on the device; None where all rows or none want them."""
    drawn: list[int]
    """Rows that are not greedy."""
    seeds: npt.NDArray[np.uint64]
    """Of the drawn rows."""
    draws: Draws
    """But for the numbers in [0, 1), which are each step's own."""


class Sampler:
    """Samples the next token of each sequence."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        draw: Callable[[Tensor, Draws], Tensor] = draw,
    ) -> None:
        """`eos_token_ids`: the files of a checkpoint may name some that have no logit. `draw`: `Kernels.draw`."""
        self._vocab_size = vocab_size
        self._device = device
        self._eos = tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
        self._seed = seed
        self._draw = draw
        self._batch: Batch | None = None

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The next token of each row, and row -> logprobs where asked for. logits: [rows, vocab], left unchanged."""
        batch = self._batch_of(sequences)
        changed = self._adjust(logits, batch) if batch.adjusted else logits
        tokens = self._draw(changed, replace(batch.draws, at=self._numbers(batch)))
        if not batch.logprobs:
            return to_host(tokens), {}
        raw, chosen = logits, tokens
        if batch.logprob_rows is not None:
            raw, chosen = logits.index_select(0, batch.logprob_rows), tokens.index_select(0, batch.logprob_rows)
        wanted = [sequences[i].request.params.logprobs or 0 for i in batch.logprobs]
        entries = token_logprobs(raw, chosen, wanted)  # queued before the host waits for the tokens
        return to_host(tokens), dict(zip(batch.logprobs, read_logprobs(entries, wanted), strict=True))

    def _numbers(self, batch: Batch) -> Tensor:
        """[rows] fp64 in [0, 1): where each row's distribution is inverted in this step."""
        if not batch.drawn:
            return batch.draws.at
        numbers = np.zeros(len(batch.sequences))
        numbers[batch.drawn] = uniforms(batch.seeds, _positions(batch))
        return to_device(numbers, self._device)

    def _batch_of(self, sequences: list[Sequence]) -> Batch:
        last = self._batch
        if last is not None and last.sequences == sequences:  # sequences are compared by identity
            return last
        known = {row.seq: row for row in last.rows} if last is not None else {}
        rows = [known.get(seq) or self._row(seq) for seq in sequences]
        self._batch = self._new_batch(list(sequences), rows)
        return self._batch

    def _row(self, seq: Sequence) -> Row:
        params = seq.request.params
        seed = params.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._seed}/{seq.request.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        row = Row(seq, seed & (2**64 - 1), counted=0)
        if params.repetition_penalty != 1.0:
            row.seen = set(seq.token_ids[: seq.prompt_len])
        return row

    def _new_batch(self, sequences: list[Sequence], rows: list[Row]) -> Batch:
        params = [seq.request.params for seq in sequences]
        drawn = [i for i, p in enumerate(params) if p.temperature > 0.0]
        logprobs = [i for i, p in enumerate(params) if p.logprobs is not None]
        some = 0 < len(logprobs) < len(sequences)
        return Batch(
            sequences=sequences,
            rows=rows,
            adjusted=[i for i, p in enumerate(params) if _adjusts(p)],
            logprobs=logprobs,
            logprob_rows=to_device(np.array(logprobs, np.int64), self._device) if some else None,
            drawn=drawn,
            seeds=np.array([rows[i].seed for i in drawn], np.uint64),
            draws=self._draws(params),
        )

    def _draws(self, params: Rows[SamplingParams]) -> Draws:
        """Of all rows, with 0 as the number of each."""
        vocab, count = self._vocab_size, len(params)
        # Columns of a multiple of 16 bytes: kernels are compiled anew for pointers that are aligned otherwise.
        kinds = np.zeros((3, -(-count // 4) * 4), np.float32)
        kinds[0, :count] = [max(p.temperature, 1e-5) if p.temperature > 0.0 else 0.0 for p in params]
        kinds[1, :count] = [p.min_p for p in params]
        kinds[2, :count] = [p.top_p for p in params]
        temperature, min_p, top_p = to_device(kinds, self._device)[:, :count].unbind()
        top_k = np.array([p.top_k if 0 < p.top_k < vocab else vocab for p in params], np.int32)
        return Draws(
            temperature, min_p, to_device(top_k, self._device), top_p,
            torch.zeros(count, dtype=torch.float64, device=self._device),
        )  # fmt: skip

    def _adjust(self, logits: Tensor, batch: Batch) -> Tensor:
        """A float copy of the logits with bias, min_tokens and penalties applied to the rows that have them."""
        changed = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
        flat = changed.view(-1)
        biased, banned, repeated, counted = list[Changes](), list[Changes](), list[Changes](), list[Changes]()
        for i in batch.adjusted:
            row, at = batch.rows[i], (i, logits.shape[1])
            params = row.seq.request.params
            if params.logit_bias:
                biased.append(Changes.of(params.logit_bias, params.logit_bias.values(), at))
            if row.seq.output_len < params.min_tokens:
                banned.append(Changes.of([*self._eos, *params.stop_token_ids], None, at))
            if _penalises(params):
                _count(row)
                if row.seen is not None:
                    repeated.append(Changes.of(row.seen, params.repetition_penalty, at))
                amounts = np.fromiter(row.counts.values(), np.float32, len(row.counts))
                amounts = params.frequency_penalty * amounts + params.presence_penalty
                counted.append(Changes.of(row.counts, -amounts, at))
        if biased:
            flat.index_add_(0, *self._there(biased))
        if banned:
            flat.index_fill_(0, self._there(banned)[0], float("-inf"))
        if repeated:
            places, penalties = self._there(repeated)
            old = flat.index_select(0, places)
            flat.index_copy_(0, places, torch.where(old > 0, old / penalties, old * penalties))
        if counted:
            flat.index_add_(0, *self._there(counted))
        return changed

    def _there(self, changes: list[Changes]) -> tuple[Tensor, Tensor]:
        """(places, amounts) of all of them, on the device."""
        places = np.concatenate([change.places for change in changes])
        amounts = np.concatenate([change.amounts for change in changes])
        return to_device(places, self._device), to_device(amounts, self._device)


@dataclass(frozen=True, slots=True)
class Changes:
    """What is done to some logits of one row."""

    places: npt.NDArray[np.int64]
    """In the flat logits of all rows; distinct."""
    amounts: npt.NDArray[np.float32]

    @staticmethod
    def of(
        tokens: Collection[int],
        amounts: Collection[float] | npt.NDArray[np.float32] | float | None,
        at: tuple[int, int],
    ) -> Changes:
        """`amounts`: one for each token, or one for all; None where it is the place alone that counts.

        `at`: the row, and how many logits a row has.
        """
        row, width = at
        places = np.fromiter(tokens, np.int64, len(tokens))
        assert not len(places) or 0 <= places.min() <= places.max() < width, "a token outside of its row's logits"
        places += row * width
        if isinstance(amounts, Collection):
            return Changes(places, np.fromiter(amounts, np.float32, len(tokens)))
        return Changes(places, np.full(len(tokens), amounts or 0.0, np.float32))


def _count(row: Row) -> None:
    """Take in what the sequence has generated since it was last sampled."""
    seq = row.seq
    new = seq.token_ids[seq.prompt_len + row.counted :]
    for token in new:
        row.counts[token] = row.counts.get(token, 0) + 1
    if row.seen is not None:
        row.seen.update(new)
    row.counted = seq.output_len


def _positions(batch: Batch) -> npt.NDArray[np.uint64]:
    """The output position of each drawn row."""
    return np.array([batch.rows[i].seq.output_len for i in batch.drawn], np.uint64)


def to_host(tokens: Tensor) -> list[int]:
    """The tokens of a step: where the host waits for the device."""
    chosen: list[int] = tokens.tolist()
    return chosen


def _penalises(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or p.min_tokens > 0 or _penalises(p)
