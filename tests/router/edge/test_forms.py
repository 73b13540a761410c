"""Forms that upload files: the model that they name decides where they go, wherever it stands in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import RequestError
from router.http.body_pieces import PIECE_BYTES
from router.prompting.body_fields import apply_edits
from router.prompting.forms import MAX_PARTS, MAX_VALUE_BYTES, read_form
from router.tenancy.config import TenancyConfig
from router.tenancy.model_names import ModelNames

AUDIO = b"RIFF--XyZ\r\n--XyZ0\r\n\r\n--Xy"
"""Looks like a boundary, and is none."""


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value


def form(*parts: bytes, boundary: bytes = b"XyZ") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + one + b"\r\n" for one in parts) + b"--" + boundary + b"--\r\n"


def file(content: bytes = AUDIO) -> bytes:
    return part("file", content, '; filename="a.wav"\r\nContent-Type: audio/wav')


def upload(path: str, body: bytes, content_type: str = "multipart/form-data; boundary=XyZ") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: {content_type}\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@given(st.permutations([part("model", b"m-1"), file(), part("stream", b"True"), part("language", b"en")]), st.data())
def test_fields_are_found_wherever_they_and_the_pieces_edges_are(parts: list[bytes], data: st.DataObject) -> None:
    body = form(*parts)
    edges = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    pieces = [body[start:end] for start, end in zip([0, *edges], [*edges, len(body)], strict=True)]
    parsed, spans = read_form(pieces, b'Multipart/Form-Data; Boundary="XyZ"')
    assert (parsed.model, parsed.stream, parsed.priority) == ("m-1", True, 0)
    changed = b"".join(apply_edits(pieces, spans.make_edits({"model": "other", "priority": 3})))
    assert changed == body.replace(b"m-1", b"other")


BAD = {
    "no boundary": (form(file()), b"multipart/form-data", "needs a boundary"),
    "never closed": (form(file())[:-6], b"multipart/form-data; boundary=XyZ", "does not end"),
    "nothing": (b"", b"multipart/form-data; boundary=XyZ", "does not end"),
    "two models": (form(part("model", b"a"), part("model", b"b")), b"multipart/form-data; boundary=XyZ", "twice"),
    "a model without end": (
        form(part("model", b"a" * (MAX_VALUE_BYTES + 1))), b"multipart/form-data; boundary=XyZ", "more than 4096 bytes",
    ),
    "many parts": (
        form(*[part("x", b"")] * (MAX_PARTS + 2)), b"multipart/form-data; boundary=XyZ", "more than 1000 parts",
    ),
    "a head without end": (form(b"x" * 10_000), b"multipart/form-data; boundary=XyZ", "without an end of its headers"),
    "a priority that is none": (
        form(part("priority", b"high")), b"multipart/form-data; boundary=XyZ", "priority: got",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_form_is_refused(what: str) -> None:
    body, content_type, message = BAD[what]
    with pytest.raises(RequestError, match=message):
        read_form([body], content_type)


def test_uploads_go_to_the_workers_of_their_model(edge: Any) -> None:
    """Small ones and such as come in pieces, on every route of forms, with the model before and behind the file."""

    async def scenario() -> None:
        await edge.start(policy="kv", pass_routes=("/v1/images/edits",), priority_min=0)
        workers = {name: await edge.worker(edge.reply(), model=name) for name in ("m-a", "m-b")}
        edge.dispatcher.reader.model_names = ModelNames(TenancyConfig(model_aliases=("whisper=m-b",)))
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"):
            for model in ("m-a", "m-b", "whisper"):
                for content in (AUDIO, AUDIO * (PIECE_BYTES // len(AUDIO) + 9)):
                    for order in (1, -1):
                        parts = [part("model", model.encode()), part("priority", b"-7"), file(content)][::order]
                        assert status(await edge.exchange(upload(path, form(*parts)))) == 200
                        name = "m-b" if model == "whisper" else model
                        expected = [part("model", name.encode()), part("priority", b"0"), file(content)][::order]
                        assert workers[name].received.pop().body == form(*expected)
                        assert not workers["m-a" if name == "m-b" else "m-b"].received
            answer = await edge.exchange(upload(path, form(part("model", b"nobody"), file())))
            assert status(answer) == 404
            assert b"model_not_found" in answer
            answer = await edge.exchange(upload(path, form(file())[:-8]))
            assert status(answer) == 400
            assert b"does not end with its boundary" in answer

    edge.run(scenario())
