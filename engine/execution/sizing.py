"""The device of a rank, the size of its cache, and the limits of its steps: from the flags, or from the hardware."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.cache.spec import FULL_KIND, CacheSpec, ceil_div
from engine.config import EngineConfig
from engine.execution.decode_graphs import CudaCapture
from engine.execution.device_pool import DevicePool, compute_unit_stride
from engine.execution.profiling import make_largest_step, measure_peak_bytes
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.grammar_compiler import GrammarCompiler
from engine.models import CausalLM
from engine.types import StepResult
from kernels import select_kernels
from options import ConfigError

log = logging.getLogger("engine.sizing")

CACHE_BYTES_MAX = 4 << 30
"""Largest cache on a CPU without a flag that sizes it; a quarter of the free memory, if that is less."""
CACHE_TOKENS_MAX = 1 << 20
"""Most tokens of the cache on a CPU without a flag that sizes it: a small model does not fill all that memory."""
GPU_STEP_BYTES = 1 << 30
"""Memory that a step on a GPU is assumed to need in a dry run, which measures nothing."""
GPU_GRAPH_BYTES = 1 << 29
"""Memory left for the CUDA graphs of decode steps."""
CPU_STEP_PRODUCTS = 4e11
"""Multiplications with weights in a step, for each thread: 1.5 s of a core with AVX512-BF16."""
CPU_STEP_TOKENS_MIN = 256
"""Fewest tokens of a step on a CPU: with fewer, reading the weights would take a good part of the step."""
MASK_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model, or one rank's part of it, with its device and the shape of its cache."""

    model: CausalLM
    spec: CacheSpec
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


def resolve_rank_model(config: EngineConfig, model: CausalLM, dtype: torch.dtype, device: torch.device) -> RankModel:
    """Make the `RankModel` of a loaded model. Raises ConfigError if --max-model-len is more than the model allows."""
    max_model_len = model.config.max_positions
    if config.max_model_len is not None:
        if config.max_model_len > max_model_len:
            raise ConfigError(
                f"--max-model-len {config.max_model_len}: this model was made for at most {max_model_len} tokens"
            )
        max_model_len = config.max_model_len
    return RankModel(model, model.make_cache_spec(config.block_size, dtype), dtype, device, max_model_len)


def size_cache(
    config: EngineConfig, rank: RankModel, all_reduce_min: Callable[[int, torch.device], int] | None = None
) -> int:
    """Return how many units the KV cache has on each tensor-parallel rank: what the rank with least memory can hold.

    A unit is a piece of memory for one or more blocks. `all_reduce_min`: each rank calls it with its own number, and
    gets the smallest number of all ranks; None: there is one rank. Raises ConfigError if a rank cannot hold one unit.
    """
    is_gpu = rank.device.type == "cuda"
    step_bytes = _measure_largest_step(config, rank) if is_gpu else 0
    try:
        unit_count = count_units(config, rank.spec, rank.device, step_bytes)
        check_fits(config, unit_count * compute_unit_stride(rank.spec), rank.device)
    except ConfigError:
        if all_reduce_min is not None:
            all_reduce_min(0, rank.device)  # so that the other ranks do not wait forever
        raise
    if all_reduce_min is None:
        return unit_count
    unit_count = all_reduce_min(unit_count, rank.device)
    if unit_count < 1:
        raise ConfigError("another rank has no memory for the cache: see its log")
    return unit_count


def _measure_largest_step(config: EngineConfig, rank: RankModel) -> int:
    """Run the largest forward step that the settings allow, and return the GPU memory that it needs, in bytes.

    Weights and KV cache are not counted. Raises ConfigError, which names the settings, if there is no memory for it.
    """
    config = replace(config, enforce_eager=True, host_cache_memory=None)  # no CUDA graphs, no host memory
    plan, unit_count = make_largest_step(
        rank.spec,
        token_count=config.step_tokens_max,
        sequence_count=count_sequences_max(config),
        length_max=rank.max_model_len,
        vocab_size=rank.model.config.vocab_size,
    )

    def run_twice() -> StepResult:
        """Make a runner and run the step: a second time, because the first step makes tables, which the second has."""
        runner = make_runner(config, rank, unit_count)
        runner.execute(plan)
        return runner.execute(plan)

    try:
        step_bytes = measure_peak_bytes(run_twice, rank.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--max-num-batched-tokens {config.step_tokens_max}, --max-num-seqs {config.max_num_seqs}, --max-model-len "
            f"{rank.max_model_len}: no memory for so large a step over so long a context: {error}"
        ) from error
    torch.cuda.empty_cache()
    log.info("the largest step needs %d MiB besides weights and cache", step_bytes >> 20)
    return step_bytes


def make_runner(
    config: EngineConfig,
    rank: RankModel,
    unit_count: int,
    eos_token_ids: tuple[int, ...] = (),
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """Allocate a KV cache of `unit_count` units, and make the runner that computes this process's forward steps.

    `eos_token_ids` end an answer, and `grammars` constrain answers. Both matter only on rank 0, which samples.
    """
    device = rank.device
    host_unit_count = count_host_units(config, rank.spec)
    pool = DevicePool(rank.spec, unit_count, device=device, dtype=rank.dtype, host_unit_count=host_unit_count)
    runner_config = RunnerConfig(
        max_model_len=rank.max_model_len,
        max_num_seqs=count_sequences_max(config),
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        overlaps_steps=config.overlaps_steps(device.type),
        mask_threads=count_mask_threads(config, device),
    )
    uses_cuda_graphs = device.type == "cuda" and not config.enforce_eager
    capture = CudaCapture(device) if uses_cuda_graphs else None
    kernels = select_kernels(device, config.attention_backend or "auto")
    return ModelRunner(rank.model, pool, runner_config, kernels=kernels, capture=capture, grammars=grammars)


def count_sequences_max(config: EngineConfig) -> int:
    """Return the largest number of sequences in a step."""
    return min(config.max_num_seqs, config.step_tokens_max)


def count_mask_threads(config: EngineConfig, device: torch.device) -> int:
    """Return the number of threads that make masks: more with a GPU, because the host then has little other work."""
    if device.type == "cpu":
        return config.num_threads
    return max(config.num_threads, min(MASK_THREADS_MAX, (os.cpu_count() or 1) // 2))


def select_rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of one rank; each rank has its own GPU. Raises ConfigError."""
    device, size = resolve_device(config.device), config.tensor_parallel_size
    if size == 1 or device.type == "cpu":
        return device
    if ":" in config.device:
        raise ConfigError(f"--device {config.device!r}: with --tensor-parallel-size {size}, expected cuda or cpu")
    gpu_count = torch.cuda.device_count()
    if gpu_count < size:
        raise ConfigError(f"--tensor-parallel-size {size}: expected at most the number of GPUs here ({gpu_count})")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def resolve_device(device_name: str) -> torch.device:
    """Return the device that --device names. Raises ConfigError if it is unknown, or cannot be used here."""
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
    """Return how many units of memory the KV cache has on a device: as the settings say, or else what is free.

    A unit holds one or more blocks. On a CPU, free memory is used for at most `CACHE_TOKENS_MAX` tokens. `step_bytes`:
    memory that a forward step on a GPU needs. Raises ConfigError if the memory does not hold one unit.
    """
    blocks_per_unit = spec.blocks_per_unit(FULL_KIND)
    if config.num_gpu_blocks_override is not None:
        return ceil_div(config.num_gpu_blocks_override, blocks_per_unit)
    if config.kv_cache_memory_bytes is not None:
        source = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
        memory_bytes = config.kv_cache_memory_bytes
    else:
        source = "the free memory"
        memory_bytes = _compute_free_bytes(config, device, step_bytes)
    unit_bytes = compute_unit_stride(spec)
    unit_count = memory_bytes // unit_bytes
    if config.kv_cache_memory_bytes is None and device.type == "cpu":
        unit_count = min(unit_count, ceil_div(CACHE_TOKENS_MAX, spec.block_size * blocks_per_unit))
    if unit_count < 1:
        raise ConfigError(f"{source}: {memory_bytes} bytes hold no unit of the cache ({unit_bytes} bytes)")
    return unit_count


def check_fits(config: EngineConfig, cache_bytes: int, device: torch.device) -> None:
    """Raise ConfigError if a flag asks for a cache that is larger than the device's whole memory."""
    if config.num_gpu_blocks_override is not None:
        _check_memory(f"--num-gpu-blocks-override {config.num_gpu_blocks_override}", cache_bytes, device)
    elif config.kv_cache_memory_bytes is not None:
        _check_memory(f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}", cache_bytes, device)


def _check_memory(flag: str, required_bytes: int, device: torch.device) -> None:
    """Raise ConfigError if `required_bytes` exceed the device's whole memory. `flag`: named in the error."""
    if device.type == "cuda":
        memory_owner = str(device)
        memory_bytes = torch.cuda.mem_get_info(device)[1]
    else:
        memory_owner = "this machine"
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required_bytes > memory_bytes:
        raise ConfigError(
            f"{flag}: takes {required_bytes} bytes; expected at most the memory of {memory_owner}, {memory_bytes} bytes"
        )


def count_host_units(config: EngineConfig, spec: CacheSpec) -> int:
    """Return how many units of host memory each tensor-parallel rank has, for blocks that are evicted from its device.

    Raises ConfigError if --host-cache-memory is less than a unit or more than this machine has, or caching is off.
    """
    memory_bytes = config.host_cache_memory
    if memory_bytes is None:
        return 0
    flag = f"--host-cache-memory {memory_bytes}"
    if not config.enable_prefix_caching:
        raise ConfigError(f"{flag} means nothing with --no-enable-prefix-caching")
    _check_memory(flag, memory_bytes, torch.device("cpu"))
    unit_bytes = compute_unit_stride(spec)
    unit_count = memory_bytes // config.tensor_parallel_size // unit_bytes
    if unit_count < 1:
        raise ConfigError(f"{flag}: holds no unit of the cache ({unit_bytes} bytes) on each rank")
    return unit_count


def choose_step_tokens(config: EngineConfig, model: CausalLM, device: torch.device) -> int:
    """Return the most tokens of a step: the value of the flag, or as many as a GPU needs to compute at full speed.

    A CPU needs far fewer for that, and decoding sequences wait for the whole step. So for a large model on a CPU, a
    step has the tokens that take about a second.
    """
    if config.max_num_batched_tokens is not None or device.type != "cpu":
        return config.step_tokens_max
    weight_count = sum(math.prod(weight.shape) for weight in model.weights if weight.is_linear)
    fitting_tokens = int(CPU_STEP_PRODUCTS * config.num_threads / weight_count)
    power_of_two = 1 << max(fitting_tokens.bit_length() - 1, 0)
    return min(max(power_of_two, CPU_STEP_TOKENS_MIN, config.max_num_seqs), config.step_tokens_max)


def _compute_free_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """Return the bytes of memory that the cache of one rank may take.

    On a GPU: the free memory, less the share that must stay free, a step (`step_bytes`) and CUDA graphs. On a CPU: a
    quarter of the free memory, at most CACHE_BYTES_MAX, which all ranks share.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - config.gpu_memory_utilization) * total - step_bytes - GPU_GRAPH_BYTES)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CACHE_BYTES_MAX, available // 4) // config.tensor_parallel_size
