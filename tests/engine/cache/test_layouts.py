"""The page table of published models, number by number, and that units are as good as any other size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.layouts import PUBLISHED, format_table, report, spec_from_config, waste
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec

# KV bytes a token, state bytes, blocks a unit, padding (rounded up, in hundredths of a per cent), vLLM's block.
TABLE = {
    "Qwen3-Next-80B-A3B": (12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), (197,), 26, 1056),
    "Qwen3.5-4B": (8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), (98,), 26, 528),
    "Nemotron-H-8B": (4 * 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 + (8192 + 2048) * 3) * 2, (198,), 19, 528),
    "Granite-4.0-H-tiny": (4 * 2 * 4 * 128 * 2, 36 * (48 * 64 * 128 + (3072 + 256) * 3) * 2, (221,), 22, 400),
    "Bamba-9B": (3 * 2 * 8 * 128 * 2, 29 * (128 * 64 * 128 + (8192 + 256) * 3) * 2, (317,), 6, 528),
    "Gemma-3-4B": (34 * 2 * 4 * 256 * 2, 0, (29, 5), 0, 16),
}


@pytest.mark.parametrize("name", list(TABLE))
def test_published_models(name: str) -> None:
    token_bytes, state_bytes, blocks, padding, vllm_block = TABLE[name]
    row = report(spec_from_config(PUBLISHED[name]))
    assert (row.token_bytes, row.state_bytes, row.blocks_per_unit, row.vllm_block_tokens) == (
        token_bytes,
        state_bytes,
        blocks,
        vllm_block,
    )
    assert row.padding <= padding / 10_000
    assert row.unit_bytes >= row.state_bytes


def test_short_prompts_waste_what_vllm_pads() -> None:
    specs = {name: spec_from_config(config) for name, config in PUBLISHED.items()}
    for name, spec in specs.items():
        if spec.state is not None:
            theirs, ours = waste(spec, 100)
            assert 0.08 < theirs < 0.24, name
            assert ours < 0.01, name
    table = format_table(specs)
    assert table.count("\n") == len(specs) + 1


@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    state=st.one_of(st.none(), st.integers(1, 200_000)),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_a_unit_holds_everything_and_no_simple_size_pads_less(
    tokens: list[int], state: int | None, block_size: int
) -> None:
    groups = tuple(GroupSpec(FULL_ATTENTION, tuple(range(layers)), 1, 64, 2) for layers in tokens)
    spec = CacheSpec(block_size, groups, None if state is None else StateSpec((99,), state))
    blocks = [spec.block_bytes(g) for g in range(len(groups))]
    assert spec.unit_bytes % 256 == 0
    assert spec.unit_bytes >= max([*blocks, state or 0])
    assert all(spec.blocks_per_unit(g) * block <= spec.unit_bytes for g, block in enumerate(blocks))
    smallest = max([*blocks, state or 0])
    plain = -(-smallest // 256) * 256
    unused = [plain % block for block in blocks] + ([plain - state] if state else [])
    assert spec.padding <= max(unused) / plain + 1e-12


def test_config_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"num_key_value_heads: expected an integer"):
        spec_from_config({"num_hidden_layers": 2, "model_type": "x"})
    with pytest.raises(ValueError, match=r"layer_types: expected .* got \['conv'\]"):
        spec_from_config({"num_hidden_layers": 2, "layer_types": ["conv", "mamba"]})


def test_text_config_and_dense() -> None:
    text = {"num_hidden_layers": 2, "num_key_value_heads": 1, "hidden_size": 64, "num_attention_heads": 4}
    spec = spec_from_config({"model_type": "outer", "text_config": text})
    assert spec.groups == (GroupSpec(FULL_ATTENTION, (0, 1), 1, 16, 2),)
    assert spec.blocks_per_unit(0) == 1
    assert spec.padding == 0
