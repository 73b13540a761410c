"""The socket of --hand-over: whatever becomes of one heir, the next one is heard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from router.app import hand_over
from router.app.hand_over import VERSION, HandOver, Predecessor, Will

WILL = Will(VERSION, 1, "key", [], [], [])


def test_an_heir_that_fails_does_not_keep_out_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "AGAIN_S", 0.001)
    left: list[bool] = []
    faults: list[Exception] = [RuntimeError("planted"), OSError(24, "Too many open files"), ValueError("planted")]

    def will() -> tuple[Will, list[Any]]:
        if faults:
            raise faults.pop()
        return WILL, []

    async def run() -> None:
        offer = HandOver(tmp_path / "s", will, lambda: left.append(True))
        offer.start()
        accept = asyncio.get_running_loop().sock_accept
        refused = [OSError(24, "Too many open files")] * 2

        async def accepts(listener: socket.socket) -> Any:
            if refused:
                raise refused.pop()
            return await accept(listener)

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accepts)
        for said in (b"", b"", b"", b"", b"noise", b"tak"):
            _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            with contextlib.suppress(OSError):
                writer.write(said)
                await writer.drain()
            await asyncio.sleep(0.01)
            writer.transport.abort()
        found = await asyncio.to_thread(Predecessor.find, tmp_path / "s")
        assert found is not None
        assert found.will == WILL
        assert not left
        await found.take()
        assert left
        assert not refused
        assert not faults
        offer.close()

    asyncio.run(run())
