"""Where a model's name leads, how large the cache gets, what a config can ask that no machine has."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.config import EngineConfig
from engine.execution.sizing import CACHE_TOKENS_MAX, check_fits, choose_step_tokens, count_units, resolve_device
from engine.model_files import locate_model
from engine.models import HfConfig, build_model
from options import ConfigError

SPEC = CacheSpec(16, (GroupSpec(FULL_ATTENTION, (0, 1), 2, 16, 2),))
CPU = torch.device("cpu")


def make_hub(home: Path, name: str) -> Path:
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return snapshot


def test_a_folder_then_the_local_cache_then_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert locate_model(str(tmp_path)) == (str(tmp_path), tmp_path)
    snapshot = make_hub(tmp_path, "org/cached")
    assert locate_model("org/cached") == ("org/cached", snapshot)

    requested_models: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        requested_models.append(name)
        if name == "org/missing":
            raise OSError("404: no such repository")
        return str(tmp_path)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    assert locate_model("org/new") == ("org/new", tmp_path)
    with pytest.raises(ConfigError, match=r"org/missing.*404"):
        locate_model("org/missing")
    with pytest.raises(ConfigError, match="no such folder"):
        locate_model("./org/typo")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no such folder"):
        locate_model("org/new")
    assert requested_models == ["org/new", "org/missing"]


def test_the_flags_that_size_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_units(EngineConfig(num_gpu_blocks_override=7), SPEC, CPU) == 7
    assert count_units(EngineConfig(kv_cache_memory_bytes=10 * SPEC.unit_bytes + 5), SPEC, CPU) == 10
    assert 1 <= count_units(EngineConfig(), SPEC, CPU) <= CACHE_TOKENS_MAX // 16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    gpu, step = torch.device("cuda", 0), 3 << 30
    large, small = (count_units(EngineConfig(gpu_memory_utilization=share), SPEC, gpu, step) for share in (0.9, 0.5))
    assert large > CACHE_TOKENS_MAX  # no cap where memory is what the machine is for
    assert (large - small) * SPEC.unit_bytes == pytest.approx(0.4 * (80 << 30), rel=0.01)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes 5"):
        count_units(EngineConfig(kv_cache_memory_bytes=5), SPEC, CPU)
    for device, owner in ((CPU, "this machine"), (gpu, "cuda:0, 85899345920 bytes")):
        for flag, value in (("--kv-cache-memory-bytes", 10**15), ("--num-gpu-blocks-override", 10**9)):
            config = EngineConfig(**{flag[2:].replace("-", "_"): value})
            with pytest.raises(ConfigError, match=f"^{flag} {value}: takes .*expected at most the memory of {owner}"):
                check_fits(config, count_units(config, SPEC, device) * SPEC.unit_bytes, device)
    check_fits(EngineConfig(num_gpu_blocks_override=7), 7 * SPEC.unit_bytes, CPU)


@pytest.mark.parametrize("device", ["tpu0", "meta", "cuda:77"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=device):
        resolve_device(device)


def dense(hidden_size: int, layers: int) -> HfConfig:
    return HfConfig({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden_size,
        "num_hidden_layers": layers, "num_attention_heads": hidden_size // 64, "num_key_value_heads": 1, "head_dim": 64,
        "vocab_size": 512, "intermediate_size": 3 * hidden_size, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("hidden_size", "layers", "threads", "tokens"),
    [(64, 2, 1, 2048), (1024, 36, 1, 512), (1024, 36, 2, 1024), (4096, 36, 1, 256), (4096, 36, 64, 2048)],
)
def test_a_step_of_a_large_model_on_a_cpu_is_short(hidden_size: int, layers: int, threads: int, tokens: int) -> None:
    """36 layers of 1,024 and 0.4 billion weights are Qwen3 0.6B."""
    model = build_model(dense(hidden_size, layers))
    config = EngineConfig(num_threads=threads)
    assert choose_step_tokens(config, model, CPU) == tokens
    assert choose_step_tokens(config, model, torch.device("cuda")) == 2048
    assert choose_step_tokens(EngineConfig(num_threads=threads, max_num_batched_tokens=777), model, CPU) == 777
    assert choose_step_tokens(EngineConfig(num_threads=1, max_num_seqs=1500), model, CPU) >= 1500, "each has a token"
    assert choose_step_tokens(EngineConfig(num_threads=1, max_num_seqs=5000), model, CPU) == 2048
