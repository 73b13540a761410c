"""How many event streams one router process can follow: the socket, the thread and the index that `router run` has.

    python benchmarks/fan_in.py [--publishers 600 --publishers 2000] [--json FILE]

One process speaks for all publishers, each on a PUB socket of its own, in vLLM's wire format: a message announces 8
blocks of 16 tokens. Another process follows them. Three figures: CPU a block at a steady rate and as fast as they can,
and how long after it was sent a block is visible in a match, at a steady rate (a thread asks the index every 0.5 ms, so
less than that is not seen). CPU is the scheduler's, of the follower with all its threads; the share of ZeroMQ's own
threads stands apart. "Idle" is the CPU that following costs when nobody says anything.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
import zmq
from harness.figures import in_words, machine, markdown, rank, resident_bytes, write_json

from events.codec import encode_batch
from events.frames import pack_seq
from events.sources import EventSource
from events.types import BlockStored, EventBatch
from router.app.system import raise_file_limit
from router.fleet.feed import IndexFeed
from router.index import make_index
from router.index.protocol import Scope

BLOCKS, BLOCK = 8, 16
MODEL = "m"
PROBES_S = 40
"""Messages a second whose way is timed."""
BURST_S = 0.01
"""A steady rate is kept in bursts so far apart."""
COLUMNS = {
    "all up after": ("up_s", "{:.1f} s"), "descriptors a stream": ("descriptors", "{:.1f}"),
    "memory a stream": ("stream_kib", "{:.0f} KiB"), "idle": ("idle_cores", "{:.3f} cores"),
    "batches/s": ("rate", "{:,.0f}"), "blocks/s a CPU second": ("blocks_a_cpu_s", "{:,.0f}"),
    "of it ZeroMQ": ("zeromq_share", "{:.0%}"), "at most, batches/s": ("most", "{:,.0f}"),
    "visible p50": ("visible_p50_ms", "{:.1f} ms"), "p99": ("visible_p99_ms", "{:.1f} ms"),
}  # fmt: skip


def payload(number: int) -> bytes:
    """The message of this number."""
    names = [number * BLOCKS + i + 1 for i in range(BLOCKS)]
    return encode_batch(EventBatch(time.time(), [BlockStored(names, None, tokens_of(number), BLOCK)], 0))


def tokens_of(number: int) -> list[int]:
    """What it announces."""
    return [(number * 7919 + i * 104_729) % 2**31 for i in range(BLOCKS * BLOCK)]


def publish(control: Connection, count: int) -> None:
    """The publishers' process. Orders are (messages a second or 0 for as many as go, seconds); the answer is when each
    message was sent."""
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    sockets = []
    for _ in range(count):
        socket = context.socket(zmq.PUB)
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        sockets.append(socket)
    control.send([socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for socket in sockets])
    seqs, number = [0] * count, 0
    while (order := control.recv()) is not None:
        rate, seconds = order
        begin_s, sent = time.monotonic(), []
        while (now := time.monotonic()) < begin_s + seconds:
            due = int((now - begin_s) * rate) + 1 if rate else len(sent) + 100
            for _ in range(due - len(sent)):
                which = number % count
                sockets[which].send_multipart([b"", pack_seq(seqs[which]), payload(number)])
                seqs[which] += 1
                number += 1
                sent.append(time.monotonic())
            time.sleep(BURST_S if rate else 0)
        control.send(sent)


class Follower:
    """This process: an index and what feeds it."""

    def __init__(self, endpoints: list[str]) -> None:
        self.index = make_index()
        self.up: set[str] = set()
        self.feed = IndexFeed(self.index, on_connection=self._changed)
        self.count = len(endpoints)
        self.next = 0
        """Number of the next message to come."""
        files, memory = len(list(Path("/proc/self/fd").iterdir())), resident_bytes()
        begin_s = time.monotonic()
        self.feed.start()
        for number, endpoint in enumerate(endpoints):
            source = EventSource(data_parallel_rank=0, endpoint=endpoint)
            self.feed.follow(f"w{number}", [source], [self.index.add_holder(f"w{number}", MODEL)])
        while len(self.up) < self.count and time.monotonic() < begin_s + 120:
            time.sleep(0.01)
        if len(self.up) < self.count:
            raise click.ClickException(f"{len(self.up)} of {self.count} streams came up")
        self.up_s = time.monotonic() - begin_s
        self.descriptors = (len(list(Path("/proc/self/fd").iterdir())) - files) / self.count
        self.stream_kib = (resident_bytes() - memory) / self.count / 1024

    def _changed(self, worker: str, up: bool) -> None:
        (self.up.add if up else self.up.discard)(worker)

    def close(self) -> None:
        self.feed.close()

    def applied(self) -> int:
        """Messages."""
        return sum(row["stored"] for row in self.feed.totals().values()) // BLOCKS

    def cpu_s(self) -> tuple[float, float]:
        """(of the feed's thread and ZeroMQ's, of ZeroMQ's)."""
        feed = zeromq = 0.0
        mine = {thread.native_id for thread in threading.enumerate() if thread.name != "kv-feed"}
        for task in Path("/proc/self/task").iterdir():
            used = int((task / "schedstat").read_text().split()[0]) / 1e9
            if (task / "comm").read_text().startswith("ZMQ"):
                zeromq += used
            elif int(task.name) not in mine:
                feed += used
        return feed + zeromq, zeromq

    def watch(self, step: int, seen: list[float], ends: threading.Event) -> None:
        """Note when every `step`th message became visible."""
        number, scope = self.next, Scope(MODEL)
        while not ends.is_set():
            if self.index.match([*tokens_of(number), 0], scope):
                seen.append(time.monotonic())
                number += step
            else:
                time.sleep(0.0005)


def measure(count: int, rate: int, seconds: float) -> dict[str, Any]:
    control, far = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(far, count), daemon=True)
    process.start()
    follower = Follower(control.recv())
    try:
        return {"publishers": count, **_figures(control, follower, rate, seconds)}
    finally:
        follower.close()
        control.send(None)
        process.join(10)
        process.kill()


def _figures(control: Connection, follower: Follower, rate: int, seconds: float) -> dict[str, Any]:
    time.sleep(1)
    idle_s = follower.cpu_s()[0]
    time.sleep(seconds)
    idle_cores = (follower.cpu_s()[0] - idle_s) / seconds

    def run(rate: int) -> tuple[list[float], float, float, float]:
        """(when messages were sent, messages applied a second, CPU seconds a message, ZeroMQ's share of them)."""
        before, (cpu_s, zeromq_s), begin_s = follower.applied(), follower.cpu_s(), time.monotonic()
        control.send((rate, seconds))
        sent: list[float] = control.recv()
        applied, took_s, end = follower.applied() - before, time.monotonic() - begin_s, time.monotonic() + 60
        while follower.applied() - before < len(sent) and time.monotonic() < end:
            time.sleep(0.05)
        follower.next += len(sent)
        total_s, used_s = follower.cpu_s()
        whole = follower.applied() - before
        if whole < len(sent):
            raise click.ClickException(f"{whole} of {len(sent)} messages were applied: the sockets' queues overflowed")
        return sent, applied / took_s, (total_s - cpu_s) / whole, (used_s - zeromq_s) / max(total_s - cpu_s, 1e-9)

    _, _, message_s, share = run(rate)
    seen: list[float] = []
    ends = threading.Event()
    step = max(1, rate // PROBES_S)
    watcher = threading.Thread(target=follower.watch, args=(step, seen, ends), name="watch")
    watcher.start()
    sent, _, _, _ = run(rate)
    time.sleep(0.2)
    ends.set()
    watcher.join()
    waits = [at_s - sent_s for sent_s, at_s in zip(sent[::step], seen)]
    most = run(0)[1]
    return {
        "up_s": follower.up_s, "descriptors": follower.descriptors, "stream_kib": follower.stream_kib,
        "idle_cores": idle_cores, "rate": rate, "blocks_a_cpu_s": BLOCKS / message_s, "zeromq_share": share,
        "most": most, "visible_p50_ms": 1e3 * rank(waits, 0.5), "visible_p99_ms": 1e3 * rank(waits, 0.99),
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--publishers", "counts", multiple=True, type=int, default=(600, 2000), show_default=True)
@click.option("--rate", default=2000, show_default=True, help="Messages a second, of all publishers together.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each part.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(counts: tuple[int, ...], rate: int, seconds: float, json_file: Path | None) -> None:
    raise_file_limit()
    facts = machine("pyzmq")
    print(in_words(facts))
    rows = {f"{count:,}": measure(count, rate, seconds) for count in counts}
    print(markdown(rows, COLUMNS, "publishers"))
    write_json(json_file, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
