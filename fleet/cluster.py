"""Calls to Ray that concern a whole cluster or a fleet as a whole."""

from __future__ import annotations

from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from fleet.plan import MemberTarget, PhaseTimeouts
from fleet.spec import NAMESPACE, FleetSpec
from fleet.state import DirectoryState


def create_directory(
    directory_class: type,
    spec: FleetSpec,
    engine_target: MemberTarget,
    router_target: MemberTarget,
    timeouts: PhaseTimeouts,
) -> Any:
    """Start the directory of a new fleet: the actor that starts, watches and stops the fleet's programs.

    Ray restarts it whenever it dies, and it outlives the process that calls this. Raises ValueError if the cluster has
    a fleet of this name.
    """
    initial_state = DirectoryState(
        spec=spec,
        engine_target=engine_target,
        router_target=router_target,
        timeouts=timeouts,
    )
    actor_class = ray.remote(directory_class).options(
        name=f"{spec.name}-directory", namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=-1, max_task_retries=-1, max_concurrency=16,
    )  # fmt: skip
    return actor_class.remote(spec.name, msgspec.json.encode(initial_state))


def delete_fleet(name: str, directory: Any) -> None:
    """Kill the directory and delete its stored state, once the last member has gone."""
    ray.kill(directory)
    internal_kv._internal_kv_del(f"fleet/{name}".encode(), namespace=NAMESPACE)


def has_gpus() -> bool:
    """Return whether the cluster has GPUs."""
    return bool(ray.cluster_resources().get("GPU"))


def compute_node_capacities(resources: dict[str, float]) -> dict[str, float]:
    """Return for each live node how many members with these resources would fit if it were empty."""
    return {
        node["NodeID"]: min(
            node["Resources"].get(resource_name, 0.0) / amount if amount else 1e9
            for resource_name, amount in resources.items()
        )
        for node in ray.nodes()
        if node["Alive"]
    }
