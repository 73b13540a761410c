"""Exact caching of what a tokenizer makes of the text between special tokens.

A tokenizer of Hugging Face's `tokenizers` first cuts its input at added tokens (leftmost, longest first), then
normalizes, pre-tokenizes and encodes each piece by itself. So the ids of a prompt are the concatenation of the ids of
its **segments**, a segment being a special token and the text up to the next one, and a chat whose earlier turns are
cached costs only its new turn.

What is not cached is mostly a new turn, short and ASCII: `prompts/bpe_encoder.py` encodes it by its words where it can,
the library where not.

Where that does not hold for a tokenizer, `plan_segments` says why and there is no cache for it: the rules are in
`_unsupported_reason`, and sample texts are encoded both ways before a plan is given out. Invariant: ids are identical
to a plain full encode. Memory is bounded in bytes, least recently used first.
"""

from __future__ import annotations

import json
import operator
import re
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from prompts.bpe_encoder import BpeEncoder, build_bpe_encoder
from prompts.encoded_prefixes import LENGTH_MIN, EncodedPrefix, EncodedPrefixCache

CACHE_BYTES_DEFAULT = 64 * 2**20
ID_TYPE = "I"
"""Type code of arrays of ids."""
_ID_BYTES = array(ID_TYPE).itemsize
_ENTRY_BYTES = 120
"""What an entry costs besides its two objects: its slot in the dictionary and its place in the order."""
_PREFIXES_SHARE = 4
"""One part in so many of the memory is for beginnings of long texts."""
_TAIL_SEGMENTS = 3
"""A beginning ends so many segments before its text does: a chat's last turn and the opening of the answer."""
SHORT_MAX = 4096
"""Characters of a text that is not looked up."""
_CHARS_AT_ONCE, _PAUSE_S = 65_536, 1e-6
"""Characters of new text that are encoded by words before other threads get a turn."""
_STARTS_MAX = 1024
_RANDOM_STATE_KEYS = ("dropout",)


@dataclass(frozen=True)
class SegmentPlan:
    """How one tokenizer's input may be cut. `pattern` finds every added token; cuts are before those in `cuts`."""

    pattern: re.Pattern[str]
    cuts: frozenset[str]
    prefix: tuple[int, ...] | None
    """Ids that `add_special_tokens` puts before and after a text; None where it does anything else."""
    suffix: tuple[int, ...] | None
    anchors: frozenset[str] = frozenset()
    """Cuts at which a known beginning may end: no other added token can reach across one from before it."""
    splitter: re.Pattern[str] | None = None
    """`pattern` in a group, where every token that it finds is a cut."""
    bpe_encoder: BpeEncoder | None = None
    """Encodes short ASCII texts, where the tokenizer is of a kind that it knows."""
    token_chars_max: int = 0
    """Characters of an added token."""

    def split(self, text: str) -> list[str]:
        """The segments of `text`, in order; their concatenation is `text`."""
        if self.splitter is not None:
            before, *parts = self.splitter.split(text)  # token, text, token, text ...
            segments = list(map(operator.add, parts[::2], parts[1::2]))
            return [before, *segments] if before else segments
        starts = [match.start() for match in self.pattern.finditer(text) if match.group() in self.cuts]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        starts.append(len(text))
        return [text[a:b] for a, b in pairwise(starts) if a < b]


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


def encode_plain(hf: HfTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """A full encode. Of the library's calls this one is the fastest, and the only one that releases the GIL."""
    ids: list[int] = hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class SegmentCache:
    """Segment text -> ids, bounded by bytes. Thread-safe; encoding happens outside the lock."""

    def __init__(
        self,
        hf: HfTokenizer,
        plan: SegmentPlan,
        *,
        max_bytes: int = CACHE_BYTES_DEFAULT,
        short_max: int = SHORT_MAX,
    ) -> None:
        self._hf = hf
        self._short_max = short_max
        self._plan = plan
        self._max_bytes = max_bytes
        self._prefixes = EncodedPrefixCache(max_bytes // _PREFIXES_SHARE)
        self._segments_bytes_max = max_bytes - max_bytes // _PREFIXES_SHARE
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        """Segment -> its ids as the bytes of an array."""
        self._used_bytes = 0
        self._segment_starts: dict[str, bool] = {}
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
        if add_special_tokens and (plan.prefix is None or plan.suffix is None):
            return None
        parts = self._encode_short(text)
        if parts is None:
            parts = self._encode_segments(text)
        out = array(ID_TYPE, plan.prefix or ()) if add_special_tokens else array(ID_TYPE)
        out.frombytes(parts[0] if len(parts) == 1 else b"".join(parts))
        if add_special_tokens:
            out.extend(plan.suffix or ())
        return out

    def _encode_short(self, text: str) -> list[bytes] | None:
        """At once, where that costs less than finding what of it is known."""
        bpe_encoder = self._plan.bpe_encoder
        ids = bpe_encoder.encode(text) if bpe_encoder is not None and len(text) <= self._short_max else None
        if ids is None:
            return None
        with self._lock:
            self._misses += 1
            self._miss_tokens += len(ids) // _ID_BYTES
        return [ids]

    def _encode_segments(self, text: str) -> list[bytes]:
        plan = self._plan
        prefix = self._find_prefix(text) if len(text) >= LENGTH_MIN else None
        segments = plan.split(text if prefix is None else text[prefix.end :])
        cached_ids = self._look_up(segments)
        missing = [segment for segment, ids in zip(segments, cached_ids) if ids is None]
        new_ids = self._encode_missing(missing) if missing else {}
        parts = [new_ids[segment] if ids is None else ids for segment, ids in zip(segments, cached_ids)]
        if len(text) >= LENGTH_MIN:
            self._store_prefix(text, prefix, segments, parts)
        if prefix is not None:
            parts.insert(0, prefix.ids)
        return parts

    def first_segments(self, text: str, chars_min: int) -> str:
        """Of `text`, until it has so many characters."""
        end = 0
        for segment in self._plan.split(text):
            end += len(segment)
            if end >= chars_min:
                break
        return text[:end]

    def starts_segment(self, text: str, position: int = 0) -> bool:
        """Whether there is a token in `text` at `position` at which any text is cut."""
        head = text[position : position + self._plan.token_chars_max]
        is_start = self._segment_starts.get(head)
        if is_start is None:
            match = self._plan.pattern.match(head)
            is_start = match is not None and match.group() in self._plan.anchors
            if len(self._segment_starts) >= _STARTS_MAX:
                self._segment_starts = {}
            self._segment_starts[head] = is_start
        return is_start

    def _find_prefix(self, text: str) -> EncodedPrefix | None:
        """The longest that is known of this text and at whose end the text is cut."""
        with self._lock:
            prefix = self._prefixes.find(text)
        if prefix is None:
            return None
        next_token = self._plan.pattern.match(text, prefix.end)
        if next_token is None or next_token.group() not in self._plan.cuts:
            return None
        with self._lock:
            self._hits += 1
            self._hit_tokens += len(prefix.ids) // _ID_BYTES
        return prefix

    def _store_prefix(
        self, text: str, cached_prefix: EncodedPrefix | None, segments: Sequence[str], parts: Sequence[bytes]
    ) -> None:
        """Remember this text up to its last turn, unless little would be won over what is known of it."""
        tail_segments = segments[-_TAIL_SEGMENTS:]
        end = len(text) - sum(map(len, tail_segments))
        cached_chars = 0 if cached_prefix is None else cached_prefix.end
        if len(segments) <= _TAIL_SEGMENTS or end - cached_chars < len(text) // 8:
            return
        anchor = self._plan.pattern.match(tail_segments[0])
        if anchor is None or anchor.group() not in self._plan.anchors:
            return
        ids = b"".join(parts[:-_TAIL_SEGMENTS])
        new_prefix = EncodedPrefix(
            text[: end + anchor.end()], end, ids if cached_prefix is None else cached_prefix.ids + ids
        )
        with self._lock:
            self._prefixes.store(new_prefix)

    def _look_up(self, segments: Sequence[str]) -> list[bytes | None]:
        entries = self._entries
        with self._lock:
            cached_ids = [entries.get(segment) for segment in segments]
            for segment, ids in zip(segments, cached_ids):
                if ids is None:
                    self._misses += 1
                else:
                    self._hits += 1
                    self._hit_tokens += len(ids) // _ID_BYTES
                    entries.move_to_end(segment)
        return cached_ids

    def _encode_missing(self, missing: Iterable[str]) -> dict[str, bytes]:
        unique = list(dict.fromkeys(missing))
        new_ids: dict[str, bytes] = {}
        remaining_segments = unique
        if self._plan.bpe_encoder is not None:
            chars_since_pause = 0
            for segment in unique:
                chars_since_pause += len(segment)
                if chars_since_pause > _CHARS_AT_ONCE:
                    time.sleep(_PAUSE_S)  # words are found under the interpreter's lock: others may have it now
                    chars_since_pause = len(segment)
                ids = self._plan.bpe_encoder.encode(segment)
                if ids is not None:
                    new_ids[segment] = ids
            remaining_segments = [segment for segment in unique if segment not in new_ids]
        if remaining_segments:
            encodings = self._hf.encode_batch_fast(remaining_segments, add_special_tokens=False)
            new_ids |= {
                segment: array(ID_TYPE, encoding.ids).tobytes()
                for segment, encoding in zip(remaining_segments, encodings)
            }
        with self._lock:
            for segment, ids in new_ids.items():
                self._miss_tokens += len(ids) // _ID_BYTES
                self._store_segment(segment, ids)
        return new_ids

    def _store_segment(self, segment: str, ids: bytes) -> None:
        size_bytes = _entry_bytes(segment, ids)
        if segment in self._entries or size_bytes > self._segments_bytes_max // 4:
            return  # one prompt must not empty the cache
        self._entries[segment] = ids
        self._used_bytes += size_bytes
        while self._used_bytes > self._segments_bytes_max:
            old_segment, old_ids = self._entries.popitem(last=False)
            self._used_bytes -= _entry_bytes(old_segment, old_ids)

    def stats(self) -> SegmentStats:
        with self._lock:
            return SegmentStats(
                hits=self._hits,
                misses=self._misses,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                entries=len(self._entries) + len(self._prefixes),
                used_bytes=self._used_bytes + self._prefixes.used_bytes,
                max_bytes=self._max_bytes,
            )

    def check_invariants(self) -> None:
        """For tests: the byte count is the sum over the entries and within its bound."""
        with self._lock:
            assert self._used_bytes == sum(_entry_bytes(segment, ids) for segment, ids in self._entries.items())
            assert self._used_bytes <= self._segments_bytes_max
            self._prefixes.check_invariants()


def _entry_bytes(segment: str, ids: bytes) -> int:
    """The same at all times: a text that is not ASCII takes more once somebody asked for its UTF-8."""
    size = sys.getsizeof(segment) if segment.isascii() else _ENTRY_BYTES + 8 * len(segment)
    return _ENTRY_BYTES + size + sys.getsizeof(ids)


def plan_segments(hf: HfTokenizer) -> SegmentPlan | str:
    """How to cut this tokenizer's input, or why it must not be cut. Conservative: a doubt is a no."""
    spec: dict[str, Any] = json.loads(hf.to_str())
    reason = _unsupported_reason(spec)
    if reason is not None:
        return reason
    literal_tokens = [token for token in spec["added_tokens"] if not token["normalized"] and token["content"]]
    looks_around = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in spec["added_tokens"])
    cuts = frozenset(token["content"] for token in literal_tokens if _can_cut(token, looks_around))
    if not cuts:
        return "no added token at whose edges its input may be cut"
    pattern = re.compile(_trie_pattern([token["content"] for token in literal_tokens]))
    prefix, suffix = _find_affixes(hf, sorted(cuts)[0]) or (None, None)
    contents = [token["content"] for token in literal_tokens]
    anchors = frozenset(cut for cut in cuts if not any(content.find(cut, 1) >= 0 for content in contents))
    encoder = build_bpe_encoder(hf, spec, _SAMPLE_TEXTS + _WORD_SAMPLE_TEXTS, cuts)
    bpe_encoder = encoder if isinstance(encoder, BpeEncoder) else None
    splitter = re.compile(f"({pattern.pattern})") if cuts.issuperset(contents) else None
    token_chars_max = max(map(len, contents))
    plan = SegmentPlan(pattern, cuts, prefix, suffix, anchors, splitter, bpe_encoder, token_chars_max)
    mismatch = _self_check(hf, plan, [token["content"] for token in spec["added_tokens"]])
    return plan if mismatch is None else mismatch


def _unsupported_reason(spec: dict[str, Any]) -> str | None:
    """Properties of a tokenizer.json under which pieces are not encoded independently of each other."""
    model = spec.get("model") or {}
    if any(model.get(key) for key in _RANDOM_STATE_KEYS):
        return "its model drops merges at random"
    if spec.get("truncation") or spec.get("padding"):
        return "it truncates or pads"
    return None


def _can_cut(token: dict[str, Any], looks_around: bool) -> bool:
    """Whether the text before and after this added token is encoded without regard to it.

    Where other added tokens look at their neighbours (lstrip and rstrip take whitespace, single_word asks for a word's
    edge), a cutting token must look to them like the end of the text: neither whitespace nor a word's character.
    """
    content: str = token["content"]
    if token["lstrip"] or token["rstrip"] or token["single_word"]:
        return False
    edges = content[0] + content[-1]
    plain_edges = not any(c.isspace() or c.isalnum() or c == "_" for c in edges)
    # Short tokens (a newline, two spaces) are everywhere in text: exact, but not worth a segment.
    return (plain_edges or not looks_around) and len(content) >= 3 and not content.isspace()


def _trie_pattern(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words` at the leftmost place, fast also for thousands."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}

    def build(node: dict[str, Any]) -> str:
        # Walk chains without branches in a loop, so that the depth of recursion is that of the branching.
        chain = ""
        while len(node) == 1 and "" not in node:
            ((char, node),) = node.items()
            chain += re.escape(char)
        ends = "" in node
        branches = [re.escape(char) + build(child) for char, child in sorted(node.items()) if char]
        if not branches:
            return chain
        return f"{chain}(?:{'|'.join(branches)}){'?' if ends else ''}"

    return build(root)


def _find_affixes(hf: HfTokenizer, special: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What add_special_tokens puts around a text, where it is the same for every text."""
    probe = f"{special}a b"
    core = encode_plain(hf, probe, add_special_tokens=False)
    full = encode_plain(hf, probe, add_special_tokens=True)
    candidates = [i for i in range(len(full) - len(core) + 1) if full[i : i + len(core)] == core]
    for position in candidates:
        prefix, suffix = full[:position], full[position + len(core) :]
        texts = ("", "x", special, f"one{special}two", f"{special}{special} three ")
        if all(
            encode_plain(hf, text, add_special_tokens=True)
            == prefix + encode_plain(hf, text, add_special_tokens=False) + suffix
            for text in texts
        ):
            return tuple(prefix), tuple(suffix)
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


def _self_check(hf: HfTokenizer, plan: SegmentPlan, added_tokens: Sequence[str]) -> str | None:
    """Encode sample chats both ways; the first difference is the reason not to use the plan."""
    cuts = sorted(plan.cuts)
    tokens = [*cuts[:4], *cuts[-2:], *added_tokens[:4], *added_tokens[-4:]]
    texts = [
        "".join(a + b for a, b in zip(_SAMPLE_TEXTS, _rotate_tokens(tokens, shift))) for shift in range(len(tokens))
    ]
    texts += [
        "".join(b + a for a, b in zip(_SAMPLE_TEXTS, _rotate_tokens(tokens, shift))) for shift in range(len(tokens))
    ]
    texts += [first + second for first in tokens for second in tokens[:6]]
    for text in texts:
        pieces = [encode_plain(hf, segment, add_special_tokens=False) for segment in plan.split(text)]
        if [i for ids in pieces for i in ids] != encode_plain(hf, text, add_special_tokens=False):
            return f"cutting changed the ids of a sample text ({text[:40]!r}...)"
    return None


def _rotate_tokens(tokens: Sequence[str], shift: int) -> list[str]:
    return [tokens[(i + shift) % len(tokens)] for i in range(len(_SAMPLE_TEXTS))]
