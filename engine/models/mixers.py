"""Recurrent mixers: gated delta net, Mamba-2, short convolution. Their state replaces the KV of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.hf_config import HfConfig, ModelError
from engine.models.layers import Linear, StateShape, Step
from engine.models.shard import DimShard, Shard
from engine.models.weights import Weight, WeightScope


def _declare_conv_weight(scope: WeightScope, name: str, channels: DimShard, width: int) -> Weight:
    """A depthwise convolution's [channels, 1, width] as [channels, width]."""
    part = scope.checkpoint_tensor(f"{name}.weight", (channels, 1, width), transform=lambda tensor: tensor[:, 0])
    return scope.declare_combined((channels, width), [part])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float


class GatedDeltaNet:
    """Short convolution, gated delta rule, gated norm; under Qwen3.5's names."""

    def __init__(self, scope: WeightScope, config: DeltaNetConfig) -> None:
        shard = scope.shard
        keys = shard.split_shared(config.key_heads, "key heads of a delta net", config.key_dim)
        values = shard.split(config.value_heads, "value heads of a delta net", config.value_dim)
        heads = shard.split(config.value_heads, "value heads of a delta net")
        c = self.config = replace(config, key_heads=keys.size // config.key_dim, value_heads=heads.size)
        self.index = 0
        self.keys, self.values = keys.size, values.size
        channels = DimShard.concatenate([keys, keys, values])
        self.channels = channels.size
        self.sizes = [channels.size, values.size, heads.size, heads.size]
        projection_rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        self.inputs = Linear(scope, projection_rows, c.hidden_size)
        self.conv = _declare_conv_weight(scope, "conv1d", channels, c.conv_width)
        self.rate_log = scope.weight("A_log", (heads,), torch.float32)
        self.dt_bias = scope.weight("dt_bias", (heads,), torch.float32)
        self.norm = scope.weight("norm.weight", (c.value_dim,))
        self.output = Linear(scope, {"out_proj": c.hidden_size}, values)

    @property
    def state_shape(self) -> StateShape:
        c = self.config
        return StateShape((c.conv_width - 1, self.channels), (c.value_heads, c.key_dim, c.value_dim))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        c, tokens, state = self.config, x.shape[0], step.states[self.index]
        mixed, gate, rate, dt = torch.split(self.inputs(x), self.sizes, -1)
        mixed = step.ops.causal_conv(mixed, self.conv.tensor, None, state.tail, step.state_plan, True)
        q, k, v = torch.split(mixed, [self.keys, self.keys, self.values], -1)
        log_decay = -self.rate_log.tensor.exp() * F.softplus(dt.float() + self.dt_bias.tensor)
        out = step.ops.gated_delta(
            q.view(tokens, c.key_heads, c.key_dim),
            k.view(tokens, c.key_heads, c.key_dim),
            v.view(tokens, c.value_heads, c.value_dim),
            log_decay,
            rate.sigmoid(),
            state.recurrent,
            step.state_plan,
        )
        gate = gate.view(tokens, c.value_heads, c.value_dim)
        return self.output(step.ops.norm_then_gate(out, gate, self.norm.tensor, c.norm_eps).reshape(tokens, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    norm_eps: float
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim


class Mamba2:
    """The Mamba-2 mixer, as Bamba, Granite-4-H and Nemotron-H have it: the gate comes before the (grouped) norm."""

    def __init__(self, scope: WeightScope, config: Mamba2Config) -> None:
        shard = scope.shard
        inner = shard.split(config.heads, "Mamba heads", config.head_dim)
        heads = shard.split(config.heads, "Mamba heads")
        groups = shard.split_shared(config.groups, "Mamba groups", config.state_dim)
        c = self.config = replace(config, heads=heads.size, groups=groups.size // config.state_dim)
        self.index = 0
        channels = DimShard.concatenate([inner, groups, groups])
        self.channels = channels.size
        self.sizes = [inner.size, channels.size, heads.size]
        self.inputs = Linear(
            scope, {"in_proj": DimShard.concatenate([inner, channels, heads])}, c.hidden_size, c.proj_bias
        )
        self.conv = _declare_conv_weight(scope, "conv1d", channels, c.conv_width)
        self.conv_bias = scope.weight("conv1d.bias", (channels,)) if c.conv_bias else None
        self.rate_log = scope.weight("A_log", (heads,), torch.float32)
        self.dt_bias = scope.weight("dt_bias", (heads,), torch.float32)
        self.skip = scope.weight("D", (heads,), torch.float32)
        self.norm = scope.weight("norm.weight", (inner,))
        self.output = Linear(scope, {"out_proj": c.hidden_size}, inner, c.proj_bias)
        self.shared_norm = _SharedNorm(scope.shard, config) if config.groups % shard.size else None

    @property
    def state_shape(self) -> StateShape:
        c = self.config
        return StateShape((c.conv_width - 1, self.channels), (c.heads, c.head_dim, c.state_dim))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        c, tokens, state = self.config, x.shape[0], step.states[self.index]
        gate, mixed, dt = torch.split(self.inputs(x), self.sizes, -1)
        bias = None if self.conv_bias is None else self.conv_bias.tensor
        mixed = step.ops.causal_conv(mixed, self.conv.tensor, bias, state.tail, step.state_plan, True)
        inputs, b, c_ = torch.split(mixed, [c.inner_size, c.groups * c.state_dim, c.groups * c.state_dim], -1)
        out = step.ops.state_space(
            inputs.view(tokens, c.heads, c.head_dim),
            F.softplus(dt.float() + self.dt_bias.tensor).clamp(*c.dt_limits),
            -self.rate_log.tensor.exp(),
            b.view(tokens, c.groups, c.state_dim),
            c_.view(tokens, c.groups, c.state_dim),
            self.skip.tensor,
            state.recurrent,
            step.state_plan,
        )
        out = out.reshape(tokens, -1)
        if self.shared_norm is not None:
            return self.output(self.shared_norm(out, gate, self.norm.tensor))
        return self.output(step.ops.gate_then_norm(out, gate, self.norm.tensor, c.norm_eps, c.groups))


class _SharedNorm:
    """`gate_then_norm` of groups whose channels lie on several ranks: the sums of squares are added over the ranks."""

    def __init__(self, shard: Shard, config: Mamba2Config) -> None:
        assert shard.size % config.groups == 0, (shard.size, config.groups)
        self.all_reduce_sum = shard.all_reduce_sum
        self.groups = config.groups
        self.group = shard.rank // (shard.size // config.groups)
        self.group_channels = config.inner_size // config.groups
        self.eps = config.norm_eps

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """x, gate: [tokens, channels of this rank], which are all of one group."""
        assert self.all_reduce_sum is not None
        gated_values = x.float() * F.silu(gate.float())
        squares = gated_values.new_zeros(x.shape[0], self.groups)
        squares[:, self.group] = gated_values.square().sum(-1)
        variance = self.all_reduce_sum(squares)[:, self.group, None] / self.group_channels
        return (gated_values * torch.rsqrt(variance + self.eps) * weight.float()).to(x.dtype)


def dt_limits(config: HfConfig) -> tuple[float, float]:
    """`time_step_limit`; transformers 5 writes infinity as an object."""
    value = config.values.get("time_step_limit", (0.0, float("inf")))
    try:
        low, high = (float(item["__float__"] if isinstance(item, dict) else item) for item in value)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{config.source}: time_step_limit: expected two numbers, got {value!r}") from error
    return low, high


class ShortConv:
    """LFM2's mixer: a gated short convolution, out(C * conv(B * x))."""

    def __init__(self, scope: WeightScope, hidden_size: int, conv_width: int, bias: bool) -> None:
        self.index = 0
        channels = scope.shard.split(hidden_size, "convolution channels")
        self.channels, self.conv_width = channels.size, conv_width
        self.inputs = Linear(scope, {"in_proj": DimShard.concatenate([channels] * 3)}, hidden_size, bias)
        self.conv = _declare_conv_weight(scope, "conv", channels, conv_width)
        self.conv_bias = scope.weight("conv.bias", (channels,)) if bias else None
        self.output = Linear(scope, {"out_proj": hidden_size}, channels, bias)

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.conv_width - 1, self.channels))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        before, after, value = self.inputs(x).chunk(3, -1)
        bias = None if self.conv_bias is None else self.conv_bias.tensor
        tail = step.states[self.index].tail
        mixed = step.ops.causal_conv(before * value, self.conv.tensor, bias, tail, step.state_plan, False)
        return self.output(after * mixed)
