"""Tiny tokenizers of every kind in `tokenizers`, trained here, with the quirks of the checkpoints they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic: it's only 1234 tests, isn't it?",
    "def encode(self, text: str) -> list[int]:\n    return self._tokenizer.encode(text).ids\n\n\n# done\n",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë. ﬁn ½ Å",
    "日本語のテスト。こんにちは世界。한국어 문장입니다. Привет, мир! مرحبا بالعالم",
    "user assistant system tool: answer the question  with   many    spaces\t and tabs 🙂👍🏽",
] * 4

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def _add(tok: Tokenizer, **flags: bool) -> Tokenizer:
    tok.add_special_tokens([AddedToken(token, normalized=False, special=True, **flags) for token in CHAT_TOKENS])
    return tok


def _train(tok: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def _byte_level(**options: bool) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return _train(tok, trainer)


def byte_level() -> Tokenizer:
    return _add(_byte_level())


def byte_level_prefix_space() -> Tokenizer:
    return _add(_byte_level(add_prefix_space=True))


def qwen() -> Tokenizer:
    tok = _byte_level()
    tok.normalizer = normalizers.NFC()
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _add(tok)
    tok.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>")])
    return tok


def llama3() -> Tokenizer:
    tok = byte_level()
    bos = tok.token_to_id("<|endoftext|>")
    template = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A <|endoftext|>:1 $B:1", special_tokens=[("<|endoftext|>", bos)]
    )
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tok


def _spm_bpe(prepend_scheme: str | None) -> Tokenizer:
    tok = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if prepend_scheme is None:  # Llama 2's older form: normalizers and no pre-tokenizer
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=prepend_scheme == "always")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], max_token_length=12, show_progress=False
    )
    short = [line[:60] for line in CORPUS]  # without a pre-tokenizer whole lines are words
    tok.train_from_iterator(short, trainer)
    return _add(tok)


def metaspace_first() -> Tokenizer:
    return _spm_bpe("first")


def metaspace_always() -> Tokenizer:
    return _spm_bpe("always")


def metaspace_never() -> Tokenizer:
    return _spm_bpe("never")


def prepend_normalizer() -> Tokenizer:
    return _spm_bpe(None)


def unigram() -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return _add(_train(tok, trainer))


def unigram_strip() -> Tokenizer:
    tok = unigram()
    tok.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKD(), normalizers.Lowercase()])
    return tok


def word_piece() -> Tokenizer:
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer()
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    _add(_train(tok, trainer))
    cls, sep = tok.token_to_id("[CLS]"), tok.token_to_id("[SEP]")
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    return tok


def word_level() -> Tokenizer:
    tok = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return _add(_train(tok, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)))


def phi_rstrip() -> Tokenizer:
    """Phi-3: chat tokens that swallow the whitespace after them, beside plain ones."""
    tok = _spm_bpe("first")
    tok.add_special_tokens([AddedToken(t, rstrip=True, normalized=False) for t in ("<|user|>", "<|assistant|>")])
    return tok


def bert_mask_lstrip() -> Tokenizer:
    tok = word_piece()
    tok.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tok


def single_word() -> Tokenizer:
    tok = byte_level()
    tok.add_tokens([AddedToken("fox", single_word=True, normalized=False), AddedToken("§a§", normalized=False)])
    return tok


def word_edged_specials() -> Tokenizer:
    """Special tokens that end in letters, beside one that asks for a word's edge."""
    tok = byte_level()
    tok.add_special_tokens(["BEGIN", "__x__"])
    tok.add_tokens([AddedToken("panic", single_word=True, normalized=False)])
    return tok


def normalized_added() -> Tokenizer:
    tok = unigram_strip()
    tok.add_tokens([AddedToken("<|TOOL|>", normalized=True), AddedToken("Fox", normalized=True)])
    return tok


def gemma_whitespace() -> Tokenizer:
    """Gemma: runs of line breaks and spaces are added tokens of their own."""
    tok = _spm_bpe("never")
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tok.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 5)])
    tok.add_tokens([AddedToken("▁" * count, normalized=False) for count in range(2, 5)])
    return tok


def overlapping() -> Tokenizer:
    """Added tokens that are prefixes, suffixes and infixes of each other."""
    tok = byte_level()
    tok.add_special_tokens(["<|im", "im_start|>", "|><|", "<|im_start|><|im_end|>", "<|im_end|>\n"])
    return tok


KINDS: dict[str, Callable[[], Tokenizer]] = {
    f.__name__: f
    for f in (
        byte_level,
        byte_level_prefix_space,
        qwen,
        llama3,
        metaspace_first,
        metaspace_always,
        metaspace_never,
        prepend_normalizer,
        unigram,
        unigram_strip,
        word_piece,
        word_level,
        phi_rstrip,
        bert_mask_lstrip,
        single_word,
        word_edged_specials,
        normalized_added,
        gemma_whitespace,
        overlapping,
    )
}


@cache
def _build_tokenizer_json(kind: str) -> str:
    return KINDS[kind]().to_str()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], Tokenizer]:
    """Kind -> a fresh tokenizer of it (trained once a session)."""
    return lambda kind: Tokenizer.from_str(_build_tokenizer_json(kind))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
