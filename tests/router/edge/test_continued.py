"""An answer whose worker dies in the middle goes on at another worker, and the client does not notice."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.routing import decode_fields
from router.edge import token_recorder
from router.edge.continuation import build_continuation
from router.edge.token_recorder import EVENT_BYTES_MAX, TokenRecorder
from router.http.headers import HeaderBlock
from router.http.request import HttpRequest

WORDS = ["The ", "stream ", "goes ", "on ", "else", "where", ".", ""]
SPOKEN = [{"content": word} for word in WORDS]
PROMPT = [5, 6, 7]
VLLM_GOLDEN = Path(__file__).parents[2] / "golden" / "vllm"


def request(body: dict[str, Any], path: str = "/v1/chat/completions") -> HttpRequest:
    made = HttpRequest("POST", path.encode(), path, HeaderBlock(b""))
    made.pieces = (json.dumps(body).encode(),)
    return made


PIECES = [
    b"data: ", b"data:", b'{"error"', b'{"id":"x","choices":[{"index":0,', b'"delta":{"content":"a"},', b'"text":"a",',
    b'"token_ids":[1,2,3]', b',"token_ids":[4294967295],', b'"token_ids":null,', b'"token_ids":[4294967296]',
    b'"token_ids" : [ 7 ]', b'{"token_ids":[', b'"prompt_token_ids":[5,6]', b'"finish_reason":"stop"', b"}]}", b"\n",
    b"\n\n", b"\r\n", b"\n\r\n", b"[DONE]", b": ping\n\n", b"1,", b",", b"[", b"]", b" ", b'"', b'\\"', b'token_ids"',
    b'"reasoning"', b'"tool_calls":[{', b"x", b"\0",
    b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[4]}]}\n\n',
]  # fmt: skip
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 8}


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"logprobs": True},
        {"guided_json": {}, "guided_regex": "a"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"max_tokens": "8"},
        {"something_new": 1},
        {"echo": True},
    ],
)
def test_what_cannot_go_on_is_not_asked_for_tokens(more: dict[str, Any]) -> None:
    names = {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "metadata": {"user_id": "u"}}
    assert build_continuation(request({**CHAT, **names})) is not None
    assert build_continuation(request({**CHAT, **more})) is None


@pytest.mark.parametrize("engine", ["blockcast", "vllm"])
@pytest.mark.parametrize(
    "body",
    [
        json.dumps(CHAT),
        json.dumps({**CHAT, "seed": 3, "return_token_ids": False, "tools": [{"type": "function"}]}),
        '{ "model":"m" , "stream" :true,"messages":[ {"role":"user","content":"\\u00e9 \\"x\\""} ]}',
        json.dumps({**CHAT, "n": 2}),
    ],
)
def test_fields_that_the_router_has_read_are_not_read_again(body: str, engine: str) -> None:
    """The same is asked of the worker whether the body's fields were decoded before or not."""
    made = request({})
    made.pieces = (body.encode(),)
    asked = []
    for fields in (None, decode_fields(made.body)):
        continuation = build_continuation(made, fields)
        asked.append(None if continuation is None else continuation.build_request_body(engine))
    assert asked[0] == asked[1]


def test_prompts_that_are_several_cannot_go_on() -> None:
    body = {"model": "m", "stream": True}
    for prompt, can in (("Hi", True), ([1, 2], True), (["Hi"], False), ([[1], [2]], False)):
        assert (build_continuation(request({**body, "prompt": prompt}, "/v1/completions")) is not None) is can


@pytest.mark.parametrize(
    ("more", "exact"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"return_token_ids": False}, True),
        ({"temperature": 0, "seed": 3}, True),
        ({"seed": 3}, False),
        ({"stop": ["a"]}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a+"}}, False),
        ({"tools": []}, True),
    ],
)
def test_only_our_engine_takes_back_all_of_its_state(more: dict[str, Any], exact: bool) -> None:
    for engine, wanted in (("blockcast", True), ("vllm", exact), ("sglang", False), ("", False)):
        made = build_continuation(request({**CHAT, **more}))
        assert made is not None
        (asked,) = made.build_request_body(engine) or (b"",)
        body = json.loads(asked)
        assert body.get("return_token_ids", False) is wanted, engine
        assert (made.recorder is not None) is wanted


# ---------------------------------------------------------------- the notes


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def test_ids_are_noted_and_taken_out_wherever_the_bytes_are_cut() -> None:
    tricky = ',"token_ids":[9],"prompt_token_ids":[8]'
    first = event(
        id="i", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[4, 70]
    )
    second = event(id="i", choices=[{"index": 0, "delta": {"content": tricky}, "token_ids": [1, 2, 4294967295]}])
    third = event(id="i", choices=[{"token_ids": [3], "index": 0, "delta": {"content": ""}, "finish_reason": "stop"}])
    whole = first + second + third + b"data: [DONE]\n\n"
    plain = whole.replace(b',"prompt_token_ids":[4,70]', b"").replace(b',"token_ids":[1,2,4294967295]', b"")
    plain = plain.replace(b'"token_ids":[3],', b"")
    for cut in range(len(whole)):
        hidden, shown = TokenRecorder(removes_ids=True), TokenRecorder(removes_ids=False)
        assert hidden.feed(whole[:cut]) + hidden.feed(whole[cut:]) == plain
        assert shown.feed(whole[:cut]) + shown.feed(whole[cut:]) == whole
        for tokens in (hidden, shown):
            assert tokens.prompt_ids.tolist() == [4, 70]
            assert tokens.output_ids.tolist() == [1, 2, 4294967295, 3]
            assert (
                tokens.text_token_count,
                tokens.has_finish_reason,
                tokens.is_unrecognized,
                tokens.has_worker_failed,
            ) == (3, True, False, False)


@pytest.mark.parametrize(
    ("delta", "odd", "parsed"),
    [
        ({"content": "x"}, False, False),
        ({"reasoning": "x"}, False, True),
        ({"content": "x", "reasoning": "y"}, False, True),
        ({"tool_calls": [{"index": 0}]}, False, True),
        ({"refusal": "x"}, True, False),
    ],
)
def test_what_is_not_text_is_noticed(delta: dict[str, Any], odd: bool, parsed: bool) -> None:
    tokens = TokenRecorder(removes_ids=True)
    tokens.feed(event(choices=[{"index": 0, "delta": delta, "token_ids": [1]}]))
    assert (tokens.is_unrecognized, tokens.has_parsed_output) == (odd, parsed)


@pytest.mark.parametrize("ids", [{}, {"token_ids": None}, {"token_ids": []}, {"token_ids": ["a"]}, {"token_ids": 5}])
def test_text_without_its_ids_is_noticed(ids: dict[str, Any]) -> None:
    """vLLM tells none where it hides reasoning."""
    tokens = TokenRecorder(removes_ids=True)
    tokens.feed(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[1]))
    assert not tokens.is_unrecognized
    tokens.feed(event(choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": None, **ids}]))
    assert tokens.is_unrecognized


def test_a_failure_told_in_the_middle_is_kept_back() -> None:
    tokens = TokenRecorder(removes_ids=True)
    text = event(choices=[{"index": 0, "text": "a", "token_ids": [1]}])
    error = event(error={"message": "dead"}) + b"data: [DONE]\n\n"
    assert b"token_ids" not in tokens.feed(text + error)
    assert tokens.has_worker_failed
    assert tokens.feed(b"more") == b""
    assert tokens.stop_recording() == error + b"more"
    assert tokens.feed(b"x") == b"x"
    assert not tokens.has_worker_failed


def test_who_streams_more_ids_than_are_kept_is_not_continued() -> None:
    tokens = TokenRecorder(removes_ids=True)
    many = event(choices=[{"index": 0, "text": "a", "token_ids": [7] * (1 << 20)}])
    for expected in (1, 2, 3, 4, 4):
        assert b"token_ids" not in tokens.feed(many)
        assert tokens.output_token_count == len(tokens.output_ids) == expected << 20
    assert tokens.is_unrecognized


STATE = (
    "prompt_ids", "output_ids", "output_token_count", "text_token_count", "last_event", "event_count",
    "is_unrecognized", "has_parsed_output", "has_finish_reason",
)  # fmt: skip


@given(st.data())
def test_no_cut_changes_what_is_passed_on_and_noted(data: st.DataObject) -> None:
    whole = b"".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    for hide in (False, True):
        once, cut = TokenRecorder(removes_ids=hide), TokenRecorder(removes_ids=hide)
        at_once = once.feed(whole) + once.finish() + once.stop_recording()
        in_parts = b"".join(cut.feed(whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)]))
        assert in_parts + cut.finish() + cut.stop_recording() == at_once
        assert hide or at_once == whole
        for name in STATE:
            assert getattr(once, name) == getattr(cut, name)


TEXTS = st.sampled_from(["", "a", "\n\n", 'say "token_ids":[9]', "\u00e9", "\\", ',"finish_reason":"stop"'])
DELTAS = st.one_of(
    st.fixed_dictionaries({"content": TEXTS}),
    st.fixed_dictionaries({"reasoning": TEXTS}, optional={"reasoning_content": TEXTS, "content": TEXTS}),
    st.just({"role": "assistant", "content": ""}),
    st.just({"tool_calls": [{"index": 0}]}),
)
IDS = st.lists(st.sampled_from([0, 7, 151_643, 999_999_999, 4_294_967_295, 4_294_967_296]), max_size=3)
CHOICES = st.one_of(
    st.fixed_dictionaries(
        {"index": st.just(0), key: value},
        optional={
            "logprobs": st.sampled_from([None, {"content": []}]), "finish_reason": st.sampled_from([None, "stop"]),
            "stop_reason": st.none(), "prompt_token_ids": st.sampled_from([None, [5]]), "token_ids": IDS,
        },
    )
    for key, value in (("delta", DELTAS), ("text", TEXTS))
)  # fmt: skip


@given(st.lists(st.tuples(CHOICES, st.sampled_from([{}, {"usage": None}, {"prompt_token_ids": [5, 6]}])), max_size=4))
def test_plain_events_are_recorded_as_any_others(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    head = {"id": "x", "object": "o", "created": 1, "model": "m"}
    for hide in (False, True):
        quick, slow = TokenRecorder(removes_ids=hide), TokenRecorder(removes_ids=hide)
        for choice, more in pairs:
            told = event(**head, choices=[choice], **more)
            with pytest.MonkeyPatch.context() as patch:
                forwarded = quick.feed(told)
                patch.setattr(token_recorder, "_PLAIN_EVENT_PATTERN", re.compile(rb"(?!)"))
                assert slow.feed(told) == forwarded
            for name in STATE:
                assert getattr(quick, name) == getattr(slow, name), (name, told)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        (b'{"token_ids":[3],"prompt_token_ids":[1],"a":1}', b'{"a":1}'),
        (b'{"token_ids":[3],"prompt_token_ids":[1]}', b"{}"),
        (b'{"a":1,"token_ids" : [ 3 ],"b":2,"prompt_token_ids":null}', b'{"a":1,"b":2}'),
        (b'{"a":",\\"token_ids\\":[3]"}', b'{"a":",\\"token_ids\\":[3]"}'),
    ],
)
def test_what_is_left_of_an_event_is_json(fields: bytes, left: bytes) -> None:
    assert TokenRecorder(removes_ids=True).feed(b"data: " + fields + b"\n\n") == b"data: " + left + b"\n\n"


@pytest.mark.parametrize("first", [{}, {"prompt_token_ids": None}, {"prompt_token_ids": []}])
def test_ids_of_the_prompt_are_recorded_wherever_they_come_first(first: dict[str, Any]) -> None:
    tokens = TokenRecorder(removes_ids=True)
    tokens.feed(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], **first))
    tokens.feed(event(choices=[{"index": 0, "delta": {"content": "x"}, "token_ids": [7]}], prompt_token_ids=[5, 6]))
    assert tokens.prompt_ids.tolist() == [5, 6]


@pytest.mark.parametrize("digits", ["007", "00", "-1", "1.5", "1e3"])
def test_ids_that_are_not_json_numbers_are_noticed_when_they_come(digits: str) -> None:
    tokens = TokenRecorder(removes_ids=True)
    head = b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":['
    tokens.feed(head + digits.encode() + b"]}]}\n\n")
    assert tokens.is_unrecognized
    assert not tokens.output_ids


def test_lists_that_never_end_cost_what_they_are_long() -> None:
    tokens = TokenRecorder(removes_ids=True)
    tokens.feed(b"data: {" + b',"token_ids":[' * 200_000 + b"\n\n")  # minutes, if each were searched to the end
    assert tokens.is_unrecognized


def test_a_long_text_of_escapes_takes_no_more_memory_than_other_bytes() -> None:
    head = b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"text":"'
    told = head + b"\\n" * 500_000 + b'","token_ids":[7]}]}\n\n'
    tokens = TokenRecorder(removes_ids=True)
    tracemalloc.start()
    try:
        tokens.feed(told)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(told)  # 80 times, if it were matched as a plain event
    finally:
        tracemalloc.stop()
    assert tokens.output_ids.tolist() == [7]
    assert tokens.text_token_count == 1


def test_nearly_every_event_of_a_completion_of_vllm_is_plain() -> None:
    capture = json.loads(gzip.decompress((VLLM_GOLDEN / "recorded-0.32.0/engine_dies.json.gz").read_bytes()))
    answers = [exchange.get("answer", "") for exchange in capture["exchanges"]]
    events = [
        event.encode() + b"\n\n" for answer in answers for event in answer.split("\n\n") if '"token_ids":[' in event
    ]
    plain = [event for event in events if token_recorder._PLAIN_EVENT_PATTERN.fullmatch(event)]
    assert len(events) - len(plain) <= 1 < len(plain)  # the first one has the ids of the prompt


def test_a_long_event_costs_what_it_is_long_and_is_passed_on_once_it_is_too_long() -> None:
    tokens, piece = TokenRecorder(removes_ids=True), b"x" * 64
    for _ in range(EVENT_BYTES_MAX // len(piece)):  # minutes, if each were joined to all before it
        assert tokens.feed(piece) == b""
    assert len(tokens.feed(piece)) == EVENT_BYTES_MAX + len(piece)
    assert tokens.feed(piece) == piece
    assert tokens.is_unrecognized


# ---------------------------------------------------------------- through the router


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def worker(
    name: str, dies_after: int | None, log: list[dict[str, Any]], *, failing: bytes = b"",
    deltas: Sequence[dict[str, Any]] = SPOKEN, is_lean: bool = False, ends_early: bool = False,
    event_format: bytes = b"data: %b\n\n",
) -> Any:  # fmt: skip
    """Speaks WORDS (in chats `deltas`) from where the prompt says; its connection breaks after so many of them.
    `is_lean`: null fields are left out, as in vLLM's Rust frontend. `ends_early`: the answer ends there instead."""

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        path = received.line.split()[1].decode()
        log.append({"worker": name, "path": path, **body})
        chat = path.endswith("chat/completions")
        given = body.get("prompt_token_ids", body.get("prompt"))
        at = len(given) - len(PROMPT) if isinstance(given, list) else 0
        shows = body.get("return_token_ids", False)
        before = at if "answered_tokens" not in body else 0  # what vLLM takes for a part of the prompt
        writer.write(HEAD)
        spoken = 0
        begins = True
        while at < len(WORDS):
            if dies_after is not None and spoken >= dies_after:
                if failing or ends_early:
                    writer.write(chunk(failing) + b"0\r\n\r\n" if failing else b"0\r\n\r\n")
                    return
                if spoken:  # half an event, which nobody may see
                    writer.write(chunk(b'data: {"id":"' + name.encode()))
                await writer.drain()
                writer.transport.abort()
                return
            last = at == len(WORDS) - 1
            choice: dict[str, Any] = {"index": 0}
            if last or not is_lean:
                choice["finish_reason"] = "stop" if last else None
            choice |= {"delta": deltas[at]} if chat else {"text": WORDS[at]}
            ids = {"token_ids": [100 + at]} if shows else {}
            told = {"id": name, "created": 1, "model": "m", "choices": [choice | ids]}
            if begins and chat:
                first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                more = {"prompt_token_ids": PROMPT} if shows else {}
                writer.write(chunk(event(**{**told, "choices": [first], **more})))
            elif begins and shows:
                choice_ids = {"prompt_token_ids": PROMPT}
                told["choices"] = [choice | ids | choice_ids]
            begins = False
            data = event(**told).removeprefix(b"data: ").removesuffix(b"\n\n")
            writer.write(chunk(b": ping\n\n" + event_format % data))
            await writer.drain()
            for _ in range(5):  # a read of its own
                await asyncio.sleep(0)
            spoken += 1
            at += 1
        if (body.get("stream_options") or {}).get("include_usage"):
            told_of = len(PROMPT) + before, len(WORDS) - before
            usage = {"prompt_tokens": told_of[0], "completion_tokens": told_of[1], "total_tokens": sum(told_of)}
            writer.write(chunk(event(id=name, created=1, model="m", choices=[], usage=usage)))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def content_of(answer: bytes) -> tuple[bytes, bool]:
    """(content of a chunked answer, whether it came to its end)."""
    rest, content = answer.partition(b"\r\n\r\n")[2], b""
    while b"\r\n" in rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        if size == 0:
            return content, True
        content, rest = content + rest[:size], rest[size + 2 :]
    return content, False


def told(answer: bytes) -> tuple[str, list[Any], bool]:
    """(text, events, whether the answer came to its end)."""
    content, ended = content_of(answer)
    assert content.endswith(b"\n\n") or not content, "the client never sees a part of an event"
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line and not line.startswith(b":")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    choices = [choice for one in events for choice in one.get("choices", ())]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return text, events, ended and lines[-1:] == [b"[DONE]"]


COMPLETION = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 20}
CHATS = {**CHAT, "model": "tiny", "max_tokens": 20}
BODIES = [("/v1/chat/completions", CHATS), ("/v1/completions", COMPLETION)]


@pytest.mark.parametrize("engine", ["blockcast", "vllm"])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "completion"])
@pytest.mark.parametrize("dies_after", [0, 1, 5, len(WORDS) - 1])
def test_the_answer_goes_on(
    edge: Any, make_post: Any, engine: str, path: str, body: dict[str, Any], dies_after: int
) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", dies_after, log), "a", engine=engine)
        await edge.worker(worker("b", None, log), "b", engine=engine)
        for ids in (False, True):
            log.clear()
            asked = {**body, "stream_options": {"include_usage": True}} | ({"return_token_ids": True} if ids else {})
            answers = [await edge.exchange(make_post(json.dumps(asked).encode(), path.encode())) for _ in range(2)]
            assert {one["worker"] for one in log} == {"a", "b"}
            texts, lists, ends = zip(*map(told, answers))
            assert texts == ("".join(WORDS),) * 2
            assert all(ends)
            for events in lists:
                *chunks, last = events
                (name,) = {one["id"] for one in events}
                if dies_after:
                    assert any(event["id"] == name for event in lists[0])
                assert [one["choices"][0].get("finish_reason") for one in chunks][-1] == "stop"
                assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
                noted = [i for one in chunks for i in one["choices"][0].get("token_ids", [])]
                assert noted == ([100 + i for i in range(len(WORDS))] if ids else [])
                assert ids or "token_ids" not in json.dumps(events)
        name = "prompt" if "vllm" in engine or "prompt" in body else "prompt_token_ids"
        again = [one for one in log if isinstance(one.get(name), list)]
        if dies_after:
            assert {one["path"] for one in again} == {path if engine == "blockcast" else "/v1/completions"}
            assert all(one[name] == PROMPT + [100 + i for i in range(dies_after)] for one in again)
            if engine == "blockcast":
                assert again[0]["answered_tokens"] == dies_after
                assert again[0]["max_tokens"] == 20
            else:
                assert again[0]["max_tokens"] == 20 - dies_after
        assert edge.metrics.broken_streams["continued"] == edge.core.counters["continued"] >= 2
        assert set(edge.metrics.broken_streams) == {"continued"}
        edge.core.check_invariants()

    edge.run(scenario())


@pytest.mark.parametrize("first_is_lean", [True, False])
@pytest.mark.parametrize("asks_ids", [True, False])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "completion"])
def test_frontends_that_leave_out_what_is_null_go_on(
    edge: Any, make_post: Any, path: str, body: dict[str, Any], asks_ids: bool, first_is_lean: bool
) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 3, log, is_lean=first_is_lean), "a", engine="vllm")
        await edge.worker(worker("b", None, log, is_lean=True), "b", engine="vllm")
        asked = json.dumps({**body, "return_token_ids": asks_ids}).encode()
        for _ in range(2):
            text, events, ended = told(await edge.exchange(make_post(asked, path.encode())))
            assert (text, ended) == ("".join(WORDS), True)
            assert [one["choices"][0].get("finish_reason") for one in events][-2:] == [None, "stop"]
        assert set(edge.metrics.broken_streams) == {"continued"}

    edge.run(scenario())


@pytest.mark.parametrize(
    "event_format", [b"data: %b\r\n\r\n: on\r\n\r\n", b": on\ndata: %b\n\n", b"event: message\ndata:%b\n\n"]
)
@pytest.mark.parametrize("engine", ["blockcast", "vllm"])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "completion"])
def test_events_go_on_in_every_form_that_browsers_read(
    edge: Any, make_post: Any, path: str, body: dict[str, Any], engine: str, event_format: bytes
) -> None:
    """A gateway before a worker may end lines by CRLF, and add comments and other fields to events."""

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 3, log, event_format=event_format), "a", engine=engine)
        await edge.worker(worker("b", None, log, event_format=event_format), "b", engine=engine)
        for _ in range(2):
            content, ended = content_of(await edge.exchange(make_post(json.dumps(body).encode(), path.encode())))
            data = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
            assert (ended, data.pop()) == (True, b"[DONE]")
            choices = [choice for text in data for choice in json.loads(text)["choices"]]
            words = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
            assert "".join(words) == "".join(WORDS)
            assert len({json.loads(text)["id"] for text in data}) == 1
        assert set(edge.metrics.broken_streams) == {"continued"}

    edge.run(scenario())


@pytest.mark.parametrize("is_lean", [True, False])
@pytest.mark.parametrize("others", [1, 0])
def test_an_answer_that_ends_without_a_finish_reason_is_not_complete(
    edge: Any, make_post: Any, others: int, is_lean: bool
) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 4, log, is_lean=is_lean, ends_early=True), "a", engine="vllm")
        for _ in range(others):
            await edge.worker(worker("b", None, log, is_lean=is_lean), "b", engine="vllm")
        for _ in range(2):
            text, _, ended = told(await edge.exchange(make_post(json.dumps(COMPLETION).encode(), b"/v1/completions")))
            assert (text, ended) == ("".join(WORDS[: None if others else 4]), bool(others))
        assert set(edge.metrics.broken_streams) == {"continued" if others else "cut"}

    edge.run(scenario())


@pytest.mark.parametrize("nonsense", [{"choices": [{"index": 0, "text": 5, "finish_reason": "stop"}]}, {"choices": 5}])
def test_an_answer_is_never_ended_by_text_that_was_not_sent(edge: Any, make_post: Any, nonsense: Any) -> None:
    """The worker that goes on tells a finish reason in an event that cannot be passed on."""
    last = event(**nonsense, finish_reason="stop")

    async def malformed_events(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spoken = event(choices=[{"index": 0, "text": "more", "token_ids": [7]}])
        writer.write(HEAD + chunk(spoken + b"data: {\n\n" + last) + b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 3, log), "a", engine="vllm")
        await edge.worker(malformed_events, "b", engine="vllm")
        answers = [await edge.exchange(make_post(json.dumps(COMPLETION).encode(), b"/v1/completions"))]
        assert [content_of(answer)[1] for answer in answers] == [False]
        assert edge.metrics.broken_streams == {"continued": 1, "cut": 1}
        assert not edge.metrics.crashes

    edge.run(scenario())


CALLED = [
    {"reasoning": "Hm", "reasoning_content": "Hm"},
    {"reasoning": ".", "reasoning_content": ".", "content": "I ask."},
    {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    {"content": ""},
    {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    {},
]


@pytest.mark.parametrize("dies_after", [0, 1, 2, 4, 6])
def test_calls_and_thoughts_go_on(edge: Any, make_post: Any, dies_after: int) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", dies_after, log, deltas=CALLED), "a", engine="blockcast")
        await edge.worker(worker("b", None, log, deltas=CALLED), "b", engine="blockcast")
        talk = [{"role": "user", "content": "Long ago"}, {"role": "user", "content": "Now"}]
        tools = [{"type": "function", "function": {"name": "f"}}]
        for ids in (False, True):
            log.clear()
            asked = {**CHATS, "messages": talk, "tools": tools, "max_completion_tokens": 30, "return_token_ids": ids}
            answers = [await edge.exchange(make_post(json.dumps(asked).encode())) for _ in range(2)]
            assert {one["worker"] for one in log} == {"a", "b"}
            for _, events, ended in map(told, answers):
                assert ended
                assert len({one["id"] for one in events}) == 1
                said = [one["choices"][0]["delta"] for one in events]
                assert said[0] == {"role": "assistant", "content": ""}
                told_of = [delta for delta in said[1:] if any(delta.values())]
                assert told_of == [delta for delta in CALLED if any(delta.values())]
        if dies_after:
            again = next(one for one in log if "answered_tokens" in one)
            assert again["prompt_token_ids"] == PROMPT + [100 + i for i in range(dies_after)]
            assert (again["answered_tokens"], again["max_completion_tokens"]) == (dies_after, 30)
            assert (again["messages"], again["tools"]) == (talk[-1:], tools)

    edge.run(scenario())


def test_a_chat_of_vllm_without_text_is_asked_for_again_as_a_chat(edge: Any, make_post: Any) -> None:
    """The worker has begun a thought, of which it sends nothing yet: as a completion the thought would be text."""
    thought = {"reasoning": "Hm"}

    async def think(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        requests.append((received.line.split()[1], body))
        is_first = len(requests) == 1
        delta = {"content": "<think>Hm"} if b"/v1/chat" not in received.line else thought
        events = [{"role": "assistant", "content": ""}, *(() if is_first else (delta, {"content": "Hi"}))]
        writer.write(HEAD)
        for number, said in enumerate(events):
            choice = {"index": 0, "delta": said, "finish_reason": "stop" if said == {"content": "Hi"} else None}
            ids = {"prompt_token_ids": PROMPT} if number == 0 else {}
            choice["token_ids"] = [7] * (number > 0)
            writer.write(chunk(event(id=str(len(requests)), created=1, model="m", choices=[choice], **ids)))
        await writer.drain()
        if is_first:
            writer.transport.abort()
        else:
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    requests: list[tuple[bytes, dict[str, Any]]] = []

    async def scenario() -> None:
        await edge.start()
        for name in "ab":
            await edge.worker(think, name, engine="vllm")
        _, events, ended = told(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert ended
        assert [one["choices"][0]["delta"] for one in events] == [
            {"role": "assistant", "content": ""}, thought, {"content": "Hi"},
        ]  # fmt: skip
        assert len({one["id"] for one in events}) == 1
        (_, first), (path, again) = requests
        assert (path, again) == (b"/v1/chat/completions", first)

    edge.run(scenario())


def test_calls_of_vllm_are_cut(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for name in "ab":
            await edge.worker(worker(name, 3, log, deltas=CALLED), name, engine="vllm")
        _, ended = content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert not ended
        assert len(log) == 1

    edge.run(scenario())


def test_it_goes_on_again_and_again_while_tokens_come(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.edge.continuation.NEW_TOKENS_MIN", 1)

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for name, dies_after in (("a", 2), ("b", 1), ("c", 3), ("d", None)):
            await edge.worker(worker(name, dies_after, log), name, engine="blockcast")
        text, _, ended = told(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert (text, ended) == ("".join(WORDS), True)

    edge.run(scenario())


@pytest.mark.parametrize(
    "fleet",
    [("", ""), ("blockcast", "vllm"), ("blockcast",), ("sglang", "sglang")],
    ids=lambda f: "-".join(f) or "none",
)
def test_where_nobody_can_go_on_it_is_cut_as_ever(edge: Any, make_post: Any, fleet: tuple[str, ...]) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for number, engine in enumerate(fleet):
            await edge.worker(worker(f"w{number}", 2, log), f"w{number}", engine=engine)
        content, ended = content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert not ended
        assert content.count(b"}\n\n") == 3
        assert edge.metrics.broken_streams["cut"] == 1

    edge.run(scenario())


def test_a_request_that_kills_its_workers_is_not_handed_round(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 2, log), "a", engine="blockcast")
        for name in "bcdef":
            await edge.worker(worker(name, 0, log), name, engine="blockcast")
        _, ended = content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert not ended
        assert len(log) <= 3

    edge.run(scenario())


@pytest.mark.parametrize("dies_after", [1, 3])
def test_a_request_that_kills_each_worker_after_some_tokens_is_sent_to_two(
    edge: Any, make_post: Any, dies_after: int
) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for name in "abcd":
            await edge.worker(worker(name, dies_after, log), name, engine="vllm")
        _, ended = content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert not ended
        assert len(log) == 2

    edge.run(scenario())


@pytest.mark.parametrize("others", [1, 0])
def test_a_worker_that_says_in_the_middle_that_it_failed(edge: Any, make_post: Any, others: int) -> None:
    error = event(error={"message": "EngineCore died", "code": 500}) + b"data: [DONE]\n\n"

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 4, log, failing=error), "a", engine="vllm")
        for _ in range(others):
            await edge.worker(worker("b", None, log), "b", engine="vllm")
        for _ in range(2):
            text, events, ended = told(await edge.exchange(make_post(json.dumps(CHATS).encode())))
            assert ended
            assert text == "".join(WORDS[: None if others else 4])
            assert ("error" in events[-1]) is not bool(others)

    edge.run(scenario())


def test_a_stream_that_refuses_its_request_is_no_failure_of_the_worker(edge: Any, make_post: Any) -> None:
    error = {"message": "Token id 898 is out of vocabulary", "type": "BadRequestError", "param": None, "code": 400}
    refusal = b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for name in "ab":
            await edge.worker(worker(name, 0, log, failing=refusal), name, engine="vllm")
        answer = await edge.exchange(make_post(json.dumps(COMPLETION).encode(), path=b"/v1/completions"))
        assert content_of(answer) == (refusal, True)
        assert len(log) == 1
        assert not edge.metrics.broken_streams
        assert not edge.metrics.failures

    edge.run(scenario())


def test_an_answer_that_lacks_its_end_only_is_ended_here(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", None, log), "a", engine="blockcast")
        whole = worker("a", None, log)

        async def without_end(received: Any, reader: Any, writer: Any) -> None:
            real, kept = writer.write, []
            writer.write = lambda data: kept.append(data)
            await whole(received, reader, writer)
            writer.write = real
            real(b"".join(one for one in kept if b"usage" not in one and b"[DONE]" not in one))
            await writer.drain()
            writer.transport.abort()

        edge.upstreams[0].script = without_end
        usage = {"prompt_tokens": 3, "total_tokens": 11, "completion_tokens": 8}
        for options, expected in (({"include_usage": True}, usage), ({"include_obfuscation": True}, None)):
            asked = json.dumps({**CHATS, "stream_options": options}).encode()
            text, events, ended = told(await edge.exchange(make_post(asked)))
            assert (text, ended) == ("".join(WORDS), True)
            assert events[-1].get("usage") == expected
        assert edge.metrics.broken_streams == {"completed": 2}

    edge.run(scenario())


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_media_are_not_continued(edge: Any, make_post: Any, part: dict[str, Any]) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        for name in "ab":
            await edge.worker(worker(name, 2, log), name, engine="blockcast")
        asked = {**CHATS, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]}
        _, ended = content_of(await edge.exchange(make_post(json.dumps(asked).encode())))
        assert not ended
        assert ["return_token_ids" in one for one in log] == [False]

    edge.run(scenario())


def test_it_can_be_switched_off(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        edge.proxy.continues_streams = False
        log: list[dict[str, Any]] = []
        for name in "ab":
            await edge.worker(worker(name, 2, log), name, engine="blockcast")
        _, ended = content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))
        assert not ended
        assert "return_token_ids" not in log[0]

    edge.run(scenario())


@pytest.mark.parametrize("odd", [b"data: {}\n\n", b"data: nothing\n\n", b'data: {"choices":[1]}\n\n', b"\xff\n\n"])
def test_a_worker_that_goes_on_with_nonsense_crashes_nothing(edge: Any, make_post: Any, odd: bytes) -> None:
    async def nonsense(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(odd) + b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        await edge.worker(worker("a", 3, log), "a", engine="blockcast")
        await edge.worker(nonsense, "b", engine="blockcast")
        ends = [content_of(await edge.exchange(make_post(json.dumps(CHATS).encode())))[1] for _ in range(2)]
        assert False in ends
        assert not edge.metrics.crashes
        edge.core.check_invariants()

    edge.run(scenario())


# ---------------------------------------------------------------- what comes at the end


@pytest.mark.parametrize("engine", ["blockcast", "vllm", ""])
@pytest.mark.parametrize("joined", [True, False], ids=["in one read", "in two"])
@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n\r\n", b": bye"])
def test_what_comes_behind_the_last_blank_line_is_passed_on(
    edge: Any, make_post: Any, engine: str, joined: bool, last: bytes
) -> None:
    spoken = event(
        id="a", choices=[{"index": 0, "delta": {"content": "Hi"}, "token_ids": [5], "finish_reason": "stop"}]
    )

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(spoken) + chunk(last) + (b"0\r\n\r\n" if joined else b""))
        if not joined:
            await writer.drain()
            await edge.let_loop_read()
            writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        await edge.worker(script, "a", engine=engine)
        answer = await edge.exchange(make_post(json.dumps(CHATS).encode()))
        wanted = spoken.replace(b',"token_ids":[5]', b"") if engine else spoken
        assert content_of(answer) == (wanted + last, True)
        assert not edge.metrics.broken_streams

    edge.run(scenario())


def test_ids_behind_the_last_blank_line_are_hidden_too(edge: Any, make_post: Any) -> None:
    choice = {"index": 0, "delta": {"content": "Hi"}, "token_ids": [5], "finish_reason": "stop"}
    last = event(id="a", choices=[choice]).rstrip()

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(last) + b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        await edge.worker(script, "a", engine="blockcast")
        answer = await edge.exchange(make_post(json.dumps(CHATS).encode()))
        assert content_of(answer) == (last.replace(b',"token_ids":[5]', b""), True)

    edge.run(scenario())


def test_a_failure_behind_the_last_blank_line_has_another_worker_go_on(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        log: list[dict[str, Any]] = []
        failing = event(error={"message": "dead"}).rstrip()
        await edge.worker(worker("a", 3, log, failing=failing), "a", engine="blockcast")
        await edge.worker(worker("b", None, log), "b", engine="blockcast")
        for _ in range(2):
            text, _, ended = told(await edge.exchange(make_post(json.dumps(CHATS).encode())))
            assert (text, ended) == ("".join(WORDS), True)
        assert set(edge.metrics.broken_streams) == {"continued"}

    edge.run(scenario())


def test_an_encoded_answer_passes_as_it_comes(edge: Any, make_post: Any) -> None:
    packed = gzip.compress(
        b"".join(event(id="a", choices=[{"index": 0, "delta": {"content": "Hi"}}]) for _ in range(9))
    )
    head = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    body = b"".join(chunk(packed[at : at + 20]) for at in range(0, len(packed), 20)) + b"0\r\n\r\n"

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(head + body), 50):
            writer.write((head + body)[at : at + 50])
            await writer.drain()
            await edge.let_loop_read()

    async def scenario() -> None:
        await edge.start()
        await edge.worker(script, "a", engine="blockcast")
        answer = await edge.exchange(make_post(json.dumps(CHATS).encode()))
        assert b"content-encoding: gzip" in answer
        assert content_of(answer) == (packed, True)

    edge.run(scenario())


def test_an_encoded_answer_that_breaks_off_is_cut(edge: Any, make_post: Any) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + chunk(b"\x1f\x8b half"))
        await writer.drain()
        await edge.let_loop_read()
        writer.transport.abort()

    async def scenario() -> None:
        await edge.start()
        for name in "ab":
            await edge.worker(script, name, engine="blockcast")
        assert content_of(await edge.exchange(make_post(json.dumps(CHATS).encode()))) == (b"\x1f\x8b half", False)
        assert edge.metrics.broken_streams == {"cut": 1}

    edge.run(scenario())
