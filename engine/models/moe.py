"""A routed mixture of gated MLPs: each token goes to its `top_k` likeliest experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.models.layers import ForwardContext
from engine.models.weights import WeightScope


class RoutedMLP:
    """Mixture of experts, with the weight names of Qwen's checkpoints. The softmax of the router is computed in fp32.

    `renormalise`: scale the weights of the chosen experts so that they add up to 1. Each rank holds a part of the
    channels of every expert. So all ranks choose the same experts, and have equal work.
    """

    def __init__(
        self, scope: WeightScope, hidden_size: int, expert_size: int, num_experts: int, top_k: int, renormalise: bool
    ) -> None:
        """Declare the weights. `top_k` of `num_experts` experts compute a token, each with `expert_size` channels."""
        self.router_weight = scope.declare_weight("gate.weight", (num_experts, hidden_size))
        self.top_k = top_k
        self.renormalise = renormalise
        self.all_reduce_sum = scope.shard.all_reduce_sum
        channels = scope.shard.split(expert_size, "channels of an expert")
        gate_up_parts, down_parts = [], []
        for index in range(num_experts):
            expert = scope.enter_scope("experts").enter_scope(index)
            for name, start in (("gate_proj", 0), ("up_proj", channels.held_size)):
                target_index = (index, slice(start, start + channels.held_size))
                gate_up_parts.append(expert.describe_tensor(f"{name}.weight", (channels, hidden_size), target_index))
            down_parts.append(expert.describe_tensor("down_proj.weight", (hidden_size, channels), (index,)))
        self.gate_up_weight = scope.declare_combined((num_experts, 2 * channels.held_size, hidden_size), gate_up_parts)
        self.down_weight = scope.declare_combined((num_experts, hidden_size, channels), down_parts)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        probabilities = F.linear(x, self.router_weight.tensor).float().softmax(-1)
        weights, expert_ids = probabilities.topk(self.top_k)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        output = context.ops.apply_experts(
            x, self.gate_up_weight.tensor, self.down_weight.tensor, expert_ids, weights.to(x.dtype)
        )
        return output if self.all_reduce_sum is None else self.all_reduce_sum(output)
