"""Top-level fields of a request body: where their values are, and the body with other values. Pure.

A body in which a field is changed holds it once: workers disagree about which of two counts, and some refuse both. So
a value is replaced where it is, a missing field is inserted at the front, a field that is dropped goes whole, and a
body that holds a field twice is refused. Bodies stay in pieces: only a piece that changes is copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from prompts.errors import RequestError
from prompts.schemas import decode_json

MAX_FIELDS = 4096
"""Top-level fields of a body that is to be changed. No API has a hundred."""
_KEY = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*')
_AFTER_VALUE = re.compile(rb"[ \t\r\n]*[,}]")
_values_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
Edit = tuple[int, int, bytes]
"""(start, end, the bytes that take the place of those from start to end)."""


class FieldSpans(msgspec.Struct):
    """Spans of the fields of a JSON object, as byte offsets."""

    spans: dict[str, tuple[int, int]]
    """Field -> (start, end) of its value."""
    content_start: int
    """Offset behind the opening brace."""
    key_starts: dict[str, int] = {}
    """Field -> start of its name."""

    def edits(self, fields: Mapping[str, object], removed_fields: Collection[str] = ()) -> list[Edit]:
        """Return the edits that give these fields these values, and take out those that are removed."""
        edits = self._removals(removed_fields)
        missing: dict[str, object] = {}
        for name, value in fields.items():
            if name in self.spans:
                edits.append((*self.spans[name], msgspec.json.encode(value)))
            else:
                missing[name] = value
        if missing:
            insertion = msgspec.json.encode(missing)[1:-1]
            has_remaining = any(name not in removed_fields for name in self.spans)
            edits.append((self.content_start, self.content_start, insertion + b"," if has_remaining else insertion))
        return edits

    def _removals(self, removed_fields: Collection[str]) -> list[Edit]:
        """Remove each field with the comma before it; those in front of all that stay, with the comma behind them."""
        names = list(self.spans)
        first = next((i for i, name in enumerate(names) if name not in removed_fields), len(names))
        edits: list[Edit] = []
        if first:
            edits.append((self.content_start, self._start_of(names, first), b""))
        for before, name in zip(names[first:], names[first + 1 :]):
            if name in removed_fields:
                edits.append((self.spans[before][1], self.spans[name][1], b""))
        return edits

    def _start_of(self, names: list[str], i: int) -> int:
        """Return the start of a field's name, or the end of the last value where there are no more."""
        return self.key_starts[names[i]] if i < len(names) else self.spans[names[-1]][1]


class FormSpans(FieldSpans):
    """Places in a multipart form (router/prompting/forms.py), whose values are plain text. A missing field stays so."""

    def edits(self, fields: Mapping[str, object], removed_fields: Collection[str] = ()) -> list[Edit]:
        values = {**fields, **dict.fromkeys(removed_fields, "")}
        texts = {name: v if isinstance(v, str) else msgspec.json.encode(v).decode() for name, v in values.items()}
        return [(*self.spans[name], text.encode()) for name, text in texts.items() if name in self.spans]


def locate_fields(body: bytes) -> FieldSpans:
    """Find the top-level fields of a JSON object. Raises RequestError where it is none, or holds a field twice."""
    values: dict[str, msgspec.Raw] = decode_json(_values_decoder, body)
    if len(values) > MAX_FIELDS:
        raise RequestError(f"the body has {len(values)} fields, expected at most {MAX_FIELDS}", param=None)
    spans: dict[str, tuple[int, int]] = {}
    key_starts: dict[str, int] = {}
    content_start = position = body.index(b"{") + 1
    while key := _KEY.match(body, position):
        name: str = msgspec.json.decode(key[1], type=str)
        value, start = bytes(values[name]), key.end()
        end = start + len(value)
        value_end = _AFTER_VALUE.match(body, end) if body.startswith(value, start) else None
        if value_end is None or name in spans:  # the value is that of the field's last occurrence
            raise duplicate_field_error(name)
        spans[name], key_starts[name] = (start, end), key.start(1)
        position = value_end.end()
    return FieldSpans(spans, content_start, key_starts)


def splice(pieces: Sequence[bytes], edits: Iterable[Edit]) -> tuple[bytes, ...]:
    """Return a body with edits, which do not overlap. Pieces without one are the same objects."""
    result = list(pieces)
    starts = [0]
    for piece in result:
        starts.append(starts[-1] + len(piece))
    for start, end, replacement in sorted(edits, reverse=True):  # from the back: what stands before keeps its place
        for i in reversed(range(len(pieces))):
            low, high = max(start, starts[i]) - starts[i], min(end, starts[i + 1]) - starts[i]
            if low < high or (start == end and starts[i] <= start < starts[i + 1]):
                is_first_piece = start >= starts[i]
                result[i] = result[i][:low] + (replacement if is_first_piece else b"") + result[i][max(low, high) :]
    return tuple(result)


def duplicate_field_error(name: str) -> RequestError:
    """Return the error of a field that a body holds twice, where the router has to know which value counts."""
    return RequestError(f"{name[:80]}: the body has this field twice, expected it once", param=name[:80])
