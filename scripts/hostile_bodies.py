"""Bodies that cost more to read than to send. See scripts/hostile.

Every kind is made at a size in bytes; none is what a model of 8,192 tokens can answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable

USER = b'{"role":"user","content":"x"}'
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def _repeated(path: str, start: bytes, item: bytes, end: bytes) -> tuple[str, Callable[[int], bytes]]:
    """A list of equal items."""
    return path, lambda size: start + b",".join([item] * (size // (len(item) + 1))) + end


def _messages(item: bytes) -> tuple[str, Callable[[int], bytes]]:
    return _repeated(CHAT, b'{"model":"mock","messages":[', item, b"]}")


def _beside(key: bytes, item: bytes, end: bytes = b"]}") -> tuple[str, Callable[[int], bytes]]:
    start = b'{"model":"mock","messages":[' + USER + b'],"' + key + b'":['
    return _repeated(CHAT, start, item, end)


def _keys(size: int) -> bytes:
    many = ",".join(f'"k{i}":1' for i in range(size // 12))
    return b'{"model":"mock","messages":[' + USER + b'],"chat_template_kwargs":{' + many.encode() + b"}}"


def _tools(size: int) -> bytes:
    item = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    return _beside(b"tools", json.dumps(item).encode())[1](size)


def _deep(open_: bytes, close: bytes, most: int) -> tuple[str, Callable[[int], bytes]]:
    def make(size: int) -> bytes:
        depth = min(most, size // (len(open_) + len(close)))
        return b'{"model":"mock","messages":[' + USER + b'],"x":' + open_ * depth + b"1" + close * depth + b"}"

    return CHAT, make


def _letters(piece: str) -> tuple[str, Callable[[int], bytes]]:
    def make(size: int) -> bytes:
        content = piece * (size // len(piece.encode()))
        return json.dumps({"model": "mock", "messages": [{"role": "user", "content": content}]}).encode()

    return CHAT, make


BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "empty messages": _messages(b"{}"),
    "a million messages": _messages(USER),
    "messages that are numbers": _messages(b"1"),
    "messages that are lists": _messages(b"[]"),
    "empty content parts": (
        CHAT,
        lambda n: b'{"model":"mock","messages":[{"role":"user","content":[%b]}]}' % b",".join([b"{}"] * (n // 3)),
    ),
    "text parts of a letter": (
        CHAT,
        lambda n: (
            b'{"model":"mock","messages":[{"role":"user","content":[%b]}]}'
            % b",".join([b'{"type":"text","text":"x"}'] * (n // 27))
        ),
    ),
    "token ids": _repeated(TEXT, b'{"model":"mock","prompt":[', b"1", b"]}"),
    "token ids in lists": _repeated(TEXT, b'{"model":"mock","prompt":[', b"[1]", b"]}"),
    "many prompts": _repeated(TEXT, b'{"model":"mock","prompt":[', b'"x"', b"]}"),
    "keys of template arguments": (CHAT, _keys),
    "tools": (CHAT, _tools),
    "stop strings": _beside(b"stop", b'"x"'),
    "unknown lists": _beside(b"unknown", b"[[]]"),
    "one letter": _letters("a"),
    "one space": _letters(" "),
    "words": _letters("many different words make a text "),
    "special tokens": _letters("<|im_start|>"),
    "no ASCII": _letters("é漢🙂"),
    "escapes": (CHAT, lambda n: b'{"model":"mock","messages":[{"role":"user","content":"%b"}]}' % (b"\\n" * (n // 2))),
    "surrogates": (
        CHAT,
        lambda n: b'{"model":"mock","messages":[{"role":"user","content":"%b"}]}' % (b"\\ud83d\\ude42" * (n // 12)),
    ),
    "a long number": (TEXT, lambda n: b'{"model":"mock","prompt":[%b]}' % (b"9" * n)),
    "a long model name": (TEXT, lambda n: b'{"model":"%b","prompt":[1]}' % (b"m" * n)),
    "nested lists": _deep(b"[", b"]", 1 << 30),
    "nested lists, 1,200 deep": _deep(b"[", b"]", 1200),
    "nested objects": _deep(b'{"a":', b"}", 1 << 30),
    "white space": (TEXT, lambda n: b'{"model":"mock",' + b" " * n + b'"prompt":[1]}'),
    "an open string": (TEXT, lambda n: b'{"model":"mock","prompt":"' + b"x" * n),
    "zeros": (TEXT, lambda n: b"\x00" * n),
}
