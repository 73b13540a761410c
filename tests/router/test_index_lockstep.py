"""The native index in lockstep with the reference, under any interleaving of what engines do to them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import msgspec
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_world import GroupSpec as Spec
from index_world import World, dump
from old_events import encode_as_arrays
from reference import ReferenceIndex

from events.codec import encode_batch
from events.types import AllBlocksCleared, EventBatch
from router.index import make_index
from router.index.protocol import IngestReport, PrefixIndex, Scope

SCOPE = Scope("m")
EXAMPLES = int(os.environ.get("LOCKSTEP_EXAMPLES", examples(150)))
"""More for a long run: LOCKSTEP_EXAMPLES=20000."""


LAYOUTS = [
    (Spec(None, None, 2),),
    (Spec(0, "full_attention", 1),),
    (Spec(0, "sliding_window", 2, 4), Spec(1, "full_attention", 2)),
    (Spec(0, "full_attention", 2), Spec(1, "mamba", 2), Spec(2, "mamba", 2)),
    (Spec(0, "full_attention", 2), Spec(1, "sliding_window", 1, 4), Spec(2, "mamba", 2)),
    (Spec(0, "full_attention", 2), Spec(0, "full_attention", 3), Spec(0, "full_attention", 1)),
    (Spec(3, "full_attention", 2), Spec(4, "full_attention", 1), Spec(5, "chunked_local_attention", 1, 4)),
    (Spec(0, "full_attention", 1), Spec(1, "sliding_window", 1, 3), Spec(1, "sliding_window", 2, 3)),
]

CHANGES: tuple[dict[str, Any], ...] = (
    {"block_size": 0},
    {"lora_id": 0, "lora_name": ""},
    {"mm_keys": [None, [{"type": "mm_key"}]]},
    {"mm_keys": [[1, 2]], "extra_keys": [[("image", 1)], None]},
    {"parent_block_hash": 0},
    {"token_ids": "text"},
    {"token_ids": None},
)
"""What other publishers say of a run of blocks."""
NEWER = ("changed", "counted", "partial", "clear tier")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
tiers = st.sampled_from(("GPU", "GPU", "GPU", "CPU", "STORAGE"))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 2), tiers, prompts, st.integers(0, 4), st.integers(1, 6)),
        st.tuples(st.just("whole"), st.integers(0, 2), tiers, prompts),
        st.tuples(st.just("sparse"), st.integers(0, 2), tiers, prompts, st.integers(0, 4095)),
        st.tuples(st.just("remove"), st.integers(0, 2), tiers, prompts, st.integers(0, 6)),
        st.tuples(st.just("groupless"), st.integers(0, 2), tiers, prompts, st.integers(1, 6), st.booleans()),
        st.tuples(st.just("bare"), st.integers(0, 2), tiers, prompts, st.integers(0, 4095)),
        st.tuples(st.just("groupless removal"), st.integers(0, 2), tiers, prompts, st.integers(0, 6)),
        st.tuples(
            st.just("changed"),
            st.integers(0, 2),
            tiers,
            prompts,
            st.integers(0, 4),
            st.integers(1, 6),
            st.sampled_from(CHANGES),
        ),
        st.tuples(st.just("counted"), st.integers(0, 2), tiers, prompts, st.integers(0, 6), st.integers(0, 3)),
        st.tuples(st.just("partial"), st.integers(0, 2), tiers, prompts, st.integers(0, 4), st.integers(0, 3)),
        st.tuples(st.just("clear tier"), tiers),
        st.tuples(st.just("clear")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("flush")),
        st.tuples(st.just("match"), prompts),
    ),
    max_size=40,
)


def drive(world: World, operation: tuple[Any, ...]) -> list[Any]:
    """The events of one operation."""
    kind, *args = operation
    if kind == "clear":
        return list(world.clear())
    if kind == "clear tier":
        return [AllBlocksCleared(args[0])]
    spec = world.specs[args[0] % len(world.specs)]
    if kind == "store":
        return list(world.store(spec, *args[1:]))
    if kind == "changed":
        return [_change_event(event, args[5]) for event in world.store(spec, *args[1:5])]
    if kind == "counted":
        return [
            msgspec.structs.replace(event, remaining_copy_counts=[args[4]]) for event in world.remove(spec, *args[1:4])
        ]
    if kind == "partial":
        return list(world.store_partial(spec, *args[1:]))
    if kind == "whole":
        return list(world.store(spec, args[1], args[2], 0, len(args[2])))
    if kind == "sparse":
        return [] if spec.kind in (None, "full_attention") else list(world.store_sparse(spec, *args[1:]))
    if kind == "groupless":
        return list(world.store_without_group(spec, *args[1:]))
    if kind == "bare":
        return list(world.store_bare(spec, *args[1:]))
    if kind == "groupless removal":
        return list(world.remove_without_group(spec, *args[1:]))
    return list(world.remove(spec, *args[1:]))


def _change_event(event: Any, change: dict[str, Any]) -> Any:
    if change.get("token_ids") == "text":
        change = {"token_ids": [*event.token_ids[:-1], "image"]}
    return msgspec.structs.replace(event, **change)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layout=st.sampled_from(LAYOUTS), run=operations, batch_events=st.integers(1, 6))
def test_odd_copies_take_nothing_away(layout: Any, run: Any, batch_events: int) -> None:
    """Copies on slower tiers told without group or tokens: every prefix stays usable that was so without them."""
    index, world = make_index(1), World(layout)
    plain, odd = index.add_holder("m"), index.add_holder("m")
    events_by_index: dict[Any, list[Any]] = {plain: [], odd: []}
    prompts: set[tuple[int, ...]] = set()
    for operation in run:
        kind = operation[0]
        if kind in ("flush", "restart", "match", "groupless removal", *NEWER):
            continue
        events = drive(world, (*operation[:2], "CPU", *operation[3:]) if kind in ("groupless", "bare") else operation)
        prompts.update(value for value in operation if isinstance(value, tuple))
        events_by_index[odd] += events
        events_by_index[plain] += [] if kind in ("groupless", "bare") else events
    for holder, events in events_by_index.items():
        for at in range(0, len(events), batch_events):
            assert index.ingest(holder, encode_batch(EventBatch(0.0, events[at : at + batch_events]))).malformed == []
    for prompt in prompts:
        matched_tokens = {match.holder: (match.tokens, match.gpu_tokens) for match in index.match((*prompt, 9), SCOPE)}
        usable, with_odd = matched_tokens.get(plain, (0, 0)), matched_tokens.get(odd, (0, 0))
        assert with_odd[0] >= usable[0]
        assert with_odd[1] >= usable[1]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), operations), max_size=4),
    pins=st.lists(st.tuples(st.integers(0, 2), prompts, st.booleans()), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    encode=st.sampled_from([encode_batch, encode_as_arrays]),
    names_are_bytes=st.booleans(),
)
def test_native_equals_the_reference(
    layouts: Any, steps: Any, pins: Any, seed: int, encode: Any, names_are_bytes: bool
) -> None:
    """Reports, groups, statistics and every field of every match, pins included."""
    pair = (ReferenceIndex(seed), make_index(seed))
    worlds = [World(layout, names_are_bytes) for layout in layouts]
    holders = [[index.add_holder("m") for _ in range(len(worlds))] for index in pair]
    assert holders[0] == holders[1]
    tried_prompts: set[tuple[int, ...]] = {()}
    for pick, prompt, stays in pins:
        prepared_prompts = [index.prepare(prompt) for index in pair]
        for ask in range(2):  # what one call computes of a prepared prompt serves the next
            keys = [index.chunk_keys(ids, SCOPE, 1 + ask) for index, ids in zip(pair, prepared_prompts)]
            assert keys[0] == keys[1] == pair[1].chunk_keys(prompt, SCOPE, 1 + ask)
            assert _fields(pair[1].match(prepared_prompts[1], SCOPE)) == _fields(pair[0].match(prompt, SCOPE))
        pin_ids = [index.pin(holders[0][pick % len(worlds)], ids, SCOPE) for index, ids in zip(pair, prepared_prompts)]
        tried_prompts.add(prompt)
        if not stays:
            for index, pin in zip(pair, pin_ids):
                index.unpin(pin)
    for pick, run in steps:
        at = pick % len(worlds)
        pending: list[Any] = []
        for operation in [*run, ("flush",)]:
            if operation[0] in ("flush", "restart"):
                payload = encode(EventBatch(0.0, pending))
                pending = []
                reports = [index.ingest(holders[0][at], payload, float(len(tried_prompts))) for index in pair]
                assert _counts(reports[0]) == _counts(reports[1])
                if operation[0] == "restart":
                    for index in pair:
                        index.clear(holders[0][at])
            elif operation[0] == "match":
                tried_prompts.add(operation[1])
            else:
                pending.extend(drive(worlds[at], operation))
                tried_prompts.update(value for value in operation if isinstance(value, tuple))
        pair[0].check_invariants()
    for prompt in [*tried_prompts, *(tuple(bits >> i & 1 for i in range(8)) for bits in range(256))]:
        _same_matches(pair, prompt)
        assert pair[0].find_lost_blocks(prompt, SCOPE, 0, 1) == pair[1].find_lost_blocks(prompt, SCOPE, 0, 1)
    for holder in holders[0]:
        assert pair[0].groups(holder) == pair[1].groups(holder)
        twins = (ReferenceIndex(seed), make_index(seed))
        for source in pair:
            for twin in twins:
                _check_copy(source, twin, holder, tried_prompts)
    stats = [index.stats() for index in pair]
    assert (stats[0].entries, stats[0].parked, stats[0].pins) == (stats[1].entries, stats[1].parked, stats[1].pins)


RUN = tuple(range(12))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    run=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(("store", "store", "remove")), tiers, st.integers(0, 5),
                  st.integers(1, 6)),
        max_size=12,
    ),
    pins=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=2),
)  # fmt: skip
def test_runs_of_blocks_that_some_hold_in_part(run: Any, pins: Any) -> None:
    """One prompt, of which three holders have these and those blocks on these and those tiers."""
    pair, layout = (ReferenceIndex(7), make_index(7)), (Spec(None, None, 2),)
    worlds = [World(layout) for _ in range(3)]
    holders = [pair[0].add_holder("m") for _ in range(3)]
    assert holders == [pair[1].add_holder("m") for _ in range(3)]
    for pick, kind, tier, start, count in run:
        args = (tier, RUN, start, count) if kind == "store" else (tier, RUN, start)
        payload = encode_batch(EventBatch(0.0, drive(worlds[pick], (kind, 0, *args))))
        for index in pair:
            index.ingest(holders[pick], payload)
    for pick, length in pins:
        for index in pair:
            index.pin(holders[pick], RUN[:length], SCOPE)
    for length in range(2, 13):
        _same_matches(pair, (*RUN[:length], 99))


def _check_copy(source: PrefixIndex, twin: PrefixIndex, holder: Any, prompts: Any) -> None:
    """A dump of either implementation rebuilds the holder in either."""
    copy = twin.add_holder("m")
    for part in dump(source, holder):
        assert twin.load(copy, part).malformed == []
    for prompt in prompts:
        tokens = {match.holder: match.tokens for match in source.match(prompt, SCOPE)}
        copied_tokens = {match.holder: match.tokens for match in twin.match(prompt, SCOPE)}
        assert tokens.get(holder, 0) == copied_tokens.get(copy, 0)


def _counts(report: IngestReport) -> dict[str, object]:
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(IngestReport)}


def _fields(matches: Any) -> list[tuple[Any, ...]]:
    return sorted((m.holder, m.tokens, m.gpu_tokens, tuple(m.tier_tokens), m.pinned_tokens) for m in matches)


def _same_matches(pair: Any, prompt: tuple[int, ...]) -> None:
    expected = _fields(pair[0].match(prompt, SCOPE))
    assert expected == _fields(pair[1].match(prompt, SCOPE))
    prepared_prompt = pair[1].prepare(prompt)
    pair[1].chunk_keys(prepared_prompt, SCOPE, 1)  # as of a prompt that was seen before: its keys are known
    assert expected == _fields(pair[1].match(prepared_prompt, SCOPE))
