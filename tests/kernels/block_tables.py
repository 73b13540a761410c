"""Block tables of one step, for tests of the kernels. The engine keeps its tables from step to step instead."""

from __future__ import annotations

import numpy as np

from kernels import PagedKV
from kernels.host_copies import upload
from kernels.interface import BlockTable, IntArray


def make_block_table(blocks: IntArray, kv: PagedKV) -> BlockTable:
    """Make the table of one step from [sequences, blocks]. Entries past a context may be outside the pool."""
    block_count = kv.buffer.numel() // kv.elems_per_unit * kv.blocks_per_unit
    start_rows = kv.compute_block_rows(np.clip(blocks, 0, block_count - 1))
    (block_start_rows,) = upload([start_rows.T], kv.buffer.device)
    return BlockTable(blocks, block_start_rows.view(blocks.shape[1], -1), np.arange(len(blocks)))
