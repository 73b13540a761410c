"""One seeded history of the engine on the fake device, written down line by line.

The real core, scheduler and cache play it. A line is what anyone outside of them can see: an output, a planned step, an
event, a refusal, the counters at the end. Two versions of the engine behave alike if they write the same lines.
Nothing here looks behind `EngineCore` and the constructors of cache and scheduler, so that old versions play too.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from fake_device import EOS, FakeDevice

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec, StateSpec
from engine.core import EngineCore
from engine.scheduler import RequestRefusedError, Scheduler, SchedulerConfig
from engine.types import (
    Chunk,
    CopyDirection,
    Request,
    SamplingParams,
    SequenceOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from events import Event

DRAIN_STEPS_MAX = 20_000
FAMILIES = ("dense", "sliding", "hybrid", "hybrid sliding")
HISTORY_SIZES = ("small", "medium", "long prompts")


class UnreliableDevice(FakeDevice):
    """A fake device that writes down each plan, and on which some answers cannot go on.

    `fails_when_sent` makes the next plan fail while it is sent, `fail_next` while it is computed.
    """

    def __init__(self, block_size: int, windows: list[int | None], lines: list[str], failing_share: float) -> None:
        super().__init__(block_size, windows)
        self._lines = lines
        self._failing_share = failing_share
        self.fails_when_sent = False
        self.failed_answers = 0

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._lines.append(_describe_plan(plan, len(self.windows)))
        if self.fails_when_sent:
            self.fails_when_sent = False
            raise MemoryError("no memory to send a step")
        failing_chunks = [index for index, chunk in enumerate(plan.chunks) if self._is_failing(chunk)]
        wait_for_result = super().submit(plan)

        def add_failures() -> StepResult:
            result = wait_for_result()
            self.failed_answers += len(failing_chunks)
            result.failure_by_chunk.update(dict.fromkeys(failing_chunks, "the answer cannot go on"))
            return result

        return add_failures

    def _is_failing(self, chunk: Chunk) -> bool:
        draw = random.Random(f"{chunk.seq.request.request_id}/{chunk.end}").random()
        return chunk.should_sample and draw < self._failing_share


class EngineHistory:
    """Draws everything from one seed: the model's shape, the settings, and what is done to the engine."""

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        self._rng = rng = random.Random(seed)
        self._size = rng.choices(HISTORY_SIZES, (70, 27, 3))[0]
        block_size = rng.randint(1, 4) if self._size == "small" else rng.choice((2, 4, 8))
        if self._size == "long prompts":
            block_size = rng.choice((32, 64))
        family = rng.choice(FAMILIES)
        spec = _draw_spec(rng, family, block_size)
        config = self._draw_config()
        settings = self._draw_cache_settings(config.max_num_batched_tokens)
        cache = KVCache(spec, **settings)
        overlaps_steps = rng.random() < 0.5
        windows = [group.sliding_window for group in spec.groups]
        failing_share = rng.choice((0.0, 0.0, 0.01))
        self._device = UnreliableDevice(block_size, windows, self.lines, failing_share)
        self._core = EngineCore(Scheduler(config, cache), self._device, self._publish, overlaps_steps=overlaps_steps)
        self._texts: list[list[int]] = [[]]
        self._token_ids_by_request: dict[str, list[int]] = {}
        self._request_count = self._generated_tokens = self._reported_failures = 0
        self._now = 0.0
        self.lines.append(f"{family}, {self._size}, blocks of {block_size}, {settings}, overlap {overlaps_steps}")

    def play(self) -> list[str]:
        """Do some dozens of random things, then let every request end. Returns the lines."""
        actions: list[tuple[float, Callable[[], None]]] = [
            (0.34, self._send_requests),
            (0.42, self._step_several_times),
            (0.05, self._abort_any),
            (0.04, lambda: self._act_during_step(self._abort_any)),
            (0.02, lambda: self._act_during_step(self._reset)),
            (0.03, self._fail_step),
            (0.02, self._reset),
            (0.05, self._drain),
            (0.02, self._sleep_and_wake),
        ]
        shares = [share for share, _ in actions]
        for _ in range(self._rng.randint(15, 50)):
            self._rng.choices([action for _, action in actions], shares)[0]()
        self._drain()
        # In the recorded histories, an answer that failed after its end took one from the generated tokens.
        generated_tokens = self._generated_tokens + self._reported_failures - self._device.failed_answers
        self.lines.append(f"stats {_describe_stats(self._core, generated_tokens)}")
        return self.lines

    # ------------------------------------------------------------------ settings

    def _draw_config(self) -> SchedulerConfig:
        rng = self._rng
        if self._size == "long prompts":
            max_num_seqs, budget = rng.randint(1, 6), rng.choice((600, 1500, 2500))
            max_model_len = 6000
        else:
            is_small = self._size == "small"
            max_num_seqs = rng.randint(1, 4) if is_small else rng.randint(2, 12)
            budget = max_num_seqs + rng.randint(0, 20 if is_small else 100)
            max_model_len = rng.choice((20, 40, 60, 400)) if is_small else rng.choice((100, 400))
        return SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}) if rng.random() < 0.4 else frozenset(),
            target_prefill_tokens=rng.choice((None, None, max(1, budget // 2))),
            prefill_order=rng.choice(("shortest", "arrival")),
        )

    def _draw_cache_settings(self, step_tokens_max: int) -> dict[str, Any]:
        rng = self._rng
        unit_count = rng.randint(3, 26) if self._size == "small" else rng.randint(20, 120)
        return {
            "unit_count": unit_count,
            "enable_prefix_caching": rng.random() < 0.88,
            "step_tokens_max": rng.choice((step_tokens_max, step_tokens_max, None)),
            "adaptive_eviction": rng.random() < 0.4,
            "host_unit_count": rng.choice((0, 0, 2, unit_count, 4 * unit_count)),
        }

    # ------------------------------------------------------------------ actions

    def _send_requests(self) -> None:
        rng = self._rng
        tail_max = {"small": 16, "medium": 60, "long prompts": 2500}[self._size]
        length_max = {"small": 50, "medium": 180, "long prompts": 5000}[self._size]
        tail = [rng.randint(0, 1) for _ in range(rng.randint(1, tail_max))]
        text = (rng.choice(self._texts) + tail)[:length_max]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            request = self._draw_request(text)
            self._request_count += 1
            self._now += 1.0
            try:
                self._core.add(request, self._now)
            except RequestRefusedError as error:
                self.lines.append(f"refused {request.request_id}: {error}")
            else:
                self._token_ids_by_request[request.request_id] = list(text)

    def _draw_request(self, text: list[int]) -> Request:
        rng = self._rng
        params = SamplingParams(
            max_tokens=rng.choice((rng.randint(1, 8), rng.randint(1, 30), None if self._size == "small" else 20)),
            min_tokens=rng.choice((0, 0, 0, 3)),
            ignore_eos=rng.random() < 0.2,
            stop_token_ids=rng.choice(((), (), (), (2,))),
            logprobs=rng.choice((None, None, None, None, 1)),
            prompt_logprobs=rng.choice((None,) * 9 + (1,)),
        )
        return Request(
            request_id=f"r{self._request_count}",
            token_ids=text,
            params=params,
            cache_salt=rng.choice((None, None, None, None, "s")),
            lora_name=rng.choice((None,) * 9 + ("l",)),
            priority=rng.choice((0, 0, 0, 1)),
            resumed_output_len=rng.choice((0,) * 9 + (min(2, len(text) - 1),)),
        )

    def _step_several_times(self) -> None:
        for _ in range(self._rng.choice((1, 2, 3, 5, 8, 20))):
            self._step()

    def _abort_any(self) -> None:
        request_id = f"r{self._rng.randrange(self._request_count + 1)}"
        for output in self._core.abort([request_id]):
            self.lines.append(f"abort {_describe_output(output)}")

    def _act_during_step(self, action: Callable[[], None]) -> None:
        self._device.on_execute = lambda plan: action()  # type: ignore[assignment]
        self._step()
        self._device.on_execute = lambda plan: None

    def _fail_step(self) -> None:
        if self._rng.random() < 0.7:
            self._device.fail_next = True
        else:
            self._device.fails_when_sent = True
        self._step()
        self._device.fail_next = self._device.fails_when_sent = False

    def _reset(self) -> None:
        self.lines.append("reset")
        self._core.reset_prefix_cache()

    def _sleep_and_wake(self) -> None:
        """Do what the core process does: it sleeps only while nothing runs, and both forget the cache."""
        if not self._core.has_work:
            self._reset()
            self._reset()

    def _drain(self) -> None:
        for _ in range(DRAIN_STEPS_MAX):
            if not self._core.has_work:
                return
            self._step()
        raise AssertionError("some request never ends")

    def _step(self) -> None:
        for output in self._core.step(self._now):
            self.lines.append(f"output {_describe_output(output)}")
            self._generated_tokens += len(output.token_ids)
            self._reported_failures += output.is_client_error
            token_ids = self._token_ids_by_request.get(output.request_id)
            if token_ids is not None:
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    self._texts = [*self._texts, token_ids][-12:]
                    del self._token_ids_by_request[output.request_id]

    def _publish(self, events: Iterable[Event]) -> None:
        self.lines += [f"event {msgspec.to_builtins(event)}" for event in events]


def _draw_spec(rng: random.Random, family: str, block_size: int) -> CacheSpec:
    """Blocks of one token take a multiple of 256 bytes, so that units hold one block of a kind or several."""

    def make_group(layer_count: int, window: int | None = None) -> GroupSpec:
        kind = FULL_ATTENTION if window is None else SLIDING_WINDOW
        return GroupSpec(kind, tuple(range(layer_count)), 1, 64, 2, window)

    groups = [make_group(rng.randint(1, 2))]
    if "sliding" in family:
        groups.append(make_group(rng.randint(1, 3), window=rng.randint(1, 4 * block_size)))
    state = None
    if "hybrid" in family:
        state = StateSpec((9,), state_bytes=rng.randint(1, 6) * block_size * 256 + rng.randint(0, 200))
    return CacheSpec(block_size, tuple(groups), state)


def _describe_stats(core: EngineCore, generated_tokens: int) -> dict[str, object]:
    """Return the statistics under the names of the recorded histories."""
    stats = core.stats()
    totals, host_memory = stats.totals, stats.host_memory
    return {
        "running_requests": stats.running_requests,
        "waiting_requests": stats.waiting_requests,
        "kv_cache_usage": stats.kv_cache_usage,
        "token_limit": core.scheduler.token_limit,
        "prefix_cache_queries": totals.prompt_tokens,
        "prefix_cache_hits": totals.prefix_hit_tokens,
        "host_cache_hits": totals.host_hit_tokens,
        "host_cache_usage": host_memory.used_share,
        "host_stored_bytes": host_memory.stored_bytes,
        "host_loaded_bytes": host_memory.loaded_bytes,
        "host_copy_s": stats.host_copy_s,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": generated_tokens,
        "preemptions": totals.preemptions,
        "finished_requests": totals.finished_requests,
        "step_count": core._step_count,
        "failed_steps": stats.failed_steps,
    }


def _describe_plan(plan: StepPlan, state_kind: int) -> str:
    """Return the line of a plan, in which restored states count apart from other copies."""
    chunks = [
        (chunk.seq.request.request_id, chunk.start, chunk.end, chunk.should_sample, chunk.token_on_device)
        for chunk in plan.chunks
    ]
    restored_states = (state_kind, CopyDirection.WITHIN_DEVICE.name)  # no compaction moves a state
    copies = [(block_copy.kind, block_copy.direction.name) for block_copy in plan.block_copies]
    restore_count = copies.count(restored_states)
    copies = [block_copy for block_copy in copies if block_copy != restored_states]
    states = restore_count, len(plan.state_resets), len(plan.state_checkpoints)
    return f"plan {chunks} copies {copies} states {states}"


def _describe_output(output: SequenceOutput) -> str:
    fields = msgspec.to_builtins(output)
    fields.pop("queue_s", None)  # newer than the recorded histories
    for name in ("logprobs", "prompt_logprobs"):
        if (positions := getattr(output, name)) is not None:
            fields[name] = [None if position is None else _describe_logprobs(position) for position in positions]
    return str(fields)


def _describe_logprobs(position: TokenLogprobs) -> dict[str, object]:
    """Return the logprobs of a position as in the recorded histories, where the likeliest tokens were not packed."""
    return {
        "token_id": position.token_id,
        "logprob": position.logprob,
        "rank": position.rank,
        "top_logprobs": position.top_logprobs,
    }


def play_history(seed: int) -> list[str]:
    """Return the lines of one history."""
    logging.getLogger("engine.core").setLevel(logging.CRITICAL)  # failed steps are meant
    return EngineHistory(seed).play()


def compute_digest(lines: list[str]) -> str:
    """Return 16 hexadecimal digits that stand for the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
