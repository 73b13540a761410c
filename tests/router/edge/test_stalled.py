"""A worker that stands still in the middle of its streams: told, avoided, and taken back when it moves."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True}).encode()


def streaming(moves: asyncio.Event, ends: asyncio.Event, begun: list[int]) -> Any:
    """Chunks without a pause while `moves` is set, until `ends` is."""

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(1)
        writer.write(HEAD)
        while not ends.is_set():
            writer.write(b"2\r\nx\n\r\n")
            await asyncio.sleep(0.001)
            await moves.wait()
        writer.write(b"0\r\n\r\n")

    return script


def test_a_worker_that_stands_still_is_avoided(edge: Any, make_post: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        await edge.start(core={"health": {"stalled_s": 0.5}})
        ends = asyncio.Event()
        moves = {name: asyncio.Event() for name in "ab"}
        begun: dict[str, list[int]] = {"a": [], "b": []}
        for name in "ab":
            moves[name].set()
            await edge.worker(streaming(moves[name], ends, begun[name]), name)
        first = [asyncio.create_task(edge.exchange(make_post(BODY, b"/v1/completions"))) for _ in range(4)]
        await edge.until(lambda: len(edge.proxy.exchanges) == 4)
        await edge.until(
            lambda: None not in (exchange.last_progress_at_s for exchange in edge.proxy.exchanges.values())
        )
        moves["a"].clear()

        def moves_now(exchange: Any) -> bool:
            worker = exchange.context.decision.worker
            return not moves[worker].is_set() or exchange.last_progress_at_s == edge.now()

        async def let_time_pass(until: Any) -> None:
            """In steps in which every stream moves, but those that stand still."""
            for _ in range(20):
                edge.advance(0.1)
                await edge.until(lambda: all(map(moves_now, edge.proxy.exchanges.values())))
                if until():
                    return
            raise AssertionError("not within 2 s")

        def alarms(name: str) -> list[str]:
            rows = edge.core.snapshot(edge.now()).workers
            return [alarm for row in rows if row["worker_id"] == name for alarm in row["alarms"]]

        await let_time_pass(until=lambda: alarms("a"))
        assert alarms("a")[0].startswith("stalled")
        assert alarms("b") == []
        there = len(begun["a"])
        more = [asyncio.create_task(edge.exchange(make_post(BODY, b"/v1/completions"))) for _ in range(3)]
        await edge.until(lambda: sum(map(len, begun.values())) == 7)
        assert len(begun["a"]) == there
        moves["a"].set()
        await let_time_pass(until=lambda: not alarms("a"))
        ends.set()
        answers = await asyncio.gather(*first, *more)
        assert all(answer.endswith(b"0\r\n\r\n") for answer in answers)

    with caplog.at_level(logging.INFO, logger="router"):
        edge.run(scenario())
    told = [record.getMessage() for record in caplog.records if "still" in record.getMessage()]
    assert told == ["worker a stands still: none of its streams moves", "worker a stands still no more"]
