"""Puts an engine together from its config: executor, cache, scheduler, publisher and core.

This is the only module that knows all parts. The core process and `LLM` use it. An assembled engine has open sockets
and must be closed. Torch is imported only to load a real model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_KIND
from engine.config import EngineConfig
from engine.core import EngineCore, Executor, Model
from engine.core_messages import CoreInfo
from engine.grammar_compiler import GrammarCompiler, GrammarVocabulary, find_unsupported_reason
from engine.model_files import ModelFiles, read_default_sampling
from engine.scheduler import Scheduler, SchedulerConfig
from engine.transfer.block_exchange import BlockExchange
from engine.transfer.fingerprint import ModelFingerprint
from engine.transfer.service import KVTransfers
from events import Event
from events.publisher import EventPublisher
from events.sources import EventSource
from options import ConfigError
from prompts import Tokenizer

log = logging.getLogger("engine")


@dataclass(slots=True)
class AssembledEngine:
    """An engine that is ready to serve requests, with the parts that must be closed when it stops."""

    core: EngineCore
    info: CoreInfo
    publisher: EventPublisher | None
    model: Model
    grammars: GrammarCompiler | None
    close: Callable[[], None]
    """Ends transfers, sends the last KV cache events, and stops the other parts. A second call does nothing."""


def locate_model_files(config: EngineConfig) -> ModelFiles:
    """Return where the model is, or the tokenizer of a simulation. Raises ConfigError."""
    if config.simulate is None:
        from engine.executor import resolve_model

        return resolve_model(config.model)
    from engine.simulation.executor import locate_tokenizer

    return locate_tokenizer(config.model)


def assemble(config: EngineConfig, tokenizer: Tokenizer | None = None) -> AssembledEngine:
    """Load the model, or a simulation of one, and build the engine around it.

    `tokenizer`: the model's, if the caller has loaded it. Raises ConfigError, ModelError, TokenizerError (all
    ValueErrors), OSError, MemoryError, and RunnerLostError if another rank ends.
    """
    files = locate_model_files(config)
    if config.simulate is None:
        _check_model_config(files.folder)
    default_sampling = read_default_sampling(files.folder) if config.generation_config == "auto" else {}
    if tokenizer is None:
        tokenizer = Tokenizer.load(config.tokenizer or files.folder, with_fast_encoder=False)
    no_grammar_reason = find_unsupported_reason(tokenizer)
    executor = _load_executor(config, files.folder)
    eos_token_ids = tuple(tokenizer.eos_token_ids)
    with ExitStack() as parts:  # an error closes the parts made so far, the last one first
        parts.callback(executor.model.close)
        grammars = None
        if no_grammar_reason is None:
            grammars = GrammarCompiler(partial(GrammarVocabulary, tokenizer, executor.vocab_size))
            parts.callback(grammars.close)
        scheduler = _make_scheduler(config, executor, frozenset(eos_token_ids))
        runner = executor.model.make_runner(eos_token_ids, grammars)
        publisher = _make_publisher(config, files.name, executor)
        if publisher is not None:
            parts.callback(publisher.close)
        transfers = _start_transfers(config, files.folder, scheduler.cache, executor)
        if transfers is not None:
            parts.callback(transfers.close)
        close_parts = parts.pop_all().close  # no error: the engine closes the parts when it stops
    core = EngineCore(
        scheduler,
        runner,
        _ignore_events if publisher is None else publisher.publish,
        overlaps_steps=executor.overlaps_steps,
        grammars=grammars,
        transfers=transfers,
        model=executor.model,
    )
    info = msgspec.structs.replace(
        _describe_model(config, files, executor, scheduler),
        event_sources=[] if publisher is None else [_describe_source(publisher, transfers)],
        default_sampling=default_sampling,
        no_constraint_reason=no_grammar_reason,
        kv_transfer_port=None if transfers is None else transfers.port,
    )
    return AssembledEngine(core, info, publisher, executor.model, grammars, close_parts)


def _make_publisher(config: EngineConfig, model_name: str, executor: Executor) -> EventPublisher | None:
    """Make the publisher of KV cache events, by which routers know what is cached; None if they are switched off."""
    if not config.kv_events.is_enabled:
        return None
    groups = tuple(executor.cache_spec.list_group_infos())
    return EventPublisher(config.kv_events, model=model_name, block_size=config.block_size, groups=groups)


def _ignore_events(events: Iterable[Event]) -> None:
    """Publish no KV cache events: they are never made, because nobody iterates over them."""


def _check_model_config(folder: Path) -> None:
    """Raise ModelError for a config.json that cannot be read, at once: reading the weights may take minutes."""
    from engine.models import HfConfig

    HfConfig.read(folder)


def _load_executor(config: EngineConfig, folder: Path) -> Executor:
    """Load the model of a folder, or make a simulation. Torch is imported only for the former."""
    if config.simulate is None:
        from engine.executor import load_executor

        return load_executor(config, folder)
    from engine.simulation.executor import load_executor as load_simulation

    return load_simulation(config, folder)


def _describe_model(config: EngineConfig, files: ModelFiles, executor: Executor, scheduler: Scheduler) -> CoreInfo:
    """Return the facts about the loaded model, its KV cache and its limits that the API server needs."""
    blocks_per_unit = executor.cache_spec.blocks_per_unit(FULL_KIND)
    return CoreInfo(
        model_name=files.name,
        model_path=str(files.folder),
        max_model_len=scheduler.token_limit,
        block_size=config.block_size,
        num_blocks=executor.unit_count * blocks_per_unit,
        num_host_blocks=executor.host_unit_count * blocks_per_unit,
        vocab_size=executor.vocab_size,
        dtype=executor.dtype,
        device=executor.device,
        groups=executor.cache_spec.list_group_infos(),
        event_sources=[],
        prefix_caching=config.enable_prefix_caching,
        prefill_order=config.prefill_order,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=executor.step_tokens_max,
        script=executor.script_turns,
    )


def _make_scheduler(config: EngineConfig, executor: Executor, eos_token_ids: frozenset[int]) -> Scheduler:
    """Make the scheduler and its KV cache, with the sizes that loading the model left room for."""
    cache = KVCache(
        executor.cache_spec,
        executor.unit_count,
        enable_prefix_caching=config.enable_prefix_caching,
        step_tokens_max=executor.step_tokens_max,
        adaptive_eviction=config.eviction_policy == "adaptive",
        host_unit_count=executor.host_unit_count,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=min(config.max_num_seqs, executor.step_tokens_max),  # a step computes a token of every sequence
        max_num_batched_tokens=executor.step_tokens_max,
        max_model_len=executor.max_model_len,
        eos_token_ids=eos_token_ids,
        target_prefill_tokens=executor.target_prefill_tokens,
        prefill_order=config.prefill_order,
    )
    scheduler = Scheduler(scheduler_config, cache)
    _warn_of_low_limit(config, scheduler.token_limit)
    return scheduler


def _warn_of_low_limit(config: EngineConfig, token_limit: int) -> None:
    """Log settings that cannot take effect, because a sequence may have no more than `token_limit` tokens."""
    if config.max_model_len is not None and token_limit < config.max_model_len:
        log.warning(
            "--max-model-len %d: the cache holds %d tokens of one sequence, and longer prompts are refused; give the "
            "cache more memory (--kv-cache-memory-bytes)",
            config.max_model_len,
            token_limit,
        )
    if config.enable_prefix_caching and config.block_size >= token_limit:
        log.warning(
            "--block-size %d: sequences of at most %d tokens fill no block, so no prompt is cached",
            config.block_size,
            token_limit,
        )


def _start_transfers(config: EngineConfig, folder: Path, cache: KVCache, executor: Executor) -> KVTransfers | None:
    """Start the exchange of cached blocks with other engines; None without --kv-transfer.

    Only engines with equal weights, dtypes and kinds of device exchange blocks. `folder`: folder of the loaded model.
    """
    if config.kv_transfer.port is None:
        return None
    if not config.enable_prefix_caching:
        raise ConfigError("--kv-transfer means nothing with --no-enable-prefix-caching")
    memory = executor.model.get_block_memory()
    if memory is None:
        raise ConfigError("--kv-transfer: with --simulate SPEC must have kv_bytes_per_token")
    device = executor.device.partition(":")[0]
    content_bytes = tuple(memory.get_block_bytes(kind) for kind in range(len(cache.spec.block_bytes_by_kind())))
    facts = (cache.spec, content_bytes, f"{executor.dtype} on {device}", config.tensor_parallel_size, config.simulate)
    exchange = BlockExchange(cache, memory, ModelFingerprint(folder, facts))
    return KVTransfers(config.kv_transfer, exchange, computes_on_cpu=device == "cpu")


def _describe_source(publisher: EventPublisher, transfers: KVTransfers | None) -> EventSource:
    """Return this engine's entry in the response of `GET /kv_event_sources`, by which a router finds its sockets."""
    offer = None if transfers is None else transfers.describe()
    return msgspec.structs.replace(publisher.describe_source(), kv_transfer=offer)
