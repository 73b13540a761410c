"""Shapes of published models, as the config.json of each: for the throughput benchmark and the tables of the docs.

Weights are random, sizes are real: the tokens are meaningless, their time and their bytes are not.
"""

from __future__ import annotations

from typing import Any


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tie_embeddings: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": intermediate, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie_embeddings, "dtype": "bfloat16",
    }  # fmt: skip


NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(64, 2, 4, 128, True) | {
        "vocab_size": 2048, "head_dim": 16, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    },
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, False),
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(32)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mamba_ssm_dtype": "float32", "dtype": "bfloat16",
    },
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072,
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 21504, "max_position_embeddings": 8192, "hybrid_override_pattern": NEMOTRON_PATTERN,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5, "dtype": "bfloat16",
    },
    "bamba-9b": {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 262144, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64,
        "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
}  # fmt: skip
