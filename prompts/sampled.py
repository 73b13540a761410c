"""What a model has said, as it said it: the ids that were sampled, and the arguments of its calls.

A conversation comes back as text. Encoded again, an answer may become other ids than were sampled, and arguments may
come back with other spacing or key order: nothing behind them would be found in a cache. A book remembers answers of
which the encoder would make other ids, by the ids that stood before them, and calls by their ids. `mend` puts back the
ids that were sampled where a prompt has the same text in the same place; nothing else of a prompt is ever changed.

What is remembered of an answer begins at the last added token of its prompt at which texts are cut
(prompts/segments.py) and must be followed by such a token, so it holds whatever the encoder merges at either end. Books
are bounded in bytes, least recently used first. Pure. docs/adr/0013-sampled-ids.md says why.
"""

from __future__ import annotations

import json
import threading
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from prompts.errors import RequestError, bad_value
from prompts.segments import ID_TYPE

LOOK_BACK = 64
"""Tokens at a prompt's end among which an added token must stand."""
VARIANTS_MAX = 4
"""Answers to one prompt that are remembered, the last ones."""
MARKS_MAX = 4096
"""Places of a prompt where an answer is looked for; behind the last one nothing is mended."""
CALL_PREFIX = b"chatcmpl-tool-"
CALL_CHARS = 32
"""Of a call's id, after the prefix: how calls are found in bodies that nobody here reads."""
CALLS_MAX = 4096
"""Calls of a body that are looked up."""
SPANS_FIELD = "prompt_token_spans"
_SPANS_BEGIN = b'{"prompt_token_spans":'
_ID_BYTES = array(ID_TYPE).itemsize
_ENTRY_BYTES = 400

Span = tuple[int, int, list[int]]
"""(index in the ids that the encoder chose, how many of them make way, for which)."""
Ids = Sequence[int]


class SampledIds(msgspec.Struct, frozen=True, tag="ids"):
    """An answer of which the encoder would make other ids."""

    start: int
    """Tokens of the prompt before it."""
    before: int
    """Their checksum."""
    encoded: bytes
    """As the encoder has it: native uint32."""
    sampled: bytes


class SampledCall(msgspec.Struct, frozen=True, tag="call"):
    """The arguments of a call, as they were generated."""

    id: str
    arguments: str


Note = SampledIds | SampledCall


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    cut_ids: frozenset[int]
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Mended(NamedTuple):
    ids: array[int]
    spans: list[Span]


def sampled_ids(tokenizer: Encoder, prompt: Ids, answer: Ids) -> list[SampledIds]:
    """What is to be remembered of an answer, given without the token that ended it; nothing where the encoder would
    choose the same ids. Costs a decoding and an encoding of the answer."""
    low = max(len(prompt) - LOOK_BACK, 0)
    start = next((i for i in range(len(prompt) - 1, low - 1, -1) if prompt[i] in tokenizer.cut_ids), None)
    if start is None or not answer:
        return []
    sampled = [*prompt[start:], *answer]
    texts = {tokenizer.decode(sampled, skip_special_tokens=False)}
    if not tokenizer.special_ids.isdisjoint(answer):  # clients are told the text without them
        head = tokenizer.decode(prompt[start:], skip_special_tokens=False)
        texts.add(head + tokenizer.decode(answer, skip_special_tokens=True))
    before = zlib.crc32(_packed(prompt[:start]))
    found = []
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if encoded != sampled and encoded[:1] == sampled[:1]:
            found.append(SampledIds(start, before, _packed(encoded), _packed(sampled)))
    return found


def sampled_call(call_id: str, arguments: str) -> SampledCall | None:
    """What is to be remembered of a call; None where a client could not write it otherwise."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(value, dict) or (not _varies(value) and json.dumps(value, ensure_ascii=False) == arguments):
        return None
    return SampledCall(call_id, arguments)


def _varies(value: Any) -> bool:
    """Whether clients may write it in several ways: keys in another order, 1.0 as 1."""
    if isinstance(value, list):
        return any(map(_varies, value))
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_varies, value.values()))
    return isinstance(value, float)


class SampledBook:
    """Answers and calls of one model. Notes come and prompts are mended on one thread; calls are looked up on any."""

    def __init__(self, cut_ids: frozenset[int], bytes_max: int) -> None:
        """`cut_ids`: of the tokenizer. `bytes_max`: of answers and of calls each a half."""
        self._cut_ids = cut_ids
        self._bytes_max = bytes_max // 2
        self._answers: OrderedDict[tuple[int, int], list[SampledIds]] = OrderedDict()
        self._starts: Counter[int] = Counter()
        self._marks: Counter[int] = Counter()
        """Of all answers: where they begin, and their first ids."""
        self._calls: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self.answer_bytes = self.call_bytes = 0
        self.mended_tokens = self.mended_calls = 0
        """Counters: ids put back, calls rendered as they were generated."""

    def __len__(self) -> int:
        return sum(map(len, self._answers.values())) + len(self._calls)

    @property
    def used_bytes(self) -> int:
        return self.answer_bytes + self.call_bytes

    def add(self, note: Note) -> bool:
        """Remember it; False where it is known, or too large."""
        return self._add_answer(note) if isinstance(note, SampledIds) else self._add_call(note)

    def notes(self) -> Iterator[Note]:
        """All that is remembered, oldest first."""
        for variants in list(self._answers.values()):
            yield from list(variants)
        with self._lock:
            calls = list(self._calls.items())
        yield from (SampledCall(*call) for call in calls)

    # Answers ----------------------------------------------------------------------------------------------------------

    def _add_answer(self, note: SampledIds) -> bool:
        if _cost(note) > self._bytes_max // 4 or not self._is_sound(note):
            return False
        key = (note.start, note.before)
        variants = self._answers.setdefault(key, [])
        self._answers.move_to_end(key)
        if note in variants:
            return False
        for old in [it for it in variants if it.encoded == note.encoded] or variants[
            : len(variants) + 1 - VARIANTS_MAX
        ]:
            variants.remove(old)
            self._count(old, -1)
        variants.append(note)
        self._count(note, 1)
        while self.answer_bytes > self._bytes_max:
            _, oldest = self._answers.popitem(last=False)
            for old in oldest:
                self._count(old, -1)
        return True

    def _is_sound(self, note: SampledIds) -> bool:
        """Whole ids, of which the first is one that cuts: each other first id were one more to look for in prompts."""
        if len(note.encoded) % _ID_BYTES or len(note.sampled) % _ID_BYTES or not note.encoded:
            return False
        return self._is_cut(note.encoded, 0) and note.sampled[:_ID_BYTES] == note.encoded[:_ID_BYTES]

    def _count(self, note: SampledIds, by: int) -> None:
        self.answer_bytes += by * _cost(note)
        for counter, key in ((self._starts, note.start), (self._marks, _first(note))):
            counter[key] += by
            if not counter[key]:
                del counter[key]

    def mend(self, ids: Ids) -> Mended | None:
        """The prompt with the ids that were sampled; None where all are as they would be."""
        if not self._answers:
            return None
        data = _packed(ids)
        view, size = memoryview(data), len(data)
        spans: list[Span] = []
        pieces: list[memoryview | bytes] = []
        crc = done = shift = 0  # of the mended prompt's beginning, up to byte `done` of the encoder's
        for index in self._places(data):
            at = index * _ID_BYTES
            if at < done or index + shift not in self._starts:
                continue
            crc = zlib.crc32(view[done:at], crc)
            pieces.append(view[done:at])
            done = at
            found = self._at(index + shift, crc, data, at, size)
            if found is None:
                continue
            count = len(found.encoded) // _ID_BYTES
            spans.append((index, count, list(array(ID_TYPE, found.sampled))))
            crc = zlib.crc32(found.sampled, crc)
            pieces.append(found.sampled)
            done, shift = at + len(found.encoded), shift + len(spans[-1][2]) - count
        if not spans:
            return None
        mended = array(ID_TYPE)
        mended.frombytes(b"".join([*pieces, view[done:]]))
        self.mended_tokens += sum(len(span[2]) for span in spans)
        return Mended(mended, spans)

    def _places(self, data: bytes) -> list[int]:
        """Where an answer may begin, in order."""
        found: list[int] = []
        for mark in self._marks:
            pattern, at = mark.to_bytes(_ID_BYTES, _ORDER), -1
            while len(found) < MARKS_MAX and (at := data.find(pattern, at + 1)) >= 0:
                if at % _ID_BYTES == 0:
                    found.append(at // _ID_BYTES)
        return sorted(found)

    def _at(self, start: int, before: int, data: bytes, at: int, size: int) -> SampledIds | None:
        variants = self._answers.get((start, before), ())
        best = None
        for note in variants:
            end = at + len(note.encoded)
            if data.startswith(note.encoded, at) and (end == size or self._is_cut(data, end)):
                best = note if best is None or len(note.encoded) > len(best.encoded) else best
        if best is not None:
            self._answers.move_to_end((start, before))
        return best

    def _is_cut(self, data: bytes, at: int) -> bool:
        return int.from_bytes(data[at : at + _ID_BYTES], _ORDER) in self._cut_ids

    # Calls ------------------------------------------------------------------------------------------------------------

    def _add_call(self, note: SampledCall) -> bool:
        cost = _call_cost(note.id, note.arguments)
        with self._lock:
            if self._calls.get(note.id) == note.arguments or cost > self._bytes_max // 4:
                return False
            if (old := self._calls.pop(note.id, None)) is not None:
                self.call_bytes -= _call_cost(note.id, old)
            self._calls[note.id] = note.arguments
            self.call_bytes += cost
            while self.call_bytes > self._bytes_max:
                self.call_bytes -= _call_cost(*self._calls.popitem(last=False))
        return True

    def get(self, call_id: str) -> str | None:
        """The arguments of a call, as they were generated."""
        with self._lock:
            found = self._calls.get(call_id)
            if found is not None:
                self._calls.move_to_end(call_id)
                self.mended_calls += 1
        return found

    def calls_in(self, body: Iterable[bytes]) -> dict[str, str]:
        """The calls that a body names, which is read elsewhere."""
        found: dict[str, str] = {}
        rest = b""
        for piece in body if self._calls else ():
            data = rest + piece if rest else piece
            at = data.find(CALL_PREFIX)
            while at >= 0 and len(found) < CALLS_MAX:
                name = data[at : at + len(CALL_PREFIX) + CALL_CHARS].decode("latin-1")
                if name not in found and (arguments := self.get(name)) is not None:
                    found[name] = arguments
                at = data.find(CALL_PREFIX, at + len(CALL_PREFIX))
            rest = data[-(len(CALL_PREFIX) + CALL_CHARS - 1) :]
        return found

    def check_invariants(self) -> None:
        """For tests: counts agree with what they count, and keep to the bounds."""
        notes = [note for variants in self._answers.values() for note in variants]
        assert self.answer_bytes == sum(map(_cost, notes)) <= self._bytes_max
        assert self._starts == Counter(note.start for note in notes)
        assert self._marks == Counter(map(_first, notes))
        assert all(0 < len(variants) <= VARIANTS_MAX for variants in self._answers.values())
        assert self.call_bytes == sum(_call_cost(*call) for call in self._calls.items()) <= self._bytes_max


# Spans: how a router tells a worker which ids it has priced -----------------------------------------------------------


class _Spans(msgspec.Struct):
    prompt_token_spans: list[Span] | None = None


_decoder = msgspec.json.Decoder(_Spans)


def with_spans(body: bytes, spans: Sequence[Span]) -> bytes:
    """A body that begins with these spans: its first piece, at least."""
    return body.lstrip().replace(b"{", _SPANS_BEGIN + msgspec.json.encode(spans) + b",", 1)


def spans_in(body: bytes) -> list[Span] | None:
    """The spans that a body begins with; None where it has none. Raises RequestError."""
    if not body.startswith(_SPANS_BEGIN):
        return None
    try:
        return _decoder.decode(body).prompt_token_spans
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"{SPANS_FIELD}: {error}", param=SPANS_FIELD) from None


def apply_spans(ids: Sequence[int], spans: Sequence[Span], vocab_size: int) -> list[int]:
    """The prompt with these spans. Raises RequestError for such as do not fit it."""
    made: list[int] = []
    done = 0
    for number, (index, count, sampled) in enumerate(spans):
        if not (done <= index and count >= 0 and index + count <= len(ids)):
            expected = f"[index, count, ids] in order, within the {len(ids)} tokens of the prompt"
            raise bad_value(f"{SPANS_FIELD}[{number}]", [index, count, "..."], expected)
        odd = next((i for i in sampled if not 0 <= i < vocab_size), None)
        if odd is not None:
            raise bad_value(f"{SPANS_FIELD}[{number}][2]", odd, f"token ids in [0, {vocab_size})")
        made += ids[done:index]
        made += sampled
        done = index + count
    return made + list(ids[done:])


# Small things ---------------------------------------------------------------------------------------------------------

_ORDER: Any = "little" if array(ID_TYPE, [1]).tobytes()[0] else "big"


class GeneratedArguments(dict[str, Any]):
    """Arguments of a call in the order in which they were generated; `tojson` writes `text`."""

    __slots__ = ("text",)

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def as_generated(arguments: dict[str, Any], text: str | None) -> dict[str, Any]:
    """`arguments`, as they were generated where `text` says the same."""
    if text is None:
        return arguments
    value = msgspec.json.decode(text)
    return GeneratedArguments(value, text) if _same(arguments, value) else arguments


def _same(a: Any, b: Any) -> bool:
    """One JSON value: whatever the order of keys, and 1 is 1.0, but not true."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _packed(ids: Ids) -> bytes:
    return ids.tobytes() if isinstance(ids, array) else array(ID_TYPE, ids).tobytes()


def _first(note: SampledIds) -> int:
    return int.from_bytes(note.encoded[:_ID_BYTES], _ORDER)


def _cost(note: SampledIds) -> int:
    return _ENTRY_BYTES + len(note.encoded) + len(note.sampled)


def _call_cost(call_id: str, arguments: str) -> int:
    return _ENTRY_BYTES + len(call_id) + len(arguments.encode("utf-8", "surrogatepass"))
