"""Host names of workers while name servers fail, are slow, or give several addresses."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from router import host_names
from router.edge.upstream import Endpoint, UpstreamPool
from router.host_names import HostNames
from router.http_client import FetchError, fetch, open_session

TEMPORARY = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class NameServer:
    """Answers look-ups. `answers`: addresses or an error of each host; an event is awaited before its next answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.queries: list[str] = []

    def find_addresses(self, host: str, port: int | None, **_: Any) -> list[Any]:
        self.queries.append(host)
        answer = self.answers[host]
        if isinstance(answer, threading.Event):
            answer.wait(60)
            answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in answer]


Scenario = Callable[[NameServer, HostNames], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    server = NameServer()

    async def run_scenario(scenario: Scenario) -> None:
        names = HostNames()
        original = socket.getaddrinfo

        def find_addresses(host: str, port: Any, **options: Any) -> Any:
            find = server.find_addresses if host in server.answers else original
            return find(host, port, **options)

        monkeypatch.setattr(socket, "getaddrinfo", find_addresses)
        await asyncio.wait_for(scenario(server, names), 60)

    return lambda scenario: asyncio.run(run_scenario(scenario))


async def list_hosts(names: HostNames, host: str = "gpu1") -> list[Any]:
    return [info[4] for info in await names.look_up(host, 80)]


def test_the_last_addresses_are_used_while_the_name_server_fails(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: NameServer, names: HostNames) -> None:
        server.answers["gpu1"] = TEMPORARY
        with pytest.raises(socket.gaierror):
            await names.look_up("gpu1", 80)
        server.answers["gpu1"] = ["10.0.0.1"]
        assert await list_hosts(names) == [("10.0.0.1", 80)]
        server.answers["gpu1"] = TEMPORARY
        assert await list_hosts(names) == [("10.0.0.1", 80)]
        assert await list_hosts(names) == [("10.0.0.1", 80)]
        assert "gpu1: Temporary failure in name resolution; its last addresses are used" in caplog.text
        server.answers["gpu1"] = ["10.0.0.2"]
        assert await list_hosts(names) == [("10.0.0.2", 80)], "a worker may move"
        for error in (UNKNOWN, TEMPORARY):
            server.answers["gpu1"] = error
            with pytest.raises(socket.gaierror):  # a name that is gone is forgotten
                await names.look_up("gpu1", 80)

    run(scenario)


def test_nobody_waits_for_a_slow_name_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "LOOKUP_S_MAX", 0.01)

    async def scenario(server: NameServer, names: HostNames) -> None:
        server.answers["gpu1"] = ["10.0.0.1"]
        await list_hosts(names)
        server.answers["gpu1"] = answers_now = threading.Event()
        assert await asyncio.gather(*(list_hosts(names) for _ in range(9))) == [[("10.0.0.1", 80)]] * 9
        assert server.queries == ["gpu1"] * 2, "one query at a time"
        server.answers["gpu1"] = ["10.0.0.2"]
        answers_now.set()
        while await list_hosts(names) != [("10.0.0.2", 80)]:
            await asyncio.sleep(0.01)
        server.answers["gpu1"] = TEMPORARY
        assert await list_hosts(names) == [("10.0.0.2", 80)], "the late answer counts"

    run(scenario)


def test_a_look_up_goes_on_when_one_of_those_who_wait_leaves(run: Run) -> None:
    async def scenario(server: NameServer, names: HostNames) -> None:
        server.answers["gpu1"] = answers_now = threading.Event()
        first, second = (asyncio.ensure_future(list_hosts(names)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        server.answers["gpu1"] = ["10.0.0.1"]
        answers_now.set()
        assert await second == [("10.0.0.1", 80)]

    run(scenario)


def test_an_ip_address_needs_no_thread_that_a_silent_name_server_holds(run: Run) -> None:
    async def scenario(server: NameServer, names: HostNames) -> None:
        is_over = threading.Event()
        hosts = [f"gpu{number}" for number in range(host_names.LOOKUPS_MAX)]
        server.answers.update(dict.fromkeys(hosts, is_over))
        look_ups = [asyncio.ensure_future(list_hosts(names, host)) for host in hosts]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(list_hosts(names, "127.0.0.1"), 5) == [("127.0.0.1", 80)]
        assert await asyncio.wait_for(list_hosts(names, "::1"), 5) == [("::1", 80, 0, 0)]
        with pytest.raises(OSError):
            await names.look_up("300.0.0.1", 80)
        server.answers.update(dict.fromkeys(hosts, ("10.0.0.1",)))
        is_over.set()
        await asyncio.gather(*look_ups)

    run(scenario)


def test_a_program_ends_while_a_name_server_is_silent() -> None:
    code = """
import asyncio, socket, threading
from router.host_names import HostNames

socket.getaddrinfo = lambda *_, **__: threading.Event().wait()

async def main():
    try:
        await asyncio.wait_for(HostNames().look_up("gpu1", 80), 0.01)
    except asyncio.TimeoutError:
        print("end")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("end\n", "", 0)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Port of 127.0.0.2 at which no connection is accepted or refused, and of 127.0.0.1 at which one is accepted."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as silent:
        port = silent.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # the kernel drops further ones
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.2", port))
        with socket.create_server(("127.0.0.1", port)):
            yield port
        for connection in waiting:
            connection.close()


def test_a_request_goes_to_the_address_that_answers(run: Run, silent_port: int) -> None:
    async def scenario(server: NameServer, names: HostNames) -> None:
        server.answers["gpu1"] = ["127.0.0.2", "127.0.0.1"]
        pool = UpstreamPool(host_names=names, connect_s_max=5.0)
        connection = pool.acquire(Endpoint.parse(f"http://gpu1:{silent_port}"))
        await pool.connect(connection)
        assert connection.transport.get_extra_info("peername")[0] == "127.0.0.1"
        pool.close()
        await asyncio.sleep(0)

    run(scenario)


def test_health_checks_go_on_while_the_name_server_fails(run: Run) -> None:
    async def scenario(server: NameServer, names: HostNames) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        worker = await asyncio.start_server(answer, sock=socket.create_server(("127.0.0.1", 0)))
        url = f"http://gpu1:{worker.sockets[0].getsockname()[1]}"
        async with open_session(None, host_names=names) as session:
            server.answers["gpu1"] = TEMPORARY
            with pytest.raises(FetchError):
                await fetch(session, url, seconds=60, bytes_max=9)
            for address in (["127.0.0.1"], TEMPORARY):
                server.answers["gpu1"] = address
                assert await fetch(session, url, seconds=60, bytes_max=9) == (200, b"")
        worker.close()

    run(scenario)
