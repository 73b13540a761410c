"""The rows that docs/how-to/add-a-tool-call-format.md adds pass the tests of every format."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import call_formats
import pytest
import test_constraint
import test_escaped_lark
import test_output_parser
import test_tool_calls

from engine.output import formats
from engine.output.formats import CALL_FORMATS, REASONING_FORMATS, resolve_formats
from engine.output.parser import OutputParser, OutputParserConfig
from engine.types import SamplingParams
from prompts import ChatTemplate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-tool-call-format.md"
FORMAT = "internlm"


def evaluate_block(place: str, brackets: str, module: ModuleType) -> Any:
    """Return the value of the page's code block for `place`, in brackets, with the names of a module."""
    match = re.search(rf"^```python\n# {re.escape(place)}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None, f"{PAGE.name} has no block for {place}"
    return eval(f"{brackets[0]}{match[1]}{brackets[1]}", dict(vars(module)))


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Add the page's rows to the tables; return its examples for `CASES`."""
    for row in evaluate_block("engine/output/formats.py: CALL_FORMATS", "[]", formats):
        monkeypatch.setitem(CALL_FORMATS, row.name, row)
    for row in evaluate_block("engine/output/formats.py: REASONING_FORMATS", "[]", formats):
        monkeypatch.setitem(REASONING_FORMATS, row.name, row)
    for name, example in evaluate_block("tests/engine/call_formats.py: EXAMPLES", "{}", call_formats).items():
        monkeypatch.setitem(call_formats.EXAMPLES, name, example)
    cases: list[Any] = evaluate_block("tests/engine/test_tool_calls.py: CASES", "[]", test_tool_calls)
    return cases


def test_calls_of_the_added_format_are_read(cases: list[Any]) -> None:
    assert [name for name, *_ in cases] == [FORMAT]
    for case in cases:
        test_tool_calls.test_calls_wherever_the_text_is_cut(*case)
        test_tool_calls.test_what_was_said_depends_on_what_has_come_alone(*case)
        test_tool_calls.test_a_text_that_ends_early_is_a_beginning_or_text(*case)
    test_tool_calls.test_formats_are_found_in_chat_templates()
    test_tool_calls.test_no_character_is_lost_and_nothing_raises(name=FORMAT)
    test_output_parser.test_each_format_cut_at_every_byte(FORMAT)


def test_calls_of_the_added_format_are_forced(cases: list[Any]) -> None:
    test_constraint.test_a_forced_call_is_one_call_or_several_in_the_markup_of_the_model(FORMAT)
    test_constraint.test_calls_of_strict_tools_are_right_where_text_is_free(FORMAT)
    test_constraint.test_arguments_are_an_object_whatever_a_schema_leaves_open(FORMAT, {})
    test_escaped_lark.test_a_custom_tools_text_matches_its_grammar(FORMAT)


def test_the_added_reasoning_format_is_read_wherever_the_text_is_cut(cases: list[Any]) -> None:
    template = ChatTemplate("{{ '<seed:think>' }}{{ '<|action_start|><|plugin|>' }}")
    assert resolve_formats("auto", "auto", template) == (FORMAT, "seed_oss")
    call = f'{{"name": "get_weather", "parameters": {test_tool_calls.WEATHER}}}'
    text = f"<seed:think>Hm.</seed:think>I ask.\n<|action_start|><|plugin|>\n{call}<|action_end|> Done."
    config = OutputParserConfig(call_format=FORMAT, reasoning_format="seed_oss", initial_state="before")
    for cut in range(len(text)):
        parser = OutputParser(config, SamplingParams())
        parser.push(text[:cut], may_stop=True)
        first_delta = parser.build_delta()
        parser.push(text[cut:], may_stop=True)
        parser.finish()
        last_delta = parser.build_delta()
        assert first_delta.reasoning + last_delta.reasoning == "Hm."
        assert first_delta.text + last_delta.text == "I ask. Done."
        calls = [*first_delta.tool_calls, *last_delta.tool_calls]
        assert "".join(call.arguments for call in calls) == test_tool_calls.WEATHER
        assert [call.name for call in calls if call.name is not None] == ["get_weather"]
