"""Token ids -> text, a few tokens at a time, such that the pieces join to what a decode of the whole would give.

Two decoders: byte-level BPE is decoded exactly, bytes first; every other tokenizer is decoded in a short
sliding window of tokens. Text that a later token can still change (half a character, the beginning of a stop string)
is held back, never emitted and taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

REPLACEMENT = "\ufffd"
PENDING_TOKENS_MAX = 32


class Detokenizer(Protocol):
    """Pieces returned by `push` and the last `flush`, joined, are the text of all ids pushed."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that has become final."""

    def flush(self) -> str:
        """Return what was held back. Nothing may be pushed after it."""


class TokenBytes(dict[int, bytes]):
    """id -> the bytes that a byte-level tokenizer stands for; filled on first use, shared by all sequences.

    Ids that the tokenizer does not know, and special tokens where they are skipped, are empty, as in its own decode.
    """

    def __init__(self, tokenizer: HFTokenizer, skipped_ids: frozenset[int]) -> None:
        """`skipped_ids`: ids that stand for no text."""
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped_ids else self._tokenizer.id_to_token(token_id)
        value = b"" if token is None else _decode_byte_level_token(token)
        self[token_id] = value
        return value


class ByteLevelDetokenizer:
    """Exact: the bytes of the tokens through an incremental UTF-8 decoder that replaces what is not UTF-8."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            return self._decode(table[token_ids[0]])
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Any tokenizer: decode a window of recent tokens with and without the new ones; the difference is new text.

    The window keeps the tokens of the last emitted piece as context, so that decoders which treat a first token apart
    (a stripped leading space) or join bytes into characters see the same surroundings. A window that ends in the
    replacement character may be half a character and is held back, but not more than PENDING_TOKENS_MAX of them: no
    character has so many bytes, and every push decodes all that is held. (The method of TGI and vLLM, who hold any.)
    """

    __slots__ = ("_context_ids", "_context_text", "_decode", "_new_ids")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context_ids: list[int] = []
        self._context_text = ""
        self._new_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._new_ids.extend(token_ids)
        text = self._decode(self._context_ids + self._new_ids)
        context_chars, is_full = len(self._context_text), len(self._new_ids) >= PENDING_TOKENS_MAX
        if len(text) <= context_chars:
            if is_full:  # tokens without a text, such as special ones: the first of all may matter to a decoder
                self._context_ids, self._new_ids = (self._context_ids + self._new_ids)[:PENDING_TOKENS_MAX], []
                self._context_text = self._decode(self._context_ids)
            return ""
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        self._context_ids, self._new_ids = self._new_ids, []
        self._context_text = self._decode(self._context_ids)
        return text[context_chars:]

    def flush(self) -> str:
        if not self._new_ids:
            return ""
        text = self._decode(self._context_ids + self._new_ids)
        self._new_ids = []
        return text[len(self._context_text) :]


class DetokenizerFactory:
    """Makes the detokenizer of each sequence; chosen once from the tokenizer's decoder."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added_tokens.items() if token.special}
        self._tables: dict[frozenset[int], TokenBytes] = {}
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def create(self, skip_special_tokens: bool = True, visible_tokens: frozenset[str] = frozenset()) -> Detokenizer:
        """`visible_tokens`: special tokens that are not skipped."""
        skipped_ids = frozenset(
            self._special_ids[text] for text in self._special_ids if skip_special_tokens and text not in visible_tokens
        )
        if self.is_byte_level:
            return ByteLevelDetokenizer(self._table(skipped_ids))
        tokenizer = self._tokenizer

        def decode(token_ids: list[int]) -> str:
            return tokenizer.decode([i for i in token_ids if i not in skipped_ids], skip_special_tokens=False)

        return WindowDetokenizer(decode)

    def _table(self, skipped_ids: frozenset[int]) -> TokenBytes:
        """One for all sequences that skip the same: of the marks of a few formats there are few sets."""
        if skipped_ids not in self._tables:
            self._tables[skipped_ids] = TokenBytes(self._tokenizer, skipped_ids)
        return self._tables[skipped_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for by itself, special tokens spelled out: what logprobs show."""
        if self.is_byte_level:
            return self._table(frozenset())[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _make_byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019): char -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    char_byte_pairs = [(chr(byte), byte) for byte in printable] + [
        (chr(256 + i), byte) for i, byte in enumerate(unprintable)
    ]
    return dict(char_byte_pairs)


_BYTE_BY_CHAR = _make_byte_level_alphabet()


def _decode_byte_level_token(token: str) -> bytes:
    """Bytes of a token written in the byte-level alphabet; a token outside of it (an added one) stands for itself."""
    try:
        return bytes([_BYTE_BY_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
