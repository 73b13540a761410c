"""Penalties and their counts, by torch and by Triton, against dicts in plain Python, over several steps."""

from __future__ import annotations

import os
import random

import pytest
import torch

from kernels import Kernels, select_kernels
from kernels.counts import PenaltyRows, TokenCounts

VOCAB = 3000


@pytest.fixture(
    params=[
        "reference",
        pytest.param("triton", marks=pytest.mark.long),
        pytest.param("triton-gpu", marks=pytest.mark.gpu),
    ]
)
def ops(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "triton-gpu":
        request.getfixturevalue("on_gpu")
        return select_kernels("cuda", "triton")
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: set TRITON_INTERPRET=1 to test the Triton kernels on CPU tensors")
    return select_kernels("cpu", request.param)


@pytest.mark.parametrize("all_rows", [True, False])
def test_steps_of_penalised_rows(ops: Kernels, rng: random.Random, all_rows: bool) -> None:
    room, count, left = 1100, 5, rng.randrange(VOCAB)
    sizes = [0, 1, 7, 1030, rng.randrange(2, 90)]
    held = [dict.fromkeys(rng.sample(range(VOCAB), size), 0) for size in sizes]  # token -> value
    counts = TokenCounts(
        torch.full((9, room), 2**40, dtype=torch.int64), torch.full((9, room), 77, dtype=torch.int32),
        torch.full((9,), 99, dtype=torch.int64),
    )  # fmt: skip
    rows = rng.sample(range(9), count)
    for row, known in zip(rows, held, strict=True):
        for place, token in enumerate(known):
            known[token] = rng.choice((1, 2, 3, 8, 9))
            counts.token_ids[row, place], counts.count_codes[row, place] = token, known[token]
        counts.used_lengths[row] = len(known)
        if not known:  # as they are entered: a token that another sequence left there, and nothing
            counts.token_ids[row, 0], counts.count_codes[row, 0] = left, 0
    untouched = [row for row in range(9) if row not in rows]
    before = [part[untouched].clone() for part in (counts.token_ids, counts.count_codes, counts.used_lengths)]
    at = list(range(count)) if all_rows else rng.sample(range(8), count)
    kinds = torch.rand(3, count, 1) + 0.5
    kinds[0, 1], kinds[1, 2], kinds[2, 3] = 1.0, 0.0, -0.3
    batch = PenaltyRows(None if all_rows else torch.tensor(at), torch.tensor(rows), *kinds)
    for _ in range(4):
        width = max(len(known) for known in held) + 1
        logits = torch.randn(count if all_rows else 8, VOCAB)
        expected = logits.double()
        for i, known in enumerate(held):
            repetition, presence, frequency = kinds[:, i, 0].tolist()
            for token, value in known.items():
                old = expected[at[i], token]
                old = old / repetition if old > 0 else old * repetition
                expected[at[i], token] = old - frequency * (value // 2) - (presence if value > 1 else 0.0)
        ops.penalise(logits, counts, batch, width)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        drawn = torch.randint(VOCAB, (len(logits),))
        for i, known in enumerate(held):
            if not known:
                drawn[at[i]] = left  # answers begin alike
            elif rng.random() < 0.5:
                drawn[at[i]] = rng.choice(list(known))
            token = int(drawn[at[i]])
            known[token] = known.get(token, 0) + 2
        ops.count_sampled(drawn, counts, batch, width)
        for row, known in zip(rows, held, strict=True):
            used = int(counts.used_lengths[row])
            found = dict(
                zip(counts.token_ids[row, :used].tolist(), counts.count_codes[row, :used].tolist(), strict=True)
            )
            assert used == len(found)
            assert found == known
    for part, old in zip((counts.token_ids, counts.count_codes, counts.used_lengths), before, strict=True):
        assert torch.equal(part[untouched], old)
