"""Two ranks against one: the same greedy tokens for every family, through the whole core; and what cannot be split.

The second process is started once for all families; the test process is rank 0.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.core import EngineCore, Runner
from engine.execution import sizing
from engine.execution.sizing import RankModel, make_runner, resolve_rank_model, size_cache
from engine.models import CausalLM, HfConfig, ModelError, Shard, build_model
from engine.models.loader import load_model
from engine.models.shard import DimShard
from engine.parallel.leader import Leader, _FollowerHandle
from engine.parallel.messages import PlanDecoder, PlanEncoder, PlanMessage
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import Recipe, cached_model
from engine.types import (
    BlockCopy,
    BlockId,
    Chunk,
    CopyDirection,
    Request,
    RunnerLostError,
    SamplingParams,
    Sequence,
    StepPlan,
    TokenLogprobs,
    UnitId,
)
from options import ConfigError

pytestmark = pytest.mark.long

MODELS = {
    "qwen3": Recipe(max_shard_size="400KB"),
    "qwen2": Recipe(family="qwen2"),
    "llama": Recipe(family="llama", tie_embeddings=False),
    "one-kv-head": Recipe(family="llama", kv_heads=1),  # both ranks hold it
    "odd-vocabulary": Recipe(family="llama", vocab_size=2051, tie_embeddings=False),  # one rank has a token less
    "mistral": Recipe(family="mistral"),
    "granite": Recipe(family="granite"),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_moe": Recipe(family="qwen3_moe"),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "qwen3_5-one-key-head": Recipe(family="qwen3_5", layers=3, kv_heads=1),
    "granitemoehybrid": Recipe(family="granitemoehybrid", layers=3),  # one Mamba group: its norm spans the ranks
    "bamba": Recipe(family="bamba", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
    "lfm2": Recipe(family="lfm2", layers=3),
}
GAPS = {"qwen3_5": 2e-3, "qwen3_5-one-key-head": 2e-3}
"""How close the two likeliest tokens are where rounding decides; else 1e-4. See test_runner_parity."""
BLOCK_SIZE = 8
UNITS = 96
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def leader() -> Iterator[Leader]:
    """Two ranks, this process being the first."""
    torch.set_num_threads(1)
    leader = Leader(2)
    yield leader
    leader.close()


def make_core(model: CausalLM, spec: CacheSpec, runner: Runner) -> EngineCore:
    cache = KVCache(spec, UNITS, step_tokens_max=24)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=256)
    return EngineCore(Scheduler(config, cache), runner, lambda events: None)


def one_rank(folder: Path, config: EngineConfig) -> EngineCore:
    model, dtype = load_model(folder, dtype=config.dtype)
    rank = RankModel(model, model.make_cache_spec(BLOCK_SIZE, dtype), dtype, CPU, 256)
    return make_core(model, rank.spec, runner_of(rank, config))


def two_ranks(leader: Leader, folder: Path, config: EngineConfig) -> EngineCore:
    leader.load(config, folder)
    model, dtype = load_model(folder, dtype=config.dtype, shard=leader.shard)
    rank = RankModel(model, model.make_cache_spec(BLOCK_SIZE, dtype), dtype, CPU, 256)
    leader.await_loaded(CPU)
    assert size_cache(config, rank, leader.all_reduce_min) == UNITS
    return make_core(model, rank.spec, leader.make_leading_runner(runner_of(rank, config), UNITS))


def runner_of(rank: RankModel, config: EngineConfig) -> Runner:
    runner = make_runner(config, rank, UNITS)
    runner.pool.buffer.fill_(0xFF)  # a read of what no step wrote is NaN
    return runner


def engine_config(folder: Path, dtype: str = "float32") -> EngineConfig:
    """Whose cache has UNITS units, whatever the model's blocks are."""
    model, model_dtype = load_model(folder, dtype=dtype, shard=Shard(0, 2))
    blocks = UNITS * model.make_cache_spec(BLOCK_SIZE, model_dtype).blocks_per_unit(0)
    return EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=blocks, dtype=dtype)


def conversations(rng: random.Random) -> list[list[Request]]:
    """Rounds of prompts: longer than a step, sharing prefixes within and between the rounds."""
    prefix = [rng.randrange(2048) for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    rounds = []
    for number in range(2):
        prompts = [prefix + [rng.randrange(2048) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        rounds.append([Request(request_id=f"{number}-{i}", token_ids=p, params=params) for i, p in enumerate(prompts)])
    return rounds


def answers(core: EngineCore, rounds: list[list[Request]]) -> dict[str, list[TokenLogprobs]]:
    """The tokens of each request, with the runners-up."""
    outputs: dict[str, list[TokenLogprobs]] = {}
    for requests in rounds:
        for request in requests:
            core.add(request, now=0.0)
        while core.has_work:
            for out in core.step(0.0):
                assert out.error is None, out.error
                outputs.setdefault(out.request_id, []).extend(out.logprobs or [])
            core.check_invariants()
    assert core.stats().totals.prefix_hit_tokens > 0
    assert [len(tokens) for tokens in outputs.values()] == [12] * 6
    return outputs


def first_difference(actual: list[TokenLogprobs], expected: list[TokenLogprobs]) -> TokenLogprobs | None:
    """What one rank found where two ranks first found another token."""
    return next((e for f, e in zip(actual, expected, strict=True) if f.token_id != e.token_id), None)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_tokens_as_one_rank(leader: Leader, name: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown when the test fails
    check_same_tokens(leader, cached_model(MODELS[name]), seed, GAPS.get(name, 1e-4))


def test_groups_of_a_state_space_mixer_are_shared_out(leader: Leader, tmp_path: Path) -> None:
    """Two Mamba groups: each rank has one, with its heads and its norm."""
    values = json.loads((cached_model(MODELS["bamba"]) / "config.json").read_text()) | {"mamba_n_groups": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(0)
    parts = [part for weight in build_model(HfConfig.read(tmp_path)).weights for part in weight.parts]
    save_file(
        {p.name: torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5 for p in parts},
        tmp_path / "model.safetensors",
    )
    check_same_tokens(leader, tmp_path, seed=0, gap=1e-4)


def check_same_tokens(leader: Leader, folder: Path, seed: int, gap: float) -> None:
    """`gap`: how close the logprobs of two tokens are that rounding may exchange."""
    config = engine_config(folder)
    rounds = conversations(random.Random(seed))
    expected = answers(one_rank(folder, config), rounds)
    parallel_answers = answers(two_ranks(leader, folder, config), rounds)
    for request_id in expected:
        other = first_difference(parallel_answers[request_id], expected[request_id])
        if other is not None:  # only where two tokens are equally likely within rounding
            (_, likeliest), (_, next_best) = other.top_logprobs
            assert likeliest - next_best < gap, f"{request_id}: {other}"


def test_logprobs_of_a_prompt(leader: Leader) -> None:
    """Every position's logits are put together from both ranks, in slabs, beside sampling."""
    folder = cached_model(MODELS["odd-vocabulary"])
    config = engine_config(folder)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    rng = random.Random(1)
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in (40, 7)]
    results = []
    for core in (one_rank(folder, config), two_ranks(leader, folder, config)):
        for i, prompt in enumerate(prompts):
            core.add(Request(request_id=str(i), token_ids=prompt, params=params), now=0.0)
        entries: dict[str, list[TokenLogprobs | None]] = {}
        while core.has_work:
            for out in core.step(0.0):
                assert out.error is None, out.error
                entries.setdefault(out.request_id, []).extend(out.prompt_logprobs or [])
        results.append(entries)
    assert [len(results[0][str(i)]) for i in range(2)] == [39, 6] or [len(results[0][str(i)]) for i in range(2)] == [
        40,
        7,
    ]
    for request_id, expected in results[0].items():
        for expected_score, parallel_score in zip(expected, results[1][request_id], strict=True):
            assert (expected_score is None) == (parallel_score is None)
            if expected_score is not None and parallel_score is not None:
                assert expected_score.token_id == parallel_score.token_id
                assert expected_score.logprob == pytest.approx(parallel_score.logprob, abs=1e-4)
                assert [p for _, p in expected_score.top_logprobs] == pytest.approx(
                    [p for _, p in parallel_score.top_logprobs], abs=1e-4
                )


def test_a_rank_holds_half_the_vocabulary() -> None:
    model, _ = load_model(cached_model(MODELS["odd-vocabulary"]), shard=Shard(1, 2))
    assert model.vocabulary.embedding.shape == model.vocabulary.head.shape == (1025, 64)


def test_bf16(leader: Leader) -> None:
    """Partial results are added in bf16, where two ranks need not agree with one; that they compute is what counts."""
    folder = cached_model(MODELS["bamba"])
    config = engine_config(folder, dtype="bfloat16")
    rounds = conversations(random.Random(0))
    answers(two_ranks(leader, folder, config), rounds)


@pytest.mark.parametrize(("our_units", "agreed_units"), [(UNITS - 5, UNITS - 5), (UNITS + 5, UNITS)])
def test_the_rank_with_least_memory_sizes_the_cache(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, our_units: int, agreed_units: int
) -> None:
    monkeypatch.setattr(sizing, "count_units", lambda *_: our_units)  # of this process; the other counts UNITS
    assert shared_size(leader) == agreed_units


def shared_size(leader: Leader) -> int:
    """What two ranks make of a model that both have just loaded."""
    folder = cached_model(MODELS["qwen3"])
    config = engine_config(folder)
    leader.load(config, folder)
    model, dtype = load_model(folder, dtype=config.dtype, shard=leader.shard)
    leader.await_loaded(CPU)
    return size_cache(config, resolve_rank_model(config, model, dtype, CPU), leader.all_reduce_min)


def test_a_model_that_a_follower_cannot_load(leader: Leader, tmp_path: Path) -> None:
    leader.load(EngineConfig(), tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"rank 1: .*nothing.*no such file"):
        leader.await_loaded(CPU)


@pytest.mark.parametrize(
    ("recipe", "size", "message"),
    [
        (Recipe(), 3, r"--tensor-parallel-size 3: expected a divisor of the model's attention heads \(4\)"),
        (Recipe(heads=6, kv_heads=3, head_dim=16, hidden_size=96), 2, r"key-value heads \(3\)"),
        (Recipe(family="llama", intermediate_size=130), 4, r"MLP channels \(130\)"),
    ],
)
def test_what_cannot_be_split(recipe: Recipe, size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(cached_model(recipe), shard=Shard(0, size))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_shares_cover_everything(size: int, count: int) -> None:
    shards = [Shard(rank, size) for rank in range(size)]
    tensor = torch.arange(count * 3)
    if count % size == 0:
        parts = [shard.split(count, "things", 3) for shard in shards]
        assert torch.cat([part.slice_tensor(tensor, 0) for part in parts]).tolist() == tensor.tolist()
        joined_parts = [DimShard.concatenate([part, part]) for part in parts]
        assert sorted(torch.cat([j.slice_tensor(tensor.repeat(2), 0) for j in joined_parts]).tolist()) == sorted(
            [*tensor.tolist()] * 2
        )
        assert all(j.is_whole == (size == 1) for j in joined_parts)
    shared_ranges = [shard.split_shared(count, "things", 3) for shard in shards]
    assert {i for part in shared_ranges for i in part.slice_tensor(tensor, 0).tolist()} == set(range(count * 3))
    assert {part.held_size for part in shared_ranges} == {3 * max(1, count // size)}


def test_plans_survive_their_messages() -> None:
    """Many steps of sequences that grow, sit out, come back, lose blocks and are replaced."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    sequences = [random_sequence(rng) for _ in range(5)]
    for _ in range(200):
        sequences = [random_sequence(rng) if rng.random() < 0.05 else seq for seq in sequences]
        chunks = [random_chunk(rng, seq) for seq in sequences if rng.random() < 0.7]
        rng.shuffle(chunks)
        plan = StepPlan(
            chunks,
            state_resets=[UnitId(4)],
            state_checkpoints=[BlockCopy(2, BlockId(3), BlockId(6))],
            block_copies=[
                BlockCopy(2, BlockId(1), BlockId(2)),
                BlockCopy(1, BlockId(8), BlockId(9)),
                BlockCopy(0, BlockId(2), BlockId(3), CopyDirection.TO_HOST),
            ],
        )
        decoded_plan = decoder.decode(
            msgspec.msgpack.decode(msgspec.msgpack.encode(encoder.encode(plan)), type=PlanMessage)
        )
        for decoded_chunk, chunk in zip(decoded_plan.chunks, chunks, strict=True):
            assert (decoded_chunk.start, decoded_chunk.end, decoded_chunk.should_sample) == (
                chunk.start,
                chunk.end,
                chunk.should_sample,
            )
            assert (
                decoded_chunk.seq.token_ids[decoded_chunk.start : decoded_chunk.end]
                == chunk.seq.token_ids[chunk.start : chunk.end]
            )
            assert decoded_chunk.seq.block_tables == chunk.seq.block_tables
            assert decoded_chunk.seq.state_unit == chunk.seq.state_unit
            has_prompt_logprobs = decoded_chunk.seq.request.params.prompt_logprobs is not None
            assert has_prompt_logprobs == (chunk.seq.request.params.prompt_logprobs is not None)
            assert not has_prompt_logprobs or decoded_chunk.seq.prompt_len == chunk.seq.prompt_len
        for name in ("state_resets", "state_checkpoints", "block_copies"):
            assert getattr(decoded_plan, name) == getattr(plan, name)


def random_sequence(rng: random.Random) -> Sequence:
    params = SamplingParams(prompt_logprobs=rng.choice((None, 0, 3)))
    request = Request(request_id="r", token_ids=[], params=params)
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
    return Sequence(
        request, tokens, len(tokens), 0.0, computed_tokens=rng.randrange(len(tokens)), block_tables=[[], []]
    )


def random_chunk(rng: random.Random, seq: Sequence) -> Chunk:
    """The next chunk of a sequence whose blocks changed in any way, now and then computed again from further back."""
    for table in seq.block_tables:
        if rng.random() < 0.2:
            del table[rng.randrange(len(table) + 1) :]
            seq.table_version += 1
        if table and rng.random() < 0.2:
            table[rng.randrange(len(table))] = BlockId(rng.randrange(99))
            seq.table_version += 1
        table += [BlockId(rng.randrange(99)) for _ in range(rng.randrange(3))]
    if seq.computed_tokens == len(seq.token_ids):
        seq.token_ids.append(rng.randrange(1000))
    start = rng.randrange(seq.computed_tokens + 1) if rng.random() < 0.1 else seq.computed_tokens
    end = rng.randrange(start, len(seq.token_ids)) + 1
    seq.computed_tokens, seq.state_unit = end, UnitId(rng.randrange(9))
    return Chunk(seq, start, end, should_sample=end == len(seq.token_ids))


def test_a_rank_that_dies_ends_the_engine(leader: Leader) -> None:
    """The last test of this leader."""
    folder = cached_model(MODELS["qwen3"])
    core = two_ranks(leader, folder, engine_config(folder))
    reasons: list[str] = []
    leader.watch(reasons.append)
    (follower,) = leader._followers
    pid = follower.process.pid
    core.add(Request(request_id="late", token_ids=[1, 2, 3], params=SamplingParams()), now=0.0)
    os.kill(pid, signal.SIGSTOP)  # it cannot answer, but takes the plan
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RunnerLostError, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        core.step(0.0)
    assert reasons == []  # the step has said it


def test_a_rank_without_memory_for_the_cache_holds_up_nobody(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    def count_units(*_: object) -> int:
        raise ConfigError("the free memory: 5 bytes hold no unit of the cache")

    monkeypatch.setattr(sizing, "count_units", count_units)
    leader.close()  # of a process's leaders one at a time
    leader = Leader(2)
    try:
        with pytest.raises(ConfigError, match="5 bytes"):
            shared_size(leader)
        (follower,) = leader._followers
        assert follower.process.wait(10) == 1  # it was told, and ends by itself
    finally:
        leader.close()


def test_a_rank_that_ends_within_a_reply_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply with blocks has megabytes, so that a killed rank leaves the beginning of one."""
    own_socket, child_socket = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", ""])
    monkeypatch.setattr("engine.parallel.leader.start_child", lambda *_: (process, own_socket))
    follower = _FollowerHandle(1, 2, 0)
    child_socket.sendall(struct.pack("!i", 1 << 20) + b"begun")
    child_socket.close()
    with pytest.raises(RunnerLostError, match="tensor-parallel rank 1"):
        follower.receive()
    follower.close()
