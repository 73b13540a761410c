"""Write seeded random checkpoints in Hugging Face's layout.

The files are those of real checkpoints: config.json, safetensors under HF's names, tokenizer.json, a chat template,
generation_config.json. transformers is imported only to write one. A tensor's values depend only on the seed, the
tensor's name and its shape.

The weights make a random model useful for tests: greedy output varies and depends on the whole context, norm weights
and biases are not the identity, and activations stay near 1, so that fp32 implementations agree closely.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.tiny.tokenizer import CHAT_TEMPLATE, build_cached, write_tokenizer

if TYPE_CHECKING:
    import torch

_RECIPE_VERSION = 2
"""Part of the cache key. Raise it when a recipe would make different bytes."""
_LOGIT_STD = 2.5
"""Standard deviation of the logits. The likeliest token is clear, but sampling still varies."""
_GAIN_BY_PATTERN = (
    (re.compile(r"self_attn\.(o_proj|out_proj)\.weight$"), 5.0),
    (re.compile(r"(o_proj|down_proj|out_proj|output_linear|w2)(\.weight)?$"), 2.0),
    (re.compile(r"q_proj\.weight$"), 2.0),
)
"""(Pattern of a weight's name, factor of its values). Layers outweigh the token's own embedding, and attention most.

Without these factors a network with tied embeddings answers every token with the same token, or soon repeats itself.
"""

_NORM_BIASES: dict[str, tuple[tuple[str, float], ...]] = {
    "qwen3": (("q_norm", 1.0),),
    "qwen3_moe": (("q_norm", 1.0),),
    "qwen3_5": (("q_norm", 1.0),),
    # A norm after a branch sets the branch's scale, whatever the branch's last matrix does.
    "gemma3_text": (("q_norm", 3.0), ("post_attention", 5.0), ("post_feedforward", 4.0)),
}
"""Family -> (part of a norm weight's name, value added to the weight), where a norm would undo a matrix's factor."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a small random model for tests and demos: its family, its sizes and the seed of its weights.

    Equal settings give equal files. Sizes are fields of the model's config.json.
    """

    family: str = "qwen3"
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    vocab_size: int = 2048
    max_position: int = 40960
    """Most tokens of a prompt and its answer: enough for the prompts of coding agents."""
    dtype: str = "float32"
    seed: int = 0
    tie_embeddings: bool = True
    max_shard_size: str = "1000GB"
    """Largest size of a weights file. The default writes one file, a smaller size several."""


PRESETS: dict[str, Recipe] = {
    "tiny": Recipe(),
    # 0.5 s to prefill 2,500 tokens with transformers on one EPYC core with AVX-512 bf16.
    "demo": Recipe(
        hidden_size=512, layers=4, heads=8, kv_heads=4, head_dim=64, intermediate_size=1536, vocab_size=4096,
        max_position=16384, dtype="bfloat16",
    ),
    "0.4m": Recipe(
        family="llama", hidden_size=96, layers=3, heads=4, kv_heads=2, head_dim=32, intermediate_size=160,
        vocab_size=2048, max_position=4096, dtype="bfloat16",
    ),
    "0.6b-shape": Recipe(
        hidden_size=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936,
        max_position=40960, dtype="bfloat16",
    ),
}  # fmt: skip


def _make_dense_config(recipe: Recipe) -> dict[str, Any]:
    """Return the config fields of a plain decoder, with transformers' names."""
    return {
        "vocab_size": recipe.vocab_size, "hidden_size": recipe.hidden_size, "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads, "num_key_value_heads": recipe.kv_heads, "head_dim": recipe.head_dim,
        "intermediate_size": recipe.intermediate_size, "max_position_embeddings": recipe.max_position,
        "tie_word_embeddings": recipe.tie_embeddings,
    }  # fmt: skip


def _list_attention_layers(recipe: Recipe) -> list[int]:
    """Return the indices of the layers with full attention: every second layer, and always the last one."""
    return sorted({*range(1, recipe.layers, 2), recipe.layers - 1})


def _list_layer_types(recipe: Recipe, other: str) -> list[str]:
    """Return the type of each layer: "full_attention", or `other`."""
    attention = _list_attention_layers(recipe)
    return ["full_attention" if index in attention else other for index in range(recipe.layers)]


def _make_mamba_config(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of Mamba-2: 2 x hidden channels in heads of head_dim, state 16."""
    return {
        "mamba_n_heads": 2 * recipe.hidden_size // recipe.head_dim, "mamba_d_head": recipe.head_dim,
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
    }  # fmt: skip


def _make_nemotron_config(recipe: Recipe) -> dict[str, Any]:
    """Return the config of a model whose layers are each a state space, an MLP or attention, in turn."""
    pattern = ("linear_attention", "mlp", "full_attention", "mlp")
    config = _make_dense_config(recipe)
    del config["num_hidden_layers"]
    return config | {
        "layers_block_type": [pattern[index % 4] for index in range(recipe.layers)],
        "mamba_num_heads": 2 * recipe.hidden_size // recipe.head_dim, "mamba_head_dim": recipe.head_dim,
        "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 16, "expand": 2,
    }  # fmt: skip


FAMILIES: dict[str, tuple[str, Callable[[Recipe], dict[str, Any]]]] = {
    # By family: its model_type in transformers, and the function that makes its config fields from a recipe.
    "qwen3": ("qwen3", _make_dense_config),
    "qwen2": ("qwen2", _make_dense_config),
    "llama": ("llama", _make_dense_config),
    "granite": ("granite", lambda r: _make_dense_config(r) | {
        "embedding_multiplier": 0.5, "logits_scaling": 1.5, "residual_multiplier": 1.3, "attention_multiplier": 0.4}),
    "mistral": ("mistral", lambda r: _make_dense_config(r) | {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", lambda r: _make_dense_config(r) | {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": r.intermediate_size // 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3_5": ("qwen3_5_text", lambda r: _make_dense_config(r) | {
        "layer_types": _list_layer_types(r, "linear_attention"), "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": r.head_dim, "linear_value_head_dim": r.head_dim,
        "linear_num_key_heads": r.kv_heads, "linear_num_value_heads": r.heads}),
    "granitemoehybrid": ("granitemoehybrid", lambda r: _make_dense_config(r) | _make_mamba_config(r) | {
        "layer_types": _list_layer_types(r, "linear_attention"), "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": r.intermediate_size, "embedding_multiplier": 2.0, "logits_scaling": 1.5,
        "residual_multiplier": 0.7, "attention_multiplier": 1.0 / r.head_dim, "position_embedding_type": "nope"}),
    "bamba": ("bamba", lambda r: _make_dense_config(r) | _make_mamba_config(r) | {
        "attn_layer_indices": _list_attention_layers(r)}),
    "nemotron_h": ("nemotron_h", _make_nemotron_config),
    "lfm2": ("lfm2", lambda r: _make_dense_config(r) | {
        "layer_types": _list_layer_types(r, "conv"), "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}),
    "gemma3_text": ("gemma3_text", lambda r: _make_dense_config(r) | {
        "layer_types": _list_layer_types(r, "sliding_attention"), "sliding_window": 32,
        "query_pre_attn_scalar": r.head_dim}),
}  # fmt: skip


def make_model(path: str | Path, recipe: Recipe) -> Path:
    """Write a random model as a Hugging Face checkpoint into the folder `path`, and return the folder.

    The files are a tokenizer, config.json, weights and generation_config.json. Raises ValueError for settings that the
    model's family cannot have, or a folder that is not empty.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: expected an empty or absent folder")
    if recipe.family not in FAMILIES:
        raise ValueError(f"family: got {recipe.family!r}, expected one of {', '.join(FAMILIES)}")
    for name in ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name}: got {getattr(recipe, name)}, expected at least 1")
    if recipe.heads % recipe.kv_heads:
        raise ValueError(f"kv_heads: got {recipe.kv_heads}, expected a divisor of heads ({recipe.heads})")
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, recipe.vocab_size, recipe.max_position)
    _write_weights(folder, recipe, ids)
    eos_ids = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation_config = {"do_sample": True, "eos_token_id": eos_ids, "pad_token_id": eos_ids[1], "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2), encoding="utf-8")
    return folder


def _write_weights(folder: Path, recipe: Recipe, special_ids: dict[str, int]) -> None:
    """Write a recipe's config.json and its pseudo-random weights to a folder."""
    import torch  # imported here, as transformers is, because both load slowly
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    model_type, make_config = FAMILIES[recipe.family]
    tokens = {"eos_token_id": special_ids["<|im_end|>"], "pad_token_id": special_ids["<|endoftext|>"]}
    config = AutoConfig.for_model(model_type, **make_config(recipe), bos_token_id=None, **tokens)
    with torch.random.fork_rng(devices=[]):  # some families draw their decay rates at construction
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill_parameter(name, parameter, recipe)
    model = model.to(getattr(torch, recipe.dtype))
    model.config.dtype = recipe.dtype
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, max_shard_size=recipe.max_shard_size)
    finally:
        hf_logging.enable_progress_bar()


def _fill_parameter(name: str, parameter: torch.Tensor, recipe: Recipe) -> None:
    """Fill one weight of a random model in place, with noise that the recipe's seed and the weight's name determine.

    Matrices keep the variance of their input. Vectors are changed a little from their initial values.
    """
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(f"{recipe.seed}:{name}".encode()))
    noise = torch.randn(parameter.shape, generator=generator)
    if "embed" in name or "lm_head" in name:
        parameter.copy_(noise * (_LOGIT_STD / math.sqrt(recipe.hidden_size)))
    elif parameter.ndim >= 2:
        # Linear [out, in], experts [expert, out, in], convolutions [channel, 1, kernel]: the last axis is summed.
        input_size = parameter.shape[-1]
        gain = next((gain for pattern, gain in _GAIN_BY_PATTERN if pattern.search(name)), 1.0)
        parameter.copy_(noise * (gain / math.sqrt(input_size)))
    else:  # weights of norms, biases and decay rates
        norm_biases = _NORM_BIASES.get(recipe.family, ())
        parameter.add_(noise * 0.1)
        parameter.add_(next((bias for pattern, bias in norm_biases if pattern in name), 0.0))


def cached_model(recipe: Recipe) -> Path:
    """Return the folder of the recipe's checkpoint in the user's cache, written once. Several processes may call it."""
    cache_inputs = json.dumps([_RECIPE_VERSION, asdict(recipe), CHAT_TEMPLATE])
    return build_cached(recipe.family, cache_inputs, lambda folder: make_model(folder, recipe))
