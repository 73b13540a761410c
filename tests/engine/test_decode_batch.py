"""Requests that decode together: who needs a block or fills one, against looking at everybody in every step."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.decode_batch import DecodeBatch
from engine.messages import StepOutputs
from engine.request_entry import RequestEntry
from engine.types import Chunk, DecodedTokens, LazyDecodeChunks, Request, SamplingParams, Sequence, SequenceOutput

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=6)


def entry_of(index: int, length: int, tokens_left: int, block_size: int) -> RequestEntry:
    """A request that has decoded its last known token, and may get `left` more."""
    request = Request(request_id=str(index), token_ids=[7] * length, params=SamplingParams())
    seq = Sequence(request, [7] * (length + 1), length, 0.0, computed_tokens=length)
    entry = RequestEntry(seq, request.request_id, (0, 0.0, index), frozenset({99}), length + 1 + tokens_left)
    entry.set_next_check(length - 1, block_size)
    return entry


@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_who_is_looked_at(lengths: list[tuple[int, int]], block_size: int, has_token_on_device: bool) -> None:
    entries = [entry_of(i, length, tokens_left, block_size) for i, (length, tokens_left) in enumerate(lengths)]
    decode_batch = DecodeBatch(entries)
    for _ in range(min(tokens_left for _, tokens_left in lengths) - 1):
        starts = [entry.seq.computed_tokens for entry in entries]
        assert decode_batch.entries_to_grow == [e for e in entries if e.seq.computed_tokens % block_size == 0]
        for entry in decode_batch.entries_to_grow:
            entry.set_next_check(entry.seq.computed_tokens, block_size)
        full = [e for e in entries if (e.seq.computed_tokens + 1) % block_size == 0]
        assert sorted(decode_batch.finish_growing()) == full
        chunks = decode_batch.make_chunks(token_on_device=has_token_on_device)
        assert list(chunks) == [
            Chunk(e.seq, start, start + 1, True, has_token_on_device) for e, start in zip(entries, starts)
        ]
        assert [chunks[-1], *chunks[1:]] == [list(chunks)[-1], *list(chunks)[1:]]
        assert isinstance(chunks, LazyDecodeChunks) == has_token_on_device
        for entry in entries:
            entry.seq.computed_tokens += 1
        tokens = list(range(len(entries)))
        outputs = decode_batch.append_tokens(tokens)
        assert outputs is not None
        assert list(outputs) == [SequenceOutput(request_id=e.request_id, token_ids=[i]) for i, e in enumerate(entries)]
        assert [e.seq.token_ids[-1] for e in entries] == tokens
    known_ids = [list(entry.seq.token_ids) for entry in entries]
    assert decode_batch.append_tokens([99] * len(entries)) is None  # somebody ends
    assert [entry.seq.token_ids for entry in entries] == known_ids


def test_what_is_decoded_together_is_told_whole() -> None:
    decoded_tokens = DecodedTokens(["a", "b"], [3, 4])
    decoded_again = msgspec.msgpack.decode(
        msgspec.msgpack.encode(StepOutputs([], decoded_tokens=decoded_tokens)), type=StepOutputs
    ).decoded_tokens
    assert decoded_again is not None
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in decoded_again] == [("a", [3], None), ("b", [4], None)]
    assert len(decoded_again) == 2
    assert SequenceOutput(request_id="b", token_ids=[4]) in decoded_again
    assert SequenceOutput(request_id="b", token_ids=[3]) not in decoded_again
