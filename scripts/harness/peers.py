"""Routers of others, and ours as users install it; each in an environment of its own, kept between runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from harness.programs import ROOT, Program, free_port, ours

PEERS = ("smg", "vllm-router")
"""Names of distributions and of their programs."""
HOME = Path.home() / ".cache" / "blockcast" / "peers"


def _install(name: str, what: list[str], stamp_text: str = "") -> Path:
    """The folder of its programs; installed where that was not done yet, or for another stamp."""
    folder = HOME / name
    stamp = folder / "ok"
    if not stamp.exists() or stamp.read_text() != stamp_text:
        print(f"installing {name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if subprocess.run([folder / "bin" / "pip", "install", "-q", *what], check=False).returncode:
            raise click.ClickException(f"cannot install {name}")
        stamp.write_text(stamp_text)
    return folder / "bin"


def peer_program(name: str) -> Path:
    return _install(name, [name]) / name


def our_program() -> Path:
    """`pip install .[router]`, again when the sources have changed."""
    digest = hashlib.sha256()
    for name in ("router", "prompts", "events", "options", "simulation"):
        for path in sorted((ROOT / name).rglob("*.[ch]pp")) + sorted((ROOT / name).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update((ROOT / "CMakeLists.txt").read_bytes())
    known = (HOME / "blockcast" / "bin" / "router").exists()
    what = ["--force-reinstall", "--no-deps", str(ROOT)] if known else [f"{ROOT}[router]"]
    return _install("blockcast", what, digest.hexdigest()) / "router"


def peer_command(name: str, urls: list[str]) -> tuple[list[str], int]:
    """(command, port), with the cache-aware policy."""
    port = free_port()
    program = [str(peer_program(name)), *(["launch"] if name == "smg" else [])]
    return [
        *program, "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
        "--prometheus-port", str(free_port()),
    ], port  # fmt: skip


@contextmanager
def before_mocks(
    folder: Path, checkout: bool, mock_args: list[list[str]], *router_args: str
) -> Iterator[tuple[Program, str, list[str]]]:
    """Our router before a mock worker for each list of arguments: (its process, its URL, the mocks' URLs)."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts"}
    with ExitStack() as stack:
        urls = []
        for number, args in enumerate(mock_args):
            command = [sys.executable, "-m", "harness.mock", "--model", str(folder), *args]
            mock = stack.enter_context(Program(command, folder / f"mock{number}.log", env=path))
            urls.append("http://127.0.0.1:" + mock.await_line(r"^(\d+)$"))
        own = ours("router") if checkout else [str(our_program())]
        command = [*own, "run", *urls, "--port", "0", *router_args]
        # An installed package must not be shadowed by the checkout: it runs elsewhere, and by no path of ours.
        env = path if checkout else {"PYTHONPATH": ""}
        router = Program(command, folder / "router.log", env=env, cwd=None if checkout else folder)
        yield stack.enter_context(router), router.await_line(), urls
