"""Learning how fast targets are from the first tokens and answers that the router sees. Pure arithmetic.

An interval of a target takes `factor * (prefill_ratio * P + step_ratio * S)`. P and S are the seconds that its prefill
and its steps take by the prior. The two ratios belong to the pool, the factor to the target. Both ratios are
fitted to the middle half of the pool's last intervals between first tokens, and of those between the tokens of answers,
so a quarter of the intervals may be far too long. The prior counts as half an interval more. Routers share what they
learned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from router.decide.config import LearnConfig, ServiceModel

_RATIO_MIN, _RATIO_MAX = 1e-3, 1e3
_INTERVALS_MAX: Final = 192
"""Last intervals of each kind to which the ratios of a pool are fitted."""
_EARLY_INTERVALS: Final = 32
"""Intervals that each renew the ratios; later only every _LEARN_EVERY-th does."""
_LEARN_EVERY: Final = 32
_PRIOR_WEIGHT: Final = 0.5
"""Number of intervals or ratios that the prior counts as."""
_REFINEMENTS: Final = 4
"""Steps in which ratios are fitted."""
_KEPT_WEIGHT: Final = 0.5
"""Intervals that the result of the step before counts as."""
_FACTOR_MIN: Final = 0.2
"""Least factor by which one step changes a ratio."""
_MODEL_TOLERANCE: Final = 1.02
"""Factor by which the model in use may differ from what was learned."""
_TARGET_INTERVALS_MAX, _TARGET_INTERVALS_MIN = 41, 20
"""Most and fewest intervals of a target whose median is the target's factor."""
_LEAVES_POOL_BEYOND, _RETURNS_TO_POOL_BELOW = 1.25, 1.12
"""A target has a factor of its own beyond the first ratio, until the ratio falls below the second. Without that margin,
noise between equal targets would send all requests to the luckiest."""
_FORGOTTEN_AFTER, _PROBES = 64, 3
"""A target without an observation for _FORGOTTEN_AFTER * members observations of its pool gets the pool's speed again,
until _PROBES intervals show otherwise. A target that is thought slow gets few requests and shows little."""
_FASTER_MAX: Final = 3.0
"""Greatest speed of a target, as a multiple of its pool's."""
_STEP_INTERVAL_EARLY_S, _STEP_INTERVAL_LATE_S = 0.5, 4.0
"""Time between two observations of a target's steps, while the pool has few and later."""
_RATIOS_MAX: Final = 15
"""Ratios whose median is a time factor."""
RATIO_VALID_S: Final = 300.0
"""Time for which a ratio counts. Without an end, a worker or a pair that was slow once would never be tried again."""
_INTERVAL_TOKENS_MAX: Final = 4.0
"""Full steps of prefill tokens after which an interval is not extended."""
_INTERVAL_STEPS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """Time that a target took for known work, with nothing else to do."""

    elapsed_s: float
    uncached_tokens: float
    quadratic_work: float
    """Attention work: sum of L^2 - h^2 over prompts of L tokens, h of them cached. Tokens^2."""
    steps: float
    decode_requests: float
    decode_context_tokens: float
    is_decode: bool = False
    """Whether the steps were counted by the tokens of an answer; otherwise they are derived from first tokens."""


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target's work, of which a copy is kept when an answer begins.

    The totals at the answer's end, less that copy, are the work that the target did while it wrote the answer.
    """

    updated_at_s: float = 0.0
    """Time up to which the two integrals are computed."""
    decode_request_seconds: float = 0.0
    """Integral of the number of decoding requests over time."""
    context_token_seconds: float = 0.0
    """Integral of the context tokens of decoding requests over time."""
    uncached_tokens: float = 0.0
    """Tokens prefilled for the requests that have their first token."""
    quadratic_work: float = 0.0
    """Attention work of those prefills: sum of L^2 - h^2 for prompts of L tokens, h of them cached. Tokens^2."""

    def compute_work_since(self, start: WorkTotals, elapsed_s: float, *, step_count: int) -> Observation:
        """Return the work between `start` and these totals, which took `elapsed_s` seconds and `step_count` steps.

        The integrals are divided by the time, so the observation has the mean numbers of requests and of tokens.
        """
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
    """Time in which a target computed prompts, until the first tokens of one engine step or of several.

    One step may begin a prompt that the next step ends. The interval then covers both steps, because only the sum of
    their work is known.
    """

    start_s: float
    decode_requests: float
    decode_context_tokens: float
    waited_steps: float = 0.0
    """Part of a step that passed before the first prompt could begin: half a step while others decode."""
    last_step_start_s: float = 0.0
    """Estimated begin of the last step."""
    is_usable: bool = True
    """Whether no other work is known to have been done meanwhile."""
    end_s: float = field(init=False, default=0.0)
    uncached_tokens: int = field(init=False, default=0)
    quadratic_work: float = field(init=False, default=0.0)
    tier_load_s: float = field(init=False, default=0.0)
    """Time to load cached tokens of all its requests from slower tiers, by the configured rates."""
    step_count: int = field(init=False, default=1)

    @classmethod
    def begin(
        cls, sent_at_s: float, oldest_since_s: float, decode_requests: int, decode_context_tokens: int, now: float
    ) -> PrefillInterval:
        """Return the interval of a prompt that was sent at `sent_at_s` and had its first token in the step until `now`.

        The prompt could begin at `oldest_since_s`, when the prompts before it had ended, or when it was sent. If it was
        sent while the target was decoding, the running step had to end first: on average half a step passed.
        """
        has_met_running_step = decode_requests > 0 and sent_at_s > oldest_since_s
        waited_steps = 0.5 if has_met_running_step else 0.0
        start_s = max(oldest_since_s, sent_at_s)
        return cls(
            start_s,
            decode_requests,
            decode_context_tokens,
            waited_steps=waited_steps,
            last_step_start_s=start_s + (now - start_s) * waited_steps / (1.0 + waited_steps),
        )

    def add_first_token(self, prompt_tokens: int, cached_tokens: int, tier_load_s: float, now: float) -> None:
        """Add a request with its first token in the last step."""
        self.end_s = now
        self.uncached_tokens += prompt_tokens - cached_tokens
        self.quadratic_work += float(prompt_tokens**2 - cached_tokens**2)
        self.tier_load_s += tier_load_s

    def can_add_step(self, sent_at_s: float, oldest_since_s: float, step_tokens: int) -> bool:
        """Return whether the next prompt may have begun in the last step, so that only both steps are known work.

        A step takes as much of the next prompt as its token budget leaves. `sent_at_s`: when the next prompt was sent.
        `oldest_since_s`: when it became the oldest.
        """
        has_room = self.uncached_tokens < _INTERVAL_TOKENS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        return has_room and sent_at_s <= self.last_step_start_s and oldest_since_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context_tokens: float) -> None:
        """Extend the interval by a step, beside so many decoding requests and tokens of their context."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context_tokens - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int, tier_load_s: float = 0.0) -> Observation:
        """Return the interval as an observation, less the time for loads from slower tiers.

        `step_tokens`: prefill tokens of a full step.
        """
        return Observation(
            elapsed_s=self.end_s - self.start_s - tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )


class PriorTimes(NamedTuple):
    """Time that an interval took, and times that its parts take by the prior."""

    elapsed_s: float
    prefill_s: float
    steps_s: float


class SharedSpeed(NamedTuple):
    """Speed of a pool as one router learned it, in absolute times, as routers may have different priors.

    A weight is the number of intervals that the time was learned from.
    """

    prefill_s_per_token: float
    prefill_weight: float
    step_s: float
    """Time of a step of one sequence without its context."""
    step_weight: float


class PoolSpeed:
    """Speed of the targets that serve one model, as this router and its peers learned it."""

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._prior = prior
        self._prior_step_s = prior.step_s + prior.decode_request_s
        self.is_enabled = config.enabled
        self._prefills: deque[PriorTimes] = deque(maxlen=_INTERVALS_MAX)
        self._steps: deque[PriorTimes] = deque(maxlen=_INTERVALS_MAX)
        self.own = SharedSpeed(prior.prefill_s_per_token, 0.0, self._prior_step_s, 0.0)
        """Speed that this router learned itself."""
        self._shared_by_router: dict[str, SharedSpeed] = {}
        self._prior_ratio = self._prefill_ratio = self._step_ratio = 1.0
        self.members: list[Speed] = []
        self.observation_count = 0
        self.model = prior
        """Service model of a target without a factor of its own."""
        self.is_silent = config.enabled
        """Whether the pool is to be learned and no router has observed anything yet."""

    @property
    def step_observation_interval_s(self) -> float:
        """Time between two observations of a target's steps."""
        return _STEP_INTERVAL_EARLY_S if len(self._steps) < _INTERVALS_MAX else _STEP_INTERVAL_LATE_S

    def compute_prior_times(self, observation: Observation) -> PriorTimes:
        """Return the times that the parts of an interval take by the prior."""
        prior = self._prior
        work_tokens = observation.uncached_tokens + observation.quadratic_work / (2.0 * prior.quadratic_tokens)
        step_s = prior.step_s + prior.decode_request_s * observation.decode_requests
        step_s += prior.decode_context_s * observation.decode_context_tokens
        return PriorTimes(observation.elapsed_s, prior.prefill_s_per_token * work_tokens, step_s * observation.steps)

    def predict_s(self, times: PriorTimes) -> float:
        """Return the time that an interval takes by the learned ratios."""
        return self._prefill_ratio * times.prefill_s + self._step_ratio * times.steps_s

    def observe(self, times: PriorTimes, *, is_decode: bool) -> bool:
        """Add an interval and fit the pool's two ratios to the last intervals; return whether the model has changed.

        A prefill ratio of 2.0 means that prefills take twice the time of the prior; the step ratio says the same of
        decode steps. After the first intervals, only every _LEARN_EVERY-th interval renews the fit. `times.elapsed_s`
        is already divided by the target's factor, so that a slow target does not slow its pool.
        """
        intervals_of_kind = self._steps if is_decode else self._prefills
        intervals_of_kind.append(times)
        self.observation_count += 1
        if len(intervals_of_kind) > _EARLY_INTERVALS and self.observation_count % _LEARN_EVERY:
            return False
        prefill_ratio, step_ratio = _fit_ratios(
            [*self._take_middle_half(self._prefills), *self._take_middle_half(self._steps)]
        )
        prefill_weight, step_weight = self._compute_weights()
        self.own = SharedSpeed(
            prefill_s_per_token=self._prior.prefill_s_per_token * prefill_ratio,
            prefill_weight=prefill_weight,
            step_s=self._prior_step_s * step_ratio,
            step_weight=step_weight,
        )
        return self._refresh_model()

    def _compute_weights(self) -> tuple[float, float]:
        """Return how many intervals count for the prefill ratio, and how many for the step ratio.

        An interval that is expected to spend 70 % of its time in prefill counts 0.7 for prefill and 0.3 for steps.
        """
        intervals = [*self._prefills, *self._steps]
        prefill_weight = sum(
            self._prefill_ratio * interval.prefill_s / self.predict_s(interval) for interval in intervals
        )
        return prefill_weight, len(intervals) - prefill_weight

    def _take_middle_half(self, intervals: Iterable[PriorTimes]) -> list[PriorTimes]:
        """Return the intervals but for the quarters that were the fastest and the slowest against their prediction.

        Some intervals held work that the router does not know of, which would spoil the fit.
        """
        ordered = sorted(intervals, key=lambda times: times.elapsed_s / self.predict_s(times))
        trimmed_count = len(ordered) // 4
        return ordered[trimmed_count : len(ordered) - trimmed_count]

    def raise_prior(self, ratio: float) -> bool:
        """Multiply the prior by `ratio`, before anything was observed; return whether the model has changed."""
        self._prior_ratio = min(self._prior_ratio * ratio, _RATIO_MAX)
        return self._refresh_model()

    def set_shared_speed(self, router: str, shared: SharedSpeed | None) -> bool:
        """Replace what another router learned, None to forget it; return whether the model has changed."""
        if shared is not None:
            self._shared_by_router[router] = shared
        elif self._shared_by_router.pop(router, None) is None:
            return False
        return self._refresh_model()

    def _refresh_model(self) -> bool:
        """Combine what all routers learned; return whether the model has changed."""
        prior, learned = self._prior, [self.own, *self._shared_by_router.values()]
        self.is_silent = self.is_enabled and not any(s.prefill_weight or s.step_weight for s in learned)
        self._prefill_ratio = _combine_ratios(
            self._prior_ratio, [(s.prefill_s_per_token / prior.prefill_s_per_token, s.prefill_weight) for s in learned]
        )
        self._step_ratio = self._prefill_ratio  # a target of half the speed is slower in everything
        if self._prior_step_s > 0.0:
            self._step_ratio = _combine_ratios(
                self._prefill_ratio, [(s.step_s / self._prior_step_s, s.step_weight) for s in learned]
            )
        model = _scale_model(prior, self._prefill_ratio, self._step_ratio)
        if not self.is_enabled or _is_near(model, self.model):
            return False
        self.model = model
        return True


def _fit_ratios(intervals: Sequence[PriorTimes]) -> tuple[float, float]:
    """Return how many times as long as by the prior the prefill of these intervals took, and their steps.

    The fit begins with one ratio for both, the median, and is refined a few times. So two parts that always come in the
    same proportion, as with prompts of one size, keep about the same ratio.
    """
    common_ratios = sorted(times.elapsed_s / (times.prefill_s + times.steps_s) for times in intervals)
    prefill_ratio = step_ratio = common_ratios[len(common_ratios) // 2]
    for _ in range(_REFINEMENTS):
        prefill_ratio, step_ratio = _refine_ratios(intervals, prefill_ratio, step_ratio)
    return prefill_ratio, step_ratio


def _refine_ratios(intervals: Sequence[PriorTimes], prefill_ratio: float, step_ratio: float) -> tuple[float, float]:
    """Return ratios that explain the intervals better than the given ones, from which they are taken to differ little.

    Least squares of `prefill_factor * prefill_share + step_factor * step_share = 1`, where a share is the time of a
    part by the given ratio over the time of the interval. `_KEPT_WEIGHT` intervals tell for each factor that it is 1.
    """
    prefill_squares = step_squares = prefill_sum = step_sum = _KEPT_WEIGHT
    products = 0.0
    for times in intervals:
        prefill_share = prefill_ratio * times.prefill_s / times.elapsed_s
        step_share = step_ratio * times.steps_s / times.elapsed_s
        prefill_squares += prefill_share * prefill_share
        step_squares += step_share * step_share
        products += prefill_share * step_share
        prefill_sum += prefill_share
        step_sum += step_share
    determinant = prefill_squares * step_squares - products * products
    prefill_factor = (prefill_sum * step_squares - step_sum * products) / determinant
    step_factor = (step_sum * prefill_squares - prefill_sum * products) / determinant
    return (
        min(max(prefill_ratio * max(prefill_factor, _FACTOR_MIN), _RATIO_MIN), _RATIO_MAX),
        min(max(step_ratio * max(step_factor, _FACTOR_MIN), _RATIO_MIN), _RATIO_MAX),
    )


def _combine_ratios(prior_ratio: float, learned: list[tuple[float, float]]) -> float:
    """Return the geometric mean of `learned`, pairs of ratio and weight, and of the prior."""
    weight = _PRIOR_WEIGHT + sum(weight for _, weight in learned)
    log_sum = _PRIOR_WEIGHT * math.log(prior_ratio) + sum(weight * math.log(ratio) for ratio, weight in learned)
    return min(max(math.exp(log_sum / weight), _RATIO_MIN), _RATIO_MAX)


def _scale_model(model: ServiceModel, prefill_factor: float, step_factor: float) -> ServiceModel:
    """Return a model with the times of prefill and of steps multiplied by two factors."""
    return replace(
        model,
        prefill_s_per_token=prefill_factor * model.prefill_s_per_token,
        step_s=step_factor * model.step_s,
        decode_request_s=step_factor * model.decode_request_s,
        decode_context_s=step_factor * model.decode_context_s,
    )


def _is_near(model: ServiceModel, other: ServiceModel) -> bool:
    """Return whether two models differ by at most _MODEL_TOLERANCE in prefill and step times."""
    times = (model.prefill_s_per_token, model.step_s + model.decode_request_s)
    other_times = (other.prefill_s_per_token, other.step_s + other.decode_request_s)
    return all(_is_within(time_s, other_s, _MODEL_TOLERANCE) for time_s, other_s in zip(times, other_times))


class _ObservedRatio(NamedTuple):
    ratio: float
    observed_at_s: float


class TimeFactor:
    """Learns the ratio of the observed time to the predicted time of KV from slower memory or from another worker.

    It is the median of the recent ratios, so that a few late arrivals on busy machines have little effect.
    """

    def __init__(self) -> None:
        self._recent: deque[_ObservedRatio] = deque(maxlen=_RATIOS_MAX)
        self._median = 1.0

    def observe(self, predicted_s: float, observed_s: float, now: float) -> None:
        """Learn from KV that took `observed_s` to arrive. `predicted_s`: the prediction before this factor."""
        ratio = min(max(observed_s / predicted_s, _RATIO_MIN), _RATIO_MAX)
        self._recent.append(_ObservedRatio(ratio, now))
        self._update_median()

    def get(self, now: float, prior: float = 1.0) -> float:
        """Forget old ratios and return the factor.

        `prior`: the factor that is assumed before any observation; its weight shrinks with each.
        """
        while self._recent and now - self._recent[0].observed_at_s > RATIO_VALID_S:
            self._recent.popleft()
            self._update_median()
        return _combine_ratios(prior, [(self._median, len(self._recent))])

    def _update_median(self) -> None:
        if self._recent:
            self._median = sorted(self._recent)[(len(self._recent) - 1) // 2].ratio


class Speed:
    """Speed of one target: its factor, the rates in use, and the observations in progress."""

    def __init__(self, pool: PoolSpeed) -> None:
        self.pool = pool
        self.factor = 1.0
        """Time that the target takes for any work, divided by the time that its pool takes."""
        self.tier_load = TimeFactor()
        """Factor of the time of loads from slower tiers."""
        self.reported_step_tokens: int | None = None
        """Most tokens of a step as the engine tells them; None: as configured."""
        self.work_totals = WorkTotals()
        self.last_step_observation_s = -math.inf
        self.open_prefill_interval: PrefillInterval | None = None
        self.observation_count = 0
        self._recent_ratios: deque[float] = deque(maxlen=_TARGET_INTERVALS_MAX)
        """Elapsed times of the last intervals, divided by the times that the pool's ratios predict."""
        self._last_observation_number = pool.observation_count
        """The pool's number of observations at the target's last one."""
        pool.members.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Recompute the rates in use after the pool's model or the factor has changed."""
        service = _scale_model(self.pool.model, self.factor, self.factor)
        self.set_service_model(replace(service, step_tokens=self.reported_step_tokens or service.step_tokens))

    def set_service_model(self, service: ServiceModel) -> None:
        """Set the rates in use."""
        self.service = service
        self.step_tokens = service.step_tokens
        self.prefill_rate = service.prefill_s_per_token
        """Seconds a token at an empty context."""
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
        """Return P, the time to compute the uncached part of a prompt."""
        quadratic_work = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic_work

    def predict_prefill_s(self, uncached_tokens: float, quadratic_work: float) -> float:
        """Return the time of several prefills at the rates in use, by the sums of their work."""
        return self.prefill_rate * uncached_tokens + self.quadratic_rate * quadratic_work

    def predict_step_s(self, observation: Observation) -> float:
        """Return the time of a decode step beside the decoding requests of an observation."""
        step_s = self.step_s + self.decode_request_s * observation.decode_requests
        return step_s + self.decode_context_s * observation.decode_context_tokens

    def predict_interval_s(self, observation: Observation) -> float:
        """Return the time that the work of an observation takes at the rates in use."""
        prefill_s = self.predict_prefill_s(observation.uncached_tokens, observation.quadratic_work)
        return prefill_s + self.predict_step_s(observation) * observation.steps

    def observe(self, observation: Observation) -> list[Speed]:
        """Learn from one interval of this target; return the speeds that changed and need a call of `refresh`.

        The pool learns how all its targets compare with the prior; the factor, how this target compares with its pool.
        Each call also checks the factor of another member in turn, because a target that gets no requests would
        otherwise keep an old factor.
        """
        pool = self.pool
        times = pool.compute_prior_times(observation)
        if not pool.is_enabled or times.elapsed_s <= 0.0 or times.prefill_s + times.steps_s <= 0.0:
            return []
        self._recent_ratios.append(times.elapsed_s / pool.predict_s(times))
        self.observation_count += 1
        times_at_pool_speed = times._replace(elapsed_s=times.elapsed_s / max(self.factor, 1.0))
        has_pool_changed = pool.observe(times_at_pool_speed, is_decode=observation.is_decode)
        self._last_observation_number = pool.observation_count
        next_member = pool.members[pool.observation_count % len(pool.members)]
        changed_members = [speed for speed in dict.fromkeys((self, next_member)) if speed._update_factor()]
        return pool.members if has_pool_changed else changed_members

    def _update_factor(self) -> bool:
        """Recompute this target's factor, 2.0 if work takes it twice as long as its pool; return whether it changed."""
        previous_factor = self.factor
        self._forget_old_ratios()
        self.factor = self._choose_factor()
        return self.factor != previous_factor

    def _forget_old_ratios(self) -> None:
        """Drop most ratios of a target that was not observed for long, so that it is taken to be as fast as its pool.

        A target that is thought slow gets few requests, so it could not show that it is fast again. _PROBES new ratios
        are then enough for a factor of its own.
        """
        unheard_count = self.pool.observation_count - self._last_observation_number
        if self.factor != 1.0 and unheard_count > _FORGOTTEN_AFTER * len(self.pool.members):
            while len(self._recent_ratios) > _TARGET_INTERVALS_MIN - _PROBES:
                self._recent_ratios.popleft()

    def _choose_factor(self) -> float:
        """Return the median of the recent ratios; 1.0 if there are few, or if the median is about 1.

        Small changes are ignored. A factor of 1.0 stays until the median is far from 1, another factor until the median
        is close to 1 again, and it stays the same number while the median is nearly equal to it.
        """
        ratios = self._recent_ratios
        if len(ratios) < _TARGET_INTERVALS_MIN:
            return 1.0
        median_ratio = max(sorted(ratios)[len(ratios) // 2], 1.0 / _FASTER_MAX)
        tolerance = _LEAVES_POOL_BEYOND if self.factor == 1.0 else _RETURNS_TO_POOL_BELOW
        if _is_within(median_ratio, 1.0, tolerance):
            return 1.0
        is_same = _is_within(median_ratio, self.factor, _MODEL_TOLERANCE)
        return self.factor if is_same else median_ratio


def _is_within(ratio: float, other: float, tolerance: float) -> bool:
    """Return whether neither number is more than `tolerance` times the other."""
    return ratio <= tolerance * other and other <= tolerance * ratio
