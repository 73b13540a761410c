"""Runs a scenario and writes down everything that can be seen from outside, by parts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .program import PORT, RouterProgram
from .templates import TEMPLATES
from .traffic import ADMIN_KEY, ClientRequest, Scenario
from .virtual_loop import START_S, MemoryTransport, VirtualClock, VirtualLoop
from .workers import ReferenceTokenizer, SimulatedWorker, WorkerRequest, make_tokenizer

PARTS = ("decisions", "ids", "worker_bytes", "client_bytes", "timings", "routes", "metrics")
END = b"\n[end]"
"""What stands for the end of a connection."""
_MADE_ID = re.compile(rb"\b[0-9a-f]{12}-([0-9a-f]+)\b")
"""Ids that the router makes up begin with random digits."""
_PORT_OF_WORKER = re.compile(rb"127\.0\.0\.1:\d+")
_DECISION_HEADER = re.compile(rb"(x-blockcast-(?:worker|predicted-cached-tokens)): ([^\r]*)\r\n", re.IGNORECASE)
_CACHED_TOKENS = re.compile(rb'"(cached_tokens|cache_read_input_tokens|input_tokens)": ?\d+')
"""What depends on the placement in answers of workers."""
_LOCAL_METRICS = re.compile(r"memory|_bytes|python_|process_|cpu_seconds|_created|large_bodies")
"""Lines of the metrics page that depend on the process or on its speed."""


class Transcript:
    """Lines by part. Lines of a part are in the order of their keys' first appearance, and then of time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._bytes: dict[tuple[str, str], bytearray] = {}
        self._lines: dict[str, list[str]] = {part: [] for part in PARTS}
        self._last_timing: dict[str, str] = {}

    def add_bytes(self, part: str, key: str, data: bytes) -> None:
        """More bytes of one stream; how they were cut is not told, but the times at which they came are."""
        self._bytes.setdefault((part, key), bytearray()).extend(data)
        timing = f"{self._loop.time() - START_S:.3f}"
        if self._last_timing.get(key) != timing:
            self._last_timing[key] = timing
            self.add("timings", f"{key} {timing}")

    def add(self, part: str, line: str) -> None:
        self._lines[part].append(line)

    def finish(self) -> dict[str, list[str]]:
        """Return the lines of each part."""
        lines = {part: list(part_lines) for part, part_lines in self._lines.items()}
        for (part, key), data in sorted(self._bytes.items(), key=_order_streams):
            data_without_chance = _MADE_ID.sub(rb"MADE-\1", bytes(data))
            if part != "worker_bytes":
                for name, value in _DECISION_HEADER.findall(data_without_chance):
                    lines["decisions"].append(f"{key} {name.decode()}: {value.decode('latin-1')}")
                data_without_chance = _DECISION_HEADER.sub(b"", data_without_chance)
                data_without_chance = _CACHED_TOKENS.sub(rb'"\1": N', data_without_chance)
            else:
                data_without_chance = _PORT_OF_WORKER.sub(b"WORKER", data_without_chance)
            text = data_without_chance.decode("latin-1")
            if part == "routes":
                lines[part].extend(f"{key} {line}" for line in _iter_fields(bytes(data)))
                continue
            lines[part].extend(f"{key} {line!r}" for line in text.split("\n"))
        lines["timings"].sort(key=lambda line: line.split(" ", 1)[0])
        return lines


def _order_streams(item: tuple[tuple[str, str], bytearray]) -> str:
    """Sort key which leaves streams in their order, but for those without an answer: connections are closed in any."""
    (_, key), data = item
    return key if data == END else ""


def _iter_fields(response: bytes) -> Iterator[str]:
    """Yield the status of a response, and the fields of its JSON body, a line each."""
    head, _, body = response.partition(b"\r\n\r\n")
    yield head.partition(b"\r\n")[0].decode("latin-1")
    try:
        yield from _iter_values("", json.loads(body.removesuffix(END)))
    except ValueError:
        yield repr(body)


def _iter_values(path: str, value: Any) -> Iterator[str]:
    """Yield `path = value` of everything in a JSON value; numbers with nine digits."""
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _iter_values(f"{path}.{name}", value[name])
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _iter_values(f"{path}[{i}]", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield f"{path} = {value:.9g}"
    else:
        yield f"{path} = {value!r}"


def digest(lines: Sequence[str]) -> str:
    """Short digest of a part."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:12]


class _ClientConnection(asyncio.Protocol):
    """A client's connection. Bytes that come are of the request sent last."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self.transport: MemoryTransport
        self.key = ""
        self.is_open = True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._transcript.add_bytes(self._part, self.key, data)

    def eof_received(self) -> bool:
        self._transcript.add_bytes(self._part, self.key, END)
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_open = False

    @property
    def _part(self) -> str:
        return "routes" if self.key.endswith("/route") else "client_bytes"


class ScenarioRun:
    """One run of one scenario."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario, folder: Path) -> None:
        self._loop = loop
        self._scenario = scenario
        self._transcript = Transcript(loop)
        self._tokenizer = ReferenceTokenizer(TEMPLATES[scenario.template])
        self._attempts: Counter[str] = Counter()
        self._prompts: set[str] = set()
        self._connections: dict[str, _ClientConnection] = {}
        self._workers = [
            SimulatedWorker(
                loop, number, {**traits, "folder": str(folder)}, self._tokenizer, self._on_request, self._on_batch
            )
            for number, traits in enumerate(scenario.workers)
        ]

    async def run(self) -> dict[str, list[str]]:
        """Return the transcript's lines by part."""
        publishers = {worker.endpoint: worker for worker in self._workers}
        program = RouterProgram(self._loop, publishers, self._on_prompt)
        flags = ["--admin-api-key", ADMIN_KEY, *self._scenario.flags]
        await program.start([*flags, *(f"url={worker.url},id={worker.name}" for worker in self._workers)])
        for request in self._scenario.requests:
            self._loop.call_at(START_S + request.at_s, self._send, request)
        for at_s, what, number in self._scenario.events:
            self._loop.call_at(START_S + at_s, getattr(self, f"_{what}"), self._workers[number])
        await asyncio.sleep(START_S + self._scenario.end_s - self._loop.time())
        for line in sorted((await self._ask_admin("GET", "/metrics")).splitlines()):
            if not _LOCAL_METRICS.search(line) and not line.startswith("# "):
                name, _, value = line.rpartition(" ")
                self._transcript.add("metrics", f"{name} {float(value):.9g}")
        await program.stop()
        return self._transcript.finish()

    # What the program does

    def _on_prompt(self, token_ids: Sequence[int]) -> None:
        ids = list(token_ids)
        line = f"{len(ids)} ids, {digest([str(ids)])}, end: {self._tokenizer.decode(ids[-40:])!r}"
        if line not in self._prompts:
            self._prompts.add(line)
            self._transcript.add("ids", line)

    def _on_request(self, worker: str, request: WorkerRequest) -> tuple[str, int]:
        request_id = _MADE_ID.sub(rb"MADE-\1", request.headers.get(b"x-request-id", b"none")).decode("latin-1")
        self._attempts[request_id] += 1
        attempt = self._attempts[request_id]
        key = f"{request_id}#{attempt}"
        self._transcript.add("decisions", f"{key} -> {worker}")
        self._transcript.add_bytes("worker_bytes", key, request.head + request.body)
        return request_id, attempt

    def _on_batch(self, endpoint: str, seq: int, payload: bytes) -> None:
        self._loop.event_feed.deliver(endpoint, seq, payload)

    # What clients do

    def _send(self, request: ClientRequest) -> None:
        connection = self._connections.get(request.connection)
        if not request.connection or connection is None or not connection.is_open:
            connection = _ClientConnection(self._transcript)
            self._loop.network.join(connection, self._loop.network.servers[PORT]())
            if request.connection:
                self._connections[request.connection] = connection
        connection.key = request.request_id
        path = request.pieces[0].split(b" ")[1] if b" " in request.pieces[0] else b""
        if path.startswith(b"/route"):
            connection.key = f"{request.request_id}/route"
        for i, piece in enumerate(request.pieces):
            self._loop.call_later(i * request.pause_s, connection.transport.write, piece)
        if request.leaves_after_s is not None:
            self._loop.call_later(request.leaves_after_s, connection.transport.abort)
        if request.stops_reading is not None:
            after_s, for_s = request.stops_reading
            self._loop.call_later(after_s, connection.transport.pause_reading)
            self._loop.call_later(after_s + for_s, connection.transport.resume_reading)

    # What happens to workers

    def _die(self, worker: SimulatedWorker) -> None:
        worker.die()
        self._loop.event_feed.look_at_publishers()

    def _come_back(self, worker: SimulatedWorker) -> None:
        worker.come_back()
        self._loop.event_feed.look_at_publishers()

    def _sicken(self, worker: SimulatedWorker) -> None:
        worker.is_healthy = False

    def _recover(self, worker: SimulatedWorker) -> None:
        worker.is_healthy = True

    def _clear_cache(self, worker: SimulatedWorker) -> None:
        worker.clear_cache()

    def _drain(self, worker: SimulatedWorker) -> None:
        self._loop.create_task(self._ask_admin("POST", f"/workers/{worker.name}/drain"))

    def _undrain(self, worker: SimulatedWorker) -> None:
        self._loop.create_task(self._ask_admin("POST", f"/workers/{worker.name}/drain", b'{"on":false}'))

    async def _ask_admin(self, method: str, path: str, body: bytes = b"") -> str:
        """Return the body of the router's answer."""
        answer = bytearray()
        ended = self._loop.create_future()

        class Reader(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                answer.extend(data)

            def connection_lost(self, exc: BaseException | None) -> None:
                ended.set_result(None)

        client, _ = self._loop.network.join(Reader(), self._loop.network.servers[PORT]())
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"
        client.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await ended
        return bytes(answer).partition(b"\r\n\r\n")[2].decode()


def write_tokenizer(folder: Path, template: str) -> None:
    """Write a tokenizer's files as a checkpoint has them."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": TEMPLATES[template],
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "X",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run_scenario(clock: VirtualClock, scenario: Scenario) -> dict[str, list[str]]:
    """Run on a loop of its own. `clock` is the installed one."""
    clock.now_s = START_S
    loop = VirtualLoop(clock)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), scenario.template)
        faults: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        try:
            asyncio.set_event_loop(loop)
            lines = loop.run_until_complete(ScenarioRun(loop, scenario, Path(folder)).run())
            for fault in faults:
                raise RuntimeError(f"seed {scenario.seed}: {fault['message']}") from fault.get("exception")
            return lines
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            loop.close()
