"""What bodies ask answers to match, as a matcher sees it: texts that it takes and texts that it does not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import msgspec
import pytest
from call_formats import EXAMPLES
from llguidance import LLMatcher, LLTokenizer

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.grammar_compiler import GrammarVocabulary, _draw_allowed_token
from engine.output.formats import CALL_FORMATS
from engine.output.parser import OutputParser, OutputParserConfig
from engine.output.schema_types import read_parameter_types
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import build_constraint
from engine.structured_output.constraint import parse_requested_constraint
from engine.structured_output.constraint_check import check_constraint
from engine.structured_output.lark import write_lark
from engine.tiny.tokenizer import cached_tokenizer
from engine.types import SamplingParams
from prompts import ChatRequest, CompletionRequest, RequestError, Tokenizer

TOKENIZER = Tokenizer.load(cached_tokenizer(), with_fast_encoder=False)
WORDS = LLTokenizer(TOKENIZER.hf_tokenizer.to_str(), eos_token=list(TOKENIZER.eos_token_ids))
GRAMMAR_WORDS = GrammarVocabulary(TOKENIZER, TOKENIZER.vocab_size)
TOKENS = {token.content: token_id for token_id, token in TOKENIZER.hf_tokenizer.get_added_tokens_decoder().items()}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "more": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "?"}], **fields}, ChatRequest)


def grammar(body: ChatRequest | CompletionRequest, markup: str | None = None) -> str:
    constraint = parse_requested_constraint(body, markup)
    assert constraint is not None
    return write_lark(constraint, TOKENS)


def takes(lark: str, text: str) -> bool:
    """Whether the text is one that the grammar means."""
    matcher = LLMatcher(WORDS, lark, log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("markup", CALL_FORMATS)
def test_a_forced_call_is_one_call_or_several_in_the_markup_of_the_model(markup: str) -> None:
    example = EXAMPLES[markup]
    weather, time, wrong = example.weather, example.time, example.wrong
    begin, end = CALL_FORMATS[markup].markup.calls_begin, CALL_FORMATS[markup].markup.calls_end
    two_calls = begin + CALL_FORMATS[markup].markup.separator.join(
        call.removeprefix(begin).removesuffix(end) if end else call for call in (weather, time)
    ) + end  # fmt: skip
    lark = grammar(chat(tools=TOOLS, tool_choice="required"), markup)
    assert takes(lark, weather)
    assert takes(lark, time)
    assert takes(lark, two_calls)
    for text in (wrong, "", "Hello", weather[:-1], weather + " and more"):
        assert not takes(lark, text), text
    single_grammar = grammar(chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), markup)
    assert takes(single_grammar, weather)
    assert not takes(single_grammar, two_calls)
    named_grammar = grammar(
        chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}}), markup
    )  # fmt: skip
    assert takes(named_grammar, time)
    assert not takes(named_grammar, weather)
    assert not takes(named_grammar, two_calls)


@pytest.mark.parametrize("markup", CALL_FORMATS)
def test_calls_of_strict_tools_are_right_where_text_is_free(markup: str) -> None:
    example = EXAMPLES[markup]
    weather, time, wrong = example.weather, example.time, example.wrong
    lark = grammar(chat(tools=TOOLS), markup)
    for text in ("", "Hello", f"I look: {weather}", weather, time):
        assert takes(lark, text), text
    assert not takes(lark, wrong)
    assert parse_requested_constraint(chat(tools=TOOLS[1:]), markup) is None
    assert parse_requested_constraint(chat(tools=TOOLS), None) is None
    assert parse_requested_constraint(chat(tools=TOOLS, tool_choice="none"), markup) is None


def test_where_calls_may_be_made_the_answer_is_calls_or_of_the_format() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    lark = grammar(chat(tools=TOOLS, response_format=form), "hermes")
    assert takes(lark, "12")
    assert takes(lark, EXAMPLES["hermes"].weather)
    assert not takes(lark, "text")
    only = grammar(chat(tools=TOOLS, response_format=form, tool_choice="none"), "hermes")
    assert takes(only, "12")
    assert not takes(only, EXAMPLES["hermes"].weather)


FLOAT, INT64 = 3.4028234663852886e38, 2**63
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"
ODD: list[tuple[dict[str, Any], Any, list[Any]]] = [
    ({"type": "number", "minimum": -FLOAT, "maximum": FLOAT}, 1.5, ["x"]),
    ({"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}, 12, ["x", 1.5]),
    ({"type": "string", "pattern": DECIMAL, "maxLength": 3}, "1.5", [5]),
    ({"type": "string", "format": "email", "pattern": EMAIL}, "a@b.c", [5]),
    ({"type": "array", "items": {"anyOf": [{"type": "string", "pattern": "(?=x)"}, {"type": "null"}]}},
     ["a", None], ["a"]),
    ({"type": "object", "properties": {"a": {"type": "integer", "pattern": 5, "maximum": 10**400}},
      "additionalProperties": False, "required": ["a"]}, {"a": 1}, [5]),
    ({"type": "nothing"}, 5, []),
    ({"$ref": "https://example.org/schema"}, 5, []),
    ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}, {"a": 5}, [5]),
]  # fmt: skip
"""(schema that the compiler cannot follow, a value that it may have, values that are not of its type)."""


@pytest.mark.parametrize("markup", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(("odd", "good", "bad"), ODD)
def test_one_odd_property_does_not_refuse_a_request(
    markup: str, odd: dict[str, Any], good: Any, bad: list[Any]
) -> None:
    """A tool that is not strict has it held to its type; a strict tool is refused."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}, "v": odd}, "required": ["n", "v"]}

    def call(value: Any) -> str:
        if markup == "pythonic":
            return f"[f(n=1, v={json.dumps(value)})]"
        if markup == "hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {{"n": 1, "v": {json.dumps(value)}}}}}\n</tool_call>'
        argument_text = value if isinstance(value, str) and odd.get("type") in ("string", None) else json.dumps(value)
        return (f"<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n"
                f"<parameter=v>\n{argument_text}\n</parameter>\n"
                "</function>\n</tool_call>")  # fmt: skip

    lark = check_tool(parameters, markup, strict=False)
    assert takes(lark, call(good))
    assert not takes(lark, call(good).replace("n=1", "n='x'").replace('"n": 1', '"n": ""').replace("\n1\n", "\nx\n"))
    for value in bad:
        if markup != "qwen3_coder" or odd["type"] != "string":
            assert not takes(lark, call(value)), value
    with pytest.raises(RequestError) as error_info:
        check_tool(parameters, markup, strict=True)
    assert error_info.value.status == 400
    assert error_info.value.param == "tools[1].function.parameters"
    assert error_info.value.message.startswith(f"{error_info.value.param}: ")


def check_tool(parameters: dict[str, Any], markup: str, *, strict: bool) -> str:
    """The grammar that a call of the second of two tools must match, as the core gets it."""
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [TOOLS[1], {"type": "function", "function": function}]
    limits = ModelLimits(max_model_len=100, vocab_size=100, call_format=markup)
    constraint = build_constraint(chat(tools=tools, tool_choice="required"), limits)
    assert constraint is not None
    return check_constraint(GRAMMAR_WORDS, constraint)


def test_the_reason_is_told_whole() -> None:
    parameters = {"type": "object", "properties": {"v": {"type": "string", "pattern": EMAIL}}}
    with pytest.raises(RequestError, match="look-around, including look-ahead and look-behind, is not supported"):
        check_tool(parameters, "hermes", strict=True)
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "x"}}}}
    limits = ModelLimits(max_model_len=100, vocab_size=100)
    constraint = build_constraint(chat(response_format=form), limits)
    assert constraint is not None
    with pytest.raises(RequestError, match="Invalid type: x") as error_info:
        check_constraint(GRAMMAR_WORDS, constraint)
    assert error_info.value.param == "response_format.json_schema.schema"


def test_schemas_too_deep_in_each_other_are_refused() -> None:
    deep: dict[str, Any] = {"type": "string", "pattern": EMAIL}
    for depth in range(900):
        deep = {"type": "array", "items": deep}
        if depth in (100, 899):
            with pytest.raises(RequestError) as error_info:
                check_tool({"type": "object", "properties": {"v": deep}}, "hermes", strict=True)
            assert len(error_info.value.message) < 1000


def test_a_property_whose_reference_leads_to_a_faulty_schema_may_have_any_value() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                                             "v": {"type": "integer", "maximum": INT64 - 1, "minimum": -INT64}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip
    parameters = {"type": "object", "properties": {"node": {"$ref": "#/$defs/node"}}, "required": ["node"],
                  "$defs": {"node": node}}  # fmt: skip
    lark = check_tool(parameters, "hermes", strict=False)
    good = '<tool_call>\n{"name": "f", "arguments": {"node": {"next": {"next": null, "v": 1}, "v": 2}}}\n</tool_call>'
    assert takes(lark, good)
    assert not takes(lark, good.replace('"node"', '"other"'))
    with pytest.raises(RequestError) as error_info:
        check_tool(parameters, "hermes", strict=True)
    assert error_info.value.param == "tools[1].function.parameters"


def test_a_tool_that_is_not_strict_may_have_a_schema_that_is_not_known_here() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "not": {"maxProperties": 0}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    lark = grammar(chat(tools=tools, tool_choice="required"), "hermes")
    assert takes(lark, '<tool_call>\n{"name": "odd", "arguments": {"a": 1}}\n</tool_call>')
    assert not takes(lark, '<tool_call>\n{"name": "odd", "arguments": {"a": ""}}\n</tool_call>')


DEFS = {
    "point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
              "additionalProperties": False},
    "digit": {"type": "integer", "minimum": 0, "maximum": 9},
}  # fmt: skip
VALUES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("qwen3_coder", {"$ref": "#/$defs/point"}, {'{"x": true}': {"x": True}}, ["x", "{}"]),
    ("qwen3_coder", {"$ref": "#/$defs/digit"}, {"5": 5}, ["12", '"5"']),
    ("qwen3_coder", {"const": 5}, {"5": 5}, ["6"]),
    ("qwen3_coder", {"const": True}, {"true": True}, ["True"]),
    ("qwen3_coder", {"oneOf": [{"const": "a"}, {"const": "b"}]}, {"a": "a", "b": "b"}, ['"a"', "c"]),
    ("qwen3_coder", {"type": "string", "maxLength": 3}, {"": "", "a\nb": "a\nb"}, ["abcd"]),
    ("qwen3_coder", {"type": "string", "minLength": 2}, {"ab": "ab"}, ["a"]),
    ("qwen3_coder", {"type": "string", "pattern": "^[a-c]{2}$"}, {"ab": "ab"}, ["abc", "a", "xab"]),
    ("qwen3_coder", {"type": "string", "pattern": "^a|\\d$"}, {"ax": "ax", "x5": "x5"}, ["xa", "5x", "\u0665"]),
    ("qwen3_coder", {"type": "string", "pattern": "[/|(]b", "maxLength": 4}, {"x/by": "x/by"}, ["b", "xx/by"]),
    ("qwen3_coder", {"type": "string", "format": "date"}, {"2026-11-26": "2026-11-26"}, ["today"]),
    ("qwen3_coder", {"anyOf": [{"type": "string"}, {"type": "null"}]}, {'"a"': "a", "null": None}, ["5"]),
    ("qwen3_coder", {"enum": ["a", 1, None]}, {"a": "a", "1": 1, "null": None}, ["b"]),
    ("qwen3_coder", {"enum": ["5", 7, "null", "x"]}, {'"5"': "5", "7": 7, "null": "null", "x": "x"}, ["5", '"x"']),
    ("pythonic", {"$ref": "#/$defs/point"}, {'{"x": true}': {"x": True}}, ["{}", '{"x": 1}', "None"]),
    (
        "pythonic",
        {"type": "array", "items": {"$ref": "#/$defs/digit"}, "minItems": 1},
        {"[1, 2]": [1, 2]},
        ["[]", "[12]"],
    ),
    ("pythonic", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, {"True": True, "None": None}, ["1", "[]"]),
    ("pythonic", {"type": ["integer", "null"], "maximum": 3}, {"3": 3, "None": None}, ["4"]),
    ("pythonic", {"description": "anything"}, {"[None, {'a': 1}]".replace("'", '"'): [None, {"a": 1}]}, ["f()"]),
    ("pythonic", {"type": "string", "maxLength": 2}, {'"ab"': "ab"}, ['"abc"', "ab"]),
]
"""(markup, schema of a value, texts that are values of it and those, texts that are none)."""


@pytest.mark.parametrize(("markup", "schema", "good", "bad"), VALUES)
def test_a_strict_value_is_of_its_schema_where_calls_are_not_json(
    markup: str, schema: dict[str, Any], good: dict[str, Any], bad: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False,
                  "$defs": DEFS}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    lark = grammar(chat(tools=tools, tool_choice="required", parallel_tool_calls=False), markup)

    def call(value: str) -> str:
        xml = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
        return xml if markup == "qwen3_coder" else f"[f(v={value})]"

    for text, value in good.items():
        assert takes(lark, call(text)), text
        assert arguments_of(call(text), markup, tools) == {"v": value}
    for text in bad:
        assert not takes(lark, call(text)), text


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False}  # fmt: skip
ARGUMENTS: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer", "minimum": 0, "maximum": 99},
                    "c": {"type": ["string", "null"], "maxLength": 4}}, "required": ["a", "b"]},
    {"properties": {"from": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "x y": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
                    "o": {**NODE, "properties": {"next": {"type": "number", "minimum": 0, "maximum": 9}}}},
     "required": ["x y"]},
    {"properties": {"e": {"enum": ["a", "null", "1", 1, None, True, "true"]},
                    "f": {"oneOf": [{"const": "5"}, {"const": 7}]},
                    "g": {"type": "string", "pattern": "^[^a]?b|c$", "maxLength": 5}}, "required": ["e", "f", "g"]},
    {"properties": {"n": {"$ref": "#/$defs/node"}, "d": {"type": "string", "format": "date"},
                    "s": {"anyOf": [{"type": "string", "maxLength": 2}, {"enum": ["long value"]}]}},
     "required": ["n", "s"], "$defs": {"node": NODE}},
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("markup", CALL_FORMATS)
def test_any_call_that_is_forced_is_read_and_fits_its_schema(markup: str, arguments: dict[str, Any]) -> None:
    """Calls drawn at random from the grammar, as a model that knows nothing would write them."""
    schema = {"type": "object", "additionalProperties": False, **arguments}
    tools = [{"type": "function", "function": {"name": "f-x", "parameters": schema, "strict": True}}]
    lark = grammar(chat(tools=tools, tool_choice="required", parallel_tool_calls=False), markup)
    for seed in range(3):
        text = draw_text(lark, random.Random(seed))
        parsed_arguments = arguments_of(text, markup, tools)
        assert [
            error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(parsed_arguments)
        ] == [], text


def draw_text(lark: str, rng: random.Random, tokens_max: int = 500) -> str:
    """A text that the grammar means."""
    matcher, ids = LLMatcher(WORDS, lark, log_level=0), list[int]()
    while not matcher.is_accepting():
        mask = matcher.compute_bitmask()
        allowed_tokens = [i for i in range(TOKENIZER.vocab_size) if mask[i // 8] >> i % 8 & 1]
        ids.append(rng.choice(allowed_tokens))
        matcher.consume_token(ids[-1])
        assert len(ids) < tokens_max
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def arguments_of(text: str, markup: str, tools: list[dict[str, Any]]) -> Any:
    """The arguments of the one call that the reader of the markup finds."""
    config = OutputParserConfig(call_format=markup, parameter_types=read_parameter_types(tools))
    parser = OutputParser(config, SamplingParams())
    parser.push(text, may_stop=True)
    parser.finish()
    delta = parser.build_delta()
    assert delta.text == ""
    (call,) = delta.tool_calls
    return json.loads(call.arguments)


@pytest.mark.parametrize("markup", CALL_FORMATS)
@pytest.mark.parametrize("parameters", [{}, None, {"properties": {}}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_a_schema_leaves_open(markup: str, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": parameters}}]
    lark = grammar(chat(tools=tools, tool_choice="required"), markup)
    empty = EXAMPLES[markup].time
    assert takes(lark, empty)
    assert arguments_of(empty, markup, tools) == {}
    if markup not in ("qwen3_coder", "pythonic"):
        for other in ("true", "null", "[]", '"a"'):
            assert not takes(lark, empty.replace(": {}", f": {other}")), other


@pytest.mark.parametrize("name", ["from", "class", "user-id", "$filter", "a b", 'say "x", (y)=', "None"])
def test_names_need_not_be_names_of_python(name: str) -> None:
    parameters = {"type": "object", "properties": {name: {"enum": ["x"]}}, "required": [name]}
    tools = [{"type": "function", "function": {"name": "get-weather", "parameters": parameters}}]
    lark = grammar(chat(tools=tools, tool_choice="required"), "pythonic")
    key = name if re.fullmatch(r"[\w$-]+", name) else json.dumps(name)
    text = f'[get-weather({key}="x")]'
    assert takes(lark, text)
    assert arguments_of(text, "pythonic", tools) == {name: "x"}


@pytest.mark.parametrize(
    ("markup", "function", "param"),
    [
        ("pythonic", {"name": "a(b"}, "tools[0].function.name"),
        ("qwen3_coder", {"name": "a>b"}, "tools[0].function.name"),
        ("hermes", {"name": "f", "parameters": [], "strict": True}, "tools[0].function.parameters"),
        ("qwen3_coder", {"name": "f", "strict": True, "parameters": {"properties": {"a>b": {}}}},
         "tools[0].function.parameters"),
        ("pythonic", {"name": "f", "strict": True, "parameters": {"anyOf": [{"properties": {"a": {}}}]}},
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_a_tool_that_the_markup_cannot_write_is_refused(markup: str, function: dict[str, Any], param: str) -> None:
    tools = [{"type": "function", "function": function}]
    with pytest.raises(RequestError) as error_info:
        grammar(chat(tools=tools, tool_choice="required"), markup)
    assert error_info.value.param == param
    loose = {name: value for name, value in function.items() if name != "strict"}
    if param.endswith("parameters") and isinstance(function["parameters"], dict):
        grammar(chat(tools=[{"type": "function", "function": loose}], tool_choice="required"), markup)


TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
       "end": "</f>"}  # fmt: skip
FREE = {"type": "any_text"}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": r"a/b\d"}, ["a/b1"], ["a/b", "a/bx"]),
    ({"regex": "a\nb|^c$"}, ["a\nb", "c"], ["ab"]),
    ({"choice": ["yes", "no\n", '"', "<tool_call>"]}, ["yes", "no\n", '"', "<tool_call>"], ["no", "", "yesno"]),
    ({"grammar": 'start: "a" b\nb: /[0-9]+/'}, ["a12"], ["a"]),
    ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", ""]),
    ({"json": {"type": "integer"}}, ["12"], ["1.5", "x"]),
    ({"json": '{"const": "ä"}'}, ['"ä"'], ['"a"']),
    ({"json": {"type": "array"}}, ["[1, 2]", "[1,2]", "[\n        1,\n        2\n]"], ["[   1]", "[\n\n1]"]),
    ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    ({"json": {"type": "array"}, "whitespace_pattern": " {3}"}, ["[1,   2]"], ["[1, 2]"]),
    ({"structural_tag": {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
                         "triggers": ["<f"]}}, ["", "so <f>12</f> it is", "<", "<f>1</f><f>2</f>"], ["<f", "<f>x</f>"]),
    ({"structural_tag": {"format": TAG}}, ["<f>1</f>"], ["1", "<f>1</f> "]),
    ({"structural_tag": json.dumps({"format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": FREE, "end": "</think>"},
        {"type": "optional", "content": {"type": "const_string", "value": "\n"}},
        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "regex", "pattern": "[ab]"}}]}})},
     ["<think>well\n</think>\nab", "<think></think>b"], ["ab", "<think>a", "<think></think>aba"]),
    ({"structural_tag": {"format": {"type": "tag", "begin": "", "content": FREE, "end": ["STOP", "END"]}}},
     ["aENSTOP", "END"], ["END.", "a"]),
    ({"structural_tag": {"format": {"type": "any_text", "excludes": ["bad/"]}}}, ["", "ba d/"], ["so bad/ly"]),
    ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True,
                                    "stop_after_first": True}}}, ["a<f>1</f>"], ["a", "<f>1</f>b"]),
    ({"structural_tag": {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}}},
     ["", "<f>1</f>, <f>2</f>"], ["<f>1</f>,"]),
    ({"structural_tag": {"format": {"type": "plus", "content": {"type": "star", "content": TAG}}}},
     ["", "<f>1</f><f>2</f>"], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "good", "bad"), FORMATS)
def test_structured_outputs(outputs: dict[str, Any], good: list[str], bad: list[str]) -> None:
    lark = grammar(msgspec.convert({"prompt": "?", "structured_outputs": outputs}, CompletionRequest))
    for text in good:
        assert takes(lark, text), text
    for text in bad:
        assert not takes(lark, text), text


def test_response_formats() -> None:
    assert parse_requested_constraint(chat()) is None
    assert parse_requested_constraint(chat(response_format={"type": "text"})) is None
    assert takes(grammar(chat(response_format={"type": "json_object"})), "{}")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": True, "strict": True}}
    assert takes(grammar(chat(response_format=schema)), '["anything"]')
    assert takes(grammar(chat(response_format={"type": "structural_tag", "format": TAG})), "<f>1</f>")
    older = {"structures": [{"begin": "<f>", "end": "</f>"}], "triggers": ["<f>"]}
    assert takes(grammar(chat(response_format={"type": "structural_tag", **older})), "<f>[1]</f>")


def test_options_of_the_compiler_are_not_the_clients() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "[ ]{100}", "lenient": True}, "not": {}}
    lark = grammar(chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}}))
    assert "Unimplemented keys" in LLMatcher(WORDS, lark, log_level=0).get_error()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format.format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "1"}}, "structured_outputs.json.json_schema"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"structured_outputs": {"structural_tag": {"format": 1}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "regex"}]}}}},
         "structured_outputs.structural_tag.elements[0].pattern"),
        ({"structured_outputs": {"structural_tag": {"structures": [{"begin": "x", "end": ""}], "triggers": ["y"]}}},
         "structured_outputs.structural_tag.tags[0].begin"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "forced", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}, "tools": TOOLS},
         "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": None}, "tools": TOOLS},
         "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}}, "tools": TOOLS},
         "tool_choice.allowed_tools.tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error_info:
        grammar(chat(**fields), "hermes")
    assert error_info.value.param == param
    assert error_info.value.status == 400


@pytest.mark.parametrize("schema", [True, {"properties": {"a": None}}, {"properties": {"a": {"format": []}}},
                                    {"properties": {"a": {"type": "string", "format": {}}}}])  # fmt: skip
@pytest.mark.parametrize("style", ["qwen_xml", "python"])
def test_a_schema_of_a_wrong_type_is_left_to_the_compiler(schema: Any, style: str) -> None:
    """Some raised errors that became an answer of status 500."""
    tag = {"format": {"type": "json_schema", "style": style, "json_schema": schema}}
    assert "start:" in grammar(chat(structured_outputs={"structural_tag": tag}))


def test_formats_inside_each_other_end_somewhere() -> None:
    deep: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(200):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(RequestError, match="too deep"):
        grammar(chat(structured_outputs={"structural_tag": {"format": deep}}))
    wide = {"type": "sequence", "elements": [TAG] * 5000}
    with pytest.raises(RequestError, match="too many"):
        grammar(chat(structured_outputs={"structural_tag": {"format": wide}}))


def test_allowed_tools() -> None:
    inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": inner}
    lark = grammar(chat(tools=TOOLS, tool_choice=choice), "hermes")
    assert takes(lark, EXAMPLES["hermes"].time)
    assert not takes(lark, EXAMPLES["hermes"].weather)


def test_a_forced_call_needs_a_markup() -> None:
    with pytest.raises(RequestError, match="no --tool-call-parser"):
        parse_requested_constraint(chat(tools=TOOLS, tool_choice="required"))


def test_an_engine_that_can_constrain_nothing_says_why() -> None:
    limits = ModelLimits(max_model_len=100, vocab_size=100, constraint_refusal="it has no bytes")
    with pytest.raises(RequestError, match=r"response_format: it has no bytes") as error_info:
        build_constraint(chat(response_format={"type": "json_object"}), limits)
    assert error_info.value.param == "response_format"
    assert build_constraint(chat(), limits) is None
    assembly = assemble(EngineConfig(simulate="h100:qwen3-8b", num_gpu_blocks_override=8))
    try:
        assert assembly.info.no_constraint_reason is None
        assert assembly.grammars is not None
    finally:
        assembly.close()


class CountedMask(bytes):
    """A mask that counts how often one of its bytes is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += not isinstance(index, slice)
        return super().__getitem__(index)


@pytest.mark.parametrize("allowed_token", [0, 100_003, 159_999])
def test_the_only_token_of_a_large_mask_is_found_without_reading_byte_by_byte(allowed_token: int) -> None:
    bits = bytearray(20_000)
    bits[allowed_token // 8] = 1 << allowed_token % 8
    mask = CountedMask(bits)
    assert _draw_allowed_token(mask, random.Random(0)) == allowed_token
    assert mask.reads <= 8
