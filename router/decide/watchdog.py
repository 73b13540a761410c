"""The drift watchdog: does what the router believes of a worker still agree with what the worker says? Pure.

Four comparisons a worker, each over a short window of finished requests, so that an alarm comes within 50 requests and
goes when its cause does:

* `prompt_tokens`: the router's token count against `usage.prompt_tokens`: another chat template or tokenizer;
* `cached_tokens`: the predicted cached tokens against the reported ones: wrong tokens of the right number, a wrong
  salt, lost events;
* `promised`: predictions that are too high: prefixes are evicted before the requests that count on them run;
* `events`: the worker fills blocks, or reuses blocks that nobody announced, and says nothing: events off or not
  arriving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

WINDOW: Final = 40
REQUESTS_MIN: Final = 20
"""Requests that must have been compared before an alarm can be raised."""


class DeviationAlarm(NamedTuple):
    """An alarm that is raised when too large a share of the predictions is wrong."""

    name: str
    min_share: float
    """From which it is raised."""
    message_template: str


_DEVIATION_ALARMS = (
    DeviationAlarm(
        "prompt_tokens",
        0.25,
        "{part} of {count} prompts have another length than the worker says: its chat template or tokenizer differs "
        "from the router's",
    ),
    DeviationAlarm(
        "cached_tokens",
        0.5,
        "{percent} % of the cached tokens of {count} requests were predicted wrongly: other tokens, another salt, or "
        "lost events",
    ),
    DeviationAlarm(
        "promised",
        0.1,
        "{part} tokens of {count} requests were predicted to be cached and were not, {percent} % of their tokens: its "
        "cache is too small for what it gets",
    ),
)
BLOCK_TOKENS: Final = 256
"""Length of a worker's block where it does not tell: so many uncached prompt tokens should be announced."""


class StallDetector:
    """Which workers stand still: none of their streams moves for a while, although those of others do. Pure."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._updated_s: float | None = None
        self.stalled_workers: dict[str, float] = {}
        """worker -> when a byte last came from it."""

    def update(self, last_byte_s: Mapping[str, float], now: float) -> set[str]:
        """Return the workers that have stalled, or moved again, since the last call. Call it often in `stall_s`.

        `last_byte_s`: worker -> time of the last byte, for workers with a begun stream and a client that reads.
        No worker is found to stall where no stream moves at all or this call is late: the router may have stood still.
        """
        is_late = self._updated_s is not None and now - self._updated_s > self.stall_s / 2
        self._updated_s = now
        stalled_workers = {worker: last_s for worker, last_s in last_byte_s.items() if now - last_s >= self.stall_s}
        if is_late or (len(stalled_workers) == len(last_byte_s) > 1):
            stalled_workers = {
                worker: last_s for worker, last_s in stalled_workers.items() if worker in self.stalled_workers
            }
        changed_workers = stalled_workers.keys() ^ self.stalled_workers.keys()
        self.stalled_workers = stalled_workers
        return changed_workers

    def alarms(self, worker_id: str, now: float) -> list[str]:
        """As Watchdog.alarms."""
        last_s = self.stalled_workers.get(worker_id)
        return [] if last_s is None else [f"stalled: none of its streams has moved for {now - last_s:.0f} s"]


@dataclass(slots=True)
class _WorkerWindow:
    deviations: dict[str, deque[tuple[int, int]]] = field(
        default_factory=lambda: {alarm.name: deque(maxlen=WINDOW) for alarm in _DEVIATION_ALARMS}
    )
    """Of each alarm in `_DEVIATION_ALARMS`, for one request each: (what is wrong, of how much).

    prompt_tokens: (1 where the count differs, 1); cached_tokens: (|predicted - reported|, the larger of the two) where
    that is not zero; promised: (predicted - reported where that is positive, prompt tokens).
    """
    unannounced_requests: int = 0
    """Requests that computed a block, or reused one that no event vouches for, since the last Stored event."""
    stored_blocks: int = 0
    """Blocks that the worker had announced when that was last counted."""

    def count_events(self, stored_blocks: int) -> None:
        """The worker has announced so many blocks since it was first followed."""
        if stored_blocks != self.stored_blocks:
            self.stored_blocks = stored_blocks
            self.unannounced_requests = 0


class Watchdog:
    """Feed it every finished request; ask `alarms`."""

    def __init__(self, count_stored_blocks: Callable[[str], int] = lambda worker_id: 0) -> None:
        self._windows: dict[str, _WorkerWindow] = {}
        self.count_stored_blocks = count_stored_blocks
        """Called with a worker: how many blocks it has announced since it was first followed."""

    def record_answer(
        self,
        worker_id: str,
        *,
        counted_tokens: int | None,
        prompt_tokens: int | None,
        predicted_cached_tokens: int,
        cached_tokens: int | None,
        resident_tokens: int | None = None,
        block_tokens: int | None = None,
    ) -> None:
        """One answer's usage. None: not counted here, or not said by the engine.

        `resident_tokens`: the part of the prediction that events vouch for. `block_tokens`: the worker's block length.
        """
        window = self._windows.get(worker_id)
        if window is None:
            window = self._windows[worker_id] = _WorkerWindow()
        if counted_tokens is not None and prompt_tokens is not None:
            window.deviations["prompt_tokens"].append((int(counted_tokens != prompt_tokens), 1))
        if counted_tokens is not None and cached_tokens is not None:
            if predicted_cached_tokens or cached_tokens:
                wrong_tokens = abs(predicted_cached_tokens - cached_tokens)
                window.deviations["cached_tokens"].append((wrong_tokens, max(predicted_cached_tokens, cached_tokens)))
            window.deviations["promised"].append((max(predicted_cached_tokens - cached_tokens, 0), counted_tokens))
        length = prompt_tokens if prompt_tokens is not None else counted_tokens
        has_new_block = length is not None and length - (cached_tokens or 0) >= (block_tokens or BLOCK_TOKENS)
        has_reused_block = (
            counted_tokens is not None and resident_tokens is not None and (cached_tokens or 0) > resident_tokens
        )
        if has_new_block or has_reused_block:
            window.count_events(self.count_stored_blocks(worker_id))
            window.unannounced_requests += 1

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._windows.pop(worker_id, None)

    def alarms(self, worker_id: str, *, expects_events: bool = True) -> list[str]:
        """What is wrong, each line starting with a stable name; empty when all agrees."""
        window = self._windows.get(worker_id)
        if window is None:
            return []
        window.count_events(self.count_stored_blocks(worker_id))
        alarms = []
        for name, share, text in _DEVIATION_ALARMS:
            deviations = window.deviations[name]
            wrong_total = sum(wrong for wrong, _ in deviations)
            compared_total = sum(compared_tokens for _, compared_tokens in deviations)
            if len(deviations) >= REQUESTS_MIN and wrong_total > share * compared_total:
                alarms.append(
                    f"{name}: "
                    + text.format(part=wrong_total, count=len(deviations), percent=100 * wrong_total // compared_total)
                )
        if expects_events and window.unannounced_requests >= REQUESTS_MIN:
            alarms.append(
                f"events: {window.unannounced_requests} prompts filled or reused blocks since the last block was "
                "announced: the worker's events are off or do not arrive"
            )
        return alarms
