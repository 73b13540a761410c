"""Exact caching of what a tokenizer makes of the text between special tokens.

A tokenizer of Hugging Face's `tokenizers` first cuts its input at added tokens (leftmost, longest first), then
normalizes, pre-tokenizes and encodes each piece by itself. So the ids of a prompt are the concatenation of the ids of
its **segments**, a segment being a special token and the text up to the next one, and a chat whose earlier turns are
cached costs only its new turn.

What is not cached is mostly a new turn: `prompts/fast_encoder.py` encodes it where it can, the library where not.

Where that does not hold for a tokenizer, `make_segment_plan` says why and there is no cache for it: the rules are in
`_find_unsupported_reason`, and sample texts are encoded both ways before a plan is given out. Invariant: ids are
identical to a plain full encode. Memory is bounded in bytes, least recently used first.
"""

from __future__ import annotations

import json
import operator
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from prompts.fast_encoder import FastEncoder, build_fast_encoder

CACHE_BYTES_DEFAULT = 64 * 2**20
ID_TYPE = "I"
"""Type code of arrays of ids."""
_ID_BYTES = array(ID_TYPE).itemsize
_ENTRY_BYTES = 120
"""What an entry costs besides its two objects: its slot in the dictionary and its place in the order."""
SHORT_TEXT_CHARS_MAX = 4096
"""Characters of a text that is not looked up."""
_START_CHECKS_MAX = 1024
_RANDOM_STATE_KEYS = ("dropout",)


@dataclass(frozen=True)
class SegmentPlan:
    """How one tokenizer's input may be cut. `pattern` finds every added token; cuts are before those in `cuts`."""

    pattern: re.Pattern[str]
    cut_tokens: frozenset[str]
    prefix_ids: tuple[int, ...] | None
    """Ids that `add_special_tokens` puts before and after a text; None where it does anything else."""
    suffix_ids: tuple[int, ...] | None
    anchor_tokens: frozenset[str] = frozenset()
    """Cuts at which a known text may end: no other added token can reach across one from before it."""
    split_pattern: re.Pattern[str] | None = None
    """`pattern` in a group, where every token that it finds is a cut."""
    fast_encoder: FastEncoder | None = None
    """Encodes in place of the library, where the tokenizer is of a kind that it knows."""
    token_chars_max: int = 0
    """Characters of an added token."""

    def split(self, text: str) -> list[str]:
        """The segments of `text`, in order; their concatenation is `text`."""
        if self.split_pattern is not None:
            before, *parts = self.split_pattern.split(text)  # token, text, token, text ...
            segments = list(map(operator.add, parts[::2], parts[1::2]))
            return [before, *segments] if before else segments
        starts = [match.start() for match in self.pattern.finditer(text) if match.group() in self.cut_tokens]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts) if start < end]


@dataclass(frozen=True)
class SegmentStats:
    """Counters since start; `tokens` are of whole prompts."""

    hits: int
    misses: int
    hit_tokens: int
    miss_tokens: int
    entries: int
    used_bytes: int
    max_bytes: int


def encode_plain(hf_tokenizer: HfTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """A full encode. Of the library's calls this one is the fastest, and the only one that releases the GIL."""
    ids: list[int] = hf_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class SegmentCache:
    """Segment text -> ids, bounded by bytes. Thread-safe; encoding happens outside the lock."""

    def __init__(
        self,
        hf_tokenizer: HfTokenizer,
        plan: SegmentPlan,
        *,
        max_bytes: int = CACHE_BYTES_DEFAULT,
        short_text_chars_max: int = SHORT_TEXT_CHARS_MAX,
    ) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._short_text_chars_max = short_text_chars_max
        self._plan = plan
        self._max_bytes = max_bytes
        self._ids_by_segment: OrderedDict[str, bytes] = OrderedDict()
        """Segment -> its ids as the bytes of an array."""
        self._used_bytes = 0
        self._segment_start_checks: dict[str, bool] = {}
        """As many characters as a token has at most -> whether one begins there at which any text is cut."""
        self._lock = threading.Lock()
        self._hits = self._misses = self._hit_tokens = self._miss_tokens = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Ids of `text`, or None where this plan cannot add the special tokens."""
        ids = self.encode_array(text, add_special_tokens=add_special_tokens)
        return None if ids is None else ids.tolist()

    def encode_array(self, text: str, *, add_special_tokens: bool) -> array[int] | None:
        """`encode` as an array of `ID_TYPE`: a long prompt's ids are joined by copying bytes, not objects."""
        plan = self._plan
        if add_special_tokens and (plan.prefix_ids is None or plan.suffix_ids is None):
            return None
        id_chunks = self._encode_short_text(text)
        if id_chunks is None:
            id_chunks = self._encode_segments(text)
        token_ids = array(ID_TYPE, plan.prefix_ids or ()) if add_special_tokens else array(ID_TYPE)
        token_ids.frombytes(id_chunks[0] if len(id_chunks) == 1 else b"".join(id_chunks))
        if add_special_tokens:
            token_ids.extend(plan.suffix_ids or ())
        return token_ids

    def _encode_short_text(self, text: str) -> list[bytes] | None:
        """At once, where that costs less than finding what of it is known."""
        fast_encoder = self._plan.fast_encoder
        if fast_encoder is None or len(text) > self._short_text_chars_max:
            return None
        ids = fast_encoder.encode(text)
        with self._lock:
            self._misses += 1
            self._miss_tokens += len(ids) // _ID_BYTES
        return [ids]

    def _encode_segments(self, text: str) -> list[bytes]:
        segments = self._plan.split(text)
        cached_ids = self._get_cached_ids(segments)
        missing_segments = [segment for segment, ids in zip(segments, cached_ids) if ids is None]
        new_ids = self._encode_missing(missing_segments) if missing_segments else {}
        return [new_ids[segment] if ids is None else ids for segment, ids in zip(segments, cached_ids)]

    def find_segment(self, text: str, start: int = 0) -> int | None:
        """Return where the first token from `start` on stands at which any text is cut; None where there is none."""
        for match in self._plan.pattern.finditer(text, start):
            if match.group() in self._plan.anchor_tokens:
                return match.start()
        return None

    def starts_segment(self, text: str, position: int = 0) -> bool:
        """Whether there is a token in `text` at `position` at which any text is cut."""
        text_start = text[position : position + self._plan.token_chars_max]
        is_start = self._segment_start_checks.get(text_start)
        if is_start is None:
            match = self._plan.pattern.match(text_start)
            is_start = match is not None and match.group() in self._plan.anchor_tokens
            if len(self._segment_start_checks) >= _START_CHECKS_MAX:
                self._segment_start_checks = {}
            self._segment_start_checks[text_start] = is_start
        return is_start

    def _get_cached_ids(self, segments: Sequence[str]) -> list[bytes | None]:
        ids_by_segment = self._ids_by_segment
        with self._lock:
            cached_ids = [ids_by_segment.get(segment) for segment in segments]
            for segment, ids in zip(segments, cached_ids):
                if ids is None:
                    self._misses += 1
                else:
                    self._hits += 1
                    self._hit_tokens += len(ids) // _ID_BYTES
                    ids_by_segment.move_to_end(segment)
        return cached_ids

    def _encode_missing(self, missing_segments: Iterable[str]) -> dict[str, bytes]:
        unique_segments = list(dict.fromkeys(missing_segments))
        fast_encoder = self._plan.fast_encoder
        if fast_encoder is not None:
            new_ids = {segment: fast_encoder.encode(segment) for segment in unique_segments}
        else:
            encodings = self._hf_tokenizer.encode_batch_fast(unique_segments, add_special_tokens=False)
            new_ids = {
                segment: array(ID_TYPE, encoding.ids).tobytes() for segment, encoding in zip(unique_segments, encodings)
            }
        with self._lock:
            for segment, ids in new_ids.items():
                self._miss_tokens += len(ids) // _ID_BYTES
                self._store_segment(segment, ids)
        return new_ids

    def _store_segment(self, segment: str, ids: bytes) -> None:
        size_bytes = _entry_bytes(segment, ids)
        if segment in self._ids_by_segment or size_bytes > self._max_bytes // 4:
            return  # one prompt must not empty the cache
        self._ids_by_segment[segment] = ids
        self._used_bytes += size_bytes
        while self._used_bytes > self._max_bytes:
            old_segment, old_ids = self._ids_by_segment.popitem(last=False)
            self._used_bytes -= _entry_bytes(old_segment, old_ids)

    def clear(self) -> None:
        """Forget all segments, and what was counted."""
        with self._lock:
            self._ids_by_segment.clear()
            self._used_bytes = self._hits = self._misses = self._hit_tokens = self._miss_tokens = 0

    def stats(self) -> SegmentStats:
        with self._lock:
            return SegmentStats(
                hits=self._hits,
                misses=self._misses,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                entries=len(self._ids_by_segment),
                used_bytes=self._used_bytes,
                max_bytes=self._max_bytes,
            )

    def check_invariants(self) -> None:
        """For tests: the byte count is the sum over the entries and within its bound."""
        with self._lock:
            assert self._used_bytes == sum(_entry_bytes(segment, ids) for segment, ids in self._ids_by_segment.items())
            assert self._used_bytes <= self._max_bytes


def _entry_bytes(segment: str, ids: bytes) -> int:
    """The same at all times: a text that is not ASCII takes more once somebody asked for its UTF-8."""
    text_bytes = sys.getsizeof(segment) if segment.isascii() else _ENTRY_BYTES + 8 * len(segment)
    return _ENTRY_BYTES + text_bytes + sys.getsizeof(ids)


def make_segment_plan(hf_tokenizer: HfTokenizer) -> SegmentPlan | str:
    """How to cut this tokenizer's input, or why it must not be cut. Conservative: a doubt is a no."""
    tokenizer_text = hf_tokenizer.to_str()
    tokenizer_json: dict[str, Any] = json.loads(tokenizer_text)
    reason = _find_unsupported_reason(tokenizer_json)
    if reason is not None:
        return reason
    literal_tokens = [token for token in tokenizer_json["added_tokens"] if not token["normalized"] and token["content"]]
    any_looks_around = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in tokenizer_json["added_tokens"])
    cut_tokens = frozenset(token["content"] for token in literal_tokens if _can_cut(token, any_looks_around))
    if not cut_tokens:
        return "no added token at whose edges its input may be cut"
    pattern = re.compile(_build_trie_pattern([token["content"] for token in literal_tokens]))
    prefix_ids, suffix_ids = _find_affixes(hf_tokenizer, sorted(cut_tokens)[0]) or (None, None)
    token_texts = [token["content"] for token in literal_tokens]
    anchor_tokens = frozenset(
        cut_token
        for cut_token in cut_tokens
        if not any(token_text.find(cut_token, 1) >= 0 for token_text in token_texts)
    )
    sample_texts = [*_SAMPLE_TEXTS, *_WORD_SAMPLE_TEXTS, *sorted(token["content"] for token in literal_tokens)[:64]]
    encoder = build_fast_encoder(hf_tokenizer, tokenizer_text, sample_texts)
    fast_encoder = encoder if isinstance(encoder, FastEncoder) else None
    split_pattern = re.compile(f"({pattern.pattern})") if cut_tokens.issuperset(token_texts) else None
    token_chars_max = max(map(len, token_texts))
    plan = SegmentPlan(
        pattern, cut_tokens, prefix_ids, suffix_ids, anchor_tokens, split_pattern, fast_encoder, token_chars_max
    )
    mismatch = _find_sample_mismatch(hf_tokenizer, plan, [token["content"] for token in tokenizer_json["added_tokens"]])
    return plan if mismatch is None else mismatch


def _find_unsupported_reason(tokenizer_json: dict[str, Any]) -> str | None:
    """Properties of a tokenizer.json under which pieces are not encoded independently of each other."""
    model = tokenizer_json.get("model") or {}
    if any(model.get(key) for key in _RANDOM_STATE_KEYS):
        return "its model drops merges at random"
    if tokenizer_json.get("truncation") or tokenizer_json.get("padding"):
        return "it truncates or pads"
    return None


def _can_cut(token: dict[str, Any], any_looks_around: bool) -> bool:
    """Whether the text before and after this added token is encoded without regard to it.

    Where other added tokens look at their neighbours (lstrip and rstrip take whitespace, single_word asks for a word's
    edge), a cutting token must look to them like the end of the text: neither whitespace nor a word's character.
    """
    content: str = token["content"]
    if token["lstrip"] or token["rstrip"] or token["single_word"]:
        return False
    edges = content[0] + content[-1]
    has_plain_edges = not any(char.isspace() or char.isalnum() or char == "_" for char in edges)
    # Short tokens (a newline, two spaces) are everywhere in text: exact, but not worth a segment.
    return (has_plain_edges or not any_looks_around) and len(content) >= 3 and not content.isspace()


def _build_trie_pattern(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words` at the leftmost place, fast also for thousands."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}

    def build_branch(node: dict[str, Any]) -> str:
        # Walk chains without branches in a loop, so that the depth of recursion is that of the branching.
        chain_pattern = ""
        while len(node) == 1 and "" not in node:
            ((char, node),) = node.items()
            chain_pattern += re.escape(char)
        ends_word = "" in node
        branch_patterns = [re.escape(char) + build_branch(child) for char, child in sorted(node.items()) if char]
        if not branch_patterns:
            return chain_pattern
        return f"{chain_pattern}(?:{'|'.join(branch_patterns)}){'?' if ends_word else ''}"

    return build_branch(root)


def _find_affixes(hf_tokenizer: HfTokenizer, special_token: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What add_special_tokens puts around a text, where it is the same for every text."""
    probe_text = f"{special_token}a b"
    plain_ids = encode_plain(hf_tokenizer, probe_text, add_special_tokens=False)
    full_ids = encode_plain(hf_tokenizer, probe_text, add_special_tokens=True)
    positions = [i for i in range(len(full_ids) - len(plain_ids) + 1) if full_ids[i : i + len(plain_ids)] == plain_ids]
    for position in positions:
        prefix_ids, suffix_ids = full_ids[:position], full_ids[position + len(plain_ids) :]
        texts = ("", "x", special_token, f"one{special_token}two", f"{special_token}{special_token} three ")
        if all(
            encode_plain(hf_tokenizer, text, add_special_tokens=True)
            == prefix_ids + encode_plain(hf_tokenizer, text, add_special_tokens=False) + suffix_ids
            for text in texts
        ):
            return tuple(prefix_ids), tuple(suffix_ids)
    return None


_SAMPLE_TEXTS = (
    "Hello world", " leading", "trailing ", "  two  spaces  ", "\n\nlines\n", "a", "", " ", "\n", "▁low ▁line",
    "don't 123,456.78 $x_1", "héllo Ünïcode é ﬁ ½", "日本語 テスト 한국어", "🙂👍🏽 emoji",
    "\t tab\r\n", "snake_case CamelCase",
)  # fmt: skip
_WORD_SAMPLE_TEXTS = (
    "I'LL we've IT'S 'Tis o'clock d'accord 'sword", "1 12 123 1234 12345 0x1F 3.14e-10 1,000,000", "a.b;c!d?e(f)[g]{h}",
    "def f(x):\n    return x**2  # x\n\n\nclass A:\n\tpass\r\n", "   three\n \n  \t x  \n", "http://a.b/c?d=e&f=%20#g",
    "\x00\x01\x1f\x7f \x0b\x0c end", "aAbBcC HTTPServer iOS XMLHttpRequest2", "a" * 70 + " " * 20 + "-" * 20 + "\n" * 9,
    "@user $5.00 <tag/> ~tilde `code` \\ | ^ & * _under_ +plus= \"quoted\"", "!" + "".join(map(chr, range(32, 127))),
)  # fmt: skip


def _find_sample_mismatch(hf_tokenizer: HfTokenizer, plan: SegmentPlan, added_tokens: Sequence[str]) -> str | None:
    """Encode sample chats both ways; the first difference is the reason not to use the plan."""
    cut_tokens = sorted(plan.cut_tokens)
    tokens = [*cut_tokens[:4], *cut_tokens[-2:], *added_tokens[:4], *added_tokens[-4:]]
    texts = [
        "".join(a + b for a, b in zip(_SAMPLE_TEXTS, _rotate_tokens(tokens, shift))) for shift in range(len(tokens))
    ]
    texts += [
        "".join(b + a for a, b in zip(_SAMPLE_TEXTS, _rotate_tokens(tokens, shift))) for shift in range(len(tokens))
    ]
    texts += [first + second for first in tokens for second in tokens[:6]]
    for text in texts:
        segment_ids = [encode_plain(hf_tokenizer, segment, add_special_tokens=False) for segment in plan.split(text)]
        if [i for ids in segment_ids for i in ids] != encode_plain(hf_tokenizer, text, add_special_tokens=False):
            return f"cutting changed the ids of a sample text ({text[:40]!r}...)"
    return None


def _rotate_tokens(tokens: Sequence[str], shift: int) -> list[str]:
    return [tokens[(i + shift) % len(tokens)] for i in range(len(_SAMPLE_TEXTS))]
