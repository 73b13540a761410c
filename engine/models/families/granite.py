"""Granite 3, dense: Llama's shape with four constants that scale embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config, dense_decoder
from engine.models.hf_config import HfConfig
from engine.models.layers import AttentionConfig
from engine.models.weights import WeightScope


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    decoder, attention, residual_scale = scaled_configs(config)
    return dense_decoder(root, config, decoder, attention, residual_scale=residual_scale)


def scaled_configs(config: HfConfig) -> tuple[DecoderConfig, AttentionConfig, float]:
    """Decoder, attention and the factor of every branch."""
    decoder = replace(
        DecoderConfig.from_hf(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )
    attention = replace(attention_config(config, decoder), scale=config.get("attention_multiplier", 1.0))
    return decoder, attention, config.get("residual_multiplier", 1.0)
