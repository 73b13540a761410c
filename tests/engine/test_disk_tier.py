"""What a request gets from the disk, how long it waits, and what is written: on the fake device, step by step."""

from __future__ import annotations

from disk_hands import SIZE, TEXT, after_a_restart, bench_on, drain, other, written

from events import STORAGE, BlockRemoved, BlockStored


def test_what_it_has_is_read_and_the_rest_computed() -> None:
    bench, disk = bench_on(after_a_restart())
    found = len(bench.cache.disk.index) * SIZE  # type: ignore[union-attr]
    assert len(written(bench)) * SIZE == found, "told at the start"
    bench.add("again", [*TEXT, 4], max_tokens=3)
    drain(bench)
    assert bench.firsts["again"].cached_tokens == found
    assert bench.device.computed_tokens == len(TEXT) + 1 - found + 2
    assert bench.core.stats().disk_loaded_bytes == found // SIZE
    assert not disk.writes, "it is there"


def test_two_that_begin_alike_have_it_read_once() -> None:
    bench, _ = bench_on(after_a_restart())
    bench.add("one", [*TEXT, 4], max_tokens=1)
    bench.add("two", [*TEXT, 3, 3], max_tokens=1)
    drain(bench)
    assert bench.core.stats().disk_loaded_bytes == len(bench.cache.disk.index)  # type: ignore[union-attr]
    assert bench.firsts["one"].cached_tokens >= 40
    assert bench.firsts["two"].cached_tokens >= 40


def test_nobody_waits_longer_than_the_bound_and_what_comes_late_is_for_the_next() -> None:
    bench, disk = bench_on(after_a_restart())
    disk.stuck = True
    bench.add("first", [*TEXT, 4], max_tokens=1)
    bench.add("behind", [2, 2, 1], max_tokens=2)
    for _ in range(5):
        bench.step()
        bench.check()
    assert "behind" in bench.ends, "it goes on meanwhile"
    assert "first" not in bench.ends
    bench.now += 6
    for _ in range(5):
        bench.step()
    assert bench.ends["first"].finish_reason == "length"
    assert not bench.firsts["first"].cached_tokens
    disk.stuck = False
    drain(bench)


def test_a_disk_that_would_take_longer_is_not_asked() -> None:
    bench, disk = bench_on(after_a_restart())
    disk.seconds = 60
    bench.add("first", [*TEXT, 4], max_tokens=1)
    bench.step()
    assert not disk.reads
    drain(bench)
    assert not bench.firsts["first"].cached_tokens


def test_the_bound_is_what_computing_takes() -> None:
    bench, _ = bench_on({})
    tier = bench.cache.disk
    assert tier is not None
    assert tier._patience_s(10) == 5.0, "nothing is known"
    bench.add("text", TEXT, max_tokens=3)
    bench.step()
    bench.now += 4.0  # 40 tokens
    bench.step()
    assert tier._patience_s(5) == 5 * SIZE * 0.1
    assert tier._patience_s(0) == 0.1
    assert tier._patience_s(1000) == 5.0
    drain(bench)


def test_what_is_damaged_is_taken_back_and_computed() -> None:
    kept = after_a_restart()
    bench, _ = bench_on(kept)
    chain = list(bench.cache.disk.index)  # type: ignore[union-attr]
    kept.pop(chain[4].slot)
    bench.add("again", [*TEXT, 4], max_tokens=3)
    drain(bench)
    assert bench.firsts["again"].cached_tokens == 4 * SIZE
    assert bench.core.stats().disk_failed_reads >= 1
    gone = [e for e in bench.events.events if isinstance(e, BlockRemoved) and e.medium == STORAGE]
    assert sum(len(e.block_hashes) for e in gone) == len(chain) - 4
    assert len(kept) == 4, "a later process does not find them either"


def test_a_beginning_that_never_leaves_the_device_is_written_first() -> None:
    bench, _ = bench_on({}, units=24)
    start = [1, 2, 3, 0] * 5
    for number in range(6):
        bench.add(f"r{number}", start + [number % 5, number // 5, *([2] * 30)], max_tokens=4)
        drain(bench)
    stored = [e for e in bench.events.events if isinstance(e, BlockStored) and e.medium == STORAGE]
    assert stored
    assert stored[0].parent_block_hash is None
    assert stored[0].token_ids[:20] == start[: len(stored[0].token_ids)][:20]
    first = next(node for node in bench.cache.tree.nodes() if node.parent is None)
    assert first.has(0), "it never left"
    assert first.hash in written(bench)


def test_host_memory_loses_the_ends_of_paths_as_without_a_disk() -> None:
    """What was held to be written is not younger than what it hangs from: else a path would go with its start."""
    bench, _ = bench_on({}, host_units=24)
    found: list[float] = []
    for number in range(8):
        bench.add(f"r{number}", [number // 4, *other(number)[:56]], max_tokens=2)
        while bench.core.has_events:
            bench.step()
            found.append(bench.core.stats().host_cache_usage)
    full = found.index(1.0)
    assert min(found[full:]) > 0.8, found
    drain(bench)


def test_behind_paths_that_are_partly_on_the_device_others_are_written() -> None:
    """All that came to host memory whole is written when nothing runs, but for what hangs from the device's."""
    bench, _ = bench_on({}, host_units=200)
    for number in range(8):
        bench.add(f"r{number}", [number // 4, *other(number)[:55]], max_tokens=2)
        bench.drain()
    drain(bench)
    tree = bench.cache.tree
    for node in list(tree.nodes()):
        at = node
        while at is not None and at.on_host(0):
            at = at.parent  # type: ignore[assignment]
        assert at is not None or node.hash in written(bench) or node.hash % 37 == 0 or _cut(node)


def _cut(node: object) -> bool:
    """Above it is one whose keys do not fit."""
    above = node.parent  # type: ignore[attr-defined]
    return above is not None and (above.hash % 37 == 0 or _cut(above))


def test_a_full_disk_gives_up_ends_of_paths_used_longest_ago() -> None:
    bench, _ = bench_on({}, slots=14, host_units=30)
    for number in (0, 1, 2, 3, 4, 0, 1):
        bench.add(f"r{number}-{bench.now}", other(number)[:40], max_tokens=4)
        drain(bench)
    assert len(written(bench)) <= 14
    assert bench.core.stats().disk_cache_usage > 0.5
    assert bench.core.stats().disk_stored_bytes > 14


def test_after_writes_that_fail_nothing_more_is_written() -> None:
    bench, disk = bench_on({})
    disk.device = None  # what writes then fails, as an error of the disk would

    def fail(entry: object, source: object) -> None:
        disk.jobs.append(lambda: (entry, False))  # type: ignore[arg-type, return-value]

    disk.write = fail  # type: ignore[method-assign]
    for number in range(6):
        bench.add(f"r{number}", other(number), max_tokens=4)
        drain(bench)
    assert bench.core.stats().disk_failed_writes >= 3
    before = bench.core.stats().disk_failed_writes
    for number in range(6, 10):
        bench.add(f"r{number}", other(number), max_tokens=4)
        drain(bench)
    assert bench.core.stats().disk_failed_writes == before
    assert not written(bench)


def test_a_reset_forgets_the_disk_too() -> None:
    bench, disk = bench_on(after_a_restart())
    bench.core.reset_prefix_cache()
    drain(bench)
    assert not bench.events.resident
    bench.add("again", [*TEXT, 4], max_tokens=3)
    drain(bench)
    assert not bench.firsts["again"].cached_tokens
    assert not disk.kept


def test_after_other_weights_nothing_is_written() -> None:
    bench, disk = bench_on(after_a_restart())
    bench.core.reset_prefix_cache()
    bench.core.give_up_disk()
    for number in range(4):
        bench.add(f"r{number}", other(number), max_tokens=4)
        drain(bench)
    assert not disk.writes
    assert not written(bench)
