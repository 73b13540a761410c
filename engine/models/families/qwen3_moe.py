"""Qwen3-MoE: Qwen3's attention, and a routed mixture of experts instead of the MLP in all or some layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.families.qwen3 import layer_windows
from engine.models.hf_config import HfConfig
from engine.models.layers import GatedMLP, Mixer
from engine.models.moe import RoutedMLP
from engine.models.weights import WeightScope


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = DecoderConfig.of(config)
    bias = config.get("attention_bias", False)
    attention = replace(
        attention_config(config, decoder), qkv_bias=bias, output_bias=bias, qk_norm_eps=decoder.norm_eps
    )
    dense_layers = set(config.values.get("mlp_only_layers") or [])
    every = config.get("decoder_sparse_step", 1)
    experts = config.integer("num_experts" if "num_experts" in config else "num_local_experts")

    def mlp(scope: WeightScope, index: int) -> Mixer:
        if index in dense_layers or (index + 1) % every:
            return GatedMLP(scope.sub("mlp"), decoder.hidden_size, config.integer("intermediate_size"))
        return RoutedMLP(
            scope.sub("mlp"),
            decoder.hidden_size,
            config.integer("moe_intermediate_size"),
            experts,
            config.integer("num_experts_per_tok"),
            config.get("norm_topk_prob", False),
        )

    return dense_decoder(root, config, decoder, attention, windows=layer_windows(config, decoder.num_layers), mlp=mlp)
