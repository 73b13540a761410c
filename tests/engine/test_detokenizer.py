"""Incremental detokenising equals decoding the whole, and stop strings do not depend on how the text arrives."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.output.detokenizer import ByteLevelDetokenizer, DetokenizerFactory, WindowDetokenizer
from engine.output.stop_strings import StopStrings

SPECIAL = "<|im_end|>"
CORPUS = ["the cat sat on the mat", "naïve café — 你好，世界 🙂🙂", "def f(x):\n    return x\n" * 3, "Ünïcödé ÿ"]


def make_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本", special=False)])
    return tokenizer


def make_byte_fallback() -> Tokenizer:
    """The shape of Llama-2 and Mistral tokenizers: metaspace, byte fallback, a stripped first space."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for char in "▁abcdefghijklmnopqrstuvwxyz.,!?":
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


BYTE_LEVEL = make_byte_level()
BYTE_FALLBACK = make_byte_fallback()


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(ids[start : start + cut])
        start += cut
    return [*pieces, ids[start:]]


@settings(max_examples=examples(300), deadline=None)
@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40),
    cuts=st.lists(st.integers(1, 4), max_size=40),
    skip=st.booleans(),
)
def test_byte_level_equals_the_full_decode_for_any_ids(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = DetokenizerFactory(BYTE_LEVEL).create(skip)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    pieces = [detokenizer.push(part) for part in split(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=30))
def test_byte_level_never_emits_half_a_character(text: str) -> None:
    detokenizer = DetokenizerFactory(BYTE_LEVEL).create()
    output_text = ""
    for token_id in BYTE_LEVEL.encode(text).ids:
        output_text += detokenizer.push([token_id])
        assert text.startswith(output_text)
    assert output_text + detokenizer.flush() == text


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.characters(exclude_characters="\ufffd▁", exclude_categories=["Cs"]), max_size=20))
def test_window_equals_the_full_decode_of_text(text: str) -> None:
    factory = DetokenizerFactory(BYTE_FALLBACK)
    detokenizer = factory.create()
    assert isinstance(detokenizer, WindowDetokenizer)
    ids = BYTE_FALLBACK.encode(text).ids
    output_text = ""
    for token_id in ids:
        output_text += detokenizer.push([token_id])
        assert text.startswith(output_text)
    assert output_text + detokenizer.flush() == BYTE_FALLBACK.decode(ids) == text


@pytest.mark.parametrize("cut", [1, 7, 500])
@pytest.mark.parametrize(
    "token", ["<0xFF>", "<0xE4>", SPECIAL, "▁", "a"], ids=["no byte of text", "a lead byte", "special", "space", "text"]
)
def test_a_window_costs_so_much_a_token_and_not_more(token: str, cut: int) -> None:
    """What is decoded grows with the tokens, whatever they are, and the text is still that of all of them."""
    decoded_tokens = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded_tokens
        decoded_tokens += len(ids)
        return str(BYTE_FALLBACK.decode(ids))

    ids = [BYTE_FALLBACK.token_to_id(token)] * 4000 + BYTE_FALLBACK.encode("b c").ids
    detokenizer = WindowDetokenizer(decode)
    pieces = [detokenizer.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert "".join(pieces) + detokenizer.flush() == BYTE_FALLBACK.decode(ids)
    assert decoded_tokens < 100 * len(ids)


def test_special_tokens_are_spelled_only_on_request() -> None:
    ids = [*BYTE_LEVEL.encode("hi").ids, BYTE_LEVEL.token_to_id(SPECIAL)]
    factory = DetokenizerFactory(BYTE_LEVEL)
    assert factory.create(True).push(ids) == "hi"
    assert factory.create(False).push(ids) == f"hi{SPECIAL}"
    assert factory.token_bytes(ids[-1]) == SPECIAL.encode()


def test_an_incomplete_character_at_the_end_is_shown_as_replacement() -> None:
    detokenizer = DetokenizerFactory(BYTE_LEVEL).create()
    byte_ids = [BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel(False).pre_tokenize_str("🙂")[0][0]]
    assert [detokenizer.push([i]) for i in byte_ids[:-1]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


def naive_stop(text: str, stops: list[str], include: bool, first_end: int) -> tuple[str, str | None]:
    for end in range(first_end, len(text) + 1):
        matching_stops = [stop for stop in stops if text[:end].endswith(stop)]
        if matching_stops:
            stop = max(matching_stops, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=examples(400), deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_pieces=st.integers(0, 4),
)
def test_stop_strings_match_a_character_by_character_search(
    pieces: list[str], stops: list[str], include: bool, min_pieces: int
) -> None:
    checker = StopStrings(stops, include)
    output_text, stop = "", None
    for number, piece in enumerate(pieces):
        final, stop = checker.push(piece, may_stop=number >= min_pieces)
        output_text += final
        if stop is not None:
            break
        assert "".join(pieces).startswith(output_text + checker.pending_text)
    output_text += checker.flush()
    expected, expected_stop = naive_stop("".join(pieces), stops, include, len("".join(pieces[:min_pieces])) + 1)
    assert (stop, output_text) == (expected_stop, expected)


@pytest.mark.parametrize("tail", ["", "x", "<|", "<|en"])
def test_only_a_possible_beginning_is_held_back(tail: str) -> None:
    checker = StopStrings(["<|end|>"], includes_stop=False)
    output_text, _ = checker.push("hello " + tail)
    assert checker.pending_text == (tail if tail.startswith("<") else "")
    assert output_text + checker.flush() == "hello " + tail
