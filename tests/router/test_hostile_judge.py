"""scripts/hostile can find something: routers that are wrong in one way each are caught by it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
BAD = b"HTTP/1.1 400 Bad\r\ncontent-length: 0\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def hostile() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "scripts")
    sys.path.append(folder)
    names = ("hostile_world", "hostile_groups", "hostile_http", "harness.load")
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    sys.path.remove(folder)


def faults(hostile: Any, handler: Handler, data: bytes, answers: int | None, monkeypatch: Any) -> list[str]:
    monkeypatch.setattr(hostile.hostile_groups, "CLOSED_S_MAX", 0.3)
    monkeypatch.setattr(hostile.hostile_world, "CLOSED_S_MAX", 0.3)

    async def run() -> list[str]:
        world = hostile.hostile_world.AttackRun(
            name_filter="", is_short=True, from_checkout=True, duration_s=60, seed=0
        )
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            world.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            variant = hostile.hostile_http.Variant("v", data, answers)
            await hostile.hostile_groups._check_cuts(world, "v", variant)
            await asyncio.sleep(1.0)
        return [fault["what"] for fault in world.faults]

    return asyncio.run(run())


async def close_writer(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def sound_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request whose head ends somewhere."""
    data = b""
    while b"\r\n\r\n" not in data and (chunk := await reader.read(1000)):
        data += chunk
    writer.write(OK if data.startswith(b"GET") else BAD)
    await close_writer(writer)


async def reads_are_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read(1000)
    writer.write(OK if data.endswith(b"\r\n\r\n") and data.startswith(b"GET") else BAD)
    await close_writer(writer)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    await asyncio.sleep(0.7)
    await close_writer(writer)


REQUEST = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


def test_a_cut_that_changes_the_meaning_is_seen(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(hostile, sound_server, REQUEST, 1, monkeypatch) == []
    assert faults(hostile, sound_server, b"X" + REQUEST, 0, monkeypatch) == []
    assert all(fault.startswith("cut into") for fault in faults(hostile, reads_are_requests, REQUEST, 1, monkeypatch))
    assert faults(hostile, reads_are_requests, REQUEST, 1, monkeypatch)


def test_what_is_answered_and_is_no_request_is_seen(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "statuses [200], expected 0 below 400" in faults(hostile, sound_server, REQUEST, 0, monkeypatch)


def test_a_connection_that_stays_open_is_seen(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the connection stays open" in faults(hostile, says_nothing, REQUEST, None, monkeypatch)


@pytest.mark.parametrize(
    ("error", "body", "fault_text"),
    [
        ("", b"half", "looks whole"),
        ("timeout", b"", "hangs"),
        ("lost", b"STALE", "nobody asked for"),
        ("lost", b"half", ""),
    ],
)
def test_answers_are_judged(hostile: Any, error: str, body: bytes, fault_text: str) -> None:
    world = hostile.hostile_world.AttackRun(name_filter="", is_short=True, from_checkout=True, duration_s=60, seed=0)
    answer = hostile.load.Response(0.0, status=200, chunks=[(0.0, body)], error=error)
    hostile.hostile_groups._check_response(world, "upstream: a stream that ends", answer, ())
    assert bool(world.faults) == bool(fault_text)
    assert fault_text in "".join(fault["what"] for fault in world.faults)


def test_a_delay_is_judged_by_who_asked_directly_at_that_moment(hostile: Any) -> None:
    lines = sorted(
        [due_s, delay_ms, 200, name, 0.0, 0.0]
        for due_s, delay_ms, name in (
            (9.7, 80.0, "direct"), (10.0, 90.0, "router"), (10.05, 70.0, "direct"), (10.1, 99.0, "direct"),
            (11.0, 50.0, "router"), (11.0, 3.0, "direct"), (10.95, 4.0, "direct"), (12.0, 8.0, "router"),
        )
    )  # fmt: skip
    direct_delays_ms = {
        line[0]: hostile.hostile_world.direct_delay_ms(line, lines) for line in lines if line[3] == "router"
    }
    assert direct_delays_ms == {10.0: 70.0, 11.0: 4.0, 12.0: 0.0}
