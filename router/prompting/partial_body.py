"""Parse only the new messages of a request body, those after a boundary up to which it equals a cached body. No I/O.

A boundary is a place between two messages of a body.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Any

import msgspec

from prompts.anthropic import depends_on_template
from prompts.chat_completions import Message
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, convert_source_to_chat, decode_fields, has_media, parse_body
from router.prompting.body_fields import locate_fields
from router.prompting.boundary_rendering import TemplateInputs
from router.prompting.conversation_cache import Boundary, CachedConversation, OtherFields
from router.prompting.encode import has_more_objects

TAIL_BYTES_MAX, TAIL_BRACKETS_MAX = 256 << 10, 2048
"""Largest part of a body that is read after a boundary, so that other requests do not wait."""
_SENTINEL_MESSAGE: Message = {"role": "user", "content": secrets.token_hex(16)}
"""Message in a body in place of all messages before a boundary."""
_SENTINEL_JSON = msgspec.json.encode(_SENTINEL_MESSAGE)

_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class MessagesArray(msgspec.Struct, frozen=True, eq=False):
    """The JSON array of messages in a request body: its offset and its bytes."""

    start: int
    """Offset of the opening bracket in the body."""
    json: bytes

    @property
    def end(self) -> int:
        """Offset of the closing bracket."""
        return self.start + len(self.json) - 1

    def find_message_ends(self) -> list[int]:
        """Return the offsets in the body at which the messages end."""
        ends: list[int] = []
        position = 1  # after the opening bracket
        for message_json in _items_decoder.decode(self.json):
            while self.json[position] in b" \t\r\n,":
                position += 1
            position += len(memoryview(message_json))
            ends.append(self.start + position)
        return ends


class PartialBody(msgspec.Struct, frozen=True, eq=False):
    """A request body of which only the new messages were parsed: those after a boundary.

    For example, a cached body has the messages A and B, and this one A, B, C and D. The ids of A and B are cached,
    so only C and D are parsed, and the other fields of the body.
    """

    request: RoutingRequest
    """The body without A and B. The routing fields are its own; one short message may stand for A and B."""
    inputs: TemplateInputs
    """The template's inputs besides `messages`, such as tools and options."""
    new_messages: list[Message]
    """C and D, as messages of a chat."""
    messages_array: MessagesArray
    """An array of three items, one for A and B. C and D are at the offsets in the body that `start` gives them."""
    other_fields: OtherFields | None
    """Fields that the next turn need not parse if it has the same; None if the body is not in OpenAI's format."""

    def find_new_message_ends(self) -> list[int]:
        """Return the offsets in the body at which its new messages end."""
        return self.messages_array.find_message_ends()[1:]


def parse_new_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> PartialBody | None:
    """Parse the messages of a body after a boundary up to which it equals the body of a cached conversation.

    Return None if the rest of the body is too large or malformed, or if the chat template gets other inputs than for
    the cached conversation, such as other tools.
    """
    partial_body = _parse_only_new_messages(conversation, boundary, body, template)
    if partial_body is None:
        partial_body = _parse_without_cached_messages(conversation, boundary, body, template)
    has_equal_inputs = partial_body is not None and partial_body.inputs.digest == conversation.inputs_digest
    return partial_body if has_equal_inputs else None


def _parse_only_new_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> PartialBody | None:
    """Parse only the new messages of a chat: its other fields must be the cached body's, byte for byte.

    This saves parsing the tools: a third of the time of a turn with 34 KB of them. Return None if the body is no chat,
    if its other fields are not equal, or if its messages cannot be read here.
    """
    fields = conversation.other_fields
    if fields is None or template.keeps_messages_as_sent != fields.keeps_messages_as_sent:
        return None
    start, end = boundary.body_end, len(body) - len(fields.end_json)
    if not start <= end <= start + TAIL_BYTES_MAX or not body.endswith(fields.end_json):
        return None
    # The new messages begin with a comma. An empty object before it completes the array.
    array_start = b"[{}"
    array_json = b"%b%b]" % (array_start, body[start:end])
    if has_more_objects(array_json, TAIL_BRACKETS_MAX):
        return None
    try:
        messages = _messages_decoder.decode(array_json)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if has_media(messages):
        return None
    return PartialBody(
        request=fields.request,
        inputs=TemplateInputs(fields.request, conversation.inputs_digest, conversation.first_message),
        new_messages=messages[1:],
        messages_array=MessagesArray(start - len(array_start), array_json),
        other_fields=fields,
    )


def _parse_without_cached_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> PartialBody | None:
    """Parse a body from which the messages before a boundary were cut; one sentinel message stands in their place.

    For example, `{"messages": [A, B, C], "tools": T}` with a boundary after B is parsed as `{"messages": [sentinel, C],
    "tools": T}`. Return None if that is too large or malformed, if the sentinel does not stay a message of its own, or
    if the token ids depend on more than the text of the prompt.
    """
    messages_start = conversation.messages_start
    if messages_start + len(body) - boundary.body_end > TAIL_BYTES_MAX:
        return None
    short_body = b"%b%b%b" % (body[: messages_start + 1], _SENTINEL_JSON, body[boundary.body_end :])
    if has_more_objects(short_body, TAIL_BRACKETS_MAX):
        return None
    try:
        fields = decode_fields(short_body)
        request = parse_body(conversation.kind, short_body, fields)
        chat = request if request.source is None else convert_source_to_chat(request, template)
    except RequestError:
        return None
    short_array_json = bytes(fields["messages"])
    is_only_array = short_body.startswith(short_array_json, messages_start)  # the body has no second `messages`
    messages = chat.messages or []
    if not is_only_array or _SENTINEL_MESSAGE not in messages[:2] or not is_text_prompt(request, chat):
        return None
    # A system text beside the array becomes the first message of the chat; the sentinel comes after it.
    system_message_count = messages.index(_SENTINEL_MESSAGE)
    messages_array = MessagesArray(messages_start + len(body) - len(short_body), short_array_json)
    inputs_digest = digest_inputs(template, chat, system_message_count)
    return PartialBody(
        request=request,
        inputs=TemplateInputs(chat, inputs_digest, conversation.first_message),
        new_messages=messages[system_message_count + 1 :],
        messages_array=messages_array,
        other_fields=get_other_fields(request, body, messages_array, template),
    )


def locate_messages(body: bytes) -> MessagesArray | None:
    """Find the array of messages in a body; None if there is none, or if the body has a field twice."""
    try:
        span_by_field = locate_fields(body).span_by_field
    except RequestError:
        return None
    start, end = span_by_field.get("messages", (0, 0))
    array_json = body[start:end]
    return MessagesArray(start, array_json) if array_json.startswith(b"[") else None


def get_other_fields(
    request: RoutingRequest, body: bytes, messages_array: MessagesArray, template: ChatTemplate
) -> OtherFields | None:
    """Return the fields of a body besides its messages; None if the body is not in OpenAI's format."""
    if request.kind != "chat":
        return None
    return OtherFields(request.replace(messages=None), body[messages_array.end :], template.keeps_messages_as_sent)


def digest_inputs(template: ChatTemplate, chat: RoutingRequest, system_message_count: int) -> bytes:
    """Digest all inputs of a template besides the messages in a body's array.

    `system_message_count`: first messages of the chat that come from another field of the body.
    """
    inputs = (
        chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
        template.keeps_messages_as_sent, (chat.messages or [])[:system_message_count],
    )  # fmt: skip
    return blake2b(msgspec.json.encode(inputs), digest_size=16).digest()


def is_text_prompt(request: RoutingRequest, chat: RoutingRequest) -> bool:
    """Return whether a chat's prompt is exactly the encoded text of its template, for every template that may come."""
    if chat.chat_template is not None or chat.scores_prompt or chat.has_media or chat.kind != "chat":
        return False
    return not (chat.continue_final_message or chat.add_special_tokens or depends_on_template(request.source))
