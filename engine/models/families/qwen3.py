"""Qwen3, dense: Llama's shape with a norm on every query and key head (Qwen3 technical report, 2025)."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.hf_config import HfConfig, ModelError
from engine.models.weights import WeightScope


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = DecoderConfig.of(config)
    bias = config.get("attention_bias", False)
    attention = replace(
        attention_config(config, decoder), qkv_bias=bias, output_bias=bias, qk_norm_eps=decoder.norm_eps
    )
    return dense_decoder(root, config, decoder, attention, windows=layer_windows(config, decoder.num_layers))


def layer_windows(config: HfConfig, num_layers: int) -> list[int | None]:
    """Each layer's sliding window, as Qwen2 and Qwen3 configs say it."""
    window = config.optional_integer("sliding_window") if config.get("use_sliding_window", False) else None
    if window is None:
        return [None] * num_layers
    kinds = config.strings("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", num_layers)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelError(f"{config.where}: layer_types: expected {num_layers} entries, got {len(kinds)}")
    return [window if kind == "sliding_attention" else None for kind in kinds]
