"""Answers of `/v1/messages`: their JSON whole or as events in Anthropic's order. No I/O.

The events are message_start; content_block_start, content_block_deltas and content_block_stop of each block;
message_delta with the stop reason and the usage; message_stop.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import Raw

from engine.output.choice import Choice
from engine.output.content_blocks import BlockEvent, ContentBlock, ContentBlocks
from engine.output.delta_builder import ChoiceDelta
from engine.protocol.generation import Generation
from prompts.chat_completions import decode_or_none
from prompts.errors import RequestError

JsonObject = dict[str, Any]
_encoder = msgspec.json.Encoder()
_DELTA_FIELDS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip
"""Kind of a block -> type of the deltas that add to its text, and their field with the text."""


def format_event(type: str, **fields: Any) -> bytes:
    """Return one event of a stream. Clients expect its type twice."""
    data = _encoder.encode({"type": type, **fields})
    return b"event: %b\ndata: %b\n\n" % (type.encode(), data)


class MessagesFormatter:
    """Formats a generated answer as Anthropic's Messages API returns it: whole as JSON, or as server-sent events."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self._blocks = ContentBlocks()
        self._has_begun = False

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the events for newly generated text, reasoning and tool calls."""
        events = b""
        if not self._has_begun:
            self._has_begun = True
            # All tokens may have come at once, but only `message_delta` tells why the answer ended.
            message = self._make_message() | {"stop_reason": None, "stop_sequence": None}
            events = format_event("message_start", message=message)
        return events + b"".join(map(_format_block_event, self._blocks.push(delta)))

    def format_end(self) -> bytes:
        """Return the last events of a stream: the end of the open block, the stop reason and the usage."""
        block_events = b"".join(map(_format_block_event, self._blocks.finish()))
        reason, sequence = get_stop_reason(self._choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        message_delta = format_event("message_delta", delta=delta, usage=self._make_usage())
        return block_events + message_delta + format_event("message_stop")

    def format_error(self, error: RequestError) -> bytes:
        """Return the event that ends a stream with an error."""
        return b"event: error\ndata: " + _encoder.encode(error.body("/v1/messages")) + b"\n\n"

    def format_response(self) -> bytes:
        """Return the whole answer. It is empty if the client wanted the prompt cached and nothing generated."""
        if not self._generation.is_prompt_only:
            self._blocks.add_whole_choice(self._choice)
        return _encoder.encode(self._make_message())

    def _make_message(self) -> JsonObject:
        """Return Anthropic's message object, with the content and the usage so far."""
        reason, sequence = get_stop_reason(self._choice)
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": [_make_content_block(block, block.text) for block in self._blocks.blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._make_usage(),
        }

    def _make_usage(self) -> JsonObject:
        """Return the token counts. The prompt has `input_tokens` + `cache_read_input_tokens`."""
        usage = self._generation.compute_usage()
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached_tokens,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached_tokens,
            "cache_creation_input_tokens": 0,  # creating cache entries costs nothing
        }


def _format_block_event(event: BlockEvent) -> bytes:
    """Return the events that tell a client of a change of a block."""
    action, block, text = event
    if action == "start":
        return format_event("content_block_start", index=block.index, content_block=_make_content_block(block, ""))
    if action == "delta":
        delta_type, field = _DELTA_FIELDS[block.kind]
        return format_event("content_block_delta", index=block.index, delta={"type": delta_type, field: text})
    events = b""
    if block.kind == "reasoning":  # clients want a signature, and send it back; nothing checks it here
        signature_delta = {"type": "signature_delta", "signature": uuid.uuid4().hex}
        events = format_event("content_block_delta", index=block.index, delta=signature_delta)
    return events + format_event("content_block_stop", index=block.index)


def _make_content_block(block: ContentBlock, text: str) -> JsonObject:
    """Return the block with its text so far."""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": uuid.uuid4().hex if text else ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": parse_arguments(text)}


def parse_arguments(arguments: str) -> Raw:
    """Return a call's arguments as a JSON object; an empty one if they are no object, as in a call that was cut."""
    is_object = isinstance(decode_or_none(arguments), dict)
    return Raw(arguments.encode() if is_object else b"{}")


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
