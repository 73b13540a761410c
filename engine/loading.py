"""The executor of a real model: weights loaded, cache sized, on one device or over several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import Executor, Runner
from engine.execution.sizing import (
    count_host_units,
    load_bytes_max,
    make_runner,
    rank_device,
    resolve_max_len,
    sequences_max,
    should_overlap,
    size_cache,
    step_tokens,
)
from engine.grammars import GrammarCompiler
from engine.model_files import locate_model
from engine.models import CausalLM, HfConfig, Shard, build_model
from engine.models.loader import load_model, load_weights, reload_weights
from kernels.cpu.packed import has_bf16_instructions
from options import ConfigError

if TYPE_CHECKING:
    from engine.execution.runner import ModelRunner
    from engine.parallel.ranks import Leader

BUILTIN_PRESET = "tiny"
CPU_TARGET_PREFILL_TOKENS = 256
"""Prefill chunk of CPUs without bf16 in hardware, which multiply at their full rate from a few rows on."""


def resolve_model(model: str | None) -> tuple[str, Path]:
    """(name, folder) of a checkpoint: `locate_model`'s, or the built-in random model. Raises ConfigError."""
    if model is not None:
        return locate_model(model)
    from engine.tiny.model import PRESETS, cached_model

    return BUILTIN_PRESET, cached_model(PRESETS[BUILTIN_PRESET])


def load(config: EngineConfig, folder: Path) -> Executor:
    """Raises ConfigError and ModelError (ValueErrors), MemoryError, RunnerLostError where another rank ends."""
    if config.tensor_parallel_size == 1:
        return _load_executor(config, folder, None)
    from engine.parallel.ranks import Leader  # one rank needs none of it

    rank_device(config, 0)  # what these refuse they refuse before any process is started
    build_model(HfConfig.read(folder), Shard(0, config.tensor_parallel_size))
    leader = Leader(config.tensor_parallel_size)
    try:
        return _load_executor(config, folder, leader)
    except BaseException:
        leader.close()
        raise


def _load_executor(config: EngineConfig, folder: Path, leader: Leader | None) -> Executor:
    torch.set_num_threads(config.num_threads)
    device = rank_device(config, 0)
    if leader is not None:
        leader.load(config, folder)
    shard = None if leader is None else leader.shard
    model, dtype = load_model(folder, dtype=config.dtype, device=device, shard=shard)
    config = replace(config, max_num_batched_tokens=step_tokens(config, model, device))
    spec = model.make_cache_spec(config.block_size, dtype)
    max_model_len = resolve_max_len(config, model)
    all_reduce_min = None
    if leader is not None:
        leader.await_loaded(device)
        all_reduce_min = leader.all_reduce_min
    host_units = count_host_units(config, spec)
    unit_count = size_cache(config, model, spec, dtype=dtype, device=device, all_reduce_min=all_reduce_min)
    runners: list[ModelRunner] = []

    def make_executor_runner(eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None) -> Runner:
        rank_runner = make_runner(
            config, model, spec, unit_count, dtype=dtype, device=device, max_model_len=max_model_len,
            eos_token_ids=eos_token_ids, grammars=grammars,
        )  # fmt: skip
        leading_runner: Runner = (
            rank_runner if leader is None else leader.make_leading_runner(rank_runner, unit_count, max_model_len)
        )
        rank_runner.record_decode_steps(sequences_max(config))
        runners.append(rank_runner)
        return leading_runner

    def close() -> None:
        while runners:
            runners.pop().close()
        if leader is not None:
            leader.close()

    loaded_model = LoadedModel(config, model, folder, dtype, device, runners)
    return Executor(
        cache_spec=spec,
        sleep=loaded_model.sleep,
        wake=loaded_model.wake,
        reload_weights=loaded_model.reload,
        unit_count=unit_count,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        make_runner=make_executor_runner,
        close=close,
        watch_for_loss=lambda on_lost: None if leader is None else leader.watch(on_lost),
        get_simulation_lag=lambda: None,
        step_tokens_max=config.step_tokens_max,
        host_unit_count=host_units,
        load_bytes_max=load_bytes_max(config, model, spec, dtype=dtype, device=device),
        get_copy_s=lambda: runners[0].pool.block_copier.copy_s if runners else 0.0,
        overlaps_steps=should_overlap(config, device),
        get_block_memory=(lambda: runners[0].pool.block_copier) if leader is None else None,
        target_prefill_tokens=_target_prefill_tokens(device, dtype),
    )


class LoadedModel:
    """The weights and the pool of one device, which can be given back, taken again, and be others."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, folder: Path, dtype: torch.dtype, device: torch.device,
        runners: list[ModelRunner],
    ) -> None:  # fmt: skip
        """`folder`: of the weights. `runners`: the runner, once it is there."""
        self._config, self._model, self._folder = config, model, folder
        self._dtype, self._device, self._runners = dtype, device, runners
        self._sleep_level = 0

    def _check_possible(self, operation: str) -> None:
        if self._config.tensor_parallel_size > 1:
            raise ConfigError(f"not with --tensor-parallel-size {self._config.tensor_parallel_size}: one rank only")
        if operation == "sleep" and self._runners[0].has_recorded_steps:
            raise ConfigError("decode steps are recorded: start with --enforce-eager")

    def sleep(self, level: int) -> None:
        """Raises ConfigError."""
        self._check_possible("sleep")
        self._runners[0].release_pool()
        for weight in self._model.weights:
            if level == 2:
                weight.release()
            elif self._device.type != "cpu":
                weight.move_to(torch.device("cpu"))
        self._sleep_level = level

    def wake(self) -> None:
        """Raises ModelError, OSError, RuntimeError."""
        if self._sleep_level == 2:
            load_weights(self._model, self._folder, self._dtype, self._device)
        else:
            for weight in self._model.weights:
                weight.move_to(self._device)
        self._runners[0].allocate_pool()
        self._sleep_level = 0

    def reload(self, path: str | None) -> None:
        """Raises ConfigError, ModelError, OSError, RuntimeError."""
        self._check_possible("reload")
        folder = self._folder if path is None else locate_model(path)[1]
        reload_weights(self._model, folder, self._dtype, self._device)
        self._folder = folder


def _target_prefill_tokens(device: torch.device, dtype: torch.dtype) -> int | None:
    if device.type != "cpu" or has_bf16_instructions(dtype):
        return None
    return CPU_TARGET_PREFILL_TOKENS
