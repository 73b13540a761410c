"""How many simulated workers one machine holds under `fleet`, and what each costs beside its engine.

    python benchmarks/fleet_many.py [--workers 64] [--routers 2] [--seconds 300] [--json FILE]

One raylet, `fleet up --simulate` with a time scale, and routers. It starts as many as come up in time, then counts
memory (pages that processes share counted once) and CPU by kind of process: the engines, the guards, the actors that
hold them, the directory, the routers, Ray itself; first with nobody asking, then with conversations, each turn by
another router, whose predictions are compared with what the workers report.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import _path  # noqa: F401
import click
from harness.figures import machine, markdown, write_json
from harness.programs import call

SPEC = "h100:llama-3.1-8b"
KINDS = {
    "engine serve": "engine", "guard.py": "guard", "ray::MemberActor": "member actor", "ray::Directory": "directory",
    "router run": "router",
}  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")


def kinds() -> dict[int, str]:
    """What this process has started, and what that has, by kind."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: dict[int, str] = {}
    ours, own = [os.getpid()], os.getpid()
    while ours:
        parent = ours.pop()
        ours += [pid for pid, its in parents.items() if its == parent]
        try:
            words = Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if parent != own and words:
            known = next((kind for pattern, kind in KINDS.items() if pattern in words), None)
            found[parent] = "guard" if "guard.py" in words else known or found.get(parents[parent], "Ray")
            if found[parent] not in KINDS.values():
                found[parent] = "Ray"
    return found


def cpu_s(pids: dict[int, str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for pid, kind in pids.items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        sums[kind] += (int(fields[11]) + int(fields[12])) / TICKS
    return sums


def memory_mb(pids: dict[int, str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for pid, kind in pids.items():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sums[kind] += int(text.partition("\nPss:")[2].split()[0]) / 1024
    return sums


def ask(url: str, messages: list[Any]) -> tuple[int, Any, int]:
    """(status, answer, the prediction)."""
    body = json.dumps({"messages": messages, "max_tokens": 16}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer), int(answer.headers["x-blockcast-predicted-cached-tokens"])
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), 0


def talk(urls: list[str], number: int, end: threading.Event, counts: dict[str, int]) -> None:
    while not end.is_set():
        messages: list[Any] = []
        opening = f"{number} {time.monotonic()}"
        for turn in range(5):
            messages.append({"role": "user", "content": f"talk {opening} turn {turn}: " + "and then what? " * 40})
            status, answer, predicted = ask(urls[(number + turn) % len(urls)], messages)
            counts["answered" if status == 200 else f"status {status}"] += 1
            if status != 200:
                break
            reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            counts["mispredicted"] += predicted != reported
            counts["cached tokens"] += reported
            messages.append(answer["choices"][0]["message"])
            if end.wait(1.0):  # its events have reached the other routers
                break


@click.command(help=__doc__)
@click.option("--workers", default=64)
@click.option("--routers", default=2)
@click.option("--time-scale", default=10.0)
@click.option("--seconds", default=300.0, help="For workers to come up.")
@click.option("--talks", default=32)
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(workers: int, routers: int, time_scale: float, seconds: float, talks: int, out: Path | None) -> None:
    os.environ |= {"RAY_raylet_start_wait_time_s": "180",
                   "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
                   "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # fmt: skip
    from ray.cluster_utils import Cluster

    click.echo(machine())
    cluster, folder = Cluster(), mkdtemp(prefix="bcray")

    def fleet(*words: str) -> str:
        command = [sys.executable, "-m", "fleet", *words, "--address", cluster.address]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    try:
        cluster.add_node(num_cpus=64, include_dashboard=False, temp_dir=folder)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray sets its own
        began_s = time.monotonic()
        fleet("up", "--no-wait", "--simulate", SPEC, "--time-scale", str(time_scale), "--replicas", str(workers),
              "--routers", str(routers), "--cpus", "0.1", "--router-cpus", "0.1", "--router-port", "0")  # fmt: skip
        up: list[Any] = []
        while len(up) < workers + routers and time.monotonic() - began_s < seconds:
            time.sleep(15)  # a look costs seconds of CPU
            members = json.loads(fleet("status", "--json"))["members"]
            up = [member for member in members if member["phase"] == "up"]
        took_s = time.monotonic() - began_s
        engines = sum(member["kind"] == "engine" for member in up)
        click.echo(f"{engines} of {workers} workers up after {took_s:.0f} s, load {os.getloadavg()[0]:.1f}")
        fronts = [member["url"] for member in up if member["kind"] == "router"]
        figures: dict[str, Any] = {"workers_up": engines, "seconds_to_up": took_s, "load": os.getloadavg()[0]}
        rows = measure(figures, engines, fronts, talks, [s["url"] for s in up if s["kind"] == "engine"])
        columns = {"processes": ("count", "{}"), "MB": ("mb", "{:.0f}"), "MB a worker": ("mb_a_worker", "{:.1f}"),
                   "cores, idle": ("idle", "{:.3f}"), "cores, asked": ("asked", "{:.3f}")}  # fmt: skip
        click.echo(markdown(rows, columns))
        click.echo(json.dumps(figures["traffic"]))
        if out is not None:
            write_json(out, figures)
    finally:
        try:
            fleet("down", "--now", "--timeout", "60")
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)  # who has just been ended may still write there


def measure(
    figures: dict[str, Any], engines: int, routers: list[str], talks: int, urls: list[str]
) -> dict[str, dict[str, Any]]:
    pids = kinds()
    memory = memory_mb(pids)
    before = cpu_s(pids)
    time.sleep(10)
    idle = {kind: (seconds - before[kind]) / 10 for kind, seconds in cpu_s(pids).items()}
    end, counts = threading.Event(), defaultdict[str, int](int)
    threads = [threading.Thread(target=talk, args=(routers, i, end, counts), daemon=True) for i in range(talks)]
    before, began_s = cpu_s(pids), time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(20)
    end.set()
    for thread in threads:
        thread.join(130)
    took_s = time.monotonic() - began_s
    asked = {kind: (seconds - before[kind]) / took_s for kind, seconds in cpu_s(pids).items()}
    late = steps = 0.0
    for url in urls:
        page = str(call(f"{url}/metrics")[1])
        for line in page.splitlines():
            late += float(line.split()[1]) if line.startswith("engine:simulated_late_seconds_total ") else 0.0
            steps += float(line.split()[1]) if line.startswith("engine:simulated_step_seconds_total ") else 0.0
    figures["traffic"] = {"seconds": took_s, **counts, "late_s": late, "step_s": steps}
    counted = list(pids.values())
    figures["kinds"] = {
        kind: {"count": counted.count(kind), "mb": memory[kind], "mb_a_worker": memory[kind] / engines,
               "idle": idle.get(kind, 0.0), "asked": asked.get(kind, 0.0)}
        for kind in sorted(set(counted))
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = figures["kinds"]
    return rows


if __name__ == "__main__":
    main()
