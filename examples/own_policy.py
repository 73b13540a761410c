"""A policy of your own: the worker with the longest cached prefix, as long as its queue is short.

PYTHONPATH=examples router run http://127.0.0.1:8001 http://127.0.0.1:8002 --policy-function own_policy:choose

The function gets the request and the terms of every candidate (docs/reference/price.md has the symbols) and returns an
index. If it raises, the price of docs/reference/price.md decides.
"""

from collections.abc import Sequence

from router.decide.messages import RouteRequest, Terms

QUEUE_S_MAX = 2.0


def choose(request: RouteRequest, candidates: Sequence[Terms]) -> int:
    """The index of the candidate that gets the request."""
    free = [i for i, terms in enumerate(candidates) if terms.slowdown * terms.queue_s <= QUEUE_S_MAX]
    if free:
        return max(free, key=lambda i: (candidates[i].cached_tokens, -candidates[i].cost))
    return min(range(len(candidates)), key=lambda i: candidates[i].slowdown * candidates[i].queue_s)
