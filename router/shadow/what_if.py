"""What another placement would have given: the requests that were seen are played again, once where they went and once
where `router run` would have sent them. Pure.

Owns the comparison. Both plays have the same engines (simulation/engine.py, whose steps take what the seen answers
took) and the same caches, so what the model has wrong is wrong in both; what was measured is then scaled by the ratio
of the two. Today's requests come when they came; before our router, one that goes on from another's answer comes so
long after that answer as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count

import msgspec

from router.decide.config import CoreConfig, CostConfig, LearnConfig, ServiceModel
from router.decide.tracker import LoadTracker
from router.index.protocol import HolderId
from router.shadow.ours import Ours
from router.shadow.seen import Seen, waited_for
from simulation.cluster import Cluster, ClusterConfig, Result, Router
from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.workload import SimRequest, Workload

FITS, FIT = 3, 0.01
"""Plays of today after which steps are not fitted any more to how long answers took, and how well they fit then."""
SEATS = 256
"""Sequences that a worker runs at once, where it does not tell."""


class Engine(msgspec.Struct, frozen=True):
    """What is known of a worker."""

    name: str
    cache_tokens: int | None = None
    seats: int | None = None
    shortest_first: bool = False


class Sums(msgspec.Struct):
    """Of the requests that count."""

    computed_tokens: float
    ttft_s: float
    """To the first token, all requests together."""
    seconds: float | None
    """To the end of the answer; None where no end was seen."""


class Comparison(msgspec.Struct):
    """Today beside `router run`, in sums over `requests`."""

    requests: int
    warming: int
    """Earlier ones that only filled the caches of both plays."""
    waited: int
    """All together, that waited for the end of another one, and do so before `router run` too."""
    prompt_tokens: int
    measured: Sums | None
    """None where no time was seen."""
    today: Sums
    """As played."""
    ours: Sums
    """As played."""
    saved: Sums
    """What switching gives: of what was measured, where it was."""
    lost: dict[str, int]
    """workload, routing -> tokens that need not have been computed, as today was played."""
    steps: dict[str, StepTimes]
    """worker -> what its steps were found to take."""
    quantiles: dict[str, list[float]] = {}
    """Seconds to the first token: the least, each hundredth, the most; measured (where it was), and of both plays."""

    @property
    def model_error(self) -> float | None:
        """How far the play of today is from what was measured, as a share of it: times to the first token."""
        return None if self.measured is None else self.today.ttft_s / max(self.measured.ttft_s, 1e-9) - 1.0


class Placed(Router):
    """Each request where it went, and what of it was where when it came."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self._once: set[int] = set()
        """Blocks that some cache has had."""
        self.elsewhere: dict[int, int] = {}
        """request -> blocks that another worker had besides those of its own."""
        self.had: dict[int, int] = {}
        """request -> blocks that any worker had at any time."""
        self.gone: dict[int, int] = {}
        """request -> of those, what none has any more."""

    def route(self, request: SimRequest, now: float) -> list[tuple[int, int]]:
        ids, limit = request.ids, (request.prompt_tokens - 1) // request.block
        place = self._places[request.index]
        here = best = self.cluster.workers[place].cache.match(ids, limit)
        if here < limit:
            for worker in self.cluster.workers:
                if worker.cache.has(ids[here]):
                    best = max(best, worker.cache.match(ids, limit))
        had = best
        while had < limit and ids[had] in self._once:
            had += 1
        self.elsewhere[request.index], self.gone[request.index] = best - here, had - best
        self.had[request.index] = had
        return [(request.index, place)]

    def stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        self._once.update(ids)


def _lost(placed: Placed, seen: Sequence[Seen], kept: Iterable[int], block: int) -> dict[str, int]:
    """part -> tokens that were computed although they need not have been, as the play of today has it. Workload: what
    no worker had any more, and what a session's next prompt has otherwise than the one before."""
    changed = dict.fromkeys(range(len(seen)), 0)
    last: dict[str, Seen] = {}
    for i, one in enumerate(seen):
        before = None if one.user is None else last.get(one.user)
        if before is not None and one.after != before.serial and before.ids[:1] == one.ids[:1]:
            limit = min(before.prompt_tokens // block, (one.prompt_tokens - 1) // block)
            changed[i] = max(limit - placed.had[i], 0)
        if one.user is not None:
            last[one.user] = one
    kept = list(kept)
    return {
        "workload": block * sum(placed.gone[i] + changed[i] for i in kept),
        "routing": block * sum(placed.elsewhere[i] for i in kept),
    }


def compare(
    seen: Sequence[Seen], engines: Sequence[Engine], block: int, config: CoreConfig | None = None, warming: int = 0
) -> Comparison:
    """`seen` in the order of arrival, all on `engines`; the first `warming` of them do not count. Raises ValueError
    where nothing is left to compare."""
    kept = range(warming, len(seen))
    if not kept:
        raise ValueError(f"{len(seen)} requests were seen, of which {warming} only fill the caches: none is left")
    steps = learn(seen, engines)
    workload, waiting = played(seen, block, waits=False), played(seen, block, waits=True)
    number = {engine.name: i for i, engine in enumerate(engines)}
    longest = max(-(-(r.prompt_tokens + r.output_tokens) // block) for r in workload.requests) + 2
    rooms = [None if e.cache_tokens is None else max(e.cache_tokens // block, longest) for e in engines]
    cluster = ClusterConfig(
        workers=len(engines),
        cache_blocks=None,
        speed=1.0,
        service=StepTimes(),
        each=[(steps[engine.name], room) for engine, room in zip(engines, rooms)],
        limits=EngineLimits(
            min(engine.seats or SEATS for engine in engines),
            preempts=True,
            shortest=all(engine.shortest_first for engine in engines),
        ),
    )
    places = [number[s.worker] for s in seen]
    placed = Placed(places)
    first = Cluster(cluster, workload, [placed]).run()
    for _ in range(FITS):
        longer = _decoding(seen, first)
        if abs(longer - 1.0) < FIT:
            break
        cluster = replace(cluster, each=[(_decodes(service, longer), room) for service, room in cluster.each])
        placed = Placed(places)
        first = Cluster(cluster, workload, [placed]).run()
    steps = {engine.name: service for engine, (service, _) in zip(engines, cluster.each)}
    second = Cluster(cluster, waiting, [Ours(config or CoreConfig())]).run()
    today, ours = _sums(first, workload, kept), _sums(second, workload, kept)
    measured = _measured([seen[i] for i in kept], today)
    base = measured or today
    saved = Sums(
        _part(base.computed_tokens, today.computed_tokens, ours.computed_tokens),
        _part(base.ttft_s, today.ttft_s, ours.ttft_s),
        None,
    )
    if all(s.end_s is None for s in seen):
        today.seconds = ours.seconds = base.seconds = None
    elif base.seconds is not None and today.seconds is not None and ours.seconds is not None:
        saved.seconds = _part(base.seconds, today.seconds, ours.seconds)
    prompt_tokens = sum(seen[i].prompt_tokens for i in kept)
    times = {
        "measured": [s.first_s - s.at_s for s in seen[warming:] if s.first_s is not None],
        "today, as played": [first.ttft_s[i] for i in kept],
        "router run": [second.ttft_s[i] for i in kept],
    }
    quantiles = {name: _hundredths(values) for name, values in times.items() if values}
    waited = sum(request.after is not None for request in waiting.requests)
    lost = _lost(placed, seen, kept, block)
    return Comparison(len(kept), warming, waited, prompt_tokens, measured, today, ours, saved, lost, steps, quantiles)


def _decoding(seen: Sequence[Seen], result: Result) -> float:
    """How many times as long answers took from their first token on as they did in the play."""
    took = [(i, s.end_s - s.first_s) for i, s in enumerate(seen) if s.end_s is not None and s.first_s is not None]
    play = sum(result.e2e_s[i] - result.ttft_s[i] for i, _ in took)
    return sum(seconds for _, seconds in took) / play if play > 0.0 and took else 1.0


def _decodes(steps: StepTimes, longer: float) -> StepTimes:
    return replace(
        steps,
        step_s=steps.step_s * longer,
        decode_request_s=steps.decode_request_s * longer,
        decode_context_s=steps.decode_context_s * longer,
    )


def _hundredths(values: list[float]) -> list[float]:
    values.sort()
    return [values[round(k / 100 * (len(values) - 1))] for k in range(101)]


def _part(measured: float, today: float, ours: float) -> float:
    return measured * (1.0 - ours / today) if today > 0.0 else 0.0


def _sums(result: Result, workload: Workload, kept: Iterable[int]) -> Sums:
    kept, requests = list(kept), workload.requests
    return Sums(
        float(sum(requests[i].prompt_tokens - result.hit_tokens[i] for i in kept)),
        sum(result.ttft_s[i] for i in kept),
        sum(result.e2e_s[i] for i in kept),
    )


def _measured(seen: Sequence[Seen], today: Sums) -> Sums | None:
    """Times of those whose times are known stand for all of them."""
    first = [s.first_s - s.at_s for s in seen if s.first_s is not None]
    whole = [s.end_s - s.at_s for s in seen if s.end_s is not None]
    told = [s for s in seen if s.cached_tokens is not None]
    if not first:
        return None
    tokens, computed = sum(s.prompt_tokens for s in told), sum(s.prompt_tokens - (s.cached_tokens or 0) for s in told)
    return Sums(
        computed * sum(s.prompt_tokens for s in seen) / tokens if tokens else today.computed_tokens,
        sum(first) * len(seen) / len(first),
        sum(whole) * len(seen) / len(whole) if whole else today.seconds,
    )


# What the engines take ------------------------------------------------------------------------------------------------


def learn(seen: Iterable[Seen], engines: Sequence[Engine]) -> dict[str, StepTimes]:
    """worker -> what its steps take, as the router learns it of the answers that pass through it."""
    tracker = LoadTracker(ServiceModel(), CostConfig(), LearnConfig())
    targets = {e.name: tracker.add_target(e.name, None, HolderId(i)) for i, e in enumerate(engines)}
    moments: list[tuple[float, int, Seen]] = []
    for one in seen:
        if one.first_s is not None and one.worker in targets:
            moments += [(one.at_s, 0, one), (one.first_s, 1, one), (one.end_s or one.first_s, 2, one)]
    for now, kind, one in sorted(moments, key=lambda moment: (moment[0], moment[2].serial, moment[1])):
        name = str(one.serial)
        tracker.advance(now)
        if kind == 0:
            cached = min(one.cached_tokens or 0, one.prompt_tokens)
            tracker.add_request(
                name,
                targets[one.worker],
                prompt_tokens=one.prompt_tokens,
                cached_tokens=cached,
                stream=True,
                now=now,
                expected_tokens=float(one.output_tokens or 0),
            )
        elif kind == 1:
            tracker.record_first_token(name, now)
        else:
            tracker.record_progress(name, one.output_tokens or 0)
            tracker.record_answer(name, one.output_tokens, now)
            tracker.end_request(name, now, reported_cached=one.cached_tokens)
    models = {name: target.speeds.measured_model(name) for name, target in targets.items()}
    return {name: StepTimes(**asdict(model)) for name, model in models.items()}


# What was asked -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Names:
    """Small numbers for digests; new ones for blocks of answers that nobody went on from."""

    known: dict[int, int]
    fresh: count[int]

    def of(self, ids: Iterable[int]) -> list[int]:
        return [self.known.get(i) or self.known.setdefault(i, next(self.fresh)) for i in ids]


def played(seen: Sequence[Seen], block: int, *, waits: bool) -> Workload:
    """As the simulation takes it. `waits`: who waited for an answer's end comes so long after it as it did; else when
    it did. Lengths of answers that are not known: the mean of those that are."""
    place: Mapping[int, int] = {one.serial: i for i, one in enumerate(seen)}
    told = [one.output_tokens for one in seen if one.output_tokens]
    usual = max(1, round(sum(told) / len(told))) if told else 1
    names = _Names({}, count(1))
    waited = waited_for(seen) if waits else [None] * len(seen)
    requests: list[SimRequest] = []
    for i, (one, last) in enumerate(zip(seen, waited)):
        before = place.get(one.after) if one.after is not None else None
        end_s = None if before is None else seen[before].end_s
        since_s = None if last is None else seen[last].end_s
        request = SimRequest(
            index=i,
            session=i if before is None else requests[before].session,
            arrival_s=one.at_s - (seen[0].at_s if since_s is None else since_s),
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens or usual,
            ids=names.of(one.ids),
            after=last,
            block=block,
        )
        requests.append(request)
        if before is not None and (end_s is None or end_s <= one.at_s):
            earlier = requests[before]
            full = earlier.full_blocks
            reach = min((earlier.prompt_tokens + earlier.output_tokens) // block, request.full_blocks)
            if not earlier.final_ids and reach >= full and earlier.ids[:full] == request.ids[:full]:
                earlier.final_ids = request.ids[:reach]
    for request in requests:
        ends = (request.prompt_tokens + request.output_tokens - 1) // block  # the last token is never computed
        known = request.final_ids or request.ids[: request.full_blocks]
        request.final_ids = known + [next(names.fresh) for _ in range(ends - len(known))]
    return Workload("seen", requests, f"{len(requests)} requests that were seen")
