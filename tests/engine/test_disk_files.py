"""The disk cache's files: what a later process finds, what it must not use, and errors that end nothing."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from disk_hands import BYTES, content, fill, finished, found, opened

from engine.cache.disk.index import DiskIndex
from engine.cache.nodes import HashBlock
from engine.types import BlockId
from options import ConfigError


def test_what_was_written_is_found_and_read(tmp_path: Path) -> None:
    names = fill(tmp_path, 8)
    files, memory = opened(tmp_path)
    entries = found(files, names)
    assert len(entries) == 8
    assert entries[0].name.extra_keys == ("salt",)
    for number, entry in enumerate(entries):
        files.read(entry, BlockId(15 - number))
    assert finished(files, 8) == [True] * 8
    for number in range(8):
        assert memory[(15 - number) * BYTES : (16 - number) * BYTES] == content(number)
    assert files.read_s(10) > 0
    files.close()


def test_one_process_at_a_time_has_the_folder(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    with pytest.raises(ConfigError, match="another engine has it"):
        opened(tmp_path, model="b")
    files.close()
    files.close()
    again, _ = opened(tmp_path)
    again.close()


def test_of_another_model_nothing_is_used_and_nothing_deleted(tmp_path: Path) -> None:
    names = fill(tmp_path, 3)
    other, _ = opened(tmp_path, model="b")
    assert not other.found
    other.close()
    files, _ = opened(tmp_path)
    assert len(found(files, names)) == 3
    files.close()


def test_a_smaller_size_keeps_what_fits(tmp_path: Path) -> None:
    names = fill(tmp_path, 8)
    files, _ = opened(tmp_path, size=4096 + 3 * 1700)
    assert files.slots == 3
    assert len(found(files, names)) == 3
    files.close()
    used = sum(path.stat().st_size for path in tmp_path.glob("*/*") if path.name != "fingerprint.json")
    assert used <= 4096 + 3 * 1700
    with pytest.raises(ConfigError, match="holds no block"):
        opened(tmp_path, size=4096 + 1000)


def test_what_was_cleared_is_not_found_but_what_came_after_is(tmp_path: Path) -> None:
    names = fill(tmp_path, 4)
    files, memory = opened(tmp_path)
    files.clear()
    index = DiskIndex(files.slots)
    entry = index.add(names[0], None, [])
    assert entry is not None
    memory[:BYTES] = content(0)
    files.write(entry, BlockId(0))
    files.close()
    again, _ = opened(tmp_path)
    assert [one.name.hash for one in again.found] == [names[0].hash]
    again.close()


@pytest.mark.parametrize("seed", range(60))
def test_of_damaged_files_nothing_wrong_is_read(tmp_path: Path, seed: int) -> None:
    """Bits flip, tails are torn, pieces are overwritten by zeros or by other pieces of the same file."""
    names = fill(tmp_path, 8)
    rng = random.Random(seed)
    path = next(tmp_path.glob(f"*/{rng.choice(['index', 'blocks'])}"))
    data = bytearray(path.read_bytes())
    used = len(data)
    kind = rng.choice(["flip", "tear", "zero", "shift"])
    at, length = rng.randrange(used), rng.randint(1, 1500)
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "tear":
        del data[at:]
    elif kind == "zero":
        data[at : at + length] = bytes(min(length, len(data) - at))
    else:
        piece = data[at : at + length]
        to = rng.randrange(used - len(piece)) if used > len(piece) else 0
        data[to : to + len(piece)] = piece
    path.write_bytes(data)
    files, memory = opened(tmp_path)
    entries = found(files, names)
    for number, entry in enumerate(entries):
        files.read(entry, BlockId(number))
    for number, succeeded in enumerate(finished(files, len(entries))):
        if succeeded:
            assert memory[number * BYTES : (number + 1) * BYTES] == content(number)
    files.close()


def test_what_was_erased_is_not_found(tmp_path: Path) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)
    files.erase(found(files, names)[2])
    files.close()
    again, _ = opened(tmp_path)
    assert len(found(again, names)) == 2
    again.close()


def test_an_error_of_the_disk_fails_a_block_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = fill(tmp_path, 4)
    files, _ = opened(tmp_path)
    entries = found(files, names)
    full = os.open("/dev/full", os.O_RDWR)
    own, files._blocks = files._blocks, full
    index = DiskIndex(files.slots)
    new = [index.add(name, None, []) for name in names]
    for entry in new:
        assert entry is not None
        files.write(entry, BlockId(0))
    assert finished(files, 4) == [False] * 4
    assert sum("cannot write" in record.message for record in caplog.records) == 1
    files._blocks = own
    os.close(full)
    files.read(entries[0], BlockId(0))
    assert finished(files, 1) == [False], "its record went before its bytes"
    files.close()


def test_keys_that_do_not_fit_are_known_before(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    assert files.fits(HashBlock(1, b"", ("s" * 200,), "lora"))
    assert not files.fits(HashBlock(1, b"", ("s" * 300,), "lora"))
    files.close()


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-cache"):
        opened(tmp_path / "file")
