"""A router's edge between raw client bytes and scripted workers, all on real sockets of one event loop.

Time stands still until a test moves it (`Edge.advance`), so no timeout depends on how fast the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from options import Schema, load_config
from router.admin.description import DescriptionRoutes, ModelRoutes
from router.admin.explanations import ExplanationRoutes
from router.admin.health import HealthRoutes
from router.admin.metrics_page import MetricsPage
from router.admin.workers import WorkerListRoutes
from router.app.api_keys import Guard
from router.app.dispatch import RequestDispatcher
from router.app.server import RouterApp, list_forwarded_paths
from router.app.tenant_limits import TenantLimits
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.workers import ServedModel, WorkerSpec
from router.edge.config import EdgeConfig, Timeouts
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Proxy
from router.edge.request_reader import RequestReader
from router.edge.upstream import UpstreamPool
from router.http.config import ClientTimeouts, HttpLimits
from router.http.listener import Listener
from router.http.routes import Routes
from router.index import make_index
from router.index.protocol import HolderId, IndexStats, IngestReport, Match, PinId, Scope
from router.metrics import Metrics
from router.miss_reasons.config import MissReasonsConfig
from router.prompting.config import PromptWorkerConfig
from router.prompting.conversation_reader import ConversationReader
from router.prompting.model_tokenizers import ModelTokenizers
from router.prompting.prompt_reader import PromptReader
from router.prompting.prompt_worker_pool import PromptWorkerPool

SETTLE_S_MAX = 10.0
"""For what the end of a scenario takes at most, on a machine with much else to do."""


class PreparedIds(list[int]):
    memory_bytes = 0


class EmptyIndex:
    """No worker holds anything; pins are counted."""

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.pins: set[int] = set()
        self._next = 0

    def _number(self) -> int:
        self._next += 1
        return self._next

    def add_holder(self, model: str) -> HolderId:
        holder = self._number()
        self.holders.add(holder)
        return HolderId(holder)

    def remove_holder(self, holder: HolderId) -> None:
        self.holders.remove(holder)

    def clear(self, holder: HolderId) -> None: ...

    def ingest(self, holder: HolderId, payload: bytes) -> IngestReport:
        return IngestReport()

    def prepare(self, token_ids: Sequence[int], similar: PreparedIds | None = None) -> PreparedIds:
        return PreparedIds(token_ids)

    def count_common_tokens(self, token_ids: Sequence[int], others: Sequence[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(token_ids, others)) if a != b), min(len(token_ids), len(others)))

    def chunk_keys(self, token_ids: Sequence[int], scope: Scope, chunk_tokens: int) -> list[int]:
        return [hash((scope, *token_ids[:end])) for end in range(chunk_tokens, len(token_ids), chunk_tokens)]

    def match(self, token_ids: Sequence[int], scope: Scope) -> list[Match]:
        return []

    def pin(self, holder: HolderId, token_ids: Sequence[int], scope: Scope) -> PinId:
        pin = self._number()
        self.pins.add(pin)
        return PinId(pin)

    def find_lost_blocks(self, token_ids: Sequence[int], scope: Scope, start: int, step: int) -> None:
        return None

    def unpin(self, pin: PinId) -> None:
        self.pins.remove(pin)

    def stats(self) -> IndexStats:
        return make_index().stats()  # the native one's, which are no dataclass

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        return []


class NoFleet:
    """Workers are added by the tests themselves."""

    def __init__(self, core: RouterCore, now: Callable[[], float]) -> None:
        self._core = core
        self._now = now
        self.failed_checks: dict[str, int] = {}
        self.waiting: dict[str, str] = {}

    def add(self, settings: dict[str, Any]) -> str:
        raise ValueError("url: missing")

    def remove(self, worker_id: str) -> None:
        self._core.remove_worker(worker_id, self._now())

    def drain(self, worker_id: str, *, is_draining: bool) -> None:
        self._core.set_draining(worker_id, self._now(), is_draining=is_draining)

    def describe_events(self, worker_id: str) -> dict[str, Any]:
        return {}

    def list_starting_reasons(self) -> dict[str, str]:
        return self.waiting


class NoFeed:
    """No worker publishes events."""

    def __init__(self) -> None:
        self.synced: set[str] | None = None
        """Workers whose caches are known; None: all."""
        self.events = SimpleNamespace(describe_fault=lambda: None, fault_count=0, ignored_message_count=0)

    def is_synced(self, worker_id: str) -> bool:
        return self.synced is None or worker_id in self.synced

    def list_event_lags(self) -> dict[str, float]:
        return {}

    def sum_counters(self) -> dict[str, dict[str, int]]:
        return {}


class Received:
    """One request as a scripted worker got it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.line, *lines = head[:-4].split(b"\r\n")
        self.headers = [tuple(line.split(b": ", 1)) for line in lines]
        self.body = body

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


Script = Callable[[Received, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """A worker that does what its script says for each request, keep-alive included."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[Received] = []
        self.connections = 0
        self.closed_by_router = 0
        self._server: asyncio.Server | None = None
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that wait here, because neither the router nor the kernel takes them."""
        return sum(writer.transport.get_write_buffer_size() for writer in self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                               if line.startswith(b"content-length:")), 0)  # fmt: skip
                received = Received(head, await reader.readexactly(length))
                self.received.append(received)
                await self.script(received, reader, writer)
                await writer.drain()
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed_by_router += 1
        finally:
            self._writers.discard(writer)
            writer.close()


def reply(
    body: bytes = b'{"ok":true}',
    status: bytes = b"200 OK",
    headers: Sequence[bytes] = (b"content-type: application/json",),
) -> Script:
    """A script: one complete answer with a content-length."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [b"HTTP/1.1 " + status, *headers, b"content-length: %d" % len(body)]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    return script


def gated(gate: asyncio.Event) -> Script:
    """A script: answers when the gate is set."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await reply()(request, reader, writer)

    return script


async def until(holds: Callable[[], Any]) -> None:
    """Wait for an event, for as long as the scenario may take."""
    while not holds():
        await asyncio.sleep(0.001)


async def let_loop_read() -> None:
    """Let the router read what was just written to it, so that what is written next comes in a read of its own."""
    for _ in range(5):
        await asyncio.sleep(0)


async def discover_no_model(model: str) -> int:
    """Find no worker that serves a model, and none that may serve it later."""
    return 0


class Edge:
    """The edge under test. `worker` and `start` first, then `connect` and talk bytes."""

    until = staticmethod(until)
    let_loop_read = staticmethod(let_loop_read)

    def __init__(self) -> None:
        self.index = EmptyIndex()
        self.reply = reply
        self.gated = gated
        self._now_s = 1000.0
        self._tasks: list[asyncio.Task[None]] = []
        self.upstreams: list[Upstream] = []

    def now(self) -> float:
        """Seconds of the clock that the router reads."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass, and fire what is due."""
        self._now_s += seconds
        self.tick()

    def run(self, scenario: Coroutine[Any, Any, None], seconds: float = 20.0) -> None:
        """Run a scenario, then check that nothing is left: no exchange, no pin, no upstream connection in use."""

        async def guarded() -> None:
            try:
                await asyncio.wait_for(scenario, seconds)
                await self.settle()
                for task in self._tasks:
                    if task.done() and not task.cancelled():
                        task.result()  # raises what a check of the books found
            finally:
                await self._stop()

        loop = uvloop.new_event_loop()  # what `router run` uses
        try:
            loop.run_until_complete(guarded())
        finally:
            loop.close()

    async def start(
        self,
        *,
        policy: str = "round_robin",
        timeouts: Timeouts | None = None,
        client_timeouts: ClientTimeouts | None = None,
        limits: HttpLimits | None = None,
        core: dict[str, Any] | None = None,
        guard: Guard | None = None,
        **edge: Any,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.core = RouterCore(
            self.index,
            load_config(
                Schema(CoreConfig, "router"), table={"policy": policy, "pin_grace_s": 0.0, **(core or {})}
            ).config,
        )
        self.pool = UpstreamPool(connect_s_max=self.timeouts.connect_s)
        self.metrics = Metrics()
        config = EdgeConfig(
            limits=limits or HttpLimits(),
            timeouts=self.timeouts,
            client_timeouts=client_timeouts or ClientTimeouts(),
            **edge,
        )
        self.proxy = Proxy(self.core, self.pool, self.metrics, config, now=self.now)
        self.executor = ThreadPoolExecutor(1)
        self.worker_pool = PromptWorkerPool(PromptWorkerConfig(count=1), chat_template=None)
        conversations = ConversationReader(0)
        tokenizers = ModelTokenizers(self.executor, conversations, self.worker_pool)
        self.prompts = PromptReader(tokenizers, conversations, self.executor, self.worker_pool)
        reading = RequestReader(self.core, self.prompts, allowed_fields=self.proxy.passed_fields)
        self._add_local_routes(reading)
        self.tenants = TenantLimits(config, self.metrics)
        self.proxy.on_end.append(self.tenants.remove_request)
        for listeners in (self.proxy.on_first_output, self.proxy.on_end):
            listeners.append(reading.stored_responses.record_answer)
        self.dispatcher = RequestDispatcher(self.proxy, reading, self.tenants, self.reasons, discover_no_model)
        self.app = RouterApp(
            self.dispatcher, list_forwarded_paths(config), self.routes, guard or (lambda connection, request: None)
        )
        self.listener = Listener(self.app, config.client_timeouts, config.connections_max)
        self.port = await self.listener.bind("127.0.0.1", 0, None)
        await self.listener.listen()
        self._tasks.append(asyncio.create_task(self._tick()))

    def _add_local_routes(self, reader: RequestReader) -> None:
        """All routes that `router run` answers itself, but for the dashboard and those of other routers."""
        self.fleet, self.feed = NoFleet(self.core, self.now), NoFeed()
        fleet, feed = cast(Any, self.fleet), cast(Any, self.feed)
        self.reasons = MissReasonsRecorder(MissReasonsConfig(enabled=False), self.proxy, self.prompts)
        self.health = HealthRoutes(self.core, fleet, feed, self.now, 0.0)
        self.worker_list = WorkerListRoutes(self.proxy, fleet, self.prompts)
        self.explanations = ExplanationRoutes(self.proxy, reader, self.reasons)
        self.metrics_page = MetricsPage(self.proxy, self.prompts, self.worker_pool, fleet, feed)
        self.routes = Routes()
        for group in (
            DescriptionRoutes("test", ()),
            self.health,
            ModelRoutes(self.core, {}, self.now),
            self.metrics_page,
            self.worker_list,
            self.explanations,
        ):
            group.register(self.routes)

    def tick(self) -> None:
        """What the timer of `router run` does."""
        for step in (
            self.proxy.sweep,
            self.listener.expire_connections,
            self.proxy.tick_core,
        ):
            try:
                step(self._now_s)
            except Exception as error:  # noqa: BLE001  as `router run` does: one keeps nothing from the others
                self.metrics.record_crash("timer", error)
        self.core.check_invariants()
        self.tenants.check_invariants(exchange.context for exchange in self.proxy.exchanges.values())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.tick()

    async def worker(
        self,
        script: Script,
        name: str | None = None,
        port: int | None = None,
        *,
        max_model_len: int = 4096,
        engine: str = "",
        model: str = "tiny",
    ) -> Upstream:
        """Add a worker; with `port`, one where nothing listens."""
        upstream = Upstream(script)
        if port is None:
            await upstream.start()
            self.upstreams.append(upstream)
        else:
            upstream.port = port
        worker_id = name or f"w{len(self.core.workers)}"
        models = (ServedModel(model, model, max_model_len=max_model_len),)
        self.core.add_worker(
            WorkerSpec(worker_id, f"http://127.0.0.1:{upstream.port}", models, engine=engine), self._now_s
        )
        return upstream

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def exchange(self, data: bytes) -> bytes:
        """Send raw bytes on a new connection and read until the router closes it."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await reader.read(-1)
        writer.close()
        return answer

    async def settle(self) -> None:
        """Wait until the books are empty; raise where they never are."""
        try:
            await asyncio.wait_for(until(self._is_settled), SETTLE_S_MAX)
        except asyncio.TimeoutError:
            raise AssertionError(
                f"left over: {len(self.proxy.exchanges)} exchanges, {len(self.index.pins)} pins, "
                f"upstream: {self.pool.count_connections()}"
            ) from None

    def _is_settled(self) -> bool:
        self.tick()  # pins end with one
        return (
            not self.proxy.exchanges
            and not self.index.pins
            and not self.tenants.requests_in_flight
            and not self.metrics.request_buffer_bytes
            and self.pool.count_connections().open == self.pool.count_connections().idle
        )

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.listener.stop_listening()
        self.listener.abort()
        self.pool.close()
        self.worker_pool.processes.close()
        for upstream in self.upstreams:
            await upstream.stop()
        self.executor.shutdown()
        ended = until(lambda: not self.listener.connections and not self.pool.count_connections().open)
        await asyncio.wait_for(ended, SETTLE_S_MAX)
        await let_loop_read()  # uvloop cannot be closed while transports of clients are being closed


@pytest.fixture
def edge() -> Edge:
    return Edge()


def post(
    body: bytes, path: bytes = b"/v1/chat/completions", headers: Sequence[bytes] = (), close: bool = True
) -> bytes:
    """A well-formed completion request."""
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: router", b"Content-Type: application/json", *headers]
    lines += [b"Connection: close"] if close else []
    return b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def make_post() -> Callable[..., bytes]:
    return post
