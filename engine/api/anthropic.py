"""Answers of `/v1/messages`: the message whole, or as events in Anthropic's order. Pure.

message_start, then for each block content_block_start, its deltas, content_block_stop, then message_delta with
the reason why it stops and the usage, message_stop
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from engine.api.choice import Choice, Piece
from engine.api.generation import Generation
from prompts.errors import RequestError

_MARK = "\ue000text\ue000"
_encoder = msgspec.json.Encoder()


class MessageUsage(Struct, frozen=True):
    """All of a prompt's tokens are `input_tokens` + `cache_read_input_tokens`: nothing is paid for being kept."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


def event(type: str, **fields: Any) -> bytes:
    """One event of a stream, with its name twice, as clients expect it."""
    data = _encoder.encode({"type": type, **fields})
    return b"event: %b\ndata: %b\n\n" % (type.encode(), data)


class MessagesAnswer:
    """Of one request, which has one choice."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self._halves: tuple[bytes, bytes] | None = None
        self._blocks = 0
        self._begun = False

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The events that one piece becomes."""
        said = b""
        if not self._begun:
            self._begun = True
            said = event("message_start", message=self._message([]))
        if not piece.text:
            return said
        if self._halves is None:
            before, after = self._delta(_MARK).split(_encoder.encode(_MARK))
            self._halves = before, after
            said += self._begin_text()
        before, after = self._halves
        return said + before + _encoder.encode(piece.text) + after

    def end(self) -> bytes:
        """What follows the last piece."""
        said = b"" if self._halves is not None else self._begin_text()
        said += event("content_block_stop", index=self._blocks)
        reason, sequence = stop_reason(self._choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return said + event("message_delta", delta=delta, usage=self._usage()) + event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        """What ends a stream that broke off."""
        return b"event: error\ndata: " + _encoder.encode(error.body("/v1/messages")) + b"\n\n"

    def whole(self) -> bytes:
        return _encoder.encode(self._message([TextBlock(self._choice.text)]))

    def _begin_text(self) -> bytes:
        return event("content_block_start", index=self._blocks, content_block=TextBlock(""))

    def _delta(self, text: str) -> bytes:
        return event("content_block_delta", index=self._blocks, delta={"type": "text_delta", "text": text})

    def _message(self, content: list[TextBlock]) -> MessageAnswer:
        generation = self._generation
        reason, sequence = stop_reason(self._choice)
        return MessageAnswer(
            id=generation.id, model=generation.model, content=content, stop_reason=reason, stop_sequence=sequence,
            usage=self._usage(),
        )  # fmt: skip

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def stop_reason(choice: Choice) -> tuple[str | None, str | None]:
    """(why it stopped in Anthropic's words, the stop sequence that it met)."""
    if choice.finish_reason is None:
        return None, None
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    met = choice.stop_reason
    return ("stop_sequence", met) if isinstance(met, str) else ("end_turn", None)
