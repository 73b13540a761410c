"""`GET /requests/ID`, `/route`, metrics and the log say why a turn missed; large bodies and hostile names too."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from engine.tiny.tokenizer import write_tokenizer
from prompts.routing import parse_routing
from prompts.tokenizer import Checkpoint, Tokenizer
from router.admin.metrics_page import build_page_families, render_metrics
from router.decide.messages import Decision
from router.decide.workers import ServedModel
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.miss_reasons.analyzer import AnalyzedRequest, MissAnalyzer
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import NO_LOSS
from router.miss_reasons.watched_conversations import WATCHED_MAX, WatchedConversations
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_reader import ConversationReader
from router.prompting.model_tokenizers import LoadedTokenizer
from router.prompting.sessions import digest_first_user_message

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix potions of jade and quartz "
ANSWER = "It is so."


class Talk:
    """A client and its conversation, through the edge; the worker says that it reused nothing."""

    def __init__(self, edge: Any, make_post: Any, *, words: int = 10) -> None:
        self.edge, self.post, self.count = edge, make_post, 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": WORDS * words}]

    def turn(self, text: str = "Go on.") -> None:
        if self.count:
            self.messages.append({"role": "assistant", "content": ANSWER})
        self.messages.append({"role": "user", "content": text * 20})

    def body(self) -> bytes:
        return json.dumps({"model": "tiny", "messages": self.messages}).encode()

    async def send(self, session: str | None = "s", *, explain: bool = False) -> dict[str, Any]:
        self.count += 1
        name = f"{session or ''}-{self.count}-{len(self.messages)}".replace(" ", "")[:60]
        headers = [b"x-request-id: " + name.encode()]
        if explain:
            headers.append(b"X-Blockcast-Explain: 1")
        if session is not None:
            headers.append(b"x-claude-code-session-id: " + session.encode())
        assert (await self.edge.exchange(self.post(self.body(), headers=headers))).startswith(b"HTTP/1.1 200")
        for _ in range(100):
            status, found = await self.ask(name)
            if status == 200 and "reported_cached_tokens" in found:
                return found
            await asyncio.sleep(0.002)
        raise AssertionError(f"{name} is not known: {found}")

    async def ask(self, name: str) -> tuple[int, Any]:
        return await self._call(f"GET /requests/{name} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode())

    async def watch(self, body: bytes) -> tuple[int, Any]:
        head = f"POST /requests/watch HTTP/1.1\r\nHost: r\r\nConnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        return await self._call(head.encode() + body)

    async def _call(self, request: bytes) -> tuple[int, Any]:
        head, _, body = (await self.edge.exchange(request)).partition(b"\r\n\r\n")
        return int(head[9:12]), json.loads(body)


def nothing_is_left(edge: Any) -> bool:
    """Whether all requests have ended, and what was to be said of them went with that."""
    analyses = [context.miss_analysis for context in edge.ended]
    return not edge.proxy.exchanges and all(item.prompt is None and item.result is None for item in analyses)


@pytest.fixture
def router(edge: Any, tmp_path: Path) -> Any:
    """Starts a router with a tokenizer and reasons before one worker."""
    write_tokenizer(tmp_path, 2048, 200_000)

    async def start(cached_tokens: int = 0, **settings: Any) -> MissReasonsRecorder:
        await edge.start(policy="kv")
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
        await edge.worker(edge.reply(json.dumps({"choices": [], "usage": usage}).encode()))
        (worker,) = edge.core.workers.values()
        models = (ServedModel("tiny", "tiny", max_model_len=100_000),)
        edge.core.add_worker(replace(worker.spec, models=models), 0.0)
        edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(
            Tokenizer.load(tmp_path), Checkpoint(str(tmp_path))
        )
        reasons = MissReasonsRecorder(
            MissReasonsConfig(**{"share": 1.0, **settings}),
            edge.proxy,
            edge.prompts,
        )
        edge.ended = []
        edge.proxy.on_end.append(edge.ended.append)
        edge.dispatcher.miss_reasons = edge.explanations._reasons = reasons
        return reasons

    return start


def test_a_prompt_that_was_all_cached_is_explained_too(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        await router(cached_tokens=100_000)
        talk = Talk(edge, make_post)
        talk.turn()
        explanation = await talk.send()
        assert "uncached_ranges" not in explanation
        assert explanation["terms"]["worker"] == explanation["worker"]

    edge.run(scenario())


def test_a_turn_is_explained_by_its_id(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post)
        talk.turn()
        first = await talk.send()
        for made in ("chatcmpl-", "cmpl-", "msg_"):  # an answer's id
            assert await talk.ask(made + first["id"]) == (200, first)
        assert (first["reason"], first["reported_cached_tokens"], first["session"]) == ("new_session", 0, "s")
        talk.turn()
        second = await talk.send()
        assert second["reason"] == "not_announced", "this worker tells nothing, and nothing is known to be gone"
        assert second["uncached_ranges"][-1]["reason"] == "new_text"
        terms = second["terms"]
        assert (terms["worker"], terms["cached_tokens"]) == (second["worker"], second["predicted_cached_tokens"])
        parts = ("ttft_s", "decode_s", "congestion_s", "pressure_s", "tie_break_s")
        assert terms["cost"] == pytest.approx(sum(terms[part] for part in parts) - terms["shared_s"])
        assert second["most_cached"] is None, "no worker had more of it"
        talk.messages[1]["content"] = "Something else. " * 20
        talk.turn()
        edited = await talk.send()
        part = next(part for part in edited["uncached_ranges"] if part["reason"] == "edited")
        assert part["message"] == 1
        assert part["group"] == "workload"
        page = render_metrics(build_page_families(edge.metrics_page))
        assert b'blockcast_router_cache_miss_requests_total{reason="new_session"} 1.0' in page
        assert b'blockcast_router_cache_miss_tokens_total{group="workload",reason="edited"}' in page
        assert b'blockcast_router_reused_tokens_total{point="prompt"}' in page
        assert sum(edge.metrics.cache_miss_tokens.values()) == sum(
            one["prompt_tokens"] for one in (first, second, edited)
        )
        assert nothing_is_left(edge)

    edge.run(scenario())


def test_what_is_not_known_is_404_and_what_is_not_read_leaves_nothing(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post)
        for settings, words in (({}, "x-request-id"), ({"enabled": False}, "--no-reasons")):
            edge.explanations._reasons = MissReasonsRecorder(
                MissReasonsConfig(**{"share": 1.0, **settings}), edge.proxy, edge.prompts,
            )  # fmt: skip
            status, refused = await talk.ask("nobody")
            assert status == 404
            assert words in refused["error"]["message"]
        for body in (b'{"model": "tiny", "messages": "none"}', b'{"model": "no-such", "messages": [{}]}'):
            await edge.exchange(make_post(body, headers=[b"x-request-id: odd"]))
        assert (await talk.ask("odd"))[0] == 404
        assert nothing_is_left(edge)

    edge.run(scenario())


def test_route_says_why_without_sending(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post)
        talk.turn()
        await talk.send()
        talk.messages[0]["content"] += "One word more."
        headers = [b"x-claude-code-session-id: s"]
        before = len(reasons.analyzer), len(reasons.analyzer.history)
        answer = await edge.exchange(make_post(talk.body(), b"/route", headers))
        why = json.loads(answer.partition(b"\r\n\r\n")[2])["why"]
        assert why["reason"] in ("system_prompt", "not_announced")
        assert "system_prompt" in {part["reason"] for part in why["uncached_ranges"]}
        assert (len(reasons.analyzer), len(reasons.analyzer.history)) == before

    edge.run(scenario())


@pytest.mark.parametrize("session", ["s", None])
def test_a_body_that_a_helper_reads_is_explained_like_another(
    edge: Any, make_post: Any, router: Any, session: str | None
) -> None:
    """Its messages are outlined in the helper, once its answer has begun."""

    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post, words=900)
        assert len(talk.body()) > 64 << 10
        for _ in range(3):
            talk.turn()
            told = await talk.send(session)
        assert told["uncached_ranges"][-1]["reason"] == "new_text"
        talk.messages[3]["content"] = "Something else. " * 20
        talk.turn()
        told = await talk.send(session)
        part = next(
            part
            for part in told["uncached_ranges"]
            if part["reason"] not in NO_LOSS and part["reason"] != "not_announced"
        )
        assert (part["reason"], part["message"]) == ("edited", 3)

    edge.run(scenario())


def test_a_conversation_that_cannot_be_looked_at_is_answered(
    edge: Any, make_post: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post)
        talk.turn()

        digest, begins = xxhash.xxh3_64_intdigest, talk.messages[-1]["content"].encode()

        def raises(data: Any, *seed: Any) -> int:
            if data == begins:
                raise KeyError("what a conversation begins with")
            return digest(data, *seed)

        monkeypatch.setattr("xxhash.xxh3_64_intdigest", raises)
        answer = await edge.exchange(make_post(talk.body(), headers=[b"x-request-id: odd"]))
        assert answer.startswith(b"HTTP/1.1 200")
        assert [(where, count) for (where, _), count in edge.metrics.crashes.items()] == [("reasons", 1)]
        status, told = await talk.ask("odd")
        assert (status, told["reason"], told["is_compared"]) == (200, "not_compared", False)
        assert nothing_is_left(edge)
        monkeypatch.undo()
        assert (await talk.send(None))["reason"] == "new_session"

    edge.run(scenario())


def test_what_a_comparison_raises_ends_its_own_reasons_only(
    edge: Any, make_post: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post)
        talk.turn()
        compared = reasons.analyzer.record_compared

        def raises(prompt: Any, *args: Any, **more: Any) -> Any:
            if prompt.request_id == "n1":
                raise KeyError(prompt.request_id)
            return compared(prompt, *args, **more)

        monkeypatch.setattr(reasons.analyzer, "record_compared", raises)
        for number in range(3):
            answer = await edge.exchange(make_post(talk.body(), headers=[b"x-request-id: n%d" % number]))
            assert answer.startswith(b"HTTP/1.1 200")
        assert [reasons.analyzer.get(f"n{number}") is not None for number in range(3)] == [True, False, True]
        assert sum(edge.metrics.cache_miss_requests.values()) == 2
        assert nothing_is_left(edge)
        assert [(where, count) for (where, _), count in edge.metrics.crashes.items()] == [("reasons", 1)]

    edge.run(scenario())


def test_a_request_that_is_not_compared_has_the_reasons_that_need_no_comparison(
    edge: Any, make_post: Any, router: Any
) -> None:
    async def scenario() -> None:
        reasons = await router(share=0.0)
        talk = Talk(edge, make_post)
        talk.turn()
        told = await talk.send()
        assert (told["reason"], told["is_compared"], "lost_tokens" in told) == ("not_compared", False, False)
        (part,) = told["uncached_ranges"]
        assert (part["start"], part["tokens"], part["group"]) == (0, told["prompt_tokens"], "none")
        assert "x-blockcast-explain: 1" in told["hint"]
        assert "/requests/watch" in told["hint"]
        talk.turn()
        again = await talk.send()
        assert [(part["reason"], part["tokens"]) for part in again["uncached_ranges"]] == [
            ("not_compared", again["prompt_tokens"])
        ]
        assert not edge.metrics.cache_miss_requests + edge.metrics.cache_miss_tokens, (
            "the share alone is counted by reason"
        )
        assert edge.metrics.reused_tokens["prompt"] == told["prompt_tokens"] + again["prompt_tokens"]
        assert len(reasons.analyzer.history) == 0
        assert nothing_is_left(edge)

    edge.run(scenario())


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("words", [10, 900])
def test_a_request_with_the_header_is_compared(
    edge: Any, make_post: Any, router: Any, session: str | None, words: int
) -> None:
    """The first has nothing to be compared with. From then on the whole conversation is kept."""

    async def scenario() -> None:
        await router(share=0.0)
        talk = Talk(edge, make_post, words=words)
        for _ in range(2):
            talk.turn()
            assert (await talk.send(session))["is_compared"] is False
        talk.turn()
        assert (await talk.send(session, explain=True))["is_compared"] is False, "no prompt was kept before"
        talk.messages[2]["content"] = "Something else. " * 20
        talk.turn()
        told = await talk.send(session, explain=True)
        assert "hint" not in told
        part = next(part for part in told["uncached_ranges"] if part["reason"] == "edited")
        assert part["message"] == 2
        talk.turn()
        assert (await talk.send(session))["uncached_ranges"][-1]["reason"] == "new_text"
        other = Talk(edge, make_post, words=words + 1)
        other.turn("Another conversation.")
        assert (await other.send(None))["is_compared"] is False
        assert not edge.metrics.cache_miss_requests, "what was asked for would bias the share"
        assert nothing_is_left(edge)
        (upstream,) = edge.upstreams
        assert not any(received.all(b"x-blockcast-explain") for received in upstream.received)
        for value in (b"yes", b"2", b"-1"):
            answer = await edge.exchange(make_post(talk.body(), headers=[b"x-blockcast-explain: " + value]))
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"x-blockcast-explain" in answer

    edge.run(scenario())


def test_a_session_that_is_watched_is_compared(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        reasons = await router(share=0.0)
        talk = Talk(edge, make_post)
        talk.turn()
        await talk.send()
        long = "a-name-of-more-than-64-characters-which-is-known-by-its-digest-" * 2
        assert await talk.watch(json.dumps({"session": "s"}).encode()) == (200, {"session": "s", "watched": 1})
        assert (await talk.watch(json.dumps({"session": long}).encode()))[1]["watched"] == 2
        for body in (b"", b"[]", b"{}", b'{"session": 3}', b'{"session": ""}'):
            status, refused = await talk.watch(body)
            assert (status, "error" in refused) == (400, True)
        for session in ("s", long):
            told = [(await talk.send(session)).get("is_compared", True) for _ in range(3)]
            assert told == [False, True, True]
        assert (await talk.send("another"))["is_compared"] is False
        reasons.is_enabled = False
        assert (await talk.watch(b'{"session": "s"}'))[0] == 409

    edge.run(scenario())


def test_what_is_followed_is_bounded() -> None:
    followed = WatchedConversations(ttl_s=10.0)
    followed.record_prompt(1, 0.0)
    assert not followed, "only what was asked for is followed"
    for key in range(WATCHED_MAX):
        followed.add(key)
    followed.record_prompt(0, 5.0)
    followed.add(-1)
    assert len(followed) == WATCHED_MAX
    assert (0 in followed, 1 in followed, -1 in followed) == (True, False, True)
    assert [followed.has_recent_prompt(0, now) for now in (5.0, 14.0, 15.0)] == [True, True, False]
    assert not followed.has_recent_prompt(-1, 5.0)


def test_conversations_without_a_name_are_told_apart_by_what_was_said_first() -> None:
    def key(path: str, body: dict[str, Any]) -> int:
        return digest_first_user_message(parse_routing(path, json.dumps(body).encode()))

    marked = [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]
    for path, field in (
        ("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input"),
    ):  # fmt: skip
        one, other, in_parts = (
            {"model": "m", "max_tokens": 5, field: [{"role": "user", "content": content}]}
            for content in ("Hello.", "Bye.", marked)
        )
        assert key(path, one) == key(path, in_parts) != key(path, other)
    hello, bye = ({"model": "m", "input": text} for text in ("Hello.", "Bye."))
    assert key("/v1/responses", hello) != key("/v1/responses", bye)


@pytest.mark.parametrize("fails", [False, True])
def test_a_large_body_is_compared_by_the_outline_of_its_reader(
    edge: Any, make_post: Any, router: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post, words=900)
        for _ in range(2):
            talk.turn()
            await talk.send()
        if fails:
            monkeypatch.setattr(reasons.analyzer, "record_compared", None)
        talk.messages[1]["content"] = "Something else. " * 20
        talk.turn()
        headers = [b"x-request-id: large", b"x-claude-code-session-id: s"]
        await edge.exchange(make_post(talk.body(), headers=headers))
        assert edge.worker_pool.counts["read"]
        status, told = await talk.ask("large")
        assert status == (404 if fails else 200)
        if not fails:
            assert told["reported_cached_tokens"] == 0
            assert "edited" in {part["reason"] for part in told["uncached_ranges"]}
        assert sum(edge.metrics.crashes.values()) == fails
        assert nothing_is_left(edge)

    edge.run(scenario())


def test_memory_is_bounded_whatever_names_and_prompts_come(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        reasons = await router(memory_mb=1, requests_max=50)
        for number in range(120):
            talk = Talk(edge, make_post, words=60 + number)
            talk.messages[0]["content"] = f"{number} " + talk.messages[0]["content"]
            talk.turn()
            await talk.send(f"session-{number}-" + "x" * (number % 60))
        reasons.analyzer.history.check_invariants()
        assert len(reasons.analyzer) == 50
        assert 500_000 < reasons.analyzer.history.used_bytes <= 1 << 20
        assert len(reasons.analyzer.history) < 120

    edge.run(scenario())


def test_ids_of_a_client_are_stored_in_the_memory_that_is_counted(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        history = (await router()).analyzer.history
        body = json.dumps({"model": "tiny", "prompt": list(range(1000, 3000))}).encode()
        await edge.exchange(make_post(body, b"/v1/completions"))
        (stored,) = history._prompts
        assert isinstance(stored.token_ids, array)
        assert stored.route.token_ids is stored.token_ids, "not the list of the body, of 40 bytes an id"

    edge.run(scenario())


@pytest.mark.parametrize("session", ["s", None])
def test_a_body_that_returns_is_explained_like_another(
    edge: Any, make_post: Any, router: Any, session: str | None
) -> None:
    """Of known bodies only what is new was read: nobody could tell from what is said."""

    async def scenario() -> None:
        reasons, told = await router(), []
        for max_bytes in (0, 8 << 20):
            edge.prompts.conversations = known = ConversationReader(max_bytes)
            if max_bytes:
                known.allow("tiny", BoundaryRenderer(edge.prompts.tokenizers.get("tiny")))
            reasons.analyzer = MissAnalyzer(MissReasonsConfig(share=1.0), edge.core.index.count_common_tokens)
            talk, said = Talk(edge, make_post, words=30), list[Any]()
            for number in range(14):
                talk.turn(f"Turn {number}. " * 30)
                if number in (5, 9):  # the last turn is another one, an early one is
                    talk.messages[-1 if number == 5 else 3]["content"] = f"Something else than {number}. " * 40
                if number == 11:
                    del talk.messages[5:9]
                one = await talk.send(session)
                said.append({name: one.get(name) for name in ("prompt_tokens", "lost_tokens", "reason", "position")})
                said[-1]["uncached_ranges"] = [
                    (p["reason"], p["start"], p["end"], p.get("message")) for p in one["uncached_ranges"]
                ]
                reasons.analyzer.history.check_invariants()
            told.append(said)
            assert (known.cache.hits > 5) == (max_bytes > 0)
        assert told[0] == told[1]
        assert {part[0] for one in told[0] for part in one["uncached_ranges"]} >= {"new_text", "edited", "truncated"}

    edge.run(scenario())


def test_sampled_requests_say_why_in_the_log(
    edge: Any, make_post: Any, router: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[AnalyzedRequest] = []
    explain = AnalyzedRequest.explanation.fget
    assert explain is not None

    def count_and_explain(request: AnalyzedRequest) -> Any:
        explained.append(request)
        return explain(request)

    async def scenario() -> None:
        await router()
        edge.proxy.log_share = 1.0
        monkeypatch.setattr(AnalyzedRequest, "explanation", property(count_and_explain))
        talk = Talk(edge, make_post)
        talk.turn()
        with caplog.at_level(logging.INFO, logger="router"):
            await talk.send()
        told = [record.fields["why"] for record in caplog.records if "why" in getattr(record, "fields", {})]
        assert [why["reason"] for why in told] == ["new_session"]
        assert len(explained) == 2, "once for the metrics and the log, and once for the client that asked"

    edge.run(scenario())


def test_it_can_be_turned_off(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        reasons = await router(enabled=False)
        talk = Talk(edge, make_post)
        talk.turn()
        await edge.exchange(make_post(talk.body(), headers=[b"x-request-id: off"]))
        assert (await talk.ask("off"))[0] == 404
        assert not len(reasons.analyzer)

    edge.run(scenario())


def question(number: int) -> Any:
    """As text, or in parts."""
    text = f"Question {number}?"
    return [{"type": "text", "text": text}] if number % 4 == 0 else text


def test_a_share_of_the_conversations_is_looked_at_whole(edge: Any, make_post: Any, router: Any) -> None:
    """All turns of a conversation or none, named or not; the others have the reasons that need no comparison."""

    async def scenario() -> None:
        reasons = await router(share=0.5)
        counts = []
        for number in range(24):
            headers = [b"x-session-id: s%d" % number] if number % 2 else []
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": question(number)},
            ]
            before = len(reasons.analyzer), sum(edge.metrics.cache_miss_requests.values())
            for _ in range(3):
                body = json.dumps({"model": "tiny", "messages": messages}).encode()
                await edge.exchange(make_post(body, headers=headers))
                messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And then?"}]
            assert len(reasons.analyzer) - before[0] == 3
            counts.append(sum(edge.metrics.cache_miss_requests.values()) - before[1])
        assert set(counts) == {0, 3}
        assert 4 <= counts.count(3) <= 20

    edge.run(scenario())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_parts_of_a_prompt_add_up_after_the_core_has_corrected_its_prediction(
    edge: Any, make_post: Any, router: Any, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """As it does at the end of a request for which no KV came, long after the first byte."""
    decisions: list[Decision] = []

    async def scenario() -> None:
        await router(share=share)
        route, finish_request = edge.core.route, edge.core.finish_request

        def predict_and_route(*args: Any, **more: Any) -> Any:
            instruction = route(*args, **more)
            decisions.append(instruction.decision)
            instruction.decision.predicted_cached_tokens = 16
            return instruction

        def correct_and_finish(*args: Any, **more: Any) -> Any:
            decisions[-1].predicted_cached_tokens = 0
            return finish_request(*args, **more)

        monkeypatch.setattr(edge.core, "route", predict_and_route)
        monkeypatch.setattr(edge.core, "finish_request", correct_and_finish)
        talk = Talk(edge, make_post)
        talk.turn()
        told = await talk.send()
        assert (told["predicted_cached_tokens"], told["reported_cached_tokens"]) == (16, 0)
        first, rest = told["uncached_ranges"]
        assert (first["reason"], first["start"], first["end"]) == ("not_announced", 0, 16)
        assert (rest["start"], rest["end"]) == (16, told["prompt_tokens"])

    edge.run(scenario())
