"""Hostile bytes at both real programs: no 500, no traceback, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from programs import Program, wait_until

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("http", "upstreams", "events", "bodies", "discovery", "peers", "operators", "collectors", "sessions")
ANSWER_S_MAX = 20.0
CHAT = b'"messages":[{"role":"user","content":"hello"}],"max_tokens":1'


class ServerUnderTest:
    """A program under attack: its URL and what it logged."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S_MAX)

    def send(self, *pieces: bytes, closes: bool = False) -> bytes:
        """Send the pieces on a connection of their own; all that comes back until the program closes it, or `b""`."""
        answer = b""
        with self.connect() as conn, contextlib.suppress(ConnectionError):
            for piece in pieces:
                conn.sendall(piece)
            if closes:
                conn.shutdown(socket.SHUT_WR)
            while received_bytes := conn.recv(1 << 16):
                answer += received_bytes
        return answer

    def status(self, *pieces: bytes, closes: bool = False) -> int | None:
        """The status of the first answer; None where the connection was closed without one."""
        match = re.match(rb"HTTP/1\.[01] (\d{3}) ", self.send(*pieces, closes=closes))
        return int(match[1]) if match else None

    def serves(self) -> None:
        """A well-formed request is answered, and promptly."""
        start_s = time.monotonic()
        assert self.status(post(b"{%b}" % CHAT)) == 200
        assert time.monotonic() - start_s < ANSWER_S_MAX


def post(body: bytes, path: bytes = b"/v1/chat/completions", headers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nConnection: close\r\n%b" % (path, headers)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module")
def router(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    program = Program(log, "router", "run", engine.url, "--port", "0", "--request-timeout", "1")
    try:
        server_under_test = ServerUnderTest(program.await_ready().url, log)
        wait_until(lambda: re.search(r"tokenizer of .* read from", server_under_test.log()), server_under_test.log, 60)
        wait_until(lambda: server_under_test.status(post(b"{%b}" % CHAT)) == 200, server_under_test.log, 60)
        yield server_under_test
    finally:
        program.close()


@pytest.fixture(params=["engine", "router"])
def server_under_test(
    request: pytest.FixtureRequest, engine: Any, router: ServerUnderTest
) -> Iterator[ServerUnderTest]:
    """Each program in turn; afterwards it still serves and has logged no traceback."""
    server = router if request.param == "router" else ServerUnderTest(engine.url, engine._log)
    yield server
    server.serves()
    assert "Traceback" not in server.log(), server.log()[-4000:]


HEADS = {
    "noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "zeros": b"\x00" * 1000 + b"\r\n\r\n",
    "a line without end": b"A" * 300_000,
    "a version of the future": b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost: h\r\nnonsense\r\n\r\n",
    "a control character": b"GET /health HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n",
    "a huge header": b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "a huge target": b"GET /" + b"%ff" * 40_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
    "a length of a name": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: ten\r\n\r\n",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_http_gets_a_4xx_or_nothing(server_under_test: ServerUnderTest, name: str) -> None:
    status = server_under_test.status(HEADS[name], closes=True)
    assert status is None or 400 <= status < 500 or status == 505


BODIES = {
    "nothing": b"",
    "half an object": b'{"messages":[{"role":"user"',
    "not UTF-8": b'{"model":"\xff\xfe"}',
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"messages":' * 50_000 + b"1" + b"}" * 50_000,
    "deep content": b'{"messages":[{"role":"user","content":' + b"[" * 20_000 + b"]" * 20_000 + b"}]}",
    "a lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "a NaN": b'{%b,"temperature":NaN}' % CHAT,
    "a number without end": b'{%b,"seed":%b}' % (CHAT, b"9" * 10_000),
    "an infinite number": b'{%b,"temperature":1e999}' % CHAT,
    "numbers as messages": b'{"messages":[1,2,3]}',
    "a role that is an object": b'{"messages":[{"role":{"a":1},"content":"x"}]}',
    "a template that never ends": json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        }
    ).encode(),
    "another model": b'{"model":"%b",%b}' % (b"m" * 5_000, CHAT),
}


@pytest.mark.parametrize("name", BODIES)
def test_wrong_bodies_get_a_4xx(server_under_test: ServerUnderTest, name: str) -> None:
    status = server_under_test.status(post(BODIES[name]))
    assert status is not None
    assert 400 <= status < 500, name


@pytest.mark.parametrize(
    "ids", ["[-1]", "[4294967296]", "[99999999999999999999]", "[1.5]", '["a",1]', "[[1],[-1]]", "[null]", "[]", "[[]]"]
)
def test_wrong_token_ids_get_a_4xx(server_under_test: ServerUnderTest, ids: str) -> None:
    status = server_under_test.status(post(b'{"prompt":%b,"max_tokens":1}' % ids.encode(), b"/v1/completions"))
    assert status is not None
    assert 400 <= status < 500


def test_senders_that_never_end_keep_nobody_waiting(server_under_test: ServerUnderTest) -> None:
    """Slow-loris: heads and bodies that stop in the middle, a hundred at once."""
    unfinished_requests = [b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-", post(b"x" * 1000)[:-500]]
    conns = [server_under_test.connect() for _ in range(100)]
    try:
        for number, conn in enumerate(conns):
            conn.sendall(unfinished_requests[number % 2])
        for _ in range(3):
            server_under_test.serves()
    finally:
        for conn in conns:
            conn.close()


def test_the_router_cuts_senders_that_never_end(router: ServerUnderTest) -> None:
    assert router.status(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-") == 408


def test_clients_that_vanish_keep_nobody_waiting(server_under_test: ServerUnderTest) -> None:
    body = b'{%b,"stream":true}' % CHAT.replace(b'"max_tokens":1', b'"max_tokens":400')
    for _ in range(30):
        conn = server_under_test.connect()
        conn.sendall(post(body))
        conn.close()
    server_under_test.serves()


def test_the_short_form_of_the_attacks_finds_nothing(tmp_path: Path) -> None:
    """scripts/hostile: raw HTTP cut anywhere, lying workers and publishers, dear bodies, odd answers and peers."""
    report = tmp_path / "hostile.json"
    command = [sys.executable, str(ROOT / "scripts" / "hostile"), "--checkout", "--short", "--json", str(report)]
    environment = {**os.environ, "BLOCKCAST_NO_VENV": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert report.exists(), process.stdout + process.stderr
    findings = json.loads(report.read_text())
    assert findings["faults"] == [], process.stdout
    assert set(findings["groups"]) == set(GROUPS)
    assert all(row["attacks"] for row in findings["groups"].values())
