"""Command lines, resources and addresses of a fleet's programs. No I/O.

The one place that knows how `engine serve`, `vllm serve` and `router run` are called.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import msgspec

from options.addresses import bracket_host

NAMESPACE = "blockcast"
"""Ray namespace of all fleets."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"


class SpecError(Exception):
    """A fleet cannot be made as requested. The message is for the user."""


class MemberKind(str, Enum):
    ENGINE = "engine"
    ROUTER = "router"


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a fleet of workers and routers: their command lines, resources, addresses and timeouts."""

    name: str
    engine_command: tuple[str, ...]
    """Command line of a worker, without its addresses."""
    router_flags: tuple[str, ...] = ()
    """Flags of `router run`, besides its addresses."""
    env: dict[str, str] = {}
    worker_cpus: float = 1.0
    """CPUs that Ray reserves for a worker. Ray only counts CPUs and does not pin processes to them."""
    worker_gpus: int = 0
    """GPUs of a worker, all on one node, because tensor-parallel ranks must be on one node."""
    router_cpus: float = 1.0
    router_host: str = ""
    """Host that routers listen on; if empty, the address of their node."""
    router_port: int = 8080
    """Port of router 0; each further router takes the next port. With 0 the system chooses all ports."""
    start_timeout_s: float = 1800.0
    """Seconds from its start in which a program must serve; else it is killed."""
    drain_timeout_s: float = 300.0
    """Longest time that the requests of a stopping worker may take."""
    stop_timeout_s: float = 60.0
    """Seconds from the stop signal until a program is killed."""
    hang_timeout_s: float = 120.0
    """Seconds without an answer after which a program is killed. With 0 it is never killed."""
    admin_key: str = ""
    """Key of the routers' admin routes."""

    @property
    def is_vllm(self) -> bool:
        """Whether the engine command is `vllm serve`, whose events must be switched on by a flag."""
        return self.engine_command[1:2] == ("serve",)


WorkerSettings = dict[str, str | int]
"""Settings of a worker, as `POST /workers` or the command line of a router takes them."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One program to start, with its addresses."""

    command: list[str]
    url: str
    health_url: str
    """URL that answers 200 once the program serves."""
    worker_settings: WorkerSettings = {}
    """Settings by which routers know the worker."""
    admin_url: str = ""
    peer_address: str = ""
    """Address at which a router publishes its load."""


PortAllocator = Callable[[int], int]
"""Function that takes a number of ports, and returns the first of that many consecutive free ports on this node."""


def plan_router(
    spec: FleetSpec, slot: int, host: str, allocate_ports: PortAllocator, workers: Sequence[Mapping[str, str | int]]
) -> Launch:
    """Return the launch of a router on the node with the address `host`.

    `slot`: number of the router. `workers`: settings of the workers that it knows from its start.

    A router listens at three addresses: for clients, with a `router_port` at the same port after each restart; for
    admin calls, on its own node only; and for other routers, which read its load.
    """
    port = spec.router_port + slot if spec.router_port else allocate_ports(1)
    admin_address = f"127.0.0.1:{allocate_ports(1)}"
    peer_address = f"tcp://{bracket_host(host)}:{allocate_ports(1)}"
    listen_host = spec.router_host or host
    # A router that listens on the loopback interface alone is not reached at its node's address.
    reachable_host = listen_host if listen_host == "127.0.0.1" else host
    has_tls = any(flag.partition("=")[0] == "--tls-cert" for flag in spec.router_flags)
    scheme = "https" if has_tls else "http"
    url = f"{scheme}://{bracket_host(reachable_host)}:{port}"

    worker_texts = [",".join(f"{key}={value}" for key, value in worker.items()) for worker in workers]
    address_flags = ["--host", listen_host, "--port", str(port), "--admin", admin_address, "--peer-bind", peer_address]
    return Launch(
        command=[sys.executable, "-m", "router", "run", *worker_texts, *address_flags, *spec.router_flags],
        url=url,
        health_url=f"{url}/livez",
        admin_url=f"{scheme}://{admin_address}",
        peer_address=peer_address,
    )


def plan_worker(spec: FleetSpec, host: str, allocate_ports: PortAllocator) -> Launch:
    """Return the launch of a worker. vLLM is told where to publish its cache events; our engine decides itself."""
    url_host = bracket_host(host)
    port = allocate_ports(1)
    url = f"http://{url_host}:{port}"
    worker: WorkerSettings = {"url": url, "id": f"{url_host}:{port}", "send_key": 1}
    command = [*spec.engine_command, "--host", host, "--port", str(port)]
    if spec.is_vllm:
        rank_count = parse_rank_count(spec.engine_command)
        first_events_port = allocate_ports(rank_count)
        first_replay_port = allocate_ports(rank_count)
        events_config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events_config |= {"endpoint": f"tcp://*:{first_events_port}", "replay_endpoint": f"tcp://*:{first_replay_port}"}
        command += ["--kv-events-config", json.dumps(events_config)]
        for key, first_port in (("events", first_events_port), ("replay", first_replay_port)):
            worker[key] = ";".join(f"tcp://{url_host}:{first_port + rank}" for rank in range(rank_count))
    return Launch(command=command, url=url, health_url=f"{url}/health", worker_settings=worker)


def parse_rank_count(command: tuple[str, ...]) -> int:
    """Return the data-parallel ranks of a vLLM command line: each publishes at a port of its own. Raises SpecError."""
    for word_index, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if flag in ("--data-parallel-size", "-dp"):
            next_word = command[word_index + 1] if word_index + 1 < len(command) else ""
            text = value if equals else next_word
            is_number = text.isascii() and text.isdigit()
            if not is_number or not 1 <= int(text) <= 1024:
                raise SpecError(f"{flag}: got {text!r}, expected a number of ranks")
            return int(text)
    return 1


FLAGS_SET_BY_FLEET = ("--host", "--port", "--kv-events-config", "--admin", "--peer-bind", "--admin-api-key")
"""Flags that the fleet sets itself."""


def build_engine_command(engine_name: str, model: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of a worker. Raises SpecError.

    `engine_name` is ours, vllm, or the path of a `vllm`. `model`: empty for our engine's built-in model.
    """
    check_flags("the worker's flags", flags)
    if engine_name == "ours":
        return (sys.executable, "-m", "engine", "serve", *([model] if model else []), *flags)
    if not model:
        raise SpecError("--engine vllm: MODEL is missing")
    words = (engine_name, "serve", model, *flags)
    parse_rank_count(words)  # for its errors
    return words


def split_flags(option_name: str, text: str) -> tuple[str, ...]:
    """Split a text into flags as a shell would. Raises SpecError."""
    try:
        flags = tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(f"{option_name}: got {text!r}: {error}") from None
    check_flags(option_name, flags)
    return flags


def check_flags(option_name: str, flags: tuple[str, ...]) -> None:
    """Raise SpecError for a flag that the fleet sets itself."""
    for flag in flags:
        if flag.partition("=")[0] in FLAGS_SET_BY_FLEET:
            raise SpecError(f"{option_name}: {flag} is the fleet's to give")


def parse_env(assignments: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Parse `NAME=VALUE`, or `NAME` with its value in `environment`. Raises SpecError."""
    env: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        has_value = bool(equals) or name in environment
        if not name or not has_value:
            raise SpecError(f"--env: got {assignment!r}, expected NAME=VALUE, or a NAME that is set here")
        env[name] = value if equals else environment[name]
    return env
