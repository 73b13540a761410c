"""`router check` names what was planted: a worker of aiohttp and a real publisher, with one fault each."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import WordLevel

from engine.tiny.tokenizer import write_tokenizer
from events import BlockStored, EventPublisher, KVEventsConfig, hash_blocks
from events.sources import EventSource, encode_sources
from prompts.routing import parse_routing
from prompts.tokenizer import Tokenizer
from router.app.cli import _print_findings
from router.commands import check
from router.commands.check import Finding, check_workers
from router.fleet.worker_settings import parse_worker_flag
from router.picker.certificate import make_self_signed_certificate
from router.prompting.encode import read_prompt, truncate_prompt

BLOCK = 16
OTHER_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Worker:
    """Remembers prompts in blocks of BLOCK, by salt and adapter; `fault` makes it wrong in one way."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.fault = fault
        template = OTHER_TEMPLATE if fault == "template" else None
        self.tokenizer = Tokenizer.load(folder, template)
        self.folder = folder
        self.cached_keys: set[tuple[str, tuple[int, ...]]] = set()
        self.port = free_port()
        self.publishers = [self._publisher()]
        self.rank_count = 2 if fault == "ranks" else 1
        self.publishers += [self._publisher(rank) for rank in range(1, self.rank_count)]
        self.request_count = 0

    def _publisher(self, rank: int = 0) -> EventPublisher:
        endpoint = f"tcp://127.0.0.1:{self.port}" if self.fault == "connects" else "tcp://*:*"
        replay = None if self.fault == "no replay" else "tcp://127.0.0.1:*"
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, topic="kv@a")
        return EventPublisher(config, dp_rank=1 if self.fault == "rank" else rank)

    def source(self, rank: int) -> EventSource:
        source = self.publishers[rank].describe_source()
        endpoint = source.endpoint.replace("*", "127.0.0.1")
        replay = source.replay_endpoint
        if self.fault == "wrong address":
            endpoint = f"tcp://127.0.0.1:{free_port()}"
        if self.fault == "another worker's":
            self.publishers.append(EventPublisher(self.publishers[0].config))
            endpoint = self.publishers[1].describe_source().endpoint.replace("*", "127.0.0.1")
        if self.fault == "dead replay":
            replay = f"tcp://127.0.0.1:{free_port()}"
        return EventSource(
            endpoint=endpoint,
            replay_endpoint=replay,
            topic="kv@b" if self.fault == "topic" else "kv@a",
            block_size=32 if self.fault == "block size" else BLOCK,
            data_parallel_rank=rank,
        )

    async def models(self, request: web.Request) -> web.Response:
        if self.fault == "key" and request.headers.get("Authorization") != "Bearer right":
            raise web.HTTPUnauthorized
        cards: list[dict[str, Any]] = [{"id": "m", "root": str(self.folder), "max_model_len": 4096}]
        if self.fault == "adapters alone":
            cards[0]["parent"] = "base"
        if self.fault in ("LoRA", "adapters"):
            cards.append({"id": "tuned", "parent": "m"})
        return web.json_response({"data": cards})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"workers_up": 2}) if self.fault == "a router" else web.Response()

    async def sources(self, request: web.Request) -> web.Response:
        if self.fault == "events off":
            raise web.HTTPNotFound
        sources = [self.source(rank) for rank in range(self.rank_count)]
        return web.Response(body=encode_sources(sources), content_type="application/json")

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.fault == "no ids":
            return web.json_response({"tokens": 5})
        body = await request.read()
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        routing_request = parse_routing(path, body)
        ids = list(truncate_prompt(read_prompt(routing_request, self.tokenizer).token_ids, routing_request, None) or ())
        return web.json_response({"tokens": [*ids, 7] if self.fault == "tokenizer" else ids})

    async def complete(self, request: web.Request) -> web.Response:
        if self.fault == "embeddings alone":
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        ids, salt, adapter = body["prompt"], body.get("cache_salt"), body["model"] != "m"
        name = "tuned" if adapter and self.fault != "LoRA" else None
        rank = int(request.headers.get("X-data-parallel-rank", self.request_count % self.rank_count))
        self.request_count += 1
        world = f"{None if self.fault == 'salt' else salt} {name} {rank}"
        keys = [tuple(ids[: end + BLOCK]) for end in range(0, len(ids) - BLOCK + 1, BLOCK)]
        cached_tokens = sum((world, key) in self.cached_keys for key in keys if len(key) < len(ids)) * BLOCK
        fresh = [key for key in keys if (world, key) not in self.cached_keys]
        if fresh and self.fault != "no caching":
            self.cached_keys.update((world, key) for key in keys)
            tokens = ids[: len(keys) * BLOCK]
            names = hash_blocks(None, tokens, BLOCK, (world,))
            self.publishers[rank].publish([BlockStored(names, None, tokens, BLOCK, lora_name=name)])
        details = None if self.fault == "reports" else {"cached_tokens": cached_tokens}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "prompt_tokens_details": details}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/kv_event_sources", self.sources)
        app.router.add_get("/health", self.health)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        tls = None
        if self.fault in ("HTTPS", "a certificate"):
            certificate, key = make_self_signed_certificate("localhost")
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            for name, pem in (("certificate", certificate), ("key", key)):
                (self.folder / f"{name}.pem").write_bytes(pem)
            tls.load_cert_chain(self.folder / "certificate.pem", self.folder / "key.pem")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        try:
            scheme = "https" if self.fault == "a certificate" else "http"
            yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            for publisher in self.publishers:
                publisher.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, 1024, 4096)
    return folder


def run_checks(folder: Path, fault: str, **settings: Any) -> dict[str, Finding]:
    async def scenario() -> dict[str, Finding]:
        findings_by_step: dict[str, Finding] = {}
        async with Worker(folder, fault).serving() as url:
            if fault == "nobody":
                url = f"http://127.0.0.1:{free_port()}"
            async for _, finding in check_workers([parse_worker_flag(url)], **settings):
                findings_by_step[finding.step] = finding
        return findings_by_step

    return asyncio.run(scenario())


PLANTED = {
    # fault: (the step that must name it, words that must be in it)
    "nobody": ("address", "is http://127.0.0.1"),
    "key": ("key", "--worker-api-key"),
    "a router": ("address", "name the workers behind it"),
    "HTTPS": ("address", "does it speak HTTPS?"),
    "a certificate": ("address", "--worker-tls-ca"),
    "events off": ("events", "publishes none"),
    "wrong address": ("events", "nobody listens"),
    "another worker's": ("events", "said nothing"),
    "connects": ("events", "instead of listening"),
    "topic": ("topic", "'kv@b'"),
    "rank": ("rank", "rank 1, not of 0"),
    "block size": ("block size", "32 tokens a block"),
    "tokenizer": ("tokenizer", "read otherwise"),
    "template": ("template", "--chat-template"),
    "no caching": ("cached", "prefix caching is off"),
    "reports": ("reports", "--enable-prompt-tokens-details"),
    "salt": ("salt", "answered from the cache"),
    "LoRA": ("LoRA", "base model's"),
    "no replay": ("replay", "not offered"),
    "dead replay": ("replay", "does not answer"),
}
SILENT = ("wrong address", "another worker's", "no caching", "dead replay")
"""Nothing comes, however long one waits."""


@pytest.mark.parametrize("fault", PLANTED)
def test_what_was_planted_is_named(checkpoint: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in SILENT:
        monkeypatch.setattr(check, "EVENTS_TIMEOUT_S", 0.5)
    step, words = PLANTED[fault]
    findings_by_step = run_checks(checkpoint, fault)
    assert findings_by_step[step].is_ok is False, findings_by_step
    assert words in findings_by_step[step].text
    other_failures = {name for name, finding in findings_by_step.items() if finding.is_ok is False} - {step}
    expected_failures = {"tokenizer": {"template"}, "no caching": {"events"}, "connects": {"replay"}}
    assert other_failures <= expected_failures.get(fault, set()), findings_by_step


@pytest.mark.parametrize("kind", ["adapters", "ranks"])
def test_a_sound_worker_has_no_problem(checkpoint: Path, kind: str) -> None:
    findings_by_step = run_checks(checkpoint, kind)
    assert [finding for finding in findings_by_step.values() if finding.is_ok is not True] == []
    steps = {"address", "tokenizer", "template", "events", "cached", "salt", "replay"}
    assert steps | ({"LoRA"} if kind == "adapters" else set()) <= findings_by_step.keys()
    assert "64 tokens predicted" in findings_by_step["cached"].text
    assert "64 reported" in findings_by_step["cached"].text


@pytest.mark.parametrize("fault", ["adapters alone", "no ids"])
def test_an_odd_answer_is_a_finding(checkpoint: Path, fault: str) -> None:
    findings_by_step = run_checks(checkpoint, fault)
    assert findings_by_step["tokenizer"].is_ok is None, findings_by_step
    assert findings_by_step["request"].is_ok


def test_a_worker_that_generates_nothing_has_no_problem(checkpoint: Path) -> None:
    finding = run_checks(checkpoint, "embeddings alone")["request"]
    assert (finding.is_ok, "routed by load" in finding.text) == (None, True)


def test_a_tokenizer_that_fails_is_a_finding(checkpoint: Path, tmp_path: Path) -> None:
    """Its library raises a plain Exception for words that are not in its vocabulary."""
    tokenizer = HfTokenizer(WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    finding = run_checks(checkpoint, "", tokenizer=str(tmp_path))["tokenizer"]
    assert (finding.is_ok, "cannot read this prompt" in finding.text) == (False, True)


def test_the_key_that_is_given_is_used(checkpoint: Path) -> None:
    assert "address" in run_checks(checkpoint, "key", key="right")


def test_findings_are_json(checkpoint: Path) -> None:
    findings_by_step = run_checks(checkpoint, "")
    assert json.loads(json.dumps([finding.text for finding in findings_by_step.values()]))


def test_the_command_prints_each_finding_and_fails_if_one_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    async def yield_findings(*flags: bool | None) -> AsyncIterator[tuple[str, Finding]]:
        for is_ok in flags:
            yield "w1", Finding("events", is_ok, "text")

    assert asyncio.run(_print_findings(yield_findings(True, None), as_json=False))
    assert not asyncio.run(_print_findings(yield_findings(False, True), as_json=True))
    *lines, bad_line, good_line = capsys.readouterr().out.splitlines()
    assert lines == ["w1  ok      events: text", "w1  ?       events: text"]
    assert json.loads(bad_line) == {"worker": "w1", "step": "events", "ok": False, "text": "text"}
    assert json.loads(good_line)["ok"] is True
