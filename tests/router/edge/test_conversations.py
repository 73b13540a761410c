"""Conversations that return, over HTTP: what is cached is used, checked while serving, and given up when wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.routing import parse_body
from router.admin.metrics_page import build_page_families, render_metrics
from router.prompting import conversation_reader, parsed_body
from router.prompting.conversation_reader import ConversationReader
from tests.router.conversation_bodies import long_talk


async def load(edge: Any, folder: Path) -> ConversationReader:
    """A router before one worker, which has read the tokenizer, and tried out its template."""
    write_tokenizer(folder, 1024, 1 << 20)
    await edge.start()
    edge.prompts.conversations.cache.max_bytes = 8 << 20
    await edge.prompts.tokenizers._load("tiny", str(folder))
    await edge.worker(edge.reply(), max_model_len=10_000_000)
    conversations: ConversationReader = edge.prompts.conversations
    assert conversations.get_renderer("tiny") is not None
    return conversations


async def send(edge: Any, make_post: Any, messages: Any) -> int:
    answer = await edge.exchange(make_post(json.dumps({"model": "tiny", "messages": messages}).encode()))
    assert answer.startswith(b"HTTP/1.1 200")
    edge.prompts.conversations.cache.check_invariants()
    return len(edge.prompts.conversations.cache)


async def wait_for_checks(edge: Any) -> None:
    while edge.prompts._check_tasks:
        await asyncio.wait(edge.prompts._check_tasks._tasks, timeout=60)


@pytest.mark.parametrize("words", [20, 1000], ids=["light", "large"])
def test_continued_conversations_are_checked(
    edge: Any, make_post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """In a thread, and in a worker process where the body is large."""
    monkeypatch.setattr(conversation_reader, "CHECK_INTERVAL", 1)
    monkeypatch.setattr(conversation_reader, "CHECK_BYTES_PER_S", 1 << 40)

    async def scenario() -> None:
        conversations = await load(edge, tmp_path)
        talk: list[Any] = [{"role": "system", "content": "be brief " * 4 * words}, *long_talk(6)]
        for number in range(4):
            assert await send(edge, make_post, talk) == 1
            talk = [*talk, {"role": "assistant", "content": f"answer {number} " * words},
                    {"role": "user", "content": f"question {number} " * words}]  # fmt: skip
        await wait_for_checks(edge)
        assert conversations.cache.hits == conversations.check_count == 3
        assert conversations.difference_count == 0

    edge.run(scenario())


def test_a_wrong_prompt_ends_the_caching_and_is_told(
    edge: Any, make_post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conversation_reader, "CHECK_INTERVAL", 2)

    async def scenario() -> None:
        conversations = await load(edge, tmp_path)
        talk = long_talk(9)
        await send(edge, make_post, talk[:5])
        (conversation,) = conversations.cache._locations_by_conversation
        conversation.token_ids[3] += 1
        await send(edge, make_post, talk[:7])
        assert conversations.get_renderer("tiny") is not None
        await send(edge, make_post, talk)
        await wait_for_checks(edge)
        assert (conversations.check_count, conversations.difference_count) == (1, 1)
        assert conversations.get_renderer("tiny") is None
        assert await send(edge, make_post, talk) == 0, "nothing is cached any more"
        (row,) = edge.worker_list.describe_workers()["workers"]
        assert "differed from the whole" in row["conversation_cache"]["tiny"]
        page = render_metrics(build_page_families(edge.metrics_page)).decode()
        for name in ("checks", "differences"):
            assert f"blockcast_router_conversation_cache_{name}_total 1.0\n" in page

    edge.run(scenario())
    assert "model tiny: a prompt that was continued" in caplog.text


def test_conversations_of_a_replaced_tokenizer_are_read_with_the_new_one(
    edge: Any, make_post: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        conversations = await load(edge, tmp_path)
        assert await send(edge, make_post, long_talk(7)) == 1
        (late_conversation,) = conversations.cache._locations_by_conversation
        upgraded = tmp_path / "upgraded"
        upgraded.mkdir()
        write_tokenizer(upgraded, 4096, 1 << 20)
        tokenizers = edge.prompts.tokenizers
        tokenizers.forget("tiny")
        assert len(conversations.cache) == 0
        assert conversations.problems == {}, "a template that is not tried would keep its problem"
        late_body = json.dumps({"model": "tiny", "messages": long_talk(7)}).encode()
        conversations.cache.store(late_conversation, late_body)  # its body was still being read
        await tokenizers.discover("tiny", str(upgraded), SimpleNamespace(url="", sends_api_key=False))
        assert len(conversations.cache) == 0
        assert tokenizers.loaded_by_model["tiny"].checkpoint.folder == str(upgraded)
        assert await send(edge, make_post, long_talk(9)) == 1
        assert conversations.cache.hits == 0
        assert conversations.problems == {}

    edge.run(scenario())


def test_a_conversation_that_cannot_be_cached_is_still_routed_by_its_prompt(
    edge: Any, make_post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await load(edge, tmp_path)
        reader, body = edge.prompts, json.dumps({"messages": long_talk(7)}).encode()
        arguments = parse_body("chat", body), reader.tokenizers.get("tiny"), None, body
        renderer = reader.conversations.get_renderer("tiny")
        expected_ids = reader.tokenize(*arguments, renderer).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(parsed_body, "cache_conversation", Mock(side_effect=KeyError("fault")))
            prompt = reader.tokenize(*arguments, renderer)
        assert prompt.conversation is None
        assert prompt.token_ids == expected_ids
        assert prompt.token_ids
        assert await send(edge, make_post, long_talk(7)) == 1, "the next one is cached"

    edge.run(scenario())
    assert "could not be cached: KeyError: 'fault'" in caplog.text


def test_a_template_that_may_not_be_cut_is_told(edge: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        write_tokenizer(tmp_path, 1024, 1 << 20)
        await edge.start()
        edge.prompts.conversations.cache.max_bytes = 8 << 20
        template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(template)
        await edge.prompts.tokenizers._load("tiny", str(tmp_path))
        await edge.worker(edge.reply())
        assert edge.prompts.conversations.get_renderer("tiny") is None
        (row,) = edge.worker_list.describe_workers()["workers"]
        assert row["conversation_cache"]["tiny"] == "no prompt of a conversation begins with an earlier one"

    edge.run(scenario())
