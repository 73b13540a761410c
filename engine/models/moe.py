"""A routed mixture of gated MLPs: each token goes to its `top_k` likeliest experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.models.layers import Step
from engine.models.weights import WeightScope


class RoutedMLP:
    """Softmax router (in fp32), top-k, optional renormalisation, experts under Qwen's names.

    Each rank holds a part of every expert's channels: all ranks route alike, and have the same work.
    """

    def __init__(
        self, scope: WeightScope, hidden_size: int, expert_size: int, num_experts: int, top_k: int, renormalise: bool
    ) -> None:
        self.router = scope.weight("gate.weight", (num_experts, hidden_size))
        self.top_k = top_k
        self.renormalise = renormalise
        self.add_up = scope.shard.add_up
        inner = scope.shard.split(expert_size, "channels of an expert")
        gates, downs = [], []
        for index in range(num_experts):
            expert = scope.sub("experts").sub(index)
            for name, start in (("gate_proj", 0), ("up_proj", inner.size)):
                place = (index, slice(start, start + inner.size))
                gates.append(expert.part(f"{name}.weight", (inner, hidden_size), place))
            downs.append(expert.part("down_proj.weight", (hidden_size, inner), (index,)))
        self.gate_up = scope.assembled((num_experts, 2 * inner.size, hidden_size), gates)
        self.down = scope.assembled((num_experts, hidden_size, inner), downs)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        odds = F.linear(x, self.router.tensor).float().softmax(-1)
        weights, experts = odds.topk(self.top_k)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = step.ops.experts(x, self.gate_up.tensor, self.down.tensor, experts, weights.to(x.dtype))
        return out if self.add_up is None else self.add_up(out)
