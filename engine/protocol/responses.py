"""Answers of `/v1/responses`: their JSON whole or as events in OpenAI's order. No I/O.

The events are response.created and response.in_progress; response.output_item.added, parts, deltas and
response.output_item.done of each item; at last response.completed with the whole response, response.incomplete if a
length limit ended the answer, or response.failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.output.choice import Choice
from engine.output.content_blocks import BlockEvent, BlockKind, ContentBlock, ContentBlocks
from engine.output.delta_builder import ChoiceDelta
from engine.protocol.generation import Generation
from engine.protocol.logprobs import LogprobFormatter, join_json_list
from engine.protocol.messages import format_event
from engine.protocol.parsed_request import ResponseContext
from prompts.chat_completions import Message
from prompts.errors import RequestError
from prompts.responses import ClientTool, make_item_id

JsonObject = dict[str, Any]
_encoder = msgspec.json.Encoder()
_echoed_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ID_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_", "custom_call": "ctc_"}
_EVENT_NAMES = {
    "reasoning": "response.reasoning_text", "text": "response.output_text",
    "call": "response.function_call_arguments", "custom_call": "response.custom_tool_call_input",
}  # fmt: skip
"""Kind of a block -> beginning of the names of the events about its text."""


class ResponsesFormatter:
    """Formats the answer of one request, which has one choice."""

    def __init__(
        self, generation: Generation, context: ResponseContext, logprobs: LogprobFormatter | None = None
    ) -> None:
        """Create the formatter of one answer of `/v1/responses`, before the answer begins.

        `context`: fields of the request that the answer needs. `logprobs`: formats logprobs of the answer's text, or
        None if the request asks for none.
        """
        self._generation = generation
        self._choice = generation.choices[0]
        self.context = context
        self._blocks = ContentBlocks({name for name, tool in context.tools.items() if tool.is_custom})
        self._sequence_number = -1
        """Number of the last event."""

        # Logprobs, as JSON, on their way from a token to a block of text.
        self._logprobs = logprobs
        self._pending_logprobs: list[bytes] = []
        """Logprobs of tokens with text that is held back."""
        self._text_logprobs: list[bytes] = []
        """Logprobs of text that is in no block yet."""

    def format_logprobs(self, choice: Choice, delta: ChoiceDelta) -> Iterator[None]:
        """Format the logprobs of a delta, and remove them. Yields after every position.

        Logprobs of reasoning and calls are dropped.
        """
        if self._logprobs is not None:
            for position in delta.logprobs:
                self._pending_logprobs.append(self._logprobs.format_chat(position))
                yield
        delta.logprobs = []
        if delta.text:
            self._text_logprobs += self._pending_logprobs
        if delta.text or delta.reasoning or delta.tool_calls:
            self._pending_logprobs = []

    # Streamed ---------------------------------------------------------------------------------------------------------

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        return self._format_beginning() + b"".join(map(self._format_block_event, self._blocks.push(delta)))

    def _format_beginning(self) -> bytes:
        """Return the events that come first in a stream; empty bytes if they were returned already."""
        if self._sequence_number >= 0:
            return b""
        response = self._make_response("in_progress")
        created_event = self._format_event("response.created", response=response)
        return created_event + self._format_event("response.in_progress", response=response)

    def format_end(self) -> bytes:
        """Return the bytes that follow the last piece."""
        events = b"".join(map(self._format_block_event, self._blocks.finish()))
        response = self.make_final_response()
        return events + self._format_event(f"response.{response['status']}", response=response)

    def format_error(self, error: RequestError) -> bytes:
        """Return the bytes that end a stream that was cut off, perhaps before its first token."""
        events = self._format_beginning()
        return events + self._format_event("response.failed", response=self._make_response("failed", error))

    def _format_block_event(self, event: BlockEvent) -> bytes:
        if event.action == "start":
            return self._format_block_start(event.block)
        if event.action == "stop":
            return self._format_block_end(event.block)
        fields: JsonObject = {"delta": event.text}
        if event.block.kind == "text":
            fields["logprobs"] = join_json_list(self._place_text_logprobs(event.block))
        return self._format_text_event("delta", event.block, fields)

    def _format_block_start(self, block: ContentBlock) -> bytes:
        item = self._make_item(block, "in_progress")
        events = self._format_event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            part = _make_text_part("", logprobs=[])
            events += self._format_event("response.content_part.added", **self._locate(block), part=part)
        return events

    def _format_block_end(self, block: ContentBlock) -> bytes:
        """Return the events that end a block: of its text or input, then of its item."""
        text = block.text
        fields_by_kind: dict[BlockKind, JsonObject] = {
            "reasoning": {"text": text},
            "text": {"text": text, "logprobs": []},  # as with vLLM: the item has them
            "call": {"name": self._get_client_tool(block).name, "arguments": text},
            "custom_call": {"input": text},
        }
        events = self._format_text_event("done", block, fields_by_kind[block.kind])
        if block.kind == "text":
            part = _make_text_part(text, logprobs=[])
            events += self._format_event("response.content_part.done", **self._locate(block), part=part)
        is_cut = self._choice.finish_reason == "length" and block is self._blocks.blocks[-1]
        item = self._make_item(block, "incomplete" if is_cut else "completed")
        return events + self._format_event("response.output_item.done", output_index=block.index, item=item)

    def _format_text_event(self, name_ending: str, block: ContentBlock, fields: JsonObject) -> bytes:
        """Return an event about the text, the arguments or the input of a block."""
        return self._format_event(f"{_EVENT_NAMES[block.kind]}.{name_ending}", **self._locate(block), **fields)

    def _place_text_logprobs(self, block: ContentBlock) -> list[bytes]:
        """Add the logprobs of the newest text to those of its block, and return them."""
        logprobs, self._text_logprobs = self._text_logprobs, []
        block.logprobs += logprobs
        return logprobs

    def _locate(self, block: ContentBlock) -> JsonObject:
        """Return the fields of an event that say which block it is about."""
        place = {"output_index": block.index, "item_id": self._make_item_id(block)}
        return place if block.kind in ("call", "custom_call") else {**place, "content_index": 0}

    def _format_event(self, type: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return format_event(type, sequence_number=self._sequence_number, **fields)

    # Whole ------------------------------------------------------------------------------------------------------------

    def format_response(self) -> bytes:
        """Return the whole answer."""
        self._blocks.add_whole_choice(self._choice)
        for block in self._blocks.blocks:
            if block.kind == "text":  # a whole answer has one block of text at most
                self._place_text_logprobs(block)
        return _encoder.encode(self.make_final_response())

    def make_final_response(self) -> JsonObject:
        """Return the finished response."""
        return self._make_response("incomplete" if self._choice.finish_reason == "length" else "completed")

    def make_stored_response(self) -> JsonObject:
        """Return the finished response without its logprobs, which may take megabytes and are shown once."""
        response = self.make_final_response()
        for item in response["output"]:
            if item["type"] == "message":
                item["content"] = [{**part, "logprobs": None} for part in item["content"]]
        return response

    def _make_response(self, status: str, error: RequestError | None = None) -> JsonObject:
        """Return OpenAI's response object, with the output so far.

        `status`: "in_progress", "completed", "incomplete" if a length limit ended the answer, or "failed", with its
        `error`. The last output item of an incomplete or failed answer is marked incomplete, too.
        """
        generation, context = self._generation, self.context
        items = [self._make_item(block, "completed") for block in self._blocks.blocks]
        if status in ("incomplete", "failed") and items:
            items[-1]["status"] = "incomplete"
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "model": generation.model,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items,
            "previous_response_id": context.previous_response_id,
            "store": context.should_store,
            **_echoed_decoder.decode(context.echoed_fields),
            # The last field, because proxies look for it at the end.
            "usage": self._make_usage() if status in ("completed", "incomplete") else None,
        }

    def _make_item(self, block: ContentBlock, status: str) -> JsonObject:
        """Convert a content block to an output item of OpenAI's Responses API. An item in progress has no text yet."""
        text = "" if status == "in_progress" else block.text
        fields = {"id": self._make_item_id(block), "status": status}
        if block.kind == "reasoning":
            reasoning_parts = [{"type": "reasoning_text", "text": text}] if text else []
            return {"type": "reasoning", **fields, "summary": [], "content": reasoning_parts}
        if block.kind == "text":
            logprobs = None if self._logprobs is None else join_json_list(block.logprobs)
            text_parts = [] if status == "in_progress" else [_make_text_part(text, logprobs)]
            return {"type": "message", **fields, "role": "assistant", "content": text_parts}
        tool = self._get_client_tool(block)
        fields |= {"call_id": block.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if block.kind == "call":
            return {"type": "function_call", **fields, "arguments": text}
        return {"type": "custom_tool_call", **fields, "input": text}

    def _get_client_tool(self, block: ContentBlock) -> ClientTool:
        """Return the called tool under the client's name."""
        return self.context.tools.get(block.name) or ClientTool(block.name)

    def _make_item_id(self, block: ContentBlock) -> str:
        return make_item_id(_ID_PREFIXES[block.kind], self._generation.id, block.index)

    def _make_usage(self) -> JsonObject:
        usage = self._generation.compute_usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # For a response that continues this one ---------------------------------------------------------------------------

    def encode_messages(self) -> bytes:
        """Encode the rendered messages and the answer as JSON, without reasoning."""
        blocks = self._blocks.blocks
        message: Message = {"role": "assistant", "content": "".join(b.text for b in blocks if b.kind == "text")}
        calls = [_make_chat_call(block) for block in blocks if block.kind in ("call", "custom_call")]
        if calls:
            message["tool_calls"] = calls
        return self.context.messages[:-1] + b"," + _encoder.encode(message) + b"]"


def _make_text_part(text: str, logprobs: msgspec.Raw | list[Any] | None) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _make_chat_call(block: ContentBlock) -> Message:
    """Return a call as chats have it. Chats have a custom tool's input as an argument."""
    arguments = json.dumps({"input": block.text}, ensure_ascii=False) if block.kind == "custom_call" else block.text
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
