"""Bamba, Granite-4-H (dense) and Nemotron-H: Mamba-2 layers, and attention in a few of them."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from engine.models.decoder import CausalLM, DecoderConfig, MakeMixer, build_alternating_decoder, read_attention_config
from engine.models.families import granite
from engine.models.hf_config import HfConfig, ModelError, read_layer_types
from engine.models.layers import Attention, AttentionConfig, Branch, ForwardContext, GatedMLP, Linear, RMSNorm
from engine.models.mixers import Mamba2, Mamba2Config, read_dt_limits
from engine.models.weights import WeightScope

BAMBA_PARTIAL_ROTARY = 0.5
LAYER_TYPE_BY_LETTER = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Letter of Nemotron-H's `hybrid_override_pattern` -> type of the layer."""


def build_bamba(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Bamba, without loading weights: each layer is Mamba-2 (a recurrence) or attention, and then an MLP.

    The config lists the attention layers. Their rotary embedding covers half of each head.
    """
    config.require_value("hidden_act", "silu")
    decoder = replace(DecoderConfig.from_hf(config, norm_eps=1e-5), norm_name="final_layernorm")
    attention = read_attention_config(config, decoder, rotary_fraction=BAMBA_PARTIAL_ROTARY)
    mixer_by_type = _get_mixer_by_type(config, decoder, attention)
    attention_layers = config.values.get("attn_layer_indices") or []
    mixers = [mixer_by_type["attention" if i in attention_layers else "mamba"] for i in range(decoder.num_layers)]
    mlp_size = config.get_integer("intermediate_size")
    has_bias = config.get("mlp_bias", False)

    def make_mlp(scope: WeightScope, index: int) -> GatedMLP:
        return GatedMLP(scope.enter_scope("feed_forward"), decoder.hidden_size, mlp_size, has_bias)

    return build_alternating_decoder(root, decoder, mixers, make_mlp, norms=("input_layernorm", "pre_ff_layernorm"))


def build_granite_hybrid(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Granite-4-H, without loading weights: each layer is Mamba-2 (a recurrence) or attention, then an MLP."""
    config.require_value("hidden_act", "silu")
    config.require_value("num_local_experts", 0)
    decoder, attention = granite.read_scaled_configs(config)
    if config.get("position_embedding_type", "") != "rope":
        attention = replace(attention, rope=None)
    mixer_by_type = _get_mixer_by_type(config, decoder, attention)
    mixers = read_layer_types(config, "layer_types", mixer_by_type, ["mamba"] * decoder.num_layers)
    mlp_size = config.get_integer("shared_intermediate_size")

    def make_mlp(scope: WeightScope, index: int) -> GatedMLP:
        mlp_scope = scope.enter_scope("shared_mlp")
        return GatedMLP(
            mlp_scope, decoder.hidden_size, mlp_size, gate_up_names=("input_linear",), down_name="output_linear"
        )

    return build_alternating_decoder(root, decoder, mixers, make_mlp)


def _get_mixer_by_type(config: HfConfig, decoder: DecoderConfig, attention: AttentionConfig) -> dict[str, MakeMixer]:
    """Return name of a layer type in a config.json -> function that makes a mixer of this type.

    A mixer is the part of a layer in which tokens see each other: attention or a recurrence, here Mamba-2.
    """
    mamba_config = _read_mamba_config(config, decoder)

    def make_attention(scope: WeightScope) -> Attention:
        return Attention(scope.enter_scope("self_attn"), attention)

    def make_mamba(scope: WeightScope) -> Mamba2:
        return Mamba2(scope.enter_scope("mamba"), mamba_config)

    return {
        "linear_attention": make_mamba,
        "mamba": make_mamba,
        "full_attention": make_attention,
        "attention": make_attention,
    }


def _read_mamba_config(config: HfConfig, decoder: DecoderConfig) -> Mamba2Config:
    """Read the sizes of Mamba-2 layers from a config.json of Bamba or Granite. Raises ModelError."""
    mamba_config = Mamba2Config(
        hidden_size=decoder.hidden_size,
        num_heads=config.get_integer("mamba_n_heads"),
        head_dim=config.get_integer("mamba_d_head"),
        num_groups=config.get_integer("mamba_n_groups"),
        state_dim=config.get_integer("mamba_d_state"),
        conv_width=config.get_integer("mamba_d_conv"),
        norm_eps=decoder.norm_eps,
        conv_bias=config.get("mamba_conv_bias", True),
        proj_bias=config.get("mamba_proj_bias", False),
        dt_limits=read_dt_limits(config),
    )
    expected_size = int(config.get("mamba_expand", 2.0) * decoder.hidden_size)
    if mamba_config.inner_size != expected_size:
        raise ModelError(
            f"{config.source}: mamba_n_heads * mamba_d_head: expected {expected_size}, got {mamba_config.inner_size}"
        )
    return mamba_config


class SquaredReluMLP:
    """MLP without a gate: down(relu(up(x)) ** 2)."""

    def __init__(self, scope: WeightScope, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        inner = scope.shard.split(intermediate_size, "MLP channels")
        self.up = Linear.declare(scope, {"up_proj": inner}, hidden_size, bias)
        self.down = Linear.declare(scope, {"down_proj": hidden_size}, inner, bias)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


def build_nemotron(config: HfConfig, root: WeightScope) -> CausalLM:
    """Build Nemotron-H, without loading weights: each layer is Mamba-2 (a recurrence), attention, or an MLP."""
    config.require_value("mlp_hidden_act", "relu2")
    config.require_value("mamba_hidden_act", "silu")
    layer_types = _read_nemotron_layer_types(config)
    decoder = DecoderConfig(
        vocab_size=config.get_integer("vocab_size"),
        hidden_size=config.get_integer("hidden_size"),
        num_layers=len(layer_types),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        max_positions=config.get_integer("max_position_embeddings"),
        tie_embeddings=False,  # as in transformers, whatever the config says
        prefix="backbone",
        embedding_name="embeddings",
        norm_name="norm_f",
        ignored_prefixes=("mtp.",),
        renamed_prefixes={"model.": "backbone."},
    )
    if "attention_head_dim" in config:  # the name before transformers 5
        config = HfConfig({**config.values, "head_dim": config.get_integer("attention_head_dim")}, config.source)
    attention = replace(read_attention_config(config, decoder), rope=None)
    mamba = _read_nemotron_mamba_config(config, decoder)

    def make_mlp(scope: WeightScope) -> SquaredReluMLP:
        has_bias = config.get("mlp_bias", False)
        return SquaredReluMLP(scope, decoder.hidden_size, config.get_integer("intermediate_size"), has_bias)

    mixer_by_type: dict[str, MakeMixer] = {
        "mamba": lambda scope: Mamba2(scope, mamba),
        "attention": lambda scope: Attention(scope, attention),
        "mlp": make_mlp,
    }

    def make_block(scope: WeightScope, index: int) -> list[Branch]:
        norm = RMSNorm(scope, "norm", decoder.hidden_size, decoder.norm_eps)
        make_mixer = mixer_by_type[layer_types[index]]
        return [Branch(norm, make_mixer(scope.enter_scope("mixer")))]

    return CausalLM(root, decoder, make_block)


def _read_nemotron_layer_types(config: HfConfig) -> list[str]:
    """Read the type of each layer of Nemotron-H: "mamba", "attention" or "mlp". Raises ModelError for other types.

    The config lists them by name (`layers_block_type`), or by one letter each, as in "M-M*-".
    """
    pattern = config.get("hybrid_override_pattern", "")
    unknown_letters = set(pattern) - set(LAYER_TYPE_BY_LETTER)
    if unknown_letters:
        raise ModelError(
            f"{config.source}: hybrid_override_pattern: layer kinds {sorted(unknown_letters)} are not supported"
        )
    types_of_pattern = [LAYER_TYPE_BY_LETTER[letter] for letter in pattern]
    type_by_name = {layer_type: layer_type for layer_type in LAYER_TYPE_BY_LETTER.values()}
    type_by_name |= {"linear_attention": "mamba", "full_attention": "attention"}
    return read_layer_types(config, "layers_block_type", type_by_name, types_of_pattern)


def _read_nemotron_mamba_config(config: HfConfig, decoder: DecoderConfig) -> Mamba2Config:
    """Read the sizes of Mamba-2 layers from a config.json of Nemotron-H. Raises ModelError."""
    return Mamba2Config(
        hidden_size=decoder.hidden_size,
        num_heads=config.get_integer("mamba_num_heads"),
        head_dim=config.get_integer("mamba_head_dim"),
        num_groups=config.get_integer("n_groups"),
        state_dim=config.get_integer("ssm_state_size"),
        conv_width=config.get_integer("conv_kernel"),
        norm_eps=decoder.norm_eps,
        conv_bias=config.get("use_conv_bias", True),
        proj_bias=config.get("use_bias", False),
        # as in transformers, which ignores `time_step_limit` for this family
        dt_limits=(config.get("time_step_min", 0.001), float("inf")),
    )
