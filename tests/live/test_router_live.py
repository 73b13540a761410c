"""`router run` in front of two `engine serve` processes: the official client, curl, predictions, faults, shutdown."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
from programs import Program, call, wait_until

from events.config import KVEventsConfig
from events.publisher import EventPublisher
from events.types import BlockRemoved, BlockStored

pytestmark = pytest.mark.live


class Cluster:
    """Two engines and a router with the kv policy."""

    def __init__(self, folder: Path) -> None:
        engine = ("engine", "serve", "--port", "0")
        self.engines = [Program(folder / f"e{i}.log", *engine) for i in range(2)]
        urls = [engine.await_ready().url for engine in self.engines]
        self.router = self.start_router(folder / "router.log", *urls)

    def start_router(self, log: Path, *args: str) -> Program:
        program = Program(log, "router", "run", "--port", "0", *args)
        program.await_ready()
        wait_until(lambda: call(f"{program.url}/health")[1] and self.up(program) == 2, "two workers up")
        return program

    @staticmethod
    def up(program: Program) -> int:
        return sum(worker["state"] == "up" for worker in call(f"{program.url}/workers")[2]["workers"])

    @property
    def url(self) -> str:
        return self.router.url

    def engine_figures(self) -> list[dict[str, float]]:
        """Of each engine, as its core told them together: what it runs, looked up and published."""
        names = ("num_requests_running", "num_requests_waiting", "prefix_cache_queries_total", "kv_event_batches_total")
        figures = []
        for engine in self.engines:
            with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            lines = [re.search(rf"^\w+:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names]
            figures.append({name: float(line.group(1)) for name, line in zip(names, lines, strict=True) if line})
            assert len(figures[-1]) == len(names), text
        return figures

    def looked_up(self) -> float:
        """Prompt tokens that the engines have looked up in their caches."""
        return sum(figures["prefix_cache_queries_total"] for figures in self.engine_figures())

    def has_settled(self, looked_up: float) -> bool:
        """Whether the engines are done with prompts of so many tokens and the router has applied all their events.

        An answer can overtake the last events of its request: they go by another socket.
        """
        figures = self.engine_figures()
        if sum(f["prefix_cache_queries_total"] for f in figures) < looked_up:
            return False
        if any(f["num_requests_running"] or f["num_requests_waiting"] for f in figures):
            return False
        published_batches = sorted(f["kv_event_batches_total"] for f in figures)
        workers = call(f"{self.url}/workers")[2]["workers"]
        seqs = [stream["last_seq"] for worker in workers for stream in worker["events"]["streams"]]
        applied_batches = sorted(0 if seq is None else seq + 1 for seq in seqs)
        return published_batches == applied_batches

    def close(self) -> None:
        for program in (self.router, *self.engines):
            program.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def test_openai_client(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    messages: Any = [{"role": "user", "content": "Say something."}]
    full_answer = client.chat.completions.create(model=model.id, messages=messages, max_tokens=12, temperature=0)
    assert full_answer.usage is not None
    stream = client.chat.completions.create(
        model=model.id, messages=messages, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == full_answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == full_answer.usage.completion_tokens == 12
    completion = client.completions.create(model=model.id, prompt="Once upon", max_tokens=5)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5


def test_curl_streams(cluster: Cluster) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True})
    command = [curl, "-sN", "-i", f"{cluster.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    out = subprocess.run([*command, "-d", body], capture_output=True, check=True, timeout=60).stdout
    head, _, events = out.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"x-blockcast-worker: 127.0.0.1:" in head
    assert events.rstrip().endswith(b"data: [DONE]")
    # a body over a megabyte makes curl ask first (Expect: 100-continue)
    large = json.dumps({"messages": [{"role": "user", "content": "x " * 700_000}], "max_tokens": 1})
    out = subprocess.run([*command, "-d", "@-"], input=large.encode(), capture_output=True, timeout=60).stdout
    assert b"HTTP/1.1 400" in out
    assert b"maximum context length" in out or b"context" in out


def test_predictions_equal_what_the_engines_report(cluster: Cluster) -> None:
    """Three conversations over long contexts of their own, interleaved, two in flight at a time."""
    model = call(f"{cluster.url}/v1/models")[2]["data"][0]["id"]
    topics = ["rivers", "engines", "letters"]
    talks = [
        [{"role": "system", "content": " ".join(f"{topic} number {i} is {i * i}." for i in range(120))}]
        for topic in topics
    ]

    def turn(index: int, number: int) -> tuple[str, int, int, int]:
        talk = talks[index]
        talk.append({"role": "user", "content": f"Question {number} about {topics[index]}?"})
        body = {"model": model, "messages": talk, "max_tokens": 20, "temperature": 0, "echo": number % 2 == 1}
        status, headers, answer = call(f"{cluster.url}/v1/chat/completions", body)
        assert status == 200, answer
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage = answer["usage"]
        predicted_tokens = int(headers["x-blockcast-predicted-cached-tokens"])
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return headers["x-blockcast-worker"], predicted_tokens, cached_tokens, usage["prompt_tokens"]

    rows = []
    looked_up = cluster.looked_up()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in range(4):
            rows.append(list(pool.map(lambda i, n=number: turn(i, n), range(3))))
            looked_up += sum(tokens for *_, tokens in rows[-1])
            wait_until(lambda total=looked_up: cluster.has_settled(total), "the router has applied what was published")
    for number, row in enumerate(rows):
        for worker, predicted_tokens, cached_tokens, tokens in row:
            assert predicted_tokens == cached_tokens, (
                f"turn {number} on {worker}: predicted {predicted_tokens}, engine says {cached_tokens}"
            )
            if number:
                assert cached_tokens > 0.8 * tokens
    for index in range(3):
        assert len({row[index][0] for row in rows}) == 1, "a conversation left the worker that holds it"
    body = {"model": model, "messages": talks[0]}
    explanation = call(f"{cluster.url}/route", body)[2]
    assert explanation["tokenized"]
    assert len(explanation["candidates"]) == 2
    assert explanation["candidates"][0]["cached_tokens"] > explanation["candidates"][1]["cached_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, 400, "max_tokens"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 50_000}]}, 400, "messages"),
        ({}, 400, "messages"),
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
    ],
)
def test_wrong_input_is_named_in_openais_form(cluster: Cluster, body: Any, status: int, field: str | None) -> None:
    response_status, _, answer = call(f"{cluster.url}/v1/chat/completions", body)
    assert response_status == status
    assert set(answer["error"]) >= {"message", "type", "param", "code"}
    assert answer["error"]["param"] == field or (field and field in answer["error"]["message"])
    assert call(f"{cluster.url}/health")[0] == 200


def test_client_that_leaves_frees_the_engine(cluster: Cluster) -> None:
    model = call(f"{cluster.url}/v1/models")[2]["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "count"}], "max_tokens": 8000, "stream": True,
            "ignore_eos": True}  # fmt: skip
    host = cluster.url.removeprefix("http://")
    for _ in range(3):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        answer.read(50)
        connection.sock.close() if connection.sock else answer.close()
        answer.close()
        connection.close()

    def idle() -> bool:
        pages = [urllib.request.urlopen(f"{engine.url}/metrics").read().decode() for engine in cluster.engines]
        running = [re.search(r"^\S*num_requests_running\S* (\S+)$", page, re.MULTILINE) for page in pages]
        return all(match is not None and float(match.group(1)) == 0 for match in running)

    wait_until(idle, "the engines stopped computing for clients that left")
    assert call(f"{cluster.url}/workers")[2]["in_flight"] == 0


def test_worker_killed_and_restarted(cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL under load: what had no first byte is answered by the other worker; a new worker is taken in by POST."""
    model = call(f"{cluster.url}/v1/models")[2]["data"][0]["id"]
    extra = Program(tmp_path / "extra.log", "engine", "serve", "--port", "0").await_ready()
    try:
        status, _, added_worker = call(f"{cluster.url}/workers", {"url": extra.url})
        assert status == 201
        wait_until(lambda: cluster.up(cluster.router) == 3, "the third worker is up")

        def send_request(number: int) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": f"{number} " * 30}], "max_tokens": 30}
            return call(f"{cluster.url}/v1/chat/completions", body)[0]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(send_request, number) for number in range(36)]
            time.sleep(0.3)
            extra.process.send_signal(signal.SIGKILL)
            statuses = [future.result(timeout=90) for future in futures]
        assert statuses == [200] * 36
        wait_until(lambda: cluster.up(cluster.router) == 2, "the dead worker is out")
        rows = {row["worker_id"]: row for row in call(f"{cluster.url}/workers")[2]["workers"]}
        assert rows[added_worker["worker_id"]]["state"] in ("down", "probing")
        assert call(f"{cluster.url}/workers/{added_worker['worker_id']}", method="DELETE")[0] == 200
        assert len(call(f"{cluster.url}/workers")[2]["workers"]) == 2
    finally:
        extra.close()


def test_a_worker_that_cannot_be_reached_is_named_and_can_be_removed(cluster: Cluster) -> None:
    status, _, answer = call(f"{cluster.url}/workers", {"url": "http://no such host"})
    assert (status, answer["error"]["param"]) == (400, "url")
    assert "no such host" in answer["error"]["message"]
    with socket.socket() as silent:  # bound and never listening: every connection is refused
        silent.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        for by in (name, f"http://{name}"):
            assert call(f"{cluster.url}/workers", {"url": f"http://{name}"})[0] == 201

            def row() -> Any:
                rows = {row["worker_id"]: row for row in call(f"{cluster.url}/workers")[2]["workers"]}
                return rows.get(name, {"state": "gone", "state_reason": ""})

            wait_until(lambda: "tried 2 times" in row()["state_reason"], lambda: row())
            assert row()["state"] == "starting"
            assert "Connect" in row()["state_reason"]
            assert call(f"{cluster.url}/workers/{quote(by, safe='')}", method="DELETE")[0] == 200
            assert row()["state"] == "gone"
    assert cluster.up(cluster.router) == 2


def test_drain_and_undrain(cluster: Cluster) -> None:
    model = call(f"{cluster.url}/v1/models")[2]["data"][0]["id"]
    first, second = (row["worker_id"] for row in call(f"{cluster.url}/workers")[2]["workers"])
    assert call(f"{cluster.url}/workers/{first}/drain", b"")[0] == 200
    for number in range(6):
        body = {"model": model, "messages": [{"role": "user", "content": f"again {number}"}], "max_tokens": 1}
        assert call(f"{cluster.url}/v1/chat/completions", body)[1]["x-blockcast-worker"] == second
    assert call(f"{cluster.url}/workers/{first}/drain", {"on": False})[0] == 200
    assert cluster.up(cluster.router) == 2
    assert call(f"{cluster.url}/workers/nobody/drain", b"")[0] == 404


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_graceful_shutdown_finishes_what_runs(cluster: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    router = cluster.start_router(tmp_path / "r2.log", *(e.url for e in cluster.engines), "--policy", "round_robin")
    try:
        model = call(f"{router.url}/v1/models")[2]["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "long"}],
            "max_tokens": 1500,  # long enough to be seen in flight, however fast the engine
            "ignore_eos": True,
        }
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(call, f"{router.url}/v1/chat/completions", body)
            wait_until(lambda: call(f"{router.url}/workers")[2]["in_flight"] == 1, "the request is in flight")
            router.process.send_signal(number)
            if number == signal.SIGHUP:  # a terminal that closes sends two: its shell does, and the kernel
                wait_until(lambda: "shutting down" in router.log(), "the first signal is heeded")
                router.process.send_signal(number)
            status, _, answer = running.result(timeout=60)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 1500
        assert router.process.wait(30) == 0
    finally:
        router.close()


class Mute(BaseHTTPRequestHandler):
    """A worker without `/metrics`."""

    def do_GET(self) -> None:
        card = {"id": "m", "object": "model", "owned_by": "someone", "max_model_len": 100}
        is_known_path = self.path in ("/health", "/v1/models")
        body = json.dumps({"object": "list", "data": [card]}).encode() if is_known_path else b"{}"
        self.send_response(200 if is_known_path else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_worker_without_metrics_shows_what_it_holds_by_what_it_evicts(tmp_path: Path) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:*", replay_endpoint="tcp://*:*")
    pub, server = EventPublisher(config), ThreadingHTTPServer(("127.0.0.1", 0), Mute)
    threading.Thread(target=server.serve_forever).start()
    source = pub.describe_source()
    events, replay = (str(at).replace("*", "127.0.0.1") for at in (source.endpoint, source.replay_endpoint))
    worker = f"url=http://127.0.0.1:{server.server_port},events={events},replay={replay}"
    router = Program(tmp_path / "router.log", "router", "run", "--port", "0", "--worker", worker)
    try:
        router.await_ready()

        def row() -> Any:
            rows = call(f"{router.url}/workers")[2]["workers"]
            return rows[0] if rows else {}

        pub.publish([BlockStored(list(range(1, 11)), None, list(range(40)), 4, None, "GPU", None)])
        wait_until(
            lambda: row().get("events", {}).get("streams", [{}])[0].get("stored") == 10, lambda: f"ten blocks: {row()}"
        )
        assert row()["cache_tokens"] is None
        for i in range(10, 20):
            pub.publish([BlockRemoved([i - 9], "GPU"), BlockStored([i + 1], None, [i] * 4, 4, None, "GPU", None)])
        wait_until(lambda: row()["cache_tokens"] == 40, lambda: f"40 tokens: {row()}")
    finally:
        router.close()
        pub.close()
        server.shutdown()
        server.server_close()
