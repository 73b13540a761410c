"""Two routers restart one after the other under load, behind the nginx of docs/how-to/upgrade-without-a-gap.md."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from programs import Program, call, wait_until

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import free_port

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")
pytestmark = [pytest.mark.live, pytest.mark.long]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "upgrade-without-a-gap.md").read_text()
SPEC = json.dumps({"prefill_s_per_token": 1e-5, "step_s": 0.01, "kv_tokens": 65536})
RATE = 40
"""Requests a second."""
FAIL_TIMEOUT_S = 2.0
"""nginx tries a router again that was away so long."""


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[Any]]:
    processes: list[Any] = []
    yield processes
    for process in reversed(processes):
        process.close()


class Nginx:
    """With the page's block, on these ports in place of those of the page."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        (block,) = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        for upstream_name, port in ports.items():
            assert upstream_name in block
            block = block.replace(upstream_name, str(port))
        names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{name}_temp_path {folder}/{name};\n" for name in names)
        file = folder / "nginx.conf"
        head = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{ }}\n"
        file.write_text(f"{head}http {{ access_log off; {temporary}{block} }}\n")
        self._process = subprocess.Popen([str(NGINX), "-e", str(folder / "error.log"), "-c", str(file)])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.mark.parametrize("front", ["nginx", "clients that know both"])
def test_both_are_restarted_one_after_the_other(tmp_path: Path, programs: list[Any], front: str) -> None:
    if front == "nginx" and NGINX is None:
        pytest.skip("nginx is not installed")

    def start(name: str, *words: str) -> Program:
        programs.append(Program(tmp_path / f"{name}.log", *words))
        return programs[-1].await_ready()  # type: ignore[no-any-return]

    engines = [
        start(f"e{i}", "engine", "serve", "--simulate", SPEC, "--served-model-name", "m", "--port", "0") for i in "ab"
    ]
    urls = [engine.url for engine in engines]
    ports = {name: free_port() for name in ("8090", "8091", "8092")}
    loads = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("8091", "8092")}

    def start_router(name: str, log: str) -> Program:
        (other,) = loads.keys() - {name}
        flags = ["--port", str(ports[name]), "--peer-bind", loads[name], "--peer", loads[other]]
        router = start(log, "router", "run", *urls, *flags)
        wait_until(lambda: call(router.url + "/readyz")[0] == 200, router.log)
        assert call(router.url + "/health")[2]["workers_up"] == 2
        return router

    routers = {name: start_router(name, name) for name in loads}
    urls_asked = [router.url for router in routers.values()]
    if front == "nginx":
        programs.append(Nginx(tmp_path, ports))
        urls_asked = [f"http://127.0.0.1:{ports['8090']}"]
        wait_until(lambda: listens(ports["8090"]), "nginx listens")
    faults: list[str] = []

    async def send_request(session: aiohttp.ClientSession, number: int) -> None:
        stream = number % 2 == 0
        body = {"model": "m", "prompt": f"{number % 7} asks again and again " * 20, "max_tokens": 20, "stream": stream}
        first = number % len(urls_asked)
        remaining_urls = urls_asked[first:] + urls_asked[:first]
        while remaining_urls:
            url, has_begun = remaining_urls.pop(0), False
            try:
                async with session.post(url + "/v1/completions", json=body | {"ignore_eos": True}) as answer:
                    has_begun = True
                    text = await answer.text()
                    if answer.status != 200 or (stream and not text.strip().endswith("data: [DONE]")):
                        faults.append(f"{number}: {answer.status} {text[-200:]}")
                    return
            except (aiohttp.ClientError, OSError) as error:
                if has_begun or not remaining_urls:  # no answer has begun: the other router may be asked
                    faults.append(f"{number}: {error!r}")
                    return

    async def scenario() -> int:
        over = asyncio.Event()

        async def load(session: aiohttp.ClientSession) -> int:
            tasks: list[asyncio.Task[None]] = []
            while not over.is_set():
                tasks.append(asyncio.create_task(send_request(session, len(tasks))))
                await asyncio.sleep(1 / RATE)
            await asyncio.gather(*tasks)
            return len(tasks)

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            loading = asyncio.create_task(load(session))
            try:
                await asyncio.sleep(0.5)
                for name in loads:
                    assert await asyncio.to_thread(routers[name].stop) == 0
                    await asyncio.to_thread(start_router, name, f"{name}-again")
                    await asyncio.sleep(FAIL_TIMEOUT_S + 0.5)
            finally:
                over.set()
            return await loading

    requests = asyncio.run(scenario())
    assert faults == [], f"{len(faults)} of {requests}"
    assert requests > RATE
