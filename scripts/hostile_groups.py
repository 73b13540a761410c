"""The attacks of scripts/hostile, one coroutine a group."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import zmq
from harness.load import Client, Response, post_request
from harness.programs import ADMIN_HEADERS, request_json, wait_until
from harness.upstream import (
    CLOSE,
    RESET,
    STREAM,
    WAIT,
    Steps,
    Upstream,
    complete_response,
    encode_chunk,
    model_card,
    models_page,
)
from harness.workers import BLOCK, Publisher, ScriptedWorker, block_stored
from hostile_bodies import BODIES, CHAT
from hostile_events import EVENTS, FRAMES, PAGES, PEER, REPLAYS
from hostile_http import Variant, make_variants
from hostile_upstreams import COMPLETE_RESPONSES, INVALID_RESPONSES, TRUNCATED_RESPONSES, UNUSUAL_RESPONSES, VALID_BODY
from hostile_world import CLOSED_S_MAX, ENDED, SILENCE_S, STAYS_OPEN, AttackRun, select_attacks

CONCURRENCY = 32
BODY_S_MAX = 120.0
ANSWER_S_MAX = 25.0
"""More than --total-timeout: what is not over then hangs."""
EVENT_S_MAX = 60.0
REDIRECT = b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"
UNUSUAL_IDS = (
    "x",
    "%00",
    "%ff",
    "a" * 60_000,
    "..%2f..%2fworkers",
    "%",
    "x/y",
    "\u00e9",
    "cmpl-" + "9" * 5_000,
    "#",
    "?",
)
PAUSE_S = 0.1
"""Between requests, so that what a worker says unasked finds its connection idle: in the middle of the next request
nobody could tell it from the answer."""


async def attack_http(world: AttackRun) -> None:
    """Each variant whole, then cut: the answers are the same."""
    attacks = {f"http: {v.name}": v for v in make_variants()}
    for name, variant in select_attacks(attacks, world, 30):
        async with world.attack(name):
            await _check_cuts(world, name, variant)


async def _check_cuts(world: AttackRun, name: str, variant: Variant) -> None:
    data = variant.data
    patience_s = CLOSED_S_MAX if variant.answers else SILENCE_S
    statuses, connection_end = await world.send_raw(data, timeout_s=patience_s)
    accepted_count = sum(status < 400 for status in statuses)
    if connection_end == STAYS_OPEN:
        world.report_fault(name, "the connection stays open", data)
    if variant.answers is not None and accepted_count != variant.answers:
        world.report_fault(name, f"statuses {statuses}, expected {variant.answers} below 400", data)
    if connection_end == ENDED:  # else more bytes are awaited, and the client's end of sending is what ends it
        patience_s = CLOSED_S_MAX
    limit = asyncio.Semaphore(CONCURRENCY)

    async def send_cut(*pieces: bytes) -> None:
        async with limit:
            cut_statuses, end = await world.send_raw(*pieces, timeout_s=patience_s)
        if sum(status < 400 for status in cut_statuses) != accepted_count or end == STAYS_OPEN:
            lengths = [len(piece) for piece in pieces][:20]
            world.report_fault(name, f"cut into {lengths}: statuses {cut_statuses}, {end}; whole {statuses}", data)

    cut_count = 6 if world.is_short else 160 if len(data) < 2000 else 4
    offsets = range(1, len(data))
    cut_offsets = world.rng.sample(offsets, min(cut_count, len(offsets)))
    cuts = [(data[:offset], data[offset:]) for offset in cut_offsets]
    if len(data) < 2000:
        cuts.append(tuple(data[i : i + 1] for i in range(len(data))))
    await asyncio.gather(*(send_cut(*pieces) for pieces in cuts))


async def attack_upstreams(world: AttackRun) -> None:
    """Each beside a sound worker of the same model; then answers broken off at every offset."""
    kinds = {
        f"upstream: {name}": (steps, "")
        for modes in (INVALID_RESPONSES, TRUNCATED_RESPONSES, UNUSUAL_RESPONSES)
        for name, steps in modes.items()
    }
    kinds |= {f"upstream: {action}s every connection": ((), action) for action in (CLOSE, RESET)}
    limit = asyncio.Semaphore(1 if world.name_filter else 6)

    async def attack_one(number: int, name: str, steps: Steps, at_accept: str) -> None:
        async with limit, world.attack(name):
            await _compare_with_valid_worker(world, f"up{number}", name, steps, at_accept)

    attacks = select_attacks(kinds, world, 12)
    await asyncio.gather(*(attack_one(number, name, *how) for number, (name, how) in enumerate(attacks)))
    for name, answer in select_attacks(
        {f"upstream: {name}, broken off": answer for name, answer in COMPLETE_RESPONSES.items()}, world, 1
    ):
        offsets = list(range(len(answer))) if not world.is_short else world.rng.sample(range(len(answer)), 20)
        for how in (CLOSE, RESET):
            async with world.attack(f"{name} ({how})"):
                await _check_truncated(world, f"{name} ({how})", answer, [(answer[:at], how) for at in offsets])


async def _compare_with_valid_worker(world: AttackRun, model: str, name: str, steps: Steps, at_accept: str) -> None:
    pages = {"/v1/models": models_page(model_card(model))}
    must_repeat = name.removeprefix("upstream: ") in INVALID_RESPONSES or at_accept
    async with (
        Upstream(pages, lambda: steps) as rogue,
        Upstream(pages, lambda: (complete_response(VALID_BODY),)) as valid_worker,
    ):
        workers = [
            await world.add_worker(rogue.url, events="none"),
            await world.add_worker(valid_worker.url, events="none"),
        ]
        if not await world.wait_until_up(workers[0]) or not await world.wait_until_up(workers[1]):
            world.report_fault(name, "a worker whose pages are sound is not taken in", steps)
        rogue.accept_action = at_accept
        async with Client(world.url, timeout_s=ANSWER_S_MAX) as client:
            for number in range(3 if world.is_short else 6):
                body = {"model": model, "prompt": [number] * 20, "stream": bool(number % 2)}
                headers = {} if number < 4 else {"x-blockcast-worker": workers[0]}
                response = await client.send(post_request("/v1/completions", body, headers))
                await asyncio.sleep(PAUSE_S)
                _check_response(world, name, response, steps)
                # A worker named in the request cannot be replaced, nor one that takes its whole time to fail.
                if must_repeat and not headers and response.status not in (200, 504):
                    world.report_fault(
                        name, f"not repeated on the sound worker: {response.status} {response.error}", steps
                    )
        await world.remove_workers(*workers)


def _check_response(world: AttackRun, name: str, response: Response, steps: object) -> None:
    if response.error == "timeout":
        world.report_fault(name, f"hangs: status {response.status} after {ANSWER_S_MAX:g} s", steps)
    if b"STALE" in response.body:
        world.report_fault(name, "bytes that nobody asked for reached a client", steps)
    if (
        name.removeprefix("upstream: ") in TRUNCATED_RESPONSES
        and response.status == 200
        and not response.error
        and b"GOOD" not in response.body
    ):
        world.report_fault(name, f"a broken answer looks whole: {response.body[-200:]!r}", steps)


async def _check_truncated(world: AttackRun, name: str, answer: bytes, steps: list[Steps]) -> None:
    """One worker for a few of them, as one that fails often is left alone."""
    model, remaining_steps = f"cut{len(world.attacks)}", list(steps)
    pages = {"/v1/models": models_page(model_card(model))}

    def next_steps() -> Steps:
        return remaining_steps.pop() if remaining_steps else (answer,)

    end_s = time.monotonic() + 120
    async with (
        Upstream(pages, lambda: (complete_response(VALID_BODY),)) as valid_worker,
        Client(world.url, timeout_s=ANSWER_S_MAX) as client,
    ):
        workers = [await world.add_worker(valid_worker.url, events="none")]
        while remaining_steps and time.monotonic() < end_s:
            async with Upstream(pages, next_steps) as rogue:
                worker = await world.add_worker(rogue.url, events="none")
                await world.wait_until_up(worker)
                for number in range(12):
                    body = {"model": model, "prompt": [number] * 20}
                    response = await client.send(post_request("/v1/completions", body))
                    if response.error == "timeout":
                        world.report_fault(name, f"hangs; {len(remaining_steps)} offsets are left", steps)
                    is_whole = b"GOOD" in response.body or b"[DONE]" in response.body or b"FULL" in response.body[-200:]
                    if response.status == 200 and not response.error and not (is_whole and response.body):
                        world.report_fault(name, f"a broken answer looks whole: {response.body!r}", steps)
                await world.remove_workers(worker)
        await world.remove_workers(*workers)
    if remaining_steps:
        world.attacks[-1]["note"] = f"{len(remaining_steps)} offsets were not reached"


async def attack_bodies(world: AttackRun) -> None:
    sizes = (63_000, 10**6) if world.is_short else (63_000, 10**6, 10**7, 6 * 10**7)
    kinds = {f"body: {name}, {size / 1e6:g} MB": (*BODIES[name], size) for name in BODIES for size in sizes}
    for name, (path, make, size) in select_attacks(kinds, world, 8):
        request = post_request(path, make(size))
        async with world.attack(name) as entry, Client(world.url, timeout_s=BODY_S_MAX) as client:
            response = await client.send(request)
            entry["note"] = f"{response.status} {response.error} in {response.end_s - response.start_s:.2f} s"
            if response.status >= 500 or response.error == "timeout" or not response.status:
                world.report_fault(name, entry["note"], request[:300])
    unfinished_sizes = {"body: 12 unfinished ones of 60 MB": 60_000_000}
    for name, size in select_attacks(unfinished_sizes, world, 0):
        async with world.attack(name):
            host, port = world.url.removeprefix("http://").split(":")
            connections = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
            for _, writer in connections:
                writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), size + 1))
                writer.write(b"x" * size)
            await asyncio.sleep(3)
            for _, writer in connections:
                writer.transport.abort()


class EventDelayProbe:
    """A worker whose events are followed while others misbehave: how long until one is known."""

    def __init__(self, world: AttackRun) -> None:
        self._world = world
        self.worker = ScriptedWorker("sound", Publisher())
        self._event_count = 0

    async def measure_delay_s(self) -> float | None:
        """None: not within the time."""
        self._event_count += 1
        ids = [(self._event_count * 7919 + i) % 30000 for i in range(4 * BLOCK + 1)]
        self.worker.publisher.publish(block_stored([self._event_count * 100 + i for i in range(4)], ids[:-1]))
        start_s = time.monotonic()

        def is_indexed() -> bool:
            status, answer = request_json(f"{self._world.url}/route", {"model": "sound", "prompt": ids}, timeout_s=60)
            return status == 200 and any(row["cached_tokens"] == 4 * BLOCK for row in answer["candidates"])

        is_found = await asyncio.to_thread(wait_until, is_indexed, EVENT_S_MAX, 0.01)
        return time.monotonic() - start_s if is_found else None


class LyingReplays(Publisher):
    """Answers questions to the replay socket with what it was given."""

    def __init__(self, replies: list[list[bytes]]) -> None:
        self._replies = replies
        super().__init__()

    def _serve_replays(self, router: zmq.Socket[bytes], stop: Any) -> None:
        reply_count = 0
        while not stop.is_set():
            if not router.poll(20):
                continue
            identity, *_ = router.recv_multipart()
            reply_count += 1
            for frames in self._replies if reply_count <= 20 else ():
                router.send_multipart([identity, b"", *frames])
        router.close(0)


async def attack_events(world: AttackRun) -> None:
    probe = EventDelayProbe(world)
    await world.wait_until_up(await world.add_worker(probe.worker.url))
    await asyncio.to_thread(probe.worker.publisher.await_subscriber)
    if await probe.measure_delay_s() is None:
        world.report_fault("events", "the sound worker's events are not known even before the first attack", "")

    def frames_of(payloads: Callable[[], Iterator[bytes]]) -> Iterator[list[bytes]]:
        return ([b"", struct.pack(">Q", seq), payload] for seq, payload in enumerate(payloads()))

    kinds: dict[str, Any] = {f"events: {n}": (lambda p=p: frames_of(p), Publisher) for n, p in EVENTS.items()}
    kinds |= {f"frames: {n}": (lambda f=f: iter(f), Publisher) for n, f in FRAMES.items()}
    gap = [[b"", struct.pack(">Q", 9), b"\x93\xcb" + b"\x00" * 8 + b"\x90\xc0"]]
    kinds |= {f"replay: {n}": (lambda: iter(gap), lambda r=r: LyingReplays(r)) for n, r in REPLAYS.items()}
    try:
        for number, (name, (frames, publisher)) in enumerate(select_attacks(kinds, world, 10)):
            async with world.attack(name) as entry:
                worker = ScriptedWorker(f"evil{number}", publisher())
                worker_id = await world.add_worker(worker.url)
                await world.wait_until_up(worker_id)
                await asyncio.to_thread(worker.publisher.await_subscriber)
                await asyncio.to_thread(_send_frames, worker, frames)
                delay_s = await probe.measure_delay_s()
                entry["note"] = f"a sound event is known after {delay_s or 0:.2f} s"
                if delay_s is None:
                    world.report_fault(name, f"events of the sound worker are not known after {EVENT_S_MAX:g} s", name)
                await world.remove_workers(worker_id)
                await asyncio.to_thread(worker.close)
    finally:
        await asyncio.to_thread(probe.worker.close)


def _send_frames(worker: ScriptedWorker, frames: Callable[[], Iterator[list[bytes]]]) -> None:
    for message in frames():
        worker.publisher._pub.send_multipart(message)


async def attack_discovery(world: AttackRun) -> None:
    attacks = select_attacks({f"discovery: {name}": pages for name, pages in PAGES.items()}, world, 8)
    while attacks:
        batch, attacks = attacks[:6], attacks[6:]
        await asyncio.gather(*(_attack_discovery_page(world, name, pages) for name, pages in batch))


async def _attack_discovery_page(world: AttackRun, name: str, pages: dict[str, bytes]) -> None:
    async with world.attack(name) as entry:
        card = model_card(f"found{len(world.attacks)}")
        valid_pages = {"/v1/models": models_page(card), "/kv_event_sources": b"{}"}
        async with Upstream({**valid_pages, **pages}, lambda: (complete_response(VALID_BODY),)) as rogue:
            worker = await world.add_worker(rogue.url)
            await asyncio.sleep(1.0 if world.is_short else 2.5)
            status, state = await world.call_admin("/workers")
            rows = [row for row in state["workers"] if row["worker_id"] == worker] if status == 200 else []
            entry["note"] = rows[0]["state"] if rows else "not listed"
            if status != 200:
                world.report_fault(name, f"/workers answers {status}: {str(state)[:200]}", pages)
            await world.remove_workers(worker)


async def attack_peers(world: AttackRun) -> None:
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.linger = 0
    pub.bind(f"tcp://127.0.0.1:{world.peer_port}")
    await asyncio.sleep(1.5)
    try:
        for name, messages in select_attacks({f"peer: {name}": frames for name, frames in PEER.items()}, world, 4):
            async with world.attack(name):
                for frames in messages:
                    pub.send_multipart(frames)
                await asyncio.sleep(0.3 if world.is_short else 1.5)
    finally:
        pub.close(0)
        context.term()
    dumps = {"noise": bytes(range(256)), "deep": b"[" * 100_000, "50 MB": b"x" * 50_000_000, "null": b"null"}
    dumps["chunks without end"] = STREAM + encode_chunk(b"x" * 9000) * 1000
    for name, dump in select_attacks({f"dump: {name}": dump for name, dump in dumps.items()}, world, 1):
        async with world.attack(name), Upstream({}, lambda: (complete_response(b"{}"),), port=world.dump_port) as peer:
            peer.default_page = dump
            worker = ScriptedWorker(f"dumped{len(world.attacks)}", Publisher())
            for _ in range(3):
                worker.publisher.publish(block_stored([1], [1] * BLOCK))
            worker.publisher.drop_oldest(2)
            worker_id = await world.add_worker(worker.url)
            await asyncio.sleep(1.0 if world.is_short else 3.0)
            await world.remove_workers(worker_id)
            await asyncio.to_thread(worker.close)


async def attack_admin_routes(world: AttackRun) -> None:
    """The admin's own routes, with the key: what a program or a person may mistype, and bodies of every kind."""
    requests = {
        f"operator: {path} of {unusual_id[:8]!r}": (f"{path}/{unusual_id}", None, method)
        for path, method in (("/requests", "GET"), ("/workers", "DELETE"), ("/peer", "GET"))
        for unusual_id in UNUSUAL_IDS
    }
    sizes = (10**5,) if world.is_short else (10**7,)
    for path in ("/route", "/workers"):
        requests |= {f"operator: {path} with {name}, {size} bytes": (path, make(size), "POST")
                  for name, (_, make) in BODIES.items() for size in sizes}  # fmt: skip
    for name, (path, body, method) in select_attacks(requests, world, 12):
        async with world.attack(name) as entry, Client(world.url, timeout_s=BODY_S_MAX) as client:
            request = post_request(path, body or b"", ADMIN_HEADERS).replace(b"POST", method.encode(), 1)
            response = await client.send(request)
            entry["note"] = f"{response.status} {response.error} in {response.end_s - response.start_s:.2f} s"
            if response.status >= 500 or response.error == "timeout":
                world.report_fault(name, entry["note"], (method, path[:200]))


async def attack_trace_collectors(world: AttackRun) -> None:
    """Where traces go."""
    kinds: dict[str, Steps] = {
        "closes": (CLOSE,), "resets": (RESET,), "never answers": (WAIT,), "noise": (bytes(range(256)), CLOSE),
        "redirects": (REDIRECT,), "50 MB": (complete_response(b"x" * 50_000_000),),
    }  # fmt: skip
    for name, steps in select_attacks({f"collector: {name}": steps for name, steps in kinds.items()}, world, 2):
        async with world.attack(name), Upstream({}, lambda steps=steps: steps, port=world.otlp_port):
            async with Client(world.url, timeout_s=ANSWER_S_MAX) as client:
                for number in range(200):
                    headers = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
                    response = await client.send(
                        post_request("/v1/completions", {"model": "mock", "prompt": [number]}, headers)
                    )
                    if response.status != 200:
                        world.report_fault(name, f"{response.status} {response.error}", steps)
            await asyncio.sleep(0.3 if world.is_short else 6.0)


async def attack_identifiers(world: AttackRun) -> None:
    """Names that clients give: of sessions, requests, tenants and models, each one new."""
    count = 300 if world.is_short else 5_000
    headers: dict[str, Callable[[int], dict[str, str]]] = {
        "sessions": lambda i: {"x-session-id": f"s{i}"}, "request ids": lambda i: {"x-request-id": f"r{i}"},
        "long sessions": lambda i: {"x-session-id": f"{i}" + "s" * 4_000},
        "traces": lambda i: {"traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01"},
    }  # fmt: skip
    for name, make in select_attacks({f"new {name}": make for name, make in headers.items()}, world, 2):
        async with world.attack(name), Client(world.url, timeout_s=ANSWER_S_MAX) as client:
            for i in range(count):
                response = await client.send(
                    post_request("/v1/completions", {"model": "mock", "prompt": [i % 999] * 40}, make(i))
                )
                if response.status != 200:
                    world.report_fault(name, f"{response.status} {response.error}", make(i))
                    break


GROUPS: dict[str, Callable[[AttackRun], Awaitable[None]]] = {
    "operators": attack_admin_routes, "collectors": attack_trace_collectors, "sessions": attack_identifiers,
    "http": attack_http, "upstreams": attack_upstreams, "events": attack_events,
    "bodies": attack_bodies, "discovery": attack_discovery, "peers": attack_peers,
}  # fmt: skip
