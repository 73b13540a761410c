"""Usage is what a JSON reader would find, in any layout, and is never taken from generated text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.messages import ReportedUsage
from router.edge.response_progress import find_usage

counts = st.integers(min_value=0, max_value=10**9 - 1) | st.none()


@st.composite
def usages(draw: Any) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name in draw(st.permutations(["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"])):
        if draw(st.booleans()):
            continue
        details = {"audio_tokens": draw(counts), "cached_tokens": draw(counts)}
        value[name] = details if name.endswith("details") else draw(counts)
    return value


def encode(value: Any, draw: Any) -> bytes:
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    return json.dumps(value, separators=separators, indent=draw(st.sampled_from([None, 2]))).encode()


@given(st.data())
def test_it_is_what_a_json_reader_finds(data: st.DataObject) -> None:
    usage = data.draw(usages())
    text = data.draw(st.sampled_from(["plain", '"usage":{"prompt_tokens":1}', 'say "usage": {"prompt_tokens": 5}']))
    before = {"choices": [{"message": {"content": text}}], "usage": None}
    after = data.draw(st.sampled_from([{}, {"usage": None}, {"note": text}]))
    tail = encode(before, data.draw) + b"\n\ndata: " + encode({"id": text, "usage": usage}, data.draw)
    tail += b"\n\ndata: " + encode(after, data.draw)
    details = usage.get("prompt_tokens_details") or {}
    expected = ReportedUsage(usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens"))
    assert find_usage(tail) == expected


def test_there_is_none_without_an_object() -> None:
    assert find_usage(b"") is None
    assert find_usage(b'{"usage":null}') is None
    assert find_usage(b'{"usage" :3,"x":{"prompt_tokens":4}}') is None


def test_a_count_of_more_than_nine_digits_is_not_believed() -> None:
    assert find_usage(b'{"usage":{"prompt_tokens":1000000000,"completion_tokens":2}}') == ReportedUsage(None, None, 2)


def test_a_number_that_the_end_may_have_cut_off_is_not_believed() -> None:
    assert find_usage(b'{"usage":{"prompt_tokens":12') == ReportedUsage(None, None, None)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'"usage":{"input_tokens":5,"output_tokens":2,"cache_read_input_tokens":64}}', ReportedUsage(69, 64, 2)),
        (
            b'"usage": {"cache_creation_input_tokens": 3, "input_tokens": 5, "output_tokens": 2}}',
            ReportedUsage(8, None, 2),
        ),
    ],
)
def test_the_parts_of_an_anthropic_prompt_add_up(tail: bytes, expected: ReportedUsage) -> None:
    start = b'data: {"type":"message_start","message":{"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
    assert find_usage(start + b'data: {"type":"message_delta",' + tail) == expected
