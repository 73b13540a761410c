"""Block tables as arrays, against a plain conversion, whatever happens to the lists between steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.execution.block_tables import BlockTables
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence


def sequence(rng: random.Random) -> Sequence:
    tables = [[BlockId(rng.randrange(99)) for _ in range(5)] for _ in range(2)]
    return Sequence(Request(request_id="r", token_ids=[], params=SamplingParams()), [], 0, 0.0, block_tables=tables)


def test_tables_are_those_of_this_step() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    groups = [BlockTables(group, 4) for group in range(2)]
    seqs = [sequence(rng) for _ in range(6)]
    for _ in range(300):
        for seq in seqs:
            for group, table in enumerate(seq.block_tables):
                what = rng.random()
                if what < 0.2:
                    table.append(BlockId(rng.randrange(99)))
                elif what < 0.3:
                    table[rng.randrange(len(table))] = BlockId(rng.randrange(99))
                elif what < 0.4 and len(table) > 5:
                    table.pop(rng.randrange(len(table)))
                elif what < 0.45:
                    seq.block_tables[group] = [BlockId(rng.randrange(99)) for _ in range(5)]
        if rng.random() < 0.2:  # gone, and its memory with it
            seqs[rng.randrange(6)] = sequence(rng)
        chosen = rng.sample(seqs, rng.randrange(1, 7))
        for group, tables in enumerate(groups):
            chunks = []
            for seq in chosen:
                end = rng.randrange(1, 4 * len(seq.block_tables[group]) + 1)
                chunks.append(Chunk(seq, end - 1, end, samples=True))
            found = tables.of(chunks)
            assert found.shape == (len(chunks), max(-(-chunk.end // 4) for chunk in chunks))
            for row, chunk in zip(found, chunks, strict=True):
                width = -(-chunk.end // 4)
                assert row[:width].tolist() == chunk.seq.block_tables[group][:width]
                assert not np.any(row[width:])


def test_too_few_blocks() -> None:
    seq = sequence(random.Random(0))
    with pytest.raises(AssertionError, match="r: 5 blocks for 21 tokens"):
        BlockTables(0, 4).of([Chunk(seq, 20, 21, samples=True)])
