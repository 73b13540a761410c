"""The Triton backend: every operation of a step as a few launches over the whole ragged batch.

Tests without a GPU run it on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported). The
host never waits for the device: the data of a step is uploaded with its plan. No kernel is tuned at run time.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.interface import BlockTable, IntArray, PagedKV, RaggedBatch, ceil_div
from kernels.reference.backend import ReferenceKernels
from kernels.sampling import DrawSettings
from kernels.triton import attention as attention_kernels
from kernels.triton import experts as expert_kernels
from kernels.triton import rows as row_kernels
from kernels.triton import sampling as sampling_kernels
from kernels.triton.plan import (
    INTERPRETED,
    AttentionPlan,
    RecurrentPlan,
    choose_dot_precision,
    has_large_shared_memory,
    make_fixed_decode_plan,
    make_fixed_recurrent_plan,
    plan_attention,
    plan_recurrent,
    refill_decode_plan,
    refill_recurrent_plan,
    round_up_to_power_of_two,
)
from kernels.triton.recurrent import causal_conv, gated_delta, state_space

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
"""Most parts into which the context of a decoding sequence is cut."""
LOGITS_PER_BLOCK = 4096
"""Logits that a program loads at a time."""
PROGRAMS_PER_PROCESSOR = 4
"""Decode programs that keep one multiprocessor's memory requests in flight."""


class TritonKernels(ReferenceKernels):
    """Runs every operation as Triton kernels, in fp32, bf16 and fp16."""

    name = "triton"
    has_fixed_plans = True

    def __init__(self, device: torch.device) -> None:
        """Choose the device. Raises ValueError on a CPU, unless Triton's interpreter runs the kernels."""
        super().__init__(device)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"attention backend 'triton' on device {device}: expected a CUDA device or TRITON_INTERPRET=1"
            )
        if device.index is not None and not INTERPRETED:
            torch.cuda.set_device(device)  # Triton launches on the current device
        self._processor_count = 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count

    # attention

    def plan_attention(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None) -> AttentionPlan:
        split_count = self._choose_split_count(batch.decode_count, kv)
        return plan_attention(batch, table, kv, window, self.device, split_count)

    def make_fixed_decode_plan(self, max_sequences: int, blocks: int, kv: PagedKV, window: int | None) -> AttentionPlan:
        return make_fixed_decode_plan(
            max_sequences, blocks, window, self.device, self._choose_split_count(max_sequences, kv)
        )

    refill_decode_plan = staticmethod(refill_decode_plan)

    def _choose_split_count(self, sequence_count: int, kv: PagedKV) -> int:
        """Return how many parts a context is split into: a power of two that gives enough programs for the device."""
        program_count = PROGRAMS_PER_PROCESSOR * self._processor_count // max(1, sequence_count * kv.num_kv_heads)
        return 1 << (max(1, min(program_count, MAX_SPLITS)).bit_length() - 1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> Tensor:
        num_tokens, _, head_dim = q.shape
        assert head_dim == kv.head_dim
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        first_layer_row = layer * kv.rows_per_layer
        attention_kernels.store_kv[(num_tokens,)](
            k, v, kv.buffer, plan.slot_rows,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), first_layer_row,
            DIM=head_dim, ROW=kv.elems_per_row, BLOCK_SIZE=kv.block_size,
            BLOCK=round_up_to_power_of_two(kv.elems_per_row),
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decode_count:
            self._attend_decodes(q, out, kv, layer, plan, scale)
        if plan.decode_count < num_tokens:
            self._attend_prompts(q, out, kv, layer, plan, scale)
        return out

    def _attend_decodes(
        self, q: Tensor, out: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> None:
        """Compute the attention of decoding sequences, of one query each, and write it to `out` [tokens, heads, dim].

        If the plan splits contexts, the attention over each part is computed alone, and then the parts are combined.
        Few sequences with long contexts keep the whole GPU busy in this way (Flash-Decoding).
        """
        sequence_count = plan.decode_count
        _, num_heads, head_dim = q.shape
        block_d = round_up_to_power_of_two(head_dim, 16)
        tile = choose_decode_tile(block_d, q.element_size())
        is_split = plan.split_count > 1
        part, part_log2_sum = out, out  # unused: the kernel writes parts only with SPLIT
        if is_split:
            sum_shape = (sequence_count, num_heads, plan.split_count)
            part = torch.empty((*sum_shape, head_dim), dtype=torch.float32, device=q.device)
            part_log2_sum = torch.empty(sum_shape, dtype=torch.float32, device=q.device)
        attention_kernels.decode_attention[(sequence_count, kv.num_kv_heads, plan.split_count)](
            q, out, part, part_log2_sum, kv.buffer, plan.block_table, plan.context_lens,
            q.stride(0), q.stride(1), plan.block_table.shape[1], layer * kv.rows_per_layer, scale * LOG2_E,
            SPLIT=is_split, BLOCK_M=round_up_to_power_of_two(num_heads // kv.num_kv_heads, 16),
            **_list_attention_constants(q, kv, plan, block_d, tile),
        )  # fmt: skip
        if is_split:
            attention_kernels.combine_splits[(sequence_count, num_heads)](
                out, part, part_log2_sum, plan.split_count, DIM=head_dim, BLOCK_SPLITS=MAX_SPLITS, BLOCK_D=block_d
            )

    def _attend_prompts(
        self, q: Tensor, out: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> None:
        """Compute the attention of prompts, in tiles of queries, and write it to `out` [tokens, heads, dim]."""
        _, num_heads, head_dim = q.shape
        heads_per_kv_head = num_heads // kv.num_kv_heads
        block_d = round_up_to_power_of_two(head_dim, 16)
        tile = choose_prefill_tile(block_d, q.element_size(), q.device)
        block_m = max(tile.rows, round_up_to_power_of_two(heads_per_kv_head, 16))
        queries_per_tile = block_m // heads_per_kv_head
        tile_seq, tile_query = plan.get_query_tiles(queries_per_tile)
        attention_kernels.prefill_attention[(tile_seq.shape[0], kv.num_kv_heads)](
            q, out, kv.buffer, plan.block_table, plan.query_starts, plan.context_lens, tile_seq, tile_query,
            q.stride(0), q.stride(1), plan.block_table.shape[1], layer * kv.rows_per_layer, scale * LOG2_E, num_heads,
            BLOCK_Q=queries_per_tile, BLOCK_M=block_m,
            **_list_attention_constants(q, kv, plan, block_d, tile),
        )  # fmt: skip

    # operations on rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
        return self._normalize_rows(x, None, weight, eps, "plain", zero_centred)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        return self._normalize_rows(x, residual, weight, eps, "add", zero_centred), residual

    def norm_then_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalize_rows(x, gate, weight, eps, "after")

    def gate_then_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
        parts = (*x.shape[:-1], groups, x.shape[-1] // groups)
        output = self._normalize_rows(x.view(parts), gate.view(parts), weight.view(groups, -1), eps, "before")
        return output.view(x.shape)

    def _normalize_rows(
        self, x: Tensor, other: Tensor | None, weight: Tensor, eps: float, mode: str, zero_centred: bool = False
    ) -> Tensor:
        """Return the root mean square norm of the rows of x times `weight`, [dim] or [heads, dim].

        `mode`: "plain"; "add": x is added to the residual `other`, in place, and the sum is normed; "before", "after":
        x is multiplied by silu(`other`) before or after the norm. `zero_centred`: the factor is 1 + weight.
        """
        rows = lay_out_rows(x)
        other_rows = rows if other is None else lay_out_rows(other)
        assert other_rows[1:4] == rows[1:4], "x and other: different numbers or sizes of rows"
        weight_head_stride = weight.stride(0) if weight.dim() == 2 else 0  # 0: all heads have the same weight
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = round_up_to_power_of_two(rows.dim, 16)
        rows_per_program = self._choose_rows_per_program(rows.row_count, block)
        row_kernels.norm_rows[(ceil_div(rows.row_count, rows_per_program),)](
            rows.tensor, other_rows.tensor, weight, out, rows.row_count, rows.inner,
            rows.outer_stride, rows.inner_stride, other_rows.outer_stride, other_rows.inner_stride,
            weight_head_stride, eps,
            DIM=rows.dim, MODE=mode, ZERO_CENTRED=zero_centred, ROWS=rows_per_program, BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )  # fmt: skip
        return out

    def _choose_rows_per_program(self, rows: int, block: int) -> int:
        """Return the rows of a program: some thousand elements if there are many rows, else one row.

        Two sizes only, so that few variants are compiled.
        """
        max_rows = max(1, (1 << 15 if INTERPRETED else 2048) // block)
        return max_rows if rows >= max_rows * self._processor_count else 1

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        return self._rotate(x, None, 0.0, False, cos, signed_sin)

    def norm_and_rotate(
        self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        return self._rotate(x, weight, eps, zero_centred, cos, signed_sin)

    def _rotate(
        self, x: Tensor, weight: Tensor | None, eps: float, zero_centred: bool, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        """Return x with rotary embedding, after a root mean square norm if `weight` is given. x: [tokens, heads, dim].

        `weight`: gains of the norm, [dim] or [heads, dim]. `cos`, `signed_sin`: [tokens, rotated dims].
        """
        rows = lay_out_rows(x)  # a row is one head of one token
        half = cos.shape[-1] // 2
        copied_dims = rows.dim - 2 * half
        block = round_up_to_power_of_two(half, 8)
        block_copied = round_up_to_power_of_two(copied_dims, 8) if copied_dims else 0
        weight_or_unused = rows.tensor if weight is None else weight  # the kernel needs a pointer also without a norm
        weight_head_stride = weight.stride(0) if weight is not None and weight.dim() == 2 else 0
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows_per_program = self._choose_rows_per_program(rows.row_count, 2 * block)
        row_kernels.rotate_rows[(ceil_div(rows.row_count, rows_per_program),)](
            rows.tensor, weight_or_unused, cos, signed_sin, out, rows.row_count, rows.inner,
            rows.outer_stride, rows.inner_stride, weight_head_stride, cos.stride(0), signed_sin.stride(0), eps,
            DIM=rows.dim, HALF=half, NORM=weight is not None, ZERO_CENTRED=zero_centred, ROWS=rows_per_program,
            BLOCK=block, BLOCK_COPIED=block_copied,
        )  # fmt: skip
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._activate_gated(x, is_gelu=False)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._activate_gated(x, is_gelu=True)

    def _activate_gated(self, x: Tensor, *, is_gelu: bool) -> Tensor:
        """Launch `rows.activate_rows`: the activation of the first half of each row, times the second half."""
        rows, size = x.reshape(-1, x.shape[-1]), x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
        block = min(round_up_to_power_of_two(size, 16), 2048)
        row_kernels.activate_rows[(rows.shape[0], ceil_div(size, block))](
            rows, out, rows.stride(0), SIZE=size, GELU=is_gelu, BLOCK=block
        )
        return out

    # experts

    def apply_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: [tokens, hidden].

        (token, expert) pairs are the rows of two matrix products. They are sorted by expert, on the device, so that a
        tile of rows needs the weights of one expert. x: [tokens, hidden]. expert_ids, weights: [tokens, top_k]. An
        expert is a gated MLP: gate_up is [experts, 2 * size, hidden], down is [experts, hidden, size].
        """
        num_tokens, hidden = x.shape
        num_experts, _, size = down.shape
        top_k = expert_ids.shape[1]
        row_count = num_tokens * top_k
        is_float32 = x.element_size() > 2
        block_m = _choose_expert_rows(row_count, num_experts, is_float32=is_float32)
        block_n = 64
        constants = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": 32 if is_float32 else 64,  # the same number of bytes
            "PRECISION": choose_dot_precision(x),
            "WIDE": INTERPRETED,
            "num_warps": 4,
            "num_stages": 3,
        }
        order, starts, tile_expert, tile_row = expert_kernels.sort_by_expert(expert_ids, num_experts, block_m)
        tile_count = tile_row.shape[0]
        x = x if x.stride(1) == 1 else x.contiguous()
        inner = torch.empty((row_count, size), dtype=x.dtype, device=x.device)
        weights = weights.contiguous()
        expert_kernels.multiply_experts[(tile_count, ceil_div(size, block_n))](
            x, gate_up, weights, inner, order, starts, tile_expert, tile_row, x.stride(0), hidden, size, top_k,
            GATED=True, **constants,
        )  # fmt: skip
        outputs = torch.empty((num_tokens, top_k, hidden), dtype=torch.float32, device=x.device)
        expert_kernels.multiply_experts[(tile_count, ceil_div(hidden, block_n))](
            inner, down, weights, outputs, order, starts, tile_expert, tile_row, size, size, hidden, top_k,
            GATED=False, **constants,
        )  # fmt: skip
        return outputs.sum(1).to(x.dtype)

    # recurrent

    def plan_state(self, batch: RaggedBatch, units: IntArray) -> RecurrentPlan:
        return plan_recurrent(batch, units, self.device)

    def make_fixed_state_plan(self, max_sequences: int) -> RecurrentPlan:
        return make_fixed_recurrent_plan(max_sequences, self.device)

    refill_state_plan = staticmethod(refill_recurrent_plan)
    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    state_space = staticmethod(state_space)

    # sampling

    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        """Draw a token from each row. The kernel searches over the order of the logits' bits."""
        rows, vocab = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)
        sampling_kernels.draw_rows[(rows,)](
            logits, settings.temperature, settings.min_p, settings.top_k, settings.top_p, settings.uniforms, out,
            logits.stride(0), vocab,
            SHIFT=shift, BLOCK=min(round_up_to_power_of_two(vocab, 128), LOGITS_PER_BLOCK), num_warps=16,
        )  # fmt: skip
        return out


class Rows(NamedTuple):
    """A tensor as `row_count` rows of `dim` adjacent elements, `inner` of them side by side."""

    tensor: Tensor
    row_count: int
    inner: int
    dim: int
    outer_stride: int
    """Elements between groups of `inner` rows."""
    inner_stride: int
    """Elements between the rows of a group."""


def lay_out_rows(x: Tensor) -> Rows:
    """Return how the rows of x lie, [..., inner, dim] or [rows, dim]. They are copied if they lie too unevenly."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        row_count, dim = x.shape
        return Rows(x, row_count, 1, dim, x.stride(0), dim)
    if x.dim() > 3:
        x = x.reshape(-1, *x.shape[-2:])
    outer, inner, dim = x.shape
    return Rows(x, outer * inner, inner, dim, x.stride(0), x.stride(1))


def _choose_expert_rows(rows: int, num_experts: int, *, is_float32: bool) -> int:
    """Return how many rows one program multiplies by an expert's weights.

    Twice the rows of an average expert, so that one program does for most experts. At least 16, which a matrix product
    on the GPU needs, and at most 64 (16 of float32), which bounds what one program holds.
    """
    rows_max = 16 if is_float32 else 64
    return round_up_to_power_of_two(min(max(2 * rows // num_experts, 16), rows_max))


class AttentionTile(NamedTuple):
    """Sizes with which an attention kernel is compiled."""

    rows: int
    """Queries times heads that a program computes; 0 if the heads alone decide, as in decode."""
    keys: int
    """Keys that a program loads at a time."""
    warps: int
    stages: int
    """Loads of keys that are in flight at the same time."""


def _list_attention_constants(
    q: Tensor, kv: PagedKV, plan: AttentionPlan, block_d: int, tile: AttentionTile
) -> dict[str, Any]:
    """Return the compile-time parameters that the Triton kernels of decode and prefill attention share.

    `block_d`: size of a head, rounded up to a power of two.
    """
    return {
        "GROUP": q.shape[1] // kv.num_kv_heads,  # query heads that share a head of K and V
        "DIM": kv.head_dim,
        "ROW": kv.elems_per_row,
        "BLOCK_SIZE": kv.block_size,  # tokens of a cache block
        "WINDOW": plan.window or 0,  # sliding window; 0: none
        "BLOCK_N": tile.keys,
        "BLOCK_D": block_d,
        "PRECISION": choose_dot_precision(q),
        "WIDE": INTERPRETED,  # the interpreter has no 16-bit products
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def choose_decode_tile(block_d: int, element_size: int) -> AttentionTile:
    """Return the tile of decode attention. Four programs keep 128 KiB of loads in flight.

    `block_d`: size of a head, rounded up to a power of two. `element_size`: bytes of an element.
    """
    if element_size > 2:
        return AttentionTile(rows=0, keys=32, warps=4, stages=2)
    if block_d > 128:
        return AttentionTile(rows=0, keys=32, warps=4, stages=3)
    return AttentionTile(rows=0, keys=64, warps=4, stages=4)


def choose_prefill_tile(block_d: int, element_size: int, device: torch.device) -> AttentionTile:
    """Return the tile of prefill attention, which fits the shared memory of the device.

    `block_d`: size of a head, rounded up to a power of two. `element_size`: bytes of an element. With heads of 128,
    four warps take 1,297 us for a prompt of 8,192 tokens on an H100; eight take 1,574.
    """
    if element_size > 2:
        return AttentionTile(rows=32, keys=32, warps=4, stages=2)
    if block_d <= 128:
        return AttentionTile(rows=128, keys=64 if block_d == 128 else 128, warps=4, stages=3)
    if block_d == 256 and has_large_shared_memory(device):
        return AttentionTile(rows=128, keys=64, warps=8, stages=2)
    return AttentionTile(rows=64, keys=32, warps=4, stages=3)
