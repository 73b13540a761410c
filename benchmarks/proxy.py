#!/usr/bin/env python3
"""What the router costs: CPU a request, added latency, CPU and delay a stream's chunk, and peers on the same workers.

    python benchmarks/proxy.py [--peer smg] [--peer vllm-router] [--cases] [--json FILE]

The router is installed into an environment of its own first, as users install it.

Two mock workers answer from memory. The router runs in full function: kv policy, index fed by the mocks' events,
tokenising, metrics. Every body is a conversation that was seen before and announced, plus a turn that never was. Direct
and routed runs alternate; the medians over the rounds are shown, the difference is what was added. CPU is the
scheduler's nanoseconds of the gateway's process with all its threads and children; the share that is rendering and
encoding the prompt, as the router's own metric counts it in CPU time, is reported apart.

The JSON's `cases`: bodies that return with 2 KB of text that nobody has seen, 32 in flight, ours and the peers' in
turn within each round: CPU us a request, of which tokenising. `--cases`: these only. Of so many conversations the
router looks for why their turns miss as by default (`--reasons-share`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.baseline_routers import BASELINES, baseline_command, router_with_mock_workers
from harness.conversations import CHAT, CONVERSATIONS_PER_SIZE, SIZES, ChatRequests, Message, make_question
from harness.figures import cpu_seconds, describe_machine, format_facts, markdown_table, percentile, write_json
from harness.load import Client, Response, closed_loop
from harness.programs import Program, read_metric, wait_until

from engine.tiny.tokenizer import write_tokenizer
from prompts.routing import parse_routing
from prompts.tokenizer import Tokenizer
from router.miss_reasons.config import MissReasonsConfig
from router.prompting.sessions import digest_first_user_message

CHUNKS = 64
STREAMS = 64
START_APART_S = 0.005
TOKENIZE = "blockcast_router_tokenize_cpu_seconds_total"
COUNTS = {"0.2k": 3000, "2k": 3000, "16k": 800, "110k": 160, "1m": 64}
"""Requests of each size in a round."""
CASES, NEW_CHARACTERS = ("2k", "16k", "110k", "1m"), 2_000
"""Sizes, and characters of the turn that is new."""
COLUMNS = {
    "CPU us": ("cpu_us", "{:.1f}"), "tokenise us": ("tokenize_us", "{:.1f}"),
    "rest us": ("cpu_us_without_tokenize", "{:.1f}"),
    "+p50 ms": ("added_p50_ms", "{:.3f}"),
    "+p99 ms": ("added_p99_ms", "{:.3f}"), "req/s": ("requests_per_s", "{:.0f}"),
}  # fmt: skip


class Gateway:
    """Something to send requests to: a mock worker itself (`pid` None) or a proxy before both."""

    def __init__(self, url: str, pid: int | None = None, *, ours: bool = False) -> None:
        self.url, self.pid, self.ours = url, pid, ours

    def cpu_s(self) -> float:
        return cpu_seconds(self.pid) if self.pid else 0.0

    def tokenize_s(self) -> float:
        """Of its CPU time: rendering and encoding prompts."""
        return read_metric(self.url, TOKENIZE) if self.ours else 0.0

    def latencies(self, requests: list[bytes], concurrency: int) -> list[float]:
        """Seconds from sending a request to its whole answer."""
        return [answer.end_s - answer.start_s for answer in asyncio.run(closed_loop(self.url, requests, concurrency))]

    def streams(self, requests: list[bytes]) -> tuple[list[float], list[float]]:
        """(first-chunk times, ages of the chunks when they came), seconds, of streams begun 5 ms apart."""

        async def send_later(client: Client, number: int) -> Response:
            await asyncio.sleep(number * START_APART_S)
            return (await client.send(requests[number])).raise_for_status()

        async def send_all() -> list[Response]:
            async with Client(self.url) as client:
                return await asyncio.gather(*(send_later(client, number) for number in range(len(requests))))

        firsts, ages = [], []
        for answer in asyncio.run(send_all()):
            # Sender and receiver read the same clock.
            chunk_times = [(at_s, json.loads(event)["t"] / 1e9) for at_s, event in answer.json_events()]
            if len(chunk_times) != CHUNKS:
                raise RuntimeError(f"a stream of {len(chunk_times)} chunks arrived, {CHUNKS} were sent")
            firsts.append(chunk_times[0][0] - answer.start_s)
            ages += [at_s - sent_s for at_s, sent_s in chunk_times]
        return firsts, ages


def is_sampled(messages: list[Message]) -> bool:
    """Whether a router as it is by default compares the turns of this conversation to say why they miss."""
    body = parse_routing(CHAT, json.dumps({"messages": messages}).encode())
    return digest_first_user_message(body) < MissReasonsConfig().share * 2**32


def medians(rounds: int, measure_once: Callable[[], dict[str, float]]) -> dict[str, float]:
    rows = [measure_once() for _ in range(rounds)]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(gateway: Gateway, direct: Gateway, bodies: ChatRequests, rounds: int, scale: float) -> dict[str, Any]:
    """All figures of one gateway, with the direct runs between its own."""

    def requests(size: str, concurrency: int) -> dict[str, float]:
        """CPU and latency of complete answers."""
        count = max(int(COUNTS[size] * (1 if concurrency > 1 else 0.4) * scale), 4 * concurrency, 64)
        tokenize_s, cpu_s = gateway.tokenize_s(), gateway.cpu_s()
        routed_s = gateway.latencies(bodies.make(size, count), concurrency)
        cpu_us = 1e6 * (gateway.cpu_s() - cpu_s) / count
        tokenize_us = 1e6 * (gateway.tokenize_s() - tokenize_s) / count
        direct_s = direct.latencies(bodies.make(size, count), concurrency)
        return {
            "cpu_us": cpu_us, "tokenize_us": tokenize_us, "cpu_us_without_tokenize": cpu_us - tokenize_us,
            "added_p50_ms": 1e3 * (percentile(routed_s, 0.5) - percentile(direct_s, 0.5)),
            "added_p99_ms": 1e3 * (percentile(routed_s, 0.99) - percentile(direct_s, 0.99)),
            "requests_per_s": count / sum(routed_s) * concurrency,
        }  # fmt: skip

    def streams() -> dict[str, float]:
        """CPU and delay of paced streams."""
        requests_sent, cpu_s = bodies.make("2k", STREAMS, stream=True), gateway.cpu_s()
        firsts, lags = gateway.streams(requests_sent)
        cpu_s = gateway.cpu_s() - cpu_s
        direct_firsts, direct_lags = direct.streams(bodies.make("2k", STREAMS, stream=True))
        return {
            "cpu_us_per_chunk": 1e6 * cpu_s / (STREAMS * CHUNKS),
            "chunk_lag_p50_ms": 1e3 * (percentile(lags, 0.5) - percentile(direct_lags, 0.5)),
            "chunk_lag_p99_ms": 1e3 * (percentile(lags, 0.99) - percentile(direct_lags, 0.99)),
            "first_chunk_p50_ms": 1e3 * (percentile(firsts, 0.5) - percentile(direct_firsts, 0.5)),
        }

    table = {}
    for concurrency in (1, 32):
        for size in SIZES:
            gateway.latencies(bodies.make(size, 2 * CONVERSATIONS_PER_SIZE), 1)  # now it was seen
            table[f"{size}_c{concurrency}"] = medians(rounds, partial(requests, size, concurrency))
    stream = medians(rounds, streams)
    return {
        "cpu_us_per_request_2k_c32": table["2k_c32"]["cpu_us_without_tokenize"],
        "added_p50_ms_c1": table["2k_c1"]["added_p50_ms"],
        "cpu_us_per_chunk": stream["cpu_us_per_chunk"],
        "chunk_lag_p50_ms": stream["chunk_lag_p50_ms"],
        "requests": table,
        "streams": stream,
    }


def measure_cases(
    gateways: dict[str, Gateway], bodies: ChatRequests, rounds: int, scale: float
) -> list[dict[str, Any]]:
    """What a conversation costs each gateway that comes back with a new turn. Ours is the first."""

    def cost(gateway: Gateway, size: str) -> dict[str, float]:
        count = max(int(COUNTS[size] * scale / 2), 32)
        requests = bodies.make(size, count, new_characters=NEW_CHARACTERS)
        tokenize_s, cpu_s = gateway.tokenize_s(), gateway.cpu_s()
        gateway.latencies(requests, 32)
        return {
            "cpu_us": 1e6 * (gateway.cpu_s() - cpu_s) / count,
            "tokenise_us": 1e6 * (gateway.tokenize_s() - tokenize_s) / count,
        }

    cases = []
    for size in CASES:
        for gateway in gateways.values():
            # After this the gateway has seen every conversation.
            gateway.latencies(bodies.make(size, 2 * CONVERSATIONS_PER_SIZE, new_characters=NEW_CHARACTERS), 1)
        rows = [{name: cost(gateway, size) for name, gateway in gateways.items()} for _ in range(rounds)]
        own_costs, *peers = [
            {figure: statistics.median(row[name][figure] for row in rows) for figure in ("cpu_us", "tokenise_us")}
            for name in gateways
        ]
        body = bodies.make(size, 1, new_characters=NEW_CHARACTERS)[0].partition(b"\r\n\r\n")[2]
        peer_costs = {name: peer["cpu_us"] for name, peer in zip(list(gateways)[1:], peers)}
        cases.append({"name": size, "body_bytes": len(body), **own_costs, "peers": peer_costs})
    return cases


def show_cases(cases: list[dict[str, Any]]) -> None:
    rows = {f"{case['body_bytes']:,} bytes": {**case, **case["peers"]} for case in cases}
    columns = {"CPU us": ("cpu_us", "{:.0f}"), "of it tokenising": ("tokenise_us", "{:.0f}")}
    columns |= {name: (name, "{:.0f}") for name in cases[0]["peers"]}
    print(f"\nReturning with {NEW_CHARACTERS} new characters, 32 in flight\n{markdown_table(rows, columns, 'body')}")


def show(name: str, result: dict[str, Any]) -> None:
    rows = {key.replace("_c", " bytes, in flight "): row for key, row in result["requests"].items()}
    print(f"\n{name}\n{markdown_table(rows, COLUMNS, 'body')}")
    stream = result["streams"]
    print(f"{STREAMS} streams of {CHUNKS} chunks, 10 ms apart: CPU {stream['cpu_us_per_chunk']:.1f} us a chunk, lag "
          f"+{stream['chunk_lag_p50_ms']:.3f} ms p50, +{stream['chunk_lag_p99_ms']:.3f} ms p99, first chunk "
          f"+{stream['first_chunk_p50_ms']:.3f} ms")  # fmt: skip


@click.command(help=__doc__)
@click.option("--peer", "peers", multiple=True, type=click.Choice(BASELINES), help="May be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--rounds", default=5, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Requests a round, relative to the default.")
@click.option("--cases", "only_cases", is_flag=True, help="Only bodies that return.")
@click.option("--checkout", is_flag=True, help="Measure the checkout instead of an installed package.")
def main(
    peers: tuple[str, ...],
    json_file: Path | None,
    rounds: int,
    scale: float,
    only_cases: bool,
    checkout: bool,
) -> None:
    import uvloop

    uvloop.install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, 4096, 1 << 20)
        bodies, tokenizer = ChatRequests(is_sampled, MissReasonsConfig().share), Tokenizer.load(folder)
        bodies_seen = [
            json.dumps({"messages": [*messages, make_question(0)]})
            for row in bodies.conversations.values()
            for messages in row
        ]
        announced_ids = [tokenizer.encode_chat(parse_routing(CHAT, body.encode())) for body in bodies_seen]
        mocks = []
        for number in range(2):
            (folder / f"announce{number}.json").write_text(json.dumps(announced_ids[number::2]))
            mocks.append(["--announce", str(folder / f"announce{number}.json")])
        report: dict[str, Any] = {"machine": describe_machine(), "installed": not checkout, "peers": {}}
        print(format_facts(report["machine"]))
        with router_with_mock_workers(folder, checkout, mocks, "--log-level", "warning") as (router, url, urls):
            direct, gateway = Gateway(urls[0]), Gateway(url, router.pid, ours=True)
            wait_until_ready(gateway, bodies)
            gateways = {"blockcast": gateway}
            if not only_cases:
                report |= measure(gateway, direct, bodies, rounds, scale)
                show("blockcast router", report)
            with ExitStack() as stack:
                for name in peers:
                    command, port = baseline_command(name, urls)
                    program = stack.enter_context(Program(command, folder / f"{name}.log"))
                    gateways[name] = Gateway(f"http://127.0.0.1:{port}", program.pid)
                    wait_until_ready(gateways[name], bodies)
                    if not only_cases:
                        result = report["peers"][name] = measure(gateways[name], direct, bodies, rounds, scale)
                        show(f"{name}: {' '.join(command[-6:])}", result)
                report["cases"] = measure_cases(gateways, bodies, rounds, scale)
            show_cases(report["cases"])
        write_json(json_file, report)


def wait_until_ready(gateway: Gateway, bodies: ChatRequests) -> None:
    """Until it answers; ours until both workers are up and the index knows what they announced."""
    cached_by_worker: dict[str, int] = {}

    def is_ready() -> bool:
        try:
            for answer in asyncio.run(closed_loop(gateway.url, bodies.make("2k", CONVERSATIONS_PER_SIZE), 1)):
                if not gateway.ours:
                    return True
                cached_tokens = int(answer.headers["x-blockcast-predicted-cached-tokens"])
                cached_by_worker[answer.headers["x-blockcast-worker"]] = cached_tokens
        except RuntimeError:
            return False
        return len(cached_by_worker) == 2 and min(cached_by_worker.values()) > 100

    if not wait_until(is_ready, 60, 0.2):
        raise click.ClickException(
            f"{gateway.url} does not answer, or does not know what the workers hold: {cached_by_worker}"
        )


if __name__ == "__main__":
    main()
