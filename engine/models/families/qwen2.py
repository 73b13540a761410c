"""Qwen2 and Qwen2.5: Llama's shape with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.families.qwen3 import layer_windows
from engine.models.hf_config import HfConfig
from engine.models.weights import WeightScope


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = DecoderConfig.of(config)
    attention = replace(attention_config(config, decoder), qkv_bias=True)
    return dense_decoder(root, config, decoder, attention, windows=layer_windows(config, decoder.num_layers))
