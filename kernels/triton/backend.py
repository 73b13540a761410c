"""The Triton backend: every operation of a step as a few launches over the whole ragged batch.

Tests without a GPU run it on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported). The
host never waits for the device: the data of a step is uploaded with its plan. No kernel is tuned at run time.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.host_copies import ALIGNED_INTS, overwrite, upload
from kernels.interface import BlockTable, IntArray, PagedKV, RaggedBatch, ceil_div, count_context_blocks
from kernels.reference.backend import ReferenceKernels
from kernels.sampling import DrawSettings
from kernels.triton import attention as attention_kernels
from kernels.triton import rows as row_kernels
from kernels.triton import sampling as sampling_kernels
from kernels.triton.experts import apply_experts
from kernels.triton.plan import (
    INTERPRETED,
    STATE_CHUNK,
    AttentionPlan,
    RecurrentPlan,
    choose_dot_precision,
    has_large_shared_memory,
    make_query_tiles,
    round_up_to_power_of_two,
)
from kernels.triton.recurrent import causal_conv, gated_delta, state_space

LOG2_E = 1.4426950408889634
PADDING_SLOT = PADDING_UNIT = -1
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
        arrays = [table.compute_slot_rows(batch, kv), batch.query_starts, batch.context_lens, table.table_rows]
        slots, starts, lens, rows = upload(arrays, self.device)
        assert table.block_start_rows is not None
        batch_table = table.block_start_rows[: count_context_blocks(batch, kv)].index_select(1, rows)
        split_count = self._choose_split_count(batch.decode_count, kv)
        return AttentionPlan(slots, starts, lens, batch_table, batch, batch.decode_count, split_count, window)

    def make_fixed_decode_plan(self, max_sequences: int, blocks: int, kv: PagedKV, window: int | None) -> AttentionPlan:
        """Make the attention plan of a recorded decode step (CUDA graph), which always reads the same device memory.

        It has room for `max_sequences` decoding sequences of up to `blocks` cache blocks. All of them are padding until
        `refill_decode_plan` writes a batch into the plan.
        """
        padded_sequence_count = ceil_div(max_sequences, ALIGNED_INTS) * ALIGNED_INTS  # aligns each row of the buffer
        buffer = torch.zeros(3, padded_sequence_count, dtype=torch.int32, device=self.device)
        buffer[0] = PADDING_SLOT
        return AttentionPlan(
            slot_rows=buffer[0, :max_sequences],
            query_starts=torch.arange(max_sequences + 1, dtype=torch.int32, device=self.device),
            context_lens=buffer[1, :max_sequences],
            block_table=torch.zeros(blocks, max_sequences, dtype=torch.int32, device=self.device),
            batch=None,
            decode_count=max_sequences,
            split_count=self._choose_split_count(max_sequences, kv),
            window=window,
            refill_buffer=buffer,
        )

    @staticmethod
    def refill_decode_plan(plan: AttentionPlan, batch: RaggedBatch, table: BlockTable, kv: PagedKV) -> None:
        """Write a batch of decoding sequences into the plan of a recorded decode step (CUDA graph).

        The plan may have room for more sequences; those become padding. Slots, lengths and table rows go to the device
        in one transfer. The block table is gathered there, from the table of all running sequences.
        """
        max_sequences = plan.decode_count
        sequence_count = batch.decode_count
        width = count_context_blocks(batch, kv)
        assert sequence_count == len(batch.context_lens) <= max_sequences, "only decoding sequences fit a fixed plan"
        assert width <= plan.block_table.shape[0], f"{width} blocks in a table of {plan.block_table.shape[0]}"
        assert plan.refill_buffer is not None, "not a fixed plan"
        assert table.block_start_rows is not None
        host_buffer = np.zeros(plan.refill_buffer.shape, np.int32)
        host_buffer[0] = PADDING_SLOT
        host_buffer[0, :sequence_count] = table.compute_slot_rows(batch, kv)
        host_buffer[1, :sequence_count] = batch.context_lens
        host_buffer[2, :sequence_count] = table.table_rows
        overwrite(plan.refill_buffer.view(-1), host_buffer)
        table_rows = plan.refill_buffer[2, :max_sequences]
        torch.index_select(table.block_start_rows[:width], 1, table_rows, out=plan.block_table[:width])

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
        constants = _list_attention_constants(q, kv, plan)
        tile = choose_decode_tile(constants["BLOCK_D"], q.element_size())
        is_split = plan.split_count > 1
        part, part_log2_sum = out, out  # unused: the kernel writes parts only with SPLIT
        if is_split:
            sum_shape = (sequence_count, num_heads, plan.split_count)
            part = torch.empty((*sum_shape, head_dim), dtype=torch.float32, device=q.device)
            part_log2_sum = torch.empty(sum_shape, dtype=torch.float32, device=q.device)
        attention_kernels.decode_attention[(sequence_count, kv.num_kv_heads, plan.split_count)](
            q, out, part, part_log2_sum, kv.buffer, plan.block_table, plan.context_lens,
            q.stride(0), q.stride(1), plan.block_table.shape[1], layer * kv.rows_per_layer, scale * LOG2_E,
            SPLIT=is_split, BLOCK_M=round_up_to_power_of_two(constants["GROUP"], 16), **tile, **constants,
        )  # fmt: skip
        if is_split:
            attention_kernels.combine_splits[(sequence_count, num_heads)](
                out, part, part_log2_sum, plan.split_count,
                DIM=head_dim, BLOCK_SPLITS=MAX_SPLITS, BLOCK_D=constants["BLOCK_D"],
            )  # fmt: skip

    def _attend_prompts(
        self, q: Tensor, out: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, scale: float
    ) -> None:
        """Compute the attention of prompts, in tiles of queries, and write it to `out` [tokens, heads, dim]."""
        constants = _list_attention_constants(q, kv, plan)
        heads_per_kv_head = constants["GROUP"]
        tile = choose_prefill_tile(constants["BLOCK_D"], q.element_size(), q.device)
        tile["BLOCK_M"] = max(tile["BLOCK_M"], round_up_to_power_of_two(heads_per_kv_head, 16))
        queries_per_tile = tile["BLOCK_M"] // heads_per_kv_head
        tile_seq, tile_query = plan.get_query_tiles(queries_per_tile)
        attention_kernels.prefill_attention[(tile_seq.shape[0], kv.num_kv_heads)](
            q, out, kv.buffer, plan.block_table, plan.query_starts, plan.context_lens, tile_seq, tile_query,
            q.stride(0), q.stride(1), plan.block_table.shape[1], layer * kv.rows_per_layer, scale * LOG2_E, q.shape[1],
            BLOCK_Q=queries_per_tile, **tile, **constants,
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
        rows = view_as_rows(x)
        other_rows = rows if other is None else view_as_rows(other)
        assert other_rows.shape == rows.shape
        outer, inner, dim = rows.shape
        row_count = outer * inner
        weight_head_stride = weight.stride(0) if weight.dim() == 2 else 0  # 0: all heads have the same weight
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = round_up_to_power_of_two(dim, 16)
        rows_per_program = self._choose_rows_per_program(row_count, block)
        row_kernels.norm_rows[(ceil_div(row_count, rows_per_program),)](
            rows, other_rows, weight, out, row_count, inner,
            rows.stride(0), rows.stride(1), other_rows.stride(0), other_rows.stride(1), weight_head_stride, eps,
            DIM=dim, MODE=mode, ZERO_CENTRED=zero_centred, ROWS=rows_per_program, BLOCK=block,
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
        rows = view_as_rows(x)  # a row is one head of one token
        num_tokens, num_heads, dim = rows.shape
        row_count = num_tokens * num_heads
        half = cos.shape[-1] // 2
        copied_dims = dim - 2 * half
        block = round_up_to_power_of_two(half, 8)
        block_copied = round_up_to_power_of_two(copied_dims, 8) if copied_dims else 0
        weight_or_unused = rows if weight is None else weight  # the kernel needs a pointer also without a norm
        weight_head_stride = weight.stride(0) if weight is not None and weight.dim() == 2 else 0
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows_per_program = self._choose_rows_per_program(row_count, 2 * block)
        row_kernels.rotate_rows[(ceil_div(row_count, rows_per_program),)](
            rows, weight_or_unused, cos, signed_sin, out, row_count, num_heads,
            rows.stride(0), rows.stride(1), weight_head_stride, cos.stride(0), signed_sin.stride(0), eps,
            DIM=dim, HALF=half, NORM=weight is not None, ZERO_CENTRED=zero_centred, ROWS=rows_per_program,
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

    # experts and recurrences

    apply_experts = staticmethod(apply_experts)
    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    state_space = staticmethod(state_space)

    def plan_state(self, batch: RaggedBatch, units: IntArray) -> RecurrentPlan:
        seq, first = make_query_tiles(batch, STATE_CHUNK)
        arrays = [batch.query_starts, units, seq, batch.query_starts[seq] + first]
        starts, device_units, tile_seq, tile_token = upload(arrays, self.device)
        return RecurrentPlan(starts, device_units, tile_seq, tile_token, batch.decode_count)

    def make_fixed_state_plan(self, max_sequences: int) -> RecurrentPlan:
        """Make a plan of decoding sequences only, all of them padding until it is refilled."""
        decodes = RaggedBatch.from_positions([0] * max_sequences, [1] * max_sequences)
        return self.plan_state(decodes, np.full(max_sequences, PADDING_UNIT))

    @staticmethod
    def refill_state_plan(plan: RecurrentPlan, units: IntArray) -> None:
        """Write the units of decoding sequences into a fixed plan. The rest becomes padding."""
        padded_units = np.full(plan.decode_count, PADDING_UNIT, np.int32)
        padded_units[: len(units)] = units
        overwrite(plan.units, padded_units)

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


def view_as_rows(x: Tensor) -> Tensor:
    """View x, [..., inner, dim] or [rows, dim], as [outer, inner, dim]. It is copied if its rows lie too unevenly."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        return x.unsqueeze(1)
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 3 else x


def _list_attention_constants(q: Tensor, kv: PagedKV, plan: AttentionPlan) -> dict[str, Any]:
    """Return the compile-time parameters that the kernels of decode and prefill attention share, but for tiles."""
    return {
        "GROUP": q.shape[1] // kv.num_kv_heads,  # query heads that share a head of K and V
        "DIM": kv.head_dim,
        "ROW": kv.elems_per_row,
        "BLOCK_SIZE": kv.block_size,  # tokens of a cache block
        "WINDOW": plan.window or 0,  # sliding window; 0: none
        "BLOCK_D": round_up_to_power_of_two(kv.head_dim, 16),
        "PRECISION": choose_dot_precision(q),
        "WIDE": INTERPRETED,  # the interpreter has no 16-bit products
    }


def choose_decode_tile(block_d: int, element_size: int) -> dict[str, int]:
    """Return how decode attention loads keys: BLOCK_N at a time, and `num_stages` of these loads in flight.

    Four programs keep 128 KiB of loads in flight. `block_d`: size of a head, rounded up to a power of two.
    `element_size`: bytes of an element.
    """
    if element_size > 2:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    if block_d > 128:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4}


def choose_prefill_tile(block_d: int, element_size: int, device: torch.device) -> dict[str, int]:
    """Return the sizes of prefill attention that fit the shared memory of the device.

    A program computes BLOCK_M queries times heads, and loads keys as in decode attention. `block_d`: size of a head,
    rounded up to a power of two. `element_size`: bytes of an element. With heads of 128, four warps take 1,297 us for a
    prompt of 8,192 tokens on an H100; eight take 1,574.
    """
    if element_size > 2:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    if block_d <= 128:
        return {"BLOCK_M": 128, "BLOCK_N": 64 if block_d == 128 else 128, "num_warps": 4, "num_stages": 3}
    if block_d == 256 and has_large_shared_memory(device):
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
