"""What our workers have said, followed as they note it (`GET /sampled`), so that prompts are priced with the ids that
were sampled (prompts/sampled.py).

Owns one stream a worker, for as long as it is followed. Knows nothing of requests. A stream that breaks off begins
again, with all that the worker remembers.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from prompts.sampled import Note, SampledBook
from router.asking import READ_BYTES, lines

log = logging.getLogger("router")

PAUSE_S = 0.5
PAUSE_S_MAX = 10.0
UNHEARD_S = 30.0
"""A worker that says nothing for so long, not even an empty line, is asked again."""
LINE_BYTES_MAX = 8 << 20
KNOWN_S_MAX = 2.0
"""For all that a worker remembers, before it gets its first request."""
_notes = msgspec.json.Decoder(Note)


class SampledFeed:
    """`follow` and `forget` workers; `close` ends all."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> None:
        """`headers`: with the workers' API key."""
        self._session = session
        self._headers = headers or {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def follow(self, worker_id: str, url: str, book: SampledBook, *, keyed: bool) -> None:
        """Until `forget`. Returns when what the worker remembers is known here, or after a while. `keyed`: it may be
        sent the workers' API key."""
        task = self._tasks.get(worker_id)
        if task is not None and not task.done():
            return
        known = asyncio.Event()
        headers = self._headers if keyed else {}
        self._tasks[worker_id] = asyncio.get_running_loop().create_task(self._keep(url, headers, book, known))
        waiting = asyncio.ensure_future(known.wait())
        try:
            await asyncio.wait({waiting}, timeout=KNOWN_S_MAX)
        finally:
            waiting.cancel()

    def forget(self, worker_id: str) -> None:
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, url: str, headers: dict[str, str], book: SampledBook, known: asyncio.Event) -> None:
        pause_s = PAUSE_S
        while True:
            try:
                if not await self._listen(f"{url}/sampled?follow=1", headers, book, known):
                    known.set()
                    return
                pause_s = PAUSE_S
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                log.debug("%s/sampled: %s: %s", url, type(error).__name__, error)
                pause_s = min(pause_s * 2, PAUSE_S_MAX)
            await asyncio.sleep(pause_s)

    async def _listen(self, url: str, headers: dict[str, str], book: SampledBook, known: asyncio.Event) -> bool:
        """Until the stream ends. False where the worker has none. Raises what a broken stream raises."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=UNHEARD_S, sock_read=UNHEARD_S)
        headers = {**headers, "Accept-Encoding": "identity"}
        asking = self._session.get(url, headers=headers, timeout=limits, allow_redirects=False, read_bufsize=READ_BYTES)
        async with asking as answer:
            if answer.status != 200:
                return answer.status >= 500
            async for line in lines(answer, LINE_BYTES_MAX):
                if line:
                    book.add(_notes.decode(line))
                else:
                    known.set()
        return True
