"""The Triton backend with FlashAttention for the attention of prompts.

The package is optional, and imported when the backend is made. FlashAttention-3 needs no copies: for it
`view_overlapping_pages` presents the pool as pages that begin at every token row. So our block tables, which hold such
rows, are its page tables. FlashAttention-2 takes only pages of 256 tokens or more, and gets a copy of the context.
Decodes stay with Triton, whose launches can be recorded, as do dtypes and sizes that the package does not take.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.interface import DeviceBlockTable, PagedKV, RaggedBatch
from kernels.transfer import copy_to_device
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttentionPlan

MAX_BLOCK_SIZE = 32
"""Largest block size: FlashAttention-3 may load larger blocks whole and multiply what lies past a context."""
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The sequences of a batch that have more than one query, as FlashAttention takes them."""

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
    context: GatheredContext | None
    """Rows of the contexts in the pool, for versions that need a copy; None: the pool itself is read."""

    @property
    def window_size(self) -> tuple[int, int]:
        """(tokens before, tokens after) that a token sees besides itself; -1: all. FlashAttention's parameter."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)


class PromptAttention(Protocol):
    """Interface of FlashAttention's versions: the causal attention of prompts, after their K and V are stored."""

    def gather(self, batch: RaggedBatch, table: DeviceBlockTable, kv: PagedKV) -> GatheredContext | None:
        """Return where the contexts of a step's prompts are, if the version needs a copy of them; else None."""
        ...

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: PromptBatch, scale: float) -> Tensor:
        """q: [tokens of the prompts, heads, dim]; returns the same shape."""
        ...


def view_overlapping_pages(kv: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """View K and V of a layer as overlapping pages, [rows, block_size, kv_heads, dim] each, without a copy.

    Page r has the `block_size` rows from row r on. So a block that begins at any row is a page. Rows are counted from
    layer 0, so that one table of blocks serves all layers: the view of another layer begins as much later.
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


class FlashAttention3:
    """Computes the attention of prompts by FlashAttention-3, which reads K and V in the cache's pool, without a copy.

    FlashAttention-3 takes an array of pages, and the page numbers of each sequence. Here page r has the `block_size`
    rows of the pool from row r on, so pages overlap, and a block that begins at row r is page r.
    """

    def __init__(self) -> None:
        """Import the package. Raises ValueError if it is not installed."""
        self._attend = _import_function("flash_attn_interface", "flash_attn_with_kvcache")

    def gather(self, batch: RaggedBatch, table: DeviceBlockTable, kv: PagedKV) -> None:
        """Return nothing, because no context is copied."""

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: PromptBatch, scale: float) -> Tensor:
        """Return the prompts' attention over their contexts in the pool, in the shape of q."""
        k, v = view_overlapping_pages(kv, layer)  # so that a block may begin at any row
        out: Tensor = self._attend(
            q,
            k,
            v,
            cache_seqlens=prompts.context_lens,
            page_table=prompts.block_start_rows,
            cu_seqlens_q=prompts.query_starts,
            max_seqlen_q=prompts.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=prompts.window_size,
        )
        return out


@dataclass(frozen=True, slots=True)
class GatheredContext:
    """Token rows of a step's prompts in the pool, by which their contexts are copied one after another."""

    token_rows: Tensor
    """[tokens of all contexts]: their K rows of layer 0."""
    context_starts: Tensor
    """[prompts + 1] int32, from 0."""
    max_context_len: int


class FlashAttention2:
    """Computes the attention of prompts by FlashAttention-2, which needs a copy of their contexts."""

    def __init__(self, device: torch.device) -> None:
        """Import the package. Raises ValueError if it is not installed."""
        self._attend = _import_function("flash_attn", "flash_attn_varlen_func")
        self._device = device

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: PromptBatch, scale: float) -> Tensor:
        """Copy K and V of the prompts' contexts out of the pool, one after another, and attend to the copies."""
        context = prompts.context
        assert context is not None, "prompts that another version has planned"
        rows = kv.view_rows()[layer * kv.rows_per_layer :]
        shape = (-1, kv.num_kv_heads, kv.head_dim)
        out: Tensor = self._attend(
            q,
            rows.index_select(0, context.token_rows).view(shape),
            rows[kv.block_size :].index_select(0, context.token_rows).view(shape),
            cu_seqlens_q=prompts.query_starts,
            cu_seqlens_k=context.context_starts,
            max_seqlen_q=prompts.max_query_len,
            max_seqlen_k=context.max_context_len,
            softmax_scale=scale,
            causal=True,
            window_size=prompts.window_size,
        )
        return out

    def gather(self, batch: RaggedBatch, table: DeviceBlockTable, kv: PagedKV) -> GatheredContext:
        """Find the token rows of the prompts' contexts, once a step, as they are the same in every layer."""
        first_prompt = batch.decode_count
        context_lens = batch.context_lens[first_prompt:]
        max_context_len = int(context_lens.max())
        max_blocks = -(-max_context_len // kv.block_size)
        blocks = table.host_blocks[table.table_rows[first_prompt:], :max_blocks]
        offsets = np.arange(kv.block_size)
        token_rows = [
            (block_rows[:, None] + offsets).reshape(-1)[:context_len]
            for block_rows, context_len in zip(kv.compute_block_rows(blocks), context_lens.tolist())
        ]
        context_starts = np.concatenate(([0], np.cumsum(context_lens))).astype(np.int32)
        return GatheredContext(
            token_rows=copy_to_device(np.concatenate(token_rows), self._device),
            context_starts=copy_to_device(context_starts, self._device),
            max_context_len=max_context_len,
        )


def make_prompt_attention(device: torch.device) -> PromptAttention:
    """Return FlashAttention-3 if it is installed, else 2. Raises ValueError if neither is."""
    try:
        return FlashAttention3()
    except ValueError:
        return FlashAttention2(device)


class FlashAttentionKernels(TritonKernels):
    """Computes the attention of prompts by FlashAttention, and the rest by Triton."""

    name = "flash-attn"

    def __init__(self, device: torch.device, attend: PromptAttention) -> None:
        super().__init__(device)
        self._attend = attend

    def plan_with_device_table(
        self, batch: RaggedBatch, table: DeviceBlockTable, kv: PagedKV, window: int | None
    ) -> AttentionPlan:
        """Plan the attention of a step: FlashAttention computes the prompts, which follow the decodes in the batch.

        Without prompts, or if FlashAttention cannot read such a pool, the plan's `prompt_batch` is None, and Triton
        computes all.
        """
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
            context=self._attend.gather(batch, table, kv),
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
        out[first:] = self._attend(q[first:], kv, layer, prompts, scale)
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
