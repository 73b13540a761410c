"""What ended leaves nothing behind: however many requests came, all that the core holds is as large as before.

A table that grows by an entry a request is a leak that no test of one request sees; so everything that can be reached
from the core is counted, whatever it is called.
"""

from __future__ import annotations

import gc
import types
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from core_by_hand import make_core, request

from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.messages import FailureKind, Forward, ReportedUsage
from router.decide.workers import CacheView

CONTAINERS = (dict, list, set, deque, OrderedDict, Counter, defaultdict, tuple)
WARM, MORE = 1000, 3000


def count_entries(root: object) -> int:
    """Of all containers that can be reached."""
    visited_ids, waiting, count = {id(root)}, [root], 0
    while waiting:
        for referent in gc.get_referents(waiting.pop()):
            if id(referent) in visited_ids or isinstance(referent, (type, types.ModuleType, types.FunctionType)):
                continue
            visited_ids.add(id(referent))
            waiting.append(referent)
            if isinstance(referent, CONTAINERS):
                count += len(referent)
    return count


def run_requests(core: RouterCore, first: int, count: int) -> None:
    """Ten prompts again and again; requests end, are given up, fail and are refused by turns."""
    for i in range(first, first + count):
        now, name, prompt = float(i), f"r{i}", [i % 10] * 300
        route_request = request(
            name, prompt, output_tokens_max=4, is_streaming=True, session=f"s{i % 7}", tenant=f"t{i % 3}"
        )
        if not isinstance(core.route(route_request, now), Forward):
            raise AssertionError(f"{name} was not sent")
        if i % 11 == 0:
            core.abort_request(name, now + 0.1)
        elif i % 13 == 0:
            core.fail_attempt(name, FailureKind.RESET, now + 0.1)
            core.abort_request(name, now + 0.2)
        else:
            core.record_first_token(name, now + 0.1)
            core.record_progress(name, 3, now + 0.2)
            usage = ReportedUsage(300, 3, 16 * (i % 2)) if i % 3 else None
            core.finish_request(name, usage, now + 0.3, is_error=i % 17 == 0)
        core.tick(now + 0.9)


@pytest.mark.parametrize("capacity_tokens", [None, 4_000, 10_000_000])
@pytest.mark.parametrize("view", list(CacheView))
def test_requests_that_ended_leave_nothing(view: CacheView, capacity_tokens: int | None) -> None:
    core, _ = make_core("abc", CoreConfig(pin_grace_s=0.25), cache_view=view, cache_tokens=capacity_tokens)
    run_requests(core, 0, WARM)
    before = count_entries(core)
    run_requests(core, WARM, MORE)
    assert count_entries(core) <= before + MORE // 2  # what is sorted out now and then is more or less full
