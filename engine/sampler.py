"""Logits -> tokens: penalties, masks, temperature, top-k, top-p, min-p, and logprobs, for all rows of a step at once.

A random token is drawn by inverting the cumulative distribution at one uniform number per row, which is a hash of the
request's seed and the output position (splitmix64, Steele et al., 2014). So a seeded request draws the same numbers
in whatever company it is computed; its tokens differ only where the logits themselves do.

Order of operations is vLLM's: bias and min_tokens, penalties, (greedy rows end here) temperature, min_p, top_k, top_p.
Logprobs are of the model's raw logits. A row of NaN logits yields some token of the vocabulary, never an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.types import SamplingParams, Sequence, TokenLogprobs

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
    prompt: set[int] | None = None
    """Distinct prompt tokens, where repetition_penalty needs them."""


@dataclass(slots=True)
class Batch:
    """The sampling parameters of a step's rows as tensors; reused while the same sequences come in the same order."""

    sequences: list[Sequence]
    rows: list[Row]
    adjusted: list[int]
    """Rows whose logits are changed before anything is drawn."""
    logprobs: list[int]
    """Rows that want logprobs."""
    drawn: list[int]
    """Rows that are not greedy."""
    plain: list[int]
    """Positions in `drawn` of rows without top_k and top_p."""
    cut: list[int]
    """Positions in `drawn` of rows with top_k or top_p."""
    seeds: npt.NDArray[np.uint64]
    temperature: torch.Tensor
    min_p: torch.Tensor | None
    """log(min_p) of each drawn row, -inf for none; None where no row has it."""
    top_k: torch.Tensor
    """Of the rows of `cut`; the vocabulary's size for none."""
    top_p: torch.Tensor
    """Of the rows of `cut`; above 1 for none."""
    candidates: int


class Sampler:
    """Samples the next token of each sequence."""

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: Iterable[int] = (), seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos = tuple(sorted(eos_token_ids))
        self._seed = seed
        self._batch: Batch | None = None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The next token of each row, and row -> logprobs where asked for. logits: [rows, vocab], left unchanged."""
        batch = self._batch_of(sequences)
        changed = self._adjust(logits, batch) if batch.adjusted else logits
        if len(batch.drawn) < len(sequences):
            tokens = changed.float().argmax(-1)
        else:
            tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        if batch.drawn:
            everyone = len(batch.drawn) == len(sequences)
            drawn = self._draw((changed if everyone else changed[batch.drawn]).float(), batch)
            if everyone:
                tokens = drawn
            else:
                tokens[batch.drawn] = drawn
        chosen: list[int] = tokens.tolist()
        if not batch.logprobs:
            return chosen, {}
        wanted = [sequences[i].request.params.logprobs or 0 for i in batch.logprobs]
        entries = token_logprobs(logits[batch.logprobs], [chosen[i] for i in batch.logprobs], wanted)
        return chosen, dict(zip(batch.logprobs, entries, strict=True))

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
            row.prompt = set(seq.token_ids[: seq.prompt_len])
        return row

    def _new_batch(self, sequences: list[Sequence], rows: list[Row]) -> Batch:
        params = [seq.request.params for seq in sequences]
        drawn = [i for i, p in enumerate(params) if p.temperature > 0.0]
        cut = [j for j, i in enumerate(drawn) if self._top_k(params[i]) or params[i].top_p < 1.0]
        chosen = [params[drawn[j]] for j in cut]
        with_min_p = any(params[i].min_p > 0.0 for i in drawn)
        nucleus = CANDIDATES if any(not self._top_k(p) for p in chosen) else 0
        return Batch(
            sequences=sequences,
            rows=rows,
            adjusted=[i for i, p in enumerate(params) if _adjusts(p)],
            logprobs=[i for i, p in enumerate(params) if p.logprobs is not None],
            drawn=drawn,
            plain=sorted(set(range(len(drawn))) - set(cut)),
            cut=cut,
            seeds=np.array([rows[i].seed for i in drawn], np.uint64),
            temperature=self._tensor([max(params[i].temperature, 1e-5) for i in drawn])[:, None],
            min_p=self._tensor([params[i].min_p for i in drawn]).log()[:, None] if with_min_p else None,
            top_k=torch.tensor([self._top_k(p) or self._vocab_size for p in chosen], device=self._device)[:, None],
            top_p=self._tensor([p.top_p if p.top_p < 1.0 else 2.0 for p in chosen])[:, None],
            candidates=min(self._vocab_size, max([nucleus, *(self._top_k(p) for p in chosen)])),
        )

    def _top_k(self, params: SamplingParams) -> int:
        """top_k where it cuts anything, else 0."""
        return params.top_k if 0 < params.top_k < self._vocab_size else 0

    def _tensor(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _adjust(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A float copy of the logits with bias, min_tokens and penalties applied to the rows that have them."""
        changed = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
        for i in batch.adjusted:
            row, values = batch.rows[i], changed[i]
            params = row.seq.request.params
            if params.logit_bias:
                tokens = torch.tensor(list(params.logit_bias), device=self._device)
                values[tokens] += self._tensor(list(params.logit_bias.values()))
            if row.seq.output_len < params.min_tokens:
                banned = [*self._eos, *params.stop_token_ids]
                values[torch.tensor(banned, dtype=torch.int64, device=self._device)] = float("-inf")
            self._penalise(values, row, params)
        return changed

    def _penalise(self, values: torch.Tensor, row: Row, params: SamplingParams) -> None:
        if not _penalises(params):
            return
        seq = row.seq
        for token in seq.token_ids[seq.prompt_len + row.counted :]:
            row.counts[token] = row.counts.get(token, 0) + 1
        row.counted = seq.output_len
        seen = torch.tensor(list(row.counts), dtype=torch.int64, device=self._device)
        if params.repetition_penalty != 1.0:
            assert row.prompt is not None
            repeated = torch.tensor(list({*row.prompt, *row.counts}), dtype=torch.int64, device=self._device)
            old = values[repeated]
            penalty = params.repetition_penalty
            values[repeated] = torch.where(old > 0, old / penalty, old * penalty)
        counts = self._tensor([float(count) for count in row.counts.values()])
        values[seen] -= params.frequency_penalty * counts + params.presence_penalty

    def _draw(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A random token for each drawn row. logits: [drawn rows, vocab] in fp32."""
        scaled = torch.nan_to_num(logits, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        scaled = scaled / batch.temperature
        if batch.min_p is not None:
            floor = scaled.amax(-1, keepdim=True) + batch.min_p
            scaled = scaled.masked_fill(scaled < floor, float("-inf"))
        positions = np.array([batch.rows[i].seq.output_len for i in batch.drawn], np.uint64)
        at = torch.from_numpy(uniforms(batch.seeds, positions)).to(self._device)
        if not batch.cut:
            return invert(scaled.softmax(-1), at)
        if not batch.plain:
            return self._draw_cut(scaled, at, batch)
        tokens = torch.empty(len(batch.drawn), dtype=torch.int64, device=self._device)
        tokens[batch.plain] = invert(scaled[batch.plain].softmax(-1), at[batch.plain])
        tokens[batch.cut] = self._draw_cut(scaled[batch.cut], at[batch.cut], batch)
        return tokens

    def _draw_cut(self, scaled: torch.Tensor, at: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Tokens of rows with top_k or top_p, drawn among the likeliest candidates."""
        count = batch.candidates
        while True:
            values, tokens = scaled.topk(count)
            values = values.masked_fill(torch.arange(count, device=self._device) >= batch.top_k, float("-inf"))
            # A row with top_k is normalised over what top_k leaves, any other over the whole vocabulary.
            limited = batch.top_k < self._vocab_size
            total = torch.where(limited, values.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
            probs = (values - total).exp()
            below = probs.cumsum(-1) - probs
            covered = limited[:, 0] | (below[:, -1] >= batch.top_p[:, 0])
            if count == self._vocab_size or bool(covered.all()):
                break
            count = self._vocab_size
        kept = probs.masked_fill(below >= batch.top_p, 0.0)
        return tokens.gather(1, invert(kept, at)[:, None])[:, 0]


def invert(probs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Index in each row where the (unnormalised) cumulative distribution passes `at` in [0, 1). probs: [rows, n]."""
    cumulative = probs.double().cumsum(-1)
    target = (at.double() * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def token_logprobs(logits: torch.Tensor, tokens: list[int], counts: Rows[int]) -> list[TokenLogprobs]:
    """Logprob and rank of each row's token, and the row's `counts[i]` likeliest tokens. logits: [rows, vocab]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks: list[int] = (1 + (logprobs > chosen).sum(-1)).tolist()
    values: list[float] = chosen[:, 0].tolist()
    most = min(max(counts), logits.shape[1])
    top = logprobs.topk(most) if most else None
    top_values: list[list[float]] = top.values.tolist() if top is not None else [[]] * len(tokens)
    top_tokens: list[list[int]] = top.indices.tolist() if top is not None else [[]] * len(tokens)
    return [
        TokenLogprobs(token, value, rank, list(zip(ids[:count], likely[:count], strict=True)))
        for token, value, rank, ids, likely, count in zip(
            tokens, values, ranks, top_tokens, top_values, counts, strict=True
        )
    ]


def _penalises(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or p.min_tokens > 0 or _penalises(p)
