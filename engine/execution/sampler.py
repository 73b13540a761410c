"""Logits -> tokens: penalties, masks, temperature, top-k, top-p, min-p, and logprobs, for all rows of a step at once.

A random token is drawn by inverting the cumulative distribution at one uniform number per row, which is a hash of the
request's seed and the output position (splitmix64, Steele et al., 2014). So a seeded request draws the same numbers
in whatever company it is computed; its tokens differ only where the logits themselves do.

Order of operations is vLLM's: bias and min_tokens, penalties, (greedy rows end here) temperature, min_p, top_k, top_p.
Logprobs are of the model's raw logits. A row of NaN logits yields some token of the vocabulary, never an error.

Where the kernels draw (`kernels.sampling`) everything is queued on the device and the host waits once, for the tokens.
Elsewhere, which is on a CPU, a few torch operations do the same; there a row with top_k or top_p inverts the
distribution from the likeliest token on, not by id, so the two ways draw different tokens from the same seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.logprobs import read_logprobs, token_logprobs
from engine.types import SamplingParams, Sequence, TokenLogprobs
from kernels.sampling import Draws, DrawsTokens
from kernels.transfer import to_device

CANDIDATES = 256
"""Rows with top_p but no top_k first look for their nucleus among so many likeliest tokens."""

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
class Cuts:
    """What the torch operations need to know of the rows that are drawn."""

    plain: list[int]
    """Positions in `drawn` of rows without top_k and top_p."""
    cut: list[int]
    """Positions in `drawn` of rows with top_k or top_p."""
    temperature: Tensor
    min_p: Tensor | None
    """log(min_p) of each drawn row, -inf for none; None where no row has it."""
    top_k: Tensor
    """Of the rows of `cut`; the vocabulary's size for none."""
    top_p: Tensor
    """Of the rows of `cut`; above 1 for none."""
    candidates: int


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
    draws: Draws | None
    """For kernels that draw; but for the numbers in [0, 1), which are each step's own."""
    cuts: Cuts | None
    """For the torch operations."""


class Sampler:
    """Samples the next token of each sequence."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        kernels: object = None,
    ) -> None:
        """`eos_token_ids`: the files of a checkpoint may name some that have no logit. `kernels`: draw if they can."""
        self._vocab_size = vocab_size
        self._device = device
        self._eos = tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
        self._seed = seed
        self._kernels = kernels if isinstance(kernels, DrawsTokens) else None
        self._batch: Batch | None = None

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The next token of each row, and row -> logprobs where asked for. logits: [rows, vocab], left unchanged."""
        batch = self._batch_of(sequences)
        changed = self._adjust(logits, batch) if batch.adjusted else logits
        if self._kernels is not None:
            assert batch.draws is not None
            tokens = self._kernels.draw(changed, replace(batch.draws, at=self._numbers(batch)))
        else:
            tokens = self._pick(changed, batch)
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
            assert batch.draws is not None
            return batch.draws.at
        numbers = np.zeros(len(batch.sequences))
        numbers[batch.drawn] = uniforms(batch.seeds, _positions(batch))
        return to_device(numbers, self._device)

    def _pick(self, logits: Tensor, batch: Batch) -> Tensor:
        """The token of each row, by torch operations. logits: [rows, vocab]."""
        if not batch.drawn:
            return logits.float().argmax(-1)
        if len(batch.drawn) == len(batch.sequences):
            return self._draw(logits.float(), batch)
        tokens = logits.float().argmax(-1)
        tokens[batch.drawn] = self._draw(logits[batch.drawn].float(), batch)
        return tokens

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
            draws=None if self._kernels is None else self._draws(params),
            cuts=None if self._kernels is not None else self._cuts([params[i] for i in drawn]),
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
        top_k = np.array([self._top_k(p) or vocab for p in params], np.int32)
        return Draws(
            temperature, min_p, to_device(top_k, self._device), top_p,
            torch.zeros(count, dtype=torch.float64, device=self._device),
        )  # fmt: skip

    def _cuts(self, params: Rows[SamplingParams]) -> Cuts:
        """Of the drawn rows."""
        cut = [j for j, p in enumerate(params) if self._top_k(p) or p.top_p < 1.0]
        chosen = [params[j] for j in cut]
        with_min_p = any(p.min_p > 0.0 for p in params)
        nucleus = CANDIDATES if any(not self._top_k(p) for p in chosen) else 0
        return Cuts(
            plain=sorted(set(range(len(params))) - set(cut)),
            cut=cut,
            temperature=self._tensor([max(p.temperature, 1e-5) for p in params])[:, None],
            min_p=self._tensor([p.min_p for p in params]).log()[:, None] if with_min_p else None,
            top_k=torch.tensor([self._top_k(p) or self._vocab_size for p in chosen], device=self._device)[:, None],
            top_p=self._tensor([p.top_p if p.top_p < 1.0 else 2.0 for p in chosen])[:, None],
            candidates=min(self._vocab_size, max([nucleus, *(self._top_k(p) for p in chosen)])),
        )

    def _top_k(self, params: SamplingParams) -> int:
        """top_k where it cuts anything, else 0."""
        return params.top_k if 0 < params.top_k < self._vocab_size else 0

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

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

    def _draw(self, logits: Tensor, batch: Batch) -> Tensor:
        """A random token for each drawn row. logits: [drawn rows, vocab] in fp32."""
        cuts = batch.cuts
        assert cuts is not None
        scaled = torch.nan_to_num(logits, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        scaled = scaled / cuts.temperature
        if cuts.min_p is not None:
            floor = scaled.amax(-1, keepdim=True) + cuts.min_p
            scaled = scaled.masked_fill(scaled < floor, float("-inf"))
        at = torch.from_numpy(uniforms(batch.seeds, _positions(batch))).to(self._device)
        if not cuts.cut:
            return invert(scaled.softmax(-1), at)
        if not cuts.plain:
            return self._draw_cut(scaled, at, cuts)
        tokens = torch.empty(len(batch.drawn), dtype=torch.int64, device=self._device)
        tokens[cuts.plain] = invert(scaled[cuts.plain].softmax(-1), at[cuts.plain])
        tokens[cuts.cut] = self._draw_cut(scaled[cuts.cut], at[cuts.cut], cuts)
        return tokens

    def _draw_cut(self, scaled: Tensor, at: Tensor, cuts: Cuts) -> Tensor:
        """Tokens of rows with top_k or top_p, drawn among the likeliest candidates."""
        count = cuts.candidates
        while True:
            values, tokens = scaled.topk(count)
            values = values.masked_fill(torch.arange(count, device=self._device) >= cuts.top_k, float("-inf"))
            # A row with top_k is normalised over what top_k leaves, any other over the whole vocabulary.
            limited = cuts.top_k < self._vocab_size
            total = torch.where(limited, values.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
            probs = (values - total).exp()
            below = probs.cumsum(-1) - probs
            covered = limited[:, 0] | (below[:, -1] >= cuts.top_p[:, 0])
            if count == self._vocab_size or bool(covered.all()):
                break
            count = self._vocab_size
        kept = probs.masked_fill(below >= cuts.top_p, 0.0)
        return tokens.gather(1, invert(kept, at)[:, None])[:, 0]


def invert(probs: Tensor, at: Tensor) -> Tensor:
    """Index in each row where the (unnormalised) cumulative distribution passes `at` in [0, 1). probs: [rows, n]."""
    cumulative = probs.double().cumsum(-1)
    target = (at.double() * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


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
