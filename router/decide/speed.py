"""Learning how fast workers are from the first tokens and answers that the router sees. Pure arithmetic.

An interval of a worker takes `factor * (prefill_ratio * P + step_ratio * S)`: P and S are the seconds that its prefill
and its steps take by the prior, the two ratios are the pool's, the factor is the worker's own. First tokens teach the
prefill ratio, answers the step ratio. Each ratio is an interquartile mean over the pool's last intervals, so that a
quarter of them may be far too long (a request that waited, a worker that was busy otherwise), and is drawn to the prior
as if that had been half an interval more. Routers share what they learned.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from router.decide.config import LearnConfig, ServiceModel

_RATIO_MIN, _RATIO_MAX = 1e-3, 1e3
_INTERVALS_MAX: Final = 192
"""Intervals of each kind that a pool's ratio is the mean of."""
_EARLY_INTERVALS: Final = 32
"""So many intervals are each learned from at once; later every LEARN_EVERY-th."""
_LEARN_EVERY: Final = 8
_PRIOR_WEIGHT: Final = 0.5
"""Intervals that the prior counts as."""
_MODEL_TOLERANCE: Final = 1.02
"""The model in use is renewed when it is off by more."""
_WORKER_INTERVALS_MAX, _WORKER_INTERVALS_MIN = 41, 20
"""Intervals of a worker that its factor is the median of, at most and at least."""
_LEAVES_POOL_BEYOND, _RETURNS_TO_POOL_BELOW = 1.25, 1.12
"""A worker leaves the pool's model beyond the first factor and returns to it below the second: the price compares
workers, and a few per cent of noise between equal ones would send everything to the luckiest."""
_FORGOTTEN_AFTER, _PROBES = 64, 3
"""After so many of the pool's observations for each of its workers without one of its own, a worker is like the pool
again until so many tell otherwise: a worker that is thought slow gets little and shows little."""
_FASTER_MAX: Final = 3.0
"""A worker is not taken to be more times as fast as its pool."""
_STEP_INTERVAL_EARLY_S, _STEP_INTERVAL_LATE_S = 0.5, 4.0
"""Seconds between two looks at a worker's steps while few were seen, and after."""
_TIER_LOADS_MAX, _TIER_LOADS_MIN = 15, 3
"""Loads of a worker that its rate is the median of, at most and at least."""
_INTERVAL_TOKENS_MAX: Final = 4.0
"""An interval that prefilled the tokens of so many full steps is not made longer."""
_INTERVAL_STEPS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval in which a worker did nothing but this work."""

    elapsed_s: float
    uncached_tokens: float
    quadratic_work: float
    """Sum of L^2 - h^2 over the prompts, tokens^2."""
    steps: float
    decode_requests: float
    decode_context_tokens: float
    is_decode: bool = False
    """The interval was seen by the tokens of an answer, so that its steps are counted; else by first tokens."""


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target, for learning how long a decode step takes: two of them bracket an answer."""

    updated_at_s: float = 0.0
    decode_request_seconds: float = 0.0
    """Integral of the number of decoding requests over time."""
    context_token_seconds: float = 0.0
    uncached_tokens: float = 0.0
    """Tokens that were prefilled until the latest first token."""
    quadratic_work: float = 0.0

    def observe_since(self, start: WorkTotals, elapsed_s: float, *, step_count: int) -> Observation:
        """Return what was done after `start`, in so many steps."""
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic_work=self.quadratic_work - start.quadratic_work,
            steps=step_count,
            decode_requests=(self.decode_request_seconds - start.decode_request_seconds) / elapsed_s,
            decode_context_tokens=(self.context_token_seconds - start.context_token_seconds) / elapsed_s,
            is_decode=True,
        )


@dataclass(slots=True)
class PrefillInterval:
    """First tokens of one engine step, or of several where a step may have begun a prompt that the next one ended."""

    start_s: float
    decode_requests: float
    decode_context_tokens: float
    waited_steps: float = 0.0
    """A request that comes while others decode waits for half a step, on average, before its own."""
    last_step_start_s: float = 0.0
    """When its last step began, about."""
    is_usable: bool = True
    """No other work is known to have been done in it."""
    end_s: float = field(init=False, default=0.0)
    uncached_tokens: int = field(init=False, default=0)
    quadratic_work: float = field(init=False, default=0.0)
    tier_load_s: float = field(init=False, default=0.0)
    """Time to load from slower tiers, by the configured rates, of all its requests."""
    step_count: int = field(init=False, default=1)

    def add_first_token(self, prompt_tokens: int, cached_tokens: int, tier_load_s: float, now: float) -> None:
        """The first token of such a request came in its last step."""
        self.end_s = now
        self.uncached_tokens += prompt_tokens - cached_tokens
        self.quadratic_work += float(prompt_tokens**2 - cached_tokens**2)
        self.tier_load_s += tier_load_s

    def can_add_step(self, routed_s: float, since_s: float, step_tokens: int) -> bool:
        """Whether a prompt that was routed then, and turned to then, may have begun in the last step: a step takes of
        the next prompt what its budget leaves, so that only both steps together did a known work."""
        has_room = self.uncached_tokens < _INTERVAL_TOKENS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        return has_room and routed_s <= self.last_step_start_s and since_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context_tokens: float) -> None:
        """Another step belongs to it, beside so many decodes; it began when the last one ended."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context_tokens - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int, tier_load_s: float = 0.0) -> Observation:
        """Return what the interval tells of a worker whose steps have so many prefill tokens, without the time that was
        spent on loads from slower tiers."""
        return Observation(
            elapsed_s=self.end_s - self.start_s - tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )


class PriorTimes(NamedTuple):
    """How long an interval took, and the seconds that its parts take by the prior."""

    elapsed_s: float
    prefill_s: float
    steps_s: float


class SharedSpeed(NamedTuple):
    """What one router learned of a pool, as absolute times, as routers may differ in the prior; and how many intervals
    say so."""

    prefill_s_per_token: float
    prefill_weight: float
    step_s: float
    """Time of a step of one sequence without its context."""
    step_weight: float


class PoolSpeed:
    """The speed of the workers that serve one model."""

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._prior = prior
        self._prior_step_s = prior.step_s + prior.decode_request_s
        self.is_enabled = config.enabled
        self._prefills: deque[PriorTimes] = deque(maxlen=_INTERVALS_MAX)
        self._steps: deque[PriorTimes] = deque(maxlen=_INTERVALS_MAX)
        self.own = SharedSpeed(prior.prefill_s_per_token, 0.0, self._prior_step_s, 0.0)
        """What this router learned by itself."""
        self._shared_by_router: dict[str, SharedSpeed] = {}
        self._prior_ratio = self._prefill_ratio = self._step_ratio = 1.0
        self.members: list[Speed] = []
        self.observation_count = 0
        self.model = prior
        """The service model of a worker that is like its pool."""

    @property
    def is_silent(self) -> bool:
        """It learns, and nothing was observed yet, of any worker by any router."""
        return self.is_enabled and not any(s.prefill_weight or s.step_weight for s in self._get_learned())

    @property
    def step_observation_interval_s(self) -> float:
        """Seconds between two looks at a worker's steps: short at first, then enough to see a change."""
        return _STEP_INTERVAL_EARLY_S if len(self._steps) < _INTERVALS_MAX else _STEP_INTERVAL_LATE_S

    def compute_prior_times(self, observation: Observation) -> PriorTimes:
        """Return what the parts of an interval take by the prior."""
        prior = self._prior
        work_tokens = observation.uncached_tokens + observation.quadratic_work / (2.0 * prior.quadratic_tokens)
        step_s = prior.step_s + prior.decode_request_s * observation.decode_requests
        step_s += prior.decode_context_s * observation.decode_context_tokens
        return PriorTimes(observation.elapsed_s, prior.prefill_s_per_token * work_tokens, step_s * observation.steps)

    def predict_s(self, times: PriorTimes) -> float:
        """Return what an interval takes by what was learned."""
        return self._prefill_ratio * times.prefill_s + self._step_ratio * times.steps_s

    def observe(self, times: PriorTimes, *, is_decode: bool) -> bool:
        """Learn from an interval, its time divided by its worker's factor; True where the model has changed."""
        intervals = self._steps if is_decode else self._prefills
        intervals.append(times)
        self.observation_count += 1
        if len(intervals) > _EARLY_INTERVALS and self.observation_count % _LEARN_EVERY:
            return False
        has_steps = any(shared.step_weight for shared in self._get_learned())
        prefill_ratio, prefill_weight = _compute_mean_ratio(
            [(times.elapsed_s, times.prefill_s, times.steps_s) for times in self._prefills],
            self._prefill_ratio,
            self._step_ratio if has_steps else None,
        )
        step_ratio, step_weight = _compute_mean_ratio(
            [(times.elapsed_s, times.steps_s, times.prefill_s) for times in self._steps],
            self._step_ratio,
            self._prefill_ratio,
        )
        self.own = SharedSpeed(
            self._prior.prefill_s_per_token * prefill_ratio,
            prefill_weight,
            self._prior_step_s * step_ratio,
            step_weight,
        )
        return self._refresh_model()

    def raise_prior(self, ratio: float) -> bool:
        """Nothing was observed yet, as everything takes so many times as long as expected, at least; True where the
        model has changed."""
        self._prior_ratio = min(self._prior_ratio * ratio, _RATIO_MAX)
        return self._refresh_model()

    def set_shared_speed(self, router: str, shared: SharedSpeed | None) -> bool:
        """Take in what another router learned, or forget it; True where the model has changed."""
        if shared is not None:
            self._shared_by_router[router] = shared
        elif self._shared_by_router.pop(router, None) is None:
            return False
        return self._refresh_model()

    def _get_learned(self) -> list[SharedSpeed]:
        return [self.own, *self._shared_by_router.values()]

    def _refresh_model(self) -> bool:
        """Combine what the routers learned; put it to use where it differs from the model in use."""
        prior, learned = self._prior, self._get_learned()
        self._prefill_ratio = _combine_ratios(
            self._prior_ratio, [(s.prefill_s_per_token / prior.prefill_s_per_token, s.prefill_weight) for s in learned]
        )
        self._step_ratio = self._prefill_ratio  # a worker of half the speed is slower in everything
        if self._prior_step_s > 0.0:
            self._step_ratio = _combine_ratios(
                self._prefill_ratio, [(s.step_s / self._prior_step_s, s.step_weight) for s in learned]
            )
        model = _scale_model(prior, self._prefill_ratio, self._step_ratio)
        if not self.is_enabled or _is_near(model, self.model):
            return False
        self.model = model
        return True


def _compute_mean_ratio(
    intervals: list[tuple[float, float, float]], ratio: float, other_ratio: float | None
) -> tuple[float, float]:
    """Return (how many times as long as by the prior one part of intervals took, how many intervals say so).

    `intervals`: (time, seconds of the part by the prior, seconds of the other part by the prior). `ratio`: as it was
    known so far. `other_ratio`: of the other part; None where nothing is known of it: the same is then taken for both.
    The mean is over the middle half of the intervals, in the order of how much longer they took than expected. An
    interval counts as much as the part is of it."""
    rows = []
    for elapsed_s, part_s, other_s in intervals:
        if other_ratio is None:
            part_s, other_s = part_s + other_s, 0.0
        else:
            other_s *= other_ratio
        expected_s = ratio * part_s + other_s
        rows.append((elapsed_s / expected_s, elapsed_s - other_s, part_s, ratio * part_s / expected_s))
    rows.sort()
    trimmed_count = len(rows) // 4
    middle_rows = rows[trimmed_count : len(rows) - trimmed_count]
    part_total_s = sum(share * part_s for _, _, part_s, share in middle_rows)
    if part_total_s <= 0.0:
        return 1.0, 0.0
    mean_ratio = sum(share * taken_s for _, taken_s, _, share in middle_rows) / part_total_s
    return min(max(mean_ratio, _RATIO_MIN), _RATIO_MAX), sum(share for _, _, _, share in rows)


def _combine_ratios(prior_ratio: float, learned: list[tuple[float, float]]) -> float:
    """Return the mean of (ratio, weight), drawn to the prior, on a logarithmic scale."""
    weight = _PRIOR_WEIGHT + sum(weight for _, weight in learned)
    log_sum = _PRIOR_WEIGHT * math.log(prior_ratio) + sum(weight * math.log(ratio) for ratio, weight in learned)
    return min(max(math.exp(log_sum / weight), _RATIO_MIN), _RATIO_MAX)


def _scale_model(model: ServiceModel, prefill_factor: float, step_factor: float) -> ServiceModel:
    """Return the model of a worker that takes so many times as long for prefill and for steps."""
    return replace(
        model,
        prefill_s_per_token=prefill_factor * model.prefill_s_per_token,
        step_s=step_factor * model.step_s,
        decode_request_s=step_factor * model.decode_request_s,
        decode_context_s=step_factor * model.decode_context_s,
    )


def _is_near(model: ServiceModel, other: ServiceModel) -> bool:
    """Whether two models differ by little."""
    times = (model.prefill_s_per_token, model.step_s + model.decode_request_s)
    other_times = (other.prefill_s_per_token, other.step_s + other.decode_request_s)
    return all(_is_within(time_s, other_s, _MODEL_TOLERANCE) for time_s, other_s in zip(times, other_times))


class TierLoadSpeed:
    """How long one worker takes to fetch what lies on slower tiers: `factor` times what the configured rates say.

    The median of what its lately seen first tokens took longer than computing them should: a queue or a busy machine
    makes some of them late, and few are early.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_TIER_LOADS_MAX)
        self.factor = 1.0

    def observe(self, tier_load_s: float, excess_s: float) -> None:
        """A load of `tier_load_s` by the configured rates took so many seconds."""
        self._recent.append(min(max(excess_s / tier_load_s, _RATIO_MIN), _RATIO_MAX))
        if len(self._recent) >= _TIER_LOADS_MIN:
            self.factor = sorted(self._recent)[len(self._recent) // 2]


class Speed:
    """How fast one target is: its factor, the rates in use, as they are read for every request, and what is being
    observed of it."""

    def __init__(self, pool: PoolSpeed) -> None:
        self.pool = pool
        self.factor = 1.0
        """So many times as long as the pool it is taken to need for everything."""
        self.tier_load = TierLoadSpeed()
        self.work_totals = WorkTotals()
        self.last_step_observation_s = -math.inf
        self.open_prefill_interval: PrefillInterval | None = None
        self.observation_count = 0
        self._recent_ratios: deque[float] = deque(maxlen=_WORKER_INTERVALS_MAX)
        """How many times as long as by the pool's model its last intervals took."""
        self._last_observation_number = pool.observation_count
        """The pool's count of observations when one was its."""
        pool.members.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Put the pool's model and the factor to use after one of them has changed."""
        self.set_service_model(_scale_model(self.pool.model, self.factor, self.factor))

    def set_service_model(self, service: ServiceModel) -> None:
        """The target is as fast as `service` says."""
        self.service = service
        self.step_tokens = service.step_tokens
        self.prefill_rate = service.prefill_s_per_token
        """a"""
        self.quadratic_rate = self.prefill_rate / (2.0 * service.quadratic_tokens)
        self.step_s = service.step_s
        """Fixed time of a step."""
        self.decode_request_s = service.decode_request_s
        self.decode_context_s = service.decode_context_s
        self.single_step_s = service.step_s + service.decode_request_s
        """Time of a step of one sequence without its context."""
        self.step_prefill_s = self.prefill_rate * service.step_tokens
        """Time of a step's prefill tokens at an empty context."""

    def estimate_prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Return P, the seconds that the uncached part of a prompt takes."""
        quadratic_work = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic_work

    def predict_step_s(self, observation: Observation) -> float:
        """Return the time of a decode step in such an interval."""
        step_s = self.step_s + self.decode_request_s * observation.decode_requests
        return step_s + self.decode_context_s * observation.decode_context_tokens

    def predict_interval_s(self, observation: Observation) -> float:
        """Return the time that such an interval takes here, as far as is known."""
        prefill_s = self.prefill_rate * observation.uncached_tokens + self.quadratic_rate * observation.quadratic_work
        return prefill_s + self.predict_step_s(observation) * observation.steps

    def observe(self, observation: Observation) -> list[Speed]:
        """Learn from one interval; returns the speeds that changed, of which `refresh` is still to be called."""
        pool, times = self.pool, self.pool.compute_prior_times(observation)
        if not pool.is_enabled or times.elapsed_s <= 0.0 or times.prefill_s + times.steps_s <= 0.0:
            return []
        self._recent_ratios.append(times.elapsed_s / pool.predict_s(times))
        self.observation_count += 1
        has_pool_changed = pool.observe(
            times._replace(elapsed_s=times.elapsed_s / max(self.factor, 1.0)), is_decode=observation.is_decode
        )
        self._last_observation_number = pool.observation_count
        next_member = pool.members[pool.observation_count % len(pool.members)]
        changed_members = [speed for speed in dict.fromkeys((self, next_member)) if speed._update_factor()]
        return pool.members if has_pool_changed else changed_members

    def _update_factor(self) -> bool:
        """Whether its factor changed."""
        pool, ratios, previous_factor = self.pool, self._recent_ratios, self.factor
        unheard_count = pool.observation_count - self._last_observation_number
        if previous_factor != 1.0 and unheard_count > _FORGOTTEN_AFTER * len(pool.members):
            while len(ratios) > _WORKER_INTERVALS_MIN - _PROBES:
                ratios.popleft()
        self.factor = 1.0
        if len(ratios) >= _WORKER_INTERVALS_MIN:
            median_ratio = max(sorted(ratios)[len(ratios) // 2], 1.0 / _FASTER_MAX)
            tolerance = _LEAVES_POOL_BEYOND if previous_factor == 1.0 else _RETURNS_TO_POOL_BELOW
            if not _is_within(median_ratio, 1.0, tolerance):
                is_same = _is_within(median_ratio, previous_factor, _MODEL_TOLERANCE)
                self.factor = previous_factor if is_same else median_ratio
        return self.factor != previous_factor


def _is_within(ratio: float, other: float, tolerance: float) -> bool:
    """Whether neither is more than `tolerance` times the other."""
    return ratio <= tolerance * other and other <= tolerance * ratio
