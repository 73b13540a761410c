"""Bodies that cost more to read than to send. See scripts/hostile.

Every kind is made at a size in bytes; none is what a model of 8,192 tokens can answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = b'{"model":"mock",'
TALK = MODEL + b'"messages":[{"role":"user","content":"x"}],'
TOOL = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}'
BodyKind = tuple[str, Callable[[int], bytes]]


def _repeat_item(start: bytes, item: bytes, end: bytes, separator: bytes = b",", path: str | None = None) -> BodyKind:
    """So many equal items; to `path`, or the path that the field asks for."""
    path = path or (CHAT if b"messages" in start else TEXT)
    return path, lambda size: start + separator.join([item] * (size // (len(item) + len(separator)))) + end


def _repeat_in(path: str, start: bytes, item: bytes, end: bytes, separator: bytes = b",") -> BodyKind:
    """So many equal items in a field of a body that asks for one token."""
    return _repeat_item(MODEL + b'"max_tokens":1,' + start, item, end + b"}", separator, path)


def _messages(item: bytes) -> BodyKind:
    return _repeat_item(MODEL + b'"messages":[', item, b"]}")


def _parts(item: bytes) -> BodyKind:
    return _repeat_item(MODEL + b'"messages":[{"role":"user","content":[', item, b"]}]}")


def _content(text: str) -> BodyKind:
    return _repeat_item(
        MODEL + b'"messages":[{"role":"user","content":"', json.dumps(text)[1:-1].encode(), b'"}]}', b""
    )


def _nest_field(open_: bytes, close: bytes, depth_max: int = 1 << 30) -> BodyKind:
    def make(size: int) -> bytes:
        depth = min(depth_max, size // (len(open_) + len(close)))
        return TALK + b'"x":' + open_ * depth + b"1" + close * depth + b"}"

    return CHAT, make


def _template_arguments(size: int) -> bytes:
    return TALK + b'"chat_template_kwargs":{%b}}' % ",".join(f'"k{i}":1' for i in range(size // 12)).encode()


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_TEXT = b'{"type":"text","text":"x"}'
_RESULT = b'{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"x"}]}'
_CALL = b'{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}'
_MESSAGES = b'"messages":[{"role":"user","content":"x"}],'


def _nested_tool_results(size: int) -> bytes:
    open_ = b'{"type":"tool_result","tool_use_id":"1","content":['
    depth = size // (len(open_) + 2)
    return MODEL + b'"max_tokens":1,"messages":[{"role":"user","content":[' + open_ * depth + b"]}" * depth + b"]}]}"


BODIES: dict[str, BodyKind] = {
    "empty messages": _messages(b"{}"),
    "a million messages": _messages(b'{"role":"user","content":"x"}'),
    "messages that are numbers": _messages(b"1"),
    "messages that are lists": _messages(b"[]"),
    "empty content parts": _parts(b"{}"),
    "text parts of a letter": _parts(b'{"type":"text","text":"x"}'),
    "token ids": _repeat_item(MODEL + b'"prompt":[', b"1", b"]}"),
    "token ids in lists": _repeat_item(MODEL + b'"prompt":[', b"[1]", b"]}"),
    "many prompts": _repeat_item(MODEL + b'"prompt":[', b'"x"', b"]}"),
    "keys of template arguments": (CHAT, _template_arguments),
    "tools": _repeat_item(TALK + b'"tools":[', TOOL, b"]}"),
    "stop strings": _repeat_item(TALK + b'"stop":[', b'"x"', b"]}"),
    "unknown lists": _repeat_item(TALK + b'"unknown":[', b"[[]]", b"]}"),
    "one letter": _content("a"),
    "one space": _content(" "),
    "words": _content("many different words make a text "),
    "special tokens": _content("<|im_start|>"),
    "thoughts without an end": _content("<think>"),
    "no ASCII": _content("é漢🙂"),
    "escapes": _content("\n"),
    "surrogates": _content("🙂"),
    "blocks of Messages": _repeat_in(MESSAGES, b'"messages":[{"role":"user","content":[', b"{}", b"]}]"),
    "texts of Messages": _repeat_in(MESSAGES, b'"messages":[{"role":"user","content":[', _TEXT, b"]}]"),
    "tool results of Messages": _repeat_in(MESSAGES, b'"messages":[{"role":"user","content":[', _RESULT, b"]}]"),
    "tool results in tool results": (MESSAGES, _nested_tool_results),
    "turns of Messages": _repeat_in(MESSAGES, b'"messages":[', b'{"role":"user","content":"x"}', b"]"),
    "tools of Messages": _repeat_in(MESSAGES, _MESSAGES + b'"tools":[', b'{"name":"f","input_schema":{}}', b"]"),
    "system of Messages": _repeat_in(MESSAGES, _MESSAGES + b'"system":[', _TEXT, b"]"),
    "counted Messages": _repeat_in(
        "/v1/messages/count_tokens", b'"messages":[', b'{"role":"user","content":"x"}', b"]"
    ),
    "items of Responses": _repeat_in(RESPONSES, b'"input":[', b"{}", b"]"),
    "messages of Responses": _repeat_in(RESPONSES, b'"input":[', b'{"role":"user","content":"x"}', b"]"),
    "calls of Responses": _repeat_in(RESPONSES, b'"input":[', _CALL, b"]"),
    "tools of Responses": _repeat_in(RESPONSES, b'"input":"x","tools":[', b'{"type":"function","name":"f"}', b"]"),
    "instructions of Responses": _repeat_in(RESPONSES, b'"input":"x","instructions":"', b"a", b'"', b""),
    "a previous response": _repeat_in(RESPONSES, b'"input":"x","previous_response_id":"', b"r", b'"', b""),
    "a long number": _repeat_item(MODEL + b'"prompt":[', b"9", b"]}", b""),
    "a long model name": _repeat_item(b'{"prompt":[1],"model":"', b"m", b'"}', b""),
    "nested lists": _nest_field(b"[", b"]"),
    "nested lists, 1,200 deep": _nest_field(b"[", b"]", 1200),
    "nested objects": _nest_field(b'{"a":', b"}"),
    "white space": _repeat_item(MODEL, b" ", b'"prompt":[1]}', b""),
    "an open string": _repeat_item(MODEL + b'"prompt":"', b"x", b"", b""),
    "zeros": _repeat_item(b"", b"\x00", b"", b""),
}
