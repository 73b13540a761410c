"""Routing policies: functions that get the candidates, or their prices, and return the index of the chosen one.

The default policy, `kv`, takes the lowest price of router/decide/price.py. Pure: random numbers come from the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from options import ConfigError
from router.decide.messages import RouteRequest, Terms
from router.decide.target import Target

log = logging.getLogger("router")

STICKY_TOKENS: Final = 256
"""First tokens of a prompt by which `sticky` places a request without a session."""
TIE_S: Final = 1e-6
"""Largest difference between two prices, in seconds, that counts as a tie."""


def choose_cheapest(costs: Sequence[float], rotation: int) -> int:
    """Return the index of the lowest cost; `rotation` counts up from choice to choice and decides between ties."""
    highest_tied_cost = min(costs) + TIE_S
    tied_indices = [i for i, cost in enumerate(costs) if cost <= highest_tied_cost]
    return tied_indices[rotation % len(tied_indices)]


class CustomPolicy:
    """Chooses workers by an operator's own function, `choose(request, terms)`, which returns an index into `terms`.

    `terms` has the price of each candidate. If the function raises or returns no index, the failure is counted, the
    first one is logged, and the router chooses by the price.
    """

    def __init__(self, name: str) -> None:
        """Import the function that `name` has as MODULE:NAME. Raises ConfigError."""
        self._function = _import_policy(name)
        self.failures = 0

    def choose(self, request: RouteRequest, terms: list[Terms]) -> int | None:
        """Return the index of the candidate that the operator's function chose; None if it failed."""
        try:
            index = self._function(request, terms)
            if type(index) is not int or not 0 <= index < len(terms):
                raise ValueError(f"got {index!r}, expected an index from 0 to {len(terms) - 1}")
        except Exception:
            self.failures += 1
            if self.failures == 1:
                log.exception("the policy function failed; the price decides, here and whenever it fails again")
            return None
        return index


def _import_policy(name: str) -> Callable[[RouteRequest, list[Terms]], object]:
    """Import a policy function by its MODULE:NAME. Raises ConfigError if it is not found or takes other arguments."""
    module_name, colon, function_name = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), function_name) if colon else None
    except ModuleNotFoundError as error:
        message = f"--policy-function: got {name!r}: {error}; PYTHONPATH must name the folder of its file"
        raise ConfigError(message) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--policy-function: got {name!r}: {error}") from error
    if not callable(policy):
        raise ConfigError(f"--policy-function: got {name!r}, expected MODULE:NAME of a function")
    try:
        with contextlib.suppress(ValueError):  # a function written in C may have no signature
            inspect.signature(policy).bind(None, [])
    except TypeError as error:
        message = f"--policy-function: got {name!r}, expected a function of a request and its candidates: {error}"
        raise ConfigError(message) from error
    function: Callable[[RouteRequest, list[Terms]], object] = policy
    return function


def choose_without_price(
    policy: str, request: RouteRequest, targets: Sequence[Target], rotation: int, rng: random.Random
) -> int:
    """Return the index of the target that a policy other than `kv` takes; `rotation` counts up from choice to choice.

    The policy `sticky` takes the least busy target for a request that has neither a session nor a known prompt.
    """
    if policy == "round_robin":
        return rotation % len(targets)
    if policy == "random":
        return rng.randrange(len(targets))
    sticky_key = make_sticky_key(request.session, request.token_ids) if policy == "sticky" else None
    if sticky_key is not None:
        return choose_sticky(targets, sticky_key)
    return choose_least_requests(targets, rotation)


def choose_least_requests(targets: Sequence[Target], rotation: int) -> int:
    """Return the index of the target with the fewest requests in flight, other routers' included; ties in turn."""
    request_counts = [target.load.request_count + target.peer_load.request_count for target in targets]
    return choose_cheapest(request_counts, rotation)


def make_sticky_key(session: str | None, token_ids: Sequence[int] | None) -> str | None:
    """Return the text that `sticky` hashes: the session, else the first tokens of the prompt, else None."""
    if session is not None:
        return session
    if token_ids is None:
        return None
    return ",".join(map(str, token_ids[:STICKY_TOKENS]))


def choose_sticky(targets: Sequence[Target], key: str) -> int:
    """Return the index of the target that a key belongs to, by rendezvous hashing (Thaler and Ravishankar, 1998).

    Every router finds the same target. When a target comes or goes, only its own share of the keys moves.
    """

    def compute_weight(index: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{targets[index].name}\0{key}".encode())

    return max(range(len(targets)), key=compute_weight)
