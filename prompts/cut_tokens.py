"""Added tokens before which a text may be cut, so that its token ids are those of both parts.

A tokenizer of Hugging Face's `tokenizers` first finds the added tokens in a text (leftmost, longest first), then
normalizes, pre-tokenizes and encodes what is between them piece by piece. Where that does not hold, or a sample text
shows another result, there are no cut tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from prompts.fast_encoder import SAMPLE_TEXTS, encode_plain

_TOKEN_CHARS_MIN = 3
"""Shortest cut token. Shorter tokens, such as a newline or two spaces, are no boundaries between messages."""


class CutTokens:
    """Finds where a text may be cut so that its parts, encoded separately, have the token ids of the whole.

    A text may be cut before some of the tokenizer's added tokens, such as `<|im_start|>`. Thread-safe.
    """

    def __init__(self, added_tokens: Sequence[str], cut_tokens: Iterable[str]) -> None:
        """`added_tokens`: all that are found in a text before normalization. `cut_tokens`: those that allow a cut."""
        self._pattern = re.compile(_build_trie_pattern(added_tokens) if added_tokens else "(?!)")  # matches nothing
        self.texts = frozenset(cut_tokens)

    def find_cut(self, text: str, start: int = 0) -> int | None:
        """Return the first position from `start` on at which the text may be cut; None if there is none."""
        return next(self._find_cuts(text, start), None)

    def starts_with_cut(self, text: str) -> bool:
        """Return whether `text` begins with a cut token, so that any text before it can be encoded separately."""
        match = self._pattern.match(text)
        return match is not None and match.group() in self.texts

    def split(self, text: str) -> list[str]:
        """Split a text before each of its cut tokens."""
        positions = [0, *self._find_cuts(text), len(text)]
        return [text[start:end] for start, end in pairwise(positions) if start < end]

    def _find_cuts(self, text: str, start: int = 0) -> Iterator[int]:
        for match in self._pattern.finditer(text, start):
            if match.group() in self.texts:
                yield match.start()


def find_cut_tokens(hf_tokenizer: HfTokenizer) -> CutTokens:
    """Find the added tokens before which a text can be cut, so that its pieces can be encoded separately.

    With the cut token `<|im_start|>`, `a<|im_start|>b` has the ids of `a` and then those of `<|im_start|>b`. There are
    no cut tokens if the tokenizer has dropout, or if encoding sample texts in pieces changes their token ids.
    """
    no_cut_tokens = CutTokens((), ())
    if getattr(hf_tokenizer.model, "dropout", None):  # a text has other ids each time
        return no_cut_tokens
    added_tokens = list(hf_tokenizer.get_added_tokens_decoder().values())
    depends_on_neighbours = any(token.lstrip or token.rstrip or token.single_word for token in added_tokens)

    # Tokens that are searched in the normalized text may be spelled otherwise in the text as sent.
    unnormalized_tokens = [token for token in added_tokens if not token.normalized and token.content]
    unnormalized_texts = [token.content for token in unnormalized_tokens]
    candidates = [token.content for token in unnormalized_tokens if _can_cut(token, depends_on_neighbours)]
    cut_tokens = CutTokens(unnormalized_texts, _drop_overlapped(candidates, unnormalized_texts))

    added_texts = [token.content for token in added_tokens]
    return no_cut_tokens if _has_sample_mismatch(hf_tokenizer, cut_tokens, added_texts) else cut_tokens


def _drop_overlapped(candidates: Iterable[str], added_texts: Sequence[str]) -> list[str]:
    """Return the candidates that no other added token can overlap from before.

    In `ab<c`, an added token `b<` would be found before the token `<c`, so a cut before `<c` would split `b<`. It is
    the same with a token `b<cd` that contains the candidate.
    """
    endings = {text[start:] for text in added_texts for start in range(1, len(text))}

    def is_overlapped(candidate: str) -> bool:
        begins_in_other_token = any(candidate[:end] in endings for end in range(1, len(candidate)))
        return begins_in_other_token or any(text.find(candidate, 1) >= 0 for text in added_texts)

    return [candidate for candidate in candidates if not is_overlapped(candidate)]


def _can_cut(token: AddedToken, depends_on_neighbours: bool) -> bool:
    """Return whether the texts before and after an added token are encoded without regard to the token.

    `depends_on_neighbours`: some added token includes the white space around it (lstrip, rstrip) or must stand at the
    edge of a word (single_word). Then this token must not begin or end with white space or with a letter of a word.
    """
    text: str = token.content
    if token.lstrip or token.rstrip or token.single_word:
        return False
    if len(text) < _TOKEN_CHARS_MIN or text.isspace():
        return False
    edges = text[0] + text[-1]
    return not (depends_on_neighbours and any(char.isspace() or char.isalnum() or char == "_" for char in edges))


def _build_trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches the leftmost, longest of thousands of words quickly."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _build_branch_pattern(root)


def _build_branch_pattern(node: dict[str, Any]) -> str:
    """Return the pattern of the words below a node of a trie: character -> child node, "" -> a word ends here.

    For `in`, `int` and `of`: `(?:in(?:t)?|of)`.
    """
    chain_pattern = ""
    while len(node) == 1 and "" not in node:  # a loop, so that only branches need recursion
        ((char, node),) = node.items()
        chain_pattern += re.escape(char)
    ends_word = "" in node
    branch_patterns = [re.escape(char) + _build_branch_pattern(child) for char, child in sorted(node.items()) if char]
    if not branch_patterns:
        return chain_pattern
    return f"{chain_pattern}(?:{'|'.join(branch_patterns)}){'?' if ends_word else ''}"


def _has_sample_mismatch(hf_tokenizer: HfTokenizer, cut_tokens: CutTokens, added_tokens: Sequence[str]) -> bool:
    """Return whether cutting a sample text before its cut tokens, and encoding the pieces, gives other token ids.

    The samples are pairs of added tokens, and ordinary texts before and after each of them.
    """
    cuts = sorted(cut_tokens.texts)
    tokens = [*cuts[:4], *cuts[-2:], *added_tokens[:4], *added_tokens[-4:]]
    samples = [first + second for first in tokens for second in tokens[:6]]
    for shift in range(len(tokens)):
        rotated_tokens = [tokens[(i + shift) % len(tokens)] for i in range(len(SAMPLE_TEXTS))]
        samples.append("".join(text + token for text, token in zip(SAMPLE_TEXTS, rotated_tokens)))
        samples.append("".join(token + text for text, token in zip(SAMPLE_TEXTS, rotated_tokens)))
    for sample in samples:
        ids_of_pieces = [encode_plain(hf_tokenizer, piece) for piece in cut_tokens.split(sample)]
        if list(chain.from_iterable(ids_of_pieces)) != encode_plain(hf_tokenizer, sample):
            return True
    return False
