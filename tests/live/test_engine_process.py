"""The life of `engine serve` as processes: keys, limits, draining, a core that dies, orphans, shadowed packages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core_messages import encode_frame
from engine.tiny.tokenizer import write_tokenizer
from options.child_process import start_child

pytestmark = [pytest.mark.live, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]


def get(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {}), timeout=60) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def in_background(function: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


def running(url: str) -> float:
    page = get(url + "/metrics")[1].decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("vllm:num_requests_"))


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.02)


def read_command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


def test_keys_names_and_the_queue_limit(start_engine: Any) -> None:
    engine = start_engine("--api-key", "secret", "--served-model-name", "a", "--served-model-name", "b",
                          "--max-queue", "2", "--max-num-seqs", "1")  # fmt: skip
    url, key = engine.url, {"Authorization": "Bearer secret"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        status, body, answer_headers = get(url + "/v1/models", headers=headers)
        assert (status, answer_headers["X-Should-Retry"]) == (401, "false")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert get(url + "/health")[0] == 200
    assert [card["id"] for card in json.loads(get(url + "/v1/models", headers=key)[1])["data"]] == ["a", "b"]
    status, body, _ = get(url + "/v1/completions", {"model": "b", "prompt": "x", "max_tokens": 1}, key)
    assert (status, json.loads(body)["model"]) == (200, "b")

    first, _ = in_background(get, url + "/v1/completions", {**LONG, "max_tokens": 1500}, key)
    second, _ = in_background(get, url + "/v1/completions", {**LONG, "max_tokens": 1500}, key)
    wait_until(lambda: running(url) == 2)
    status, body, headers = get(url + "/v1/completions", {"prompt": "x"}, key)
    assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
    assert headers["Retry-After"]
    first.join()
    second.join()
    assert get(url + "/v1/completions", {"prompt": "x"}, key)[0] == 200


def test_a_deadline_ends_what_takes_longer(start_engine: Any) -> None:
    url = start_engine("--request-timeout", "0.4").url
    status, body, _ = get(url + "/v1/completions", LONG)
    assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
    status, body, _ = get(url + "/v1/completions", {**LONG, "stream": True})
    assert status == 200
    *_, error, done_event, _ = body.decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done_event == "data: [DONE]"
    wait_until(lambda: running(url) == 0)
    assert get(url + "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_zero(start_engine: Any, number: int) -> None:
    engine = start_engine()
    core = engine.core_pid()
    thread, results = in_background(get, engine.url + "/v1/completions", {**LONG, "max_tokens": 1500})
    wait_until(lambda: running(engine.url) == 1)
    engine.process.send_signal(number)
    wait_until(lambda: get(engine.url + "/health")[0] == 503)
    status, body, headers = get(engine.url + "/v1/completions", {"prompt": "x"})
    assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
    assert headers["Retry-After"]
    thread.join()
    assert results[0][0] == 200
    assert json.loads(results[0][1])["usage"]["completion_tokens"] == 1500
    assert engine.process.wait(20) == 0
    assert not alive(core)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_core_starts_ends_at_once(start_engine: Any, number: int) -> None:
    engine = start_engine(wait=False)
    wait_until(lambda: any(b"core_process" in read_command(pid) for pid in engine.children()))
    core = engine.core_pid()
    os.kill(core, signal.SIGSTOP)  # so its start does not end
    engine.process.send_signal(number)
    assert engine.process.wait(60) == 0
    assert not alive(core)
    assert engine.log() == ""  # no grace time has passed, nothing has failed


def test_a_full_disk_under_its_output_ends_no_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    spec = json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 4096})
    command = [sys.executable, "-m", "engine", "serve", "--simulate", spec, "--port", str(port)]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=full) as process:
        try:
            wait_until(lambda: isinstance(get_or_fail(f"http://127.0.0.1:{port}/health", None), tuple), 60)
            assert get(f"http://127.0.0.1:{port}/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        finally:
            process.kill()


def test_a_full_disk_hides_no_reason_of_a_cores_end() -> None:
    program = (
        "import sys; from engine.process import core_process; "
        "core_process.assemble = lambda config: 1 / 0; sys.exit(core_process.main(int(sys.argv[1])))"
    )
    own_socket, core_socket = socket.socketpair()
    with own_socket, core_socket, open("/dev/full", "w") as full:
        fd = core_socket.fileno()
        process = subprocess.Popen([sys.executable, "-c", program, str(fd)], stderr=full, pass_fds=[fd])
        core_socket.close()
        own_socket.sendall(encode_frame(msgspec.msgpack.encode(EngineConfig())))
        answer = b"".join(iter(lambda: own_socket.recv(4096), b""))
    process.wait()
    assert b"division by zero" in answer


def test_a_second_signal_ends_at_once(start_engine: Any) -> None:
    engine = start_engine("--shutdown-timeout", "300")
    thread, _ = in_background(get_or_fail, engine.url + "/v1/completions", {**LONG, "n": 8})
    wait_until(lambda: running(engine.url) == 8)
    engine.process.send_signal(signal.SIGINT)
    wait_until(lambda: get(engine.url + "/health")[0] == 503)
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait(20) == 0
    thread.join()


def get_or_fail(url: str, body: Any) -> Any:
    try:
        return get(url, body)
    except (OSError, ValueError) as error:
        return error


def test_a_dead_core_is_told_to_everyone(start_engine: Any) -> None:
    engine = start_engine()
    thread, results = in_background(get, engine.url + "/v1/completions", LONG)
    wait_until(lambda: running(engine.url) == 1)
    os.kill(engine.core_pid(), signal.SIGKILL)
    thread.join()
    status, body, _ = results[0]
    assert (status, json.loads(body)["error"]["type"]) == (503, "server_error")
    assert engine.process.wait(20) == 1
    assert "the core process ended" in engine.log()


def test_no_orphan_when_the_server_is_killed(start_engine: Any) -> None:
    engine = start_engine()
    core = engine.core_pid()
    engine.process.kill()
    wait_until(lambda: not alive(core))


def test_a_core_that_still_starts_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core whose server was killed kept its memory until the model was loaded, and longer if its device hung."""
    (tmp_path / "endless_core.py").write_text(
        "import time\nfrom engine.process import core_process\n"
        "core_process.assemble = lambda config: time.sleep(600)\nmain = core_process.main\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process, server_socket = start_child("endless_core")
    with server_socket:
        server_socket.sendall(encode_frame(msgspec.msgpack.encode(EngineConfig())))
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()


def test_a_wrong_model_is_one_clear_line(start_engine: Any, tmp_path: Path) -> None:
    engine = start_engine(str(tmp_path / "nowhere"), wait=False)
    assert engine.process.wait(60) == 1
    (line,) = engine.log().strip().splitlines()
    assert "nowhere" in line
    assert "no such folder" in line
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    write_tokenizer(tmp_path / "model", 512, 512)
    engine = start_engine(str(tmp_path / "model"), wait=False)
    assert engine.process.wait(60) == 1
    assert "FooForCausalLM" in engine.log()
    assert "Qwen3ForCausalLM" in engine.log()


def test_a_taken_port_is_one_clear_line(start_engine: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.run([sys.executable, "-m", "engine", "serve", "--port", str(port)], cwd=ROOT,
                              capture_output=True, text=True, timeout=60)  # fmt: skip
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in process.stderr
    assert "Traceback" not in process.stderr
