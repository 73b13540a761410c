"""Two routers before the same two workers, as processes: one view of the caches, one sum of the load, and one of them
killed and replaced."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]

VOCAB = 2000
_RNG = random.Random(7)


def prompt(tokens: int) -> list[int]:
    return [_RNG.randrange(10, VOCAB) for _ in range(tokens)]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Router(Program):
    """`router run` that tells its load at `own` and listens to `other`."""

    def __init__(self, log: Path, workers: Sequence[str], own_port: int, peer_port: int, *args: str) -> None:
        peers = ("--peer-bind", f"tcp://127.0.0.1:{own_port}", "--peer", f"tcp://127.0.0.1:{peer_port}")
        port = () if "--port" in args else ("--port", "0")
        super().__init__(log, "router", "run", *workers, *port, "--health-interval", "0.5", *peers, *args)

    def await_ready(self) -> Router:
        super().await_ready()
        wait_until(lambda: all(row["state"] == "up" for row in self.workers()), self.log, 60)
        return self

    def workers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = call(f"{self.url}/workers")[2]["workers"]
        return sorted(rows, key=lambda row: str(row["worker_id"]))

    def counts(self, *names: str) -> list[int]:
        """The sum of these columns of `/workers`, a worker a number."""
        return [sum(row[name] for name in names) for row in self.workers()]

    def complete(self, ids: list[int], worker: str | None = None) -> tuple[str, int, int]:
        """(worker, tokens predicted as cached, tokens the engine reused) of a streamed completion of two tokens."""
        body = {"model": "m", "prompt": ids, "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        worker_headers = {"x-blockcast-worker": worker} if worker else {}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **worker_headers},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            headers, lines = answer.headers, answer.read().split(b"\n\n")
        assert lines[-2:] == [b"data: [DONE]", b""], lines
        usage = json.loads(lines[-3].removeprefix(b"data: "))["usage"]
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return headers["x-blockcast-worker"], int(headers["x-blockcast-predicted-cached-tokens"]), cached_tokens

    def predicted_tokens(self, ids: list[int]) -> dict[str, int]:
        """Worker -> tokens of this prompt that it holds, as far as this router knows."""
        explanation = call(f"{self.url}/route", {"model": "m", "prompt": ids, "max_tokens": 1})[2]
        return {row["worker"]: row["cached_tokens"] for row in explanation["candidates"]}

    def queued_s(self, worker: str) -> float:
        """Seconds of prefill that wait there, both routers' requests counted."""
        explanation = call(f"{self.url}/route", {"model": "m", "prompt": prompt(20), "max_tokens": 1})[2]
        return float(next(row["queue_s"] for row in explanation["candidates"] if row["worker"] == worker))


class Cluster:
    """Two engines, two routers."""

    def __init__(self, folder: Path, engines: list[Any]) -> None:
        self.engines = engines
        self.urls = [engine.url for engine in engines]
        self._folder = folder
        self._ports = free_ports(2)
        self.routers: list[Router] = []
        self._routers: list[Router] = []
        for side in range(2):
            self.routers.append(self.start(side))
        for router in self.routers:
            router.await_ready()

    def start(self, side: int) -> Router:
        log = self._folder / f"router-{len(self._routers)}.log"
        router = Router(log, self.urls, self._ports[side], self._ports[1 - side])
        self._routers.append(router)
        return router

    @contextlib.contextmanager
    def nothing_computed(self) -> Iterator[None]:
        """Within, the engines take requests and compute nothing."""
        pids = [engine.core_pid() for engine in self.engines]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for router in self._routers:
            router.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: list[Any]) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("routers"), engines)
    yield running
    running.close()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[concurrent.futures.Future[Any]]:
    """Every call in a thread of its own, started one after the other without waiting for answers."""
    pool = concurrent.futures.ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures


def test_a_shared_prefix_goes_to_one_worker_through_both(cluster: Cluster) -> None:
    for prefix in (prompt(400) for _ in range(3)):
        worker, predicted_tokens, _ = cluster.routers[0].complete([*prefix, *prompt(20)])
        assert predicted_tokens == 0
        for number in (1, 0, 1):
            router = cluster.routers[number]
            ids = [*prefix, *prompt(20)]
            wait_until(lambda: router.predicted_tokens(ids)[worker] == 400, "the events came")  # noqa: B023
            wait_until(lambda: router.queued_s(worker) == 0, "the other router told that its request has begun")  # noqa: B023
            assert router.complete(ids) == (worker, 400, 400)


def test_a_burst_through_both_is_spread_over_the_sum(cluster: Cluster) -> None:
    """Worker 0 is given six requests by one router. The other, which has nothing in flight, fills worker 1 first; then
    the first, which has nothing on worker 1, takes that into account in turn."""
    first, second = cluster.routers
    names = [row["worker_id"] for row in first.workers()]
    # Warm: what was learned and lately routed is then about equal.
    for router in cluster.routers:
        for name in names:
            router.complete(prompt(1000), worker=name)

    def sends(router: Router, count: int, worker: str | None = None) -> list[concurrent.futures.Future[Any]]:
        prompts = [prompt(1000) for _ in range(count)]
        return at_once([lambda ids=ids: router.complete(ids, worker=worker) for ids in prompts])

    def all_told(a: Router, b: Router, count: int) -> None:
        """`b` counts as another's what `a` has in flight, and `a` has `count` of them."""
        local_counts = ("prefilling", "decoding")
        wait_until(lambda: sum(a.counts(*local_counts)) == count, lambda: (a.workers(), a.log()))
        are_counts_shared = lambda: b.counts("peer_prefilling", "peer_decoding") == a.counts(*local_counts)  # noqa: E731
        wait_until(are_counts_shared, lambda: (a.workers(), b.workers()))

    with cluster.nothing_computed():
        burst = sends(first, 6, names[0])
        all_told(first, second, 6)
        burst += sends(second, 10)
        all_told(second, first, 10)
        on_second = second.counts("prefilling")
        burst += sends(first, 6)
        all_told(first, second, 12)
        sums = [a + b for a, b in zip(first.counts("prefilling"), second.counts("prefilling"))]
    assert on_second[1] - on_second[0] >= 4, f"without the other's six they would be 5 and 5: {on_second}"
    assert sum(sums) == 22
    assert abs(sums[0] - sums[1]) <= 3, f"the sum is what counts: {sums}"
    for future in burst:
        future.result(60)
    for router in cluster.routers:
        columns = ("prefilling", "decoding", "peer_prefilling", "peer_decoding")
        wait_until(lambda: router.counts(*columns) == [0, 0], router.log)  # noqa: B023


def test_one_is_killed_and_another_starts_in_its_place(cluster: Cluster) -> None:
    dead, remaining_router = cluster.routers
    names = [row["worker_id"] for row in remaining_router.workers()]
    predictions = {}
    for number in range(6):
        ids = prompt(320)
        name, _, _ = remaining_router.complete(ids, worker=names[number % 2])
        predictions[name, number] = ids
    with cluster.nothing_computed():
        lost_answers = at_once([lambda: dead.complete(prompt(500), worker=names[0])] * 3)
        wait_until(lambda: remaining_router.counts("peer_prefilling", "peer_decoding") == [3, 0], remaining_router.log)
        dead.process.kill()
        wait_until(lambda: remaining_router.counts("peer_prefilling", "peer_decoding") == [0, 0], remaining_router.log)
    for future in lost_answers:
        with pytest.raises(OSError):
            future.result(60)
    assert "is silent: its load no longer counts" in remaining_router.log()
    assert remaining_router.complete(prompt(100))[2] == 0, "the other one works on"
    late = cluster.start(0).await_ready()
    for (name, _), ids in predictions.items():
        extended_ids = [*ids, 5]
        wait_until(
            lambda: late.predicted_tokens(extended_ids) == remaining_router.predicted_tokens(extended_ids),  # noqa: B023
            lambda: (late.predicted_tokens(extended_ids), late.log()),  # noqa: B023
        )
        assert late.predicted_tokens(extended_ids)[name] == 320
    # And it counts what was in flight before it came, and is counted.
    with cluster.nothing_computed():
        waiting = at_once([lambda: remaining_router.complete(prompt(500), worker=names[1]) for _ in range(2)])
        waiting += at_once([lambda: late.complete(prompt(500), worker=names[0])])
        wait_until(lambda: late.counts("peer_prefilling") == [0, 2], late.log)
        wait_until(lambda: remaining_router.counts("peer_prefilling") == [1, 0], remaining_router.log)
    for future in waiting:
        future.result(60)


def test_routers_that_agree_share_a_port(tmp_path: Path, engines: list[Any]) -> None:
    """The kernel spreads connections over both, each counts the other's load, and one goes without the other."""
    port, *more_ports = free_ports(5)
    loads, admins = more_ports[:2], more_ports[2:]
    urls = [engine.url for engine in engines]
    programs: list[Program] = []

    def count_answers(side: int) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{admins[side]}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        counts = [line.split()[-1] for line in lines if line.startswith("blockcast_router_decisions_total")]
        return sum(map(int, map(float, counts)))

    def complete() -> int:
        return call(f"http://127.0.0.1:{port}/v1/completions", {"model": "m", "prompt": prompt(20), "max_tokens": 1})[0]

    try:
        for side in range(2):
            flags = ["--port", str(port), "--reuse-port", "--admin", f"127.0.0.1:{admins[side]}"]
            flags += ["--peer-bind", f"tcp://127.0.0.1:{loads[side]}"]
            flags += [f"--peer=tcp://127.0.0.1:{load}" for load in loads]  # of all, its own too
            programs.append(Program(tmp_path / f"shares-{side}.log", "router", "run", *urls, *flags))
        for side, router in enumerate(programs):
            router.await_ready()
            wait_until(lambda: call(f"http://127.0.0.1:{admins[side]}/readyz")[0] == 200, router.log)  # noqa: B023
        assert {complete() for _ in range(32)} == {200}
        wait_until(lambda: sum(map(count_answers, range(2))) == 32, "every request was counted once")
        assert min(map(count_answers, range(2))) > 0
        page = urllib.request.urlopen(f"http://127.0.0.1:{admins[0]}/metrics", timeout=10).read().decode()
        assert 'blockcast_router_peer_messages_total{outcome="received"} 0.0' not in page
        programs[0].process.send_signal(signal.SIGTERM)
        assert programs[0].process.wait(30) == 0
        assert {complete() for _ in range(16)} == {200}
    finally:
        for router in programs:
            router.close()


def as_vllm_tells(engine: Any) -> str:
    """The worker's `--worker` for a router that cannot ask where it publishes."""
    source = call(f"{engine.url}/kv_event_sources")[2]["0"]
    return f"url={engine.url},events={source['endpoint']},replay={source['replay_endpoint']}"


def test_one_that_starts_later_takes_what_the_first_knows(tmp_path: Path, engines: list[Any]) -> None:
    """Each names the other in --snapshot-from. The second fills its index from the first; then the first is killed,
    and another in its place fills its own from the second."""
    loads, apis = free_ports(2), free_ports(2)
    workers = [part for engine in engines for part in ("--worker", as_vllm_tells(engine))]
    routers: list[Router] = []

    def start(side: int) -> Router:
        own_flags = ("--port", str(apis[side]), "--snapshot-from", f"http://127.0.0.1:{apis[1 - side]}")
        router = Router(tmp_path / f"{len(routers)}.log", workers, loads[side], loads[1 - side], *own_flags)
        routers.append(router)
        return router.await_ready()

    try:
        first = start(0)
        names = [row["worker_id"] for row in first.workers()]
        prompts = {}
        for number in range(6):
            ids = prompt(320)
            name, _, _ = first.complete(ids, worker=names[number % 2])
            prompts[name, number] = [*ids, 5]
        knows = {key: {name: 320 if name == key[0] else 0 for name in names} for key in prompts}
        predictions_of = lambda router: {key: router.predicted_tokens(ids) for key, ids in prompts.items()}  # noqa: E731
        wait_until(lambda: predictions_of(first) == knows, lambda: (predictions_of(first), first.log()))
        second = start(1)
        for name in names:
            assert f"worker {name} rank 0: starting from {first.url}" in second.log()
        wait_until(lambda: predictions_of(second) == knows, lambda: (predictions_of(second), second.log()))
        first.process.kill()
        first.process.wait()
        third = start(0)
        for name in names:
            assert f"worker {name} rank 0: starting from {second.url}" in third.log()
        wait_until(lambda: predictions_of(third) == knows, lambda: (predictions_of(third), third.log()))
        assert [row["events"]["streams"][0]["replayed"] for row in third.workers()] == [0, 0], "not from the ring"
        for (name, _), ids in prompts.items():
            assert third.complete(ids, worker=name) == (name, 320, 320)
    finally:
        for router in routers:
            router.close()
