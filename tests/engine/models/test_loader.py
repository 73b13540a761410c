"""What the loader accepts and refuses, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.core_messages import CallCore
from engine.models import BUILDER_BY_ARCHITECTURE, ModelError
from engine.models.loader import load_model, reload_weights
from engine.models.weights import Weight
from engine.process.core_process import CoreLoop
from engine.tiny.model import Recipe, cached_model
from engine.types import RunnerLostError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(cached_model(Recipe()), tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_dtypes(folder: Path) -> None:
    assert load_model(folder)[1] == torch.float32
    assert load_model(folder, dtype="bfloat16")[0].vocabulary.embedding.tensor.dtype == torch.bfloat16
    edit_config(folder, dtype=None, torch_dtype="float16")
    assert load_model(folder)[1] == torch.float16
    with pytest.raises(ModelError, match="--dtype: 'int8' is not supported; expected one of bfloat16"):
        load_model(folder, dtype="int8")


def test_shards_hold_the_same_as_one_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole_model, _ = load_model(folder)
    caplog.clear()  # another test may have made the logger say more
    with caplog.at_level("INFO"):
        sharded_model, _ = load_model(cached_model(Recipe(max_shard_size="400KB")))
    load_messages = [line for line in caplog.messages if line.startswith("loading ")]
    assert len(load_messages) > 1, "how far it is stands in the log, a line a file"
    assert all(f"({number} of {len(load_messages)}, " in line for number, line in enumerate(load_messages, 1)), (
        load_messages
    )
    for a, b in zip(whole_model.weights, sharded_model.weights, strict=True):
        assert torch.equal(a.tensor, b.tensor)


def test_unknown_architecture_lists_what_is_supported(folder: Path) -> None:
    edit_config(folder, architectures=["FooForCausalLM"])
    with pytest.raises(ModelError, match="'FooForCausalLM' is not supported; supported: ") as error_info:
        load_model(folder)
    assert all(name in str(error_info.value) for name in BUILDER_BY_ARCHITECTURE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, r"config.json: vocab_size: expected a positive integer, got None"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads 3: expected a divisor of num_attention_heads 4"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu' is not supported; expected 'silu'"),
        ({"rms_norm_eps": "big"}, r"rms_norm_eps: expected float, got 'big'"),
        ({"architectures": []}, r"architectures: expected a list with one name"),
        ({"quantization_config": {"quant_method": "awq"}}, r"config.json: quantization_config: quantised weights are"),
        ({"hidden_size": 32}, r"shape \[2048, 64\], expected \[2048, 32\]"),
        (
            {"num_hidden_layers": 3},
            r"missing from the checkpoint: model.layers.2.input_layernorm.weight, .* and 3 more",
        ),
        ({"num_hidden_layers": 1}, r"tensors in the checkpoint that the model does not have: model.layers.1"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            r"layer_types: 'chunked_attention' is not supported; expected full_attention, sliding_attention",
        ),
    ],
)
def test_a_config_that_does_not_fit(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope"}, "rope scaling 'longrope' is not supported; expected default, linear"),
        (5, "rope_parameters: expected an object, got 5"),
        ({"rope_theta": "x"}, "rope_parameters: rope_theta: expected float, got 'x'"),
        ({"rope_theta": float("nan")}, "rope_theta nan and its scaling: expected finite frequencies"),
        ({"rope_type": "linear", "factor": 0}, "config.json: rope_theta 10000 and its scaling: expected finite"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}, "config.json: expected the sizes and settings"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": []}, "scaling attention_factor: expected a number"),
        ({"partial_rotary_factor": -1.0}, "config.json: expected the sizes and settings of a model"),
    ],
)
def test_rope_settings_are_checked_before_weights_are_read(folder: Path, parameters: object, message: str) -> None:
    if isinstance(parameters, dict):
        parameters = {"rope_theta": 1e4, **parameters}
    edit_config(folder, rope_parameters=parameters)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_null_in_rope_scaling_is_the_default(folder: Path) -> None:
    frequencies = []
    for extra in ({}, {"beta_fast": None, "beta_slow": None, "original_max_position_embeddings": None}):
        edit_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **extra})
        (rope,) = load_model(folder)[0]._rope_configs
        frequencies.append(rope.compute_frequencies().inverse)
    assert torch.equal(*frequencies)


def test_untied_head_must_be_there(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing from the checkpoint: lm_head.weight$"):
        load_model(folder)


def test_a_tied_checkpoint_may_carry_its_head(folder: Path) -> None:
    expected = load_model(folder)[0].vocabulary
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros_like(t["model.embed_tokens.weight"])}))
    vocabulary = load_model(folder)[0].vocabulary
    assert torch.equal(vocabulary.embedding.tensor, expected.embedding.tensor)
    hidden_states = torch.randn(3, expected.embedding.tensor.shape[1])
    assert torch.equal(vocabulary.compute_logits(hidden_states), expected.compute_logits(hidden_states))


def test_rotary_frequencies_in_a_checkpoint_are_passed_over(folder: Path) -> None:
    """As llama-2's weights have them; the frequencies follow from the config."""
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(folder)


def test_integer_tensors_are_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model.norm.weight: dtype torch.int8 is not supported"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    """Every answer would be the token 0 again and again. 1e38 is finite in fp32, and not in the dtype of the model."""
    edit_tensors(folder, lambda t: t["model.layers.1.mlp.down_proj.weight"][3].fill_(value))
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.down_proj\.weight: expected finite values, as torch.float16"
    ):
        load_model(folder, dtype="float16")


def test_a_reload_of_weights_that_are_not_finite_changes_nothing(folder: Path, tmp_path: Path) -> None:
    other_folder = Path(shutil.copytree(folder, tmp_path / "other"))
    edit_tensors(other_folder, lambda t: t["model.norm.weight"].fill_(float("nan")))
    model, dtype = load_model(folder)
    before = [weight.tensor.clone() for weight in model.weights]
    with pytest.raises(ModelError, match=r"model\.norm\.weight: expected finite values"):
        reload_weights(model, other_folder, dtype, torch.device("cpu"))
    assert all(torch.equal(weight.tensor, tensor) for weight, tensor in zip(model.weights, before, strict=True))


def test_files_that_are_not_there_or_broken(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file; expected the folder of an HF checkpoint"):
        load_model(tmp_path / "nothing")
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no such file; expected the checkpoint's weights in safetensors"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load_model(folder)


def test_weights_without_read_permission_are_not_called_missing() -> None:
    """As in a container whose user is not the one that wrote the checkpoint: `save_file` lets the owner alone read."""
    user_id = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(cached_model(Recipe()), Path(name) / "model"))
        load_model(folder)
        Path(name).chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        if user_id == 0:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(ModelError, match=r"model\.safetensors: not a readable .* Permission denied"):
                load_model(folder)
        finally:
            os.seteuid(user_id)


@pytest.mark.parametrize(
    "index",
    [b"{", b"[1]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": 3}}', b'{"weight_map": {"a": {}}}', b"\xff",
     b'{"weight_map": {"a": "x", "b": null}}', b"[" * 100_000],
    ids=lambda index: index[:40],
)  # fmt: skip
def test_an_index_that_is_malformed(folder: Path, index: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match="expected an object with weight_map"):
        load_model(folder)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("granite", "residual_multiplier", 0.7), ("granite", "attention_multiplier", 0.2),
        ("granite", "rope_theta", 5e5), ("bamba", "time_step_limit", [0.0, 0.1]),
        ("qwen3_moe", "num_experts_per_tok", 3), ("qwen3_moe", "norm_topk_prob", False),
    ],
)  # fmt: skip
def test_reload_refuses_a_checkpoint_with_another_setting(tmp_path: Path, family: str, key: str, value: object) -> None:
    """The model would compute the new weights with the old setting."""
    folder = cached_model(Recipe(family=family))
    other_folder = Path(shutil.copytree(folder, tmp_path / "other"))
    if key == "rope_theta":
        edit_config(other_folder, rope_theta=value, rope_parameters={"rope_type": "default", "rope_theta": value})
    else:
        edit_config(other_folder, **{key: value})
    model, dtype = load_model(folder)
    before = [weight.tensor.clone() for weight in model.weights]
    with pytest.raises(ModelError, match="expected a checkpoint of the same architecture, shapes and scale factors"):
        reload_weights(model, other_folder, dtype, torch.device("cpu"))
    assert all(torch.equal(weight.tensor, tensor) for weight, tensor in zip(model.weights, before, strict=True))
    same_folder = Path(shutil.copytree(folder, tmp_path / "same"))
    reload_weights(model, same_folder, dtype, torch.device("cpu"))


def test_a_reload_that_fails_half_way_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to a GPU may fail. The engine went on with weights of both checkpoints."""
    replace_values, calls = Weight.replace_values, []

    def fail_half_way(weight: Weight, other: Weight) -> None:
        calls.append(weight)
        if len(calls) == 4:
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`")
        replace_values(weight, other)

    monkeypatch.setattr(Weight, "replace_values", fail_half_way)
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=8) as llm:
        assembled = SimpleNamespace(core=llm._core, model=llm._engine.model, publisher=None)
        loop = CoreLoop(assembled, SimpleNamespace())
        with pytest.raises(RunnerLostError, match=r"in part only: CUDA error: unspecified launch failure$"):
            loop._execute_call(CallCore(1, "reload"))
