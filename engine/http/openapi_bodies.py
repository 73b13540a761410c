"""The schemas of request bodies as this engine serves them: narrower than the structs that read them.

The structs accept every field of OpenAI's and vLLM's bodies so that an error can name it; `prompts.support` and the
limits of `openai_params` then refuse some. Here those refusals become schema. What joins two fields (`top_logprobs`
needs `logprobs`) stays unsaid.
"""

from __future__ import annotations

from typing import Any

from prompts.schemas import MAX_LOGPROBS, MAX_N, MAX_STOPS

_NULL = {"type": "null"}
_NONEMPTY = {"type": "string", "minLength": 1}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _at_most(maximum: int, minimum: int = 0) -> dict[str, Any]:
    return _or_null({"type": "integer", "minimum": minimum, "maximum": maximum})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        _NONEMPTY,
        {"type": "array", "items": _NONEMPTY, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, _NULL]},
        "tool_calls": _or_null({"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}),
    },
    "required": ["role"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "description": {}, "parameters": {}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGES = {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1}
_TOOLS = _or_null({"type": "array", "items": {"$ref": "#/components/schemas/Tool"}})

EXTRA_COMPONENTS = {"Message": _MESSAGE, "Tool": _TOOL, "ToolCall": _TOOL_CALL}

_COMMON: dict[str, dict[str, Any]] = {
    "n": _at_most(MAX_N, 1),
    "best_of": {**_NULL, "description": "Accepted where it equals n."},
    "use_beam_search": {"enum": [False, None]},
    "stop": _or_null({"anyOf": [_NONEMPTY, {"type": "array", "items": _NONEMPTY, "maxItems": MAX_STOPS}]}),
    "prompt_logprobs": _at_most(MAX_LOGPROBS),
    "response_format": _or_null({"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
         "bad_words", "logits_processors"),
        _NULL,
    ),
}  # fmt: skip

NARROWER: dict[str, dict[str, dict[str, Any]]] = {
    "ChatRequest": {
        **_COMMON,
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "tool_choice": {"enum": ["none", "auto", None]},
        "chat_template": {**_NULL, "description": "Only the server's own, or its --chat-template."},
        "max_tokens": _or_null({"type": "integer", "minimum": 1}),
        "max_completion_tokens": _or_null({"type": "integer", "minimum": 1}),
        "top_logprobs": _at_most(MAX_LOGPROBS),
    },
    "CompletionRequest": {
        **_COMMON,
        "prompt": _PROMPT,
        "logprobs": _at_most(MAX_LOGPROBS),
        "suffix": {"enum": ["", None]},
        "prompt_embeds": _NULL,
    },
    "TokenizeChat": {"messages": _MESSAGES, "tools": _TOOLS},
}
"""Component -> property -> schema that replaces the struct's."""


def narrow(components: dict[str, Any]) -> dict[str, Any]:
    """The components with the properties of NARROWER replaced and those they refer to added."""
    narrowed = {**components, **EXTRA_COMPONENTS}
    for name, properties in NARROWER.items():
        component = components[name]
        unknown = set(properties) - set(component["properties"])
        assert not unknown, f"{name} has no {unknown}"
        narrowed[name] = {**component, "properties": {**component["properties"], **properties}}
    return narrowed
