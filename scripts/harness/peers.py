"""Routers of others, and ours as users install it: compiled; each in an environment of its own, kept between runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import click

from harness.programs import ROOT, free_port

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
    for name in ("router", "prompts", "events"):
        for path in sorted((ROOT / name).rglob("*.[ch]pp")) + sorted((ROOT / name).rglob("*.py")):
            digest.update(path.read_bytes())
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
