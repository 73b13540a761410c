"""Granite 3, dense: Llama's shape with four constants that scale embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.hf_config import HfConfig
from engine.models.weights import WeightScope


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder = replace(
        DecoderConfig.of(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )
    bias = config.get("attention_bias", False)
    attention = replace(
        attention_config(config, decoder),
        qkv_bias=bias,
        output_bias=bias,
        scale=config.get("attention_multiplier", 1.0),
    )
    return dense_decoder(
        root,
        config,
        decoder,
        attention,
        mlp_bias=config.get("mlp_bias", False),
        residual_scale=config.get("residual_multiplier", 1.0),
    )
