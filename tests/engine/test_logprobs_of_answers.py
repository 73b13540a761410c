"""Logprobs in answers: their JSON, in slices between which the loop serves others, and within a bound."""

from __future__ import annotations

import asyncio
import json
import math
import tracemalloc
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.core_messages import StepOutputs
from engine.http.generate import POSITIONS_PER_PAUSE, ChoiceUpdater, format_logprobs
from engine.http.metrics import ServerMetrics
from engine.output.detokenizer import DetokenizerFactory
from engine.process.client import TOKENS_PER_PAUSE, EngineClient, OutputStream, merge_outputs
from engine.process.logprob_budget import LogprobBudget, LogprobShare
from engine.protocol.chat import ChatFormatter
from engine.protocol.completions import CompletionFormatter
from engine.protocol.generation import Generation, make_generation
from engine.protocol.logprobs import LOGPROB_FLOOR, LogprobFormatter
from engine.protocol.params import ModelLimits, is_echo_only_request
from engine.protocol.parsed_request import ParsedRequest, ResponseContext
from engine.protocol.responses import ResponsesFormatter
from engine.tiny.tokenizer import build_tokenizer
from engine.types import FinishReason, SequenceOutput, TokenLogprobs
from prompts import ChatRequest, CompletionRequest, RequestError, parse_chat, parse_completion

FACTORY = DetokenizerFactory(build_tokenizer(1024))
LIMITS = ModelLimits(max_model_len=100_000, vocab_size=1024)
PROMPT = [5, 6, 7]

logprobs = st.one_of(st.floats(-20, 0, width=32), st.just(-math.inf))
token_ids = st.integers(0, 1023)
positions = st.builds(
    TokenLogprobs.pack, token_ids, logprobs, st.integers(1, 99), st.lists(st.tuples(token_ids, logprobs), max_size=3)
)


def token_text(token_id: int) -> str:
    return FACTORY.token_bytes(token_id).decode("utf-8", "replace")


def floor_logprob(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)


def in_chat(token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(token_id),
        "logprob": floor_logprob(logprob),
        "bytes": list(FACTORY.token_bytes(token_id)),
    }


def generate(body: ChatRequest | CompletionRequest) -> Generation:
    parsed_request = ParsedRequest(body, [PROMPT], is_prompt_only=is_echo_only_request(body))
    return make_generation(parsed_request, id="i", request_prefix="u", model="m", limits=LIMITS, factory=FACTORY)


def chat(**fields: Any) -> tuple[Generation, ChatFormatter]:
    body = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], "logprobs": True, **fields}).encode())
    generation = generate(body)
    return generation, ChatFormatter(generation, body, FACTORY)


def completion(**fields: Any) -> tuple[Generation, CompletionFormatter]:
    body = parse_completion(json.dumps({"prompt": PROMPT, "logprobs": 3, **fields}).encode())
    generation = generate(body)
    return generation, CompletionFormatter(generation, body, FACTORY, ["abc" if body.echo else ""])


def outputs_of(scores: list[TokenLogprobs], prompt: list[TokenLogprobs | None] | None) -> list[SequenceOutput]:
    outputs = [SequenceOutput(request_id="u-0", token_ids=[s.token_id], logprobs=[s]) for s in scores]
    outputs[0].prompt_logprobs = prompt
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


@given(scores=st.lists(positions, min_size=1, max_size=5), prompt=st.lists(positions, max_size=4))
def test_a_chats_logprobs_are_those_of_the_engine(scores: list[TokenLogprobs], prompt: list[TokenLogprobs]) -> None:
    generation, answer = chat(top_logprobs=3, prompt_logprobs=3)
    for output in outputs_of(scores, [None, *prompt]):
        piece = generation.choices[0].push(output)
        list(answer.format_logprobs(generation.choices[0], piece))
    response = json.loads(answer.format_response())
    assert response["choices"][0]["logprobs"]["content"] == [
        in_chat(s.token_id, s.logprob) | {"top_logprobs": [in_chat(*other) for other in s.top_logprobs]} for s in scores
    ]
    assert response["prompt_logprobs"] == [None, *map(in_prompt, prompt)]


def in_prompt(score: TokenLogprobs) -> dict[str, Any]:
    ranked_scores = [(score.token_id, score.logprob, score.rank)]
    ranked_scores += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top_logprobs, 1)]
    return {
        str(token_id): {"logprob": floor_logprob(logprob), "rank": rank, "decoded_token": token_text(token_id)}
        for token_id, logprob, rank in ranked_scores
    }


@pytest.mark.parametrize("stream", [False, True])
@given(scores=st.lists(positions, min_size=1, max_size=5), prompt=st.lists(positions, max_size=4))
def test_a_completions_logprobs_begin_with_the_echoed_prompt(
    stream: bool, scores: list[TokenLogprobs], prompt: list[TokenLogprobs]
) -> None:
    generation, answer = completion(echo=True, stream=stream)
    stream_bytes = b""
    for output in outputs_of(scores, [None, *prompt]):
        piece = generation.choices[0].push(output)
        list(answer.format_logprobs(generation.choices[0], piece))
        if stream:
            stream_bytes += answer.format_delta(generation.choices[0], piece)
    if stream:
        chunks = [json.loads(event[6:]) for event in stream_bytes.split(b"\n\n") if event]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert len(parts) == len(scores)
        logprob_lists = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        logprob_lists = json.loads(answer.format_response())["choices"][0]["logprobs"]
    every: list[TokenLogprobs | None] = [None, *prompt, *scores]
    tokens = [token_text(PROMPT[0] if s is None else s.token_id) for s in every]
    assert logprob_lists["tokens"] == tokens
    assert logprob_lists["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert logprob_lists["token_logprobs"] == [None if s is None else floor_logprob(s.logprob) for s in every]
    assert logprob_lists["top_logprobs"] == [
        None if s is None else {token_text(i): floor_logprob(p) for i, p in [(s.token_id, s.logprob), *s.top_logprobs]}
        for s in every
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_has_no_token(stream: bool) -> None:
    """Its ids, the usage of its chunks and its end told of the token that the step of the prompt draws."""
    usage_options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    generation, answer = completion(
        echo=True, max_tokens=0, stop=["a"], return_token_ids=True, stream=stream, **usage_options
    )
    output = SequenceOutput(
        request_id="u-0", token_ids=[9], finish_reason=FinishReason.STOP, stop_token_id=9, logprobs=[score(1)],
        prompt_logprobs=[None, score(1), score(1)],
    )  # fmt: skip

    def read() -> list[dict[str, Any]]:
        ((choice, delta),) = ChoiceUpdater(Mock(metrics=ServerMetrics()), generation, Mock()).apply([output])
        list(answer.format_logprobs(choice, delta))
        if stream:
            events = answer.format_delta(choice, delta) + answer.format_end()
            return [json.loads(event[6:]) for event in events.split(b"\n\n")[:-2]]
        return [json.loads(answer.format_response())]

    part, *rest = read()
    assert [chunk["usage"]["completion_tokens"] for chunk in (part, *rest)] == [0] * (1 + stream)
    (choice,) = part["choices"]
    assert (choice["text"], choice["token_ids"], len(choice["logprobs"]["tokens"])) == ("abc", [], 3)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def score(top: int) -> TokenLogprobs:
    return TokenLogprobs.pack(9, -1.0, 1, [(i, -2.0) for i in range(top)])


@pytest.mark.parametrize(("samples", "tokens", "prompt"), [(16, 200, 0), (1, 1, 3000), (2, 500, 1000), (128, 30, 0)])
def test_the_loop_goes_on_while_many_logprobs_are_formatted(samples: int, tokens: int, prompt: int) -> None:
    generation, answer = completion(n=samples, max_tokens=tokens, logprobs=20, prompt_logprobs=20)
    pieces = [
        (choice, choice.push(SequenceOutput(
            request_id="u", token_ids=[9] * tokens, logprobs=[score(20)] * tokens, prompt_logprobs=[score(20)] * prompt,
        )))
        for choice in generation.choices
    ]  # fmt: skip
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting_task = asyncio.ensure_future(count_turns())
        await format_logprobs(answer, pieces)
        counting_task.cancel()

    asyncio.run(main())
    assert turns >= samples * (tokens + prompt) // (2 * POSITIONS_PER_PAUSE)
    assert not any(piece.logprobs or piece.prompt_logprobs for _, piece in pieces)


def test_logprobs_count_until_they_are_formatted_and_gone() -> None:
    """Those of a long answer were released while the answer still had them."""
    generation, answer = completion(n=2, logprobs=1)
    output = SequenceOutput(request_id="u", token_ids=[9] * 500, logprobs=[score(1)] * 500)
    pieces = [(choice, choice.push(structs.replace(output))) for choice in generation.choices]
    assert asyncio.run(format_logprobs(answer, pieces)) == 2 * 500 * 2
    assert not any(piece.logprobs for _, piece in pieces)


class Client:
    def __init__(self) -> None:
        self.aborted_names: list[str] = []

    def abort(self, names: list[str]) -> None:
        self.aborted_names += names


def make_output(name: str, tokens: int) -> SequenceOutput:
    return SequenceOutput(request_id=name, token_ids=[1] * tokens, logprobs=[score(1)] * tokens)


@pytest.mark.parametrize(("request_max", "total_max", "status"), [(10, 100, 400), (100, 10, 503)])
def test_a_request_that_holds_too_many_logprobs_is_ended(request_max: int, total_max: int, status: int) -> None:
    budget, client = LogprobBudget(request_max, total_max), Client()

    async def main() -> None:
        stream = OutputStream(client, ["a", "b"], LogprobShare(budget))  # type: ignore[arg-type]
        stream.deliver(make_output("a", 3))
        stream.deliver(make_output("b", 2))
        await anext(stream)
        stream.logprob_share.release(6)
        stream.deliver(make_output("a", 3))
        assert not client.aborted_names
        stream.deliver(make_output("b", 1))
        assert sorted(client.aborted_names) == ["a", "b"]
        with pytest.raises(RequestError, match="logprobs") as error_info:
            await anext(stream)
        assert error_info.value.status == status
        assert budget.held_count == 0

    asyncio.run(main())


def test_the_loop_goes_on_while_a_long_text_is_read_late() -> None:
    unread_a = make_output("a", 3 * TOKENS_PER_PAUSE + 5)
    unread_a.cached_tokens, unread_a.finish_reason = 3, FinishReason.LENGTH
    outputs: list[SequenceOutput] = []
    parts_before_turn: list[int] = []

    async def count_parts() -> None:
        while True:
            parts_before_turn.append(len(outputs))
            await asyncio.sleep(0)

    async def main() -> None:
        stream = OutputStream(Client(), ["a", "b"], LogprobShare(LogprobBudget()))  # type: ignore[arg-type]
        stream.deliver(unread_a)
        stream.deliver(structs.replace(make_output("b", 2), finish_reason=FinishReason.STOP))
        counting_task = asyncio.ensure_future(count_parts())
        async for part in stream:
            assert sum(len(output.token_ids) for output in part) <= TOKENS_PER_PAUSE
            outputs.extend(part)
        counting_task.cancel()

    asyncio.run(main())
    assert parts_before_turn == [0, 1, 2]
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [
        *[("a", TOKENS_PER_PAUSE)] * 3, ("a", 5), ("b", 2),
    ]  # fmt: skip
    assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs)
    assert [output.cached_tokens for output in outputs] == [3, None, None, None, None]
    assert [output.finish_reason for output in outputs] == [*[None] * 3, FinishReason.LENGTH, FinishReason.STOP]


def test_too_many_prompt_logprobs_are_refused_before_anything_is_computed() -> None:
    generation, _ = completion(prompt_logprobs=2, n=4)
    client = object.__new__(EngineClient)
    client.death_reason, client.logprob_budget = None, LogprobBudget(request_max=len(PROMPT) * 3 * 4 - 1)
    with pytest.raises(RequestError, match=r"prompt_logprobs: asks for 36 .* at most 35") as error_info:
        client.submit(generation.requests)
    assert (error_info.value.param, error_info.value.status) == ("prompt_logprobs", 400)


def test_logprobs_that_nobody_reads_take_little_memory() -> None:
    """They took 115 bytes a pair, and 900 MB up to the bound."""
    reports = msgspec.msgpack.Decoder(StepOutputs)
    output = SequenceOutput(
        request_id="u", token_ids=[9], logprobs=[TokenLogprobs.pack(9, -1.0, 1, [(700, -2.0)] * 20)]
    )
    message = msgspec.msgpack.encode(StepOutputs([output]))
    count, unread_output = 2000, reports.decode(message).outputs[0]
    tracemalloc.start()
    for _ in range(count):
        merge_outputs(unread_output, reports.decode(message).outputs[0])
    pair_bytes = tracemalloc.get_traced_memory()[0] / (count * 21)
    tracemalloc.stop()
    assert pair_bytes < 25


@pytest.mark.parametrize("is_late", [False, True])
def test_a_response_has_the_logprobs_of_its_text_alone_also_if_it_is_read_late(is_late: bool) -> None:
    """Where the HTTP process lagged, the token that ended the answer, or those of a call, were among them."""
    body = parse_chat(b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}')
    generation = generate(body)
    context = ResponseContext(messages=b"[]", echoed_fields=b"{}", should_store=False, previous_response_id=None)
    formatter = ResponsesFormatter(generation, context, LogprobFormatter(FACTORY))
    outputs = outputs_of([TokenLogprobs.pack(token_id, -1.0, 1, []) for token_id in (65, 66, 67)], None)
    outputs[-1].finish_reason = FinishReason.STOP  # by the last token, which is no text
    if is_late:
        first, *others = outputs
        for output in others:
            merge_outputs(first, output)
        outputs = [first]
    updater = ChoiceUpdater(Mock(metrics=ServerMetrics()), generation, Mock(), takes_single_tokens=True)
    asyncio.run(format_logprobs(formatter, updater.apply(outputs)))
    (item,) = json.loads(formatter.format_response())["output"]
    (part,) = item["content"]
    assert part["text"] == token_text(65) + token_text(66)
    assert [entry["token"] for entry in part["logprobs"]] == [token_text(65), token_text(66)]
