"""Recurrent mixers: gated delta net, Mamba-2, short convolution. They keep a state instead of KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.hf_config import HfConfig, ModelError
from engine.models.layers import ForwardContext, LayerState, Linear, StateShape
from engine.models.shard import DimShard, Shard
from engine.models.weights import WeightScope


class CausalConv:
    """Convolves each channel over the last `width` tokens of a sequence. The last inputs are a part of its state."""

    def __init__(
        self,
        scope: WeightScope,
        name: str,
        channels: DimShard,
        width: int,
        *,
        has_bias: bool = False,
        silu: bool = True,
    ) -> None:
        """Declare the weights of the channels that this rank holds. `silu`: whether SiLU is applied to the result."""
        part = scope.describe_tensor(f"{name}.weight", (channels, 1, width), (slice(None), None))
        self.weight = scope.declare_combined((channels, width), [part])
        self.bias = scope.declare_weight(f"{name}.bias", (channels,)) if has_bias else None
        self.silu = silu
        self.tail_shape = (width - 1, channels.held_size)

    def __call__(self, x: Tensor, state: LayerState, context: ForwardContext) -> Tensor:
        bias = None if self.bias is None else self.bias.tensor
        return context.ops.causal_conv(x, self.weight.tensor, bias, state.conv_tail, context.state_plan, silu=self.silu)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Sizes of a gated delta net."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float


class GatedDeltaNet:
    """Recurrent layer of Qwen3.5: a short convolution, the gated delta rule (linear attention), and a gated norm."""

    def __init__(self, scope: WeightScope, config: DeltaNetConfig) -> None:
        """Declare the weights of the heads that this rank holds under tensor parallelism.

        Consecutive value heads share a key head, so ranks may hold the same key head. A `DimShard` is the part of a
        tensor's dimension that this rank holds: `value_shard` of all channels of the value heads, `head_shard` of what
        has one number for each value head.
        """
        shard = scope.shard
        key_shard = shard.split_shared(config.num_key_heads, "key heads of a delta net", config.key_dim)
        value_shard = shard.split(config.num_value_heads, "value heads of a delta net", config.value_dim)
        head_shard = shard.split(config.num_value_heads, "value heads of a delta net")
        channel_shard = DimShard.concatenate([key_shard, key_shard, value_shard])  # q, k and v
        num_key_heads = key_shard.held_size // config.key_dim
        self.config = replace(config, num_key_heads=num_key_heads, num_value_heads=head_shard.held_size)
        """Config with the numbers of heads that this rank holds."""
        self.recurrent_index = 0
        """Number of this layer among the recurrent ones, set by `CausalLM`."""
        self.key_channels = key_shard.held_size
        self.value_channels = value_shard.held_size

        projection_rows = {  # one matrix makes q, k, v; the gate (z), the rate (b), the time step of the decay (a)
            "in_proj_qkv": channel_shard,
            "in_proj_z": value_shard,
            "in_proj_b": head_shard,
            "in_proj_a": head_shard,
        }
        self.projection_sizes = [rows.held_size for rows in projection_rows.values()]
        self.input_projection = Linear.declare(scope, projection_rows, config.hidden_size)
        self.conv = CausalConv(scope, "conv1d", channel_shard, config.conv_width)
        self.rate_log = scope.declare_weight("A_log", (head_shard,), torch.float32)
        self.dt_bias = scope.declare_weight("dt_bias", (head_shard,), torch.float32)
        self.norm = scope.declare_weight("norm.weight", (config.value_dim,))
        self.output_projection = Linear.declare(scope, {"out_proj": config.hidden_size}, value_shard)

    @property
    def state_shape(self) -> StateShape:
        config = self.config
        return StateShape(self.conv.tail_shape, (config.num_value_heads, config.key_dim, config.value_dim))

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Mix each token with the tokens before it in its sequence, and advance the sequences' states in place.

        One projection makes q, k, v and the gates of all heads. A short convolution over the last tokens smooths q, k
        and v. The gated delta rule then reads and corrects the states. x and the result: [tokens, hidden].
        """
        config, num_tokens = self.config, x.shape[0]
        state = context.state_by_layer[self.recurrent_index]
        qkv, gate, rate, dt = torch.split(self.input_projection(x), self.projection_sizes, -1)
        q, k, v = torch.split(
            self.conv(qkv, state, context), [self.key_channels, self.key_channels, self.value_channels], -1
        )
        out = context.ops.gated_delta(
            q=q.view(num_tokens, config.num_key_heads, config.key_dim),
            k=k.view(num_tokens, config.num_key_heads, config.key_dim),
            v=v.view(num_tokens, config.num_value_heads, config.value_dim),
            log_decay=-self.rate_log.tensor.exp() * F.softplus(dt.float() + self.dt_bias.tensor),
            rate=rate.sigmoid(),
            states=state.recurrent_state,
            plan=context.state_plan,
        )
        out = context.ops.norm_then_gate(out, gate.view_as(out), self.norm.tensor, config.norm_eps)
        return self.output_projection(out.reshape(num_tokens, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Sizes and settings of a Mamba-2 mixer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    norm_eps: float
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Least and greatest time step of the recurrence."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


class Mamba2:
    """Mamba-2, the recurrent layer of Bamba, Granite-4-H and Nemotron-H. The output is gated, then normed by group."""

    def __init__(self, scope: WeightScope, config: Mamba2Config) -> None:
        """Declare the weights of the heads that this rank holds under tensor parallelism, and of the groups they share.

        `in_proj` has, one after the other, the rows of the gate, of the channels that are convolved (inputs, B and C),
        and of the time steps of the heads.
        """
        shard = scope.shard
        inner_shard = shard.split(config.num_heads, "Mamba heads", config.head_dim)
        head_shard = shard.split(config.num_heads, "Mamba heads")
        group_shard = shard.split_shared(config.num_groups, "Mamba groups", config.state_dim)
        channel_shard = DimShard.concatenate([inner_shard, group_shard, group_shard])  # inputs, B and C
        num_groups = group_shard.held_size // config.state_dim
        self.config = replace(config, num_heads=head_shard.held_size, num_groups=num_groups)
        """Config with the numbers of heads and groups that this rank holds."""
        self.recurrent_index = 0  # set by `CausalLM`

        projections = [inner_shard, channel_shard, head_shard]
        self.projection_sizes = [rows.held_size for rows in projections]
        projection_rows = {"in_proj": DimShard.concatenate(projections)}
        self.input_projection = Linear.declare(scope, projection_rows, config.hidden_size, config.proj_bias)
        self.conv = CausalConv(scope, "conv1d", channel_shard, config.conv_width, has_bias=config.conv_bias)
        self.rate_log = scope.declare_weight("A_log", (head_shard,), torch.float32)
        self.dt_bias = scope.declare_weight("dt_bias", (head_shard,), torch.float32)
        self.skip = scope.declare_weight("D", (head_shard,), torch.float32)
        self.norm = scope.declare_weight("norm.weight", (inner_shard,))
        self.output_projection = Linear.declare(scope, {"out_proj": config.hidden_size}, inner_shard, config.proj_bias)
        self.shared_norm = _CrossRankGroupNorm(shard, config) if config.num_groups % shard.num_ranks else None
        """Norm for groups that several ranks share; None: each rank holds whole groups."""

    @property
    def state_shape(self) -> StateShape:
        config = self.config
        return StateShape(self.conv.tail_shape, (config.num_heads, config.head_dim, config.state_dim))

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Mix each token with the tokens before it in its sequence, and advance the sequences' states in place.

        One projection makes the gate, the inputs, and Mamba-2's B, C and time steps (dt). A short convolution smooths
        the inputs, B and C. The output of the recurrence is gated and normed. x and the result: [tokens, hidden].
        """
        config = self.config
        gate, inputs_b_c, dt = torch.split(self.input_projection(x), self.projection_sizes, -1)
        state = context.state_by_layer[self.recurrent_index]
        out = self._run_recurrence(self.conv(inputs_b_c, state, context), dt, state, context)
        if self.shared_norm is not None:
            normed = self.shared_norm(out, gate, self.norm.tensor)
        else:
            normed = context.ops.gate_then_norm(out, gate, self.norm.tensor, config.norm_eps, config.num_groups)
        return self.output_projection(normed)

    def _run_recurrence(self, inputs_b_c: Tensor, dt: Tensor, state: LayerState, context: ForwardContext) -> Tensor:
        """Run Mamba-2's recurrence, which advances the sequences' states. Returns [tokens, inner size].

        `inputs_b_c`: the inputs of all heads, and the B and C of all groups, side by side. `dt`: [tokens, heads].
        """
        config, num_tokens = self.config, dt.shape[0]
        bc_size = config.num_groups * config.state_dim
        inputs, b, c = torch.split(inputs_b_c, [config.inner_size, bc_size, bc_size], -1)
        out = context.ops.state_space(
            x=inputs.view(num_tokens, config.num_heads, config.head_dim),
            dt=F.softplus(dt.float() + self.dt_bias.tensor).clamp(*config.dt_limits),
            rate=-self.rate_log.tensor.exp(),  # negative, so that the states decay
            b=b.view(num_tokens, config.num_groups, config.state_dim),
            c=c.view(num_tokens, config.num_groups, config.state_dim),
            skip=self.skip.tensor,
            states=state.recurrent_state,
            plan=context.state_plan,
        )
        return out.reshape(num_tokens, -1)


class _CrossRankGroupNorm:
    """Gated root mean square norm over groups of channels, for more tensor-parallel ranks than groups.

    Each rank holds some channels of one group. The ranks' sums of squares are added up by an all-reduce.
    """

    def __init__(self, shard: Shard, config: Mamba2Config) -> None:
        assert shard.num_ranks % config.num_groups == 0, (shard.num_ranks, config.num_groups)
        ranks_per_group = shard.num_ranks // config.num_groups
        self.all_reduce_sum = shard.all_reduce_sum
        self.num_groups = config.num_groups
        self.group_index = shard.rank // ranks_per_group
        self.group_channels = config.inner_size // config.num_groups
        self.eps = config.norm_eps

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return norm(x * silu(gate)) * weight. x, gate: [tokens, channels of this rank]. weight: [those channels]."""
        assert self.all_reduce_sum is not None
        gated_values = x.float() * F.silu(gate.float())
        squares = gated_values.new_zeros(x.shape[0], self.num_groups)
        squares[:, self.group_index] = gated_values.square().sum(-1)
        variance = self.all_reduce_sum(squares)[:, self.group_index, None] / self.group_channels
        return (gated_values * torch.rsqrt(variance + self.eps) * weight.float()).to(x.dtype)


def read_dt_limits(config: HfConfig) -> tuple[float, float]:
    """Read `time_step_limit`; transformers 5 writes infinity as an object."""
    value = config.values.get("time_step_limit", (0.0, float("inf")))
    try:
        low, high = (float(item["__float__"] if isinstance(item, dict) else item) for item in value)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{config.source}: time_step_limit: expected two numbers, got {value!r}") from error
    return low, high


class ShortConv:
    """Gated short convolution of LFM2: output_projection(output_gate * conv(input_gate * value)).

    The two gates and the value are projections of the token. The last inputs of each sequence are its state.
    """

    def __init__(self, scope: WeightScope, hidden_size: int, conv_width: int, has_bias: bool) -> None:
        """Declare the weights of the channels that this rank holds. `conv_width`: tokens that a convolution sees."""
        self.recurrent_index = 0  # set by `CausalLM`
        channels = scope.shard.split(hidden_size, "convolution channels")
        input_rows = {"in_proj": DimShard.concatenate([channels, channels, channels])}
        self.input_projection = Linear.declare(scope, input_rows, hidden_size, has_bias)
        self.conv = CausalConv(scope, "conv", channels, conv_width, has_bias=has_bias, silu=False)
        self.output_projection = Linear.declare(scope, {"out_proj": hidden_size}, channels, has_bias)

    @property
    def state_shape(self) -> StateShape:
        return StateShape(self.conv.tail_shape)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Mix each token with the last tokens of its sequence. x and the result: [tokens, hidden]."""
        input_gate, output_gate, value = self.input_projection(x).chunk(3, -1)
        mixed = self.conv(input_gate * value, context.state_by_layer[self.recurrent_index], context)
        return self.output_projection(output_gate * mixed)
