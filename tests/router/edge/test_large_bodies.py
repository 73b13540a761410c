"""Large bodies are read by helper processes: with the same result, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.errors import RequestError
from prompts.routing import ApiKind, parse_routing
from prompts.tokenizer import Checkpoint, Tokenizer
from router.edge.upstream import UpstreamConnection
from router.http.body_pieces import PIECE_BYTES
from router.http.config import HttpLimits
from router.http.request import BYTES_PER_TURN, HttpRequest, RequestParser
from router.prompting import encode, prompt_worker_pool
from router.prompting.config import PromptWorkerConfig
from router.prompting.encode import (
    NAME_BYTES_MAX,
    is_light,
    is_within_bounds,
    read_large_request,
    read_prompt,
    truncate_prompt,
)
from router.prompting.model_tokenizers import LoadedTokenizer
from router.prompting.parsed_body import BodyToRead
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask, WorkerState, _inspect_body, _run_task

ROOT = Path(__file__).resolve().parents[3]
WORDS = "one two three four five " * 6000


def parts(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "many turns": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}] * 3000}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]}),
    "text": ("/v1/completions", {"prompt": WORDS}),
    "ids": ("/v1/completions", {"prompt": list(range(30_000))}),
    "the last of it": ("/v1/completions", {"prompt": WORDS, "truncate_prompt_tokens": 7}),
    "the first of it": ("/v1/completions", {"prompt": list(range(30_000)), "truncate_prompt_tokens": 7,
                                            "truncation_side": "right"}),
    "as much as there is room for": ("/v1/completions", {"prompt": WORDS, "truncate_prompt_tokens": -1}),
    "its own template": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}],
                                                 "chat_template": "{{ 1 }}"}),
    "an image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 99_999}}]}]}),
    "no ids": ("/v1/completions", {"prompt": [-1] * 40_000}),
    "too many objects": ("/v1/chat/completions", {"messages": [{}] * 60_000}),
    "a batch": ("/v1/embeddings", {"input": ["words"] * 20_000}),
}  # fmt: skip


@pytest.mark.parametrize("what", BODIES)
def test_a_helper_reads_what_this_process_would(edge: Any, make_post: Any, tmp_path: Path, what: str) -> None:
    path, fields = BODIES[what]
    body = json.dumps({"model": "tiny", "user": "u", "stream": False, **fields}).encode()
    assert not is_light(body)
    write_tokenizer(tmp_path, 1024, 4096)
    tokenizer = Tokenizer.load(tmp_path)
    expected = None
    if path != "/v1/embeddings" and what not in ("no ids", "too many objects"):
        parsed = parse_routing(path, body)
        expected = truncate_prompt(read_prompt(parsed, tokenizer, 1_000_000).token_ids, parsed, 1_000_000)

    async def scenario() -> None:
        await edge.start(policy="kv")
        edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(tokenizer, Checkpoint(str(tmp_path)))
        worker = await edge.worker(edge.reply(), max_model_len=1_000_000)
        routed = []
        edge.proxy.on_end.append(lambda exchange: routed.append(exchange.route))
        assert parts(await edge.exchange(make_post(body, path.encode())))[0] == 200
        assert worker.received[0].body == body
        (route,) = routed
        assert (None if route.token_ids is None else list(route.token_ids)) == (
            None if expected is None else list(expected)
        )
        assert (route.model, route.session, route.is_streaming) == ("tiny", "u", False)
        status, told = parts(await edge.exchange(make_post(body, f"/route?path={path}".encode())))
        assert (status, told["worker"], told["tokenized"]) == (200, "w0", expected is not None)
        assert edge.worker_pool.waiting_bytes == 0

    edge.run(scenario())


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "' + b"x" * 100_000, b"{" + b"\xff" * 100_000, b'{"a":' * 50_000, b"[" * 100_000, b"x" * 100_000],
)
def test_what_is_no_object_is_refused_all_the_same(edge: Any, make_post: Any, body: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        status, told = parts(await edge.exchange(make_post(body, b"/v1/completions")))
        assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert worker.received == []
        wrong = make_post(b'{"prompt":"%b"}' % (b"x" * 100_000), b"/v1/completions", [b"x-blockcast-priority: high"])
        assert parts(await edge.exchange(wrong))[0] == 400
        usual = make_post(b'{"model":"tiny","prompt":"%b"}' % (b"x" * 100_000), b"/v1/completions")
        assert parts(await edge.exchange(usual))[0] == 200

    edge.run(scenario())


def run(config: PromptWorkerConfig, work: Any) -> None:
    async def scenario() -> None:
        worker_pool = PromptWorkerPool(config, chat_template=None)
        try:
            await work(worker_pool)
        finally:
            worker_pool.processes.close()

    asyncio.run(scenario())


PROMPT = json.dumps({"model": "m", "prompt": list(range(1000))}).encode()


def make_body(pieces: Any, kind: ApiKind | None, **more: Any) -> BodyToRead:
    return BodyToRead(pieces, kind, **{"find_target": mock.Mock(), "is_wanted": lambda: True, **more})


IDS_ONLY = ReadTask()


def test_a_client_that_left_before_its_body_was_read_is_no_error(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        @contextlib.asynccontextmanager
        async def refuse(*_: Any) -> AsyncIterator[None]:
            await gate.wait()
            raise RequestError("the client left", param=None, status=503)
            yield  # so that this is a generator

        await edge.start()
        edge.worker_pool.inspect = refuse
        _, writer = await edge.connect()
        writer.write(make_post(b'{"model":"tiny","prompt":"' + b"x" * 100_000 + b'"}', b"/v1/completions"))
        await edge.until(lambda: edge.proxy.exchanges)
        writer.close()
        await edge.until(lambda: not edge.proxy.exchanges)
        gate.set()
        await edge.let_loop_read()
        assert not edge.metrics.http_errors

    edge.run(scenario())


def test_a_helper_that_dies_is_replaced() -> None:
    async def work(worker_pool: PromptWorkerPool) -> None:
        for _ in range(3):
            made = (await worker_pool.read(make_body((PROMPT,), "completion"), IDS_ONLY)).parsed_body
            assert (made.request.model, len(made.prompt.token_ids or ())) == ("m", 1000)
            process = worker_pool.processes.processes[0].child
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    run(PromptWorkerConfig(count=1), work)


def test_one_without_work_is_ended_and_started_again() -> None:
    async def work(worker_pool: PromptWorkerPool) -> None:
        for _ in range(2):
            (helper,) = worker_pool.processes.processes
            made = (await worker_pool.read(make_body((PROMPT,), "completion"), IDS_ONLY)).parsed_body
            assert len(made.prompt.token_ids or ()) == 1000
            worker_pool.close_idle(helper.last_used_s + 59.9)
            assert helper.child is not None
            helper.is_busy = True
            worker_pool.close_idle(helper.last_used_s + 60.1)
            helper.is_busy = False
            assert helper.is_running(), "it has a body"
            worker_pool.close_idle(helper.last_used_s + 60.1)
            assert worker_pool.processes.processes[0].child is None
            assert helper.child.wait() == -signal.SIGKILL

    run(PromptWorkerConfig(count=1), work)


def test_one_that_takes_too_long_is_ended_and_load_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is stopped, as if it were busy: no clock is compared with any work."""

    async def work(worker_pool: PromptWorkerPool) -> None:
        async with worker_pool.inspect(make_body((PROMPT,), "completion")) as inspected_body:
            process = worker_pool.processes.processes[0].child
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
            monkeypatch.setattr(prompt_worker_pool, "START_S_MAX", 0.05)
            made = (await inspected_body.read_prompt(ReadTask())).parsed_body
        assert (made.request.model, made.prompt.token_ids) == ("m", None)
        assert worker_pool.counts["failed"] == 1
        monkeypatch.undo()
        made = (await worker_pool.read(make_body((PROMPT,), "completion"), IDS_ONLY)).parsed_body
        assert len(made.prompt.token_ids or ()) == 1000

    run(PromptWorkerConfig(count=1, seconds_max=0.3), work)


def test_memory_is_bounded_and_so_is_what_waits() -> None:
    heavy = b'{"model":"m","prompt":[%b1]}' % (b"123456789," * 3_000_000)

    async def work(worker_pool: PromptWorkerPool) -> None:
        for needs_opening in (False, True):
            made = await worker_pool.read(make_body((heavy,), "completion", needs_opening=needs_opening), IDS_ONLY)
            assert made.parsed_body.prompt.token_ids is None, "the helper has no room for so many"
        made = (await worker_pool.read(make_body((PROMPT,), "completion"), IDS_ONLY)).parsed_body
        assert len(made.prompt.token_ids or ()) == 1000
        spaces = (b"{%b}" % (b" " * 12_000_000),)
        waiting = [
            asyncio.ensure_future(worker_pool.read(make_body(spaces, None, tenant=f"key {number}"), IDS_ONLY))
            for number in range(5)
        ]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        assert [error.status for error in refused] == [503, 503]
        assert worker_pool.waiting_bytes == 0
        with pytest.raises(RequestError, match="left"):
            await worker_pool.read(make_body((PROMPT,), None, is_wanted=lambda: False), IDS_ONLY)

    run(PromptWorkerConfig(count=1, memory_mb=160, waiting_mb=38), work)


@pytest.mark.parametrize(
    ("body", "within"),
    [
        (b'{"messages":[%b{}]}' % (b"{}," * encode.OBJECTS_MAX), False),
        (b'{"messages":[{"content":[%b{}]}]}' % (b"{}," * encode.OBJECTS_MAX), False),
        (b'{"tools":[%b{}]}' % (b"[[[]]]," * (encode.OBJECTS_MAX // 3)), False),
        (b'{"prompt":"%b"}' % (b'{[,\\"' * encode.VALUES_MAX), True),
        (b'{"chat_template_kwargs":{%b"a":1}}' % (b'"a":1,' * encode.VALUES_MAX), False),
        (b'{"prompt":[%b1]}' % (b"1," * 1_000_000), True),
    ],
    ids=["messages", "parts", "arrays", "a string", "keys", "ids"],
)
def test_values_are_counted_before_they_are_built(body: bytes, within: bool) -> None:
    assert is_within_bounds(body) is within
    assert read_large_request(body, None).model is None


@pytest.mark.parametrize(("side", "kept"), [("right", [0, 1, 2]), ("left", [7, 8, 9]), (None, [7, 8, 9])])
def test_a_prompt_is_truncated_at_the_side_that_the_client_names(side: str | None, kept: list[int]) -> None:
    fields = {"truncate_prompt_tokens": 3} | ({} if side is None else {"truncation_side": side})
    parsed = parse_routing("/v1/completions", json.dumps({"prompt": list(range(10)), **fields}).encode())
    assert list(truncate_prompt(parsed.prompt, parsed, 100) or ()) == kept  # type: ignore[arg-type]


def test_encoding_stops_where_the_context_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "COUNTED_CHARS", 0)
    write_tokenizer(tmp_path, 1024, 4096)
    tokenizer = Tokenizer.load(tmp_path)
    parsed = parse_routing("/v1/completions", json.dumps({"prompt": WORDS}).encode())
    prompt = read_prompt(parsed, tokenizer, 100)
    assert len(truncate_prompt(prompt.token_ids, parsed, 100) or ()) == 101
    encoded_ids = tokenizer.encode(WORDS[: 101 * encode.CHARS_PER_TOKEN_MAX], add_special_tokens=False)
    assert 101 < len(prompt.token_ids or ()) <= len(encoded_ids) + 1 < len(WORDS) / encode.CHARS_PER_TOKEN_MAX


def allocated_bytes(work: Any) -> int:
    """Bytes that it takes at most beyond what there was, for however short a time."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    work()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_never_copied_as_a_whole(chunked: bool) -> None:
    """Not when its last byte has come, not on its way to a helper process, not on its way to the worker: what is
    allocated stays within a few pieces."""
    bytes_max = 3 * PIECE_BYTES
    text = b'{"model":"m","prompt":"%b"}' % (b"x" * (16 << 20))
    parser, requests = RequestParser(HttpLimits()), []
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(text)
    parser.feed(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n%b\r\n\r\n" % framing)
    assert parser.next_request() is None

    def take() -> None:
        while (request := parser.next_request()) is not None or parser.has_more:
            if request is not None:
                requests.append(request)

    tracemalloc.start()
    try:
        for at in range(0, len(text), 1 << 16):
            part = text[at : at + (1 << 16)]
            parser.feed(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            assert allocated_bytes(take) < bytes_max
        if chunked:
            parser.feed(b"0\r\n\r\n")
            assert allocated_bytes(take) < bytes_max
        (request,) = requests
        assert max(map(len, request.pieces)) < bytes_max
        transport, pool = mock.Mock(), mock.Mock()
        connection = UpstreamConnection(pool, mock.Mock())
        transport.is_closing.return_value = False
        connection.transport = transport
        assert allocated_bytes(lambda: connection.send(b"head", request.pieces)) < bytes_max
        sent = [*transport.writelines.call_args.args[0], *(call.args[0] for call in transport.write.call_args_list)]
        assert all(a is b for a, b in zip(sent, (b"head", *request.pieces), strict=True))

        async def work(worker_pool: PromptWorkerPool) -> None:
            made = (await worker_pool.read(make_body(request.pieces, "completion"), IDS_ONLY)).parsed_body
            assert made.prompt.token_ids is None

        assert allocated_bytes(lambda: run(PromptWorkerConfig(count=1), work)) < bytes_max
        assert b"".join(request.pieces) == text
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/route"])
@pytest.mark.parametrize("fill", [b"\x00", b" "])
def test_what_a_refused_body_took_is_free_at_once(edge: Any, make_post: Any, path: bytes, fill: bytes) -> None:
    """Without the garbage collector, which hardly ever looks."""

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())
        request = make_post(fill * (4 << 20), path)
        sizes = []
        for _ in range(4):
            assert parts(await edge.exchange(request))[0] == 400
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert sizes[-1] - sizes[0] < 1 << 20, sizes

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        edge.run(scenario())
    finally:
        tracemalloc.stop()
        gc.enable()


def test_small_chunks_are_read_in_turns(edge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few bytes cost hundreds of times what large ones do; others get their turn between them."""
    turns: list[int] = []
    take = RequestParser.next_request

    def counted(parser: RequestParser) -> HttpRequest | None:
        before = parser.buffered_bytes
        request = take(parser)
        turns.append(before - parser.buffered_bytes if request is None else 0)
        return request

    monkeypatch.setattr(RequestParser, "next_request", counted)
    text = b'{"prompt":"%b"}' % (b"x" * 299_987)

    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert len(text) % 5 == 0
        chunks = b"".join(b"5\r\n%b\r\n" % text[at : at + 5] for at in range(0, len(text), 5))
        answer = await edge.exchange(head + chunks + b"0\r\n\r\n")
        assert parts(answer)[0] == 200
        assert worker.received[0].body == text

    edge.run(scenario())
    assert len(turns) > len(text) * 2 / BYTES_PER_TURN
    assert max(turns) <= BYTES_PER_TURN


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 2}, {"top_logprobs": None}, {"echo": False}])
def test_a_large_chat_that_wants_logprobs_of_its_prompt_is_known_as_a_small_one(fields: dict[str, Any]) -> None:
    """vLLM reuses no cached block for it, so none must be predicted."""
    messages = [{"role": "user", "content": WORDS}]
    body = json.dumps({"messages": messages, "echo": True, "logprobs": True, **fields}).encode()
    small_request = parse_routing("/v1/chat/completions", body)
    for kind in ("chat", None):
        assert read_large_request(body, kind).echoes_chat is small_request.echoes_chat
    assert small_request.echoes_chat is (fields in ({}, {"top_logprobs": 2}))


def test_a_large_response_has_the_limit_of_a_small_one() -> None:
    body = json.dumps({"input": "hi", "max_tokens": None, "max_output_tokens": 7}).encode()
    assert parse_routing("/v1/responses", body).output_tokens_max == 7
    assert read_large_request(body, "responses").output_tokens_max == 7


def test_a_helper_keeps_nothing_of_a_body_and_gives_no_half_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_media(*_: Any) -> None:
        raise MemoryError

    state = WorkerState(None)
    for token_count in (1000, 0):
        _inspect_body(state, (PROMPT,), "completion")
        result = _run_task(state, ReadTask())
        assert len(result.parsed_body.prompt.token_ids or ()) == token_count
        assert (state.body, state.parsed_body) == (b"", None)
        monkeypatch.setattr(prompt_worker_pool, "read_media", read_media)


def test_long_names_are_cut() -> None:
    """What nobody is called is not carried about."""
    body = b'{"model":"%b","user":%b}' % (b"m" * 10**6, b"[" * 500 + b"]" * 500)
    request = read_large_request(body, None)
    assert request.model is not None
    assert len(request.model) <= NAME_BYTES_MAX + 1
    assert request.user is None
    with pytest.raises(RequestError, match="priority: got"):
        read_large_request(b'{"priority":%b}' % (b"9" * 10**6), None)


HEAP = """
import sys
from concurrent.futures import ThreadPoolExecutor
from options.system import read_resident_bytes
from router.app.process_limits import make_heap_trimmer
before = read_resident_bytes()
with ThreadPoolExecutor(1) as threads:
    trim = make_heap_trimmer(threads)
    pieces = [bytes(5000) for _ in range(20_000)]
    last = bytes(5000)
    del pieces
    kept = read_resident_bytes()
    trim(100.0)
print(before, kept, read_resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, which is not asked")
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, cwd=ROOT, check=True)
    before, blocks, after = map(int, done.stdout.split())
    assert blocks > before + (64 << 20)
    assert after < before + (8 << 20)
