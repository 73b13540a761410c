"""What `/v1/messages` answers, made of a choice's pieces: events in their order, the same text, stop reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from engine.output.choice import Choice
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation, make_generation
from engine.protocol.messages import MessagesFormatter
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import ParsedRequest
from engine.types import FinishReason, SequenceOutput
from prompts import RequestError
from prompts.chat_completions import ChatRequest

WORDS = ["one", " two", " STOP", ' "', "\u00e9"]
LIMITS = ModelLimits(max_model_len=100, vocab_size=len(WORDS))


def generation(stream: bool) -> Generation:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.decoder = decoders.Fuse()
    body = ChatRequest(messages=[{"role": "user"}], max_tokens=20, stop=["STOP"], stream=stream)
    factory = DetokenizerFactory(tokenizer)
    parsed_request = ParsedRequest(body, [[1, 2, 3]])
    return make_generation(parsed_request, id="msg_1", request_prefix="u", model="m", limits=LIMITS, factory=factory)


def push_all(
    message_generation: Generation, ids: list[int], finish: FinishReason | None, cuts: int
) -> tuple[Choice, list[Any]]:
    (choice,) = message_generation.choices
    pieces = []
    for start in range(0, len(ids), cuts):
        last = start + cuts >= len(ids)
        output = SequenceOutput(
            request_id="u-0", token_ids=ids[start : start + cuts], cached_tokens=2 if start == 0 else None,
            finish_reason=finish if last else None,
        )  # fmt: skip
        pieces.append(choice.push(output))
        if choice.finish_reason is not None:
            break
    return choice, pieces


def events(data: bytes) -> list[dict[str, Any]]:
    parsed_events = []
    for block in data.decode().strip().split("\n\n"):
        name, body = block.split("\n")
        parsed_events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {parsed_events[-1]['type']}"
    return parsed_events


@pytest.mark.parametrize("cuts", [1, 2, 9])
@pytest.mark.parametrize(
    ("ids", "finish", "reason", "sequence"),
    [
        ([0, 1, 3, 4], FinishReason.LENGTH, "max_tokens", None),
        ([0, 1, 2, 4], FinishReason.LENGTH, "stop_sequence", "STOP"),
        ([0, 4, 1], FinishReason.STOP, "end_turn", None),
        ([1], FinishReason.STOP, "end_turn", None),
    ],
)
def test_a_stream_is_the_message_in_the_order_of_events(
    ids: list[int], finish: FinishReason, reason: str, sequence: str | None, cuts: int
) -> None:
    whole_generation = generation(stream=False)
    push_all(whole_generation, ids, finish, cuts)
    message = json.loads(MessagesFormatter(whole_generation).format_response())
    assert (message["type"], message["role"], message["id"], message["model"]) == ("message", "assistant", "msg_1", "m")
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["usage"]["cache_read_input_tokens"] == 2
    assert message["usage"]["input_tokens"] == 1

    whole_generation = generation(stream=True)
    answer = MessagesFormatter(whole_generation)
    choice, pieces = push_all(whole_generation, ids, finish, cuts)
    stream_events = events(b"".join(answer.format_delta(choice, piece) for piece in pieces) + answer.format_end())
    names = [event["type"] for event in stream_events]
    deltas = [event["delta"]["text"] for event in stream_events if event["type"] == "content_block_delta"]
    order = ["message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop"]
    assert names == [*order, "message_delta", "message_stop"]
    assert "".join(deltas) == message["content"][0]["text"]
    assert stream_events[0]["message"]["content"] == []
    begin = stream_events[0]["message"]
    assert (begin["stop_reason"], begin["stop_sequence"]) == (None, None), "even if all tokens came at once"
    assert stream_events[0]["message"]["usage"]["cache_read_input_tokens"] == 2
    assert stream_events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert stream_events[-2]["usage"] == message["usage"]


def test_a_stream_that_breaks_off_ends_with_an_error_of_this_api() -> None:
    error_bytes = MessagesFormatter(generation(stream=True)).format_error(RequestError("late", param=None, status=504))
    assert events(error_bytes) == [{"type": "error", "error": {"type": "timeout_error", "message": "late"}}]
