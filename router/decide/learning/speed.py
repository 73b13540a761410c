"""Speed of a pool of targets, and of each target in it.

An interval of a target takes `factor * (prefill_ratio * P + step_ratio * S)`. P and S are the seconds that its prefill
and its steps take by the prior. The two ratios belong to the pool, the factor to the target. Both ratios are fitted to
the middle half of the pool's last intervals between first tokens, and of those between the tokens of answers, so a
quarter of the intervals may be far too long. The prior counts as half an interval more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from router.decide.config import LearnConfig
from router.decide.learning.observations import Observation, PrefillInterval, WorkTotals
from router.decide.learning.ratios import RATIO_MAX, IntervalTimes, TimeFactor, combine_ratios, fit_ratios, is_within
from simulation.steps import StepTimes

_INTERVALS_MAX: Final = 192
"""Last intervals of each kind to which the ratios of a pool are fitted."""
_EARLY_INTERVALS: Final = 32
"""Intervals that each renew the ratios; later only every _LEARN_EVERY-th does."""
_LEARN_EVERY: Final = 32
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


class PoolSpeed:
    """Speed of the targets that serve one model."""

    def __init__(self, prior: StepTimes, config: LearnConfig) -> None:
        """Begin with the step times of `prior`, which are assumed before anything is learned."""
        self.is_enabled = config.enabled
        self.prior = prior
        self.model = prior
        """Step times that are in use: the prior's, multiplied by the ratios below."""
        self.members: list[Speed] = []
        """Speeds of the workers in the pool."""

        self._prefills: deque[IntervalTimes] = deque(maxlen=_INTERVALS_MAX)
        """Last intervals between first tokens."""
        self._steps: deque[IntervalTimes] = deque(maxlen=_INTERVALS_MAX)
        """Last intervals between tokens of an answer."""
        self.observation_count = 0
        """Number of all intervals so far."""

        # Ratios of the actual times to the prior's: one that is assumed, and those learned.
        self._prior_ratio = 1.0
        """Ratio that is assumed; it is raised while no answer has come and prompts are overdue."""
        self._prefill_ratio = 1.0
        self._step_ratio = 1.0

    @property
    def is_unmeasured(self) -> bool:
        """Whether the speed is to be learned and nothing was observed yet."""
        return self.is_enabled and not self.observation_count

    @property
    def step_observation_interval_s(self) -> float:
        """Time between two observations of a target's steps."""
        return _STEP_INTERVAL_EARLY_S if len(self._steps) < _INTERVALS_MAX else _STEP_INTERVAL_LATE_S

    def predict_s(self, times: IntervalTimes) -> float:
        """Return the time that an interval takes by the learned ratios."""
        return self._prefill_ratio * times.prefill_s + self._step_ratio * times.steps_s

    def observe(self, times: IntervalTimes, *, is_decode: bool) -> bool:
        """Learn from an interval of one target, and return whether the pool's model has changed by more than 2 %.

        After the first intervals, only every `_LEARN_EVERY`-th renews what was learned. `times.elapsed_s` is the time
        that the pool would have taken: half of the measured time if the target takes twice as long as its pool.
        """
        intervals_of_kind = self._steps if is_decode else self._prefills
        intervals_of_kind.append(times)
        self.observation_count += 1
        if len(intervals_of_kind) > _EARLY_INTERVALS and self.observation_count % _LEARN_EVERY:
            return False
        self._learn_ratios()
        return self._update_model()

    def raise_prior(self, ratio: float) -> bool:
        """Multiply the prior by `ratio`, before anything was observed; return whether the pool's model has changed."""
        self._prior_ratio = min(self._prior_ratio * ratio, RATIO_MAX)
        self._prefill_ratio = self._step_ratio = self._prior_ratio
        return self._update_model()

    def _update_model(self) -> bool:
        """Scale the prior by both ratios, unless the model stays within 2 %; return whether the model has changed."""
        model = self.prior.scale(self._prefill_ratio, self._step_ratio)
        if _is_near(model, self.model):
            return False
        self.model = model
        return True

    def _learn_ratios(self) -> None:
        """Learn the ratios of actual to assumed time, one for prefill and one for steps, from the last intervals.

        An interval that spends 70 % of its time in prefill counts as 0.7 intervals for the ratio of prefill, and as 0.3
        for that of steps. The fewer intervals count, the nearer is a learned ratio to its prior. The prior for steps is
        the ratio of prefill, as a worker with slow prefills is likely to have slow steps too.
        """
        typical_intervals = [*self._take_middle_half(self._prefills), *self._take_middle_half(self._steps)]
        prefill_ratio, step_ratio = fit_ratios(typical_intervals)
        intervals = [*self._prefills, *self._steps]
        prefill_shares = [self._prefill_ratio * times.prefill_s / self.predict_s(times) for times in intervals]
        prefill_weight = sum(prefill_shares)
        step_weight = len(intervals) - prefill_weight
        self._prefill_ratio = combine_ratios(self._prior_ratio, prefill_ratio, prefill_weight)
        self._step_ratio = self._prefill_ratio
        if self.prior.step_s + self.prior.decode_request_s > 0.0:
            self._step_ratio = combine_ratios(self._prefill_ratio, step_ratio, step_weight)

    def _take_middle_half(self, intervals: Iterable[IntervalTimes]) -> list[IntervalTimes]:
        """Return the intervals without the quarter that was fastest, and the quarter that was slowest.

        They are compared with their predictions. Some held work that the router does not know of, and spoil the fit.
        """
        ordered = sorted(intervals, key=lambda times: times.elapsed_s / self.predict_s(times))
        trimmed_count = len(ordered) // 4
        return ordered[trimmed_count : len(ordered) - trimmed_count]


def predict_times(model: StepTimes, observation: Observation) -> IntervalTimes:
    """Return the times that a model predicts for the prefill of an observation and for its steps."""
    work_tokens = observation.uncached_tokens + observation.quadratic_work / (2.0 * model.quadratic_tokens)
    step_s = model.step_s + model.decode_request_s * observation.decode_requests
    step_s += model.decode_context_s * observation.decode_context_tokens
    return IntervalTimes(observation.elapsed_s, model.prefill_s_per_token * work_tokens, step_s * observation.steps)


def _is_near(model: StepTimes, other: StepTimes) -> bool:
    """Return whether two models differ by at most _MODEL_TOLERANCE in prefill and step times."""
    times = (model.prefill_s_per_token, model.step_s + model.decode_request_s)
    other_times = (other.prefill_s_per_token, other.step_s + other.decode_request_s)
    return all(is_within(time_s, other_s, _MODEL_TOLERANCE) for time_s, other_s in zip(times, other_times))


class Speed:
    """Speed of one target: its factor, the rates in use, and the observations in progress."""

    def __init__(self, pool: PoolSpeed) -> None:
        """Begin with the speed of a pool: of the workers that serve the same model."""
        self.pool = pool
        self.factor = 1.0
        """Time that the target takes for any work, divided by the time that its pool takes."""
        self.tier_load = TimeFactor()
        """Factor of the expected time to load cached KV from slower memory, such as the host's."""
        self.reported_step_tokens: int | None = None
        """Most tokens of a step, by the engine's report; None: as configured."""

        # Observations from which the speed is learned.
        self.work_totals = WorkTotals()
        self.open_prefill_interval: PrefillInterval | None = None
        self.last_step_observation_s = -math.inf
        self.observation_count = 0
        self._recent_ratios: deque[float] = deque(maxlen=_TARGET_INTERVALS_MAX)
        """Elapsed times of the last intervals, divided by the times that the pool's speed predicts."""
        self._last_observation_number = pool.observation_count
        """Number of the pool's observations at the target's last one."""

        pool.members.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Compute the step times in use anew, after the pool's model or the factor has changed."""
        step_times = self.pool.model.scale(self.factor, self.factor)
        self.set_step_times(replace(step_times, step_tokens=self.reported_step_tokens or step_times.step_tokens))

    def set_step_times(self, step_times: StepTimes) -> None:
        """Use these step times from now on, as attributes of this object, which every price reads.

        A prompt of n tokens takes `prefill_rate * n + quadratic_rate * n ** 2`. A step of n answers takes `step_s +
        decode_request_s * n`, and `decode_context_s` more for each token of their contexts.
        """
        self.step_times = step_times
        self.step_s = step_times.step_s
        self.step_tokens = step_times.step_tokens
        self.decode_request_s = step_times.decode_request_s
        self.decode_context_s = step_times.decode_context_s
        self.prefill_rate = step_times.prefill_s_per_token
        self.quadratic_rate = self.prefill_rate / (2.0 * step_times.quadratic_tokens)
        self.single_step_s = self.step_s + self.decode_request_s
        """Time of a decode step of one answer, besides the time for its context."""
        self.step_prefill_s = self.prefill_rate * self.step_tokens
        """Time of a step that is full of prefill tokens, at an empty context."""

    def estimate_prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Return P, the time to compute the uncached part of a prompt."""
        quadratic_work = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic_work

    def predict_interval_s(self, observation: Observation) -> float:
        """Return the time that the work of an observation takes at the rates in use."""
        times = predict_times(self.step_times, observation)
        return times.prefill_s + times.steps_s

    def observe_prefills(self, interval: PrefillInterval) -> list[Speed]:
        """Learn from a prefill interval that has ended; return the speeds that changed, as `observe` does.

        The factor of loads from slower memory is learned from the time beyond the expected one. Then such loads, by at
        most 9/10 of the time, are left out.
        """
        observation = interval.to_observation(self.step_tokens)
        if interval.tier_load_s:
            excess_s = observation.elapsed_s - self.predict_interval_s(observation)
            self.tier_load.observe(interval.tier_load_s, excess_s, interval.end_s)
            tier_load_s = interval.tier_load_s * self.tier_load.get(interval.end_s)
            computing_s = observation.elapsed_s - min(tier_load_s, 0.9 * observation.elapsed_s)
            observation = replace(observation, elapsed_s=computing_s)
        return self.observe(observation)

    def observe(self, observation: Observation) -> list[Speed]:
        """Learn from the time that this worker took for known work; return the speeds that changed.

        For example, the work took 0.6 s, and takes the pool's workers 0.4 s in general. The ratio is 1.5, and the
        median of the last such ratios is the factor of this worker. The pool learns from the time, too. The caller
        calls `refresh` of the returned speeds. Nothing is learned from an observation without time or work.
        """
        pool = self.pool
        times = predict_times(pool.prior, observation)
        has_work = times.elapsed_s > 0.0 and times.prefill_s + times.steps_s > 0.0
        if not pool.is_enabled or not has_work:
            return []
        self.observation_count += 1

        # Times of a slow worker are scaled, so that it does not slow the pool. Those of a fast one are not.
        ratio_to_pool = times.elapsed_s / pool.predict_s(times)
        pool_times = times._replace(elapsed_s=times.elapsed_s / max(self.factor, 1.0))
        has_pool_changed = pool.observe(pool_times, is_decode=observation.is_decode)
        self._last_observation_number = pool.observation_count

        self._recent_ratios.append(ratio_to_pool)
        previous_factor = self.factor
        self.factor = self._choose_factor()
        changed_speeds = [self] if self.factor != previous_factor else []
        # The members are checked one after the other, one at each observation, for factors too old to trust.
        checked_speed = pool.members[pool.observation_count % len(pool.members)]
        if checked_speed._forget_old_factor():
            changed_speeds.append(checked_speed)
        return pool.members if has_pool_changed else changed_speeds

    def _forget_old_factor(self) -> bool:
        """Take a target for as fast as its pool again if it was not observed for long; return whether that changed it.

        A target that is thought slow gets few requests, so it could not show that it is fast again. _PROBES new ratios
        are then enough for a factor of its own.
        """
        unheard_count = self.pool.observation_count - self._last_observation_number
        if self.factor == 1.0 or unheard_count <= _FORGOTTEN_AFTER * len(self.pool.members):
            return False
        while len(self._recent_ratios) > _TARGET_INTERVALS_MIN - _PROBES:
            self._recent_ratios.popleft()
        self.factor = 1.0
        return True

    def _choose_factor(self) -> float:
        """Return the time that work takes on this worker, as a multiple of the time at its pool's speed.

        It is the median of the recent ratios, or 1.0 if they are few or their median is near 1.0. A worker at the
        pool's speed gets a factor only beyond `_LEAVES_POOL_BEYOND`, and loses it below `_RETURNS_TO_POOL_BELOW`, which
        is smaller, so that noise does not change the factor to and fro. Small changes are ignored, too.
        """
        ratios = self._recent_ratios
        if len(ratios) < _TARGET_INTERVALS_MIN:
            return 1.0
        median_ratio = max(sorted(ratios)[len(ratios) // 2], 1.0 / _FASTER_MAX)
        has_own_factor = self.factor != 1.0
        tolerance = _RETURNS_TO_POOL_BELOW if has_own_factor else _LEAVES_POOL_BEYOND
        if is_within(median_ratio, 1.0, tolerance):
            return 1.0
        if is_within(median_ratio, self.factor, _MODEL_TOLERANCE):
            return self.factor
        return median_ratio
