"""Block tables kept on host and device, against the lists they were made from, whatever happens between steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.execution import block_tables
from engine.execution.block_tables import BlockTables, RowAllocator
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence
from kernels import PagedKV

CPU = torch.device("cpu")
POOL = PagedKV(
    torch.zeros(40 * 100), elems_per_unit=100, blocks_per_unit=3, block_size=4, num_layers=1, num_kv_heads=1, head_dim=4
)  # fmt: skip


def blocks(rng: random.Random, count: int) -> list[BlockId]:
    return [BlockId(rng.randrange(99)) for _ in range(count)]


def sequence(rng: random.Random) -> Sequence:
    request = Request(request_id="r", token_ids=[], params=SamplingParams())
    return Sequence(request, [], 0, 0.0, block_tables=[blocks(rng, 5) for _ in range(2)])


def test_tables_are_those_of_this_step() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    row_allocator, groups = RowAllocator(25), [BlockTables(group, POOL, 25, 80, CPU) for group in range(2)]
    host_groups = [BlockTables(group, POOL, 25, 80, None) for group in range(2)]
    seqs = [sequence(rng) for _ in range(25)]
    for _ in range(300):
        calm = rng.random() < 0.5  # tables only grow
        for seq in seqs:
            event_draw = rng.random() * (0.2 if calm else 1)
            if event_draw < 0.2:
                for table in seq.block_tables:
                    if len(table) < 80:
                        table.append(BlockId(rng.randrange(99)))
            elif event_draw < 0.3:
                table = rng.choice(seq.block_tables)
                table[rng.randrange(len(table))] = BlockId(rng.randrange(99))
                seq.table_version += 1
            elif event_draw < 0.35:
                seq.block_tables = [blocks(rng, 5) for _ in range(2)]
                seq.table_version += 1
        if rng.random() < 0.2:  # gone, and its memory with it
            seqs[rng.randrange(len(seqs))] = sequence(rng)
        if rng.random() < 0.05:
            row_allocator.clear()
        step_seqs = seqs[:3] if rng.random() < 0.5 else rng.sample(seqs, rng.randrange(1, len(seqs)))
        ends = [rng.randrange(1, 4 * len(seq.block_tables[0]) + 1) for seq in step_seqs]
        chunks = [Chunk(seq, end - 1, end, should_sample=True) for seq, end in zip(step_seqs, ends)]
        rows, new = row_allocator.assign(step_seqs)
        assert len(set(rows.tolist())) == len(chunks)
        for group, tables in enumerate(zip(groups, host_groups, strict=True)):
            for table in tables:
                table.update(chunks, np.array(ends), rows, new)
            kept_tables, host_table = (table.make_step_table(rows) for table in tables)
            table_rows = host_table.host_blocks[rows]
            assert kept_tables.block_start_rows is not None
            assert len(table_rows) == len(chunks)
            for row, row_table, chunk in zip(rows, table_rows, chunks, strict=True):
                width = -(-chunk.end // 4)
                table = chunk.seq.block_tables[group][:width]
                assert row_table[:width].tolist() == table
                assert kept_tables.block_start_rows[:width, row].tolist() == [
                    POOL.compute_block_rows(block) for block in table
                ]


def test_a_decode_step_sends_new_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, row_allocator, tables = random.Random(0), RowAllocator(4), BlockTables(0, POOL, 4, 80, CPU)
    sent_sizes: list[int] = []
    upload = block_tables.upload
    monkeypatch.setattr(
        block_tables, "upload", lambda arrays, device: (sent_sizes.append(len(arrays[0])), upload(arrays, device))[1]
    )
    seqs = [sequence(rng) for _ in range(4)]
    for step in range(6):
        if step == 3:
            seqs[1].block_tables[0].append(BlockId(7))
        ends = np.array([20, 20 + (step == 4), 20, 20])
        chunks = [Chunk(seq, end - 1, end, should_sample=True) for seq, end in zip(seqs, ends.tolist())]
        rows, new = row_allocator.assign(seqs)
        tables.update(chunks, ends, rows, new)
    assert sent_sizes == [20, 1]


def test_too_few_blocks() -> None:
    chunk = Chunk(sequence(random.Random(0)), 20, 21, should_sample=True)
    with pytest.raises(AssertionError, match="r: fewer blocks than tokens"):
        BlockTables(0, POOL, 1, 80, None).update([chunk], np.array([21]), np.array([0]), [0])
