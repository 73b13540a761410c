"""Jobs of transfers that raise on the thread of the steps: they end a pull, and neither the engine nor a request."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transfer_peers import RECIPES, Engine, prompt

from engine.core_messages import CallCore
from engine.process.core_process import CoreLoop

POINTS_OF_STORE: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "match": lambda engine: (engine.cache.tree, "extend_match"),
    "allocate": lambda engine: (engine.cache.pool, "allocate"),
    "copy": lambda engine: (engine.exchange._memory, "execute"),
    "write": lambda engine: (engine.exchange._memory, "write_blocks"),
    "attach": lambda engine: (engine.cache.device_tier, "attach"),
    "commit": lambda engine: (engine.cache.device_tier, "commit"),
    "announce": lambda engine: (engine.cache.tree.event_log, "record"),
    "promote": lambda engine: (engine.cache.host_tier, "discard_duplicate"),
}
POINTS_OF_READ: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "copy": lambda engine: (engine.exchange._memory, "execute"),
    "find": lambda engine: (engine.cache.tree, "get"),
    "read": lambda engine: (engine.exchange._memory, "read_blocks"),
}


class Breaker:
    """Makes the call number `skipped_calls` of a method raise, once, and only while a job runs."""

    def __init__(self, engine: Engine, job: str, point: tuple[Any, str], skipped_calls: int) -> None:
        self.has_raised = False
        self._is_in_job = False
        self._skipped_calls = skipped_calls
        self._job, self._call = getattr(engine.exchange, job), getattr(*point)
        setattr(engine.exchange, job, self._run_job)
        setattr(*point, self._raise_once)

    def _run_job(self, *arguments: Any) -> Any:
        self._is_in_job = True
        try:
            return self._job(*arguments)
        finally:
            self._is_in_job = False

    def _raise_once(self, *arguments: Any, **options: Any) -> Any:
        if self._is_in_job and not self.has_raised:
            self._skipped_calls -= 1
            if self._skipped_calls < 0:
                self.has_raised = True
                raise RuntimeError("out of memory")
        return self._call(*arguments, **options)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], list[int]]:
    """What engines without a cache generate, by family and text."""
    answers = {}
    for family in RECIPES:
        with Engine(family, prefix_caching=False) as engine:
            for name in ("moves", "runs", "waits"):
                answers[family, name] = engine.answer(name, prompt(name, 202), max_tokens=40)
    return answers


def check_answers(engine: Engine, family: str, expected: dict[tuple[str, str], list[int]]) -> None:
    for name in engine.outputs:
        if name in ("moves", "runs", "waits"):
            tokens = engine.tokens(name)
            assert tokens == expected[family, name][: len(tokens)], name


@pytest.mark.parametrize("overlaps_steps", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("skipped_calls", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("point", POINTS_OF_STORE)
@pytest.mark.parametrize("family", RECIPES)
def test_a_job_that_fails_to_store_ends_its_pull_only(
    expected: dict[tuple[str, str], list[int]], family: str, point: str, skipped_calls: int, overlaps_steps: bool
) -> None:
    text = prompt("moves", 202)
    with Engine(family) as source, Engine(family, overlaps_steps=overlaps_steps, host_units=200) as consumer:
        source.answer("a", text)
        source.serve()
        consumer.answer("half", text[:101])
        consumer.add("runs", prompt("runs", 202), max_tokens=40)
        for _ in range(6):
            consumer.step()
        breaker = Breaker(consumer, "store", POINTS_OF_STORE[point](consumer), skipped_calls)
        consumer.add("waits", prompt("waits", 202))
        consumer.add("moves", text, source.source)
        consumer.run()
        assert breaker.has_raised or (skipped_calls and point in ("match", "copy", "write", "promote"))
        check_answers(consumer, family, expected)
        assert len(consumer.tokens("runs")) == 40
        assert consumer.cache.pool.live_units == 0, "memory leaked"
        assert consumer.core.stats().failed_steps == breaker.has_raised
        assert not sum(consumer.transfers.stats.failures.values())
        consumer.core.reset_prefix_cache()
        assert consumer.answer("again", text, source.source) == consumer.tokens("moves")
        source.pause()
        assert consumer.cached_tokens("again") == 200
        assert consumer.transfers.stats.pulls == 2
        assert not sum(consumer.transfers.stats.failures.values()), "the source is blamed for our failure"


@pytest.mark.parametrize("point", POINTS_OF_READ)
@pytest.mark.parametrize("family", RECIPES)
def test_a_job_that_fails_to_read_is_answered_and_ends_nothing_else(
    expected: dict[tuple[str, str], list[int]], family: str, point: str
) -> None:
    text = prompt("moves", 202)
    with Engine(family, host_units=200) as source, Engine(family) as consumer:
        source.answer("a", text)
        source.add("runs", prompt("runs", 202), max_tokens=40)
        breaker = Breaker(source, "read", POINTS_OF_READ[point](source), 0)
        source.serve()
        consumer.answer("moves", text, source.source)
        while source.core.has_work:
            pass
        source.pause()
        assert breaker.has_raised
        assert consumer.transfers.stats.failures["failed"] == 1
        assert consumer.transfers.stats.pull_s < 5, "the peer waits for an answer"
        assert len(source.tokens("runs")) == 40
        for engine in (source, consumer):
            check_answers(engine, family, expected)
            assert engine.cache.pool.live_units == 0, "memory leaked"


def test_weights_whose_files_are_gone_wake_up_and_are_shared_with_no_peer() -> None:
    """The engine was awake, answered that it was not, and could not be woken up any more."""
    text = prompt("moves", 202)
    with Engine() as source, Engine() as consumer:
        source.core._model = FakeModel()
        source.answer("a", text)
        source.exchange.fingerprint._compute_digest = lambda: _raise(FileNotFoundError("config.json"))
        source.core.sleep(2)
        source.core.wake()
        source.core.reload_weights("other")
        source.answer("b", text)
        assert source.cached_tokens("b") == 0, "computed by the old weights"
        source.serve()
        consumer.answer("a", text, source.source)
        source.pause()
        assert consumer.transfers.stats.failures["incompatible"] == 1


def test_weights_that_stayed_in_memory_are_not_those_of_their_changed_files() -> None:
    """After a sleep of level 1 the files were read again: a peer with the new weights took blocks of the old ones."""
    with Engine() as source, Engine() as consumer, Engine(fingerprint=b"other weights") as changed_consumer:
        source.core._model = FakeModel()
        source.core.sleep(1)
        source.core.wake()
        text = prompt("moves", 202)
        source.answer("a", text)
        source.serve()
        for engine, failures in ((consumer, 0), (changed_consumer, 1)):
            engine.answer("a", text, source.source)
            assert engine.transfers.stats.failures["incompatible"] == failures
        source.pause()
        assert consumer.cached_tokens("a") > 0
        source.core.sleep(2)
        source.core.wake()
        assert source.exchange.fingerprint.digest == b"other weights"


class FakeModel:
    """A model for which changes of weights cost nothing."""

    def sleep(self, level: int) -> None:
        pass

    def wake(self) -> None:
        pass

    def reload(self, path: str | None) -> None:
        pass


class BrokenModel(FakeModel):
    """A model that raises what it should not."""

    def wake(self) -> None:
        raise AssertionError("still asleep")

    def reload(self, path: str | None) -> None:
        raise TypeError("'int' object is not iterable")


def test_a_checkpoint_that_raises_anything_is_refused() -> None:
    with Engine() as engine:
        engine.core._model = BrokenModel()
        model = SimpleNamespace(get_simulation_lag=None)
        assembled = SimpleNamespace(core=engine.core, model=model, publisher=None)
        loop = CoreLoop(assembled, SimpleNamespace())  # type: ignore[arg-type]
        assert loop._execute_call(CallCore(1, "reload")) == "reload: TypeError: 'int' object is not iterable"
        assert loop._execute_call(CallCore(2, "sleep")) is None
        assert loop._execute_call(CallCore(3, "wake")) == "wake: AssertionError: still asleep"
        engine.answer("a", prompt("a", 20))


def _raise(error: Exception) -> Any:
    raise error
