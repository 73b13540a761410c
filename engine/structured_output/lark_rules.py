"""The rules of a grammar in Lark, and the notation of texts, patterns and JSON schemas in it. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from prompts.chat_completions import Json

ANY_TEXT = "/(?s:.*)/"
"""Pattern of any text."""


class GrammarRules:
    """Collects the rules and terminals of one Lark grammar, for structured output, and gives them names."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: ids of tokens that the grammar must use for their texts, such as "<tool_call>", by text."""
        self.lines: list[str] = []
        self._tokens = tokens
        texts = sorted(tokens, key=len, reverse=True)
        self._token_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def add_rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def add_terminal(self, body: str) -> str:
        """Add a terminal, and return its name."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def write_text(self, text: str) -> str:
        """Return an expression that matches a text. "a<think>" becomes `"a" <[7]>` if <think> is the token 7."""
        parts = []
        text_start = 0
        token_matches = () if self._token_pattern is None else self._token_pattern.finditer(text)
        for match in token_matches:
            parts += [quote(text[text_start : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            text_start = match.end()
        parts.append(quote(text[text_start:]))
        empty_text = '""'
        return " ".join(part for part in parts if part != empty_text) or empty_text


def json_directive(schema: Json, options: Mapping[str, Any]) -> str:
    """Return an expression of a schema (an object or a boolean). Our options replace options in the client's schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": dict(options)}
    return "%json " + json.dumps(schema)


def slash_regex(pattern: str) -> str:
    """Return a regular expression between slashes."""
    return "/" + re.sub(r"\\.|/|\n", lambda match: _SLASH_ESCAPES.get(match[0], match[0]), pattern, flags=re.S) + "/"


_SLASH_ESCAPES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def escape_literal(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return slash_regex(re.escape(text))[1:-1]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
