"""What tests/live/test_engine_hostile.py sends: requests, by the part of the engine that they aim at."""

from __future__ import annotations

import copy
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.load import post_request

from prompts import ChatRequest, CompletionRequest
from prompts.anthropic import CountRequest, MessagesRequest
from prompts.responses import ResponsesRequest

MESSAGES_PATH, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
SHORT: dict[str, Any] = {"max_tokens": 2}
MESSAGES = [{"role": "user", "content": "hello"}]
OTHER_IDS = (-5, -1, 10**5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 10**30)
"""Outside of every small vocabulary."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 20, 21, 128, 129, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30,
    -(10**30), 10**300, 0.5, -0.5, 1e-300, 1e308, -1e308, "", "x", "\x00", "🙂" * 300, "y" * 100_000, [], [[]], [None],
    [0], [-1], [10**30], ["a"] * 2000, [1] * 5000, [{}], {}, {"a": 1}, {"1": 1}, {"-1": 1}, {str(10**30): 1},
    {"1": 1e308}, {"type": "x"}, {"type": "text"}, {"include_usage": 10**30},
)  # fmt: skip
"""Of every JSON type: absurd, at a bound and just beyond."""


STRUCTS: dict[str, Any] = {
    CHAT: ChatRequest, COMPLETION: CompletionRequest, MESSAGES_PATH: MessagesRequest, COUNT: CountRequest,
    RESPONSES: ResponsesRequest,
}  # fmt: skip
STARTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, **SHORT}, COMPLETION: {"prompt": "hello", **SHORT},
    MESSAGES_PATH: {"messages": MESSAGES, **SHORT}, COUNT: {"messages": MESSAGES},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
WHOLES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {
        "messages": [{"role": "user", "name": "n", "content": [{"type": "text", "text": "x"}]},
                     {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "c1", "content": "y"}],
        "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }),
    (CHAT, {"response_format": {"type": "json_schema",
                                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
    (COMPLETION, {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}),
    (MESSAGES_PATH, {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                     {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                                       {"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "is_error": False,
                                                   "content": [{"type": "text", "text": "y"}]}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }),
    (RESPONSES, {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                  {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                  {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c1", "output": "y"}],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
    }),
)  # fmt: skip
"""Bodies in which every place gets every value."""


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    request: bytes
    disconnect_s: float | None = None
    """After so long the client goes away."""
    is_valid: bool = False
    """It is to be answered: what others change of it is what is wrong with them."""


def all_cases() -> list[Case]:
    groups = (
        fields,
        nested_values,
        grammars,
        token_ids,
        many_samples,
        bodies,
        templates,
        detokenizing,
        stored_responses,
        disconnects,
    )
    return [case for group in groups for case in group()]


def _json(group: str, name: str, path: str, body: dict[str, Any], leaves_s: float | None = None) -> Case:
    return Case(group, name, post_request(path, body), leaves_s)


def fields() -> Iterator[Case]:
    """Every field of every body with every value."""
    for path, struct in STRUCTS.items():
        for name in struct.__struct_fields__:
            for number, value in enumerate(VALUES):
                case_name = f"{path}: {name} = {value!r:.60}"
                yield _json("fields", case_name, path, {**STARTS[path], name: value})
                if number % 5 == 0 and path != COUNT:
                    yield _json("fields", f"{case_name}, streamed", path, {**STARTS[path], "stream": True, name: value})


def nested_values() -> Iterator[Case]:
    """Every value at every place inside of messages, tools, choices and formats."""
    for path, example in WHOLES:
        yield Case("inside", f"{path}: as it is", post_request(path, {**STARTS[path], **example}), is_valid=True)
        for place in _places(example):
            for value in VALUES:
                body: Any = copy.deepcopy(example)
                parent = body
                for key in place[:-1]:
                    parent = parent[key]
                parent[place[-1]] = value
                yield _json("inside", f"{path}: {place} = {value!r:.60}", path, {**STARTS[path], **body})


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def grammars() -> Iterator[Case]:
    """What an answer has to match, in every API that can say so: absurd, endless, contradictory."""
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    schemas: tuple[Any, ...] = (
        {}, {"type": "x"}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:9/x"}, {"allOf": [{"$ref": "#"}]}, deep,
        {"enum": []}, {"enum": ["x" * 100_000]}, {"enum": list(range(20_000))}, {"not": {}}, {"type": []},
        {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "(" * 5_000}, {"minItems": 10**30},
        {"type": "string", "pattern": "a{1000000}"}, {"type": "string", "minLength": 10**9, "maxLength": 1},
        {"type": "array", "minItems": 10**9}, {"type": "number", "multipleOf": 0}, {"minimum": 10**300},
        {"type": "object", "properties": {str(i): {} for i in range(5_000)}}, {"anyOf": [{"$ref": "#"}] * 3_000},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, [], None, 10**30,
    )  # fmt: skip
    for number, schema in enumerate(schemas):
        named_schema = {"name": "f", "schema": schema}
        function = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        flat = {"type": "function", "name": "f", "parameters": schema, "strict": True}
        for name, path, body in (
            ("response_format", CHAT, {"response_format": {"type": "json_schema", "json_schema": named_schema}}),
            ("forced tool", CHAT, {"tools": [function], "tool_choice": "required"}),
            ("structured_outputs", COMPLETION, {"structured_outputs": {"json": schema}}),
            ("output_config", MESSAGES_PATH, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
            (
                "tools",
                MESSAGES_PATH,
                {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}},
            ),
            ("text", RESPONSES, {"text": {"format": {"type": "json_schema", **named_schema}}}),
            ("tools", RESPONSES, {"tools": [flat], "tool_choice": "required"}),
        ):
            yield _json("grammars", f"{path}: {name}, schema {number}", path, {**STARTS[path], **body})
    for kind, values in {
        "regex": ("(a+)+b", "(" * 9_000, "a{1,1000000}", "[" + "\U0001f642" * 9_000 + "]", "", "(?<=x)y", "\x00"),
        "choice": ([], [""], ["x" * 100_000], ["a"] * 20_000, [1], [["a"]]),
        "grammar": ("start: start start", "start: ", "x", "start: /(/", "start: a\na: b\nb: a", 'start: "a"' * 5_000),
    }.items():
        for value in values:
            body = {**STARTS[COMPLETION], "structured_outputs": {kind: value}}
            yield _json("grammars", f"{kind} {value!r:.40}", COMPLETION, body)


def token_ids() -> Iterator[Case]:
    """Ids that no vocabulary has; with min_tokens the sampler forbids them, with a bias it adds to them."""
    for invalid_id in OTHER_IDS:
        for body in (
            {"prompt": [5, invalid_id]},
            {"prompt": [[5], [invalid_id, 5]]},
            {"prompt": [5], "stop_token_ids": [invalid_id]},
            {"prompt": [5], "stop_token_ids": [5, invalid_id], "min_tokens": 2},
            {"prompt": [5], "logit_bias": {str(invalid_id): 100}},
            {"prompt": [5], "allowed_token_ids": [invalid_id]},
            {"prompt": [5], "prompt_logprobs": 1, "stop_token_ids": [invalid_id], "min_tokens": 1},
        ):
            yield _json("token ids", json.dumps(body), COMPLETION, {**SHORT, **body})
        yield _json("token ids", f"detokenize {invalid_id}", DETOKENIZE, {"tokens": [invalid_id]})


def many_samples() -> Iterator[Case]:
    """As many samples as a request may have, and a number that does not fit on the way to the core."""
    for name, value in (("top_k", 10**30), ("priority", 10**30), ("logit_bias", {str(10**30): 1}), ("seed", 2**63 - 1)):
        for number in range(8):
            body = {"prompt": [number], "n": 128, "max_tokens": 1, name: value}
            yield _json("n = 128", f"{name}, {number}", COMPLETION, body)


def bodies() -> Iterator[Case]:
    def case(name: str, body: bytes, path: str = CHAT, encoding: str | None = None) -> Case:
        return Case(
            "bodies", name, post_request(path, body, {} if encoding is None else {"Content-Encoding": encoding})
        )

    plain = json.dumps({"messages": MESSAGES, **SHORT}).encode()
    deep = b"[" * 5_000 + b"]" * 5_000
    for encoding in ("gzip", "deflate", "br", "zstd", "x-unknown", "gzip, gzip"):
        yield case(f"not {encoding}", plain, encoding=encoding)
        yield case(f"not {encoding}, and empty", b"", encoding=encoding)
    compressed = gzip.compress(plain)
    yield case("half a gzip", compressed[: len(compressed) // 2], encoding="gzip")
    yield case("a gzip with a broken end", compressed[:-4] + b"\0\0\0\0", encoding="gzip")
    yield case("a gzip of gigabytes", gzip.compress(b" " * (1 << 28)), encoding="gzip")
    yield case("a deflate of gigabytes", zlib.compress(b"[" * (1 << 27)), encoding="deflate")
    for path in (CHAT, COMPLETION, TOKENIZE, DETOKENIZE):
        for name, body in (
            ("nothing", b""), ("half an object", b'{"messages":[{"role":"user"'), ("no UTF-8", b'{"model":"\xff\xfe"}'),
            ("deep arrays", b"[" * 100_000), ("an array", b"[]"), ("a number", b"7"), ("null", b"null"),
            ("many digits", b'{"prompt":"x","seed":%b}' % (b"9" * 10_000)),
            ("NaN", b'{"prompt":"x","temperature":NaN}'),
            ("a lone surrogate", b'{"prompt":"\\ud800"}'), ("two megabytes of brackets", b'{"x":' + b"[" * (1 << 21)),
            ("a million objects", b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}"),
            ("a million prompts", b'{"prompt":[' + b'"",' * 1_000_000 + b'""]}'),
            ("deep and unread", b'{"prompt":"x","never_heard_of":' + deep + b"}"),
        ):  # fmt: skip
            yield case(f"{path}: {name}", body, path)
    for place, message in {
        "arguments": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep.decode()}}]},
        "arguments of many digits": {"role": "assistant",
                                     "tool_calls": [{"function": {"name": "f", "arguments": "9" * 10_000}}]},
        "content": {"role": "user", "content": [{"type": "text", "text": deep.decode()}]},
    }.items():  # fmt: skip
        for path in (CHAT, TOKENIZE):
            yield _json("bodies", f"{path}: deep {place}", path, {"messages": [message, *MESSAGES], **SHORT})
    for depth in (100, 900, 990, 5_000):
        nested_object = b'{"a":' * depth + b"1" + b"}" * depth
        chat = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,%b}'
        tool = b'"tools":[{"function":{"name":"f","parameters":%b}}]' % nested_object
        yield case(f"tools {depth} deep", chat % tool)
        yield case(f"template arguments {depth} deep", chat % (b'"chat_template_kwargs":{"tools":%b}' % nested_object))


def templates() -> Iterator[Case]:
    """A request's own template, and arguments that shadow what the server's template uses."""
    loops = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"
    for name, template in {
        "nine million steps": loops, "twelve gigabytes": "{{ [[]] | tojson(indent=1000000000) }}",
        "a syntax error": "{% if",
        "a long string": "{{ 'x' * 1000000000 }}", "a big power": "{{ 9 ** 9 ** 9 }}", "empty": "",
    }.items():  # fmt: skip
        for path in (CHAT, TOKENIZE):
            body = {"messages": MESSAGES, "chat_template": template, **SHORT}
            yield _json("templates", f"{path}: {name}", path, body)
            kwargs = {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": template}, **SHORT}
            yield _json("templates", f"{path}: {name}, as an argument", path, kwargs)
    for name in (
        "messages",
        "namespace",
        "range",
        "raise_exception",
        "bos_token",
        "loop",
        "self",
        "tools",
        "documents",
    ):
        for value in (None, 10**30, [[]], {"a": {}}):
            body = {"messages": MESSAGES, "chat_template_kwargs": {name: value}, **SHORT}
            yield _json("templates", f"{name} = {value}", CHAT, body)


def detokenizing() -> Iterator[Case]:
    """Texts and stop strings that cost as much as any to put together."""
    for token in (0, 1, 2, 3, 200, 255):
        body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "logit_bias": {str(token): 100}, "stream": True}
        for stop in (None, ["a" * 256], [letter * 256 for letter in "abcdefghijklmnopqrstuvwxyz"], ["\ufffd" * 256]):
            yield _json("detokenizing", f"{token} for ever", COMPLETION, {**body, "stop": stop})


def stored_responses() -> Iterator[Case]:
    """Responses that are kept, and the names of some that are not."""
    for name in (
        "resp_x",
        "x" * 5_000,
        "..%2F..%2Fetc",
        "%00",
        "resp_%ff",
        "resp_1/cancel",
        "%20",
        "\u2603".encode().hex(),
    ):
        for method in ("GET", "DELETE", "POST"):
            line = f"{method} {RESPONSES}/{name}{'/cancel' if method == 'POST' else ''} HTTP/1.1\r\nHost: h\r\n\r\n"
            yield Case("stored", line[:60], line.encode())
        body = {**STARTS[RESPONSES], "previous_response_id": name}
        yield _json("stored", f"after {name:.40}", RESPONSES, body)
    yield _json("stored", "in the background", RESPONSES, {**STARTS[RESPONSES], "background": True})


def disconnects() -> Iterator[Case]:
    long = {"stream": True, "temperature": 1}
    for number in range(60):
        path = (CHAT, MESSAGES_PATH, RESPONSES)[number % 3]
        limits = {"max_output_tokens": 400} if path == RESPONSES else {"max_tokens": 400}
        words = "word " * (number * 7)
        prompt_fields = (
            {"input": words + "x"} if path == RESPONSES else {"messages": [{"role": "user", "content": words + "x"}]}
        )
        yield _json(
            "leaving",
            f"{path}, {number}",
            path,
            {**prompt_fields, **long, **limits},
            leaves_s=0.005 + number % 10 * 0.04,
        )
    for number in range(40):
        body = {"prompt": [number + 5] * (number * 17 + 1), "max_tokens": 400, "ignore_eos": True, "stream": True,
                "n": 1 + number % 3}  # fmt: skip
        yield _json("leaving", f"{number}", COMPLETION, body, leaves_s=0.01 + number % 8 * 0.05)
