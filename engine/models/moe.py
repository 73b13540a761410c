"""A routed mixture of gated MLPs: each token goes to its `top_k` likeliest experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.models.layers import ForwardContext
from engine.models.weights import WeightScope


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMLPConfig:
    """Sizes and settings of a routed mixture."""

    hidden_size: int
    expert_size: int
    """Channels of an expert."""
    num_experts: int
    top_k: int
    renormalise: bool
    """Whether the `top_k` scores are scaled to a sum of 1."""


class RoutedMLP:
    """Mixture of experts, gated MLPs, with the weight names of Qwen's checkpoints.

    The router, a matrix with a row for each expert, scores the experts for a token. The `top_k` experts with the best
    scores compute the token, and their outputs are added with the scores as weights. Under tensor parallelism each rank
    holds an equal number of the channels of every expert.
    """

    def __init__(self, scope: WeightScope, config: RoutedMLPConfig) -> None:
        """Declare the weights. Those of all experts are stacked in one tensor, so that one kernel multiplies them.

        With 8 experts of 64 channels, each of 2 ranks holds 32 of every expert. `gate_up_weight` is [8, 64, hidden].
        """
        self.config = config
        hidden_size, num_experts = config.hidden_size, config.num_experts
        self.router_weight = scope.declare_weight("gate.weight", (num_experts, hidden_size))
        self.all_reduce_sum = scope.shard.all_reduce_sum
        channel_shard = scope.shard.split(config.expert_size, "channels of an expert")
        channel_count = channel_shard.held_size  # on this rank
        gate_rows = slice(0, channel_count)
        up_rows = slice(channel_count, 2 * channel_count)
        up_shape = (channel_shard, hidden_size)  # of gate, too
        down_shape = (hidden_size, channel_shard)
        gate_up_parts, down_parts = [], []
        for i in range(num_experts):
            expert = scope.enter_scope("experts").enter_scope(i)
            gate_up_parts += [
                expert.describe_tensor("gate_proj.weight", up_shape, target_index=(i, gate_rows)),
                expert.describe_tensor("up_proj.weight", up_shape, target_index=(i, up_rows)),
            ]
            down_parts.append(expert.describe_tensor("down_proj.weight", down_shape, target_index=(i,)))
        self.gate_up_weight = scope.declare_combined((num_experts, 2 * channel_count, hidden_size), gate_up_parts)
        self.down_weight = scope.declare_combined((num_experts, hidden_size, channel_count), down_parts)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the weighted sum of each token's experts. x and the result: [tokens, hidden]."""
        probabilities = F.linear(x, self.router_weight.tensor).float().softmax(-1)
        weights, expert_ids = probabilities.topk(self.config.top_k)
        if self.config.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        output = context.ops.apply_experts(
            x, self.gate_up_weight.tensor, self.down_weight.tensor, expert_ids, weights.to(x.dtype)
        )
        return output if self.all_reduce_sum is None else self.all_reduce_sum(output)
