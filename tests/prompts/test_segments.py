"""The segment cache against plain full encodes, for every kind of tokenizer."""

from __future__ import annotations

import json
import threading
from functools import cache

import pytest
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from prompts.segments import SegmentCache, SegmentPlan, _build_trie_pattern, encode_plain, make_segment_plan

WORDS = ["The", " quick", "fox", " fox", "FOX", "panic", " don't", "1234", "\n", "\n\n", "  ", " ", "▁", "▁▁▁", "\t",
         "é", "ﬁ", "½", "日本", "한국", "🙂", "👍🏽", "<|", "|>", "<|im", "im_", "_", "x", ".", "Å", "\u0301",
         "\u200b", "\r\n"]  # fmt: skip


@cache
def _prepare_plan(spec: str) -> tuple[Tokenizer, SegmentPlan | str, list[str]]:
    hf_tokenizer = Tokenizer.from_str(spec)
    added_tokens = [token["content"] for token in json.loads(spec)["added_tokens"]]
    return hf_tokenizer, make_segment_plan(hf_tokenizer), added_tokens


def make_cache(hf_tokenizer, plan=None, **options):
    return SegmentCache(hf_tokenizer, plan or make_segment_plan(hf_tokenizer), **options)


def texts(added_tokens: list[str]) -> st.SearchStrategy[str]:
    pieces = st.one_of(
        st.sampled_from(added_tokens),
        st.sampled_from(added_tokens),
        st.sampled_from(WORDS),
        st.text(max_size=6),
    )
    return st.lists(pieces, max_size=14).map("".join).map(lambda s: s.encode("utf-8", "ignore").decode())


@given(data=st.data())
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cached_ids_equal_a_full_encode(kind, make_tokenizer, data):
    hf_tokenizer, plan, added_tokens = _prepare_plan(make_tokenizer(kind).to_str())
    assert isinstance(plan, SegmentPlan), plan
    bounds = {
        "max_bytes": st.sampled_from([1, 2_000, 1_000_000]),
        "short_text_chars_max": st.sampled_from([0, 20, 1_000]),
    }
    cache = make_cache(hf_tokenizer, plan, **data.draw(st.fixed_dictionaries(bounds)))
    history = ""
    for _ in range(data.draw(st.integers(1, 4))):
        history += data.draw(texts(added_tokens))
        for special in (False, True):
            assert "".join(plan.split(history)) == history
            actual_ids = cache.encode(history, add_special_tokens=special)
            want = encode_plain(hf_tokenizer, history, add_special_tokens=special)
            assert actual_ids is None or actual_ids == want, (kind, history)
            assert want == hf_tokenizer.encode(history, add_special_tokens=special).ids
        cache.check_invariants()


def test_every_kind_here_has_a_cache_and_knows_its_affixes(kind, make_tokenizer):
    plan = make_segment_plan(make_tokenizer(kind))
    assert isinstance(plan, SegmentPlan)
    assert "<|im_start|>" in plan.cut_tokens
    assert plan.prefix_ids is not None


def test_tokens_that_look_around_never_cut(make_tokenizer):
    assert not {"fox", "<|user|>"} & make_segment_plan(make_tokenizer("phi_rstrip")).cut_tokens
    cuts = make_segment_plan(make_tokenizer("word_edged_specials")).cut_tokens
    assert not {"BEGIN", "__x__", "panic"} & cuts
    assert "<|im_end|>" in cuts


def test_dropout_and_missing_specials_mean_no_cache():
    vocab = {chr(97 + i): i for i in range(26)}
    assert "random" in make_segment_plan(Tokenizer(models.BPE(vocab=vocab, merges=[], dropout=0.1)))
    assert "no added token" in make_segment_plan(Tokenizer(models.BPE(vocab=vocab, merges=[])))


def test_a_wrong_plan_is_found_by_the_self_check(monkeypatch, make_tokenizer):
    """Cutting at a token that strips its surroundings changes ids; the samples must show it without the rule."""
    tok = make_tokenizer("byte_level")
    tok.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False)])
    monkeypatch.setattr("prompts.segments._can_cut", lambda token, looks_around: True)
    assert "cutting changed" in make_segment_plan(tok)


@given(st.lists(st.text("ab<|>", min_size=1, max_size=5), min_size=1, max_size=12), st.text("ab<|>", max_size=40))
@settings(max_examples=examples(300), deadline=None)
def test_the_pattern_finds_the_leftmost_longest_token(words, text):
    import re

    naive, at = [], 0
    while at < len(text):
        best = max((w for w in words if text.startswith(w, at)), key=len, default="")
        if best:
            naive.append((at, best))
        at += len(best) or 1
    assert [(m.start(), m.group()) for m in re.finditer(_build_trie_pattern(words), text)] == naive


def test_a_new_turn_costs_only_itself(make_tokenizer):
    hf_tokenizer = make_tokenizer("qwen")
    cache = make_cache(hf_tokenizer, short_text_chars_max=0)
    turns = [f"<|im_start|>user\nquestion {i}<|im_end|>\n" for i in range(20)]
    cache.encode("".join(turns), add_special_tokens=False)
    before = cache.stats()
    cache.encode("".join(turns) + "<|im_start|>user\nthe new one<|im_end|>\n", add_special_tokens=False)
    after = cache.stats()
    assert after.misses - before.misses == 1
    assert after.miss_tokens - before.miss_tokens == len(hf_tokenizer.encode("<|im_start|>user\nthe new one").ids)
    assert after.hit_tokens > 0


def test_memory_is_bounded_and_the_oldest_goes_first(make_tokenizer):
    hf_tokenizer = make_tokenizer("qwen")
    cache = make_cache(hf_tokenizer, max_bytes=4_000, short_text_chars_max=0)
    first = "<|im_start|>first"
    for i in range(50):
        cache.encode(first, add_special_tokens=False)  # used all the time: it stays
        cache.encode(f"<|im_start|>number {i}", add_special_tokens=False)
    cache.check_invariants()
    misses = cache.stats().misses
    cache.encode(first, add_special_tokens=False)
    assert cache.stats().misses == misses
    cache.encode("<|im_start|>number 0", add_special_tokens=False)
    assert cache.stats().misses == misses + 1
    cache.encode("<|im_start|>" + "long " * 2_000, add_special_tokens=False)  # larger than the cache: not kept
    assert 0 < cache.stats().used_bytes <= 4_000


def test_many_threads_agree(make_tokenizer):
    hf_tokenizer = make_tokenizer("metaspace_first")
    cache = make_cache(hf_tokenizer, max_bytes=3_000)
    chats = ["".join(f"<|im_start|>user {j % 7} {i}<|im_end|>" for j in range(i)) for i in range(1, 30)]
    want = [encode_plain(hf_tokenizer, chat, add_special_tokens=True) for chat in chats]
    wrong = []

    def work() -> None:
        for _ in range(3):
            wrong.extend(c for c, w in zip(chats, want) if cache.encode(c, add_special_tokens=True) != w)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.check_invariants()


def test_the_callers_list_is_its_own(make_tokenizer):
    hf_tokenizer = make_tokenizer("qwen")
    cache = make_cache(hf_tokenizer)
    text = "<|im_start|>user"
    want = encode_plain(hf_tokenizer, text, add_special_tokens=False)
    cache.encode(text, add_special_tokens=False).append(7)
    assert cache.encode(text, add_special_tokens=False) == want


@pytest.mark.parametrize("count", [1, 3000])
def test_patterns_of_thousands_of_tokens_compile(count):
    import re

    words = [f"<unused{i}>" for i in range(count)]
    assert re.fullmatch(_build_trie_pattern(words), words[-1])
