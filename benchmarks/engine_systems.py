"""What is compared: our `engine serve`, any OpenAI URL, and Hugging Face's `generate`, each behind one `run`."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from harness.figures import cpu_seconds, rank
from harness.load import closed_loop, completion, post


@dataclass(frozen=True)
class Figures:
    """One run of one setting. Milliseconds, tokens a second, CPU microseconds a token (None where not known)."""

    ttft_ms: float
    itl_ms: float
    gap_p99_ms: float
    tokens_per_s: float
    cpu_us_per_token: float | None

    @classmethod
    def of(
        cls, answers: Sequence[tuple[float, list[float]]], tokens: int, each: int, wall_s: float, cpu_s: float | None
    ) -> Figures:
        """`answers`: when each was asked for and when its parts came; `tokens` in all, `each` in one."""
        ttft_s = statistics.median(times[0] - asked_s for asked_s, times in answers)
        itl_s = statistics.median((times[-1] - times[0]) / max(1, each - 1) for _, times in answers)
        gaps_s = [b - a for _, times in answers for a, b in pairwise(times)]  # zero: two parts that came in one read
        cpu_us = None if cpu_s is None else 1e6 * cpu_s / tokens
        return cls(1e3 * ttft_s, 1e3 * itl_s, 1e3 * rank(gaps_s or [0.0], 0.99), tokens / wall_s, cpu_us)


class System(Protocol):
    """Something that continues prompts."""

    name: str

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures: ...


def listener_pid(port: int) -> int | None:
    """The process that listens on a local TCP port, if we may know."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # ended, or somebody else's
    return None


class HttpSystem:
    """A server that speaks OpenAI's completions."""

    def __init__(self, name: str, url: str, *, with_ids: bool = False) -> None:
        """`with_ids`: let chunks carry token ids, so that a token without text of its own makes a chunk too."""
        self.name = name
        self._with_ids = with_ids
        self.url = url.rstrip("/")
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            self.model: str = json.load(answer)["data"][0]["id"]
        port = re.search(r"//(?:127\.0\.0\.1|localhost):(\d+)", self.url)
        self.pid = listener_pid(int(port.group(1))) if port else None

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures:
        import uvloop

        more = {"return_token_ids": True} if self._with_ids else {}
        bodies = [completion(self.model, prompt, output_len, **more) for prompt in prompts]
        cpu_s = cpu_seconds(self.pid) if self.pid is not None else 0.0
        start_s = time.perf_counter()
        answers = uvloop.run(closed_loop(self.url, [post("/v1/completions", body) for body in bodies], users))
        wall_s = time.perf_counter() - start_s
        used_s = cpu_seconds(self.pid) - cpu_s if self.pid is not None else None
        found = []
        for answer in answers:
            *chunks, (_, last) = answer.events()  # the last is the usage
            tokens = json.loads(last)["usage"]["completion_tokens"]
            if tokens != output_len:
                raise RuntimeError(f"{self.name}: {tokens} tokens instead of {output_len}")
            found.append((answer.sent_s, [at_s for at_s, _ in chunks]))
        return Figures.of(found, len(prompts) * output_len, output_len, wall_s, used_s)


class HfGenerate:
    """Static batches of `users` prompts, one after the other, in a process of its own: no server, no detokenising.

    `generate` at its best reasonable use: bf16 as the checkpoint says (or another dtype, where that is faster), sdpa
    attention, inference mode, padded on the left with a mask where lengths differ, a streamer that only notes the time.
    """

    name = "HF generate"

    def __init__(self, model: Path, threads: int, dtype: str = "auto") -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far = spawn.Pipe()
        self._process = spawn.Process(target=generate_for, args=(far, str(model), threads, dtype), daemon=True)
        os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process.start()
        far.close()  # so that its end is heard
        self._cpu_s: float = self._pipe.recv()

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures:
        answers, wall_s, cpu_s = [], 0.0, self._cpu_s
        for start in range(0, len(prompts), users):
            self._pipe.send((prompts[start : start + users], output_len))
            asked_s, times_s, end_s, self._cpu_s = self._pipe.recv()
            answers.append((asked_s, times_s))
            wall_s += end_s - asked_s
        return Figures.of(answers, len(prompts) * output_len, output_len, wall_s, self._cpu_s - cpu_s)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)


def generate_for(pipe: Connection, model_path: str, threads: int, dtype: str) -> None:
    """The process: (prompts, tokens of each answer) in; (when asked, when each step came, the end, CPU so far) out."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa").eval()

    class Clock(BaseStreamer):  # type: ignore[misc]
        """The first `put` brings the prompt, every other one token of each sequence."""

        def __init__(self) -> None:
            self.times_s: list[float] = []

        def put(self, value: Any) -> None:
            self.times_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    pipe.send(time.process_time())
    while True:
        try:
            prompts, output_len = pipe.recv()
        except EOFError:
            return
        start_s = time.perf_counter()
        width, clock = max(map(len, prompts)), Clock()
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=output_len, min_new_tokens=output_len,
                do_sample=False, pad_token_id=0, streamer=clock,
            )  # fmt: skip
        end_s = time.perf_counter()
        assert out.shape[1] == width + output_len, f"{out.shape[1] - width} tokens instead of {output_len}"
        pipe.send((start_s, clock.times_s[1:], end_s, time.process_time()))
