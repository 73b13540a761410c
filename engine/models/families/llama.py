"""Llama 2 and 3, and what is Llama's shape but for a setting or two: Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, build_dense_decoder, read_attention_config
from engine.models.hf_config import HfConfig, read_layer_types
from engine.models.layers import GatedMLP, Mixer
from engine.models.moe import RoutedMLP, RoutedMLPConfig
from engine.models.weights import WeightScope

MISTRAL_WINDOW = 4096
"""Window of a Mistral config without the key; `null` means no window."""


def build_llama(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Llama 2 or 3."""
    decoder = DecoderConfig.from_hf(config)
    return build_dense_decoder(root, config, decoder, read_attention_config(config, decoder))


def build_mistral(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Mistral: Llama with a sliding window on every layer."""
    decoder = DecoderConfig.from_hf(config)
    window = config.get_optional_integer("sliding_window") if "sliding_window" in config.values else MISTRAL_WINDOW
    return build_dense_decoder(root, config, decoder, replace(read_attention_config(config, decoder), window=window))


def build_qwen2(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""
    decoder = DecoderConfig.from_hf(config)
    attention = replace(read_attention_config(config, decoder), qkv_bias=True, output_bias=False)
    return build_dense_decoder(
        root, config, decoder, attention, window_by_layer=_read_window_by_layer(config, decoder.num_layers)
    )


def build_qwen3(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Qwen3: Llama with a norm on every query and key head (Qwen3 technical report, 2025)."""
    decoder = DecoderConfig.from_hf(config)
    attention = replace(read_attention_config(config, decoder), qk_norm_eps=decoder.norm_eps)
    return build_dense_decoder(
        root, config, decoder, attention, window_by_layer=_read_window_by_layer(config, decoder.num_layers)
    )


def build_qwen3_moe(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Qwen3-MoE: Qwen3 with a mixture of experts instead of the MLP in all or some layers.

    No weights are loaded. A sliding window in the config is that of every layer.
    """
    decoder = DecoderConfig.from_hf(config)
    attention = replace(
        read_attention_config(config, decoder), qk_norm_eps=decoder.norm_eps, window=_read_window(config)
    )
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"  # checkpoints use either name
    experts_config = RoutedMLPConfig(
        hidden_size=decoder.hidden_size,
        expert_size=config.get_integer("moe_intermediate_size"),
        num_experts=config.get_integer(experts_key),
        top_k=config.get_integer("num_experts_per_tok"),
        renormalise=config.get("norm_topk_prob", False),
    )
    dense_layers = set(config.values.get("mlp_only_layers") or [])
    experts_interval = config.get("decoder_sparse_step", 1)

    def make_mlp(scope: WeightScope, layer: int) -> Mixer:
        mlp_scope = scope.enter_scope("mlp")
        has_experts = layer not in dense_layers and (layer + 1) % experts_interval == 0
        if has_experts:
            return RoutedMLP(mlp_scope, experts_config)
        return GatedMLP(mlp_scope, decoder.hidden_size, config.get_integer("intermediate_size"))

    return build_dense_decoder(root, config, decoder, attention, make_mlp=make_mlp)


def _read_window(config: HfConfig) -> int | None:
    """Read the sliding window of a Qwen config; None: it is not used."""
    return config.get_optional_integer("sliding_window") if config.get("use_sliding_window", False) else None


def _read_window_by_layer(config: HfConfig, num_layers: int) -> list[int | None]:
    """Read each layer's sliding window from a Qwen2 or Qwen3 config."""
    window = _read_window(config)
    if window is None:
        return [None] * num_layers
    full_layers = config.get("max_window_layers", num_layers)
    default_types = ["full_attention" if i < full_layers else "sliding_attention" for i in range(num_layers)]
    window_by_type = {"full_attention": None, "sliding_attention": window}
    return read_layer_types(config, "layer_types", window_by_type, default_types)
