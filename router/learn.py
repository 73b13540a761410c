"""Learning how fast a worker is from the first tokens the router sees. Pure arithmetic; the tracker feeds it.

The time between two first tokens of a busy worker is modelled as

    seconds = a * u  +  b * q  +  o * s  +  k * z

u: uncached prompt tokens; q: sum of L^2 - h^2; s: engine steps (uncached / step budget, at least one); z: what running
decodes add to s steps by the prior's constants. Each term is scaled by its prior, so the unknowns are four ratios that
are 1 on a worker which is exactly as assumed. They are found by least squares with exponential forgetting, ridge terms
that tie the lesser three to the first (a worker of half speed is slower in everything), bounds, and Huber weights that
trust a fast observation more than a slow one: an interval can be long for reasons that are not the worker's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import LearnConfig, ServiceModel

_RATIO_MIN, _RATIO_MAX = 1e-3, 1e3
_COUPLING = (0.0, 2.0, 1.0, 4.0)
"""Strength, in observations, of the ties from quadratic, step and decode ratios to the prefill ratio."""
_SWEEPS = 8
_RECENT = 15
"""Intervals, relative to what the model expected, whose median is what outliers are measured from."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval in which a worker did nothing but this prefill work."""

    elapsed_s: float
    uncached_tokens: float
    quadratic: float
    """Sum of L^2 - h^2 over the prompts, tokens^2."""
    steps: float
    decode_requests: float
    decode_context: float


class SpeedEstimate:
    """What is known of one worker's speed. `ratios` times the prior's constants are the estimate."""

    __slots__ = (
        "_a",
        "_b",
        "_config",
        "_keep",
        "_prior",
        "_recent",
        "_start",
        "_typical_ratio",
        "observations",
        "ratios",
    )

    def __init__(self, prior: ServiceModel, config: LearnConfig, *, start_ratio: float = 1.0) -> None:
        """`start_ratio`: speed of the other workers of the pool relative to the prior, for one that has just joined."""
        self._prior = prior
        self._config = config
        self._start = start_ratio
        self._keep = 0.5 ** (1.0 / config.half_life)
        self._a = [[0.0] * 4 for _ in range(4)]
        self._b = [0.0] * 4
        self._recent: list[float] = []
        self._typical_ratio = start_ratio
        self.ratios = [start_ratio] * 4
        self.observations = 0

    def observe(self, seen: Observation) -> None:
        """Take in one interval and solve again: about 30 us."""
        features = self._features(seen)
        expected_prior = features[0] + features[1] + features[2] + features[3]
        if not self._config.enabled or seen.elapsed_s <= 0.0 or expected_prior <= 0.0:
            return
        self.observations += 1
        expected = sum(r * f for r, f in zip(self.ratios, features))
        self._recent.append(seen.elapsed_s / expected)
        if len(self._recent) > _RECENT:
            del self._recent[0]
        # Outliers are judged against what is usual lately, not against a model that may still be far off.
        typical = sorted(self._recent)[len(self._recent) // 2]
        expected *= typical
        self._typical_ratio = expected / expected_prior
        prior = self._prior
        granule = self._typical_ratio * (prior.prefill_s_per_token * prior.step_tokens * 0.25 + prior.step_s)
        scale = expected + granule
        error = (seen.elapsed_s - expected) / scale
        trust = 1.0
        if error > 1.0:
            trust = 1.0 / (error * error)
        elif error < -0.75:
            trust = 0.75 / -error
        self._add(features, seen.elapsed_s, trust / (scale * scale))
        self._solve()

    def model(self) -> ServiceModel:
        """The constants to predict with; `prefill_s_per_token` errs low while little was seen."""
        prior, (ra, rb, ro, rk) = self._prior, self.ratios
        low = 1.0
        if self._config.enabled:
            low -= (1.0 - self._config.err_low) / (1.0 + self.observations / 50.0)
        a = prior.prefill_s_per_token * ra * low
        quadratic = prior.prefill_s_per_token * rb * low / prior.quadratic_tokens  # a / Lq
        return ServiceModel(
            prefill_s_per_token=a,
            quadratic_tokens=a / quadratic,
            step_s=prior.step_s * ro,
            decode_request_s=prior.decode_request_s * rk,
            decode_context_s=prior.decode_context_s * rk,
            step_tokens=prior.step_tokens,
        )

    def _features(self, seen: Observation) -> tuple[float, float, float, float]:
        prior = self._prior
        a = prior.prefill_s_per_token
        decode = prior.decode_request_s * seen.decode_requests + prior.decode_context_s * seen.decode_context
        return (
            a * seen.uncached_tokens,
            a * seen.quadratic / (2.0 * prior.quadratic_tokens),
            prior.step_s * seen.steps,
            decode * seen.steps,
        )

    def _add(self, features: tuple[float, float, float, float], elapsed_s: float, weight: float) -> None:
        keep = self._keep
        for i, fi in enumerate(features):
            row = self._a[i]
            for j, fj in enumerate(features):
                row[j] = row[j] * keep + weight * fi * fj
            self._b[i] = self._b[i] * keep + weight * fi * elapsed_s

    def _solve(self) -> None:
        """Bounded coordinate descent on the ridge problem, started from the last solution."""
        # An observation adds about 1 / ratio^2 to the diagonal, so that strengths count observations.
        strength = 0.05 * self._config.prior_weight / self._typical_ratio**2
        ratios = self.ratios
        for _ in range(_SWEEPS):
            for i in range(4):
                row = self._a[i]
                diagonal, target = row[i], self._b[i]
                for j in range(4):
                    if j != i:
                        target -= row[j] * ratios[j]
                if i == 0:
                    diagonal += strength
                    target += strength * self._start
                    for j in range(1, 4):
                        diagonal += strength * _COUPLING[j]
                        target += strength * _COUPLING[j] * ratios[j]
                else:
                    diagonal += strength * _COUPLING[i]
                    target += strength * _COUPLING[i] * ratios[0]
                ratios[i] = min(max(target / diagonal, _RATIO_MIN), _RATIO_MAX)
