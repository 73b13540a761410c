"""The sampler against a naive one, row by row; distributions; seeds in different company; logprobs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.block_tables import RowAllocator
from engine.execution.logprobs import compute_token_logprobs, read_logprobs
from engine.execution.sampler import _INCREMENT, Sampler, SamplingBatch, _mix, compute_uniforms
from engine.types import Request, SamplingParams, Sequence, TokenLogprobs
from kernels import sampling

VOCAB = 97
ROWS = 20_000
CPU = torch.device("cpu")


class Drawing:
    """A sampler as the runner drives it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sampler, self.row_allocator = Sampler(*args, row_count=ROWS, **options), RowAllocator(ROWS)
        self.batch: SamplingBatch | None = None

    def __call__(self, logits: torch.Tensor, seqs: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """(the next token of each row, row -> logprobs where asked for)."""
        ends = [len(seq.token_ids) for seq in seqs]
        if self.batch is None or self.batch.sequences != seqs:
            rows, new = self.row_allocator.assign(seqs)
            self.sampler.reset_rows(new)
            self.batch = self.sampler.make_batch(list(seqs), rows.tolist())
        inputs = self.sampler.prepare(self.batch, np.array(ends), dict)
        tokens, logprobs = self.sampler.sample(logits.clone(), inputs)
        rows = inputs.batch.logprobs
        if rows is None:
            return tokens.tolist(), {}
        entries = read_logprobs([x.tolist() for x in logprobs], rows.top_counts)
        return tokens.tolist(), dict(zip(rows.rows, entries, strict=True))


def sequence(params: SamplingParams, prompt: Rows[int] = (1,), output: Rows[int] = (), name: str = "r") -> Sequence:
    return Sequence(Request(request_id=name, token_ids=[*prompt], params=params), [*prompt, *output], len(prompt), 0.0)


def naive_distribution(logits: list[float], seq: Sequence, eos: tuple[int, ...]) -> list[float]:
    """The probabilities a token is drawn with, in plain Python."""
    p = seq.request.params
    values = list(logits)
    for token, bias in (p.logit_bias or {}).items():
        values[token] += bias
    if seq.output_len < p.min_tokens:
        for token in (*eos, *p.stop_token_ids):
            values[token] = -math.inf
    outputs = seq.token_ids[seq.prompt_len :]
    for token in set(seq.token_ids):
        values[token] *= 1 / p.repetition_penalty if values[token] > 0 else p.repetition_penalty
    for token in set(outputs):
        values[token] -= p.frequency_penalty * outputs.count(token) + p.presence_penalty
    if p.temperature == 0:
        best = values.index(max(values))
        return [float(i == best) for i in range(len(values))]
    weights = [math.exp((v - max(values)) / p.temperature) for v in values]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    order = sorted(range(len(values)), key=lambda i: -weights[i])
    kept_ids = order[: p.top_k] if p.top_k > 0 else order
    total, mass, nucleus = sum(weights[i] for i in kept_ids), 0.0, []
    for i in kept_ids:
        if mass >= p.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(values))]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=4),
    min_tokens=st.sampled_from([0, 2, 100]),
    stop_token_ids=st.just(()) | st.just((5, 6)),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=5), seed=st.integers(0, 2**32), candidates=st.sampled_from([VOCAB, 4])
)
def test_draws_by_inversion_of_the_naive_distribution(params, seed, candidates):
    """What is drawn at u is the token where the naive cumulative distribution passes u (by id)."""
    rng = random.Random(seed)
    seqs = [
        sequence(
            p, [rng.randrange(VOCAB) for _ in range(5)], [rng.randrange(VOCAB) for _ in range(rng.randrange(6))], str(i)
        )
        for i, p in enumerate(params)
    ]
    logits = torch.randn(len(seqs), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    candidates_before, sampling.MIN_CANDIDATE_COUNT = sampling.MIN_CANDIDATE_COUNT, candidates
    try:
        tokens, logprobs = Drawing(VOCAB, CPU, (0, 9), seed)(logits, seqs)
    finally:
        sampling.MIN_CANDIDATE_COUNT = candidates_before
    assert logprobs == {}
    assert torch.equal(logits, before)
    for row, seq, token in zip(logits.tolist(), seqs, tokens, strict=True):
        assert naive_distribution(row, seq, (0, 9))[token] > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=6, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1.4, min_p=0.2, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.4),
    ],
)
def test_frequencies(params):
    """20,000 rows drawn together follow the naive distribution (total variation; fixed seeds, so it cannot flake)."""
    count = 20000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    seq = sequence(params, [1, 2, 3], [4, 4, 5])
    seqs = [sequence(params, [1, 2, 3], [4, 4, 5], name=str(i)) for i in range(count)]
    tokens, _ = Drawing(VOCAB, CPU, seed=3)(logits.expand(count, -1), seqs)
    expected = np.array(naive_distribution(logits[0].tolist(), seq, ()))
    frequencies = np.bincount(tokens, minlength=VOCAB) / count
    assert np.abs(frequencies - expected).sum() / 2 < 0.03
    assert frequencies[expected == 0].sum() == 0


def test_tokens_that_min_tokens_bans_are_listed_once_for_all_steps(monkeypatch):
    """A request may have a thousand of them: to list them for 256 sequences takes longer than a step."""
    sampler = Sampler(VOCAB, CPU, (2,))
    batch = sampler.make_batch([sequence(SamplingParams(min_tokens=3, stop_token_ids=(5,)))], [0])
    monkeypatch.delattr(Sampler, "_list_banned_tokens")
    for position, banned in ((1, [2, 5]), (3, [2, 5]), (4, None)):
        indices = sampler.prepare(batch, np.array([position]), dict).banned_indices
        assert (None if indices is None else indices.tolist()) == banned


def test_seeded_requests_draw_the_same_in_any_company():
    rng = torch.Generator().manual_seed(5)
    seeded_params = SamplingParams(seed=11, temperature=0.9, top_p=0.95)
    single_draws, company = [], []
    for output in range(20):
        logits = torch.randn(1, VOCAB, generator=rng)
        seq = sequence(seeded_params, [1, 2], [3] * output, name=f"alone{output}")
        single_draws += Drawing(VOCAB, CPU, seed=1)(logits, [seq])[0]
        other_seqs = [
            sequence(SamplingParams(temperature=1.3), name="x"),
            sequence(SamplingParams(temperature=0.0), name="y"),
        ]
        seq = sequence(seeded_params, [1, 2], [3] * output, name=f"company{output}")
        rows = torch.cat((torch.randn(1, VOCAB, generator=rng), logits, torch.randn(1, VOCAB, generator=rng)))
        company.append(Drawing(VOCAB, CPU, seed=2)(rows, [other_seqs[0], seq, other_seqs[1]])[0][1])
    assert single_draws == company
    assert len(set(single_draws)) > 5


def test_unseeded_requests_differ():
    logits = torch.zeros(64, VOCAB)
    draws = [
        tuple(Drawing(VOCAB, CPU, seed=s)(logits, [sequence(SamplingParams(), name=str(i)) for i in range(64)])[0])
        for s in (1, 2)
    ]
    assert draws[0] != draws[1]
    assert len(set(draws[0])) > 30


def test_uniforms_are_uniform():
    seeds = _mix(np.repeat(np.arange(200, dtype=np.uint64), 500) + _INCREMENT)
    u = compute_uniforms(seeds, np.tile(np.arange(500, dtype=np.uint64), 200))
    assert u.min() >= 0
    assert u.max() < 1
    assert np.abs(np.histogram(u, 50, (0, 1))[0] / 2000 - 1).max() < 0.15
    by_seed = u.reshape(200, 500)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.02


def test_the_same_sequences_again_see_new_penalties():
    """The batch is reused from step to step; counts still follow the outputs."""
    draw = Drawing(VOCAB, CPU)
    seqs = [sequence(SamplingParams(temperature=0.0, frequency_penalty=1.0), name=str(i)) for i in range(2)]
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 8] = 2.5, 1.0
    draws = []
    for _ in range(5):
        tokens, _ = draw(logits, seqs)
        draws.append(tokens[0])
        for seq, token in zip(seqs, tokens, strict=True):
            seq.token_ids.append(token)
    assert draws == [7, 7, 7, 8, 0] or draws == [7, 7, 8, 7, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5, min_p=0.1)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_yield_a_token(params, bad):
    logits = torch.full((3, VOCAB), bad)
    logits[2, 4] = 1.0
    tokens, _ = Drawing(VOCAB, CPU)(logits, [sequence(params, name=str(i)) for i in range(3)])
    assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(dtype):
    logits = (torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    wants = [None, 0, 3, 1000]
    seqs = [
        sequence(SamplingParams(temperature=0.0, logprobs=want, logit_bias={5: 100.0}), name=str(i))
        for i, want in enumerate(wants)
    ]
    tokens, logprobs = Drawing(VOCAB, CPU)(logits, seqs)
    assert tokens == [5] * 4
    assert sorted(logprobs) == [1, 2, 3]
    exact = torch.log_softmax(logits.double(), -1)
    for i, entry in logprobs.items():
        order = exact[i].argsort(descending=True).tolist()
        assert entry.token_id == 5
        assert entry.logprob == pytest.approx(exact[i, 5].item(), abs=1e-4)
        assert len(entry.top_logprobs) == min(wants[i] or 0, VOCAB)
        assert [lp for _, lp in entry.top_logprobs] == pytest.approx(
            [exact[i, t].item() for t in order[: len(entry.top_logprobs)]], abs=1e-4
        )
        assert entry.rank == 1 + int((logits[i] > logits[i, 5]).sum())


def test_logprobs_of_given_tokens():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    (entry,) = read_logprobs([x.tolist() for x in compute_token_logprobs(logits, torch.tensor([1]), 2)], [2])
    assert (entry.rank, [token for token, _ in entry.top_logprobs]) == (2, [2, 1])
