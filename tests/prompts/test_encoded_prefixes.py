"""Known beginnings of long texts: ids as of a full encode whatever follows, memory within its bound."""

from __future__ import annotations

import json
from functools import cache

import pytest
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from prompts import encoded_prefixes, segments
from prompts.encoded_prefixes import EncodedPrefix, EncodedPrefixCache
from prompts.segments import SegmentCache, SegmentPlan, encode_plain, make_segment_plan


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are short: everything from 8 characters on is long enough to be kept."""
    monkeypatch.setattr(encoded_prefixes, "PREFIX_CHARS_MIN", 8)
    monkeypatch.setattr(segments, "PREFIX_CHARS_MIN", 8)
    monkeypatch.setattr(encoded_prefixes, "_SAMPLE_CHARS", 2)


@cache
def _prepare_plan(spec: str) -> tuple[Tokenizer, SegmentPlan, list[str]]:
    hf_tokenizer = Tokenizer.from_str(spec)
    plan = make_segment_plan(hf_tokenizer)
    assert isinstance(plan, SegmentPlan), plan
    return hf_tokenizer, plan, [token["content"] for token in json.loads(spec)["added_tokens"]]


def _check_texts(
    hf_tokenizer: Tokenizer, plan: SegmentPlan, data: st.DataObject, pieces: st.SearchStrategy[str]
) -> None:
    """A tree of texts: each goes on from somewhere in an earlier one."""
    bounds = {
        "max_bytes": st.sampled_from([400, 4_000, 1_000_000]),
        "short_text_chars_max": st.sampled_from([0, 0, 1_000]),
    }
    cache = SegmentCache(hf_tokenizer, plan, **data.draw(st.fixed_dictionaries(bounds)))
    texts = [""]
    for _ in range(data.draw(st.integers(2, 6))):
        before = texts[data.draw(st.integers(0, len(texts) - 1))]
        before = before[: len(before) - data.draw(st.integers(0, 4))]
        text = before + data.draw(st.lists(pieces, min_size=2, max_size=14).map("".join))
        texts.append(text)
        for special in (False, True):
            actual_ids = cache.encode(text, add_special_tokens=special)
            assert actual_ids is None or actual_ids == encode_plain(hf_tokenizer, text, add_special_tokens=special), (
                text
            )
        cache.check_invariants()


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_ids_are_those_of_a_full_encode(kind, make_tokenizer, data) -> None:
    hf_tokenizer, plan, added_tokens = _prepare_plan(make_tokenizer(kind).to_str())
    pieces = st.one_of(
        st.sampled_from(added_tokens), st.sampled_from(["a", " fox", "<|", "|>", "\n", "é", "日", "<|im_", "1"])
    )
    _check_texts(hf_tokenizer, plan, data, pieces)


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_tokens_that_hold_a_cut_in_their_middle_or_begin_with_one(make_tokenizer, data) -> None:
    hf_tokenizer = make_tokenizer("qwen")
    odd = ("ab<|im_end|>cd", "<|im_start|>user", "d|><|endof", "x<|im_start|>")
    hf_tokenizer.add_tokens([AddedToken(token, normalized=False) for token in odd])
    hf_tokenizer, plan, added_tokens = _prepare_plan(hf_tokenizer.to_str())
    assert "<|endoftext|>" in plan.anchor_tokens
    assert not {"<|im_end|>", "<|im_start|>"} & plan.anchor_tokens
    pieces = st.one_of(
        st.sampled_from(added_tokens), st.sampled_from(["ab", "cd", "user", "x", "d|>", "<|endof", "text|>"])
    )
    _check_texts(hf_tokenizer, plan, data, pieces)


def test_of_a_conversation_that_comes_back_only_the_new_turn_is_cut(make_tokenizer, monkeypatch) -> None:
    hf_tokenizer, plan, _ = _prepare_plan(make_tokenizer("qwen").to_str())
    cache = SegmentCache(hf_tokenizer, plan, short_text_chars_max=0)
    talk = "".join(f"<|im_start|>user\nturn {n}<|im_end|>\n" for n in range(50))
    cut: list[int] = []
    split = SegmentPlan.split
    monkeypatch.setattr(SegmentPlan, "split", lambda self, text: cut.append(len(text)) or split(self, text))
    for turn in ("one", "another", "a third"):
        text = f"{talk}<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        assert cache.encode(text, add_special_tokens=False) == encode_plain(
            hf_tokenizer, text, add_special_tokens=False
        )
    assert cut[0] > len(talk)
    assert max(cut[1:]) < 80
    assert cache.stats().hit_tokens > cache.stats().miss_tokens


steps = st.lists(st.tuples(st.booleans(), st.text("ab", min_size=1, max_size=40), st.integers(0, 9)), max_size=40)


@given(steps=steps, max_bytes=st.sampled_from([0, 2_000, 8_000]))
def test_what_is_found_is_a_beginning_and_memory_is_bounded(steps, max_bytes) -> None:
    cache = EncodedPrefixCache(max_bytes)
    for is_stored, text, id_count in steps:
        if is_stored:
            cache.store(EncodedPrefix(text, len(text) - 1, bytes(4 * id_count)))
        prefix = cache.find(text)
        assert prefix is None or text.startswith(prefix.text)
        if is_stored and max_bytes == 8_000 and len(text) >= 8:
            assert prefix is not None, "what was kept last is found"
            assert prefix.text == text
        cache.check_invariants()


def test_a_text_too_long_for_the_memory_is_not_kept() -> None:
    book = EncodedPrefixCache(10_000)
    book.store(EncodedPrefix("a" * 5_000, 4_999, b""))
    assert len(book) == 0
    assert book.find("a" * 6_000) is None
