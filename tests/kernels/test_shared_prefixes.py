"""Prefixes that a batch shares: found as a look at all tables would find them, attended to once by Triton kernels."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import PagedKV, Ragged, select
from kernels.interface import IntArray, KeptTable
from kernels.reference.backend import ReferenceKernels
from kernels.shared import TOKENS_MIN, PrefixFinder, shared_prefixes

CPU = torch.device("cpu")
SIZE = 16
LEAST = TOKENS_MIN // SIZE
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


def drawn_tables(rng: random.Random, count: int, blocks_max: int) -> list[list[int]]:
    """Tables that branch from each other anywhere, as those of a prefix cache do."""
    fresh = iter(range(1, 10**9))
    tables: list[list[int]] = []
    for _ in range(count):
        source = rng.choice(tables) if tables and rng.random() < 0.8 else []
        cut = rng.choice((len(source), rng.randint(0, len(source)), len(source) // 2))
        own = rng.randint(1, max(1, blocks_max - cut)) if rng.random() < 0.5 else 1
        tables.append(source[:cut] + [next(fresh) for _ in range(own)])
    return tables


def batch_of(rng: random.Random, tables: list[list[int]]) -> tuple[Ragged, KeptTable]:
    """Each decodes somewhere in its last block; in rows of their own."""
    ends = [(len(table) - 1) * SIZE + rng.randint(1, SIZE) for table in tables]
    rows = np.array(rng.sample(range(2 * len(tables)), len(tables)))
    here = np.full((2 * len(tables), max(map(len, tables))), -7)
    for row, table in zip(rows, tables, strict=True):
        here[row, : len(table)] = table
    return Ragged.of([end - 1 for end in ends], ends), KeptTable(here, torch.zeros(0), rows)


def common(tables: list[list[int]]) -> int:
    return next((i for i, blocks in enumerate(zip(*tables)) if len(set(blocks)) > 1), min(map(len, tables)))


def test_they_are_what_all_tables_say() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    found_any = more_any = 0
    for _ in range(300):
        tables = drawn_tables(rng, rng.randint(1, 12), rng.choice((LEAST, 2 * LEAST, 5 * LEAST)))
        batch, table = batch_of(rng, tables)
        found = shared_prefixes(batch, table, SIZE)
        seen = [i for members in found.members for i in members.tolist()]
        assert len(seen) == len(set(seen))
        for members, tokens in zip(found.members, found.tokens, strict=True):
            assert len(members) > 1
            assert TOKENS_MIN <= tokens < batch.context_lens[members].min()
            assert common([tables[i][: tokens // SIZE] for i in members]) == tokens // SIZE
        # No fewer keys are saved than by sets that have just the least in common.
        whole = [tuple(t[:LEAST]) for t, end in zip(tables, batch.context_lens, strict=True) if end > TOKENS_MIN]
        assert found.saved_tokens >= TOKENS_MIN * (len(whole) - len(set(whole)))
        found_any += bool(seen)
        more_any += found.saved_tokens > TOKENS_MIN * (len(whole) - len(set(whole)))
    assert found_any > 30
    assert more_any > 10


def test_they_are_looked_for_only_when_something_changed() -> None:
    rng = random.Random(1)
    shared = list(range(LEAST + 3))
    batch, table = batch_of(rng, [[*shared, 1000 + i, 2000 + i] for i in range(3)])
    table, finder = replace(table, version=4), PrefixFinder()
    found = finder.find(batch, table, SIZE, 1)
    assert found is not None
    assert found.tokens == [(LEAST + 3) * SIZE]
    later = Ragged.of((batch.context_lens).tolist(), (batch.context_lens + 1).tolist())
    assert finder.find(later, replace(table), SIZE, 1) is found
    assert finder.find(later, replace(table, rows=table.rows.copy()), SIZE, 1) is not found
    assert finder.find(later, replace(table, version=5), SIZE, found.saved_tokens + 1) is None


def pool_of(tables: list[list[int]], kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[PagedKV, IntArray]:
    """Of two layers, in drawn places; the tables with places for names, and what is past their ends."""
    names = sorted({name for table in tables for name in table})
    places = dict(zip(names, np.random.permutation(len(names)).tolist(), strict=True))
    unit = 2 * 2 * SIZE * kv_heads * dim
    kv = PagedKV(torch.randn(len(names) * unit).to(dtype), unit, 1, SIZE, 2, kv_heads, dim)
    found = np.full((len(tables), max(map(len, tables))), 10**6)
    for row, table in enumerate(tables):
        found[row, : len(table)] = [places[name] for name in table]
    return kv, found


@interpreted
def test_a_fixed_plan_attends_once_to_what_its_batch_shares() -> None:
    """More sequences than a tile has, sets of different lengths and none at all, in turn through one fixed plan."""
    from kernels.triton.backend import TritonKernels

    rng, heads, dim = random.Random(2), (3, 1), 16
    ops = TritonKernels(CPU)
    ops.saved_keys_min, ops._processors = 1, 24  # contexts and prefixes are split
    fixed = None
    first, second = list(range(LEAST)), list(range(10_000, 10_000 + 2 * LEAST))
    fresh = iter(range(10**6, 10**9))
    for sets in ([(first, 18), (second, 2)], [([], 3)], [(second, 3), (first, 2), ([], 1)]):
        tables = [
            prefix + [next(fresh) for _ in range(rng.randint(1, 4))] for prefix, count in sets for _ in range(count)
        ]
        rng.shuffle(tables)
        kv, places = pool_of(tables, heads[1], dim, torch.float32)
        exact_kv, exact = replace(kv, buffer=kv.buffer.double()), ReferenceKernels(CPU)
        ends = [(len(table) - 1) * SIZE + rng.randint(1, SIZE) for table in tables]
        batch, kept = Ragged.of([end - 1 for end in ends], ends), KeptTable.of(places, kv, CPU)
        fixed = fixed or ops.fixed_decode_plan(24, 3 * LEAST, kv, None, shared=True)
        assert fixed.shared.splits > 1 < fixed.splits
        ops.refill_decode_plan(fixed, batch, kept, kv)
        assert ops.shares(batch, kept, kv, None) == bool(sets[0][0]) == bool(fixed.shared.count.any())
        assert not ops.shares(batch, kept, kv, 600)
        q, k, v = (torch.randn(24, n, dim) for n in (heads[0], heads[1], heads[1]))
        found = ops.attention(q, k, v, kv, 1, fixed, 0.25)
        count = len(tables)
        plan = exact.plan_attention(batch, places, exact_kv, None)
        wanted = exact.attention(*(x[:count].double() for x in (q, k, v)), exact_kv, 1, plan, 0.25)
        assert torch.allclose(found[:count].double(), wanted, atol=1e-5)
        assert not found[count:].any()  # padding attends to nothing


@interpreted
def test_more_sets_than_tiles_leave_the_least_to_themselves() -> None:
    ops = select(CPU, "triton")
    ops.saved_keys_min = 1
    fresh = iter(range(10**6, 10**9))
    tables = []
    for i in range(12):
        prefix = [next(fresh) for _ in range(LEAST + (i == 5))]
        tables += [[*prefix, next(fresh)] for _ in range(2)]
    kv, places = pool_of(tables, 1, 16, torch.float32)
    ends = [(len(table) - 1) * SIZE + 3 for table in tables]
    plan = ops.plan_attention(Ragged.of([end - 1 for end in ends], ends), places, kv, None)
    assert (plan.shared.count > 0).sum() == 11 == (plan.shared.skips > 0).sum() // 2  # 3 for 24 sequences and 8 more
    assert plan.shared.skips[10:12].tolist() == [(LEAST + 1) * SIZE] * 2
