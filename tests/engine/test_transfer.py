"""Blocks that move between two real engines: the same tokens as without a cache, the hits that are due, the events."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transfer_peers import BLOCK_SIZE, RECIPES, Engine, prompt

from engine.transfer.messages import WantedBlock
from engine.types import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = list(RECIPES)
PLAIN: dict[tuple[str, str], list[int]] = {}


def plain_answer(family: str, name: str, text: list[int]) -> list[int]:
    """What an engine without a cache generates."""
    if (family, name) not in PLAIN:
        with Engine(family, prefix_caching=False) as engine:
            PLAIN[family, name] = engine.answer("plain", text)
    return PLAIN[family, name]


def check_no_failure(consumer: Engine, pulls: int = 1) -> None:
    stats = consumer.transfers.stats
    assert sum(stats.failures.values()) == stats.missing_blocks == 0
    assert stats.pulls == pulls


@pytest.mark.parametrize("overlaps_steps", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_a_peer_has_computed_is_not_computed_again(family: str, overlaps_steps: bool) -> None:
    text = prompt(family, 202)
    expected = plain_answer(family, "whole", text)
    with (
        Engine(family, overlaps_steps=overlaps_steps) as source,
        Engine(family, overlaps_steps=overlaps_steps) as consumer,
    ):
        assert source.answer("a", text) == expected
        source.serve()
        assert consumer.answer("a", text, source.source) == expected
        source.pause()
        assert consumer.cached_tokens("a") == 200
        check_no_failure(consumer)
        stats = consumer.transfers.stats
        assert stats.pulled_blocks == source.transfers.stats.sent_blocks
        assert stats.pulled_bytes == source.transfers.stats.sent_bytes > 0
        assert consumer.answer("b", text) == expected
        assert consumer.cached_tokens("b") == 200


def test_the_step_after_the_last_block_computes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine is in its next step before another thread can end the pull, unless it waits for that."""
    monkeypatch.setattr("engine.transfer.service.END_WAIT_S_MAX", 20.0)  # a busy machine starts that thread late
    text = prompt("qwen3", 202)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text)
        source.serve()
        store, stored_blocks = consumer.exchange.store, []
        monkeypatch.setattr(
            consumer.exchange, "store", lambda *of: stored_blocks.append(store(*of)) or stored_blocks[-1]
        )
        for number in range(5):
            consumer.add(f"busy{number}", prompt(number, 30), max_tokens=400)
            consumer.add("a", text, source.source)
            while not stored_blocks:
                assert "a" not in consumer.outputs
                consumer.step()
            assert consumer.cached_tokens("a") == 200, "no step before the prompt's"
            consumer.core.abort(["a", f"busy{number}"])
            consumer.core.reset_prefix_cache()
            consumer.outputs.clear()
            stored_blocks.clear()
        source.pause()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_lacking_moves(family: str) -> None:
    """The consumer has the first half, the source all; then a longer prompt, of which the source has the beginning."""
    text, longer_text = prompt(family, 202), prompt(family, 202) + prompt("tail", 60)
    with Engine(family) as source, Engine(family) as consumer:
        source.answer("a", text)
        consumer.answer("half", text[:101])
        source.serve()
        assert consumer.answer("a", text, source.source) == plain_answer(family, "whole", text)
        check_no_failure(consumer)
        assert consumer.cached_tokens("a") == 200
        full_blocks = 25
        assert full_blocks <= consumer.transfers.stats.pulled_blocks <= full_blocks + 10  # the end of windows, a state
        consumer.answer("b", text, source.source)
        assert consumer.transfers.stats.pulls == 1, "asked for what is here"
        assert consumer.answer("c", longer_text, source.source) == plain_answer(family, "longer", longer_text)
        assert consumer.cached_tokens("c") == 200
        source.pause()


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_come_from_and_meet_host_memory(family: str) -> None:
    """The source has evicted the prompt to its host memory, the consumer its first half."""
    text = prompt(family, 202)
    fillers = [prompt(("filler", i), 200) for i in range(5)]
    units = {"qwen3": 110, "gemma3": 110, "qwen3_5": 20, "bamba": 30}[family]
    with (
        Engine(family, units=units, host_units=400) as source,
        Engine(family, units=units, host_units=400) as consumer,
    ):
        source.answer("a", text)
        consumer.answer("half", text[:101])
        for index, filler in enumerate(fillers):
            source.answer(f"filler {index}", filler)
            consumer.answer(f"filler {index}", filler)
        assert source.core.stats().host_memory.stored_bytes > 0
        source.serve()
        assert consumer.answer("a", text, source.source) == plain_answer(family, "whole", text)
        source.pause()
        check_no_failure(consumer)
        assert consumer.cached_tokens("a") == 200


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_serve_and_pull_while_they_decode(family: str) -> None:
    texts = [prompt((family, i), 120 + 7 * i) for i in range(6)]
    with Engine(family, prefix_caching=False) as plain:
        expected = [plain.answer(f"{i}", text) for i, text in enumerate(texts)]
    with Engine(family, overlaps_steps=True) as left, Engine(family, overlaps_steps=True) as right:
        for i, text in enumerate(texts):
            (left if i % 2 else right).answer(f"first {i}", text)
        left.add("long", prompt("long", 40), max_tokens=60)
        right.add("long", prompt("long", 40), max_tokens=60)
        for i, text in enumerate(texts):
            (right if i % 2 else left).add(f"{i}", text, (left if i % 2 else right).source)
        while left.core.has_work or right.core.has_work:
            for engine in (left, right):
                if engine.core.has_work:
                    engine.step()
        for i, text in enumerate(texts):
            engine = right if i % 2 else left
            assert engine.tokens(f"{i}") == expected[i]
            assert engine.cached_tokens(f"{i}") == (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
        check_no_failure(left, pulls=3)
        check_no_failure(right, pulls=3)


def test_requests_for_the_same_blocks_share_a_pull_and_its_end() -> None:
    text = prompt("shared", 202)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text)
        for index in range(4):
            consumer.add(f"{index}", text, source.source)
        consumer.core.abort(["0"])
        source.serve()
        consumer.run()
        source.pause()
        check_no_failure(consumer)
        assert [consumer.cached_tokens(f"{index}") for index in range(1, 4)] == [200] * 3
        assert "0" not in consumer.outputs


@pytest.mark.parametrize(("cached_tokens", "pulls"), [(None, 3), (160, 1)])
def test_blocks_that_several_prompts_begin_with_are_sent_once(cached_tokens: int | None, pulls: int) -> None:
    """Prompts share one pull, and its end, if the requests say up to where the source has them."""
    texts = [prompt("common", 160) + prompt(index, 42) for index in range(3)]
    with Engine(prefix_caching=False) as plain:
        expected = [plain.answer(f"{index}", text) for index, text in enumerate(texts)]
    with Engine() as source, Engine() as consumer:
        source.answer("a", prompt("common", 160) + [1])
        for index, text in enumerate(texts):
            consumer.add(f"{index}", text, replace(source.source, cached_tokens=cached_tokens))
        source.serve()
        consumer.run()
        source.pause()
        check_no_failure(consumer, pulls=pulls)
        assert [consumer.tokens(f"{index}") for index in range(3)] == expected
        assert [consumer.cached_tokens(f"{index}") for index in range(3)] == [160] * 3
        assert source.transfers.stats.sent_blocks == 40


def test_a_prompt_whose_beginning_is_being_pulled_waits_for_it() -> None:
    text, other = (prompt("common", 160) + prompt(name, 42) for name in "ab")
    with Engine() as source, Engine() as consumer:
        source.answer("a", prompt("common", 160) + [1])
        consumer.add("pulling", text, replace(source.source, cached_tokens=160))
        consumer.add("without a source", other)
        consumer.add("unlike", prompt("unlike", 42))
        source.serve()
        consumer.run()
        source.pause()
        check_no_failure(consumer)
        names = ["pulling", "without a source", "unlike"]
        assert [consumer.cached_tokens(name) for name in names] == [160, 160, 0]
        assert consumer.tokens("without a source") == plain_answer("qwen3", "other", other)


def test_a_small_cache_keeps_what_fits_and_computes_the_others() -> None:
    text = prompt("large", 302)
    with Engine() as source, Engine(units=100) as consumer:
        source.answer("a", text)
        consumer.answer("half", text[:151])
        consumer.answer("filler", prompt("filler", 150))
        source.serve()
        assert consumer.answer("a", text, source.source) == plain_answer("qwen3", "large", text)
        assert consumer.cached_tokens("a") == 300, "the part that was here was evicted for the part that came"
        running_text = prompt("runs", 250)
        consumer.add("runs", running_text, max_tokens=100)
        while "runs" not in consumer.outputs:
            consumer.step()
        consumer.answer("b", prompt("other", 302)[:290] + [1], source.source)
        source.pause()


def test_blocks_that_were_evicted_meanwhile_are_computed() -> None:
    """The source says that it has all blocks, and has them no more when they are asked for."""
    text = prompt("evicted", 202)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text[:81])
        source.exchange.locate = lambda hashes: b"\1" * len(hashes)  # type: ignore[method-assign]
        source.serve()
        assert consumer.answer("a", text, source.source) == plain_answer("qwen3", "evicted", text)
        source.pause()
        assert consumer.cached_tokens("a") == 80
        assert consumer.transfers.stats.missing_blocks == 30
        assert not sum(consumer.transfers.stats.failures.values())


def reset_before_reading(source: Engine, reset_engine: Engine) -> None:
    """Empty the cache of one of two engines when the source reads blocks, on the thread that runs the steps of both."""
    reading = source.exchange.read

    def reset_and_read(wanted_blocks: Sequence[WantedBlock]) -> Any:
        reset_engine.core.reset_prefix_cache()
        return reading(wanted_blocks)

    source.exchange.read = reset_and_read  # type: ignore[method-assign]


def test_a_source_that_was_emptied_meanwhile_sends_no_block() -> None:
    text = prompt("emptied", 202)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text)
        reset_before_reading(source, source)
        source.serve()
        assert consumer.answer("a", text, source.source) == plain_answer("qwen3", "emptied", text)
        source.pause()
        assert consumer.cached_tokens("a") == 0
        assert consumer.transfers.stats.missing_blocks == 50
        assert not sum(consumer.transfers.stats.failures.values())


def test_nothing_is_stored_after_a_reset() -> None:
    text = prompt("reset", 202)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text)
        reset_before_reading(source, consumer)
        consumer.add("a", text, source.source)
        while consumer.core.has_work:
            consumer.step()
            if source.core.has_work:
                source.step()
        assert consumer.tokens("a") == plain_answer("qwen3", "reset", text)
        assert consumer.cached_tokens("a") == 0
        assert consumer.transfers.stats.pulled_blocks == 0


def test_a_salt_keeps_caches_apart() -> None:
    text = prompt("salt", 102)
    with Engine() as source, Engine() as consumer:
        source.answer("a", text)
        source.serve()
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        consumer.core.add(
            Request(request_id="a", token_ids=text, params=params, cache_salt="x", kv_source=source.source), 0.0
        )
        consumer.run()
        source.pause()
        assert consumer.cached_tokens("a") == 0
        check_no_failure(consumer)


@pytest.mark.long
def test_the_benchmark_of_a_pull_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "kv_transfer.py"), "--blocks", "8", "--rounds", "1"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "median" in process.stdout
