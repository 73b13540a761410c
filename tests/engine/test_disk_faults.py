"""Disks that fail under a running engine: each kind of fault is told once, nobody waits, and nothing is promised."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from disk_hands import BYTES, TEXT, after_a_restart, bench_on, drain, fill, finished, found, opened, written

from engine.cache.disk.index import DiskIndex
from engine.execution import disk_files
from engine.types import BlockId
from events import STORAGE, BlockRemoved


def told(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.message for record in caplog.records)


def test_files_that_were_removed_are_not_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)
    entries = found(files, names)
    shutil.rmtree(tmp_path)
    for entry in entries:
        files.write(entry, BlockId(0))
    assert finished(files, 4) == [False] * 4
    assert told(caplog, "its files were removed") == 1
    files.read(entries[0], BlockId(0))
    assert finished(files, 1) == [True], "they are there while they are open"
    files.close()


def test_a_mistake_fails_a_block_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)

    def settle() -> None:
        raise RuntimeError("no device")

    files._settle = settle
    for entry in found(files, names):
        files.write(entry, BlockId(0))
    assert finished(files, 4) == [False] * 4
    assert told(caplog, "cannot write: RuntimeError") == 1
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    files._begin_anew = settle  # type: ignore[method-assign]
    files.clear()
    files._settle = lambda: None
    files.read(found(files, names)[0], BlockId(0))
    assert finished(files, 1) == [True], "the thread is alive"
    files.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_ends_everybody_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)
    entries, go = found(files, names), threading.Event()

    def settle() -> None:
        go.wait(10)
        raise SystemExit

    files._settle = settle
    for number, entry in enumerate(entries):
        (files.read if number % 2 else files.write)(entry, BlockId(number))
    assert not files.lost
    go.set()
    assert finished(files, 4) == [False] * 4
    assert files.lost
    files.read(entries[0], BlockId(0))
    files.erase(entries[0])
    assert finished(files, 1) == [False]
    assert told(caplog, "its thread has ended") == 1
    files.close()


def test_a_disk_that_cannot_be_read_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)
    entries = found(files, names)
    own, files._blocks = files._blocks, os.open(tmp_path, os.O_RDONLY)  # of a folder: EISDIR
    files.read(entries[0], BlockId(0))
    files.read(entries[1], BlockId(1))
    assert finished(files, 2) == [False] * 2
    assert not files.lost
    os.close(files._blocks)
    files._blocks = own
    files.read(entries[1], BlockId(1))
    assert finished(files, 1) == [True]
    files._blocks = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2):
        for entry in entries:
            files.read(entry, BlockId(0))
    assert finished(files, 8) == [False] * 8
    assert files.lost
    assert told(caplog, "cannot read: [Errno 21]") == 1
    assert told(caplog, "nothing of it is used any more") == 1
    os.close(files._blocks)
    files._blocks = own
    files.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pwrite of a block takes .2 s, and `close` waits half a second."""
    monkeypatch.setattr(disk_files, "CLOSE_S_MAX", 0.5)
    real: Any = disk_files._write_all

    def write_all(file: int, data: memoryview, place: int) -> None:
        if len(data) == BYTES:
            time.sleep(0.2)
        real(file, data, place)

    monkeypatch.setattr(disk_files, "_write_all", write_all)


@pytest.mark.usefixtures("slow")
def test_a_slow_disk_does_not_hold_up_the_end_but_what_was_cleared_is(tmp_path: Path) -> None:
    names = fill(tmp_path, 2)
    files, _ = opened(tmp_path)
    index = DiskIndex(files.slots)
    entry = index.add(names[0], None, [])
    assert entry is not None
    for _ in range(20):
        files.write(entry, BlockId(0))
    files.clear()
    start_s = time.monotonic()
    files.close()
    assert time.monotonic() - start_s < 1.5
    again, _ = opened(tmp_path)
    assert not again.found
    again.close()


def test_what_hangs_is_not_waited_for_and_its_files_stay_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_files, "CLOSE_S_MAX", 0.1)
    names = fill(tmp_path, 2)
    files, _ = opened(tmp_path)
    go = threading.Event()
    files._settle = lambda: bool(go.wait(20)) and None
    entries = found(files, names)
    assert files.read_s(1) == 0
    files.read(entries[0], BlockId(0))
    time.sleep(0.3)
    assert files.read_s(1) >= 0.2, "what hangs goes on hanging, as far as is known"
    thread = files._thread
    assert thread is not None
    files.close()
    assert told(caplog, "its files are not closed") == 1
    os.fstat(files._blocks)
    go.set()
    thread.join(10)
    files.close()
    assert not files._files


def test_damage_is_told_at_the_start_and_nothing_is_promised_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = fill(tmp_path, 8)
    (blocks,), (index,) = tmp_path.glob("*/blocks"), tmp_path.glob("*/index")
    os.truncate(blocks, 5 * BYTES + 1)
    files, _ = opened(tmp_path)
    assert len(found(files, names)) == 5
    assert told(caplog, "3 blocks are damaged or torn") == 1
    files.close()
    data = bytearray(index.read_bytes())
    data[20] ^= 1
    index.write_bytes(data)
    files, _ = opened(tmp_path)
    assert not files.found
    assert told(caplog, "its index is damaged") == 1
    files.close()


def test_everything_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fill(tmp_path / "cache", 2)
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    (own,) = (tmp_path / "cache").glob("*/")
    assert modes == {
        "cache": 0o700, own.name: 0o700, "lock": 0o600, "fingerprint.json": 0o600, "index": 0o600, "blocks": 0o600,
    }  # fmt: skip
    own.chmod(0o755)
    opened(tmp_path / "cache")[0].close()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_full_disk_can_be_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be written for what is there to be used."""
    names = fill(tmp_path, 3)

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(disk_files, "_write_all", full)
    files, _ = opened(tmp_path)
    assert len(found(files, names)) == 3
    files.close()


def test_a_disk_of_many_slots_costs_nothing_before_they_are_used() -> None:
    index = DiskIndex(10**12)
    assert not index.used
    index.check_invariants([])


def test_of_a_lost_disk_everything_is_taken_back_and_nothing_written() -> None:
    bench, disk = bench_on(after_a_restart())
    names = written(bench)
    assert len(names) >= 10
    disk.stuck = True
    bench.add("reads", [*TEXT, 4], max_tokens=2)
    bench.add("writes", [2] * 72, max_tokens=6)
    for _ in range(8):
        bench.step()
        bench.check()
    disk.lost = True
    bench.step()
    bench.check()
    assert not written(bench)
    gone = [e for e in bench.events.events if isinstance(e, BlockRemoved) and e.medium == STORAGE]
    assert {name for event in gone for name in event.block_hashes} == names
    disk.stuck = False
    drain(bench)
    assert bench.ends["reads"].finish_reason == "length"
    writes = disk.writes
    bench.add("more", [3] * 72, max_tokens=6)
    bench.add("again", [*TEXT, 4], max_tokens=2)
    drain(bench)
    assert disk.writes == writes
    assert not written(bench)
