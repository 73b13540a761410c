"""Thoughts, texts and calls as blocks: in their order, one open at a time, the same whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from engine.http import response_store
from engine.http.generate import _store_response
from engine.http.response_store import ResponseStore
from engine.output.choice import Choice
from engine.output.content_blocks import ContentBlocks
from engine.output.delta_builder import ChoiceDelta, ToolCallDelta
from engine.output.parser import OutputParser, OutputParserConfig
from engine.protocol.generation import Generation
from engine.protocol.logprobs import LogprobFormatter
from engine.protocol.messages import MessagesFormatter
from engine.protocol.parsed_request import ResponseContext
from engine.protocol.responses import ResponsesFormatter
from engine.types import SamplingParams, TokenLogprobs
from prompts import RequestError
from prompts.chat_completions import ChatRequest
from prompts.responses import ClientTool

ASKED = ResponseContext(
    messages=b'[{"role":"user","content":"q"}]',
    echoed_fields=b'{"tools":[1]}',
    should_store=True,
    previous_response_id=None,
)


def piece(text: str = "", reasoning: str = "", calls: Any = ()) -> ChoiceDelta:
    return ChoiceDelta(text, reasoning, list(calls))


PIECES = [
    piece(reasoning="I "), piece(reasoning="think"), piece("Let me"), piece(" see"),
    piece(calls=[ToolCallDelta(0, '{"a"', "f", "call_1")]),
    piece(calls=[ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "g", "call_2")]),
]  # fmt: skip


class Factory:
    def create(self, *_: object) -> None:
        return None


def generation() -> tuple[Generation, Choice]:
    choice = Choice(0, SamplingParams(), Factory(), keeps_text=True)  # type: ignore[arg-type]
    choice.reasoning_texts, choice.texts = ["I ", "think"], ["Let me", " see"]
    choice.call_parts = [(ToolCallDelta(0, '{"a": 1}', "f", "call_1"), []), (ToolCallDelta(1, "{}", "g", "call_2"), [])]
    choice.finish_reason, choice.cached_tokens, choice.completion_tokens, choice.reasoning_tokens = "stop", 2, 9, 4
    body = ChatRequest(messages=[{"role": "user"}])
    new_generation = Generation(id="x_1", model="m", body=body, prompts=[[1, 2, 3]], n=1, choices=[choice], requests=[])
    return new_generation, choice


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in data.decode().strip().split("\n\n")]


def test_one_block_is_open_at_a_time() -> None:
    blocks = ContentBlocks()
    events = [event for delta in PIECES for event in blocks.push(delta)] + blocks.finish()
    open_indices: list[int] = []
    for action, block, _ in events:
        if action == "start":
            assert not open_indices
            open_indices.append(block.index)
        else:
            assert open_indices == [block.index]
            if action == "stop":
                open_indices.pop()
    assert [(b.kind, b.text, b.name) for b in blocks.blocks] == [
        ("reasoning", "I think", ""), ("text", "Let me see", ""), ("call", '{"a": 1}', "f"), ("call", "{}", "g"),
    ]  # fmt: skip


def test_the_end_of_a_call_belongs_to_it_though_text_comes_in_the_same_delta() -> None:
    """Several tokens come in one delta when a client reads slowly. The end became a call without a name."""
    blocks = ContentBlocks()
    blocks.push(piece(calls=[ToolCallDelta(0, '{"a"', "f", "call_1")]))
    blocks.push(piece(" So", calls=[ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "g", "call_2")]))
    assert [(block.kind, block.name, block.text) for block in blocks.blocks] == [
        ("call", "f", '{"a": 1}'), ("text", "", " So"), ("call", "g", "{}"),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["</function>\n</tool_call>", ""])
def test_text_inside_of_a_call_does_not_cut_the_call(end: str) -> None:
    """The arguments after it became a second call without a name."""
    types = {"f": {"a": ("integer",), "b": ("integer",)}}
    parser = OutputParser(OutputParserConfig(call_format="qwen3_coder", parameter_types=types), SamplingParams())
    first, second = (f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 1), ("b", 2)))
    blocks = ContentBlocks()
    for char in f"Hm.<tool_call>\n<function=f>\nI see{first}{second}{end}":
        parser.push(char, may_stop=True)
        blocks.push(parser.build_delta())
    parser.finish()
    blocks.push(parser.build_delta())
    arguments = '{"a": 1, "b": 2' + ("}" if end else "")
    assert [(block.kind, block.name, block.text) for block in blocks.blocks] == [
        ("text", "", "Hm."), ("call", "f", arguments), ("text", "", "\nI see"),
    ]  # fmt: skip


def test_messages() -> None:
    new_generation, choice = generation()
    message = json.loads(MessagesFormatter(new_generation).format_response())
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2] == {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}
    answer = MessagesFormatter(new_generation)
    stream_events = events(b"".join(answer.format_delta(choice, delta) for delta in PIECES) + answer.format_end())
    deltas: dict[int, list[Any]] = {}
    for event in stream_events:
        if event["type"] == "content_block_delta":
            deltas.setdefault(event["index"], []).append(event["delta"])
    assert [d["type"] for d in deltas[0]] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert "".join(d["partial_json"] for d in deltas[2]) == '{"a": 1}'
    starts = [event["content_block"] for event in stream_events if event["type"] == "content_block_start"]
    assert starts[1] == {"type": "text", "text": ""}
    assert starts[2] == {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}


def test_responses() -> None:
    new_generation, choice = generation()
    response = json.loads(ResponsesFormatter(new_generation, ASKED).format_response())
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["tools"] == [1]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    answer = ResponsesFormatter(new_generation, ASKED)
    stream_events = events(b"".join(answer.format_delta(choice, delta) for delta in PIECES) + answer.format_end())
    assert [event["sequence_number"] for event in stream_events] == list(range(len(stream_events)))
    items = {
        event["output_index"]: event["item"] for event in stream_events if event["type"] == "response.output_item.done"
    }
    assert list(items.values()) == stream_events[-1]["response"]["output"]

    def bare(items: list[Any]) -> list[Any]:
        return [{k: v for k, v in item.items() if k != "id"} for item in items]

    assert bare(stream_events[-1]["response"]["output"]) == bare(response["output"])
    arguments = [
        e["delta"]
        for e in stream_events
        if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 2
    ]
    assert "".join(arguments) == '{"a": 1}'
    stored_messages = json.loads(answer.encode_messages())
    assert stored_messages[0] == {"role": "user", "content": "q"}
    assert [call["id"] for call in stored_messages[1]["tool_calls"]] == ["call_1", "call_2"]


class TokenTexts:
    """Token n is spelled `n`."""

    def token_bytes(self, token_id: int) -> bytes:
        return str(token_id).encode()


def test_responses_have_the_logprobs_of_their_text() -> None:
    """Those of tokens without text come with the next text, except before reasoning and calls; whole as streamed."""

    def read_pieces(answer: ResponsesFormatter) -> Iterator[ChoiceDelta]:
        for token_id, delta in enumerate([*PIECES[:3], piece(), *PIECES[3:]]):
            delta = structs.replace(delta, logprobs=[TokenLogprobs.pack(token_id, -1.0, 1, [(token_id, -1.0)])])
            list(answer.format_logprobs(choice, delta))
            yield delta

    new_generation, choice = generation()
    formatter = LogprobFormatter(TokenTexts())  # type: ignore[arg-type]
    answer = ResponsesFormatter(new_generation, ASKED, formatter)
    data = b"".join(answer.format_delta(choice, delta) for delta in read_pieces(answer))
    stream_events = events(data + answer.format_end())
    deltas = [event for event in stream_events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["2"], ["3", "4"]]
    entry = {"token": "2", "logprob": -1.0, "bytes": [50]}
    assert deltas[0]["logprobs"] == [{**entry, "top_logprobs": [entry]}]
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert stream_events[-1]["response"]["output"][1]["content"][0]["logprobs"] == logprobs
    store = ResponseStore()
    _store_response(Mock(response_store=store), answer)
    (stored_part,) = json.loads(store.get(new_generation.id, "").response)["output"][1]["content"]
    assert (stored_part["text"], stored_part["logprobs"]) == ("".join(event["delta"] for event in deltas), None)
    whole_answer = ResponsesFormatter(new_generation, ASKED, formatter)
    list(read_pieces(whole_answer))
    assert json.loads(whole_answer.format_response())["output"][1]["content"][0]["logprobs"] == logprobs


TOOLS = {"f": ClientTool("read", "fs"), "g": ClientTool("apply_patch", None, True)}
CALLS = [
    piece(calls=[ToolCallDelta(0, "{}", "f", "c1")]), piece(calls=[ToolCallDelta(1, '{"input": "a', "g", "c2")]),
    piece(calls=[ToolCallDelta(1, '\\')]), piece(calls=[ToolCallDelta(1, 'nb"}')]), piece("so"),
]  # fmt: skip


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_calls_are_told_as_their_client_knows_the_tools(finish: str) -> None:
    context = structs.replace(ASKED, tools=TOOLS)
    new_generation, choice = generation()
    choice.reasoning_texts, choice.texts, choice.finish_reason = [], ["so"], finish
    choice.call_parts = [
        (ToolCallDelta(0, "{}", "f", "c1"), []),
        (ToolCallDelta(1, '{"input": "a\\nb"}', "g", "c2"), []),
    ]
    answer = ResponsesFormatter(new_generation, context)
    stream_events = events(b"".join(answer.format_delta(choice, delta) for delta in CALLS) + answer.format_end())
    read, patch, message = stream_events[-1]["response"]["output"]
    del read["id"], patch["id"], message["id"]
    assert read == {
        "type": "function_call", "status": "completed", "call_id": "c1", "name": "read", "namespace": "fs",
        "arguments": "{}",
    }  # fmt: skip
    assert patch == {
        "type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "a\nb"
    }  # fmt: skip
    status = "incomplete" if finish == "length" else "completed"
    assert (message["status"], stream_events[-1]["response"]["status"]) == (status, status)
    assert stream_events[-1]["type"] == f"response.{status}"
    last = [event["item"] for event in stream_events if event["type"] == "response.output_item.done"][-1]
    assert last["status"] == status
    deltas = [event["delta"] for event in stream_events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "\nb"]
    (done_event,) = [event for event in stream_events if event["type"] == "response.custom_tool_call_input.done"]
    assert (done_event["input"], done_event["output_index"]) == ("a\nb", 1)
    (done_event,) = [event for event in stream_events if event["type"] == "response.function_call_arguments.done"]
    assert done_event["name"] == "read"
    response = json.loads(ResponsesFormatter(new_generation, context).format_response())
    assert {item["type"]: item.get("input", item.get("namespace")) for item in response["output"][1:]} == {
        "function_call": "fs", "custom_tool_call": "a\nb"
    }  # fmt: skip
    stored_messages = json.loads(answer.encode_messages())
    assert [call["function"]["name"] for call in stored_messages[1]["tool_calls"]] == ["f", "g"], (
        "as the model is shown them"
    )


def test_items_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response was decoded once for each of its items, 9 s for 5,000 calls in a row."""
    decoder = Mock(wraps=response_store._output_decoder)
    monkeypatch.setattr(response_store, "_output_decoder", decoder)
    new_generation, _ = generation()
    new_generation.id, store = "resp_0af", ResponseStore(5_000)
    answer = ResponsesFormatter(new_generation, ASKED)
    response = json.loads(answer.format_response())
    store.put(answer.make_final_response(), b"[]")
    items = asyncio.run(store.get_items({item["id"]: "input[0].id" for item in response["output"]}))
    assert [json.loads(item) for item in items.values()] == response["output"]
    assert decoder.decode.call_count == 1
    for name in ("rs_0af0009", "rs_ffff0000", "rs_", ""):
        with pytest.raises(RequestError, match=r"^input\[0\]\.id: no item") as error_info:
            asyncio.run(store.get_items({name: "input[0].id"}))
        assert error_info.value.status == 404


def test_others_are_served_between_two_responses_that_are_searched_for_items() -> None:
    """250 large responses, named by one body, held the event loop .45 s."""
    store, param_by_name = ResponseStore(1 << 20), {}
    for number in range(20):
        new_generation, _ = generation()
        new_generation.id = f"resp_{number:03x}"
        answer = ResponsesFormatter(new_generation, ASKED)
        response = json.loads(answer.format_response())
        store.put(answer.make_final_response(), b"[]")
        param_by_name[response["output"][0]["id"]] = f"input[{number}].id"

    async def scenario() -> int:
        task = asyncio.ensure_future(store.get_items(param_by_name))
        turn_count = 0
        while not task.done():
            await asyncio.sleep(0)
            turn_count += 1
        assert len(await task) == 20
        return turn_count

    assert asyncio.run(scenario()) >= 20


def test_a_response_that_breaks_off_has_failed() -> None:
    new_generation, choice = generation()
    answer = ResponsesFormatter(new_generation, ASKED)
    answer.format_delta(choice, PIECES[2])
    (failed_event,) = events(answer.format_error(RequestError("late", param=None, status=504)))
    assert failed_event["type"] == "response.failed"
    assert failed_event["response"]["error"]["message"] == "late"
    assert failed_event["response"]["output"][0]["status"] == "incomplete"


def test_a_response_that_fails_before_its_first_token_was_created() -> None:
    """OpenAI's client refuses a stream whose first event is another one."""
    new_generation, _ = generation()
    stream_events = events(ResponsesFormatter(new_generation, ASKED).format_error(RequestError("late", param=None)))
    assert [event["type"] for event in stream_events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in stream_events] == [0, 1, 2]


def test_the_store_keeps_within_its_bytes_and_drops_what_was_not_used() -> None:
    new_generation, _ = generation()
    store = ResponseStore(5_000)
    for i in range(8):
        new_generation.id = f"resp_{i}"
        store.put(ResponsesFormatter(new_generation, ASKED).make_final_response(), b"x" * 1_000)
        store.check_invariants()
        store.get("resp_0", "response_id")
    assert store.get("resp_7", "response_id").messages
    with pytest.raises(RequestError, match="newer ones took its place"):
        store.get("resp_2", "previous_response_id")
    store.delete("resp_0")
    store.check_invariants()
    new_generation.id = "resp_huge"
    store.put(ResponsesFormatter(new_generation, ASKED).make_final_response(), b"x" * 9_000)
    with pytest.raises(RequestError):
        store.get("resp_huge", "response_id")
    store.check_invariants()
