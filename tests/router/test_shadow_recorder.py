"""Where copied requests went, of which only caches tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from core_by_hand import make_core, request

from router.decide.messages import Decision
from router.edge.mirrored_exchange import MIRRORED
from router.shadow.config import ShadowConfig
from router.shadow.recorder import Recorder


class Copies:
    """A recorder on a core of two workers, told of copies; `at` is its clock."""

    def __init__(self) -> None:
        self.core, self.index = make_core("ab")
        self.at = 1.0
        self.recorder = Recorder(self.core, ShadowConfig(), lambda: self.at, lambda *_: None)

    def copy(self, name: str, prompt: list[int]) -> None:
        route = request(name, prompt)
        decision = self.core.explain(route, self.at)
        assert isinstance(decision, Decision)
        context: Any = SimpleNamespace(
            route=route, decision=decision, outcome=MIRRORED, turn=None, started_at_s=self.at, name=name,
        )  # fmt: skip
        self.recorder.record_copy(context)

    def store(self, worker: str, prompt: list[int]) -> None:
        self.index.store(self.core.workers[worker].holders[0], prompt)

    @property
    def workers(self) -> list[str]:
        return [recorded_request.worker for recorded_request in self.recorder.requests]


def test_the_cache_that_grew_by_a_prompt_is_its_workers() -> None:
    copies = Copies()
    copies.copy("one", list(range(400)))
    copies.recorder.find_workers(1.01)
    assert not copies.workers
    copies.store("b", list(range(400)))
    copies.recorder.find_workers(1.1)
    assert copies.workers == ["b"]
    assert copies.recorder.counts == {"placed": 1}


def test_two_turns_that_went_apart_between_two_looks_are_both_placed() -> None:
    copies = Copies()
    copies.copy("one", list(range(400)))
    copies.store("a", list(range(400)))
    copies.at = 1.001
    copies.copy("two", list(range(600)))
    copies.store("b", list(range(600)))
    copies.recorder.find_workers(1.1)
    assert copies.workers == ["a", "b"], "the other cache has the first prompt by the second turn"
    assert copies.recorder.counts == {"placed": 2}


def test_a_turn_beside_one_that_is_not_answered_yet_says_nothing_of_it() -> None:
    copies = Copies()
    copies.copy("one", list(range(400)))
    copies.copy("beside", list(range(500)))
    assert not copies.workers
    copies.store("a", list(range(400)))
    copies.recorder.find_workers(1.1)
    assert copies.workers == ["a"]
