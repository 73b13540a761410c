"""Qwen3.5, dense, text: three gated delta nets to one gated attention; norms stored zero-centred, partial rotary.

Of a vision-language checkpoint the text model is served; vision and multi-token-prediction weights are ignored.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.models.decoder import CausalLM, DecoderConfig, MakeMixer, build_alternating_decoder, read_attention_config
from engine.models.hf_config import HfConfig, make_layer_types, read_layer_types
from engine.models.layers import Attention, AttentionConfig, ForwardContext, GatedMLP, Linear
from engine.models.mixers import DeltaNetConfig, GatedDeltaNet
from engine.models.shard import DimShard
from engine.models.weights import WeightScope

PARTIAL_ROTARY = 0.25
FULL_ATTENTION_EVERY = 4


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate that is projected beside the queries."""

    def _declare_projection(
        self, scope: WeightScope, config: AttentionConfig, query_rows: DimShard, key_rows: DimShard
    ) -> Linear:
        """Declare the projections. q_proj has for each head the rows of its query, and then the rows of its gate."""
        query_and_gate_rows = scope.shard.split(config.num_heads, "attention heads", 2 * config.head_dim)
        return super()._declare_projection(scope, config, query_and_gate_rows, key_rows)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        config = self.config
        heads = self.qkv_projection(x).view(x.shape[0], -1, config.head_dim)
        queries_and_gates, keys_and_values = heads[:, : 2 * config.num_heads], heads[:, 2 * config.num_heads :]
        queries, gates = queries_and_gates[:, ::2], queries_and_gates[:, 1::2]
        attention = self.attend(torch.cat((queries, keys_and_values), 1).flatten(1), context)
        return self.output_projection(attention * gates.sigmoid().flatten(1))


def build_qwen3_5(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Qwen3.5's text model, without loading weights: a layer is a gated delta net or gated attention, and an MLP.

    A gated delta net is a recurrence. One layer in four has attention, unless the config lists the types of the layers.
    """
    tie_embeddings = config.get("tie_word_embeddings", False)
    if "text_config" in config:
        config = config.get_object("text_config")
    config.require_value("hidden_act", "silu")
    config.require_value("attn_output_gate", True)
    decoder = replace(
        DecoderConfig.from_hf(config, tie_embeddings=tie_embeddings),
        zero_centred_norm=True,
        ignored_prefixes=("model.visual.", "mtp."),
        renamed_prefixes={"model.language_model.": "model."},
    )
    attention = replace(
        read_attention_config(config, decoder, rotary_fraction=PARTIAL_ROTARY), qk_norm_eps=decoder.norm_eps
    )
    delta_net_config = _read_delta_net_config(config, decoder)
    mixer_by_type: dict[str, MakeMixer] = {
        "linear_attention": lambda scope: GatedDeltaNet(scope.enter_scope("linear_attn"), delta_net_config),
        "full_attention": lambda scope: GatedAttention(scope.enter_scope("self_attn"), attention),
    }
    full_attention_interval = config.get("full_attention_interval", FULL_ATTENTION_EVERY)
    default_types = make_layer_types(decoder.num_layers, full_attention_interval, "linear_attention")
    mixers = read_layer_types(config, "layer_types", mixer_by_type, default_types)
    intermediate_size = config.get_integer("intermediate_size")

    def make_mlp(scope: WeightScope, index: int) -> GatedMLP:
        return GatedMLP(scope.enter_scope("mlp"), decoder.hidden_size, intermediate_size)

    return build_alternating_decoder(root, decoder, mixers, make_mlp)


def _read_delta_net_config(config: HfConfig, decoder: DecoderConfig) -> DeltaNetConfig:
    """Read the sizes of the gated delta nets. Raises ModelError."""
    return DeltaNetConfig(
        hidden_size=decoder.hidden_size,
        num_key_heads=config.get_integer("linear_num_key_heads"),
        num_value_heads=config.get_integer("linear_num_value_heads"),
        key_dim=config.get_integer("linear_key_head_dim"),
        value_dim=config.get_integer("linear_value_head_dim"),
        conv_width=config.get_integer("linear_conv_kernel_dim"),
        norm_eps=decoder.norm_eps,
    )
