"""The files of a disk cache, and the thread that reads and writes them.

A folder holds for every model (and whatever else decides what KV is: its `fingerprint`) a folder of two files. `blocks`
is cut into slots of one block's bytes. `index` has a record for each slot: the block's name, its place below another
block, a checksum of its bytes, and one of the record. A block is written first, then its record, so that a process that
is killed leaves a whole block, or none; whatever a crash of the machine tears is found by the checksums. A record is
good while it has the index's generation, which `clear` changes.

One process at a time has the folder. No error of the disk ends anything: it is counted and told once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from engine.cache.disk.index import Found
from engine.cache.nodes import DiskBlock, HashBlock
from engine.types import BlockId
from options import ConfigError

log = logging.getLogger("engine.disk")

HEADER_BYTES = 4096
KEYS_BYTES = 256
"""Of a block's extra keys: a LoRA's name, a salt. With longer ones it is not written."""
_MAGIC = b"blockcast kv 1\0\0"
_HEADER = struct.Struct("<16sQQ32s16s")
"""(magic, bytes of a record, of a block, fingerprint, generation), and a checksum of these."""
_RECORD = struct.Struct("<16sQQQHH16s")
"""(generation, serial, parent's serial or 0, hash, bytes of tokens, of keys, checksum of the block)."""
_CHECK = struct.Struct("<Q")
_LEARNED = 0.1
"""Weight of the last read in the mean time of one."""
ERRORS_MAX = 3
"""Reads in a row that end with an error of the disk before it is given up."""
CLOSE_S_MAX = 5.0
"""How long `close` waits for what was asked for; then what has not been begun is not written any more."""
_Job = tuple[Callable[[], None], DiskBlock | None]
"""What the thread does, and the entry that `done` is to answer for."""


class DiskFiles:
    """An `engine.cache.disk.jobs.Disk` of at most `size` bytes in `folder`."""

    def __init__(self, folder: Path, fingerprint: dict[str, object], size: int, block_bytes: int, tokens: int) -> None:
        """`tokens`: of a block. Raises ConfigError where another process has the folder, or it cannot be used."""
        self.block_bytes = block_bytes
        self._record_bytes = -(-(_CHECK.size + _RECORD.size + 4 * tokens + KEYS_BYTES) // 64) * 64
        self.slots = (size - HEADER_BYTES) // (block_bytes + self._record_bytes)
        if self.slots < 1:
            raise ConfigError(f"--disk-cache-size {size}: holds no block of {block_bytes} bytes")
        text = json.dumps(fingerprint, sort_keys=True, indent=1)
        self._fingerprint = hashlib.sha256(text.encode()).digest()
        self._folder = folder / self._fingerprint.hex()[:16]
        self._files: list[int] = []
        self._told: set[str] = set()
        self.found: Sequence[Found] = ()
        try:
            self._open(folder, text)
        except OSError as error:
            self._close_files()
            raise ConfigError(f"--disk-cache {folder}: {error}") from error
        except ConfigError:
            self._close_files()
            raise
        self._memory: Callable[[BlockId], memoryview] = _nowhere
        self._settle: Callable[[], None] = _nothing
        self._work = threading.Condition()
        self._reads: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._began_s: float | None = None
        """When the job was begun that the thread is at."""
        self._closing = self._ended = False
        self.lost = False
        self._errors = 0
        """Of the disk, when blocks were read, since one was read."""
        self._done: deque[tuple[DiskBlock, bool]] = deque()
        self._something = threading.Event()
        self._read_s: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, memory: Callable[[BlockId], memoryview], settle: Callable[[], None]) -> None:
        """`memory`: a block of the host's; `settle` waits until what steps that are over copied is there."""
        self._memory, self._settle = memory, settle
        self._thread = threading.Thread(target=self._run, name="disk cache", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ asked by the step loop

    def fits(self, name: HashBlock) -> bool:
        return len(_keys(name)) <= KEYS_BYTES

    def write(self, entry: DiskBlock, source: BlockId) -> None:
        self._ask(self._others, partial(self._attempt, "write", self._write, entry, source), entry)

    def read(self, entry: DiskBlock, target: BlockId) -> None:
        self._ask(self._reads, partial(self._attempt, "read", self._read, entry, target), entry)

    def erase(self, entry: DiskBlock) -> None:
        self._ask(self._others, partial(self._quietly, partial(self._erase, entry.slot)))

    def clear(self) -> None:
        self._ask(self._others, partial(self._quietly, self._begin_anew))

    def done(self) -> list[tuple[DiskBlock, bool]]:
        self._something.clear()
        return [self._done.popleft() for _ in range(len(self._done))]

    def read_s(self, blocks: int) -> float:
        """What hangs will hang, as far as is known, as long again."""
        began_s = self._began_s
        hangs_s = 0.0 if began_s is None else time.perf_counter() - began_s
        return hangs_s + (self._read_s or 0.0) * (len(self._reads) + blocks)

    def wait(self, seconds: float) -> None:
        self._something.wait(seconds)

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify()
        if (thread := self._thread) is not None:
            thread.join(CLOSE_S_MAX)
            if thread.is_alive():
                self._tell("slow: what is not written yet is dropped")
                with self._work:
                    self._reads.clear()
                    self._others = deque(job for job in self._others if job[1] is None)
                thread.join(CLOSE_S_MAX)
                if thread.is_alive():  # it has the files still, until the process ends
                    self._tell("hangs: its files are not closed")
                    return
            self._thread = None
        self._close_files()

    def _ask(self, queue: deque[_Job], job: Callable[[], None], entry: DiskBlock | None = None) -> None:
        with self._work:
            if self._ended:
                self._refuse(entry)
            else:
                queue.append((job, entry))
                self._work.notify()

    def _refuse(self, entry: DiskBlock | None) -> None:
        if entry is not None:
            self._answer(entry, False)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        finally:  # nobody is to wait for an answer that nobody gives
            with self._work:
                self._ended = True
                if not self._closing:
                    self._lose("its thread has ended")
                for _, entry in chain(self._reads, self._others):
                    self._refuse(entry)
                self._reads.clear()
                self._others.clear()

    def _next(self) -> Callable[[], None] | None:
        """Waits for a job. None: there are to be no more."""
        with self._work:
            self._began_s = None
            while not (self._reads or self._others or self._closing):
                self._work.wait()
            queue = self._reads or self._others
            if not queue:
                return None
            self._began_s = time.perf_counter()
            return queue.popleft()[0]

    def _attempt(self, what: str, job: Callable[[DiskBlock, BlockId], bool], entry: DiskBlock, block: BlockId) -> None:
        succeeded = False
        try:
            self._settle()
            succeeded = job(entry, block)
            if what == "read":
                self._errors = 0
        except Exception as error:  # noqa: BLE001 - whatever it is: the step loop waits for an answer
            self._tell_error(f"cannot {what}", error)
            if what == "read":
                self._errors += 1
                if self._errors == ERRORS_MAX:
                    self._lose(f"{ERRORS_MAX} reads in a row have failed")
        finally:
            self._answer(entry, succeeded)

    def _answer(self, entry: DiskBlock, succeeded: bool) -> None:
        self._done.append((entry, succeeded))
        self._something.set()

    def _quietly(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            self._tell_error("cannot erase", error)

    def _lose(self, why: str) -> None:
        self.lost = True
        self._tell(f"{why}: nothing of it is used any more, and nothing written, until the next start")

    def _tell_error(self, what: str, error: Exception) -> None:
        if isinstance(error, OSError):
            self._tell(f"{what}: {error}")
        elif self._tell(f"{what}: {type(error).__name__}"):
            log.error("--disk-cache: the first time", exc_info=error)

    def _tell(self, what: str) -> bool:
        """Whether it is told: each thing once."""
        if what in self._told or len(self._told) >= 100:
            return False
        self._told.add(what)
        log.warning("--disk-cache %s: %s (told once)", self._folder, what)
        return True

    def _write(self, entry: DiskBlock, source: BlockId) -> bool:
        memory = self._memory(source)
        if not (os.fstat(self._index).st_nlink and os.fstat(self._blocks).st_nlink):
            raise OSError(errno.ENOENT, "its files were removed")
        self._erase(entry.slot)
        _write_all(self._blocks, memory, entry.slot * self.block_bytes)
        _write_all(self._index, memoryview(self._record(entry, xxh3_128_digest(memory))), self._place(entry.slot))
        return True

    def _read(self, entry: DiskBlock, target: BlockId) -> bool:
        start_s = time.perf_counter()
        record = os.pread(self._index, self._record_bytes, self._place(entry.slot))
        end = _CHECK.size + _RECORD.size
        digest = record[end - 16 : end]
        if record != self._record(entry, digest):
            self._tell("records have changed, or are torn: these blocks are not used")
            return False
        memory, done = self._memory(target), 0
        while done < len(memory):
            count = os.preadv(self._blocks, [memory[done:]], entry.slot * self.block_bytes + done)
            if not count:
                break
            done += count
        if done < len(memory) or xxh3_128_digest(memory) != digest:
            self._tell("blocks have changed, or are torn: they are not used")
            return False
        took_s = time.perf_counter() - start_s
        self._read_s = took_s if self._read_s is None else self._read_s + _LEARNED * (took_s - self._read_s)
        return True

    def _erase(self, slot: int) -> None:
        _write_all(self._index, memoryview(bytes(_CHECK.size)), self._place(slot))

    def _begin_anew(self) -> None:
        self._generation = os.urandom(16)
        self._write_header()

    # ------------------------------------------------------------------ the files

    def _open(self, folder: Path, fingerprint: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--disk-cache {folder}: another engine has it; give each a folder of its own") from None
        others = sorted(path.parent.name for path in folder.glob("*/index") if path.parent != self._folder)
        if others:
            log.warning(
                "--disk-cache %s: what other models or settings wrote is not used, and not deleted: %s",
                folder, ", ".join(others[:8]),
            )  # fmt: skip
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_mode & 0o077:
            self._folder.chmod(0o700)
        told = self._folder / "fingerprint.json"
        if not told.exists():  # for who looks there; a disk that is full by now has it already
            told.touch(mode=0o600)
            told.write_text(fingerprint + "\n", encoding="utf-8")
        for name in ("index", "blocks"):
            self._files.append(os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _, self._index, self._blocks = self._files
        self.found = self._find()
        for file, size in ((self._index, self._place(self.slots)), (self._blocks, self.slots * self.block_bytes)):
            if os.fstat(file).st_size > size:
                os.ftruncate(file, size)
        log.info("--disk-cache %s: room for %d blocks, %d found", self._folder, self.slots, len(self.found))

    def _find(self) -> list[Found]:
        """What is there, after the header is read, or written."""
        with open(self._index, "rb", closefd=False) as file:
            header = file.read(HEADER_BYTES)
            end = _HEADER.size
            if len(header) == HEADER_BYTES and header[end : end + _CHECK.size] == _check(header[:end]):
                magic, record_bytes, block_bytes, fingerprint, self._generation = _HEADER.unpack_from(header)
                wanted = _MAGIC, self._record_bytes, self.block_bytes, self._fingerprint
                if (magic, record_bytes, block_bytes, fingerprint) == wanted:
                    return self._find_records(file)
        if header:
            self._tell("its index is damaged: it begins anew")
        os.ftruncate(self._index, 0)
        self._begin_anew()
        return []

    def _find_records(self, file: BinaryIO) -> list[Found]:
        found, damaged = [], 0
        there = min(self.slots, os.fstat(self._blocks).st_size // self.block_bytes)
        for slot in range(self.slots):
            record = file.read(self._record_bytes)
            if len(record) < self._record_bytes:
                break
            rest = record[_CHECK.size :]
            if record[: _CHECK.size] == bytes(_CHECK.size):
                continue  # erased, or never written
            if slot >= there or record[: _CHECK.size] != _check(rest):
                damaged += 1
            elif (one := self._parse(slot, rest)) is not None:
                found.append(one)
        if damaged:
            self._tell(f"{damaged} blocks are damaged or torn: they are not used")
        return found

    def _write_header(self) -> None:
        header = _HEADER.pack(_MAGIC, self._record_bytes, self.block_bytes, self._fingerprint, self._generation)
        _write_all(self._index, memoryview(header + _check(header)), 0)

    def _place(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._record_bytes

    def _record(self, entry: DiskBlock, digest: bytes) -> bytes:
        keys, packed = _keys(entry.name), entry.name.packed
        parent = 0 if entry.parent is None else entry.parent.serial
        head = _RECORD.pack(self._generation, entry.serial, parent, entry.hash, len(packed), len(keys), digest)
        rest = (head + packed + keys).ljust(self._record_bytes - _CHECK.size, b"\0")
        return _check(rest) + rest

    def _parse(self, slot: int, rest: bytes) -> Found | None:
        """`rest`: of a whole record, behind its checksum."""
        generation, serial, parent, hash_, packed_bytes, keys_bytes, _ = _RECORD.unpack_from(rest)
        if generation != self._generation:
            return None
        at = _RECORD.size + packed_bytes
        extra_keys, lora_name = json.loads(rest[at : at + keys_bytes] or b"[null, null]")
        name = HashBlock(
            hash_, rest[_RECORD.size : at], None if extra_keys is None else tuple(extra_keys), lora_name
        )  # fmt: skip
        return Found(slot, serial, parent or None, name)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _keys(name: HashBlock) -> bytes:
    if name.extra_keys is None and name.lora_name is None:
        return b""
    return json.dumps([name.extra_keys, name.lora_name]).encode()


def _check(data: bytes) -> bytes:
    return _CHECK.pack(xxh3_64_intdigest(data))


def _write_all(file: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def _nowhere(block: BlockId) -> memoryview:
    raise AssertionError(f"block {block} asked for before there is memory")


def _nothing() -> None:
    pass
