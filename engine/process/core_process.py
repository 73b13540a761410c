"""The core process: the step loop over model, cache and event publisher, in a process that shares nothing with HTTP.

Between steps the loop reads from its socket without waiting; while idle, it sleeps until the socket has data. It never
waits to write: bytes that do not fit are sent later, and are bounded by the tokens of the requests in flight. When the
socket closes, for whatever reason, the process ends within seconds, so that no process is left over.

Knows nothing of HTTP, text or clients. The other end is `engine.process.client`; the messages are in
`engine.core_messages`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import select
import socket
import time
import traceback
from contextlib import suppress

import msgspec

from engine.assembly import AssembledEngine, assemble
from engine.config import EngineConfig
from engine.core_messages import (
    AbortRequests,
    AddRequests,
    CallCore,
    CallDone,
    Command,
    CoreFailed,
    CoreReady,
    FrameReader,
    Report,
    StepOutputs,
    encode_frame,
)
from engine.types import Request, RunnerLostError, SequenceOutput
from options.child_process import exit_when_closed
from options.logs import configure_logging

STATS_PERIOD_S = 0.1
SEND_FATAL_TIMEOUT_S = 5.0
RECEIVE_BYTES_MAX = 1 << 20

log = logging.getLogger("engine.process")


class CoreSocket:
    """Sends reports to the HTTP process, and receives its commands.

    Writes never wait, because the steps of all requests would wait with them: bytes that the socket does not take are
    sent later.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frame_reader = FrameReader()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent_bytes = bytearray()
        self.is_closed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def wake(self) -> None:
        """End a wait of `receive`, the present or the next one. For any thread."""
        with suppress(OSError):  # the socket is full, so it ends the wait anyway, or closed
            self._wake_sender.send(b"\0")

    def receive(self, wait_s: float | None) -> list[Command]:
        """Return the commands that have arrived from the HTTP process.

        Waits for the first one until the socket closes, `wake` is called, or `wait_s` seconds pass (None: no limit).
        """
        if wait_s != 0.0:
            self._wait_readable(wait_s)
        commands: list[Command] = []
        while not self.is_closed:
            try:
                data = self._sock.recv(RECEIVE_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                data = b""
            if not data:
                self.is_closed = True
                break
            commands.extend(self._decoder.decode(payload) for payload in self._frame_reader.feed(data))
        return commands

    def send(self, report: Report) -> None:
        """Send a report as soon as the socket takes it."""
        self._unsent_bytes += encode_frame(self._encoder.encode(report))
        self.flush()

    def flush(self) -> None:
        """Send as many of the unsent bytes as the socket takes."""
        while self._unsent_bytes and not self.is_closed:
            try:
                sent_bytes = self._sock.send(self._unsent_bytes)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                self.is_closed = True
                return
            del self._unsent_bytes[:sent_bytes]

    def send_fatal(self, message: str) -> None:
        """Send the reason why the core ends, and wait until it is sent."""
        self.send(CoreFailed(message))
        end_s = time.monotonic() + SEND_FATAL_TIMEOUT_S
        while self._unsent_bytes and not self.is_closed and time.monotonic() < end_s:
            select.select([], [self._sock], [], 0.1)
            self.flush()

    def close(self) -> None:
        for sock in (self._sock, self._wake_receiver, self._wake_sender):
            sock.close()

    def _wait_readable(self, wait_s: float | None) -> None:
        """Wait until a command comes, the socket closes, `wake` is called or `wait_s` has passed."""
        while not self.is_closed:
            sockets_to_write = [self._sock] if self._unsent_bytes else []
            sockets_to_read = [self._sock, self._wake_receiver]
            readable_sockets, writable_sockets, _ = select.select(sockets_to_read, sockets_to_write, [], wait_s)
            self.flush()
            if self._wake_receiver in readable_sockets:
                self._wake_receiver.recv(4096)
            if readable_sockets or not writable_sockets:
                return


class CoreLoop:
    """Executes commands and steps in turn, and sends the outputs, until the socket closes."""

    def __init__(self, engine: AssembledEngine, core_socket: CoreSocket, *, check_invariants: bool = False) -> None:
        """Make the loop of an engine. `check_invariants`: whether to check scheduler and cache after every step."""
        self._core = engine.core
        self._get_simulation_lag = engine.model.get_simulation_lag
        self._publisher = engine.publisher
        self._core_socket = core_socket
        self._checks_invariants = check_invariants
        self._stats_due_s = 0.0
        """Time from which on a report has statistics again."""

    def run(self) -> None:
        """Run the engine until the socket closes: execute new commands, do one step, send its outputs, and repeat.

        Without requests, the loop sleeps until a command comes. While all requests wait for a grammar or for blocks of
        another engine, it wakes up to report statistics. Raises RunnerLostError if a device or rank is lost.
        """
        core, core_socket = self._core, self._core_socket
        core.watch(core_socket.wake)
        is_idle_reported = False
        while not core_socket.is_closed:
            is_busy = core.has_work
            if not is_busy and not is_idle_reported:
                core_socket.send(self._make_report([], with_stats=True))
                is_idle_reported = True
            if core.can_step:
                wait_s: float | None = 0.0
            else:
                wait_s = STATS_PERIOD_S if is_busy else None
            outputs: list[SequenceOutput] = []
            for command in core_socket.receive(wait_s):
                outputs += self._execute_command(command)
            if core.has_work:
                is_idle_reported = False
            if core.can_step:
                outputs += core.step(time.monotonic())
                if self._checks_invariants:
                    core.check_invariants()
            self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Send a step's outputs and those of rejected requests in one report, with statistics every STATS_PERIOD_S."""
        now_s = time.monotonic()
        is_stats_due = now_s >= self._stats_due_s
        if is_stats_due:
            self._stats_due_s = now_s + STATS_PERIOD_S
        if outputs or is_stats_due:
            self._core_socket.send(self._make_report(outputs, with_stats=is_stats_due))
        else:
            self._core_socket.flush()

    def _make_report(self, outputs: list[SequenceOutput], *, with_stats: bool) -> StepOutputs:
        """Return the message of a step, with statistics if they are due."""
        if not with_stats:
            return StepOutputs(outputs)
        publisher_stats = None if self._publisher is None else self._publisher.stats
        return StepOutputs(outputs, self._core.stats(), publisher_stats, self._get_simulation_lag())

    def _execute_command(self, command: Command) -> list[SequenceOutput]:
        """Execute a command, and send its reply if it has one. Returns the outputs of requests that were rejected."""
        if isinstance(command, AddRequests):
            outputs = [self._add_request(request) for request in command.requests]
            return [output for output in outputs if output is not None]
        if isinstance(command, AbortRequests):
            self._core.abort(command.request_ids)
        else:
            self._core_socket.send(CallDone(command.call_id, self._execute_call(command)))
        return []

    def _add_request(self, request: Request) -> SequenceOutput | None:
        """Queue a request. Returns None; or, if the request can never be served, an output with the reason."""
        try:
            self._core.add(request, time.monotonic())
        except ValueError as error:
            return SequenceOutput.from_error(request.request_id, str(error), is_client_error=True)
        return None

    def _execute_call(self, call: CallCore) -> str | None:
        """Reset the prefix cache, sleep, wake up or reload weights. Returns the reason for a failure, or None."""
        if call.operation == "reset":
            self._core.reset_prefix_cache()
        try:
            if call.operation == "sleep":
                self._core.sleep(call.level)
            elif call.operation == "wake":
                self._core.wake()
            elif call.operation == "reload":
                self._core.reload_weights(call.path)
        except RunnerLostError:
            raise
        except (ValueError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: of a device without memory
            return f"{call.operation}: {error}"
        except Exception as error:  # a malformed checkpoint, for example
            log.exception("%s failed", call.operation)
            return f"{call.operation}: {type(error).__name__}: {error}"
        return None


def main(fd: int) -> int:
    """Run the engine core's process: load the model, and serve the HTTP process over the socket `fd` until it closes.

    Returns the exit status. The HTTP process handles signals, drains its requests, and closes the socket.
    """
    faulthandler.enable()
    keep_freed_memory()
    exit_when_closed(fd)
    sock = socket.socket(fileno=fd)
    config = _receive_config(sock)
    if config is None:
        return 0
    configure_logging(config.log_level, as_json=config.log_json)
    core_socket = CoreSocket(sock)
    try:
        engine = assemble(config)
    except Exception as error:  # noqa: BLE001 - the HTTP process must get the reason, whatever it is
        core_socket.send_fatal(f"cannot start: {error}")  # before the traceback, which a full disk may stop
        is_expected = isinstance(error, (ValueError, OSError, RunnerLostError))
        if not is_expected:
            traceback.print_exc()
        return 1
    try:
        return _serve(engine, core_socket, check_invariants=config.check_invariants)
    finally:
        engine.close()
        core_socket.close()


def _serve(engine: AssembledEngine, core_socket: CoreSocket, *, check_invariants: bool) -> int:
    """Report that the engine is ready, and run its step loop until the socket closes. Returns the exit status.

    After an error, the HTTP process gets the reason.
    """
    try:
        gc.collect()
        gc.freeze()  # the model and the pool live as long as the process: collections need not visit them
        engine.model.watch_for_loss(lambda reason: _exit_with_reason(core_socket, reason))
        core_socket.send(CoreReady(engine.info))
        CoreLoop(engine, core_socket, check_invariants=check_invariants).run()
    except RunnerLostError as error:
        core_socket.send_fatal(str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - the HTTP process must get the reason before this process ends
        core_socket.send_fatal(f"the step loop failed: {type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _exit_with_reason(core_socket: CoreSocket, reason: str) -> None:
    """Send the reason and end the process, from a thread, as the loop may be idle or blocked for good."""
    core_socket.send_fatal(reason)
    os._exit(1)


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one, instead of returning it to the system.

    Measured: 15.5 -> 12.5 ms for a step of 1,600 prompt tokens of a 0.4M model. Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_TRIM_THRESHOLD, 1 << 28), (_M_TOP_PAD, 1 << 26), (_M_MMAP_THRESHOLD, 1 << 25)):
        mallopt(parameter, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt, from malloc.h."""


def _receive_config(sock: socket.socket) -> EngineConfig | None:
    """Wait for the configuration, the first frame on the socket; None if the socket closes before."""
    reader = FrameReader()
    while True:
        data = sock.recv(1 << 16)
        if not data:
            return None
        for payload in reader.feed(data):
            return msgspec.msgpack.decode(payload, type=EngineConfig)
