"""Byte offsets of the top-level fields of a request body, and edits of their values. No I/O.

A changed body must hold each field once, because workers disagree about which of two counts, and some refuse both. So
a value is replaced in its place, a missing field is inserted at the front, a dropped field is removed with its name,
and a body that holds a field twice is refused. Bodies stay in pieces: only a piece that changes is copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from prompts.errors import RequestError
from prompts.routing import decode_fields

MAX_FIELDS = 4096
"""Top-level fields of a body that is to be changed. No API has a hundred."""
_KEY_PATTERN = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*')
_AFTER_VALUE_PATTERN = re.compile(rb"[ \t\r\n]*[,}]")
Body = tuple[bytes, ...]
"""Pieces of a request's body."""
Edit = tuple[int, int, bytes]
"""(start, end, replacement of the bytes from start to end)."""


class FieldSpans(msgspec.Struct):
    """Byte offsets of the top-level fields of a JSON object, by which a few fields are set or removed in its bytes."""

    span_by_field: dict[str, tuple[int, int]]
    """Field -> (start, end) of its value."""
    content_start: int
    """Offset of the byte after the opening brace."""
    key_start_by_field: dict[str, int] = {}
    """Field -> start of its name."""

    def make_edits(self, value_by_field: Mapping[str, object], removed_fields: Collection[str] = ()) -> list[Edit]:
        """Return the edits that set these values and remove these fields. Missing fields are inserted at the front.

        An edit is (start, end, replacement of the bytes from start to end).
        """
        edits = self._make_removals(removed_fields)
        value_by_missing_field: dict[str, object] = {}
        for name, value in value_by_field.items():
            if name in self.span_by_field:
                start, end = self.span_by_field[name]
                edits.append((start, end, msgspec.json.encode(value)))
            else:
                value_by_missing_field[name] = value
        if value_by_missing_field:
            insertion = msgspec.json.encode(value_by_missing_field)[1:-1]  # without the braces
            if any(name not in removed_fields for name in self.span_by_field):
                insertion += b","  # other fields follow
            edits.append((self.content_start, self.content_start, insertion))
        return edits

    def _make_removals(self, removed_fields: Collection[str]) -> list[Edit]:
        """Return edits that remove each field and the comma before it, or after it if no field before it stays."""
        names = list(self.span_by_field)
        first_kept_index = next((i for i, name in enumerate(names) if name not in removed_fields), None)
        if first_kept_index is None:  # the object becomes empty
            return [(self.content_start, self.span_by_field[names[-1]][1], b"")] if names else []
        edits: list[Edit] = []
        if first_kept_index > 0:
            edits.append((self.content_start, self.key_start_by_field[names[first_kept_index]], b""))
        for previous_name, name in zip(names[first_kept_index:], names[first_kept_index + 1 :]):
            if name in removed_fields:
                edits.append((self.span_by_field[previous_name][1], self.span_by_field[name][1], b""))
        return edits


class FormSpans(FieldSpans):
    """Spans of the values of a multipart form (router/prompting/forms.py). A missing field is not inserted."""

    def make_edits(self, fields: Mapping[str, object], removed_fields: Collection[str] = ()) -> list[Edit]:
        value_by_field = {**fields, **dict.fromkeys(removed_fields, "")}
        text_by_field = {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in value_by_field.items()
        }
        return [
            (*self.span_by_field[name], text.encode())
            for name, text in text_by_field.items()
            if name in self.span_by_field
        ]


def locate_fields(body: bytes) -> FieldSpans:
    """Find the byte offsets of the top-level fields of a JSON object, and of their values.

    Raises RequestError for other JSON, for too many fields, and for a field that comes twice.
    """
    raw_value_by_field = decode_fields(body)
    if len(raw_value_by_field) > MAX_FIELDS:
        raise RequestError(f"the body has {len(raw_value_by_field)} fields, expected at most {MAX_FIELDS}", param=None)
    span_by_field: dict[str, tuple[int, int]] = {}
    key_start_by_field: dict[str, int] = {}
    content_start = body.index(b"{") + 1
    position = content_start
    while key_match := _KEY_PATTERN.match(body, position):
        name: str = msgspec.json.decode(key_match[1], type=str)
        value = bytes(raw_value_by_field[name])
        start = key_match.end()
        end = start + len(value)
        # Of {"a": 1, "a": 2} the decoder keeps 2. The bytes at the first "a" are another value, so "a" comes twice.
        separator = _AFTER_VALUE_PATTERN.match(body, end) if body.startswith(value, start) else None
        if separator is None or name in span_by_field:
            raise make_duplicate_field_error(name)
        span_by_field[name] = (start, end)
        key_start_by_field[name] = key_match.start(1)
        position = separator.end()
    return FieldSpans(span_by_field, content_start, key_start_by_field)


def apply_edits(pieces: Sequence[bytes], edits: Iterable[Edit]) -> tuple[bytes, ...]:
    """Replace parts of a body in pieces, and return the new pieces. Pieces without an edit stay the same objects.

    An edit is (start, end, replacement), with offsets in the whole body. Edits do not overlap. If one spans several
    pieces, its replacement goes into the first of them.
    """
    edits_from_back = sorted(edits, reverse=True)
    new_pieces: list[bytes] = []
    piece_start = 0
    for piece in pieces:
        new_pieces.append(_edit_piece(piece, piece_start, edits_from_back))
        piece_start += len(piece)
    return tuple(new_pieces)


def _edit_piece(piece: bytes, piece_start: int, edits_from_back: Sequence[Edit]) -> bytes:
    """Return a piece of a body with the edits of the body that are in it. `piece_start`: its offset in the body.

    The last edit is made first, so that the offsets of the others stay right.
    """
    new_piece = piece
    for start, end, replacement in edits_from_back:
        cut_start, cut_end = max(start - piece_start, 0), min(end - piece_start, len(piece))
        begins_here = 0 <= start - piece_start < len(piece)
        is_insertion = start == end
        if cut_start < cut_end or (is_insertion and begins_here):
            new_piece = new_piece[:cut_start] + (replacement if begins_here else b"") + new_piece[cut_end:]
    return new_piece


def make_duplicate_field_error(name: str) -> RequestError:
    """Return the error for a field that comes twice, so that the router cannot know which value counts."""
    return RequestError(f"{name[:80]}: the body has this field twice, expected it once", param=name[:80])


def add_fields(body: Body, fields: Mapping[str, Any]) -> Body:
    """Return the body of a request, a JSON object, with further fields before its own.

    `{"a":1}` and the field b with the value 2 give `{"b":2,"a":1}`. The body's own bytes stay as they are.
    """
    start = body[0].index(b"{") + 1
    head, rest = body[0][:start], (body[0][start:], *body[1:])
    separator = b"" if _ends_object(rest) else b","
    return (head + msgspec.json.encode(fields)[1:-1] + separator + rest[0], *rest[1:])


def _ends_object(pieces: Body) -> bool:
    """Return whether an object ends here, because it is empty."""
    for piece in pieces:
        text = piece.lstrip(b" \t\r\n")
        if text:
            return text.startswith(b"}")
    return False
