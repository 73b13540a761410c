"""Continue a streamed answer at another worker when its worker dies, so that the client notices nothing.

Decides which answers can be continued exactly, and builds the request for the other worker. It is sent the prompt and
the tokens that the client has, to `/v1/completions`, or as a chat again where it is our engine. token_recorder.py
records these tokens, and event_converter.py converts the other worker's events to the form of the first worker's.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, Final

import msgspec

from router.decide.messages import RouteRequest
from router.decide.workers import BLOCKCAST, VLLM
from router.edge.event_converter import DONE_EVENT, MALFORMED_EVENT_ERRORS, EventConverter, make_event_template
from router.edge.token_recorder import TokenRecorder
from router.http.headers import ProtocolError
from router.http.request import HttpRequest

_COMPLETIONS_PATH: Final = b"/v1/completions"
_CHAT_PATH: Final = "/v1/chat/completions"
NEW_TOKENS_MIN: Final = 32
"""Tokens that a second worker must have added before a third one may continue the answer."""
_DEFAULT_TOKENS_MAX: Final = 16
"""Value of `max_tokens` in a completion that has none."""

# fmt: off
_RESENT_FIELDS = frozenset((
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "priority", "cache_salt", "user", "stream", "stream_options", "response_format",
    "structured_outputs",
))
_PROMPT_FIELDS = frozenset((
    "messages", "prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "documents", "add_special_tokens", "reasoning_effort", "truncate_prompt_tokens", "truncation_side",
    "max_completion_tokens", "return_token_ids", "request_id", "metadata", "store", "prompt_cache_key",
    "safety_identifier",
))
"""Fields that the request for the rest does not repeat: its token ids and its own limits stand for them."""
_CHAT_OUTPUT_FIELDS = frozenset((
    "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "continue_final_message",
    "max_completion_tokens",
))
"""Fields that our engine needs to parse or end the answer of a chat."""
# fmt: on
_USAGE_OPTION_PATTERN = re.compile(rb'"include_usage"\s*:\s*true')
_ONE = re.compile(rb"(1|null)\Z")
_COUNT = re.compile(rb"([0-9]+|null)\Z")
_CONTINUABLE_VALUES = {
    "n": _ONE,
    "best_of": _ONE,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": _COUNT,
    "prompt": re.compile(rb'"|\[\s*[0-9]'),  # not several prompts
    "stream_options": re.compile(rb"(?!.*continuous_usage_stats)", re.DOTALL),
}
"""Field -> values with which another worker can continue an answer."""
_EMPTY_VALUES = frozenset((b"null", b"false", b"[]", b"{}", b'""'))
_Fields = dict[str, msgspec.Raw]
_fields_decoder = msgspec.json.Decoder(_Fields)


def build_continuation(
    request: HttpRequest, fields: _Fields | None = None, tokens_max: int | None = None
) -> StreamContinuation | None:
    """Prepare a request so that another worker can continue its streamed answer if the first worker dies.

    Return None if that is impossible: for other APIs than chats and completions, for answers that are not streamed, and
    for fields that a second request cannot repeat. `fields`: fields of the body, if they were decoded already.
    `tokens_max`: longest context of the model, if it is known.
    """
    is_chat = request.path == _CHAT_PATH
    is_completion = request.path == _COMPLETIONS_PATH.decode()
    is_large = len(request.pieces) > 1
    if request.is_http_1_0 or is_large or not (is_chat or is_completion):
        return None
    if fields is None:
        try:
            fields = _fields_decoder.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
    is_stream = bytes(fields.get("stream", b"")) == b"true"
    if not is_stream or not all(_is_continuable_field(name, value, is_chat=is_chat) for name, value in fields.items()):
        return None
    return StreamContinuation(fields, request.body, is_chat=is_chat, tokens_max=tokens_max)


def _is_continuable_field(name: str, raw: msgspec.Raw, *, is_chat: bool) -> bool:
    """Return whether another worker can continue the answer to a request with this field. `raw`: its value as JSON.

    The second request repeats the field, or takes it into account. An unknown field could mean anything, so it prevents
    the continuation unless its value is empty.
    """
    if name in _CONTINUABLE_VALUES:
        return _CONTINUABLE_VALUES[name].match(raw) is not None
    if name in _RESENT_FIELDS or name in _PROMPT_FIELDS or (is_chat and name in _CHAT_OUTPUT_FIELDS):
        return True
    return bytes(raw) in _EMPTY_VALUES


class StreamContinuation:
    """Continues one streamed answer at another worker, if its first worker fails in the middle.

    It records the tokens of the answer, builds the request for the rest of it, and has the events of the second worker
    converted, so that the client sees one stream.
    """

    __slots__ = (
        "_body", "_converter", "_fields", "_has_restarted", "_is_chat", "_sent_token_count", "_tokens_max",
        "_wants_token_ids", "_wants_usage", "continuation_body", "engine", "path", "recorder",
    )  # fmt: skip

    def __init__(self, fields: _Fields, body: bytes, *, is_chat: bool, tokens_max: int | None = None) -> None:
        """Keep a client's request for a streamed answer, from which the request for the rest is built later.

        `fields`: top-level fields of the JSON `body`. `is_chat`: whether it is a chat, not a completion. `tokens_max`:
        longest context of the model, if it is known.
        """
        self._fields = fields
        self._body = body
        self._is_chat = is_chat
        self._tokens_max = tokens_max
        self._wants_token_ids = bytes(fields.get("return_token_ids", b"")) == b"true"
        self._wants_usage = _USAGE_OPTION_PATTERN.search(fields.get("stream_options", b"")) is not None

        # The first worker.
        self.engine = ""
        """Inference engine that the worker runs; empty before the request is sent."""
        self.recorder: TokenRecorder | None = None
        """Records the tokens of the answer; None if the worker does not report them."""

        # The worker that continues the answer.
        self._has_restarted = False
        """Whether the whole request was repeated, as the client had nothing of the answer."""
        self._converter: EventConverter | None = None
        """Converts the events of the worker that continues the answer; None before."""
        self._sent_token_count = 0
        """Tokens that the client had received when the last worker died."""
        self.continuation_body: bytes | None = None
        """Body of the request for the rest of the answer."""
        self.path: bytes | None = None
        """Path of that request; None for the path of the client's request."""

    # Asking -------------------------------------------------------------------------------------------------------

    @property
    def _continues_as_chat(self) -> bool:
        """Whether the other worker gets a chat request and not a completion request.

        A chat of vLLM without text is repeated, because completions do not tell its reasoning from text.
        """
        return self._is_chat and (self.engine == BLOCKCAST or self._sent_token_count == 0)

    @property
    def is_continued(self) -> bool:
        """Whether a worker continues what another one began."""
        return self.continuation_body is not None

    def build_request_body(self, engine: str) -> tuple[bytes] | None:
        """Return the pieces of the body to send to a worker that runs `engine`, such as vLLM.

        The first worker gets the client's body. It also asks for token ids if the engine could continue the answer by
        them. A later worker gets the body for the rest of the answer, or None if it runs another engine.
        """
        if self.continuation_body is not None:
            return (self.continuation_body,) if engine == self.engine else None
        self.engine = engine
        self.recorder = None
        if self._is_exactly_continuable():
            self.recorder = TokenRecorder(removes_ids=not self._wants_token_ids)
        if self.recorder is None or self._wants_token_ids:
            return (self._body,)
        if "return_token_ids" in self._fields:  # replaced, as engines read the last of two equal fields
            return (msgspec.json.encode({**self._fields, "return_token_ids": True}),)
        return (self._body.replace(b"{", b'{"return_token_ids":true,', 1),)

    def _is_exactly_continuable(self) -> bool:
        """Return whether the worker's engine can continue the answer as if it had not been interrupted.

        Our engine restores all state. vLLM takes the earlier tokens of the answer for a part of the prompt. So it
        restarts penalties, the random seed and structured output, finds stop strings in new text only, and parses no
        tool calls.
        """
        if self.engine == BLOCKCAST:
            return True
        if self.engine != VLLM:
            return False
        restarted_penalties = ("presence_penalty", "frequency_penalty")
        restarted_parsers = ("stop", "tools", "response_format", "structured_outputs")
        if any(self._decode_field(name) for name in restarted_penalties + restarted_parsers):
            return False
        is_seeded_sample = self._decode_field("seed") is not None and self._decode_field("temperature") != 0
        return not is_seeded_sample

    def build_continuation_route(self, route: RouteRequest, same_engine_workers: frozenset[str]) -> RouteRequest | None:
        """Return the routing request for the rest of an answer that broke off; None if it cannot be continued.

        For example, a prompt has 100 tokens, and its answer has 40 tokens so far and may have 100. Then the new prompt
        has 140 tokens, and its answer at most 60. Only workers of the same engine may continue the answer. If the
        client has no event yet, `route` itself is returned, once: then any worker may repeat the whole request.
        """
        recorder = self.recorder
        if recorder is None or not self._is_recorded_fully(recorder):
            return None
        if recorder.event_count == 0:
            return None if self._has_restarted else route
        output_ids = recorder.output_ids
        if self.engine == VLLM:  # it generates the last tokens again if their text is incomplete
            output_ids = output_ids[: recorder.text_token_count]
        answered_tokens = len(output_ids)
        if not self._may_continue_after(answered_tokens):
            return None
        token_ids = recorder.prompt_ids + output_ids
        if self.engine == VLLM and self._count_remaining_tokens(len(token_ids), answered_tokens) < 1:
            return None
        has_limit, allowed_workers = route.output_tokens_max > 0, route.allowed_workers
        return route.replace(
            allowed_workers=same_engine_workers if allowed_workers is None else same_engine_workers & allowed_workers,
            token_ids=token_ids,
            prompt_tokens=len(token_ids),
            output_tokens_max=max(route.output_tokens_max - answered_tokens, 1) if has_limit else 0,
            output_tokens_min=max(route.output_tokens_min - answered_tokens, 0),
            deadline_s=None,
        )

    def _is_recorded_fully(self, recorder: TokenRecorder) -> bool:
        """Return whether the recorded tokens are all that the client has of the answer, and more have to follow."""
        if recorder.is_unrecognized or recorder.has_finish_reason:
            return False
        if self.engine == BLOCKCAST:
            return True
        # The client has ids of tokens whose text is incomplete. vLLM would generate these tokens again.
        has_incomplete_text = recorder.text_token_count < recorder.output_token_count
        return not (recorder.has_parsed_output or (self._wants_token_ids and has_incomplete_text))

    def _may_continue_after(self, output_token_count: int) -> bool:
        """Return whether another worker may continue the answer after so many tokens."""
        assert self.recorder is not None
        if not self.recorder.prompt_ids or self._get_event_template() is None:
            return False
        # If the second worker died soon, too, the request may be what kills the workers.
        return not self.is_continued or output_token_count >= self._sent_token_count + NEW_TOKENS_MIN

    def start_continuation(self) -> None:
        """Prepare the request to another worker, and forget tokens that the client has not received."""
        recorder = self.recorder
        assert recorder is not None
        recorder.rewind(drops_incomplete_text=self.engine == VLLM)
        if recorder.event_count == 0:
            self._has_restarted = True
            return
        self._sent_token_count = recorder.output_token_count
        event_template = self._get_event_template()
        assert event_template is not None
        self.path = None if self._continues_as_chat else _COMPLETIONS_PATH
        self._converter = EventConverter(
            event_template, is_chat=self._is_chat, is_worker_chat=self._continues_as_chat,
            has_token_ids=self._wants_token_ids, prompted_tokens=self._sent_token_count if self.engine == VLLM else 0,
        )  # fmt: skip
        self.continuation_body = msgspec.json.encode(self._build_body(recorder.prompt_ids + recorder.output_ids))

    def _build_body(self, ids: array[int]) -> dict[str, Any]:
        """Return the body of the request by which another worker continues an answer that broke off.

        `ids`: token ids of the prompt and of the answer so far. A chat of our engine gets the ids too, in place of all
        messages but the last. A chat of vLLM is repeated, as its answer has no text yet. Others become completions.
        """
        if self._continues_as_chat and self.engine == VLLM:
            return {**self._fields, "return_token_ids": True}
        answered_tokens = self._sent_token_count
        resent_names = _RESENT_FIELDS | _CHAT_OUTPUT_FIELDS if self._continues_as_chat else _RESENT_FIELDS
        body: dict[str, Any] = {name: value for name, value in self._fields.items() if name in resent_names}
        if self._continues_as_chat:
            last_message = msgspec.json.decode(self._fields["messages"], type=list[msgspec.Raw])[-1:]
            body |= {"messages": last_message, "prompt_token_ids": ids.tolist()}
            return body | {"answered_tokens": answered_tokens, "return_token_ids": True}
        body |= {"prompt": ids.tolist(), "return_token_ids": True}
        if self.engine == BLOCKCAST:  # its limits count `answered_tokens` as output
            return body | {"max_tokens": self._read_output_tokens_max(), "answered_tokens": answered_tokens}
        remaining_tokens_max = self._count_remaining_tokens(len(ids), answered_tokens)
        remaining_tokens_min = max((self._decode_field("min_tokens") or 0) - answered_tokens, 0)
        return body | {"max_tokens": remaining_tokens_max, "min_tokens": remaining_tokens_min}

    def _count_remaining_tokens(self, tokens: int, answered_tokens: int) -> int:
        """Return how many tokens may follow `tokens`, the prompt and the answer so far; 0 if there is no limit."""
        output_tokens_max = self._read_output_tokens_max()
        if output_tokens_max is not None:
            return int(output_tokens_max) - answered_tokens
        return 0 if self._tokens_max is None else self._tokens_max - tokens

    def _read_output_tokens_max(self) -> Any:
        """Return the client's bound of the answer's tokens; None if there is none."""
        output_tokens_max = self._decode_field("max_completion_tokens") if self._is_chat else None
        if output_tokens_max is None:
            output_tokens_max = self._decode_field("max_tokens")
        if output_tokens_max is None and not self._is_chat:
            output_tokens_max = _DEFAULT_TOKENS_MAX
        return output_tokens_max

    def _decode_field(self, name: str) -> Any:
        """Return the value of a field of the client's request; None if the request has no such field."""
        raw = self._fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    # Answering ----------------------------------------------------------------------------------------------------

    def record_and_convert(self, content: bytes, *, is_last: bool) -> bytes:
        """Record the tokens in the next bytes of a worker's answer, and return the complete events for the client.

        `is_last`: whether the answer ends with these bytes. Raises ProtocolError for events that cannot be converted.
        All bytes are returned if the answer is not recorded.
        """
        if self.recorder is None:
            return content
        events = self.recorder.feed(content)
        if is_last:
            events += self.recorder.finish()
        if self._converter is None or not events:
            return events
        try:
            return self._converter.convert(events)
        except MALFORMED_EVENT_ERRORS as error:
            self.recorder.is_unrecognized = True  # the client does not get these events, but their tokens are recorded
            raise ProtocolError(f"an event of the worker that went on: {error!r}") from error

    def _get_event_template(self) -> dict[str, Any] | None:
        """Return an event of the first worker without its text and ids; None if it has another form than is known."""
        assert self.recorder is not None
        return make_event_template(self.recorder.last_event) if self._converter is None else self._converter.template

    def build_end_events(self, *, is_usage_sent: bool) -> bytes | None:
        """Return the usage, if the client wants it and does not have it, and `[DONE]`, for a stream that broke off.

        Return None if the client may lack tokens of the answer, or if the usage cannot be built.
        """
        recorder = self.recorder
        if recorder is None or recorder.is_unrecognized or not recorder.has_finish_reason:
            return None
        if not self._wants_usage or is_usage_sent:
            return DONE_EVENT
        usage_event = self._build_usage_event(recorder)
        return None if usage_event is None else usage_event + DONE_EVENT

    def _build_usage_event(self, recorder: TokenRecorder) -> bytes | None:
        """Return the event that reports the recorded tokens; None if the form of the worker's events is not known."""
        event_template = self._get_event_template()
        if event_template is None:
            return None
        prompt_tokens, completion_tokens = len(recorder.prompt_ids), recorder.output_token_count
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        return b"data: " + msgspec.json.encode({**event_template, "choices": [], "usage": usage}) + b"\n\n"
