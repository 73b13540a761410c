"""The Triton backend with FlashAttention-3 for the attention of prompts.

The package is optional, and imported when the backend is made. It needs no copies: `view_overlapping_pages` presents
the pool as pages that begin at every token row. So our block tables, which hold such rows, are its page tables. Decodes
stay with Triton, whose launches can be recorded, as do dtypes and sizes that the package does not take.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.interface import DeviceBlockTable, PagedKV, RaggedBatch
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttentionPlan

MAX_BLOCK_SIZE = 32
"""Largest block size: FlashAttention may load larger blocks whole and multiply what lies past a context."""
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Sequences of a batch that have more than one query."""

    first_token: int
    """Index of their first token in the batch."""
    query_starts: Tensor
    """[prompts + 1] int32, from 0."""
    context_lens: Tensor
    """[prompts] int32: context lengths."""
    block_start_rows: Tensor
    """[prompts, width] int32: the row where each block begins, K of layer 0."""
    max_query_len: int
    window: int | None

    @property
    def window_size(self) -> tuple[int, int]:
        """(tokens before, tokens after) that a token sees besides itself; -1: all. FlashAttention's parameter."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)


def view_overlapping_pages(kv: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """View K and V of a layer as overlapping pages, [rows, block_size, kv_heads, dim] each.

    Page r begins at token row r of layer 0.
    """
    elems_per_row, layer_offset = kv.elems_per_row, layer * kv.rows_per_layer
    page_count = kv.buffer.numel() // elems_per_row - layer_offset - 2 * kv.block_size + 1
    shape = (page_count, kv.block_size, kv.num_kv_heads, kv.head_dim)
    start = kv.buffer.storage_offset() + layer_offset * elems_per_row
    k, v = (
        kv.buffer.as_strided(
            shape, (elems_per_row, elems_per_row, kv.head_dim, 1), start + i * kv.block_size * elems_per_row
        )
        for i in (0, 1)
    )
    return k, v


class FlashAttentionKernels(TritonKernels):
    """Implements `interface.Kernels` with FlashAttention for prompts, and Triton for the rest."""

    name = "flash-attn"

    def __init__(self, device: torch.device) -> None:
        """Import the package. Raises ValueError if it is not installed."""
        super().__init__(device)
        try:
            from flash_attn_interface import flash_attn_with_kvcache
        except ImportError as error:
            raise ValueError(
                f"attention backend 'flash-attn': FlashAttention-3 is not installed ({error}): pip install the folder "
                "hopper of its sources"
            ) from error
        self._attend_paged = flash_attn_with_kvcache

    def plan_with_device_table(
        self, batch: RaggedBatch, table: DeviceBlockTable, kv: PagedKV, window: int | None
    ) -> AttentionPlan:
        plan = super().plan_with_device_table(batch, table, kv, window)
        first = batch.decode_count
        if first == len(batch.context_lens) or not _supports(kv):
            return plan
        prompts = PromptBatch(
            first_token=int(batch.query_starts[first]),
            query_starts=plan.query_starts[first:] - plan.query_starts[first],
            context_lens=plan.context_lens[first:],
            block_start_rows=plan.block_table[:, first:].t().contiguous(),
            max_query_len=int(np.diff(batch.query_starts[first:]).max()),
            window=window,
        )
        return replace(plan, prompt_batch=prompts)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> Tensor:
        prompts: PromptBatch | None = plan.prompt_batch
        if prompts is None:
            return super().attention(q, k, v, kv, layer, plan, scale)
        out = self.store_and_decode(q, k, v, kv, layer, plan, scale)
        first = prompts.first_token
        key_pages, value_pages = view_overlapping_pages(kv, layer)
        out[first:] = self._attend_paged(
            q[first:],
            key_pages,
            value_pages,
            cache_seqlens=prompts.context_lens,
            page_table=prompts.block_start_rows,
            cu_seqlens_q=prompts.query_starts,
            max_seqlen_q=prompts.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=prompts.window_size,
        )
        return out


def _supports(kv: PagedKV) -> bool:
    """Return whether FlashAttention can read such a pool."""
    return (
        kv.buffer.dtype in (torch.bfloat16, torch.float16)
        and kv.block_size <= MAX_BLOCK_SIZE
        and kv.head_dim % 8 == 0
        and kv.head_dim <= MAX_HEAD_DIM
    )
