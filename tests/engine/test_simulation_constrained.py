"""A simulated engine says what a grammar allows, and comes to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.grammar_compiler import GrammarCompiler, GrammarVocabulary, read_added_tokens
from engine.output.formats import CALL_FORMATS
from engine.output.parser import OutputParser, OutputParserConfig
from engine.output.schema_types import read_parameter_types
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import build_constraint
from engine.simulation.constrained import ConstrainedAnswers
from engine.simulation.executor import sample_words
from engine.simulation.runner import SimulatedAnswers
from engine.structured_output.lark import write_lark
from engine.tiny.tokenizer import cached_tokenizer
from engine.types import Constraint, Request, SamplingParams, Sequence
from events.config import KVEventsConfig
from options import ConfigError
from prompts import RequestError, Tokenizer, parse_chat
from simulation.spec import CALL_ONE_TOOL_TURNS, ScriptTurn, read_spec

TOKENIZER = Tokenizer.load(cached_tokenizer())
EOS = TOKENIZER.eos_token_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer", "minimum": 3},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "kind": {"enum": ["aa", "bb"]},
        "of": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "free": {},
    },
    "required": ["name", "count", "tags", "kind", "of", "free"],
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    new_grammars = GrammarCompiler(lambda: GrammarVocabulary(TOKENIZER, TOKENIZER.vocab_size))
    yield new_grammars
    new_grammars.close()


def generate_text(
    grammars: GrammarCompiler,
    constraint: Constraint,
    length: int | None = None,
    tokens: int = 200,
    *,
    drops_matchers: bool = False,
) -> str:
    """The whole answer; fails where it does not end. `drops_matchers`: each token comes from an engine of its own."""
    answers = ConstrainedAnswers(grammars, TOKENIZER, EOS, length)
    free = SimulatedAnswers(sample_words(TOKENIZER), EOS, length)
    request = Request(request_id="r", token_ids=[5, 6], params=SamplingParams(constraint=constraint))
    seq = Sequence(request=request, token_ids=[5, 6], prompt_len=2, arrival_s=0.0)
    for _ in range(tokens):
        token = answers.next_token(seq, free.next_token(seq))
        if token == EOS:
            return TOKENIZER.decode(seq.token_ids[2:], skip_special_tokens=False)
        seq.token_ids.append(token)
        if drops_matchers:
            answers._matcher_states.clear()
    raise AssertionError(f"no end: {TOKENIZER.decode(seq.token_ids[2:], skip_special_tokens=False)}")


def make_constraint(script: tuple[ScriptTurn, ...] = (), calls: str = "hermes", **fields: Any) -> Constraint:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    limits = ModelLimits(max_model_len=4096, vocab_size=TOKENIZER.vocab_size, call_format=calls, script=script)
    requested = build_constraint(parse_chat(json.dumps(body).encode()), limits)
    assert requested is not None
    return Constraint(write_lark(requested.decode(), read_added_tokens(TOKENIZER)), requested.param)


@pytest.mark.parametrize("length", [None, 3, 50])
def test_a_schema_is_satisfied_with_words(grammars: GrammarCompiler, length: int | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    value = json.loads(generate_text(grammars, make_constraint(response_format=form), length))
    assert set(value) == set(SCHEMA["required"])
    assert re.fullmatch(r" [a-z]+", value["name"])
    assert (len(value["tags"]), value["kind"] in ("aa", "bb"), value["count"] >= 3) == (2, True, True)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[a-z]{40}"}, "[a-z]{40}"), ({"regex": "(ab)+c"}, "(ab)+c")],
)
def test_patterns_and_choices(grammars: GrammarCompiler, outputs: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, generate_text(grammars, make_constraint(structured_outputs=outputs)))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_is_made_and_an_optional_one_is_words(grammars: GrammarCompiler, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]
    answer = generate_text(grammars, make_constraint(tools=tools, tool_choice=choice))
    call = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    assert set(call.get("arguments", call)) == set(SCHEMA["required"])
    assert re.fullmatch(r"( [a-z]+)+", generate_text(grammars, make_constraint(tools=tools)))


def test_an_open_thought_is_ended_first(grammars: GrammarCompiler) -> None:
    end = TOKENIZER.hf_tokenizer.encode(" x", add_special_tokens=False).ids[0]
    form = make_constraint(structured_outputs={"choice": ["yes"]})
    answer = generate_text(grammars, Constraint(lark_grammar=form.lark_grammar, param="", reasoning_end_token=end))
    assert answer == TOKENIZER.decode([end], skip_special_tokens=False) + "yes"


def test_a_preempted_answer_goes_on_as_it_was(grammars: GrammarCompiler) -> None:
    """A matcher that was dropped meanwhile reads what was said again."""
    constraint = make_constraint(structured_outputs={"regex": "(abc ){20}d"})
    answers = ConstrainedAnswers(grammars, TOKENIZER, EOS, None)
    free = SimulatedAnswers(sample_words(TOKENIZER), EOS, None)
    request = Request(request_id="r", token_ids=[5], params=SamplingParams(constraint=constraint))
    seq = Sequence(request=request, token_ids=[5], prompt_len=1, arrival_s=0.0)
    while (token := answers.next_token(seq, free.next_token(seq))) != EOS:
        assert isinstance(token, int)
        seq.token_ids.append(token)
        answers._matcher_states.clear()
    assert TOKENIZER.decode(seq.token_ids[1:], skip_special_tokens=False) == "abc " * 20 + "d"


@pytest.mark.parametrize("calls", CALL_FORMATS)
def test_a_call_goes_on_alike_on_another_engine(grammars: GrammarCompiler, calls: str) -> None:
    """Half an end tag was taken for a part of the argument."""
    constraint = make_constraint(CALL_ONE_TOOL_TURNS, calls, tools=TOOLS)
    assert generate_text(grammars, constraint, drops_matchers=True) == generate_text(grammars, constraint)


TYPED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "none": {"type": "null"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "strict": True, "parameters": TYPED}},
]
ASK, RESULT = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "i", "content": "7"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
SAID = {"role": "assistant", "content": "so"}
REMINDER = {"role": "user", "content": "a client's note beside the result"}
WORDS = r"( [a-z]+)+"


def parse_output(answer: str, calls: str = "hermes") -> tuple[str, list[tuple[str, Any]]]:
    """(text, calls) of a whole answer."""
    types = read_parameter_types(TOOLS) if calls == "qwen3_coder" else {}
    parser = OutputParser(OutputParserConfig(call_format=calls, parameter_types=types), SamplingParams())
    parser.push(answer, may_stop=True)
    parser.finish()
    delta = parser.build_delta()
    return delta.text, [(call.name or "", json.loads(call.arguments)) for call in delta.tool_calls]


@pytest.mark.parametrize("calls", CALL_FORMATS)
def test_tools_are_called_once_and_then_answered(grammars: GrammarCompiler, calls: str) -> None:
    talk = [ASK]
    for answer in (CALLED, SAID, CALLED):
        text, calls_made = parse_output(
            generate_text(grammars, make_constraint(CALL_ONE_TOOL_TURNS, calls, messages=talk, tools=TOOLS)), calls
        )
        if answer is CALLED:
            ((name, arguments),) = calls_made
            assert (text, name, set(arguments)) == ("", "f", set(SCHEMA["required"]))
            talk = [*talk, CALLED, RESULT, REMINDER]
        else:
            assert not calls_made
            assert re.fullmatch(WORDS, text)
            talk = [*talk, SAID, ASK]


@pytest.mark.parametrize("calls", CALL_FORMATS)
def test_a_script_says_its_turns_to_the_letter(grammars: GrammarCompiler, calls: str) -> None:
    arguments = {"city": 'Å "x"\n</parameter>', "days": 3, "deep": {"a": [1, None, True, "b"]}, "none": None}
    text = 'To the letter: <b>{"a"}</b> 🙂\n\tand on.'
    script = (ScriptTurn(call="g", arguments=arguments), ScriptTurn(text=text), ScriptTurn(call="g", arguments={}))
    turns = [[ASK], [ASK, CALLED, RESULT], [ASK, CALLED, RESULT, SAID, ASK]]
    answers = [generate_text(grammars, make_constraint(script, calls, messages=talk, tools=TOOLS)) for talk in turns]
    assert parse_output(answers[0], calls) == ("", [("g", arguments)])
    assert parse_output(answers[1], calls) == (text, [])
    assert parse_output(answers[2], calls) == ("", [("g", {})])


@pytest.mark.parametrize(
    ("parameters", "expected_arguments"),
    [
        (None, {}),
        ({"type": "object", "properties": {}}, {}),
        ({"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}, {"city": "Oslo"}),
    ],
)
@pytest.mark.parametrize("calls", CALL_FORMATS)
def test_made_up_arguments_are_those_that_a_tool_declares(
    grammars: GrammarCompiler, calls: str, parameters: Any, expected_arguments: Any
) -> None:
    """The client's function failed with an argument that it does not know."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = generate_text(grammars, make_constraint((ScriptTurn(call="f"),), calls, tools=tools))
    assert parse_output(answer, calls)[1] == [("f", expected_arguments)]


@pytest.mark.parametrize(
    "parameters", [{"required": 5}, {"required": [[1]]}, {"properties": 5, "required": ["a"]}, {"required": [{}]}]
)
def test_malformed_schemas_of_tools_are_left_to_the_grammar(parameters: Any) -> None:
    """They ended the request with a TypeError, which is answered 500."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with suppress(RequestError):
        make_constraint((ScriptTurn(call="f"),), tools=tools)


def test_a_scripted_line_may_reason_before_strict_tools(grammars: GrammarCompiler) -> None:
    """The grammar of strict tools allowed no reasoning, so the answer was empty."""
    line = "<think>Hm.</think>So be it."
    script = [TOKENIZER.hf_tokenizer.encode(line, add_special_tokens=False).ids]
    start, end = (TOKENIZER.token_to_id(marker) for marker in ("<think>", "</think>"))
    constraint = structs.replace(make_constraint(tools=TOOLS[1:]), reasoning_start_token=start, reasoning_end_token=end)
    answers = ConstrainedAnswers(grammars, TOKENIZER, EOS, None)
    scripted = SimulatedAnswers(sample_words(TOKENIZER), EOS, None, script)
    request = Request(request_id="r", token_ids=[5], params=SamplingParams(constraint=constraint))
    seq = Sequence(request=request, token_ids=[5], prompt_len=1, arrival_s=0.0)
    while (token := answers.next_token(seq, scripted.next_token(seq))) != EOS:
        assert isinstance(token, int)
        assert seq.output_len < 100
        seq.token_ids.append(token)
    assert TOKENIZER.decode(seq.token_ids[1:], skip_special_tokens=False) == line


def test_a_scripted_text_is_said_in_the_tokenizer_s_own_tokens(grammars: GrammarCompiler) -> None:
    """So that the conversation's next prompt finds them in the cache."""
    text = "The quick engine answers its requests, one token after the other. " * 40
    constrained_answers = ConstrainedAnswers(grammars, TOKENIZER, EOS, None)
    free_answers = SimulatedAnswers(sample_words(TOKENIZER), EOS, None)
    request = Request(
        request_id="r", token_ids=[5], params=SamplingParams(constraint=make_constraint((ScriptTurn(text=text),)))
    )
    seq = Sequence(request=request, token_ids=[5], prompt_len=1, arrival_s=0.0)
    while (token := constrained_answers.next_token(seq, free_answers.next_token(seq))) != EOS:
        assert isinstance(token, int)
        seq.token_ids.append(token)
    assert seq.token_ids[1:] == TOKENIZER.hf_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS[1:]},
        {"tools": TOOLS, "tool_choice": "none"},
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[1:]}},
        },
    ],
)
def test_a_call_that_a_request_cannot_have_is_words(grammars: GrammarCompiler, fields: dict[str, Any]) -> None:
    assert re.fullmatch(WORDS, generate_text(grammars, make_constraint((ScriptTurn(call="f"),), **fields)))


def test_what_must_be_said_wins_over_the_script(grammars: GrammarCompiler) -> None:
    script = (ScriptTurn(text="no"), ScriptTurn(call="f"))
    tool_choice = {"type": "function", "function": {"name": "g"}}
    assert (
        parse_output(generate_text(grammars, make_constraint(script, tools=TOOLS, tool_choice=tool_choice)))[1][0][0]
        == "g"
    )
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}
    assert generate_text(grammars, make_constraint(script, response_format=form)) == "5"


def test_a_scripted_call_is_made_beside_a_format_of_the_text(grammars: GrammarCompiler) -> None:
    script = (ScriptTurn(call="g", arguments={}), ScriptTurn(text="no"))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}
    turns = [[ASK], [ASK, {"role": "assistant", "content": "x"}, ASK]]
    call, text = (
        generate_text(grammars, make_constraint(script, messages=talk, tools=TOOLS, response_format=form))
        for talk in turns
    )
    assert parse_output(call)[1] == [("g", {})]
    assert text == "5"


def test_an_answer_that_a_client_has_begun_is_no_turn(grammars: GrammarCompiler) -> None:
    talk = [ASK, {"role": "assistant", "content": "It"}]
    fields = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    assert generate_text(grammars, make_constraint((ScriptTurn(text=" is"), ScriptTurn(text="no")), **fields)) == " is"


SPEC = {"prefill_s_per_token": 1e-4, "kv_tokens": 4096}


def test_scripts_of_turns_are_read_and_told_to_the_server() -> None:
    script = [{"call": "f", "arguments": {"a": 1}}, {"call": "*"}, {"text": "so"}, {}]
    events = KVEventsConfig(enable_kv_cache_events=False)
    for script_setting, turns in ((script, 4), ("tools", 2)):
        assembly = assemble(EngineConfig(simulate=json.dumps({**SPEC, "script": script_setting}), kv_events=events))
        assert len(assembly.info.script) == turns
        assembly.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([], r"script: .*length >= 1"),
        ([{"say": "x"}], r"script\[0\].*unknown field say"),
        ([{}, {"call": "f", "text": "x"}], r"script\[1\].*call or text, not both"),
        ([{"arguments": {}}], r"script\[0\].*only beside call"),
        ([{"call": "f", "arguments": "{}"}], r"script\[0\]\.arguments"),
        ([{"text": "x" * 5000}], r"script\[0\]\.text.*4096"),
        (5, "script"),
    ],
)
def test_a_wrong_script_is_named(script: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_spec(json.dumps({**SPEC, "script": script}))
