"""The executor of a simulation: a tokenizer and no model, a cache of blocks without contents, steps that sleep."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.config import EngineConfig
from engine.core import Executor, Runner, SimulationLag
from engine.grammar_compiler import GrammarCompiler, find_unsupported_reason
from engine.model_files import ModelFiles, locate_model
from engine.simulation.constrained import ConstrainedAnswers
from engine.simulation.runner import SimulatedAnswers, SimulatedRunner
from engine.tiny.tokenizer import cached_tokenizer
from engine.transfer.simulated_memory import SimulatedBlockMemory
from options import ConfigError
from prompts import Tokenizer
from simulation.spec import SimulationSpec, read_spec

WORD_COUNT = 256
_WORD_PATTERN = re.compile(r" [a-z]{3,12}")
_MAX_PROBED_TOKENS = 20_000
"""Most tokens of the vocabulary that `sample_words` tries."""
BLOCKS_MAX = 10_000_000
"""Most blocks of the cache, and of host memory. A simulated block has no content, but takes 250 bytes and 7 us."""


def locate_tokenizer(model: str | None) -> ModelFiles:
    """Return where the tokenizer of a simulation is. Without `model`, that is a small built-in one."""
    return ModelFiles("simulated", cached_tokenizer()) if model is None else locate_model(model, weights=False)


def load_executor(config: EngineConfig, folder: Path) -> Executor:
    """Return what the engine needs to simulate a model: one that makes up tokens, and the sizes of its cache.

    The tokenizer is that of a folder. Raises ConfigError, TokenizerError.
    """
    assert config.simulate is not None
    spec = read_spec(config.simulate)
    _check_flags(config)
    tokenizer = Tokenizer.load(config.tokenizer or folder, with_fast_encoder=False)
    if spec.script_turns:
        unsupported_reason = find_unsupported_reason(tokenizer)
        if unsupported_reason is not None:
            raise ConfigError(f"--simulate: script: turns cannot be said: {unsupported_reason}")
    model = SimulatedModel(config, spec, tokenizer)
    # The blocks have no contents, so any head size is right. With this one, a unit of memory is one block.
    cache_group = GroupSpec(FULL_ATTENTION, layer_indices=(0,), num_kv_heads=1, head_dim=128, dtype_bytes=2)
    return Executor(
        model=model,
        cache_spec=CacheSpec(config.block_size, (cache_group,)),
        unit_count=_count_blocks(config, spec),
        host_unit_count=_count_host_blocks(config, spec),
        max_model_len=config.max_model_len or spec.max_model_len,
        vocab_size=tokenizer.vocab_size,
        dtype="simulated",
        device=spec.source,
        step_tokens_max=config.step_tokens_max,
        script_turns=spec.script_turns,
    )


def _check_flags(config: EngineConfig) -> None:
    """Raise ConfigError for a flag that has no meaning in a simulation."""
    is_set_by_flag = {
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes is not None,
    }
    for flag, is_set in is_set_by_flag.items():
        if is_set:
            raise ConfigError(f"{flag} means nothing with --simulate: its times and kv_tokens are those of the whole")


class SimulatedModel:
    """Model of a simulation: its runner sleeps instead of computing. Implements `engine.core.Model`.

    Its blocks have no contents. They can still be moved to peers if the spec gives the bytes of a block.
    """

    def __init__(self, config: EngineConfig, spec: SimulationSpec, tokenizer: Tokenizer) -> None:
        self._config = config
        self._spec = spec
        self._tokenizer = tokenizer
        self._word_ids = sample_words(tokenizer)
        self._script = _encode_script(spec, tokenizer)
        self._runner: SimulatedRunner | None = None
        """None before `make_runner` and after `close`."""

    def make_runner(self, eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None) -> Runner:
        """Make the runner of a simulated model: it draws made-up tokens, and sleeps as long as a real step would take.

        `eos_token_ids`: the tokenizer's end-of-sequence tokens. `grammars`: compiler of the grammars that requests
        give for their answers; None if requests may give none. Raises ConfigError if the simulation says where answers
        end, and the tokenizer has no token for an end.
        """
        spec = self._spec
        has_answer_ends = bool(self._script or spec.answer_tokens)
        if has_answer_ends and not eos_token_ids:
            raise ConfigError("--simulate: the tokenizer names no token that ends an answer")
        eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        constrained_answers = None
        if grammars is not None:
            constrained_answers = ConstrainedAnswers(grammars, self._tokenizer, eos_token_id, spec.answer_tokens)
        self._runner = SimulatedRunner(
            spec.make_step_times(self._config.step_tokens_max, self._config.time_scale),
            SimulatedAnswers(self._word_ids, eos_token_id, spec.answer_tokens, self._script),
            block_size=self._config.block_size,
            constrained_answers=constrained_answers,
        )
        return self._runner

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def get_block_memory(self) -> SimulatedBlockMemory | None:
        if self._spec.kv_bytes_per_token is None:
            return None
        block_bytes = self._spec.kv_bytes_per_token * self._config.block_size
        return SimulatedBlockMemory(block_bytes, self._spec.transfer_gb_s * 1e9 / self._config.time_scale)

    def watch_for_loss(self, on_lost: Callable[[str], None]) -> None:
        pass

    def get_copy_s(self) -> float:
        return 0.0

    def get_simulation_lag(self) -> SimulationLag | None:
        return None if self._runner is None else self._runner.simulation_lag

    def sleep(self, level: int) -> None:
        pass

    def wake(self) -> None:
        pass

    def reload(self, path: str | None) -> None:
        """Check that the folder exists. Raises ConfigError."""
        if path is not None:
            locate_model(path, weights=False)


def _count_blocks(config: EngineConfig, spec: SimulationSpec) -> int:
    """Return the blocks that the cache has on the device. Raises ConfigError."""
    if config.num_gpu_blocks_override is not None:
        flag = f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
        return _check_block_count(flag, config.num_gpu_blocks_override)
    block_count = spec.kv_tokens // config.block_size
    if block_count < 1:
        raise ConfigError(f"--simulate: kv_tokens {spec.kv_tokens}: expected at least a block ({config.block_size})")
    return _check_block_count(f"--simulate: kv_tokens {spec.kv_tokens}", block_count)


def _count_host_blocks(config: EngineConfig, spec: SimulationSpec) -> int:
    """Return the blocks of host memory that the cache has. Raises ConfigError."""
    memory_bytes = config.host_cache_memory
    if memory_bytes is None:
        return 0
    flag = f"--host-cache-memory {memory_bytes}"
    if spec.kv_bytes_per_token is None:
        raise ConfigError(f"{flag}: with --simulate SPEC must have kv_bytes_per_token")
    block_count = memory_bytes // (spec.kv_bytes_per_token * config.block_size)
    if block_count < 1:
        raise ConfigError(f"{flag}: holds no block of {config.block_size} tokens of KV")
    return _check_block_count(flag, block_count)


def _check_block_count(flag: str, block_count: int) -> int:
    """Return the number of blocks that a flag asks for. Raises ConfigError if it is too large."""
    if block_count > BLOCKS_MAX:
        raise ConfigError(f"{flag}: {block_count} blocks; expected at most {BLOCKS_MAX} in a simulation")
    return block_count


def sample_words(tokenizer: Tokenizer) -> list[int]:
    """Return token ids of short words, of which simulated answers are made.

    A client sends an answer back as text, in the history of its next request. The tokenizer encodes these words to the
    same ids again, so that the answer is found in the prefix cache. Without such words, other ids are returned.
    """
    hf_tokenizer = tokenizer.hf_tokenizer
    token_ids = list(range(tokenizer.vocab_size))
    random.Random(0).shuffle(token_ids)

    def is_stable_word(token_id: int) -> bool:
        """Return whether a token is a word that is encoded to the same token again, also after another word."""
        text = hf_tokenizer.decode([token_id])
        if not _WORD_PATTERN.fullmatch(text):
            return False
        encoded_ids: list[int] = hf_tokenizer.encode(text * 2, add_special_tokens=False).ids
        return encoded_ids == [token_id, token_id]

    word_ids = list(islice(filter(is_stable_word, token_ids[:_MAX_PROBED_TOKENS]), WORD_COUNT))
    return word_ids or [token_id for token_id in token_ids if token_id not in tokenizer.special_ids][:WORD_COUNT]


def _encode_script(spec: SimulationSpec, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each line of the script file, if there is one. Raises ConfigError."""
    if not isinstance(spec.script, str) or spec.script_turns:
        return []
    try:
        script_lines = Path(spec.script).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--simulate: script {spec.script!r}: {error}") from None
    encoded_lines = [
        tokenizer.hf_tokenizer.encode(line, add_special_tokens=False).ids for line in script_lines if line.strip()
    ]
    if not encoded_lines:
        raise ConfigError(f"--simulate: script {spec.script!r}: expected a text with at least one line")
    return encoded_lines
