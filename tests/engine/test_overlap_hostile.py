"""Steps of a real model that overlap, attacked inside of running steps: aborts, resets, preemptions, failing steps.

Penalties, masks of grammars, bias, seeds and stops are mixed in every step. Whoever is served to its end gets what it
gets alone without overlap; the others get a beginning of it.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from fake_device import EventChecker, resident_in

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.device_pool import DevicePool
from engine.execution.prepared_step import PreparedStep
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.grammar_compiler import GrammarCompiler, GrammarVocabulary
from engine.models.loader import load_model, load_weights
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import PRESETS, cached_model
from engine.types import Constraint, FinishReason, Request, SamplingParams
from kernels import select_kernels
from prompts import Tokenizer

CPU = torch.device("cpu")
BLOCK = 4
JSON = 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
KINDS: list[SamplingParams] = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, **PENALTIES),  # type: ignore[arg-type]
    SamplingParams(temperature=0.8, seed=5, max_tokens=24, constraint=Constraint(JSON, "response_format")),
    SamplingParams(
        temperature=0.9, seed=6, top_p=0.9, max_tokens=24, logit_bias={7: 3.0, 9: -4.0}, **PENALTIES,  # type: ignore[arg-type]
        constraint=Constraint('start: /[a-z ]{5,60}/', "structured_outputs.regex"),
    ),
    SamplingParams(temperature=0.7, seed=7, max_tokens=24, min_tokens=4, stop_token_ids=tuple(range(0, 2048, 6))),
    SamplingParams(temperature=0.0, max_tokens=24, logit_bias={3: 2.0}, min_tokens=3, presence_penalty=1.0),
]  # fmt: skip


class Fault(RuntimeError):
    pass


class AttackedEngine:
    """A core on a real model, whose next steps can be made to fail while they run."""

    def __init__(self, units: int, grammars: GrammarCompiler, *, overlap: bool) -> None:
        folder, dtype = cached_model(PRESETS["tiny"]), torch.float64  # in which no sum's order decides a draw
        model, _ = load_model(folder)
        load_weights(model, folder, dtype, CPU)
        spec, ends = model.make_cache_spec(BLOCK, dtype), tokenizer().eos_token_ids
        self.runner = ModelRunner(
            model,
            DevicePool(spec, units, device=CPU, dtype=dtype),
            RunnerConfig(max_model_len=128, eos_token_ids=tuple(ends), overlaps_steps=overlap),
            grammars=grammars,
            kernels=select_kernels(CPU, "reference"),
        )
        self.runner.pool.buffer.fill_(0xFF)  # a read of what no step wrote is NaN
        self.cache, self.events = KVCache(spec, units, step_tokens_max=48), EventChecker(BLOCK)
        config = SchedulerConfig(
            max_num_seqs=5, max_num_batched_tokens=48, max_model_len=128, eos_token_ids=frozenset(ends)
        )  # fmt: skip
        self.core = EngineCore(
            Scheduler(config, self.cache), self.runner, self.events, overlaps_steps=overlap, grammars=grammars
        )
        self.fails = False
        self._forward, self.runner._forward = self.runner._forward, self._fail_or_forward  # type: ignore[method-assign]
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def _fail_or_forward(self, step: PreparedStep) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise Fault("the device fell off the bus")
        return self._forward(step)

    def step(self) -> None:
        for output in self.core.step(0.0):
            assert output.request_id not in self.ends, "an output after the last"
            assert output.error is None or "fell off the bus" in output.error, output.error
            self.answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        self.core.check_invariants()
        assert set(self.events.resident) == resident_in(self.cache)

    def abort(self, name: str) -> None:
        for output in self.core.abort([name]):
            self.ends[name] = output.finish_reason or FinishReason.ABORT

    def close(self) -> None:
        assert self.cache.pool.live_units == 0, "memory leaked"
        self.runner.close()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(cached_model(PRESETS["tiny"]), with_fast_encoder=False)


def make_requests(rng: random.Random, count: int) -> list[Request]:
    prefix = [rng.randrange(500) for _ in range(16)]
    return [
        Request(
            request_id=f"{i}",
            token_ids=prefix[: rng.randrange(17)] + [rng.randrange(500) for _ in range(rng.randrange(1, 12))],
            params=KINDS[i % len(KINDS)],
        )
        for i in range(count)
    ]


def answer_each_alone(requests: list[Request], grammars: GrammarCompiler) -> dict[str, list[int]]:
    calm = AttackedEngine(200, grammars, overlap=False)
    for request in requests:
        calm.core.add(request, 0.0)
        while calm.core.has_work:
            calm.step()
        calm.core.reset_prefix_cache()
    calm.close()
    return calm.answers


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_is_served_is_what_it_would_be_alone(overlap: bool) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    requests = make_requests(rng, 36)
    grammars = GrammarCompiler(lambda: GrammarVocabulary(tokenizer(), PRESETS["tiny"].vocab_size))
    right = answer_each_alone(requests, grammars)
    engine = AttackedEngine(20, grammars, overlap=overlap)
    waiting, out = list(requests), 0
    while waiting or engine.core.has_work:
        event_draw = rng.random()
        if waiting and event_draw < 0.4:
            engine.core.add(waiting.pop(0), 0.0)
        elif event_draw < 0.44:
            engine.abort(f"{rng.randrange(len(requests))}")
        elif event_draw < 0.47:
            engine.core.reset_prefix_cache()
        engine.fails = rng.random() < 0.02
        engine.step()
        out += len(engine.core._steps_in_flight)
    engine.close()
    grammars.close()
    assert (out > 0) == overlap
    assert engine.core.stats().totals.preemptions > 0
    for request in requests:
        name, answer = request.request_id, engine.answers.get(request.request_id, [])
        is_complete = engine.ends[name] in (FinishReason.STOP, FinishReason.LENGTH)
        assert answer == (right[name] if is_complete else right[name][: len(answer)]), (name, request.params)
    assert {FinishReason.STOP, FinishReason.LENGTH} <= set(engine.ends.values())
