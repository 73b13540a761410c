"""A chat template out of a checkpoint's folder is a program: what may not end is rendered by a helper process with a
deadline, at the start and while serving, and everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.process_pool import WorkerProcess, WorkerProcessError
from prompts.routing import parse_body
from prompts.tokenizer import Checkpoint, Tokenizer
from router.prompting import prompt_reader
from router.prompting.boundary_rendering import BoundaryRenderer, TemplateInputs
from router.prompting.config import PromptWorkerConfig
from router.prompting.model_tokenizers import TIMEOUTS_MAX
from router.prompting.parsed_body import BodyToRead
from router.prompting.placeholder_messages import NO_PLACEHOLDERS
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask, TemplateTrial

BODY = {"messages": [{"role": "user", "content": "hello there"}]}
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
USUAL = "aa{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}"


def write_model(folder: Path, template: str) -> str:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, 1024, 4096)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


async def start(edge: Any, folder: str) -> list[Any]:
    """An edge that serves `bad`, whose files are in `folder`, and `tiny`; routes of what ends."""
    await edge.start(policy="kv")
    await edge.worker(edge.reply())
    await edge.worker(edge.reply(), model="bad")
    await edge.prompts.tokenizers.discover("bad", folder, SimpleNamespace(url="", sends_api_key=False))
    routes: list[Any] = []
    edge.proxy.on_end.append(lambda exchange: routes.append(exchange.route))
    return routes


def send_chat(edge: Any, make_post: Any, model: str = "bad", path: bytes = b"/v1/chat/completions", **more: Any) -> Any:
    return edge.exchange(make_post(json.dumps({"model": model, **BODY, **more}).encode(), path))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_template_that_took_too_long_is_rendered_by_a_helper_with_the_same_result(
    edge: Any, make_post: Any, tmp_path: Path, path: str
) -> None:
    folder = write_model(tmp_path, USUAL)
    expected = Tokenizer.load(tmp_path).encode("aahello there", add_special_tokens=False)

    async def scenario() -> None:
        routes = await start(edge, folder)
        edge.prompts.tokenizers.get("bad").chat_template.is_bounded = False
        for _ in range(2):
            answer = await send_chat(edge, make_post, path=path.encode(), max_tokens=1)
            assert answer.startswith(b"HTTP/1.1 200")
        assert [list(route.token_ids) for route in routes] == [expected, expected]
        assert edge.worker_pool.counts["read"] == 2

    edge.run(scenario())


@pytest.mark.parametrize("failures", [1, 2])
def test_a_template_is_tried_again_if_the_process_of_its_trial_was_killed(
    edge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Its chats would be rendered by processes, and never be cached, for as long as the router runs."""
    folder, errors = write_model(tmp_path, USUAL), [WorkerProcessError("EOFError: killed")] * failures

    async def fail_first(*_: Any) -> TemplateTrial:
        if errors:
            raise errors.pop()
        return TemplateTrial(is_bounded=True, problem=None)

    async def scenario() -> None:
        monkeypatch.setattr(WorkerProcess, "call", fail_first)
        await start(edge, folder)
        assert edge.prompts.tokenizers.get("bad").chat_template.is_bounded is (failures == 1)

    edge.run(scenario())


def test_a_loop_without_end_stops_and_nobody_else_waits_for_it(
    edge: Any, make_post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reader, "WORKER_RENDER_S_MAX", 0.2)
    monkeypatch.setattr("router.prompting.prompt_worker_pool.START_S_MAX", 60.0)
    folder = write_model(tmp_path, ENDLESS)

    async def scenario() -> None:
        routes = await start(edge, folder)
        for _ in range(TIMEOUTS_MAX + 2):  # here, then by worker processes, then no more
            answers = await asyncio.gather(send_chat(edge, make_post), send_chat(edge, make_post, "tiny"))
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert all(route.token_ids is None for route in routes)
        assert edge.worker_pool.counts["failed"] == TIMEOUTS_MAX
        assert "too long" in edge.prompts.tokenizers.problems["bad"]
        assert edge.prompts.make_task("bad", "chat", None).checkpoint is None
        assert edge.prompts.make_task("bad", "completion", None).checkpoint.folder == folder

    edge.run(scenario(), 60.0)


def test_a_template_in_place_of_one_that_took_too_long_is_rendered_again(
    edge: Any, make_post: Any, tmp_path: Path
) -> None:
    """Also the chats in large bodies, which worker processes read from the first on."""
    long_chat = {"messages": [{"role": "user", "content": "hello there " * 9_000}]}

    async def scenario() -> None:
        routes = await start(edge, write_model(tmp_path / "old", USUAL))
        tokenizers, worker = edge.prompts.tokenizers, SimpleNamespace(url="", sends_api_key=False)
        for _ in range(TIMEOUTS_MAX):
            tokenizers.record_rendering("bad", is_overdue=True)
        assert "too long" in tokenizers.problems["bad"]
        await send_chat(edge, make_post, **long_chat)
        tokenizers.forget("bad")
        await tokenizers.discover("bad", write_model(tmp_path / "new", USUAL), worker)
        await send_chat(edge, make_post, **long_chat)
        assert [route.token_ids is None for route in routes] == [True, False]
        assert "bad" not in tokenizers.problems

    edge.run(scenario(), 60.0)


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ 'a'.center(10**9) | length }}",
        "{{ ('a' | center(10**15)) | length }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ ('aaaa' * 250000) | replace('a', 'a' * 9999) | length }}",
        "{{ (['a' * 9999] * 250000) | join | length }}",
    ],
)
def test_a_template_is_first_rendered_by_a_helper(
    edge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A single operation cannot be interrupted here, and may take gigabytes."""

    def fail(*arguments: Any) -> str:
        raise AssertionError("rendered here")

    monkeypatch.setattr(ChatTemplate, "_render", fail)

    async def scenario() -> None:
        await edge.start()
        worker = SimpleNamespace(url="", sends_api_key=False)
        await edge.prompts.tokenizers.discover("bad", write_model(tmp_path, source), worker)
        assert not edge.prompts.tokenizers.get("bad").chat_template.is_bounded
        await edge.prompts.tokenizers.discover("usual", write_model(tmp_path, USUAL), worker)
        assert edge.prompts.tokenizers.get("usual").chat_template.is_bounded

    edge.run(scenario(), 60.0)


def test_a_chat_that_waits_while_another_takes_too_long_is_not_rendered_here(edge: Any, tmp_path: Path) -> None:
    """Nor are its messages after a boundary: many chats may wait for a thread."""

    async def scenario() -> None:
        await edge.start()
        tokenizer = Tokenizer.load(tmp_path, USUAL)
        template, request = tokenizer.chat_template, parse_body("chat", json.dumps(BODY).encode())
        assert template is not None
        assert request.messages is not None
        assert edge.prompts.tokenize(request, tokenizer).token_ids is not None
        template.seconds_max = 0.0
        for _ in range(2):
            assert edge.prompts.tokenize(request, tokenizer).token_ids is None
        assert not template.is_bounded
        template.seconds_max = 60.0
        assert edge.prompts.tokenize(request, tokenizer).token_ids is None
        inputs = TemplateInputs(request, b"", request.messages[0])
        assert BoundaryRenderer(tokenizer).render_new(NO_PLACEHOLDERS, inputs, request.messages) is None

    write_model(tmp_path, USUAL)
    edge.run(scenario())


def test_a_worker_is_not_asked_how_it_renders_a_template_that_may_take_long(edge: Any, tmp_path: Path) -> None:
    """Which version of transformers a worker has is found out by rendering here."""

    class Remote:
        async def tokenize_at(self, worker: Any, request_body: bytes) -> list[int]:
            raise AssertionError("asked")

    async def scenario() -> None:
        await edge.start()
        edge.prompts.tokenizers.remote = Remote()
        worker = SimpleNamespace(url="http://w", sends_api_key=False)
        await edge.prompts.tokenizers.discover("endless", write_model(tmp_path, ENDLESS), worker)
        assert edge.prompts.tokenizers.get("endless") is not None

    edge.run(scenario(), 60.0)


def test_a_chat_that_needs_too_much_memory_in_a_helper_costs_no_later_chat_its_prompt(tmp_path: Path) -> None:
    """Clients decide how long their messages are, so one such chat says nothing of the template."""
    template = "{% for m in messages %}{{ m.content | center(10**15 if m.content == 'long' else 10) }}{% endfor %}"
    folder = write_model(tmp_path, template)

    async def work(worker_pool: PromptWorkerPool) -> None:
        async def has_prompt(content: str) -> bool:
            body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
            task = ReadTask(Checkpoint(folder))
            body_to_read = BodyToRead((body,), "chat", find_target=Mock(), is_wanted=lambda: True)
            result = await worker_pool.read(body_to_read, task)
            return result.parsed_body.prompt.token_ids is not None

        assert [await has_prompt(content) for content in ("hello", "long", "hello")] == [True, False, True]

    run(PromptWorkerConfig(count=1), work)


def run(config: PromptWorkerConfig, work: Any) -> None:
    async def scenario() -> None:
        worker_pool = PromptWorkerPool(config, chat_template=None)
        try:
            await work(worker_pool)
            worker_pool.check_invariants()
            assert not worker_pool.waiting_bytes
        finally:
            worker_pool.processes.close()

    asyncio.run(scenario())


def test_keys_take_turns_at_the_helpers() -> None:
    async def work(worker_pool: PromptWorkerPool) -> None:
        order: list[str] = []
        gate = asyncio.Event()

        async def occupy() -> None:
            async with worker_pool.processes.acquire("a"):
                await gate.wait()
                raise RequestError("done", param=None)

        async def take(party: str) -> None:
            async with worker_pool.processes.acquire(party):
                order.append(party)

        holding = [asyncio.create_task(occupy()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(take("a")) for _ in range(24)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(take("b")), asyncio.create_task(take("c"))]
        await asyncio.sleep(0)
        waiting[3].cancel()
        gate.set()
        await asyncio.gather(*holding, *waiting, return_exceptions=True)
        assert order.count("a") == 23
        assert max(order.index("b"), order.index("c")) <= 4
        assert not any(process.is_busy for process in worker_pool.processes.processes)

    run(PromptWorkerConfig(count=2), work)


def test_one_key_leaves_room_for_bodies_of_others() -> None:
    body = (b"{" + b" " * (400 << 10) + b"}",)

    async def work(worker_pool: PromptWorkerPool) -> None:
        async def read(party: str) -> int:
            try:
                body_to_read = BodyToRead(body, "other", find_target=Mock(), is_wanted=lambda: True, tenant=party)
                await worker_pool.read(body_to_read, ReadTask())
            except RequestError as refused:
                return refused.status
            return 200

        first = [asyncio.create_task(read("a")) for _ in range(3)]
        await asyncio.sleep(0)
        worker_pool.check_invariants()
        second = [asyncio.create_task(read("b")), asyncio.create_task(read("c"))]
        assert await asyncio.gather(*first) == [200, 429, 429]
        assert await asyncio.gather(*second) == [200, 503]
        assert (worker_pool.counts["full_for_tenant"], worker_pool.counts["full"]) == (2, 1)

    run(PromptWorkerConfig(count=1, waiting_mb=1), work)
