"""What is compared: our `engine serve`, any OpenAI URL, and Hugging Face's `generate`, each behind one `run`."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from engine_load import closed_loop

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figures:
    """One run of one setting. Milliseconds, tokens a second, CPU microseconds a token (None where not known)."""

    ttft_ms: float
    itl_ms: float
    gap_p99_ms: float
    tokens_per_s: float
    cpu_us_per_token: float | None


class System(Protocol):
    """Something that continues prompts."""

    name: str

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures: ...


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its threads and its children so far."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            for child in (task / "children").read_text().split():
                total += tree_cpu_s(int(child))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return total


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
        cpu_s = tree_cpu_s(self.pid) if self.pid is not None else 0.0
        answers, wall_s = closed_loop(self.url, self.model, prompts, users, output_len, with_ids=self._with_ids)
        tokens = sum(answer.tokens for answer in answers)
        cpu = (tree_cpu_s(self.pid) - cpu_s) / tokens * 1e6 if self.pid is not None else None
        gaps = sorted(gap for answer in answers for gap in answer.gaps_s) or [0.0]
        return Figures(
            ttft_ms=1e3 * statistics.median(answer.ttft_s for answer in answers),
            itl_ms=1e3 * statistics.median(answer.itl_s for answer in answers),
            gap_p99_ms=1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            tokens_per_s=tokens / wall_s,
            cpu_us_per_token=cpu,
        )


class HfGenerate:
    """Static batches of `users` prompts, one after the other."""

    name = "HF generate"

    def __init__(self, model: Path, threads: int, dtype: str = "auto") -> None:
        script = str(Path(__file__).with_name("engine_hf.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(model), str(threads), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_env(threads),
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
        gaps = sorted(gaps) or [0.0]
        tokens = len(prompts) * output_len
        return Figures(
            ttft_ms=1e3 * statistics.median(ttfts),
            itl_ms=1e3 * statistics.median(itls),
            gap_p99_ms=1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            tokens_per_s=tokens / wall_s,
            cpu_us_per_token=(self._cpu_s - cpu_s) / tokens * 1e6,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _env(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}


@contextmanager
def engine_serve(model: Path, threads: int, flags: tuple[str, ...] = ()) -> Iterator[str]:
    """The URL of an `engine serve` of this checkout; stopped at the end."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", str(model), "--port", "0", "--num-threads", str(threads), *flags],
            stdout=log, stderr=subprocess.STDOUT, env=_env(threads), cwd=ROOT,
        )  # fmt: skip
        try:
            end_s = time.monotonic() + 120
            while True:
                log.seek(0)
                text = log.read()
                found = re.search(r"^ready +(http://\S+)$", text, re.MULTILINE)
                if found:
                    break
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"engine serve did not start:\n{text}")
                time.sleep(0.1)
            yield found.group(1)
        finally:
            process.terminate()
            process.wait(60)
