"""Text fields of forms that upload files (multipart/form-data, RFC 7578), and their byte offsets. No I/O.

Forms are parsed as by Starlette, on which vLLM and SGLang are built. Files are only searched for the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from email.message import Message

from prompts.errors import RequestError
from prompts.routing import RoutingRequest, make_routing_request
from prompts.worker_fields import CONTAINER_FIELDS, is_worker_field
from router.prompting.body_fields import FormSpans, make_duplicate_field_error

_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"
MAX_PARTS = 1000
MAX_HEAD_BYTES = 8192
"""Most bytes of one part's headers."""
MAX_VALUE_BYTES = 4096
MAX_BOUNDARY_BYTES = 256
ROUTING_FIELDS = frozenset(("model", "stream", "priority"))


def is_form(content_type: bytes | None) -> bool:
    """Whether a body of this type is a form with parts."""
    return content_type is not None and content_type.lower().startswith(b"multipart/form-data")


def read_form(pieces: Sequence[bytes], content_type: bytes) -> tuple[RoutingRequest, FormSpans]:
    """Read the fields of an uploaded form that the router needs or may change, and the byte offsets of their values.

    The form is given in `pieces`. Fields of other names, and files, are skipped. Raises RequestError for a malformed
    form, and for a needed field that comes twice or has a long value.
    """
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    boundary = _parse_header_parameters(content_type).get("boundary", "").encode("latin-1", "replace")
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise RequestError("content-type: a form needs a boundary", param=None)
    value_by_field: dict[str, str] = {}
    span_by_field: dict[str, tuple[int, int]] = {}
    for start, end in _iter_part_spans(body, b"--" + boundary):
        part_head = _read_part_head(body, start, end)
        name = _parse_field_name(part_head)
        if name is None or not _is_read_field(name):
            continue
        if name in span_by_field:
            raise make_duplicate_field_error(name)
        value_start = start + len(part_head) + len(_HEAD_END)
        if end - value_start > MAX_VALUE_BYTES:
            raise RequestError(f"{name}: the form's value has more than {MAX_VALUE_BYTES} bytes", param=name)
        span_by_field[name] = value_start, end
        value_by_field[name] = body[value_start:end].decode("utf-8", "replace")
    return make_routing_request("other", value_by_field), FormSpans(span_by_field, content_start=0)


def _read_part_head(body: bytes, start: int, end: int) -> bytes:
    """Return the headers of the part between two offsets. Raises RequestError if they do not end, or are too long."""
    part_head, separator, _ = body[start : min(end, start + MAX_HEAD_BYTES)].partition(_HEAD_END)
    if not separator:
        raise RequestError(f"the form has a part without an end of its headers in {MAX_HEAD_BYTES} bytes", param=None)
    return part_head


def _is_read_field(name: str) -> bool:
    """Return whether a field decides how a form is routed, or may have to be removed."""
    return name in ROUTING_FIELDS or name in CONTAINER_FIELDS or is_worker_field(name)


def _iter_part_spans(body: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part of a multipart form, its headers included.

    Parts are separated by lines with `delimiter`; `--` after it closes the form. Raises RequestError if the form is not
    closed, or has too many parts.
    """
    part_start: int | None = None
    part_count = 0
    for match in re.finditer(re.escape(delimiter), body):
        next_bytes = body[match.end() : match.end() + 2]
        begins_line = match.start() == 0 or body.endswith(_LINE_END, 0, match.start())
        if not begins_line or next_bytes not in (_LINE_END, b"--"):
            continue  # the bytes of the delimiter are part of a value
        if part_start is not None:
            yield part_start, match.start() - len(_LINE_END)
        if next_bytes == b"--":
            return
        part_start = match.end() + len(_LINE_END)
        part_count += 1
        if part_count > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts", param=None)
    raise RequestError("the form does not end with its boundary", param=None)


def _parse_field_name(part_head: bytes) -> str | None:
    """Return the field name of a part; None for a file, and for a part without a name."""
    for line in part_head.split(b"\r\n"):
        header_name, _, value = line.partition(b":")
        if header_name.strip().lower() == b"content-disposition":
            parameters = _parse_header_parameters(value)
            return None if "filename" in parameters else parameters.get("name")
    return None


def _parse_header_parameters(value: bytes) -> dict[str, str]:
    """Parse the parameters of a header such as `form-data; name="model"`."""
    message = Message()
    message["content-type"] = " ".join(value.decode("latin-1").split())
    return {key.lower(): text if isinstance(text, str) else text[2] for key, text in message.get_params([])[1:]}
