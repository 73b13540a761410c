"""Every frame that real vLLM engines sent, read by our decoder and compared with the engines' own words."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from old_events import encode_as_arrays

from events import BlockStored, decode_batch, encode_batch
from events.frames import END_SEQ, parse_live_message, parse_reply_message
from events.types import EVENT_CLASS_BY_NAME

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"
CAPTURES = sorted(
    path.relative_to(GOLDEN).as_posix()[: -len(".frames.jsonl.gz")]
    for path in GOLDEN.glob("*/*.frames.jsonl.gz")
    if not path.parent.name.startswith("recorded-")  # those hold raw frames and no engine's reading of them
)


def frames_of(capture: str) -> list[list[bytes]]:
    with gzip.open(GOLDEN / f"{capture}.frames.jsonl.gz", "rt") as lines:
        return [[bytes.fromhex(part) for part in json.loads(line)["frames"]] for line in lines]


def story_of(capture: str) -> dict[str, Any]:
    with gzip.open(GOLDEN / f"{capture}.json.gz", "rt") as text:
        return json.load(text)  # type: ignore[no-any-return]


def with_bytes(value: Any) -> Any:
    """The captures write bytes as {"__bytes__": hex}."""
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["__bytes__"]) if "__bytes__" in value else {k: with_bytes(v) for k, v in value.items()}
        )
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def as_fields(event: Any) -> dict[str, Any]:
    """A recorded event, map or array, as {field: value} with the type first."""
    if isinstance(event, dict):
        return event
    fields = EVENT_CLASS_BY_NAME[event[0]].__struct_fields__
    return {"type": event[0], **dict(zip(fields, event[1:]))}


def test_there_are_captures_of_every_generation() -> None:
    assert len(CAPTURES) == 26
    assert {capture.split("/")[0] for capture in CAPTURES} >= {"classes-0.9.2", "classes-0.23.0", "server-0.32.0"}


@pytest.mark.parametrize("capture", CAPTURES)
def test_every_frame_decodes_to_what_the_engine_meant(capture: str) -> None:
    story, frames = story_of(capture), frames_of(capture)
    assert len(frames) == len(story["batches"])
    for raw, batch in zip(frames, story["batches"]):
        frame = parse_live_message(raw)
        assert (frame.topic.decode(), frame.seq) == (batch["topic"], batch["seq"])
        decoded_batch = decode_batch(frame.payload)
        assert not decoded_batch.errors
        assert not decoded_batch.unknown_type_counts
        assert decoded_batch.batch.data_parallel_rank == batch["dp_rank"]
        assert len(decoded_batch.batch.events) == len(batch["events"])
        for event, recorded_event in zip(decoded_batch.batch.events, batch["events"]):
            expected = as_fields(with_bytes(recorded_event))
            read = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
            if read.get("extra_keys"):
                read["extra_keys"] = [keys and list(keys) for keys in read["extra_keys"]]
            assert {name: read[name] for name in expected} == expected
            assert all(value is None for name, value in read.items() if name not in expected)


def short_headers(payload: bytes) -> bytes:
    """Map headers in their short form: which one msgspec writes depends on its version, in vLLM as here."""
    return re.sub(rb"\xde\x00(.)(?=\xa4type)", lambda match: bytes([0x80 | match[1][0]]), payload, flags=re.DOTALL)


WRITTEN_AS = ("classes-0.33.0", "classes-0.24.0", "server-0.32.0", "classes-0.23.0")


@pytest.mark.parametrize("capture", [c for c in CAPTURES if c.startswith(WRITTEN_AS)])
def test_what_we_write_is_byte_for_byte_what_vllm_writes(capture: str) -> None:
    """0.23.0 is the reference for arrays, the later ones for maps."""
    for raw in frames_of(capture):
        payload = parse_live_message(raw).payload
        encode = encode_as_arrays if "0.23.0" in capture else encode_batch
        written_payload = encode(decode_batch(payload).batch)
        assert short_headers(written_payload) == short_headers(payload)


@pytest.mark.parametrize("capture", [c for c in CAPTURES if c.startswith("server")])
def test_server_captures_survive_a_round_trip(capture: str) -> None:
    for raw in frames_of(capture):
        batch = decode_batch(parse_live_message(raw).payload).batch
        second_batch = decode_batch(encode_batch(batch))
        assert not second_batch.errors
        assert second_batch.batch == batch


def test_replay_replies_of_a_real_server_parse() -> None:
    replies = story_of("server-0.32.0/replay")["replay"]
    live = {frame.seq: frame.payload for frame in map(parse_live_message, frames_of("server-0.32.0/replay"))}
    compared_count = 0
    for exchange in replies:
        for received_frames in exchange["received"]:
            reply = parse_reply_message([bytes.fromhex(part) for part in received_frames["frames"]])
            if reply.seq == END_SEQ:
                assert reply.payload == b""
            else:
                compared_count += 1
                assert live[reply.seq] == reply.payload
    assert compared_count >= 5


def test_full_attention_runs_tile_their_tokens() -> None:
    """What the router relies on to spell a name: hash i belongs to tokens [i * size, (i + 1) * size)."""
    runs = 0
    for capture in CAPTURES:
        for raw in frames_of(capture):
            for event in decode_batch(parse_live_message(raw).payload).batch.events:
                if isinstance(event, BlockStored) and event.kv_cache_spec_kind == "full_attention":
                    runs += 1
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    assert runs > 100
