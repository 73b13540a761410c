"""Ratios of observed to predicted times: fitted to intervals, averaged with a prior, or the median of recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

RATIO_MIN, RATIO_MAX = 1e-3, 1e3
_PRIOR_WEIGHT: Final = 0.5
"""Number of intervals or ratios that the prior counts as."""
_REFINEMENTS: Final = 4
"""Number of refinements after the first guess, which is one ratio for both."""
_UNCHANGED_WEIGHT: Final = 0.5
"""Number of intervals that the assumption "this ratio does not change" counts as in a refinement."""
_FACTOR_MIN: Final = 0.2
"""Smallest factor by which one refinement changes a ratio."""
_RATIOS_MAX: Final = 15
"""Number of recent ratios of which `TimeFactor` takes the median."""
RATIO_VALID_S: Final = 300.0
"""Age at which a ratio is forgotten. Otherwise a worker or a pair that was slow once would never be tried again."""


class IntervalTimes(NamedTuple):
    """Time that an interval took, and the predicted times of its prefill and of its steps."""

    elapsed_s: float
    prefill_s: float
    steps_s: float


def fit_ratios(intervals: Sequence[IntervalTimes]) -> tuple[float, float]:
    """Return two ratios of observed to prior time: for the prefill of these intervals, and for their steps.

    The fit begins with one ratio for both, the median, and is refined a few times. So two parts that always come in the
    same proportion, as with prompts of one size, keep about the same ratio.
    """
    common_ratios = sorted(times.elapsed_s / (times.prefill_s + times.steps_s) for times in intervals)
    prefill_ratio = step_ratio = common_ratios[len(common_ratios) // 2]
    for _ in range(_REFINEMENTS):
        prefill_ratio, step_ratio = _refine_ratios(intervals, prefill_ratio, step_ratio)
    return prefill_ratio, step_ratio


def _refine_ratios(intervals: Sequence[IntervalTimes], prefill_ratio: float, step_ratio: float) -> tuple[float, float]:
    """Return both ratios after one step of a least-squares fit: each multiplied by a factor.

    For example, by the given ratios an interval of 1.0 s has 0.6 s of prefill and 0.3 s of steps: the factors should
    solve `prefill_factor * 0.6 + step_factor * 0.3 = 1`. Also `prefill_factor = 1` and `step_factor = 1` should hold,
    as if each were half an interval (`_UNCHANGED_WEIGHT`), so that few intervals change the ratios little.
    """
    # Sums of the two normal equations, with these two assumptions counted first.
    prefill_squares, step_squares, products = _UNCHANGED_WEIGHT, _UNCHANGED_WEIGHT, 0.0
    prefill_sum, step_sum = _UNCHANGED_WEIGHT, _UNCHANGED_WEIGHT
    for times in intervals:
        prefill_share = prefill_ratio * times.prefill_s / times.elapsed_s
        step_share = step_ratio * times.steps_s / times.elapsed_s
        prefill_squares += prefill_share * prefill_share
        step_squares += step_share * step_share
        products += prefill_share * step_share
        prefill_sum += prefill_share
        step_sum += step_share
    # Their solution by Cramer's rule.
    determinant = prefill_squares * step_squares - products * products
    prefill_factor = (prefill_sum * step_squares - step_sum * products) / determinant
    step_factor = (step_sum * prefill_squares - prefill_sum * products) / determinant
    return (
        min(max(prefill_ratio * max(prefill_factor, _FACTOR_MIN), RATIO_MIN), RATIO_MAX),
        min(max(step_ratio * max(step_factor, _FACTOR_MIN), RATIO_MIN), RATIO_MAX),
    )


def combine_ratios(prior_ratio: float, learned_ratio: float, weight: float) -> float:
    """Return the geometric mean of a prior and of a ratio that was learned with a weight.

    The prior has a weight of 0.5: a prior of 1.0 and a ratio of 2.0 that was learned with a weight of 8 give 1.92.
    """
    log_sum = _PRIOR_WEIGHT * math.log(prior_ratio) + weight * math.log(learned_ratio)
    return min(max(math.exp(log_sum / (_PRIOR_WEIGHT + weight)), RATIO_MIN), RATIO_MAX)


class _ObservedRatio(NamedTuple):
    ratio: float
    observed_at_s: float


class TimeFactor:
    """Learned factor between the predicted and the actual time in which KV comes from slower memory or another worker.

    It is the weighted geometric mean of a prior and of the median of the recent ratios of observed to predicted time.
    With the median, a few late arrivals on busy machines have little effect.
    """

    def __init__(self) -> None:
        self._recent: deque[_ObservedRatio] = deque(maxlen=_RATIOS_MAX)
        self._median = 1.0

    def observe(self, predicted_s: float, observed_s: float, now: float) -> None:
        """Learn from KV that took `observed_s` to arrive. `predicted_s`: the prediction before this factor."""
        ratio = min(max(observed_s / predicted_s, RATIO_MIN), RATIO_MAX)
        self._recent.append(_ObservedRatio(ratio, now))
        self._update_median()

    def get(self, now: float, prior: float = 1.0) -> float:
        """Forget old ratios and return the factor.

        `prior`: the factor that is assumed before any observation; its weight shrinks with each.
        """
        while self._recent and now - self._recent[0].observed_at_s > RATIO_VALID_S:
            self._recent.popleft()
            self._update_median()
        return combine_ratios(prior, self._median, len(self._recent))

    def _update_median(self) -> None:
        if self._recent:
            self._median = sorted(self._recent)[(len(self._recent) - 1) // 2].ratio


def is_within(ratio: float, other: float, tolerance: float) -> bool:
    """Return whether neither number is more than `tolerance` times the other."""
    return ratio <= tolerance * other and other <= tolerance * ratio
