"""Routers of others, and ours as users install it; each in an environment of its own, kept between runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from harness.programs import ROOT, Program, free_port, module_command

BASELINES = ("smg", "vllm-router")
"""Names of distributions and of their programs."""
INSTALL_ROOT = Path.home() / ".cache" / "blockcast" / "peers"


def _install(name: str, requirements: list[str], stamp_text: str = "") -> Path:
    """The folder of its programs; installed where that was not done yet, or for another stamp."""
    folder = INSTALL_ROOT / name
    stamp = folder / "ok"
    if not stamp.exists() or stamp.read_text() != stamp_text:
        print(f"installing {name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if subprocess.run([folder / "bin" / "pip", "install", "-q", *requirements], check=False).returncode:
            raise click.ClickException(f"cannot install {name}")
        stamp.write_text(stamp_text)
    return folder / "bin"


def baseline_program(name: str) -> Path:
    return _install(name, [name]) / name


def installed_router_program() -> Path:
    """`pip install .[router]`, again when the sources have changed."""
    digest = hashlib.sha256()
    for name in ("router", "prompts", "events", "options", "simulation"):
        for path in sorted((ROOT / name).rglob("*.[ch]pp")) + sorted((ROOT / name).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update((ROOT / "CMakeLists.txt").read_bytes())
    return _install("blockcast", [f"{ROOT}[router]"], digest.hexdigest()) / "router"


def baseline_command(name: str, urls: list[str]) -> tuple[list[str], int]:
    """(command, port), with the cache-aware policy."""
    port = free_port()
    program = [str(baseline_program(name)), *(["launch"] if name == "smg" else [])]
    return [
        *program, "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
        "--prometheus-port", str(free_port()),
    ], port  # fmt: skip


@contextmanager
def router_with_mock_workers(
    folder: Path, checkout: bool, mock_arguments: list[list[str]], *router_arguments: str
) -> Iterator[tuple[Program, str, list[str]]]:
    """Our router before a mock worker for each list of arguments: (its process, its URL, the mocks' URLs)."""
    checkout_env = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts"}
    with ExitStack() as stack:
        urls = []
        for number, arguments in enumerate(mock_arguments):
            command = [sys.executable, "-m", "harness.mock", "--model", str(folder), *arguments]
            mock = stack.enter_context(Program(command, folder / f"mock{number}.log", env=checkout_env))
            urls.append("http://127.0.0.1:" + mock.await_line(r"^(\d+)$"))
        program_command = module_command("router") if checkout else [str(installed_router_program())]
        command = [*program_command, "run", *urls, "--port", "0", *router_arguments]
        # An installed package must not be shadowed by the checkout: it runs elsewhere, and by no path of ours.
        env = checkout_env if checkout else {"PYTHONPATH": ""}
        router = Program(command, folder / "router.log", env=env, cwd=None if checkout else folder)
        yield stack.enter_context(router), router.await_line(), urls
