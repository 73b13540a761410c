"""Weights that change under a running engine and a running router: nothing of the old ones is left."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, wait_until

from engine.executor import resolve_model

pytestmark = [pytest.mark.live, pytest.mark.long]
PROMPT = "What was computed once is not computed again, unless it was computed by others. " * 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape, and one that is broken."""
    import torch
    from safetensors.torch import load_file, save_file

    _, first = resolve_model(None)
    model_folders = [first]
    for name in ("second", "broken"):
        folder = tmp_path_factory.mktemp("weights") / name
        shutil.copytree(first, folder)
        weights = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        weights = {key: torch.randn_like(value.float()).to(value.dtype) * 0.05 for key, value in weights.items()}
        if name == "broken":
            weights.pop(next(key for key in weights if "layers.1" in key))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model_folders.append(folder)
    return model_folders


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    programs: list[Program] = []

    def start(*args: str) -> Program:
        program = Program(tmp_path / f"{len(programs)}.log", *args, "--port", "0")
        programs.append(program)
        return program.await_ready()

    yield start
    for program in reversed(programs):
        program.close()


def answer_of(url: str, prompt: str = PROMPT) -> tuple[str, int]:
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
    allowed_paths = ("--allowed-weights-path", str(folders[1].parent), "--allowed-weights-path", str(folders[2].parent))
    engine = start("engine", "serve", str(folders[0]), "--enable-sleep-mode", *allowed_paths, *host)
    old, _ = answer_of(engine.url)
    answer_of(engine.url, "other prompts push the first one out to the host's memory; " * 40)
    assert answer_of(engine.url)[1] > 0
    assert reload(engine.url, folders[1]) == (200, {"results": [None]})
    new, cached_tokens = answer_of(engine.url)
    assert cached_tokens == 0, "nothing that the old weights computed is used"
    assert new != old
    fresh = start("engine", "serve", str(folders[1]))
    assert answer_of(fresh.url)[0] == new, "as an engine that was started with them"
    assert answer_of(engine.url) == (new, answer_of(fresh.url)[1])
    nowhere = folders[1].parent / "nowhere"
    for wrong, status, words in (
        (folders[2], 409, "missing from the checkpoint"), (nowhere, 409, "nowhere"), ("/nowhere", 403, "/nowhere"),
    ):  # fmt: skip
        reload_status, answer = reload(engine.url, wrong)
        assert reload_status == status
        assert words in answer["error"]["message"]
        assert answer_of(engine.url)[0] == new, "the old ones stay"
    assert reload(engine.url, None)[0] == 200, "the folder of last time"
    assert answer_of(engine.url) == (new, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up_as_it_was(start: Any, folders: list[Path], level: int) -> None:
    engine = start("engine", "serve", str(folders[0]), "--enable-sleep-mode", "--kv-cache-memory-bytes", "256MiB")
    before = answer_of(engine.url)[0]
    core = int(engine.children()[0])
    mapped_bytes = lambda: int(Path(f"/proc/{core}/statm").read_text().split()[0]) * 4096  # noqa: E731
    bytes_awake = mapped_bytes()
    body = {"prompt": "what runs is finished first", "max_tokens": 100, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(engine.url + "/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as running:
        assert running.readline()
        status, _, answer = call(f"{engine.url}/sleep?level={level}", {})
        assert running.read().endswith(b"[DONE]\n\n")
    assert (status, answer) == (200, {"status": "sleeping", "level": level})
    assert call(engine.url + "/is_sleeping")[2] == {"is_sleeping": True}
    on_gpu = re.search(r"asleep: freed (\d+) MiB of GPU memory", engine.log())
    freed_bytes = int(on_gpu[1]) << 20 if on_gpu else bytes_awake - mapped_bytes()
    assert freed_bytes > 200 << 20, "the pool was given back"
    status, _, answer = call(engine.url + "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, "sleeps" in answer["error"]["message"]) == (503, True)
    assert call(engine.url + "/health")[0] == 503
    assert call(engine.url + "/sleep", {})[0] == 409
    assert reload(engine.url, None)[0] == 409
    assert call(engine.url + "/wake_up", {})[0] == 200
    assert call(engine.url + "/wake_up", {})[0] == 409
    assert answer_of(engine.url) == (before, 0)
    assert answer_of(engine.url)[1] > 0
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


def test_a_router_follows_workers_that_change(start: Any, folders: list[Path]) -> None:
    """Workers take other weights one by one, under load: no request fails, and no prediction is of the old cache.
    A worker that sleeps gets no requests, and an emptied cache counts as empty."""
    engines = [
        start(
            "engine",
            "serve",
            str(folders[0]),
            "--enable-sleep-mode",
            "--served-model-name",
            "m",
            "--allowed-weights-path",
            str(folders[1]),
        )
        for _ in "ab"
    ]
    router = start("router", "run", *(engine.url for engine in engines))
    wait_until(lambda: call(router.url + "/health")[2].get("workers_up") == 2, router.log)
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

    def rows() -> dict[str, Any]:
        return {row["worker_id"]: row for row in call(router.url + "/workers")[2]["workers"]}

    def runs(worker_id: str) -> int:
        row = rows()[worker_id]
        return row["prefilling"] + row["decoding"]

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for engine in engines:
            worker_id = engine.url.removeprefix("http://")
            assert call(f"{router.url}/workers/{worker_id}/drain", {})[0] == 200
            wait_until(lambda: runs(worker_id) == 0, router.log)  # noqa: B023
            assert reload(engine.url, folders[1])[0] == 200
            assert call(f"{router.url}/workers/{worker_id}/drain", {"on": False})[0] == 200
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert faults == []
    wait_until(lambda: {row["state"] for row in rows().values()} == {"up"}, router.log)
    fresh = start("engine", "serve", str(folders[1]), "--served-model-name", "m")
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = call(fresh.url + "/v1/completions", body)[2]["choices"][0]["text"]
    for turn in range(4):
        status, headers, answer = call(router.url + "/v1/completions", body)
        assert answer["choices"][0]["text"] == expected
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached_tokens
        assert turn or not cached_tokens
    asleep = engines[0].url.removeprefix("http://")
    assert call(engines[0].url + "/sleep", {})[0] == 200
    wait_until(lambda: rows()[asleep]["state"] == "down", router.log)
    for _ in range(4):
        status, headers, _ = call(router.url + "/v1/completions", body)
        assert status == 200
        assert headers["x-blockcast-worker"] != asleep
    assert call(engines[0].url + "/wake_up", {})[0] == 200
    wait_until(lambda: {row["state"] for row in rows().values()} == {"up"}, router.log)
    answer_of(router.url)
    predicted_tokens = lambda: call(router.url + "/route", body)[2]["predicted_cached_tokens"]  # noqa: E731
    wait_until(lambda: predicted_tokens() > 0, router.log)
    for engine in engines:
        assert call(engine.url + "/reset_prefix_cache", {})[0] == 200
    wait_until(lambda: predicted_tokens() == 0, router.log)
    assert call(router.url + "/v1/completions", body)[1]["x-blockcast-predicted-cached-tokens"] == "0"


def _stream(url: str, body: Any) -> tuple[int, bool]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return (200 if b"[DONE]" in answer.read() else 599), True
