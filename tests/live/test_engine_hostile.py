"""One `engine serve` is asked for everything that it must refuse, beside a victim whose tokens may not change.

Every field of every body with absurd values, values of the wrong type and values at a boundary; token ids outside of
the vocabulary; bodies that are no JSON, too deep, badly compressed; templates; clients that leave in the middle or
read slowly. Meanwhile the victim streams the same greedy answer again and again, and /health is asked. Nothing may be
answered by a 5xx or not at all, and at the end the engine serves as before.

    pytest -m slow -s tests/live/test_engine_hostile.py       # all requests, and how long the victim waited
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.fault_run import FaultRun
from harness.figures import percentile
from harness.load import Client, post_request
from harness.programs import request_json, serve_engine
from hostile_engine_cases import Case, all_cases

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]

ANSWER_S_MAX = 180.0
"""A request that is not answered wholly by then hangs."""
CLIENTS = 16
"""Requests at one time."""
VICTIM = post_request("/v1/completions", {"prompt": [17, 29, 41, 5], "max_tokens": 48, "temperature": 0,
                                          "ignore_eos": True, "stream": True, "return_token_ids": True})  # fmt: skip


class Siege(FaultRun):
    """The attack on one engine, and what came of it."""

    def __init__(self) -> None:
        super().__init__("hostile-engine")
        flags = ("--port", "0", "--max-model-len", "2048", "--check-invariants")
        engine = serve_engine(self.folder / "engine.log", *flags)
        self._url = self.watch_program(self.exit_stack.enter_context(engine)).await_line()
        self._client = Client(self._url, timeout_s=ANSWER_S_MAX)
        self._room = asyncio.Semaphore(CLIENTS)
        self._over = False
        self.waits_ms: dict[str, list[float]] = {"victim": [], "/health": []}
        """The longest wait for a token of each of the victim's answers; the time of each answer of /health."""

    async def run(self, cases: list[Case]) -> None:
        async with self._client:
            self._expected = await self._victim()
            watchers = [asyncio.create_task(self._suffer()), asyncio.create_task(self._probe())]
            await asyncio.gather(*map(self._attack, cases))
            self._over = True
            await asyncio.gather(*watchers)
            await self._as_before()
        self.check_logs("all of it")

    async def _victim(self) -> list[int]:
        """Its tokens."""
        answer = await self._client.send(VICTIM)
        if answer.error or answer.status != 200:
            self.report_fault("victim", f"got {answer.status} {answer.error}: {answer.body[:200]!r}")
            return []
        events = [(at_s, json.loads(data)["choices"]) for at_s, data in answer.json_events()]
        times = [answer.start_s, *(at_s for at_s, choices in events if choices)]
        self.waits_ms["victim"].append(1e3 * max(end_s - begin_s for begin_s, end_s in itertools.pairwise(times)))
        return [token for _, choices in events for choice in choices for token in choice["token_ids"]]

    async def _suffer(self) -> None:
        while not self._over:
            if (tokens := await self._victim()) != self._expected:
                self.report_fault("victim", f"its tokens changed: {tokens} instead of {self._expected}")
                return

    async def _probe(self) -> None:
        while not self._over:
            answer = await self._client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            if answer.status != 200:
                self.report_fault("/health", f"said {answer.status} {answer.error} in the middle")
            self.waits_ms["/health"].append(1e3 * (answer.end_s - answer.start_s))
            await asyncio.sleep(0.02)

    async def _attack(self, case: Case) -> None:
        async with self._room:
            answer = await self._client.send(case.request, new_connection=True, timeout_s=case.disconnect_s)
        has_left = case.disconnect_s is not None and answer.error == "timeout"
        outcome = "left" if has_left else answer.error or str(answer.status)
        if not has_left and (answer.error or answer.status >= 500):
            self.report_fault(f"{case.group}, {case.name}", outcome)
        elif case.is_valid and answer.status != 200:
            self.report_fault(
                f"{case.group}, {case.name}", f"{outcome} {answer.body[:300]!r}, and nothing is wrong with it"
            )

    async def _as_before(self) -> None:
        """Nothing is left of the attack, and who asks is answered."""
        for _ in range(100):
            page = str((await asyncio.to_thread(request_json, f"{self._url}/metrics"))[1]).splitlines()
            gauge_lines = [
                line for line in page if line.startswith(("vllm:num_requests_run", "vllm:num_requests_wait"))
            ]
            if gauge_lines and all(float(line.rsplit(" ", 1)[1]) == 0 for line in gauge_lines):
                break
            await asyncio.sleep(0.1)
        else:
            self.report_fault("the end", f"requests are left after the attack: {gauge_lines}")
        if await self._victim() != self._expected:
            self.report_fault("the end", "after the attack the victim's tokens are others")


def draw_cases(count: int | None, seed: int) -> list[Case]:
    """Draw cases: sound ones first, then the same number of each group."""
    cases = all_cases()
    random.Random(seed).shuffle(cases)
    kind_counts = Counter[str]()
    cases.sort(key=lambda case: not case.is_valid)
    turns = [kind_counts.update([case.group]) or kind_counts[case.group] for case in cases]
    cases = [case for _, case in sorted(zip(turns, cases), key=lambda pair: pair[0])]
    return cases[:count]


def run_siege(cases: list[Case]) -> Siege:
    """The end of a siege by these cases."""
    siege = Siege()
    try:
        asyncio.run(siege.run(cases))
    finally:
        siege.close()
    return siege


def test_no_request_ends_service_or_changes_a_neighbour() -> None:
    """Some of the requests, other ones each day."""
    seed = int(time.time() // 86400)
    cases = draw_cases(500, seed)
    siege = run_siege(cases)
    assert siege.faults == [], f"seed {seed}"
    assert len(cases) == 500
    assert len(siege.waits_ms["victim"]) >= 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nor_does_any_of_all_requests() -> None:
    siege = run_siege(draw_cases(None, 0))
    for name, waits in siege.waits_ms.items():
        print(f"{name}: {len(waits)} answers, p50 {percentile(waits, 0.5):.0f} ms, longest {max(waits):.0f} ms")
    assert siege.faults == []
