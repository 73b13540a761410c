"""Answers of `/v1/responses`: their structs, and their JSON whole or as events in OpenAI's order. No I/O.

The events are response.created and response.in_progress; response.output_item.added, parts, deltas and
response.output_item.done of each item; response.completed with the whole response, or response.failed.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from engine.output.choice import Choice
from engine.output.content_blocks import BlockEvent, ContentBlock, ContentBlocks, make_blocks_of_choice
from engine.output.custom_input import CustomInputDecoder
from engine.output.delta_builder import ChoiceDelta
from engine.protocol.generation import CompletionTokensDetails, Generation, PromptTokensDetails
from engine.protocol.messages import format_event
from engine.protocol.parsed_request import ResponseContext
from prompts.errors import RequestError
from prompts.responses import ClientTool, make_item_id
from prompts.schemas import Message

_encoder = msgspec.json.Encoder()


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response, in progress or finished."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    previous_response_id: str | None = None
    store: bool
    # As the client gave them.
    instructions: Any = None
    max_output_tokens: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = True
    reasoning: Any = None
    temperature: Any = 1.0
    text: Any = None
    tool_choice: Any = "auto"
    tools: Any = []
    top_p: Any = 1.0
    truncation: Any = "disabled"
    user: Any = None
    usage: ResponseUsage | None = None
    """The last field, because proxies look for it at the end."""


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


_echoed_decoder = msgspec.json.Decoder(dict[str, Raw])
_ID_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


class ResponsesFormatter:
    """Formats the answer of one request, which has one choice."""

    def __init__(self, generation: Generation, context: ResponseContext) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self.context = context
        self._blocks = ContentBlocks()
        self._custom_inputs: dict[int, CustomInputDecoder] = {}
        """Block index -> decoder of the free text of a custom tool's call."""
        self._is_finished = False
        """Whether the answer has ended. A block that ends then may be incomplete, because a length limit cut it."""
        self._sequence_number = -1
        """Number of the last event."""

    # Streamed ---------------------------------------------------------------------------------------------------------

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        return self._format_beginning() + b"".join(map(self._format_block_event, self._blocks.push(delta)))

    def _format_beginning(self) -> bytes:
        """Return the events that come first in a stream; empty bytes if they were returned already."""
        if self._sequence_number >= 0:
            return b""
        response = self.make_response("in_progress", [])
        created_event = self._format_event("response.created", response=response)
        return created_event + self._format_event("response.in_progress", response=response)

    def format_end(self) -> bytes:
        """Return the bytes that follow the last piece."""
        self._is_finished = True
        events = b"".join(map(self._format_block_event, self._blocks.finish()))
        return events + self._format_event("response.completed", response=self.make_final_response())

    def format_error(self, error: RequestError) -> bytes:
        """Return the bytes that end a stream that was cut off, perhaps before its first token."""
        events = self._format_beginning()
        response = self.make_response("failed", self._blocks.blocks, error)
        return events + self._format_event("response.failed", response=response)

    def _format_block_event(self, event: BlockEvent) -> bytes:
        if event.action == "start":
            return self._format_block_start(event.block)
        if event.action == "delta":
            return self._format_block_delta(event.block, event.text)
        return self._format_block_end(event.block)

    def _format_block_start(self, block: ContentBlock) -> bytes:
        item = self._make_item(block, "in_progress")
        events = self._format_event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            part = OutputText("", logprobs=[])
            events += self._format_event("response.content_part.added", **self._locate(block), part=part)
        return events

    def _format_block_delta(self, block: ContentBlock, text: str) -> bytes:
        """Return the event of a piece of text; empty bytes if a call's free text does not grow by it."""
        event_type, fields = f"{self._get_event_base_name(block)}.delta", self._locate(block)
        if block.kind == "text":
            return self._format_event(event_type, **fields, delta=text, logprobs=[])
        custom_input = self._get_custom_input(block)
        if custom_input is None:
            return self._format_event(event_type, **fields, delta=text)
        input_text = custom_input.push(text)
        return self._format_event(event_type, **fields, delta=input_text) if input_text else b""

    def _format_block_end(self, block: ContentBlock) -> bytes:
        """Return the events that end a block: of its text or input, then of its item."""
        name, fields = self._get_event_base_name(block), self._locate(block)
        if block.kind == "call":
            events = self._format_call_end(block, name, fields)
        elif block.kind == "reasoning":
            events = self._format_event(f"{name}.done", **fields, text=block.text)
        else:
            part = OutputText(block.text, logprobs=[])
            events = self._format_event(f"{name}.done", **fields, text=block.text, logprobs=[])
            events += self._format_event("response.content_part.done", **fields, part=part)
        is_cut = self._is_finished and self._choice.finish_reason == "length"
        item = self._make_item(block, "incomplete" if is_cut else "completed")
        return events + self._format_event("response.output_item.done", output_index=block.index, item=item)

    def _format_call_end(self, block: ContentBlock, name: str, fields: dict[str, Any]) -> bytes:
        """Return the last delta of a custom tool's input, if any text was held back, and the event that ends the input.

        `name`: beginning of the events' names. `fields`: fields of the events that say which block they are about.
        """
        custom_input = self._get_custom_input(block)
        if custom_input is None:
            tool_name = self._get_client_tool(block).name
            return self._format_event(f"{name}.done", **fields, name=tool_name, arguments=block.text)
        last_text = custom_input.finish()
        events = self._format_event(f"{name}.delta", **fields, delta=last_text) if last_text else b""
        return events + self._format_event(f"{name}.done", **fields, input=custom_input.text)

    def _locate(self, block: ContentBlock) -> dict[str, Any]:
        """Return the fields of an event that say which block it is about."""
        fields: dict[str, Any] = {"output_index": block.index, "item_id": self._make_item_id(block)}
        return fields if block.kind == "call" else {**fields, "content_index": 0}

    def _get_event_base_name(self, block: ContentBlock) -> str:
        if block.kind == "call":
            is_custom = self._get_client_tool(block).is_custom
            return "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
        return "response.output_text" if block.kind == "text" else "response.reasoning_text"

    def _get_client_tool(self, block: ContentBlock) -> ClientTool:
        """Return the called tool under the client's name."""
        return self.context.tools.get(block.name) or ClientTool(block.name)

    def _get_custom_input(self, block: ContentBlock) -> CustomInputDecoder | None:
        """Return the decoder of the free text of a call; None for blocks without free text."""
        if block.kind != "call" or not self._get_client_tool(block).is_custom:
            return None
        return self._custom_inputs.setdefault(block.index, CustomInputDecoder())

    def _format_event(self, type: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return format_event(type, sequence_number=self._sequence_number, **fields)

    # Whole ------------------------------------------------------------------------------------------------------------

    def format_response(self) -> bytes:
        """Return the whole answer, after decoding the free text of its calls."""
        self._blocks.blocks = make_blocks_of_choice(self._choice)
        for block in self._blocks.blocks:
            custom_input = self._get_custom_input(block)
            if custom_input is not None:
                custom_input.push(block.text)
                custom_input.finish()
        return _encoder.encode(self.make_final_response())

    def make_final_response(self) -> ResponseObject:
        """Return the finished response."""
        status = "incomplete" if self._choice.finish_reason == "length" else "completed"
        return self.make_response(status, self._blocks.blocks)

    def make_response(
        self, status: str, blocks: list[ContentBlock], error: RequestError | None = None
    ) -> ResponseObject:
        """Return the response object with the given content blocks as its output.

        `status`: "in_progress", "completed", "incomplete" if a length limit ended the answer, or "failed", with its
        `error`. An answer that is incomplete or failed may have ended within its last block, which is then marked
        incomplete.
        """
        generation, context = self._generation, self.context
        has_usage = status in ("completed", "incomplete")
        items = [self._make_item(block, "completed") for block in blocks]
        if status in ("incomplete", "failed") and blocks:
            items[-1] = self._make_item(blocks[-1], "incomplete")
        # Fields of the request that a response repeats, such as `tools`.
        echoed_fields: dict[str, Any] = _echoed_decoder.decode(context.echoed_fields)
        return ResponseObject(
            id=generation.id,
            created_at=generation.created,
            status=status,
            model=generation.model,
            store=context.should_store,
            previous_response_id=context.previous_response_id,
            error=None if error is None else ResponseError("server_error", error.message),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            output=items,
            usage=self._make_usage() if has_usage else None,
            **echoed_fields,
        )

    def _make_item(self, block: ContentBlock, status: str) -> OutputItem:
        """Return the output item of a content block. An item in progress has no text."""
        is_in_progress = status == "in_progress"
        text = "" if is_in_progress else block.text
        if block.kind == "call":
            return self._make_call_item(block, status, text)
        item_id = self._make_item_id(block)
        if block.kind == "reasoning":
            return ReasoningItem(id=item_id, status=status, content=[ReasoningText(text)] if text else [])
        return OutputMessage(id=item_id, status=status, content=[] if is_in_progress else [OutputText(text)])

    def _make_call_item(self, block: ContentBlock, status: str, arguments: str) -> OutputItem:
        tool = self._get_client_tool(block)
        fields: dict[str, Any] = {
            "id": self._make_item_id(block), "status": status, "call_id": block.id, "name": tool.name
        }  # fmt: skip
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        custom_input = self._get_custom_input(block)
        if custom_input is not None:
            return CustomToolCall(**fields, input=custom_input.text if arguments else "")
        return FunctionCall(**fields, arguments=arguments)

    def _make_item_id(self, block: ContentBlock) -> str:
        prefix = "ctc_" if self._get_custom_input(block) is not None else _ID_PREFIXES[block.kind]
        return make_item_id(prefix, self._generation.id, block.index)

    def _make_usage(self) -> ResponseUsage:
        usage = self._generation.compute_usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionTokensDetails(self._choice.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    # For a response that continues this one ---------------------------------------------------------------------------

    def encode_messages(self) -> bytes:
        """Encode the rendered messages and the answer as JSON, without reasoning."""
        blocks = self._blocks.blocks
        message: Message = {"role": "assistant", "content": "".join(b.text for b in blocks if b.kind == "text")}
        calls = [
            {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.text}}
            for b in blocks if b.kind == "call"
        ]  # fmt: skip
        if calls:
            message["tool_calls"] = calls
        return self.context.messages[:-1] + b"," + _encoder.encode(message) + b"]"
