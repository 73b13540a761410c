"""The core process: the step loop over model, cache and event publisher, in a process that shares nothing with HTTP.

Between steps the loop takes what has arrived on its socket without waiting; idle, it sleeps on the socket. It never
waits for the socket to take bytes: what does not fit is kept and sent later (bounded by the tokens of the requests in
flight). When the socket closes, for whatever reason, the process ends: no orphans.

Knows nothing of HTTP, text or clients. The other end is `engine.process.client`; the messages are in
`engine.messages`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from engine.assembly import Assembled, assemble
from engine.config import EngineConfig
from engine.messages import (
    Abort,
    Add,
    ChangeWeights,
    Command,
    Done,
    Failed,
    FrameReader,
    Outputs,
    Ready,
    Report,
    ResetPrefixCache,
    frame,
    split_output,
)
from engine.types import DecodedTokens, FinishReason, RunnerLostError, SequenceOutput
from options.logs import configure_logging

STATS_PERIOD_S = 0.1
LAST_WORDS_S = 5.0

log = logging.getLogger("engine.process")


class CoreSocket:
    """The core's end of the socket: reads without waiting unless told to, writes what fits and keeps the rest."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent = bytearray()
        self.closed = False

    def receive(self, wait: bool) -> list[Command]:
        """The commands that have arrived; with `wait`, sleep until there is one (or the socket closes)."""
        if wait:
            self._wait()
        commands: list[Command] = []
        while not self.closed:
            try:
                data = self._sock.recv(1 << 20)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
                break
            commands.extend(self._decoder.decode(payload) for payload in self._reader.feed(data))
        return commands

    def send(self, report: Report) -> None:
        self._unsent += frame(self._encoder.encode(report))
        self.flush()

    def flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                self.closed = True
                return
            del self._unsent[:sent]

    def last_words(self, message: str) -> None:
        """Tell the other side why the core ends, and wait until it is sent."""
        self.send(Failed(message))
        end_s = time.monotonic() + LAST_WORDS_S
        while self._unsent and not self.closed and time.monotonic() < end_s:
            select.select([], [self._sock], [], 0.1)
            self.flush()

    def _wait(self) -> None:
        while not self.closed:
            readable, _, _ = select.select([self._sock], [self._sock] if self._unsent else [], [])
            self.flush()
            if readable:
                return


class CoreLoop:
    """Take commands, make a step, send what it produced; until the socket closes."""

    def __init__(self, assembled: Assembled, link: CoreSocket, *, check_invariants: bool = False) -> None:
        self._core = assembled.core
        self._executor = assembled.executor
        self._asleep: int | None = None
        """How deeply."""
        self._lateness = assembled.executor.simulation_lag
        self._publisher = assembled.publisher
        self._link = link
        self._checks = check_invariants
        self._refused: list[SequenceOutput] = []

    def run(self) -> None:
        core, link = self._core, self._link
        stats_due_s = 0.0
        idle_told = False
        while not link.closed:
            busy = core.has_work
            if not busy and not idle_told:
                link.send(self._report([], (), with_stats=True))
            idle_told = not busy
            for command in link.receive(wait=not busy):
                self._obey(command)
            refused, self._refused = self._refused, []
            outputs: Collection[SequenceOutput] = ()
            if core.has_work:
                outputs = core.step(time.monotonic())
                if self._checks:
                    core.check_invariants()
            now_s = time.monotonic()
            stats_due = now_s >= stats_due_s
            if stats_due:
                stats_due_s = now_s + STATS_PERIOD_S
            if refused or outputs or stats_due:
                self._send_long(outputs)
                link.send(self._report(refused, outputs, with_stats=stats_due))
            else:
                link.flush()

    def _send_long(self, outputs: Collection[SequenceOutput]) -> None:
        """Send what of long outputs comes before their last part, a message each, and leave the last part."""
        if isinstance(outputs, DecodedTokens):
            return
        for output in outputs:
            if output.prompt_logprobs is not None:
                *parts, last = split_output(output)
                for part in parts:
                    self._link.send(Outputs([part]))
                output.prompt_logprobs = last.prompt_logprobs

    def _report(
        self, refused: list[SequenceOutput], outputs: Collection[SequenceOutput], *, with_stats: bool
    ) -> Outputs:
        decoded = outputs if isinstance(outputs, DecodedTokens) else None
        report = Outputs([*refused, *(outputs if decoded is None else ())], decoded=decoded)
        if not with_stats:
            return report
        events = None if self._publisher is None else self._publisher.stats
        return replace(report, stats=self._core.stats(), events=events, lateness=self._lateness())

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            for request in command.requests:
                try:
                    self._core.add(request, time.monotonic())
                except ValueError as error:  # a request the cache can never hold; the reason goes to its client
                    refusal = SequenceOutput(
                        request_id=request.request_id, token_ids=[], error=str(error), is_client_error=True
                    )
                    refusal.finish_reason = FinishReason.ERROR
                    self._refused.append(refusal)
        elif isinstance(command, Abort):
            self._core.abort(command.request_ids)
        elif isinstance(command, ChangeWeights):
            self._link.send(Done(command.call_id, self._change(command)))
        else:
            if isinstance(command, ResetPrefixCache):
                self._core.reset_prefix_cache()
            self._link.send(Done(command.call_id))

    def _change(self, change: ChangeWeights) -> str | None:
        """Why it was not done, or None."""
        if self._core.has_work:
            return f"{change.what}: sequences are running"
        if (self._asleep is None) == (change.what == "wake"):
            return f"{change.what}: the engine is {'awake' if self._asleep is None else 'asleep'}"
        try:
            if change.what == "sleep":
                self._executor.sleep(change.level)
                self._asleep = change.level
            elif change.what == "wake":
                self._executor.wake()
                self._asleep = None
            else:
                self._executor.reload(change.path)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: of a device without memory
            return f"{change.what}: {error}"
        self._core.reset_prefix_cache()  # what was computed by other weights, or lay where nothing lies now
        return None


def main(fd: int) -> int:
    """The core process's whole life. Signals are the HTTP process's affair: it drains, then closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    keep_freed_memory()
    sock = socket.socket(fileno=fd)
    config = _receive_config(sock)
    if config is None:
        return 0
    configure_logging(config.log_level, as_json=config.log_json)
    link = CoreSocket(sock)
    try:
        assembled = assemble(config)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side must hear why there is no engine
        if not isinstance(
            error, (ValueError, OSError, RunnerLostError)
        ):  # those say what to change; others are mistakes
            traceback.print_exc()
        link.last_words(f"cannot start: {error}")
        return 1
    try:
        gc.collect()
        gc.freeze()  # the model and the pool live as long as the process: collections need not visit them
        assembled.executor.watch(lambda reason: _end(link, reason))
        link.send(Ready(assembled.info))
        CoreLoop(assembled, link, check_invariants=config.check_invariants).run()
    except RunnerLostError as error:
        link.last_words(str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - the last frame of the process: tell the other side, then end
        traceback.print_exc()
        link.last_words(f"the step loop failed: {type(error).__name__}: {error}")
        return 1
    finally:
        assembled.close()
    return 0


def _end(link: CoreSocket, reason: str) -> None:
    """End the process from a thread, its loop being idle or blocked for good."""
    link.last_words(reason)
    os._exit(1)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, instead of giving it back and faulting it in again.

    Measured: 15.5 -> 12.5 ms for a step of 1,600 prompt tokens of a 0.4M model. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_TRIM_THRESHOLD, 1 << 28), (_M_TOP_PAD, 1 << 26), (_M_MMAP_THRESHOLD, 1 << 25)):
        mallopt(parameter, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""From malloc.h."""


def _receive_config(sock: socket.socket) -> EngineConfig | None:
    reader = FrameReader()
    while True:
        data = sock.recv(1 << 16)
        if not data:
            return None
        for payload in reader.feed(data):
            return msgspec.msgpack.decode(payload, type=EngineConfig)
