"""What a process asks of Python and of the operating system: before it serves, and of its memory while it does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

import zmq

_MMAP_THRESHOLD, _MMAPPED_BYTES = -3, 4 << 20
"""Larger pieces have a mapping of their own, which ends with them (M_MMAP_THRESHOLD of mallopt). A new mapping costs
more than what is written into it: conversations of a megabyte return again and again."""
_TRIM_THRESHOLD, _TOP_BYTES = -1, 8 << 20
"""As much that is free at the heap's end is kept until `HeapTrimmer` trims it (M_TRIM_THRESHOLD)."""
FILES_A_STREAM, FILES_BESIDES = 4, 200
"""Descriptors; a replay or a data-parallel rank takes as many again."""
TRIM_S, TRIM_S_MAX, WORTH_BYTES = 5.0, 320.0, 4 << 20
YOUNG_OBJECTS_MAX, COLLECTIONS_TILL_OLD = 1_000, 3
"""Objects that came, beyond those that went, until the collector looks at them; how often until it looks at all of
those once more. A look at 50,000 took 20 to 60 ms."""
OLD_IDLE, OLD_BUSY = 60, 300
"""Second looks until it looks at all that has come since the start, some 5,000 objects each."""


class HeapTrimmer:
    """Returns freed memory to the system: glibc keeps it, so after one attack a process would stay large.

    Asks glibc every TRIM_S while the process is larger than it was at the start; half as often each time that gives
    little back, and again at once when it has grown. In a thread, as it may take tens of milliseconds. Does nothing
    with another C library.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        library = ctypes.CDLL(None)
        self._trim: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(_MMAP_THRESHOLD, _MMAPPED_BYTES)
            library.mallopt(_TRIM_THRESHOLD, _TOP_BYTES)
        self._smallest_bytes = self._trimmed_bytes = resident_bytes() if self._trim is not None else 0
        """Bytes, of all times, and after the last trim."""
        self._pause_s = self._checked_s = self._trimmed_s = 0.0

    def tick(self, now: float) -> None:
        """Call often. `now`: of `time.monotonic`."""
        if self._trim is None or now < self._checked_s + TRIM_S:
            return
        self._checked_s = now
        resident = resident_bytes()
        self._smallest_bytes = min(self._smallest_bytes, resident)
        if resident > self._trimmed_bytes + WORTH_BYTES:
            self._pause_s = 0.0
        if resident > self._smallest_bytes + WORTH_BYTES and now >= self._trimmed_s + self._pause_s:
            self._trimmed_s = now
            self._executor.submit(self._trim_heap, self._trim, resident)

    def _trim_heap(self, trim: Callable[[int], int], before: int) -> None:
        trim(0)
        self._trimmed_bytes = resident_bytes()
        worth = before - self._trimmed_bytes > WORTH_BYTES
        self._pause_s = TRIM_S if worth else min(max(2 * self._pause_s, TRIM_S), TRIM_S_MAX)


def resident_bytes() -> int:
    """Of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def limit_garbage_collection() -> None:
    """Take what start-up made out of the garbage collector's sight, and let it look at little at a time: nobody waits
    for a look of more than a few milliseconds. What is older is `collect_old_objects`'s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, COLLECTIONS_TILL_OLD, 2**31 - 1)


def collect_old_objects(*, idle: bool) -> None:
    """Call often. Looks at everything, which takes long where there is much: hardly ever, as nearly all garbage is
    found young, and best while nobody waits."""
    if gc.get_count()[2] >= (OLD_IDLE if idle else OLD_BUSY):
        gc.collect()


def event_streams_max(limit: int) -> int:
    """Event streams that three quarters of the `limit` of file descriptors are enough for."""
    return max(1, 3 * (limit - FILES_BESIDES) // 4 // FILES_A_STREAM)


def connections_limit(limit: int, workers: int, connections_max: int) -> int:
    """Number of clients' connections, at most `connections_max`, for which `limit` descriptors are enough: two each,
    beside one event stream of each worker."""
    return max(1, min(connections_max, (limit - FILES_A_STREAM * workers - FILES_BESIDES) // 2))


def too_few_files_message(limit: int, workers: int, connections: int) -> str:
    """The message for an operator who asked for more `connections` than `limit` descriptors are enough for."""
    files_needed = FILES_A_STREAM * workers + 2 * connections + FILES_BESIDES
    return (
        f"{limit} file descriptors are too few for {workers} event streams ({FILES_A_STREAM} each) and {connections} "
        f"connections (2 each): at most {connections_limit(limit, workers, connections)} connections are taken; raise "
        f"the hard limit to {files_needed} (ulimit -Hn, LimitNOFILE=), or lower --max-connections"
    )


@contextlib.contextmanager
def name_flag_in_errors(flag: str, address: str) -> Iterator[None]:
    """An address that cannot be had is told with the flag that asked for it. Raises OSError."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise OSError(f"{flag} {address}: cannot be used: {error.strerror or error}") from error
