"""The executor of a real model: weights loaded, cache sized, on one device or over several ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import Executor, Runner
from engine.execution.sizing import (
    RankModel,
    choose_step_tokens,
    compute_load_bytes_max,
    count_host_units,
    count_sequences_max,
    make_runner,
    resolve_rank_model,
    select_rank_device,
    should_overlap,
    size_cache,
)
from engine.grammars import GrammarCompiler
from engine.model_files import locate_model
from engine.models import HfConfig, Shard, build_model
from engine.models.loader import load_model, load_weights, reload_weights
from engine.transfer.block_exchange import BlockMemory
from kernels.cpu.packed import has_bf16_instructions
from options import ConfigError

if TYPE_CHECKING:
    from engine.execution.runner import ModelRunner
    from engine.parallel.ranks import Leader

log = logging.getLogger(__name__)

BUILTIN_PRESET = "tiny"
CPU_TARGET_PREFILL_TOKENS = 256
"""Prompt tokens of a step on CPUs without bf16 in hardware, which reach their full rate with a few rows."""


def resolve_model(model: str | None) -> tuple[str, Path]:
    """Return (name, folder) of a checkpoint; without `model`, of the built-in random model. Raises ConfigError."""
    if model is not None:
        return locate_model(model)
    from engine.tiny.model import PRESETS, cached_model

    return BUILTIN_PRESET, cached_model(PRESETS[BUILTIN_PRESET])


def load_executor(config: EngineConfig, folder: Path) -> Executor:
    """Load the model of a checkpoint's folder, on all ranks, and size its cache.

    Raises ConfigError and ModelError (ValueErrors), MemoryError, and RunnerLostError if another rank ends.
    """
    if config.tensor_parallel_size == 1:
        return _load_rank(config, folder, None)
    from engine.parallel.ranks import Leader  # imports torch.distributed

    # A wrong configuration ends here, before any process is started.
    select_rank_device(config, 0)
    build_model(HfConfig.read(folder), Shard(0, config.tensor_parallel_size))
    leader = Leader(config.tensor_parallel_size)
    try:
        return _load_rank(config, folder, leader)
    except BaseException:
        leader.close()
        raise


def _load_rank(config: EngineConfig, folder: Path, leader: Leader | None) -> Executor:
    """Load the model on this rank. `leader`: has the other ranks load their parts; None: this is the only rank."""
    torch.set_num_threads(config.num_threads)
    device = select_rank_device(config, 0)
    if leader is not None:
        leader.load(config, folder)
    shard = None if leader is None else leader.shard
    model, dtype = load_model(folder, dtype=config.dtype, device=device, shard=shard)
    config = replace(config, max_num_batched_tokens=choose_step_tokens(config, model, device))
    rank = resolve_rank_model(config, model, dtype, device)
    all_reduce_min = None
    if leader is not None:
        leader.await_loaded(device)
        all_reduce_min = leader.all_reduce_min
    host_unit_count = count_host_units(config, rank.spec)
    unit_count = size_cache(config, rank, all_reduce_min)
    runners: list[ModelRunner] = []

    def make_executor_runner(eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None) -> Runner:
        rank_runner = make_runner(config, rank, unit_count, eos_token_ids, grammars)
        leading_runner: Runner = rank_runner if leader is None else leader.make_leading_runner(rank_runner, unit_count)
        rank_runner.record_decode_steps(count_sequences_max(config))
        runners.append(rank_runner)
        return leading_runner

    def close() -> None:
        while runners:
            runners.pop().close()
        if leader is not None:
            leader.close()

    def get_block_memory() -> BlockMemory:
        copier = runners[0].pool.block_copier
        if leader is None:
            return copier
        from engine.parallel.block_memory import RankedBlockMemory

        return RankedBlockMemory(leader, copier)

    return Executor(
        cache_spec=rank.spec,
        model_memory=LoadedModel(config, rank, folder, runners),
        unit_count=unit_count,
        max_model_len=rank.max_model_len,
        vocab_size=model.config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        make_runner=make_executor_runner,
        close=close,
        watch_for_loss=lambda on_lost: None if leader is None else leader.watch(on_lost),
        get_simulation_lag=lambda: None,
        step_tokens_max=config.step_tokens_max,
        host_unit_count=host_unit_count,
        load_bytes_max=compute_load_bytes_max(config, rank),
        get_copy_s=lambda: runners[0].pool.block_copier.copy_s if runners else 0.0,
        overlaps_steps=should_overlap(config, device),
        get_block_memory=get_block_memory,
        target_prefill_tokens=_choose_target_prefill_tokens(device, dtype),
    )


class LoadedModel:
    """Implements `engine.core.ModelMemory` for the weights and the pool of one device."""

    def __init__(self, config: EngineConfig, rank: RankModel, folder: Path, runners: list[ModelRunner]) -> None:
        """`folder`: that of the weights. `runners`: holds the runner once it is made."""
        self._config, self._rank, self._folder, self._runners = config, rank, folder, runners
        self._sleep_level = 0

    def _check_possible(self) -> None:
        """Raise ConfigError if this engine cannot sleep, or reload weights."""
        if self._config.tensor_parallel_size > 1:
            raise ConfigError(f"not with --tensor-parallel-size {self._config.tensor_parallel_size}: one rank only")

    def sleep(self, level: int) -> None:
        """See `ModelMemory`. Raises ConfigError."""
        self._check_possible()
        self._runners[0].release_pool()
        for weight in self._rank.model.weights:
            if level == 2:
                weight.release()
            elif self._rank.device.type != "cpu":
                weight.move_to(torch.device("cpu"))
        if self._rank.device.type == "cuda":  # torch keeps freed memory, which other processes could use
            reserved_bytes = torch.cuda.memory_reserved(self._rank.device)
            torch.cuda.empty_cache()
            freed_bytes = reserved_bytes - torch.cuda.memory_reserved(self._rank.device)
            log.info("asleep: %d MiB of GPU memory were given back", freed_bytes >> 20)
        self._sleep_level = level

    def wake(self) -> None:
        """See `ModelMemory`. Raises ModelError, OSError, RuntimeError."""
        if self._sleep_level == 2:
            load_weights(self._rank.model, self._folder, self._rank.dtype, self._rank.device)
        else:
            for weight in self._rank.model.weights:
                weight.move_to(self._rank.device)
        self._runners[0].allocate_pool()
        self._runners[0].record_decode_steps(count_sequences_max(self._config))
        self._sleep_level = 0

    def reload(self, path: str | None) -> None:
        """See `ModelMemory`. Raises ConfigError, ModelError, OSError, RuntimeError."""
        self._check_possible()
        folder = self._folder if path is None else locate_model(path)[1]
        reload_weights(self._rank.model, folder, self._rank.dtype, self._rank.device)
        self._folder = folder


def _choose_target_prefill_tokens(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return `SchedulerConfig.target_prefill_tokens` for a device."""
    if device.type != "cpu" or has_bf16_instructions(dtype):
        return None
    return CPU_TARGET_PREFILL_TOKENS
