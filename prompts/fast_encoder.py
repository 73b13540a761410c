"""Text to token ids by fastokens: the ids of Hugging Face's `tokenizers` at a fiftieth of its CPU time.

fastokens encodes byte-level BPE, and SentencePiece-like BPE whose spaces a normalizer replaces. Tokenizers that it does
not load, or encodes otherwise on a sample text, are left to the library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

# Callers encode in threads of their own, and fastokens' pool would only fight them. It is read once a process.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

try:
    from fastokens import Tokenizer as FastTokenizer
except ImportError:
    FastTokenizer = None


class FastEncoder:
    """Encodes text of one tokenizer. Thread-safe; long texts are encoded without the interpreter's lock."""

    def __init__(self, fast_tokenizer: Any) -> None:
        self._fast_tokenizer = fast_tokenizer

    def encode(self, text: str) -> bytes:
        """Ids of `text`, without the special tokens of a whole prompt, as the bytes of an array of uint32. Raises
        UnicodeEncodeError for a lone surrogate."""
        ids: bytes = self._fast_tokenizer.encode_batch_flat([text])[0]
        return ids


def build_fast_encoder(
    hf_tokenizer: HfTokenizer, tokenizer_json: str, sample_texts: Sequence[str]
) -> FastEncoder | str:
    """Return the encoder of a tokenizer, or the reason why there is none. `tokenizer_json` is that of `hf_tokenizer`,
    whose ids of `sample_texts` are compared."""
    if FastTokenizer is None:
        return "fastokens is not installed"
    if sys.byteorder != "little":
        return "fastokens writes ids in little-endian order"
    try:
        encoder = FastEncoder(FastTokenizer.from_json_str(tokenizer_json))
    except ValueError as error:
        return str(error)
    for text in sample_texts:
        library_ids = hf_tokenizer.encode(text, add_special_tokens=False).ids
        if list(memoryview(encoder.encode(text)).cast("I")) != library_ids:
            return f"fastokens gives a sample text other ids ({text[:40]!r})"
    return encoder
