"""What is compared: our `engine serve`, any OpenAI URL, and Hugging Face's `generate`, each behind one `run`."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from harness.figures import cpu_seconds, rank
from harness.load import closed_loop, completion, post
from harness.programs import ROOT


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
        cls, ttfts_s: list[float], itls_s: list[float], gaps_s: list[float], rate: float, cpu_us: float | None
    ) -> Figures:
        ttft_ms, itl_ms = 1e3 * statistics.median(ttfts_s), 1e3 * statistics.median(itls_s)
        return cls(ttft_ms, itl_ms, 1e3 * rank(gaps_s or [0.0], 0.99), rate, cpu_us)


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
        cpu = (cpu_seconds(self.pid) - cpu_s) / (len(prompts) * output_len) * 1e6 if self.pid is not None else None
        ttfts, itls, gaps = [], [], []
        for answer in answers:
            *chunks, (_, last) = answer.events()  # the last is the usage
            tokens = json.loads(last)["usage"]["completion_tokens"]
            if tokens != output_len:
                raise RuntimeError(f"{self.name}: {tokens} tokens instead of {output_len}")
            ttfts.append(chunks[0][0] - answer.sent_s)
            itls.append((chunks[-1][0] - chunks[0][0]) / max(1, tokens - 1))
            gaps += [b - a for (a, _), (b, _) in pairwise(chunks)]  # zero: two chunks that came in one read
        return Figures.of(ttfts, itls, gaps, len(prompts) * output_len / wall_s, cpu)


class HfGenerate:
    """Static batches of `users` prompts, one after the other."""

    name = "HF generate"

    def __init__(self, model: Path, threads: int, dtype: str = "auto") -> None:
        script = str(Path(__file__).with_name("engine_hf.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(model), str(threads), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._cpu_s = self._read()["cpu_s"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"HF generate ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures:
        assert self._process.stdin is not None
        ttfts: list[float] = []
        itls: list[float] = []
        gaps: list[float] = []
        wall_s, cpu_s = 0.0, self._cpu_s
        for start in range(0, len(prompts), users):
            order = {"prompts": prompts[start : start + users], "output_len": output_len}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            found = self._read()
            times = found["times_s"]
            ttfts.append(found["ttft_s"])
            itls.append((times[-1] - times[0]) / max(1, output_len - 1))
            gaps.extend(b - a for a, b in pairwise(times))
            wall_s += found["wall_s"]
            self._cpu_s = found["cpu_s"]
        tokens = len(prompts) * output_len
        return Figures.of(ttfts, itls, gaps, tokens / wall_s, (self._cpu_s - cpu_s) / tokens * 1e6)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
