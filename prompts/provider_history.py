"""Text for parts of a conversation that OpenAI's chats do not have: documents, search results, tools of a provider.

Our engine runs no tools as a provider's servers do (`server_tool_use`, `web_search_call` ...), but a conversation may
have begun at a server that does. The model then reads the calls and their results. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from prompts.chat_completions import Message

Block = dict[str, Any]
MEDIA_PART: Message = {"type": "file", "file": {}}
"""Part of a chat for a document without text."""


def is_hosted_block(block_type: str) -> bool:
    """Return whether blocks of this type say what Anthropic's servers did: ran a tool, or shortened the history."""
    return block_type.endswith(("_tool_use", "_tool_result")) or block_type == "compaction"


def convert_block(block: Block) -> Message:
    """Return a document, a search result or any other block as a part of a chat."""
    block_type = block.get("type")
    if block_type == "document":
        text = _read_document_text(block)
    elif block_type == "search_result":
        text = _join_lines(block.get("title"), block.get("source"), _join_texts(block.get("content")))
    elif block_type == "compaction" and isinstance(block.get("content"), str):
        text = str(block["content"])
    elif block_type == "image":
        text = None
    else:
        text = _format_hosted_block(block)
    return MEDIA_PART if text is None else {"type": "text", "text": text}


def find_media_kind(block: Block) -> str | None:
    """Return `image` or `document` for a block that is no text; None for any other."""
    block_type = block.get("type")
    if block_type == "image":
        return "image"
    if block_type != "document":
        return None
    content = (block.get("source") or {}).get("content")
    inner_parts = content if isinstance(content, list) else ()
    if any(isinstance(part, dict) and part.get("type") == "image" for part in inner_parts):
        return "image"
    return "document" if _read_document_text(block) is None else None


def _read_document_text(block: Block) -> str | None:
    """Return a document's title, context and text; None if it is a PDF, or a file that the body only names."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    source_type, text = source.get("type"), None
    if source_type == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif source_type == "content":
        text = _join_texts(source.get("content"))
    return None if text is None else _join_lines(block.get("title"), block.get("context"), text)


def _join_texts(content: Any) -> str | None:
    """Return a text, or the joined texts of a list of text blocks; None if the content has anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(content) else None


def _join_lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _format_hosted_block(block: Block) -> str:
    field_names = ("name", "input", "content")
    fields = {name: block[name] for name in field_names if block.get(name) is not None}
    if not fields:
        fields = {name: value for name, value in block.items() if name != "type"}
    block_type = str(block.get("type"))
    return format_hosted_call(block_type, fields) or f"[{block_type}]"


def format_hosted_call(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return a line with the readable fields of a block or an item; None if it has none."""
    readable_fields = _readable_fields(fields)
    for name, value in readable_fields.items():
        if isinstance(value, dict):
            readable_fields[name] = _readable_fields(value)
        elif isinstance(value, list):
            readable_fields[name] = [_readable_fields(part) if isinstance(part, dict) else part for part in value]
    return f"[{kind}: {msgspec.json.encode(readable_fields).decode()}]" if readable_fields else None


def _readable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a model can read: not those that only the provider can read, and no images."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and not name.startswith("encrypted")
        and not (isinstance(value, str) and value.startswith("data:"))
    }
