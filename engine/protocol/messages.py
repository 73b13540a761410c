"""Answers of `/v1/messages`: their structs, and their JSON whole or as events in Anthropic's order. No I/O.

The events are message_start; content_block_start, content_block_deltas and content_block_stop of each block;
message_delta with the stop reason and the usage; message_stop.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import Raw, Struct

from engine.output.choice import Choice
from engine.output.content_blocks import BlockEvent, ContentBlock, ContentBlocks, make_blocks_of_choice
from engine.output.delta_builder import ChoiceDelta
from engine.protocol.generation import Generation
from prompts.errors import RequestError

_encoder = msgspec.json.Encoder()


class MessageUsage(Struct, frozen=True):
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens`; creating cache entries costs nothing."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any
    """JSON of an object."""


class MessageResponse(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


def format_event(type: str, **fields: Any) -> bytes:
    """Return one event of a stream. Clients expect its type twice."""
    data = _encoder.encode({"type": type, **fields})
    return b"event: %b\ndata: %b\n\n" % (type.encode(), data)


class MessagesFormatter:
    """Formats the answer of `/v1/messages`, whole or as events. It has one choice."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self._blocks = ContentBlocks()
        self._has_begun = False

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events = format_event("message_start", message=self._make_message([]))
        return events + b"".join(map(self._format_block_event, self._blocks.push(delta)))

    def format_end(self) -> bytes:
        """Return the bytes that follow the last piece."""
        events = b"".join(map(self._format_block_event, self._blocks.finish()))
        reason, sequence = get_stop_reason(self._choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return (
            events + format_event("message_delta", delta=delta, usage=self._make_usage()) + format_event("message_stop")
        )

    def format_error(self, error: RequestError) -> bytes:
        """Return the bytes that end a stream that was cut off."""
        return b"event: error\ndata: " + _encoder.encode(error.body("/v1/messages")) + b"\n\n"

    def format_response(self) -> bytes:
        return _encoder.encode(self._make_message(make_blocks_of_choice(self._choice)))

    def _format_block_event(self, event: BlockEvent) -> bytes:
        """Return the events that tell a client of a change of a block."""
        action, block, text = event
        if action == "delta":
            return _format_block_delta(block, text)
        if action == "start":
            content_block = _make_content_block(block, "")
            return format_event("content_block_start", index=block.index, content_block=content_block)
        events = b""
        if block.kind == "reasoning":  # clients want a signature, and send it back; nothing checks it here
            signature_delta = {"type": "signature_delta", "signature": uuid.uuid4().hex}
            events = format_event("content_block_delta", index=block.index, delta=signature_delta)
        return events + format_event("content_block_stop", index=block.index)

    def _make_message(self, blocks: list[ContentBlock]) -> MessageResponse:
        """Return the message with these blocks. Its usage is that of the answer so far."""
        generation = self._generation
        content = [_make_content_block(block, block.text) for block in blocks]
        reason, sequence = get_stop_reason(self._choice)
        return MessageResponse(
            id=generation.id, model=generation.model, content=content, stop_reason=reason, stop_sequence=sequence,
            usage=self._make_usage(),
        )  # fmt: skip

    def _make_usage(self) -> MessageUsage:
        usage = self._generation.compute_usage()
        cached_tokens = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached_tokens, usage.completion_tokens, cached_tokens)


def _make_content_block(block: ContentBlock, text: str) -> TextBlock | ThinkingBlock | ToolUseBlock:
    """Return the block with its text so far."""
    if block.kind == "text":
        return TextBlock(text)
    if block.kind == "reasoning":
        return ThinkingBlock(text, uuid.uuid4().hex if text else "")
    return ToolUseBlock(block.id, block.name, parse_arguments(text))


def parse_arguments(arguments: str) -> Raw:
    """Return a call's arguments as a JSON object; an empty one if they are no object, as in a call that was cut."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return Raw(arguments.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return Raw(b"{}")


def _format_block_delta(block: ContentBlock, text: str) -> bytes:
    type, field = {
        "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]  # fmt: skip
    return format_event("content_block_delta", index=block.index, delta={"type": type, field: text})


def get_stop_reason(choice: Choice) -> tuple[str | None, str | None]:
    """Return (Anthropic's stop reason, stop sequence that ended the text)."""
    if choice.finish_reason is None:
        return None, None
    if choice.finish_reason == "length":
        return "max_tokens", None
    stop = choice.stop_reason
    if isinstance(stop, str):
        return "stop_sequence", stop  # not "tool_use": the stop sequence may have cut a call, which must not run
    return "tool_use" if choice.parser.has_tool_calls else "end_turn", None
