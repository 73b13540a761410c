"""Free texts of custom tools: the same however their JSON is cut, and something for every text a model may write."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output.custom_input import CustomInputDecoder


def decode_input(pieces: list[str]) -> str:
    decoder = CustomInputDecoder()
    return "".join([decoder.push(piece) for piece in pieces]) + decoder.finish()


@given(text=st.text(max_size=30), escapes=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_text_comes_out_as_it_was_written(text: str, escapes: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escapes)
    places = sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    pieces = [arguments[a:b] for a, b in pairwise(places)]
    assert decode_input(pieces) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n*** End"}', "*** Begin\n*** End"),
        ('{"input": "cut sho', "cut sho"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "raw\nline"}', "raw\nline"),
        ('{"input": "half \\ud83d."}', "half \ufffd."),
        ('{"input": "half \\ude00."}', "half \ufffd."),
        ('{"input": "odd \\q \\uzzzz"}', "odd q \\uzzzz"),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
        ("", ""),
    ],
)
def test_what_models_write_is_never_lost(arguments: str, text: str) -> None:
    assert decode_input([arguments]) == text
    assert decode_input(list(arguments)) == text
