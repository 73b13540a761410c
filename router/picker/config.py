"""Settings of the endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag

Port = Annotated[int, Meta(ge=0, le=65535)]
Objective = Annotated[str, Meta(pattern=r"^[^=\s]+=-?\d{1,6}$", title="NAME=N", examples=["batch=10"])]


# fmt: off
@dataclass(frozen=True, slots=True)
class PickerConfig:
    """Settings of `router epp` besides those of `router run`: ports, TLS, fallbacks and priorities."""

    health_port: Annotated[Port, Flag("--health-port"),
        "Port of gRPC health checks; 0 lets the system choose."] = 9003
    metrics_port: Annotated[Port, Flag("--metrics-port"),
        "Port of /metrics and the admin routes; 0 lets the system choose."] = 9090
    self_signed: Annotated[bool, Flag(),
        "Serve gRPC with TLS and a certificate made at the start.",
        "Gateways of the Inference Extension expect this unless they are configured otherwise."] = False
    fallbacks: Annotated[int, Meta(ge=0, le=16, title="N"), Flag("--fallbacks"),
        "Number of other workers that Envoy is told to try after the chosen one."] = 2
    objectives: Annotated[tuple[Objective, ...], Flag("--objective", metavar="NAME=N"),
        "Priority of requests with x-gateway-inference-objective: NAME."] = ()

    @property
    def priorities(self) -> dict[str, int]:
        """Priority of requests by the name of their objective, from the texts NAME=N."""
        pairs = (objective.rpartition("=") for objective in self.objectives)
        return {name: int(priority) for name, _, priority in pairs}
