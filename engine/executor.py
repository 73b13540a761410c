"""The executor of a real model: weights loaded, cache sized, on one device or over several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import Executor, Runner
from engine.execution.sizing import (
    RankModel,
    choose_step_tokens,
    count_host_units,
    count_sequences_max,
    make_runner,
    resolve_rank_model,
    select_rank_device,
    size_cache,
)
from engine.grammar_compiler import GrammarCompiler
from engine.model_files import ModelFiles, locate_model
from engine.models import HfConfig, Shard, build_model
from engine.models.loader import load_model, load_weights, reload_weights
from engine.transfer.block_exchange import BlockMemory
from kernels.cpu.packed import has_bf16_instructions

if TYPE_CHECKING:
    from engine.execution.runner import ModelRunner
    from engine.parallel.leader import Leader

log = logging.getLogger(__name__)

BUILTIN_PRESET = "tiny"
CPU_TARGET_PREFILL_TOKENS = 256
"""Prompt tokens of a step on CPUs without bf16 in hardware, which reach their full rate with a few rows."""


def resolve_model(model: str | None) -> ModelFiles:
    """Return where a checkpoint is; without `model`, the built-in random model. Raises ConfigError."""
    if model is not None:
        return locate_model(model)
    from engine.tiny.model import PRESETS, cached_model

    return ModelFiles(BUILTIN_PRESET, cached_model(PRESETS[BUILTIN_PRESET]))


def load_executor(config: EngineConfig, folder: Path) -> Executor:
    """Load the model from a checkpoint's folder, on all tensor-parallel ranks, and choose the size of its KV cache.

    Raises ConfigError and ModelError (ValueErrors), MemoryError, and RunnerLostError if another rank ends.
    """
    if config.tensor_parallel_size == 1:
        return _load_first_rank(config, folder, None)
    from engine.parallel.leader import Leader  # imports torch.distributed

    # Raise the errors of a wrong configuration before any process is started.
    select_rank_device(config, 0)
    build_model(HfConfig.read(folder), Shard(0, config.tensor_parallel_size))
    leader = Leader(config.tensor_parallel_size)  # starts the other ranks
    try:
        return _load_first_rank(config, folder, leader)
    except BaseException:
        leader.close()
        raise


def _load_first_rank(config: EngineConfig, folder: Path, leader: Leader | None) -> Executor:
    """Load rank 0's part of the model, while the other ranks load theirs, and choose the size of the KV cache.

    `leader`: connection to the other ranks; None: there is one rank.
    """
    torch.set_num_threads(config.num_threads)
    device = select_rank_device(config, 0)
    shard = None
    all_reduce_min = None
    if leader is not None:
        leader.load(config, folder)
        shard = leader.shard
        all_reduce_min = leader.all_reduce_min
    model, dtype = load_model(folder, dtype=config.dtype, device=device, shard=shard)
    config = replace(config, max_num_batched_tokens=choose_step_tokens(config, model, device))
    rank = resolve_rank_model(config, model, dtype, device)
    if leader is not None:
        leader.await_loaded(device)
    host_unit_count = count_host_units(config, rank.spec)
    unit_count = size_cache(config, rank, all_reduce_min)
    return Executor(
        model=LoadedModel(config, rank, folder, unit_count, leader),
        cache_spec=rank.spec,
        unit_count=unit_count,
        max_model_len=rank.max_model_len,
        vocab_size=rank.model.config.vocab_size,
        dtype=str(rank.dtype).removeprefix("torch."),
        device=str(rank.device),
        step_tokens_max=config.step_tokens_max,
        host_unit_count=host_unit_count,
        overlaps_steps=config.overlaps_steps(rank.device.type),
        target_prefill_tokens=_choose_target_prefill_tokens(rank.device, rank.dtype),
    )


class LoadedModel:
    """A loaded model with its runner and weights, on all ranks. Implements `engine.core.Model`."""

    def __init__(
        self, config: EngineConfig, rank: RankModel, folder: Path, unit_count: int, leader: Leader | None
    ) -> None:
        """Hold a model that is loaded already, on one or more tensor-parallel ranks.

        `rank`: the model's part on rank 0. `folder`: the checkpoint. `unit_count`: units of KV cache memory on each
        rank. `leader`: connection to the other ranks; None: there is one rank.
        """
        self.unit_count = unit_count
        self._config = config
        self._rank = rank
        self._folder = folder
        self._leader = leader
        self._runner: ModelRunner | None = None
        """Runner of rank 0; None before `make_runner` and after `close`."""
        self._sleep_level = 0

    def make_runner(self, eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None) -> Runner:
        """Make the runner of all ranks, and record its decode steps if the device can."""
        runner = make_runner(self._config, self._rank, self.unit_count, eos_token_ids, grammars)
        leading_runner: Runner = runner
        if self._leader is not None:
            leading_runner = self._leader.make_leading_runner(runner, self.unit_count)
        runner.record_decode_steps(count_sequences_max(self._config))
        self._runner = runner
        return leading_runner

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        if self._leader is not None:
            self._leader.close()

    def watch_for_loss(self, on_lost: Callable[[str], None]) -> None:
        if self._leader is not None:
            self._leader.watch(on_lost)

    def get_copy_s(self) -> float:
        return 0.0 if self._runner is None else self._runner.pool.block_copier.copy_s

    def get_simulation_lag(self) -> None:
        return None

    def get_block_memory(self) -> BlockMemory:
        copier = self._get_runner().pool.block_copier
        if self._leader is None:
            return copier
        from engine.parallel.leader import RankedBlockMemory

        return RankedBlockMemory(self._leader, copier)

    def _get_runner(self) -> ModelRunner:
        assert self._runner is not None
        return self._runner

    def sleep(self, level: int) -> None:
        """Free the pool, and move the weights to the CPU; level 2 drops them. Never with several ranks."""
        assert self._leader is None
        self._get_runner().release_pool()
        for weight in self._rank.model.weights:
            if level == 2:
                weight.release()
            elif self._rank.device.type != "cpu":
                weight.move_to(torch.device("cpu"))
        if self._rank.device.type == "cuda":
            _return_gpu_memory(self._rank.device)
        self._sleep_level = level

    def wake(self) -> None:
        """Restore the weights, allocate the pool, and record decode steps. Raises ModelError, OSError, RuntimeError."""
        if self._sleep_level == 2:
            load_weights(self._rank.model, self._folder, self._rank.dtype, self._rank.device)
        else:
            for weight in self._rank.model.weights:
                weight.move_to(self._rank.device)
        self._get_runner().pool.allocate()
        self._get_runner().record_decode_steps(count_sequences_max(self._config))
        self._sleep_level = 0

    def reload(self, path: str | None) -> None:
        """Load the weights of a checkpoint, or the current one's again if `path` is None. Never with several ranks.

        Raises ConfigError, ModelError, OSError, RuntimeError.
        """
        assert self._leader is None
        folder = self._folder if path is None else locate_model(path).folder
        reload_weights(self._rank.model, folder, self._rank.dtype, self._rank.device)
        self._folder = folder


def _return_gpu_memory(device: torch.device) -> None:
    """Give memory that torch has freed, and keeps for itself, back to the GPU for other processes."""
    reserved_bytes = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    freed_bytes = reserved_bytes - torch.cuda.memory_reserved(device)
    log.info("asleep: freed %d MiB of GPU memory", freed_bytes >> 20)


def _choose_target_prefill_tokens(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return `SchedulerConfig.target_prefill_tokens` for a device."""
    if device.type != "cpu" or (dtype == torch.bfloat16 and has_bf16_instructions()):
        return None
    return CPU_TARGET_PREFILL_TOKENS
