"""A short life of a fleet on one raylet: up, `kill -9`, a program that hangs beside one that is busy, a router that
comes back, scale, down. `scripts/fleet_faults` is the long one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import request_json, wait_until

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed: no fleet on Ray is tried")
pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parents[2]
SLOW = json.dumps({"prefill_s_per_token": 2e-4, "step_s": 1.0, "kv_tokens": 40_000})
"""Steps that are as long as a quarter of the patience."""
HANG_S = 4


class Short:
    """`fleet` on a cluster of its own."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.started_pids: set[int] = set()

    def __call__(self, *words: str) -> str:
        command = [sys.executable, "-m", "fleet", words[0], "--address", self.cluster.address, *words[1:]]
        process = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
        assert process.returncode == 0, f"{words}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    def status(self) -> dict[str, Any]:
        directory = ray.get_actor("fleet-directory", namespace="blockcast")
        fleet_status: dict[str, Any] = ray.get(directory.status.remote(), timeout=60)
        return fleet_status

    def wait_until(self, is_reached: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        assert wait_until(lambda: is_reached(self.status()), 120, 0.2), json.dumps(self.status(), indent=1)
        return self.status()

    def pids(self, kind: str) -> dict[str, int]:
        """Member -> its program. As the guard's first child."""
        pids_by_name = {}
        for member in self.status()["members"]:
            if member["kind"] == kind and member["phase"] == "up":
                port = f"--port\0{member['url'].rpartition(':')[2]}\0".encode()
                pids_by_name[member["name"]] = min(
                    pid for pid, words in processes() if port in words and b"guard" not in words
                )
        self.started_pids.update(pids_by_name.values())
        return pids_by_name


def processes() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "cmdline").read_bytes()
        except OSError:
            continue


@pytest.fixture(scope="module")
def fleet() -> Iterator[Short]:
    from ray.cluster_utils import Cluster

    settings = {"RAY_raylet_start_wait_time_s": "120", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONPATH": str(ROOT)}  # fmt: skip
    folder, cluster = mkdtemp(prefix="bcray"), Cluster()  # pytest's own folder is too long for Ray's sockets
    settings["RAY_TMPDIR"] = folder  # in it is a folder `ray` with the cluster's address, which Ray does not make
    (Path(folder) / "ray").mkdir()
    before = {key: os.environ.get(key) for key in settings}
    os.environ |= settings
    handler = signal.getsignal(signal.SIGTERM)
    try:
        cluster.add_node(num_cpus=4, include_dashboard=False, temp_dir=folder)
        ray.init(address=cluster.address, namespace="blockcast", log_to_driver=False, logging_level="error")
        yield Short(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)
        shutil.rmtree(folder, ignore_errors=True)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def chat(url: str, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    return request_json(f"{url}/v1/chat/completions", body, timeout_s=60)[0]


def test_a_life(fleet: Short) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    extra_flags = ("--cpus", "0.5", "--router-cpus", "0.5", "--router-host", "127.0.0.1", "--router-port", str(port),
            "--hang-timeout", str(HANG_S), "--replicas", "2", "--timeout", "180")  # fmt: skip
    router = fleet("up", "--simulate", SLOW, *extra_flags).strip()
    assert router == f"http://127.0.0.1:{port}"
    engines, (front,) = fleet.pids("engine"), fleet.pids("router").values()
    end = threading.Event()

    def keep_busy() -> None:
        while not end.is_set():
            chat(router, "is it so?")

    threads = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        dead, hung = engines
        os.kill(engines[hung], signal.SIGSTOP)
        os.kill(front, signal.SIGKILL)
        answer = wait_until(lambda: chat(router, "is anybody there?"), 120, 0.01)
        assert answer == 200, "a router that comes back knows its workers from its first answer on"
        os.kill(engines[dead], signal.SIGKILL)

        def are_back(status: dict[str, Any]) -> bool:
            has_seen_death = any(text.startswith(f"{dead}: gone") for _, text in status["events"])
            return status["hung"].get("engine") == 1 and status["settled"] and has_seen_death

        status = fleet.wait_until(are_back)
        assert any(f"{hung}: does not answer" in text for _, text in status["events"])
        assert not Path(f"/proc/{engines[hung]}").exists()
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert fleet.wait_until(lambda status: status["settled"])["hung"] == {"engine": 1}, "who is busy does not hang"
    fleet("scale", "1", "--timeout", "120")
    assert len(fleet.pids("engine") | fleet.pids("router")) == 2
    fleet("down", "--timeout", "120")
    assert not [pid for pid in fleet.started_pids if Path(f"/proc/{pid}").exists()], "a program outlives its fleet"


def test_a_router_that_is_wanted_again_does_not_wait_for_its_old_node(fleet: Short) -> None:
    fleet.cluster.add_node(num_cpus=4)
    flags = ("--router-cpus", "4", "--router-host", "127.0.0.1", "--router-port", "0", "--replicas", "0")
    fleet("up", "--simulate", SLOW, *flags, "--routers", "2", "--timeout", "120")
    (old_node,) = {member["node"] for member in fleet.status()["members"] if member["slot"] == 1}
    fleet("scale", "--routers", "1", "--timeout", "60")

    @ray.remote(num_cpus=4)
    class Occupant:
        def begin(self) -> None:
            """Answer once it has the node's CPUs."""

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(old_node, soft=False)
    occupant = Occupant.options(scheduling_strategy=strategy).remote()
    ray.get(occupant.begin.remote(), timeout=60)
    fleet.cluster.add_node(num_cpus=4)
    try:
        fleet("scale", "--routers", "2", "--timeout", "60")
        assert len({member["node"] for member in fleet.status()["members"]} - {old_node}) == 2
    finally:
        fleet("down", "--timeout", "60")
        ray.kill(occupant)


def test_a_router_that_lost_its_place_goes_to_another_node(fleet: Short) -> None:
    flags = ("--router-cpus", "4", "--router-host", "127.0.0.1", "--router-port", "0", "--replicas", "0")
    fleet("up", "--simulate", SLOW, *flags, "--timeout", "120")
    (router,) = fleet.status()["members"]

    @ray.remote(num_cpus=4)
    class Occupant:
        def begin(self) -> None:
            """Answer once it has the node's CPUs."""

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(router["node"], soft=False)
    occupant = Occupant.options(scheduling_strategy=strategy).remote()
    begun = occupant.begin.remote()  # waits for the router's CPUs
    try:
        ray.kill(ray.get_actor(router["name"], namespace="blockcast"))
        ray.get(begun, timeout=60)
        status = fleet.wait_until(lambda status: any(member["wait"] for member in status["members"]))
        assert status["members"][0]["wait"] == f"waits for 4 CPUs on node {router['node'][:8]}"
        status = fleet.wait_until(lambda status: status["settled"])
        assert status["members"][0]["node"] != router["node"]
        assert any("its old node has no room" in text for _, text in status["events"])
    finally:
        fleet("down", "--timeout", "60")
        ray.kill(occupant)
