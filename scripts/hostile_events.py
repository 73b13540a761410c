"""Event streams, replays, discovery answers and peers that mean harm. See scripts/hostile.

What is held against the router: a sound worker's events are applied meanwhile, and soon; nothing is raised; memory that
such a stream took comes back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from harness.workers import BLOCK, END_SEQ, block_removed, block_stored
from msgspec.msgpack import encode

Payloads = Callable[[], Iterator[bytes]]
TIMESTAMP = 1795230670.0


def batch(*events: Any, rank: Any = None) -> bytes:
    return encode([TIMESTAMP, list(events), rank])


def raw_batch(count: int, event: bytes) -> bytes:
    """So many equal events, without making them one by one."""
    return b"\x93" + encode(TIMESTAMP) + b"\xdd" + struct.pack(">I", count) + event * count + b"\xc0"


def _single_payload(make: Callable[[], bytes]) -> Payloads:
    def payloads() -> Iterator[bytes]:
        yield make()

    return payloads


def _chain_event(count: int, **extra_fields: Any) -> Any:
    return block_stored([2**40 + i for i in range(count)], [i % 30000 for i in range(count * BLOCK)], **extra_fields)


def _event_batches(count: int, make: Callable[[int], Any]) -> Payloads:
    """Batches of 1,000 events."""

    def payloads() -> Iterator[bytes]:
        for first in range(0, count, 1000):
            yield batch(*map(make, range(first, min(count, first + 1000))))

    return payloads


def _block_event(i: int, **extra_fields: Any) -> Any:
    return block_stored([i], [i % 30000] * BLOCK, **extra_fields)


def _field_variants(name: str, *values: Any) -> Payloads:
    return _single_payload(lambda: batch(*({**_block_event(7), name: value} for value in values)))


INVALID_VALUES = (None, -1, 0, 1.5, 2**63, "x", b"\xff", [], {}, [[]], True)
FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "type", "cache_salt", "session_id",
)  # fmt: skip

EVENTS: dict[str, Payloads] = {
    **{f"every wrong {name}": _field_variants(name, *INVALID_VALUES) for name in FIELDS},
    "nothing": _single_payload(bytes),
    "noise": _single_payload(lambda: bytes(range(256)) * 1000),
    "JSON": _single_payload(lambda: json.dumps([TIMESTAMP, [_block_event(1)], None]).encode()),
    "half a batch": _single_payload(lambda: batch(_chain_event(100))[:-700]),
    "a batch and more": _single_payload(lambda: batch(_block_event(1)) + b"\x00" * 1000),
    "a batch in a batch": _single_payload(lambda: batch(batch(_block_event(1)))),
    "a map for a batch": _single_payload(lambda: encode({"ts": TIMESTAMP, "events": [_block_event(1)]})),
    "a list of 2^32 events": _single_payload(lambda: b"\x93" + encode(TIMESTAMP) + b"\xdd\xff\xff\xff\xff\xc0"),
    "a map of 2^32 keys": _single_payload(lambda: b"\x93" + encode(TIMESTAMP) + b"\x91\xdf\xff\xff\xff\xff\xc0"),
    "a string of 4 GB": _single_payload(lambda: b"\x93" + encode(TIMESTAMP) + b"\x91\x81\xdb\xff\xff\xff\xffx"),
    "extension types": _single_payload(lambda: raw_batch(1000, b"\xc7\x03\x05abc")),
    "100,000 lists deep": _single_payload(lambda: b"\x93" + encode(TIMESTAMP) + b"\x91" * 100_000 + b"\xc0\xc0"),
    "100,000 maps deep": _single_payload(
        lambda: b"\x93" + encode(TIMESTAMP) + b"\x91" + b"\x81\xa1x" * 100_000 + b"\xc0\xc0"
    ),
    "a million tiny unknown events": _single_payload(lambda: raw_batch(1_000_000, b"\x81\xa4type\xa1x")),
    "a million nils": _single_payload(lambda: raw_batch(1_000_000, b"\xc0")),
    "100 MB of nils": _single_payload(lambda: raw_batch(100_000_000, b"\xc0")),
    "50,000 different unknown types": _event_batches(50_000, lambda i: {"type": f"Event{i}"}),
    "one event of 1.6 M tokens": _single_payload(lambda: batch(_chain_event(100_000))),
    "40,000 blocks of a key each": _single_payload(lambda: batch(_chain_event(40_000, extra_keys=[["a"]] * 40_000))),
    "40,000 blocks of an image each": _single_payload(
        lambda: batch(_chain_event(40_000, extra_keys=[[["m" * 64, 0]]] * 40_000))
    ),
    "200,000 children of nobody": _event_batches(200_000, lambda i: _block_event(i, parent=2**50 + i)),
    "200,000 children of one that never comes": _event_batches(200_000, lambda i: _block_event(i, parent=2**50)),
    "names that share 24 bits": _event_batches(20_000, lambda i: _block_event((i << 24) + 5)),
    "names that share 48 bits": _event_batches(20_000, lambda i: _block_event((i << 48) + 5)),
    "names of 64 KB": _single_payload(
        lambda: batch(*(block_stored([bytes([i]) * 65536], [1] * BLOCK) for i in range(100)))
    ),
    "one name 100,000 times": _event_batches(100_000, lambda i: _block_event(9)),
    "one name for 20,000 contents": _event_batches(20_000, lambda i: block_stored([9], [i] * BLOCK)),
    "a ring of parents": _event_batches(2000, lambda i: _block_event(i, parent=(i + 1) % 2000)),
    "its own parent": _single_payload(lambda: batch(_block_event(5, parent=5))),
    "50,000 removals of nothing": _event_batches(50_000, lambda i: block_removed([i + 2**60])),
    "stored and cleared in turn": _event_batches(
        100_000, lambda i: _block_event(i) if i % 2 else {"type": "AllBlocksCleared"}
    ),
    "10,000 media": _event_batches(10_000, lambda i: _block_event(i, medium=f"M{i}")),
    "10,000 LoRAs": _event_batches(10_000, lambda i: {**_block_event(i), "lora_name": f"l{i}", "lora_id": i}),
    "10,000 salts": _event_batches(10_000, lambda i: _block_event(i, extra_keys=[[f"salt {i}"]])),
    "10,000 groups": _event_batches(
        10_000, lambda i: _block_event(i, group_idx=i, kv_cache_spec_kind="full_attention")
    ),
    "10,000 block sizes": _event_batches(
        300, lambda i: block_stored([i], [1] * (i + 1), size=i + 1, group_idx=0, kv_cache_spec_kind="mamba")
    ),
    "windows of every size": _event_batches(
        2000,
        lambda i: _block_event(i, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=i - 5),
    ),
    "a time that is none": _single_payload(lambda: encode([float("nan"), [_block_event(1)], None])),
    "a rank of 10^18": _single_payload(lambda: batch(_block_event(1), rank=10**18)),
}

FRAMES: dict[str, list[list[bytes]]] = {
    "no frames but one": [[b""], [b"x"]],
    "two frames": [[b"", b"\x00" * 8]],
    "a hundred frames": [[b"x"] * 100],
    "a seq of 3 bytes": [[b"", b"\x00" * 3, batch(_block_event(1))]],
    "a seq of 1 MB": [[b"", b"\x00" * 1_000_000, batch(_block_event(1))]],
    "the end marker": [[b"", struct.pack(">Q", END_SEQ), b""]],
    "a topic of 1 MB": [[b"t" * 1_000_000, struct.pack(">Q", 5), batch(_block_event(1))]],
    "seqs that jump": [
        [b"", struct.pack(">Q", seq), batch(_block_event(1))] for seq in (5, 2**63, 1, 2**64 - 3, 0, 7) * 50
    ],
    "seqs that go back": [[b"", struct.pack(">Q", 2000 - seq), batch(_block_event(seq))] for seq in range(2000)],
}

_END = struct.pack(">Q", END_SEQ)
REPLAYS: dict[str, list[list[bytes]]] = {
    "noise": [[b"", b"\xff" * 50, b"\xff"]],
    "frames without an end": [[b"", struct.pack(">Q", seq), batch(_block_event(seq))] for seq in range(20_000)],
    "too few frames": [[], [b""], [b"", b"x"]],
    "seqs that go back": [[b"", struct.pack(">Q", 500 - seq), batch(_block_event(seq))] for seq in range(500)]
    + [[b"", _END, b""]],
    "batches that are none": [[b"", struct.pack(">Q", seq), b"\xc1" * 10] for seq in range(500)] + [[b"", _END, b""]],
    "a batch of 50 MB": [[b"", struct.pack(">Q", 0), raw_batch(50_000_000, b"\xc0")], [b"", _END, b""]],
    "a thousand ends": [[b"", _END, b""]] * 1000,
    "nothing": [],
}
"""What the replay socket answers to every question, behind the asker's identity and the empty frame."""

_DEEP = b"[" * 100_000 + b"]" * 100_000
_DIGITS = b"9" * 5000
_SOURCE = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:1"}
_CARD = b'{"object":"list","data":[{"id":"%b","object":"model","root":"%b","max_model_len":%b}]}'

PAGES: dict[str, dict[str, bytes]] = {
    **{
        f"{path}: {name}": {path: body}
        for path in ("/v1/models", "/kv_event_sources", "/get_server_info", "/metrics")
        for name, body in {
            "noise": bytes(range(256)), "deep": _DEEP, "deep objects": b'{"a":' * 50_000, "a number": b"5",
            "null": b"null",
            "digits": _DIGITS, "a list": b"[1,2]", "50 MB": b'"' + b"x" * 50_000_000 + b'"', "half": b'{"object":"li',
            "a redirect": b"HTTP/1.1 302 Found\r\nlocation: /workers\r\ncontent-length: 0\r\n\r\n",
            "503": b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
            "no end": b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{",
        }.items()
    },
    "metrics of 4 MB of empty lines": {"/metrics": b"\n" * 4_000_000},
    "a megabyte of empty lists": {"/v1/models": b'{"data":[' + b"[]," * 340_000 + b"[]]}"},
    "a model that is a lone surrogate": {"/v1/models": _CARD % (b"\\ud800", b"\\ud800", b"5")},
    "a model of 1 MB": {"/v1/models": _CARD % (b"m" * 1_000_000, b"r", b"5")},
    "a root of another user": {"/v1/models": _CARD % (b"home", b"~nosuchuser/x", b"5")},
    "a root that is /proc": {"/v1/models": _CARD % (b"proc", b"/proc/self", b"5")},
    "a root with a zero": {"/v1/models": _CARD % (b"zero", b"/a\\u0000b", b"5")},
    "a length of 5,000 digits": {"/v1/models": _CARD % (b"digits", b"r", _DIGITS)},
    "a negative length": {"/v1/models": _CARD % (b"negative", b"r", b"-5")},
    "100,000 models": {"/v1/models": json.dumps({"data": [{"id": f"m{i}"} for i in range(100_000)]}).encode()},
    "a rank that is \u00b2": {"/kv_event_sources": '{"\u00b2":{"endpoint":"tcp://127.0.0.1:1"}}'.encode()},
    "100,000 ranks": {"/kv_event_sources": json.dumps({str(i): _SOURCE for i in range(100_000)}).encode()},
    "an endpoint that is none": {"/kv_event_sources": json.dumps({"0": {**_SOURCE, "endpoint": "\ud800"}}).encode()},
    "an endpoint on a file": {"/kv_event_sources": json.dumps({"0": {**_SOURCE, "endpoint": "ipc:///etc/x"}}).encode()},
    "an oversized group": {"/kv_cache/groups": b'[{"group_idx":%b,"kind":"x","block_size":-1}]' % _DIGITS},
}  # fmt: skip
"""Pages of a worker that is added; those not named are sound."""

PEER: dict[str, list[list[bytes]]] = {
    "noise": [[b"blockcast-load", bytes(range(256))], [b"blockcast-load"], [b"blockcast-load", b"", b"", b""]],
    "deep": [[b"blockcast-load", b"\x91" * 500_000 + b"\xc0"]],
    "20 MB": [[b"blockcast-load", b"\xda\xff\xff" + b"x" * 20_000_000]],
    "wrong types": [[b"blockcast-load", encode(v)] for v in (None, 5, [1], [1, 2, 3, 4, 5, 6], {"version": 1})],
    "20,000 routers": [[b"blockcast-load", encode([1, f"r{i}", "e", 1, True, []])] for i in range(20_000)],
    "loads that are no numbers": [
        [b"blockcast-load", encode([1, "r", "e", seq, True, [["127.0.0.1:1", x, x, x, x, 5, 5, x]]])]
        for seq, x in enumerate((float("nan"), float("inf"), -1e300))
    ],
    "20,000 targets": [[b"blockcast-load", encode([1, "r", "e", 9, True, [[f"t{i}", *[0.0] * 4, 1, 1, 0.0]
                                                                         for i in range(20_000)]])]],
}  # fmt: skip
"""Messages of another router."""
