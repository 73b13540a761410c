"""Supported architectures, by their names in config.json: which family's builder makes a checkpoint's model."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.decoder import CausalLM
from engine.models.families import bamba, gemma3, granite, lfm2, llama, qwen3_5
from engine.models.hf_config import HfConfig, ModelError
from engine.models.shard import Shard
from engine.models.weights import WeightScope

BUILDER_BY_ARCHITECTURE: dict[str, Callable[[HfConfig, WeightScope], CausalLM]] = {
    "BambaForCausalLM": bamba.build_bamba,
    "Gemma3ForCausalLM": gemma3.build_gemma3,
    "Gemma3ForConditionalGeneration": gemma3.build_gemma3,
    "GraniteForCausalLM": granite.build_granite,
    "GraniteMoeHybridForCausalLM": bamba.build_granite_hybrid,
    "Lfm2ForCausalLM": lfm2.build_lfm2,
    "LlamaForCausalLM": llama.build_llama,
    "MistralForCausalLM": llama.build_mistral,
    "NemotronHForCausalLM": bamba.build_nemotron,
    "Qwen2ForCausalLM": llama.build_qwen2,
    "Qwen3ForCausalLM": llama.build_qwen3,
    "Qwen3_5ForCausalLM": qwen3_5.build_qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5.build_qwen3_5,
    "Qwen3MoeForCausalLM": llama.build_qwen3_moe,
}


def build_model(config: HfConfig, shard: Shard | None = None) -> CausalLM:
    """Build the model that a checkpoint's config.json describes, without its weights.

    `shard`: the part of the model that this process holds under tensor parallelism; None: all of it. Raises ModelError
    if the model is not supported, or cannot be split over so many ranks.
    """
    build = BUILDER_BY_ARCHITECTURE.get(config.architecture)
    if build is None:
        raise ModelError(
            f"{config.source}: architecture {config.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(BUILDER_BY_ARCHITECTURE))}"
        )
    if "quantization_config" in config:
        raise ModelError(f"{config.source}: quantization_config: quantised weights are not supported; expected floats")
    try:
        model = build(config, WeightScope(shard=shard or Shard()))
    except ModelError:
        raise
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # such as of a head_dim of 0.1 or 2**70
        raise ModelError(f"{config.source}: expected the sizes and settings of a model: {error}") from error
    if not model.attention_layers:
        raise ModelError(f"{config.source}: no attention layer; models of recurrent layers only are not supported")
    return model
