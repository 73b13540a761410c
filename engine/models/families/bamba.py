"""Bamba, Granite-4-H (dense) and Nemotron-H: Mamba-2 layers, and attention in a few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from engine.models.decoder import CausalLM, DecoderConfig, attention_config
from engine.models.hf_config import HfConfig, ModelError, layer_types
from engine.models.layers import Attention, AttentionConfig, DecoderBlock, GatedMLP, Linear, Mixer, RMSNorm, Step
from engine.models.mixers import Mamba2, Mamba2Config, dt_limits
from engine.models.weights import WeightScope

BAMBA_PARTIAL_ROTARY = 0.5
KINDS = {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "attention", "attention": "attention"}
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Nemotron-H's `hybrid_override_pattern`, a letter a layer."""


def build_bamba(config: HfConfig, root: WeightScope) -> CausalLM:
    config.expect("hidden_act", "silu", "silu")
    decoder = replace(DecoderConfig.of(config, norm_eps=1e-5), norm_name="final_layernorm")
    bias = config.get("attention_bias", False)
    attention = replace(
        attention_config(config, decoder, partial=BAMBA_PARTIAL_ROTARY), qkv_bias=bias, output_bias=bias
    )
    chosen = config.values.get("attn_layer_indices") or []
    kinds = ["attention" if i in chosen else "mamba" for i in range(decoder.num_layers)]
    intermediate, mlp_bias = config.integer("intermediate_size"), config.get("mlp_bias", False)

    def mlp(scope: WeightScope) -> Mixer:
        return GatedMLP(scope.sub("feed_forward"), decoder.hidden_size, intermediate, mlp_bias)

    block = _two_branch_block(decoder, attention, _mamba(config, decoder), kinds, "pre_ff_layernorm", mlp, 1.0)
    return CausalLM(root, "model", decoder, block)


def build_granite(config: HfConfig, root: WeightScope) -> CausalLM:
    """Granite-4-H without routed experts; its four multipliers are those of Granite."""
    config.expect("hidden_act", "silu", "silu")
    config.expect("num_local_experts", 0, 0)
    plain = DecoderConfig.of(config)
    decoder = replace(
        plain,
        embedding_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )
    bias = config.get("attention_bias", False)
    attention = attention_config(config, decoder)
    attention = replace(
        attention,
        qkv_bias=bias,
        output_bias=bias,
        scale=config.get("attention_multiplier", 1.0),
        rope=attention.rope if config.get("position_embedding_type", "") == "rope" else None,
    )
    kinds = layer_types(config, "layer_types", KINDS, ["mamba"] * decoder.num_layers, count=decoder.num_layers)
    intermediate = config.integer("shared_intermediate_size")

    def mlp(scope: WeightScope) -> Mixer:
        return GatedMLP(
            scope.sub("shared_mlp"),
            decoder.hidden_size,
            intermediate,
            inputs=("input_linear",),
            output="output_linear",
        )

    scale = config.get("residual_multiplier", 1.0)
    mamba = _mamba(config, decoder)
    block = _two_branch_block(decoder, attention, mamba, kinds, "post_attention_layernorm", mlp, scale)
    return CausalLM(root, "model", decoder, block)


def _mamba(config: HfConfig, decoder: DecoderConfig) -> Mamba2Config:
    """The mixer under Bamba's and Granite's names."""
    mamba = Mamba2Config(
        hidden_size=decoder.hidden_size,
        heads=config.integer("mamba_n_heads"),
        head_dim=config.integer("mamba_d_head"),
        groups=config.integer("mamba_n_groups"),
        state_dim=config.integer("mamba_d_state"),
        conv_width=config.integer("mamba_d_conv"),
        norm_eps=decoder.norm_eps,
        conv_bias=config.get("mamba_conv_bias", True),
        proj_bias=config.get("mamba_proj_bias", False),
        dt_limits=dt_limits(config),
    )
    inner = int(config.get("mamba_expand", 2.0) * decoder.hidden_size)
    if mamba.inner_size != inner:
        raise ModelError(f"{config.where}: mamba_n_heads * mamba_d_head: expected {inner}, got {mamba.inner_size}")
    return mamba


def _two_branch_block(
    decoder: DecoderConfig,
    attention: AttentionConfig,
    mamba: Mamba2Config,
    kinds: list[str],
    mlp_norm: str,
    mlp: Callable[[WeightScope], Mixer],
    residual_scale: float,
) -> Callable[[WeightScope, int], DecoderBlock]:
    """Blocks of a mixer and an MLP."""

    def block(scope: WeightScope, index: int) -> DecoderBlock:
        mixer: Mixer
        if kinds[index] == "attention":
            mixer = Attention(scope.sub("self_attn"), attention)
        else:
            mixer = Mamba2(scope.sub("mamba"), mamba)
        return DecoderBlock(
            mixer_norm=RMSNorm(scope, "input_layernorm", decoder.hidden_size, decoder.norm_eps),
            mixer=mixer,
            mlp_norm=RMSNorm(scope, mlp_norm, decoder.hidden_size, decoder.norm_eps),
            mlp=mlp(scope),
            residual_scale=residual_scale,
        )

    return block


class SquaredReluMLP:
    """down(relu(up(x)) ** 2)."""

    def __init__(self, scope: WeightScope, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        inner = scope.shard.split(intermediate_size, "MLP channels")
        self.up = Linear(scope, {"up_proj": inner}, hidden_size, bias)
        self.down = Linear(scope, {"down_proj": hidden_size}, inner, bias)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.down(step.ops.relu_squared(self.up(x)))


def build_nemotron(config: HfConfig, root: WeightScope) -> CausalLM:
    """Nemotron-H: every layer is one branch, a Mamba-2 mixer, attention without positions, or an MLP."""
    config.expect("mlp_hidden_act", "relu2", "relu2")
    config.expect("mamba_hidden_act", "silu", "silu")
    pattern = config.get("hybrid_override_pattern", "")
    if unknown := set(pattern) - set(PATTERN):
        raise ModelError(f"{config.where}: hybrid_override_pattern: layer kinds {sorted(unknown)} are not supported")
    default = [PATTERN[letter] for letter in pattern]
    kinds = layer_types(config, "layers_block_type", KINDS | {"mlp": "mlp"}, default, count=None)
    decoder = DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=len(kinds),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        max_positions=config.integer("max_position_embeddings"),
        tie_embeddings=False,  # never, whatever the config says
        embedding_name="embeddings",
        norm_name="norm_f",
    )
    if "attention_head_dim" in config:  # the name before transformers 5
        config = HfConfig({**config.values, "head_dim": config.integer("attention_head_dim")}, config.where)
    attention = replace(attention_config(config, decoder), rope=None)
    use_bias = config.get("use_bias", False)
    mamba = Mamba2Config(
        hidden_size=decoder.hidden_size,
        heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        groups=config.integer("n_groups"),
        state_dim=config.integer("ssm_state_size"),
        conv_width=config.integer("conv_kernel"),
        norm_eps=decoder.norm_eps,
        conv_bias=config.get("use_conv_bias", True),
        proj_bias=use_bias,
        # As transformers has it; `time_step_limit` is not read for this family.
        dt_limits=(config.get("time_step_min", 0.001), float("inf")),
    )

    def block(scope: WeightScope, index: int) -> DecoderBlock:
        inner = scope.sub("mixer")
        mixer: Mixer
        if kinds[index] == "attention":
            mixer = Attention(inner, attention)
        elif kinds[index] == "mamba":
            mixer = Mamba2(inner, mamba)
        else:
            size, bias = config.integer("intermediate_size"), config.get("mlp_bias", False)
            mixer = SquaredReluMLP(inner, decoder.hidden_size, size, bias)
        return DecoderBlock(
            mixer_norm=RMSNorm(scope, "norm", decoder.hidden_size, decoder.norm_eps),
            mixer=mixer,
        )

    return CausalLM(root, "backbone", decoder, block, ignored=("mtp.",), renamed={"model.": "backbone."})
