"""Alarms where predictions of the router drift from what a worker reports. No I/O.

Each alarm compares a short window of finished requests, so that it comes within 50 requests and goes with its cause:

* `prompt_tokens`: the router counts other tokens than `usage.prompt_tokens`, by another chat template or tokenizer;
* `cached_tokens`: predicted and reported cached tokens differ, by wrong tokens, a wrong salt or lost events;
* `promised`: predictions are too high, as prefixes are evicted before the requests that count on them run;
* `events`: the worker fills or reuses blocks without events: they are off or do not arrive;
* `unreachable`: the worker is up, but nobody listens at the address of its events.
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
    """Share of wrong predictions above which the alarm is raised."""
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
UNREACHABLE_HINT: Final = "is it the worker's address, and is the port open from here?"
"""Question to the operator if the events of a worker that is up cannot be read."""
BLOCK_TOKENS: Final = 256
"""Assumed block length of a worker that does not report it; as many uncached tokens should cause an event."""


class StallDetector:
    """Detects that all streams of a worker have stopped moving while streams of other workers move.

    The detector has no clock: its caller passes the time.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._updated_s: float | None = None
        self.stalled_workers: dict[str, float] = {}
        """worker -> time of its last byte, for stalled workers."""

    def update(self, last_byte_s: Mapping[str, float], now: float) -> set[str]:
        """Return the workers that have stalled, or moved again, since the last call.

        Call it at least twice in `stall_s` seconds: a later call may mean that the router itself was stuck.

        `last_byte_s`: worker -> time of the last byte, for workers with a begun stream and a client that reads.
        No worker counts as stalled where no stream moves at all, or this call is late: the router itself may be stuck.
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
        """Return [] or the one alarm "stalled: ..." of a worker."""
        last_s = self.stalled_workers.get(worker_id)
        return [] if last_s is None else [f"stalled: none of its streams has moved for {now - last_s:.0f} s"]


@dataclass(slots=True)
class _WorkerWindow:
    """How well the predictions for one worker's last requests agreed with what the worker reported."""

    deviations: dict[str, deque[tuple[int, int]]] = field(
        default_factory=lambda: {alarm.name: deque(maxlen=WINDOW) for alarm in _DEVIATION_ALARMS}
    )
    """alarm name -> (wrong amount, compared amount) of the last requests.

    prompt_tokens: (1 if the count differs, 1); cached_tokens: (|predicted - reported|, the larger of the two) where
    that is not zero; promised: (predicted - reported where that is positive, prompt tokens).
    """
    unannounced_requests: int = 0
    """Requests since the last stored event that computed a block, or reused one without an event."""
    stored_blocks: int = 0
    """Number of announced blocks at the last check."""

    def count_events(self, stored_blocks: int) -> None:
        """Start to count unannounced requests anew if the worker has announced blocks since the last call.

        `stored_blocks` is the number of blocks that the worker has announced in all.
        """
        if stored_blocks != self.stored_blocks:
            self.stored_blocks = stored_blocks
            self.unannounced_requests = 0


class Watchdog:
    """Alarms of all workers, from the usage of every finished request."""

    def __init__(self, count_stored_blocks: Callable[[str], int] = lambda worker_id: 0) -> None:
        self._windows: dict[str, _WorkerWindow] = {}
        self.count_stored_blocks = count_stored_blocks
        """Function that returns the number of blocks that a worker has announced since it was first followed."""
        self.list_unreachable_endpoints: Callable[[str], list[str]] = lambda worker_id: []
        """Function that returns the event endpoints of a worker that could not be connected for a while."""

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
        """Compare what the router predicted for one answer with what the engine reports, for the alarms of a worker.

        The router counted `counted_tokens` in the prompt, and the engine reports `prompt_tokens` and `cached_tokens`;
        None: not counted, or not reported. Of the predicted cached tokens, events of the worker confirm
        `resident_tokens`. `block_tokens` is the worker's block length.
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
        prompt_length = prompt_tokens if prompt_tokens is not None else counted_tokens
        uncached_tokens = 0 if prompt_length is None else prompt_length - (cached_tokens or 0)
        has_new_block = uncached_tokens >= (block_tokens or BLOCK_TOKENS)
        has_reused_block = (
            counted_tokens is not None and resident_tokens is not None and (cached_tokens or 0) > resident_tokens
        )
        if has_new_block or has_reused_block:  # events announce such blocks, if the worker publishes any
            window.count_events(self.count_stored_blocks(worker_id))
            window.unannounced_requests += 1

    def forget(self, worker_id: str) -> None:
        """Forget a worker that was removed."""
        self._windows.pop(worker_id, None)

    def alarms(self, worker_id: str, *, expects_events: bool = True) -> list[str]:
        """Return the present alarms of a worker, such as "events: 50 prompts ..."; each begins with its stable name.

        An alarm is raised if predictions for its last requests were wrong too often. With `expects_events`, another is
        raised if its requests filled cache blocks and no event named a new block since.
        """
        window = self._windows.get(worker_id)
        if window is None:
            return []
        window.count_events(self.count_stored_blocks(worker_id))
        alarms = []
        for name, share, text in _DEVIATION_ALARMS:
            deviations = window.deviations[name]
            wrong_total = sum(wrong_amount for wrong_amount, _ in deviations)
            compared_total = sum(compared_amount for _, compared_amount in deviations)
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

    def event_alarms(self, worker_id: str) -> list[str]:
        """Return an alarm if the events of a worker, which is up, cannot be read."""
        endpoints = self.list_unreachable_endpoints(worker_id)
        if not endpoints:
            return []
        return [f"unreachable: no events can be read from {', '.join(endpoints)}: {UNREACHABLE_HINT}"]
