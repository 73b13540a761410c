"""Request bodies: what is accepted, and errors that name field, value and expectation."""

from __future__ import annotations

import json
import re

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.unsupported_params import check_supported
from prompts import RequestError, parse_chat, parse_completion, parse_routing
from prompts.chat_completions import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "hi"}


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


EVERYTHING_CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r", "extra": {"kept": True}},
    ],
    "temperature": 0, "top_p": 0.5, "frequency_penalty": -2, "presence_penalty": 2.0, "logit_bias": {"5": -100},
    "max_tokens": 0, "max_completion_tokens": 7, "n": 2, "seed": -5, "stop": ["a", "b"], "stream": True,
    "stream_options": {"include_usage": True, "unknown": 1}, "user": "u", "response_format": {"type": "text"},
    "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": [1],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "prompt_logprobs": 0, "priority": -3,
    "cache_salt": "s", "return_token_ids": True, "logprobs": True, "top_logprobs": 5, "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "parallel_tool_calls": False,
    "add_generation_prompt": True, "continue_final_message": False, "documents": [{"text": "d"}], "echo": False,
    "chat_template": None, "chat_template_kwargs": {"enable_thinking": False}, "add_special_tokens": False,
    "never_heard_of": [1, {"a": None}], "metadata": {"x": "y"}, "store": True, "service_tier": "auto",
}  # fmt: skip


def test_every_known_field_is_read_and_unknown_ones_are_ignored():
    request = parse_chat(json.dumps(EVERYTHING_CHAT).encode())
    for name in ChatRequest.__struct_fields__:
        if name in EVERYTHING_CHAT and name not in ("stream_options", "response_format", "logit_bias"):
            assert getattr(request, name) == EVERYTHING_CHAT[name], name
    assert request.logit_bias == {5: -100.0}
    assert request.stream_options.include_usage is True
    check_supported(request)


def test_nulls_read_as_absent():
    fields = {n: None for n in ChatRequest.__struct_fields__ if n != "messages"}
    assert chat(**fields) == parse_chat(json.dumps({"messages": [USER]}).encode())
    fields = {n: None for n in CompletionRequest.__struct_fields__ if n != "prompt"}
    assert completion(**fields) == parse_completion(b'{"prompt": "x"}')


@pytest.mark.parametrize("prompt", ["x", "", ["a", ""], [1, 2], [[1], [2, 3]]])
def test_prompt_forms(prompt):
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -0.1}, "temperature", "got -0.1, expected float >= 0.0"),
        ({"temperature": "hot"}, "temperature", 'got "hot", expected float'),
        ({"temperature": True}, "temperature", "got true"),
        ({"top_p": 0}, "top_p", "got 0, expected float > 0.0"),
        ({"top_p": 1.5}, "top_p", "expected float <= 1.0"),
        ({"top_k": -2}, "top_k", "got -2, expected int >= -1"),
        ({"min_p": 2}, "min_p", "expected float <= 1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "expected float >= 0.001"),
        ({"presence_penalty": 3}, "presence_penalty", "expected float <= 2.0"),
        ({"n": 0}, "n", "got 0, expected int >= 1"),
        ({"n": 1.5}, "n", "got 1.5, expected int"),
        ({"max_tokens": -1}, "max_tokens", "expected int >= 0"),
        ({"max_tokens": "16"}, "max_tokens", 'got "16", expected int'),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens (4)"),
        ({"seed": 2**63}, "seed", "expected int <="),
        ({"stop": 3}, "stop", "got 3"),
        ({"stop": ["a", 3]}, "stop[1]", "got 3, expected str"),
        ({"stop": [""]}, "stop[0]", "length >= 1"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", "got -2, expected int >= 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "a key is wrong"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "float <= 100.0"),
        ({"logit_bias": [1]}, "logit_bias", "got an array of 1 items"),
        ({"stream": "yes"}, "stream", 'got "yes", expected bool'),
        ({"stream_options": {"include_usage": True}}, "stream_options", '"stream": true'),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got 1"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            'got "xml", expected one of json_object, json_schema',
        ),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        ({"cache_salt": 5}, "cache_salt", "got 5, expected str"),
        ({"ignore_eos": 1}, "ignore_eos", "got 1, expected bool"),
        ({"model": 3}, "model", "got 3, expected str"),
        ({"priority": "high"}, "priority", 'got "high", expected int'),
    ],
)
def test_wrong_fields_are_named(fields, param, words):
    for make in (chat, completion):
        with pytest.raises(RequestError) as error_info:
            make(**fields)
        assert error_info.value.param == param
        assert words in error_info.value.message
        assert error_info.value.message.startswith(param)
        error = error_info.value.body()["error"]
        assert error == {
            "message": error_info.value.message, "type": "invalid_request_error", "param": param, "code": None
        }  # fmt: skip
        assert error_info.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "an empty array, expected at least one message"),
        ({"messages": "hi"}, "messages", 'got "hi", expected array'),
        ({"messages": ["hi"]}, "messages[0]", 'got "hi", expected object'),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role", "got null, expected a string"),
        ({"messages": [{"role": 3}]}, "messages[0].role", "got 3"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got 3"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "got 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
            "hologram",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls", "got 3"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "0 keys"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "got null"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "c"}}]},
            "tools[0].type",
            'got "custom", expected "function"',
        ),
        ({"tools": {}}, "tools", "expected array"),
        ({"top_logprobs": 3}, "top_logprobs", '"logprobs": true'),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs", '"logprobs": true'),
        ({"logprobs": 3}, "logprobs", "got 3, expected bool"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both"),
    ],
)
def test_wrong_chats_are_named(fields, param, words):
    with pytest.raises(RequestError) as error_info:
        chat(**fields)
    assert (error_info.value.param, words in error_info.value.message) == (param, True), error_info.value.message


@pytest.mark.parametrize("logprobs", [False, None, True])
def test_no_alternatives_need_no_logprobs(logprobs):
    assert chat(top_logprobs=0, logprobs=logprobs).top_logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (None, "prompt", "got null"),
        (5, "prompt", "got 5"),
        ({}, "prompt", "0 keys"),
        ([], "prompt", "not empty"),
        ([True], "prompt[0]", "got true"),
        ([1, "a"], "prompt[1]", 'got "a"'),
        (["a", 1], "prompt[1]", "a string"),
        ([[1], []], "prompt[1]", "an empty array"),
        ([[1], 2], "prompt[1]", "got 2"),
        ([[1], [-2]], "prompt[1][0]", "got -2"),
        ([2**32], "prompt[0]", "token id"),
        ([1.5], "prompt[0]", "got 1.5"),
    ],
)
def test_wrong_prompts_are_named(prompt, param, words):
    with pytest.raises(RequestError) as error_info:
        completion(prompt=prompt)
    assert (error_info.value.param, words in error_info.value.message) == (param, True), error_info.value.message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated after 0 bytes"),
        (b"{", "truncated after 1 bytes"),
        (b"[1]", "expected `object`, got `array`"),
        (b"null", "expected `object`, got `null`"),
        (b'{"messages": [} ]', "byte 14"),
        (b'{"model": "m", } ', "byte 15"),
        (b'{"model": "m", "user": "\xff\xfe"}', "invalid UTF-8 at byte 24"),
        (b'{"x": ' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"x": ' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_001, "nested too deeply"),
    ],
)
def test_what_is_not_json_is_said_with_its_position(data, words):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError) as error_info:
            parse(data)
        assert words in error_info.value.message
        assert error_info.value.param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"logits_processors": ["x"]}, "logits_processors"),
    ],
)
def test_unsupported_features_that_change_the_answer_are_refused(fields, param):
    for request in (chat(**fields), completion(**fields)):
        with pytest.raises(RequestError) as error_info:
            check_supported(request)
        assert error_info.value.param == param


def test_unsupported_by_one_endpoint():
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}],
    }
    for fields, param in (
        ({"messages": [USER, image]}, "messages[1].content[1].type"),
        ({"chat_template": "x"}, "chat_template"),
    ):
        with pytest.raises(RequestError) as error_info:
            check_supported(chat(**fields))
        assert error_info.value.param == param
    for fields, param in (({"suffix": "s"}, "suffix"), ({"prompt_embeds": "AA"}, "prompt_embeds")):
        with pytest.raises(RequestError) as error_info:
            check_supported(completion(**fields))
        assert error_info.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 1}, {"n": 3, "best_of": 3}, {"tool_choice": "none"}, {"bad_words": []}, {"use_beam_search": False},
     {"suffix": ""}, {"length_penalty": 1.0}, {"response_format": {"type": "text"}}],
)  # fmt: skip
def test_harmless_values_of_unsupported_fields_pass(fields):
    check_supported(chat(**fields))
    check_supported(completion(**fields))


# -- the router's view


def test_routing_reads_what_it_needs():
    body = EVERYTHING_CHAT | {"model": "m"}
    request = parse_routing("/v1/chat/completions", json.dumps(body).encode())
    assert (request.kind, request.model) == ("chat", "m")
    assert (request.stream, request.priority, request.cache_salt) == (True, -3, "s")
    for name in ("messages", "tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_special_tokens"):
        assert getattr(request, name) == body[name]
    request = parse_routing("/v1/completions", b'{"prompt": [1, 2], "max_tokens": 3}')
    assert (request.kind, request.prompt, request.messages) == ("completion", [1, 2], None)
    assert parse_routing("/v1/embeddings", b'{"input": "x", "model": "m"}').kind == "other"


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({"max_tokens": 9}, 0),
        ({"max_tokens": 9, "min_tokens": 4}, 4),
        ({"max_tokens": 9, "ignore_eos": True}, 9),
        ({"max_tokens": 9, "ignore_eos": True, "n": 3}, 27),
        ({"max_tokens": 9, "ignore_eos": True, "stop": []}, 9),
        ({"max_tokens": 9, "ignore_eos": True, "stop": "x", "min_tokens": 2}, 2),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [5]}, 0),
        ({"ignore_eos": True}, 0),
        ({"min_tokens": -5, "ignore_eos": "yes"}, 0),
    ],
)
def test_routing_sees_how_long_an_answer_will_be_at_least(fields, least):
    assert parse_routing("/v1/completions", json.dumps({"prompt": "x", **fields}).encode()).output_tokens_min == least


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True}, False),
        ({"logprobs": 5}, False),
        ({"logprobs": True, "prompt_logprobs": None}, False),
    ],
)
def test_routing_sees_that_the_whole_prompt_is_to_be_scored(fields, scores):
    """As vLLM 0.32: it reports no cached tokens for these."""
    assert parse_routing("/v1/completions", json.dumps({"prompt": "x", **fields}).encode()).scores_prompt is scores


@pytest.mark.parametrize(
    ("fields", "scores"),
    [({"echo": True}, True), ({"echo": True, "top_logprobs": None}, False), ({"top_logprobs": 3}, False)],
)
def test_routing_sees_that_a_chat_with_echo_may_be_scored(fields, scores):
    """vLLM 0.32 scores its prompt for the top logprobs, of which a chat wants none (0) unless it says null."""
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    for path in ("/v1/chat/completions", ""):  # the router knows the route already
        assert parse_routing(path, json.dumps(body).encode()).echoes_chat is scores
        assert not parse_routing(path, json.dumps(body).encode()).scores_prompt


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from([*ChatRequest.__struct_fields__, "prompt", "suffix", "unknown"])


def assert_clean(parse, data):
    """`parse` succeeds or raises a RequestError that can be sent."""
    error_info = None
    try:
        parse(data)
    except RequestError as error:
        error_info = error
    if error_info is not None:
        assert error_info.status == 400
        assert error_info.message
        json.dumps(error_info.body())


@given(st.dictionaries(_names, _json, max_size=6), st.sampled_from(["/v1/chat/completions", "/v1/completions", "/x"]))
@settings(max_examples=examples(400), deadline=None)
def test_routing_refuses_no_json_object_and_the_strict_parsers_raise_only_request_errors(body, path):
    data = json.dumps(body).encode()
    refusal = None
    try:
        request = parse_routing(path, data)
        assert request.messages is None or all(isinstance(m, dict) for m in request.messages)
    except RequestError as error:
        refusal = error.param
    assert refusal in (None, "priority"), "which the router bounds"
    for parse in (parse_chat, parse_completion):
        assert_clean(parse, data)


@given(st.binary(max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_bytes_that_are_no_json_are_one_error(data):
    for parse in (parse_chat, parse_completion, lambda d: parse_routing("/v1/completions", d)):
        assert_clean(parse, data)


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{", b'{"a": \xff}', b'{"x": ' + b"[" * 200_000])
def test_routing_refuses_what_is_no_json_object(data):
    with pytest.raises(RequestError, match="JSON"):
        parse_routing("/v1/completions", data)


def test_a_completion_without_a_prompt_says_so():
    with pytest.raises(RequestError, match="prompt: missing"):
        parse_completion(b'{"max_tokens": 3}')


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (rb"\ud800", rb"\ud800"), (rb"a\\\uD83D b", rb"\uD83D"), (rb"\ud83d\ude00 \ude00", rb"\ude00 at byte 24"),
        (rb"\udc00\ud800", rb"\udc00"), (rb"\ud83d\ud83d\ude00", rb"\ud83d"), (rb"\ud800A", rb"\ud800"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", [False, True])
def test_half_of_a_character_is_named(text: bytes, position: bytes, key: bool) -> None:
    data = b'{"%b":"a"}' % text if key else b'{"prompt":"%b"}' % text
    if key and b" at" in position:
        position = position.partition(b" ")[0]
    for parse in (parse_chat, parse_completion, lambda d: parse_routing("/v1/completions", d)):
        with pytest.raises(RequestError, match=re.escape(position.decode()) + ".* is half of a surrogate pair"):
            parse(data)


def test_what_only_looks_like_half_of_a_character_is_none() -> None:
    for text in (rb"\\ud800", rb"\ud83d\ude00", rb"\\\\udc00"):
        assert parse_routing("/v1/completions", b'{"prompt":"%b"}' % text).prompt is not None
        with pytest.raises(RequestError, match="truncated after"):
            parse_routing("/v1/completions", b'{"prompt":"%b' % text)
