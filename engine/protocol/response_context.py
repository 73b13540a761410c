"""Fields of a `/v1/responses` body that its answer needs."""

from __future__ import annotations

from msgspec import Struct

from prompts.responses import ClientTool

ECHOED_FIELDS = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text",
    "tool_choice", "tools", "top_p", "truncation", "user",
)  # fmt: skip
"""Fields of a body that its answer repeats."""


class ResponseContext(Struct, frozen=True):
    """Fields of a `/v1/responses` body that its answer needs; large ones stay encoded."""

    messages: bytes
    """JSON list of the rendered messages, for a response that continues this one."""
    echoed_fields: bytes
    """JSON object of the fields that the answer repeats."""
    should_store: bool
    previous_response_id: str | None
    tools: dict[str, ClientTool] = {}
    """Name that the model sees -> tool, for tools with another name or with free text as input."""
    skipped_item_types: list[str] = []
    """Types of input items that the model does not see."""
