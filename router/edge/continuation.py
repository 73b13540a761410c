"""A streamed answer that goes on at another worker when its own dies, as if nothing had happened.

Owns which answers can go on exactly, what the other worker is asked (`/v1/completions`, of our engine the same chat,
with the prompt and the tokens that were sent), and how its words become the rest of the first answer. tokens.py
notes the tokens. Refuses to know connections and who comes next. docs/operations.md tells users what goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prompts.schemas import MEDIA_PARTS
from router.decide.messages import RouteRequest
from router.decide.workers import BLOCKCAST, VLLM
from router.edge.tokens import Tokens
from router.http.headers import ProtocolError
from router.http.request import HttpRequest

_COMPLETIONS: Final = b"/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_DONE: Final = b"data: [DONE]\n\n"
NEW_TOKENS_MIN: Final = 32
"""Tokens that a worker must have added to another one's answer before a third goes on."""
_MODEL_DEFAULT: Final = 16
"""`max_tokens` of a completion that names none."""

# fmt: off
_ASKED_AGAIN = frozenset((
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "priority", "cache_salt", "user", "stream", "stream_options", "response_format",
    "structured_outputs",
))
_IN_THE_PROMPT = frozenset((
    "messages", "prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "documents", "add_special_tokens", "reasoning_effort", "truncate_prompt_tokens", "max_completion_tokens",
    "return_token_ids", "request_id", "metadata", "store",
))
"""Fields that have done their work when the first token comes."""
_OF_A_CHAT = frozenset((
    "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "continue_final_message",
    "max_completion_tokens",
))
"""Fields by which our engine reads the text of a chat's answer, or ends it."""
# fmt: on
_ODD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError, AttributeError)
"""What events of another form than that of these engines raise."""
_NOTHING = frozenset((b"null", b"false", b"[]", b"{}", b'""'))
_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields)
_MEDIA = tuple(f'"{part}"'.encode() for part in MEDIA_PARTS)


def continuation(request: HttpRequest) -> Continuation | None:
    """For a streamed request that could go on elsewhere; None for any other."""
    chat = request.path == _CHAT
    if request.is_http_1_0 or len(request.pieces) > 1:
        return None
    if not chat and request.path != _COMPLETIONS.decode():
        return None
    try:
        fields = _fields.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not all(_can_go_on(name, bytes(value), chat) for name, value in fields.items()):
        return None
    return Continuation(fields, request.body, chat) if bytes(fields.get("stream", b"")) == b"true" else None


def _can_go_on(name: str, value: bytes, chat: bool) -> bool:
    if name in ("n", "best_of"):
        return value in (b"1", b"null")
    if name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        return value.isdigit() or value == b"null"
    if name == "messages":
        return not any(part in value for part in _MEDIA)
    if name == "prompt":
        return value[:1] == b'"' or value[1:].lstrip()[:1].isdigit()
    if name == "stream_options":
        return b"continuous_usage_stats" not in value
    if value in _NOTHING or name in _ASKED_AGAIN or name in _IN_THE_PROMPT:
        return True
    return chat and name in _OF_A_CHAT


class Continuation:
    """What one answer needs to go on elsewhere."""

    __slots__ = (
        "_asks_ids", "_begins_anew", "_body", "_chat", "_engine", "_fields", "_sent", "_shape", "_tells_usage", "again",
        "tokens",
    )  # fmt: skip

    def __init__(self, fields: _Fields, body: bytes, chat: bool) -> None:
        self._fields, self._body, self._chat = fields, body, chat
        self._asks_ids = bytes(fields.get("return_token_ids", b"")) == b"true"
        self._tells_usage = b"true" in bytes(fields.get("stream_options", b""))
        self._engine = ""
        self._begins_anew = False
        self._shape: dict[str, Any] | None = None
        """Of the first answer's events, once another worker goes on."""
        self._sent = 0
        """Tokens that the client had when the last worker died."""
        self.again: bytes | None = None
        """What the other worker is asked."""
        self.tokens: Tokens | None = None
        """Notes the tokens of the answer under way; None where the worker does not tell them."""

    # Asking -------------------------------------------------------------------------------------------------------

    @property
    def _as_chat(self) -> bool:
        """The other worker is asked the same chat again."""
        return self._chat and self._engine == BLOCKCAST

    @property
    def path(self) -> bytes | None:
        """Where the body of `ask` is to be sent; None: where the client sent its own."""
        return None if self.again is None or self._as_chat else _COMPLETIONS

    @property
    def goes_on(self) -> bool:
        """A worker continues what another one began."""
        return self.again is not None

    def ask(self, engine: str) -> tuple[bytes] | None:
        """The body for a worker of this engine; None where it cannot go on with another one's answer."""
        if self.again is not None:
            return (self.again,) if engine == self._engine else None
        self._engine = engine
        self.tokens = Tokens(not self._asks_ids) if self._is_exact() else None
        if self.tokens is None or self._asks_ids:
            return (self._body,)
        if "return_token_ids" in self._fields:  # of one name said twice the last counts
            return (msgspec.json.encode({**self._fields, "return_token_ids": True}),)
        return (self._body.replace(b"{", b'{"return_token_ids":true,', 1),)

    def _is_exact(self) -> bool:
        """Whether this engine's answers go on exactly. Ours takes back all of its state; vLLM counts the tokens that
        were sent as a prompt, begins the seed's numbers and what the answer must match anew, looks for stop strings in
        the new text only, and reads no calls out of a completion."""
        if self._engine != VLLM:
            return self._engine == BLOCKCAST
        value = self._value
        return not (
            value("stop")
            or value("tools")
            or value("response_format")
            or value("structured_outputs")
            or value("presence_penalty")
            or value("frequency_penalty")
            or (value("seed") is not None and value("temperature") != 0)
        )

    def rest(self, route: RouteRequest, tokens_max: int | None) -> RouteRequest | None:
        """The worker died: what is to be routed now. None where the answer cannot go on. `tokens_max`: of the model.

        Changes nothing: `begin_rest` does, once there is a worker for it.
        """
        tokens = self.tokens
        if tokens is None or tokens.odd or tokens.finished or (tokens.parsed and self._engine != BLOCKCAST):
            return None
        if tokens.events == 0:  # the client has a head, and nothing of the answer: the whole of it, once
            return None if self._begins_anew else route
        prompt, answer = tokens.prompt, tokens.answer
        if self._engine == VLLM and tokens.spoken < len(answer):  # of the last ones the text is not complete
            if self._asks_ids:
                return None
            answer = answer[: tokens.spoken]
        if not prompt or (self._shape or _shape(tokens.last)) is None:
            return None
        if self._shape is not None and len(answer) < self._sent + NEW_TOKENS_MIN:
            return None  # it ended soon after it went on: this may be a request that kills its workers
        ids = prompt + answer
        if self._asked_for(ids, len(answer), tokens_max) is None:
            return None
        left = max(route.output_tokens_max - len(answer), 1) if route.output_tokens_max else 0
        least = max(route.output_tokens_min - len(answer), 0)
        return route.replace(
            token_ids=ids, prompt_tokens=len(ids), output_tokens_max=left, output_tokens_min=least, deadline_s=None
        )

    def begin_rest(self, rest: RouteRequest, tokens_max: int | None) -> None:
        """Another worker is asked next: what the client has not seen is forgotten."""
        tokens = self.tokens
        assert tokens is not None
        tokens.rewind(self._engine == VLLM)
        if tokens.events == 0:
            self._begins_anew = True
            return
        if self._shape is None:
            self._shape = _shape(tokens.last)
        ids, self._sent = rest.token_ids, len(tokens.answer)
        assert isinstance(ids, array)
        self.again = msgspec.json.encode(self._asked_for(ids, self._sent, tokens_max))

    def _asked_for(self, ids: array[int], answered: int, tokens_max: int | None) -> dict[str, Any] | None:
        """The body for the worker that goes on; None where it would not be exact."""
        if self._as_chat:
            kept = {name: value for name, value in self._fields.items() if name in _ASKED_AGAIN or name in _OF_A_CHAT}
            last = msgspec.json.decode(self._fields["messages"], type=list[msgspec.Raw])[-1:]
            told = {"prompt_token_ids": ids.tolist(), "answered_tokens": answered, "return_token_ids": True}
            return {**kept, "messages": last, **told}
        body: dict[str, Any] = {name: value for name, value in self._fields.items() if name in _ASKED_AGAIN}
        body |= {"prompt": ids.tolist(), "return_token_ids": True}
        limit = self._value("max_completion_tokens") if self._chat else None
        if limit is None:
            limit = self._value("max_tokens")
        if limit is None and not self._chat:
            limit = _MODEL_DEFAULT
        if self._engine == BLOCKCAST:
            return body | {"max_tokens": limit, "answered_tokens": answered}
        if limit is not None:
            limit -= answered
        elif tokens_max is not None:
            limit = tokens_max - len(ids)
        if limit is None or limit < 1:
            return None
        least = max((self._value("min_tokens") or 0) - answered, 0)
        return body | {"max_tokens": limit, "min_tokens": least}

    def _value(self, name: str) -> Any:
        raw = self._fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    @property
    def failed(self) -> bool:
        """The worker said so, in an event that is kept back."""
        return self.tokens is not None and self.tokens.failed

    @property
    def is_truncated(self) -> bool:
        """Whether an answer that ends now lacks its end."""
        return self.tokens is not None and self.tokens.is_truncated

    def release(self) -> bytes:
        """That event, where nobody goes on."""
        return self.tokens.release() if self.tokens is not None else b""

    # Answering ----------------------------------------------------------------------------------------------------

    def pass_on(self, content: bytes, *, ends: bool) -> bytes:
        """What the client gets for the next bytes of a worker's answer, which may be its last. Raises ProtocolError
        where it is no answer."""
        assert self.tokens is not None
        events = self.tokens.feed(content)
        if ends:
            events += self.tokens.finish()
        if self._shape is None or not events:
            return events
        try:
            return b"".join(map(self._as_first, filter(None, events.split(b"\n\n"))))
        except _ODD as error:
            self.tokens.odd = True  # what was noted of these events was not sent: nobody ends the answer by it
            raise ProtocolError(f"an event of the worker that went on: {error!r}") from error

    def _as_first(self, event: bytes) -> bytes:
        """An event of the worker that goes on, in the shape of the first one's."""
        if event.startswith(b":"):
            return event + b"\n\n"  # a comment, which keeps connections alive
        data = event.removeprefix(b"data:").strip()
        if data == _DONE[6:-2]:
            return _DONE
        told = msgspec.json.decode(data)
        assert self._shape is not None
        made, choices = dict(self._shape), []
        for choice in told["choices"]:
            delta, reason = _words(choice, self._as_chat), choice.get("finish_reason")
            if "role" in delta or (not any(delta.values()) and reason is None and not self._asks_ids):
                return b""
            one = dict(self._shape["choices"][0])
            one |= {"delta": delta} if self._chat else {"text": delta.get("content") or ""}
            if reason is not None:
                one |= {"finish_reason": reason, "stop_reason": choice.get("stop_reason")}
            if self._asks_ids:
                one["token_ids"] = choice.get("token_ids")
            choices.append(one)
        made["choices"] = choices
        if told.get("usage") is not None:
            made["usage"] = self._whole(told["usage"])
        return b"data: " + msgspec.json.encode(made) + b"\n\n"

    def _whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer."""
        made = dict(usage)
        if self._engine == VLLM:
            made["prompt_tokens"] -= self._sent
            made["completion_tokens"] += self._sent
        details = made.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            cached = min(details["cached_tokens"], made["prompt_tokens"])
            made["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return made

    def ending(self, *, usage_sent: bool) -> bytes | None:
        """What is missing of an answer whose last token has been sent; None where it has not."""
        tokens = self.tokens
        if tokens is None or tokens.odd or not tokens.finished:
            return None
        if not self._tells_usage or usage_sent:
            return _DONE
        prompt, answer = len(tokens.prompt), len(tokens.answer)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        shape = self._shape or _shape(tokens.last)
        if shape is None:
            return None
        made = {**shape, "choices": [], "usage": usage}
        return b"data: " + msgspec.json.encode(made) + b"\n\n" + _DONE


def _words(choice: dict[str, Any], as_chat: bool) -> dict[str, Any]:
    """What an event of the worker that goes on says, as a chat's. Some frontends leave out what is null or empty."""
    delta: dict[str, Any] = choice.get("delta") or {} if as_chat else {"content": choice.get("text") or ""}
    return delta


def _shape(event: bytes) -> dict[str, Any] | None:
    """An event without what is its own; None where it is none of one choice."""
    try:
        told: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data:").strip())
        told.pop("prompt_token_ids", None)
        (choice,) = told["choices"]
        for name in ("delta", "text", "token_ids", "prompt_token_ids"):
            choice.pop(name, None)
    except _ODD:
        return None
    return told
