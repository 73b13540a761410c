"""Facts from other threads reach the event loop in order, and one that repeats itself once a turn."""

from __future__ import annotations

import asyncio
import threading

from router.fleet.fact_queue import CacheCleared, CapacityObserved, FactQueue, StreamLost, WorkerFact


def test_facts_arrive_in_order_on_the_loops_thread() -> None:
    async def run() -> None:
        applied: list[WorkerFact] = []
        threads: set[int] = set()
        has_all = asyncio.Event()

        def apply(fact: WorkerFact) -> None:
            applied.append(fact)
            threads.add(threading.get_ident())
            if len(applied) == len(facts):
                has_all.set()

        queue = FactQueue(asyncio.get_running_loop(), apply)
        facts: list[WorkerFact] = [CacheCleared(f"w{i % 7}", i, float(i)) for i in range(200)]
        thread = threading.Thread(target=lambda: [queue.put(fact) for fact in facts])
        thread.start()
        await has_all.wait()
        thread.join()
        assert applied == facts
        assert threads == {threading.get_ident()}

    asyncio.run(run())


def test_a_later_fact_replaces_the_one_that_waits() -> None:
    async def run() -> None:
        applied: list[WorkerFact] = []
        queue = FactQueue(asyncio.get_running_loop(), applied.append)
        for i in range(1000):
            queue.put(CacheCleared("a", 0, float(i)))
            queue.put(CapacityObserved("a", 0, i))
            if i == 500:
                queue.put(CacheCleared("a", 1, 1.0))
                queue.put(StreamLost("a", 0))
        await asyncio.sleep(0)
        assert applied == [
            CacheCleared("a", 1, 1.0),
            StreamLost("a", 0),
            CacheCleared("a", 0, 999.0),
            CapacityObserved("a", 0, 999),
        ]
        queue.put(CacheCleared("a", 0, 1000.0))
        await asyncio.sleep(0)
        assert applied[4:] == [CacheCleared("a", 0, 1000.0)]

    asyncio.run(run())


def test_what_is_put_while_facts_are_applied_comes_with_the_next_turn() -> None:
    async def run() -> None:
        applied: list[WorkerFact] = []

        def apply(fact: WorkerFact) -> None:
            applied.append(fact)
            if isinstance(fact, StreamLost):
                queue.put(CacheCleared("a", 0, 2.0))

        queue = FactQueue(asyncio.get_running_loop(), apply)
        queue.put(StreamLost("a", 0))
        queue.put(CacheCleared("a", 0, 1.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert applied == [StreamLost("a", 0), CacheCleared("a", 0, 1.0), CacheCleared("a", 0, 2.0)]

    asyncio.run(run())
