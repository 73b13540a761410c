"""Qwen3.5, dense, text: three gated delta nets to one gated attention; norms stored zero-centred, partial rotary.

Of a vision-language checkpoint the text model is served; vision and multi-token-prediction weights are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from engine.models.decoder import CausalLM, DecoderConfig, MakeMixer, build_alternating_decoder, read_attention_config
from engine.models.hf_config import HfConfig, make_layer_types, read_layer_types
from engine.models.layers import Attention, AttentionConfig, ForwardContext, GatedMLP, Linear, shard_attention
from engine.models.mixers import DeltaNetConfig, GatedDeltaNet
from engine.models.shard import Extent
from engine.models.weights import Weight, WeightScope

PARTIAL_ROTARY = 0.25
FULL_ATTENTION_EVERY = 4


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate that is projected beside the queries."""

    def __init__(self, scope: WeightScope, config: AttentionConfig) -> None:
        super().__init__(scope, config, _declare_projection(scope, config))
        self.qkv_width = self.qk_width + self.config.num_kv_heads * config.head_dim

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        projections = self.qkv_projection(x)
        attention = self.attend(projections[:, : self.qkv_width], context)
        return self.output_projection(attention * projections[:, self.qkv_width :].sigmoid())


def _declare_projection(scope: WeightScope, config: AttentionConfig) -> Linear:
    """Declare one stacked projection of a token to its queries, keys, values and gates, in this order.

    In the checkpoint, q_proj has for each head the rows of its query, and then the rows of its gate. So it is read
    twice: once for the queries of all heads, and once for the gates.
    """
    rank_config, _, key_rows = shard_attention(scope.shard, config)
    query_and_gate_rows = scope.shard.split(config.num_heads, "attention heads", 2 * rank_config.head_dim)
    query_row_count = rank_config.num_heads * rank_config.head_dim
    key_start = query_row_count
    value_start = key_start + key_rows.held_size
    gate_start = value_start + key_rows.held_size
    row_count = gate_start + query_row_count

    def select_rows(q_proj: Tensor, part: int) -> Tensor:
        """Return the rows of all queries (`part` 0) or of all gates (1)."""
        rows_by_head = q_proj.view(rank_config.num_heads, 2, rank_config.head_dim, *q_proj.shape[1:])
        return rows_by_head[:, part].flatten(0, 1)

    def declare_stacked(parameter: str, *columns: int) -> Weight:
        q_name = f"q_proj.{parameter}"
        q_shape: tuple[Extent, ...] = (query_and_gate_rows, *columns)
        kv_shape: tuple[Extent, ...] = (key_rows, *columns)
        parts = [
            scope.describe_tensor(q_name, q_shape, (slice(0, key_start),), partial(select_rows, part=0)),
            scope.describe_tensor(f"k_proj.{parameter}", kv_shape, (slice(key_start, value_start),)),
            scope.describe_tensor(f"v_proj.{parameter}", kv_shape, (slice(value_start, gate_start),)),
            scope.describe_tensor(q_name, q_shape, (slice(gate_start, row_count),), partial(select_rows, part=1)),
        ]
        return scope.declare_combined((row_count, *columns), parts)

    weight = declare_stacked("weight", rank_config.hidden_size)
    bias = declare_stacked("bias") if rank_config.qkv_bias else None
    return Linear(weight, bias)


def build_qwen3_5(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Qwen3.5's text model, without loading weights: a layer is a gated delta net or gated attention, and an MLP.

    A gated delta net is a recurrence. One layer in four has attention, unless the config lists the types of the layers.
    """
    tie_embeddings = config.get("tie_word_embeddings", False)
    if "text_config" in config:
        config = config.get_object("text_config")
    config.require_value("hidden_act", "silu")
    config.require_value("attn_output_gate", True)
    decoder = replace(DecoderConfig.from_hf(config, tie_embeddings=tie_embeddings), zero_centred_norm=True)
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

    return build_alternating_decoder(
        root,
        decoder,
        mixers,
        make_mlp,
        ignored_prefixes=("model.visual.", "mtp."),
        renamed_prefixes={"model.language_model.": "model."},
    )


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
