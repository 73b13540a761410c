"""The HTTP process's side of the core: sends requests and commands, and receives the outputs of each step.

Owns the socket to the core process and the streams of the requests in flight. Outputs that a slow reader has not read
are merged, so that the buffer of a request is bounded by the tokens that it may generate. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Literal, cast

import msgspec

from engine.config import EngineConfig
from engine.core import EngineStats, SimulationLag
from engine.core_messages import (
    AbortRequests,
    AddRequests,
    CallCore,
    CallDone,
    Command,
    CoreInfo,
    CoreReady,
    FrameReader,
    Report,
    StepOutputs,
    encode_frame,
)
from engine.process.logprob_budget import LogprobBudget, LogprobShare
from engine.types import Request, SequenceOutput, count_logprobs
from events.publisher import PublisherStats
from options.child_process import start_child
from prompts import RequestError

TOKENS_PER_PAUSE = 1024
"""Unread tokens that a request's reader gets before the event loop serves others, some 4 ms of decoding and parsing."""

log = logging.getLogger("engine.client")


class EngineDeadError(RequestError):
    """The core process has ended, or could not start, for a `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is not running: {reason}", code="unavailable", status=503)
        self.reason = reason


class OutputStream:
    """Outputs of all sequences of one HTTP request, for one reader. Outputs of one sequence come in order.

    Outputs of a sequence that are not read yet are merged. If the unsent logprobs exceed the budget, the stream fails
    and is closed.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str], logprob_share: LogprobShare) -> None:
        self.logprob_share = logprob_share
        """Share of the logprob budget. The reader releases the logprobs of outputs that it has sent."""
        self._client = client
        self._open_request_ids = set(request_ids)
        self._pending_output_by_id: dict[str, SequenceOutput] = {}
        self._has_news = asyncio.Event()
        self._error: Exception | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        """Wait for generated tokens, and return those since the last call, merged into one output for each sequence.

        At most TOKENS_PER_PAUSE tokens are returned, and other requests are served before the next call returns more.
        The iteration ends when all sequences have finished. If the stream has failed, it raises the error at the end.
        """
        while not self._pending_output_by_id:
            if self._error is not None:
                raise self._error
            if not self._open_request_ids:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        outputs = self._take_outputs()
        if self._pending_output_by_id:
            await asyncio.sleep(0)
        return outputs

    def _take_outputs(self) -> list[SequenceOutput]:
        """Remove unread outputs of at most TOKENS_PER_PAUSE tokens, and return them. A larger output is split."""
        outputs: list[SequenceOutput] = []
        remaining_tokens = TOKENS_PER_PAUSE
        for request_id, output in list(self._pending_output_by_id.items()):
            if not remaining_tokens:
                break
            if len(output.token_ids) > remaining_tokens:
                output = take_first_tokens(output, remaining_tokens)
            else:
                del self._pending_output_by_id[request_id]
            outputs.append(output)
            remaining_tokens -= len(output.token_ids)
            if output.finish_reason is not None:
                self._open_request_ids.discard(request_id)
        return outputs

    def close(self) -> None:
        """Abort all sequences that still run, and forget their unread outputs. Idempotent."""
        self.logprob_share.close()
        self._abort(list(self._open_request_ids))

    def abort(self, request_id: str) -> None:
        """Abort one sequence if it still runs, and forget its unread output."""
        if request_id in self._open_request_ids:
            self._abort([request_id])

    def _abort(self, request_ids: list[str]) -> None:
        self._open_request_ids.difference_update(request_ids)
        for request_id in request_ids:
            self._pending_output_by_id.pop(request_id, None)
        self._client.abort(request_ids)

    def deliver(self, output: SequenceOutput) -> None:
        """Give newly generated tokens of a sequence to the reader. Unread outputs of a sequence are merged.

        If too many logprobs are not sent yet, the reader gets an error, and this stream is closed.
        """
        if output.logprobs or output.prompt_logprobs:
            logprob_count = count_logprobs(output.logprobs or ()) + count_logprobs(output.prompt_logprobs or ())
            try:
                self.logprob_share.acquire(logprob_count)
            except RequestError as error:
                self.fail(error)
                self.close()
                return
        unread_output = self._pending_output_by_id.get(output.request_id)
        if unread_output is None:
            self._pending_output_by_id[output.request_id] = output
        else:
            merge_outputs(unread_output, output)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the outputs that have arrived."""
        self._error = error
        self._has_news.set()


def _count_prompt_logprobs(request: Request) -> int:
    """Return the number of logprobs of its prompt that a request asks for."""
    top_count = request.params.prompt_logprobs
    return 0 if top_count is None else (top_count + 1) * len(request.token_ids)


def merge_outputs(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    """Merge two consecutive outputs of one sequence into the first one, and return it.

    Only a sequence's first output has facts about the prompt, so the second of two has none.
    """
    first.token_ids.extend(second.token_ids)
    if second.logprobs:
        first.logprobs = first.logprobs or []
        first.logprobs.extend(second.logprobs)
    first.finish_reason = second.finish_reason
    first.stop_token_id = second.stop_token_id
    first.error, first.is_client_error = second.error, second.is_client_error
    return first


def take_first_tokens(output: SequenceOutput, count: int) -> SequenceOutput:
    """Split an output: remove its first `count` tokens, and return them as an output of their own.

    The returned output also gets what is reported once, with the first token: `cached_tokens`, `queue_s` and
    `prompt_logprobs`.
    """
    logprobs = output.logprobs
    first_output = SequenceOutput(
        request_id=output.request_id,
        token_ids=output.token_ids[:count],
        cached_tokens=output.cached_tokens,
        queue_s=output.queue_s,
        logprobs=None if logprobs is None else logprobs[:count],
        prompt_logprobs=output.prompt_logprobs,
    )
    del output.token_ids[:count]
    if logprobs is not None:
        del logprobs[:count]
    output.cached_tokens = output.queue_s = None
    output.prompt_logprobs = None
    return first_output


class EngineClient(asyncio.Protocol):
    """Starts one core process, and talks to it over a socket. Make it with `start`, then await `wait_ready`."""

    def __init__(self, core_process: subprocess.Popen[bytes], on_death: Callable[[str], None]) -> None:
        """Create the client of a core process. `on_death` is called once, if the process ends before `close`."""
        self._core_process = core_process
        self._on_death = on_death
        self._ready_future: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self.death_reason: str | None = None
        """Reason why the core has ended; None while it runs."""

        # Messages over the socket.
        self._transport: asyncio.Transport | None = None
        self._frame_reader = FrameReader()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._encoder = msgspec.msgpack.Encoder()

        # Requests and calls that the core has not finished.
        self._stream_by_request_id: dict[str, OutputStream] = {}
        self.logprob_budget = LogprobBudget()
        self._pending_calls: dict[int, asyncio.Future[str | None]] = {}
        self._call_count = 0
        self._open_ping: tuple[int, float] | None = None
        """Call id of the ping that is not answered yet, and the time when it was sent."""

        # Last statistics of the core, which sends them after a step, up to ten times a second.
        self.stats: EngineStats | None = None
        self.publisher_stats: PublisherStats | None = None
        self.simulation_lag: SimulationLag | None = None

    @classmethod
    async def start(cls, config: EngineConfig, on_death: Callable[[str], None]) -> EngineClient:
        """Start a core process, connect to it by a pair of sockets, and send it the configuration.

        `on_death` is called once, with the reason, if the core process ends before `close`.
        """
        core_process, client_sock = start_child("engine.process.core_process")
        client_sock.sendall(encode_frame(msgspec.msgpack.encode(config)))
        client_sock.setblocking(False)
        _, client = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(core_process, on_death), sock=client_sock
        )
        return client

    async def wait_ready(self) -> CoreInfo:
        """Wait until the core can serve. Raises EngineDeadError with the reason if it cannot."""
        return await asyncio.shield(self._ready_future)

    @property
    def in_flight_count(self) -> int:
        """Number of sequences that the core has not finished."""
        return len(self._stream_by_request_id)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Send requests to the engine core, and return the stream of the tokens that they generate.

        Raises EngineDeadError, or RequestError if the requests ask for too many logprobs of prompts.
        """
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        self.logprob_budget.check_prompts(sum(map(_count_prompt_logprobs, requests)))
        payload = self._encoder.encode(AddRequests(list(requests)))  # may raise, so no stream is registered yet
        stream = OutputStream(self, [request.request_id for request in requests], LogprobShare(self.logprob_budget))
        for request in requests:
            assert request.request_id not in self._stream_by_request_id, request.request_id
            self._stream_by_request_id[request.request_id] = stream
        self._write(payload)
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sequences and free their memory. Ids of finished sequences are ignored."""
        running_ids = [request_id for request_id in request_ids if request_id in self._stream_by_request_id]
        for request_id in running_ids:
            del self._stream_by_request_id[request_id]
        if running_ids and self.death_reason is None:
            self._send(AbortRequests(running_ids))

    async def call_core(
        self, operation: Literal["reset", "sleep", "wake", "reload"], *, level: int = 1, path: str | None = None
    ) -> None:
        """Have the core empty its prefix cache, sleep, wake up or load other weights, and wait until it has.

        Running sequences keep their blocks. `level`: for "sleep", 2 to free the weights in host memory, too. `path`:
        for "reload", the folder of the weights, or None for the last one. Raises ValueError with the reason if the
        operation fails, and EngineDeadError.
        """
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        self._call_count += 1
        call_id = self._call_count
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._pending_calls[call_id] = future
        self._send(CallCore(call_id, operation, level, path))
        try:
            error = await future
        finally:
            self._pending_calls.pop(call_id, None)
        if error is not None:
            raise ValueError(error)

    def ping_core(self) -> float:
        """Send a ping to the core unless it has yet to answer one, and return for how many seconds it has not.

        Returns 0 while another call is pending, because a change of weights takes long.
        """
        now = time.monotonic()
        if self._open_ping is None and self.death_reason is None:
            self._call_count += 1
            self._open_ping = self._call_count, now
            self._send(CallCore(self._call_count, "ping"))
        if self._open_ping is None or self._pending_calls:
            return 0.0
        _, sent_at_s = self._open_ping
        return now - sent_at_s

    async def close(self, timeout_s: float = 5.0) -> None:
        """End the core process; kill it after `timeout_s`, or at once while it still starts and has nothing to save."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
        if not self._ready_future.done():
            self._core_process.kill()
        exit_wait = asyncio.get_running_loop().run_in_executor(None, self._core_process.wait, timeout_s)
        try:
            await exit_wait
        except subprocess.TimeoutExpired:
            log.warning("the core process did not end within %.0f s and is killed", timeout_s)
            self._core_process.kill()
            self._core_process.wait()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle the reports of the core process that these bytes complete. Asyncio calls this.

        A report has generated tokens, says that the core is ready, replies to a call, or says why the core ends.
        """
        for payload in self._frame_reader.feed(data):
            report = self._decoder.decode(payload)
            if isinstance(report, StepOutputs):
                self._deliver_outputs(report)
            elif isinstance(report, CoreReady):
                self._ready_future.set_result(report.info)
            elif isinstance(report, CallDone):
                self._finish_call(report)
            else:
                self._mark_dead(report.message)

    def _finish_call(self, report: CallDone) -> None:
        """Note the answer to a ping, or hand the reply to the caller that waits for it."""
        if self._open_ping is not None and report.call_id == self._open_ping[0]:
            self._open_ping = None
        future = self._pending_calls.get(report.call_id)
        if future is not None and not future.done():
            future.set_result(report.error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_closing:
            self._mark_dead("the core process ended without a word" + (f": {exc}" if exc else ""))

    def _deliver_outputs(self, report: StepOutputs) -> None:
        """Store statistics, and give each output to the stream of its request."""
        if report.stats is not None:
            self.stats = report.stats
            self.publisher_stats = report.publisher_stats
            self.simulation_lag = report.simulation_lag
        streams = self._stream_by_request_id
        for output in report.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # the request was aborted while the core computed this output
            if output.finish_reason is not None:
                del streams[output.request_id]
            stream.deliver(output)

    def _send(self, command: Command) -> None:
        self._write(self._encoder.encode(command))

    def _write(self, payload: bytes) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(payload))

    def _mark_dead(self, reason: str) -> None:
        """Let all streams and calls fail with EngineDeadError, because the core has ended, and call `on_death`."""
        if self.death_reason is not None:
            return
        exit_status = self._core_process.poll()
        self.death_reason = reason if exit_status is None else f"{reason} (exit status {exit_status})"
        error = EngineDeadError(self.death_reason)
        if not self._ready_future.done():
            self._ready_future.set_exception(error)
        for stream in set(self._stream_by_request_id.values()):
            stream.fail(error)
        self._stream_by_request_id.clear()
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(error)
        self._on_death(self.death_reason)
