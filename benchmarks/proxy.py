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
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from proxy_parts.load import closed_loop, cpu_seconds, streams  # noqa: E402
from proxy_parts.peers import PEERS, install_ourselves, peer_command  # noqa: E402

from engine.tiny.tokenizer import write_tokenizer  # noqa: E402
from prompts.routing import parse_routing  # noqa: E402
from prompts.tokenizer import Tokenizer  # noqa: E402

SIZES = {"0.2k": 200, "2k": 2_000, "16k": 16_000, "110k": 110_000}
CONVERSATIONS = 8
CHUNKS = 64
STREAMS = 64
Message = dict[str, str]


class Gateway:
    """Something to send requests to: a mock worker itself (`pid` None) or a proxy before both."""

    def __init__(self, name: str, port: int, pid: int | None) -> None:
        self.name = name
        self.port = port
        self.pid = pid

    def cpu_s(self) -> float:
        return cpu_seconds(self.pid) if self.pid is not None else 0.0


def conversations(size: int) -> list[list[Message]]:
    """Real text (this repository's sources) cut into turns, `size` bytes a conversation, each different."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "events").glob("*.py")))
    text += "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "router").glob("*.py")))
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


def request_of(body: bytes) -> bytes:
    """The headers that OpenAI's Python client sends."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip, deflate\r\n"
        b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        b"User-Agent: OpenAI/Python 1.99.0\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n"
        b"X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Async: false\r\n"
        b"Authorization: Bearer sk-none\r\nX-Stainless-Retry-Count: 0\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


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
            made.append(request_of(body_of(talk, question(self._count), stream=stream)))
        return made


@contextmanager
def program(command: list[str], ready: str, env: dict[str, str] | None = None) -> Iterator[tuple[int, str]]:
    """Run a process; (pid, what the first group of `ready` matched in a line of its output)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    lines: list[str] = []
    try:
        assert process.stdout is not None
        while True:
            line = process.stdout.readline()
            if not line:
                raise click.ClickException(f"{' '.join(command[:4])} ended:\n{''.join(lines[-20:])}")
            lines.append(line)
            found = re.search(ready, line)
            if found:
                break
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield process.pid, found.group(1)
        drain.terminate()
        drain.wait()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def metric(port: int, name: str) -> float:
    """A counter of the router's, by its exact sample name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        found = re.search(rf"^{name} (\S+)$", page.read().decode(), re.MULTILINE)
    if found is None:
        raise click.ClickException(f"no metric {name}")
    return float(found.group(1))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


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
        asyncio.run(closed_loop(self._gateway.port, self._bodies.make(size, 2 * CONVERSATIONS), 1))  # now it was seen
        rows: dict[str, list[float]] = {}
        for _ in range(self._rounds):
            tokenize = metric(self._gateway.port, TOKENIZE) if self._ours else 0.0
            cpu = self._gateway.cpu_s()
            routed = asyncio.run(closed_loop(self._gateway.port, self._bodies.make(size, count), concurrency))
            cpu = self._gateway.cpu_s() - cpu
            tokenize = metric(self._gateway.port, TOKENIZE) - tokenize if self._ours else 0.0
            direct = asyncio.run(closed_loop(self._direct.port, self._bodies.make(size, count), concurrency))
            for name, value in (
                ("cpu_us", 1e6 * cpu / count),
                ("tokenize_us", 1e6 * tokenize / count),
                ("added_p50_ms", 1e3 * (percentile(routed, 0.5) - percentile(direct, 0.5))),
                ("added_p99_ms", 1e3 * (percentile(routed, 0.99) - percentile(direct, 0.99))),
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
            firsts, lags = asyncio.run(streams(self._gateway.port, requests, CHUNKS))
            cpu = self._gateway.cpu_s() - cpu
            direct_firsts, direct_lags = asyncio.run(
                streams(self._direct.port, self._bodies.make("2k", STREAMS, stream=True), CHUNKS)
            )
            for name, value in (
                ("cpu_us_per_chunk", 1e6 * cpu / total),
                ("chunk_lag_p50_ms", 1e3 * (percentile(lags, 0.5) - percentile(direct_lags, 0.5))),
                ("chunk_lag_p99_ms", 1e3 * (percentile(lags, 0.99) - percentile(direct_lags, 0.99))),
                ("first_chunk_p50_ms", 1e3 * (percentile(firsts, 0.5) - percentile(direct_firsts, 0.5))),
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


TOKENIZE = "blockcast_router_tokenize_cpu_seconds_total"


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
@click.option("--peer", "peers", multiple=True, type=click.Choice(sorted(PEERS)), help="May be repeated.")
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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tokenizer(folder, 4096, 1 << 20)
        bodies = Bodies()
        announced = bodies.announced(Tokenizer.load(folder))
        ports = []
        here = str(Path(__file__).resolve().parent)
        for number in range(2):
            file = folder / f"announce{number}.json"
            file.write_text(json.dumps(announced[number::2]))
            command = [sys.executable, f"{here}/proxy_parts/mock.py", "--model", str(folder), "--announce", str(file)]
            _, port = stack.enter_context(program(command, r"^(\d+)$"))
            ports.append(int(port))
        direct = Gateway("direct", ports[0], None)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        report: dict[str, Any] = {"machine": machine(), "policy": policy, "compiled": not checkout}
        print(f"{report['machine']}")

        own = [sys.executable, "-m", "router"] if checkout else [str(install_ourselves(ROOT))]
        command = [*own, "run", *urls, "--port", "0", "--policy", policy, "--log-level", "warning"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)} if checkout else None
        with program(command, r"listening on http://127.0.0.1:(\d+)", env) as (pid, port):
            gateway = Gateway("router", int(port), pid)
            wait_for_matches(gateway, bodies)
            ours = Measurement(gateway, direct, bodies, ours=True, rounds=rounds, scale=scale).all()
        show(f"blockcast router, {policy}", ours)
        report.update(ours)
        report["peers"] = {}
        for name in peers:
            command, ready, peer_port = peer_command(name, urls)
            with program(command, ready) as (pid, _):
                gateway = Gateway(name, peer_port, pid)
                wait_for_answer(gateway, bodies)
                found = Measurement(gateway, direct, bodies, ours=False, rounds=rounds, scale=scale).all()
            show(f"{name}: {' '.join(command[-6:])}", found)
            report["peers"][name] = found
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n")


def wait_for_matches(gateway: Gateway, bodies: Bodies) -> None:
    """Until both workers are up and the index knows what they announced: full function, not a warm-up."""
    end_s = time.monotonic() + 60
    seen: dict[str, int] = {}
    while time.monotonic() < end_s:
        try:
            for request in bodies.make("2k", CONVERSATIONS):
                body = request.partition(b"\r\n\r\n")[2]
                sent = urllib.request.Request(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", body,
                                              {"Content-Type": "application/json"})  # fmt: skip
                with urllib.request.urlopen(sent) as answer:
                    seen[answer.headers["x-blockcast-worker"]] = int(
                        answer.headers["x-blockcast-predicted-cached-tokens"]
                    )
        except OSError:
            pass
        if len(seen) == 2 and min(seen.values()) > 100:
            return
        time.sleep(0.2)
    raise click.ClickException(f"the router did not learn what the workers hold: {seen}")


def wait_for_answer(gateway: Gateway, bodies: Bodies) -> None:
    end_s = time.monotonic() + 60
    error: Exception | None = None
    while time.monotonic() < end_s:
        try:
            asyncio.run(closed_loop(gateway.port, bodies.make("0.2k", 2), 1))
        except (OSError, RuntimeError) as caught:
            error = caught
            time.sleep(0.3)
        else:
            return
    raise click.ClickException(f"{gateway.name} does not answer: {error}")


def machine() -> str:
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())  # fmt: skip
    versions = f"Python {platform.python_version()}, Linux {platform.release()}"
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}"


if __name__ == "__main__":
    main()
