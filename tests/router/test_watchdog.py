"""The drift watchdog: each fault raises its alarm within 50 requests, and nothing else does."""

from __future__ import annotations

import random
from collections import Counter

from router.decide.watchdog import StallDetector, Watchdog


class CountingWatchdog(Watchdog):
    """Watchdog of workers whose announced blocks are set by hand."""

    def __init__(self) -> None:
        self.stored_blocks = Counter[str]()
        super().__init__()
        self.count_stored_blocks = self.stored_blocks.__getitem__


def finish(dog: Watchdog, i: int, **changes: int | None) -> None:
    """A request of a worker that agrees in everything, up to `changes`."""
    length = 500 + i
    values: dict[str, int | None] = {
        "counted_tokens": length, "reported_tokens": length, "predicted_cached_tokens": 320,
        "reported_cached_tokens": 320, "resident_tokens": 320, **changes,
    }  # fmt: skip
    dog.record_answer("w", **values)  # type: ignore[arg-type]


def alarm_names(dog: Watchdog) -> list[str]:
    return [alarm.split(":")[0] for alarm in dog.list_alarms("w")]


def test_agreement_raises_nothing() -> None:
    dog = CountingWatchdog()
    for i in range(500):
        finish(dog, i)
        dog.stored_blocks["w"] = i
        assert alarm_names(dog) == []


def test_another_chat_template_is_flagged_within_50() -> None:
    dog = CountingWatchdog()
    for i in range(50):
        dog.stored_blocks["w"] = i
        finish(dog, i, reported_tokens=507 + i)
    assert alarm_names(dog) == ["prompt_tokens"]


def test_another_tokenizer_with_now_and_then_the_same_length_is_flagged() -> None:
    dog, rng = CountingWatchdog(), random.Random(1)
    for i in range(50):
        dog.stored_blocks["w"] = i
        finish(dog, i, reported_tokens=500 + i + rng.choice([0, 0, 0, 3, -2]))
    assert alarm_names(dog) == ["prompt_tokens"]


def test_wrong_tokens_of_the_right_number_show_in_the_cached_tokens() -> None:
    dog = CountingWatchdog()
    for i in range(50):
        dog.stored_blocks["w"] = i
        finish(dog, i, predicted_cached_tokens=0, reported_cached_tokens=320)
    assert alarm_names(dog) == ["cached_tokens"]


def test_eviction_now_and_then_is_no_drift() -> None:
    dog, rng = CountingWatchdog(), random.Random(2)
    for i in range(200):
        dog.stored_blocks["w"] = i
        finish(dog, i, reported_cached_tokens=320 if rng.random() < 0.8 else 160)
        assert alarm_names(dog) == []


def test_promises_that_evictions_break_are_flagged_although_half_of_them_hold() -> None:
    """Ten at once before a cache for three: half of what was predicted is found, which is no drift of the index."""
    dog = CountingWatchdog()
    for i in range(50):
        dog.stored_blocks["w"] = i
        finish(dog, i, predicted_cached_tokens=320, reported_cached_tokens=320 if i % 2 else 0)
    assert alarm_names(dog) == ["promised"]
    for i in range(50):
        finish(dog, i)
    assert alarm_names(dog) == []


def test_silent_events_are_flagged_and_the_alarm_goes_with_its_cause() -> None:
    dog = CountingWatchdog()
    dog.stored_blocks["w"] = 100
    for i in range(50):
        finish(dog, i, predicted_cached_tokens=0, reported_cached_tokens=0)
        dog.stored_blocks["w"] = 100
    assert alarm_names(dog) == ["events"]
    assert dog.list_alarms("w", expects_events=False) == []
    dog.stored_blocks["w"] = 101
    assert alarm_names(dog) == []


def test_reuse_that_no_event_vouches_for_shows_silence_also_in_short_turns() -> None:
    dog = CountingWatchdog()
    for i in range(50):
        dog.stored_blocks["w"] = 0
        dog.record_answer(
            "w",
            counted_tokens=90 + i,
            reported_tokens=90 + i,
            predicted_cached_tokens=80,
            reported_cached_tokens=80,
            resident_tokens=0,
        )
    assert alarm_names(dog) == ["events"]
    dog = CountingWatchdog()
    for _ in range(50):  # the same prompt again and again: nothing new to announce
        dog.record_answer(
            "w",
            counted_tokens=90,
            reported_tokens=90,
            predicted_cached_tokens=80,
            reported_cached_tokens=80,
            resident_tokens=80,
        )
    assert alarm_names(dog) == []


def test_the_workers_block_length_says_what_must_be_announced() -> None:
    dog = CountingWatchdog()
    for _ in range(50):
        finish(dog, 0, predicted_cached_tokens=0, reported_cached_tokens=0, block_tokens=528)
    assert alarm_names(dog) == []
    for _ in range(50):
        finish(dog, 100, predicted_cached_tokens=0, reported_cached_tokens=0, block_tokens=528)
    assert alarm_names(dog) == ["events"]


def test_prompts_too_short_to_fill_a_block_expect_no_event() -> None:
    dog = CountingWatchdog()
    for _ in range(100):
        finish(dog, 0, counted_tokens=20, reported_tokens=20, predicted_cached_tokens=0, reported_cached_tokens=0)
    assert alarm_names(dog) == []


def test_engines_that_say_nothing_raise_nothing() -> None:
    dog = CountingWatchdog()
    for i in range(100):
        dog.stored_blocks["w"] = i
        finish(dog, i, reported_tokens=None, reported_cached_tokens=None)
    assert alarm_names(dog) == []
    dog.forget("w")
    assert dog.list_alarms("w") == []


def test_a_worker_stands_still_while_others_move() -> None:
    detector = StallDetector(10.0)
    for now in range(9):
        assert detector.update({"a": 0.0, "b": float(now)}, float(now)) == set()
    assert [detector.update({"a": 0.0, "b": float(now)}, float(now)) for now in range(9, 12)] == [set(), {"a"}, set()]
    assert detector.list_alarms("a", 11.0) == ["stalled: none of its streams has moved for 11 s"]
    assert detector.list_alarms("b", 11.0) == []
    assert detector.update({"a": 11.5, "b": 12.0}, 12.0) == {"a"}  # it moves again
    assert detector.stalled_workers == {}


def test_where_nothing_moves_nobody_is_named() -> None:
    detector = StallDetector(10.0)
    for now in range(0, 40, 2):
        assert detector.update({"a": 0.0, "b": 0.0}, float(now)) == set()
    assert detector.update({"a": 0.0}, 40.0) == {"a"}  # the only one: nobody else could be slow
    assert detector.update({}, 41.0) == {"a"}  # its streams have ended


def test_a_look_that_comes_late_names_nobody_new() -> None:
    detector = StallDetector(10.0)
    detector.update({"a": 0.0, "b": 0.0}, 0.0)
    assert detector.update({"a": 0.0, "b": 29.9}, 30.0) == set()  # the router itself stood still
    assert detector.update({"a": 0.0, "b": 30.9}, 31.0) == {"a"}
