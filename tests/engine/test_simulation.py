"""A simulated engine: its times are the service model's and the offline simulator's, its answers are repeatable."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.assembly import assemble
from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.prefill_queue import PrefillOrder
from engine.scheduler import Scheduler, SchedulerConfig
from engine.simulation.executor import sample_words
from engine.simulation.runner import RESYNC_LAG_S, SimulatedAnswers, SimulatedRunner
from engine.tiny.tokenizer import cached_tokenizer
from engine.types import Request, SamplingParams
from events.config import KVEventsConfig
from options import ConfigError
from prompts import Tokenizer, TokenizerError
from simulation.spec import PRESET_NAMES, read_spec
from simulation.steps import StepTimes

SPEC = {"prefill_s_per_token": 1e-4, "step_s": 0.01, "decode_request_s": 5e-5, "kv_tokens": 4096}
CACHE = CacheSpec(16, (GroupSpec(FULL_ATTENTION, (0,), 1, 128, 2),))
EOS = 7


class Clock:
    """Time passes where somebody sleeps, and, if told so, `overhead_s` at every look."""

    def __init__(self, overhead_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.overhead_s = overhead_s

    def __call__(self) -> float:
        self.now_s += self.overhead_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def engine(
    clock: Clock,
    times: StepTimes,
    answers: SimulatedAnswers | None = None,
    units: int = 4096,
    order: PrefillOrder = "shortest",
    seats: int = 256,
) -> EngineCore:
    runner = SimulatedRunner(times, answers or SimulatedAnswers([1, 2, 3], EOS, None), clock=clock, sleep=clock.sleep)
    limits = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=times.step_tokens,
        max_model_len=100_000,
        eos_token_ids=frozenset({EOS}),
        prefill_order=order,
    )
    return EngineCore(Scheduler(limits, KVCache(CACHE, units)), runner, lambda events: None)


def test_what_comes_back_from_host_memory_takes_time() -> None:
    """Two prompts that do not fit together take turns; the second time around each is loaded."""
    clock, times = Clock(), StepTimes(1e-3, 1e12, 0.0, 0.0, 0.0, 2048, load_s_per_token=1e-5)
    runner = SimulatedRunner(
        times, SimulatedAnswers([1, 2, 3], EOS, None), clock=clock, sleep=clock.sleep, block_size=16
    )
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=2000)
    core = EngineCore(Scheduler(limits, KVCache(CACHE, 70, host_unit_count=140)), runner, lambda events: None)
    took = []
    for turn in range(2):
        for first in (1, 2):
            start_s = clock.now_s
            core.add(request(f"{turn}/{first}", 64 * 16, 1, first=first), clock.now_s)
            while core.has_work:
                core.step(clock.now_s)
            took.append(clock.now_s - start_s)
    assert took[:2] == pytest.approx([64 * 16 * 1e-3] * 2)
    loaded_blocks = core.stats().totals.host_hit_tokens / 2
    assert loaded_blocks > 50 * 16
    assert took[2:] == pytest.approx([16 * 1e-3 + loaded_blocks * 1e-5] * 2, rel=0.05)


def test_host_memory_of_a_simulation() -> None:
    spec = {**SPEC, "kv_bytes_per_token": 1000}
    assembly = assemble(EngineConfig(simulate=json.dumps(spec), host_cache_memory=160_000, block_size=16))
    assert assembly.info.num_host_blocks == 10
    assembly.close()
    for spec_fields, memory, wrong in (
        (SPEC, 160_000, "SPEC must have kv_bytes_per_token"),
        (spec, 100, "holds no block"),
    ):
        with pytest.raises(ConfigError, match=f"--host-cache-memory {memory}.*{wrong}"):
            assemble(EngineConfig(simulate=json.dumps(spec_fields), host_cache_memory=memory))


@pytest.mark.parametrize(
    ("changes", "is_warned"), [({}, True), ({"enable_prefix_caching": False}, False), ({"block_size": 128}, False)]
)
def test_a_block_that_no_sequence_fills_is_warned_of(changes: dict[str, Any], is_warned: bool, caplog: Any) -> None:
    config = {"simulate": json.dumps(SPEC), "max_model_len": 256, "block_size": 256, **changes}
    assemble(EngineConfig(**config)).close()
    assert any("--block-size 256" in record.getMessage() for record in caplog.records) is is_warned


def test_sizes_that_would_take_this_machine_are_refused() -> None:
    spec = {**SPEC, "kv_bytes_per_token": 1}
    with pytest.raises(ConfigError, match=r"^--host-cache-memory 1000000000000: 62500000000 blocks; expected at most"):
        assemble(EngineConfig(simulate=json.dumps(spec), host_cache_memory=10**12))
    with pytest.raises(
        ConfigError, match=r"^--num-gpu-blocks-override 1000000000: 1000000000 blocks; expected at most"
    ):
        assemble(EngineConfig(simulate=json.dumps(spec), num_gpu_blocks_override=10**9))
    with pytest.raises(ConfigError, match=r"^--simulate: kv_tokens 1000000000: 62500000 blocks; expected at most"):
        assemble(EngineConfig(simulate=json.dumps({**spec, "kv_tokens": 10**9})))


def request(name: str, length: int, out: int, first: int = 10, **params: Any) -> Request:
    ids = [first * 50_000 + i for i in range(length)]
    return Request(request_id=name, token_ids=ids, params=SamplingParams(max_tokens=out, **params))


def run(core: EngineCore, clock: Clock, arrivals: list[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
    """(time to first token, time to the end) of each, in virtual time."""
    begin, first, end = clock.now_s, [math.nan] * len(arrivals), [math.nan] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    while waiting or core.has_work:
        if not core.has_work:
            clock.now_s = max(clock.now_s, begin + arrivals[waiting[0]][0])
        while waiting and begin + arrivals[waiting[0]][0] <= clock.now_s:
            at, length, out = arrivals[i := waiting.pop(0)]
            core.add(request(str(i), length, out, i, ignore_eos=True), begin + at)
        for output in core.step(clock.now_s):
            i = int(output.request_id)
            elapsed_s = clock.now_s - begin - arrivals[i][0]
            first[i] = elapsed_s if math.isnan(first[i]) else first[i]
            end[i] = elapsed_s
    return first, end


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30_000).map(lambda k: k * 1.00013e-4), st.integers(2, 5000), st.integers(1, 40)),
        min_size=1, max_size=8, unique_by=lambda arrival: arrival[0],
    ),
    st.sampled_from(["shortest", "arrival"]),
    st.sampled_from([1, 2, 256]),
)  # fmt: skip
def test_it_takes_the_time_of_the_offline_simulator(
    arrivals: list[tuple[float, int, int]], order: PrefillOrder, seats: int
) -> None:
    """The engine's own scheduler over sleeping steps, and simulation/: two step loops, one service model."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    from routing_sim import peers

    from simulation import cluster, workload
    from simulation.engine import EngineLimits

    requests, block = [], 0
    for i, (at, length, out) in enumerate(arrivals):
        ids = list(range(block, block + -(-length // 512)))
        block += len(ids)
        request = workload.SimRequest(i, i, at, length, out, ids)
        request.final_block_ids = ids[: length // 512]
        requests.append(request)
    times = StepTimes()
    limits = EngineLimits(seats, shortest_first=order == "shortest")
    config = cluster.ClusterConfig([cluster.WorkerConfig(times, None)], limits=limits)
    offline = cluster.Cluster(config, workload.Workload("t", requests, ""), [peers.RoundRobin()]).run()
    clock = Clock()
    first, end = run(engine(clock, times, order=order, seats=seats), clock, arrivals)
    assert first == pytest.approx([offline.ttft_s_by_request[i] for i in range(len(first))], rel=1e-6, abs=1e-6)
    assert end == pytest.approx([offline.e2e_s_by_request[i] for i in range(len(end))], rel=1e-6, abs=1e-6)


def test_what_scheduling_costs_does_not_add_up() -> None:
    """Each step is due after the one before it was due, not after its outputs were sent."""
    exact, slow = Clock(), Clock(overhead_s=1e-3)
    times = StepTimes()
    (_, [expected]), (_, [actual]) = (run(engine(c, times), c, [(0.0, 100, 200)]) for c in (exact, slow))
    assert expected < actual < expected + 0.01


def test_lateness_is_counted_and_the_timeline_begins_anew() -> None:
    clock = Clock()
    times = StepTimes(step_s=0.01)
    runner = SimulatedRunner(times, SimulatedAnswers([1], EOS, None), clock=clock, sleep=clock.sleep)
    core = EngineCore(Scheduler(SchedulerConfig(), KVCache(CACHE, 64)), runner, lambda events: None)
    core.add(request("a", 2, 50), clock.now_s)
    core.step(clock.now_s)
    assert runner.simulation_lag.lag_s == pytest.approx(0.0, abs=1e-9)
    clock.now_s += 0.5  # the machine did something else
    core.step(clock.now_s)
    late = runner.simulation_lag
    assert late.lag_s_max == pytest.approx(0.5 - times.compute_decode_s(1, 3), rel=0.01)
    core.step(clock.now_s)  # catches up: not a moment slept
    assert runner.simulation_lag.lag_s > 1.9 * late.lag_s_max
    clock.now_s += 2 * RESYNC_LAG_S
    core.step(clock.now_s)
    before, total = clock.now_s, runner.simulation_lag.lag_s
    core.step(clock.now_s)
    assert clock.now_s - before == pytest.approx(times.compute_decode_s(1, 6), rel=1e-6)
    assert runner.simulation_lag.lag_s == pytest.approx(total, abs=1e-6)
    assert runner.simulation_lag.step_count == 5


def generate_answer(answers: SimulatedAnswers, out: int, **params: Any) -> tuple[list[int], str]:
    clock = Clock()
    core = engine(clock, StepTimes(), answers)
    core.add(request("a", 5, out, **params), clock.now_s)
    tokens, reason = [], None
    while core.has_work:
        for output in core.step(clock.now_s):
            tokens += output.token_ids
            reason = output.finish_reason
    assert reason is not None
    return tokens, reason.value


def test_answers_end_repeat_and_follow_a_script() -> None:
    words = SimulatedAnswers([1, 2, 3], EOS, 6)
    tokens, reason = generate_answer(words, 50)
    assert (len(tokens), tokens[-1], reason) == (6, EOS, "stop")
    assert generate_answer(words, 50) == (tokens, reason)
    assert generate_answer(words, 4)[1] == "length"
    longer, reason = generate_answer(words, 20, ignore_eos=True)
    assert (len(longer), reason) == (20, "length")
    assert len(set(generate_answer(SimulatedAnswers(range(20, 60), EOS, None), 40)[0])) > 5
    script = SimulatedAnswers([1], EOS, None, [[11, 12, 13]])
    assert generate_answer(script, 50) == ([11, 12, 13, EOS], "stop")
    assert generate_answer(script, 6, ignore_eos=True) == ([11, 12, 13, EOS, 11, 12], "length")


def test_words_are_read_back_as_they_were_said() -> None:
    tokenizer = Tokenizer.load(cached_tokenizer())
    words = sample_words(tokenizer)
    assert len(set(words)) > 100
    text = tokenizer.decode(words, skip_special_tokens=True)
    assert tokenizer.hf_tokenizer.encode(text, add_special_tokens=False).ids == words


def test_certain_logprobs_for_those_who_ask() -> None:
    clock = Clock()
    core = engine(clock, StepTimes())
    core.add(request("a", 40, 3, logprobs=2, prompt_logprobs=0), clock.now_s)
    outputs = [output for _ in range(3) for output in core.step(clock.now_s)]
    assert [len(output.logprobs or ()) for output in outputs] == [1, 1, 1]
    assert outputs[0].prompt_logprobs is not None
    assert [entry and entry.token_id for entry in outputs[0].prompt_logprobs] == [
        None, *request("a", 40, 3).token_ids[1:]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec_text", "words"),
    [
        ("h100:gpt-9", "no such file.*GPU:MODEL of h200"),
        ("/nowhere/spec.json", "no such file"),
        ("{", "^--simulate SPEC: this is not valid JSON: "),
        ('{"kv_tokens": 5}', "prefill_s_per_token: missing"),
        (json.dumps({**SPEC, "step_ms": 5}), "^--simulate SPEC: object contains unknown field `step_ms`"),
        (json.dumps({**SPEC, "step_s": -1}), "^--simulate SPEC: step_s: got -1, expected float >= 0.0"),
        (json.dumps({**SPEC, "kv_tokens": 0}), "^--simulate SPEC: kv_tokens: got 0, expected int >= 1"),
        ("l4:qwen3-32b", "do not fit"),
    ],
)
def test_a_wrong_spec_is_named(spec_text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_spec(spec_text)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"kv_cache_memory_bytes": 1 << 30}, "--kv-cache-memory-bytes"),
        ({"simulate": json.dumps({**SPEC, "kv_tokens": 5})}, "kv_tokens 5"),
        ({"simulate": json.dumps({**SPEC, "script": "/nowhere.txt"})}, "script '/nowhere.txt'"),
    ],
)
def test_what_cannot_be_simulated_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assemble(EngineConfig(**{"simulate": json.dumps(SPEC), **config}))


def test_presets_are_in_order() -> None:
    """The larger model is slower on the same GPU, and the slower GPU on the same model."""
    fits = [name for name in PRESET_NAMES if name not in ("l4:qwen3-32b", "l40s:qwen3-32b")]
    specs = {name: read_spec(name) for name in fits}
    for field in ("prefill_s_per_token", "step_s", "decode_context_s"):
        value = {name: getattr(spec, field) for name, spec in specs.items()}
        assert value["h100:qwen3-0.6b"] < value["h100:qwen3-8b"] < value["h100:qwen3-32b"], field
        assert value["h200:qwen3-8b"] <= value["h100:qwen3-8b"] < value["a100:qwen3-8b"] < value["l4:qwen3-8b"], field
    for name, spec in specs.items():
        assert read_spec(msgspec.json.encode(spec).decode()) == spec, name


def test_sizes_are_those_that_were_given() -> None:
    events = KVEventsConfig(enable_kv_cache_events=False)
    assembly = assemble(EngineConfig(simulate=json.dumps(SPEC), max_model_len=1000, kv_events=events))
    assert (assembly.info.num_blocks, assembly.info.max_model_len) == (4096 // 16, 1000)
    assembly.close()
    assembly = assemble(EngineConfig(simulate="h100:qwen3-8b", num_gpu_blocks_override=77, kv_events=events))
    assert assembly.info.num_blocks == 77
    assembly.close()


def test_a_missing_tokenizer_is_said_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("loading a large model takes minutes")

    monkeypatch.setattr("engine.executor.load_executor", load)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        assemble(EngineConfig(model=str(tmp_path)))
