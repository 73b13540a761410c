"""Handlers that generate: chats, completions, Messages and Responses, answered by JSON or a stream of events.

The head of a stream is sent with its first token, so that an error before it has the right status. A first token that
takes longer than `KEEPALIVE_COMMENT_S` is preceded by a comment, because clients and proxies give up on silent
connections. A client that leaves cancels its handler, which aborts the sequences. A client that reads slowly makes the
outputs of the core merge; the core never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from engine.config import ServerConfig
from engine.http.body_workers import BodyParser
from engine.http.metrics import RequestClock
from engine.http.request_body import receive_body
from engine.http.state import STATE, ServerState
from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta
from engine.process.client import OutputStream, take_first_tokens
from engine.protocol.chat import ChatFormatter
from engine.protocol.completions import CompletionFormatter
from engine.protocol.generation import Generation, make_generation
from engine.protocol.logprobs import LogprobFormatter
from engine.protocol.messages import MessagesFormatter
from engine.protocol.parsed_request import ParsedRequest, read_response, read_response_references
from engine.protocol.responses import ResponsesFormatter
from engine.types import Constraint, FinishReason, SequenceOutput, count_logprobs
from prompts import ChatRequest, RequestError

log = logging.getLogger("engine.server")

_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ID_PREFIX_BY_API = {"chat": "chatcmpl-", "completion": "cmpl-", "messages": "msg_", "responses": "resp_"}
KEEPALIVE_COMMENT_S = 5.0
"""Silence after which a stream sends a comment; up to twice as long after other writes."""
KEEPALIVE_COMMENT = b": keep-alive\n\n"
POSITIONS_PER_PAUSE = 64
"""Positions whose logprobs are formatted before the event loop serves others, in a millisecond or two."""
FINAL_WRITES_S = 1.0
"""Time after a stream's deadline for all that is still to be written: unread text, and the error that ends it."""
FINAL_WRITE_S_MIN = 0.1
"""Time that each of these writes may take in any case, because this process may be late itself."""
ResponseFormatter = ChatFormatter | CompletionFormatter | MessagesFormatter | ResponsesFormatter
SMALL_WRITE_BYTES = 32 << 10
"""Writes below this size fit into the empty buffer of a transport."""


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer `POST /v1/responses`, which may continue a stored response or refer to items of stored responses."""
    state = request.app[STATE]
    body = await receive_body(request)
    previous_messages: bytes | None = None
    items: dict[str, bytes] = {}
    # Few bodies refer to anything. Looking for the words is much cheaper than parsing every body twice.
    may_have_references = b'"previous_response_id"' in body or b'"item_reference"' in body
    if may_have_references:
        with state.admission.reserve():
            references = await state.reader.read(read_response_references, body, tenant=state.get_tenant(request))
        previous_id = references.previous_response_id
        if previous_id is not None:
            previous_messages = state.response_store.get(previous_id, "previous_response_id").messages
        items = await state.response_store.get_items(references.items)
    extra_bytes = len(previous_messages or b"") + sum(map(len, items.values()))
    parse = partial(read_response, previous_messages, items=items)
    return await generate(request, parse=parse, extra_bytes=extra_bytes)


async def generate(
    request: web.Request, *, parse: BodyParser[ParsedRequest], extra_bytes: int = 0
) -> web.StreamResponse:
    """Answer a request: parse its body, submit its sequences to the engine core, and send what they generate.

    `parse`: parser of the requested API's bodies. `extra_bytes`: size of other inputs of `parse`.
    """
    state = request.app[STATE]
    tenant = state.get_tenant(request)
    body = await receive_body(request)
    with state.admission.reserve():  # a request that is being parsed counts as waiting until it is submitted
        parsed_request = await state.reader.read(parse, body, extra_bytes=extra_bytes, tenant=tenant)
        state.check_model(parsed_request.body.model)
        requested = parsed_request.constraint
        constraint = None if requested is None else await state.reader.check(requested, tenant)
        generation = make_generation(
            parsed_request,
            id=_ID_PREFIX_BY_API[parsed_request.api] + _choose_id_ending(request, parsed_request),
            request_prefix=state.make_request_prefix(),
            model=parsed_request.body.model or state.model_names[0],
            limits=state.limits,
            factory=state.detokenizer_factory,
            constraint=constraint,
            kv_source=state.check_kv_source(parsed_request.kv_source),
        )
        formatter = _make_formatter(state, parsed_request, generation)
        stream = state.admission.submit(generation.requests)
    return await _respond(state, request, generation, stream, formatter)


def _make_formatter(state: ServerState, parsed_request: ParsedRequest, generation: Generation) -> ResponseFormatter:
    """Return the formatter of the API that was asked."""
    body, response_context = parsed_request.body, parsed_request.response_context
    if response_context is not None:
        if response_context.skipped_item_types:
            item_types = ", ".join(response_context.skipped_item_types)[:1000]
            log.warning("items of a response's input are not shown: %s", item_types)
        logprobs = LogprobFormatter(state.detokenizer_factory) if body.logprobs else None
        return ResponsesFormatter(generation, response_context, logprobs)
    if parsed_request.api == "messages":
        return MessagesFormatter(generation)
    if isinstance(body, ChatRequest):
        return ChatFormatter(generation, body, state.detokenizer_factory)
    return CompletionFormatter(generation, body, state.detokenizer_factory, parsed_request.prompt_texts)


def _choose_id_ending(request: web.Request, parsed_request: ParsedRequest) -> str:
    """Return the id that the client gives to its request, or a random one."""
    if parsed_request.api == "responses":  # whoever knows the id of a stored response can read it
        return uuid.uuid4().hex
    client_id = parsed_request.body.request_id or request.headers.get("X-Request-Id") or ""
    return client_id if _REQUEST_ID_PATTERN.fullmatch(client_id) else uuid.uuid4().hex


async def _respond(
    state: ServerState, request: web.Request, generation: Generation, stream: OutputStream, formatter: ResponseFormatter
) -> web.StreamResponse:
    """Send the answer of submitted sequences, streamed or whole, as the request wants.

    If the client disconnects, which cancels this task, or the time limit passes, unfinished sequences are aborted.
    """
    state.admission.active_request_count += 1
    deadline_timer = _start_deadline_timer(stream, state.config.request_timeout_s)
    deadline_s = None if deadline_timer is None else deadline_timer.when()
    writer = ResponseWriter(request, state.config, deadline_s)
    try:
        state.metrics.prompt_tokens += sum(map(len, generation.prompts))
        # A response has the logprobs of its text alone, and a token's part in the text shows if it comes alone.
        takes_single_tokens = isinstance(formatter, ResponsesFormatter) and bool(generation.body.logprobs)
        updater = ChoiceUpdater(state, generation, stream, takes_single_tokens=takes_single_tokens)
        if generation.body.stream:
            return await _stream_response(state, writer, stream, updater, formatter)
        async for outputs in stream:
            await format_logprobs(formatter, updater.apply(outputs))  # held until the whole answer is sent
        response_body = formatter.format_response()
        _store_response(state, formatter)
        return await writer.write_body(response_body)
    finally:
        if deadline_timer is not None:
            deadline_timer.cancel()
        unfinished_count = sum(choice.finish_reason is None for choice in generation.choices)
        state.metrics.finished_sequences["abort"] += unfinished_count
        stream.close()
        state.admission.active_request_count -= 1


def _start_deadline_timer(stream: OutputStream, limit_s: float | None) -> asyncio.TimerHandle | None:
    """Let `stream` fail after `limit_s` seconds; None: there is no limit."""
    if limit_s is None:
        return None
    message = f"the request took longer than {limit_s:g} s (--request-timeout)"
    error = RequestError(message, code="timeout", status=504)
    return asyncio.get_running_loop().call_later(limit_s, stream.fail, error)


def _store_response(state: ServerState, formatter: ResponseFormatter) -> None:
    """Store a finished response of `/v1/responses` if its request wants that."""
    if isinstance(formatter, ResponsesFormatter) and formatter.context.should_store:
        state.response_store.put(formatter.make_stored_response(), formatter.encode_messages())


def _make_sequence_error(output: SequenceOutput, constraint: Constraint | None) -> RequestError:
    """Return the error of a sequence that failed, by the client's fault or the engine's."""
    if not output.is_client_error:
        return RequestError(output.error or "the engine failed", code="engine_error", status=500)
    param = None if constraint is None else constraint.param
    return RequestError(output.error or "the request cannot be answered", param=param, code="request_refused")


class ChoiceUpdater:
    """Adds the outputs of the engine core to the choices of an answer as they are generated. Records their times.

    The core reports one output for each sequence and step, such as the next token id. It becomes a delta: the text that
    it adds to its choice, one of the `n` answers that the request asked for.
    """

    def __init__(
        self, state: ServerState, generation: Generation, stream: OutputStream, *, takes_single_tokens: bool = False
    ) -> None:
        """`takes_single_tokens`: whether each token becomes a delta of its own, also where several came at once."""
        self._generation = generation
        self._takes_single_tokens = takes_single_tokens
        sequence_ids = [request.request_id for request in generation.requests]
        self._choice_by_sequence_id = dict(zip(sequence_ids, generation.choices))
        self._stream = stream
        self._clock = RequestClock(state.metrics, time.perf_counter())

    def apply(self, outputs: list[SequenceOutput]) -> list[tuple[Choice, ChoiceDelta]]:
        """Add outputs to their choices. Return each choice with its delta. Raises RequestError if a sequence failed."""
        now_s = time.perf_counter()
        deltas: list[tuple[Choice, ChoiceDelta]] = []
        for output in outputs:
            for part in self._split(output):
                choice, delta = self._apply_output(part, now_s)
                deltas.append((choice, delta))
                if delta.finish_reason is not None:  # a stop string may end the answer before the last part
                    break
        return deltas

    def _split(self, output: SequenceOutput) -> Iterator[SequenceOutput]:
        while self._takes_single_tokens and len(output.token_ids) > 1:
            yield take_first_tokens(output, 1)
        yield output

    def _apply_output(self, output: SequenceOutput, now_s: float) -> tuple[Choice, ChoiceDelta]:
        """Add an output of the engine core to its choice. Return the choice, and the text that is new in it.

        If a stop string, for which the core does not look, ends the text, the sequence is aborted. Raises RequestError
        if the sequence has failed.
        """
        choice = self._choice_by_sequence_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            choice.finish_reason = "error"
            self._record_finish(choice, "error", now_s)
            raise _make_sequence_error(output, choice.params.constraint)
        if self._generation.is_prompt_only:
            output = drop_tokens(output)
        if output.queue_s is not None:
            self._clock.record_queue_time(output.queue_s, now_s)
        delta = choice.push(output)
        self._clock.record_tokens(choice.index, len(delta.token_ids), now_s)
        if delta.should_abort:
            self._stream.abort(output.request_id)
        if delta.finish_reason is not None:
            self._record_finish(choice, delta.finish_reason, now_s)
        return choice, delta

    def _record_finish(self, choice: Choice, reason: str, now_s: float) -> None:
        prompt_tokens = len(self._generation.get_choice_prompt(choice))
        self._clock.record_finish(choice.index, reason, prompt_tokens, now_s)


def drop_tokens(output: SequenceOutput) -> SequenceOutput:
    """Return the output of a prompt alone. The step that reads the prompt draws a token, which nobody wants."""
    return msgspec.structs.replace(
        output, token_ids=[], logprobs=None, finish_reason=FinishReason.LENGTH, stop_token_id=None
    )


async def format_logprobs(formatter: ResponseFormatter, deltas: list[tuple[Choice, ChoiceDelta]]) -> int:
    """Format the logprobs of new tokens as JSON, and return how many there were.

    There may be millions, so other requests are served in between.
    """
    if isinstance(formatter, MessagesFormatter):  # Anthropic's API has no logprobs
        return 0
    formatted_count = positions_since_pause = 0
    for choice, delta in deltas:
        formatted_count += count_logprobs(delta.logprobs) + count_logprobs(delta.prompt_logprobs)
        for _ in formatter.format_logprobs(choice, delta):
            positions_since_pause += 1
            if positions_since_pause == POSITIONS_PER_PAUSE:
                positions_since_pause = 0
                await asyncio.sleep(0)
    return formatted_count


async def _stream_response(
    state: ServerState,
    writer: ResponseWriter,
    stream: OutputStream,
    updater: ChoiceUpdater,
    formatter: ResponseFormatter,
) -> web.StreamResponse:
    """Send an answer as a stream of server-sent events, while it is generated.

    An error is raised if nothing was sent yet, and else sent as the last event.
    """
    comment_task = asyncio.ensure_future(writer.send_keepalive_comments())
    try:
        async for outputs in stream:
            deltas = updater.apply(outputs)
            logprob_count = await format_logprobs(formatter, deltas)
            if not isinstance(formatter, ResponsesFormatter):  # whose last event repeats the whole answer
                stream.logprob_share.release(logprob_count)
            events = [formatter.format_delta(choice, delta) for choice, delta in deltas]
            await writer.write(b"".join(events))
        final_events = formatter.format_end()
        _store_response(state, formatter)  # before the end is sent, because a client may continue the response then
        await writer.write(final_events)
    except RequestError as error:
        if not writer.has_started:
            raise
        state.metrics.error_responses[str(error.status)] += 1
        await writer.write(formatter.format_error(error))
    finally:
        comment_task.cancel()
    return await writer.end()


class ResponseWriter:
    """Sends one answer, whole or as a stream. A client that takes nothing for too long is dropped."""

    def __init__(self, request: web.Request, config: ServerConfig, deadline_s: float | None) -> None:
        """`deadline_s`: time of the event loop's clock at which the answer must be sent; None: no deadline."""
        self._request = request
        self._stall_s = config.stall_timeout_s
        self._deadline_s = deadline_s
        self._write_count = 0
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def has_started(self) -> bool:
        return self._response.prepared

    async def write_body(self, body: bytes) -> web.StreamResponse:
        self._response = web.Response(body=body, content_type="application/json")
        await self._response.prepare(self._request)
        return await self.end()

    async def write(self, data: bytes) -> None:
        """Send the next bytes of a stream. The first call sends the head too."""
        self._write_count += 1
        if not self.has_started:
            await self._response.prepare(self._request)
        if not data:
            return
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() == 0 and len(data) < SMALL_WRITE_BYTES:
            await self._response.write(data)  # fits into the buffer, so there is nothing to wait for
        else:
            await self._wait_for_client(self._response.write(data))

    async def send_keepalive_comments(self) -> None:
        """Send a comment after every `KEEPALIVE_COMMENT_S` without a write, unless the client reads slowly."""
        while True:
            write_count = self._write_count
            await asyncio.sleep(KEEPALIVE_COMMENT_S)
            transport = self._request.transport
            if self._write_count == write_count and transport is not None and transport.get_write_buffer_size() == 0:
                try:
                    await self.write(KEEPALIVE_COMMENT)
                except ConnectionError:  # the client has left, and the stream will notice that
                    return

    async def end(self) -> web.StreamResponse:
        await self._wait_for_client(self._response.write_eof())
        return self._response

    async def _wait_for_client(self, writing: Coroutine[Any, Any, None]) -> None:
        """Wait until bytes are written. Raises ConnectionResetError if the client takes too long."""
        limit_s = self._stall_s
        if self._deadline_s is not None:
            remaining_s = self._deadline_s + FINAL_WRITES_S - asyncio.get_running_loop().time()
            limit_s = min(limit_s, max(remaining_s, FINAL_WRITE_S_MIN))
        try:
            await asyncio.wait_for(writing, limit_s)
        except asyncio.TimeoutError:
            log.info("a client took nothing for %.0f s, or not all in time, and is dropped", limit_s)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None
