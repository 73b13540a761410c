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

FIELDS_MAX = 4096
"""Top-level fields of a body that is to be changed. No API has a hundred."""
_KEY = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*')
_BEHIND_VALUE = re.compile(rb"[ \t\r\n]*[,}]")
_values = msgspec.json.Decoder(dict[str, msgspec.Raw])
Edit = tuple[int, int, bytes]
"""(start, end, the bytes that take the place of those from start to end)."""


class FieldSpans(msgspec.Struct):
    """Places in a JSON object, as byte offsets."""

    values: dict[str, tuple[int, int]]
    """Field -> (start, end) of its value."""
    inside: int
    """Behind the opening brace."""
    keys: dict[str, int] = {}
    """Field -> start of its name."""

    def edits(self, fields: Mapping[str, object], dropped: Collection[str] = ()) -> list[Edit]:
        """What gives these fields these values, and takes out those that are dropped."""
        made = self._cuts(dropped)
        missing: dict[str, object] = {}
        for name, value in fields.items():
            if name in self.values:
                made.append((*self.values[name], msgspec.json.encode(value)))
            else:
                missing[name] = value
        if missing:
            inserted = msgspec.json.encode(missing)[1:-1]
            stay = any(name not in dropped for name in self.values)
            made.append((self.inside, self.inside, inserted + b"," if stay else inserted))
        return made

    def _cuts(self, dropped: Collection[str]) -> list[Edit]:
        """Each field goes with the comma before it; those in front of all that stay, with the comma behind them."""
        names = list(self.values)
        first = next((i for i, name in enumerate(names) if name not in dropped), len(names))
        made: list[Edit] = []
        if first:
            made.append((self.inside, self._start(names, first), b""))
        for before, name in zip(names[first:], names[first + 1 :]):
            if name in dropped:
                made.append((self.values[before][1], self.values[name][1], b""))
        return made

    def _start(self, names: list[str], i: int) -> int:
        """Of a field's name, or the end of the last value where there are no more."""
        return self.keys[names[i]] if i < len(names) else self.values[names[-1]][1]


class FormSpans(FieldSpans):
    """Places in a multipart form (router/prompting/forms.py), whose values are plain text. A missing field stays so."""

    def edits(self, fields: Mapping[str, object], dropped: Collection[str] = ()) -> list[Edit]:
        values = {**fields, **dict.fromkeys(dropped, "")}
        texts = {name: v if isinstance(v, str) else msgspec.json.encode(v).decode() for name, v in values.items()}
        return [(*self.values[name], text.encode()) for name, text in texts.items() if name in self.values]


def find_fields(body: bytes) -> FieldSpans:
    """Find the top-level fields of a JSON object. Raises RequestError where it is none, or holds a field twice."""
    values: dict[str, msgspec.Raw] = decode_json(_values, body)
    if len(values) > FIELDS_MAX:
        raise RequestError(f"the body has {len(values)} fields, expected at most {FIELDS_MAX}", param=None)
    found: dict[str, tuple[int, int]] = {}
    keys: dict[str, int] = {}
    inside = at = body.index(b"{") + 1
    while key := _KEY.match(body, at):
        name: str = msgspec.json.decode(key[1], type=str)
        value, start = bytes(values[name]), key.end()
        end = start + len(value)
        behind = _BEHIND_VALUE.match(body, end) if body.startswith(value, start) else None
        if behind is None or name in found:  # the value is that of the field's last occurrence
            raise field_twice(name)
        found[name], keys[name] = (start, end), key.start(1)
        at = behind.end()
    return FieldSpans(found, inside, keys)


def splice(pieces: Sequence[bytes], edits: Iterable[Edit]) -> tuple[bytes, ...]:
    """Return a body with edits, which do not overlap. Pieces without one are the same objects."""
    made = list(pieces)
    starts = [0]
    for piece in made:
        starts.append(starts[-1] + len(piece))
    for start, end, new in sorted(edits, reverse=True):  # from the back: what stands before keeps its place
        for i in reversed(range(len(pieces))):
            low, high = max(start, starts[i]) - starts[i], min(end, starts[i + 1]) - starts[i]
            if low < high or (start == end and starts[i] <= start < starts[i + 1]):
                first = start >= starts[i]
                made[i] = made[i][:low] + (new if first else b"") + made[i][max(low, high) :]
    return tuple(made)


def field_twice(name: str) -> RequestError:
    """A field that a body holds twice, where the router has to know which value counts."""
    return RequestError(f"{name[:80]}: the body has this field twice, expected it once", param=name[:80])
