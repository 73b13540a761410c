"""Histories of the core alone: stimuli in, instructions out, over the real index. Faster than whole traffic by far.

What a worker does to a request depends on the request's number and attempt, and on what that worker had cached."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from router.decide.core import RouterCore
from router.decide.messages import Enqueue, FailureKind, Forward, Refuse, ReportedUsage, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.worker_responses import read_loads
from router.index import make_index
from router.index.protocol import Scope

from .program import read_config
from .workers import BLOCK_TOKENS, BlockCache

REQUESTS = 300
INDEX_SEED = 7
TICK_S = 0.02
END_S = 2000.0
FAILURES_BEFORE = ("CONNECT", "RESET", "TIMEOUT", "OVERLOADED", "SERVER")


class _Worker:
    """A worker's cache, and the time at which its prefills end, of each rank."""

    def __init__(self, core: RouterCore, index: Any, spec: WorkerSpec, blocks: int, now: Callable[[], float]) -> None:
        self.spec = spec
        holders = core.add_worker(spec, now()).holders

        def publish(rank: int, events: list[dict[str, Any]]) -> None:
            index.ingest(holders[rank], msgspec.msgpack.encode([now(), events, rank]), now())

        self.caches = [BlockCache(blocks, partial(publish, rank)) for rank in range(spec.ranks)]
        self.free_s = [0.0] * spec.ranks


class CoreHistory:
    """One seed's history."""

    def __init__(self, seed: int, policy: str) -> None:
        self._rng = rng = random.Random(f"core {seed}")
        self._seed = seed
        self._now = 100.0
        self._index = make_index(INDEX_SEED)
        flags = ["--policy", policy]
        if rng.random() < 0.4:
            flags += ["--fair", "--set", f"queue.requests_max={rng.choice((5, 4096))}"]
            if rng.random() < 0.5:
                flags += ["--background-priority", "5"]
        if rng.random() < 0.3:
            flags += ["--max-in-flight", str(rng.choice((3, 12)))]
        if rng.random() < 0.3:
            flags.append("--session-affinity")
        if rng.random() < 0.3:
            flags += ["--set", "pin_grace_s=0"]
        config, _ = read_config([*flags, "--log-level", "error", "http://127.0.0.1:1"])
        self._core = RouterCore(self._index, config.core, seed=seed)
        self._lines: list[str] = []
        self._timer_count = 0
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._attempts: Counter[str] = Counter()
        self._requests: dict[str, RouteRequest] = {}
        """Requests that have not ended."""
        self._workers: dict[str, _Worker] = {}
        self._faults = rng.choice((0.0, 0.05, 0.2))
        self._conversations = [[rng.randrange(1000) for _ in range(rng.randint(20, 900))] for _ in range(24)]
        shared_ids = [rng.randrange(1000) for _ in range(400)]
        for conversation in self._conversations[::2]:
            conversation[:0] = shared_ids
        self._specs = [self._make_spec(number) for number in range(rng.randint(2, 8))]

    def _make_spec(self, number: int) -> WorkerSpec:
        rng = self._rng
        models = [ServedModel("m", "m", max_model_len=rng.choice((None, 100_000)))]
        if rng.random() < 0.5:
            models.append(ServedModel("m-lora", "m", lora="m-lora"))
        return WorkerSpec(
            f"w{number}",
            f"http://10.0.0.{number}",
            tuple(models),
            ranks=rng.choice((1, 1, 1, 2)),
            engine=rng.choice(("vllm", "blockcast")),
            cache_tokens=rng.choice((None, 60 * BLOCK_TOKENS, 600 * BLOCK_TOKENS)),
            max_num_seqs=rng.choice((None, 2, 8)),
            block_size=BLOCK_TOKENS,
        )

    def run(self) -> dict[str, list[str]]:
        """Return the lines by part."""
        rng = self._rng
        for spec in self._specs:
            self._add_worker(spec)
        at_s = 0.0
        rate = rng.choice((2.0, 10.0, 40.0))
        for number in range(REQUESTS):
            at_s += rng.expovariate(rate)
            self._after(at_s, partial(self._arrive, f"r{number}"))
        for _ in range(rng.randint(0, 12)):
            self._after(rng.uniform(0, at_s), self._disturb)
        while self._timers:
            when_s, _, action = heapq.heappop(self._timers)
            self._tick_until(when_s)
            self._now = when_s
            action()
            if when_s > END_S:
                raise RuntimeError("the history does not end")
        self._tick_until(self._now + 5.0)
        self._core.check_invariants()
        snapshot = self._core.snapshot(self._now)
        counters = [f"{name} {count}" for name, count in sorted(snapshot.counters.items()) if count]
        left = f"in flight {snapshot.in_flight}, queued {snapshot.queued_requests}"
        return {"decisions": self._lines, "metrics": [*counters, left]}

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (self._now + seconds, self._timer_count, action))

    def _tick_until(self, until_s: float) -> None:
        """Call the core when it wants to be, no more often than its shell does."""
        while (due_s := self._core.next_tick()) is not None and max(due_s, self._now + TICK_S) <= until_s:
            self._now = max(due_s, self._now + TICK_S)
            self._perform(self._core.tick(self._now))

    # Requests

    def _arrive(self, request_id: str) -> None:
        rng = random.Random(f"{self._seed} {request_id}")
        conversation = rng.choice(self._conversations)
        conversation += [rng.randrange(1000) for _ in range(rng.randint(5, 80))]
        name, ids = f"s{self._conversations.index(conversation)}", list(conversation)
        has_ids = rng.random() < 0.95
        model = rng.choices(("m", "m-lora", "unknown"), (90, 8, 2))[0]
        request = RouteRequest(
            request_id=request_id,
            model=model,
            scope=Scope("m", rng.choice((None, None, None, "salt")), "m-lora" if model == "m-lora" else None),
            token_ids=ids if has_ids else None,
            prompt_tokens=len(ids),
            output_tokens_max=rng.choice((0, 16, 200)),
            is_streaming=rng.random() < 0.7,
            priority=rng.choice((0, 0, 0, -3, 5, 9)),
            worker="w1" if rng.random() < 0.02 else None,
            session=name if rng.random() < 0.5 else None,
            is_final=rng.random() < 0.03,
            deadline_s=self._now + rng.choice((0.05, 2.0)) if rng.random() < 0.1 else None,
            ttft_s_max=rng.choice((0.05, 5.0)) if rng.random() < 0.1 else None,
            tenant=rng.choice(("a", "a", "b", "c")),
        )
        self._requests[request_id] = request
        if rng.random() < 0.1:
            self._write(f"{request_id} would go:", [self._core.explain(request, self._now)])
        if rng.random() < 0.04:
            self._after(rng.uniform(0.0, 1.0), partial(self._abort, request_id))
        self._perform([self._core.route(request, self._now)])

    def _perform(self, instructions: Iterable[Any]) -> None:
        instructions = list(instructions)
        self._write("", instructions)
        for instruction in instructions:
            if isinstance(instruction, Forward):
                self._send(instruction)
            elif isinstance(instruction, Refuse):
                self._requests.pop(instruction.request_id, None)
            elif not isinstance(instruction, Enqueue):
                self._clear_cache(instruction.worker_id)

    def _write(self, prefix: str, instructions: Iterable[Any]) -> None:
        for instruction in instructions:
            decision = getattr(instruction, "decision", instruction)
            if isinstance(instruction, Refuse):
                text = f"{instruction.request_id} refused {instruction.status} {instruction.code}"
            elif hasattr(decision, "worker"):
                name = getattr(instruction, "request_id", "")
                text = f"{name} -> {decision.worker}/{decision.rank}, cached {decision.predicted_cached_tokens}"
            else:
                text = f"{type(instruction).__name__} {getattr(instruction, 'request_id', '')}"
            self._lines.append(f"{self._now:.4f} {prefix}{text}")

    def _send(self, forward: Forward) -> None:
        """A worker gets a request."""
        request_id, decision = forward.request_id, forward.decision
        self._attempts[request_id] += 1
        attempt = self._attempts[request_id]
        rng = random.Random(f"{self._seed} {request_id} {attempt}")
        worker, request = self._workers.get(decision.worker), self._requests[request_id]
        check = partial(self._if_current, request_id, attempt)
        if worker is None or rng.random() < self._faults:
            kind = getattr(FailureKind, rng.choice(FAILURES_BEFORE), FailureKind.RESET)
            self._after(rng.uniform(0.001, 0.3), partial(check, partial(self._fail, request_id, kind)))
            return
        rank = decision.rank or 0
        cache, ids = worker.caches[rank], list(request.token_ids or [])
        cached = cache.count_cached(ids, request.scope.salt)
        begin_s = max(self._now, worker.free_s[rank])
        worker.free_s[rank] = begin_s + 1e-4 * (request.prompt_tokens - cached)
        first_s = worker.free_s[rank] + 0.012 - self._now + rng.random() * 1e-3
        outputs = rng.randint(1, 60)
        end_s = first_s + 0.013 * outputs
        self._after(first_s - 0.005, partial(cache.store, ids, request.scope.salt))
        if request.is_streaming:
            self._after(first_s, partial(check, partial(self._begin, request_id)))
            if rng.random() < 0.5:
                middle_s = first_s + 0.013 * (outputs // 2)
                progress = partial(self._core.record_progress, request_id, outputs // 2)
                self._after(middle_s, partial(check, progress))
        if rng.random() < self._faults / 2:
            kind = FailureKind.STREAM if request.is_streaming else FailureKind.RESET
            self._after(end_s, partial(check, partial(self._fail, request_id, kind)))
            return
        usage = ReportedUsage(request.prompt_tokens, cached, outputs) if rng.random() < 0.9 else None
        self._after(end_s, partial(check, partial(self._finish, request_id, usage)))

    def _if_current(self, request_id: str, attempt: int, action: Callable[[], object]) -> None:
        if request_id in self._requests and self._attempts[request_id] == attempt:
            action()

    def _begin(self, request_id: str) -> None:
        self._perform(self._core.record_first_token(request_id, self._now))

    def _finish(self, request_id: str, usage: ReportedUsage | None) -> None:
        del self._requests[request_id]
        self._perform(self._core.finish_request(request_id, usage, self._now))

    def _fail(self, request_id: str, kind: FailureKind) -> None:
        self._perform(self._core.fail_attempt(request_id, kind, self._now, was_sent=kind is not FailureKind.CONNECT))

    def _abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._perform(self._core.abort_request(request_id, self._now))

    # Workers

    def _add_worker(self, spec: WorkerSpec) -> None:
        blocks = self._rng.choice((60, 600))
        self._workers[spec.worker_id] = _Worker(self._core, self._index, spec, blocks, lambda: self._now)

    def _clear_cache(self, worker_id: str) -> None:
        for cache in self._workers[worker_id].caches:
            cache.clear()
        self._core.clear_worker_cache(worker_id, self._now)

    def _disturb(self) -> None:
        """Something happens to a worker."""
        rng, core = self._rng, self._core
        worker_id = rng.choice(sorted(self._workers))
        kind = rng.choice(("down", "drain", "sleep", "clear", "load"))
        self._lines.append(f"{self._now:.4f} {worker_id} {kind}")
        if kind == "down":
            self._perform(core.mark_worker_down(worker_id, self._now, "made up"))
            self._after(rng.uniform(0.5, 3.0), lambda: self._perform(core.mark_worker_up(worker_id, self._now)))
        elif kind == "drain":
            self._perform(core.set_draining(worker_id, self._now))
            self._after(1.0, lambda: self._perform(core.set_draining(worker_id, self._now, is_draining=False)))
        elif kind == "sleep":
            self._perform(core.set_asleep(worker_id, self._now, is_asleep=True))
            self._after(1.0, lambda: self._perform(core.set_asleep(worker_id, self._now, is_asleep=False)))
        elif kind == "clear":
            self._clear_cache(worker_id)
        elif kind == "load":
            ranks = self._workers[worker_id].spec.ranks
            page = "".join(
                f'vllm:num_requests_running{{engine="{rank}"}} {rng.randint(0, 9)}\n'
                f'vllm:num_requests_waiting{{engine="{rank}"}} {rng.randint(0, 3)}\n'
                for rank in range(ranks)
            )
            core.record_engine_load(
                worker_id, read_loads(page, ranks), core.count_in_flight_by_rank(worker_id), self._now
            )


def run_core_history(seed: int, policy: str) -> dict[str, list[str]]:
    """Return what the core did, by parts."""
    return CoreHistory(seed, policy).run()
