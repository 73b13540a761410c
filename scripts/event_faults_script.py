"""What a case of scripts/event_faults is made of: two scripted workers, prompts, and the truth about them.

A case scripts two workers (A and B) and asks for prompts of its own, so that cases do not disturb each other. Every
prompt has a truth: the tokens that each worker could really reuse. The truths of a prompt never tie, so the right
worker is known. Prompts of the kind `control` are asked first: a router that hears nothing fails there, and not only
where its deafness happens to be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.workers import FakeWorker

BLOCK = 16
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW: dict[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 4 * BLOCK,
}
STATE: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}


@dataclass(frozen=True)
class Probe:
    """One prompt and what each worker really holds of it, in tokens."""

    tokens: list[int]
    a: int
    b: int
    control: bool = False
    salt: str | None = None
    lora: bool = False
    wrong: str = "lost hit"
    """What it is where the router chooses the other worker."""
    sudden: bool = False
    """Asked before anybody can know what happened: only the answer counts, not the prediction."""


@dataclass(frozen=True)
class Setup:
    """How the two workers are made."""

    topic: str = ""
    replays: bool = True
    replies_with_topic: bool = True
    block_size_b: int = BLOCK
    lora: bool = False
    second_group: str = ""
    """A hybrid model: `window` or `state` beside full attention."""


class Script:
    """What a case plays with: two workers, fresh names and tokens, and the means to wait."""

    def __init__(
        self,
        a: FakeWorker,
        b: FakeWorker,
        seed: int,
        settle: Callable[[list[Probe]], None],
        ask: Callable[[Probe], None],
        second_group: str = "",
    ) -> None:
        self.a, self.b = a, b
        self._second_group = second_group
        self.rng = random.Random(seed)
        self.told: list[tuple[list[int], int, int, str]] = []
        """What a case's `before` leaves to its `play`."""
        self._settle = settle
        self.ask = ask
        """Ask for a prompt right now, in the middle of the fault."""

    def settle(self, *probes: Probe) -> None:
        """Give the router the time to apply what was published: until it predicts these truths, where it tells."""
        self._settle(list(probes))

    def tokens(self, blocks: int) -> list[int]:
        """A prompt of so many blocks and a rest that no block holds."""
        return [self.rng.randrange(1000, 30000) for _ in range(blocks * BLOCK + 5)]

    def names(self, count: int) -> list[Any]:
        return [self.rng.getrandbits(64) for _ in range(count)]

    def control(self) -> list[Probe]:
        """Two plain prompts, one on each worker: does the router follow them at all?"""
        probes = []
        for worker, other in ((self.a, self.b), (self.b, self.a)):
            prompt = self.tokens(8)
            self._store(worker, prompt, 8)
            self._store(other, prompt, 1)
            held = (8 * BLOCK, BLOCK) if worker is self.a else (BLOCK, 8 * BLOCK)
            probes.append(Probe(prompt, *held, control=True))
        return probes

    def _store(self, worker: FakeWorker, prompt: list[int], blocks: int) -> None:
        """The worker holds so many blocks in every group of its model."""
        names, tokens = self.names(blocks), prompt[: blocks * BLOCK]
        if self._second_group == "":
            worker.publisher.publish(stored(names, tokens))
        elif self._second_group == "window":
            worker.publisher.publish(stored(names, tokens, **FULL), stored(names, tokens, **WINDOW))
        else:
            worker.publisher.publish(stored(names, tokens, **FULL), stored(names[-1:], tokens, **STATE))

    def on_b(self, prompt: list[int], blocks: int, **fields: Any) -> int:
        """B holds the first `blocks` blocks. Returns the tokens."""
        self.b.publisher.publish(stored(self.names(blocks), prompt[: blocks * BLOCK], **fields))
        return blocks * BLOCK


Play = Callable[[Script], list[Probe]]


@dataclass(frozen=True)
class Case:
    name: str
    play: Play
    setup: Setup = field(default_factory=Setup)
    before: Callable[[Script], None] | None = None
    """Played before the router gets the workers."""
    silent: bool = False
    """The fault consists in silence: nothing may be published after it."""
    rounds: int = 3
    """How often it is played, with fresh prompts each time: a router that cannot tell must not be right by luck."""


CASES: list[Case] = []


def case(
    name: str, *, before: Callable[[Script], None] | None = None, silent: bool = False, rounds: int = 3, **setup: Any
) -> Callable[[Play], Play]:
    def register(play: Play) -> Play:
        CASES.append(Case(name, play, Setup(**setup), before, silent, rounds))
        return play

    return register


def stored(
    names: list[Any], tokens: list[int], parent: Any = None, *, size: int = BLOCK, medium: str = "GPU", **more: Any
) -> dict[str, Any]:
    """A BlockStored event as vLLM writes it since June 2026."""
    head = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    return {**head, "block_size": size, "lora_id": None, "medium": medium, "lora_name": None, **more}


def removed(names: list[Any], medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}


def stored_array(names: list[Any], tokens: list[int], parent: Any = None) -> list[Any]:
    """The same as vLLM wrote it before."""
    return ["BlockStored", names, parent, tokens, BLOCK, None, "GPU", None]


def removed_array(names: list[Any]) -> list[Any]:
    return ["BlockRemoved", names, "GPU"]
