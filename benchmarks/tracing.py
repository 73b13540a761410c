#!/usr/bin/env python3
"""What looking costs: CPU us a request of a router that traces 1 % or all of its requests, or whose dashboard is open.

    benchmarks/tracing.py [--requests 3000] [--rounds 5] [--checkout] [--json FILE]

One router for each way stands before two mock workers of its own, in full function; bodies of 2 KB that were seen
before, 32 in flight, as fast as they go. The routers take turns within each round; the medians of the rounds are shown.
A collector in this process takes the spans. The dashboard's viewer reads all that it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.figures import cpu_seconds, in_words, machine, markdown, write_json
from harness.load import closed_loop
from harness.peers import before_mocks
from harness.programs import ADMIN, Program
from harness.talks import TALKS, Bodies
from proxy import Gateway, wait_until_ready

from engine.tiny.tokenizer import write_tokenizer

IN_FLIGHT = 32
COLUMNS = {
    "CPU us": ("cpu_us", "{:.0f}"), "more than off": ("more_us", "{:+.1f}"), "requests/s": ("requests_per_s", "{:.0f}"),
}  # fmt: skip


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        Collector.bytes_taken += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    bytes_taken = 0

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def collector() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def watched(url: str) -> Iterator[list[int]]:
    """With the dashboard open; the bytes that it was sent."""
    request = urllib.request.Request(f"{url}/dashboard/events", headers=ADMIN)
    read, over = [0], threading.Event()

    def look() -> None:
        with urllib.request.urlopen(request, timeout=60) as events:
            while not over.is_set():
                read[0] += len(events.read1(1 << 16))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield read
    over.set()
    thread.join(5)


def once(router: Program, url: str, bodies: Bodies, count: int) -> dict[str, float]:
    made = bodies.make("2k", count)
    started, cpu_s = time.monotonic(), cpu_seconds(router.pid)
    asyncio.run(closed_loop(url, made, IN_FLIGHT))
    seconds = time.monotonic() - started
    return {"cpu_us": 1e6 * (cpu_seconds(router.pid) - cpu_s) / count, "requests_per_s": count / seconds}


@click.command(help=__doc__)
@click.option("--requests", default=3000, show_default=True, help="Of each way in each round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--checkout", is_flag=True, help="This checkout instead of an installed router.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(requests: int, rounds: int, checkout: bool, json_file: Path | None) -> None:
    host, rows = machine("opentelemetry-sdk"), {}
    print(in_words(host))
    with collector() as to, tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        bodies, found = Bodies(), {}
        ways = {"off": [], "1 % traced": ["0.01"], "100 % traced": ["1"], "dashboard open": []}
        for way, share in ways.items():
            folder = Path(name) / way.replace(" ", "-").replace("%", "")
            folder.mkdir()
            write_tokenizer(folder, 4096, 1 << 20)
            given = ["--otlp-endpoint", to, "--trace-share", *share] if share else []
            router, url, _ = stack.enter_context(
                before_mocks(folder, checkout, [[], []], *given, "--log-level", "warning")
            )
            found[way] = (router, url)
            wait_until_ready(Gateway(url, router.pid, ours=True), bodies)
            asyncio.run(closed_loop(url, bodies.make("2k", 8 * TALKS), 4))  # until all is warm
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (router, url) in found.items():
                with watched(url) if way == "dashboard open" else contextlib.nullcontext():
                    taken[way].append(once(router, url, bodies, requests))
    for way, rounds_of in taken.items():
        rows[way] = {key: statistics.median(one[key] for one in rounds_of) for key in rounds_of[0]}
        rows[way]["more_us"] = rows[way]["cpu_us"] - rows["off"]["cpu_us"]
    print(markdown(rows, COLUMNS, "looking"))
    if not Collector.bytes_taken:
        raise click.ClickException("no span came to the collector")
    write_json(json_file, {"rows": rows, "rounds": taken, "machine": host})


if __name__ == "__main__":
    main()
