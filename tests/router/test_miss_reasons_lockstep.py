"""The analyzer of turns against its naive model, on conversations that nobody would have."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
from reference.miss_reasons.lockstep import BothAnalyzers
from reference.miss_reasons.naive import check_adds_up

from router.decide.messages import Decision, ReportedUsage, RouteRequest, Terms
from router.index import make_index
from router.index.protocol import Scope
from router.miss_reasons.analyzer import MissAnalyzer
from router.miss_reasons.attribution import Placement, RemovedPrefix, find_first_missing_token
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import GROUPS, NO_LOSS
from router.miss_reasons.prompt_history import AnalyzedPrompt
from router.prompting.outline import MessageFingerprint, MessageFingerprints, Outline

INDEX = make_index(seed=3)
BLOCK, CHUNK = 4, 16
SCOPES = (Scope("m"), Scope("m", "salt"), Scope("m", None, "lora"), Scope("n"))
SESSIONS = (None, None, "one", "two", "half \ud83d of a pair")
KINDS = (0, 1, 2, 3, 1 | 16, 2 | 8, 2 | 32, 2 | 8 | 32)
MESSAGE_TOKENS = 5


@dataclass
class SomeFacts:
    """Whatever an index might say."""

    emptied_s: float | None = None
    is_guessed: bool = False
    is_thought: bool = False

    def last_emptied_s(self, worker_id: str) -> float | None:
        return self.emptied_s

    def has_approximate_cache(self, worker_id: str) -> bool:
        return self.is_guessed

    def is_thinking(self, model: str, ids: Sequence[int]) -> bool:
        return self.is_thought


@dataclass
class Talk:
    """A prompt of few different tokens, and messages of few different digests: all that can collide does."""

    ids: list[int] = field(default_factory=list)
    words: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def outline(self, tools: int, flags: int) -> Outline:
        rows = [MessageFingerprint(*message) for message in self.words]
        return Outline(MessageFingerprints.from_rows(rows), tools, flags)


def draw_message(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Sent alike, they are alike; system prompts often are, others now and then."""
    kind = rng.choice(KINDS)
    content_hash = rng.randrange(12 if kind == 0 or rng.random() < 0.4 else 10**6)
    return content_hash, content_hash // 2, content_hash // 3, kind, 1 + 9 * (content_hash % 5)


def draw_similar_message(rng: random.Random, message: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
    """Sent otherwise, and perhaps the same where it counts."""
    content_hash = message[0] + rng.choice([-1, 1]) if message[0] else 1
    return content_hash, content_hash // 2, content_hash // 3, message[3], 1 + 9 * (content_hash % 5)


def draw_next_talk(rng: random.Random, talk: Talk) -> Talk:
    """Mostly it goes on; or it is cut, edited, rendered otherwise."""
    how = rng.choice(["on", "on", "on", "same", "cut", "edit", "edit", "rendered", "tail", "new", "new", "fork"])
    if how == "new" or len(talk.ids) > 300:
        talk = Talk()
    ids, words = list(talk.ids), list(talk.words)
    if how == "fork":  # another conversation with the same system prompt
        ids, words = ids[: CHUNK + 2], [(*old_message[:3], 0, old_message[4]) for old_message in words[:1]]
    if ids and how in ("cut", "edit", "rendered", "tail"):
        at = len(ids) - rng.randrange(1, min(len(ids), 40) + 1) if how == "tail" else rng.randrange(len(ids))
        ids = ids[:at] if how == "cut" else [*ids[:at], 9, *ids[at + 1 :]]
        if words and how in ("cut", "edit"):
            place = min(at // MESSAGE_TOKENS, len(words) - 1)
            other = draw_similar_message(rng, words[place]) if rng.random() < 0.4 else draw_message(rng)
            words = words[:place] if how == "cut" else [*words[:place], other, *words[place + 1 :]]
    if how == "edit" and words and rng.random() < 0.5:  # that a template drops, or does not
        words[rng.randrange(len(words))] = draw_message(rng)
    for _ in range(0 if how == "same" else rng.randrange(1, 4)):
        words.append(draw_message(rng))
        ids += rng.choices(range(2), k=MESSAGE_TOKENS)
    return Talk(ids, words)


def make_terms(worker: str, cached_tokens: int, resident_tokens: int, ttft_s: float) -> Terms:
    return Terms(worker, cost=0.0, ttft_s=ttft_s, cached_tokens=cached_tokens, resident_tokens=resident_tokens)


def draw_decision(rng: random.Random, tokens: int) -> Decision:
    def terms(worker: str, cached_tokens: int) -> Terms:
        return make_terms(worker, cached_tokens, rng.randrange(tokens + 1), rng.random())

    cached_tokens = rng.choice([0, rng.randrange(tokens // BLOCK + 1)]) * BLOCK
    chosen_terms = terms(rng.choice("ab"), cached_tokens)
    decision = Decision("r", chosen_terms.worker, None, rng.randrange(2), tokens, cached_tokens, 0.0, chosen_terms, 0.0)
    if rng.random() < 0.2:
        decision.most_cached = terms("c", cached_tokens + BLOCK * rng.randrange(1, 6))
    return decision


def draw_facts(rng: random.Random, now: float) -> SomeFacts:
    emptied_s = now - rng.randrange(20)
    return SomeFacts(emptied_s if rng.random() < 0.2 else None, rng.random() < 0.1, rng.random() < 0.3)


def make_route(ids: array[int], scope: Scope, session: str | None, **changes: Any) -> RouteRequest:
    return RouteRequest("", scope.model, scope, ids, len(ids), session=session, **changes)


class World:
    """Conversations side by side, and both analyzers told of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.are_sessions_named = rng, 0.0, rng.random() < 0.5
        self.analyzers = BothAnalyzers(
            MissReasonsConfig(memory_mb=1, ttl_s=30.0, requests_max=6), INDEX.count_common_tokens
        )
        self.talks: list[tuple[Talk, str | None]] = [(Talk(), None)]
        self.running_requests: list[tuple[Any, int]] = []
        self.reasons: set[str] = set()

    def place_request(self, number: int) -> None:
        rng, analyzers = self.rng, self.analyzers
        before, session = rng.choice(self.talks[-6:])
        talk = draw_next_talk(rng, before)
        if rng.random() < 0.3:
            session = rng.choice(SESSIONS if self.are_sessions_named else SESSIONS[:1])
        self.talks.append((talk, session))
        scope = SCOPES[0] if rng.random() < 0.85 else rng.choice(SCOPES)
        tools, flags = rng.choices([0, 1], [8, 1])[0], rng.choices([0, 7], [8, 1])[0]
        is_chat, ids = rng.random() < 0.85, array("I", talk.ids)
        keys = INDEX.chunk_keys(ids, scope, CHUNK)
        decision = draw_decision(rng, len(ids))
        name, outline = f"r{rng.choice([number, rng.randrange(9)])}", talk.outline(tools, flags) if is_chat else None
        route = make_route(ids, scope, session, parent=rng.choice(SESSIONS), is_final=rng.random() < 0.05)
        prompt = AnalyzedPrompt(
            name, route, ids, outline, keys,
            talk.words[0][0] if session is None and talk.words else None, rng.random() < 0.2,
        )  # fmt: skip
        facts = draw_facts(rng, self.now)
        removed_prefix = (
            RemovedPrefix(find_first_missing_token(decision) + rng.randrange(1, 40), "a", 0.5)
            if rng.random() < 0.2
            else None
        )
        placement = Placement(decision, removed_prefix, BLOCK, self.now, 1.0)
        check_adds_up(analyzers.explain(prompt, placement, facts))
        if rng.random() < 0.2:
            started_request = analyzers.record_placed(prompt, placement)
        else:
            is_sampled = rng.random() < 0.7
            started_request = analyzers.record_compared(prompt, placement, facts, is_sampled=is_sampled)
        self.running_requests.append((started_request, len(ids)))

    def end(self) -> None:
        rng = self.rng
        running_request, tokens = self.running_requests.pop(rng.randrange(len(self.running_requests)))
        usage = ReportedUsage(tokens, rng.choice([None, rng.randrange(tokens + 3)]), None)
        self.analyzers.record_end(running_request, rng.choice([None, usage]), rng.randrange(20), self.now)
        why = self.analyzers.explanation_of(running_request)
        check_adds_up(why)
        self.reasons |= {part.reason for part in why.uncached_ranges}


def test_both_say_the_same() -> None:
    seen_reasons: set[str] = set()
    for seed in (*range(60), 2285477464, random.randrange(2**32)):  # the long one: a scope and an answer in one block
        world = World(random.Random(seed))
        for number in range(80):
            print("seed", seed, "request", number)  # shown where it fails
            world.now += world.rng.choices([0.0, 1.0, 6.0, 30.0], [4, 8, 2, 1])[0]
            world.place_request(number)
            while world.running_requests and world.rng.random() < 0.5:
                world.end()
        seen_reasons |= world.reasons
    assert seen_reasons == {*GROUPS, *NO_LOSS}, "every reason was given"


def test_prompts_beyond_its_memory_leave_in_their_order() -> None:
    analyzers = BothAnalyzers(MissReasonsConfig(memory_mb=1), INDEX.count_common_tokens)
    for number in range(40):
        ids = array("I", range(number * 100_000, number * 100_000 + 20_000 + 1_000 * (number % 7)))
        keys = INDEX.chunk_keys(ids, SCOPES[0], 512)
        route = make_route(ids, SCOPES[0], f"s{number % 9}" if number % 2 else None)
        prompt = AnalyzedPrompt(f"r{number}", route, ids, None, chunk_keys=keys)
        terms = make_terms("a", 0, 0, 0.0)
        decision = Decision("r", "a", None, 0, len(ids), 0, 0.0, terms, 0.0)
        analyzers.record_compared(prompt, Placement(decision, None, BLOCK, 1.0 + number, 0.0), SomeFacts())
    sizes = [len(analyzers.analyzer.history), len(analyzers.naive.history)]
    assert 5 < sizes[0] < 20
    assert all(a == b for a, b in pairwise(sizes))


def test_a_block_without_tokens_is_refused() -> None:
    analyzer = MissAnalyzer(MissReasonsConfig(), INDEX.count_common_tokens)
    terms = make_terms("a", 0, 0, 0.0)
    decision = Decision("r", "a", None, 0, 3, 0, 0.0, terms, 0.0)
    prompt = AnalyzedPrompt("r", make_route(array("I", [1, 2, 3]), SCOPES[0], "s"), array("I", [1, 2, 3]), None)
    with pytest.raises(ValueError, match="block"):
        analyzer.record_compared(prompt, Placement(decision, None, 0, 0.0, 0.0), SomeFacts())
    assert len(analyzer) == len(analyzer.history) == 0


def test_of_requests_with_one_name_the_last_is_known() -> None:
    analyzer = MissAnalyzer(MissReasonsConfig(requests_max=2), INDEX.count_common_tokens)
    terms, most_cached = make_terms("a", 0, 0, 0.0), make_terms("b", 16, 16, 0.5)
    for name, tokens in (("one", 3), ("two", 4), ("one", 5), ("three", 6)):
        decision = Decision("r", "a", None, 0, tokens, 0, 0.0, terms, 0.0, most_cached=most_cached)
        analyzer.record_placed(name, None, tokens, Placement(decision, None, BLOCK, 0.0, 0.0))
    explanations = [analyzer.get(name) for name in ("one", "two", "three")]
    assert [None if why is None else why.prompt_tokens for why in explanations] == [5, None, 6]
    latest_request = analyzer.get_request("three")
    assert latest_request is not None
    decision = latest_request.placement.decision
    assert (decision.terms, decision.most_cached) == (terms, most_cached), "both prices are known"


def test_an_explanation_that_was_given_does_not_change_with_the_report_of_the_worker() -> None:
    analyzer = MissAnalyzer(MissReasonsConfig(), INDEX.count_common_tokens)
    ids = array("I", range(40))
    decision = Decision("r", "a", None, 0, len(ids), 8, 0.0, make_terms("a", 8, 8, 0.0), 0.0)
    placement = Placement(decision, None, BLOCK, 0.0, 0.0)
    prompt = AnalyzedPrompt("compared", make_route(ids, SCOPES[0], "s"), ids, None)
    requests = [
        analyzer.record_placed("placed", None, len(ids), placement),
        analyzer.record_compared(prompt, placement, SomeFacts()),
    ]
    for request, reason in zip(requests, ("not_compared", "new_session")):
        early_explanation = request.explanation
        analyzer.record_end(request, ReportedUsage(len(ids), 16, 1), 1, 1.0)
        ranges = [(part.reason, part.start, part.end) for part in early_explanation.uncached_ranges]
        assert (early_explanation.reported_cached_tokens, ranges) == (None, [(reason, 8, 40)])
        ranges = [(part.reason, part.start, part.end) for part in request.explanation.uncached_ranges]
        assert (request.explanation.reported_cached_tokens, ranges) == (16, [(reason, 16, 40)])


def test_a_prompt_that_no_other_could_find_takes_no_memory() -> None:
    """A short one that is no chat, in a session without a name: it has no whole chunk, and no message of a user."""
    analyzers = BothAnalyzers(MissReasonsConfig(), INDEX.count_common_tokens)
    decision = Decision("r", "a", None, 0, CHUNK, 0, 0.0, make_terms("a", 0, 0, 0.0), 0.0)
    placement, ids = Placement(decision, None, BLOCK, 0.0, 0.0), array("I", range(CHUNK))
    for session, count in ((None, 0), ("s", 1)):
        prompt = AnalyzedPrompt("r", make_route(ids, SCOPES[0], session), ids, None)
        analyzers.record_end(analyzers.record_compared(prompt, placement, SomeFacts()), None, 5, 1.0)
        assert len(analyzers.analyzer.history) == count


def test_a_prompt_that_was_dropped_is_not_kept_by_its_request() -> None:
    analyzer = MissAnalyzer(MissReasonsConfig(memory_mb=1), INDEX.count_common_tokens)
    prompts: list[ref[array[int]]] = []
    for number in range(20):
        ids = array("I", range(50_000))
        decision = Decision("r", "a", None, 0, len(ids), 0, 0.0, make_terms("a", 0, 0, 0.0), 0.0)
        prompt = AnalyzedPrompt(f"r{number}", make_route(ids, SCOPES[0], f"s{number}"), ids, None)
        analyzer.record_compared(prompt, Placement(decision, None, BLOCK, 0.0, 0.0), SomeFacts())
        prompts.append(ref(ids))
        del ids, prompt
    assert len(analyzer) == 20
    assert sum(prompt() is not None for prompt in prompts) == len(analyzer.history) < 6


@pytest.mark.parametrize("session", [None, "s"])
def test_prompts_take_the_memory_that_is_counted(session: str | None) -> None:
    analyzer = MissAnalyzer(MissReasonsConfig(), INDEX.count_common_tokens)
    gc.collect()
    tracemalloc.start()
    for number in range(300):
        ids = array("I", range(1000 * number, 1000 * number + 512))
        keys = () if session else INDEX.chunk_keys(ids, SCOPES[0], 256)
        route = make_route(ids, SCOPES[0], session and f"{session}{number}")
        analyzer.history.add(AnalyzedPrompt(f"request-{number}", route, ids, None, keys, None if session else number))
    taken_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(analyzer.history) == 300
    assert taken_bytes == pytest.approx(analyzer.history.used_bytes, rel=0.1)
