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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 40
REQUESTS_MIN: Final = 20
"""Requests that must have been compared before an alarm can be raised."""
_SHARES = (
    (
        "prompt_tokens",
        0.25,
        "{part} of {count} prompts have another length than the worker says: its chat template or tokenizer differs "
        "from the router's",
    ),
    (
        "cached_tokens",
        0.5,
        "{percent} % of the cached tokens of {count} requests were predicted wrongly: other tokens, another salt, or "
        "lost events",
    ),
    (
        "promised",
        0.1,
        "{part} tokens of {count} requests were predicted to be cached and were not, {percent} % of their tokens: its "
        "cache is too small for what it gets",
    ),
)
"""(alarm, the share that raises it, what it says)."""
BLOCK_TOKENS: Final = 256
"""Length of a worker's block where it does not tell: so many uncached prompt tokens should be announced."""


class StallDetector:
    """Which workers stand still: none of their streams moves for a while, although those of others do. Pure."""

    def __init__(self, still_s: float) -> None:
        self.still_s = still_s
        self._looked_s: float | None = None
        self.workers: dict[str, float] = {}
        """worker -> when a byte last came from it."""

    def look(self, moved: Mapping[str, float], now: float) -> set[str]:
        """Look again; the workers of which something else is true now. Call it a few times in `still_s`.

        `moved`: of every worker with streams in their middle whose clients read, when the last byte of any came. Where
        nothing moves anywhere, or this look comes late, the router itself may have stood still: nothing new is said.
        """
        late = self._looked_s is not None and now - self._looked_s > self.still_s / 2
        self._looked_s = now
        still = {worker: last_s for worker, last_s in moved.items() if now - last_s >= self.still_s}
        if late or (len(still) == len(moved) > 1):
            still = {worker: last_s for worker, last_s in still.items() if worker in self.workers}
        changed = still.keys() ^ self.workers.keys()
        self.workers = still
        return changed

    def alarms(self, worker_id: str, now: float) -> list[str]:
        """As Watchdog.alarms."""
        last_s = self.workers.get(worker_id)
        return [] if last_s is None else [f"stalled: none of its streams has moved for {now - last_s:.0f} s"]


@dataclass(slots=True)
class _Window:
    parts: dict[str, deque[tuple[int, int]]] = field(
        default_factory=lambda: {name: deque(maxlen=WINDOW) for name, _, _ in _SHARES}
    )
    """Of each alarm in `_SHARES`, for one request each: (what is wrong, of how much).

    prompt_tokens: (1 where the count differs, 1); cached_tokens: (|predicted - reported|, the larger of the two) where
    that is not zero; promised: (predicted - reported where that is positive, prompt tokens).
    """
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
            window.parts["prompt_tokens"].append((int(counted_tokens != prompt_tokens), 1))
        if counted_tokens is not None and cached_tokens is not None:
            if predicted_cached or cached_tokens:
                wrong = abs(predicted_cached - cached_tokens)
                window.parts["cached_tokens"].append((wrong, max(predicted_cached, cached_tokens)))
            window.parts["promised"].append((max(predicted_cached - cached_tokens, 0), counted_tokens))
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
        for name, share, text in _SHARES:
            parts = window.parts[name]
            part, whole = sum(wrong for wrong, _ in parts), sum(of for _, of in parts)
            if len(parts) >= REQUESTS_MIN and part > share * whole:
                found.append(f"{name}: " + text.format(part=part, count=len(parts), percent=100 * part // whole))
        if expects_events and window.unannounced >= REQUESTS_MIN:
            found.append(
                f"events: {window.unannounced} prompts filled or reused blocks since the last block was announced: "
                "the worker's events are off or do not arrive"
            )
        return found
