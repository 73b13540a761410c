"""The Triton backend with FlashAttention for the attention of prompts.

The package is optional, and imported when the backend is made. FlashAttention-3 reads the KV cache in place.
FlashAttention-2 takes only pages of 256 tokens or more, and gets a copy of the context. Decodes stay with Triton, as do
dtypes and sizes that the package does not take: its launches can be recorded.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.host_copies import copy_to_device
from kernels.interface import BlockTable, IntArray, PagedKV, RaggedBatch, ceil_div
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttendPrompts, AttentionPlan

MAX_BLOCK_SIZE = 32
"""Largest block size: FlashAttention-3 may load larger blocks whole and multiply what lies past a context."""
MAX_HEAD_DIM = 256


def make_query_arguments(batch: RaggedBatch, plan: AttentionPlan) -> dict[str, Any]:
    """Return the arguments that describe a batch's prompts to either version of FlashAttention.

    `cu_seqlens_q`, [prompts + 1] int32, counts the queries before each prompt. `window_size` is the number of tokens
    (before, after) that a token sees besides itself; -1 means all.
    """
    first = batch.decode_count
    return {
        "cu_seqlens_q": plan.query_starts[first:] - plan.query_starts[first],
        "max_seqlen_q": int(np.diff(batch.query_starts[first:]).max()),
        "causal": True,
        "window_size": (-1, -1) if plan.window is None else (plan.window - 1, 0),
    }


def view_overlapping_pages(kv: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """View K and V of a layer as the pages that FlashAttention-3 reads: [pages, block_size, kv_heads, dim] each.

    The cache is an array of rows, each K or V of one token in one layer. A block table gives the row r at which a block
    begins, with its K of layer 0. K and V of other layers lie a constant number of rows later, where the views begin.
    So page r has the block's K or V of this layer, and the block table is the page table. Pages overlap; no copies.
    """
    first_k_row = layer * kv.rows_per_layer
    first_v_row = first_k_row + kv.block_size
    last_page = kv.buffer.numel() // kv.elems_per_row - kv.block_size - first_v_row  # its V ends where the pool ends
    shape = (last_page + 1, kv.block_size, kv.num_kv_heads, kv.head_dim)
    strides = (kv.elems_per_row, kv.elems_per_row, kv.head_dim, 1)

    def view_pages(first_row: int) -> Tensor:
        return kv.buffer.as_strided(shape, strides, kv.buffer.storage_offset() + first_row * kv.elems_per_row)

    return view_pages(first_k_row), view_pages(first_v_row)


class FlashAttention3:
    """Computes the attention of prompts by FlashAttention-3, which reads K and V where the paged cache has them.

    FlashAttention-3 takes an array of pages, and the page numbers of each sequence. The block tables of the cache serve
    as page tables; see `view_overlapping_pages`.
    """

    def __init__(self) -> None:
        """Import the package. Raises ValueError if it is not installed."""
        self._function = _import_function("flash_attn_interface", "flash_attn_with_kvcache")

    def plan(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, plan: AttentionPlan) -> AttendPrompts:
        """Return a function that computes the attention of the step's prompts in any layer.

        FlashAttention-3 gets the context length of each prompt, [prompts], and its pages, [prompts, pages].
        """
        first_prompt = batch.decode_count  # decoding sequences come first in a batch
        arguments = make_query_arguments(batch, plan)
        arguments["cache_seqlens"] = plan.context_lens[first_prompt:]
        arguments["page_table"] = plan.block_table[:, first_prompt:].t().contiguous()
        return partial(self._attend, arguments)

    def _attend(self, arguments: dict[str, Any], q: Tensor, kv: PagedKV, layer: int, scale: float) -> Tensor:
        k, v = view_overlapping_pages(kv, layer)
        out: Tensor = self._function(q, k, v, softmax_scale=scale, **arguments)
        return out


class FlashAttention2:
    """Computes the attention of prompts by FlashAttention-2, on a contiguous copy of K and V of their contexts.

    FlashAttention-2 cannot read the small blocks of the paged cache, so each layer copies the contexts out of it.
    """

    def __init__(self, device: torch.device) -> None:
        """Import the package. Raises ValueError if it is not installed."""
        self._function = _import_function("flash_attn", "flash_attn_varlen_func")
        self._device = device

    def plan(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, plan: AttentionPlan) -> AttendPrompts:
        """Return a function that computes the attention of the step's prompts in any layer."""
        context_lens = batch.context_lens[batch.decode_count :]  # decoding sequences come first in a batch
        context_starts = np.concatenate(([0], np.cumsum(context_lens))).astype(np.int32)
        arguments = make_query_arguments(batch, plan)
        arguments["cu_seqlens_k"] = copy_to_device(context_starts, self._device)
        arguments["max_seqlen_k"] = int(context_lens.max())
        context_rows = copy_to_device(find_context_rows(batch, table, kv), self._device)  # of layer 0
        return partial(self._attend, arguments, context_rows)

    def _attend(
        self, arguments: dict[str, Any], context_rows: Tensor, q: Tensor, kv: PagedKV, layer: int, scale: float
    ) -> Tensor:
        """Copy K and V of all contexts in a layer, and attend to the copies. `context_rows`: K rows in layer 0."""
        k_rows = kv.view_rows()[layer * kv.rows_per_layer :]
        v_rows = k_rows[kv.block_size :]
        k = k_rows.index_select(0, context_rows).view(-1, kv.num_kv_heads, kv.head_dim)
        v = v_rows.index_select(0, context_rows).view(-1, kv.num_kv_heads, kv.head_dim)
        out: Tensor = self._function(q, k, v, softmax_scale=scale, **arguments)
        return out


def find_context_rows(batch: RaggedBatch, table: BlockTable, kv: PagedKV) -> IntArray:
    """Return the row of the cache that holds each context token's K in layer 0, for one prompt after another."""
    first_prompt = batch.decode_count
    context_lens = batch.context_lens[first_prompt:]
    block_count_max = ceil_div(int(context_lens.max()), kv.block_size)  # of prompts; decodes may have many more
    blocks = table.host_blocks[table.table_rows[first_prompt:], :block_count_max]
    offsets = np.arange(kv.block_size)
    rows_by_prompt = []
    for block_rows, context_len in zip(kv.compute_block_rows(blocks), context_lens.tolist()):
        rows_by_prompt.append((block_rows[:, None] + offsets).reshape(-1)[:context_len])
    return np.concatenate(rows_by_prompt)


class FlashAttentionKernels(TritonKernels):
    """Backend that computes the attention of prompts by FlashAttention, and all other operations by Triton kernels."""

    name = "flash-attn"

    def __init__(self, device: torch.device) -> None:
        """Import FlashAttention-3 if it is installed, else 2. Raises ValueError if neither is."""
        super().__init__(device)
        self._prompt_attention: FlashAttention3 | FlashAttention2
        try:
            self._prompt_attention = FlashAttention3()
        except ValueError:
            self._prompt_attention = FlashAttention2(device)

    def plan_attention(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None) -> AttentionPlan:
        """Prepare a step's attention. `attend_prompts` of the plan is set if FlashAttention computes the prompts.

        FlashAttention does so unless it does not take the cache's dtype or sizes. `window`: sliding window.
        """
        plan = super().plan_attention(batch, table, kv, window)
        has_prompts = batch.decode_count < len(batch.context_lens)
        if not has_prompts or not _supports(kv):
            return plan
        return replace(plan, attend_prompts=self._prompt_attention.plan(batch, table, kv, plan))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> Tensor:
        if plan.attend_prompts is None:
            return super().attention(q, k, v, kv, layer, plan, scale)
        out = self.store_and_attend_decodes(q, k, v, kv, layer, plan, scale)
        first_token = plan.decode_count  # decodes come first, and have one token each
        out[first_token:] = plan.attend_prompts(q[first_token:], kv, layer, scale)
        return out


def _supports(kv: PagedKV) -> bool:
    """Return whether FlashAttention can read such a pool."""
    return (
        kv.buffer.dtype in (torch.bfloat16, torch.float16)
        and kv.block_size <= MAX_BLOCK_SIZE
        and kv.head_dim % 8 == 0
        and kv.head_dim <= MAX_HEAD_DIM
    )


def _import_function(module: str, name: str) -> Callable[..., Any]:
    """Import a function. Raises ValueError if its module is not installed."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"attention backend 'flash-attn': {name} of {module} is not installed ({error}): pip install flash-attn"
        ) from error
    return function
