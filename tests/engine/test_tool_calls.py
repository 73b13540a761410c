"""Tool calls in text: every format, cut at every character, malformed, hostile."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from budget import examples
from call_formats import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output.delta_builder import ChoiceDelta
from engine.output.formats import (
    CALL_FORMATS,
    choose_format,
)
from engine.output.parser import OutputParser, OutputParserConfig
from engine.output.schema_types import SCHEMAS_MAX, read_parameter_types, resolve, schema_types
from engine.output.xml_calls import encode_as_types
from engine.types import SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "at": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}, "y": {}}}}},
]
TYPES = read_parameter_types(TOOLS)
Told = tuple[str, list[tuple[str, str]]]


def make_parser(name: str) -> OutputParser:
    return OutputParser(OutputParserConfig(call_format=name, parameter_types=TYPES), SamplingParams())


def run(name: str, pieces: list[str], *, ends: bool = True) -> Told:
    """(what was said, [(name, arguments)]) of a text that came in these pieces."""
    parser = make_parser(name)
    deltas: list[ChoiceDelta] = []
    for piece in pieces:
        parser.push(piece, may_stop=True)
        deltas.append(parser.build_delta())
    if ends:
        parser.finish()
        deltas.append(parser.build_delta())
    output_text, calls = "", dict[int, list[str]]()
    for delta in deltas:
        output_text += delta.text
        for call in delta.tool_calls:
            assert (call.name is None) == (call.id is None) == (call.index in calls)
            assert call.index == len(calls) or call.name is None
            if call.name is not None:
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert parser._delta.call_count == len(calls)
    assert parser.has_tool_calls == bool(calls)
    return output_text, [(name, arguments) for name, arguments in calls.values()]


WEATHER = '{"city": "Bad \\"Säckingen\\" {1}", "days": 3}'
BOTH = [("get_weather", WEATHER), ("now", "{}")]
# (format, text, what is said, what is called)
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "", BOTH[:1]),
    ("hermes", f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', "Let me see.", BOTH),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call> Done.', " Done.", BOTH[:1]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"id": 7, "type": "function", "name": "now", "parameters": null}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"a": []}}</tool_call>', "",
     [("now", "{}"), ("now", '{"a": []}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}', "",
     [("now", "{}"), ("now", "{}")]),
    ("hermes", '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>', "<tool_call>", BOTH[1:]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>', "",
     [("now", '{"a": "</tool_call><tool_call>"}')]),
    ("hermes", '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}', []),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, '
                '{"name": "now", "arguments": {}}]', "", BOTH),
    ("granite", f'<tool_call> [{{"name": "get_weather", "arguments": {WEATHER}}}] and so', " and so", BOTH[:1]),
    ("granite", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", BOTH[1:]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
                '{"name": "now", "arguments": {}}]', "", BOTH),
    ("mistral", f"So:[TOOL_CALLS]get_weather{WEATHER}[TOOL_CALLS]now{{}}", "So:", BOTH),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}", "", BOTH),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "now", "parameters": {{}}}}', "",
     BOTH),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", BOTH[1:]),
    ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3_json", '{"name": "Ada"}', '{"name": "Ada"}', []),
    ("pythonic", '[get_weather(city="Bad \\"Säckingen\\" {1}", days=3), now()]', "", BOTH),
    ("pythonic", "[now(a=[1, -2.5, {'b': None}], c=true, d='x\ny')]", "",
     [("now", '{"a": [1, -2.5, {"b": null}], "c": true, "d": "x\\ny"}')]),
    ("pythonic", "[shop.find(a=false)]", "", [("shop.find", '{"a": false}')]),
    ("pythonic", "[1] See (there).", "[1] See (there).", []),
    ("pythonic", "[now(1)]", "[now(1)]", []),
    ("pythonic", "[now(a=b)] x", "[now(a=b)] x", []),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", BOTH[1:]),
    ("qwen3_coder", '<tool_call>\n<function=get_weather>\n<parameter=city>\nBad "Säckingen" {1}\n</parameter>\n'
                    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
                    "</function>\n</tool_call>", "", BOTH),
    ("qwen3_coder", "First,\n<function=get_weather><parameter=exact>True</parameter><parameter=at>null</parameter>"
                    "<parameter=other>1</parameter></function> then", "First, then",
     [("get_weather", '{"exact": true, "at": null, "other": "1"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "1\n\t2\\\n", "b":\n "\\\\\n"}}</tool_call>', "",
     [("now", '{"a": "1\\n\\t2\\n", "b":\n "\\\\\\n"}')]),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": \\"1\\n2\\"}", "name": "now"}</tool_call>', "",
     [("now", '{"a": "1\\n2"}')]),
    ("mistral", '[TOOL_CALLS]now{"a": "1\r\n2"}', "", [("now", '{"a": "1\\r\\n2"}')]),
    ("pythonic", "[get-weather(from='x', class=1, user-id=[None], $filter=\"a=b, c\"), a$b(\"x, y\"=(1), 'z'= 2,)]", "",
     [("get-weather", '{"from": "x", "class": 1, "user-id": [null], "$filter": "a=b, c"}'),
      ("a$b", '{"x, y": 1, "z": 2}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\na</parameter>; </function>\n<parameter=x> "
                    "<parameter=z>\n</parameter>\n</parameter>\n</function>\n</tool_call>", "",
     [("f", '{"x": "a</parameter>; </function>\\n<parameter=x> <parameter=z>\\n</parameter>"}')]),
    ("qwen3_coder", "<function=f><parameter=x>a<parameter=y>b</function> </tool_call>", "",
     [("f", '{"x": "a", "y": "b"}')]),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>",
     "<tool_call>\n<function=rm>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=at>\n{\"a\": [1]}\n</parameter>\n<parameter=days>"
                    "\nsoon\n<parameter=city>\n\n a\n\nb \n\n</function>\n</tool_call>", "",
     [("get_weather", '{"at": {"a": [1]}, "days": "soon", "city": "\\n a\\n\\nb \\n"}')]),
]  # fmt: skip
IDS = [f"{case[0]}-{number}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("name", "text", "expected_text", "calls"), CASES, ids=IDS)
def test_calls_wherever_the_text_is_cut(name: str, text: str, expected_text: str, calls: list[tuple[str, str]]) -> None:
    assert run(name, [text]) == (expected_text, calls)
    assert run(name, list(text)) == (expected_text, calls)
    for cut in range(len(text)):
        assert run(name, [text[:cut], text[cut:]]) == (expected_text, calls), text[:cut]
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(("name", "text", "expected_text", "calls"), CASES, ids=IDS)
def test_what_was_said_depends_on_what_has_come_alone(
    name: str, text: str, expected_text: str, calls: list[tuple[str, str]]
) -> None:
    """So a stream that another worker goes on with, from some token on, repeats nothing and leaves nothing out."""
    rng = random.Random(text)
    for end in range(len(text)):
        cuts = sorted(rng.sample(range(end + 1), min(end, 3)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, end])]
        assert run(name, pieces, ends=False) == run(name, [text[:end]], ends=False), text[:end]


@pytest.mark.parametrize(("name", "text", "expected_text", "calls"), CASES, ids=IDS)
def test_a_text_that_ends_early_is_a_beginning_or_text(
    name: str, text: str, expected_text: str, calls: list[tuple[str, str]]
) -> None:
    for end in range(len(text)):
        _, early_calls = run(name, [text[:end]])
        for (early_name, early_arguments), (full_name, full_arguments) in zip(early_calls, calls):
            assert early_name == full_name
            assert (
                full_arguments.startswith(early_arguments) or name == "qwen3_coder"
            )  # of a value that was cut: as it was written
        if not early_calls:
            assert run(name, [text[:end]])[0] == text[:end]


MALFORMED = [
    ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": }, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "tool": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now" "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>now</tool_call>"),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "</tool_call>"),
    ("granite", "<|tool_call|>now"),
    ("mistral", "[TOOL_CALLS]now and then"),
    ("mistral", "[TOOL_CALLS] 7"),
    ("mistral", "[TOOL_CALLS]" + "n" * 300 + "{}"),
    ("qwen3_coder", "<tool_call>\n<function=\nnow></function></tool_call>"),
    ("qwen3_coder", "<function=></function>"),
    ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>'),
    ("pythonic", "[now(a=1"),
    ("pythonic", "[now(**a)]"),
    ("pythonic", "[now(a=b'x')]"),
    ("pythonic", "[now(a=1e999)]"),
    ("pythonic", "[now(a=1, a=2)]"),
    ("pythonic", "[now(a b=1)]"),
    ("pythonic", "[now(a==1)]"),
    ("pythonic", "[now(a=)]"),
    ("pythonic", "[now(,)]"),
    ("pythonic", "[now(]"),
    ("pythonic", "[now(a=[1), b=(2])]"),
    ("pythonic", "[now(a='\\ud800')]"),
    ("qwen3_coder", "<tool_call>\n<function=undeclared>\n</function>\n</tool_call>"),
    ("pythonic", "[now(a=" + "-" * 20000 + "1)]"),
    ("pythonic", "[now(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ("llama3_json", '{"name": "now", "parameters": 3}'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_markup_comes_back_as_text(name: str, text: str) -> None:
    for before, after in (("", ""), ("Well:\n", " So."), ("\n ", "\n")):
        if name in ("pythonic", "llama3_json") and before.strip():
            continue
        full_text = before + text + after
        assert run(name, [full_text]) == (full_text, [])
        if len(full_text) < 1000:
            assert run(name, list(full_text)) == (full_text, [])


def test_a_call_after_malformed_markup_is_found() -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for name, bad in MALFORMED:
        if name == "hermes" and "</tool_call>" in bad:
            assert run(name, list(bad + good)) == (bad, BOTH[1:])


def test_arguments_that_are_no_json_stay_what_the_model_wrote() -> None:
    """Their call has been told by then."""
    output_text, calls = run("hermes", list('<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>'))
    assert (output_text, calls) == ("", [("now", '{"a": }')])
    output_text, calls = run("hermes", list('<tool_call>{"name": "now", "arguments": {} oops}</tool_call>.'))
    assert (output_text, calls) == (" oops}</tool_call>.", BOTH[1:])
    output_text, calls = run("hermes", list('<tool_call>{"name": "now", "arguments": {}, "more": 1}</tool_call>'))
    assert (output_text, calls) == (', "more": 1}</tool_call>', BOTH[1:])


def test_formats_are_found_in_chat_templates() -> None:
    assert set(EXAMPLES) == set(CALL_FORMATS)
    for name, example in EXAMPLES.items():
        assert choose_format("auto", CALL_FORMATS, "{%- for message in messages %}" + example.template) == name
    assert choose_format("auto", CALL_FORMATS, "{{ messages[0].content }}") is None


@pytest.mark.parametrize("name", CALL_FORMATS)
@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_no_character_is_lost_and_nothing_raises(name: str, data: st.DataObject) -> None:
    scraps = [*EXAMPLES[name].scraps, "§", " ", "\n", "a", "<", '"', "\\"]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    output_text, calls = run(name, pieces)
    assert (output_text, calls) == run(name, [text])
    assert (output_text, calls) == run(name, list(text))
    all_output = output_text + "".join(name + arguments for name, arguments in calls)
    assert all_output.count("§") == text.count("§")
    if not calls:
        assert output_text == text
    half = "".join(pieces[: len(pieces) // 2])
    assert run(name, pieces[: len(pieces) // 2], ends=False) == run(name, [half], ends=False)


class _CountingStr(str):
    """Counts the characters that are looked at or copied by what grows with the text."""

    read_chars = 0

    def __getitem__(self, key: Any) -> Any:
        part = _CountingStr(str.__getitem__(self, key))
        _CountingStr.read_chars += len(part)
        return part

    def __add__(self, other: str) -> Any:
        _CountingStr.read_chars += len(self) + len(other)
        return _CountingStr(str.__add__(self, other))


HOSTILE = {
    "hermes": ['<tool_call>{"', "<tool_call>{", "<tool_call>" + " " * 20, '<tool_call>{"name":"', "\n", "<"],
    "granite": ["<tool_call>[", "<|tool_call|>[{", "<tool_call>[{}"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[CALL_ID]", "["],
    "llama3_json": ["{", '{"name": "', "<|python_tag|>"],
    "pythonic": ["[f(", "[", "f('", "(", "["],
    "qwen3_coder": ["<function=f><parameter=", "<function=f>", "<parameter=a>", "\n", "<tool_call>",
                    "<function=f><parameter=x></parameter> ", "<function=f><parameter=x></function>\n"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "scrap"), [(name, scrap) for name, scraps in HOSTILE.items() for scrap in scraps])
def test_work_grows_with_the_text_and_no_faster(name: str, scrap: str) -> None:
    """Whether it comes at once or a few characters at a time."""

    def work(copies: int, at_a_time: int) -> int:
        text, parser = scrap * copies, make_parser(name)
        _CountingStr.read_chars = 0
        for start in range(0, len(text), at_a_time):
            parser._source.text = _CountingStr(parser._source.text)
            parser.push(_CountingStr(text[start : start + at_a_time]), may_stop=True)
        parser.finish()
        return _CountingStr.read_chars

    for at_a_time in (3, 1 << 20):
        small, large = work(200, at_a_time), work(1600, at_a_time)
        assert large <= 10 * small + 2000, at_a_time


@pytest.mark.parametrize(
    ("value", "types", "expected_json"),
    [
        ("5", ("integer",), "5"), ("5.5", ("number",), "5.5"), ("five", ("integer",), '"five"'),
        ("5", ("string",), '"5"'), ("5", ("integer", "string"), "5"), ("x", ("integer", "string"), '"x"'),
        ("True", ("boolean",), "true"), ("0", ("boolean",), "false"), ("0", ("boolean", "integer"), "0"),
        ("null", ("null", "string"), "null"), ("[1,2]", ("array",), "[1,2]"), ('{"a":1}', ("object",), '{"a":1}'),
        ("{a}", ("object",), '"{a}"'), ("1e999", ("number",), '"1e999"'), ("NaN", ("number",), '"NaN"'),
        ("None", ("null", "string"), "null"), ("none", ("null", "string"), '"none"'), ("None", ("string",), '"None"'),
        ("{'a': True, 'b': [None]}", ("object",), '{"a": true, "b": [null]}'), ("['x']", ("array",), '["x"]'),
        ("['x']", ("object",), '"[\'x\']"'), ('{"a": "x\ny"}', ("object",), '{"a": "x\\ny"}'),
        ("{1}", ("array",), '"{1}"'),
    ],
)  # fmt: skip
def test_values_take_the_type_of_their_schema(value: str, types: tuple[str, ...], expected_json: str) -> None:
    assert encode_as_types(value, types) == expected_json


ROOT = {
    "$defs": {
        "point": {"properties": {"x": {}}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        "circle": {"$ref": "#/$defs/circle"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "int"}, ("integer",)), ({"type": ["string", "null"]}, ("null", "string")), ({}, ("string",)),
        ({"enum": [1, None, "a"]}, ("integer", "null", "string")), (None, ("string",)), ({"type": 5}, ("string",)),
        ({"anyOf": [{"type": "number"}, {"oneOf": [{"type": "array"}]}]}, ("array", "number")),
        ({"$ref": "#/$defs/point"}, ("object",)), ({"$ref": "#/$defs/maybe"}, ("null", "object")),
        ({"$ref": "#/$defs/circle"}, ("string",)), ({"$ref": "#/nowhere"}, ("string",)),
        ({"const": True}, ("boolean",)),
        ({"oneOf": [{"const": "a"}, {"const": 5}]}, ("integer", "string")), ({"items": {}}, ("array",)),
    ],
)  # fmt: skip
def test_types_are_read_from_schemas(schema: Any, types: tuple[str, ...]) -> None:
    assert schema_types(schema, ROOT) == types


def test_schemas_that_refer_to_each_other_in_circles_are_read_once() -> None:
    """Ten references of a schema to itself took 10^9 steps, on the event loop of the server."""
    node: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/node"}] * 30 + [{"type": "integer"}], "type": "null"}
    parameters = {"$defs": {"node": node}, "properties": {"a": {"$ref": "#/$defs/node"}}, "allOf": [{"$ref": "#"}] * 30}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    assert read_parameter_types(tools) == {"f": {"a": ("integer", "null")}}


def test_schemas_of_one_request_are_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 64 KB with many references to a schema of many branches held the event loop for many seconds."""
    resolved: list[Any] = []

    def count_and_resolve(schema: Any, root: Any) -> Any:
        resolved.append(schema)
        return resolve(schema, root)

    monkeypatch.setattr("engine.output.schema_types.resolve", count_and_resolve)
    properties = {f"p{number}": {"$ref": "#/$defs/wide"} for number in range(1_500)}
    parameters = {"properties": properties, "$defs": {"wide": {"anyOf": [{"type": "integer"}] * 1_500}}}
    types = read_parameter_types([{"function": {"name": "f", "parameters": parameters}}])
    assert len(resolved) <= SCHEMAS_MAX
    assert list(types["f"]) == list(properties)
    assert types["f"]["p0"] == ("integer",)
    assert types["f"]["p1499"] == ("string",)
