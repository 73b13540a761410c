"""The order and the framing of what Envoy is answered, by the pure state machine alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import RequestError
from router.http.request import HttpRequest
from router.picker.ext_proc_stream import Choice, ExtProcStream, Phase, UnexpectedMessage
from router.picker.messages import BUFFERED, DUPLEX, NONE, PIECE_BYTES, STREAMED, read_subset_hint

LIMIT = 1 << 20


class RecordingHandler:
    """Notes what it is told; chooses at once unless told to wait."""

    def __init__(self) -> None:
        self.stream = ExtProcStream(self, LIMIT)
        self.stream.answer_reader = self
        self.requests: list[HttpRequest] = []
        self.response_starts: list[tuple[int, str | None]] = []
        self.response_body = b""
        self.charged_bytes = 0
        self.end_count = 0
        self.chooses_at_once = True
        self.is_cancelled = False
        self.body: bytes | None = None

    def request_complete(self, request: HttpRequest) -> None:
        self.requests.append(request)
        if self.body is not None:
            request.pieces = (self.body,)
        if self.chooses_at_once:
            self.stream.choose(Choice(["10.0.0.1:8000", "10.0.0.2:8000"], [(b"x-set", b"\xc3\xa9")], ["x-gone"]))

    def request_cancelled(self) -> None:
        self.is_cancelled = True

    def charge_body_bytes(self, size: int) -> None:
        self.charged_bytes = size

    def response_started(self, status: int, served_by: str | None) -> Sequence[tuple[bytes, bytes]]:
        self.response_starts.append((status, served_by))
        return ((b"x-told", b"yes"),)

    def response_content(self, data: bytes) -> None:
        self.response_body += data

    def response_ended(self) -> None:
        self.end_count += 1

    def send(self, *messages: Any) -> list[Any]:
        for message in messages:
            self.stream.receive(message)
        return self.stream.pop_responses()


def head(
    *, ends: bool = False, mode: int = DUPLEX, answer: int = DUPLEX, method: str = "POST", config: bool = True,
    **headers: str,
) -> Any:  # fmt: skip
    fields = {":method": method, ":path": "/v1/completions?x=1", ":authority": "a", **headers}
    message = pb.ProcessingRequest(
        request_headers={"headers": {"headers": [{"key": k, "raw_value": v.encode()} for k, v in fields.items()]},
                         "end_of_stream": ends}
    )  # fmt: skip
    if config:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = answer
    return message


def body(data: bytes, *, ends: bool = False) -> Any:
    return pb.ProcessingRequest(request_body={"body": data, "end_of_stream": ends})


def answer_head(status: str = "200", *, ends: bool = False) -> Any:
    headers = [{"key": ":status", "raw_value": status.encode()}, {"key": "content-type", "value": "text/event-stream"}]
    return pb.ProcessingRequest(response_headers={"headers": {"headers": headers}, "end_of_stream": ends})


def kinds(responses: Sequence[Any]) -> list[str]:
    return [response.WhichOneof("response") for response in responses]


def echoed(responses: Sequence[Any], kind: str) -> tuple[bytes, list[bool]]:
    parts = [getattr(r, kind).response.body_mutation.streamed_response for r in responses if r.HasField(kind)]
    assert all(len(part.body) <= PIECE_BYTES for part in parts)
    return b"".join(part.body for part in parts), [part.end_of_stream for part in parts]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 300_000])
@pytest.mark.parametrize("config", [True, False])
def test_full_duplex_answers_after_the_body_s_end(size: int, config: bool) -> None:
    handler, data = RecordingHandler(), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert handler.send(head(config=config)) == []
    assert handler.send(*[body(data[at : at + 7000]) for at in range(0, size, 7000)]) == []
    assert handler.charged_bytes == size
    first, *rest = handler.send(body(b"", ends=True))
    assert handler.requests[0].body == data
    assert handler.requests[0].path == "/v1/completions"
    common = first.request_headers.response
    assert common.clear_route_cache
    options = common.header_mutation.set_headers
    assert [(o.header.key, o.header.raw_value, o.append_action) for o in options] == [
        ("x-gateway-destination-endpoint", b"10.0.0.1:8000,10.0.0.2:8000", 2), ("x-set", b"\xc3\xa9", 2),
    ]  # fmt: skip
    assert all(not option.header.value for option in options)
    assert list(common.header_mutation.remove_headers) == ["x-gone"]
    assert MessageToDict(first.dynamic_metadata) == {
        "envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"}
    }
    whole, ends = echoed(rest, "request_body")
    assert whole == data
    assert ends == [False] * (len(ends) - 1) + [True]


def test_trailers_end_a_body_too() -> None:
    handler = RecordingHandler()
    handler.send(head(), body(b"abc"))
    responses = handler.send(pb.ProcessingRequest(request_trailers={}))
    assert kinds(responses) == ["request_headers", "request_body", "request_trailers"]
    assert echoed(responses, "request_body") == (b"abc", [False])


def test_buffered_is_answered_with_the_body() -> None:
    handler = RecordingHandler()
    assert kinds(handler.send(head(mode=BUFFERED, answer=NONE))) == ["request_headers"]
    (chosen,) = handler.send(body(b"{}", ends=True))
    common = chosen.request_body.response
    assert common.clear_route_cache
    assert common.header_mutation.set_headers[0].header.key == "x-gateway-destination-endpoint"
    assert not common.HasField("body_mutation")
    assert "envoy.lb" in MessageToDict(chosen.dynamic_metadata)


def test_a_buffered_body_that_was_changed_is_sent_with_its_length() -> None:
    handler = RecordingHandler()
    handler.body = b"another"
    handler.send(head(mode=BUFFERED, answer=NONE, **{"content-length": "2"}))
    (chosen,) = handler.send(body(b"{}", ends=True))
    common = chosen.request_body.response
    assert common.body_mutation.body == b"another"
    assert {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}["content-length"] == b"7"


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED, NONE, STREAMED])
def test_a_request_without_a_body_is_picked_on_its_headers(mode: int) -> None:
    handler = RecordingHandler()
    assert kinds(handler.send(head(ends=True, mode=mode))) == ["request_headers"]
    assert handler.requests[0].path == ""  # a POST without one is read by nobody
    handler = RecordingHandler()
    handler.send(head(ends=True, mode=mode, method="GET"))
    assert handler.requests[0].path == "/v1/completions"


def test_a_body_that_is_streamed_passes_after_a_choice_by_load() -> None:
    handler = RecordingHandler()
    assert kinds(handler.send(head(mode=STREAMED))) == ["request_headers"]
    assert kinds(handler.send(body(b"a"), body(b"b", ends=True))) == ["request_body", "request_body"]
    assert handler.requests[0].path == ""


def test_the_answer_by_way_of_here() -> None:
    handler = RecordingHandler()
    handler.send(head(), body(b"{}", ends=True))
    (first,) = handler.send(answer_head())
    assert first.response_headers.response.header_mutation.set_headers[0].header.raw_value == b"yes"
    assert handler.response_starts == [(200, None)]
    data = b"y" * 130_000
    responses = handler.send(pb.ProcessingRequest(response_body={"body": data}))
    assert echoed(responses, "response_body") == (data, [False] * 3)
    (last,) = handler.send(pb.ProcessingRequest(response_body={"end_of_stream": True}))
    assert last.response_body.response.body_mutation.streamed_response.end_of_stream
    assert (handler.response_body, handler.end_count, handler.stream.phase) == (data, 1, Phase.OVER)


def test_the_answer_s_trailers_are_its_end() -> None:
    handler = RecordingHandler()
    handler.send(head(mode=BUFFERED, answer=NONE), body(b"{}", ends=True), answer_head())
    assert kinds(handler.send(pb.ProcessingRequest(response_trailers={}))) == ["response_trailers"]
    assert handler.end_count == 1


def test_who_served_is_read_from_metadata_or_attributes() -> None:
    for fill in ("metadata", "attributes"):
        handler, answer = RecordingHandler(), answer_head()
        handler.send(head(ends=True))
        if fill == "metadata":
            served = {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}
            answer.metadata_context.filter_metadata["envoy.lb"].update(served)
        else:
            answer.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.2:8000"})
        handler.send(answer)
        assert handler.response_starts[0][1] == "10.0.0.2:8000"


@pytest.mark.parametrize("hint", ["10.0.0.1:8000, 10.0.0.2:8000", ["10.0.0.1:8000", "10.0.0.2:8000"]])
def test_subset_hints_are_lists_or_text(hint: Any) -> None:
    message = head()
    assert read_subset_hint(message) is None
    name = "x-gateway-destination-endpoint-subset"
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({name: hint})
    assert read_subset_hint(message) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({name: []})
    assert read_subset_hint(message) == []


def test_a_body_too_large_is_the_client_s_fault() -> None:
    handler = RecordingHandler()
    handler.send(head())
    with pytest.raises(RequestError) as caught:
        handler.send(*[body(b"x" * 60_000)] * 20)
    assert caught.value.status == 413
    handler.stream.refuse(413, [(b"content-type", b"application/json")], b"{}")
    (response,) = handler.stream.pop_responses()
    assert response.immediate_response.status.code == 413
    assert response.immediate_response.body == b"{}"


@pytest.mark.parametrize(
    ("name", "value"), [("a b", "x"), ("x", "a\r\nb: c"), ("x", "\0"), (":method", "GET X"), (":path", "no"), ("", "x")]
)
def test_headers_that_no_parser_would_pass_are_refused(name: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        RecordingHandler().send(head(**{name: value}))
    assert caught.value.status == 400


def test_an_answer_that_envoy_made_itself_passes() -> None:
    handler = RecordingHandler()
    assert kinds(handler.send(answer_head("503", ends=True))) == ["response_headers"]
    handler = RecordingHandler()
    handler.chooses_at_once = False
    handler.send(head(), body(b"{}", ends=True))
    assert kinds(handler.send(answer_head("504", ends=True))) == ["response_headers"]
    assert handler.is_cancelled
    assert not handler.response_starts


_data = st.binary(max_size=30)
MESSAGES = st.one_of(
    st.builds(head, ends=st.booleans(), mode=st.integers(0, 5), answer=st.integers(0, 5), config=st.booleans()),
    st.builds(body, _data, ends=st.booleans()),
    st.builds(answer_head, st.sampled_from(["200", "x", ""]), ends=st.booleans()),
    st.builds(lambda d, e: pb.ProcessingRequest(response_body={"body": d, "end_of_stream": e}), _data, st.booleans()),
    st.just(pb.ProcessingRequest(request_trailers={})),
    st.just(pb.ProcessingRequest(response_trailers={})),
    st.just(pb.ProcessingRequest()),
)


@given(st.lists(MESSAGES, max_size=12), st.booleans())
def test_whatever_comes_is_answered_or_out_of_turn(messages: list[Any], at_once: bool) -> None:
    """What is out of turn changes nothing; one request is complete once, and ends once."""
    handler = RecordingHandler()
    handler.chooses_at_once = at_once
    for message in messages:
        before = handler.stream.phase
        try:
            handler.send(message)
        except UnexpectedMessage:
            assert handler.stream.phase is before
    assert len(handler.requests) <= 1
    assert handler.end_count <= 1
