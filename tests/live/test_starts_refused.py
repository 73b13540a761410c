"""What a start cannot have is one line that names the flag: addresses that are taken, packages that are missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def start(*args: str) -> subprocess.CompletedProcess[str]:
    own_key = {name: value for name, value in os.environ.items() if name != "ROUTER_ADMIN_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=60, env=own_key
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--port {}",),
        ("--port 0", "--admin 127.0.0.1:{}"),
        ("--port 0", "--bind-events tcp://127.0.0.1:{}"),
        ("--port 0", "--peer-bind tcp://127.0.0.1:{}"),
        ("--port {}", "--reuse-port"),
    ],
    ids=lambda args: args[-1].split()[0] + args[0],
)
def test_a_taken_address_is_told_with_its_flag(args: tuple[str, ...], busy_port: int) -> None:
    words = " ".join(args).format(busy_port).split()
    process = start("router", "run", *words)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    flag = next(part.split()[0] for part in args if "{}" in part)
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert flag in last
    assert f":{busy_port}" in last


def test_a_taken_port_is_found_before_workers_are_asked_and_a_key_is_printed(busy_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as worker:
        url = f"http://127.0.0.1:{worker.getsockname()[1]}"
        process = start("router", "run", url, "--port", str(busy_port))
        worker.setblocking(False)
        with pytest.raises(BlockingIOError):
            worker.accept()
    assert process.returncode == 1
    assert process.stdout == ""
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("Error: --host and --port")


def test_files_that_are_no_certificate_are_told_with_their_flag(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("nothing")
    process = start("router", "run", "--port", "0", *(f"--tls-{name}={tmp_path / 'cert'}" for name in ("cert", "key")))
    assert process.returncode == 2
    assert "--tls-cert" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("package", ["torch", "numpy", "safetensors", "aiohttp", "click"])
def test_a_package_that_is_missing_is_one_line(package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['engine', 'serve', '--port', '0']\n"
        "from engine.__main__ import main; main()"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert f"`{package}`" in line
    assert "install blockcast[engine]" in line
