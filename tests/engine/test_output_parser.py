"""Thought, answer and calls of choices, from token ids: whole and streamed, cut anywhere, gone on with elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from budget import examples
from call_formats import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.config import ReasoningParserName, ToolCallParserName
from engine.output.choice import Choice
from engine.output.detokenizer import _BYTE_BY_CHAR, DetokenizerFactory
from engine.output.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    initial_reasoning_state,
    resolve_formats,
)
from engine.output.parser import OutputParser, OutputParserConfig
from engine.protocol.chat import ChatFormatter
from engine.protocol.generation import Generation, make_generation
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import ParsedRequest, make_parser_config, reasoning_token_ids
from engine.tiny.tokenizer import build_tokenizer, cached_tokenizer
from engine.types import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs
from prompts import ChatTemplate, parse_chat
from prompts import Tokenizer as PromptTokenizer

TINY = build_tokenizer()
FACTORY = DetokenizerFactory(TINY)
LIMITS = ModelLimits(max_model_len=2000, vocab_size=4096, call_format="hermes", reasoning_format="qwen3")
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "é🙂"}}\n</tool_call>'
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}


def ids_of(text: str) -> list[int]:
    return list(TINY.encode(text, add_special_tokens=False).ids)


def outputs(ids: list[int], cuts: Sequence[int], reason: FinishReason | None) -> list[SequenceOutput]:
    new_outputs = [
        SequenceOutput(
            request_id="r", token_ids=ids[a:b], logprobs=[TokenLogprobs.pack(i, -1.0, 1, []) for i in ids[a:b]]
        )
        for a, b in zip([0, *cuts], [*cuts, len(ids)])
        if a < b
    ] or [SequenceOutput(request_id="r", token_ids=[])]
    new_outputs[-1].finish_reason = reason
    return new_outputs


def generate(ids: list[int], cuts: Sequence[int], body: dict[str, Any], reason: FinishReason = FinishReason.LENGTH,
             prompt: str = "", limits: ModelLimits = LIMITS) -> tuple[Generation, ChatFormatter, bytes]:  # fmt: skip
    """An answer of these tokens, and the bytes of its stream."""
    request = parse_chat(json.dumps({**BODY, **body}).encode())
    plan = make_parser_config(request, prompt, limits)
    generation = make_generation(
        ParsedRequest(request, [[1, 2]], parser_config=plan),
        id="x",
        request_prefix="u",
        model="m",
        limits=limits,
        factory=FACTORY,
    )
    answer = ChatFormatter(generation, request, FACTORY)
    (choice,), stream_bytes = generation.choices, b""
    for output in outputs(ids, cuts, reason):
        if choice.finish_reason is None:
            stream_bytes += answer.format_delta(choice, choice.push(output))
    return generation, answer, stream_bytes + answer.format_end()


def format_whole(ids: list[int], cuts: Sequence[int] = (), reason: FinishReason = FinishReason.LENGTH, prompt: str = "",
          limits: ModelLimits = LIMITS, **body: Any) -> dict[str, Any]:  # fmt: skip
    _, answer, _ = generate(ids, cuts, body, reason, prompt, limits)
    response: dict[str, Any] = json.loads(answer.format_response())
    return response


def join_stream(stream_bytes: bytes) -> dict[str, Any]:
    """The whole that a client makes of a stream, by the rules of OpenAI's clients."""
    joined_message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for event in stream_bytes.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]:
        chunk = json.loads(event.removeprefix(b"data: "))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            joined_message["content"] += delta.get("content") or ""
            joined_message["reasoning"] += delta.get("reasoning") or ""
            calls = delta.get("tool_calls", ())
            assert len({call["index"] for call in calls}) == len(calls)
            for call in calls:
                if call["index"] == len(joined_message["tool_calls"]):
                    assert call["id"]
                    assert call["type"] == "function"
                    joined_message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                joined_message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            joined_message["finish_reason"] = choice["finish_reason"] or joined_message["finish_reason"]
    return joined_message


def message(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer."""
    (choice,) = answer["choices"]
    message_fields = choice["message"]
    return {
        "content": message_fields["content"] or "",
        "reasoning": message_fields["reasoning"] or "",
        "tool_calls": [call["function"] for call in message_fields.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
    }


ANSWERS = [
    f"<think>\nLet me see.\n</think>\n\nI ask.\n{CALL}\n{CALL}",
    "Plainly so.",
    "<think>\nNo end of it",
    f"<think>A call at once{CALL}",
    "<think>\n\n</think>\n\nNo.",
    f"{CALL} and <think>this</think> is text",
    "<tool_call>\n{'no': 'call'}\n</tool_call>",
    "\n <thin> <tool",
    " \n<think>é</think>é🙂",
]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("prompt", ["", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"])
def test_streams_concatenate_to_the_whole_wherever_they_are_cut(text: str, prompt: str) -> None:
    ids, rng = ids_of(text), random.Random(text)
    for reason in (FinishReason.STOP, FinishReason.LENGTH):
        tokens = [*ids, 3] if reason is FinishReason.STOP else ids
        expected_message = message(format_whole(tokens, reason=reason, prompt=prompt))
        cuts = [list(range(len(ids))), [], *([rng.randrange(len(ids))] for _ in range(5))]
        for options in ({}, {"return_token_ids": True}, {"logprobs": True, "top_logprobs": 0}):
            for cut in cuts:
                body = {"stream": True, **options}
                assert join_stream(generate(tokens, cut, body, reason, prompt)[2]) == expected_message
                assert message(format_whole(tokens, cut, reason, prompt, **options)) == expected_message


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_cut_at_every_byte(name: str) -> None:
    """A token is a byte here; a character that a cut divides is told once it is whole."""
    letters = {byte: letter for letter, byte in _BYTE_BY_CHAR.items()}
    ids = [TINY.token_to_id(letters[byte]) for byte in EXAMPLES[name].find.encode()]
    limits = ModelLimits(max_model_len=2000, vocab_size=4096, call_format=name, reasoning_format="qwen3")
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    expected_message = message(format_whole(ids, limits=limits, tools=tools))
    assert json.loads(expected_message["tool_calls"][0]["arguments"])["city"] == "Säckingen 🙂"
    for cut in [*([cut] for cut in range(len(ids))), list(range(len(ids)))]:
        stream_bytes = generate(ids, cut, {"stream": True, "tools": tools}, limits=limits)[2]
        assert join_stream(stream_bytes) == expected_message, cut


def test_what_a_thinking_model_that_calls_says() -> None:
    answer = format_whole([*ids_of(ANSWERS[0]), 3], reason=FinishReason.STOP)
    (choice,) = answer["choices"]
    message_fields = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message_fields["reasoning"], message_fields["reasoning_content"]) == ("\nLet me see.\n", "\nLet me see.\n")
    assert message_fields["content"] == "\n\nI ask."
    assert [call["function"] for call in message_fields["tool_calls"]] == [
        {"arguments": '{"zone": "é🙂"}', "name": "now"}
    ] * 2
    assert len({call["id"] for call in message_fields["tool_calls"]}) == 2
    assert {call["type"] for call in message_fields["tool_calls"]} == {"function"}
    count = len(ids_of("\nLet me see.\n"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


def test_messages_have_nothing_that_was_not_asked_for() -> None:
    plain = ModelLimits(max_model_len=2000, vocab_size=4096)
    answer = format_whole([*ids_of("<think>x</think>" + CALL), 3], reason=FinishReason.STOP, limits=plain)
    (choice,) = answer["choices"]
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert choice["message"]["content"] == "<think>x</think>" + CALL
    assert choice["finish_reason"] == "stop"
    assert "completion_tokens_details" not in answer["usage"]
    only_thought = format_whole(ids_of("<think>x"))["choices"][0]["message"]
    assert (only_thought["content"], only_thought["reasoning"]) == (None, "x")


@pytest.mark.parametrize(
    "choice", ["none", None, "auto", "required", {"type": "function", "function": {"name": "now"}}]
)
def test_tool_choice_decides_whether_calls_are_read(choice: Any) -> None:
    message_fields = message(format_whole([*ids_of(CALL), 3], reason=FinishReason.STOP, tool_choice=choice))
    if choice == "none":
        assert message_fields["content"] == CALL
        assert message_fields["finish_reason"] == "stop"
    else:
        assert len(message_fields["tool_calls"]) == 1
        assert message_fields["finish_reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")
    assert message(format_whole(ids_of(CALL), tools=None))["content"] == CALL


def test_one_call_is_told_where_more_were_not_wanted() -> None:
    for stream in (False, True):
        body = {"parallel_tool_calls": False, "stream": stream}
        _, answer, stream_bytes = generate(ids_of(CALL + CALL + "."), [3, 9, 30], body)
        message_fields = join_stream(stream_bytes) if stream else message(json.loads(answer.format_response()))
        assert len(message_fields["tool_calls"]) == 1
        assert message_fields["content"] == "."


def test_thoughts_may_be_left_out_and_their_tokens_with_them() -> None:
    body = {"include_reasoning": False, "return_token_ids": True, "logprobs": True}
    answer = format_whole(ids_of("<think>secret</think>told"), **body)
    assert "secret" not in json.dumps(answer)
    assert message(answer)["content"] == "told"
    _, _, stream_bytes = generate(ids_of("<think>secret</think>told"), [2, 4], {**body, "stream": True})
    assert b"secret" not in stream_bytes
    assert b'token_ids":[' not in stream_bytes.replace(b"prompt_token_ids", b"")
    assert join_stream(stream_bytes)["content"] == "told"


def test_stop_strings_are_looked_for_after_the_thought() -> None:
    text = "<think>a stop here</think>no stop here"
    for stream in (False, True):
        generation, answer, stream_bytes = generate(ids_of(text), list(range(40)), {"stop": ["stop"], "stream": stream})
        message_fields = join_stream(stream_bytes) if stream else message(json.loads(answer.format_response()))
        assert (message_fields["reasoning"], message_fields["content"], message_fields["finish_reason"]) == (
            "a stop here",
            "no ",
            "stop",
        )
        assert generation.choices[0].stop_reason == "stop"
    assert message(format_whole(ids_of(CALL), stop=["name"]))["content"] == '<tool_call>\n{"'


@pytest.mark.parametrize("stop", ["zone", '"', "}", "\n", "</tool_call>"])
def test_no_stop_string_leaves_half_a_call(stop: str) -> None:
    tool_choices: list[Any] = ["required", {"type": "function", "function": {"name": "now"}}]
    inside = [] if stop in ('"', "\n") else ["auto"]  # these end an answer where it is not known yet to be a call
    for choice in [*tool_choices, *inside]:
        for cuts in ((), range(1, len(ids_of(CALL)))):
            call_message = message(format_whole(ids_of(CALL), list(cuts), stop=[stop], tool_choice=choice))
            assert call_message["tool_calls"] == [{"name": "now", "arguments": '{"zone": "é🙂"}'}], choice
    stopped_message = message(format_whole(ids_of(CALL + " and zone x"), stop=["zone"]))
    assert (stopped_message["content"], stopped_message["finish_reason"]) == (" and ", "tool_calls")


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_an_answer_goes_on_from_any_token(data: st.DataObject) -> None:
    """What a choice says that was told the first tokens is what another one says after them."""
    scraps = ["<think>", "</think>", CALL, "<tool_call>", '{"name": "now", ', "é🙂", " ", "\n", "stop", "s", "x"]
    ids = ids_of("".join(data.draw(st.lists(st.sampled_from(scraps), min_size=1, max_size=8))))
    at = data.draw(st.integers(0, len(ids) - 1))
    stops = ("stop",) if data.draw(st.booleans()) else ()
    plan = OutputParserConfig(
        reasoning_format="qwen3",
        initial_state=data.draw(st.sampled_from(["before", "inside", "after"])),
        call_format="hermes",
    )

    def choice() -> Choice:
        return Choice(0, SamplingParams(stop=stops), FACTORY, keeps_text=True, parser_config=plan)

    def push_tokens(new_choice: Choice, tokens: list[int]) -> tuple[Any, ...]:
        for output in outputs(tokens, list(range(1, len(tokens))), FinishReason.LENGTH):
            if new_choice.finish_reason is None:
                new_choice.push(output)
        return (
            new_choice.text, new_choice.reasoning, [(c.name, c.arguments) for c in new_choice.tool_calls],
            new_choice.finish_reason, new_choice.completion_tokens, new_choice.reasoning_tokens,
        )  # fmt: skip

    first = choice()
    for token in ids[:at]:
        if first.finish_reason is None:
            first.push(SequenceOutput(request_id="r", token_ids=[token]))
    if first.finish_reason is not None:
        return
    first_part = (first.text, first.reasoning, [[c.name, c.arguments] for c in first.tool_calls])
    second = choice()
    second.keeps_text = False
    second.resume(ids[:at])
    text, reasoning, calls = first_part
    for output in outputs(ids[at:], list(range(1, len(ids) - at)), FinishReason.LENGTH):
        if second.finish_reason is None:
            piece = second.push(output)
            text, reasoning = text + piece.text, reasoning + piece.reasoning
            for call in piece.tool_calls:
                if call.name is not None:
                    assert call.index == len(calls)
                    calls.append([call.name, ""])
                calls[call.index][1] += call.arguments
    assert (
        text, reasoning, [tuple(call) for call in calls], second.finish_reason, second.completion_tokens,
        second.reasoning_tokens,
    ) == push_tokens(choice(), ids)  # fmt: skip


def test_marks_that_are_special_tokens_are_read_and_others_stay_hidden() -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    text = "<s>[THINK]why[/THINK]Well[TOOL_CALLS]now[ARGS]{}<s>"
    for decoder in (decoders.ByteLevel(), decoders.Fuse()):
        tokenizer.decoder = decoder
        factory = DetokenizerFactory(tokenizer)
        ids = tokenizer.encode(text).ids
        plan = OutputParserConfig(reasoning_format="mistral", initial_state="before", call_format="mistral")
        for skips in (True, False):
            new_choice = Choice(
                0, SamplingParams(), factory, keeps_text=True, skip_special_tokens=skips, parser_config=plan
            )
            for output in outputs(ids, list(range(1, len(ids))), FinishReason.LENGTH):
                new_choice.push(output)
            assert [(call.name, call.arguments) for call in new_choice.tool_calls] == [("now", "{}")]
            assert [len(call.id or "") for call in new_choice.tool_calls] == [9]
            if skips:
                assert (new_choice.reasoning, new_choice.text) == ("why", "Well")
            else:
                assert new_choice.text == "<s>[THINK]why[/THINK]Well<s>"
        plain = Choice(0, SamplingParams(), factory, keeps_text=True)
        plain.push(outputs(ids, [], FinishReason.LENGTH)[0])
        assert plain.text == "whyWellnow{}"


# ---------------------------------------------------------------- thoughts


@pytest.mark.parametrize(
    ("name", "prompt", "continued_text", "state"),
    [
        ("qwen3", "<|im_start|>assistant\n", None, "before"), ("qwen3", "assistant\n<think>\n", None, "inside"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None, "after"),
        ("deepseek_r1", "<|Assistant|>", None, "inside"),
        ("deepseek_r1", "<think>\n\n</think>", None, "after"), ("qwen3", "x", "<think>so", "inside"),
        ("qwen3", "x", "<think>so</think>and", "after"), ("qwen3", "x", "and", "after"), ("qwen3", "x", "", "before"),
        ("qwen3", "What is <think>?<|im_end|>\nassistant\n", None, "before"), ("deepseek_r1", "x", "so", "inside"),
    ],
)  # fmt: skip
def test_where_an_answer_begins(name: str, prompt: str, continued_text: str | None, state: str) -> None:
    assert initial_reasoning_state(REASONING_FORMATS[name], prompt, continued_text) == state


@pytest.mark.parametrize(
    ("name", "state", "text", "reasoning", "answer_text"),
    [
        ("qwen3", "before", "<think>a</think>b", "a", "b"),
        ("qwen3", "before", "b<think>a</think>", "", "b<think>a</think>"),
        ("qwen3", "before", "\n" * 65 + "<think>", "", "\n" * 65 + "<think>"),
        ("qwen3", "before", "<thi", "", "<thi"),
        ("qwen3", "inside", "a</think>b</think>", "a", "b</think>"),
        ("qwen3", "inside", "a<tool_call>b", "a", "<tool_call>b"),
        ("qwen3", "inside", "</thi", "</thi", ""),
        ("qwen3", "inside", "\n<think>a<think></think>b", "a<think>", "b"),
        ("qwen3", "after", "</think>", "", "</think>"),
        ("deepseek_r1", "inside", "a<tool_call>b", "a<tool_call>b", ""),
        ("deepseek_r1", "inside", "<think>a</think>b", "a", "b"),
        ("granite", "before", "Here's my thought process: a Here is my response: b", " a ", " b"),
        ("granite", "before", "Here we go", "", "Here we go"),
        ("mistral", "before", "\n[THINK]a[/THINK]", "a", ""),
    ],
)  # fmt: skip
def test_thoughts_wherever_the_text_is_cut(name: str, state: Any, text: str, reasoning: str, answer_text: str) -> None:
    config = OutputParserConfig(reasoning_format=name, initial_state=state, call_format="hermes")
    for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(len(text) + 1))):
        parser = OutputParser(config, SamplingParams())
        for piece in pieces:
            parser.push(piece, may_stop=True)
        parser.finish()
        delta = parser.build_delta()
        assert (delta.reasoning, delta.text, delta.tool_calls) == (reasoning, answer_text, [])


def test_the_token_that_ends_a_thought() -> None:
    tokenizer = PromptTokenizer.load(cached_tokenizer())

    def find_token(name: str, state: Any) -> int | None:
        return reasoning_token_ids(OutputParserConfig(reasoning_format=name, initial_state=state), tokenizer)[1]

    assert find_token("qwen3", "inside") == find_token("qwen3", "before") == TINY.token_to_id("</think>")
    assert find_token("qwen3", "after") is None
    assert find_token("granite", "inside") is None


def test_parsers_are_chosen_by_flag_or_by_template() -> None:
    qwen = ChatTemplate("{{ '<think>' }}<tool_call>\n{\"name\"")
    assert resolve_formats("auto", "auto", qwen) == ("hermes", "qwen3")
    assert resolve_formats("none", "none", qwen) == (None, None)
    assert resolve_formats("pythonic", "deepseek_r1", qwen) == ("pythonic", "deepseek_r1")
    assert resolve_formats("auto", "auto", None) == (None, None)
    assert resolve_formats("auto", "auto", ChatTemplate({"rag": "<think>"})) == (None, None)
    assert resolve_formats("auto", "auto", ChatTemplate("{{ x.split('</think>') }}")) == (None, "deepseek_r1")
    assert {"auto", "none", *CALL_FORMATS} == set(get_args(ToolCallParserName))
    assert {"auto", "none", *REASONING_FORMATS} == set(get_args(ReasoningParserName))
