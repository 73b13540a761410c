"""Chats, completions, Messages and Responses: a body in, JSON or a stream of SSE chunks out.

Response headers of a stream are sent with its first token, so that what fails before it has the right status; where
that takes longer than `QUIET_S`, with a comment, as clients and proxies give up on connections without a byte. A
client that leaves cancels the handler, which aborts its sequences. A client that reads slowly makes the core's
outputs merge; it never makes the core wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from engine.api.anthropic import MessagesFormatter
from engine.api.choice import Choice, ChoiceDelta
from engine.api.generation import Generation, make_generation
from engine.api.parsed_request import (
    ParsedRequest,
    read_chat,
    read_completion,
    read_messages,
    read_response,
    read_response_references,
)
from engine.api.response_formatters import ChatFormatter, CompletionFormatter
from engine.api.responses import ResponsesFormatter
from engine.config import ServerConfig
from engine.http.body_workers import BodyParser
from engine.http.metrics import RequestClock
from engine.http.response_store import StoredResponse
from engine.http.state import ServerState, not_running, random_id
from engine.process.client import EngineDeadError, OutputStream
from engine.types import Constraint, FinishReason, SequenceOutput
from prompts import ChatRequest, RequestError

log = logging.getLogger("engine.server")

STATE = web.AppKey("state", ServerState)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
QUIET_S = 5.0
"""A stream that says nothing for so long sends a comment."""
COMMENT = b": keep-alive\n\n"
PAUSE_LOGPROBS = 2048
"""Logprobs that are formatted between two pauses of the loop: some milliseconds."""
LAST_WORDS_S = 1.0
"""For the error that ends a stream at its deadline."""
ResponseFormatter = ChatFormatter | CompletionFormatter | MessagesFormatter | ResponsesFormatter
SMALL_WRITE_BYTES = 32 << 10
"""Less than what a transport buffers before it asks its writer to wait."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, read_chat, "chatcmpl-")


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, read_completion, "cmpl-")


async def messages(request: web.Request) -> web.StreamResponse:
    return await _answer(request, read_messages, "msg_")


async def responses(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    data, before = await state.body(request), None
    items: dict[str, bytes] = {}
    if b'"previous_response_id"' in data or b'"item_reference"' in data:
        with state.admission():
            named = await state.reader.read(read_response_references, data)
        if named.previous_response_id is not None:
            before = state.stored.get(named.previous_response_id, "previous_response_id").messages
        items = {name: state.stored.item(name, param) for name, param in named.items.items()}
    brought = len(before or b"") + sum(map(len, items.values()))
    return await _answer(request, partial(read_response, before, items=items), "resp_", brought=brought)


async def _answer(
    request: web.Request, work: BodyParser[ParsedRequest], kind: str, brought: int = 0
) -> web.StreamResponse:
    state = request.app[STATE]
    data = await state.body(request)
    with state.admission():
        reading = await state.reader.read(work, data, brought=brought)
        body = reading.body
        state.check_model(body.model)
        constraint = None if reading.constraint is None else await state.reader.check(reading.constraint)
        generation = _plan(state, request, reading, kind, constraint)
        answer: ResponseFormatter
        if reading.response_context is not None:
            if reading.response_context.skipped_item_types:
                log.warning(
                    "items of a response's input are not shown: %s",
                    ", ".join(reading.response_context.skipped_item_types)[:1000],
                )
            answer = ResponsesFormatter(generation, reading.response_context)
        elif kind == "msg_":
            answer = MessagesFormatter(generation)
        elif isinstance(body, ChatRequest):
            answer = ChatFormatter(generation, body, state.factory)
        else:
            answer = CompletionFormatter(generation, body, state.factory, reading.prompt_texts)
        stream = state.submit(generation.requests)
    return await _serve(state, request, generation, stream, answer)


def _plan(
    state: ServerState, request: web.Request, reading: ParsedRequest, kind: str, constraint: Constraint | None
) -> Generation:
    body = reading.body
    wanted = body.request_id or request.headers.get("X-Request-Id") or ""
    return make_generation(
        body,
        reading.prompts,
        id=kind + (wanted if _ID.fullmatch(wanted) and kind != "resp_" else random_id()),  # who knows it may read it
        request_prefix=state.unique_id(),
        model=body.model or state.names[0],
        limits=state.limits,
        factory=state.factory,
        parser_config=reading.parser_config,
        constraint=constraint,
    )


async def _serve(
    state: ServerState, request: web.Request, generation: Generation, stream: OutputStream, answer: ResponseFormatter
) -> web.StreamResponse:
    """Follow what was submitted to the end, answer. Whatever ends this early aborts what still runs."""
    state.enter()
    limit_s, loop = state.config.request_timeout_s, asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.call_later(limit_s, stream.fail, _too_late(limit_s))
    writer = ResponseWriter(request, state.config, None if deadline is None else deadline.when())
    try:
        state.metrics.prompt_tokens += sum(map(len, generation.prompts))
        follower = DeltaStream(state, generation, stream)
        if generation.body.stream:
            return await _stream(state, generation, writer, follower, answer)
        async for pieces in follower:
            await follower.format_logprobs(answer, pieces)
        whole = answer.format_response()
        _store(state, answer)
        return await writer.whole(whole)
    finally:
        if deadline is not None:
            deadline.cancel()
        unfinished = sum(choice.finish_reason is None for choice in generation.choices)
        state.metrics.finished["abort"] += unfinished
        stream.close()
        state.leave()


def _store(state: ServerState, answer: ResponseFormatter) -> None:
    if isinstance(answer, ResponsesFormatter) and answer.context.should_store:
        state.stored.put(StoredResponse(answer.final_response(), answer.encode_messages()))


def _too_late(limit_s: float) -> RequestError:
    return RequestError(
        f"the request took longer than {limit_s:g} s (--request-timeout)",
        param=None,
        code="timeout",
        status=504,
    )


def _ended(output: SequenceOutput, constraint: Constraint | None) -> RequestError:
    """Why a sequence ended with an error: the client's fault, or the engine's."""
    if not output.is_client_error:
        return RequestError(output.error or "the engine failed", param=None, code="engine_error", status=500)
    param = None if constraint is None else constraint.param
    return RequestError(output.error or "the request cannot be answered", param=param, code="request_refused")


class DeltaStream:
    """Turns a stream of core outputs into pieces of choices, batch by batch; times and counts them."""

    def __init__(self, state: ServerState, generation: Generation, stream: OutputStream) -> None:
        self._generation = generation
        self._stream = stream
        self._clock = RequestClock(state.metrics, time.perf_counter())

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> list[tuple[Choice, ChoiceDelta]]:
        outputs = await self._stream.__anext__()
        now_s = time.perf_counter()
        return [self._take(output, now_s) for output in outputs]

    async def format_logprobs(self, answer: ResponseFormatter, pieces: list[tuple[Choice, ChoiceDelta]]) -> None:
        """Format the logprobs of pieces, some at a time: between them the loop serves everybody else."""
        if not isinstance(answer, (ChatFormatter, CompletionFormatter)):
            return
        since_pause = 0
        for choice, piece in pieces:
            while count := answer.format_logprob_slice(choice, piece):
                if self._generation.body.stream:
                    self._stream.logprobs.release(count)
                since_pause += count
                if since_pause >= PAUSE_LOGPROBS:
                    since_pause = 0
                    await asyncio.sleep(0)

    def _take(self, output: SequenceOutput, now_s: float) -> tuple[Choice, ChoiceDelta]:
        choice = self._generation.choices_by_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            choice.finish_reason = "error"
            self._clock.finish("error", len(self._generation.prompt_of_choice(choice)), choice.completion_tokens, now_s)
            raise _ended(output, choice.params.constraint)
        piece = choice.push(output)
        self._clock.tokens(choice.index, len(piece.token_ids), now_s)
        if piece.should_abort:
            self._stream.close(output.request_id)
        if piece.finish_reason is not None:
            prompt_tokens = len(self._generation.prompt_of_choice(choice))
            self._clock.finish(piece.finish_reason, prompt_tokens, choice.completion_tokens, now_s)
        return choice, piece


async def _stream(
    state: ServerState, generation: Generation, writer: ResponseWriter, follower: DeltaStream, answer: ResponseFormatter
) -> web.StreamResponse:
    commenting = asyncio.ensure_future(writer.comment_while_quiet())
    try:
        async for pieces in follower:
            await follower.format_logprobs(answer, pieces)
            await writer.write(b"".join([answer.format_delta(choice, piece) for choice, piece in pieces]))
        last = answer.format_end()
        _store(state, answer)  # a client may go on from it as soon as it has the end
        await writer.write(last)
    except (RequestError, EngineDeadError) as error:
        if not writer.started:
            raise
        if isinstance(error, EngineDeadError):
            error = not_running(error)
        state.metrics.count_refusal(error.status)
        await writer.write(answer.format_error(error))
    finally:
        commenting.cancel()
    return await writer.end()


class ResponseWriter:
    """Sends one answer, and waits where the client does not take what was written; for ever it may not."""

    def __init__(self, request: web.Request, config: ServerConfig, ends_s: float | None) -> None:
        """`ends_s`: of the loop's clock, when the client must have all; None: when it pleases."""
        self._request = request
        self._stall_s = config.stall_timeout_s
        self._ends_s = ends_s
        self._writes = 0
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def whole(self, body: bytes) -> web.StreamResponse:
        self._response = web.Response(body=body, content_type="application/json")
        await self._response.prepare(self._request)
        return await self.end()

    async def write(self, data: bytes) -> None:
        """The next bytes of a stream; its head goes with the first call."""
        self._writes += 1
        if not self.started:
            await self._response.prepare(self._request)
        if not data:
            return
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() == 0 and len(data) < SMALL_WRITE_BYTES:
            await self._response.write(data)  # cannot have to wait
        else:
            await self._unstalled(self._response.write(data))

    async def comment_while_quiet(self) -> None:
        """Send a comment whenever nothing was written for `QUIET_S` to a client that has taken all; cancel it."""
        while True:
            before = self._writes
            await asyncio.sleep(QUIET_S)
            transport = self._request.transport
            if self._writes == before and transport is not None and transport.get_write_buffer_size() == 0:
                try:
                    await self.write(COMMENT)
                except ConnectionError:  # the client has left, which the stream finds out by itself
                    return

    async def end(self) -> web.StreamResponse:
        await self._unstalled(self._response.write_eof())
        return self._response

    async def _unstalled(self, writing: Coroutine[Any, Any, None]) -> None:
        limit_s = self._stall_s
        if self._ends_s is not None:
            left_s = self._ends_s - asyncio.get_running_loop().time()
            limit_s = min(limit_s, max(left_s, LAST_WORDS_S))
        try:
            await asyncio.wait_for(writing, limit_s)
        except asyncio.TimeoutError:
            log.info("a client took nothing for %.0f s, or not all in time, and is dropped", limit_s)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None
