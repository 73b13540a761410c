"""Every parser in Python that reads what others send, for a fuzzer: what each may raise, and a budget of work.

Work is the lines of our own code that run, so a parser that is quadratic in its input is found on any machine, however
busy. What a C library does within one line is not seen: those inputs have bounds of their own (docs/security.md).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from events.codec import decode_batch, encode_batch
from events.frames import parse_live_message, parse_replay_request, parse_reply_message, parse_snapshot_message
from events.types import AllBlocksCleared, BlockRemoved, BlockStored, DecodeError, EventBatch
from prompts.anthropic import convert_to_chat, parse_messages
from prompts.chat_completions import parse_chat, parse_completion
from prompts.chat_template import ChatTemplate, ChatTemplateError
from prompts.errors import RequestError
from prompts.routing import parse_routing
from router.decide.config import CostConfig, LearnConfig
from router.decide.load_tracker import LoadTracker
from router.edge.continuation import StreamContinuation
from router.edge.event_converter import EventConverter
from router.edge.response_progress import find_usage
from router.fleet import worker_responses
from router.fleet.peers import LoadMessage, PeerLoads, TargetLoad
from router.fleet.worker_settings import parse_worker_flag
from router.http.config import HttpLimits
from router.http.headers import ProtocolError
from router.http.request import BadRequest, RequestParser
from router.http.response import parse_response_head
from router.index.protocol import HolderId
from simulation.steps import StepTimes

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(str(ROOT / room) for room in ("router", "events", "prompts"))
LINES, LINES_PER_BYTE = 3_000, 12
"""An input of n bytes may cost LINES + n * LINES_PER_BYTE lines."""


class TooMuchWork(AssertionError):
    pass


@dataclass(frozen=True)
class Parser:
    name: str
    read: Callable[[bytes], object]
    examples: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = ()
    """What it may raise."""
    units: tuple[bytes, ...] = field(default=())
    """Repeated many times over: where quadratic work would show."""


def count_lines(call: Callable[[], object]) -> int:
    """Lines of our rooms that run in `call`."""
    lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "call":
            return count if frame.f_code.co_filename.startswith(ROOMS) else None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def check_work(parser: Parser, data: bytes) -> bool:
    """Read `data` within the budget; whether it was accepted. Raises TooMuchWork, and whatever it must not raise."""
    is_accepted = True

    def read() -> None:
        nonlocal is_accepted
        try:
            parser.read(data)
        except parser.refuses:
            is_accepted = False

    lines = count_lines(read)
    if lines > LINES + LINES_PER_BYTE * len(data):
        raise TooMuchWork(f"{parser.name}: {len(data)} bytes cost {lines} lines: {data[:200]!r}")
    return is_accepted


def mutate_example(rng: random.Random, parser: Parser) -> bytes:
    """One of its examples, changed a little; sometimes with a stretch of it many times over."""
    data = bytearray(rng.choice(parser.examples))
    for _ in range(rng.randint(1, 4)):
        position, kind = rng.randrange(len(data) + 1), rng.randrange(7)
        if kind == 0:
            del data[position:]
        elif kind == 1 and position < len(data):
            data[position] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[position:position] = rng.randbytes(rng.randint(1, 4))
        elif kind == 3:
            del data[position : position + rng.randint(1, 8)]
        elif kind == 4:
            other_example = rng.choice(parser.examples)
            start = rng.randrange(len(other_example) + 1)
            data[position:position] = other_example[start : start + rng.randint(1, 64)]
        elif kind == 5:
            data[position:position] = bytes(data[position : position + rng.randint(1, 32)]) * rng.choice((2, 20, 500))
        else:
            data[position:position] = rng.choice(
                (b"\0", b"\xff", b"\r\n", b"{", b"[", b'"', b"\xdd\xff\xff\xff\xff", b"9" * 400)
            )
    return bytes(data[: 1 << 17])


def repeat_units(parser: Parser, times: int) -> list[bytes]:
    """Each unit alone and inside an example, so many times over."""
    repetitions = [unit * times for unit in parser.units]
    return repetitions + [
        e[: len(e) // 2] + w + e[len(e) // 2 :] for w, e in itertools.product(repetitions, parser.examples)
    ]


# What is read -----------------------------------------------------------------------------------------------------


def _pieces(data: bytes) -> list[bytes]:
    """Cut at places that the data itself decides."""
    rng = random.Random(len(data))
    edges = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(3)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def _requests(data: bytes) -> None:
    parser = RequestParser(HttpLimits())
    for piece in _pieces(data):
        parser.feed(piece)
        while parser.next_request() is not None or parser.has_more:
            pass


def _answer(data: bytes) -> None:
    buffer, body = b"", None
    for piece in _pieces(data):
        buffer += piece
        if body is None:
            parsed = parse_response_head(buffer, "POST")
            if parsed is None:
                continue
            body, buffer = parsed[0].body, parsed[1]
        if not body.is_complete:
            _, buffer = body.feed(buffer)
    if body is not None:
        body.finish()


def _stream(data: bytes) -> None:
    """A worker's events: what is kept of them, their tokens, and the usage at their end."""
    find_usage(data[-4096:])
    for shape in (None, {"id": "1", "choices": [{"index": 0}]}):
        answer = StreamContinuation({}, b'{"stream":true}', is_chat=True)
        answer.build_request_body("vllm")
        if shape is not None:  # as where another worker goes on
            answer._converter = EventConverter(shape, True, True, False, 0)
        for piece in _pieces(data):
            if answer.recorder is not None:
                answer.record_and_convert(piece, is_last=False)
        if answer.recorder is not None:
            answer.record_and_convert(b"", is_last=True)
            answer.recorder.stop_recording()


def _worker(data: bytes) -> None:
    for read in (worker_responses.read_models, worker_responses.read_server_info):
        _call_suppressing(DecodeError, read, data)
    for read_sources in (worker_responses.read_sources, worker_responses.read_publisher):
        _call_suppressing(DecodeError, read_sources, data, "http://10.0.0.1:8000")
    page = data.decode(errors="replace")
    worker_responses.read_engine_sizes(page)
    _call_suppressing(ValueError, parse_worker_flag, page)


def _call_suppressing(error: type[Exception], call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(error):
        call(*args)


def _peer(data: bytes) -> None:
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig(enabled=False))
    tracker.add_target("w", None, HolderId(0))
    loads = PeerLoads(tracker, "us")
    for _ in range(2):
        loads.apply_message(data, 1.0)
    loads.expire(100.0)


def _events(data: bytes) -> None:
    _call_suppressing(DecodeError, decode_batch, data)
    for parse in (parse_live_message, parse_reply_message, parse_replay_request, parse_snapshot_message):
        for frames in (
            [b"kv", data[:8], data[8:]],
            [b"", data[:24], data[:8]],
            [b"", data[:8], data[:16], data],
            [data[:8], data[8:]],
            [b"", data[:8], data],
            [data],
        ):
            _call_suppressing(DecodeError, parse, frames)


def _bodies(data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        _call_suppressing(RequestError, parse_routing, path, data)
    _call_suppressing(RequestError, parse_chat, data)
    _call_suppressing(RequestError, parse_completion, data)
    _call_suppressing(RequestError, lambda: convert_to_chat(parse_messages(data), None))


def _template(data: bytes) -> None:
    template = ChatTemplate(data.decode(errors="replace"))
    template.find_content_format()


def _examples() -> dict[str, tuple[bytes, ...]]:
    load = LoadMessage(1, "them", "e", 1, True, [TargetLoad("w", 1.0, 0.5, 2.0, 1.0, 3, 900, 0.5)])
    store_event = BlockStored([1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0)
    batch = EventBatch(1.0, [store_event, BlockRemoved([1], "GPU"), AllBlocksCleared()], 0)
    chat = (
        b'{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],'
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"stop":["a"]}'
    )
    turns = (
        b'{"model":"m","max_tokens":9,"system":[{"type":"text","text":"s"}],"tools":[{"name":"f","input_schema":{}}],'
        b'"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{}}]},'
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"r"}]}]}]}'
    )
    event = (
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","prompt_token_ids":[1,2],'
        b'"choices":[{"index":0,"text":"a","delta":{"content":"a"},"token_ids":[7],"finish_reason":null}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    )
    return {
        "requests": (
            b"POST /v1 HTTP/1.1\r\nHost: r\r\nContent-Length: 4\r\n\r\n{}  GET / HTTP/1.1\r\nHost: r\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
        ),
        "answers": (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"HTTP/1.0 500 Oops\r\nServer: x\r\n\r\nno",
        ),
        "streams": (event * 2 + b"data: [DONE]\n\n", b": ping\n\n" + event, b'data: {"error":{"message":"x"}}\n\n'),
        "workers": (
            b'{"data":[{"id":"m","owned_by":"vllm","root":"/m","max_model_len":4096},{"id":"l","parent":"m"}]}',
            b'[{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"","data_parallel_rank":0,'
            b'"groups":[{"group_idx":0,"kind":"full_attention","block_size":16}]}]',
            b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n',
            b"http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,max_num_seqs=4",
            b'{"max_total_num_tokens": 100000}',
        ),
        "peers": (msgspec.msgpack.encode(load),),
        "events": (
            encode_batch(batch),
            msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [1, 2], 2, None, "GPU"]], 0]),
        ),
        "bodies": (
            chat,
            turns,
            b'{"model":"m","prompt":[[1,2],[3]],"max_tokens":3}',
            b'{"prompt":"x","n":2,"logit_bias":{"1":2}}',
        ),
        "templates": (
            b"{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{% if x %}a{% endif %}",
            b"{% set n = namespace(x=1) %}{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{%endfor%}",
        ),
    }


def parsers() -> list[Parser]:
    examples = _examples()

    def of(name: str, read: Callable[[bytes], object], *units: bytes, refuses: Any = ()) -> Parser:
        return Parser(name, read, examples[name], refuses, units)

    heads = (b"a:\r\n", b"GET / HTTP/1.1\r\nHost: r\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"1\r\na\r\n", b"\r\n", b" ")
    # They end their request.
    odd_stream = (ProtocolError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    return [
        of("requests", _requests, *heads, refuses=BadRequest),
        of("answers", _answer, *heads, refuses=ProtocolError),
        of("streams", _stream, b"data: {}\n\n", b"\n", b'"usage"', b"data:", b"[", refuses=odd_stream),
        of("workers", _worker, b"[", b'{"id":"m"},', b'a="', b",", b"cache_config_info{\n", b"\n"),
        of("peers", _peer, b"\x91", b"\xc0", b"\xa1w"),
        of("events", _events, b"\x91", b"\xc0", b"\x81\xa4type\xa1x"),
        of("bodies", _bodies, b"[", b"{},", b'{"role":"user"},', b"1,", b'"",', b'{"a":'),
        of("templates", _template, b"{{a}}", b"{%if a%}", b"{% set a=a %}", b"(", b"{{", b"{% for m in messages %}",
           refuses=(ChatTemplateError, RecursionError)),
    ]  # fmt: skip
