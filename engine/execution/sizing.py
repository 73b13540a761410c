"""Which device a rank computes on, and how much of its memory is the cache."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.execution.decode_graphs import CudaCapture
from engine.execution.device_pool import DevicePool, unit_stride_bytes, units_for_memory
from engine.execution.profiling import peak_step_bytes
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.grammars import GrammarCompiler
from engine.models import CausalLM
from kernels import select_kernels
from options import ConfigError

log = logging.getLogger("engine.sizing")

CACHE_BYTES_MAX = 4 << 30
"""Cache on a CPU without a flag that sizes it; or a quarter of the free memory, if that is less."""
CACHE_TOKENS_MAX = 1 << 20
"""Without a flag a small model on a CPU does not fill that memory: enough is enough."""
GPU_STEP_BYTES = 1 << 30
"""Memory of a step on a GPU, where it is not measured: in a dry run."""
GPU_GRAPH_BYTES = 1 << 29
"""Memory left for CUDA graphs of decode steps."""
CPU_STEP_PRODUCTS = 4e11
"""Products of a weight and a number in a step, a thread: 1.5 s of a core with AVX512-BF16."""
CPU_STEP_TOKENS_MIN = 256
"""Fewest tokens of a step: with fewer, reading the weights takes a good part of it."""
MASK_THREADS_MAX = 8
LOAD_TIME_SHARE = 0.025
"""Share of a decode step on a CPU for copies of blocks from and to host memory: 3 % in truth, as not all is counted."""
COPY_COST = 2
"""Cost of a copied byte, which is read and written, in bytes of weights, which are only read."""
BLOCK_COST_BYTES = 1_200_000
"""Further cost of a copied block, to plan and announce it: some 50 us beside a small model."""


def sequences_max(config: EngineConfig) -> int:
    """Most sequences that a step may have."""
    return min(config.max_num_seqs, config.step_tokens_max)


def size_cache(
    config: EngineConfig,
    model: CausalLM,
    spec: CacheSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    all_reduce_min: Callable[[int, torch.device], int] | None = None,
) -> int:
    """Units of the cache that there is memory for, on every rank. Raises ConfigError if there are none.

    `all_reduce_min`: the smallest number of all ranks, which must all be here together; None: one rank.
    """
    step_bytes, max_model_len = 0, resolve_max_len(config, model)
    if device.type == "cuda":

        def make_profiling_runner(units: int) -> ModelRunner:
            return make_runner(
                replace(config, enforce_eager=True, host_cache_memory=None), model, spec, units,
                dtype=dtype, device=device, max_model_len=max_model_len, eos_token_ids=(),
            )  # fmt: skip

        tokens = config.step_tokens_max
        try:
            step_bytes = peak_step_bytes(
                make_profiling_runner, spec, tokens, sequences_max(config), max_model_len, device
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens}, --max-num-seqs {config.max_num_seqs}, --max-model-len "
                f"{max_model_len}: no memory for so large a step over so long a context: {error}"
            ) from error
        log.info("the largest step needs %d MiB besides weights and cache", step_bytes >> 20)
    try:
        count = count_units(config, spec, device, step_bytes)
        check_fits(config, count * unit_stride_bytes(spec), device)
    except ConfigError:
        if all_reduce_min is not None:
            all_reduce_min(0, device)  # the others wait for it
        raise
    if all_reduce_min is not None and (count := all_reduce_min(count, device)) < 1:
        raise ConfigError("another rank has no memory for the cache: see its log")
    return count


def make_runner(
    config: EngineConfig,
    model: CausalLM,
    spec: CacheSpec,
    unit_count: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """The runner of this process's model; made alike on every rank, but for `grammars`: only the leader samples."""
    pool = DevicePool(spec, unit_count, device=device, dtype=dtype, host_unit_count=count_host_units(config, spec))
    runner_config = RunnerConfig(
        max_model_len=max_model_len, eos_token_ids=eos_token_ids, seed=config.seed,
        overlaps_steps=should_overlap(config, device), mask_threads=mask_threads(config, device),
    )  # fmt: skip
    return ModelRunner(
        model, pool, runner_config, kernels=select_kernels(device, config.attention_backend or "auto"),
        capture=CudaCapture(device) if device.type == "cuda" and not config.enforce_eager else None, grammars=grammars,
    )  # fmt: skip


def mask_threads(config: EngineConfig, device: torch.device) -> int:
    """Threads that make masks: beside a GPU the host has little else to do."""
    if device.type == "cpu":
        return config.num_threads
    return max(config.num_threads, min(MASK_THREADS_MAX, (os.cpu_count() or 1) // 2))


def should_overlap(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are planned and begun while the one before is computed."""
    if config.tensor_parallel_size > 1:  # followers would have to be told the tokens that rank 0 draws
        return False
    return config.overlap == "on" or (config.overlap == "auto" and device.type != "cpu")


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of one rank: of several GPUs, each rank's own. Raises ConfigError."""
    device, size = resolve_device(config.device), config.tensor_parallel_size
    if size == 1 or device.type == "cpu":
        return device
    if ":" in config.device:
        raise ConfigError(f"--device {config.device!r}: with --tensor-parallel-size {size}, expected cuda or cpu")
    if (count := torch.cuda.device_count()) < size:
        raise ConfigError(f"--tensor-parallel-size {size}: expected at most the number of GPUs here ({count})")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def resolve_device(device_name: str) -> torch.device:
    if device_name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device_name)
    except RuntimeError as error:
        raise ConfigError(f"--device {device_name!r}: expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device_name!r}: no usable CUDA device here; nvidia-smi lists the GPUs, --device cpu needs none"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device_name!r}: expected auto, cpu, cuda or cuda:N")
    return device


def count_units(config: EngineConfig, spec: CacheSpec, device: torch.device, step_bytes: int = GPU_STEP_BYTES) -> int:
    """Units of the cache, from the flags or from the memory that is free. Raises ConfigError if not even one fits.

    `step_bytes`: what a step on a GPU needs besides weights and cache.
    """
    per_unit = spec.blocks_per_unit(0)
    if config.num_gpu_blocks_override is not None:
        return -(-config.num_gpu_blocks_override // per_unit)
    if config.kv_cache_memory_bytes is not None:
        flag, budget = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}", config.kv_cache_memory_bytes
        count = units_for_memory(spec, budget)
    else:
        flag, budget = "the free memory", _free_memory(config, device, step_bytes)
        count = units_for_memory(spec, budget)
        if device.type == "cpu":
            count = min(count, -(-CACHE_TOKENS_MAX // (spec.block_size * per_unit)))
    if count < 1:
        raise ConfigError(f"{flag}: {budget} bytes hold no unit of the cache ({spec.unit_bytes} bytes)")
    return count


def check_fits(config: EngineConfig, cache_bytes: int, device: torch.device) -> None:
    """Raises ConfigError where a flag asks for a cache that a device like this cannot hold, before somebody tries."""
    if config.num_gpu_blocks_override is not None:
        _check_memory(f"--num-gpu-blocks-override {config.num_gpu_blocks_override}", cache_bytes, device)
    elif config.kv_cache_memory_bytes is not None:
        _check_memory(f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}", cache_bytes, device)


def _check_memory(flag: str, required_bytes: int, device: torch.device) -> None:
    memory_owner, memory_bytes = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory_owner, memory_bytes = str(device), torch.cuda.mem_get_info(device)[1]
    if required_bytes > memory_bytes:
        raise ConfigError(
            f"{flag}: takes {required_bytes} bytes; expected at most the memory of {memory_owner}, {memory_bytes} bytes"
        )


def count_host_units(config: EngineConfig, spec: CacheSpec) -> int:
    """Units of host memory under each rank's cache. Raises ConfigError where they are none, or too many."""
    memory = config.host_cache_memory
    if memory is None:
        return 0
    flag = f"--host-cache-memory {memory}"
    if not config.enable_prefix_caching:
        raise ConfigError(f"{flag} means nothing with --no-enable-prefix-caching")
    _check_memory(flag, memory, torch.device("cpu"))
    count = units_for_memory(spec, memory // config.tensor_parallel_size)
    if count < 1:
        raise ConfigError(f"{flag}: holds no unit of the cache ({unit_stride_bytes(spec)} bytes) on each rank")
    return count


def step_tokens(config: EngineConfig, model: CausalLM, device: torch.device) -> int:
    """Return the most tokens that a step computes: those of the flag, or as many as fill a GPU.

    Far fewer fill a CPU, and decoding sequences wait for the whole step, so a large model there takes the tokens of
    about a second.
    """
    if config.max_num_batched_tokens is not None or device.type != "cpu":
        return config.step_tokens_max
    weight_count = sum(math.prod(weight.shape) for weight in model.weights if weight.is_linear)
    fitting_tokens = int(CPU_STEP_PRODUCTS * config.num_threads / weight_count)
    return min(
        max(1 << max(fitting_tokens.bit_length() - 1, 0), CPU_STEP_TOKENS_MIN, config.max_num_seqs),
        config.step_tokens_max,
    )


def load_bytes_max(
    config: EngineConfig, model: CausalLM, spec: CacheSpec, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that a step with decodes copies from host memory, and there to make room for them.

    On a CPU the thread copies that reads every weight in a step, so the bytes of the weights say what share of the step
    it takes. A GPU's link is so much slower than its memory that loads within
    such a share would take longer than computing the same: there a step loads as much as it could compute.
    """
    if device.type != "cpu":
        return config.step_tokens_max * sum(group.token_bytes for group in spec.groups)
    linear_weights = [weight for weight in model.weights if weight.is_linear]
    weights = sum(math.prod(weight.shape) * (weight.dtype or dtype).itemsize for weight in linear_weights)
    return max(1, int(weights * LOAD_TIME_SHARE / (COPY_COST + BLOCK_COST_BYTES / spec.block_bytes(0))))


def _free_memory(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - config.gpu_memory_utilization) * total - step_bytes - GPU_GRAPH_BYTES)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CACHE_BYTES_MAX, available // 4) // config.tensor_parallel_size  # the ranks share it


def resolve_max_len(config: EngineConfig, model: CausalLM) -> int:
    model_max_len = model.config.max_positions
    if config.max_model_len is None:
        return model_max_len
    if config.max_model_len > model_max_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: this model was made for at most {model_max_len} tokens"
        )
    return config.max_model_len
