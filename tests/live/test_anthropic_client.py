"""`engine serve`, and `router run` in front of it, as the official `anthropic` client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from programs import Program, call, wait_until

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
def router(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    program = Program(log, "router", "run", engine.url, "--port", "0", "--api-key", "k1")
    try:
        program.await_ready()
        wait_until(
            lambda: call(f"{program.url}/workers")[2]["workers"][0].get("tokenizer") == {"tiny": "loaded"},
            "a tokenizer",
        )
        wait_until(lambda: call(f"{program.url}/readyz")[0] == 200, "the cache's view")
        yield program
    finally:
        program.close()


@pytest.fixture(scope="module", params=["engine", "router"])
def client(request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    url = request.getfixturevalue(request.param).url
    with anthropic.Anthropic(base_url=url, api_key="k1", max_retries=0, timeout=60) as client:
        yield client


def create_message(client: anthropic.Anthropic, **extra_fields: Any) -> anthropic.types.Message:
    fields = {"system": SYSTEM, "messages": TURNS, "tools": TOOLS, "max_tokens": 12, **extra_fields}
    return client.messages.create(model="tiny", extra_body={"temperature": 0}, **fields)


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = create_message(client)
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.id.startswith("msg_")
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 12
    assert create_message(client, max_tokens=1, stop_sequences=["never said"]).usage.output_tokens == 1


def test_a_message_of_no_tokens_caches_its_prompt(client: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "Only this turn is to be cached. " * 10}]
    warmed = create_message(client, max_tokens=0, messages=turns)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    usage = create_message(client, max_tokens=1, messages=turns).usage
    assert (usage.cache_read_input_tokens or 0) > 4 * usage.input_tokens


def test_a_stream_has_its_events_in_their_order(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="tiny", system=SYSTEM, messages=TURNS, tools=TOOLS, max_tokens=30, extra_body={"temperature": 0}
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    names = [event.type for event in events]
    assert [name for name in names if name not in ("content_block_delta", "text")] == EVENTS
    assert final.content[0].text == "".join(event.text for event in events if event.type == "text")  # type: ignore[union-attr]
    assert final.stop_reason in ("end_turn", "max_tokens")
    assert 0 < final.usage.output_tokens <= 30


def test_what_was_reused_is_told_and_the_parts_are_the_whole(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="tiny", system=SYSTEM, messages=TURNS, tools=TOOLS)
    create_message(client)
    answer = create_message(client, system=[{"type": "text", "text": "x-anthropic-billing-header: 7"},
                                 {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}])  # fmt: skip
    usage = answer.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 0.8 * count.input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


def test_errors_have_the_form_of_this_api(client: anthropic.Anthropic, engine: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as error_info:
        create_message(client, stop_sequences=[""])
    assert error_info.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=TURNS, max_tokens=3)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]"):
        create_message(client, messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, image]}])
    if str(client.base_url).rstrip("/") != engine.url:
        return
    status, _, body = call(engine.url + "/v1/messages", {"max_tokens": 3, "messages": [{"role": "bob", "content": ""}]})
    assert status == 400
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": body["error"]["message"]}}
    assert "messages[0].role" in body["error"]["message"]


def test_the_key_may_come_in_the_header_of_this_api(start_engine: Any) -> None:
    url = start_engine("--api-key", "k1").url
    with anthropic.Anthropic(base_url=url, api_key="k1", max_retries=0) as client:
        assert client.messages.count_tokens(model="tiny", messages=TURNS).input_tokens > 0
    wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as error_info:
        wrong.messages.count_tokens(model="tiny", messages=TURNS)
    assert error_info.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_the_router_predicts_what_the_engine_reports(router: Program) -> None:
    turns: list[Any] = [{"role": "user", "content": "First " + SYSTEM}]
    with anthropic.Anthropic(base_url=router.url, api_key="k1", max_retries=0) as client:
        for turn in range(4):
            if turn == 2:
                turns.insert(1, {"role": "system", "content": "Be short."})
            raw = client.messages.with_raw_response.create(
                model="tiny", system=f"x-anthropic-billing-header: {turn}\n{SYSTEM}", messages=turns, tools=TOOLS,
                max_tokens=6, stream=False,
            )  # fmt: skip
            answer = raw.parse()
            assert int(raw.headers["x-blockcast-predicted-cached-tokens"]) == answer.usage.cache_read_input_tokens
            if turn in (1, 3):
                assert answer.usage.cache_read_input_tokens > 0
            blocks = [{"type": "text", "text": block.text} for block in answer.content if block.type == "text"]
            turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "And then?"}]
            wait_until(
                lambda: figures(router)["reported_cached_tokens"] == figures(router)["predicted_cached_tokens"], "equal"
            )
    _, _, explanation = call(
        f"{router.url}/route?path=%2Fv1%2Fmessages", {"model": "tiny", "messages": turns, "max_tokens": 4}
    )
    assert explanation["tokenized"] is True


def figures(router: Program) -> dict[str, Any]:
    worker_row: dict[str, Any] = call(f"{router.url}/workers")[2]["workers"][0]
    return worker_row


def test_the_routers_own_errors_have_the_form_of_this_api(router: Program) -> None:
    wrong = anthropic.Anthropic(base_url=router.url, api_key="no", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as error_info:
        wrong.messages.create(model="tiny", messages=TURNS, max_tokens=3)
    assert error_info.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    authorized_client = anthropic.Anthropic(base_url=router.url, api_key="k1", max_retries=0)
    with authorized_client, pytest.raises(anthropic.NotFoundError) as unknown:
        authorized_client.messages.create(model="nobody", messages=TURNS, max_tokens=3)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
