"""Short ASCII text to ids by its words: what a new turn costs where the library would take a thousand allocations.

A byte-level tokenizer cuts normalized text into words by a regular expression and encodes every word by itself, so the
ids of a text are those of its words, and words come back. Here the words are found by Python's `re` and their ids come
from the library's own model, once a word. Only for ASCII: there the normal forms change nothing and the classes of
characters are small sets, so that both regular expression engines (backtracking, first alternative first) agree.

`plan_words` says why where a tokenizer is not of this kind; sample texts are encoded both ways before a plan is given
out. Invariant: ids are identical to a plain full encode, or `encode` returns None and the library is asked.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

TEXT_MAX = 16_384
"""Longer texts are left to the library, which lets other threads run meanwhile."""
WORDS_MAX = 32_768
"""Words remembered; when there are more, all are forgotten."""
_WORD_MAX = 64
"""Longer words hardly come back: they are encoded, not remembered."""
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_NEVER = r"\x80-\xff"
"""Inside a class: no ASCII character."""
_CLASSES = {
    "L": "a-zA-Z", "N": "0-9", "Nd": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": _NEVER, "Lm": _NEVER, "Lo": _NEVER,
    "M": _NEVER, "Mn": _NEVER, "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<->^`|~",
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


class WordEncoder:
    """Encodes ASCII text of one tokenizer. Thread-safe."""

    def __init__(self, hf: HfTokenizer, steps: Sequence[re.Pattern[str]], added: re.Pattern[str]) -> None:
        self._model = hf.model
        self._ids_of = hf.token_to_id
        self._steps = steps
        self._added = added
        """Finds every added token."""
        self._known: dict[str, bytes] = {}
        """Word -> its ids as the bytes of an array."""

    def encode(self, text: str, special: str = "") -> bytes | None:
        """Ids of `text` as the bytes of an array; None where the library must be asked. `text` begins with the added
        token `special` and has no other."""
        if len(text) > TEXT_MAX or not text.isascii():
            return None
        rest = text[len(special) :]
        if self._added.search(rest) is not None:
            return None
        words = [rest] if rest else []
        for step in self._steps:
            words = _cut(step, words[0]) if len(words) == 1 else [piece for word in words for piece in _cut(step, word)]
        known = self._known
        parts = [known.get(word) for word in words]
        if None in parts:
            if "" in words:
                return None  # after an empty match the two engines go on differently
            parts = [known.get(word) or self._learn(word) for word in words]
        if special:
            special_id = self._ids_of(special)
            if special_id is None:
                return None
            parts.insert(0, array("I", (special_id,)).tobytes())
        return b"".join(parts)  # type: ignore[arg-type]

    def _learn(self, word: str) -> bytes:
        ids = array("I", [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]).tobytes()
        if len(word) <= _WORD_MAX:
            if len(self._known) >= WORDS_MAX:
                self._known = {}
            self._known[word] = ids
        return ids


def _cut(step: re.Pattern[str], text: str) -> list[str]:
    """Matches and what lies between them. An empty one stands for an empty match."""
    found: list[str] = step.findall(text)
    if sum(map(len, found)) == len(text):
        return found
    pieces: list[str] = step.split(text)  # gap, match, gap, match, ..., gap
    return [piece for place, piece in enumerate(pieces) if piece or place % 2]


def _byte_level() -> dict[int, int]:
    """How byte-level tokenizers spell ASCII bytes that cannot be seen."""
    hidden = [*range(33), 127]
    return {byte: 256 + place for place, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level()
_BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by where it is told to."""


def plan_words(hf: HfTokenizer, spec: dict[str, Any], samples: Sequence[str]) -> WordEncoder | str:
    """The encoder of a tokenizer whose tokenizer.json is `spec`, or why there is none: a doubt is a no."""
    if (spec.get("model") or {}).get("type") != "BPE":
        return "it is not byte-level BPE"
    if not _keeps_ascii(spec.get("normalizer")):
        return "its normalizer may change ASCII text"
    if any(token["normalized"] and not token["content"].isascii() for token in spec["added_tokens"]):
        return "an added token may be ASCII once it is normalized"
    patterns = _patterns(spec.get("pre_tokenizer"))
    if isinstance(patterns, str):
        return patterns
    steps = []
    for pattern in patterns:
        translated = ascii_pattern(pattern)
        if translated is None:
            return f"its pattern uses what is not known here: {pattern[:60]!r}"
        try:
            steps.append(re.compile(f"({translated})", re.ASCII))
        except re.error as error:
            return f"its pattern does not compile: {error}"
    contents = [token["content"] for token in spec["added_tokens"] if token["content"]]
    added = re.compile("|".join(re.escape(content) for content in contents) or r"(?!)")
    encoder = WordEncoder(hf, steps, added)
    for sample in samples:
        ids = encoder.encode(sample)
        plain = hf.encode_batch_fast([sample], add_special_tokens=False)[0].ids
        if ids is not None and ids != array("I", plain).tobytes():
            return f"its words gave other ids for a sample text ({sample[:40]!r})"
    return encoder


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_keeps_ascii(part) for part in normalizer["normalizers"])
    return normalizer.get("type") in _NORMAL_FORMS


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str] | str:
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


def ascii_pattern(pattern: str) -> str | None:
    """`pattern` (Oniguruma's syntax) as Python's, equal on ASCII text; None where it uses anything but the constructs
    that are known to mean the same in both."""
    folded = re.findall(r"\(\?i:([^()]*)\)", pattern)
    if len(folded) != pattern.count("(?i:") or any(r"\p" in text for text in folded):
        return None  # what a property means regardless of case is each engine's own idea
    out, at = "", 0
    while at < len(pattern):
        part = _PATTERN_PARTS.match(pattern, at)
        if part is None:
            return None
        at = part.end()
        text = part.group()
        if part.lastgroup in ("property", "name"):
            known = _CLASSES.get(part.group("name"))
            text = f"[{known}]"
            if known is None:
                return None
        elif part.lastgroup == "class":
            names = re.findall(r"\\p\{(\w+)\}", text)
            if not all(name in _CLASSES for name in names) or re.search(r"-\\p|\\p\{\w+\}-", text):
                return None
            text = re.sub(r"\\p\{(\w+)\}", lambda found: _CLASSES[found.group(1)], text)
        out += text
    return out
