"""What `hostile_engine` sends: requests, by the part of the engine that they aim at."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.load import post

from prompts import ChatRequest, CompletionRequest

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


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    request: bytes
    leaves_s: float | None = None
    """After so long the client goes away."""


def all_cases() -> list[Case]:
    return [*fields(), *token_ids(), *eight(), *bodies(), *templates(), *detokenizing(), *leaving()]


def _json(group: str, name: str, path: str, body: dict[str, Any], leaves_s: float | None = None) -> Case:
    return Case(group, name, post(path, body), leaves_s)


def fields() -> Iterator[Case]:
    """Every field of both bodies with every value."""
    for path, names in ((CHAT, ChatRequest.__struct_fields__), (COMPLETION, CompletionRequest.__struct_fields__)):
        start = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
        for name in names:
            for number, value in enumerate(VALUES):
                yield _json("fields", f"{name} = {value!r:.60}", path, {**start, **SHORT, name: value})
                if number % 5 == 0:
                    with_stream = {**start, **SHORT, "stream": True, name: value}
                    yield _json("fields", f"{name} = {value!r:.60}, streamed", path, with_stream)


def token_ids() -> Iterator[Case]:
    """Ids that no vocabulary has; with min_tokens the sampler forbids them, with a bias it adds to them."""
    for wrong in OTHER_IDS:
        for body in (
            {"prompt": [5, wrong]},
            {"prompt": [[5], [wrong, 5]]},
            {"prompt": [5], "stop_token_ids": [wrong]},
            {"prompt": [5], "stop_token_ids": [5, wrong], "min_tokens": 2},
            {"prompt": [5], "logit_bias": {str(wrong): 100}},
            {"prompt": [5], "allowed_token_ids": [wrong]},
            {"prompt": [5], "prompt_logprobs": 1, "stop_token_ids": [wrong], "min_tokens": 1},
        ):
            yield _json("token ids", json.dumps(body), COMPLETION, {**SHORT, **body})
        yield _json("token ids", f"detokenize {wrong}", DETOKENIZE, {"tokens": [wrong]})


def eight() -> Iterator[Case]:
    """As many samples as a request may have, and a number that does not fit on the way to the core."""
    for name, value in (("top_k", 10**30), ("priority", 10**30), ("logit_bias", {str(10**30): 1}), ("seed", 2**63 - 1)):
        for number in range(8):
            body = {"prompt": [number], "n": 128, "max_tokens": 1, name: value}
            yield _json("n = 128", f"{name}, {number}", COMPLETION, body)


def bodies() -> Iterator[Case]:
    def case(name: str, body: bytes, path: str = CHAT, encoding: str | None = None) -> Case:
        return Case("bodies", name, post(path, body, {} if encoding is None else {"Content-Encoding": encoding}))

    plain = json.dumps({"messages": MESSAGES, **SHORT}).encode()
    deep = b"[" * 5_000 + b"]" * 5_000
    for encoding in ("gzip", "deflate", "br", "zstd", "x-unknown", "gzip, gzip"):
        yield case(f"not {encoding}", plain, encoding=encoding)
        yield case(f"not {encoding}, and empty", b"", encoding=encoding)
    packed = gzip.compress(plain)
    yield case("half a gzip", packed[: len(packed) // 2], encoding="gzip")
    yield case("a gzip with a broken end", packed[:-4] + b"\0\0\0\0", encoding="gzip")
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
    for where, message in {
        "arguments": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep.decode()}}]},
        "arguments of many digits": {"role": "assistant",
                                     "tool_calls": [{"function": {"name": "f", "arguments": "9" * 10_000}}]},
        "content": {"role": "user", "content": [{"type": "text", "text": deep.decode()}]},
    }.items():  # fmt: skip
        for path in (CHAT, TOKENIZE):
            yield _json("bodies", f"{path}: deep {where}", path, {"messages": [message, *MESSAGES], **SHORT})
    for depth in (100, 900, 990, 5_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        chat = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,%b}'
        tool = b'"tools":[{"function":{"name":"f","parameters":%b}}]' % nested
        yield case(f"tools {depth} deep", chat % tool)
        yield case(f"template arguments {depth} deep", chat % (b'"chat_template_kwargs":{"tools":%b}' % nested))


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


def leaving() -> Iterator[Case]:
    for number in range(40):
        body = {"prompt": [number + 5] * (number * 17 + 1), "max_tokens": 400, "ignore_eos": True, "stream": True,
                "n": 1 + number % 3}  # fmt: skip
        yield _json("leaving", f"{number}", COMPLETION, body, leaves_s=0.01 + number % 8 * 0.05)
