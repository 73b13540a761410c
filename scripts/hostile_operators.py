"""What scripts/hostile sends to the router's own routes, as a collector, as an heir, and under ever new names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from harness.load import Client, post
from harness.programs import ADMIN
from harness.upstream import CLOSE, RESET, WAIT, Steps, Upstream, whole
from hostile_bodies import BODIES
from hostile_world import World, named

ANSWER_S_MAX, BODY_S_MAX = 30.0, 60.0
REDIRECT = b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"
ODD_IDS = ("x", "%00", "%ff", "a" * 60_000, "..%2f..%2fworkers", "%", "x/y", "\u00e9", "cmpl-" + "9" * 5_000, "#", "?")


async def operators(world: World) -> None:
    """The admin's own routes, with the key: what a program or a person may mistype, and bodies of every kind."""
    asked = {
        f"operator: {path} of {odd[:8]!r}": (f"{path}/{odd}", None, method)
        for path, method in (("/requests", "GET"), ("/workers", "DELETE"), ("/peer", "GET"))
        for odd in ODD_IDS
    }
    sizes = (10**5,) if world.short else (10**7,)
    for path in ("/route", "/workers"):
        asked |= {f"operator: {path} with {name}, {size} bytes": (path, make(size), "POST")
                  for name, (_, make) in BODIES.items() for size in sizes}  # fmt: skip
    for name, (path, body, method) in named(asked, world, 12):
        async with world.attack(name) as entry, Client(world.url, patience_s=BODY_S_MAX) as client:
            request = post(path, body or b"", ADMIN).replace(b"POST", method.encode(), 1)
            answer = await client.ask(request)
            entry["note"] = f"{answer.status} {answer.error} in {answer.end_s - answer.sent_s:.2f} s"
            if answer.status >= 500 or answer.error == "timeout":
                world.fault(name, entry["note"], (method, path[:200]))


async def collectors(world: World) -> None:
    """Where traces go, and who connects to the socket of --hand-over."""
    kinds: dict[str, Steps] = {
        "closes": (CLOSE,), "resets": (RESET,), "never answers": (WAIT,), "noise": (bytes(range(256)), CLOSE),
        "redirects": (REDIRECT,), "50 MB": (whole(b"x" * 50_000_000),),
    }  # fmt: skip
    for name, steps in named({f"collector: {name}": steps for name, steps in kinds.items()}, world, 2):
        async with world.attack(name), Upstream({}, lambda steps=steps: steps, port=world.otlp_port):
            async with Client(world.url, patience_s=ANSWER_S_MAX) as client:
                for number in range(200):
                    traced = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
                    answer = await client.ask(post("/v1/completions", {"model": "mock", "prompt": [number]}, traced))
                    if answer.status != 200:
                        world.fault(name, f"{answer.status} {answer.error}", steps)
            await asyncio.sleep(0.3 if world.short else 6.0)
    says = {"goes": b"", "says noise": b"\xff" * 16, "half of the word": b"tak", "1 MB": b"x" * 1_000_000}
    for name, said in named({f"heir: {name}": said for name, said in says.items()}, world, 2):
        async with world.attack(name):
            for _ in range(5):
                reader, writer = await asyncio.open_unix_connection(str(world.hand_over))
                await asyncio.wait_for(reader.readexactly(8), 10.0)
                with contextlib.suppress(OSError):
                    writer.write(said)
                    await writer.drain()
                writer.transport.abort()


async def sessions(world: World) -> None:
    """Names that clients give: of sessions, requests, tenants and models, each one new."""
    count = 300 if world.short else 5_000
    headers: dict[str, Callable[[int], dict[str, str]]] = {
        "sessions": lambda i: {"x-session-id": f"s{i}"}, "request ids": lambda i: {"x-request-id": f"r{i}"},
        "long sessions": lambda i: {"x-session-id": f"{i}" + "s" * 4_000},
        "traces": lambda i: {"traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01"},
    }  # fmt: skip
    for name, make in named({f"new {name}": make for name, make in headers.items()}, world, 2):
        async with world.attack(name), Client(world.url, patience_s=ANSWER_S_MAX) as client:
            for i in range(count):
                answer = await client.ask(post("/v1/completions", {"model": "mock", "prompt": [i % 999] * 40}, make(i)))
                if answer.status != 200:
                    world.fault(name, f"{answer.status} {answer.error}", make(i))
                    break
