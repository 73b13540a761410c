"""Memory, garbage collection and file descriptors of the router's process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import zmq

_MMAP_THRESHOLD, _MMAPPED_BYTES = -3, 4 << 20
"""Size from which memory has a mapping of its own (M_MMAP_THRESHOLD of mallopt). A new mapping is slow, and
conversations of a megabyte come again and again."""
_TRIM_THRESHOLD, _HEAP_END_BYTES = -1, 8 << 20
"""Free bytes at the end of the heap that are kept until the heap is trimmed (M_TRIM_THRESHOLD)."""
FILES_PER_STREAM, OTHER_FILES = 4, 200
"""File descriptors of an event stream, and of all else. A replay or another rank takes as many as a stream."""
TRIM_S = 30.0
"""Time between two trims of the heap. One that found nothing in a heap of 700 MB took a thread 24 ms."""
COLLECTION_THRESHOLDS = 1_000, 3, 300
"""New objects until a young collection, young collections until a middle one, and middle ones until a full one.

Collecting 50,000 objects took 20 to 60 ms. Only removed workers and broken answers leave cycles, so full ones are rare.
"""


def make_heap_trimmer(executor: Executor) -> Callable[[float], None]:
    """Configure malloc, and return a function to call every TRIM_S: it returns freed memory to the operating system.

    glibc's malloc keeps memory after a burst of large requests. With another C library nothing is done. `executor`:
    runs the trims in a thread.
    """
    c_library = ctypes.CDLL(None)
    malloc_trim: Callable[[int], int] | None = getattr(c_library, "malloc_trim", None)
    if malloc_trim is None:
        return lambda now: None
    c_library.mallopt(_MMAP_THRESHOLD, _MMAPPED_BYTES)
    c_library.mallopt(_TRIM_THRESHOLD, _HEAP_END_BYTES)

    def trim(now: float) -> None:
        executor.submit(malloc_trim, 0)

    return trim


def limit_garbage_collection() -> None:
    """Exclude the objects of the start from garbage collection, and limit most collections to a few ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)


def compute_streams_max(limit: int) -> int:
    """Return the number of event streams that fit into three quarters of `limit` file descriptors."""
    return max(1, 3 * (limit - OTHER_FILES) // 4 // FILES_PER_STREAM)


def compute_worker_requests_max(limit: int) -> int:
    """Return how many requests of the router itself may wait for workers at once: an eighth of `limit` descriptors.

    It is at least 100. A worker that does not answer holds up to three until they time out, and healthy workers are
    checked meanwhile.
    """
    return max(100, limit // 8)


def compute_connections_max(limit: int, workers: int, connections_max: int) -> int:
    """Return the number of client connections that fit into `limit` file descriptors, at most `connections_max`.

    A connection takes two descriptors. Each worker has one event stream.
    """
    return max(1, min(connections_max, (limit - FILES_PER_STREAM * workers - OTHER_FILES) // 2))


def describe_missing_files(limit: int, workers: int, connections: int) -> str:
    """Return the message for an operator who configured more `connections` than `limit` descriptors allow."""
    files_needed = FILES_PER_STREAM * workers + 2 * connections + OTHER_FILES
    possible_connections = compute_connections_max(limit, workers, connections)
    return (
        f"{limit} file descriptors are too few for {workers} event streams ({FILES_PER_STREAM} each) and {connections} "
        f"connections (2 each): at most {possible_connections} connections are taken; raise "
        f"the hard limit to {files_needed} (ulimit -Hn, LimitNOFILE=), or lower --max-connections"
    )


@contextlib.contextmanager
def name_flag_in_errors(flag: str, address: str) -> Iterator[None]:
    """Name the flag in the error of an address that cannot be used. Raises OSError."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise OSError(f"{flag} {address}: cannot be used: {error.strerror or error}") from error
