"""Decode token ids to text, a few tokens at a time. The pieces join to the text of all tokens decoded at once.

Byte-level BPE is decoded exactly, by its bytes. Every other tokenizer is decoded in a short sliding window of tokens.
Text that a later token can still change, such as half a character, is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

REPLACEMENT = "\ufffd"
PENDING_TOKENS_MAX = 32
"""Most tokens that wait for the rest of a character."""


class ByteLevelDetokenizer:
    """Converts the tokens of a byte-level BPE tokenizer to text as they are generated.

    Each token stands for some bytes of UTF-8 text. A character whose last bytes are missing is held back. Invalid bytes
    become the replacement character.
    """

    __slots__ = ("_get_token_bytes", "_pending_bytes", "_skipped_ids")

    def __init__(self, get_token_bytes: Callable[[int], bytes], skipped_ids: frozenset[int]) -> None:
        """`get_token_bytes`: returns the bytes of a token id. `skipped_ids`: special tokens that become no text."""
        self._get_token_bytes = get_token_bytes
        self._skipped_ids = skipped_ids
        self._pending_bytes = b""
        """First bytes of a character that is not complete."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next token ids. Return the text that has become final."""
        parts = [self._get_token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped_ids]
        data = self._pending_bytes + b"".join(parts)
        text, decoded_byte_count = codecs.utf_8_decode(data, "replace", False)
        self._pending_bytes = data[decoded_byte_count:]
        return text

    def flush(self) -> str:
        """Return the text that was held back. Nothing may be pushed afterwards."""
        return self._pending_bytes.decode("utf-8", "replace")


class WindowDetokenizer:
    """Converts the tokens of any tokenizer to text as they are generated, by decoding a window of recent tokens.

    A token cannot be decoded alone: a decoder may strip the space before a first token, or make one character of
    several tokens. So new tokens are decoded behind the tokens of the last returned text (the context), and the text
    that they add is returned. Text that ends in the replacement character may be half a character. It is held back for
    at most PENDING_TOKENS_MAX tokens, more than any character has bytes.
    """

    __slots__ = ("_context_ids", "_context_text", "_decode", "_new_ids")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context_ids: list[int] = []
        self._context_text = ""
        self._new_ids: list[int] = []
        """Tokens with text that was not returned yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next token ids. Return the text that has become final."""
        self._new_ids.extend(token_ids)
        text = self._decode(self._context_ids + self._new_ids)
        new_text = text[len(self._context_text) :]
        is_full = len(self._new_ids) >= PENDING_TOKENS_MAX
        if new_text and (is_full or not new_text.endswith(REPLACEMENT)):
            self._start_window(self._new_ids)
            return new_text
        if is_full:  # tokens without text, such as special tokens: the first ones may matter to a decoder
            self._start_window((self._context_ids + self._new_ids)[:PENDING_TOKENS_MAX])
        return ""

    def _start_window(self, context_ids: list[int]) -> None:
        """Start a new window behind `context_ids`, tokens with text that was returned."""
        self._context_ids = context_ids
        self._context_text = self._decode(context_ids)
        self._new_ids = []

    def flush(self) -> str:
        """Return the text that was held back. Nothing may be pushed afterwards."""
        if not self._new_ids:
            return ""
        text = self._decode(self._context_ids + self._new_ids)
        self._new_ids = []
        return text[len(self._context_text) :]


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer
"""Decoder of one sequence. The results of all `push` calls and of `flush` join to the text of all ids."""


class DetokenizerFactory:
    """Creates a detokenizer for each sequence: an exact one for byte-level BPE, a window for any other tokenizer."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added_tokens.items() if token.special}
        self._bytes_by_id: dict[int, bytes] = {}
        """Cache of `token_bytes`."""
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def create(self, skip_special_tokens: bool = True, visible_tokens: frozenset[str] = frozenset()) -> Detokenizer:
        """Return the detokenizer of a new sequence. `visible_tokens`: special tokens that are never skipped."""
        skipped_ids: frozenset[int] = frozenset()
        if skip_special_tokens:
            skipped_ids = frozenset(
                token_id for token, token_id in self._special_ids.items() if token not in visible_tokens
            )
        if self.is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skipped_ids)
        tokenizer = self._tokenizer

        def decode(token_ids: list[int]) -> str:
            shown_ids = [token_id for token_id in token_ids if token_id not in skipped_ids]
            return tokenizer.decode(shown_ids, skip_special_tokens=False)

        return WindowDetokenizer(decode)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token alone, with special tokens spelled out; no bytes for an unknown id."""
        token_bytes = self._bytes_by_id.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes_by_id[token_id] = self._decode_alone(token_id)
        return token_bytes

    def _decode_alone(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else _decode_byte_level_token(token)


def _make_byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_BYTE_BY_CHAR = _make_byte_level_alphabet()


def _decode_byte_level_token(token: str) -> bytes:
    """Return the bytes of a token in the byte-level alphabet. An added token, outside of it, is its own text."""
    try:
        return bytes([_BYTE_BY_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
