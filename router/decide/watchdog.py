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
from dataclasses import dataclass, field

WINDOW = 40
REQUESTS_MIN = 20
"""Requests that must have been compared before an alarm can be raised."""
COUNT_SHARE = 0.25
"""Share of requests with another token count that raises `prompt_tokens`. Right means equal."""
CACHED_SHARE = 0.5
"""Mispredicted tokens, as a share of the larger of predicted and reported, that raises `cached_tokens`."""
PROMISED_SHARE = 0.1
"""Tokens predicted and not reported, as a share of all prompt tokens, that raise `promised`."""
BLOCK_TOKENS = 256
"""Length of a worker's block where it does not tell: so many uncached prompt tokens should be announced."""


@dataclass(slots=True)
class _Window:
    counts: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Whether each request's token count differed."""
    cached: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(|predicted - reported|, the larger of the two) where either is not zero."""
    promised: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(predicted - reported where that is positive, prompt tokens) of every request."""
    unannounced: int = 0
    """Requests that computed a block, or reused one that no event vouches for, since the last Stored event."""
    stored: int = 0
    """Stored blocks the feed had counted when it was last asked."""


class Watchdog:
    """Feed it every finished request and the feed's counters; ask `alarms`."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def finished(
        self,
        worker_id: str,
        *,
        counted_tokens: int | None,
        prompt_tokens: int | None,
        predicted_cached: int,
        cached_tokens: int | None,
        resident: int | None = None,
        block_tokens: int | None = None,
    ) -> None:
        """One answer's usage. None: not counted here, or not said by the engine.

        `resident`: the part of the prediction that events vouch for. `block_tokens`: the worker's block length.
        """
        window = self._windows.get(worker_id)
        if window is None:
            window = self._windows[worker_id] = _Window()
        if counted_tokens is not None and prompt_tokens is not None:
            window.counts.append(counted_tokens != prompt_tokens)
        if counted_tokens is not None and cached_tokens is not None and (predicted_cached or cached_tokens):
            window.cached.append((abs(predicted_cached - cached_tokens), max(predicted_cached, cached_tokens)))
        if counted_tokens is not None and cached_tokens is not None:
            window.promised.append((max(predicted_cached - cached_tokens, 0), counted_tokens))
        length = prompt_tokens if prompt_tokens is not None else counted_tokens
        computed = length is not None and length - (cached_tokens or 0) >= (block_tokens or BLOCK_TOKENS)
        reused = counted_tokens is not None and resident is not None and (cached_tokens or 0) > resident
        if computed or reused:
            window.unannounced += 1

    def events(self, worker_id: str, stored_total: int) -> None:
        """Blocks the feed has seen the worker announce since it started; call it when the counters are read."""
        window = self._windows.setdefault(worker_id, _Window())
        if stored_total != window.stored:
            window.stored = stored_total
            window.unannounced = 0

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._windows.pop(worker_id, None)

    def alarms(self, worker_id: str, *, expects_events: bool = True) -> list[str]:
        """What is wrong, each line starting with a stable name; empty when all agrees."""
        window = self._windows.get(worker_id)
        if window is None:
            return []
        found = []
        if len(window.counts) >= REQUESTS_MIN:
            wrong = sum(window.counts)
            if wrong > COUNT_SHARE * len(window.counts):
                found.append(
                    f"prompt_tokens: {wrong} of {len(window.counts)} prompts have another length than the worker says: "
                    "its chat template or tokenizer differs from the router's"
                )
        if len(window.cached) >= REQUESTS_MIN:
            missed, total = sum(m for m, _ in window.cached), sum(t for _, t in window.cached)
            if missed > CACHED_SHARE * total:
                found.append(
                    f"cached_tokens: {100 * missed // total} % of the cached tokens of {len(window.cached)} requests "
                    "were predicted wrongly: other tokens, another salt, or lost events"
                )
        if len(window.promised) >= REQUESTS_MIN:
            broken, prompts = sum(b for b, _ in window.promised), sum(p for _, p in window.promised)
            if broken > PROMISED_SHARE * prompts:
                found.append(
                    f"promised: {broken} tokens of {len(window.promised)} requests were predicted to be cached and "
                    f"were not, {100 * broken // prompts} % of their tokens: its cache is too small for what it gets"
                )
        if expects_events and window.unannounced >= REQUESTS_MIN:
            found.append(
                f"events: {window.unannounced} prompts filled or reused blocks since the last block was announced: "
                "the worker's events are off or do not arrive"
            )
        return found
