"""`/openapi.json`: what the server takes and answers.

Answers are described by the structs that write them, bodies by those that read them, narrowed: these accept every
field of OpenAI's and vLLM's bodies so that an error can name it, and `engine.api.support` then refuses some. Here those
refusals are types. What joins two fields (`top_logprobs` needs `logprobs`) stays unsaid.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine.api.anthropic import MessageAnswer, TokenCount
from engine.api.bodies import ChatCompletion, Completion, DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from engine.api.responses import DeletedResponse, ResponseAnswer
from engine.config import __version__
from engine.http.routes import DetokenizeBody, TokenizeChat, TokenizePrompt
from events.sources import EventSource, GroupInfo
from prompts import ChatRequest, CompletionRequest, openapi
from prompts.anthropic import CountRequest, MessageBlock, MessagesRequest, OutputConfig, Role
from prompts.openapi import Operation
from prompts.responses import ResponsesRequest
from prompts.schemas import COUNT_MAX, TokenIdField

_NonEmpty = Annotated[str, Meta(min_length=1)]
_Positive = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
_Ids = Annotated[list[TokenIdField], Meta(min_length=1)]
_PROMPT_FORMS = (
    _NonEmpty,
    Annotated[list[_NonEmpty], Meta(min_length=1)],
    _Ids,
    Annotated[list[_Ids], Meta(min_length=1)],
)
_Prompt = Annotated[Any, Meta(extra_json_schema={"anyOf": [msgspec.json.schema(form) for form in _PROMPT_FORMS]})]
"""Put together by hand: msgspec has no type for lists that differ in their items."""


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class FunctionCall(Struct):
    name: str
    arguments: str | UnsetType = UNSET


class FunctionName(Struct):
    name: str


class ToolCall(Struct):
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(Struct):
    role: Annotated[str, Meta(min_length=1, examples=["system", "user", "assistant", "tool"])]
    content: str | list[TextPart | str] | None = None
    tool_calls: list[ToolCall] | None = None


class NamedTool(Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChatToolChoice(Struct):
    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | UnsetType = UNSET
    allowed_tools: AllowedTools | UnsetType = UNSET


class Function(Struct):
    name: str
    description: Any = None
    parameters: Any = None


class Tool(Struct):
    function: Function
    type: Literal["function"] | UnsetType = UNSET


class FunctionTool(Struct, tag_field="type", tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None


def _narrowed(body: type[Struct], types: dict[str, Any]) -> type[Struct]:
    """The body with other types of some of its fields, under the same name."""
    fields = msgspec.structs.fields(body)
    assert set(types) <= {field.name for field in fields}, (body, types)
    required = [(f.name, types.get(f.name, f.type)) for f in fields if f.required]
    rest = [(f.name, types.get(f.name, f.type), f.default) for f in fields if not f.required]
    return msgspec.defstruct(body.__name__, [*required, *rest], kw_only=True)


_MESSAGES = {"messages": Annotated[list[Message], Meta(min_length=1)], "tools": list[Tool] | None}


class PlainFormat(Struct):
    type: Literal["text", "json_object"]


_COMMON = {
    "response_format": Annotated[
        PlainFormat | None, Meta(description="Also json_schema and structural_tag, as far as they can be followed.")
    ],
    "best_of": Annotated[None, Meta(description="Accepted where it equals n.")],
    "truncate_prompt_tokens": Annotated[
        Annotated[int, Meta(ge=-1, le=COUNT_MAX)] | None,
        Meta(extra_json_schema={"not": {"const": 0}}, description="At most the context's length."),
    ],
    "use_beam_search": Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})],
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
         "bad_words", "logits_processors"),
        None,
    ),
}  # fmt: skip
_CHAT = _narrowed(
    ChatRequest,
    _COMMON
    | _MESSAGES
    | {
        "tool_choice": Literal["none", "auto", "required", None] | ChatToolChoice,
        "chat_template": Annotated[None, Meta(description="Only the server's own, or its --chat-template.")],
        "max_tokens": _Positive | None,
        "max_completion_tokens": _Positive | None,
        "answered_tokens": Annotated[Literal[0, None], Meta(description="Of prompt_token_ids: fewer than they are.")],
        "prompt_token_ids": Annotated[
            None, Meta(description="The prompt itself, in place of what messages would make.")
        ],
    },
)
_COMPLETION = _narrowed(
    CompletionRequest,
    _COMMON
    | {
        "answered_tokens": Annotated[
            Literal[0, None], Meta(description="Of one prompt of token ids: fewer than it has, and than max_tokens.")
        ],
        "prompt": _Prompt,
        "suffix": Literal["", None],
        "prompt_embeds": None,
    },
)
_TEXT_BLOCK = Literal["text", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"]
_BLOCK = _narrowed(
    MessageBlock, {"type": _TEXT_BLOCK, "content": str | list[TextPart] | None, "tool": None, "source": None}
)
_TURN = msgspec.defstruct("Turn", [("role", Role), ("content", str | Annotated[list[_BLOCK], Meta(min_length=1)])])  # type: ignore[valid-type]
_CHOICE = msgspec.defstruct("ToolChoice", [("type", Literal["auto", "none"])])
_MESSAGES_FIELDS: dict[str, Any] = {
    "messages": Annotated[list[_TURN], Meta(min_length=1)],  # type: ignore[valid-type]
    "tool_choice": _CHOICE | None,
    "output_config": _narrowed(OutputConfig, {"format": None}) | None,
}
_MESSAGES_BODY = _narrowed(MessagesRequest, _MESSAGES_FIELDS)
_COUNT_BODY = _narrowed(CountRequest, _MESSAGES_FIELDS)
_RESPONSE_BODY = _narrowed(
    ResponsesRequest,
    {"input": str, "previous_response_id": None, "background": Literal[False, None], "prompt": None,
     "conversation": None,
     "tools": Annotated[list[FunctionTool] | None, Meta()], "tool_choice": Literal["auto", "none", None], "text": None},
)  # fmt: skip
_TOKENIZE = (TokenizePrompt, _narrowed(TokenizeChat, _MESSAGES))

_READS = (400, 404, 408, 413)
_GENERATES = (*_READS, 429, 500, 503, 504)
_OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Continue a conversation", _CHAT, ChatCompletion, _GENERATES, True),
    Operation("post", "/v1/completions", "Continue texts or token ids", _COMPLETION, Completion, _GENERATES, True),
    Operation("post", "/v1/messages", "Anthropic's Messages", _MESSAGES_BODY, MessageAnswer, _GENERATES, True),
    Operation("post", "/v1/messages/count_tokens", "How long a prompt is", _COUNT_BODY, TokenCount, _READS),
    Operation("post", "/v1/responses", "OpenAI's Responses", _RESPONSE_BODY, ResponseAnswer, _GENERATES, True),
    Operation("get", "/v1/responses/{response_id}", "A stored response", None, ResponseAnswer, (404,)),
    Operation("delete", "/v1/responses/{response_id}", "Forget one", None, DeletedResponse, (404,)),
    Operation("post", "/v1/responses/{response_id}/cancel", "End one that runs in the background", None,
              ResponseAnswer, (400, 404)),
    Operation("get", "/v1/models", "The served names of the model", None, ModelList, ()),
    Operation("get", "/v1/models/{model}", "One served name", None, ModelCard, (404,)),
    Operation("post", "/tokenize", "Ids of a text or a conversation", _TOKENIZE, TokenizeAnswer, _READS),
    Operation("post", "/detokenize", "Text of token ids", DetokenizeBody, DetokenizeAnswer, _READS),
    Operation("post", "/reset_prefix_cache", "Forget all cached prefixes and announce it", None, None, (503,)),
    Operation("get", "/kv_event_sources", "Where the cache events are published", None, dict[str, EventSource], (),
              is_open=True),
    Operation("get", "/kv_cache/groups", "The cache's groups", None, list[GroupInfo], (), is_open=True),
    Operation("get", "/health", "200 while new requests are taken", None, None, (503,), is_open=True),
    Operation("get", "/ping", "As /health", None, None, (503,), is_open=True),
    Operation("post", "/ping", "As /health", None, None, (503,), is_open=True),
    Operation("get", "/version", "The engine's version", None, dict[str, str], (), is_open=True),
    Operation("get", "/metrics", "Prometheus metrics under vLLM's names", None, str, (), is_open=True),
    Operation("get", "/openapi.json", "This document", None, dict[str, Any], (), is_open=True),
)  # fmt: skip


def document(has_keys: bool, vocab_size: int = 2**32) -> bytes:
    """The document, encoded. `has_keys`: what is not open needs an API key. Token ids are below `vocab_size`."""
    made = openapi.document("Blockcast engine", __version__, _OPERATIONS, [{"key": []}] if has_keys else None)
    _bound_ids(made, vocab_size)
    return msgspec.json.encode(made)


def _bound_ids(part: Any, vocab_size: int) -> None:
    if isinstance(part, dict) and part.get("maximum") == 2**32 - 1:
        part["maximum"] = vocab_size - 1
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _bound_ids(inner, vocab_size)
