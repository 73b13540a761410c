"""Ids of fastokens against the library's own, for the patterns and kinds of tokenizers that are in use."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest
from budget import examples
from fastokens import Tokenizer as FastTokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from prompts.fast_encoder import _WORD_SAMPLE_TEXTS, SAMPLE_TEXTS, build_fast_tokenizer, encode_fast

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
ENCODED_KINDS = (
    "byte_level", "byte_level_prefix_space", "qwen", "llama3", "prepend_normalizer", "single_word",
    "word_edged_specials", "gemma_whitespace", "overlapping",
)  # fmt: skip


@cache
def make_pattern_tokenizer(name: str) -> Tokenizer:
    """Tiny byte-level BPE that cuts text by a pattern of a checkpoint."""
    hf_tokenizer = Tokenizer(models.BPE())
    hf_tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hf_tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    hf_tokenizer.add_special_tokens([AddedToken("<|user|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    hf_tokenizer.add_tokens([AddedToken("panic", normalized=True), AddedToken("<think>", normalized=False)])
    return hf_tokenizer


@cache
def make_encoder(name: str) -> FastTokenizer:
    hf_tokenizer = make_pattern_tokenizer(name)
    return build_fast_tokenizer(hf_tokenizer)


def encode_by_library(hf_tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> bytes:
    return array("I", hf_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids).tobytes()


PIECES = st.sampled_from(
    ["fox", " fox", "FOX", "I'LL", "'s", "'S ", "12", "12345", "\n", "\r\n", "\n\n ", "  ", "\t", "_", "x_1", ".",
     "...", "!", "panic", "<think>", "<|end|>", "<|", "|>", "/", "\x00", "\x0b", "\x1c", "\x7f", "$", "€", "é",
     "e\u0301", "\u0301", "\u212a", "\u1fef", "\u037e", "ſ", "ß", "ｔｈｅ", "’", "—", " — ", "…", "\u00a0", "\u2028",
     "\u200d", "👍🏽", "一二", "²", "Ⅷ", "\u1100\u1161", "ﬁ", "İ", "\x85", "٣", "日本語", "हिन्दी", "ไทย"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, PIECES, st.text(max_size=5)), max_size=20).map("".join)


@pytest.mark.parametrize("name", PATTERNS)
@given(text=TEXTS)
@settings(max_examples=examples(300), deadline=None)
@example(text="").via("nothing to encode")
@example(text="<|user|>" + "a" * 5000 + " \n \n  b" + " " * 5000).via("long words")
@example(text="fox<|end|><|user|>\n fox <|end|").via("tokens at which it is cut, and what only begins like one")
def test_ids_equal_the_library_s(name: str, text: str) -> None:
    want = encode_by_library(make_pattern_tokenizer(name), text)
    for _ in range(2):  # new words, then cached ones
        assert encode_fast(make_encoder(name), text, add_special_tokens=False) == want


@cache
def make_kind_encoder(kind: str, tokenizer_json: str) -> tuple[Tokenizer, FastTokenizer]:
    hf_tokenizer = Tokenizer.from_str(tokenizer_json)
    return hf_tokenizer, build_fast_tokenizer(hf_tokenizer)


@pytest.mark.parametrize("bpe_kind", ENCODED_KINDS)
def test_other_kinds_of_bpe_give_the_library_s_ids(bpe_kind: str, make_tokenizer: Callable[[str], Tokenizer]) -> None:
    hf_tokenizer, encoder = make_kind_encoder(bpe_kind, make_tokenizer(bpe_kind).to_str())
    rng = random.Random(bpe_kind)
    words = ["fox", " the", "<|im_start|>", "<|im_end|>", "<|im", "panic", "BEGIN", "__x__", "▁", "▁▁", "\n", "\n\n",
             " ", "   ", "é", "日本語", "👍🏽", "don't", "123", "<0x0A>", "Ġ", "\t", "e\u0301"]  # fmt: skip
    for _ in range(1500):
        text = "".join(
            rng.choice(words) if rng.random() < 0.8 else chr(rng.randrange(0x21, 0xD7FF))
            for _ in range(rng.randrange(12))
        )
        for special in (False, True):
            want = encode_by_library(hf_tokenizer, text, add_special_tokens=special)
            assert encode_fast(encoder, text, add_special_tokens=special) == want, text


def test_the_text_encoded_before_changes_nothing() -> None:
    """Version 0.3.2 kept the words of the last long text, and where spaces end a word hangs on what follows them."""
    rng = random.Random(3)
    filler = " ".join(rng.choice(["fox", "panicked", "it's", "12", "x_1", "done."]) for _ in range(1200))
    for name in PATTERNS:
        hf_tokenizer, encoder = make_pattern_tokenizer(name), make_encoder(name)
        before = f"{filler}{' ' * 700}x{filler}"
        for after in (" ", "\n", "\tx", "y", "", "x" * 700):
            text = f"{filler}{' ' * 700}{after}"
            encode_fast(encoder, before, add_special_tokens=False)
            assert encode_fast(encoder, text, add_special_tokens=False) == encode_by_library(hf_tokenizer, text), (
                name,
                after,
            )


def test_threads_share_an_encoder() -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choice(["fox ", "panic", "12", "\n", "é", "一"]) * rng.randrange(1, 900) for _ in range(20))
             for _ in range(40)]  # fmt: skip
    hf_tokenizer, encoder = make_pattern_tokenizer("qwen"), make_encoder("qwen")
    with ThreadPoolExecutor(4) as pool:
        for text, ids in zip(texts, pool.map(partial(encode_fast, encoder, add_special_tokens=False), texts)):
            assert ids == encode_by_library(hf_tokenizer, text)


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode_fast(make_encoder("qwen"), "fox \ud800", add_special_tokens=False)


@pytest.mark.parametrize(
    "corpus", [("the cat",), (*SAMPLE_TEXTS, *_WORD_SAMPLE_TEXTS)], ids=["few bytes", "many bytes"]
)
def test_a_tokenizer_without_a_token_of_every_byte_is_left_to_the_library(corpus: tuple[str, ...]) -> None:
    """As trained without an initial alphabet. The library leaves such bytes out, and fastokens raises an error."""
    hf_tokenizer = Tokenizer(models.BPE())
    hf_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(show_progress=False))
    with pytest.raises(ValueError, match="has no token in vocabulary"):
        build_fast_tokenizer(hf_tokenizer)


def test_the_reason_is_said_where_there_is_none(
    make_tokenizer: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen = make_tokenizer("qwen")
    random_merges = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], dropout=0.1))
    reason_by_tokenizer = [
        (make_tokenizer("unigram"), "NFKC"),
        (make_tokenizer("word_piece"), None),
        (make_tokenizer("metaspace_first"), None),
        (random_merges, "random"),
    ]
    for hf_tokenizer, reason in reason_by_tokenizer:
        with pytest.raises(ValueError, match=reason):
            build_fast_tokenizer(hf_tokenizer)
    another = FastTokenizer.from_json_str(make_tokenizer("byte_level").to_str())
    monkeypatch.setattr(FastTokenizer, "from_json_str", lambda _: another, raising=False)
    with pytest.raises(ValueError, match="other ids"):
        build_fast_tokenizer(qwen)
