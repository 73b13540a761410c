"""Backends that take one operation from a package made for it: flash-attn for the attention of prompts, fla-core for
their gated delta rule. Everything else is the Triton backend's.

The packages are optional and imported when a backend is made. FlashAttention-2 takes pages of 256 tokens only, and our
blocks are smaller and lie strided in the pool, so the context of prompts is gathered first and given as one ragged
batch without pages; decoding stays with Triton, which reads the blocks where they are.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.interface import KeptTable, PagedKV, Ragged
from kernels.transfer import upload
from kernels.triton.backend import TritonKernels
from kernels.triton.plan import AttentionPlan, RecurrentPlan
from kernels.triton.recurrent import gated_delta


@dataclass(frozen=True, slots=True)
class PromptGather:
    """The prompts of a batch as flash-attn wants them."""

    rows: Tensor
    """[context tokens of all prompts]: their K rows of layer 0."""
    query_starts: Tensor
    key_starts: Tensor
    """[prompts + 1] int32, from 0."""
    first_token: int
    query_len_max: int
    key_len_max: int


@dataclass(frozen=True, slots=True)
class FlashPlan:
    paged: AttentionPlan
    prompts: PromptGather | None


class FlashAttnKernels(TritonKernels):
    """The Triton backend with flash-attn for prompts: FlashAttention-3 where it is installed, else 2."""

    name = "flash-attn"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._varlen = _function("flash-attn", ("flash_attn_interface", "flash_attn"), "flash_attn_varlen_func")

    def plan_kept(self, batch: Ragged, table: KeptTable, kv: PagedKV, window: int | None) -> FlashPlan:  # type: ignore[override]
        return FlashPlan(super().plan_kept(batch, table, kv, window), _gather(batch, table, kv, self.device))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: FlashPlan | AttentionPlan, scale: float
    ) -> Tensor:
        if isinstance(plan, AttentionPlan):  # a captured decode step
            return super().attention(q, k, v, kv, layer, plan, scale)
        out = self.store_and_decode(q, k, v, kv, layer, plan.paged, scale)
        prompts = plan.prompts
        if prompts is None:
            return out
        rows = kv.rows()[layer * kv.layer_rows :]
        shape = (-1, kv.num_kv_heads, kv.head_dim)
        window = -1 if plan.paged.window is None else plan.paged.window - 1
        found = self._varlen(
            q[prompts.first_token :],
            rows.index_select(0, prompts.rows).view(shape),
            rows[kv.block_size :].index_select(0, prompts.rows).view(shape),
            cu_seqlens_q=prompts.query_starts,
            cu_seqlens_k=prompts.key_starts,
            max_seqlen_q=prompts.query_len_max,
            max_seqlen_k=prompts.key_len_max,
            softmax_scale=scale,
            causal=True,
            window_size=(window, -1 if window < 0 else 0),
        )
        out[prompts.first_token :] = found[0] if isinstance(found, tuple) else found
        return out


class FlaKernels(TritonKernels):
    """The Triton backend with fla-core's chunked gated delta rule for prompts."""

    name = "fla"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._chunked = _function("fla", ("fla.ops.gated_delta_rule",), "chunk_gated_delta_rule")

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: RecurrentPlan
    ) -> Tensor:
        count = plan.decode_count
        if plan.sequences == count:
            return gated_delta(q, k, v, log_decay, rate, states, plan)
        out = torch.empty_like(v)
        if count:
            decode = RecurrentPlan(plan.starts, plan.units, plan.tile_seq, plan.tile_token, count, count)
            out[:count] = gated_delta(q[:count], k[:count], v[:count], log_decay[:count], rate[:count], states, decode)
        per_key = v.shape[1] // q.shape[1]
        units = plan.units[count:].long()
        found, last = self._chunked(
            q[count:].repeat_interleave(per_key, 1)[None],
            k[count:].repeat_interleave(per_key, 1)[None],
            v[count:][None],
            g=log_decay[count:][None],
            beta=rate[count:][None],
            initial_state=states[units].float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=(plan.starts[count:] - count).long(),
        )
        out[count:] = found[0]
        states[units] = last.to(states.dtype)
        return out


def _function(backend: str, modules: tuple[str, ...], name: str) -> Callable[..., Any]:
    """The function `name` of the first of the modules that is installed."""
    errors = []
    for module in modules:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            errors.append(f"{module}: {error}")
        else:
            return found
    raise ValueError(f"attention backend {backend!r}: {name} is not installed ({'; '.join(errors)})")


def _gather(batch: Ragged, table: KeptTable, kv: PagedKV, device: torch.device) -> PromptGather | None:
    first = batch.decode_count
    lens = batch.context_lens[first:]
    if not len(lens):
        return None
    heads = kv.block_rows(table.here[table.rows[first:], : table.width(batch, kv)])
    rows = [(row[:, None] + np.arange(kv.block_size)).reshape(-1)[:n] for row, n in zip(heads, lens.tolist())]
    query_starts = batch.query_starts[first:] - batch.query_starts[first]
    key_starts = np.concatenate(([0], np.cumsum(lens)))
    rows_there, queries, keys = upload([np.concatenate(rows), query_starts, key_starts], device)
    longest = int(np.diff(query_starts).max())
    return PromptGather(rows_there, queries, keys, int(batch.query_starts[first]), longest, int(lens.max()))
