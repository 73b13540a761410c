"""`/v1/chat/completions` and `/v1/completions`: a body in, JSON or a stream of SSE chunks out.

Response headers of a stream are sent with its first token, so that what fails before it has the right status. A
client that leaves cancels the handler, which aborts its sequences. A client that reads slowly makes the core's
outputs merge; it never makes the core wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from engine.api.answers import DONE, ChatAnswer, CompletionAnswer, sse
from engine.api.choice import Choice, Piece
from engine.api.generation import Generation, plan_generation
from engine.http.metrics import RequestClock
from engine.http.state import ServerState, random_id, unavailable
from engine.process.client import EngineDead, OutputStream
from engine.types import FinishReason, SequenceOutput
from prompts import ChatRequest, CompletionRequest, RequestError, check_supported, parse_chat, parse_completion

log = logging.getLogger("engine.server")

STATE = web.AppKey("state", ServerState)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
Answer = ChatAnswer | CompletionAnswer
SMALL_WRITE_BYTES = 32 << 10
"""Less than what a transport buffers before it asks its writer to wait."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    data = await state.body(request)
    body = parse_chat(data)
    state.check_model(body.model)
    check_supported(body)
    state.admit(body.n or 1)
    prompt = await state.encode(len(data), lambda: state.tokenizer.chat_ids(body))
    generation = _plan(state, request, body, [prompt], "chatcmpl-")
    return await _serve(state, request, generation, ChatAnswer(generation, body, state.factory))


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    data = await state.body(request)
    body = parse_completion(data)
    state.check_model(body.model)
    check_supported(body)
    state.admit(body.n or 1)
    prompts = await state.encode(len(data), lambda: state.tokenizer.completion_ids(body))
    generation = _plan(state, request, body, prompts, "cmpl-")
    state.admit(len(generation.requests))
    texts = _echoed(state, body, generation)
    return await _serve(state, request, generation, CompletionAnswer(generation, body, state.factory, texts))


def _plan(
    state: ServerState, request: web.Request, body: ChatRequest | CompletionRequest, prompts: list[list[int]], kind: str
) -> Generation:
    wanted = body.request_id or request.headers.get("X-Request-Id") or ""
    return plan_generation(
        body,
        prompts,
        id=kind + (wanted if _ID.fullmatch(wanted) else random_id()),
        unique=state.unique_id(),
        model=body.model or state.names[0],
        limits=state.limits,
        factory=state.factory,
    )


def _echoed(state: ServerState, body: CompletionRequest, generation: Generation) -> list[str]:
    if not body.echo:
        return [""] * len(generation.prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    given = body.prompt if isinstance(body.prompt[0], str) else [None] * len(generation.prompts)
    return [
        text if isinstance(text, str) else state.tokenizer.decode(ids, skip_special_tokens=False)
        for text, ids in zip(given, generation.prompts)
    ]


async def _serve(
    state: ServerState, request: web.Request, generation: Generation, answer: Answer
) -> web.StreamResponse:
    """Submit, follow to the end, answer. Whatever ends this early aborts what still runs."""
    state.enter()
    stream: OutputStream | None = None
    deadline: asyncio.TimerHandle | None = None
    try:
        stream = state.client.submit(generation.requests)
        limit_s = state.config.request_timeout_s
        if limit_s is not None:
            deadline = asyncio.get_running_loop().call_later(limit_s, stream.fail, _too_late(limit_s))
        state.metrics.prompt_tokens += sum(map(len, generation.prompts))
        follower = PieceStream(state, generation, stream)
        if generation.streams:
            return await _stream(state, request, follower, answer)
        async for _ in follower:
            pass
        return web.Response(body=answer.whole(), content_type="application/json")
    except EngineDead as error:
        raise unavailable(f"the engine is not running: {error}") from error
    finally:
        if deadline is not None:
            deadline.cancel()
        if stream is not None:
            unfinished = sum(choice.finish_reason is None for choice in generation.choices)
            state.metrics.finished["abort"] += unfinished
            stream.close()
        state.leave()


def _too_late(limit_s: float) -> RequestError:
    return RequestError(
        f"the request took longer than {limit_s:g} s (--request-timeout)",
        param=None,
        code="timeout",
        status=504,
        type="server_error",
    )


class PieceStream:
    """Turns a stream of core outputs into pieces of choices, batch by batch; times and counts them."""

    def __init__(self, state: ServerState, generation: Generation, stream: OutputStream) -> None:
        self._generation = generation
        self._stream = stream
        self._clock = RequestClock(state.metrics, time.perf_counter())

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> list[tuple[Choice, Piece]]:
        outputs = await self._stream.__anext__()
        now_s = time.perf_counter()
        return [self._take(output, now_s) for output in outputs]

    def _take(self, output: SequenceOutput, now_s: float) -> tuple[Choice, Piece]:
        choice = self._generation.by_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            choice.finish_reason = "error"
            self._clock.finish("error", len(self._generation.prompt_of(choice)), choice.completion_tokens, now_s)
            raise RequestError(
                output.error or "the engine failed", param=None, code="engine_error", status=500, type="server_error"
            )
        piece = choice.push(output)
        self._clock.tokens(choice.index, len(piece.token_ids), now_s)
        if piece.aborts:
            self._stream.close(output.request_id)
        if piece.finish_reason is not None:
            prompt_tokens = len(self._generation.prompt_of(choice))
            self._clock.finish(piece.finish_reason, prompt_tokens, choice.completion_tokens, now_s)
        return choice, piece


async def _stream(
    state: ServerState, request: web.Request, follower: PieceStream, answer: Answer
) -> web.StreamResponse:
    response: web.StreamResponse | None = None
    try:
        async for pieces in follower:
            data = b"".join([answer.piece(choice, piece) for choice, piece in pieces])
            if response is None:
                response = await _start_stream(request)
            if data:
                await _write(state, request, response, data)
        assert response is not None, "a sequence ended without an output"
        await _write(state, request, response, answer.usage() + DONE)
    except (RequestError, EngineDead) as error:
        if response is None:
            raise
        if isinstance(error, EngineDead):
            error = unavailable(f"the engine is not running: {error}")
        state.metrics.count_refusal(error.status)
        await _write(state, request, response, sse(error.body()) + DONE)
    await _unstalled(state, request, response.write_eof())
    return response


async def _start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    await response.prepare(request)
    return response


async def _write(state: ServerState, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write, and wait where the client does not take what was written; for ever it may not."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() == 0 and len(data) < SMALL_WRITE_BYTES:
        await response.write(data)  # cannot have to wait
    else:
        await _unstalled(state, request, response.write(data))


async def _unstalled(state: ServerState, request: web.Request, writing: Coroutine[Any, Any, None]) -> None:
    try:
        await asyncio.wait_for(writing, state.config.stall_timeout_s)
    except asyncio.TimeoutError:
        transport = request.transport
        log.info("a client took nothing for %.0f s and is dropped", state.config.stall_timeout_s)
        if transport is not None:
            transport.abort()
        raise ConnectionResetError("the client does not read") from None
