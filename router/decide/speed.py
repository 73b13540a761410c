"""Learning how fast a worker is from the first tokens the router sees. Pure arithmetic; the tracker feeds it.

The time between two first tokens of a busy worker is modelled as

    seconds = a * u  +  b * q  +  o * s  +  k * z

u: uncached prompt tokens; q: sum of L^2 - h^2; s: engine steps (uncached / step budget, at least one); z: what running
decodes add to s steps by the prior's constants. Each term is scaled by its prior, so the unknowns are four ratios that
are 1 on a worker which is exactly as assumed. They are the most probable ones (Bayesian linear regression): what is
known beforehand is that the first is near the prior's, weakly, and the lesser three near the first (a worker of half
speed is slower in everything); each interval counts by how exactly it can be known, a long one the more; old ones
fade; there are lower bounds, and an interval that is too long counts less than one that is too short: it can be long
for reasons that are not the worker's speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from router.decide.config import LearnConfig, ServiceModel

_RATIO_MIN, _RATIO_MAX = 1e-3, 1e3
_SPREAD = (3.0, 1.0, 1.0, 3.0)
"""How far the prefill ratio may be from 1, and the quadratic, step and decode ratio from it, in typical ratios: the
standard deviations of what is known beforehand. A sequence's part of a step is small and differs most between
engines."""
PREFILL_RATE_SHARE: Final = 0.9
"""Share of the estimated prefill rate that is used before anything was observed: half of the true rate costs 2 % of the
mean TTFT, twice the true rate costs 9 %."""
_LATE: Final = 1.1
"""So many times as long as expected is late."""
_SHARE_MIN: Final = 0.1
"""No ratio is less than this part of the typical one: some prefill rate and some step time there must be."""
_POOL_MEMORY: Final = 8.0
"""The pool's half-life, in those of a worker."""
_MEMBER_RECENT, _JUDGED_AFTER = 41, 20
"""Intervals of a worker that its factor is the median of, at most and at least."""
_DIFFERENT, _ALIKE = math.log(1.25), math.log(1.12)
"""A worker leaves the pool's model beyond the first factor and returns to it below the second."""
_FADES_AFTER, _PROBES = 64, 3
"""After so many of the pool's observations for each of its workers without one of its own, a worker is like the pool
again until so many tell otherwise."""
_FASTER_MAX: Final = 3.0
"""A worker is not taken to be more times as fast as its pool."""
_REFRESH = math.log(1.02)
"""The pool's model in use is renewed when it is off by more."""
_STEPS_EVERY_S, _STEPS_SELDOM_S, _LEARNT_AFTER = 0.5, 4.0, 200
"""Seconds between two looks at a worker's steps before so many intervals of the pool, and after."""
_LOADS_RECENT, _LOADS_MIN = 15, 3
"""Loads of a worker that its rate is the median of, at most and at least."""
_RECENT: Final = 15
"""Intervals, relative to what the model expected, whose median is what outliers are measured from."""


Ratios = tuple[float, float, float, float]
"""(prefill, quadratic, step, decode): seconds by the prior, or what relates to it."""


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
    clean: bool = False
    """No prefill was under way when it ended; else part of some may be in it that is not said here, or not all."""
    noise: float = 0.5
    """The relative error of a long interval, beside that of when it began."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What an observation added to an estimate."""

    features: Ratios
    elapsed_s: float
    expected_s: float
    """What had been expected."""
    weight: float
    number: int


class SpeedEstimate:
    """What is known of one worker's speed. `ratios` times the prior's constants are the estimate."""

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._prior = prior
        self._config = config
        self._keep = 0.5 ** (1.0 / config.half_life)
        self._a = [[0.0] * 4 for _ in range(4)]
        self._b = [0.0] * 4
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._typical_ratio = 1.0
        self._centre = 1.0
        """What the prefill ratio is near to, as far as is known beforehand."""
        self.ratios = [1.0] * 4
        self.observations = 0

    def await_longer(self, ratio: float) -> None:
        """Nothing was observed yet, as all takes so many times as long as was expected, at least."""
        if self._config.enabled and not self.observations:
            self._centre = self._typical_ratio = min(self._centre * ratio, _RATIO_MAX)
            self.ratios = [self._centre] * 4

    def observe(self, seen: Observation) -> TrainingSample | None:
        """Take in one interval and solve again: about 30 us. What it returns can be given to `revise`."""
        features = self._features(seen)
        expected_prior = features[0] + features[1] + features[2] + features[3]
        if not self._config.enabled or seen.elapsed_s <= 0.0 or expected_prior <= 0.0:
            return None
        self.observations += 1
        known = expected = sum(r * f for r, f in zip(self.ratios, features))
        self._recent.append(seen.elapsed_s / expected)
        # Outliers are judged against what is usual lately, not against a model that may still be far off.
        typical = sorted(self._recent)[len(self._recent) // 2]
        expected *= typical
        self._typical_ratio = expected / expected_prior
        prior = self._prior
        doubt_s = 0.0 if seen.clean else 0.25 * prior.step_tokens * prior.prefill_s_per_token
        granule = self._typical_ratio * (doubt_s + prior.step_s)
        scale = expected + granule
        error = (seen.elapsed_s - expected) / scale
        trust = 1.0
        if error > 1.0:
            trust = 1.0 / (error * error)
        elif error < -0.75:
            trust = 0.75 / -error
        weight = trust / (granule * granule + (seen.noise * expected) ** 2)
        self._add(features, seen.elapsed_s, weight, keep=self._keep)
        self._solve()
        return TrainingSample(features, seen.elapsed_s, known, weight, self.observations)

    def revise(self, lesson: TrainingSample, seen: Observation) -> None:
        """The interval's work was other than was thought: put the truth in the lesson's place, faded as much."""
        faded = lesson.weight * self._keep ** (self.observations - lesson.number)
        self._add(lesson.features, lesson.elapsed_s, -faded)
        self._add(self._features(seen), seen.elapsed_s, faded)
        self._solve()

    def model(self, *, cautious: bool = True) -> ServiceModel:
        """The constants to predict with; with `cautious`, `prefill_s_per_token` errs low while little was seen."""
        prior, (ra, rb, ro, rk) = self._prior, self.ratios
        low = 1.0
        if self._config.enabled and cautious:
            low -= (1.0 - PREFILL_RATE_SHARE) / (1.0 + self.observations / 50.0)
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

    def _features(self, seen: Observation) -> Ratios:
        prior = self._prior
        a = prior.prefill_s_per_token
        decode = prior.decode_request_s * seen.decode_requests + prior.decode_context_s * seen.decode_context
        return (
            a * seen.uncached_tokens,
            a * seen.quadratic / (2.0 * prior.quadratic_tokens),
            prior.step_s * seen.steps,
            decode * seen.steps,
        )

    def _add(self, features: Ratios, elapsed_s: float, weight: float, *, keep: float = 1.0) -> None:
        for i, fi in enumerate(features):
            row = self._a[i]
            for j, fj in enumerate(features):
                row[j] = row[j] * keep + weight * fi * fj
            self._b[i] = self._b[i] * keep + weight * fi * elapsed_s

    def _solve(self) -> None:
        """The normal equations, solved exactly; what falls below its bound is fixed there."""
        strengths = [1.0 / (spread * self._typical_ratio) ** 2 for spread in _SPREAD]
        matrix = [row[:] for row in self._a]
        right = self._b[:]
        matrix[0][0] += strengths[0]
        right[0] += strengths[0] * self._centre
        for j, strength in enumerate(strengths[1:], 1):  # strength * (ratio_j - ratio_0)^2
            matrix[j][j] += strength
            matrix[0][0] += strength
            matrix[0][j] -= strength
            matrix[j][0] -= strength
        floor = [max(_RATIO_MIN, _SHARE_MIN * self._typical_ratio)] * 4
        fixed: dict[int, float] = {}
        while True:
            ratios = _solve_with(matrix, right, fixed)
            low = [i for i in range(4) if i not in fixed and ratios[i] < floor[i]]
            if not low:
                break
            worst = min(low, key=lambda i: ratios[i] - floor[i])
            fixed[worst] = floor[worst]
        self.ratios = [min(ratio, _RATIO_MAX) for ratio in ratios]


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """What one interval taught the pool, and the factor of the worker it was seen on."""

    lesson: TrainingSample
    factor: float


@dataclass(slots=True)
class _PoolWorker:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMBER_RECENT))
    """Of its last intervals: how many times as long as by the pool's model."""
    factor: float = 1.0
    """So many times as long as the pool it is taken to need for everything."""
    observations: int = 0
    heard: int = 0
    """The pool's count of observations when one was its."""


class PoolSpeeds:
    """The speeds of the workers that serve one model.

    All intervals go into one estimate for the pool. A worker is taken to be like the pool until the median of its own
    intervals differs clearly, and then to be slower or faster in everything by that factor: one number can be told from
    noise where four cannot, and the price compares workers, so a few per cent of noise between equal ones would send
    everything to the luckiest. Who is thought slow gets little and shows little: what was known of him fades.
    """

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._learns = config.enabled
        self._pool = SpeedEstimate(prior, replace(config, half_life=config.half_life * _POOL_MEMORY))
        self._pool_model = self._pool.model()
        self._members: dict[str, _PoolWorker] = {}
        self._turns: deque[str] = deque()

    def join(self, name: str) -> None:
        """A worker has come; it is like the pool until it shows otherwise."""
        self.leave(name)
        self._members[name] = _PoolWorker(heard=self._pool.observations)
        self._turns.append(name)

    def leave(self, name: str) -> None:
        """A worker has gone."""
        if self._members.pop(name, None) is not None:
            self._turns.remove(name)

    def model(self, name: str) -> ServiceModel:
        """What to predict this worker with."""
        return _slower(self._pool_model, self._members[name].factor)

    def measured(self, name: str) -> ServiceModel:
        """The constants that were learned of this worker, without the caution of `model`."""
        return _slower(self._pool.model(cautious=False), self._members[name].factor)

    def observations(self, name: str) -> int:
        """Intervals seen of this worker."""
        return self._members[name].observations

    def observe(self, name: str, seen: Observation) -> tuple[list[str], WorkerSample | None]:
        """Take in one interval of one worker; (those whose model changed, what to give to `correct`)."""
        member = self._members[name]
        lesson = self._pool.observe(replace(seen, elapsed_s=seen.elapsed_s / member.factor))
        if lesson is None:
            return [], None
        member.observations += 1
        member.heard = self._pool.observations
        member.recent.append(seen.elapsed_s / lesson.expected_s)
        taught = WorkerSample(lesson, member.factor)
        changed = self._renewed()
        changed |= {name for name in (name, self._next()) if self._judge(self._members[name])}
        return sorted(changed), taught

    def correct(self, taught: WorkerSample, seen: Observation) -> list[str]:
        """An interval turned out to be of other work than was thought; returns those whose model changed."""
        self._pool.revise(taught.lesson, replace(seen, elapsed_s=seen.elapsed_s / taught.factor))
        return sorted(self._renewed())

    @property
    def steps_every_s(self) -> float:
        """One answer of a worker teaches what steps take in so many seconds: often at first, then enough to see a
        change."""
        return _STEPS_EVERY_S if self._pool.observations < _LEARNT_AFTER else _STEPS_SELDOM_S

    @property
    def silent(self) -> bool:
        """It learns, and nothing was observed yet, of any worker."""
        return self._learns and not self._pool.observations

    def await_longer(self, ratios: Sequence[float]) -> list[str]:
        """While it is silent: how many times as long as expected has passed at the workers that are waited for. Half
        of them say that all are slower than was thought, however slow. Returns those whose model changed."""
        usual = sorted(ratios)[len(ratios) // 2]
        if usual <= _LATE:
            return []
        self._pool.await_longer(usual)
        return sorted(self._renewed())

    def _next(self) -> str:
        """Each in turn is looked at, also who is not heard of."""
        self._turns.rotate(-1)
        return self._turns[0]

    def _judge(self, member: _PoolWorker) -> bool:
        """Whether its factor changed."""
        recent, before = member.recent, member.factor
        if before != 1.0 and self._pool.observations - member.heard > _FADES_AFTER * len(self._members):
            while len(recent) > _JUDGED_AFTER - _PROBES:
                recent.popleft()
        member.factor = 1.0
        if len(recent) >= _JUDGED_AFTER:
            apart = sorted(recent)[len(recent) // 2]
            if abs(math.log(apart)) > (_DIFFERENT if before == 1.0 else _ALIKE):
                apart = max(apart, 1.0 / _FASTER_MAX)
                member.factor = before if abs(math.log(apart / before)) < _REFRESH else apart
        return member.factor != before

    def _renewed(self) -> set[str]:
        """Put the pool's latest model to use where it is another; all of them then."""
        latest = self._pool.model()
        pairs = zip(_reference_s(latest), _reference_s(self._pool_model))
        if all(abs(math.log(new / old)) <= _REFRESH for new, old in pairs):
            return set()
        self._pool_model = latest
        return set(self._members)


class TierLoadSpeed:
    """How long one worker takes to fetch what lies on slower tiers: `factor` times what the configured rates say.

    The median of what its lately seen first tokens took longer than computing them should: a queue or a busy machine
    makes some of them late, and few are early.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_LOADS_RECENT)
        self.factor = 1.0

    def observe(self, tier_load_s: float, excess_s: float) -> None:
        """A load of `tier_load_s` by the configured rates took so many seconds."""
        self._recent.append(min(max(excess_s / tier_load_s, _RATIO_MIN), _RATIO_MAX))
        if len(self._recent) >= _LOADS_MIN:
            self.factor = sorted(self._recent)[len(self._recent) // 2]


def _slower(model: ServiceModel, factor: float) -> ServiceModel:
    """The model of a worker that takes `factor` times as long for everything."""
    if factor == 1.0:
        return model
    names = ("prefill_s_per_token", "step_s", "decode_request_s", "decode_context_s")
    return replace(model, **{name: factor * getattr(model, name) for name in names})


def _reference_s(model: ServiceModel) -> tuple[float, float]:
    """Times of a typical prefill (2,048 tokens after 6,144 cached) and of a step of 32 sequences of 2,048 tokens: to
    compare two models by two numbers."""
    quadratic = (8192.0**2 - 6144.0**2) / (2.0 * model.quadratic_tokens)
    step = model.step_s + 32.0 * (model.decode_request_s + 2048.0 * model.decode_context_s)
    return model.prefill_s_per_token * (2048.0 + quadratic) + model.step_s, step


def _solve_with(matrix: list[list[float]], right: list[float], fixed: dict[int, float]) -> list[float]:
    """Gaussian elimination of a positive definite system in which some unknowns are given."""
    free = [i for i in range(len(right)) if i not in fixed]
    rows = [[matrix[i][j] for j in free] + [right[i] - sum(matrix[i][k] * v for k, v in fixed.items())] for i in free]
    count = len(free)
    for i in range(count):
        pivot = rows[i]
        for r in range(i + 1, count):
            factor = rows[r][i] / pivot[i]
            if factor:
                for c in range(i, count + 1):
                    rows[r][c] -= factor * pivot[c]
    found = dict(fixed)
    for i in range(count - 1, -1, -1):
        row = rows[i]
        found[free[i]] = (row[count] - sum(row[j] * found[free[j]] for j in range(i + 1, count))) / row[i]
    return [found[i] for i in range(len(right))]
