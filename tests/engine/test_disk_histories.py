"""Seeded histories of the core over a disk: its thread works at random moments, fails, and is there after restarts.

The fake device checks every read and every answer, so bytes that came from the disk are those of their prefix; events
are held to what the cache says is where, and to parents first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from drawn_specs import group
from fake_device import EOS, Bench
from fake_disk import FakeDisk, Slots

from engine.cache.disk.tier import DiskTier
from engine.cache.event_log import EventLog
from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec
from engine.scheduler import RequestRefusedError, SchedulerConfig
from engine.types import StepPlan


class History:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.randint(1, 4)
        self.groups = (group(rng.randint(1, 2)),)
        self.units, self.host_units = rng.randint(4, 16), rng.choice([1, 2, 6, 12, 30])
        self.slots = rng.choice([1, 3, 10, 40, 200, 200])
        seqs = rng.randint(1, 4)
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.randint(0, 20),
            max_model_len=60,
            eos_token_ids=frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
            prefill_order="arrival" if seed % 2 else "shortest",
        )
        self.adaptive, self.overlap = rng.random() < 0.5, rng.random() < 0.6
        self.load_bytes_max = rng.choice([1, 600, None])
        self.failing = rng.choice([0.0, 0.0, 0.1])
        self.texts: list[list[int]] = [[]]
        self.count = 0
        self.loaded = 0
        self.start({})

    def start(self, kept: Slots) -> None:
        kept = {slot: one for slot, one in kept.items() if slot < self.slots}  # the file is cut
        disk = FakeDisk(self.slots, self.rng, kept)
        disk.failing = self.failing
        cache = KVCache(
            CacheSpec(block_size=self.size, groups=self.groups), self.units,
            step_tokens_max=self.config.max_num_batched_tokens, adaptive_eviction=self.adaptive,
            host_units=self.host_units, load_bytes_max=self.load_bytes_max, disk=disk,
        )  # fmt: skip
        self.bench, self.disk = Bench(cache, self.config, overlap=self.overlap), disk
        disk.device = self.bench.device
        self.bench.device.on_execute = lambda plan: disk.work(self.rng.choice([0, 0, 1, 9]))  # type: ignore[assignment]
        self.bench.check()

    def play(self) -> None:
        acts: list[tuple[float, Callable[[], object]]] = [
            (0.35, self.ask),
            (0.45, self.steps),
            (0.04, lambda: self.bench.abort(self.anyone())),
            (0.03, lambda: self.during(lambda plan: self.bench.abort(self.anyone()))),
            (0.01, lambda: self.during(lambda plan: self.bench.core.reset_prefix_cache())),
            (0.03, self.fail),
            (0.01, self.bench_reset),
            (0.03, self.restart),
            (0.03, lambda: setattr(self.bench, "now", self.bench.now + 10)),
            (0.04, lambda: self.bench.drain()),
        ]
        for _ in range(self.rng.randint(20, 60)):
            self.rng.choices([act for _, act in acts], [share for share, _ in acts])[0]()
            self.bench.check()
            self.bench.assert_correct()
        self.finish()

    def finish(self) -> None:
        self.bench.drain()
        while self.bench.core.has_events:
            self.bench.step()
        self.bench.check()
        self.bench.assert_correct()
        assert self.bench.cache.disk is not None
        assert not self.bench.cache.disk.references(), "held for nobody"

    def bench_reset(self) -> None:
        self.bench.core.reset_prefix_cache()

    def restart(self) -> None:
        """The process ends, at whatever moment, and another one finds what the disk has."""
        if self.rng.random() < 0.5:
            self.finish()
        self.disk.work(self.rng.choice([0, 1, 1_000]))
        if self.rng.random() < 0.3:
            self.slots = self.rng.choice([1, 3, 10, 40, 200])
        self.loaded += self.bench.cache.disk.totals.loaded  # type: ignore[union-attr]
        self.start(self.disk.kept)

    def anyone(self) -> str:
        return f"r{self.rng.randrange(self.count + 1)}"

    def ask(self) -> None:
        rng = self.rng
        text = (rng.choice(self.texts) + [rng.randint(0, 1) for _ in range(rng.randint(1, 16))])[:50]
        for _ in range(rng.choice([1, 1, 2, 3])):
            with suppress(RequestRefusedError):
                self.bench.add(
                    f"r{self.count}", text, max_tokens=rng.randint(1, 20), priority=rng.randint(0, 1),
                    cache_salt=rng.choice([None, None, None, "s"]), prompt_logprobs=rng.choice([None, None, None, 1]),
                )  # fmt: skip
            self.count += 1

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            for output in self.bench.step():
                if output.finish_reason is not None:
                    name = output.request_id
                    self.texts = [*self.texts, self.bench.requests[name].token_ids + self.bench.outputs[name]][-12:]

    def during(self, act: Callable[[StepPlan], object]) -> None:
        before = self.bench.device.on_execute
        self.bench.device.on_execute = act  # type: ignore[assignment]
        self.bench.step()
        self.bench.device.on_execute = before

    def fail(self) -> None:
        self.bench.device.fail_next = True
        self.bench.step()
        self.bench.device.fail_next = False


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_every_read_every_event_and_every_answer_is_right(first: int) -> None:
    loaded = 0
    for seed in range(first, first + 30):
        print(f"seed {seed}")
        history = History(seed)
        history.play()
        assert history.bench.cache.disk is not None
        loaded += history.loaded + history.bench.cache.disk.totals.loaded
    assert loaded > 5, "the disk was of use"


def unsaved_untold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventLog, "unsaved", lambda self, entry: None)


def saved_untold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventLog, "saved", lambda self, entry: None)


def saved_when_asked_for(patch: pytest.MonkeyPatch) -> None:
    real = DiskTier._flush

    def flush(self: DiskTier) -> None:
        for write in self._writes:
            if write.ready:
                self._tree.log.saved(write.entry)
        real(self)

    patch.setattr(DiskTier, "_flush", flush)


@pytest.mark.parametrize("mutant", [unsaved_untold, saved_untold, saved_when_asked_for])
def test_events_of_the_disk_that_lie_are_found_out(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        _play(range(60))


def _play(seeds: range) -> None:
    for seed in seeds:
        History(seed).play()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 250))
def test_thousands_of_them(first: int) -> None:
    for seed in range(first, first + 250):
        print(f"seed {seed}")
        History(seed).play()
