"""A router core over a naive index, and short ways to ask it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Forward, RouteRequest
from router.decide.recent_prompts import RecentPrompts
from router.decide.target import InFlightRequest, Target
from router.decide.workers import ServedModel, WorkerSpec
from router.index.protocol import HolderId, IndexStats, IngestReport, Match, PinId, Scope


class NaiveIndex:
    """Block size 1: a holder holds a set of prefixes; pins are prefixes too."""

    def __init__(self) -> None:
        self.models: dict[HolderId, str] = {}
        self.resident: dict[HolderId, set[tuple[int, ...]]] = {}
        self.pins: dict[PinId, tuple[HolderId, tuple[int, ...]]] = {}
        self._pins_of_removed_holders: set[PinId] = set()
        self._next = 0

    def add_holder(self, model: str) -> HolderId:
        self._next += 1
        holder = HolderId(self._next)
        self.models[holder] = model
        self.resident[holder] = set()
        return holder

    def remove_holder(self, holder: HolderId) -> None:
        pins = [pin for pin, (pinned_holder, _) in self.pins.items() if pinned_holder == holder]
        for pin in pins:
            del self.pins[pin]
        self._pins_of_removed_holders.update(pins)
        del self.models[holder], self.resident[holder]

    def clear(self, holder: HolderId) -> None:
        self.resident[holder].clear()

    def ingest(self, holder: HolderId, payload: bytes) -> IngestReport:
        raise NotImplementedError

    def store(self, holder: HolderId, tokens: Sequence[int]) -> None:
        for end in range(1, len(tokens) + 1):
            self.resident[holder].add(tuple(tokens[:end]))

    def prepare(self, token_ids: Sequence[int], similar: None = None) -> Sequence[int]:
        return token_ids

    def chunk_keys(self, token_ids: Sequence[int] | bytes, scope: Scope, chunk_tokens: int) -> list[int]:
        token_ids = array("I", token_ids)
        ends, keys = range(chunk_tokens, len(token_ids), chunk_tokens), [hash(scope)]
        for end in ends:
            keys.append(hash((keys[-1], *token_ids[end - chunk_tokens : end])) % 2**64)
        return keys[1:]

    def match(
        self, token_ids: Sequence[int], scope: Scope, holders: Sequence[HolderId] | None = None, rivals: int = 0
    ) -> list[Match]:
        """Those with many rivals before them are returned as well."""
        matches = []
        for holder, model in self.models.items():
            if model != scope.model or (holders is not None and holder not in holders):
                continue
            pinned = [pinned_ids for pinned_holder, pinned_ids in self.pins.values() if pinned_holder == holder]
            tokens = self._longest_prefix(token_ids, self.resident[holder], [])
            pinned_tokens = self._longest_prefix(token_ids, self.resident[holder], pinned)
            if pinned_tokens:
                matches.append(Match(holder, tokens, tokens, (tokens, 0, 0, 0), pinned_tokens))
        return matches

    @staticmethod
    def _longest_prefix(token_ids: Sequence[int], resident: set[tuple[int, ...]], pinned: list[tuple[int, ...]]) -> int:
        """Return the number of first tokens, but for the last, of which each prefix is resident or begins a pin."""
        length = 0
        while length < len(token_ids) - 1:
            pinned = [ids for ids in pinned if ids[length : length + 1] == (token_ids[length],)]
            if not pinned and tuple(token_ids[: length + 1]) not in resident:
                break
            length += 1
        return length

    def pin(self, holder: HolderId, token_ids: Sequence[int], scope: Scope) -> PinId:
        assert holder in self.models
        self._next += 1
        self.pins[PinId(self._next)] = (holder, tuple(token_ids))
        return PinId(self._next)

    def unpin(self, pin: PinId) -> None:
        if pin in self._pins_of_removed_holders:
            self._pins_of_removed_holders.remove(pin)
        else:
            del self.pins[pin]

    def stats(self) -> IndexStats:
        return IndexStats(len(self.models), 0, 0, len(self.pins), 0)

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        return []


MODEL = "m"


def spec(name: str, **changes: object) -> WorkerSpec:
    base = WorkerSpec(worker_id=name, url=f"http://{name}", models=(ServedModel(MODEL, MODEL, max_model_len=100_000),))
    return replace(base, **changes)  # type: ignore[arg-type]


def request(request_id: str, tokens: Sequence[int] | None = None, **changes: object) -> RouteRequest:
    count = len(tokens) if tokens is not None else 10
    base = RouteRequest(request_id, MODEL, Scope(MODEL), tokens, count)
    return base.replace(**changes)


def make_core(
    names: str = "ab", config: CoreConfig | None = None, recent_prompts: RecentPrompts | None = None, **changes: object
) -> tuple[RouterCore, NaiveIndex]:
    index = NaiveIndex()
    core = RouterCore(index, config or CoreConfig(), recent_prompts=recent_prompts)
    for name in names:
        core.add_worker(spec(name, **changes), 0.0)
    return core, index


def apply_operation(
    tracker: LoadTracker,
    target: Target,
    in_flight: dict[str, InFlightRequest],
    operation: str,
    name: str,
    tokens: int,
    now: float,
) -> None:
    """Tell a tracker what happened to the request `name`: "route" (streams), "blind", "first", "progress" or "end"."""
    request = in_flight.get(name)
    if operation in ("route", "blind") and request is None:
        in_flight[name] = tracker.add_request(
            target, prompt_tokens=tokens, cached_tokens=0, is_streaming=operation == "route", now=now
        )
    elif operation == "first" and request is not None:
        tracker.record_first_token(request, now)
    elif operation == "end" and request is not None:
        tracker.end_request(in_flight.pop(name), now)
    elif operation == "progress" and request is not None:
        tracker.record_progress(request, tokens)


def chosen_worker(result: object) -> str:
    assert isinstance(result, Forward), result
    return result.decision.worker
