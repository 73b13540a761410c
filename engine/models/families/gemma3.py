"""Gemma 3, text: sliding-window layers with one full-attention layer in six, each kind with its own rotary base.

Norms are zero-centred and stand on both sides of each branch; embeddings are scaled by sqrt(hidden_size). Of a
vision-language checkpoint the text model is served; vision weights are ignored.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, read_attention_config
from engine.models.hf_config import HfConfig, ModelError, make_layer_types, read_layer_types
from engine.models.layers import Attention, AttentionConfig, Branch, GatedMLP, RMSNorm
from engine.models.rope import RopeConfig
from engine.models.weights import WeightScope

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
FULL_ATTENTION_EVERY = 6
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
DEFAULT_BY_KEY = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Values of keys that published configs leave out."""


def build_gemma3(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Gemma 3's text model: five layers with a sliding window, then one with full attention, and so on.

    No weights are loaded. The config may describe a vision model, too, which is ignored.
    """
    config = _read_text_config(config)
    decoder = replace(
        DecoderConfig.from_hf(config, tie_embeddings=True),
        zero_centred_norm=True,
        embedding_scale=math.sqrt(config.get_integer("hidden_size")),
        ignored_prefixes=VISION_PREFIXES,
        renamed_prefixes=TEXT_PREFIXES,
    )
    full_attention_interval = config.get("sliding_window_pattern", FULL_ATTENTION_EVERY)
    default_types = make_layer_types(decoder.num_layers, full_attention_interval, "sliding_attention")
    attention_by_type = _read_attention_configs(config, decoder)
    attention_by_layer = read_layer_types(config, "layer_types", attention_by_type, default_types)
    intermediate_size = config.get_integer("intermediate_size")

    def make_block(scope: WeightScope, index: int) -> list[Branch]:
        return _build_block(scope, decoder, attention_by_layer[index], intermediate_size)

    return CausalLM(root, decoder, make_block)


def _read_text_config(config: HfConfig) -> HfConfig:
    """Return the text model's config, with published configs' defaults. Raises ModelError for unsupported settings."""
    if "text_config" in config:
        config = config.get_object("text_config")
    config = HfConfig(DEFAULT_BY_KEY | dict(config.values), config.source)
    config.require_value("hidden_activation", "gelu_pytorch_tanh")
    config.require_value("use_bidirectional_attention", False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            raise ModelError(f"{config.source}: {key}: {config.values[key]!r} is not supported; expected null")
    return config


def _read_attention_configs(config: HfConfig, decoder: DecoderConfig) -> dict[str, AttentionConfig]:
    """Return the attention config of each layer type. They differ in the window and the rotary base."""
    attention = replace(
        read_attention_config(config, decoder),
        qk_norm_eps=decoder.norm_eps,
        scale=config.get("query_pre_attn_scalar", 256.0) ** -0.5,
    )
    window_by_type = {"sliding_attention": config.get_integer("sliding_window"), "full_attention": None}
    return {
        layer_type: replace(attention, rope=_make_rope_config(config, attention.head_dim, layer_type), window=window)
        for layer_type, window in window_by_type.items()
    }


def _make_rope_config(config: HfConfig, head_dim: int, layer_type: str) -> RopeConfig:
    """Make the rotary config of a layer type.

    In transformers 5 each type has its own settings. In older configs only the full-attention layers have scaling.
    """
    if "rope_parameters" in config:
        theta = GLOBAL_THETA if layer_type == "full_attention" else LOCAL_THETA
        return RopeConfig.from_hf(config, head_dim, theta=theta, layer_type=layer_type)
    if layer_type == "full_attention":
        return RopeConfig.from_hf(config, head_dim, theta=GLOBAL_THETA)
    return RopeConfig(head_dim, config.get("rope_local_base_freq", LOCAL_THETA), source=config.source)


def _build_block(scope: WeightScope, decoder: DecoderConfig, attention: AttentionConfig, size: int) -> list[Branch]:
    """Build a block with norms before and after both branches. `size`: width of the MLP."""

    def make_norm(name: str) -> RMSNorm:
        return RMSNorm(scope, name, decoder.hidden_size, decoder.norm_eps, zero_centred=True)

    mixer = Attention(scope.enter_scope("self_attn"), attention)
    mlp = GatedMLP(scope.enter_scope("mlp"), decoder.hidden_size, size, is_gelu=True)
    return [
        Branch(make_norm("input_layernorm"), mixer, make_norm("post_attention_layernorm")),
        Branch(make_norm("pre_feedforward_layernorm"), mlp, make_norm("post_feedforward_layernorm")),
    ]
