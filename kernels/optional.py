"""The Triton backend with an operation borrowed from a package made for it: the attention of prompts from
FlashAttention or FlashInfer, their gated delta rule from fla-core.

The packages are optional and imported when a backend is made. Nothing is copied for FlashAttention-3 and FlashInfer:
`pages` shows them the pool as pages that begin at every token row, so that our block tables, which hold such rows, are
their page tables. FlashAttention-2, whose pages have 256 tokens at least, is given a copy of the context. Decoding
stays with Triton, whose launches are recorded; so do tensors and blocks that a package does not take.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.interface import IntArray, KeptTable, PagedKV, Ragged
from kernels.transfer import to_device
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttentionPlan, RecurrentPlan
from kernels.triton.recurrent import gated_delta

PAGE_MAX = 32
"""Tokens of a block. FlashAttention-3 may load larger ones whole: what lies past a context would be multiplied."""
HEAD_DIM_MAX = 256
FLASHINFER_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Prompts:
    """The sequences of a batch that have more than one query."""

    first_token: int
    query_starts: Tensor
    """[prompts + 1] int32, from 0."""
    lens: Tensor
    """[prompts] int32: context lengths."""
    pages: Tensor
    """[prompts, width] int32: the row where each block begins, K of layer 0."""
    query_len_max: int
    window: int | None
    batch: Ragged
    table: KeptTable

    @property
    def window_size(self) -> tuple[int, int]:
        """(tokens before, after) that a token sees besides itself, as FlashAttention is told; -1: all."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)


class PromptAttention(Protocol):
    """Causal attention of prompts whose K and V are stored already."""

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: Prompts, scale: float) -> Tensor:
        """q: [tokens of the prompts, heads, dim]; returns the same shape."""
        ...


def pages(kv: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer: [rows, block_size, kv_heads, dim] each, where page r begins at row r of layer 0."""
    row, ahead = kv.row_elems, layer * kv.layer_rows
    count = kv.buffer.numel() // row - ahead - 2 * kv.block_size + 1
    shape = (count, kv.block_size, kv.num_kv_heads, kv.head_dim)
    start = kv.buffer.storage_offset() + ahead * row
    k, v = (kv.buffer.as_strided(shape, (row, row, kv.head_dim, 1), start + i * kv.block_size * row) for i in (0, 1))
    return k, v


class FlashAttention3:
    """Raises ValueError where it is not installed."""

    def __init__(self) -> None:
        self._attend = _function("flash-attn", "flash_attn_interface", "flash_attn_with_kvcache")

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: Prompts, scale: float) -> Tensor:
        k, v = pages(kv, layer)
        out: Tensor = self._attend(
            q,
            k,
            v,
            cache_seqlens=prompts.lens,
            page_table=prompts.pages,
            cu_seqlens_q=prompts.query_starts,
            max_seqlen_q=prompts.query_len_max,
            softmax_scale=scale,
            causal=True,
            window_size=prompts.window_size,
        )
        return out


@dataclass(frozen=True, slots=True)
class Gathered:
    """The contexts of prompts, one behind the other."""

    prompts: Prompts
    rows: Tensor
    """[tokens of all contexts]: their K rows of layer 0."""
    starts: Tensor
    """[prompts + 1] int32, from 0."""
    len_max: int


class FlashAttention2:
    """Raises ValueError where it is not installed."""

    def __init__(self, device: torch.device) -> None:
        self._attend = _function("flash-attn", "flash_attn", "flash_attn_varlen_func")
        self._device = device
        self._gathered: dict[int, Gathered] = {}
        """By group: of the last step."""

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: Prompts, scale: float) -> Tensor:
        known = self._gathered.get(id(kv))
        if known is None or known.prompts is not prompts:
            known = self._gathered[id(kv)] = self._gather(prompts, kv)
        rows = kv.rows()[layer * kv.layer_rows :]
        shape = (-1, kv.num_kv_heads, kv.head_dim)
        out: Tensor = self._attend(
            q,
            rows.index_select(0, known.rows).view(shape),
            rows[kv.block_size :].index_select(0, known.rows).view(shape),
            cu_seqlens_q=prompts.query_starts,
            cu_seqlens_k=known.starts,
            max_seqlen_q=prompts.query_len_max,
            max_seqlen_k=known.len_max,
            softmax_scale=scale,
            causal=True,
            window_size=prompts.window_size,
        )
        return out

    def _gather(self, prompts: Prompts, kv: PagedKV) -> Gathered:
        batch, table, first = prompts.batch, prompts.table, prompts.batch.decode_count
        lens = batch.context_lens[first:]
        heads = kv.block_rows(table.here[table.rows[first:], : -(-int(lens.max()) // kv.block_size)])
        rows = [(row[:, None] + np.arange(kv.block_size)).reshape(-1)[:n] for row, n in zip(heads, lens.tolist())]
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        rows_there, starts_there = (to_device(x, self._device) for x in (np.concatenate(rows), starts))
        return Gathered(prompts, rows_there, starts_there, int(lens.max()))


def flash_attention(device: torch.device) -> PromptAttention:
    """FlashAttention-3 where it is installed, else 2. Raises ValueError where neither is."""
    try:
        return FlashAttention3()
    except ValueError:
        return FlashAttention2(device)


class FlashInfer:
    """Raises ValueError where it is not installed. Of each group two wrappers take turns: the memory from which one
    sends its plan must not be written while the step before has not read it."""

    def __init__(self, device: torch.device) -> None:
        self._wrapper = _function("flashinfer", "flashinfer", "BatchPrefillWithPagedKVCacheWrapper")
        self._workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._planned: dict[int, tuple[Prompts | None, Any, Any]] = {}
        """By group: (what the first wrapper is planned for, it, the other one)."""

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, prompts: Prompts, scale: float) -> Tensor:
        if id(kv) not in self._planned:
            self._planned[id(kv)] = (None, *(self._wrapper(self._workspace, "NHD") for _ in range(2)))
        known, wrapper, other = self._planned[id(kv)]
        if known is not prompts:
            self._plan(other, q, kv, prompts, scale)
            self._planned[id(kv)] = (prompts, other, wrapper)
            wrapper = other
        out: Tensor = wrapper.run(q, pages(kv, layer))
        return out

    def _plan(self, wrapper: Any, q: Tensor, kv: PagedKV, prompts: Prompts, scale: float) -> None:
        batch, table, first = prompts.batch, prompts.table, prompts.batch.decode_count
        lens = batch.context_lens[first:]
        counts = -(-lens // kv.block_size)
        here = kv.block_rows(table.here[table.rows[first:], : counts.max()])
        used = here[np.arange(here.shape[1]) < counts[:, None]]
        starts = batch.query_starts[first:] - batch.query_starts[first]
        page_starts = np.concatenate(([0], np.cumsum(counts)))
        wrapper.plan(
            _ints(starts),
            _ints(page_starts),
            to_device(used.astype(np.int32), self._device),
            _ints((lens - 1) % kv.block_size + 1),
            q.shape[1],
            kv.num_kv_heads,
            kv.head_dim,
            kv.block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if prompts.window is None else prompts.window - 1,
            q_data_type=q.dtype,
            kv_data_type=kv.buffer.dtype,
        )


@dataclass(frozen=True, slots=True)
class DeltaPrompts:
    """What fla-core wants to know of the prompts, once a step."""

    decode: RecurrentPlan
    units: Tensor
    """[prompts] int64."""
    starts_there: Tensor
    starts_here: Tensor
    """[prompts + 1] int64 each, from 0; on the device and on the host."""


class BorrowingKernels(TritonKernels):
    """The Triton backend with prompts' attention, or their gated delta rule, from elsewhere."""

    def __init__(
        self, device: torch.device, name: str, attend: PromptAttention | None = None, *, delta: bool = False
    ) -> None:
        """Raises ValueError for `delta` where fla-core is not installed, or is too old."""
        super().__init__(device)
        self.name = name
        self._attend = attend
        self._chunked: Callable[..., Any] | None = None
        if delta:
            self._chunked = _function("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
            if "state_v_first" not in inspect.signature(self._chunked).parameters:
                raise ValueError("attention backend 'fla': expected fla-core 0.6 or newer")

    def plan_kept(self, batch: Ragged, table: KeptTable, kv: PagedKV, window: int | None) -> AttentionPlan:
        plan = super().plan_kept(batch, table, kv, window)
        first = batch.decode_count
        if self._attend is None or first == len(batch.context_lens) or not _takes(kv):
            return plan
        prompts = Prompts(
            first_token=int(batch.query_starts[first]),
            query_starts=plan.starts[first:] - plan.starts[first],
            lens=plan.lens[first:],
            pages=plan.table[:, first:].t().contiguous(),
            query_len_max=int(np.diff(batch.query_starts[first:]).max()),
            window=window,
            batch=batch,
            table=table,
        )
        return replace(plan, borrowed=prompts)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> Tensor:
        prompts: Prompts | None = plan.borrowed
        if prompts is None or self._attend is None:
            return super().attention(q, k, v, kv, layer, plan, scale)
        out = self.store_and_decode(q, k, v, kv, layer, plan, scale)
        first = prompts.first_token
        out[first:] = self._attend(q[first:], kv, layer, prompts, scale)
        return out

    def plan_state(self, batch: Ragged, units: IntArray) -> RecurrentPlan:
        plan, first = super().plan_state(batch, units), batch.decode_count
        if self._chunked is None or first == len(units):
            return plan
        starts = batch.query_starts[first:] - batch.query_starts[first]
        prompts = DeltaPrompts(
            decode=RecurrentPlan(plan.starts, plan.units, plan.tile_seq, plan.tile_token, first, first),
            units=plan.units[first:].long(),
            starts_there=to_device(starts, self.device),
            starts_here=torch.from_numpy(starts),
        )
        return replace(plan, borrowed=prompts)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: RecurrentPlan
    ) -> Tensor:
        prompts: DeltaPrompts | None = plan.borrowed
        if prompts is None or self._chunked is None:
            return gated_delta(q, k, v, log_decay, rate, states, plan)
        count, out = plan.decode_count, torch.empty_like(v)
        if count:
            out[:count] = gated_delta(
                q[:count], k[:count], v[:count], log_decay[:count], rate[:count], states, prompts.decode
            )
        found, last = self._chunked(
            *(x[count:][None] for x in (q, k, v)),
            g=log_decay[count:][None],
            beta=rate[count:][None],
            initial_state=states[prompts.units].float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=prompts.starts_there,
            cu_seqlens_cpu=prompts.starts_here,
        )
        out[count:] = found[0]
        states[prompts.units] = last.to(states.dtype)
        return out


def _takes(kv: PagedKV) -> bool:
    """Whether the packages take such a pool."""
    return (
        kv.buffer.dtype in (torch.bfloat16, torch.float16)
        and kv.block_size <= PAGE_MAX
        and kv.head_dim % 8 == 0
        and kv.head_dim <= HEAD_DIM_MAX
    )


def _ints(array: IntArray) -> Tensor:
    """On the host, as int32."""
    return torch.from_numpy(array.astype(np.int32))


def _function(backend: str, module: str, name: str) -> Callable[..., Any]:
    """Raises ValueError where it is not installed."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"attention backend {backend!r}: {name} of {module} is not installed ({error})") from error
    return found
