"""Text to token ids by fastokens: the ids of Hugging Face's `tokenizers` at a fiftieth of its CPU time.

fastokens encodes byte-level BPE, and SentencePiece-like BPE whose spaces a normalizer replaces. Tokenizers that it does
not load, or encodes otherwise on a sample text, are left to the library.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from fastokens import Tokenizer as FastTokenizer
from tokenizers import Tokenizer as HfTokenizer

# Callers encode in threads of their own, and fastokens' pool would only fight them. It is read once a process.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

SAMPLE_TEXTS: Final = (
    "Hello world", " leading", "trailing ", "  two  spaces  ", "\n\nlines\n", "a", "", " ", "\n", "▁low ▁line",
    "don't 123,456.78 $x_1", "héllo Ünïcode é ﬁ ½", "日本語 テスト 한국어", "🙂👍🏽 emoji",
    "\t tab\r\n", "snake_case CamelCase",
)  # fmt: skip
_WORD_SAMPLE_TEXTS: Final = (
    "I'LL we've IT'S 'Tis o'clock d'accord 'sword", "1 12 123 1234 12345 0x1F 3.14e-10 1,000,000", "a.b;c!d?e(f)[g]{h}",
    "def f(x):\n    return x**2  # x\n\n\nclass A:\n\tpass\r\n", "   three\n \n  \t x  \n", "http://a.b/c?d=e&f=%20#g",
    "\x00\x01\x1f\x7f \x0b\x0c end", "aAbBcC HTTPServer iOS XMLHttpRequest2", "a" * 70 + " " * 20 + "-" * 20 + "\n" * 9,
    "@user $5.00 <tag/> ~tilde `code` \\ | ^ & * _under_ +plus= \"quoted\"", "!" + "".join(map(chr, range(32, 127))),
)  # fmt: skip
_EVERY_BYTE_TEXT: Final = "".join(
    map(chr, (*range(0xC0), *range(0xC0, 0x800, 0x40), 0x800, *range(0x1000, 0x10000, 0x1000), 0x10000,
              *range(0x40000, 0x110000, 0x40000)))
)  # fmt: skip
"""A character for every byte that UTF-8 has. fastokens raises an error for a byte that the vocabulary lacks."""
_TOKEN_SAMPLES_MAX: Final = 64
"""Added tokens that are compared."""


def encode_fast(fast_tokenizer: FastTokenizer, text: str, *, add_special_tokens: bool) -> bytes:
    """Return the ids of a text as the bytes of uint32 numbers. Raises UnicodeEncodeError for a lone surrogate.

    Thread-safe; a long text is encoded without the interpreter's lock.
    """
    ids: bytes = fast_tokenizer.encode_batch_flat([text], add_special_tokens)[0]
    return ids


def encode_plain(hf_tokenizer: HfTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of a text by the library's fastest call, which is the only one that releases the GIL."""
    ids: list[int] = hf_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def build_fast_tokenizer(hf_tokenizer: HfTokenizer) -> FastTokenizer:
    """Build a tokenizer of fastokens that gives the ids of a Hugging Face one. Raises ValueError if there is none.

    Both encode sample texts, and all ids must be equal.
    """
    if sys.byteorder != "little":
        raise ValueError("fastokens writes ids in little-endian order")
    if getattr(hf_tokenizer.model, "dropout", None):
        raise ValueError("its model drops merges at random")
    fast_tokenizer = FastTokenizer.from_json_str(hf_tokenizer.to_str())
    for text in (*SAMPLE_TEXTS, *_WORD_SAMPLE_TEXTS, _EVERY_BYTE_TEXT, *_make_token_samples(hf_tokenizer)):
        for add_special_tokens in (False, True):
            fast_ids = encode_fast(fast_tokenizer, text, add_special_tokens=add_special_tokens)
            library_ids = encode_plain(hf_tokenizer, text, add_special_tokens=add_special_tokens)
            if list(memoryview(fast_ids).cast("I")) != library_ids:
                raise ValueError(f"fastokens gives a sample text other ids ({text[:40]!r})")
    return fast_tokenizer


def _make_token_samples(hf_tokenizer: HfTokenizer) -> list[str]:
    """Return some of the added tokens of a tokenizer, alone and inside of text."""
    added_tokens = sorted(token.content for token in hf_tokenizer.get_added_tokens_decoder().values() if token.content)
    return [*added_tokens[:_TOKEN_SAMPLES_MAX], *(f"one{token}two " for token in added_tokens[:2])]
