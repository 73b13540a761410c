"""The layers that decoder families share: linear, norm, embedding, attention, gated MLP.

Projections that read the same input are one matrix (q, k and v; gate and up), put together when the checkpoint is
loaded. Layers are called with a `Step`, which carries all that is particular to the batch; they hold only weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.models.rope import RopeConfig
from engine.models.weights import Scope, Weight
from kernels import Kernels, PagedKV


@dataclass(slots=True)
class Step:
    """One step's batch, as the layers see it."""

    ops: Kernels
    rotary: list[tuple[torch.Tensor, torch.Tensor]]
    """(cos, signed sin) of the batch's positions for each of the model's rope settings."""
    kv: list[PagedKV]
    """The KV of each attention group."""
    plans: list[Any]
    """The attention plan of each group."""


class Mixer(Protocol):
    """What mixes tokens in a block: attention, or a recurrent layer."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor: ...


class Linear:
    """x @ W^T + b, W stacked from the named projections: `outputs` is {name: rows}."""

    def __init__(self, scope: Scope, outputs: dict[str, int], inputs: int, bias: bool = False) -> None:
        rows = sum(outputs.values())
        weights, biases, at = [], [], 0
        for name, size in outputs.items():
            place = (slice(at, at + size),)
            weights.append(scope.part(f"{name}.weight", (size, inputs), place))
            biases.append(scope.part(f"{name}.bias", (size,), place))
            at += size
        self.weight = scope.assembled((rows, inputs), weights)
        self.bias = scope.assembled((rows,), biases) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


class RMSNorm:
    """Root mean square norm; `zero_centred` families store the gain minus one."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float, zero_centred: bool = False) -> None:
        self.weight = scope.weight(f"{name}.weight", (size,))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return step.ops.rms_norm(x, self.weight.tensor, self.eps, self.zero_centred)

    def add(self, x: torch.Tensor, residual: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); `residual` is consumed."""
        return step.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps, self.zero_centred)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: no position embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """RMSNorm of each query and key head before rotation; None: none."""
    zero_centred_norm: bool = False
    window: int | None = None
    """Sliding window in tokens, the query's own included."""
    scale: float | None = None
    """Of the scores; None: head_dim ** -0.5."""


class Attention:
    """Grouped-query attention over the paged cache. `group` and `layer` are its place there, given by the model."""

    def __init__(self, scope: Scope, config: AttentionConfig) -> None:
        c = self.config = config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv = Linear(scope, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, c.hidden_size, c.qkv_bias)
        self.output = Linear(scope, {"o_proj": c.hidden_size}, queries, c.output_bias)
        self.qk_norm = None if c.qk_norm_eps is None else _head_norms(scope, c)
        self.scale = c.head_dim**-0.5 if c.scale is None else c.scale
        self.qk_heads = c.num_heads + c.num_kv_heads
        self.qk_width = queries + keys
        self.rope_index = 0
        self.group = 0
        self.layer = 0

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        c, tokens = self.config, x.shape[0]
        qkv = self.qkv(x)
        return self.output(self.attend(qkv, tokens, c, step))

    def attend(self, qkv: torch.Tensor, tokens: int, c: AttentionConfig, step: Step) -> torch.Tensor:
        """Everything between the projections: [tokens, (heads + 2 kv_heads) * dim] -> [tokens, heads * dim]."""
        qk = qkv[:, : self.qk_width].view(tokens, self.qk_heads, c.head_dim)
        v = qkv[:, self.qk_width :].view(tokens, c.num_kv_heads, c.head_dim)
        if self.qk_norm is not None:
            assert c.qk_norm_eps is not None
            qk = step.ops.rms_norm(qk, self.qk_norm.tensor, c.qk_norm_eps, c.zero_centred_norm)
        if c.rope is not None:
            qk = step.ops.rotate(qk, *step.rotary[self.rope_index])
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        out = step.ops.attention(q, k, v, step.kv[self.group], self.layer, step.plans[self.group], self.scale)
        return out.reshape(tokens, -1)


def _head_norms(scope: Scope, c: AttentionConfig) -> Weight:
    """The gains of the query and key norms as one [heads + kv_heads, dim], so that one operation norms both."""
    heads, shape = c.num_heads + c.num_kv_heads, (c.head_dim,)
    return scope.assembled(
        (heads, c.head_dim),
        [
            scope.part("q_norm.weight", shape, (slice(0, c.num_heads),)),
            scope.part("k_norm.weight", shape, (slice(c.num_heads, heads),)),
        ],
    )


def silu_and_mul(x: torch.Tensor, step: Step) -> torch.Tensor:
    return step.ops.silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor, step: Step) -> torch.Tensor:
    return step.ops.gelu_tanh_and_mul(x)


class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        scope: Scope,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Callable[[torch.Tensor, Step], torch.Tensor] = silu_and_mul,
    ) -> None:
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(scope, sizes, hidden_size, bias)
        self.down = Linear(scope, {"down_proj": hidden_size}, intermediate_size, bias)
        self.activation = activation

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x), step))


@dataclass(slots=True)
class Block:
    """A pre-norm decoder block: x + mixer(norm(x)), then x + mlp(norm(x)).

    The residual travels apart from x, so that adding it and norming the sum is one operation.
    """

    mixer_norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: Mixer
    attention: Attention | None = field(default=None)
    """The mixer where it is attention: what the cache must hold for this block."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = x, self.mixer_norm(x, step)
        else:
            x, residual = self.mixer_norm.add(x, residual, step)
        x = self.mixer(x, step)
        x, residual = self.mlp_norm.add(x, residual, step)
        return self.mlp(x, step), residual
