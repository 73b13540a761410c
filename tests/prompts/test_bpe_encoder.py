"""Ids by words against the library's own, for the patterns of the tokenizers that are in use."""

from __future__ import annotations

import json
import random
import re
from array import array
from functools import cache

import pytest
from budget import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from prompts import bpe_encoder
from prompts._words import Words, count_openings, digest32
from prompts.bpe_encoder import BpeEncoder, build_bpe_encoder, translate_pattern
from prompts.segments import SegmentPlan, make_segment_plan

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_CAPS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "gpt2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama3": [
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen": [_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "o200k": [
        _O200K_CAPS + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + "?|" + _O200K_CAPS
        + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS
        + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}", r"[一-龥ぁ-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}  # fmt: skip
CORPUS = [
    "The quick brown fox. Don't panic: it's ONLY 1234 tests!\n\n\tdef f(self, x_1): return [x] # done\r\n   ok"
] * 9


@cache
def tokenizer(name: str, form: str = "NFC", has_normalized_token: bool = True) -> Tokenizer:
    """`has_normalized_token`: with an added token that is sought in normalized text."""
    hf_tokenizer = Tokenizer(models.BPE())
    hf_tokenizer.normalizer = getattr(normalizers, form)()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hf_tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    hf_tokenizer.add_special_tokens([AddedToken("<|user|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    hf_tokenizer.add_tokens(
        [AddedToken("panic", normalized=True)] * has_normalized_token + [AddedToken("<think>", normalized=False)]
    )
    return hf_tokenizer


@cache
def encoder(name: str) -> BpeEncoder:
    hf_tokenizer = tokenizer(name)
    tested_encoder = build_bpe_encoder(
        hf_tokenizer, json.loads(hf_tokenizer.to_str()), CORPUS, frozenset(("<|user|>", "<|end|>"))
    )
    assert isinstance(tested_encoder, BpeEncoder), tested_encoder
    return tested_encoder


PIECES = st.sampled_from(
    ["fox", " fox", "FOX", "I'LL", "'s", "'S ", "12", "12345", "\n", "\r\n", "\n\n ", "  ", "\t", "_", "x_1", ".",
     "...", "!", "panic", "<think>", "<|end|>", "<|", "|>", "/", "\x00", "\x0b", "\x1c", "\x7f", "$", "€", "é", "一"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, PIECES, st.text(st.characters(max_codepoint=127), max_size=5)), max_size=20)


@pytest.mark.parametrize("name", PATTERNS)
@given(text=TEXTS.map("".join))
@settings(max_examples=examples(150), deadline=None)
@example(text="").via("nothing to cut")
@example(text="<|user|>" + "a" * 100 + " \n \n  b").via("a word too long to remember")
@example(text="fox<|end|><|user|>\n fox <|end|").via("tokens at which it is cut, and what only begins like one")
def test_ids_equal_the_library_s_or_there_are_none(name: str, text: str) -> None:
    want = array("I", tokenizer(name).encode(text, add_special_tokens=False).ids).tobytes()
    for _ in range(2):  # learned, then known
        actual = encoder(name).encode(text)
        assert actual is None or actual == want
    if text.isascii() and not any(token in text for token in ("panic", "<think>")):
        assert actual is not None, "such a text needs no library"
    else:
        assert actual is None


OTHERS = st.sampled_from(
    ["é", "e\u0301", "\u0301", "\u212a", "\u1fef", "\u037e", "ſ", "ß", "ｔｈｅ", "’", "—", " — ", "…", "\u00a0",
     "\u2028", "\u200d", "👍🏽", "一二", "²", "Ⅷ", "\u1100\u1161", "ﬁ", "İ", "\x85", "٣"]
)  # fmt: skip
MIXED = st.lists(st.one_of(PIECES, st.sampled_from(["The fox", " is a test", "it", "re"]), OTHERS), max_size=15)


@pytest.mark.parametrize("name", [name for name in PATTERNS if len(PATTERNS[name]) == 1])
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@given(text=MIXED.map("".join))
@settings(max_examples=examples(150), deadline=None)
@example(text="It’s a test").via("an apostrophe that is none")
@example(text="a test of the cafe\u0301 is it").via("what becomes one with the character before")
def test_other_characters_among_ascii_are_the_library_s(name: str, form: str, text: str) -> None:
    hf_tokenizer = tokenizer(name, form, has_normalized_token=False)
    tested_encoder = mixing(name, form)
    want = array("I", hf_tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
    for _ in range(2):
        actual = tested_encoder.encode(text)
        assert actual is None or actual == want
    added_tokens = any(token in text for token in ("<think>", "<|end|>", "<|user|>"))
    assert (tested_encoder.encode(f"a test {text} is a test of it") is None) == added_tokens


@cache
def mixing(name: str, form: str) -> BpeEncoder:
    hf_tokenizer = tokenizer(name, form, has_normalized_token=False)
    tested_encoder = build_bpe_encoder(hf_tokenizer, json.loads(hf_tokenizer.to_str()), CORPUS)
    assert isinstance(tested_encoder, BpeEncoder), tested_encoder
    return tested_encoder


def test_little_is_asked_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tested_encoder, library_texts = mixing("qwen", "NFC"), list[str]()
    ask = tested_encoder._encode_with_library

    def encode_and_note(texts: list[str]) -> list[list[int]]:
        library_texts.extend(texts)
        return ask(texts)

    monkeypatch.setattr(tested_encoder, "_library_encode", encode_and_note)
    text = "The first fox — or is it “the second”? — has 12 naïve tests to go on with, it says."
    for _ in range(2):
        assert (
            tested_encoder.encode(text)
            == array("I", tokenizer("qwen").encode(text, add_special_tokens=False).ids).tobytes()
        )
    assert library_texts == [" fox — or is", " it “the", " second”? — has", " naïve"], "each once"
    names = [first + second for first in "abcdefghi" for second in "abcdefghi"]
    assert tested_encoder.encode("".join(f"a test é{name} it " for name in names[:64])) is not None
    assert tested_encoder.encode("".join(f"a test à{name} it " for name in names[:65])) is None


ATOMS = st.sampled_from(
    ["a", "b", " ", "[ab]", "[^a]", r"\s", r"\S", r"\d", r"[a-c\n]", r"[^\sA]", "(?i:ab|C)", "(?:a|ab| )"]
)
REPEATED = st.builds("{}{}".format, ATOMS, st.sampled_from(["", "", "?", "*", "+", "{1,2}", "{2,}"]))
TAILS = st.builds("{}{}".format, st.lists(REPEATED, min_size=1, max_size=3).map("".join), st.sampled_from(
    ["", "", r"(?!\S)", "(?=a)", "(?:a+ |b)?", r"(?:(?!b)\S)?"]))  # fmt: skip


@given(
    pattern=st.lists(TAILS, min_size=1, max_size=3).map("|".join),
    text=st.text(st.sampled_from("aAbBc 1\n.\x7f"), max_size=12),
)
@settings(max_examples=examples(600), deadline=None)
@example(pattern=r"\s+(?!\S)|\s+", text="a  b ").via("what GPT-2 ends in")
def test_words_are_those_of_python_s_regular_expressions(pattern: str, text: str) -> None:
    rows = bpe_encoder.compile_pattern(pattern)
    if rows is None:
        assert re.search(r"\)[?*+{]", pattern) is not None, "only groups that come again are not known"
        return
    word_lengths = Words([rows], 7, 100).encode(text, lambda word: [len(word)])
    compiled_pattern, want, at, gap = re.compile(pattern, re.ASCII), [], 0, 0
    while at < len(text):
        match = compiled_pattern.match(text, at)
        if match is None:
            at += 1
            continue
        if match.end() == at:
            assert word_lengths is None
            return
        want += [at - gap] * (gap < at) + [match.end() - at]
        gap = at = match.end()
    assert word_lengths == array("I", want + [len(text) - gap] * (gap < len(text))).tobytes()


def test_every_tokenizer_in_use_has_words(make_tokenizer) -> None:
    for kind in ("byte_level", "qwen", "llama3"):
        plan = make_segment_plan(make_tokenizer(kind))
        assert isinstance(plan, SegmentPlan)
        assert plan.bpe_encoder is not None, kind
    for kind in ("byte_level_prefix_space", "metaspace_first", "unigram"):
        plan = make_segment_plan(make_tokenizer(kind))
        assert not isinstance(plan, SegmentPlan) or plan.bpe_encoder is None, kind


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_encoder, "CACHED_WORDS_MAX", 5)
    hf_tokenizer = tokenizer("llama3")
    tested_encoder = build_bpe_encoder(hf_tokenizer, json.loads(hf_tokenizer.to_str()), [])
    assert isinstance(tested_encoder, BpeEncoder)
    for number in range(50):
        text = f"word{number % 7}x and more{number}"
        assert (
            tested_encoder.encode(text) == array("I", hf_tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        )
        assert len(tested_encoder.native_encoder) <= 5
    assert tested_encoder.encode("x" * (bpe_encoder.TEXT_CHARS_MAX + 1)) is None


@pytest.mark.parametrize("name", PATTERNS)
def test_long_words_are_the_library_s_which_lets_others_run_meanwhile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested_encoder, library_texts = encoder.__wrapped__(name), 0

    def learn(word: str) -> list[int]:
        nonlocal library_texts
        library_texts += len(word)
        return [0]

    monkeypatch.setattr(tested_encoder, "_encode_word", learn)
    texts = [
        "".join(item * (63_000 // len(item)))
        for item in ("a", " ", "\n", "-", "A", " a" * 50 + "b" * 99, "b" * 129 + " ")
    ]
    for text in [*texts, "a" * 4097, ("a" * 1000 + " ") * 4]:
        library_texts = 0
        tested_encoder.encode(text)
        assert library_texts <= 4096, (text[:80], library_texts)
    assert library_texts in (4000, 4003), "a few long words are found here"


def test_a_rule_of_dashes_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tested_encoder, hf_tokenizer, library_texts = encoder.__wrapped__("gpt2"), tokenizer("gpt2"), list[str]()
    learn = tested_encoder._encode_word
    monkeypatch.setattr(tested_encoder, "_encode_word", lambda word: [library_texts.append(word), learn(word)][1])
    for number in range(3):
        text = f"part {number} {'-' * 119} {'=' * 65}end {'.' * 64} {'*' * 200}"
        assert (
            tested_encoder.encode(text) == array("I", hf_tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        )
    assert [len(word) for word in library_texts] == [120, 66, 65, 201, 201, 201]


@pytest.mark.parametrize(
    "pattern",
    [r"\p{Greek}+", r"a++", r"a?+", r"a{1,2}+", r"[a&&b]", r"[[:alpha:]]+", r"(a)", r"(?<n>a)", r"^a", r"a$", r"\ba",
     r"a.b", r"[\p{L}-z]", r"(?i:\p{Lu})", r"\X", r"\h", r"[a\h]", r"a|(?#c)b", r"\p{^L}", r"(?m:a)"],
)  # fmt: skip
def test_patterns_that_may_mean_something_else_are_refused(pattern: str) -> None:
    assert translate_pattern(pattern) is None


def test_other_kinds_of_tokenizers_are_refused() -> None:
    hf_tokenizer = tokenizer("qwen")
    spec = json.loads(hf_tokenizer.to_str())
    for change, reason in (
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"model": {"type": "Unigram"}}, "BPE"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "byte-level"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, "byte-level"),
        ({"added_tokens": [{"content": "Å", "normalized": True}]}, "normalized"),
    ):
        refusal = build_bpe_encoder(hf_tokenizer, {**spec, **change}, [])
        assert isinstance(refusal, str)
        assert reason in refusal


def test_words_that_differ_from_the_library_s_are_found_by_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_tokenizer = tokenizer("llama3")
    monkeypatch.setattr(bpe_encoder, "translate_pattern", lambda pattern: r"[^\s]+|\s+")
    reason = build_bpe_encoder(hf_tokenizer, json.loads(hf_tokenizer.to_str()), ["It's 1234 tests!"])
    assert isinstance(reason, str)
    assert "other ids" in reason


def test_a_pattern_with_many_alternatives_is_known() -> None:
    rows = bpe_encoder.compile_pattern("|".join(f"[a-c]{{{2 + number}}}" for number in reversed(range(65))))
    assert rows is not None
    word_lengths = Words([rows], 7, 100).encode("abc" * 30 + "z" + "ab", lambda word: [len(word)])
    assert word_lengths == array("I", [66, 24, 1, 2]).tobytes()


def test_a_pattern_with_too_many_states_is_refused() -> None:
    hf_tokenizer = tokenizer("qwen")
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,5000}"}, "behavior": "Isolated", "invert": False}
    spec = json.loads(hf_tokenizer.to_str())
    spec["pre_tokenizer"]["pretokenizers"].insert(0, split)
    reason = build_bpe_encoder(hf_tokenizer, spec, [])
    assert isinstance(reason, str)
    assert "too many states" in reason


@pytest.mark.parametrize("pattern", [r"a(?=bc)", r"a(?=b*)", r"a(?!b|cd)", r"a(?=)"])
def test_what_looks_further_than_a_character_is_refused(pattern: str) -> None:
    assert bpe_encoder.compile_pattern(pattern) is None


@given(
    text=st.one_of(st.binary(max_size=40), st.text("[{z;\x7b\x5b\x1b\x3b", max_size=40).map(str.encode)),
    end=st.one_of(st.none(), st.integers(0, 50)),
)
def test_lists_and_objects_are_counted(text: bytes, end: int | None) -> None:
    actual = count_openings(text) if end is None else count_openings(text, end)
    assert actual == text[:end].count(b"[") + text[:end].count(b"{")


@given(st.lists(st.binary(max_size=70), min_size=2, max_size=2, unique=True), st.integers(0, 2**32 - 1))
def test_other_bytes_have_another_digest(two: list[bytes], before: int) -> None:
    first_digest, second_digest = (digest32(data, before) for data in two)
    assert 0 <= first_digest < 2**32
    assert first_digest != second_digest
    assert digest32(two[0], before) == first_digest != digest32(two[0], before + 1)


def test_digests_of_texts_that_differ_little_differ_in_half_of_their_bits() -> None:
    rng = random.Random(7)
    differing = []
    for size in (1, 7, 8, 15, 16, 17, 33, 400):
        for _ in range(200):
            data = bytearray(rng.randbytes(size))
            before = digest32(bytes(data), 0)
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            differing.append((before ^ digest32(bytes(data), 0)).bit_count())
    assert 15 < sum(differing) / len(differing) < 17
    assert min(differing) > 2


@given(
    st.lists(st.text("ab<|>", min_size=1, max_size=5), unique=True, max_size=8), st.text("ab<|>c", max_size=40),
    st.integers(0, 8),
)  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
def test_texts_are_cut_at_the_leftmost_longest_token(tokens: list[str], text: str, cuts: int) -> None:
    """`cuts`: at so many of them; any other leaves the text to the library."""
    rows = bpe_encoder.compile_pattern("[a-z<|>]")
    assert rows is not None
    added_tokens = [(token, 1000 + i if i < cuts else None) for i, token in enumerate(tokens)]
    tested_encoder = Words([rows], 7, 100, None, added_tokens)
    want, at = list[int](), 0
    while at < len(text):
        token = max((t for t in tokens if text.startswith(t, at)), key=len, default=text[at])
        number = dict(added_tokens).get(token, ord(text[at]))
        want.append(-1 if number is None else number)
        at += len(token)
    actual = tested_encoder.encode(text, lambda word: [ord(word)])
    assert actual == (None if -1 in want else array("I", want).tobytes())
    with pytest.raises(ValueError, match="without text"):
        Words([rows], 7, 100, None, [("", 1)])
