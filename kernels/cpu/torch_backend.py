"""The CPU in torch alone: few, large operations a layer, no Python loop over tokens and none over decoding sequences.

Decoding sequences attend together: their context is gathered by token row (so that no byte outside a context is ever
read: what lies in the unused part of a block may be anything, NaN included) and the query heads that share a KV head
are folded into the query axis. Sequences of very different length go into separate buckets, so that padding stays
under the bucket's real size. Prefill chunks attend one by one. All index arithmetic happens once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu.packed import has_fast_bf16
from kernels.interface import IntArray, PagedKV, Ragged, slot_rows, wide
from kernels.reference.backend import ReferenceKernels
from kernels.reference.blocked import blocked_attention

BUCKET_SLACK_ROWS = 512
"""Padding that is cheaper than another bucket's operations, in token rows."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decoding sequences that attend in one operation."""

    queries: torch.Tensor | None
    """Their indices in the batch; None: they are the first `count`, in order."""
    count: int
    context: int
    rows: torch.Tensor
    """[count * context] K rows of layer 0; past a sequence's own context its last row is repeated."""
    valid: torch.Tensor | None
    """[count, context] True where a row is in the sequence's (windowed) context; None: all are."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's queries [start, end) of the batch."""

    start: int
    end: int
    rows: torch.Tensor | None
    """[context] K rows of layer 0; None: the chunk is its whole context, K and V are at hand."""
    window: int | None


@dataclass(slots=True)
class TorchCpuPlan:
    slots: torch.Tensor
    """[tokens] row of each K in layer 0."""
    buckets: list[DecodeBucket]
    chunks: list[PrefillChunk]
    masks: dict[tuple[int, torch.dtype], torch.Tensor | None]
    """Additive masks made so far, by bucket (0 .. ) or chunk (-1 ..) and dtype."""


class TorchCpuKernels(ReferenceKernels):
    """Implements `interface.Kernels`. One instance serves one step loop: it owns gather buffers."""

    name = "cpu"
    chunked_scans = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._scalars: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def plan_attention(self, batch: Ragged, block_table: IntArray, kv: PagedKV, window: int | None) -> TorchCpuPlan:  # type: ignore[override]
        slots = torch.from_numpy(slot_rows(batch, block_table, kv))
        buckets = [
            _bucket(batch, block_table, kv, window, members)
            for members in _bucket_members(batch.context_lens[: batch.decode_count], window)
        ]
        starts = batch.query_starts.tolist()
        chunks = [
            plan_chunk(starts[i], starts[i + 1], int(batch.context_lens[i]), block_table[i], kv, window)
            for i in range(batch.decode_count, len(batch.context_lens))
        ]
        return TorchCpuPlan(slots, buckets, chunks, {})

    def attention(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: PagedKV,
        layer: int,
        plan: TorchCpuPlan,
        scale: float,
    ) -> torch.Tensor:
        k_rows, v_rows = _layer_rows(kv, layer)
        k_rows.index_copy_(0, plan.slots, k.reshape(-1, kv.row_elems))
        v_rows.index_copy_(0, plan.slots, v.reshape(-1, kv.row_elems))
        out: torch.Tensor | None = None
        for i, bucket in enumerate(plan.buckets):
            part = self._decode(q, k_rows, v_rows, kv, bucket, self._bucket_mask(plan, i, q.dtype), scale)
            if bucket.count == q.shape[0]:
                return part
            out = torch.empty_like(q) if out is None else out
            if bucket.queries is None:
                out[: bucket.count] = part
            else:
                out[bucket.queries] = part
        if plan.chunks:
            out = torch.empty_like(q) if out is None else out
            self._attend_chunks(q, k, v, kv, layer, plan, scale, out)
        assert out is not None, "a batch has at least one query"
        return out

    def _attend_chunks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: PagedKV,
        layer: int,
        plan: TorchCpuPlan,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        k_rows, v_rows = _layer_rows(kv, layer)
        for i, chunk in enumerate(plan.chunks):
            out[chunk.start : chunk.end] = self._prefill(q, k, v, k_rows, v_rows, kv, plan, i, scale)

    def _decode(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        kv: PagedKV,
        bucket: DecodeBucket,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        count, heads, dim = bucket.count, q.shape[1], q.shape[2]
        queries = q[:count] if bucket.queries is None else q[bucket.queries]
        folded = queries.reshape(count, kv.num_kv_heads, heads // kv.num_kv_heads, dim)
        shape = (count, bucket.context, kv.num_kv_heads, dim)
        keys = self._gather("k", k_rows, bucket.rows).view(shape).transpose(1, 2)
        values = self._gather("v", v_rows, bucket.rows).view(shape).transpose(1, 2)
        mask = None if mask is None else mask[:, None, None]
        return F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale).reshape(count, heads, dim)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        kv: PagedKV,
        plan: TorchCpuPlan,
        which: int,
        scale: float,
    ) -> torch.Tensor:
        chunk = plan.chunks[which]
        if chunk.rows is None:
            keys, values = k[chunk.start : chunk.end], v[chunk.start : chunk.end]
        else:
            shape = (chunk.rows.shape[0], kv.num_kv_heads, kv.head_dim)
            keys = self._gather("k", k_rows, chunk.rows).view(shape)
            values = self._gather("v", v_rows, chunk.rows).view(shape)
        if q.dtype == torch.bfloat16 and has_fast_bf16():
            return blocked_attention(q[chunk.start : chunk.end], keys, values, chunk.window, scale)
        queries = q[chunk.start : chunk.end].transpose(0, 1)[None]
        mask = self._chunk_mask(plan, which, keys.shape[0], q.dtype)
        part = F.scaled_dot_product_attention(
            queries,
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != kv.num_kv_heads,
        )
        return part[0].transpose(0, 1)

    def _gather(self, which: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """rows[index] in a buffer that is used again by the next gather of the same name."""
        count, width = index.shape[0], rows.shape[1]
        key = (which, width, rows.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < count:
            buffer = self._buffers[key] = torch.empty(max(count, 4096), width, dtype=rows.dtype)
        return torch.index_select(rows, 0, index, out=buffer[:count])

    def _bucket_mask(self, plan: TorchCpuPlan, which: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[count, context] additive mask of a bucket, made once a step."""
        valid = plan.buckets[which].valid
        if valid is None:
            return None
        mask = plan.masks.get((which, dtype))
        if mask is None:
            mask = torch.zeros(valid.shape, dtype=dtype).masked_fill_(~valid, float("-inf"))
            plan.masks[which, dtype] = mask
        return mask

    def _chunk_mask(self, plan: TorchCpuPlan, which: int, context: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[queries, context] additive mask of a prefill chunk, made once a step."""
        key = (-1 - which, dtype)
        if key not in plan.masks:
            chunk = plan.chunks[which]
            plan.masks[key] = _prefill_mask(chunk.end - chunk.start, context, chunk.window, dtype)
        return plan.masks[key]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False) -> torch.Tensor:
        """One pass for the norm, then in place: on large inputs F.rms_norm spends its time on temporaries."""
        value = x.to(wide(x.dtype))
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        scale = torch.addcmul(self._scalar(eps, value.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        value = torch.mul(value, scale) if value is x else value.mul_(scale)
        return value.mul_(weight.to(value.dtype) + 1 if zero_centred else weight).to(x.dtype)

    def _scalar(self, number: float, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._scalars.get((number, dtype))
        if tensor is None:
            tensor = self._scalars[number, dtype] = torch.tensor(number, dtype=dtype)
        return tensor

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps, zero_centred), residual

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = x.shape
        if cos.shape[-1] != dim:
            return super().rotate(x, cos, signed_sin)
        swapped = x.reshape(tokens, heads, 2, dim // 2).flip(2).view(tokens, heads, dim)
        return torch.mul(x, cos[:, None]).addcmul_(swapped, signed_sin[:, None])

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def experts(
        self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Tokens are sorted by expert, so that each expert that is used runs once, on all its tokens."""
        top_k = chosen.shape[1]
        order = chosen.reshape(-1).argsort(stable=True)
        tokens = order // top_k
        inputs = x[tokens]
        outputs = torch.empty_like(inputs)
        by_expert = torch.bincount(chosen.reshape(-1), minlength=gate_up.shape[0]).tolist()
        end = 0
        for expert, count in enumerate(by_expert):
            if count:
                start, end = end, end + count
                hidden = self.silu_and_mul(F.linear(inputs[start:end], gate_up[expert]))
                torch.mm(hidden, down[expert].t(), out=outputs[start:end])
        outputs.mul_(weights.reshape(-1)[order, None])
        return torch.zeros_like(x).index_add_(0, tokens, outputs)


def _bucket_members(context_lens: IntArray, window: int | None) -> list[IntArray]:
    """Split decoding sequences so that padding costs at most as much as the real rows, plus a little slack."""
    count = len(context_lens)
    if count == 0:
        return []
    lens = context_lens if window is None else np.minimum(context_lens, window)
    if int(lens.max()) * count <= 2 * int(lens.sum()) + BUCKET_SLACK_ROWS:
        return [np.arange(count)]
    members: list[IntArray] = []
    order = np.argsort(-lens, kind="stable")
    start = 0
    while start < count:
        floor = min(int(lens[order[start]]) // 2, int(lens[order[start]]) - BUCKET_SLACK_ROWS // count)
        end = start + int(np.searchsorted(-lens[order[start:]], -floor, side="right"))
        members.append(order[start:end])
        start = end
    return members


def _layer_rows(kv: PagedKV, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer's token rows from the first K, and from the first V, of a layer on."""
    rows = kv.rows()
    return rows[layer * kv.layer_rows :], rows[layer * kv.layer_rows + kv.block_size :]


def _token_rows(blocks: IntArray, kv: PagedKV) -> IntArray:
    """K rows of layer 0 of every token of the blocks: [..., blocks] -> [..., blocks * block_size]."""
    rows = kv.block_rows(blocks)[..., None] + np.arange(kv.block_size)
    return rows.reshape(*blocks.shape[:-1], -1)


def _bucket(batch: Ragged, block_table: IntArray, kv: PagedKV, window: int | None, members: IntArray) -> DecodeBucket:
    lens = batch.context_lens[members]
    first = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
    shown = lens - first
    context = int(shown.max())
    offsets = np.arange(context)
    same_length = int(shown.min()) == context
    at = first[:, None] + (offsets if same_length else np.minimum(offsets, shown[:, None] - 1))
    if window is None and same_length:
        rows = _token_rows(block_table[members, : -(-context // kv.block_size)], kv)[:, :context]
    else:
        block_index, offset = np.divmod(at, kv.block_size)
        rows = kv.block_rows(np.take_along_axis(block_table[members], block_index, 1)) + offset
    in_order = bool((members == np.arange(len(members))).all())
    return DecodeBucket(
        queries=None if in_order else torch.from_numpy(members),
        count=len(members),
        context=context,
        rows=torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)),
        valid=None if same_length else torch.from_numpy(offsets < shown[:, None]),
    )


def plan_chunk(start: int, end: int, context: int, blocks: IntArray, kv: PagedKV, window: int | None) -> PrefillChunk:
    queries = end - start
    first = 0 if window is None else max(0, context - queries - window + 1)
    whole = queries == context
    rows = None
    if not whole:
        rows = _token_rows(blocks[first // kv.block_size : -(-context // kv.block_size)], kv)
        skip = first % kv.block_size
        rows = rows[skip : skip + context - first]
    return PrefillChunk(start, end, None if rows is None else torch.from_numpy(np.ascontiguousarray(rows)), window)


def _prefill_mask(queries: int, context: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[queries, context] additive mask of queries that are the last positions; None: plain causal is enough."""
    if queries == context and (window is None or window >= context):
        return None
    query_at = torch.arange(context - queries, context)[:, None]
    key_at = torch.arange(context)[None]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    return torch.zeros(queries, context, dtype=dtype).masked_fill_(~seen, float("-inf"))
