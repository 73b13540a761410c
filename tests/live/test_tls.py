"""Certificates on both sides of both programs: whom they let in, whom they keep out, what bad files are answered."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import ADMIN_KEY, Program, wait_until

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
SPEC = json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 4096})


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: ca.pem, and {server,client,stranger}.{pem,key}; ca signed the first two, the stranger itself."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(*new, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        openssl(*new, "-subj", f"/CN={name}", *names, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", f"{name}.key",
                "-out", f"{name}.pem")  # fmt: skip
    openssl(*new, "-subj", "/CN=stranger", *names, "-keyout", "stranger.key", "-out", "stranger.pem")
    (folder / "text.pem").write_text("no certificate\n")
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    programs: list[Program] = []

    def start(*words: str) -> Program:
        programs.append(Program(tmp_path / f"{len(programs)}.log", *words, "--port", "0"))
        return programs[-1]

    yield start
    for program in reversed(programs):
        program.close()


def request_json(pki: Path, url: str, body: Any = None, *, certificate_name: str | None = "client") -> tuple[int, Any]:
    """As somebody with this certificate, or none. Raises OSError where the door stays shut."""
    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    if certificate_name is not None:
        context.load_cert_chain(pki / f"{certificate_name}.pem", pki / f"{certificate_name}.key")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


def command(*words: str) -> tuple[int, str, str]:
    """(status, output, errors) of one of our commands; of its output no times."""
    process = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60)
    return process.returncode, re.sub(r"[\d.]+ s\)\n", "", process.stdout), process.stderr


def flags(pki: Path, **files: str) -> list[str]:
    return [word for flag, name in files.items() for word in (f"--{flag.replace('_', '-')}", str(pki / name))]


def test_certificates_all_the_way(pki: Path, start: Any) -> None:
    server_flags = flags(pki, tls_cert="server.pem", tls_key="server.key", tls_client_ca="ca.pem")
    towards = flags(pki, worker_tls_ca="ca.pem", worker_tls_cert="client.pem", worker_tls_key="client.key")
    engine = start("engine", "serve", "--simulate", SPEC, *server_flags).await_ready()
    assert engine.url.startswith("https://")
    router = start("router", "run", engine.url, *server_flags, *towards).await_ready()
    wait_until(lambda: request_json(pki, router.url + "/health")[1]["workers_up"] == 1, router.log)
    for stream in (False, True):
        body = {"prompt": "Hello, who is there? " * 30, "max_tokens": 4, "ignore_eos": True, "stream": stream}
        if not stream:
            status, answer = request_json(pki, router.url + "/v1/completions", body)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    (worker,) = request_json(pki, router.url + "/workers")[1]["workers"]
    assert worker["state"] == "up"
    for url in (engine.url, router.url):
        for certificate_name in (None, "stranger"):
            with pytest.raises(OSError):
                request_json(pki, url + "/health", certificate_name=certificate_name)
        assert request_json(pki, url + "/health")[0] == 200, "who is turned away harms nobody"
    client_flags = flags(pki, tls_ca="ca.pem", tls_cert="client.pem", tls_key="client.key")
    assert command("router", "top", "--once", router.url, *client_flags)[0] == 0
    status, _, error = command("router", "top", "--once", router.url, *client_flags[:2])
    assert (status, router.url in error) == (1, True), "a certificate is asked for"
    assert "--tls-ca FILE" in command("router", "top", "--once", router.url)[2]
    assert "https://" in command("router", "top", "--once", router.url.replace("https", "http"))[2]
    check_output = command("router", "check", engine.url, "--yes", *towards)[1]
    assert "ok      address: serves" in check_output
    assert "ok      request" in check_output
    assert "PROBLEM address" in command("router", "check", engine.url, "--yes")[1]
    router_without_certificate = start("router", "run", engine.url, *server_flags, *flags(pki, worker_tls_ca="ca.pem"))
    router_without_certificate.await_ready()
    wait_until(
        lambda: request_json(pki, router_without_certificate.url + "/workers")[1]["workers"],
        router_without_certificate.log,
    )
    (worker,) = request_json(pki, router_without_certificate.url + "/workers")[1]["workers"]
    assert worker["state"] == "starting", "a worker that asks for a certificate does not take what has none"


@pytest.mark.parametrize("program", ["engine", "router"])
def test_bad_files_are_named(pki: Path, start: Any, program: str) -> None:
    command = (
        ["engine", "serve", "--simulate", SPEC] if program == "engine" else ["router", "run", "http://127.0.0.1:9"]
    )
    good = {"tls_cert": "server.pem", "tls_key": "server.key"}
    cases: list[tuple[dict[str, str], str]] = [
        ({"tls_cert": "server.pem"}, "--tls-cert and --tls-key: expected both or neither"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "no certificate and its key"),
        ({"tls_cert": "text.pem", "tls_key": "server.key"}, "no certificate and its key"),
        (good | {"tls_client_ca": "text.pem"}, "--tls-client-ca"),
        (good | {"tls_client_ca": "nowhere.pem"}, "nowhere.pem"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca: needs --tls-cert"),
    ]
    if program == "router":
        cases += [
            ({"worker_tls_cert": "client.pem"}, "--worker-tls-cert and --worker-tls-key: expected both or neither"),
            ({"worker_tls_ca": "text.pem"}, "--worker-tls-ca"),
            ({"worker_tls_cert": "text.pem", "worker_tls_key": "client.key"}, "--worker-tls-cert"),
        ]
    for files, words in cases:
        refused_program = start(*command, *flags(pki, **files))
        assert refused_program.process.wait(60) != 0
        assert words in refused_program.log(), refused_program.log()
        assert "Traceback" not in refused_program.log()
