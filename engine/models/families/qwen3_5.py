"""Qwen3.5, dense, text: three gated delta nets to one gated attention; norms stored zero-centred, partial rotary.

Of a vision-language checkpoint the text model is served; vision and multi-token-prediction weights are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from engine.models.decoder import CausalLM, DecoderConfig, MakeMixer, alternating_decoder, attention_config
from engine.models.hf_config import HfConfig, layer_types
from engine.models.layers import Attention, AttentionConfig, GatedMLP, Linear, Step, share_heads
from engine.models.mixers import DeltaNetConfig, GatedDeltaNet
from engine.models.shard import Extent
from engine.models.weights import Weight, WeightScope

PARTIAL_ROTARY = 0.25
FULL_ATTENTION_EVERY = 4


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate that is projected beside the queries."""

    def __init__(self, scope: WeightScope, config: AttentionConfig) -> None:
        super().__init__(scope, config, _queries_keys_values_gates(scope, config))
        self.qkv_width = self.qk_width + self.config.num_kv_heads * config.head_dim

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        projected = self.qkv(x)
        attended = self.attend(projected[:, : self.qkv_width], step)
        return self.output(attended * projected[:, self.qkv_width :].sigmoid())


def _queries_keys_values_gates(scope: WeightScope, config: AttentionConfig) -> Linear:
    """q_proj holds, head by head, a query's rows and then its gate's; here all queries come first, all gates last."""
    c, _, key_rows = share_heads(scope.shard, config)
    pairs = scope.shard.split(config.num_heads, "attention heads", 2 * c.head_dim)
    queries, keys = c.num_heads * c.head_dim, key_rows.size
    gates = queries + 2 * keys

    def half(which: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor.view(c.num_heads, 2, c.head_dim, *tensor.shape[1:])[:, which].flatten(0, 1)

    def stacked(kind: str, *columns: int) -> Weight:
        q_name = f"q_proj.{kind}"
        q_shape: tuple[Extent, ...] = (pairs, *columns)
        kv_shape: tuple[Extent, ...] = (key_rows, *columns)
        parts = [
            scope.part(q_name, q_shape, (slice(0, queries),), half(0)),
            scope.part(f"k_proj.{kind}", kv_shape, (slice(queries, queries + keys),)),
            scope.part(f"v_proj.{kind}", kv_shape, (slice(queries + keys, gates),)),
            scope.part(q_name, q_shape, (slice(gates, gates + queries),), half(1)),
        ]
        return scope.assembled((gates + queries, *columns), parts)

    return Linear.of(stacked("weight", c.hidden_size), stacked("bias") if c.qkv_bias else None)


def build(config: HfConfig, root: WeightScope) -> CausalLM:
    tied = config.get("tie_word_embeddings", False)
    if "text_config" in config:
        config = config.sub("text_config")
    config.expect("hidden_act", "silu", "silu")
    config.expect("attn_output_gate", True, True)
    decoder = replace(DecoderConfig.of(config, tie_embeddings=tied), zero_centred_norm=True)
    attention = replace(attention_config(config, decoder, partial=PARTIAL_ROTARY), qk_norm_eps=decoder.norm_eps)
    delta = DeltaNetConfig(
        hidden_size=decoder.hidden_size,
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_width=config.integer("linear_conv_kernel_dim"),
        norm_eps=decoder.norm_eps,
    )
    makers: dict[str, MakeMixer] = {
        "linear_attention": lambda scope: GatedDeltaNet(scope.sub("linear_attn"), delta),
        "full_attention": lambda scope: GatedAttention(scope.sub("self_attn"), attention),
    }
    every, size = config.get("full_attention_interval", FULL_ATTENTION_EVERY), config.integer("intermediate_size")
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(decoder.num_layers)]

    def mlp(scope: WeightScope) -> GatedMLP:
        return GatedMLP(scope.sub("mlp"), decoder.hidden_size, size)

    return alternating_decoder(
        root,
        decoder,
        layer_types(config, "layer_types", makers, default),
        [mlp] * decoder.num_layers,
        ignored=("model.visual.", "mtp."),
        renamed={"model.language_model.": "model."},
    )
