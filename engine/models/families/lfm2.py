"""LFM2, dense: gated short convolutions, and attention with normed heads in some layers."""

from __future__ import annotations

from dataclasses import replace

from engine.cache.spec import ceil_div
from engine.models.decoder import CausalLM, DecoderConfig, MakeMixer, build_alternating_decoder, read_attention_config
from engine.models.hf_config import HfConfig, read_layer_types
from engine.models.layers import Attention, GatedMLP
from engine.models.mixers import ShortConv
from engine.models.weights import WeightScope

DEFAULT_ROPE_THETA = 1_000_000.0


def build_lfm2(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build LFM2, without loading weights: each layer is a gated short convolution or attention, and then an MLP."""
    norm_eps = config.get("norm_eps", 1e-5)
    tie_embeddings = config.get("tie_embedding", config.get("tie_word_embeddings", True))  # early configs, later ones
    decoder = replace(
        DecoderConfig.from_hf(config), norm_eps=norm_eps, tie_embeddings=tie_embeddings, norm_name="embedding_norm"
    )
    attention = replace(
        read_attention_config(config, decoder, theta=DEFAULT_ROPE_THETA),
        qk_norm_eps=norm_eps,
        output_name="out_proj",
        norm_names=("q_layernorm", "k_layernorm"),
    )
    conv_width = config.get_integer("conv_L_cache")
    conv_bias = config.get("conv_bias", False)
    mixer_by_type: dict[str, MakeMixer] = {
        "conv": lambda scope: ShortConv(scope.enter_scope("conv"), decoder.hidden_size, conv_width, conv_bias),
        "full_attention": lambda scope: Attention(scope.enter_scope("self_attn"), attention),
    }
    default_types = _list_default_layer_types(config, decoder.num_layers)
    mixers = read_layer_types(config, "layer_types", mixer_by_type, default_types)
    mlp_size = _compute_mlp_size(config)

    def make_mlp(scope: WeightScope, index: int) -> GatedMLP:
        return GatedMLP(
            scope.enter_scope("feed_forward"), decoder.hidden_size, mlp_size, gate_up_names=("w1", "w3"), down_name="w2"
        )

    return build_alternating_decoder(root, decoder, mixers, make_mlp, norms=("operator_norm", "ffn_norm"))


def _list_default_layer_types(config: HfConfig, num_layers: int) -> list[str]:
    """Return the layer types of a config without `layer_types`. Early configs list the indices of attention layers."""
    attention_layers = config.values.get("full_attn_idxs") or range(num_layers)
    return ["full_attention" if i in attention_layers else "conv" for i in range(num_layers)]


def _compute_mlp_size(config: HfConfig) -> int:
    """Return the MLP's width; older configs derive it from `block_ff_dim`."""
    size = config.get_integer("intermediate_size" if "intermediate_size" in config else "block_ff_dim")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.get("block_multiple_of", 256)
    size = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return ceil_div(size, multiple) * multiple
