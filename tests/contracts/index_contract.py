"""What every PrefixIndex must do, as functions `check_*(make_index)`; tests/router/test_index.py runs them.

The bytes come from our own codec here; tests/golden holds those of real engines.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from index_world import dump
from old_events import encode_as_arrays

from events.codec import encode_batch
from events.types import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from router.index.protocol import SILENT_AFTER_STORES, HolderId, Match, PrefixIndex, Scope, Tokens, make_block_group

MakeIndex = Callable[[], PrefixIndex]
PROMPT = list(range(100, 300))
SCOPE = Scope("m")


def batch(*events: Event) -> bytes:
    return encode_batch(EventBatch(0.0, list(events), 0))


def store_event(
    names: list[Any],
    tokens: list[int],
    parent: Any = None,
    size: int = 16,
    medium: str | None = "GPU",
    lora: str | None = None,
    **fields: Any,
) -> BlockStored:
    lora_id = fields.pop("lora_id", None)
    return BlockStored(names, parent, tokens, size, lora_id, medium, lora, **fields)


def remove_event(*names: Any, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(names), medium, group)


def store_prompt(count: int, size: int = 16, first: int = 1, tokens: list[int] = PROMPT, **fields: Any) -> BlockStored:
    """The first `count` blocks of the prompt, named first, first + 1, ..."""
    return store_event(list(range(first, first + count)), tokens[: count * size], size=size, **fields)


def one_holder(make: MakeIndex) -> tuple[PrefixIndex, HolderId]:
    index = make()
    return index, index.add_holder("m")


def single_match(index: PrefixIndex, tokens: Tokens = PROMPT, scope: Scope = SCOPE) -> Match | None:
    matches = list(index.match(tokens, scope))
    assert len(matches) <= 1
    return matches[0] if matches else None


def tokens_of(index: PrefixIndex, tokens: list[int] = PROMPT, scope: Scope = SCOPE) -> int:
    match = single_match(index, tokens, scope)
    return 0 if match is None else match.tokens


def tokens_by_holder(index: PrefixIndex, tokens: list[int] = PROMPT, scope: Scope = SCOPE) -> dict[int, int]:
    return {match.holder: match.tokens for match in index.match(tokens, scope)}


# -- full attention ------------------------------------------------------------------------------------------------


def check_stored_blocks_match(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    report = index.ingest(holder, batch(store_prompt(4)))
    assert (report.stored, report.parked, report.malformed) == (4, 0, [])
    assert tokens_of(index) == 64
    assert tokens_of(index, PROMPT[:40]) == 32
    assert tokens_of(index, [1, *PROMPT]) == 0
    assert tokens_of(index, []) == 0 == tokens_of(index, [7])
    match = single_match(index)
    assert match is not None
    assert (match.gpu_tokens, tuple(match.tier_tokens), match.pinned_tokens) == (64, (64, 0, 0, 0), 64)


def check_shared_beginnings(make: MakeIndex) -> None:
    index, long = make(), list(range(5000))
    for other in ([], [1], long[:1], long, long[:512], long[:1025], [*long[:1024], 0], [*long[:4999], 7, 8]):
        shared_count = next((i for i, (a, b) in enumerate(zip(long, other)) if a != b), len(other))
        assert (
            index.count_common_tokens(array("I", long), array("I", other))
            == index.count_common_tokens(other, long)
            == shared_count
        )


def check_at_most_prompt_minus_one(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    assert tokens_of(index, PROMPT[:64]) == 48
    assert tokens_of(index, PROMPT[:65]) == 64


def check_holes_are_exact(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(10)))
    index.ingest(holder, batch(remove_event(5)))
    assert tokens_of(index) == 64
    index.ingest(holder, batch(store_event([5], PROMPT[64:80], parent=4)))
    assert tokens_of(index) == 160


def check_copies_are_counted(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    index.ingest(holder, batch(store_event([4], PROMPT[48:64], parent=3)))
    index.ingest(holder, batch(remove_event(4)))
    assert tokens_of(index) == 64
    index.ingest(holder, batch(remove_event(4)))
    assert tokens_of(index) == 48
    assert index.ingest(holder, batch(remove_event(4))).unknown_removals == 1
    assert tokens_of(index) == 48


def check_what_is_gone_is_remembered(make: MakeIndex) -> None:
    """Who held it and when it left, until a miss in between; what is still held somewhere is for `match` to tell."""
    index, holder = one_holder(make)
    other = index.add_holder("m")
    index.ingest(holder, batch(store_prompt(8)), 1.0)
    index.ingest(other, batch(store_prompt(3)), 1.0)
    assert index.find_lost_blocks(PROMPT, SCOPE, 0, 16) is None
    index.ingest(holder, batch(remove_event(8, 7)), 2.0)
    index.ingest(holder, batch(remove_event(6, 5, 3)), 3.5)
    assert index.find_lost_blocks(PROMPT, SCOPE, 64, 16) == (128, holder, 3.5)
    assert index.find_lost_blocks(PROMPT, SCOPE, 32, 16) == (48, holder, 3.5), "the fourth block is still there"
    assert index.find_lost_blocks(PROMPT, SCOPE, 96, 16) == (128, holder, 2.0)
    assert index.find_lost_blocks(PROMPT, Scope("m", salt="s"), 64, 16) is None
    assert index.find_lost_blocks(PROMPT[:120], SCOPE, 64, 16) == (112, holder, 3.5)
    index.ingest(other, batch(remove_event(3)), 4.0)
    assert index.find_lost_blocks(index.prepare(PROMPT), SCOPE, 32, 16) == (48, other, 4.0), "the last one to have it"
    with pytest.raises(ValueError, match="step is 0"):
        index.find_lost_blocks(PROMPT, SCOPE, 0, 0)


def check_what_leaves_a_window_is_not_gone(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_prompt(4), 0, "sliding_window", 32)), 1.0)
    index.ingest(holder, batch(remove_event(1, 2, group=0)), 2.0)
    assert index.find_lost_blocks(PROMPT, SCOPE, 0, 16) is None


def check_two_names_of_one_block(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(2), store_prompt(2, first=11)))
    index.ingest(holder, batch(remove_event(2), remove_event(1)))
    assert tokens_of(index) == 32
    index.ingest(holder, batch(remove_event(11)))
    assert tokens_of(index) == 0


def check_reannounced_hits_are_a_set(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.set_reannounces(holder, True)
    index.ingest(holder, batch(store_prompt(4)))
    index.ingest(holder, batch(store_prompt(4)))
    index.ingest(holder, batch(remove_event(4)))
    assert tokens_of(index) == 48


def check_reused_name_follows_the_newest_block(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(2)))
    other = list(range(500, 600))
    index.ingest(holder, batch(store_prompt(2, tokens=other)))
    assert tokens_of(index) == 0
    assert tokens_of(index, other) == 32
    index.ingest(holder, batch(remove_event(1, 2)))
    assert tokens_of(index, other) == 0
    assert index.stats().entries == 0


# -- names and parents ---------------------------------------------------------------------------------------------


def check_names_of_every_form(make: MakeIndex) -> None:
    forms: list[tuple[Any, Any]] = [
        (2**64 - 1, 2**63),
        (-1, -(2**63)),
        (bytes(32), bytes(range(32))),
        (0, 1),
        (b"", b"x"),
    ]
    for first, second in forms:
        for encode in (encode_batch, encode_as_arrays):
            index, holder = one_holder(make)
            index.ingest(holder, encode(EventBatch(0.0, [store_event([first], PROMPT[:16])])))
            index.ingest(holder, encode(EventBatch(0.0, [store_event([second], PROMPT[16:32], parent=first)])))
            assert tokens_of(index) == 32, (first, second)
            assert index.ingest(holder, encode(EventBatch(0.0, [remove_event(second)]))).removed == 1
            assert tokens_of(index) == 16


def check_unknown_parent_waits(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    assert index.ingest(holder, batch(store_event([3, 4], PROMPT[32:64], parent=2))).parked == 2
    assert index.ingest(holder, batch(store_event([5], PROMPT[64:80], parent=4))).parked == 1
    assert index.stats().parked == 3
    assert tokens_of(index) == 0
    index.ingest(holder, batch(store_prompt(2)))
    assert tokens_of(index) == 80
    assert (index.stats().parked, index.stats().entries) == (0, 5)


def check_removal_of_a_waiting_block(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_event([3, 4], PROMPT[32:64], parent=2)))
    assert index.ingest(holder, batch(remove_event(4))).removed == 1
    index.ingest(holder, batch(store_prompt(2)))
    assert tokens_of(index) == 48
    assert index.ingest(holder, batch(remove_event(4))).unknown_removals == 1


def check_waiting_blocks_are_bounded(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    runs = [store_event(list(range(at, at + 512)), [7] * 512, parent=at - 1, size=1) for at in range(10, 70_000, 513)]
    for event in runs:
        index.ingest(holder, batch(event))
    assert 7_600 < index.stats().parked <= 8_192


def check_child_before_parent_in_one_batch(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    report = index.ingest(holder, batch(store_event([3], PROMPT[32:48], parent=2), store_prompt(2)))
    assert (report.stored, report.parked) == (3, 0)
    assert tokens_of(index) == 48


def check_child_of_a_block_that_waited_until_this_batch(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_event([3], PROMPT[32:48], parent=2)))
    report = index.ingest(holder, batch(store_prompt(2), store_event([4], PROMPT[48:64], parent=3)))
    assert (report.stored, report.parked) == (4, 0)
    assert tokens_of(index) == 64
    assert index.stats().parked == 0


def check_store_and_removal_in_one_batch(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(3), remove_event(3), remove_event(9)))
    assert tokens_of(index) == 32
    index.ingest(holder, batch(remove_event(2), store_event([2, 3], PROMPT[16:48], parent=1), remove_event(3)))
    assert tokens_of(index) == 32


# -- clearing, holders, models -------------------------------------------------------------------------------------


def check_clear_event_inside_a_batch(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    report = index.ingest(holder, batch(store_prompt(5), AllBlocksCleared(), store_prompt(2)))
    assert (report.cleared, report.stored) == (1, 7)
    assert tokens_of(index) == 32
    index.ingest(holder, batch(AllBlocksCleared()))
    assert tokens_of(index) == 0
    assert index.stats().entries == 0


def check_clear_and_remove_holder(make: MakeIndex) -> None:
    index = make()
    a, b = index.add_holder("m"), index.add_holder("m")
    for holder in (a, b):
        index.ingest(holder, batch(store_prompt(4)))
    index.clear(a)
    assert tokens_by_holder(index) == {b: 64}
    index.remove_holder(b)
    assert tokens_by_holder(index) == {}
    assert (index.stats().entries, index.stats().holders) == (0, 1)
    with pytest.raises(KeyError):
        index.ingest(b, batch(store_prompt(4)))
    with pytest.raises(KeyError):
        index.clear(b)
    c = index.add_holder("m")
    assert c != b
    index.ingest(c, batch(store_prompt(1)))
    index.ingest(a, batch(store_prompt(2)))
    assert tokens_by_holder(index) == {a: 32, c: 16}


def check_models_are_apart(make: MakeIndex) -> None:
    index = make()
    a, b = index.add_holder("m"), index.add_holder("other")
    index.ingest(a, batch(store_prompt(4)))
    index.ingest(b, batch(store_prompt(2)))
    assert tokens_by_holder(index) == {a: 64}
    assert tokens_by_holder(index, scope=Scope("other")) == {b: 32}
    assert tokens_by_holder(index, scope=Scope("third")) == {}


def check_many_holders(make: MakeIndex) -> None:
    index = make()
    holders = [index.add_holder("m") for _ in range(150)]
    for i, holder in enumerate(holders):
        index.ingest(holder, batch(store_prompt(1 + i % 12)))
    assert tokens_by_holder(index) == {holder: 16 * (1 + i % 12) for i, holder in enumerate(holders)}
    for holder in holders[::2]:
        index.remove_holder(holder)
    for i, holder in enumerate(holders[1::2]):
        index.ingest(holder, batch(remove_event(1 + (1 + 2 * i) % 12)))
    expected = {holder: 16 * (i % 12) for i, holder in enumerate(holders) if i % 2}
    assert tokens_by_holder(index) == {holder: tokens for holder, tokens in expected.items() if tokens}


# -- block sizes ---------------------------------------------------------------------------------------------------


def check_block_sizes_between_holders(make: MakeIndex) -> None:
    index = make()
    a, b = index.add_holder("m"), index.add_holder("m")
    index.ingest(a, batch(store_prompt(4)))
    index.ingest(b, batch(store_prompt(2, size=48)))
    assert tokens_by_holder(index) == {a: 64, b: 96}


def check_block_sizes_inside_a_group(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_event([1], PROMPT[:32], size=32), store_event([2], PROMPT[32:48], parent=1)))
    index.ingest(holder, batch(store_event([3], PROMPT[48:128], parent=2, size=80)))
    assert tokens_of(index) == 128
    assert tokens_of(index, PROMPT[:128]) == 48
    index.ingest(holder, batch(remove_event(1)))
    assert tokens_of(index) == 0
    index.ingest(holder, batch(store_event([7, 8], PROMPT[:32])))
    assert tokens_of(index) == 128


# -- what tells prompts apart --------------------------------------------------------------------------------------


def check_salts(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(2, extra_keys=[("A",), None])))
    index.ingest(holder, batch(store_event([3], PROMPT[32:48], parent=2, extra_keys=[None])))
    assert tokens_of(index) == 0
    assert tokens_of(index, scope=Scope("m", "B")) == 0
    assert tokens_of(index, scope=Scope("m", "A")) == 48
    sglang = make()
    holder = sglang.add_holder("m")
    sglang.ingest(holder, batch(store_prompt(2, cache_salt="A")))
    assert (tokens_of(sglang), tokens_of(sglang, scope=Scope("m", "A"))) == (0, 32)


def check_loras(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(2, lora="lo", lora_id=1, extra_keys=[("lo", "S"), ("lo",)])))
    index.ingest(holder, batch(store_prompt(3, first=11, lora="lo", extra_keys=[("lo",)] * 3)))
    index.ingest(holder, batch(store_prompt(4, first=21, lora="lo2")))
    index.ingest(holder, batch(store_prompt(5, first=31, lora_id=9)))
    assert tokens_of(index) == 0
    assert tokens_of(index, scope=Scope("m", "S", "lo")) == 32
    assert tokens_of(index, scope=Scope("m", None, "lo")) == 48
    assert tokens_of(index, scope=Scope("m", None, "lo2")) == 64


def check_blocks_with_media_match_nothing(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    keys = [None, (("img", 4),), (("img", -12), ("snd", 15)), (("snd", -1),)]
    index.ingest(holder, batch(store_prompt(4, extra_keys=keys)))
    assert tokens_of(index) == 16
    report = index.ingest(holder, batch(store_event([5], PROMPT[64:80], parent=4)))
    assert (report.stored, report.parked, tokens_of(index)) == (1, 0, 16)
    assert index.ingest(holder, batch(remove_event(2, 5))).unknown_removals == 0
    salted = index.add_holder("m")
    index.ingest(salted, batch(store_prompt(2, extra_keys=[(("img", 4), "salt"), None])))
    assert tokens_by_holder(index, scope=Scope("m", "salt")) == {}


def check_unreadable_extra_keys_match_nothing(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(3, extra_keys=[None, ("bare-identifier",), None])))
    assert tokens_of(index) == 16
    index.ingest(holder, batch(store_prompt(3, first=11, extra_keys=[None, None, (5, b"x", ("y", "z"))])))
    assert tokens_of(index) == 32


# -- groups --------------------------------------------------------------------------------------------------------


def in_group(event: BlockStored, group: int, kind: str, window: int | None = None) -> BlockStored:
    event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = group, kind, window
    return event


def check_sliding_window(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder,
        batch(in_group(store_prompt(8), 1, "full_attention"), in_group(store_prompt(8), 0, "sliding_window", 40)),
    )
    assert tokens_of(index) == 128
    # ceil(39 / 16) = 3 blocks before p
    index.ingest(holder, batch(remove_event(6, group=0)))
    assert tokens_of(index) == 80
    index.ingest(holder, batch(remove_event(1, group=0), remove_event(2, group=0)))
    assert tokens_of(index) == 80
    index.ingest(holder, batch(remove_event(3, group=0)))
    assert tokens_of(index) == 0
    index.ingest(holder, batch(in_group(store_event([1], PROMPT[:16]), 0, "sliding_window", 40)))
    assert tokens_of(index) == 16
    assert tokens_of(index, PROMPT[:33]) == 16


def check_window_smaller_than_a_block(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_prompt(8), 0, "full_attention")))
    index.ingest(holder, batch(in_group(store_event([8], PROMPT[112:128], parent=7), 1, "sliding_window", 17)))
    assert tokens_of(index) == 128
    assert tokens_of(index, PROMPT[:128]) == 0


def check_chunked_local(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_prompt(8), 0, "full_attention")))
    index.ingest(holder, batch(in_group(store_event([5], PROMPT[64:80], parent=4), 1, "chunked_local_attention", 64)))
    assert tokens_of(index) == 128
    assert tokens_of(index, PROMPT[:128]) == 80
    assert tokens_of(index, PROMPT[:80]) == 64


def check_state_checkpoints(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder,
        batch(in_group(store_event([6], PROMPT[:96]), 0, "mamba"), in_group(store_prompt(8), 3, "full_attention")),
    )
    assert tokens_of(index) == 96
    assert tokens_of(index, PROMPT[:96]) == 0
    index.ingest(holder, batch(in_group(store_event([2], PROMPT[16:32], parent=1), 0, "mamba")))
    assert tokens_of(index, PROMPT[:96]) == 32
    index.ingest(holder, batch(remove_event(6, group=0)))
    assert tokens_of(index) == 32
    index.ingest(holder, batch(remove_event(2, group=0)))
    assert tokens_of(index) == 0


def check_every_group_must_resume(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder,
        batch(in_group(store_prompt(8), 0, "full_attention"), in_group(store_prompt(8), 1, "sliding_window", 33)),
    )
    index.ingest(holder, batch(*(in_group(store_event([n], PROMPT[: 16 * n]), 2, "mamba") for n in (3, 5, 7))))
    assert tokens_of(index) == 112
    index.ingest(holder, batch(remove_event(6, group=1)))
    assert tokens_of(index) == 80
    index.ingest(holder, batch(remove_event(5, group=2)))
    assert tokens_of(index) == 48
    index.ingest(holder, batch(remove_event(2, group=0)))
    assert tokens_of(index) == 0


def check_sparse_events(make: MakeIndex) -> None:
    """As vLLM 0.32: the window group names its last blocks only, before full attention spells them out."""
    index, holder = one_holder(make)
    sparse = in_group(store_event([7, 8], PROMPT[:128]), 0, "sliding_window", 33)
    report = index.ingest(holder, batch(sparse, in_group(store_prompt(8), 1, "full_attention")))
    assert (report.stored, report.parked) == (10, 0)
    assert tokens_of(index) == 128
    assert tokens_of(index, PROMPT[:128]) == 0
    index.ingest(holder, batch(in_group(store_event([], PROMPT[128:144], parent=8), 0, "sliding_window", 33)))
    assert tokens_of(index) == 128


def check_sparse_names_wait_for_their_spelling(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    sparse = in_group(store_event([7, 8], PROMPT[:128]), 0, "sliding_window", 33)
    assert index.ingest(holder, batch(sparse)).parked == 2
    index.ingest(holder, batch(remove_event(7, group=0)))
    index.ingest(holder, batch(in_group(store_prompt(8), 1, "full_attention")))
    assert tokens_of(index) == 0
    assert index.stats().entries == 9


def check_state_model_without_full_attention(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_event([6], PROMPT[:96]), 0, "mamba")))
    assert tokens_of(index) == 96
    index.ingest(holder, batch(in_group(store_event([8], PROMPT[96:128], parent=6), 0, "mamba")))
    assert tokens_of(index) == 128


def check_empty_group_that_has_spoken(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder,
        batch(in_group(store_prompt(8), 0, "full_attention"), in_group(store_event([], PROMPT[:128]), 1, "mamba")),
    )
    assert tokens_of(index) == 0


def check_declared_groups(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    full = {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}
    state = {"group_idx": 1, "kind": "mamba", "block_size": 16, "sliding_window": None}
    index.declare_groups(holder, [full, state])
    index.ingest(holder, batch(in_group(store_prompt(2), 0, "full_attention")))
    assert tokens_of(index) == 0
    assert [group["silent"] for group in index.groups(holder)] == [False, False]
    for at in range(3, 3 + SILENT_AFTER_STORES):
        event = store_event([at], PROMPT[16 * at - 16 : 16 * at], parent=at - 1)
        index.ingest(holder, batch(in_group(event, 0, "full_attention")))
    assert tokens_of(index) == 160
    assert index.groups(holder)[1] == {**state, "blocks": 0, "silent": True}
    index.ingest(holder, batch(in_group(store_event([4], PROMPT[48:64], parent=3), 1, "mamba")))
    assert tokens_of(index) == 64
    index.clear(holder)
    assert [(group["group_idx"], group["blocks"], group["silent"]) for group in index.groups(holder)] == [
        (0, 0, False),
        (1, 0, False),
    ]


def check_known_block_length_without_events(make: MakeIndex) -> None:
    """Prompts in flight leave whole blocks of the length that was declared, and later of the announced lengths."""
    index, holder = one_holder(make)
    index.declare_groups(holder, [make_block_group(64)])
    index.pin(holder, PROMPT[:60], SCOPE)
    assert [match.pinned_tokens for match in index.match(PROMPT, SCOPE)] in ([], [0])
    pin = index.pin(holder, PROMPT[:150], SCOPE)
    assert [match.pinned_tokens for match in index.match(PROMPT, SCOPE)] == [128]
    index.unpin(pin)
    index.ingest(holder, batch(in_group(store_prompt(2), 0, "full_attention")))
    assert tokens_of(index) == 32
    index.pin(holder, PROMPT[:60], SCOPE)
    assert [match.pinned_tokens for match in index.match(PROMPT, SCOPE)] == [48]


def check_encoder_groups_are_ignored(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder, batch(in_group(store_prompt(2), 0, "full_attention"), in_group(store_prompt(1), 1, "cross_attention"))
    )
    assert tokens_of(index) == 32


def check_groups_report(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    assert index.held_tokens(holder) == 0
    index.ingest(
        holder,
        batch(in_group(store_prompt(4), 1, "full_attention"), in_group(store_prompt(2), 0, "sliding_window", 40)),
    )
    assert index.held_tokens(holder) == 64
    assert index.groups(holder) == [
        {
            "group_idx": 0,
            "kind": "sliding_window",
            "block_size": 16,
            "sliding_window": 40,
            "blocks": 2,
            "silent": False,
        },
        {
            "group_idx": 1,
            "kind": "full_attention",
            "block_size": 16,
            "sliding_window": None,
            "blocks": 4,
            "silent": False,
        },
    ]
    assert index.stats().entries == 6
    assert index.stats().memory_bytes > 0


# -- tiers ---------------------------------------------------------------------------------------------------------


def check_tiers(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(
        holder,
        batch(
            store_prompt(6),
            store_prompt(8, medium="CPU_PINNED"),
            store_prompt(3, medium="DISK"),
            store_prompt(9, medium="EXTERNAL"),
        ),
    )
    index.ingest(holder, batch(remove_event(5, 3, medium="GPU")))
    match = single_match(index)
    assert match is not None
    assert (match.tokens, match.gpu_tokens) == (144, 32)
    assert tuple(match.tier_tokens) == (64, 64, 0, 16)
    index.ingest(
        holder, batch(remove_event(1, medium="CPU"), remove_event(3, medium="cpu"), remove_event(7, medium="REMOTE"))
    )
    match = single_match(index)
    assert match is not None
    assert (match.tokens, tuple(match.tier_tokens)) == (144, (64, 48, 16, 16))
    index.ingest(holder, batch(remove_event(1, 2, 4, 6)))
    match = single_match(index)
    assert match is not None
    assert (match.tokens, match.gpu_tokens, tuple(match.tier_tokens)) == (144, 0, (0, 96, 32, 16))


# -- copies that leave out what they are about: made by hand after vLLM 0.32's connectors, not recorded -------------


def lmcache(name: int, end: int, size: int, parent: int | None = None) -> BlockStored:
    """LMCache's connector: chunks of its own size under names of its own, of no group, with tokens."""
    return store_event([name], PROMPT[end - size : end], parent=parent, size=size, medium="cpu")


def offloaded_store(*names: int, group: int | None = 0, size: int = 0, medium: str = "CPU") -> BlockStored:
    """vLLM's offloading connector: names only. Its simple one and Mooncake's tell the size (`size`)."""
    return store_event(list(names), [], size=size, medium=medium, group_idx=group)


def match_counts(index: PrefixIndex) -> tuple[int, int, tuple[int, ...]]:
    match = single_match(index)
    return (0, 0, (0, 0, 0, 0)) if match is None else (match.tokens, match.gpu_tokens, tuple(match.tier_tokens))


def hybrid() -> list[BlockStored]:
    return [in_group(store_prompt(8), 1, "full_attention"), in_group(store_prompt(8), 0, "sliding_window", 33)]


def check_a_store_without_group_makes_no_group(make: MakeIndex) -> None:
    """Whether it comes before the groups have spoken, with them or after: the prefix is what it was without it."""
    early, together, late = batch(lmcache(901, 64, 64)), batch(*hybrid(), lmcache(901, 64, 64)), batch(*hybrid())
    for payloads in ([early, late], [together], [late, early]):
        index, holder = one_holder(make)
        for payload in payloads:
            index.ingest(holder, payload)
        assert match_counts(index) == (128, 128, (128, 0, 0, 0))
    index.ingest(holder, batch(lmcache(902, 128, 64, parent=901)))
    index.ingest(holder, batch(remove_event(1, 2, 3, 4, group=1)))
    assert match_counts(index) == (128, 0, (64, 64, 0, 0))
    assert [(group["group_idx"], group["block_size"]) for group in index.groups(holder)] == [(0, 16), (1, 16)]
    index.ingest(holder, batch(remove_event(901, medium="CPU")))
    assert match_counts(index) == (0, 0, (0, 0, 0, 0))


def check_a_known_name_without_group_is_in_its_group(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    window = in_group(store_event([21], PROMPT[:16]), 0, "sliding_window", 17)
    index.ingest(holder, batch(in_group(store_prompt(1), 1, "full_attention"), window))
    for name, group, tokens_left in ((21, 0, 16), (1, 1, 16)):
        index.ingest(holder, batch(store_event([name], PROMPT[:16], medium="CPU"), remove_event(name, group=group)))
        assert tokens_of(index) == tokens_left
    assert match_counts(index) == (16, 0, (0, 16, 0, 0))
    index.ingest(holder, batch(remove_event(21, medium="CPU")))
    assert tokens_of(index) == 0


def check_without_any_group_nothing_changes(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4), lmcache(901, 128, 128), offloaded_store(2, group=None)))
    assert match_counts(index) == (128, 64, (0, 128, 0, 0))
    index.ingest(holder, batch(remove_event(901, medium="CPU")))
    assert match_counts(index) == (64, 64, (64, 0, 0, 0))


def check_names_without_tokens_are_copies(make: MakeIndex) -> None:
    for size in (0, 16):
        for group in (1, None):
            index, holder = one_holder(make)
            index.ingest(holder, batch(*hybrid()))
            report = index.ingest(holder, batch(offloaded_store(3, 4, group=group, size=size)))
            assert (report.stored, report.unknown_copies, report.parked, report.malformed) == (2, 0, 0, [])
            index.ingest(holder, batch(remove_event(3, 4, group=1)))
            assert match_counts(index) == (128, 32, (96, 32, 0, 0))
            report = index.ingest(holder, batch(remove_event(4, group=group, medium="CPU")))
            assert (report.removed, report.unknown_removals) == (1, 0)
            assert tokens_of(index) == 48
            assert [entry["block_size"] for entry in index.groups(holder)] == [16, 16]


def check_a_block_evicted_before_its_copy_is_told(make: MakeIndex) -> None:
    """The block leaves the GPU in the batch that says where it went."""
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_prompt(4), 0, "full_attention")))
    assert index.ingest(holder, batch(remove_event(4, group=0), offloaded_store(4))).stored == 1
    assert match_counts(index) == (64, 48, (48, 16, 0, 0))


def check_unknown_names_without_tokens_are_counted(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(in_group(store_prompt(4), 0, "full_attention")))
    before = index.groups(holder)
    report = index.ingest(
        holder, batch(offloaded_store(77, 78, medium="STORAGE"), offloaded_store(1, group=5), offloaded_store())
    )
    assert (report.stored, report.unknown_copies, report.parked, report.malformed) == (0, 3, 0, [])
    assert (index.groups(holder), index.stats().parked) == (before, 0)
    assert match_counts(index) == (64, 64, (64, 0, 0, 0))
    report = index.ingest(holder, batch(remove_event(77, group=0, medium="STORAGE"), offloaded_store(4, size=80)))
    assert (report.unknown_removals, report.stored) == (1, 1), "a known length is believed, not the one told"
    assert match_counts(index) == (64, 64, (64, 0, 0, 0))


# -- shapes that other publishers send ------------------------------------------------------------------------------


def as_map(event: BlockStored | BlockRemoved, **fields: Any) -> dict[str, Any]:
    """An event as a map, with other fields."""
    return {**msgspec.to_builtins(event), **fields}


def foreign(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def check_a_publisher_that_begins_prompts_behind_the_parent_0(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    assert index.ingest(holder, foreign(as_map(store_prompt(4), parent_block_hash=0))).parked == 0
    assert tokens_of(index) == 64
    index.ingest(holder, foreign(as_map(store_prompt(4), parent_block_hash=0, block_hashes=[0, 91, 92, 93])))
    index.ingest(
        holder, foreign(as_map(store_prompt(1), parent_block_hash=0, block_hashes=[94], token_ids=PROMPT[16:32]))
    )
    index.ingest(holder, batch(remove_event(2, 91)))
    assert tokens_of(index) == 64, "0 is a name like others where it is one"


def check_a_block_size_that_is_left_at_0(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    assert index.ingest(holder, foreign(as_map(store_prompt(4), block_size=0))).malformed == []
    assert tokens_of(index) == 64
    report = index.ingest(holder, foreign(as_map(store_prompt(4), block_size=0, token_ids=PROMPT[:63])))
    assert report.malformed_events == 1


def check_an_adapter_without_number_and_name_is_none(make: MakeIndex) -> None:
    for fields in ({"lora_id": 0}, {"lora_name": ""}, {"lora_id": 0, "lora_name": "", "extra_keys": [[""]] * 4}):
        index, holder = one_holder(make)
        index.ingest(holder, foreign(as_map(store_prompt(4), **fields)))
        assert tokens_of(index) == (0 if "extra_keys" in fields else 64)
    index, holder = one_holder(make)
    index.ingest(holder, foreign(as_map(store_prompt(4), lora_id=1, lora_name="")))
    assert tokens_of(index) == 0


def check_media_cut_the_chain_where_they_stand(make: MakeIndex) -> None:
    """Texts among the token ids and media keys of TensorRT-LLM: what is before them is text, and what is behind is
    somebody's all the same, so that its removals are known."""
    key = {"type": "mm_key", "hash": "ab", "start_offset": 0}
    texts = [*PROMPT[:40], *["image"] * 8, *PROMPT[48:64]]
    for fields in ({"token_ids": texts}, {"mm_keys": [[], None, [key], []]}, {"mm_keys": [None, None, [key]]}):
        index, holder = one_holder(make)
        assert index.ingest(holder, foreign(as_map(store_prompt(4), **fields))).malformed == []
        assert tokens_of(index) == 32
        assert index.ingest(holder, batch(store_event([5, 6], PROMPT[64:96], 4))).parked == 0, (
            "what follows the media is placed behind them"
        )
        assert tokens_of(index) == 32
        assert index.ingest(holder, batch(remove_event(1, 3, 5))).unknown_removals == 0
        assert tokens_of(index) == 0


def check_names_whose_tokens_are_nil_are_copies(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    copies = as_map(store_prompt(4), token_ids=None, medium="CPU")
    assert index.ingest(holder, foreign(copies)).stored == 4
    index.ingest(holder, batch(remove_event(1, 2, 3, 4)))
    assert match_counts(index) == (64, 0, (0, 64, 0, 0))


def check_the_copies_that_a_removal_leaves_are_believed(make: MakeIndex) -> None:
    index, holder = one_holder(make)

    def tokens_after_removal(*counts: int) -> int:
        index.ingest(
            holder, foreign(as_map(remove_event(*range(1, 1 + len(counts))), remaining_copy_counts=list(counts)))
        )
        return tokens_of(index)

    for _ in range(3):
        index.ingest(holder, batch(store_prompt(4)))
    assert tokens_after_removal(1, 1, 1, 0) == 48
    assert tokens_after_removal(1, 1, 1) == 48, "again, of copies that were not counted here"
    assert tokens_after_removal(2) == 48
    index.ingest(holder, batch(remove_event(1)))
    assert tokens_of(index) == 48
    index.ingest(holder, batch(remove_event(1)))
    assert tokens_of(index) == 0
    index.set_reannounces(holder, True)
    index.ingest(holder, batch(store_prompt(1)))
    assert tokens_after_removal(5) == 48
    index.ingest(holder, batch(remove_event(1)))
    assert tokens_of(index) == 0


def check_one_medium_is_cleared(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4), store_prompt(2, medium="CPU")))
    report = index.ingest(holder, foreign({"type": "AllBlocksCleared", "medium": "cpu"}))
    assert (report.cleared, report.removed) == (0, 2)
    assert match_counts(index) == (64, 64, (64, 0, 0, 0))
    assert index.ingest(holder, batch(store_event([9], PROMPT[:16], 8, medium="CPU"))).parked == 1
    index.ingest(holder, foreign(["AllBlocksCleared", "CPU"]))
    assert index.stats().parked == 0
    index.ingest(holder, foreign(["AllBlocksCleared", "GPU"]))
    assert tokens_of(index) == 0
    index.ingest(holder, batch(store_prompt(4), store_prompt(2, medium="CPU")))
    for odd in ({"type": "AllBlocksCleared", "medium": 5}, ["AllBlocksCleared"], ["AllBlocksCleared", None]):
        index.ingest(holder, batch(store_prompt(4)))
        assert index.ingest(holder, foreign(odd)).cleared == 1
        assert tokens_of(index) == 0


def check_a_partial_block_with_skipped_ancestry(make: MakeIndex) -> None:
    """A full block of 64, then one that is not full: 32 tokens of it, of which only the last 16 have a name."""

    def partial(**fields: Any) -> dict[str, Any]:
        return {
            **as_map(store_prompt(1)), "block_hashes": [82], "parent_block_hash": 81, "token_ids": PROMPT[80:96],
            "skipped_parent_block_hash": 1, "skipped_token_ids": PROMPT[64:80], "skipped_extra_keys": [None], **fields,
        }  # fmt: skip

    full = {**as_map(store_prompt(1)), "token_ids": PROMPT[:64], "block_size": 64}
    for fields, tokens in (
        ({}, 96),
        ({"skipped_extra_keys": [["image"]]}, 64),
        ({"skipped_parent_block_hash": 7}, 64),
        ({"skipped_token_ids": PROMPT[65:81]}, 64),
    ):
        index, holder = one_holder(make)
        index.ingest(holder, foreign(full, partial(**fields)))
        assert tokens_of(index) == tokens
    index.ingest(holder, batch(remove_event(82)))
    assert tokens_of(index) == 64
    index, holder = one_holder(make)
    gap = partial(skipped_parent_block_hash=1, skipped_token_ids=PROMPT[16:80])
    index.ingest(holder, foreign(as_map(store_prompt(1)), gap))
    assert tokens_of(index) == 16, "between blocks of one size, what was skipped is not there"
    index.ingest(holder, batch(store_prompt(5, first=1)))
    assert tokens_of(index) == 96


# -- pins ----------------------------------------------------------------------------------------------------------


def match_pinned(index: PrefixIndex, tokens: Tokens = PROMPT, scope: Scope = SCOPE) -> tuple[int, int]:
    match = single_match(index, tokens, scope)
    return (0, 0) if match is None else (match.tokens, match.pinned_tokens)


def check_pins(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(2)))
    first = index.pin(holder, PROMPT[:100], SCOPE)
    second = index.pin(holder, array("I", PROMPT[:70]).tobytes(), SCOPE)
    assert match_pinned(index) == (32, 96)
    assert match_pinned(index, PROMPT[:90] + [1] * 20) == (32, 80)
    assert match_pinned(index, scope=Scope("m", "salt")) == (0, 0)
    assert index.stats().pins == 2
    index.unpin(first)
    assert match_pinned(index) == (32, 64)
    index.clear(holder)
    assert match_pinned(index) == (0, 64)
    index.unpin(second)
    index.unpin(second)
    assert match_pinned(index) == (0, 0)
    assert index.stats().pins == 0


def check_pins_end_in_any_order(make: MakeIndex) -> None:
    rng = random.Random(5)
    for _ in range(40):
        index = make()
        cuts = {index.add_holder("m"): 16, index.add_holder("m"): 32}
        for holder, size in cuts.items():
            index.ingest(holder, batch(store_event([1], [7] * size, size=size)))
        pins: list[tuple[Any, HolderId, list[int]]] = []
        for step in range(30):
            if pins and (step > 20 or rng.random() < 0.4):
                index.unpin(pins.pop(rng.randrange(len(pins)))[0])
            else:
                base = rng.choice(pins)[2] if pins and rng.random() < 0.7 else PROMPT
                ids = base[: rng.randrange(len(base) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(90))]
                holder = rng.choice(list(cuts))
                pins.append((index.pin(holder, ids, SCOPE), holder, ids))
            prompt = [*rng.choice(pins)[2], 9] if pins else PROMPT
            expected_tokens = {
                holder: max(length // cut * cut for length in [0, *_pinned_lengths(pins, holder, prompt)])
                for holder, cut in cuts.items()
            }
            matched_tokens = {match.holder: match.pinned_tokens for match in index.match(prompt, SCOPE)}
            assert matched_tokens == {holder: tokens for holder, tokens in expected_tokens.items() if tokens}
        holder = next(iter(cuts))
        index.ingest(holder, batch(AllBlocksCleared(), store_event([1], [7] * 48, size=48)))  # now it is cut otherwise
        new_pins = [
            index.pin(holder, ids[: rng.randrange(len(ids) + 1)], SCOPE) for _, _, ids in [*pins, (0, holder, PROMPT)]
        ]
        remaining_pins = [pin for pin, _, _ in pins] + new_pins
        rng.shuffle(remaining_pins)
        for pin in remaining_pins:
            index.unpin(pin)
        assert [match for _, _, ids in [*pins, (0, holder, PROMPT)] for match in index.match(ids, SCOPE)] == []


def _pinned_lengths(pins: list[tuple[Any, HolderId, list[int]]], holder: HolderId, token_ids: list[int]) -> list[int]:
    """How much of what is asked each pin of a holder promises, but for the last token."""
    lengths = []
    for _, pin_holder, ids in pins:
        if pin_holder == holder:
            shared_length = next(
                (i for i, (a, b) in enumerate(zip(ids, token_ids)) if a != b), min(len(ids), len(token_ids))
            )
            lengths.append(min(shared_length, len(token_ids) - 1))
    return lengths


def check_pins_fill_holes(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(6), remove_event(2)))
    pin = index.pin(holder, PROMPT[:40], SCOPE)
    assert match_pinned(index) == (16, 96)
    index.unpin(pin)
    assert match_pinned(index) == (16, 16)


def check_pins_of_a_state_model(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.declare_groups(
        holder,
        [
            {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None},
            {"group_idx": 1, "kind": "mamba", "block_size": 16, "sliding_window": None},
        ],
    )
    index.pin(holder, PROMPT[:64], SCOPE)
    assert match_pinned(index) == (0, 48)
    assert match_pinned(index, PROMPT[:48]) == (0, 0)
    index.ingest(
        holder,
        batch(in_group(store_prompt(8), 0, "full_attention"), in_group(store_event([2], PROMPT[:32]), 1, "mamba")),
    )
    assert match_pinned(index) == (32, 48)


def check_pins_of_sparse_windows(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    sparse = in_group(store_event([3, 4], PROMPT[:64]), 0, "sliding_window", 33)
    index.ingest(holder, batch(sparse, in_group(store_prompt(4), 1, "full_attention")))
    index.pin(holder, PROMPT[:128], SCOPE)
    assert match_pinned(index) == (64, 112)
    assert match_pinned(index, PROMPT[:112]) == (64, 64)


def check_pins_end_with_their_holder(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    pin = index.pin(holder, PROMPT, SCOPE)
    index.remove_holder(holder)
    assert index.stats().pins == 0
    index.unpin(pin)
    other = index.add_holder("m")
    index.pin(other, PROMPT[:32], SCOPE)
    assert match_pinned(index) == (0, 32)


# -- input and output ----------------------------------------------------------------------------------------------


def check_token_bytes(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    for tokens in (PROMPT, tuple(PROMPT), array("I", PROMPT), array("q", PROMPT), array("I", PROMPT).tobytes()):
        assert [match.tokens for match in index.match(tokens, SCOPE)] == [64], type(tokens)
    for bad in ([1, -1], [1 << 32], b"\0" * 7):
        with pytest.raises(ValueError):
            index.match(bad, SCOPE)


def check_prepared_prompts(make: MakeIndex) -> None:
    """One prepared prompt, asked in several scopes and cut in several ways, answers as its ids do."""
    index, holder = one_holder(make)
    index.ingest(holder, batch(store_prompt(4)))
    prompt = index.prepare(array("I", PROMPT))
    assert len(prompt) == len(PROMPT)
    for scope in (SCOPE, Scope("m", "salt"), SCOPE, Scope("m")):
        assert match_pinned(index, prompt, scope) == match_pinned(index, PROMPT, scope)
        for chunk in (16, 24, 8, 5, 1000):
            assert index.chunk_keys(prompt, scope, chunk) == index.chunk_keys(PROMPT, scope, chunk)
        pin = index.pin(holder, prompt, scope)
        assert match_pinned(index, scope=scope)[1] == 16 * ((len(PROMPT) - 1) // 16)
        index.unpin(pin)
    other = index.add_holder("m")
    index.ingest(other, batch(store_prompt(3, size=4)))
    assert [match.tokens for match in index.match(prompt, SCOPE)] == [64, 12]


def check_an_order_leaves_out_who_is_beaten(make: MakeIndex) -> None:
    """Six holders of 4, 1, 0, 2, 2 and 3 blocks, one of the four in flight."""
    index = make()
    holders = [index.add_holder("m") for _ in range(6)]
    for holder, blocks in zip(holders, (3, 1, 0, 2, 2, 3)):
        if blocks:
            index.ingest(holder, batch(store_prompt(blocks)))
    index.pin(holders[0], PROMPT[:65], SCOPE)

    def unbeaten(order: Sequence[int], max_rivals: int) -> list[tuple[int, int]]:
        matches = index.match(PROMPT, SCOPE, [holders[i] for i in order], max_rivals)
        return [(holders.index(match.holder), match.pinned_tokens) for match in matches]

    assert unbeaten([2, 1, 3, 4, 5, 0], 1) == [(1, 16), (3, 32), (5, 48), (0, 64)]
    assert unbeaten([2, 1, 3, 4, 5, 0], 2) == [(1, 16), (3, 32), (4, 32), (5, 48), (0, 64)]
    assert unbeaten([0, 1, 2, 3, 4, 5], 1) == [(0, 64)]
    assert unbeaten([0, 1, 2, 3, 4, 5], 3) == [(0, 64), (1, 16), (3, 32), (4, 32), (5, 48)]
    assert unbeaten([5, 3], 1) == [(5, 48)], "others are not asked about"
    assert unbeaten([], 1) == []
    with pytest.raises(ValueError, match="max_rivals"):
        unbeaten([1], 0)


def check_chunk_keys_name_whole_prefixes_and_scopes(make: MakeIndex) -> None:
    index = make()
    keys = index.chunk_keys(PROMPT[:100], SCOPE, 32)
    assert len(keys) == len(set(keys)) == 3
    assert index.chunk_keys(PROMPT[:97], SCOPE, 32) == keys
    assert index.chunk_keys(PROMPT[:96], SCOPE, 32) == keys[:2], "the last token is always computed"
    assert not set(index.chunk_keys([9, *PROMPT[1:100]], SCOPE, 32)) & set(keys)
    assert not set(index.chunk_keys(PROMPT[:100], Scope("m", "salt"), 32)) & set(keys)
    with pytest.raises(ValueError):
        index.chunk_keys(PROMPT, SCOPE, 0)


def check_large_token_ids(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    tokens = [2**32 - 1, 0, 2**31, 128, 127, 255, 256, 65535, 65536] * 3
    index.ingest(holder, batch(store_prompt(20, size=1, tokens=tokens)))
    assert tokens_of(index, tokens) == 20


def check_bad_events_cost_only_themselves(make: MakeIndex) -> None:
    index, holder = one_holder(make)
    bad = [
        store_event([1, 2], PROMPT[:31]),
        store_event([1, 2], PROMPT[:15], size=0),
        store_event([1], [2**32] * 16),
        store_event([1], [-1] * 16),
    ]
    for event in bad:
        report = index.ingest(holder, batch(event, store_prompt(3)))
        assert (report.stored, len(report.malformed)) == (3, 1), event
        assert "BlockStored" in report.malformed[0]
    assert tokens_of(index) == 48
    for payload in (b"", b"\xc1", batch(store_prompt(2))[:-40], b"\x93\x01", b"\x91\x01"):
        assert len(index.ingest(holder, payload).malformed) == 1, payload
    assert tokens_of(index) == 48


def check_dump_moves_to_an_index_of_the_same_seed(make_seeded: Callable[[int], PrefixIndex]) -> None:
    index, twin, stranger = make_seeded(5), make_seeded(5), make_seeded(6)
    holder = index.add_holder("m")
    events = [
        in_group(store_prompt(8), 1, "full_attention"),
        in_group(store_event([7, 8], PROMPT[:128]), 0, "sliding_window", 33),
        in_group(store_event([8], PROMPT[112:128], parent=7), 1, "full_attention"),
    ]
    index.ingest(holder, batch(*events))
    index.ingest(holder, batch(store_event([1], PROMPT[:16], medium="CPU", group_idx=1)))
    parts = dump(index, holder)
    copy = twin.add_holder("m")
    for part in parts:
        assert twin.load(copy, part).malformed == []
    assert twin.groups(copy) == index.groups(holder)
    assert twin.held_tokens(copy) == index.held_tokens(holder)
    assert twin.stats().entries == index.stats().entries
    for payload in (batch(remove_event(8, group=1)), batch(remove_event(8, group=1)), batch(remove_event(7, group=0))):
        assert tokens_of(twin) == tokens_of(index)
        index.ingest(holder, payload)
        twin.ingest(copy, payload)
    assert tokens_of(twin) == tokens_of(index) == 0
    other = stranger.add_holder("m")
    assert all(len(stranger.load(other, part).malformed) == 1 for part in parts)
    assert stranger.stats().entries == 0


CHECKS = [
    value for name, value in sorted(globals().items()) if name.startswith("check_") and "make" in value.__annotations__
]
SEEDED_CHECKS = [check_dump_moves_to_an_index_of_the_same_seed]
