"""Convert the events of a worker that continues a streamed answer to the form of the first worker's events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_DONE_DATA: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"
MALFORMED_EVENT_ERRORS = (msgspec.MsgspecError, RecursionError, KeyError, TypeError, ValueError, AttributeError)
"""Exceptions that events of an unknown form raise."""


class EventConverter(msgspec.Struct, frozen=True, eq=False):
    """Converts the server-sent events of the worker that continues an answer, so that the client sees one stream.

    For example, a completion continues the chat with the id 1. Its `{"id": "2", "choices": [{"text": " you"}]}` becomes
    `{"id": "1", "choices": [{"delta": {"content": " you"}}]}`.
    """

    template: dict[str, Any]
    """Event of the first worker without its text and token ids."""
    is_chat: bool
    """Whether the client reads a chat, and not a completion."""
    is_worker_chat: bool
    """Whether the worker sends a chat, and not a completion."""
    has_token_ids: bool
    """Whether the client reads token ids."""
    prompted_tokens: int
    """Tokens of the first worker's part that this worker counts as a part of its prompt."""

    def convert(self, events: bytes) -> bytes:
        """Return complete events as the first worker would have sent them. Raises MALFORMED_EVENT_ERRORS."""
        unix_events = events.replace(b"\r\n", b"\n")  # JSON has no line end in its strings
        return b"".join(self._convert_event(event) for event in unix_events.split(b"\n\n") if event)

    def _convert_event(self, event: bytes) -> bytes:
        """Return one event; return b"" for one that the client does not need, as it names the role or has no text."""
        data = _read_data(event)
        if not data:
            return event + b"\n\n"  # a comment, which keeps connections alive
        if data == _DONE_DATA:
            return DONE_EVENT
        event_fields = msgspec.json.decode(data)
        choices = [self._convert_choice(choice) for choice in event_fields["choices"]]
        if None in choices:
            return b""
        converted_event = {**self.template, "choices": choices}
        if event_fields.get("usage") is not None:
            converted_event["usage"] = self._convert_usage(event_fields["usage"])
        return b"data: " + msgspec.json.encode(converted_event) + b"\n\n"

    def _convert_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return an element of `choices`, the text of one answer; None if the client does not need it."""
        finish_reason = choice.get("finish_reason")  # some frontends omit null and empty fields
        delta = choice.get("delta") or {} if self.is_worker_chat else {"content": choice.get("text") or ""}
        if "role" in delta:
            return None  # the first worker has sent the role
        has_text = any(delta.values())
        if not has_text and finish_reason is None and not self.has_token_ids:
            return None
        converted_choice = dict(self.template["choices"][0])
        if self.is_chat:
            converted_choice["delta"] = delta
        else:
            converted_choice["text"] = delta.get("content") or ""
        if finish_reason is not None:
            converted_choice["finish_reason"] = finish_reason
            converted_choice["stop_reason"] = choice.get("stop_reason")
        if self.has_token_ids:
            converted_choice["token_ids"] = choice.get("token_ids")
        return converted_choice

    def _convert_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer, from the usage that this worker reports."""
        converted_usage = dict(usage)
        if self.prompted_tokens:
            converted_usage["prompt_tokens"] -= self.prompted_tokens
            converted_usage["completion_tokens"] += self.prompted_tokens
        details = converted_usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            cached_tokens = min(details["cached_tokens"], converted_usage["prompt_tokens"])
            converted_usage["prompt_tokens_details"] = {**details, "cached_tokens": cached_tokens}
        return converted_usage


def make_event_template(event: bytes) -> dict[str, Any] | None:
    """Return an event without its text and ids; None if it does not have one choice."""
    try:
        event_fields: dict[str, Any] = msgspec.json.decode(_read_data(event))
        event_fields.pop("prompt_token_ids", None)
        (choice,) = event_fields["choices"]
        for name in ("delta", "text", "token_ids", "prompt_token_ids"):
            choice.pop(name, None)
    except MALFORMED_EVENT_ERRORS:
        return None
    return event_fields


def _read_data(event: bytes) -> bytes:
    """Return the data of a server-sent event, which may also have comments and other fields."""
    return b"".join(line[len(b"data:") :] for line in event.splitlines() if line.startswith(b"data:")).strip()
