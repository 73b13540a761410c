"""A wrong start is one line that names the fault and the next step: a port in use, a missing package, a broken file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.tiny.model import PRESETS, make_model

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


class WrongStart(NamedTuple):
    """A start that a user gets wrong, and what one line of its stderr says of it."""

    words: str
    """The command; {model} is a folder with a good checkpoint, {folder} one with broken ones, {busy} a port in use."""
    fault: str
    """The flag, file or address that is wrong, or what is wrong with it."""
    remedy: str
    """What to do, or what was expected."""
    status: int | None = 1
    """The exit status; None where the program goes on and waits for the fault to be mended."""


EVENTS_ON = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:BUSY"}'
WRONG_STARTS = {
    "engine: port taken": WrongStart("engine serve {model} --port {busy}", "--port", "already in use"),
    "engine: folder without config": WrongStart(
        "engine serve {folder}/empty", "no config.json", "folder of a checkpoint"
    ),
    "engine: no such folder": WrongStart("engine serve {folder}/missing", "{folder}/missing", "expected a folder"),
    "engine: unknown model type": WrongStart("engine serve {folder}/unknown --port 0", "Zeppelin", "supported: "),
    "engine: no weights": WrongStart("engine serve {folder}/no_weights --port 0", "model.safetensors", "safetensors"),
    "engine: torn weights": WrongStart("engine serve {folder}/torn --port 0", "model.safetensors", "not a readable"),
    "engine: no tokenizer": WrongStart("engine serve {folder}/no_tokenizer --port 0", "tokenizer.json", "--tokenizer"),
    "engine: broken tokenizer": WrongStart(
        "engine serve {folder}/broken_tokenizer --port 0", "tokenizer.json", "not a tokenizer"
    ),
    "engine: broken config": WrongStart("engine serve {folder}/broken_config --port 0", "config.json", "not json"),
    "engine: no GPU": WrongStart("engine serve {model} --port 0 --device cuda", "--device", "--device cpu"),
    "engine: block size of 0": WrongStart("engine serve {model} --block-size 0", "--block-size", "from 1", 2),
    "engine: too much memory": WrongStart(
        "engine serve {model} --port 0 --kv-cache-memory-bytes 900TB", "--kv-cache-memory-bytes", "expected at most"
    ),
    "engine: context too long": WrongStart(
        "engine serve {model} --port 0 --max-model-len 100000000", "--max-model-len", "at most"
    ),
    "engine: port of events taken": WrongStart(
        "engine serve {model} --port 0 --kv-events-config " + EVENTS_ON, "--kv-events-config", "already in use"
    ),
    "engine: package missing": WrongStart(
        "engine serve {model} --port 0 --attention-backend flash-attn", "flash_attn", "pip install"
    ),
    "engine: unknown preset": WrongStart("engine serve --port 0 --simulate h900:x", "h900:x", "h100"),
    "engine: unknown parser": WrongStart("engine serve --tool-call-parser hermez", "--tool-call-parser", "hermes", 2),
    "engine: sleep with several ranks": WrongStart(
        "engine serve --enable-sleep-mode -tp 2", "--enable-sleep-mode", "not with --tensor-parallel-size", 2
    ),
    "engine: flag misspelt": WrongStart("engine serve --prot 0", "--prot", "--port", 2),
    "router: setting misspelt": WrongStart("router run --config {folder}/typo.toml", "typo.toml", "nearest is port", 2),
    "router: file is no TOML": WrongStart("router run --config {folder}/broken.toml", "broken.toml", "line 1", 2),
    "router: key of a worker misspelt": WrongStart(
        "router run --worker url=http://a:1,evnts=none", "evnts", "events", 2
    ),
    "router: not a URL": WrongStart("router run ftp://gpu1:8000", "ftp://gpu1:8000", "http://host:port", 2),
    "router: address without a port": WrongStart("router run --bind-events 5557", "--bind-events", "tcp://*:5557", 2),
    "router: folder without tokenizer": WrongStart(
        "router run --tokenizer {folder}/empty", "--tokenizer", "expected", 2
    ),
    "router: policy not found": WrongStart("router run --policy-function no:f", "--policy-function", "no module", 2),
    "router: worker is not up": WrongStart("router run {closed} --port 0", "cannot connect", "does it run", None),
    "router: unknown host": WrongStart(
        "router run http://no.host.invalid:1 --port 0", "no.host.invalid", "address", None
    ),
    "router: worker wants a key": WrongStart("router run {locked} --port 0", "answers 401", "--worker-api-key", None),
    "router: not an LLM server": WrongStart("router run {web} --port 0", "answers 404", "openai api", None),
    "router: no workers": WrongStart("router run --port 0", "no workers", "router run http://", None),
    "router: no peer": WrongStart("router run --snapshot-from {closed} --port 0", "--snapshot-from", "refused", None),
    "router check: wrong key": WrongStart("router check {locked} --yes", "answers 401", "--worker-api-key"),
    "router top: no router": WrongStart("router top {closed} --once", "refused", "does it run"),
    "engine: file of weights": WrongStart("engine serve {folder}/typo.toml", "typo.toml': a file", "the folder of a"),
    "engine: SPEC misspelt": WrongStart(
        "engine serve --port 0 --simulate {folder}/spec.json", "`prefil`", "prefill_s_per_token"
    ),
    "engine: no chat template": WrongStart(
        "engine serve {model} --port 0 --chat-template {folder}/missing", "--chat-template", "a file with one"
    ),
    "engine: heads that cannot be split": WrongStart(
        "engine serve {model} --port 0 --tensor-parallel-size 3", "--tensor-parallel-size 3", "a divisor of"
    ),
    "engine: cache shorter than the context": WrongStart(
        "engine serve --simulate h100:llama-3.1-8b --port 0 --max-model-len 4096 --num-gpu-blocks-override 4",
        "--max-model-len 4096",
        "more memory",
        None,
    ),
    "engine: unknown command": WrongStart("engine run", "'run'", "serve", 2),
    "router: unknown command": WrongStart("router serve", "'serve'", "run", 2),
    "router: folder instead of TOML": WrongStart("router run --config {folder}", "--config", "a TOML file", 2),
    "router: worker given twice": WrongStart("router run http://a:1 http://a:1", "worker a:1", "given twice", 2),
    "router: certificate without key": WrongStart("router run --tls-cert {folder}/typo.toml", "--tls-key", "both", 2),
    "router: peer without a scheme": WrongStart("router run --peer 127.0.0.1:5600", "--peer", "tcp://*:5557", 2),
    "router shadow: no workers": WrongStart("router shadow --port 0", "no workers", "name their URLs", None),
    "router shadow: report in no folder": WrongStart(
        "router shadow {closed} --report {folder}/no/x.html", "--report", "a folder that exists", 2
    ),
    "router top: no router's URL": WrongStart("router top {web} --once", "is not a router's", "router run"),
    "kv_subscriber: endpoint without a port": WrongStart(
        "events.kv_subscriber tcp://gpu1", "tcp://gpu1", "tcp://HOST:PORT", 2
    ),
    "kv_subscriber: no worker": WrongStart("events.kv_subscriber {closed}", "refused", "does it run"),
    "kv_subscriber: no worker's URL": WrongStart(
        "events.kv_subscriber {web}", "/kv_event_sources", "vllm's default, tcp://127.0.0.1:5557", None
    ),
    "kv_subscriber: nobody publishes": WrongStart(
        "events.kv_subscriber tcp://127.0.0.1:1", "cannot connect", "--kv-events-config", None
    ),
}


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status that its server was made for."""

    def do_GET(self) -> None:
        assert isinstance(self.server, _RefusingServer)
        self.send_error(self.server.status)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        return


class _RefusingServer(ThreadingHTTPServer):
    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Refusing)
        self.status = status

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, busy_port: int) -> Iterator[dict[str, str]]:
    """placeholder of a `WrongStart` -> what stands there."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make_model(folder / "model", PRESETS["tiny"])
    (folder / "empty").mkdir()
    for name, broken_file, content in (
        ("unknown", "config.json", b'{"architectures": ["ZeppelinForCausalLM"], "model_type": "zeppelin"}'),
        ("torn", "model.safetensors", (model / "model.safetensors").read_bytes()[:1000]),
        ("broken_config", "config.json", b"{"),
        ("broken_tokenizer", "tokenizer.json", b"{"),
        ("no_weights", "model.safetensors", None),
        ("no_tokenizer", "tokenizer.json", None),
    ):
        shutil.copytree(model, folder / name)
        if content is None:
            (folder / name / broken_file).unlink()
        else:
            (folder / name / broken_file).write_bytes(content)
    (folder / "typo.toml").write_text("prot = 1\n")
    (folder / "broken.toml").write_text("port = \n")
    (folder / "spec.json").write_text('{"prefil": 1}')
    with socket.socket() as unused, _RefusingServer(401) as locked, _RefusingServer(404) as web:
        unused.bind(("127.0.0.1", 0))  # and never listens
        for server in (locked, web):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "model": str(model),
            "folder": str(folder),
            "busy": str(busy_port),
            "closed": f"http://127.0.0.1:{unused.getsockname()[1]}",
            "locked": locked.url,
            "web": web.url,
        }
        locked.shutdown()
        web.shutdown()


def read_output(process: subprocess.Popen[str], is_last: Callable[[str], bool]) -> str:
    """Return what a program prints up to the first line that `is_last`, or to its end; kill it after a minute."""
    lines: list[str] = []
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if is_last(line):
                break
    finally:
        timer.cancel()
    return "".join(lines)


@pytest.mark.long
@pytest.mark.parametrize("start", WRONG_STARTS.values(), ids=WRONG_STARTS)
def test_a_wrong_start_names_the_fault_and_the_next_step(start: WrongStart, places: dict[str, str]) -> None:
    fault, remedy = start.fault.format_map(places).lower(), start.remedy.lower()
    words = [
        EVENTS_ON.replace("BUSY", places["busy"]) if word == EVENTS_ON else word.format_map(places)
        for word in start.words.split()
    ]
    environment = {name: value for name, value in os.environ.items() if name != "ROUTER_ADMIN_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        says_both = lambda line: fault in line.lower() and remedy in line.lower()  # noqa: E731
        output = read_output(process, says_both if start.status is None else lambda line: False)
        assert any(says_both(line) for line in output.splitlines()), output
        assert "Traceback" not in output
        if start.status is not None:
            assert process.wait(60) == start.status
    finally:
        process.kill()
        process.communicate()
