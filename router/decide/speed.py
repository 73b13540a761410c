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

import msgspec

from router.decide.config import LearnConfig, ServiceModel

_INTERVAL_TOKENS_MAX, _INTERVAL_STEPS_MAX = 4.0, 16
"""An interval of so many steps' tokens, or of so many steps, is not made longer."""
_RATIO_MIN, _RATIO_MAX = 1e-3, 1e3
_SPREAD = (3.0, 1.0, 1.0, 3.0)
"""How far the prefill ratio may be from 1, and the quadratic, step and decode ratio from it, in typical ratios: the
standard deviations of what is known beforehand. A sequence's part of a step is small and differs most between
engines."""
PREFILL_RATE_SHARE: Final = 0.9
"""Share of the estimated prefill rate that is used before anything was observed: half of the true rate costs 2 % of the
mean TTFT, twice the true rate costs 9 %."""
_LATE_RATIO: Final = 1.1
"""So many times as long as expected is late."""
_SHARE_MIN: Final = 0.1
"""No ratio is less than this part of the typical one: some prefill rate and some step time there must be."""
_POOL_HALF_LIFE_FACTOR: Final = 8.0
"""The pool's half-life, in those of a worker."""
_WORKER_INTERVALS_MAX, _WORKER_INTERVALS_MIN = 41, 20
"""Intervals of a worker that its factor is the median of, at most and at least."""
_LEAVES_POOL_BEYOND, _RETURNS_TO_POOL_BELOW = math.log(1.25), math.log(1.12)
"""A worker leaves the pool's model beyond the first factor and returns to it below the second."""
_FORGOTTEN_AFTER, _PROBES = 64, 3
"""After so many of the pool's observations for each of its workers without one of its own, a worker is like the pool
again until so many tell otherwise."""
_FASTER_MAX: Final = 3.0
"""A worker is not taken to be more times as fast as its pool."""
_MODEL_TOLERANCE = math.log(1.02)
"""The pool's model in use is renewed when it is off by more."""
_STEP_INTERVAL_EARLY_S, _STEP_INTERVAL_LATE_S, _EARLY_INTERVALS = 0.5, 4.0, 200
"""Seconds between two looks at a worker's steps before so many intervals of the pool, and after."""
_TIER_LOADS_MAX, _TIER_LOADS_MIN = 15, 3
"""Loads of a worker that its rate is the median of, at most and at least."""
_RECENT_INTERVALS: Final = 15
"""Intervals, relative to what the model expected, whose median is what outliers are measured from."""


Ratios = tuple[float, float, float, float]
"""(prefill, quadratic, step, decode): seconds by the prior, or what relates to it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval in which a worker did nothing but this prefill work."""

    elapsed_s: float
    uncached_tokens: float
    quadratic_work: float
    """Sum of L^2 - h^2 over the prompts, tokens^2."""
    steps: float
    decode_requests: float
    decode_context_tokens: float
    is_complete: bool = False
    """No prefill was under way when it ended; else part of some may be in it that is not said here, or not all."""
    relative_noise: float = 0.5
    """The relative error of a long interval, beside that of when it began."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What an observation added to an estimate."""

    features: Ratios
    elapsed_s: float
    expected_s: float
    """What had been expected."""
    weight: float
    observation_number: int


class SpeedEstimate:
    """What is known of one worker's speed. `ratios` times the prior's constants are the estimate."""

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._prior = prior
        self._config = config
        self._decay = 0.5 ** (1.0 / config.half_life)
        self._normal_matrix = [[0.0] * 4 for _ in range(4)]
        self._normal_vector = [0.0] * 4
        self._recent_ratios: deque[float] = deque(maxlen=_RECENT_INTERVALS)
        self._typical_ratio = 1.0
        self._prior_ratio = 1.0
        """What the prefill ratio is near to, as far as is known beforehand."""
        self.ratios = [1.0] * 4
        self.observation_count = 0

    def raise_prior(self, ratio: float) -> None:
        """Nothing was observed yet, as all takes so many times as long as was expected, at least."""
        if self._config.enabled and not self.observation_count:
            self._prior_ratio = self._typical_ratio = min(self._prior_ratio * ratio, _RATIO_MAX)
            self.ratios = [self._prior_ratio] * 4

    def observe(self, observation: Observation) -> TrainingSample | None:
        """Take in one interval and solve again: about 30 us. What it returns can be given to `revise`."""
        features = self._compute_features(observation)
        prior_expected_s = features[0] + features[1] + features[2] + features[3]
        if not self._config.enabled or observation.elapsed_s <= 0.0 or prior_expected_s <= 0.0:
            return None
        self.observation_count += 1
        model_expected_s = expected_s = sum(r * f for r, f in zip(self.ratios, features))
        self._recent_ratios.append(observation.elapsed_s / expected_s)
        # Outliers are judged against what is usual lately, not against a model that may still be far off.
        median_ratio = sorted(self._recent_ratios)[len(self._recent_ratios) // 2]
        expected_s *= median_ratio
        self._typical_ratio = expected_s / prior_expected_s
        prior = self._prior
        uncertainty_s = 0.0 if observation.is_complete else 0.25 * prior.step_tokens * prior.prefill_s_per_token
        resolution_s = self._typical_ratio * (uncertainty_s + prior.step_s)
        error_scale_s = expected_s + resolution_s
        relative_error = (observation.elapsed_s - expected_s) / error_scale_s
        trust = 1.0
        if relative_error > 1.0:
            trust = 1.0 / (relative_error * relative_error)
        elif relative_error < -0.75:
            trust = 0.75 / -relative_error
        weight = trust / (resolution_s * resolution_s + (observation.relative_noise * expected_s) ** 2)
        self._add_sample(features, observation.elapsed_s, weight, decay=self._decay)
        self._solve()
        return TrainingSample(features, observation.elapsed_s, model_expected_s, weight, self.observation_count)

    def revise(self, sample: TrainingSample, observation: Observation) -> None:
        """The interval's work was other than was thought: put the truth in the lesson's place, faded as much."""
        weight = sample.weight * self._decay ** (self.observation_count - sample.observation_number)
        self._add_sample(sample.features, sample.elapsed_s, -weight)
        self._add_sample(self._compute_features(observation), observation.elapsed_s, weight)
        self._solve()

    def make_service_model(self, *, cautious: bool = True) -> ServiceModel:
        """The constants to predict with; with `cautious`, `prefill_s_per_token` errs low while little was seen."""
        prior, (prefill_ratio, quadratic_ratio, step_ratio, decode_ratio) = self._prior, self.ratios
        caution = 1.0
        if self._config.enabled and cautious:
            caution -= (1.0 - PREFILL_RATE_SHARE) / (1.0 + self.observation_count / 50.0)
        prefill_s_per_token = prior.prefill_s_per_token * prefill_ratio * caution
        quadratic_rate = prior.prefill_s_per_token * quadratic_ratio * caution / prior.quadratic_tokens  # a / Lq
        return ServiceModel(
            prefill_s_per_token=prefill_s_per_token,
            quadratic_tokens=prefill_s_per_token / quadratic_rate,
            step_s=prior.step_s * step_ratio,
            decode_request_s=prior.decode_request_s * decode_ratio,
            decode_context_s=prior.decode_context_s * decode_ratio,
            step_tokens=prior.step_tokens,
        )

    def _compute_features(self, observation: Observation) -> Ratios:
        prior = self._prior
        prefill_s_per_token = prior.prefill_s_per_token
        step_decode_s = (
            prior.decode_request_s * observation.decode_requests
            + prior.decode_context_s * observation.decode_context_tokens
        )
        return (
            prefill_s_per_token * observation.uncached_tokens,
            prefill_s_per_token * observation.quadratic_work / (2.0 * prior.quadratic_tokens),
            prior.step_s * observation.steps,
            step_decode_s * observation.steps,
        )

    def _add_sample(self, features: Ratios, elapsed_s: float, weight: float, *, decay: float = 1.0) -> None:
        for i, fi in enumerate(features):
            row = self._normal_matrix[i]
            for j, fj in enumerate(features):
                row[j] = row[j] * decay + weight * fi * fj
            self._normal_vector[i] = self._normal_vector[i] * decay + weight * fi * elapsed_s

    def _solve(self) -> None:
        """The normal equations, solved exactly; what falls below its bound is fixed there."""
        strengths = [1.0 / (spread * self._typical_ratio) ** 2 for spread in _SPREAD]
        matrix = [row[:] for row in self._normal_matrix]
        right_side = self._normal_vector[:]
        matrix[0][0] += strengths[0]
        right_side[0] += strengths[0] * self._prior_ratio
        for j, strength in enumerate(strengths[1:], 1):  # strength * (ratio_j - ratio_0)^2
            matrix[j][j] += strength
            matrix[0][0] += strength
            matrix[0][j] -= strength
            matrix[j][0] -= strength
        ratio_bounds = [max(_RATIO_MIN, _SHARE_MIN * self._typical_ratio)] * 4
        fixed_ratios: dict[int, float] = {}
        while True:
            ratios = _solve_with(matrix, right_side, fixed_ratios)
            low_indices = [i for i in range(4) if i not in fixed_ratios and ratios[i] < ratio_bounds[i]]
            if not low_indices:
                break
            lowest_index = min(low_indices, key=lambda i: ratios[i] - ratio_bounds[i])
            fixed_ratios[lowest_index] = ratio_bounds[lowest_index]
        self.ratios = [min(ratio, _RATIO_MAX) for ratio in ratios]


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """What one interval taught the pool, and the factor of the worker it was seen on."""

    sample: TrainingSample
    factor: float


@dataclass(slots=True)
class _PoolWorker:
    recent_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_WORKER_INTERVALS_MAX))
    """Of its last intervals: how many times as long as by the pool's model."""
    factor: float = 1.0
    """So many times as long as the pool it is taken to need for everything."""
    observation_count: int = 0
    last_observation_number: int = 0
    """The pool's count of observations when one was its."""


class PoolSpeeds:
    """The speeds of the workers that serve one model.

    All intervals go into one estimate for the pool. A worker is taken to be like the pool until the median of its own
    intervals differs clearly, and then to be slower or faster in everything by that factor: one number can be told from
    noise where four cannot, and the price compares workers, so a few per cent of noise between equal ones would send
    everything to the luckiest. Who is thought slow gets little and shows little: what was known of him fades.
    """

    def __init__(self, prior: ServiceModel, config: LearnConfig) -> None:
        self._is_enabled = config.enabled
        self._pool_estimate = SpeedEstimate(prior, replace(config, half_life=config.half_life * _POOL_HALF_LIFE_FACTOR))
        self._pool_model = self._pool_estimate.make_service_model()
        self._workers: dict[str, _PoolWorker] = {}
        self._rotation: deque[str] = deque()

    def add_worker(self, name: str) -> None:
        """A worker has come; it is like the pool until it shows otherwise."""
        self.remove_worker(name)
        self._workers[name] = _PoolWorker(last_observation_number=self._pool_estimate.observation_count)
        self._rotation.append(name)

    def remove_worker(self, name: str) -> None:
        """A worker has gone."""
        if self._workers.pop(name, None) is not None:
            self._rotation.remove(name)

    def make_service_model(self, name: str) -> ServiceModel:
        """What to predict this worker with."""
        return _scale_model(self._pool_model, self._workers[name].factor)

    def make_measured_model(self, name: str) -> ServiceModel:
        """The constants that were learned of this worker, without the caution of `model`."""
        return _scale_model(self._pool_estimate.make_service_model(cautious=False), self._workers[name].factor)

    def get_observation_count(self, name: str) -> int:
        """Intervals seen of this worker."""
        return self._workers[name].observation_count

    def observe(self, name: str, observation: Observation) -> tuple[list[str], WorkerSample | None]:
        """Take in one interval of one worker; (those whose model changed, what to give to `correct`)."""
        worker = self._workers[name]
        sample = self._pool_estimate.observe(replace(observation, elapsed_s=observation.elapsed_s / worker.factor))
        if sample is None:
            return [], None
        worker.observation_count += 1
        worker.last_observation_number = self._pool_estimate.observation_count
        worker.recent_ratios.append(observation.elapsed_s / sample.expected_s)
        worker_sample = WorkerSample(sample, worker.factor)
        changed_names = self._refresh_pool_model()
        changed_names |= {name for name in (name, self._rotate_worker()) if self._update_factor(self._workers[name])}
        return sorted(changed_names), worker_sample

    def correct(self, sample: WorkerSample, observation: Observation) -> list[str]:
        """An interval turned out to be of other work than was thought; returns those whose model changed."""
        self._pool_estimate.revise(sample.sample, replace(observation, elapsed_s=observation.elapsed_s / sample.factor))
        return sorted(self._refresh_pool_model())

    @property
    def step_observation_interval_s(self) -> float:
        """One answer of a worker teaches what steps take in so many seconds: often at first, then enough to see a
        change."""
        return (
            _STEP_INTERVAL_EARLY_S
            if self._pool_estimate.observation_count < _EARLY_INTERVALS
            else _STEP_INTERVAL_LATE_S
        )

    @property
    def is_untrained(self) -> bool:
        """It learns, and nothing was observed yet, of any worker."""
        return self._is_enabled and not self._pool_estimate.observation_count

    def raise_prior(self, ratios: Sequence[float]) -> list[str]:
        """While it is silent: how many times as long as expected has passed at the workers that are waited for. Half
        of them say that all are slower than was thought, however slow. Returns those whose model changed."""
        median_ratio = sorted(ratios)[len(ratios) // 2]
        if median_ratio <= _LATE_RATIO:
            return []
        self._pool_estimate.raise_prior(median_ratio)
        return sorted(self._refresh_pool_model())

    def _rotate_worker(self) -> str:
        """Each in turn is looked at, also who is not heard of."""
        self._rotation.rotate(-1)
        return self._rotation[0]

    def _update_factor(self, worker: _PoolWorker) -> bool:
        """Whether its factor changed."""
        recent_ratios, previous_factor = worker.recent_ratios, worker.factor
        if (
            previous_factor != 1.0
            and self._pool_estimate.observation_count - worker.last_observation_number
            > _FORGOTTEN_AFTER * len(self._workers)
        ):
            while len(recent_ratios) > _WORKER_INTERVALS_MIN - _PROBES:
                recent_ratios.popleft()
        worker.factor = 1.0
        if len(recent_ratios) >= _WORKER_INTERVALS_MIN:
            median_ratio = sorted(recent_ratios)[len(recent_ratios) // 2]
            if abs(math.log(median_ratio)) > (
                _LEAVES_POOL_BEYOND if previous_factor == 1.0 else _RETURNS_TO_POOL_BELOW
            ):
                median_ratio = max(median_ratio, 1.0 / _FASTER_MAX)
                worker.factor = (
                    previous_factor
                    if abs(math.log(median_ratio / previous_factor)) < _MODEL_TOLERANCE
                    else median_ratio
                )
        return worker.factor != previous_factor

    def _refresh_pool_model(self) -> set[str]:
        """Put the pool's latest model to use where it is another; all of them then."""
        latest = self._pool_estimate.make_service_model()
        pairs = zip(_reference_seconds(latest), _reference_seconds(self._pool_model))
        if all(abs(math.log(new / old)) <= _MODEL_TOLERANCE for new, old in pairs):
            return set()
        self._pool_model = latest
        return set(self._workers)


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


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target, for learning what a decode step takes: two of them bracket an answer."""

    updated_at_s: float = 0.0
    decode_request_seconds: float = 0.0
    """Decoding requests, over time."""
    context_token_seconds: float = 0.0
    uncached_tokens: float = 0.0
    """Prefilled, of all first tokens so far."""
    quadratic_work: float = 0.0

    def observe_since(self, start: WorkTotals, elapsed_s: float, *, step_count: int, is_complete: bool) -> Observation:
        """What was done after `start`, in so many steps."""
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic_work=self.quadratic_work - start.quadratic_work,
            steps=step_count,
            decode_requests=(self.decode_request_seconds - start.decode_request_seconds) / elapsed_s,
            decode_context_tokens=(self.context_token_seconds - start.context_token_seconds) / elapsed_s,
            is_complete=is_complete,
            relative_noise=0.1 if is_complete else 0.5,
        )


@dataclass(slots=True)
class PrefillInterval:
    """First tokens of one engine step, or of several where a step may have begun a prompt that the next one ended:
    before they are learned from."""

    start_s: float
    end_s: float
    uncached_tokens: int
    quadratic_work: float
    decode_requests: float
    decode_context_tokens: float
    is_usable: bool
    waited_steps: float = 0.0
    """Who comes while others decode waits for half a step, on average, before its own."""
    last_step_start_s: float = 0.0
    """When its last step began, about."""
    step_count: int = 1
    tier_load_s: float = 0.0
    """By the configured rates, of all its requests."""
    estimated_tier_load_s: float = 0.0
    """What of it is taken to be loading."""
    sample: WorkerSample | None = None
    """What was learned from it, once it was."""

    def can_add_step(self, routed_s: float, since_s: float, step_tokens: int) -> bool:
        """Whether what was routed then, and was turned to then, may have begun in its last step: a step takes of the
        next prompt what its budget leaves. What the two steps did is known together; of many tokens it is little."""
        has_room = self.uncached_tokens < _INTERVAL_TOKENS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        return has_room and routed_s <= self.last_step_start_s and since_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context: float) -> None:
        """Another step belongs to it, beside so many decodes; it began when the last one ended."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int) -> Observation:
        """What it teaches of a worker whose steps have so many prefill tokens."""
        return Observation(
            elapsed_s=self.end_s - self.start_s - self.estimated_tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )


@dataclass(slots=True, eq=False)
class Speed:
    """How fast one target is: the service model in use, unpacked, as it is read for every request, and what is being
    observed of the target."""

    pool: PoolSpeeds
    target_name: str
    tier_load: TierLoadSpeed = field(default_factory=TierLoadSpeed)
    work_totals: WorkTotals = field(default_factory=WorkTotals)
    last_step_observation_s: float = -math.inf
    open_prefill_interval: PrefillInterval | None = None
    service: ServiceModel = field(init=False)
    prefill_rate: float = 0.0
    """a"""
    quadratic_rate: float = 0.0
    """a / (2 * Lq)"""
    step_s: float = 0.0
    """Fixed time of a step."""
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    single_step_s: float = 0.0
    """Time of a step of one sequence without its context."""
    step_prefill_s: float = 0.0
    """Time of a step's prefill tokens at an empty context."""

    def __post_init__(self) -> None:
        self.pool.add_worker(self.target_name)
        self.set_service_model(self.pool.make_service_model(self.target_name))

    def set_service_model(self, service: ServiceModel) -> None:
        """The target is as fast as `service` says."""
        self.service = service
        self.prefill_rate = service.prefill_s_per_token
        self.quadratic_rate = self.prefill_rate / (2.0 * service.quadratic_tokens)
        self.step_s = service.step_s
        self.decode_request_s = service.decode_request_s
        self.decode_context_s = service.decode_context_s
        self.single_step_s = service.step_s + self.decode_request_s
        self.step_prefill_s = self.prefill_rate * service.step_tokens

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


def _scale_model(model: ServiceModel, factor: float) -> ServiceModel:
    """The model of a worker that takes `factor` times as long for everything."""
    if factor == 1.0:
        return model
    names = ("prefill_s_per_token", "step_s", "decode_request_s", "decode_context_s")
    return replace(model, **{name: factor * getattr(model, name) for name in names})


def _reference_seconds(model: ServiceModel) -> tuple[float, float]:
    """Times of a typical prefill (2,048 tokens after 6,144 cached) and of a step of 32 sequences of 2,048 tokens: to
    compare two models by two numbers."""
    quadratic_tokens = (8192.0**2 - 6144.0**2) / (2.0 * model.quadratic_tokens)
    reference_step_s = model.step_s + 32.0 * (model.decode_request_s + 2048.0 * model.decode_context_s)
    return model.prefill_s_per_token * (2048.0 + quadratic_tokens) + model.step_s, reference_step_s


def _solve_with(matrix: list[list[float]], right_side: list[float], fixed_values: dict[int, float]) -> list[float]:
    """Gaussian elimination of a positive definite system in which some unknowns are given."""
    free_indices = [i for i in range(len(right_side)) if i not in fixed_values]
    rows = [
        [matrix[i][j] for j in free_indices] + [right_side[i] - sum(matrix[i][k] * v for k, v in fixed_values.items())]
        for i in free_indices
    ]
    free_count = len(free_indices)
    for i in range(free_count):
        pivot_row = rows[i]
        for r in range(i + 1, free_count):
            factor = rows[r][i] / pivot_row[i]
            if factor:
                for c in range(i, free_count + 1):
                    rows[r][c] -= factor * pivot_row[c]
    solution = dict(fixed_values)
    for i in range(free_count - 1, -1, -1):
        row = rows[i]
        solution[free_indices[i]] = (
            row[free_count] - sum(row[j] * solution[free_indices[j]] for j in range(i + 1, free_count))
        ) / row[i]
    return [solution[i] for i in range(len(right_side))]
