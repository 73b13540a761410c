"""Short, mostly ASCII text to ids by its words: a new turn costs the library a thousand allocations.

A byte-level tokenizer cuts normalized text into words by a regular expression and encodes every word by itself, so the
ids of a text are those of its words, and words come back. Here the words are found natively (prompts/native/words.hpp)
and put together from the model's byte pairs, or by the library's own model, once a word. Only for ASCII: there the
normal forms change nothing and the classes of characters are small sets, so that all backtracking engines (first
alternative first) agree. Where other characters stand among it, the library encodes those and what stands beside them,
up to where a word ends whatever they are, and such pieces come back too.

`build_bpe_encoder` says why where a tokenizer is not of this kind; sample texts are encoded both ways before a plan is
given out. Invariant: ids are identical to a plain full encode, or `encode` returns None and the library is asked.
"""

from __future__ import annotations

import re
import secrets
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from tokenizers import Tokenizer as HfTokenizer

try:
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parse  # type: ignore[attr-defined]
except ImportError:  # before Python 3.11
    import sre_constants as sre
    import sre_parse

try:
    from prompts._words import Words
    from prompts._words import begin_alike as begin_alike
    from prompts._words import count_openings as count_openings
    from prompts._words import digest32 as digest32
    from prompts._words import digests as digests
    from prompts._words import digests_among as digests_among
    from prompts._words import message_words as message_words
except ImportError:
    _HAS_NATIVE = False

    def begin_alike(first: bytes, second: bytes, length: int) -> bool:
        """Whether both have so many bytes, and the same ones."""
        return length <= min(len(first), len(second)) and first.startswith(memoryview(second)[:length])

    def count_openings(text: bytes, end: int = sys.maxsize) -> int:
        """Of `[` and `{` before `end`: no JSON text has more lists and objects."""
        return text.count(b"[", 0, end) + text.count(b"{", 0, end)

    def digest32(data: bytes, before: int, /) -> int:
        """Of some bytes behind others whose digest is `before`."""
        return xxhash.xxh3_64_intdigest(data, before) & 0xFFFF_FFFF

    def message_words(
        messages: list[Any],
        roles: dict[str, int],
        mark: bytes,
        line: bytes,
        words_of_message: Callable[[Any], tuple[int, ...]],
        /,
    ) -> bytes:
        """`other` of each message, 32 bits each."""
        return array("I", [word for message in messages for word in words_of_message(message)]).tobytes()

    def digests(body: bytes, first: int, seed: int, end: int = sys.maxsize) -> list[int]:
        """Of the beginnings of `body` before `end` that have `first` bytes, an eighth more, two eighths ..., twice as
        many, an eighth of that more, and so on."""
        hasher, view, results = xxhash.xxh3_64(seed=seed), memoryview(body), list[int]()
        offset, length, step = 0, first, first // 8
        while length <= min(len(body), end):
            hasher.update(view[offset:length])
            results.append(hasher.intdigest())
            offset, step = length, 2 * step if length == 16 * step else step
            length += step
        return results

    def digests_among(body: bytes, first: int, seed: int, among: Mapping[int, object], most: int) -> list[int]:
        """Of the `digests` of the whole body the last ones that `among` has, `most` at most, the last first."""
        return [digest for digest in reversed(digests(body, first, seed)) if digest in among][:most]

else:
    _HAS_NATIVE = True

TEXT_CHARS_MAX = 65_536
"""Longer texts are left to the library, which lets other threads run meanwhile."""
CACHED_WORDS_MAX = 65_536
"""Words remembered, of 128 characters at most; when there are more, all are forgotten."""
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_NO_ASCII = r"\x80-\xff"
"""Inside a class: no ASCII character."""
_ASCII_BY_PROPERTY = {
    "L": "a-zA-Z", "N": "0-9", "Nd": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": _NO_ASCII, "Lm": _NO_ASCII, "Lo": _NO_ASCII,
    "M": _NO_ASCII, "Mn": _NO_ASCII, "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<->^`|~",
}  # fmt: skip
_PATTERN_PARTS = re.compile(
    r"""(?P<property>\\p\{(?P<name>\w+)\})
    | (?P<escape>\\[sSdwrnt'".\-/|()\[\]{}?*+\\^$])
    | (?P<group>\(\?(?:i?:|!|=))
    | (?P<repeat>(?:[?*+]|\{\d+(?:,\d*)?\})(?![?*+{]))
    | (?P<close>[)|])
    | (?P<class>\[\^?(?:\\p\{\w+\}|\\[sSdwrnt'".\-/|()\[\]{}?*+\\^$]|[^\\\[\]&]|&(?!&))+\])
    | (?P<literal>[^\\()\[\]{}?*+^$.|])""",
    re.VERBOSE,
)


class PatternRow(NamedTuple):
    """One part of a compiled pattern, as prompts/native/words.hpp runs it."""

    kind: int
    chars_low: int
    """Bits of the ASCII characters 0 to 63 that the part matches."""
    chars_high: int
    """Bits of the ASCII characters 64 to 127 that the part matches."""
    count_min: int
    count_max: int
    is_positive: bool
    """A lookahead must match; else it must not."""
    branches: list[int]
    next_row: int


class MergePairs(NamedTuple):
    """Token ids of a vocabulary's ASCII merges."""

    alphabet_ids: list[int]
    left_ids: list[int]
    right_ids: list[int]
    merged_ids: list[int]


class BpeEncoder:
    """Encodes text of one tokenizer. Thread-safe."""

    def __init__(
        self, hf_tokenizer: HfTokenizer, pattern_steps: Sequence[Sequence[PatternRow]],
        added_tokens: Sequence[tuple[str, int | None]],
        merge_pairs: MergePairs | None = None, accepts_non_ascii: bool = False,
    ) -> None:  # fmt: skip
        """`added_tokens`: every added token that a text may have, with its id where texts are cut at it. `merge_pairs`:
        of which new words are made; None leaves that to the library. `accepts_non_ascii`: other characters than ASCII,
        and what stands beside them, are the library's, and all else is encoded here."""
        self._hf_tokenizer = hf_tokenizer
        self._model = hf_tokenizer.model
        self._library_encode = self._encode_with_library if accepts_non_ascii else None
        self.native_encoder = Words(pattern_steps, secrets.randbits(64), CACHED_WORDS_MAX, merge_pairs, added_tokens)

    def encode(self, text: str) -> bytes | None:
        """Ids of `text` as the bytes of an array; None where the library must be asked: it has an added token at which
        texts are not cut, or is not of the kind."""
        if len(text) > TEXT_CHARS_MAX or not (self._library_encode or text.isascii()):
            return None
        return self.native_encoder.encode(text, self._encode_word, self._library_encode)

    def _encode_with_library(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._hf_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_word(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]


def _make_byte_level_table() -> dict[int, int]:
    """How byte-level tokenizers spell ASCII bytes that cannot be seen."""
    invisible_bytes = [*range(33), 127]
    characters = {byte: byte for byte in range(128)}  # what is missing costs an exception a character
    return characters | {byte: 256 + index for index, byte in enumerate(invisible_bytes)}


_BYTE_LEVEL = _make_byte_level_table()
_BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by where it is told to."""


def build_bpe_encoder(
    hf_tokenizer: HfTokenizer,
    tokenizer_json: dict[str, Any],
    sample_texts: Sequence[str],
    cut_tokens: frozenset[str] = frozenset(),
) -> BpeEncoder | str:
    """The encoder of a tokenizer of `tokenizer_json`, or why there is none: a doubt is a no. `cut_tokens`: added
    tokens before and behind which texts are encoded for themselves."""
    if not _HAS_NATIVE:
        return "prompts._words was not compiled"
    if (tokenizer_json.get("model") or {}).get("type") != "BPE":
        return "it is not byte-level BPE"
    if not _preserves_ascii(tokenizer_json.get("normalizer")):
        return "its normalizer may change ASCII text"
    if any(token["normalized"] and not token["content"].isascii() for token in tokenizer_json["added_tokens"]):
        return "an added token may be ASCII once it is normalized"
    patterns = _read_split_patterns(tokenizer_json.get("pre_tokenizer"))
    if isinstance(patterns, str):
        return patterns
    pattern_steps = []
    for pattern in patterns:
        python_pattern = translate_pattern(pattern)
        try:
            rows = None if python_pattern is None else compile_pattern(python_pattern)
        except re.error as error:
            return f"its pattern does not compile: {error}"
        if rows is None:
            return f"its pattern uses what is not known here: {pattern[:60]!r}"
        pattern_steps.append(rows)
    token_texts = dict.fromkeys(token["content"] for token in tokenizer_json["added_tokens"] if token["content"])
    added_tokens = [
        (content, hf_tokenizer.token_to_id(content) if content in cut_tokens else None) for content in token_texts
    ]
    try:
        accepts_non_ascii = len(pattern_steps) == 1 and not any(
            token["normalized"] for token in tokenizer_json["added_tokens"]
        )
        encoder = BpeEncoder(
            hf_tokenizer, pattern_steps, added_tokens, _read_merge_pairs(tokenizer_json["model"]), accepts_non_ascii
        )
    except ValueError as error:
        return f"its pattern is not for words: {error}"
    for sample_text in sample_texts:
        ids = encoder.encode(sample_text)
        library_ids = hf_tokenizer.encode_batch_fast([sample_text], add_special_tokens=False)[0].ids
        if ids is not None and ids != array("I", library_ids).tobytes():
            return f"its words gave other ids for a sample text ({sample_text[:40]!r})"
    return encoder


def _read_merge_pairs(model: dict[str, Any]) -> MergePairs | None:
    """The merges of a byte-level model that make ASCII tokens; None where it makes words another way."""
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "dropout")):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    alphabet = "".join(map(chr, range(128))).translate(_BYTE_LEVEL)
    if any(char not in vocabulary for char in alphabet):
        return None
    left_ids, right_ids, merged_ids = [], [], []
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        token = first + second
        if not token.strip(alphabet):
            left_ids.append(vocabulary[first])
            right_ids.append(vocabulary[second])
            merged_ids.append(vocabulary[token])
    return MergePairs([vocabulary[char] for char in alphabet], left_ids, right_ids, merged_ids)


def _preserves_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_preserves_ascii(part) for part in normalizer["normalizers"])
    return normalizer.get("type") in _NORMAL_FORMS


def _read_split_patterns(pre_tokenizer: dict[str, Any] | None) -> list[str] | str:
    """The regular expressions that cut a text into words one after the other, before it is spelt byte by byte."""
    parts = [] if pre_tokenizer is None else [pre_tokenizer]
    if pre_tokenizer is not None and pre_tokenizer.get("type") == "Sequence":
        parts = pre_tokenizer["pretokenizers"]
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return "it is not byte-level"
    patterns: list[str] = []
    for part in parts[:-1]:
        pattern = part.get("pattern") or {}
        if part.get("type") != "Split" or part.get("behavior") != "Isolated" or part.get("invert"):
            return f"it cuts words by {part.get('type')}"
        if not isinstance(pattern.get("Regex"), str):
            return "it cuts words at a string"
        patterns.append(pattern["Regex"])
    if parts[-1].get("use_regex", True):
        patterns.append(_BYTE_LEVEL_PATTERN)
    return patterns or "it does not cut words"


def translate_pattern(pattern: str) -> str | None:
    """`pattern` (Oniguruma's syntax) as Python's, equal on ASCII text; None where it uses anything but the constructs
    that are known to mean the same in both."""
    caseless_groups = re.findall(r"\(\?i:([^()]*)\)", pattern)
    if len(caseless_groups) != pattern.count("(?i:") or any(r"\p" in text for text in caseless_groups):
        return None  # what a property means regardless of case is each engine's own idea
    python_pattern, position = "", 0
    while position < len(pattern):
        part = _PATTERN_PARTS.match(pattern, position)
        if part is None:
            return None
        position = part.end()
        text = part.group()
        if part.lastgroup in ("property", "name"):
            char_class = _ASCII_BY_PROPERTY.get(part.group("name"))
            text = f"[{char_class}]"
            if char_class is None:
                return None
        elif part.lastgroup == "class":
            names = re.findall(r"\\p\{(\w+)\}", text)
            if not all(name in _ASCII_BY_PROPERTY for name in names) or re.search(r"-\\p|\\p\{\w+\}-", text):
                return None
            text = re.sub(r"\\p\{(\w+)\}", lambda match: _ASCII_BY_PROPERTY[match.group(1)], text)
        python_pattern += text
    return python_pattern


# A pattern as prompts/native/words.hpp runs it ------------------------------------------------------------------------

_ACCEPT, _SET, _ALTERNATIVES, _LOOKAHEAD = range(4)
_ASCII = (1 << 128) - 1
_UNLIMITED = 1 << 31


def _make_char_bits(text: str) -> int:
    """A set of characters as bits."""
    return sum(1 << ord(char) for char in set(text))


_SPACE, _DIGIT = _make_char_bits(" \t\n\r\f\v"), _make_char_bits("0123456789")
_WORD = _DIGIT | _make_char_bits("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_BITS_BY_CATEGORY = {
    sre.CATEGORY_SPACE: _SPACE, sre.CATEGORY_NOT_SPACE: _ASCII & ~_SPACE,
    sre.CATEGORY_DIGIT: _DIGIT, sre.CATEGORY_NOT_DIGIT: _ASCII & ~_DIGIT,
    sre.CATEGORY_WORD: _WORD, sre.CATEGORY_NOT_WORD: _ASCII & ~_WORD,
}  # fmt: skip


def compile_pattern(pattern: str) -> list[PatternRow] | None:
    """The parts of a pattern in Python's syntax, for ASCII text; None where there is none for what it uses. Raises
    re.error."""
    rows: list[PatternRow] = [PatternRow(_ACCEPT, 0, 0, 1, 1, True, [], 0)]

    def add_row(
        kind: int, next_row: int, *, chars: int = 0, repeats: tuple[int, int] = (1, 1), is_positive: bool = True,
        branches: Sequence[int] = (),
    ) -> int:  # fmt: skip
        low, high = chars & (1 << 64) - 1, chars >> 64
        count_max = min(int(repeats[1]), _UNLIMITED)
        rows.append(PatternRow(kind, low, high, repeats[0], count_max, is_positive, list(branches), next_row))
        return len(rows) - 1

    def compile_items(items: Sequence[Any], next_row: int, ignores_case: bool) -> int:
        """Return the row at which these items begin, where `next_row` follows them."""
        for op, value in reversed(list(items)):
            chars = _compile_char_set(op, value, ignores_case)
            if chars is not None:
                next_row = add_row(_SET, next_row, chars=chars)
            elif op is sre.MAX_REPEAT:
                count_min, count_max, inner_items = value[0], value[1], list(value[2])
                chars = (
                    _compile_char_set(inner_items[0][0], inner_items[0][1], ignores_case)
                    if len(inner_items) == 1
                    else None
                )
                if chars is not None:
                    next_row = add_row(_SET, next_row, chars=chars, repeats=(count_min, count_max))
                elif (count_min, count_max) == (0, 1):
                    next_row = add_row(
                        _ALTERNATIVES, next_row, branches=[compile_items(inner_items, next_row, ignores_case), next_row]
                    )
                else:
                    raise KeyError(op)
            elif op is sre.BRANCH:
                next_row = add_row(
                    _ALTERNATIVES,
                    next_row,
                    branches=[compile_items(branch, next_row, ignores_case) for branch in value[1]],
                )
            elif op is sre.SUBPATTERN and not value[2]:
                next_row = compile_items(value[3], next_row, ignores_case or bool(value[1] & re.IGNORECASE))
            elif op in (sre.ASSERT, sre.ASSERT_NOT) and value[0] == 1:
                inner_items = list(value[1])
                chars = (
                    _compile_char_set(inner_items[0][0], inner_items[0][1], ignores_case)
                    if len(inner_items) == 1
                    else None
                )
                if chars is None:
                    raise KeyError(op)
                next_row = add_row(_LOOKAHEAD, next_row, chars=chars, is_positive=op is sre.ASSERT)
            else:
                raise KeyError(op)
        return next_row

    try:
        first_row = compile_items(sre_parse.parse(pattern, re.ASCII), 0, False)
    except KeyError:
        return None
    add_row(_ALTERNATIVES, first_row, branches=[first_row])
    return rows


def _compile_char_set(op: Any, value: Any, ignores_case: bool) -> int | None:
    """The characters that a single-character item matches; None for any other. Raises KeyError."""
    if op is sre.LITERAL:
        char = chr(value)
        return (_make_char_bits(char.lower() + char.upper() if ignores_case else char) if value < 128 else 0) & _ASCII
    if op is sre.NOT_LITERAL and not ignores_case:
        return _ASCII & ~(1 << int(value))
    if op is not sre.IN or (ignores_case and any(item is not sre.LITERAL for item, _ in value)):
        return None
    chars, is_negated = 0, False
    for item, item_value in value:
        if item is sre.NEGATE:
            is_negated = True
        elif item is sre.RANGE:
            chars |= ((1 << item_value[1] + 1) - 1 & ~((1 << item_value[0]) - 1)) & _ASCII
        elif item is sre.CATEGORY:
            chars |= int(_BITS_BY_CATEGORY[item_value])
        else:
            chars |= _compile_char_set(item, item_value, ignores_case) or 0
    return _ASCII & ~chars if is_negated else chars
