"""What the endpoint picker can be told."""

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
    """Ports and priorities."""

    health_port: Annotated[Port, Flag("--health-port"),
        "Of gRPC health checks; 0 lets the system choose."] = 9003
    metrics_port: Annotated[Port, Flag("--metrics-port"),
        "Of /metrics and the admin routes; 0 lets the system choose."] = 9090
    self_signed: Annotated[bool, Flag(),
        "gRPC with TLS and a certificate made at the start, which gateways of the Inference Extension ask for unless "
        "told otherwise."] = False
    fallbacks: Annotated[int, Meta(ge=0, le=16, title="N"), Flag("--fallbacks"),
        "Other workers that Envoy is told to try where the chosen one does not answer."] = 2
    objectives: Annotated[tuple[Objective, ...], Flag("--objective", metavar="NAME=N"),
        "Priority of requests whose x-gateway-inference-objective is NAME; lower goes first. May be repeated."] = ()

    @property
    def priorities(self) -> dict[str, int]:
        """Objective -> priority."""
        pairs = [text.rpartition("=") for text in self.objectives]
        return {name: int(number) for name, _, number in pairs}
