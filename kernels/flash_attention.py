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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.host_copies import copy_to_device
from kernels.interface import BlockTable, PagedKV, RaggedBatch
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttentionPlan, FlashPrompts

MAX_BLOCK_SIZE = 32
"""Largest block size: FlashAttention-3 may load larger blocks whole and multiply what lies past a context."""
MAX_HEAD_DIM = 256


class FlashAttentionKernels(TritonKernels):
    """Backend that computes the attention of prompts by FlashAttention, and all other operations by Triton kernels."""

    name = "flash-attn"

    def __init__(self, device: torch.device) -> None:
        """Import FlashAttention-3 if it is installed, else 2. Raises ValueError if neither is."""
        super().__init__(device)
        try:
            self._attend = _import_function("flash_attn_interface", "flash_attn_with_kvcache")
            self._reads_cache = True
        except ValueError:
            self._attend = _import_function("flash_attn", "flash_attn_varlen_func")
            self._reads_cache = False

    def plan_attention(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None) -> AttentionPlan:
        """Prepare a step's attention, and its prompts for FlashAttention if that takes the cache's dtype and sizes."""
        plan = super().plan_attention(batch, table, kv, window)
        first = batch.decode_count  # decoding sequences come first in a batch
        context_lens = batch.context_lens[first:]
        if not len(context_lens) or not _supports(kv):
            return plan
        arguments = {
            "cu_seqlens_q": plan.query_starts[first:] - plan.query_starts[first],  # queries before each prompt
            "max_seqlen_q": int(np.diff(batch.query_starts[first:]).max()),
            "causal": True,
            # Tokens before and after that a token sees besides itself; -1: all.
            "window_size": (-1, -1) if window is None else (window - 1, 0),
        }
        if self._reads_cache:
            arguments["cache_seqlens"] = plan.context_lens[first:]
            arguments["page_table"] = plan.block_table[:, first:].t().contiguous()  # see `view_overlapping_pages`
            return replace(plan, flash_prompts=FlashPrompts(arguments, copied_rows=None))
        context_starts = np.concatenate(([0], np.cumsum(context_lens))).astype(np.int32)
        arguments["cu_seqlens_k"] = copy_to_device(context_starts, self.device)
        arguments["max_seqlen_k"] = int(context_lens.max())
        rows = [table.find_rows(first + i, np.arange(length), kv) for i, length in enumerate(context_lens)]
        copied_rows = copy_to_device(np.concatenate(rows), self.device)
        return replace(plan, flash_prompts=FlashPrompts(arguments, copied_rows))

    def _attend_prompts(
        self, q: Tensor, out: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> None:
        prompts = plan.flash_prompts
        if prompts is None:
            super()._attend_prompts(q, out, kv, layer, plan, scale)
            return
        if prompts.copied_rows is None:
            k, v = view_overlapping_pages(kv, layer)
        else:
            k, v = (rows.index_select(0, prompts.copied_rows) for rows in kv.view_layer(layer))
        first_token = plan.decode_count  # decodes come first, and have one token each
        out[first_token:] = self._attend(q[first_token:], k, v, softmax_scale=scale, **prompts.arguments)


def view_overlapping_pages(kv: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """View K and V of a layer as the pages that FlashAttention-3 reads: [pages, block_size, kv_heads, dim] each.

    A page begins at every row of the cache, so that pages overlap, and is as long as a block. A block table has the row
    at which each block begins. So it is a page table, too, and nothing is copied.
    """
    k_rows, v_rows = kv.view_layer(layer)
    page_count = len(v_rows) - kv.block_size + 1  # the last page of V ends where the pool ends
    shape = (page_count, kv.block_size, kv.num_kv_heads, kv.head_dim)
    strides = (kv.elems_per_row, kv.elems_per_row, kv.head_dim, 1)
    return k_rows.as_strided(shape, strides), v_rows.as_strided(shape, strides)


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
