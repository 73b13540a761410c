"""Drawing tokens, by torch and by Triton, against a sort of all tokens in fp64, and that against plain Python."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import sampling, select_kernels
from kernels.sampling import DrawSettings, _draw_index
from kernels.triton import backend as triton_ops

Draw = Callable[[torch.Tensor, DrawSettings], torch.Tensor]


@pytest.fixture(
    params=[
        "reference",
        pytest.param("triton", marks=pytest.mark.long),
        pytest.param("triton-gpu", marks=pytest.mark.gpu),
    ]
)
def draw(request: pytest.FixtureRequest) -> Draw:
    if request.param == "triton-gpu":
        request.getfixturevalue("on_gpu")
        return select_kernels("cuda", "triton").draw
    if request.param == "reference":
        return sampling.draw
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: set TRITON_INTERPRET=1 to test the Triton kernels on CPU tensors")
    return select_kernels("cpu", "triton").draw


def draws_of(rows: int, vocab: int, **overrides: float) -> DrawSettings:
    """The same for all rows, each with a number of its own."""
    kinds = {"temperature": 1.0, "min_p": 0.0, "top_k": vocab, "top_p": 1.0} | overrides
    tensors = {name: torch.full((rows,), float(value)) for name, value in kinds.items()}
    return DrawSettings(
        tensors["temperature"], tensors["min_p"], tensors["top_k"].int(), tensors["top_p"],
        torch.rand(rows, dtype=torch.float64),
    )  # fmt: skip


def kept_weights(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """[rows, vocab] fp64, by a sort of all tokens: each weight relative to the greatest; 0 for what is not kept."""
    values = logits.double().nan_to_num(nan=float("-inf"), posinf=sampling.MAX_LOGIT, neginf=float("-inf"))
    values, order = values.clamp(max=sampling.MAX_LOGIT).sort(descending=True, stable=True)
    peak = values[:, :1].nan_to_num(neginf=0.0)
    temperature = settings.temperature.double()[:, None]
    cold = temperature == 0.0
    weights = ((values - peak) / temperature.masked_fill(cold, 1.0)).exp()
    weights = weights * (weights >= settings.min_p.double()[:, None])
    rank = torch.arange(values.shape[1], device=values.device)
    weights = weights * (rank < settings.top_k[:, None])
    mass_before = weights.cumsum(-1) - weights
    target_mass = settings.top_p.double()[:, None] * weights.sum(-1, keepdim=True)
    weights = weights * ((mass_before < target_mass) | (settings.top_p[:, None] >= 1.0) | (rank == 0))
    weights = torch.where(cold, (rank == 0).double(), weights)
    return torch.zeros_like(weights).scatter_(1, order, weights)


def naive_weights(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> list[float]:
    """What `kept_weights` says of one row, up to a factor."""
    logits = [-math.inf if x != x else min(x, sampling.MAX_LOGIT) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    best = logits[order[0]]
    if temperature == 0.0:
        return [float(i == order[0]) for i in range(len(logits))]
    weights = [math.exp((x - best) / temperature) if x > -math.inf else 0.0 for x in logits]
    weights = [w if w >= min_p else 0.0 for w in weights]
    kept, mass, total = set[int](), 0.0, sum(weights[i] for i in order[:top_k])
    for i in order[:top_k]:
        if kept and top_p < 1.0 and mass >= top_p * total:
            break
        kept.add(i)
        mass += weights[i]
    return [w if i in kept else 0.0 for i, w in enumerate(weights)]


def check(draw: Draw, logits: torch.Tensor, settings: DrawSettings, tolerance: float = 1e-5) -> None:
    """Every row's token is where the exact running sum passes its number, up to `tolerance` of the sum."""
    before = logits.clone()
    tokens = draw(logits, settings)
    assert tokens.dtype == torch.int64
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    weights = kept_weights(logits, settings)
    ends = weights.cumsum(-1)
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    places = tokens[:, None]
    weight, end, total = weights.gather(1, places)[:, 0], ends.gather(1, places)[:, 0], ends[:, -1]
    inside = (
        (end - weight <= (settings.uniforms + tolerance) * total)
        & (end >= (settings.uniforms - tolerance) * total)
        & (weight > 0)
    )
    dead = total == 0
    assert (tokens[dead] == 0).all()
    wrong = (~inside & ~dead).nonzero()[:, 0].tolist()
    assert not wrong, [(tokens[i], settings.select_rows([i])) for i in wrong]


def random_draws(rng: random.Random, rows: int, vocab: int) -> DrawSettings:
    """Of which no two rows need be alike."""
    return DrawSettings(
        torch.tensor([rng.choice((0.0, 0.3, 1.0, 1.7, 1e-5)) for _ in range(rows)]),
        torch.tensor([rng.choice((0.0, 0.0, 0.1, 0.9, 1.0)) for _ in range(rows)]),
        torch.tensor([rng.choice((1, 2, 7, 50, 400, vocab, vocab + 5)) for _ in range(rows)], dtype=torch.int32),
        torch.tensor([rng.choice((1e-9, 0.05, 0.5, 0.93, 0.9999, 1.0, 1.0)) for _ in range(rows)]),
        torch.rand(rows, dtype=torch.float64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 97, 1000])
def test_the_token_that_the_running_sum_passes(draw, rng, monkeypatch, dtype, vocab):
    monkeypatch.setattr(triton_ops, "LOGITS_PER_BLOCK", rng.choice((128, 256, 8192)))  # several tiles, or one
    logits = (torch.randn(12, vocab) * rng.choice((0.1, 3.0, 20.0))).to(dtype)
    if rng.random() < 0.5:
        logits = logits.round()  # many equal ones, on the edges too
    check(draw, logits, random_draws(rng, 12, vocab))


def test_kept_weights_are_the_naive_ones(rng):
    for _ in range(20):
        vocab = rng.choice((1, 5, 60))
        logits = torch.randn(6, vocab) * 3
        logits = logits.round() if rng.random() < 0.5 else logits
        settings = random_draws(rng, 6, vocab)
        for i, row in enumerate(kept_weights(logits, settings).tolist()):
            kinds = [getattr(settings, name)[i].item() for name in ("temperature", "min_p", "top_k", "top_p")]
            naive = naive_weights(logits[i].double().tolist(), *kinds)
            exact = [w / sum(naive) for w in naive]
            assert [w / sum(row) for w in row] == pytest.approx(exact, abs=1e-9), kinds


@pytest.mark.parametrize(
    "given",
    [
        {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies(draw, rng, given):
    """Chi-square against the exact probabilities; the same numbers every run, so that it cannot fail by chance."""
    rows, vocab = (3000, 60) if draw is sampling.draw else (100, 8)  # an interpreted row takes milliseconds
    torch.manual_seed(7)
    logits = (torch.randn(1, vocab) * 1.5).bfloat16().expand(rows, -1)
    settings = draws_of(rows, vocab, **given)
    found = torch.bincount(draw(logits, settings), minlength=vocab).double()
    weights = kept_weights(logits[:1], settings.select_rows([0]))[0]
    expected = weights / weights.sum() * rows
    assert found[expected == 0].sum() == 0
    # Tokens expected less than five times make one class.
    rare = expected < 5
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    used = expected > 0
    statistic = ((found - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = max(int(used.sum()) - 1, 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_exactly_top_k_of_equal_logits(draw, rng):
    """All equal: the first k ids, each as likely as the others."""
    logits = torch.zeros(12, 300, dtype=torch.bfloat16)
    for given, kept in (({"top_k": 4}, 4), ({"top_p": 0.01}, 3)):
        settings = replace(draws_of(12, 300, **given), uniforms=(torch.arange(12, dtype=torch.float64) + 0.5) / 12)
        assert draw(logits, settings).tolist() == [i * kept // 12 for i in range(12)]


@pytest.mark.parametrize(
    "given", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0.0}, {"min_p": 1.0}]
)
def test_only_the_likeliest(draw, rng, given):
    rows = 20 if draw is sampling.draw else 4
    logits = torch.randn(rows, 300).bfloat16().float()
    logits[:, 250] = logits[:, 7] = logits.amax(-1) + (0 if "min_p" in given else 1)
    if "min_p" in given:  # keeps both of two that are equal
        logits[:, 250] -= 1
    best = logits.argmax(-1)
    ids = torch.arange(300).expand_as(logits)
    best = torch.where(logits == logits.amax(-1, keepdim=True), ids, 300).amin(-1)
    if "min_p" in given:
        assert (logits.gather(1, draw(logits, draws_of(rows, 300, **given))[:, None])[:, 0] == logits.amax(-1)).all()
    else:
        assert torch.equal(draw(logits, draws_of(rows, 300, **given)), best)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
def test_bad_logits_yield_a_token(draw, given):
    logits = torch.full((5, 40), math.nan)
    logits[1] = math.inf
    logits[2] = -math.inf
    logits[3, 4] = 1.0
    logits[4, 6] = math.inf
    tokens = draw(logits, draws_of(5, 40, **given))
    assert tokens[0] == tokens[2] == 0
    assert 0 <= tokens[1] < 40
    assert tokens[3:].tolist() == [4, 6]
    check(draw, logits, draws_of(5, 40, **given))


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=str)
def test_a_real_vocabulary(draw, rng, dtype):
    """152k logits, in rows with a gap between them, flat ones and steep ones."""
    vocab = 151_936
    logits = (torch.randn(4, vocab + 64) * torch.tensor([[0.05], [1.0], [3.0], [8.0]])).to(dtype)[:, :vocab]
    check(draw, logits[1:3], random_draws(rng, 2, vocab))  # an interpreted row takes a second
    check(draw, logits[::3], draws_of(2, vocab, top_p=0.9))


def test_rows_do_not_depend_on_their_company(draw, rng):
    logits = torch.randn(9, 500) * 2
    settings = random_draws(rng, 9, 500)
    together = draw(logits, settings)
    order = torch.randperm(9)[:4]
    assert torch.equal(draw(logits[order], settings.select_rows(order)), together[order])


def test_only_rows_that_keep_many_tokens_are_sorted_whole(monkeypatch) -> None:
    shapes = []

    def keep_likeliest(values, *args):
        shapes.append(tuple(values.shape))
        return sampling._keep_likeliest_unwatched(values, *args)

    monkeypatch.setattr(sampling, "_keep_likeliest_unwatched", sampling._keep_likeliest, raising=False)
    monkeypatch.setattr(sampling, "_keep_likeliest", keep_likeliest)
    logits = torch.zeros(4, 5000)
    logits[[0, 1, 3], 7] = 30.0
    tokens = sampling.draw(logits, draws_of(4, 5000, top_p=0.9))
    assert shapes == [(4, sampling.MIN_CANDIDATE_COUNT), (1, 5000)]
    assert tokens[[0, 1, 3]].tolist() == [7] * 3


def test_an_index_is_where_the_running_sum_passes_the_target() -> None:
    """With most weights 0, and where a target lies at the end of everything."""
    torch.manual_seed(seed := random.randrange(2**32))
    print("seed", seed)
    for count in (1, 5, 511, 512, 513, 1536, 5000):
        weights = torch.rand(64, count) ** 8
        weights[1::2] *= torch.rand(32, count) < 0.02
        weights[:, torch.randint(count, (1,))] = 1.0
        at = torch.rand(64, dtype=torch.float64)
        at[:8], at[8:16] = 0.0, 1.0 - 2.0**-53
        running = weights.double().cumsum(-1)
        targets = at * running[:, -1]
        crossings = _draw_index(weights, at)
        assert (weights.gather(1, crossings[:, None]) > 0).all(), "what has no weight was drawn"
        # The target is rounded, so that beside an edge it may fall to either side.
        ends = running.gather(1, crossings[:, None])[:, 0]
        starts = ends - weights.double().gather(1, crossings[:, None])[:, 0]
        rounding = 1e-13 * running[:, -1]
        assert (starts <= targets + rounding).all()
        assert (targets < ends + rounding).all()
