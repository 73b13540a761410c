"""The price against a version written out from docs/reference/price.md, over lists of requests instead of sums."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CostConfig, LearnConfig
from router.decide.load import PeerLoad
from router.decide.load_tracker import UTILISATION_WINDOW_S, LoadTracker
from router.decide.messages import Terms, Transfer, TransferKind
from router.decide.price import Candidate, RequestFacts, TransferPlan, price_worker
from router.index.protocol import HolderId
from simulation.steps import StepTimes

NOW, CAPACITY_TOKENS = 50.0, 100_000
CONFIG = CostConfig(decode_weight=0.3, utilisation_weight=0.2)


@dataclass(frozen=True)
class Sent:
    """A request that was sent to the worker."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    has_first_token: bool


def work_s(service: StepTimes, first: float, last: float) -> float:
    """Seconds to prefill the tokens from `first` to `last`: each costs the more, the more context it has."""
    return service.prefill_s_per_token * ((last - first) + (last**2 - first**2) / (2 * service.quadratic_tokens))


def write_out(
    service: StepTimes,
    requests: list[Sent],
    peer: PeerLoad | None,
    priced: RequestFacts,
    cache: Candidate,
    step_seen_s: float,
    slots: int,
    speed_factor: float,
) -> dict[str, float]:
    """The six parts, as docs/reference/price.md has them."""
    decoding = [request for request in requests if request.has_first_token]
    waiting = [request for request in requests if not request.has_first_token]
    decode_count = len(decoding) + (peer.decode_requests if peer is not None else 0)
    decode_context = sum(request.prompt_tokens for request in decoding) + (
        peer.decode_context_tokens if peer is not None else 0
    )
    count = len(requests) + (peer.request_count if peer is not None else 0)
    step_s = service.step_s + service.decode_request_s * decode_count + service.decode_context_s * decode_context
    slowdown = 1 + step_s / (service.prefill_s_per_token * service.step_tokens)
    hit = max(cache.cached_tokens, cache.media_cached_tokens)
    prefill_s = work_s(service, hit, priced.prompt_tokens)

    waiting_s = [work_s(service, request.cached_tokens, request.prompt_tokens) for request in waiting]
    queue_s = sum(waiting_s)
    if waiting:  # the first is computed since it was sent, or since the first token before it
        since_s = max(step_seen_s if decoding else 0.0, waiting[0].at_s)
        fixed_s = step_s * max(0.0, 1 - waiting_s[0] / (service.prefill_s_per_token * service.step_tokens))
        progress_s = max(0.0, (NOW - since_s - fixed_s) / slowdown)
        if progress_s:
            queue_s += max(waiting_s[0] - progress_s, 0.2 * progress_s) - waiting_s[0]
    left_tokens = sum(request.output_tokens for request in requests) / len(requests) if requests else 256.0
    slot_s = max(0, count + 1 - slots) / slots * left_tokens * step_s if count else 0.0
    ttft_s = (
        max(slot_s, cache.memory_wait_s) + slowdown * (queue_s + cache.queued_ahead_s + prefill_s) + cache.tier_load_s
    )
    arrival_s = cache.plan.arrival_s if cache.plan else 0.0
    ttft_s += max(0.0, arrival_s - slowdown * (queue_s + cache.queued_ahead_s))

    output = priced.output_tokens
    context_s = service.decode_context_s * (priced.prompt_tokens + output / 2)
    answer_s = output * (service.step_s + service.decode_request_s + context_s)
    all_context = decode_context + sum(request.prompt_tokens for request in waiting)
    answer_s += output * (service.decode_request_s * count + service.decode_context_s * all_context)
    answer_s += output * count * (service.decode_request_s + context_s)
    again_s = work_s(service, hit, priced.shared_tokens) if hit < priced.shared_tokens else 0.0
    free_tokens = CAPACITY_TOKENS - decode_context - sum(request.prompt_tokens for request in waiting)
    free_share = max(0.0, 1 - count / slots) * max(0.0, free_tokens / CAPACITY_TOKENS)
    copy_reuse_share = priced.copy_reuse_share * free_share

    utilisation = peer.utilisation if peer is not None else 0.0
    for request in requests:
        sent_s = work_s(service, request.cached_tokens, request.prompt_tokens)
        utilisation += (
            sent_s / UTILISATION_WINDOW_S * 2.718281828459045 ** -((NOW - request.at_s) / UTILISATION_WINDOW_S)
        )
    if priced.can_move_prefill:
        answer_s += (prefill_s - copy_reuse_share * again_s) * decode_count
        prompts = count - decode_count
        prefill_share = min(max(utilisation, prompts / (prompts + 1)), 0.9)
        answer_s += output * step_s * prefill_share / (1 - prefill_share)
    else:
        answer_s += (1 - copy_reuse_share) * again_s * count
    return {
        "ttft_s": ttft_s,
        "decode_s": CONFIG.decode_weight * answer_s,
        "congestion_s": priced.congestion / speed_factor * slowdown * prefill_s,
        "pressure_s": cache.pressure_s,
        "shared_s": slowdown * (1 + priced.congestion / speed_factor) * copy_reuse_share * again_s,
        "tie_break_s": CONFIG.utilisation_weight * utilisation,
    }


def sent(draw_prompt: st.SearchStrategy[int]) -> st.SearchStrategy[Sent]:
    return st.builds(
        lambda at, prompt, share, output, first: Sent(at, prompt, int(share * (prompt - 1)), output, first),
        st.floats(40.0, 49.0), draw_prompt, st.floats(0.0, 1.0), st.integers(1, 2000), st.booleans(),
    )  # fmt: skip


@given(
    requests=st.lists(sent(st.integers(1, 30_000)), max_size=6),
    peer=st.none() | st.builds(
        PeerLoad, decode_requests=st.integers(0, 9), decode_context_tokens=st.integers(0, 90_000),
        utilisation=st.floats(0.0, 1.0),
    ),
    prompt_tokens=st.integers(1, 30_000),
    output_tokens=st.floats(1.0, 4000.0),
    shares=st.tuples(*[st.floats(0.0, 1.0)] * 4),
    congestion=st.floats(0.1, 50.0),
    waits_s=st.tuples(*[st.floats(0.0, 3.0)] * 4),
    arrival_s=st.just(0.0) | st.floats(0.0, 3.0),
    can_move_prefill=st.booleans(),
    slots=st.integers(1, 8),
    step_seen_s=st.floats(49.0, NOW),
    speed_factor=st.just(1.0) | st.floats(0.3, 10.0),
)  # fmt: skip
def test_the_price_is_its_six_parts_written_out(
    requests: list[Sent],
    peer: PeerLoad | None,
    prompt_tokens: int,
    output_tokens: float,
    shares: tuple[float, ...],
    congestion: float,
    waits_s: tuple[float, ...],
    arrival_s: float,
    can_move_prefill: bool,
    slots: int,
    step_seen_s: float,
    speed_factor: float,
) -> None:
    requests = sorted(requests, key=lambda request: request.at_s)
    tracker = LoadTracker(StepTimes(), CONFIG, LearnConfig(enabled=False))
    target = tracker.add_target("w", None, HolderId(1))
    target.speed.factor = speed_factor
    target.speed.refresh()
    target.capacity.kv_tokens = CAPACITY_TOKENS
    target.capacity.max_num_seqs = slots
    target.recompute_decode_load()
    in_flight = [
        tracker.add_request(
            target, prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens, is_streaming=True,
            now=request.at_s, expected_output_tokens=request.output_tokens,
        )
        for request in requests
    ]  # fmt: skip
    for request, in_flight_request in zip(requests, in_flight):
        if request.has_first_token:
            tracker.record_first_token(in_flight_request, step_seen_s)
    if peer is not None:
        tracker.set_peer_loads("other", {"w": peer})
    decay = tracker.compute_utilisation_decay(NOW)
    cached, shared, media = (int(share * (prompt_tokens - 1)) for share in shares[:3])
    transfer = Transfer(TransferKind.PULL, "other", None, 0, arrival_s)
    plan = TransferPlan(transfer, Candidate(target), arriving_tokens=0)
    cache = Candidate(target, cached, cached, media, *waits_s, plan=plan)
    priced = RequestFacts(NOW, prompt_tokens, output_tokens, decay, congestion, shared, shares[3], can_move_prefill)
    terms = price_worker(cache, priced, CONFIG)
    parts = write_out(target.speed.step_times, requests, peer, priced, cache, step_seen_s, slots, speed_factor)
    assert {name: getattr(terms, name) for name in parts} == pytest.approx(parts, rel=1e-6, abs=1e-9)
    assert terms.cost == pytest.approx(sum_parts(terms), rel=1e-9)
    assert terms.cost == pytest.approx(sum(parts.values()) - 2 * parts["shared_s"], rel=1e-6, abs=1e-9)


def sum_parts(terms: Terms) -> float:
    added_s = terms.ttft_s + terms.decode_s + terms.congestion_s + terms.pressure_s + terms.tie_break_s
    return added_s - terms.shared_s
