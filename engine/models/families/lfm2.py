"""LFM2, dense: gated short convolutions, and attention with normed heads in some layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder import CausalLM, DecoderConfig, attention_config
from engine.models.hf_config import HfConfig, layer_types
from engine.models.layers import Attention, DecoderBlock, GatedMLP, Mixer, RMSNorm
from engine.models.mixers import ShortConv
from engine.models.weights import WeightScope

ROPE_THETA = 1_000_000.0


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    eps = config.get("norm_eps", 1e-5)
    decoder = replace(DecoderConfig.of(config), norm_eps=eps, tie_embeddings=tied, norm_name="embedding_norm")
    attention = replace(
        attention_config(config, decoder, theta=ROPE_THETA),
        qk_norm_eps=eps,
        output_name="out_proj",
        norm_names=("q_layernorm", "k_layernorm"),
    )
    full = config.values.get("full_attn_idxs") or range(decoder.num_layers)
    default = ["full_attention" if i in full else "conv" for i in range(decoder.num_layers)]
    kinds = layer_types(
        config, "layer_types", {"conv": "conv", "full_attention": "attention"}, default, count=decoder.num_layers
    )
    width, bias, size = config.integer("conv_L_cache"), config.get("conv_bias", False), _mlp_size(config)

    def block(scope: WeightScope, index: int) -> DecoderBlock:
        mixer: Mixer
        if kinds[index] == "attention":
            mixer = Attention(scope.sub("self_attn"), attention)
        else:
            mixer = ShortConv(scope.sub("conv"), decoder.hidden_size, width, bias)
        mlp = GatedMLP(scope.sub("feed_forward"), decoder.hidden_size, size, inputs=("w1", "w3"), output="w2")
        return DecoderBlock(
            mixer_norm=RMSNorm(scope, "operator_norm", decoder.hidden_size, eps),
            mixer=mixer,
            mlp_norm=RMSNorm(scope, "ffn_norm", decoder.hidden_size, eps),
            mlp=mlp,
        )

    return CausalLM(root, "model", decoder, block)


def _mlp_size(config: HfConfig) -> int:
    """The MLP's width; older configs call the number it is derived from `block_ff_dim`."""
    size = config.integer("intermediate_size" if "intermediate_size" in config else "block_ff_dim")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.get("block_multiple_of", 256)
    size = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
