"""Digests taken from a similar prompt change nothing of what the index says of a prompt, however alike they are."""

from __future__ import annotations

from array import array

from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from events.codec import encode_batch
from events.types import BlockStored, EventBatch
from router.index import make_index
from router.index.protocol import Scope

SCOPES = (Scope("m"), Scope("m", "salt"), Scope("m", None, "lora"))
LONG = tuple(i * 7919 % 101 for i in range(1600))
lengths = st.one_of(st.integers(0, 40), st.integers(500, 540), st.integers(0, 1600))


@settings(max_examples=examples(200), deadline=None)
@given(
    first=lengths,
    second=lengths,
    changed_position=st.one_of(st.none(), lengths),
    first_scope=st.sampled_from(SCOPES),
    second_scope=st.sampled_from(SCOPES),
    chunks=st.lists(st.sampled_from((1, 2, 3, 16, 64)), min_size=1, max_size=3),
)
def test_a_prompt_is_matched_as_if_no_similar_one_were_known(
    first: int, second: int, changed_position: int | None, first_scope: Scope, second_scope: Scope, chunks: list[int]
) -> None:
    """`changed_position`: a place of the second prompt with another token than in the first."""
    index = make_index(seed=3)
    holder = index.add_holder("m")
    stored_event = BlockStored(list(range(75)), None, list(LONG[:1200]), 16, None, "GPU", None)
    index.ingest(holder, encode_batch(EventBatch(0.0, [stored_event])))
    first_ids, second_ids = array("I", LONG[:first]), array("I", LONG[:second])
    if changed_position is not None and changed_position < second:
        second_ids[changed_position] += 1
    similar = index.prepare(first_ids)
    for chunk in chunks:
        index.chunk_keys(similar, first_scope, chunk)
    index.match(similar, first_scope)
    for chunk in reversed(chunks):
        prompt = index.prepare(second_ids, similar)
        assert index.chunk_keys(prompt, second_scope, chunk) == index.chunk_keys(second_ids, second_scope, chunk)
        matches, expected = index.match(prompt, second_scope), index.match(index.prepare(second_ids), second_scope)
        assert [(m.holder, m.tokens, m.pinned_tokens) for m in matches] == [
            (m.holder, m.tokens, m.pinned_tokens) for m in expected
        ]
        index.unpin(index.pin(holder, prompt, second_scope))
    assert index.chunk_keys(similar, first_scope, 16) == index.chunk_keys(first_ids, first_scope, 16)
    assert index.stats().pins == 0


def test_the_digests_outlive_the_ids() -> None:
    index = make_index(seed=3)
    prompt = index.prepare(array("I", LONG))
    keys = index.chunk_keys(prompt, SCOPES[0], 16)
    longer = index.prepare(array("I", [*LONG, 1]), prompt)
    del prompt
    assert index.chunk_keys(longer, SCOPES[0], 16)[: len(keys)] == keys


def test_memory_of_a_prepared_prompt_is_that_of_its_digests_and_of_copied_ids() -> None:
    index = make_index(seed=3)
    borrowed, copied = index.prepare(array("I", LONG)), index.prepare(list(LONG))
    assert (borrowed.memory_bytes, copied.memory_bytes) == (0, 4 * len(LONG))
    index.chunk_keys(borrowed, SCOPES[0], 16)
    assert borrowed.memory_bytes == 8 * (len(LONG) // 16 + 1)
