"""The command itself, as a process, against a real publisher."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from block_hash import hash_block

from events import (
    FULL_ATTENTION,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    DroppedMessages,
    EventBatch,
    EventPublisher,
    KVEventsConfig,
    Message,
    Notice,
    Origin,
    Subscriber,
    decode_batch,
)
from events.kv_subscriber import EventFilter, format_json_lines, format_text_lines
from events.types import DecodedBatch

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "events.kv_subscriber"]


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv"
    )
    publisher = EventPublisher(config)
    yield publisher
    publisher.close()


def make_stored(key: int) -> BlockStored:
    return BlockStored([hash_block(None, [key])], None, [key], 1, None, GPU, None, [None], 0, FULL_ATTENTION)


def command(publisher: EventPublisher, *options: str) -> list[str]:
    source = publisher.describe_source()
    assert source.replay_endpoint
    return [*PROGRAM, source.endpoint, "--replay", source.replay_endpoint, "--json", *options]


def lines(output: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, output.splitlines()) if "type" in line]


def run(publisher: EventPublisher, *options: str) -> list[dict[str, object]]:
    result = subprocess.run(command(publisher, *options), capture_output=True, text=True, timeout=60, check=True)
    return lines(result.stdout)


def test_from_start_filters_and_records(publisher: EventPublisher, tmp_path: Path) -> None:
    for key in range(3):
        publisher.publish([make_stored(key)])
    publisher.publish([BlockRemoved([hash_block(None, [1])], GPU, 0)])
    record = tmp_path / "capture.frames.jsonl.gz"
    lines = run(publisher, "--from-start", "--batches", "4", "--type", "removed", "--record", str(record))
    assert [(line["seq"], line["type"]) for line in lines] == [(3, "BlockRemoved")]
    with gzip.open(record, "rt") as file:
        frames = [[bytes.fromhex(part) for part in json.loads(line)["frames"]] for line in file]
    assert [int.from_bytes(seq, "big") for _, seq, _ in frames] == [0, 1, 2, 3]
    assert decode_batch(frames[0][2]).batch.events == [make_stored(0)]


def test_killed_and_started_again_it_fills_its_gap(publisher: EventPublisher, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state.json"))
    publisher.publish([make_stored(0)])
    first = subprocess.Popen(command(publisher, "--from-start", *state), stdout=subprocess.PIPE, text=True)
    assert first.stdout
    while '"seq": 0' not in first.stdout.readline():
        assert first.poll() is None
    deadline = time.monotonic() + 30
    while not (tmp_path / "state.json").exists() or b"[0," not in (tmp_path / "state.json").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    for key in range(1, 6):
        publisher.publish([make_stored(key)])
    lines = run(publisher, "--batches", "5", *state)
    assert [(line["seq"], line["origin"]) for line in lines] == [(seq, "replay") for seq in range(1, 6)]


def test_an_interrupt_that_comes_twice_ends_it_once(publisher: EventPublisher, tmp_path: Path) -> None:
    """`timeout -s INT` tells the command and then its whole group."""
    state = tmp_path / "state.json"
    follow = [*command(publisher, "--from-start"), "--state", str(state)]
    process = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    assert process.wait(30) == 0
    process.stdout.close()
    assert state.exists()


def test_wrong_addresses_say_so() -> None:
    for arguments, says in [
        ([], "nothing to follow"),
        (["host:1"], "expected tcp://"),
        (["http://127.0.0.1:1"], "cannot ask"),
    ]:
        result = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
        assert result.returncode != 0
        assert says in result.stderr


def test_a_package_that_another_distribution_overwrote_is_named(tmp_path: Path) -> None:
    """As an installed command, which begins in our packages."""
    for name in ("options", "events"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "events" / "__init__.py").write_text("x = 1\n")
    script = "import sys; sys.argv = ['kv_subscriber', 'http://127.0.0.1:9']\n"
    script += "sys.meta_path[:] = [finder for finder in sys.meta_path if 'ScikitBuild' not in type(finder).__name__]\n"
    script += "from options.entry import kv_subscriber; kv_subscriber()"
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("kv_subscriber: the package `events` was overwritten")
    assert len(result.stderr.splitlines()) == 1


def test_a_medium_that_is_cleared_is_named_and_selected() -> None:
    batch = EventBatch(1.0, [AllBlocksCleared("CPU"), AllBlocksCleared()])
    message = Message("a", b"", 0, b"", Origin.LIVE, DecodedBatch(batch))
    texts = [line.split(" ", 4)[4] for line in format_text_lines(message, EventFilter(), show_tokens=False)]
    assert texts == ["Cleared  CPU", "Cleared  everything"]
    assert len(list(format_text_lines(message, EventFilter(media=("GPU",)), show_tokens=False))) == 1


def test_dropped_messages_are_told() -> None:
    with Subscriber([]) as subscriber:
        subscriber.handle("a", DroppedMessages(2), b"")
        item = subscriber.get(5.0)
    assert item == Notice("a", DroppedMessages(2))
    assert [line.partition(" ")[2] for line in format_text_lines(item, EventFilter(), show_tokens=False)] == [
        "a DROPPED  2 messages, because too many waited"
    ]
    assert list(map(json.loads, format_json_lines(item, EventFilter()))) == [
        {"stream": "a", "notice": "DroppedMessages", "count": 2}
    ]


@pytest.mark.parametrize("token_ids", [[7], ["image"]], ids=["typed", "event by event"])
@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("a", "a"),
        (b"a", {"__bytes__": "61"}),
        ({b"a": 1, "b": 2}, {"b": 2}),
        (datetime(2026, 1, 2, tzinfo=timezone.utc), "2026-01-02 00:00:00+00:00"),
        (msgspec.msgpack.Ext(5, b"a"), {"__bytes__": "61"}),
    ],
)
def test_keys_of_media_are_shown_whatever_they_are(token_ids: list[Any], key: Any, shown: Any) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": token_ids, "block_size": 1, "mm_keys": [[key]]}
    event["parent_block_hash"] = None
    payload = msgspec.msgpack.encode([1.0, [event], 0])
    message = Message("a", b"", 1, payload, Origin.LIVE, decode_batch(payload))
    (line,) = map(json.loads, format_json_lines(message, EventFilter()))
    assert line["mm_keys"] == [[shown]]


def test_keys_of_media_that_can_be_read_but_not_written_end_nothing() -> None:
    """JSON is written at a lesser depth than that to which msgpack is read."""
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [7], "block_size": 1, "mm_keys": [["key"]]}
    event["parent_block_hash"] = None
    batch = msgspec.msgpack.encode([1.0, [event], 0])
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
        payload = batch.replace(b"\xa3key", b"\x81\xa1a" * depth + b"\x01")
        with contextlib.suppress(DecodeError):
            message = Message("a", b"", 1, payload, Origin.LIVE, decode_batch(payload))
            assert len(list(format_json_lines(message, EventFilter()))) == 1
