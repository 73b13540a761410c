"""`engine serve` as the official `anthropic` client sees it: answers, streams, errors, keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from programs import call

pytestmark = pytest.mark.live

SYSTEM = "You are a helpful assistant that reads files. " * 12
TOOLS: Any = [
    {"name": "read", "description": "Read a file", "input_schema": {"type": "object", "properties": {"path": {}}}}
]
TURNS: Any = [
    {"role": "user", "content": "What is in a.txt?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.txt"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "A poem."}]},
]
EVENTS = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=engine.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    given = {"system": SYSTEM, "messages": TURNS, "tools": TOOLS, "max_tokens": 12, **more}
    return client.messages.create(model="tiny", extra_body={"temperature": 0}, **given)


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = ask(client)
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.id.startswith("msg_")
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 12
    assert ask(client, max_tokens=1, stop_sequences=["never said"]).usage.output_tokens == 1


def test_a_stream_spells_the_same_text_in_the_order_of_events(client: anthropic.Anthropic) -> None:
    whole = ask(client, max_tokens=30)
    with client.messages.stream(
        model="tiny", system=SYSTEM, messages=TURNS, tools=TOOLS, max_tokens=30, extra_body={"temperature": 0}
    ) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert [name for name in names if name not in ("content_block_delta", "text")] == EVENTS
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_what_was_reused_is_told_and_the_parts_are_the_whole(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="tiny", system=SYSTEM, messages=TURNS, tools=TOOLS)
    ask(client)
    answer = ask(client, system=[{"type": "text", "text": "x-anthropic-billing-header: 7"},
                                 {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}])  # fmt: skip
    usage = answer.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 0.8 * count.input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


def test_errors_have_the_form_of_this_api(client: anthropic.Anthropic, engine: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, max_tokens=10**6)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=TURNS, max_tokens=3)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]"):
        ask(client, messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, image]}])
    status, _, body = call(engine.url + "/v1/messages", {"max_tokens": 3, "messages": [{"role": "bob", "content": ""}]})
    assert status == 400
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": body["error"]["message"]}}
    assert "messages[0].role" in body["error"]["message"]


def test_the_key_may_come_in_the_header_of_this_api(start_engine: Any) -> None:
    url = start_engine("--api-key", "k1").url
    with anthropic.Anthropic(base_url=url, api_key="k1", max_retries=0) as client:
        assert client.messages.count_tokens(model="tiny", messages=TURNS).input_tokens > 0
    wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as refused:
        wrong.messages.count_tokens(model="tiny", messages=TURNS)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
