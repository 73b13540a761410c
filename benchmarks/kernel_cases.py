"""The inputs of each kernel at the shapes of real models: the kernel benchmark times them, the GPU check compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from kernels import Kernels, PagedKV, RaggedBatch, sampling
from kernels.host_copies import upload
from kernels.interface import BlockTable
from kernels.reference.backend import ReferenceKernels

BLOCK_SIZE = 16
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel on its inputs, and what it must at least move and compute."""

    call: Call
    moved_bytes: float
    operations: float = 0.0
    peers: dict[str, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the models that the kernels are timed at."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (1, 32768), (32, 4096), (256, 1024))
    """(sequences, context)."""
    prefill: tuple[tuple[int, int, int], ...] = ((1, 8192, 0), (8, 1024, 0), (1, 2048, 16384))
    """(sequences, queries, context before them)."""
    rows: tuple[int, ...] = (1, 256, 8192)
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    """Experts, chosen, hidden, size: Qwen3-30B-A3B."""
    delta: tuple[int, int, int] = (16, 32, 128)
    """Key heads, value heads, dim of both: Qwen3.5-4B."""
    ssm: tuple[int, int, int, int] = (128, 64, 8, 128)
    """Heads, head dim, groups, state: Nemotron-H-8B."""
    vocab: int = 151_936


TINY = Shape(
    hidden=64, intermediate=96, heads=4, kv_heads=2, dim=16, decode=((1, 40), (3, 17)),
    prefill=((1, 40, 0), (2, 9, 20)), rows=(1, 5), experts=(4, 2, 32, 16), delta=(2, 4, 16), ssm=(4, 16, 2, 16),
    vocab=300,
)  # fmt: skip


class Bench:
    """Makes each kernel's inputs, the same for every backend."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

    def random(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=dtype or self.dtype)

    def cases(self) -> Iterator[tuple[str, Callable[[Kernels], KernelCase]]]:
        s = self.shape
        for count, context in s.decode:
            yield f"decode {count} x {context}", lambda ops, c=count, n=context: self.attention(ops, c, 1, n - 1)
        for count, queries, before in s.prefill:
            name = f"prefill {count} x {queries}" + (f" after {before}" if before else "")
            yield name, lambda ops, c=count, q=queries, b=before: self.attention(ops, c, q, b)
        for rows in s.rows:
            yield f"add_rms_norm {rows} x {s.hidden}", lambda ops, n=rows: self.norm(ops, n)
            yield f"rotate {rows} x {s.heads + s.kv_heads} heads", lambda ops, n=rows: self.rotate(ops, n)
            yield f"silu_and_mul {rows} x {s.intermediate}", lambda ops, n=rows: self.silu(ops, n)
            yield f"linear {rows} x {s.hidden} x {s.intermediate} (torch)", lambda ops, n=rows: self.linear(n)
            yield f"experts {rows}", lambda ops, n=rows: self.experts(ops, n)
        for count, tokens in ((s.rows[1], 1), (1, s.rows[-1])):
            kind = f"step x {count}" if tokens == 1 else f"prompt of {tokens}"
            yield f"causal_conv {kind}", lambda ops, c=count, t=tokens: self.conv(ops, c, t)
            yield f"gated_delta {kind}", lambda ops, c=count, t=tokens: self.delta(ops, c, t)
            yield f"state_space {kind}", lambda ops, c=count, t=tokens: self.ssm(ops, c, t)
        for rows in s.rows[:2]:
            for kind, draw_arguments in (("greedy", (0.0, 1.0)), ("plain", (0.6, 1.0)), ("top_p", (0.6, 0.9))):
                yield f"draw {kind} {rows} x {s.vocab}", lambda ops, n=rows, g=draw_arguments: self.draw(ops, n, *g)

    def attention(self, ops: Kernels, count: int, queries: int, context_before: int) -> KernelCase:
        s, context = self.shape, queries + context_before
        blocks = -(-context // BLOCK_SIZE)
        unit = 2 * BLOCK_SIZE * s.kv_heads * s.dim
        kv = PagedKV(self.random(count * blocks * unit), unit, 1, BLOCK_SIZE, 1, s.kv_heads, s.dim)
        host_blocks = np.random.default_rng(0).permutation(count * blocks).reshape(count, blocks)
        (start_rows,) = upload([kv.compute_block_rows(host_blocks).T], self.device)
        table = BlockTable(host_blocks, start_rows.view(blocks, count), np.arange(count))
        batch = RaggedBatch.from_positions([context_before] * count, [context] * count)
        plan = ops.plan_attention(batch, table, kv, None)
        q = self.random(count * queries, s.heads, s.dim)
        k, v = self.random(count * queries, s.kv_heads, s.dim), self.random(count * queries, s.kv_heads, s.dim)
        pairs = count * (queries * context_before + queries * (queries + 1) / 2)
        moved_elements = 2 * count * context * s.kv_heads * s.dim + 2 * q.numel()

        def call() -> torch.Tensor:
            return ops.attention(q, k, v, kv, 0, plan, s.dim**-0.5)

        peers = self._attention_peers(count, queries, context)
        return KernelCase(call, moved_elements * q.element_size(), 4 * s.heads * s.dim * pairs, peers)

    def _attention_peers(self, count: int, queries: int, context: int) -> dict[str, Call]:
        s = self.shape
        q = self.random(count, s.heads, queries, s.dim)
        k, v = (self.random(count, s.kv_heads, context, s.dim) for _ in range(2))
        if queries == 1:
            return {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
        if queries < context:  # torch's causal flag aligns the other way: a mask would be another kernel
            return {}
        return {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}

    def draw(self, ops: Kernels, rows: int, temperature: float, top_p: float) -> KernelCase:
        """Against it: a sort of the whole vocabulary, as is usual. Logits as steep as a model's."""
        logits = self.random(rows, self.shape.vocab) * 3

        def full(value: float) -> torch.Tensor:
            return torch.full((rows,), value, device=self.device)

        at = torch.rand(rows, device=self.device, dtype=torch.float64)
        settings = sampling.DrawSettings(full(temperature), full(0.0), full(self.shape.vocab).int(), full(top_p), at)
        noise = torch.rand_like(logits, dtype=torch.float32) + 0.1  # drawn once: a recording that fails spoils torch's

        def by_sort() -> torch.Tensor:
            probs, order = (logits.float() / temperature).softmax(-1).sort(descending=True)
            kept_probs = probs * (probs.cumsum(-1) - probs < top_p)
            return order.gather(1, (kept_probs / noise).argmax(-1, keepdim=True))

        peers: dict[str, Call] = {"argmax": lambda: logits.argmax(-1)} if temperature == 0.0 else {"sort": by_sort}
        return KernelCase(lambda: ops.draw(logits, settings), logits.numel() * logits.element_size(), 0.0, peers)

    def norm(self, ops: Kernels, rows: int) -> KernelCase:
        x, residual = self.random(rows, self.shape.hidden), self.random(rows, self.shape.hidden)
        weight = self.random(self.shape.hidden)
        return KernelCase(
            lambda: ops.add_rms_norm(x, residual, weight, 1e-6)[0], 4 * x.numel() * x.element_size(), 0.0,
            {"torch": lambda: F.rms_norm(x + residual, weight.shape, weight, 1e-6)},
        )  # fmt: skip

    def rotate(self, ops: Kernels, rows: int) -> KernelCase:
        x = self.random(rows, self.shape.heads + self.shape.kv_heads, self.shape.dim)
        cos, sin = self.random(rows, self.shape.dim), self.random(rows, self.shape.dim)
        return KernelCase(lambda: ops.rotate(x, cos, sin), 2 * (x.numel() + cos.numel()) * x.element_size())

    def silu(self, ops: Kernels, rows: int) -> KernelCase:
        x = self.random(rows, 2 * self.shape.intermediate)
        return KernelCase(
            lambda: ops.silu_and_mul(x), 1.5 * x.numel() * x.element_size(), 0.0,
            {"torch": lambda: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]},
        )  # fmt: skip

    def linear(self, rows: int) -> KernelCase:
        x, weight = self.random(rows, self.shape.hidden), self.random(self.shape.intermediate, self.shape.hidden)
        moved_bytes = (x.numel() + weight.numel() + rows * self.shape.intermediate) * x.element_size()
        return KernelCase(lambda: F.linear(x, weight), moved_bytes, 2 * rows * weight.numel())

    def experts(self, ops: Kernels, rows: int) -> KernelCase:
        count, top_k, hidden, size = self.shape.experts
        x, weights = self.random(rows, hidden), torch.rand(rows, top_k, device=self.device).to(self.dtype)
        gate_up, down = self.random(count, 2 * size, hidden) * 0.05, self.random(count, hidden, size) * 0.05
        expert_ids = torch.rand(rows, count, device=self.device).topk(top_k).indices
        used_experts = min(count, int(expert_ids.unique().numel()))
        moved_bytes = (used_experts * 3 * size * hidden + 2 * x.numel()) * x.element_size()
        return KernelCase(
            lambda: ops.apply_experts(x, gate_up, down, expert_ids, weights),
            moved_bytes,
            6 * rows * top_k * size * hidden,
        )

    def _states(self, count: int, tokens: int) -> tuple[RaggedBatch, np.ndarray]:
        return RaggedBatch.from_positions([0] * count, [tokens] * count), np.arange(count)

    def conv(self, ops: Kernels, count: int, tokens: int) -> KernelCase:
        key_heads, value_heads, dim = self.shape.delta
        channels, (batch, units) = (2 * key_heads + value_heads) * dim, self._states(count, tokens)
        x, weight = self.random(count * tokens, channels), self.random(channels, 4)
        tails = self.random(count, 3, channels)
        plan = ops.plan_state(batch, units)
        moved_bytes = (2 * x.numel() + 2 * tails.numel()) * x.element_size()
        return KernelCase(lambda: ops.causal_conv(x, weight, None, tails, plan, True), moved_bytes)

    def delta(self, ops: Kernels, count: int, tokens: int) -> KernelCase:
        key_heads, heads, dim = self.shape.delta
        batch, units = self._states(count, tokens)
        n, plan = count * tokens, ops.plan_state(batch, units)
        q, k, v = self.random(n, key_heads, dim), self.random(n, key_heads, dim), self.random(n, heads, dim)
        decay = -torch.rand(n, heads, device=self.device) * 0.1
        rate = torch.rand(n, heads, device=self.device)
        states = self.random(count, heads, dim, dim, dtype=torch.float32)
        moved_bytes = (q.numel() + k.numel() + 2 * v.numel()) * v.element_size() + 8 * states.numel()
        return KernelCase(
            lambda: ops.gated_delta(q, k, v, decay, rate, states, plan), moved_bytes, 6 * n * heads * dim * dim
        )

    def ssm(self, ops: Kernels, count: int, tokens: int) -> KernelCase:
        heads, dim, groups, state = self.shape.ssm
        batch, units = self._states(count, tokens)
        n, plan = count * tokens, ops.plan_state(batch, units)
        x, b, c = self.random(n, heads, dim), self.random(n, groups, state), self.random(n, groups, state)
        dt, rate = torch.rand(n, heads, device=self.device), -torch.rand(heads, device=self.device)
        skip = torch.randn(heads, device=self.device)
        states = self.random(count, heads, dim, state, dtype=torch.float32)
        moved_bytes = (2 * x.numel() + b.numel() + c.numel()) * x.element_size() + 8 * states.numel()
        return KernelCase(
            lambda: ops.state_space(x, dt, rate, b, c, skip, states, plan), moved_bytes, 4 * n * heads * dim * state
        )


def expected(make: Callable[[Kernels], KernelCase], device: torch.device) -> torch.Tensor:
    """What the torch reference makes of the inputs that `make` makes after a seed of 0."""
    torch.manual_seed(0)
    return make(ReferenceKernels(device)).call().double()
