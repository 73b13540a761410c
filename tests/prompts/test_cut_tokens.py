"""Texts that are cut at tokens, against plain full encodes, for every kind of tokenizer."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from prompts.cut_tokens import CutTokens, _build_trie_pattern, find_cut_tokens
from prompts.fast_encoder import encode_plain

WORDS = ["The", " quick", "fox", " fox", "FOX", "panic", " don't", "1234", "\n", "\n\n", "  ", " ", "▁", "▁▁▁", "\t",
         "é", "ﬁ", "½", "日本", "한국", "🙂", "👍🏽", "<|", "|>", "<|im", "im_", "_", "x", ".", "Å", "\u0301",
         "\u200b", "\r\n"]  # fmt: skip


@cache
def prepare_cut_tokens(tokenizer_text: str) -> tuple[Tokenizer, CutTokens, list[str]]:
    hf_tokenizer = Tokenizer.from_str(tokenizer_text)
    added_tokens = [token["content"] for token in json.loads(tokenizer_text)["added_tokens"]]
    return hf_tokenizer, find_cut_tokens(hf_tokenizer), added_tokens


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
def test_the_ids_of_the_parts_are_those_of_the_text(kind, make_tokenizer, data):
    hf_tokenizer, cut_tokens, added_tokens = prepare_cut_tokens(make_tokenizer(kind).to_str())
    text, text_before = data.draw(texts(added_tokens)), data.draw(texts(added_tokens))
    parts = cut_tokens.split(text)
    assert "".join(parts) == text
    ids = encode_plain(hf_tokenizer, text)
    assert [token_id for part in parts for token_id in encode_plain(hf_tokenizer, part)] == ids
    for part in parts[1:]:
        assert cut_tokens.starts_with_cut(part)
    assert cut_tokens.starts_with_cut(text) == (cut_tokens.find_cut(text) == 0)
    if cut_tokens.starts_with_cut(text):
        assert encode_plain(hf_tokenizer, text_before + text) == encode_plain(hf_tokenizer, text_before) + ids


def test_every_kind_here_can_be_cut_at_messages(kind, make_tokenizer):
    is_overlapped = kind == "overlapping"  # its token |><| may begin before <|im_start|>
    assert ("<|im_start|>" in find_cut_tokens(make_tokenizer(kind)).texts) != is_overlapped


def test_tokens_that_look_around_never_cut(make_tokenizer):
    assert not {"fox", "<|user|>"} & find_cut_tokens(make_tokenizer("phi_rstrip")).texts
    cuts = find_cut_tokens(make_tokenizer("word_edged_specials")).texts
    assert not {"BEGIN", "__x__", "panic"} & cuts
    assert "<|im_end|>" in cuts


def test_tokens_that_another_may_overlap_from_before_never_cut(make_tokenizer):
    assert "▁▁▁▁" not in find_cut_tokens(make_tokenizer("gemma_whitespace")).texts
    hf_tokenizer = make_tokenizer("overlapping")
    cuts = find_cut_tokens(hf_tokenizer).texts
    for text_before, text in (("<|im_start|>", "<|im_end|>\n"), ("|>", "<|im_start|>")):
        separate_ids = encode_plain(hf_tokenizer, text_before) + encode_plain(hf_tokenizer, text)
        assert encode_plain(hf_tokenizer, text_before + text) != separate_ids
        assert text not in cuts


def test_dropout_and_missing_specials_mean_no_cuts():
    vocab = {chr(97 + i): i for i in range(26)}
    for dropout in (0.1, None):
        cut_tokens = find_cut_tokens(Tokenizer(models.BPE(vocab=vocab, merges=[], dropout=dropout)))
        assert not cut_tokens.texts
        assert cut_tokens.find_cut("abc") is None
        assert not cut_tokens.starts_with_cut("abc")


def test_a_wrong_rule_is_found_by_the_self_check(monkeypatch, make_tokenizer):
    """Cutting at a token that strips its surroundings changes ids; the samples must show it without the rule."""
    hf_tokenizer = make_tokenizer("byte_level")
    hf_tokenizer.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False)])
    assert find_cut_tokens(hf_tokenizer).texts
    monkeypatch.setattr("prompts.cut_tokens._can_cut", lambda token, looks_around: True)
    assert not find_cut_tokens(hf_tokenizer).texts


@given(st.lists(st.text("ab<|>", min_size=1, max_size=5), min_size=1, max_size=12), st.text("ab<|>", max_size=40))
@settings(max_examples=examples(300), deadline=None)
def test_the_pattern_finds_the_leftmost_longest_token(words, text):
    naive, at = [], 0
    while at < len(text):
        best = max((w for w in words if text.startswith(w, at)), key=len, default="")
        if best:
            naive.append((at, best))
        at += len(best) or 1
    assert [(m.start(), m.group()) for m in re.finditer(_build_trie_pattern(words), text)] == naive


@pytest.mark.parametrize("count", [1, 3000])
def test_patterns_of_thousands_of_tokens_compile(count):
    words = [f"<unused{i}>" for i in range(count)]
    assert re.fullmatch(_build_trie_pattern(words), words[-1])
