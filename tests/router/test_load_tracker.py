"""In-flight bookkeeping and learning: sums, estimates of unseen first tokens, workers that are not as assumed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from core_by_hand import apply_operation
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CostConfig, LearnConfig
from router.decide.learning import Observation, PoolSpeed, Speed, TimeFactor
from router.decide.learning.ratios import RATIO_VALID_S
from router.decide.load_tracker import LoadTracker
from router.decide.price import Candidate
from router.decide.target import InFlightRequest, RequestPhase, Target
from router.index.protocol import HolderId
from simulation.steps import StepTimes


def make(*, learn: bool = False) -> tuple[LoadTracker, Target]:
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig(enabled=learn))
    return tracker, tracker.add_target("w", None, HolderId(0))


def test_a_request_that_does_not_stream_starts_decoding_when_it_should() -> None:
    tracker, target = make()
    a = tracker.add_request(target, prompt_tokens=10_000, cached_tokens=0, is_streaming=False, now=0.0)
    due = target.slowdown * target.estimate_prefill_s(10_000, 0)
    tracker.advance(due * 0.99)
    assert a.phase is RequestPhase.PREFILL
    tracker.advance(due * 1.01)
    assert a.phase is RequestPhase.DECODE
    assert target.estimate_queue_s(due * 1.01) == 0.0
    tracker.end_request(a, due + 1)
    tracker.check_invariants([])


def test_a_removed_target_takes_nothing_with_it() -> None:
    tracker, target = make()
    other = tracker.add_target("v", None, HolderId(1))
    a = tracker.add_request(target, prompt_tokens=100, cached_tokens=0, is_streaming=True, now=0.0)
    b = tracker.add_request(other, prompt_tokens=100, cached_tokens=0, is_streaming=True, now=0.0)
    tracker.remove_target("w")
    tracker.record_first_token(a, 1.0)
    tracker.end_request(a, 2.0)
    tracker.check_invariants([b])
    assert other.prefill_queue.own_prefill_s > 0.0


def test_memory_is_expected_to_be_held_longer_by_answers_that_are_longer_than_expected() -> None:
    tracker, target = make()
    target.capacity.kv_tokens = 20_000
    requests = [
        tracker.add_request(
            target, prompt_tokens=10_000, cached_tokens=0, is_streaming=True, now=0.0, expected_output_tokens=100.0
        )
        for _ in range(2)
    ]
    for request in requests:
        tracker.record_first_token(request, 1.0)
    tracker.record_progress(requests[0], 90)
    assert target.estimate_memory_wait_s(10_000) == pytest.approx(100 * target.step_s)
    tracker.record_progress(requests[0], 500)
    assert target.estimate_memory_wait_s(10_000) == pytest.approx(300 * target.step_s)
    tracker.check_invariants(requests)
    for request in requests:
        tracker.end_request(request, 9.0)
    assert target.load.overdue_output_tokens == 0


def test_utilisation_decays_and_survives_rescaling() -> None:
    tracker, target = make()
    tracker.add_request(target, prompt_tokens=10_000, cached_tokens=0, is_streaming=True, now=0.0)
    start = tracker.compute_utilisation(target, 0.0)
    assert start == pytest.approx(target.estimate_prefill_s(10_000, 0) / 60)
    assert tracker.compute_utilisation(target, 60.0) == pytest.approx(start / 2.718281828, rel=1e-6)
    assert tracker.compute_utilisation(target, 60.0 * 30) == pytest.approx(start * 2.718281828**-30, rel=1e-6)
    tracker.add_request(target, prompt_tokens=10_000, cached_tokens=0, is_streaming=True, now=60.0 * 45)
    assert tracker.compute_utilisation(target, 60.0 * 45) == pytest.approx(start, rel=1e-6)


KINDS = ["route", "first", "end", "progress", "blind"]


def test_steady_load_shows_as_utilisation() -> None:
    tracker, target = make()
    p = target.estimate_prefill_s(1000, 0)
    for i in range(3000):
        request = tracker.add_request(target, prompt_tokens=1000, cached_tokens=0, is_streaming=True, now=i * 2 * p)
        tracker.end_request(request, i * 2 * p)
    assert tracker.compute_utilisation(target, 3000 * 2 * p) == pytest.approx(0.5, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["route", "first", "end", "progress", "blind"]), st.integers(0, 9), st.integers(1, 9000)
        ),
        max_size=60,
    )
)
def test_sums_equal_what_they_sum_in_any_order(steps: list[tuple[str, int, int]]) -> None:
    tracker, target = make(learn=True)
    requests: dict[str, InFlightRequest] = {}
    for i, (operation, number, tokens) in enumerate(steps):
        name, now = str(number), i * 0.1
        apply_operation(tracker, target, requests, operation, name, tokens, now)
        tracker.advance(now)
        tracker.check_invariants(requests.values())
        assert target.estimate_queue_s(now) >= 0.0
    for request in requests.values():
        tracker.end_request(request, 1e6)
    assert (
        target.load.request_count,
        target.load.decode_request_count,
        target.load.decode_context_tokens,
        target.prefill_queue.own_prefill_s,
    ) == (0, 0, 0, 0.0)


# Learning ------------------------------------------------------------------------------------------------------------
def observation(rng: random.Random, truth: StepTimes, *, noise: float = 0.0) -> Observation:
    """One interval of a worker that is exactly `truth`, up to relative noise."""
    length = rng.randint(200, 30_000)
    cached_tokens = rng.choice([0, 0, length // 2, length * 9 // 10])
    decoding, context = rng.randint(0, 60), rng.randint(0, 400_000)
    u, q = length - cached_tokens, float(length**2 - cached_tokens**2)
    steps = max(1.0, u / truth.step_tokens)
    seconds = truth.prefill_s_per_token * (u + q / (2 * truth.quadratic_tokens))
    per_step = truth.step_s + truth.decode_request_s * decoding + truth.decode_context_s * context
    seconds = (seconds + steps * per_step) * (1 + noise * rng.gauss(0, 1))
    return Observation(max(seconds, 1e-4), u, q, steps, decoding, context)


TRUTHS = [
    StepTimes(prefill_s_per_token=2e-5, step_s=0.004),
    StepTimes(),
    StepTimes(prefill_s_per_token=4e-4, step_s=0.03, decode_request_s=2e-4),
    StepTimes(prefill_s_per_token=3e-3, step_s=0.05),
]


def make_pool(count: int, config: LearnConfig | None = None) -> list[Speed]:
    pool = PoolSpeed(StepTimes(), config or LearnConfig())
    return [Speed(pool) for _ in range(count)]


def learn_from(speed: Speed, sample: Observation) -> None:
    for changed_speed in speed.observe(sample):
        changed_speed.refresh()


def decode_observation(rng: random.Random, truth: StepTimes, *, noise: float = 0.0) -> Observation:
    """An answer of a worker that is exactly `truth`, beside which a prompt or two were computed."""
    steps, decoding, context = rng.randint(16, 200), rng.randint(1, 60), rng.randint(0, 400_000)
    uncached_tokens = rng.choice([0, 0, 500])
    seconds = steps * (truth.step_s + truth.decode_request_s * decoding + truth.decode_context_s * context)
    seconds += truth.prefill_s_per_token * uncached_tokens
    return Observation(seconds * (1 + noise * rng.gauss(0, 1)), uncached_tokens, 0.0, steps, decoding, context, True)


def scaled(ratio: float) -> StepTimes:
    """A worker that takes so many times as long as by the prior."""
    prior = StepTimes()
    return replace(
        prior,
        prefill_s_per_token=ratio * prior.prefill_s_per_token,
        step_s=ratio * prior.step_s,
        decode_request_s=ratio * prior.decode_request_s,
        decode_context_s=ratio * prior.decode_context_s,
    )


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_worker_is_learned_within_a_hundred_requests(truth: StepTimes, noise: float) -> None:
    rng = random.Random(5)
    (speed,) = make_pool(1)
    for _ in range(100):
        learn_from(speed, observation(rng, truth, noise=noise))
    service = speed.step_times
    for length, cached_tokens in ((1000, 0), (8000, 4000), (30_000, 0), (30_000, 27_000)):
        seconds = [
            m.prefill_s_per_token * (length - cached_tokens + (length**2 - cached_tokens**2) / (2 * m.quadratic_tokens))
            for m in (truth, service)
        ]
        assert 0.7 < seconds[1] / seconds[0] < 1.25, (length, cached_tokens, service)


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.integers(0, 1000))
def test_priors_that_are_wrong_by_ten_are_right_after_two_hundred_requests(
    prefill_ratio: float, step_ratio: float, seed: int
) -> None:
    """Prefill and steps, each wrong by its own factor, with a tenth of all intervals far too long."""
    rng = random.Random(seed)
    truth = replace(scaled(step_ratio), prefill_s_per_token=prefill_ratio * StepTimes().prefill_s_per_token)
    (speed,) = make_pool(1)
    for i in range(200):
        make_sample = decode_observation if i % 4 == 3 else observation
        sample = make_sample(rng, truth, noise=0.1)
        is_late = rng.random() < 0.1
        learn_from(speed, replace(sample, elapsed_s=sample.elapsed_s * rng.uniform(2.0, 20.0)) if is_late else sample)
    for _ in range(20):
        sample = observation(rng, truth)
        assert speed.predict_interval_s(sample) == pytest.approx(sample.elapsed_s, rel=0.25)
    assert speed.step_times.step_s == pytest.approx(truth.step_s, rel=0.2)


@pytest.mark.parametrize(("prefill_ratio", "step_ratio"), [(1.0, 5.0), (0.2, 1.0)])
def test_first_tokens_alone_tell_prefill_and_steps_apart(prefill_ratio: float, step_ratio: float) -> None:
    """Without answers that are long enough to time steps, equal targets share one model."""
    rng = random.Random(7)
    truth = replace(scaled(step_ratio), prefill_s_per_token=prefill_ratio * StepTimes().prefill_s_per_token)
    speeds = make_pool(4)
    for i in range(800):
        tokens, steps = rng.randint(50, 5000), 1.5
        seconds = truth.prefill_s_per_token * tokens + (truth.step_s + truth.decode_request_s) * steps
        learn_from(speeds[i % 4], Observation(seconds * rng.uniform(0.9, 1.1), tokens, 0.0, steps, 1.0, 0.0, False))
    for speed in speeds:
        assert speed.step_times.prefill_s_per_token == pytest.approx(truth.prefill_s_per_token, rel=0.2)
        assert speed.step_times.step_s == pytest.approx(truth.step_s, rel=0.25)
    assert len({speed.step_times for speed in speeds}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_one_size_do_not_drive_prefill_and_steps_apart(seed: int) -> None:
    """Every interval has the same work or that of one other kind, so that noise could stand for either part."""
    rng, truth = random.Random(seed), StepTimes()
    (speed,) = make_pool(1)
    for i in range(600):
        uncached_tokens, steps = (1000, 10.0) if i % 3 == 2 else (100, 1.5)
        seconds = truth.prefill_s_per_token * uncached_tokens + (truth.step_s + truth.decode_request_s) * steps
        elapsed_s = seconds * rng.lognormvariate(0.0, 0.3)
        learn_from(speed, Observation(elapsed_s, uncached_tokens, 0.0, steps, 1.0, 0.0, i % 3 == 2))
    assert 0.5 < speed.step_times.prefill_s_per_token / truth.prefill_s_per_token < 2.0
    assert 0.5 < speed.step_times.step_s / truth.step_s < 2.0


def test_outliers_that_are_slow_do_not_mislead() -> None:
    """A tenth of the intervals is twenty times as long: the engine waited for memory, or others' requests ran."""
    rng = random.Random(6)
    truth = StepTimes(prefill_s_per_token=2e-4)
    (speed,) = make_pool(1)
    for _ in range(300):
        sample = observation(rng, truth, noise=0.1)
        if rng.random() < 0.1:
            sample = replace(sample, elapsed_s=sample.elapsed_s * 20)
        learn_from(speed, sample)
    assert 0.7 * 2e-4 < speed.step_times.prefill_s_per_token < 1.2 * 2e-4


def test_a_worker_that_changes_is_learned_again() -> None:
    rng = random.Random(7)
    (speed,) = make_pool(1)
    for truth in (StepTimes(prefill_s_per_token=5e-5), StepTimes(prefill_s_per_token=4e-4)):
        for _ in range(400):
            learn_from(speed, observation(rng, truth, noise=0.1))
        assert speed.step_times.prefill_s_per_token == pytest.approx(truth.prefill_s_per_token, rel=0.25)


def test_a_pool_is_as_fast_as_its_fast_workers_whoever_is_seen_first() -> None:
    """Only the slow worker is seen for a while: once the others are, it is the one that differs, and one that was never
    seen is taken to be as fast as they are."""
    rng = random.Random(13)
    speeds = make_pool(4)
    for _ in range(100):
        learn_from(speeds[0], observation(rng, scaled(3.0), noise=0.1))
    assert speeds[3].step_times.prefill_s_per_token == pytest.approx(3e-4, rel=0.2)
    for _ in range(300):
        for speed, truth in ((speeds[0], scaled(3.0)), (speeds[1], StepTimes()), (speeds[2], StepTimes())):
            learn_from(speed, observation(rng, truth, noise=0.1))
    assert speeds[3].step_times.prefill_s_per_token == pytest.approx(1e-4, rel=0.1)
    assert [speed.factor for speed in speeds[1:]] == [1.0, 1.0, 1.0]
    assert speeds[0].factor == pytest.approx(3.0, rel=0.2)


def test_learning_from_first_tokens_of_a_queue() -> None:
    """A worker four times as slow as assumed, first come first served, learned through the tracker's intervals."""
    tracker, target = make(learn=True)
    rng = random.Random(8)
    truth = StepTimes(prefill_s_per_token=4e-4, step_s=0.05)
    free_s, now = 0.0, 0.0
    ends: list[tuple[float, InFlightRequest]] = []
    for _ in range(200):
        now += rng.expovariate(0.35)
        while ends and ends[0][0] <= now:
            at, request = ends.pop(0)
            tracker.record_first_token(request, at)
            tracker.end_request(request, at)
        length = rng.randint(500, 9000)
        request = tracker.add_request(target, prompt_tokens=length, cached_tokens=0, is_streaming=True, now=now)
        steps = max(1, -(-length // 2048))
        seconds = truth.prefill_s_per_token * (length + length**2 / 1e5) + steps * truth.step_s
        free_s = max(free_s, now) + seconds
        ends.append((free_s, request))
    assert target.speed.step_times.prefill_s_per_token == pytest.approx(4e-4, rel=0.15)


def test_a_prompt_begun_in_what_a_step_has_left_is_no_fast_one() -> None:
    """A step of 4,096 tokens takes five cached prompts in and most of one that is not, the next step the rest of it:
    alone, the first step says that five short ones take 0.4 s, the second that a long one takes 0.05 s."""
    tracker, target = make(learn=True)
    truth = StepTimes(prefill_s_per_token=1e-4, step_s=0.01)
    now = 0.0
    for _ in range(60):
        first = tracker.add_request(target, prompt_tokens=4050, cached_tokens=0, is_streaming=True, now=now)
        others = [  # while the first is computed
            tracker.add_request(
                target, prompt_tokens=4050, cached_tokens=cached_tokens, is_streaming=True, now=now + 0.05
            )
            for cached_tokens in [3968] * 5 + [0]
        ]
        now += truth.step_s + 4050 * truth.prefill_s_per_token
        tracker.record_first_token(first, now)
        now += truth.step_s + 4096 * truth.prefill_s_per_token
        for other in others[:5]:
            tracker.record_first_token(other, now)
        now += truth.step_s + (5 * 82 + 4050 - 4096) * truth.prefill_s_per_token
        tracker.record_first_token(others[5], now)
        for request in (first, *others):
            tracker.end_request(request, now)
        now += 1.0
    service = target.speed.step_times
    taken_s = service.prefill_s_per_token * (4050 + 4050**2 / (2 * service.quadratic_tokens)) + service.step_s
    assert taken_s == pytest.approx(0.415, rel=0.1)
    assert service.prefill_s_per_token * 82 + service.step_s < 0.05


def test_a_newcomer_starts_at_its_pools_speed() -> None:
    tracker, target = make(learn=True)
    rng = random.Random(9)
    for _ in range(50):
        learn_from(target.speed, observation(rng, StepTimes(prefill_s_per_token=3e-4, step_s=0.036)))
    fresh = tracker.add_target("new", None, HolderId(5))
    other = tracker.add_target("other", None, HolderId(6), pool="another model")
    assert fresh.speed.step_times.prefill_s_per_token == pytest.approx(3e-4, rel=0.25)
    assert other.speed.step_times.prefill_s_per_token == 1e-4


LIVE = StepTimes(3e-4, 50_000, 0.02, 1e-3, 2.5e-8)
"""benchmarks/live_peers.py: a sequence adds twenty times what the prior says to a step, the rest differs less."""


def test_how_long_steps_take_is_learned_while_the_first_answers_still_come() -> None:
    """Eight workers, 17 questions a second behind a cached prompt, answers of 150 tokens: none has ended after three
    seconds, and how long steps take is known to a fifth."""
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    targets = [tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(8)]
    rng, output_tokens = random.Random(4), dict[InFlightRequest, float]()

    def step_s(target: Target) -> float:
        return (
            LIVE.step_s
            + LIVE.decode_request_s * target.load.decode_request_count
            + LIVE.decode_context_s * target.load.decode_context_tokens
        )

    for tick in range(60):
        now = 0.05 * tick
        for request in output_tokens:
            output_tokens[request] += 0.05 / step_s(request.target)
            if tick % 5 == 0:
                tracker.record_progress(request, int(output_tokens[request]), now)
        target = targets[rng.randrange(8) if tick % 8 else 0]
        request = tracker.add_request(target, prompt_tokens=2080, cached_tokens=2000, is_streaming=True, now=now)
        own_s = 80 * LIVE.prefill_s_per_token * (1 + 2040 / LIVE.quadratic_tokens)
        tracker.record_first_token(request, now + 1.5 * step_s(target) * rng.uniform(0.7, 1.0) + own_s)
        output_tokens[request] = 1.0
    learned_s, true_s = sum(target.step_s for target in targets), sum(step_s(target) for target in targets)
    assert learned_s == pytest.approx(true_s, rel=0.2)
    assert sum(target.load.decode_request_count for target in targets) == 60


def test_while_nothing_was_heard_the_wait_itself_tells_how_slow_a_pool_is() -> None:
    """Three workers have begun a prompt each that by the prior takes 0.2 s; none has answered after 0.6 s."""
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    targets = [tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(4)]
    r0, r1, r2 = (
        tracker.add_request(targets[i], prompt_tokens=2000, cached_tokens=0, is_streaming=True, now=0.01 * i)
        for i in range(3)
    )
    assert targets[3].estimate_prefill_s(2000, 0) < 0.21
    tracker.advance(0.6)
    assert targets[3].estimate_prefill_s(2000, 0) == pytest.approx(0.55, rel=0.1)
    assert r0.prefill_s == targets[3].estimate_prefill_s(2000, 0)
    assert targets[0].estimate_queue_s(0.6) >= 0.1, "it will take longer still"
    tracker.record_first_token(r0, 0.7)
    tracker.record_first_token(r1, 0.71)
    tracker.close_interval(targets[0])
    assert targets[3].estimate_prefill_s(2000, 0) == pytest.approx(0.63, rel=0.15)
    tracker.advance(60.0)
    assert targets[3].estimate_prefill_s(2000, 0) < 1.0, "one that stands still tells nothing of the others any more"
    tracker.check_invariants([r0, r1, r2])


def test_the_second_request_is_priced_by_the_first_one() -> None:
    """A prefill that no later step can extend is learned from at its first token."""
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    target = tracker.add_target("w", None, HolderId(0))
    first = tracker.add_request(target, prompt_tokens=2000, cached_tokens=0, is_streaming=True, now=0.0)
    tracker.record_first_token(first, 2.0)
    assert target.estimate_prefill_s(2000, 0) > 0.8


def test_equal_workers_get_one_model_and_a_different_one_its_own() -> None:
    """Fifteen per cent of noise between eight equal workers does not tell them apart; half the speed does."""
    rng = random.Random(10)
    speeds = make_pool(8)
    for _ in range(60):
        for speed in speeds:
            learn_from(speed, observation(rng, scaled(2.0) if speed is speeds[0] else StepTimes(), noise=0.15))
    assert len({speed.step_times for speed in speeds[1:]}) == 1
    assert 1.6 < speeds[0].step_times.prefill_s_per_token / speeds[1].step_times.prefill_s_per_token < 2.3
    for _ in range(600):
        learn_from(speeds[0], observation(rng, StepTimes(), noise=0.15))
    assert speeds[0].step_times == speeds[1].step_times, "it was repaired"


def test_a_worker_that_is_thought_slow_and_not_asked_is_like_the_others_again() -> None:
    """Else a worker that was slow once, or unlucky, would never get the requests that show what it can do."""
    rng = random.Random(11)
    speeds = make_pool(4)
    for _ in range(40):
        for speed in speeds:
            learn_from(speed, observation(rng, scaled(3.0) if speed is speeds[0] else StepTimes(), noise=0.1))
    assert speeds[0].step_times.step_s > 2 * speeds[1].step_times.step_s
    rounds = 0
    while speeds[0].step_times != speeds[1].step_times:
        rounds += 1
        assert rounds < 200, "it never faded"
        for speed in speeds[1:]:
            learn_from(speed, observation(rng, StepTimes(), noise=0.1))
    for _ in range(4):  # and a few requests are enough to know it again
        learn_from(speeds[0], observation(rng, scaled(3.0), noise=0.1))
    assert speeds[0].step_times.step_s > 2 * speeds[1].step_times.step_s


def test_equal_workers_are_not_told_apart_by_when_their_requests_come() -> None:
    """Short prompts between decoding steps: the wait for the step that runs is no worker's slowness."""
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    targets = [tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(8)]
    truth, rng, now = StepTimes(step_s=0.01, decode_request_s=2e-5), random.Random(12), 0.0
    requests = []
    for i in range(4000):
        target = targets[i % 8]
        now += 0.004
        request = tracker.add_request(target, prompt_tokens=1050, cached_tokens=1000, is_streaming=True, now=now)
        requests.append(request)
        step = truth.step_s + truth.decode_request_s * target.load.decode_request_count
        wait = rng.random() * step if target.load.decode_request_count else 0.0
        prefill_s = 50 * truth.prefill_s_per_token * (1 + 1025 / truth.quadratic_tokens)
        tracker.record_first_token(request, now + wait + step + prefill_s)
        if i >= 80:
            tracker.end_request(requests[i - 80], now + 0.03)
    services = {target.speed.step_times for target in targets}
    assert len(services) == 1, services
    assert targets[0].speed.step_times.step_s == pytest.approx(truth.step_s, rel=0.15)


def test_what_loading_takes_is_learned_apart_from_what_computing_takes() -> None:
    tracker, target = make(learn=True)
    rng, now, before = random.Random(3), 0.0, target.speed.step_times.prefill_s_per_token
    for i in range(60):
        uncached_tokens = rng.randrange(500, 4000)
        loads = i % 2 == 1
        load_s = 4000 * 2e-6 if loads else 0.0
        request = tracker.add_request(
            target,
            prompt_tokens=8000,
            cached_tokens=8000 - uncached_tokens,
            is_streaming=True,
            now=now,
            candidate=Candidate(target, tier_load_s=load_s * target.speed.tier_load.get(now)),
        )
        steps = max(1.0, uncached_tokens / StepTimes().step_tokens)
        now += _compute_s(uncached_tokens, steps) + 30 * load_s
        tracker.record_first_token(request, now)
        tracker.end_request(request, now + 0.001)
        now += 1.0
    tracker.close_interval(target)
    assert target.speed.tier_load.get(now) == pytest.approx(30, rel=0.2)
    assert target.speed.step_times.prefill_s_per_token == pytest.approx(before, rel=0.15), "loads taught it"


def _compute_s(uncached_tokens: int, steps: float) -> float:
    """As the prior has it, after a long cached prefix."""
    service = StepTimes()
    quadratic = (8000**2 - (8000 - uncached_tokens) ** 2) / (2 * service.quadratic_tokens)
    return service.prefill_s_per_token * (uncached_tokens + quadratic) + service.step_s * steps


def test_times_that_seem_to_be_nothing_or_for_ever_are_bounded() -> None:
    factor = TimeFactor()
    assert factor.get(0.0) == 1.0
    for _ in range(20):
        factor.observe(0.1, -1.0, 0.0)
    assert 0.0 < factor.get(0.0) < 0.01
    for _ in range(20):
        factor.observe(1e-9, 1e9, 0.0)
    assert factor.get(0.0) == pytest.approx(1000.0, rel=0.3)


def test_a_time_factor_is_the_median_and_begins_at_its_prior() -> None:
    factor = TimeFactor()
    assert factor.get(0.0, prior=3.0) == pytest.approx(3.0)
    factor.observe(0.1, 0.8, 0.0)
    assert factor.get(0.0) == pytest.approx(8 ** (2 / 3)), "the prior counts as half an observation"
    factor.observe(0.1, 60.0, 0.0)
    assert factor.get(0.0) == pytest.approx(8**0.8), "one late observation changes nothing"
    for _ in range(20):
        factor.observe(0.1, 0.2, 1.0)
    assert factor.get(1.0) == pytest.approx(2.0, rel=0.05)
    assert factor.get(1.1 + RATIO_VALID_S) == 1.0, "old observations are forgotten"
