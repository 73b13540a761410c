"""Llama 2 and 3 and what shares their shape; Mistral is Llama with an optional sliding window on every layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.hf_config import HfConfig
from engine.models.weights import WeightScope

MISTRAL_WINDOW = 4096
"""What a Mistral config without the key means; `null` means no window."""


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = DecoderConfig.of(config)
    bias = config.get("attention_bias", False)
    attention = replace(attention_config(config, decoder), qkv_bias=bias, output_bias=bias)
    return dense_decoder(root, config, decoder, attention, mlp_bias=config.get("mlp_bias", False))


def build_mistral(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = DecoderConfig.of(config)
    window = config.optional_integer("sliding_window") if "sliding_window" in config.values else MISTRAL_WINDOW
    return dense_decoder(root, config, decoder, replace(attention_config(config, decoder), window=window))
