"""Policies: functions that get the candidates, or their prices, and return the index of one. Pure: chance is given.

`kv`, the default, takes the lowest price of router/decide/price.py.
"""

from __future__ import annotations

import importlib
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
"""Without a session key, `sticky` goes by this many first tokens of the prompt."""
TIE_S: Final = 1e-6
"""Prices that are at most so many seconds apart are a tie, and ties rotate."""


def choose_cheapest(terms: Sequence[Terms], rotation: int) -> int:
    """The lowest price; of several within `TIE_S`, the `rotation`-th in turn."""
    highest_tied_cost = min(candidate.cost for candidate in terms) + TIE_S
    tied_candidates = [i for i, candidate in enumerate(terms) if candidate.cost <= highest_tied_cost]
    return tied_candidates[rotation % len(tied_candidates)]


class CustomPolicy:
    """An operator's own function: `choose(request, terms) -> index into terms`, one `Terms` a candidate.

    Where it raises or returns no index, nobody loses an answer: it is counted, logged the first time, and the price
    decides. Raises ConfigError where the function cannot be found.
    """

    def __init__(self, name: str) -> None:
        module, colon, function = name.partition(":")
        try:
            policy = getattr(importlib.import_module(module), function) if colon else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--policy-function: got {name!r}: {error}") from error
        if not callable(policy):
            raise ConfigError(f"--policy-function: got {name!r}, expected MODULE:NAME of a function")
        self._function: Callable[[RouteRequest, list[Terms]], object] = policy
        self.failures = 0

    def choose(self, request: RouteRequest, terms: list[Terms]) -> int | None:
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


def choose_round_robin(targets: Sequence[Target], rotation: int) -> int:
    """Each in turn."""
    return rotation % len(targets)


def choose_least_requests(targets: Sequence[Target], rotation: int) -> int:
    """Fewest requests in flight, other routers' included; ties in turn."""
    request_counts = [
        target.load.request_count + target.peer_load.prefill_requests + target.peer_load.decode_requests
        for target in targets
    ]
    fewest = min(request_counts)
    tied_candidates = [i for i, count in enumerate(request_counts) if count == fewest]
    return tied_candidates[rotation % len(tied_candidates)]


def choose_random(targets: Sequence[Target], rng: random.Random) -> int:
    """Uniformly."""
    return rng.randrange(len(targets))


def make_sticky_key(session: str | None, token_ids: Sequence[int] | None) -> str | None:
    """What `sticky` hashes: the session, else how the prompt begins; None where neither is known."""
    if session is not None:
        return session
    if token_ids is None:
        return None
    return ",".join(map(str, token_ids[:STICKY_TOKENS]))


def choose_sticky(targets: Sequence[Target], key: str) -> int:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): the same on every router, and a worker that comes or goes
    moves only its own share of keys."""
    return max(range(len(targets)), key=lambda i: xxhash.xxh3_64_intdigest(f"{targets[i].name}\0{key}".encode()))
