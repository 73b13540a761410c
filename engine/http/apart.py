"""Bodies are read where they do no harm: short ones at once, longer ones in a thread, long ones in another process.

What a client sends decides how long it takes to parse, to render and to encode, and how much memory. A process can be
told how much it may have, and can be ended. Owns those processes; knows nothing of what is read in them. A process ends
when its socket closes, whatever the reason: no orphans. Pickles go only between our own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.api.params import ModelLimits
from prompts import RequestError, Tokenizer

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
"""What reading one body may take beyond what the process has with its tokenizer."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.http.apart import main; sys.exit(main(int(sys.argv[2])))"
)
log = logging.getLogger("engine.server")


class Reader:
    """Reads bodies with one tokenizer. `close` it."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, folder: str, chat_template: str | None) -> None:
        """`folder`, `chat_template`: where `tokenizer` is from, for the processes, which are started when needed."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._setup = (folder, chat_template, limits)
        self._threads = ThreadPoolExecutor(max_workers=2 + PROCESSES, thread_name_prefix="read")
        self._free: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()  # the last used has read the most before
        self._all: set[_Process] = set()
        for _ in range(PROCESSES):
            self._free.put_nowait(None)

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
        process = await self._free.get()
        try:
            if process is None:
                process = _Process(self._setup)
                self._all.add(process)
            asked = asyncio.get_running_loop().run_in_executor(self._threads, process.read, work, data)
            found = await asyncio.wait_for(asked, READ_S_MAX)
        except (asyncio.TimeoutError, EOFError, OSError, pickle.UnpicklingError) as error:
            log.warning("a body of %d bytes could not be read: %s", len(data), type(error).__name__)
            if process is not None:
                self._all.discard(process)
                process.close()
            process = None
            raise RequestError("the body takes more time or memory to read than it may", param=None) from error
        finally:
            self._free.put_nowait(process)
        if isinstance(found, _Refused):
            raise found.error()
        return found

    def close(self) -> None:
        for process in self._all:
            process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Refused:
    """A RequestError on its way."""

    def __init__(self, error: RequestError) -> None:
        self._fields = vars(error)

    def error(self) -> RequestError:
        return RequestError(**self._fields)


class _Process:
    """Our side of one."""

    def __init__(self, setup: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ours:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
            self._stream = ours.makefile("rwb")
        pickle.dump(setup, self._stream)

    def read(self, work: Work[T], data: bytes) -> T | _Refused:
        """Blocks; for one thread at a time. Raises EOFError or OSError where the process has ended."""
        pickle.dump((work, data), self._stream)
        self._stream.flush()
        found: T | _Refused = pickle.load(self._stream)
        return found

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def main(fd: int) -> int:
    """The process's whole life: read what comes until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the server's affair
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as stream, contextlib.suppress(EOFError, OSError):
        folder, chat_template, limits = pickle.load(stream)
        tokenizer = Tokenizer.load(folder, chat_template=chat_template)
        _limit_memory()
        while True:
            work, data = pickle.load(stream)
            try:
                found = work(data, tokenizer, limits)
            except RequestError as error:
                found = _Refused(error)
            except MemoryError:
                return 1
            pickle.dump(found, stream)
            stream.flush()
    return 0


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES_MAX, resource.RLIM_INFINITY))
    except (OSError, ValueError) as error:  # no Linux, or a lower limit from outside: the time limit is left
        log.info("reading bodies has no limit of memory here: %s", error)
