"""The gateways that benchmarks/proxy.py compares with, each installed into an environment of its own."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path

import click

PEERS = {"smg": "smg", "vllm-router": "vllm-router"}
"""Name -> distribution."""
HOME = Path.home() / ".cache" / "blockcast" / "peers"


def install(name: str) -> Path:
    """The peer's environment, made where it is not there yet."""
    folder = HOME / name
    if not (folder / "ok").exists():
        print(f"installing {PEERS[name]} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        done = subprocess.run([folder / "bin" / "pip", "install", "-q", PEERS[name]], check=False)
        if done.returncode:
            raise click.ClickException(f"cannot install {PEERS[name]}")
        (folder / "ok").touch()
    return folder


def install_ourselves(root: Path) -> Path:
    """`pip install .[router]` into an environment of its own, as users do: compiled. Again when the sources changed."""
    folder = HOME / "blockcast"
    digest = hashlib.sha256()
    for name in ("router", "prompts", "events"):
        for path in sorted((root / name).rglob("*.[ch]pp")) + sorted((root / name).rglob("*.py")):
            digest.update(path.read_bytes())
    stamp = folder / "ok"
    if not stamp.exists() or stamp.read_text() != digest.hexdigest():
        print(f"installing this checkout into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [folder / "bin" / "pip", "install", "-q", "--force-reinstall", "--no-deps", str(root)]
        with_dependencies = [folder / "bin" / "pip", "install", "-q", f"{root}[router]"]
        known = (folder / "bin" / "router").exists()
        done = subprocess.run(command if known else with_dependencies, check=False)
        if done.returncode:
            raise click.ClickException(f"cannot install {root}")
        stamp.write_text(digest.hexdigest())
    return folder / "bin" / "router"


def peer_command(name: str, urls: list[str]) -> tuple[list[str], str, int]:
    """(command, pattern of the line that says it serves, port), with the cache-aware policy."""
    folder = install(name)
    port = free_port()
    binary = str(folder / "bin" / name)
    common = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    if name == "smg":
        command = [binary, "launch", "--worker-urls", *urls, *common, "--prometheus-port", str(free_port())]
    else:
        command = [binary, "--worker-urls", *urls, *common, "--prometheus-port", str(free_port())]
    return command, r"(?i)(start|listen|server|router)", port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
