"""Weights that change under a running engine and a running router: nothing of the old ones is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, until

from engine.loading import model_folder

pytestmark = pytest.mark.live
PROMPT = "What was computed once is not computed again, unless it was computed by others. " * 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape, and one that is broken."""
    import torch
    from safetensors.torch import load_file, save_file

    _, first = model_folder(None)
    made = [first]
    for name in ("second", "broken"):
        folder = tmp_path_factory.mktemp("weights") / name
        shutil.copytree(first, folder)
        weights = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        weights = {key: torch.randn_like(value.float()).to(value.dtype) * 0.05 for key, value in weights.items()}
        if name == "broken":
            weights.pop(next(key for key in weights if "layers.1" in key))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        made.append(folder)
    return made


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Program] = []

    def start(*args: str) -> Program:
        program = Program(tmp_path / f"{len(started)}.log", *args, "--port", "0")
        started.append(program)
        return program.await_ready()

    yield start
    for program in reversed(started):
        program.close()


def said(url: str, prompt: str = PROMPT) -> tuple[str, int]:
    """(text, cached tokens) of greedy tokens."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, _, answer = call(url + "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def reload(url: str, folder: Path | str | None) -> tuple[int, Any]:
    body = {"method": "reload_weights"} | ({} if folder is None else {"kwargs": {"weights_path": str(folder)}})
    status, _, answer = call(url + "/collective_rpc", body)
    return status, answer


@pytest.mark.parametrize("host", [(), ("--host-cache-memory", "64MiB", "--num-gpu-blocks-override", "96")])
def test_other_weights_in_place(start: Any, folders: list[Path], host: tuple[str, ...]) -> None:
    engine = start("engine", "serve", str(folders[0]), "--enable-sleep-mode", *host)
    old, _ = said(engine.url)
    said(engine.url, "other prompts push the first one out to the host's memory; " * 40)
    assert said(engine.url)[1] > 0
    assert reload(engine.url, folders[1]) == (200, {"results": [None]})
    new, cached = said(engine.url)
    assert cached == 0, "nothing that the old weights computed is used"
    assert new != old
    fresh = start("engine", "serve", str(folders[1]))
    assert said(fresh.url)[0] == new, "as an engine that was started with them"
    assert said(engine.url) == (new, said(fresh.url)[1])
    for wrong, words in ((folders[2], "missing from the checkpoint"), ("/nowhere", "/nowhere")):
        status, answer = reload(engine.url, wrong)
        assert status == 409
        assert words in answer["error"]["message"]
        assert said(engine.url)[0] == new, "the old ones stay"
    assert reload(engine.url, None)[0] == 200, "the folder of last time"
    assert said(engine.url) == (new, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up_as_it_was(start: Any, folders: list[Path], level: int) -> None:
    engine = start("engine", "serve", str(folders[0]), "--enable-sleep-mode", "--kv-cache-memory-bytes", "256MiB")
    before = said(engine.url)[0]
    core = int(engine.children()[0])
    mapped = lambda: int(Path(f"/proc/{core}/statm").read_text().split()[0]) * 4096  # noqa: E731
    held = mapped()
    body = {"prompt": "what runs is finished first", "max_tokens": 100, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(engine.url + "/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as running:
        assert running.readline()
        status, _, answer = call(f"{engine.url}/sleep?level={level}", {})
        assert running.read().endswith(b"[DONE]\n\n")
    assert (status, answer) == (200, {"status": "sleeping", "level": level})
    assert call(engine.url + "/is_sleeping")[2] == {"is_sleeping": True}
    assert mapped() < held - (200 << 20), "the pool was given back"
    status, _, answer = call(engine.url + "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, "sleeps" in answer["error"]["message"]) == (503, True)
    assert call(engine.url + "/health")[0] == 503
    assert call(engine.url + "/sleep", {})[0] == 409
    assert reload(engine.url, None)[0] == 409
    assert call(engine.url + "/wake_up", {})[0] == 200
    assert call(engine.url + "/wake_up", {})[0] == 409
    assert said(engine.url) == (before, 0)
    assert said(engine.url)[1] > 0
    for target, words in (
        ("/sleep?level=3", "level"),
        ("/sleep?mode=abort", "mode"),
        ("/wake_up?tags=weights", "tags"),
    ):
        status, _, answer = call(engine.url + target, {})
        assert status == 400
        assert words in answer["error"]["message"]
    assert call(engine.url + "/collective_rpc", {"method": "os.system", "args": ["true"]})[0] == 400


def test_without_the_flag_there_are_no_such_routes(start: Any) -> None:
    engine = start("engine", "serve", "--simulate", json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 4096}))
    for path in ("/sleep", "/wake_up", "/collective_rpc"):
        assert call(engine.url + path, {})[0] == 404
    assert call(engine.url + "/is_sleeping")[0] == 404


def test_a_router_rolls_new_weights_out(start: Any, folders: list[Path]) -> None:
    """One worker after the other, under load: no request fails, and after it no prediction is of the old cache."""
    engines = [
        start("engine", "serve", str(folders[0]), "--enable-sleep-mode", "--served-model-name", "m") for _ in "ab"
    ]
    router = start("router", "run", *(engine.url for engine in engines))
    until(lambda: call(router.url + "/health")[2].get("workers_up") == 2, router.log)
    faults: list[Any] = []
    over = threading.Event()

    def load(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            body = {
                "model": "m",
                "prompt": f"{number} asks {turn % 5}: {PROMPT}",
                "max_tokens": 4,
                "stream": turn % 2 == 0,
            }
            request = call if not body["stream"] else _stream
            status = request(router.url + "/v1/completions", body)[0]
            if status != 200:
                faults.append(status)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        status, _, answer = call(router.url + "/weights", {"do": "reload", "path": str(folders[1])})
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert status == 200, answer
    assert {one["worker_id"] for one in answer["workers"]} == {one.url.removeprefix("http://") for one in engines}
    assert all(one["done"] for one in answer["workers"])
    assert faults == []
    assert {row["state"] for row in call(router.url + "/workers")[2]["workers"]} == {"up"}
    fresh = start("engine", "serve", str(folders[1]), "--served-model-name", "m")
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = call(fresh.url + "/v1/completions", body)[2]["choices"][0]["text"]
    for turn in range(4):
        status, headers, answer = call(router.url + "/v1/completions", body)
        assert answer["choices"][0]["text"] == expected
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached
        assert turn or not cached
    status, _, answer = call(router.url + "/weights", {"do": "reload", "path": str(folders[2])})
    assert status == 502, "the first that fails ends it"
    assert [one["done"] for one in answer["workers"]] == [False]
    assert "missing" in answer["workers"][0]["error"]
    assert {row["state"] for row in call(router.url + "/workers")[2]["workers"]} == {"up"}, (
        "and works on with what it has"
    )
    one = engines[0].url.removeprefix("http://")
    assert call(router.url + "/weights", {"do": "sleep", "worker_id": one})[0] == 200
    assert call(engines[0].url + "/is_sleeping")[2] == {"is_sleeping": True}
    for _ in range(4):
        assert call(router.url + "/v1/completions", body)[0] == 200
    assert call(router.url + "/weights", {"do": "wake", "worker_id": one})[0] == 200
    until(lambda: {row["state"] for row in call(router.url + "/workers")[2]["workers"]} == {"up"}, router.log)
    said(router.url)
    assert call(router.url + "/weights", {"do": "reset"})[0] == 200
    status, headers, answer = call(router.url + "/v1/completions", body)
    assert headers["x-blockcast-predicted-cached-tokens"] == "0"
    for wrong in ({"do": "nothing"}, {"do": "sleep", "worker_id": "x"}, {"do": "reload", "path": 3}, {}):
        assert call(router.url + "/weights", wrong)[0] in (400, 404), wrong


def test_processes_change_as_one(start: Any) -> None:
    """Whichever of a router's two processes is told: one order at a time, no work to a worker that sleeps, no process
    that still believes in what was forgotten, and /readyz speaks for both."""
    spec = json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 65_536, "step_s": 0.01})
    flags = ("--simulate", spec, "--enable-sleep-mode", "--served-model-name", "m")
    engines = [start("engine", "serve", *flags) for _ in "ab"]
    router = start("router", "run", *(engine.url for engine in engines), "--processes", "2", "--health-interval", "60")
    until(lambda: call(router.url + "/readyz")[0] == 200, router.log)
    assert {call(router.url + "/readyz")[0] for _ in range(16)} == {200}, "one that says so speaks for both"
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    predicted = lambda: {  # noqa: E731
        call(router.url + "/route", body)[2]["predicted_cached_tokens"] for _ in range(16)
    }
    said(router.url)
    until(lambda: 0 not in predicted(), "both processes know what is cached")
    for _ in range(4):  # each goes to either of the two
        assert call(router.url + "/weights", {"do": "reset"})[0] == 200
        assert predicted() == {0}
        said(router.url)
        until(lambda: 0 not in predicted(), "both processes know what is cached")
    one = engines[0].url.removeprefix("http://")
    assert call(router.url + "/weights", {"do": "sleep", "worker_id": one})[0] == 200
    for _ in range(16):
        assert call(router.url + "/v1/completions", body)[1]["x-blockcast-worker"] != one
    assert call(router.url + "/weights", {"do": "wake", "worker_id": one})[0] == 200
    up = lambda: [row["state"] for row in call(router.url + "/workers")[2]["workers"]] == ["up", "up"]  # noqa: E731
    until(lambda: all(up() for _ in range(16)), "every process sends work to it")
    slow = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(call, router.url + "/v1/completions", slow)
        until(lambda: sum(row["decoding"] for row in call(router.url + "/workers")[2]["workers"]), "it runs")
        orders = [pool.submit(call, router.url + "/weights", {"do": "reset"}) for _ in range(2)]
        assert sorted(order.result()[0] for order in orders) == [200, 409], "one order at a time"
        assert running.result()[0] == 200
    frozen = router.children()[1]
    os.kill(frozen, signal.SIGSTOP)
    try:  # connections that come to the frozen one are not answered at all
        status = until(lambda: answered(router.url + "/readyz"), "the other one answers")
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert status == 503
    until(lambda: call(router.url + "/readyz")[0] == 200, router.log)


def test_a_process_that_dies_in_the_middle_of_an_order_goes_on_with_it(start: Any) -> None:
    """And knows what operators told the other one meanwhile: who was added, removed, drained."""
    spec = json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 65_536, "step_s": 0.02})
    engines = [start("engine", "serve", "--simulate", spec, "--served-model-name", "m").url for _ in "abc"]
    one, two, three = (url.removeprefix("http://") for url in engines)
    router = start("router", "run", engines[0], engines[2], "--processes", "2")
    until(lambda: call(router.url + "/readyz")[0] == 200, router.log)
    assert call(router.url + "/workers", {"url": engines[1]})[0] == 201
    assert call(f"{router.url}/workers/{three}", method="DELETE")[0] == 200

    def states() -> dict[str, str]:
        return {row["worker_id"]: row["state"] for row in call(router.url + "/workers")[2]["workers"]}

    until(lambda: all(states() == {one: "up", two: "up"} for _ in range(16)), "both know both")
    assert call(f"{router.url}/workers/{two}/drain", {})[0] == 200
    slow = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(call, engines[0] + "/v1/completions", slow)  # what the order may break off
        through = [pool.submit(call, router.url + "/v1/completions", slow) for _ in "12"]
        until(lambda: sum(row["decoding"] for row in call(router.url + "/workers")[2]["workers"]), "it runs")
        order = pool.submit(attempt, router.url + "/weights", {"do": "reset"})
        until(lambda: states()[one] == "draining", "the order waits for what runs")
        first = router.children()[0]
        os.kill(first, signal.SIGKILL)
        assert order.result() in (None, 503), "who gave the order is told that it broke off"
        until(lambda: len(router.children()) == 2 and first not in router.children(), "it is started again")
        until(lambda: "reset goes on" in router.log(), router.log)
        until(lambda: all(states() == {one: "up", two: "draining"} for _ in range(16)), router.log)
        assert f"reset of worker {one}: done" in router.log()
        assert f"reset of worker {two}: done" in router.log()
        assert running.result()[0] == 200
        del through  # either ended with its process or did not


def attempt(url: str, body: Any) -> int | None:
    """The status; None where the connection broke."""
    try:
        return call(url, body)[0]
    except OSError:
        return None


def answered(url: str) -> int | None:
    """The status; None where there is none for two seconds."""
    try:
        return urllib.request.urlopen(url, timeout=2).status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def _stream(url: str, body: Any) -> tuple[int, bool]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return (200 if b"[DONE]" in answer.read() else 599), True
