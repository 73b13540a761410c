"""What the router costs: CPU a request, added latency, CPU and delay a stream's chunk, and peers on the same workers.

    python benchmarks/proxy.py [--peer smg] [--peer vllm-router] [--json FILE]

The router is installed into an environment of its own first, as users install it (compiled).

Two mock workers answer from memory. The router runs in full function: kv policy, index fed by the mocks' events,
tokenising, metrics. Every body is a conversation that was seen before and announced, plus a turn that never was. Direct
and routed runs alternate; the medians over the rounds are shown, the difference is what was added. CPU is the
scheduler's nanoseconds of the gateway's process with all its threads and children; the share that is rendering and
encoding the prompt, as the router's own metric counts it in CPU time, is reported apart.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _path
import click
from harness.figures import cpu_seconds, in_words, machine, rank, write_json
from harness.load import Answer, Client, closed_loop, post
from harness.peers import PEERS, before_mocks, peer_command
from harness.programs import Program, await_true, metric

from engine.tiny.tokenizer import write_tokenizer
from prompts.routing import parse_routing
from prompts.tokenizer import Tokenizer

SIZES = {"0.2k": 200, "2k": 2_000, "16k": 16_000, "110k": 110_000}
CONVERSATIONS = 8
CHUNKS = 64
STREAMS = 64
START_APART_S = 0.005
TOKENIZE = "blockcast_router_tokenize_cpu_seconds_total"
Message = dict[str, str]


class Gateway:
    """Something to send requests to: a mock worker itself (`pid` None) or a proxy before both."""

    def __init__(self, name: str, port: int | str, pid: int | None = None) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.pid = pid

    def cpu_s(self) -> float:
        return cpu_seconds(self.pid) if self.pid is not None else 0.0

    def latencies(self, requests: list[bytes], concurrency: int) -> list[float]:
        """Seconds from sending a request to its whole answer."""
        return [answer.end_s - answer.sent_s for answer in asyncio.run(closed_loop(self.url, requests, concurrency))]

    def streams(self, requests: list[bytes]) -> tuple[list[float], list[float]]:
        """(first-chunk times, ages of the chunks when they came), seconds, of streams begun 5 ms apart."""

        async def begun(client: Client, number: int) -> Answer:
            await asyncio.sleep(number * START_APART_S)
            return (await client.ask(requests[number])).checked()

        async def all_of_them() -> list[Answer]:
            async with Client(self.url) as client:
                return await asyncio.gather(*(begun(client, number) for number in range(len(requests))))

        firsts, ages = [], []
        for answer in asyncio.run(all_of_them()):
            # Sender and receiver read the same clock.
            sent = [(at_s, json.loads(event)["t"] / 1e9) for at_s, event in answer.events()]
            if len(sent) != CHUNKS:
                raise RuntimeError(f"a stream of {len(sent)} chunks arrived, {CHUNKS} were sent")
            firsts.append(sent[0][0] - answer.sent_s)
            ages += [at_s - sent_s for at_s, sent_s in sent]
        return firsts, ages


def conversations(size: int) -> list[list[Message]]:
    """Real text (this repository's sources) cut into turns, `size` bytes a conversation, each different."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((_path.ROOT / "events").glob("*.py")))
    text += "\n".join(path.read_text(encoding="utf-8") for path in sorted((_path.ROOT / "router").rglob("*.py")))
    rng = random.Random(size)
    made = []
    for number in range(CONVERSATIONS):
        at = rng.randrange(len(text))
        messages = [{"role": "system", "content": f"Assistant {number}: be brief."}]
        left = size - 150
        while left > 100:
            take = min(left, rng.randint(200, 2000))
            role = "assistant" if messages[-1]["role"] == "user" else "user"
            content = (text[at:] + text)[:take]
            at = (at + take) % len(text)
            messages.append({"role": role, "content": content})
            left -= take + 30
        if messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": "Yes."})
        made.append(messages)
    return made


def body_of(messages: list[Message], turn: str, *, stream: bool = False) -> bytes:
    value: dict[str, Any] = {"model": "mock", "messages": [*messages, {"role": "user", "content": turn}]}
    if stream:
        value["stream"] = True
    return json.dumps(value).encode()


def question(number: int) -> str:
    """A turn that no other number has."""
    return f"Question {number}: what does function {number * 7919 % 100_003} do, and why?"


class Bodies:
    """Requests that end in a turn never seen before."""

    def __init__(self) -> None:
        self._talks = {name: conversations(size) for name, size in SIZES.items()}
        self._count = 0

    def announced(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of every conversation, as a worker that holds them would announce them."""
        found = []
        for talks in self._talks.values():
            for messages in talks:
                parsed = parse_routing("/v1/chat/completions", body_of(messages, "x"))
                found.append(tokenizer.chat_ids(parsed))
        return found

    def make(self, size: str, count: int, *, stream: bool = False) -> list[bytes]:
        talks = self._talks[size]
        made = []
        for _ in range(count):
            self._count += 1
            talk = talks[self._count % len(talks)]
            made.append(post("/v1/chat/completions", body_of(talk, question(self._count), stream=stream)))
        return made


class Measurement:
    """All figures of one gateway, with the direct runs between its own."""

    def __init__(
        self, gateway: Gateway, direct: Gateway, bodies: Bodies, *, ours: bool, rounds: int, scale: float
    ) -> None:
        self._gateway = gateway
        self._direct = direct
        self._bodies = bodies
        self._ours = ours
        self._rounds = rounds
        self._scale = scale

    def requests(self, size: str, concurrency: int) -> dict[str, float]:
        """CPU and latency of complete answers."""
        count = int(
            {"0.2k": 3000, "2k": 3000, "16k": 800, "110k": 160}[size] * (1 if concurrency > 1 else 0.4) * self._scale
        )
        count = max(count, 4 * concurrency, 64)
        self._gateway.latencies(self._bodies.make(size, 2 * CONVERSATIONS), 1)  # now it was seen
        rows: dict[str, list[float]] = {}
        for _ in range(self._rounds):
            tokenize = metric(self._gateway.url, TOKENIZE) if self._ours else 0.0
            cpu = self._gateway.cpu_s()
            routed = self._gateway.latencies(self._bodies.make(size, count), concurrency)
            cpu = self._gateway.cpu_s() - cpu
            tokenize = metric(self._gateway.url, TOKENIZE) - tokenize if self._ours else 0.0
            direct = self._direct.latencies(self._bodies.make(size, count), concurrency)
            for name, value in (
                ("cpu_us", 1e6 * cpu / count),
                ("tokenize_us", 1e6 * tokenize / count),
                ("added_p50_ms", 1e3 * (rank(routed, 0.5) - rank(direct, 0.5))),
                ("added_p99_ms", 1e3 * (rank(routed, 0.99) - rank(direct, 0.99))),
                ("requests_per_s", count / sum(routed) * concurrency),
            ):
                rows.setdefault(name, []).append(value)
        found = {name: statistics.median(values) for name, values in rows.items()}
        found["cpu_us_without_tokenize"] = statistics.median(
            cpu - tokenize for cpu, tokenize in zip(rows["cpu_us"], rows["tokenize_us"])
        )
        return found

    def streams(self) -> dict[str, float]:
        """CPU and delay of paced streams."""
        rows: dict[str, list[float]] = {}
        total = STREAMS * CHUNKS
        for _ in range(self._rounds):
            requests = self._bodies.make("2k", STREAMS, stream=True)
            cpu = self._gateway.cpu_s()
            firsts, lags = self._gateway.streams(requests)
            cpu = self._gateway.cpu_s() - cpu
            direct_firsts, direct_lags = self._direct.streams(self._bodies.make("2k", STREAMS, stream=True))
            for name, value in (
                ("cpu_us_per_chunk", 1e6 * cpu / total),
                ("chunk_lag_p50_ms", 1e3 * (rank(lags, 0.5) - rank(direct_lags, 0.5))),
                ("chunk_lag_p99_ms", 1e3 * (rank(lags, 0.99) - rank(direct_lags, 0.99))),
                ("first_chunk_p50_ms", 1e3 * (rank(firsts, 0.5) - rank(direct_firsts, 0.5))),
            ):
                rows.setdefault(name, []).append(value)
        return {name: statistics.median(values) for name, values in rows.items()}

    def all(self) -> dict[str, Any]:
        table = {f"{size}_c{c}": self.requests(size, c) for c in (1, 32) for size in SIZES}
        stream = self.streams()
        return {
            "cpu_us_per_request_2k_c32": table["2k_c32"]["cpu_us_without_tokenize" if self._ours else "cpu_us"],
            "added_p50_ms_c1": table["2k_c1"]["added_p50_ms"],
            "cpu_us_per_chunk": stream["cpu_us_per_chunk"],
            "chunk_lag_p50_ms": stream["chunk_lag_p50_ms"],
            "requests": table,
            "streams": stream,
        }


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}")
    columns = ("CPU us", "tokenise us", "rest us", "+p50 ms", "+p99 ms", "req/s")
    print(f"  {'body':>5} {'in flight':>9} " + " ".join(f"{column:>11}" for column in columns))
    for key, row in result["requests"].items():
        size, _, concurrency = key.partition("_c")
        print(
            f"  {size:>5} {concurrency:>9} {row['cpu_us']:11.1f} {row['tokenize_us']:11.1f} "
            f"{row['cpu_us_without_tokenize']:11.1f} {row['added_p50_ms']:11.3f} {row['added_p99_ms']:11.3f} "
            f"{row['requests_per_s']:11.0f}"
        )
    stream = result["streams"]
    print(
        f"  {STREAMS} streams of {CHUNKS} chunks, 10 ms apart: CPU {stream['cpu_us_per_chunk']:.1f} us a chunk, lag "
        f"+{stream['chunk_lag_p50_ms']:.3f} ms p50, +{stream['chunk_lag_p99_ms']:.3f} ms p99, first chunk "
        f"+{stream['first_chunk_p50_ms']:.3f} ms"
    )


@click.command(help=__doc__)
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="May be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--rounds", default=5, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Requests a round, relative to the default.")
@click.option("--policy", default="kv", show_default=True)
@click.option("--checkout", is_flag=True, help="Measure the checkout, interpreted, instead of an installed package.")
def main(
    peers: tuple[str, ...], json_file: Path | None, rounds: int, scale: float, policy: str, checkout: bool
) -> None:
    import uvloop

    uvloop.install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, 4096, 1 << 20)
        bodies = Bodies()
        announced = bodies.announced(Tokenizer.load(folder))
        for number in range(2):
            (folder / f"announce{number}.json").write_text(json.dumps(announced[number::2]))
        mocks = [["--announce", str(folder / f"announce{number}.json")] for number in range(2)]
        report: dict[str, Any] = {"machine": machine(), "policy": policy, "compiled": not checkout, "peers": {}}
        print(in_words(report["machine"]))
        with before_mocks(folder, checkout, mocks, "--policy", policy, "--log-level", "warning") as (router, url, urls):
            direct = Gateway("direct", urls[0].rpartition(":")[2])
            gateway = Gateway("router", url.rpartition(":")[2], router.pid)
            wait_for_matches(gateway, bodies)
            report |= Measurement(gateway, direct, bodies, ours=True, rounds=rounds, scale=scale).all()
            show(f"blockcast router, {policy}", report)
            for name in peers:
                command, port = peer_command(name, urls)
                with Program(command, folder / f"{name}.log") as program:
                    gateway = Gateway(name, port, program.pid)
                    wait_for_answer(gateway, bodies)
                    found = Measurement(gateway, direct, bodies, ours=False, rounds=rounds, scale=scale).all()
                show(f"{name}: {' '.join(command[-6:])}", found)
                report["peers"][name] = found
        write_json(json_file, report)


def wait_for_matches(gateway: Gateway, bodies: Bodies) -> None:
    """Until both workers are up and the index knows what they announced: full function, not a warm-up."""
    seen: dict[str, int] = {}

    def known() -> bool:
        try:
            for answer in asyncio.run(closed_loop(gateway.url, bodies.make("2k", CONVERSATIONS), 1)):
                cached = int(answer.headers["x-blockcast-predicted-cached-tokens"])
                seen[answer.headers["x-blockcast-worker"]] = cached
        except RuntimeError:
            return False
        return len(seen) == 2 and min(seen.values()) > 100

    if not await_true(known, 60, 0.2):
        raise click.ClickException(f"the router did not learn what the workers hold: {seen}")


def wait_for_answer(gateway: Gateway, bodies: Bodies) -> None:
    error: Exception | None = None

    def answers() -> bool:
        nonlocal error
        try:
            gateway.latencies(bodies.make("0.2k", 2), 1)
        except RuntimeError as caught:
            error = caught
        else:
            return True
        return False

    if not await_true(answers, 60, 0.3):
        raise click.ClickException(f"{gateway.name} does not answer: {error}")


if __name__ == "__main__":
    main()
