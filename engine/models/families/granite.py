"""Granite 3, dense: Llama's shape with four constants that scale embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, build_dense_decoder, read_attention_config
from engine.models.hf_config import HfConfig
from engine.models.layers import AttentionConfig
from engine.models.weights import WeightScope


def build_granite(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Granite 3."""
    return build_dense_decoder(root, config, *read_scaled_configs(config))


def read_scaled_configs(config: HfConfig) -> tuple[DecoderConfig, AttentionConfig]:
    """Return the configs of decoder and attention, with the four constants by which Granite scales."""
    decoder = replace(
        DecoderConfig.from_hf(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )
    return decoder, replace(read_attention_config(config, decoder), scale=config.get("attention_multiplier", 1.0))
