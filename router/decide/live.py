"""A request that the core knows: held or in flight. Values only; router/decide/core.py changes them."""

from __future__ import annotations

from typing import TypedDict

from router.decide.choose import Chosen
from router.decide.messages import Decision, RouteRequest

_NONE_TRIED: frozenset[str] = frozenset()


class Live:
    """A request that is held or in flight."""

    __slots__ = ("arrived_s", "attempt", "decision", "explain", "first_token_seen", "request", "tried")

    def __init__(self, request: RouteRequest, arrived_s: float, *, explain: bool) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.attempt = 0
        self.tried: frozenset[str] = _NONE_TRIED
        self.decision: Decision | None = None
        """Set while in flight."""
        self.first_token_seen = False
        self.explain = explain
        """Whether its decisions carry every candidate's terms."""


class PlaceInLine(TypedDict):
    """What decides a held request's turn."""

    priority: int
    work_s: float
    arrived_s: float


def place_in_line(live: Live, choice: Chosen) -> PlaceInLine:
    """Where the request stands among the held ones, were it to go to the choice's winner."""
    target = choice.cost.targets[choice.winner]
    prefill_s = target.prefill_seconds(live.request.prompt_tokens, choice.cost.cached[choice.winner])
    return {"priority": live.request.priority, "work_s": target.slow * prefill_s, "arrived_s": live.arrived_s}
