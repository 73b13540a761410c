"""The reference backend: plain torch, for any device and any float dtype. Attention takes one sequence at a time.

It defines the operations of a step: every other backend extends it, and is tested against it. Attention and norms are
computed in fp32 (in fp64 for fp64 inputs). `tokens` is the axis of the ragged batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import BlockTable, IntArray, PagedKV, RaggedBatch, get_accumulation_dtype
from kernels.reference.recurrent import PromptSpan, StatePlan, causal_conv, gated_delta, state_space
from kernels.sampling import draw


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Tokens of a step, and the rows of the KV cache that they write and read. See `PagedKV.view_layer` for rows."""

    query_starts: list[int]
    """[sequences + 1]: the batch's query_starts."""
    slot_rows: Tensor
    """[tokens]: row in which each token's K and V are stored."""
    visible_rows: list[Tensor]
    """Rows of the positions that some query of a sequence sees, in order, for each sequence."""
    window: int | None


class ReferenceKernels:
    """Computes every operation in plain torch. Other backends replace operations."""

    name = "reference"
    has_fixed_plans = False
    """Whether plans can keep their memory, into which each batch is written, so that decode steps can be recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plan_attention(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None) -> Any:
        """Plan the attention of a batch, once a step for each group.

        `window`: number of last positions that a query sees, its own included; None: all.
        """
        visible_rows = []
        for i, (context_len, query_count) in enumerate(zip(batch.context_lens, np.diff(batch.query_starts))):
            first_visible = 0 if window is None else max(0, context_len - query_count + 1 - window)
            rows = table.find_rows(i, np.arange(first_visible, context_len), kv)
            visible_rows.append(torch.from_numpy(rows).to(self.device))
        slot_rows = torch.from_numpy(table.compute_slot_rows(batch, kv)).to(self.device)
        return ReferencePlan(batch.query_starts.tolist(), slot_rows, visible_rows, window)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: Any, scale: float) -> Tensor:
        """Store K and V of the step's tokens in a layer of the paged cache, and return their causal attention.

        q and the result: [tokens, heads, dim]. k and v: [tokens, kv_heads, dim]; heads is a multiple of kv_heads.
        `plan`: the step's batch, prepared by `plan_attention`. `layer`: index of the layer in the cache `kv`.
        """
        k_rows, v_rows = kv.view_layer(layer)
        # All sequences are stored before any attends: they may share blocks, so that one reads what another stores.
        k_rows[plan.slot_rows] = k
        v_rows[plan.slot_rows] = v
        out = torch.empty_like(q)
        for (start, end), visible_rows in zip(pairwise(plan.query_starts), plan.visible_rows):
            out[start:end] = attend(q[start:end], k_rows[visible_rows], v_rows[visible_rows], plan.window, scale)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
        """Root mean square norm of the last axis in fp32, times `weight` (times `1 + weight` where zero-centred).

        `weight` is [dim], or [heads, dim] for a norm of its own for each head. Zhang and Sennrich, 2019.
        """
        value = x.to(get_accumulation_dtype(x.dtype))
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
        gain = weight.to(value.dtype)
        return (value * (gain + 1 if zero_centred else gain)).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual). May write the sum into `residual`."""
        total = x + residual
        return self.rms_norm(total, weight, eps, zero_centred), total

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotary embedding (Su et al., 2021) of the first R dims of each head, halves rotated against each other.

        x: [tokens, heads, dim]; cos and signed_sin: [tokens, R] with R <= dim, where the first half of signed_sin is
        -sin and the second +sin, so that the result is x * cos + swapped(x) * signed_sin.
        """
        width = cos.shape[-1]
        rotary_dims, pass_dims = x[..., :width], x[..., width:]
        first, second = rotary_dims.chunk(2, -1)
        swapped_halves = torch.cat((second, first), -1)
        return torch.cat((rotary_dims * cos[:, None] + swapped_halves * signed_sin[:, None], pass_dims), -1)

    def norm_and_rotate(
        self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        """Apply `rms_norm`, then `rotate`, as queries and keys with head norms need. x: [tokens, heads, dim]."""
        return self.rotate(self.rms_norm(x, weight, eps, zero_centred), cos, signed_sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Return silu(first half of the last axis) * second half (SwiGLU)."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """Return gelu(first half of the last axis) * second half (GeGLU), with the tanh approximation."""
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def apply_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: [tokens, hidden].

        The (token, expert) pairs are sorted by expert, so that each expert, down(silu(gate(x)) * up(x)), runs once, on
        all of its tokens. x: [tokens, hidden]. gate_up: [experts, 2 * size, hidden]. down: [experts, hidden, size].
        expert_ids, weights: [tokens, top_k], the experts of a token being distinct.
        """
        flat_expert_ids = expert_ids.reshape(-1)
        pair_order = flat_expert_ids.argsort(stable=True)
        token_indices = pair_order // expert_ids.shape[1]
        inputs = x[token_indices]
        outputs = torch.empty_like(inputs)
        pair_count_by_expert = torch.bincount(flat_expert_ids, minlength=gate_up.shape[0]).tolist()
        start = 0
        for expert, pair_count in enumerate(pair_count_by_expert):
            if pair_count:
                end = start + pair_count
                hidden = self.silu_and_mul(F.linear(inputs[start:end], gate_up[expert]))
                torch.mm(hidden, down[expert].t(), out=outputs[start:end])
                start = end
        outputs.mul_(weights.reshape(-1)[pair_order, None])
        return torch.zeros_like(x).index_add_(0, token_indices, outputs)

    def norm_then_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return rms_norm(x) * weight * silu(gate), over the last axis. x and gate: [..., dim]; weight: [dim]."""
        normalized_x = self.rms_norm(x, weight, eps).to(get_accumulation_dtype(x.dtype))
        return (normalized_x * F.silu(gate.to(normalized_x.dtype))).to(x.dtype)

    def gate_then_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
        """Return rms_norm(x * silu(gate)) * weight. Each of `groups` equal parts of the last axis has its own norm."""
        gated_x = x.to(get_accumulation_dtype(x.dtype)) * F.silu(gate.to(get_accumulation_dtype(x.dtype)))
        parts = gated_x.reshape(*x.shape[:-1], groups, -1)
        return self.rms_norm(parts, weight.view(groups, -1), eps).reshape(x.shape).to(x.dtype)

    def plan_state(self, batch: RaggedBatch, units: IntArray) -> Any:
        """Plan the recurrent operations of this batch, once a step. `units`: [sequences]."""
        first = batch.decode_count  # decoding sequences come first in a batch
        decode_units = torch.from_numpy(units[:first]).to(self.device)
        spans = zip(pairwise(batch.query_starts[first:].tolist()), units[first:].tolist())
        return StatePlan(decode_units, [PromptSpan(start, end, unit) for (start, end), unit in spans])

    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    state_space = staticmethod(state_space)
    draw = staticmethod(draw)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Compute causal attention of one sequence: of its last tokens (queries) over its context, which ends with them.

    q: [queries, heads, dim]. k and v: [context, kv_heads, dim]; heads / kv_heads query heads share a head of K and V.
    `window`: number of last positions that a query sees; None: all. Returns [queries, heads, dim] in q's dtype.
    """
    num_queries, num_heads, _ = q.shape
    context_len, num_kv_heads, _ = k.shape
    heads_per_kv_head = num_heads // num_kv_heads
    dtype = get_accumulation_dtype(q.dtype)
    k = k.to(dtype).repeat_interleave(heads_per_kv_head, 1)
    v = v.to(dtype).repeat_interleave(heads_per_kv_head, 1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k) * scale
    query_positions = torch.arange(context_len - num_queries, context_len, device=q.device)[:, None]
    key_positions = torch.arange(context_len, device=q.device)[None]
    is_visible = key_positions <= query_positions
    if window is not None:
        is_visible &= key_positions > query_positions - window
    weights = torch.softmax(scores.masked_fill(~is_visible, float("-inf")), -1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
