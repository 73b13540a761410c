"""What JSON Schema cannot say of the engine's bodies: rules that join two fields, and the length of its context.

Hooks of schemathesis for `fuzz_schemas`: bodies that break such a rule are not sent, as the document takes them for
valid and the engine has to refuse them (tests/live/test_engine_bodies.py holds that it does, and in which words).
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

CONTEXT_TOKENS = 768
"""Of the engine that is asked."""
VOCABULARY = 2048
_BODY_BYTES_MAX = CONTEXT_TOKENS - 128
"""No tokenizer of ours makes more tokens of a text than it has bytes."""
_COMPLETION_TOKENS = 16
"""A completion's `max_tokens` where it is not given, as in OpenAI's API."""


def contradicts(path: str, body: dict[str, Any]) -> bool:
    """Whether fields that are right each on its own do not go together."""

    def number(name: str, default: float) -> float:
        value = body.get(name)
        return value if isinstance(value, (int, float)) else default

    most = number("max_completion_tokens", number("max_tokens", 1e9))
    if path == "/v1/completions" and body.get("max_tokens") is None:
        most = _COMPLETION_TOKENS
    return (
        number("min_tokens", 0) > min(most, number("max_tokens", 1e9), number("max_output_tokens", 1e9), _room(body))
        or number("truncate_prompt_tokens", 0) > CONTEXT_TOKENS
        or (number("n", 1) > 1 and body.get("temperature") == 0)
        or (bool(body.get("stream_options")) and not body.get("stream"))
        or (body.get("top_logprobs") is not None and not body.get("logprobs"))
        or (bool(body.get("continue_final_message")) and bool(body.get("add_generation_prompt")))
        or any(key.isdecimal() and int(key) >= VOCABULARY for key in _object(body, "logit_bias"))
        or (path.startswith("/v1/messages") and not any(map(_says, _turns(body))))
    )


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def _room(body: dict[str, Any]) -> int:
    return CONTEXT_TOKENS - len(json.dumps(body, default=str))


def _turns(body: dict[str, Any]) -> list[Any]:
    turns = body.get("messages")
    return [body.get("system"), *turns] if isinstance(turns, list) else [body.get("system")]


def _says(turn: Any) -> bool:
    """Whether a turn of the Messages API makes a message; vLLM passes over what says nothing, and so do we."""
    if not isinstance(turn, dict):
        return bool(turn)
    content = turn.get("content")
    if not isinstance(content, list):
        return turn.get("role") != "system" or bool(content)
    texts = any(isinstance(block, dict) and block.get("text") for block in content)
    return texts or turn.get("role") == "assistant"


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    body = case.body
    if not isinstance(body, dict):
        return True
    if len(json.dumps(body, default=str, ensure_ascii=False).encode(errors="replace")) > _BODY_BYTES_MAX:
        return False
    return not contradicts(case.operation.path, body)
