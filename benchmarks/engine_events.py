"""What publishing cache events costs the engine's thread: timed inside the step, and by alternating runs on and off.

Times are CPU times of the engine's thread, so that other programs of the machine do not count. Timed inside: noting
what changed (the log that the cache keeps) and handing it to the publisher (sequence number, ring, queue, bell). The
publisher's own thread makes the events, encodes and sends; its CPU time is told beside it, and what it takes from the
step by sharing the interpreter is seen in the ratio of alternating runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.assembly import Assembled, assemble
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.types import Request, SamplingParams
from events import AllBlocksCleared, Event
from events.config import KVEventsConfig

USERS = 16
PROMPT_LEN = 100


@dataclass(frozen=True)
class EventsCost:
    us_per_block: float
    us_per_batch: float
    blocks_per_batch: float
    elsewhere_us_per_block: float
    """CPU of the publisher's thread and ZeroMQ's: making the events, the shadow, encoding, sending."""
    share: float
    """Of step time, noting and handing over together."""
    step_ms: float
    on_off_ratio: float
    """Time of a run with events on over one with events off, median of the pairs."""
    spread: float
    """Standard deviation of the ratios of the pairs."""


class Timed:
    """Calls a function and keeps the CPU time it took, less what looking at the clock takes."""

    def __init__(self, function: Callable[..., Any], clock_s: float) -> None:
        self._function = function
        self._clock_s = clock_s
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        time.thread_time()  # uncounted: behind a cold cache the first look at the clock takes several times longer
        start_s = time.thread_time()
        result = self._function(*args)
        self.seconds += time.thread_time() - start_s - self._clock_s
        return result


def _clock_s() -> float:
    """Seconds between two looks at the clock."""
    gaps = []
    for _ in range(1000):
        start_s = time.thread_time()
        gaps.append(time.thread_time() - start_s)
    return statistics.mean(sorted(gaps)[100:-100])


def _assemble(model: Path, threads: int, enabled: bool, tokens: int) -> Assembled:
    events = KVEventsConfig(
        enable_kv_cache_events=enabled,
        endpoint="tcp://127.0.0.1:*" if enabled else "tcp://*:5557",
        replay_endpoint="tcp://127.0.0.1:*" if enabled else None,
    )
    blocks = 4 * -(-tokens // 16)
    return assemble(
        EngineConfig(model=str(model), num_threads=threads, num_gpu_blocks_override=blocks, kv_events=events)
    )


def play(core: EngineCore, prompts: list[list[int]], outputs: int) -> tuple[float, int]:
    """CPU seconds of this thread inside `step`, and steps, until all prompts are continued."""
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add(Request(request_id=str(number), token_ids=prompt, params=params), time.monotonic())
    seconds, steps = 0.0, 0
    while core.has_work:
        start_s = time.thread_time()
        core.step(time.monotonic())
        seconds += time.thread_time() - start_s
        steps += 1
    return seconds, steps


def measure_events(
    model: Path, threads: int, prompts: Callable[[int, int], list[list[int]]], outputs: int, rounds: int
) -> EventsCost:
    """Run the step loop in this process, with a publisher that nobody listens to."""
    tokens = USERS * (PROMPT_LEN + outputs)
    on, off = _assemble(model, threads, True, tokens), _assemble(model, threads, False, tokens)
    try:
        for engine in (on, off):
            play(engine.core, prompts(USERS, PROMPT_LEN), 4)
        ratios = []
        for number in range(rounds):
            batch = prompts(USERS, PROMPT_LEN)
            taken = {id(e): play(e.core, batch, outputs)[0] for e in ((on, off) if number % 2 else (off, on))}
            ratios.append(taken[id(on)] / taken[id(off)])
        return _inside(on, prompts, outputs, ratios)
    finally:
        on.close()
        off.close()


def _inside(
    on: Assembled, prompts: Callable[[int, int], list[list[int]]], outputs: int, ratios: list[float]
) -> EventsCost:
    cache, core = on.core.scheduler.cache, on.core
    log, clock_s = cache.tree.log, _clock_s()
    timed = [Timed(function, clock_s) for function in (log.stored, log.removed, cache.take_events, core._publish)]
    log.stored, log.removed, cache.take_events = timed[:3]  # type: ignore[method-assign, assignment]
    batches: list[Collection[Event]] = []
    publish = timed[3]

    def kept(events: Collection[Event]) -> None:
        batches.append(events)  # counted when everything is measured: the publisher's thread makes the events
        publish(events)

    core._publish = kept
    seconds, steps = 0.0, 0
    elsewhere_s = time.thread_time() - time.process_time()
    for _ in ratios:
        more = play(core, prompts(USERS, PROMPT_LEN), outputs)
        seconds, steps = seconds + more[0], steps + more[1]
    assert on.publisher is not None
    while on.publisher.waiting:
        time.sleep(0.01)
    elsewhere_s += time.process_time() - time.thread_time()
    blocks = sum(len(e.block_hashes) for events in batches for e in events if not isinstance(e, AllBlocksCleared))
    total = sum(part.seconds for part in timed)
    return EventsCost(
        us_per_block=1e6 * total / blocks,
        us_per_batch=1e6 * total / len(batches),
        blocks_per_batch=blocks / len(batches),
        elsewhere_us_per_block=1e6 * elsewhere_s / blocks,
        share=total / seconds,
        step_ms=1e3 * seconds / steps,
        on_off_ratio=statistics.median(ratios),
        spread=statistics.pstdev(ratios),
    )
