"""Puts an engine together from its config: checkpoint, cache, scheduler, runner, publisher, core.

The one place that knows all the parts; used by the core process and by `LLM`. Sizes the cache. Opens the publisher's
sockets, nothing else; whoever assembles must `close`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.spec import MAMBA, CacheSpec
from engine.config import EngineConfig
from engine.core import EngineCore, Runner
from engine.execution.runner import ModelRunner
from engine.execution.sizing import make_runner, rank_device, resolve_max_len, sequences_max, size_cache
from engine.messages import CoreInfo
from engine.models import HfConfig, Shard, build_model
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.types import SamplingParams
from events import Event
from events.publisher import EventPublisher
from events.sources import GroupInfo
from kernels.cpu.packed import multiplies_in_hardware
from options import ConfigError
from prompts import Tokenizer

if TYPE_CHECKING:
    from engine.parallel.ranks import Leader

log = logging.getLogger("engine.assembly")

BUILTIN_PRESET = "tiny"
CPU_ENOUGH_PROMPT_TOKENS = 256
"""Where a core multiplies at its full rate from a few rows on, as all but those with bf16 in hardware do."""
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]

_DEFAULT_SAMPLING = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "max_new_tokens": (int,),
}


@dataclass(slots=True)
class Assembled:
    """An engine ready to step, and what loading found out."""

    core: EngineCore
    info: CoreInfo
    publisher: EventPublisher | None
    runner: ModelRunner
    """Of this process's part of the model."""
    leader: Leader | None = None
    """Of the other ranks, with tensor parallelism."""

    def close(self) -> None:
        """Flush and free the publisher's addresses, and end the other ranks. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
        if self.leader is not None:
            self.runner.forget_decode_steps()
            self.leader.close()
            self.leader = None


def locate(model: str | None) -> tuple[str, Path]:
    """(name, folder) of a checkpoint: a folder, a name in the local Hugging Face cache, or the built-in model.

    A hub name (`org/name`) that is not in the cache is fetched, unless HF_HUB_OFFLINE is set. Raises ConfigError.
    """
    if model is None:
        from engine.tiny.model import PRESETS, cached_model

        return BUILTIN_PRESET, cached_model(PRESETS[BUILTIN_PRESET])
    folder = Path(model).expanduser()
    if folder.is_dir():
        return model, folder
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    main = hub / "refs" / "main"
    if main.is_file():
        snapshot = hub / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return model, snapshot
    if _HUB_NAME.fullmatch(model) and not os.environ.get("HF_HUB_OFFLINE"):
        return model, _download(model)
    raise ConfigError(
        f"MODEL {model!r}: no such folder, and not in the Hugging Face cache ({hub}); expected a folder with "
        "config.json and safetensors, or the name of a model on the hub"
    )


def _download(name: str) -> Path:
    """Fetch a checkpoint into the Hugging Face cache. Raises ConfigError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"MODEL {name!r}: no such folder; to fetch it from the hub, install huggingface_hub"
        ) from error
    log.info("fetching %s from the Hugging Face hub", name)
    try:
        return Path(snapshot_download(name, allow_patterns=_CHECKPOINT_FILES))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors: no network, no such model, no access
        raise ConfigError(f"MODEL {name!r}: no such folder, and the hub does not give it: {error}") from error


def assemble(config: EngineConfig, eos_token_ids: tuple[int, ...] | None = None) -> Assembled:
    """Load the model and build everything. `eos_token_ids`: from a tokenizer that is already loaded.

    Raises ConfigError, ModelError, TokenizerError (all ValueErrors or with a clear message), MemoryError,
    RunnerLost where another rank ends.
    """
    if config.tensor_parallel_size == 1:
        return _assemble(config, eos_token_ids, None)
    from engine.parallel.ranks import Leader  # one rank needs none of it

    rank_device(config, 0)  # what these refuse they refuse before any process is started
    build_model(HfConfig.read(locate(config.model)[1]), Shard(0, config.tensor_parallel_size))
    leader = Leader(config.tensor_parallel_size)
    try:
        return _assemble(config, eos_token_ids, leader)
    except BaseException:
        leader.close()
        raise


def _assemble(config: EngineConfig, eos_token_ids: tuple[int, ...] | None, leader: Leader | None) -> Assembled:
    torch.set_num_threads(config.num_threads)
    name, folder = locate(config.model)
    device = rank_device(config, 0)
    if leader is not None:
        leader.load(config, folder)
    shard = None if leader is None else leader.shard
    model, dtype = load_model(folder, dtype=config.dtype, device=device, shard=shard)
    spec = model.cache_spec(config.block_size, dtype)
    max_model_len = resolve_max_len(config, model)
    agree = None
    if leader is not None:
        leader.await_loaded(device)
        agree = leader.smallest
    unit_count = size_cache(config, model, spec, dtype=dtype, device=device, agree=agree)
    if eos_token_ids is None:
        eos_token_ids = Tokenizer.load(config.tokenizer or folder, cache_bytes=0).eos_token_ids
    cache = KVCache(
        spec,
        unit_count,
        enable_prefix_caching=config.enable_prefix_caching,
        step_tokens_max=config.max_num_batched_tokens,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=sequences_max(config),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        enough_prompt_tokens=_enough_prompt_tokens(device, dtype),
    )
    scheduler = Scheduler(scheduler_config, cache)
    runner = make_runner(
        config, model, spec, unit_count,
        dtype=dtype, device=device, max_model_len=max_model_len, eos_token_ids=tuple(eos_token_ids),
    )  # fmt: skip
    leading: Runner = runner if leader is None else leader.lead(runner, unit_count, max_model_len)
    runner.record_decode_steps(sequences_max(config))
    groups = group_infos(spec)
    publisher = None
    if config.kv_events.enabled:
        publisher = EventPublisher(
            config.kv_events,
            model=name,
            block_size=config.block_size,
            groups=tuple(groups),
            legacy=config.legacy_events,
        )
    core = EngineCore(scheduler, leading, _discard if publisher is None else publisher.publish)
    info = CoreInfo(
        model_name=name,
        model_path=str(folder),
        max_model_len=scheduler.token_limit,
        block_size=config.block_size,
        num_blocks=unit_count * spec.blocks_per_unit(0),
        vocab_size=model.config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        eos_token_ids=list(eos_token_ids),
        groups=groups,
        event_sources=[] if publisher is None else [publisher.source()],
        prefix_caching=config.enable_prefix_caching,
        default_sampling=_default_sampling(folder) if config.generation_config == "auto" else {},
    )
    return Assembled(core, info, publisher, runner, leader)


def _enough_prompt_tokens(device: torch.device, dtype: torch.dtype) -> int | None:
    if device.type != "cpu" or multiplies_in_hardware(dtype):
        return None
    return CPU_ENOUGH_PROMPT_TOKENS


def group_infos(spec: CacheSpec) -> list[GroupInfo]:
    """The answer of /kv_cache/groups: attention groups, then recurrent state where the model has it."""
    groups = [
        GroupInfo(group_idx=i, kind=group.kind, block_size=spec.block_size, sliding_window=group.sliding_window)
        for i, group in enumerate(spec.groups)
    ]
    if spec.state is not None:
        groups.append(GroupInfo(group_idx=len(groups), kind=MAMBA, block_size=spec.block_size))
    return groups


def _default_sampling(folder: Path) -> dict[str, float | int]:
    """Sampling parameters of generation_config.json under their request names."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    found: dict[str, float | int] = {}
    for name, types in _DEFAULT_SAMPLING.items():
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, types) and not isinstance(value, bool):
            found["max_tokens" if name == "max_new_tokens" else name] = value
    try:
        msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; --generation-config vllm does without it") from error
    return found


def _discard(events: Collection[Event]) -> None:
    """Where events are off."""
