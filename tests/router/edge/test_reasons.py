"""`GET /requests/ID`, `/route`, metrics and the log say why a turn missed; large bodies and hostile names too."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from engine.tiny.tokenizer import write_tokenizer
from prompts.tokenizer import Tokenizer
from router.app.metrics_page import families, render
from router.decide.workers import ServedModel
from router.edge.reasons import WAITING_MAX, Reasons
from router.prompting.known import KnownBodies
from router.turns.config import TurnsConfig
from router.turns.ledger import Ledger
from router.turns.why import NO_LOSS

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

    async def send(self, session: str | None = "s") -> dict[str, Any]:
        self.count += 1
        name = f"{session}-{self.count}-{len(self.messages)}"
        headers = [b"x-request-id: " + name.encode()]
        if session is not None:
            headers.append(b"x-claude-code-session-id: " + session.encode())
        assert (await self.edge.exchange(self.post(self.body(), headers=headers))).startswith(b"HTTP/1.1 200")
        for _ in range(100):
            status, found = await self.ask(name)
            if status == 200 and "reported_tokens" in found:
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"{name} is not known: {found}")

    async def ask(self, name: str) -> tuple[int, Any]:
        answer = await self.edge.exchange(
            f"GET /requests/{name} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode()
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head[9:12]), json.loads(body)


def nothing_is_left(edge: Any) -> bool:
    """Whether all requests have ended, and what was to be said of them went with that."""
    return not edge.proxy.exchanges and all(exchange.looked is None for exchange in edge.ended)


@pytest.fixture
def router(edge: Any, tmp_path: Path) -> Any:
    """Starts a router with a tokenizer and reasons before one worker."""
    write_tokenizer(tmp_path, 2048, 200_000)

    async def start(**settings: Any) -> Reasons:
        await edge.start(policy="kv")
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
        await edge.worker(edge.reply(json.dumps({"choices": [], "usage": usage}).encode()))
        (worker,) = edge.core.workers.values()
        models = (ServedModel("tiny", "tiny", max_model_len=100_000),)
        edge.core.add_worker(replace(worker.spec, models=models), 0.0)
        edge.prompts._tokenizers["tiny"] = Tokenizer.load(tmp_path)
        edge.prompts._folders["tiny"] = str(tmp_path)
        reasons = Reasons(
            TurnsConfig(**{"share": 1.0, **settings}),
            edge.core,
            edge.proxy,
            edge.prompts,
            edge.helpers,
            edge.metrics,
            emptied={},
        )
        edge.ended = []
        edge.proxy.on_end.append(edge.ended.append)
        edge.app._reasons = edge.admin._reasons = reasons
        edge.admin._reading.outlined = reasons.outlined
        return reasons

    return start


def test_a_turn_is_explained_by_its_id(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post)
        talk.turn()
        first = await talk.send()
        for made in ("chatcmpl-", "cmpl-", "msg_"):  # an answer's id
            assert await talk.ask(made + first["id"]) == (200, first)
        assert (first["reason"], first["reported_tokens"], first["session"]) == ("new_session", 0, "s")
        talk.turn()
        second = await talk.send()
        assert second["reason"] == "not_announced", "this worker tells nothing, and nothing is known to be gone"
        assert second["parts"][-1]["reason"] == "new_text"
        talk.messages[1]["content"] = "Something else. " * 20
        talk.turn()
        edited = await talk.send()
        part = next(part for part in edited["parts"] if part["reason"] == "edited")
        assert part["message"] == 1
        assert part["group"] == "workload"
        page = render(
            families(edge.metrics, edge.admin.report(), edge.core.snapshot(0.0), edge.core.index.stats(), (), {}, {})
        )
        assert b'blockcast_router_turns_total{reason="new_session"} 1.0' in page
        assert b'blockcast_router_turn_tokens_total{group="workload",reason="edited"}' in page
        assert b'blockcast_router_reused_tokens_total{point="prompt"}' in page
        assert sum(edge.metrics.turn_tokens.values()) == sum(one["prompt_tokens"] for one in (first, second, edited))
        assert nothing_is_left(edge)

    edge.run(scenario())


def test_what_is_not_known_is_404_and_what_is_not_read_leaves_nothing(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        await router()
        talk = Talk(edge, make_post)
        for settings, words in (
            ({}, "that were answered"),
            ({"share": 0.5}, "50% of"),
            ({"enabled": False}, "--reasons"),
        ):
            edge.admin._reasons = Reasons(
                TurnsConfig(**{"share": 1.0, **settings}), edge.core, edge.proxy, edge.prompts, edge.helpers,
                edge.metrics, emptied={},
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
        before = len(reasons.ledger), reasons.ledger.book.prompts
        answer = await edge.exchange(make_post(talk.body(), b"/route", headers))
        why = json.loads(answer.partition(b"\r\n\r\n")[2])["why"]
        assert why["reason"] in ("system_prompt", "not_announced")
        assert "system_prompt" in {part["reason"] for part in why["parts"]}
        assert (len(reasons.ledger), reasons.ledger.book.prompts) == before

    edge.run(scenario())


@pytest.mark.parametrize("session", ["s", None])
def test_a_body_that_a_helper_reads_is_explained_like_another(
    edge: Any, make_post: Any, router: Any, session: str | None
) -> None:
    """In the helper only the new messages are outlined; a conversation that was changed is looked at again, whole."""

    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post, words=900)
        assert len(talk.body()) > 64 << 10
        for _ in range(3):
            talk.turn()
            told = await talk.send(session)
        assert told["parts"][-1]["reason"] == "new_text"
        assert reasons.outlined("s") == (len(talk.messages) if session else 0)
        talk.messages[3]["content"] = "Something else. " * 20
        talk.turn()
        told = await talk.send(session)
        part = next(
            part for part in told["parts"] if part["reason"] not in NO_LOSS and part["reason"] != "not_announced"
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
        assert (await talk.ask("odd"))[0] == 404
        assert nothing_is_left(edge)
        monkeypatch.undo()
        assert (await talk.send(None))["reason"] == "new_session"

    edge.run(scenario())


def test_nobody_waits_to_be_looked_at_for_ever(edge: Any, make_post: Any, router: Any) -> None:
    """They are looked at together; what one raises is counted, and its own."""

    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post)
        talk.turn()
        for number in range(3):
            headers = [b"x-request-id: n%d" % number]
            await edge.exchange(make_post(talk.body(), headers=headers))
        assert not len(reasons.ledger)
        assert len(reasons._waiting) == 6
        reasons._waiting[2][0][0] = None  # what was asked about the second
        for _ in range(500):
            if not reasons._waiting:
                break
            await asyncio.sleep(0.01)
        assert [reasons.get(f"n{number}") is not None for number in range(3)] == [True, False, True]
        assert sum(edge.metrics.turns.values()) == 2
        assert nothing_is_left(edge)
        assert [(where, count) for (where, _), count in edge.metrics.crashes.items()] == [("reasons", 1)]
        for number in range(WAITING_MAX // 2):
            await edge.exchange(make_post(talk.body(), headers=[b"x-request-id: m%d" % number]))
        assert not reasons._waiting, "so many are looked at without waiting"

    edge.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_ends_while_its_outline_is_made_elsewhere(
    edge: Any, make_post: Any, router: Any, fails: bool
) -> None:
    async def scenario() -> None:
        reasons = await router()
        talk = Talk(edge, make_post, words=900)
        for _ in range(2):
            talk.turn()
            await talk.send()
        may_go, outline = asyncio.Event(), edge.helpers.outline

        async def slow(*args: Any) -> Any:
            await may_go.wait()
            if fails:
                raise RuntimeError("the helper is gone")
            return await outline(*args)

        edge.helpers.outline = slow
        talk.messages[1]["content"] = "Something else. " * 20
        talk.turn()
        headers = [b"x-request-id: slow", b"x-claude-code-session-id: s"]
        await edge.exchange(make_post(talk.body(), headers=headers))
        reasons.settle()
        assert (await talk.ask("slow"))[0] == 404
        assert list(reasons._outlining)
        may_go.set()
        for _ in range(500):
            if not reasons._outlining:
                break
            await asyncio.sleep(0.01)
        status, told = await talk.ask("slow")
        assert status == (404 if fails else 200)
        if not fails:
            assert told["reported_tokens"] == 0
            assert "edited" in {part["reason"] for part in told["parts"]}
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
        assert reasons.ledger.book.holds_together()
        assert len(reasons.ledger) == 50
        assert 500_000 < reasons.ledger.book.used_bytes <= 1 << 20
        assert reasons.ledger.book.prompts < 120

    edge.run(scenario())


@pytest.mark.parametrize("session", ["s", None])
def test_a_body_that_returns_is_explained_like_another(
    edge: Any, make_post: Any, router: Any, session: str | None
) -> None:
    """Of known bodies only what is new was read, and the book keeps no more of their ids than that: nobody could tell
    from what is said."""

    async def scenario() -> None:
        reasons, told = await router(), []
        for known in (KnownBodies(0), KnownBodies(8 << 20)):
            edge.app._reading.known, reasons.ledger = known, Ledger(TurnsConfig(share=1.0))
            talk, said = Talk(edge, make_post, words=30), list[Any]()
            for number in range(14):
                talk.turn(f"Turn {number}. " * 30)
                if number in (5, 9):  # the last turn is another one, an early one is
                    talk.messages[-1 if number == 5 else 3]["content"] = f"Something else than {number}. " * 40
                if number == 11:
                    del talk.messages[5:9]
                one = await talk.send(session)
                said.append({name: one.get(name) for name in ("prompt_tokens", "lost_tokens", "reason", "position")})
                said[-1]["parts"] = [(p["reason"], p["start"], p["end"], p.get("message")) for p in one["parts"]]
                assert reasons.ledger.book.holds_together()
            told.append(said)
            assert (known.hits > 5) == (known.max_bytes > 0)
        assert told[0] == told[1]
        assert {part[0] for one in told[0] for part in one["parts"]} >= {"new_text", "edited", "truncated"}

    edge.run(scenario())


def test_sampled_requests_say_why_in_the_log(
    edge: Any, make_post: Any, router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await router()
        edge.proxy.log_share = 1.0
        talk = Talk(edge, make_post)
        talk.turn()
        with caplog.at_level(logging.INFO, logger="router"):
            await talk.send()
        told = [record.fields["why"] for record in caplog.records if "why" in getattr(record, "fields", {})]
        assert [why["reason"] for why in told] == ["new_session"]

    edge.run(scenario())


def test_it_can_be_turned_off(edge: Any, make_post: Any, router: Any) -> None:
    async def scenario() -> None:
        reasons = await router(enabled=False)
        talk = Talk(edge, make_post)
        talk.turn()
        await edge.exchange(make_post(talk.body(), headers=[b"x-request-id: off"]))
        assert (await talk.ask("off"))[0] == 404
        reasons.settle()
        assert not len(reasons.ledger)

    edge.run(scenario())


def question(number: int) -> Any:
    """As text, or in parts."""
    text = f"Question {number}?"
    return [{"type": "text", "text": text}] if number % 4 == 0 else text


def test_a_share_of_the_conversations_is_looked_at_whole(edge: Any, make_post: Any, router: Any) -> None:
    """All turns of a conversation or none, named or not."""

    async def scenario() -> None:
        reasons = await router(share=0.5)
        counts = []
        for number in range(24):
            headers = [b"x-session-id: s%d" % number] if number % 2 else []
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": question(number)},
            ]
            before = len(reasons.ledger)
            for _ in range(3):
                body = json.dumps({"model": "tiny", "messages": messages}).encode()
                await edge.exchange(make_post(body, headers=headers))
                messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And then?"}]
            reasons.settle()
            counts.append(len(reasons.ledger) - before)
        assert set(counts) == {0, 3}
        assert 4 <= counts.count(3) <= 20

    edge.run(scenario())
