"""`--dry-run` and the table of docs/concepts/hybrid-cache.md: made by the models, and checked number by number."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from engine.cache.spec import CacheSpec
from engine.cli import cli
from engine.config import EngineConfig
from engine.dry_run import describe_cache
from engine.models import HfConfig, ModelError, build_model
from engine.tiny.model import Recipe, cached_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "concepts" / "hybrid-cache.md").read_text()

# KV bytes of a token, state bytes, blocks a unit: by hand from the published configs, state in fp32.
BY_HAND = {
    "Qwen3.5-4B": (8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), [98]),
    "Nemotron-H-8B": (4 * 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 * 4 + 10240 * 3 * 2), [390]),
    "Bamba-9B": (3 * 2 * 8 * 128 * 2, 29 * (128 * 64 * 128 * 4 + 8448 * 3 * 2), [626]),
    "Gemma-3-4B": (34 * 2 * 4 * 256 * 2, 0, [29, 5]),
}


@pytest.fixture(scope="module")
def specs() -> dict[str, CacheSpec]:
    """Cache specifications of these models by name. A model is built from its config alone, without weights."""
    path = ROOT / "benchmarks" / "throughput_shapes.py"
    spec = importlib.util.spec_from_file_location("throughput_shapes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shapes = {name: module.SHAPES[name.lower()] for name in BY_HAND}
    return {
        name: build_model(HfConfig(shape, name)).make_cache_spec(16, torch.bfloat16) for name, shape in shapes.items()
    }


def test_the_page_table_of_the_docs_is_what_the_models_say(specs: dict[str, CacheSpec]) -> None:
    head = ["model", "KV / token", "state", "unit", "blocks / unit", "padding"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, spec in specs.items():
        blocks = " or ".join(str(spec.blocks_per_unit(g)) for g in range(len(spec.groups)))
        cells = [name, f"{sum(group.token_bytes for group in spec.groups):,} B"]
        cells += [f"{spec.state.state_bytes / 1e6:.1f} MB" if spec.state else "-", f"{spec.unit_bytes / 1e6:.2f} MB"]
        lines.append("| " + " | ".join([*cells, blocks, f"{spec.compute_padding_share(spec.unit_bytes):.2%}"]) + " |")
    table = "\n".join(lines)
    assert f"\n\n{table}\n\n" in DOCS, f"docs/concepts/hybrid-cache.md: expected\n{table}"


@pytest.mark.parametrize("name", list(BY_HAND))
def test_the_numbers_are_those_of_the_published_configs(specs: dict[str, CacheSpec], name: str) -> None:
    token_bytes, state_bytes, blocks = BY_HAND[name]
    spec = specs[name]
    assert sum(group.token_bytes for group in spec.groups) == token_bytes
    assert (spec.state.state_bytes if spec.state else 0) == state_bytes
    assert [spec.blocks_per_unit(g) for g in range(len(spec.groups))] == blocks
    assert spec.compute_padding_share(spec.unit_bytes) < 0.003


NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64, "max_position_embeddings": 64,
    "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 128,
    "conv_kernel": 4,
}  # fmt: skip


@pytest.mark.parametrize("says", [{}, {"mamba_ssm_cache_dtype": "bfloat16"}, {"mamba_ssm_cache_dtype": "float32"}])
def test_state_is_kept_in_fp32_whatever_the_config_says(says: dict[str, str]) -> None:
    spec = build_model(HfConfig(NEMOTRON | says)).make_cache_spec(16, torch.bfloat16)
    assert spec.state is not None
    assert spec.state.state_bytes == 4 * 32 * 128 * 4 + 3 * (128 + 2 * 128) * 2


def test_a_dense_model_has_no_state() -> None:
    assert build_model(HfConfig.read(cached_model(Recipe()))).make_cache_spec(16, torch.float32).state is None


def test_a_model_without_attention_is_refused_with_its_name() -> None:
    with pytest.raises(ModelError, match=r"here: no attention layer"):
        build_model(HfConfig(NEMOTRON | {"hybrid_override_pattern": "MM"}, "here"))


def test_a_dry_run_tells_the_layout_without_weights(tmp_path: Path) -> None:
    description = describe_cache(EngineConfig(num_gpu_blocks_override=10))
    assert "10 units" in description
    assert "full_attention" in description
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON | {"dtype": "bfloat16"}))
    description = describe_cache(EngineConfig(model=str(tmp_path), num_gpu_blocks_override=10))
    assert "state: 1 layers, 67,840 bytes, 1 a unit" in description
    assert "padding: at most" in description


def test_flags_of_vllm_that_change_nothing_here_are_accepted() -> None:
    flags = ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--enable-chunked-prefill"]
    result = CliRunner().invoke(cli, ["serve", "--dry-run", "--trust-remote-code", *flags])
    assert result.exit_code == 0, result.output
