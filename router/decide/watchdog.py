"""Alarms where predictions of the router drift from what a worker reports. No I/O.

The first four compare the last finished requests, so that they come within 50 requests and go with their cause:

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
from typing import Final

WINDOW: Final = 40
REQUESTS_MIN: Final = 20
"""Requests that must have been compared before an alarm can be raised."""
UNREACHABLE_HINT: Final = "is it the worker's address, and is the port open from here?"
"""Question to the operator if the events of a worker that is up cannot be read."""
BLOCK_TOKENS: Final = 256
"""Assumed block length of a worker that does not report it; as many uncached tokens should cause an event."""


class StallDetector:
    """Detects workers that send nothing for `stall_s` seconds on any of their streams, while other workers do."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._updated_s: float | None = None
        self.stalled_workers: dict[str, float] = {}
        """Time of the last byte of each stalled worker."""

    def update(self, last_byte_s: Mapping[str, float], now: float) -> set[str]:
        """Look for stalled workers; return those that have stalled, or sent bytes again, since the last call.

        `last_byte_s`: time of the last byte by worker, for workers with a running stream that a client reads. The
        router itself may be stuck if all of several stand still, or if the last call is over `stall_s / 2` seconds ago.
        Then no further worker counts as stalled.
        """
        stalled_workers = {worker: last_s for worker, last_s in last_byte_s.items() if now - last_s >= self.stall_s}
        do_all_stand_still = len(stalled_workers) == len(last_byte_s) > 1
        is_call_late = self._updated_s is not None and now - self._updated_s > self.stall_s / 2
        self._updated_s = now
        if is_call_late or do_all_stand_still:
            new_workers = stalled_workers.keys() - self.stalled_workers.keys()
            for worker in new_workers:
                del stalled_workers[worker]
        changed_workers = stalled_workers.keys() ^ self.stalled_workers.keys()
        self.stalled_workers = stalled_workers
        return changed_workers

    def list_alarms(self, worker_id: str, now: float) -> list[str]:
        """Return [] or the one alarm "stalled: ..." of a worker."""
        last_s = self.stalled_workers.get(worker_id)
        return [] if last_s is None else [f"stalled: none of its streams has moved for {now - last_s:.0f} s"]


@dataclass(slots=True)
class _DeviationAlarm:
    """Alarm for one worker: raised if too large a share of what was predicted for its last requests was wrong."""

    name: str
    share_max: float
    """Wrong share above which the alarm is raised."""
    message_template: str
    amounts: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(wrong amount, compared amount) of each of the last requests, in tokens or in prompts."""

    def record_request(self, *, wrong: int, compared: int) -> None:
        """Record how much was compared for one request, in tokens or in prompts, and how much of that was wrong."""
        self.amounts.append((wrong, compared))

    def describe(self) -> list[str]:
        """Return the text of the alarm, "name: ...", in a list, which is empty if the alarm is not raised."""
        wrong = sum(wrong for wrong, _ in self.amounts)
        compared = sum(compared for _, compared in self.amounts)
        request_count = len(self.amounts)
        if request_count < REQUESTS_MIN or wrong <= self.share_max * compared:
            return []
        message = self.message_template.format(part=wrong, count=request_count, percent=100 * wrong // compared)
        return [f"{self.name}: {message}"]


@dataclass(slots=True)
class _SilenceAlarm:
    """Alarm for one worker: raised if REQUESTS_MIN requests filled or reused blocks, and no event announced a block."""

    announced_blocks: int = 0
    """Number of blocks that the worker's events had announced at the last of these requests."""
    request_count: int = 0
    """Requests in a row, up to the last one, at which that number was the same."""

    def record_request(self, announced_blocks: int) -> None:
        """Record a request after which an event must come. `announced_blocks`: number of blocks announced so far."""
        if announced_blocks != self.announced_blocks:  # events come: this request is the first to wait for the next one
            self.announced_blocks, self.request_count = announced_blocks, 0
        self.request_count += 1

    def describe(self, announced_blocks: int) -> list[str]:
        """Return the text of the alarm in a list, empty if it is not raised or a block was announced since."""
        if self.request_count < REQUESTS_MIN or announced_blocks != self.announced_blocks:
            return []
        return [
            f"events: {self.request_count} prompts filled or reused blocks since the last block was announced: the "
            "worker's events are off or do not arrive"
        ]


class _WorkerAlarms:
    """Alarms of one worker, raised where its last answers and the router's predictions for them do not agree."""

    def __init__(self) -> None:
        self.prompt_lengths = _DeviationAlarm(
            name="prompt_tokens",
            share_max=0.25,
            message_template="{part} of {count} prompts have another length than the worker says: its chat template or "
            "tokenizer differs from the router's",
        )
        self.cached_tokens = _DeviationAlarm(
            name="cached_tokens",
            share_max=0.5,
            message_template="{percent} % of the cached tokens of {count} requests were predicted wrongly: other "
            "tokens, another salt, or lost events",
        )
        self.missing_tokens = _DeviationAlarm(
            name="promised",
            share_max=0.1,
            message_template="{part} tokens of {count} requests were predicted to be cached and were not, {percent} % "
            "of their tokens: its cache is too small for what it gets",
        )
        self.silence = _SilenceAlarm()

    def compare_cached_tokens(self, *, prompt_tokens: int, predicted: int, reported: int) -> None:
        """Compare the cached tokens of a prompt: predicted 320 and reported 200 are 120 wrong of 320, all missing."""
        if predicted or reported:
            self.cached_tokens.record_request(wrong=abs(predicted - reported), compared=max(predicted, reported))
        self.missing_tokens.record_request(wrong=max(predicted - reported, 0), compared=prompt_tokens)


class Watchdog:
    """Alarms of all workers, from the usage of every finished request."""

    def __init__(self) -> None:
        self._alarms: dict[str, _WorkerAlarms] = {}
        self.count_stored_blocks: Callable[[str], int] = lambda worker_id: 0
        """Function that returns the number of blocks that a worker has announced since it was first followed."""
        self.list_unreachable_endpoints: Callable[[str], list[str]] = lambda worker_id: []
        """Function that returns the event endpoints of a worker that could not be connected for a while."""

    def record_answer(
        self,
        worker_id: str,
        *,
        counted_tokens: int | None,
        reported_tokens: int | None,
        predicted_cached_tokens: int,
        reported_cached_tokens: int | None,
        resident_tokens: int,
        block_tokens: int | None = None,
    ) -> None:
        """Compare what the router predicted for one answer with what the engine reports, for the alarms of a worker.

        For example, the router counts 500 tokens in a prompt and predicts that 320 are cached. The worker's events had
        announced 256 of them, the `resident_tokens`. The engine reports 507 and 200: the chat templates differ, and 120
        tokens were evicted. A number is None if the router cannot count it, or the engine does not report it.
        """
        alarms = self._alarms.get(worker_id)
        if alarms is None:
            alarms = self._alarms[worker_id] = _WorkerAlarms()
        if counted_tokens is not None and reported_tokens is not None:
            alarms.prompt_lengths.record_request(wrong=int(counted_tokens != reported_tokens), compared=1)
        if counted_tokens is not None and reported_cached_tokens is not None:
            alarms.compare_cached_tokens(
                prompt_tokens=counted_tokens, predicted=predicted_cached_tokens, reported=reported_cached_tokens
            )
        # Events must tell of blocks that the request filled, and of those that it found cached without an event.
        cached_tokens = reported_cached_tokens or 0
        prompt_tokens = (counted_tokens if reported_tokens is None else reported_tokens) or 0
        has_filled_block = prompt_tokens - cached_tokens >= (block_tokens or BLOCK_TOKENS)
        has_reused_unknown_block = counted_tokens is not None and cached_tokens > resident_tokens
        if has_filled_block or has_reused_unknown_block:
            alarms.silence.record_request(self.count_stored_blocks(worker_id))

    def forget(self, worker_id: str) -> None:
        """Forget a worker that was removed."""
        self._alarms.pop(worker_id, None)

    def list_alarms(self, worker_id: str, *, expects_events: bool = True) -> list[str]:
        """Return the present alarms of a worker, such as "events: 50 prompts ..."; each begins with its stable name.

        With `expects_events`, the worker is known to announce its cached blocks by events.
        """
        alarms = self._alarms.get(worker_id)
        if alarms is None:
            return []
        deviation_alarms = (alarms.prompt_lengths, alarms.cached_tokens, alarms.missing_tokens)
        texts = [text for alarm in deviation_alarms for text in alarm.describe()]
        if expects_events:
            texts += alarms.silence.describe(self.count_stored_blocks(worker_id))
        return texts

    def list_event_alarms(self, worker_id: str) -> list[str]:
        """Return an alarm if the events of a worker, which is up, cannot be read."""
        endpoints = self.list_unreachable_endpoints(worker_id)
        if not endpoints:
            return []
        return [f"unreachable: no events can be read from {', '.join(endpoints)}: {UNREACHABLE_HINT}"]
