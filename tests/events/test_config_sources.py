"""Addresses and configuration: vLLM's rules, and errors that name what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from events import (
    ConfigError,
    DecodeError,
    EventPublisher,
    EventSource,
    GroupInfo,
    KVEventsConfig,
    discover,
    encode_sources,
    parse_sources,
)
from events.config import make_rank_endpoint, should_bind
from events.sources import resolve_endpoint


def test_defaults_are_vllms() -> None:
    config = KVEventsConfig.parse('{"enable_kv_cache_events": true}')
    assert config.is_enabled
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert not KVEventsConfig.parse("{}").is_enabled
    assert not KVEventsConfig.parse('{"enable_kv_cache_events": true, "publisher": "null"}').is_enabled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"endpont": "x"}', "`endpont`"),
        ('{"hwm": -1}', r"hwm"),
        ('{"max_queue_size": 0}', r"max_queue_size"),
        ('{"publisher": "kafka"}', r"kafka.*publisher"),
        ('{"topic": 5}', r"topic"),
        ("[]", "object"),
        ("{", "truncated"),
    ],
)
def test_wrong_configuration_names_the_key(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KVEventsConfig.parse(text)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://router:5557", False),
        ("tcp://0.0.0.0:5557", False),
    ],
)
def test_bind_or_connect(endpoint: str, binds: bool) -> None:
    assert should_bind(endpoint) is binds


def test_one_port_a_rank() -> None:
    assert make_rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert make_rank_endpoint("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert make_rank_endpoint("tcp://127.0.0.1:*", 3) == "tcp://127.0.0.1:*"
    assert make_rank_endpoint("inproc://kv", 0) == "inproc://kv"
    assert make_rank_endpoint("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"
    for bad in ("udp://x:1", "tcp://host", "tcp://host:port", "tcp://*:65535"):
        with pytest.raises(ConfigError, match="endpoint"):
            make_rank_endpoint(bad, 1)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "gpu1", "tcp://gpu1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.2", "tcp://10.0.0.2:5557"),
        ("tcp://[::]:5557", "fe80::1", "tcp://[fe80::1]:5557"),
        ("tcp://10.9.9.9:5557", "gpu1", "tcp://10.9.9.9:5557"),
        ("ipc:///run/kv", "gpu1", "ipc:///run/kv"),
    ],
)
def test_advertised_wildcards_become_the_worker(endpoint: str, host: str, expected: str) -> None:
    assert resolve_endpoint(endpoint, host) == expected


def test_sources_round_trip_and_resolve() -> None:
    group = GroupInfo(group_idx=0, kind="full_attention", block_size=16)
    source = EventSource(
        endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558", epoch="e", snapshot=True, groups=(group,)
    )
    (read,) = parse_sources(encode_sources([source]), "http://gpu1:8000")
    assert (read.endpoint, read.replay_endpoint) == ("tcp://gpu1:5557", "tcp://gpu1:5558")
    assert (read.epoch, read.snapshot, read.groups) == ("e", True, (group,))


@pytest.mark.parametrize("template", ["[%s]", '{"sources": [%s]}'])
def test_vllms_answers_are_read(template: str) -> None:
    source_json = (
        '{"data_parallel_rank": 1, "endpoint": "tcp://0.0.0.0:41002", "replay_endpoint": null, "topic": "kv-events"}'
    )
    (read,) = parse_sources((template % source_json).encode(), "http://[::1]:8000")
    assert read == EventSource(data_parallel_rank=1, endpoint="tcp://[::1]:41002", topic="kv-events")


def test_the_answer_of_vllm_0_32() -> None:
    """As `vllm serve --kv-events-config` answered it: a map of ranks to the publisher's configuration."""
    rank = (
        '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:9301",'
        '"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":""}'
    )
    first_source, second_source = parse_sources(
        f'{{"1": {rank % 9202}, "0": {rank % 9201}}}'.encode(), "http://gpu1:8000"
    )
    assert first_source == EventSource(endpoint="tcp://gpu1:9201", replay_endpoint="tcp://gpu1:9301")
    assert (second_source.data_parallel_rank, second_source.endpoint) == (1, "tcp://gpu1:9202")
    assert parse_sources(b"{}", "http://gpu1:8000") == [], "events are off"
    off = rank.replace('"zmq"', '"null"') % 9201
    assert parse_sources(f'{{"0": {off}}}'.encode(), "http://gpu1:8000") == []


@pytest.mark.parametrize("body", [b"", b'{"x": {}}', b'{"0": {}}', b"3", b'[{"topic": ""}]', b"<html>", b"\xff"])
def test_other_answers_raise(body: bytes) -> None:
    with pytest.raises(DecodeError, match="http://w:1/kv_event_sources"):
        parse_sources(body, "http://w:1")


class _Worker(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def worker() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Worker)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_discovery_over_http(worker: str) -> None:
    _Worker.answers = {}
    assert [source.endpoint for source in discover(worker)] == ["tcp://127.0.0.1:5557"]
    _Worker.answers = {"/kv_event_sources": (200, b'[{"endpoint": "tcp://*:7000"}]')}
    assert [source.endpoint for source in discover(worker + "/")] == ["tcp://127.0.0.1:7000"]
    _Worker.answers = {"/kv_event_sources": (500, b"")}
    with pytest.raises(DecodeError, match="500"):
        discover(worker)
    with pytest.raises(DecodeError, match="http://"):
        discover("tcp://x")


def test_who_connects_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for endpoint, says in (("tcp://127.0.0.1:*", False), ("tcp://localhost:5999", True)):
        caplog.clear()
        EventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)).close()
        connect_lines = [line for line in caplog.messages if line.startswith(f"kv events: connecting to {endpoint}")]
        assert bool(connect_lines) is says
        assert all("router run --bind-events" in line for line in connect_lines)
