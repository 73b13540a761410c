"""The program under test: `router run` with its own command line, between simulated workers and clients.

This is the only file that touches the program. What it takes from it: the flags of `router run`, `RouterProcess`, the
index's `prepare`, and the interface between the feed and its sockets, which are replaced by calls."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Protocol

import aiohttp.connector

import router.app.cli
import router.app.process
import router.fleet.index_feed
import router.prompting.prompt_worker_pool
from events.feed_sockets import StreamSource
from events.stream import StreamState
from events.stream_types import Connection, Instruction, RequestReplay, RequestSnapshot
from router.index import make_index

from .fixed_clock import begin_worker, fix_date
from .virtual_loop import Network, VirtualLoop

TICK_S = 0.1
PORT = 8080
INDEX_SEED = 7


class Publisher(Protocol):
    """A worker's event stream."""

    is_up: bool
    batches: list[bytes]
    """Payloads since the worker's start; their places are their sequence numbers."""


class _RecordingIndex:
    """The real index, which tells the ids that it is asked for."""

    def __init__(self, index: Any, on_prompt: Callable[[Sequence[int]], None]) -> None:
        self._index = index
        self._on_prompt = on_prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def prepare(self, token_ids: Sequence[int], *args: Any) -> Any:
        self._on_prompt(token_ids)
        return self._index.prepare(token_ids, *args)


class _Stream:
    def __init__(self, source: StreamSource) -> None:
        self.source = source
        self.state = StreamState(source.config, source.resume_position)
        self.is_connected = False


class EventFeedOnLoop:
    """Stands where events/feed.py has its sockets and its thread: the same decisions, on the loop's thread."""

    publisher_by_endpoint: dict[str, Publisher]
    ignored_message_count = fault_count = 0

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._loop: Any = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._loop.event_feed = self

    def start(self) -> None:
        self._loop.call_later(TICK_S, self._tick)

    def describe_fault(self) -> None:
        return None

    def has_publisher(self) -> bool:
        return False

    def rematch_topics(self) -> None: ...

    def close(self) -> None:
        self._streams.clear()

    def add(self, source: StreamSource) -> None:
        self._loop.call_soon(self._add, source)

    def remove(self, stream_id: str) -> None:
        self._loop.call_soon(self._streams.pop, stream_id, None)

    def get_stream_state(self, stream_id: str) -> StreamState | None:
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.state

    def schedule_work(self, stream_id: str, work: Iterator[None]) -> None:
        for _ in work:
            pass

    def deliver(self, endpoint: str, seq: int, payload: bytes) -> None:
        """A publisher sent a batch."""
        for stream_id, stream in list(self._streams.items()):
            if stream.source.endpoint == endpoint and stream.is_connected:
                self._stimulate(stream_id, lambda state: state.on_live_batch(seq, payload, self._loop.time()))

    def look_at_publishers(self) -> None:
        """Publishers came or went."""
        for stream_id, stream in list(self._streams.items()):
            publisher = self.publisher_by_endpoint.get(stream.source.endpoint)
            is_up = publisher is not None and publisher.is_up
            if is_up is stream.is_connected:
                continue
            stream.is_connected = is_up
            self._handle(stream_id, Connection(is_up), b"")
            if is_up:
                self._stimulate(stream_id, lambda state: state.on_connected(self._loop.time()))
            else:
                self._stimulate(stream_id, lambda state: state.on_disconnected())

    def _add(self, source: StreamSource) -> None:
        self._streams[source.stream_id] = _Stream(source)
        self.look_at_publishers()

    def _tick(self) -> None:
        for stream_id in list(self._streams):
            self._stimulate(stream_id, lambda state: state.on_tick(self._loop.time()))
        self._loop.call_later(TICK_S, self._tick)

    def _stimulate(self, stream_id: str, stimulus: Callable[[StreamState], list[Instruction]]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        for instruction in stimulus(stream.state):
            if isinstance(instruction, RequestReplay):
                self._loop.call_soon(self._replay, stream_id, instruction)
            elif isinstance(instruction, RequestSnapshot):
                self._loop.call_soon(self._refuse, stream_id, instruction.request_id)
            else:
                for _ in self._handle(stream_id, instruction, b"") or ():
                    pass

    def _replay(self, stream_id: str, request: RequestReplay) -> None:
        stream = self._streams.get(stream_id)
        publisher = None if stream is None else self.publisher_by_endpoint.get(stream.source.endpoint)
        if publisher is None or not publisher.is_up:
            return
        request_id, now = request.request_id, self._loop.time()
        for seq, payload in list(enumerate(publisher.batches))[request.start_seq :]:
            self._stimulate(stream_id, methodcaller("on_reply", request_id, seq, payload, now))
        self._stimulate(stream_id, methodcaller("on_reply_end", request_id, now))

    def _refuse(self, stream_id: str, request_id: int) -> None:
        """Answer a request for a snapshot as a worker that has none."""
        self._stimulate(stream_id, methodcaller("on_request_failed", request_id, self._loop.time()))


def read_config(flags: Sequence[str]) -> tuple[Any, str]:
    """Return what `router run` makes of its command line."""
    configs: list[tuple[Any, str]] = []
    router.app.cli.run_process = lambda config, version, _: configs.append((config, "0"))  # type: ignore[assignment]
    router.app.cli.cli.main(args=["run", *flags], prog_name="router", standalone_mode=False)
    return configs[0]


class RouterProgram:
    """One run of the router on a loop."""

    def __init__(
        self, loop: VirtualLoop, publisher_by_endpoint: dict[str, Publisher],
        on_prompt: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._on_prompt = on_prompt
        self._publisher_by_endpoint = publisher_by_endpoint
        self._task: asyncio.Task[None]

    async def start(self, flags: Sequence[str]) -> None:
        """Start it and wait until its address is open."""
        network: Network = self._loop.network
        EventFeedOnLoop.publisher_by_endpoint = self._publisher_by_endpoint
        fix_date()
        router.prompting.prompt_worker_pool.WorkerState = begin_worker  # type: ignore[assignment,misc]
        router.fleet.index_feed.EventFeed = EventFeedOnLoop  # type: ignore[misc,assignment]
        router.app.process.make_index = lambda seed=None: _RecordingIndex(make_index(INDEX_SEED), self._on_prompt)
        aiohttp.connector.aiohappyeyeballs.start_connection = network.start_connection  # type: ignore[attr-defined]
        config, version = read_config(["--port", str(PORT), "--log-level", "error", *flags])
        process = router.app.process.RouterProcess(config, version)
        with contextlib.redirect_stdout(io.StringIO()):
            self._task = self._loop.create_task(process.run())
            while PORT not in network.servers:
                await asyncio.sleep(0.05)
                if self._task.done():
                    self._task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End it as SIGTERM does. Raises what ended it."""
        self._loop.signal_handlers[signal.SIGTERM]()
        await self._task
