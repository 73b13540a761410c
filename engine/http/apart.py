"""Bodies are read where they do no harm: short ones at once, longer ones in a thread, long ones in another process.

What a client sends decides how long it takes to parse, to render and to encode, and how much memory (prompts/apart.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.api.params import ModelLimits
from prompts import RequestError, Tokenizer
from prompts.apart import Ended, Processes

T = TypeVar("T")
Work = Callable[[bytes, Tokenizer, ModelLimits], T]
"""A function of a module: what it does not raise as RequestError must be small."""

AT_ONCE_BYTES = 4096
"""Bodies up to this size are read on the event loop: a thread would cost more than it frees."""
THREAD_BYTES = 64 << 10
"""Bodies up to this size are read in a thread: parsing them holds the interpreter for some milliseconds at most."""
PROCESSES = 2
READ_S_MAX = 30.0
MEMORY_BYTES_MAX = 4 << 30
"""Of a process."""

log = logging.getLogger("engine.server")


class Reader:
    """Reads bodies with one tokenizer. `close` it."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, folder: str, chat_template: str | None) -> None:
        """`folder`, `chat_template`: where `tokenizer` is from, for the processes, which are started when needed."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="read")
        self._processes = Processes((_load, (folder, chat_template, limits)), PROCESSES, MEMORY_BYTES_MAX)

    async def read(self, work: Work[T], data: bytes) -> T:
        """What `work` makes of a body. Raises RequestError."""
        if len(data) <= AT_ONCE_BYTES:
            return work(data, self._tokenizer, self._limits)
        if len(data) <= THREAD_BYTES:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, data, self._tokenizer, self._limits)
        reading = asyncio.ensure_future(self._read_apart(work, data))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(reading)  # a client who leaves leaves no process half way through its body

    async def _read_apart(self, work: Work[T], data: bytes) -> T:
        try:
            return await self._processes.use(data, lambda process: process.call(READ_S_MAX, _read, work, data))
        except Ended as error:
            log.warning("a body of %d bytes could not be read: %s", len(data), error)
            raise RequestError("the body takes more time or memory to read than it may", param=None) from error

    def close(self) -> None:
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


# In the process -------------------------------------------------------------------------------------------------------


def _load(folder: str, chat_template: str | None, limits: ModelLimits) -> tuple[Tokenizer, ModelLimits]:
    return Tokenizer.load(folder, chat_template=chat_template), limits


def _read(loaded: tuple[Tokenizer, ModelLimits], work: Work[T], data: bytes) -> T:
    return work(data, *loaded)
