"""What a disk cache is refused for, and what its content depends on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn_specs import group

from engine.cache.spec import CacheSpec, StateSpec
from engine.config import EngineConfig
from engine.execution.disk_opening import check_disk_flags, kv_fingerprint, open_disk, weights_fingerprint
from engine.tiny.model import PRESETS, cached_model
from options import ConfigError

SPEC = CacheSpec(block_size=16, groups=(group(2),))
CONFIG = EngineConfig(disk_cache="somewhere", host_cache_memory=1_000_000)


def fingerprint(folder: Path, config: EngineConfig = CONFIG, spec: CacheSpec = SPEC, **other: object) -> str:
    known = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 100, **other}
    return json.dumps(kv_fingerprint(config, spec, folder, **known), sort_keys=True)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(cached_model(PRESETS["tiny"]), tmp_path / "model"))


def test_it_is_the_same_for_the_same(folder: Path) -> None:
    assert fingerprint(folder) == fingerprint(folder)


def test_it_differs_with_whatever_decides_what_kv_is(folder: Path) -> None:
    found = {fingerprint(folder)}
    others = [
        fingerprint(folder, dtype=torch.bfloat16),
        fingerprint(folder, device=torch.device("cuda")),
        fingerprint(folder, max_model_len=200),
        fingerprint(folder, replace(CONFIG, attention_backend="reference")),
        fingerprint(folder, spec=replace(SPEC, block_size=32)),
        fingerprint(folder, spec=replace(SPEC, groups=(group(1),))),
    ]
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    others.append(fingerprint(folder))
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    others.append(fingerprint(folder))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    others.append(fingerprint(folder))
    assert len(found | set(others)) == 1 + len(others)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, state=StateSpec(layers=(9,), state_bytes=500)),
        replace(SPEC, groups=(*SPEC.groups, group(1, window=8))),
        replace(SPEC, groups=(group(1, window=8),)),
    ],
)
def test_other_models_than_of_full_attention_are_refused(folder: Path, spec: CacheSpec) -> None:
    with pytest.raises(ConfigError, match="recurrent states or sliding windows"):
        open_disk(CONFIG, spec, folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=100, weights={})


def test_several_ranks_and_no_host_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="not with --tensor-parallel-size 2"):
        check_disk_flags(replace(CONFIG, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="needs --host-cache-memory"):
        check_disk_flags(replace(CONFIG, host_cache_memory=None))
    check_disk_flags(EngineConfig())


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="an empty name"):
        check_disk_flags(replace(CONFIG, disk_cache=""))


def test_weights_that_change_while_they_are_loaded_are_refused(folder: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, disk_cache=str(tmp_path / "cache"))
    known = weights_fingerprint(folder)

    def take() -> None:
        open_disk(
            config, SPEC, folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=100, weights=known
        ).close()

    take()
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    with pytest.raises(ConfigError, match="has changed while it was loaded"):
        take()
