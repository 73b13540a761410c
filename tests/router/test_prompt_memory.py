"""What is remembered of one prompt changes nothing of what is said of another, however alike they are."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from events.codec import encode_batch
from events.types import BlockStored, EventBatch
from prompts.routing import RoutingRequest
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.edge.request_reader import RequestReader
from router.edge.routing_headers import ResolvedModel
from router.index import make_index
from router.index.protocol import Scope
from router.prompting.conversation_cache import Boundary, CachedConversation
from router.prompting.placeholder_messages import PlaceholderMessages, RenderedPlaceholders
from router.prompting.read_body import ReadBody, TokenizedPrompt
from router.prompting.reader import PromptReader

SCOPES = (Scope("m"), Scope("m", "salt"), Scope("m", None, "lora"))
LONG = tuple(i * 7919 % 101 for i in range(1600))
lengths = st.one_of(st.integers(0, 40), st.integers(500, 540), st.integers(0, 1600))


@settings(max_examples=examples(200), deadline=None)
@given(
    first=lengths, second=lengths, changed_position=st.one_of(st.none(), lengths), before=st.sampled_from(SCOPES),
    after=st.sampled_from(SCOPES), known_share=st.sampled_from((None, 0.0, 0.3, 1.0)),
    chunks=st.lists(st.sampled_from((1, 2, 3, 16, 64)), min_size=1, max_size=3),
)  # fmt: skip
def test_it_is_as_if_nothing_was_remembered(
    first: int, second: int, changed_position: int | None, before: Scope, after: Scope, known_share: float | None,
    chunks: list[int],
) -> None:  # fmt: skip
    """`changed`: the place of a token that is another one in the second prompt. `told`: how much of what both begin
    with is known."""
    index = make_index(seed=3)
    holder = index.add_holder("a", "m")
    stored_event = BlockStored(list(range(75)), None, list(LONG[:1200]), 16, None, "GPU", None)
    index.ingest(holder, encode_batch(EventBatch(0.0, [stored_event])))
    ids, other = array("I", LONG[:first]), array("I", LONG[:second])
    if changed_position is not None and changed_position < second:
        other[changed_position] += 1
    prompt = index.prepare(ids)
    for chunk in chunks:
        index.chunk_keys(prompt, before, chunk)
    index.match(prompt, before)
    memory = index.make_memory(prompt)
    assert memory is not None
    assert memory.nbytes <= 4 * first + 8 * (first + 1)
    for chunk in reversed(chunks):
        like = index.prepare(
            other, memory, None if known_share is None else int(known_share * index.count_common_tokens(ids, other))
        )
        assert index.chunk_keys(like, after, chunk) == index.chunk_keys(other, after, chunk)
        matches, plain = index.match(like, after), index.match(index.prepare(other), after)
        assert [(m.holder, m.tokens, m.pinned_tokens) for m in matches] == [
            (m.holder, m.tokens, m.pinned_tokens) for m in plain
        ]
        index.unpin(index.pin(holder, like, after))
    assert index.chunk_keys(prompt, before, 16) == index.chunk_keys(ids, before, 16)
    assert index.stats().pins == 0


def test_ids_that_were_copied_are_not_remembered() -> None:
    index = make_index(seed=3)
    assert index.make_memory(index.prepare([1, 2, 3])) is None
    assert index.make_memory(index.prepare(array("I"))) is not None


def test_the_ids_outlive_whoever_had_them() -> None:
    index = make_index(seed=3)
    prompt = index.prepare(array("I", LONG))
    keys = index.chunk_keys(prompt, SCOPES[0], 16)
    memory = index.make_memory(prompt)
    del prompt
    second_prompt = index.prepare(array("I", [*LONG, 1]), memory)
    del memory
    assert index.chunk_keys(second_prompt, SCOPES[0], 16)[: len(keys)] == keys


def test_a_cached_conversation_keeps_the_memory_of_its_prompt() -> None:
    """Counted with the conversation's bytes; its ids once, where they are the conversation's own."""
    core = RouterCore(make_index(), CoreConfig())
    core.add_worker(WorkerSpec("a", "http://a", models=(ServedModel("m", "m", max_model_len=100_000),)), 0.0)
    prompts = PromptReader(cast(Any, None), conversation_bytes=1 << 20)
    reading, cache = RequestReader(core, prompts), prompts.conversations.cache
    for number, is_borrowed in enumerate((True, False)):
        ids = array("I", LONG)
        body = b'{"messages": [%b]}' % (b"x" * (9000 + number))
        boundaries = [Boundary(9000, 0, 3, 0, 0, RenderedPlaceholders(PlaceholderMessages(), "", 0, False), True, 1)]
        conversation = CachedConversation("chat", 0, b"", 0, [], b"", b"", 0, boundaries, ids, 0, 0, None, False)
        route = RouteRequest(f"r{number}", "m", SCOPES[0], ids if is_borrowed else array("I", LONG), len(LONG))
        core.route(route, 0.0)
        before = conversation.memory_bytes
        read = ReadBody(
            RoutingRequest("chat"), ResolvedModel("m", "m"), TokenizedPrompt(ids, 0.0, conversation), body,
            first_message_digest=7,
        )  # fmt: skip
        reading.store_conversation(cast(Any, SimpleNamespace(body=read)), route)
        assert (conversation.model, conversation.first_message_digest, conversation.is_memory_exact) == (
            "m",
            7,
            is_borrowed,
        )
        assert conversation.prompt_memory is not None
        keys = len(LONG) // 16 + 1
        assert conversation.memory_bytes - before == 8 * keys + (0 if is_borrowed else 4 * len(LONG))
        assert cache.find("chat", body, 1)[0] == (conversation, conversation.boundaries[0])
        cache.check_invariants()
