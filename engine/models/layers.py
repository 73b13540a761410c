"""Layers that decoder families share: linear, norm, attention, gated MLP, block.

Projections with the same input are one matrix (q, k and v; gate and up), which is put together when the checkpoint is
loaded. Layers hold only weights. All that depends on the batch is in the `ForwardContext` of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from engine.models.rope import RopeConfig
from engine.models.shard import DimShard, Extent, get_held_size
from engine.models.weights import Weight, WeightScope
from kernels import Kernels, PagedKV


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one recurrent layer in all units of the pool, as strided views."""

    conv_tail: Tensor
    """[units, width - 1, channels] in the model's dtype: the last inputs of the convolution."""
    recurrent_state: Tensor
    """[units, ...] in fp32; of zero size in a layer that only convolves."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of one recurrent layer's state of a sequence."""

    conv_tail: tuple[int, int]
    recurrent_state: tuple[int, ...] = ()


@dataclass(slots=True)
class ForwardContext:
    """Tensors and plans of one step's batch, for every layer."""

    ops: Kernels
    rotary_by_rope: list[tuple[Tensor, Tensor]]
    """(cos, signed sin) of the batch's positions for each of the model's rope settings."""
    kv_by_group: list[PagedKV]
    """The KV of each attention group."""
    plan_by_group: list[Any]
    """The attention plan of each group."""
    state_by_layer: list[LayerState]
    """The state of each recurrent layer."""
    state_plan: Any
    """Units of the batch's states; None on a model without state."""


class Mixer(Protocol):
    """Layer that a block applies: attention, a recurrent layer, or an MLP."""

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor: ...


@runtime_checkable
class RecurrentMixer(Mixer, Protocol):
    """A mixer that keeps a state of fixed size instead of KV."""

    recurrent_index: int
    """Index of the layer in `ForwardContext.state_by_layer`, given by the model."""

    @property
    def state_shape(self) -> StateShape: ...


class Linear:
    """Linear layer, x @ W^T + b. W may be several matrices of the checkpoint, stacked, such as those of q, k and v.

    Under tensor parallelism each rank holds some rows or some columns of W. With columns, it multiplies its part of x,
    and an all-reduce adds up the products of all ranks.
    """

    def __init__(
        self, weight: Weight, bias: Weight | None, all_reduce_sum: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Make a layer from declared weights. `all_reduce_sum`: adds up the products of all ranks; None: no need to."""
        self.weight = weight
        self.weight.is_linear = True  # so that it may be packed for fast multiplication
        self.bias = bias
        self.all_reduce_sum = all_reduce_sum

    @classmethod
    def declare(
        cls, scope: WeightScope, rows_by_projection: Mapping[str, Extent], inputs: Extent, has_bias: bool = False
    ) -> Linear:
        """Make a layer of matrices that are stacked, and declare its weights, which the loader fills later.

        `rows_by_projection`: name of each matrix in the checkpoint, such as "q_proj" -> number of its rows, or this
        rank's part of them (a `DimShard`). `inputs`: number of columns, or this rank's part of them.
        """
        weight_parts, bias_parts = [], []
        row_count = 0
        for name, rows in rows_by_projection.items():
            start = row_count
            row_count += get_held_size(rows)
            stacked_rows = (slice(start, row_count),)
            weight_parts.append(scope.describe_tensor(f"{name}.weight", (rows, inputs), stacked_rows))
            bias_parts.append(scope.describe_tensor(f"{name}.bias", (rows,), stacked_rows))
        weight = scope.declare_combined((row_count, inputs), weight_parts)
        bias = scope.declare_combined((row_count,), bias_parts) if has_bias else None
        all_reduce_sum = scope.shard.all_reduce_sum if isinstance(inputs, DimShard) else None
        if all_reduce_sum is not None and scope.shard.rank > 0:
            bias = None  # only rank 0 adds the bias, so that the sum over the ranks has it once
        return cls(weight, bias, all_reduce_sum)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.weight.multiply(x, None if self.bias is None else self.bias.tensor)
        return out if self.all_reduce_sum is None else self.all_reduce_sum(out)


class RMSNorm:
    """Root mean square norm. `zero_centred`: the checkpoint stores the gain minus one."""

    def __init__(self, scope: WeightScope, name: str, size: int, eps: float, zero_centred: bool = False) -> None:
        self.weight = scope.declare_weight(f"{name}.weight", (size,))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        return context.ops.rms_norm(x, self.weight.tensor, self.eps, self.zero_centred)

    def add(self, x: Tensor, residual: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual); `residual` is consumed."""
        return context.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps, self.zero_centred)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Sizes and settings of an attention layer, and the names of its weights in the checkpoint."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """Settings of rotary embedding; None: no position embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """Epsilon of the RMSNorm of each query and key head before rotation; None: no such norm."""
    zero_centred_norm: bool = False
    """Whether the checkpoint stores the gains of that norm minus one."""
    window: int | None = None
    """Sliding window in tokens, the query's own included; None: full attention."""
    scale: float | None = None
    """Factor of the scores; None: head_dim ** -0.5."""
    output_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")


class Attention:
    """Computes grouped-query attention over the paged cache, with its projections, norms and rotation."""

    def __init__(self, scope: WeightScope, config: AttentionConfig) -> None:
        """Declare the weights of the heads that this rank holds under tensor parallelism.

        A rank holds some of the query heads, with the key-value heads that they share. If there are more ranks than
        key-value heads, several ranks hold the same one.
        """
        query_rows = scope.shard.split(config.num_heads, "attention heads", config.head_dim)
        key_rows = scope.shard.split_shared(config.num_kv_heads, "key-value heads", config.head_dim)
        rank_config = replace(
            config,
            num_heads=query_rows.held_size // config.head_dim,
            num_kv_heads=key_rows.held_size // config.head_dim,
        )
        self.config = rank_config
        """Config with the numbers of heads that this rank holds."""
        self.scale = rank_config.head_dim**-0.5 if rank_config.scale is None else rank_config.scale
        self.num_qk_heads = rank_config.num_heads + rank_config.num_kv_heads
        self.qk_width = query_rows.held_size + key_rows.held_size
        """Columns of queries and keys in the input of `attend`; values follow."""
        self.qkv_projection = self._declare_projection(scope, config, query_rows, key_rows)
        output_rows = {rank_config.output_name: rank_config.hidden_size}
        self.output_projection = Linear.declare(scope, output_rows, query_rows, rank_config.output_bias)
        self.qk_norm = None if rank_config.qk_norm_eps is None else _declare_head_norms(scope, rank_config)
        """Gains of the norms of query and key heads; None: the model has no such norm."""

        # set by `CausalLM`
        self.rope_index = 0
        """Index of the rotary settings."""
        self.group_index = 0
        """Index of the cache group: layers that share a block table."""
        self.group_layer_index = 0
        """Index of this layer in its cache group."""

    def _declare_projection(
        self, scope: WeightScope, config: AttentionConfig, query_rows: DimShard, key_rows: DimShard
    ) -> Linear:
        """Declare the projections to queries, keys and values, stacked. Those of keys and values have equal rows.

        `config`: that of all ranks together.
        """
        rows = {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows}
        return Linear.declare(scope, rows, config.hidden_size, config.qkv_bias)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        return self.output_projection(self.attend(self.qkv_projection(x), context))

    def attend(self, qkv: Tensor, context: ForwardContext) -> Tensor:
        """Store K and V of a step's tokens in the paged cache, and return causal attention: [tokens, heads * dim].

        `qkv`: [tokens, (heads + 2 kv_heads) * dim], the queries, keys and values of each token side by side. `context`
        has the KV cache and the step's batch (a plan) for each group of layers with equal windows and sizes of K and V.
        """
        config, num_tokens = self.config, qkv.shape[0]
        qk = qkv[:, : self.qk_width].view(num_tokens, self.num_qk_heads, config.head_dim)
        v = qkv[:, self.qk_width :].view(num_tokens, config.num_kv_heads, config.head_dim)
        qk = self._norm_and_rotate(qk, context)  # one operation for the heads of both
        out = context.ops.attention(
            q=qk[:, : config.num_heads],
            k=qk[:, config.num_heads :],
            v=v,
            kv=context.kv_by_group[self.group_index],
            layer=self.group_layer_index,
            plan=context.plan_by_group[self.group_index],
            scale=self.scale,
        )
        return out.reshape(num_tokens, -1)

    def _norm_and_rotate(self, qk: Tensor, context: ForwardContext) -> Tensor:
        """Norm and rotate query and key heads [tokens, heads, dim], if the model does these; both in one operation."""
        config = self.config
        rotary = None if config.rope is None else context.rotary_by_rope[self.rope_index]
        if self.qk_norm is None:
            return qk if rotary is None else context.ops.rotate(qk, *rotary)
        assert config.qk_norm_eps is not None
        gains, eps, zero_centred = self.qk_norm.tensor, config.qk_norm_eps, config.zero_centred_norm
        if rotary is None:
            return context.ops.rms_norm(qk, gains, eps, zero_centred)
        return context.ops.norm_and_rotate(qk, gains, eps, zero_centred, *rotary)


def _declare_head_norms(scope: WeightScope, config: AttentionConfig) -> Weight:
    """Declare the gains of query and key norms as one weight [heads + kv_heads, dim], for one operation on both."""
    query_name, key_name = config.norm_names
    num_heads, shape = config.num_heads + config.num_kv_heads, (config.head_dim,)
    query_rows, key_rows = slice(0, config.num_heads), slice(config.num_heads, num_heads)
    parts = [  # the checkpoint has one norm for all query heads, and one for all key heads
        scope.describe_tensor(f"{query_name}.weight", shape, (query_rows,)),
        scope.describe_tensor(f"{key_name}.weight", shape, (key_rows,)),
    ]
    return scope.declare_combined((num_heads, config.head_dim), parts)


class GatedMLP:
    """Gated MLP: down(activation(gate(x)) * up(x)), where gate and up are one stacked matrix."""

    def __init__(
        self,
        scope: WeightScope,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        is_gelu: bool = False,
        gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj"),
        down_name: str = "down_proj",
    ) -> None:
        """Declare the weights of the channels that this rank holds under tensor parallelism.

        `is_gelu`: whether the activation is gelu (with tanh), not silu. `gate_up_names`: names of the gate and up
        matrices in the checkpoint, or of the one matrix that stacks both.
        """
        channel_shard = scope.shard.split(intermediate_size, "MLP channels")
        is_stacked = len(gate_up_names) == 1
        rows = DimShard.concatenate([channel_shard, channel_shard]) if is_stacked else channel_shard
        rows_by_matrix = dict.fromkeys(gate_up_names, rows)
        self.gate_up_projection = Linear.declare(scope, rows_by_matrix, hidden_size, bias)
        self.down_projection = Linear.declare(scope, {down_name: hidden_size}, channel_shard, bias)
        self.is_gelu = is_gelu

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        activate = context.ops.gelu_tanh_and_mul if self.is_gelu else context.ops.silu_and_mul
        return self.down_projection(activate(self.gate_up_projection(x)))


@dataclass(slots=True)
class Branch:
    """Part of a block, x + layer(norm(x)). The layer is a mixer (attention or a recurrent layer) or an MLP.

    Its output is normed by `post_norm`, if there is one, and multiplied by `residual_scale`, before it is added.
    """

    norm: RMSNorm
    layer: Mixer
    post_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    def __call__(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return (x, residual): their sum is the output. The next branch adds them, in one operation with its norm.

        x, residual: [tokens, hidden], as the last branch has returned them; residual is None in the first one.
        """
        if residual is None:
            x, residual = self.norm(x, context), x
        else:
            x, residual = self.norm.add(x, residual, context)
        x = self.layer(x, context)
        if self.post_norm is not None:
            x = self.post_norm(x, context)
        return (x if self.residual_scale == 1.0 else x * self.residual_scale), residual
