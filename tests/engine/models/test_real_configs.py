"""Configs as they are published: every family builds from them, without weights, to the size that is known."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import CausalLM, HfConfig, build_model

LLAMA3 = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip

# name -> (parameters as published, config.json as far as it describes the text model)
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-0.6B": (596_049_920, {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    }),
    "Qwen2.5-0.5B": (494_032_768, {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    }),
    "Llama-3.2-1B": (1_235_814_400, {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
    }),
    "Mistral-7B-v0.1": (7_241_732_096, {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    }),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 151936,
    }),
    "gemma-3-1b-it": (999_885_952, {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    }),
    "gemma-3-4b-it": (3_880_263_168, {
        "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "vision_config": {},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }),
    "LFM2-1.2B": (1_170_340_608, {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
        "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
        "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_embedding": True, "vocab_size": 65536,
    }),
    "Nemotron-H-8B-Base-8K": (8_100_852_736, {
        "architectures": ["NemotronHForCausalLM"], "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4,
        "expand": 2, "hidden_size": 4096, "hybrid_override_pattern":
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8,
        "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "ssm_state_size": 128,
        "tie_word_embeddings": False, "time_step_limit": [0.0, math.inf], "use_bias": False, "use_conv_bias": True,
        "vocab_size": 131072,
    }),
}  # fmt: skip


def load_published(name: str) -> CausalLM:
    return build_model(HfConfig(PUBLISHED[name][1], name))


def count_parameters(model: CausalLM) -> int:
    shapes = {part.name: part.shape for weight in model.weights for part in weight.parts}
    return sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_size_is_the_published_one(name: str) -> None:
    assert count_parameters(load_published(name)) == PUBLISHED[name][0]


def test_cache_of_a_windowed_model() -> None:
    """Mistral keeps its whole KV in a full-attention group; Gemma has a group of each kind, full attention first."""
    (group,) = load_published("Mistral-7B-v0.1").make_cache_spec(16, torch.bfloat16).groups
    assert (group.kind, group.sliding_window) == ("full_attention", None)
    assert load_published("Mistral-7B-v0.1").window_by_group == [4096]
    full, sliding = load_published("gemma-3-4b-it").make_cache_spec(16, torch.bfloat16).groups
    assert (full.kind, full.layer_indices) == ("full_attention", (5, 11, 17, 23, 29))
    assert (sliding.kind, sliding.sliding_window, len(sliding.layer_indices)) == ("sliding_window", 1024, 29)


def test_cache_of_a_hybrid_model() -> None:
    """Nemotron-H-8B: 4 attention layers of 4 KiB a token, 24 states of 4 MiB in fp32 and their tails of 60 KiB."""
    spec = load_published("Nemotron-H-8B-Base-8K").make_cache_spec(16, torch.bfloat16)
    assert [(g.layer_indices, g.token_bytes) for g in spec.groups] == [((7, 18, 29, 40), 4 * 4096)]
    assert spec.state is not None
    assert spec.state.state_bytes == 24 * (128 * 64 * 128 * 4 + 3 * 10240 * 2)
    assert 0 <= spec.unit_bytes - spec.state.state_bytes < 0.002 * spec.unit_bytes
    assert spec.blocks_per_unit(0) == 390


def test_the_family_that_the_docs_show_is_the_one_that_runs() -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "how-to" / "add-a-model.md").read_text()
    assert f"```python\n{(root / 'engine/models/families/granite.py').read_text()}```" in page
    rows = re.findall(r"^```python\n# (\S+): (\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(rows) == 4
    for file, table, row in rows:
        assert row in (root / file).read_text().partition(f"\n{table}")[2], f"{file} has no such row in {table}"
