"""Steps that overlap: the same tokens, events and cache as without, on models and on the fake device."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from budget import examples
from drawn_specs import group, specs
from fake_device import EOS, Bench, EventChecker
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.decode_graphs import CudaCapture
from engine.execution.device_pool import DevicePool
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import Recipe, cached_model
from engine.types import FinishReason, Request, RunnerLostError, SamplingParams, StepPlan
from events import AllBlocksCleared, BlockStored, Event
from kernels import select_kernels

CPU = torch.device("cpu")
RECIPES = {
    "qwen3": Recipe(),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
}
SMALLEST = Recipe(layers=1, heads=1, kv_heads=1)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 2048, 5))},  # most stop soon, and unforeseen
    {"temperature": 0.8, "seed": 7, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 8, "stop_token_ids": tuple(range(0, 2048, 7)), "min_tokens": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "top_k": 20, "presence_penalty": 0.5, "seed": 9},
    {"temperature": 0.0, "prompt_logprobs": 1, "logit_bias": {5: 1.0}},
]


def dense(block_size: int = 4) -> CacheSpec:
    group = GroupSpec(kind=FULL_ATTENTION, layer_indices=(0,), num_kv_heads=1, head_dim=8, dtype_bytes=2)
    return CacheSpec(block_size=block_size, groups=(group,))


def answers(
    family: str,
    overlap: bool,
    token_count: int,
    kernels: str = "cpu",
    device: torch.device = CPU,
    *,
    count: int = 14,
    answer_tokens: int = 25,
    recipe: Recipe | None = None,
) -> tuple[dict[str, Any], EngineCore]:
    """What a few requests that come one after the other get, in a cache of about so many tokens."""
    model, dtype = load_model(cached_model(recipe or RECIPES[family]), device=device)
    spec = model.make_cache_spec(4, dtype)
    units = sum(-(-token_count // (4 * spec.blocks_per_unit(g))) for g in range(len(spec.groups)))
    units += 16 if spec.state is not None else 0
    cache = KVCache(spec, units, step_tokens_max=64)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=256)
    runner = ModelRunner(
        model,
        DevicePool(spec, units, device=device, dtype=dtype),
        RunnerConfig(max_model_len=256, overlaps_steps=overlap),
        kernels=select_kernels(device, kernels),
        capture=CudaCapture(device) if device.type == "cuda" else None,
    )
    runner.pool.buffer.fill_(0xFF)  # a read of what no step wrote is NaN
    core = EngineCore(Scheduler(config, cache), runner, EventChecker(4), overlaps_steps=overlap)
    rng = random.Random(family)
    prefix = [rng.randrange(2048) for _ in range(30)]
    waiting = []
    for i in range(count):
        tokens = prefix[: rng.randrange(1, 30)] + [rng.randrange(2048) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(**PARAMS[i % len(PARAMS)], max_tokens=rng.randrange(3, answer_tokens))
        waiting.append(Request(request_id=str(i), token_ids=tokens, params=params))
    answers_by_id: dict[str, Any] = {}
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.add(waiting.pop(), 0.0)
        for out in core.step(0.0):
            answer = answers_by_id.setdefault(out.request_id, [[], [], None])
            answer[0] += out.token_ids
            answer[1] += [entry.token_id for entry in out.logprobs or []]
            answer[2] = out.finish_reason
            assert out.error is None
        core.check_invariants()
    runner.close()
    assert cache.pool.live_units == 0
    return answers_by_id, core


@pytest.mark.parametrize("family", list(RECIPES))
@pytest.mark.parametrize("token_count", [100, 1000])
def test_the_same_answers_as_without(family: str, token_count: int) -> None:
    off, _ = answers(family, False, token_count)
    on, core = answers(family, True, token_count)
    assert on == off
    assert {answer[2] for answer in on.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert core.stats().totals.finished_requests == 14
    if family != "qwen3_5":  # there it is states that fill the cache
        assert (core.stats().totals.preemptions > 0) == (token_count == 100)


@pytest.mark.long
def test_the_same_answers_on_kernels_that_keep_their_tables() -> None:
    """Interpreted, a layer of a step takes a second: few of either, but tables that grow by blocks and change."""
    small_run: dict[str, Any] = {"count": 6, "answer_tokens": 9, "recipe": SMALLEST}
    on, off = (answers("qwen3", overlap, 1000, "triton", **small_run)[0] for overlap in (True, False))
    assert on == off


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", list(RECIPES))
def test_the_same_answers_on_a_gpu(family: str) -> None:
    device = torch.device("cuda")
    assert answers(family, True, 1000, "triton", device)[0] == answers(family, False, 1000, "triton", device)[0]


Asked = list[tuple[list[int], int, int]]
"""(prompt, tokens at most, a token that ends it) of each request."""


def with_state(window: int | None = None) -> CacheSpec:
    groups = [group(1)] + [group(3, window)] * (window is not None)
    return CacheSpec(block_size=1, groups=tuple(groups), state=StateSpec((9,), 256))


def format_events(events: list[Event], groups: int) -> list[str]:
    """What was said of each block of the first groups: how many are told of in one event is the owner's business."""
    lines = []
    for event in events:
        parent = event.parent_block_hash if isinstance(event, BlockStored) else None
        assert not isinstance(event, AllBlocksCleared)
        for name in event.block_hashes:
            if event.group_idx < groups:
                lines.append(repr((type(event), event.group_idx, name, parent, event.medium)))
            parent = name if isinstance(event, BlockStored) else None
    return sorted(lines)


def goes_on_as_an_answer(bench: Bench) -> bool:
    """Whether a prompt says more of another request's text than its prompt: a token that only a step's result tells."""
    texts = {
        name: (len(request.token_ids), request.token_ids + bench.outputs[name])
        for name, request in bench.requests.items()
    }
    prompts = {name: request.token_ids for name, request in bench.requests.items()}
    return any(
        name != other and len(prompt) > prompt_len and prompt[: prompt_len + 1] == text[: prompt_len + 1]
        for name, prompt in prompts.items()
        for other, (prompt_len, text) in texts.items()
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    spec=specs(4, 9),
    arrivals=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 12), st.integers(0, 5)),
        min_size=1, max_size=5,
    ),
)  # fmt: skip
@example(with_state(), [([0], 1, 0), ([1, 0, 0], 2, 1), ([1, 0, 0, 0], 1, 0)])  # one that waits for a state
@example(with_state(), [([1], 3, 2), ([1, 1, 1], 3, 0), ([1], 6, 0)])  # a state that two reach, one of them by decoding
@example(with_state(), [([1], 3, 5), ([1], 4, 2)])  # both by decoding
@example(with_state(2), [([1, 1], 2, 5), ([1, 1, 0], 1, 3), ([0, 1, 0], 1, 1), ([1], 10, 4)])
@example(with_state(1), [([1, 1, 0], 6, 5), ([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1], 3, 0)])
def test_late_stops_leave_no_trace(spec: CacheSpec, arrivals: Asked) -> None:
    """Requests that come together, in a cache that evicts nothing: outputs, cached tokens and events are the same.

    But for states where a prompt goes on as another request's answer: without overlap the host knows that answer a step
    earlier, so the newcomer parts from it a block later, and keeps the state of another place.
    """
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=200, max_model_len=60, eos_token_ids=frozenset({EOS})
    )
    benches = [Bench(KVCache(spec, 400, step_tokens_max=200), config, overlap=overlap) for overlap in (False, True)]
    for bench in benches:
        for i, (text, max_tokens, stop) in enumerate(arrivals):
            bench.add(str(i), text, max_tokens=max_tokens, stop_token_ids=(stop,), min_tokens=stop % 3)
        bench.drain()
        bench.assert_correct()
    off, on = benches
    assert on.ends == off.ends
    assert on.outputs == off.outputs
    assert {n: o.cached_tokens for n, o in on.firsts.items()} == {n: o.cached_tokens for n, o in off.firsts.items()}
    groups = len(spec.groups) + (not goes_on_as_an_answer(on))
    assert format_events(on.events.events, groups) == format_events(off.events.events, groups)


def make_bench(units: int = 64, **config: Any) -> Bench:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200} | config
    return Bench(KVCache(dense(), units), SchedulerConfig(**options), overlap=True)


def test_a_step_is_begun_before_the_result_of_the_one_before_is_asked_for() -> None:
    bench = make_bench()
    bench.add("a", [1, 2, 3], max_tokens=5)
    submitted_plans: list[StepPlan] = []
    submit = bench.core._submit_step

    def record_plan(plan: StepPlan) -> Any:
        submitted_plans.append(plan)
        return submit(plan)

    bench.core._submit_step = record_plan
    bench.device.on_execute = lambda plan: order.append((len(submitted_plans), plan is submitted_plans[-1]))
    order: list[tuple[int, bool]] = []
    bench.drain()
    assert order == [(2, False), (3, False), (4, False), (5, False), (5, True)]
    assert [chunk.token_on_device for plan in submitted_plans for chunk in plan.chunks] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert bench.device.plans[-1] == [("a", 6, 7)]  # the length is known ahead: nothing is computed in vain


def test_a_stop_costs_one_step_in_vain() -> None:
    bench = make_bench()
    request = bench.add("a", [1, 2, 3], max_tokens=50, stop_token_ids=(0, 1, 2, 3, 4))
    bench.drain()
    assert [len(plan) for plan in bench.device.plans] == [1, 1]
    assert bench.outputs["a"][-1] in request.params.stop_token_ids
    assert bench.core.stats().totals.finished_requests == 1


def test_nobody_is_preempted_while_a_step_is_out() -> None:
    bench = make_bench(units=8)
    for i in range(4):
        bench.add(str(i), [i] * 6, max_tokens=20)
    requests = bench.core.scheduler._requests
    preempt = requests.preempt

    def record_preemption(entry: Any) -> None:
        assert not bench.core._steps_in_flight
        preempt(entry)

    requests.preempt = record_preemption  # type: ignore[method-assign]
    bench.drain()
    bench.assert_correct()
    assert bench.core.stats().totals.preemptions > 0


def test_a_failing_step_takes_nobody_else_with_it() -> None:
    """Whom only the step after it has waits again; the cache is empty then."""
    bench = make_bench()
    bench.add("other", [3] * 9, max_tokens=1)
    bench.drain()
    bench.add("a", [1, 2, 3], max_tokens=9)
    bench.device.fail_next = True
    assert bench.step() == []
    bench.add("b", [3] * 9, max_tokens=2)
    (failed_output,) = bench.step()
    assert (failed_output.request_id, failed_output.finish_reason) == ("a", FinishReason.ERROR)
    stats = bench.core.stats()
    assert (stats.running_requests, stats.waiting_requests, stats.totals.preemptions, stats.totals.prompt_tokens) == (
        0,
        1,
        1,
        21,
    )
    bench.drain()
    bench.assert_correct()
    assert bench.firsts["b"].cached_tokens == 8
    assert bench.ends["b"].finish_reason is FinishReason.LENGTH


def test_what_fails_to_begin_is_told_after_the_step_before() -> None:
    bench = make_bench()
    bench.add("a", [1, 2, 3], max_tokens=9)
    bench.step()
    submit, bench.core._submit_step = bench.core._submit_step, _refuse
    bench.add("b", [4, 5], max_tokens=9)
    (first,) = bench.step()
    assert (first.request_id, len(first.token_ids)) == ("a", 1)
    bench.core._submit_step = submit
    assert {out.request_id: out.finish_reason for out in bench.step()} == dict.fromkeys("ab", FinishReason.ERROR)
    bench.drain()


def _refuse(plan: StepPlan) -> Any:
    raise MemoryError("no memory for a step")


def test_abort_and_reset_with_two_steps_out() -> None:
    bench = make_bench()
    for name in "abc":
        bench.add(name, [1, 2, 3, ord(name)] * 3, max_tokens=12)

    def act(plan: StepPlan) -> None:
        if len(bench.device.plans) == 3:
            assert len(bench.core._steps_in_flight) == 1  # and this one
            bench.abort("a")
            bench.core.reset_prefix_cache()
        if len(bench.device.plans) == 5:
            bench.abort("b")

    bench.device.on_execute = act
    bench.drain()
    bench.assert_correct()
    assert {name: end.finish_reason for name, end in bench.ends.items()} == {
        "a": FinishReason.ABORT, "b": FinishReason.ABORT, "c": FinishReason.LENGTH,
    }  # fmt: skip


def test_an_abort_and_a_sleep_at_once_while_a_step_is_out() -> None:
    bench = make_bench()
    bench.core._model = Mock()
    bench.add("a", [1, 2, 3], max_tokens=9)
    bench.step()
    bench.add("b", [4, 5], max_tokens=9)
    bench.abort("a")
    with pytest.raises(ValueError, match="running"):
        bench.core.sleep(1)
    bench.abort("b")
    bench.core.sleep(1)
    assert not bench.core.has_work
    bench.core.wake()
    bench.add("c", [1, 2, 3], max_tokens=9)
    bench.drain()
    bench.assert_correct()


def make_overlapped_core(units: int, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[EngineCore, ModelRunner]:
    model, dtype = load_model(cached_model(Recipe()))
    spec = model.make_cache_spec(16, dtype)
    runner = ModelRunner(
        model, DevicePool(spec, units, device=CPU, dtype=dtype), RunnerConfig(max_model_len=64, overlaps_steps=True)
    )
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=64)
    scheduler = Scheduler(config, KVCache(spec, units))
    return EngineCore(scheduler, runner, lambda events: None, overlaps_steps=True), runner


def test_failures_of_a_step_are_told() -> None:
    core, runner = make_overlapped_core(units=8, max_num_seqs=2, max_num_batched_tokens=64)
    forward = runner._forward

    def fail_with_two(step: Any) -> torch.Tensor:
        if len(step.chunks) > 1:
            raise RuntimeError("no memory for two")
        return forward(step)

    runner._forward = fail_with_two  # type: ignore[method-assign]
    for name in "ab":
        core.add(Request(request_id=name, token_ids=[1, 2, 3], params=SamplingParams(max_tokens=3)), 0.0)
    outputs = []
    while core.has_work:
        outputs += core.step(0.0)
        core.check_invariants()
    assert [(out.request_id, out.finish_reason) for out in outputs] == [(n, FinishReason.ERROR) for n in "ab"]
    core.add(Request(request_id="c", token_ids=[1, 2, 3], params=SamplingParams(max_tokens=3)), 0.0)
    tokens = []
    while core.has_work:
        tokens += [token for out in core.step(0.0) for token in out.token_ids]
    assert len(tokens) == 3
    core.add(Request(request_id="d", token_ids=[1, 2], params=SamplingParams(max_tokens=3)), 0.0)
    runner._forward = lambda step: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    runner._check_device = _fail_device  # type: ignore[method-assign]
    assert core.step(0.0) == []
    with pytest.raises(RunnerLostError, match="cpu computes nothing any more"):
        core.step(0.0)
    runner.close()


def test_a_step_that_stands_on_a_failed_one_reads_no_foreign_memory() -> None:
    """What it is fed is of nobody, but a token: on a GPU a place outside of memory would end the process."""
    core, runner = make_overlapped_core(units=64, max_num_seqs=40, max_num_batched_tokens=400)
    core.add(Request(request_id="first", token_ids=[1, 2, 3], params=SamplingParams(max_tokens=9)), 0.0)
    core.step(0.0)
    for i in range(30):  # more rows than there were
        core.add(Request(request_id=str(i), token_ids=[i + 1] * 3, params=SamplingParams(max_tokens=9)), 0.0)
    prepare = runner._prepare

    def fails(plan: StepPlan) -> Any:
        prepare(plan)
        raise MemoryError("no memory to send a step")

    runner._prepare = fails  # type: ignore[method-assign]
    core.step(0.0)
    runner._prepare = prepare  # type: ignore[method-assign]
    computed_steps: list[Any] = []
    compute = runner._launch

    def record_step(step: Any) -> Any:
        computed_steps.append(compute(step))
        return computed_steps[-1]

    runner._launch = record_step  # type: ignore[method-assign]
    assert len(core.step(0.0)) == 31  # with an error
    while core.has_work:
        core.step(0.0)
    runner.close()
    assert len(computed_steps) == 1  # the one that stood on it went through


def answer_beside(fails: bool) -> list[int]:
    """What a request with a penalty gets that comes behind a step which fails to begin."""
    core, runner = make_overlapped_core(units=64, max_num_seqs=4, max_num_batched_tokens=64)
    core.add(Request(request_id="a", token_ids=[1, 2, 3], params=SamplingParams(max_tokens=9)), 0.0)
    core.step(0.0)
    forward = runner._forward
    if fails:
        runner._forward = lambda step: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    core.step(0.0)
    runner._forward = forward  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=8, frequency_penalty=2.0)
    core.add(Request(request_id="b", token_ids=[4, 5, 6], params=params), 0.0)
    tokens = []
    while core.has_work:
        tokens += [token for out in core.step(0.0) if out.request_id == "b" for token in out.token_ids]
    runner.close()
    return tokens


def test_what_a_step_counted_that_stood_on_a_failed_one_is_forgotten() -> None:
    assert answer_beside(fails=True) == answer_beside(fails=False)


@pytest.mark.parametrize(
    ("how", "device", "ranks", "expected"),
    [
        ("auto", "cuda", 1, True), ("auto", "cpu", 1, False), ("on", "cpu", 1, True), ("off", "cuda", 1, False),
        ("on", "cuda", 2, False),
    ],
)  # fmt: skip
def test_where_steps_overlap(how: Any, device: str, ranks: int, expected: bool) -> None:
    config = EngineConfig(model="m", overlap=how, tensor_parallel_size=ranks)
    assert config.overlaps_steps(device) == expected


def _fail_device() -> None:
    raise RuntimeError("gone")
