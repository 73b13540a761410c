"""Read a body that continues a cached conversation: only what stands behind the boundary that both share. Pure.

The new messages are rendered behind a few short ones that stand in for the cached messages (router/prompting/
stand_in.py). As long as the template writes these as it did when the boundary was made, the prompt is the cached ids
and those of the text behind them. That text begins with a token at which any text is cut, so that its ids do not hang
on what is before it. Which templates allow this is tried out when they are loaded (router/prompting/template_trial.py).
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from prompts.anthropic import MessagesRequest, depends_on_template
from prompts.body_digests import count_openings
from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, convert_source_to_chat, has_media, parse_routing_of_kind
from prompts.schemas import Message
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.prompting.chat_outline import FINGERPRINT_BYTES, Outline
from router.prompting.conversation_cache import (
    BODY_BYTES_MAX,
    BODY_BYTES_MIN,
    BOUNDARIES_MAX,
    Boundary,
    CachedConversation,
)
from router.prompting.encode import OBJECTS_MAX, RenderedPrompt
from router.prompting.outline import fingerprint_messages, outline_chat
from router.prompting.stand_in import MARK, MESSAGES_MAX, OPENING_MARK, StandIn, find_compared_texts

REST_BYTES_MAX, REST_OBJECTS_MAX = 256 << 10, 2048
"""Bounds on what is read behind a boundary: decoding and rendering so much keeps nobody waiting."""
GROWTH_BYTES_MIN = 1024
"""A cached conversation is replaced by one that is longer by so many bytes, or by a 32nd."""
VOLATILE_MESSAGES = 3
"""Messages at the end that clients send otherwise the next time: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Messages of a chat before a boundary; the first that is not the system's is among them."""
_STAND_IN_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {"name": OPENING_MARK, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
_PLACEHOLDER: Message = {"role": "user", "content": secrets.token_hex(16)}
_PLACEHOLDER_JSON = msgspec.json.encode(_PLACEHOLDER)

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class _Rest(NamedTuple):
    """What a body has behind a boundary."""

    request: RoutingRequest
    """The body's, with the placeholder instead of the cached messages, or with the opening ones."""
    chat: RoutingRequest
    """The chat that is rendered."""
    new_messages: list[Message]
    """Messages of the chat behind the boundary."""
    system_messages: int
    template_digest: bytes
    message_ends: list[int]
    """Offsets in the body: ends of its new messages."""
    messages_end: int
    """Offset in the body: end of its array of messages."""


class _Cut(NamedTuple):
    """Where a text is cut, and what the template writes of the messages that stand in for those before."""

    position: int
    stand_in_text: str
    shows_opening: bool


class Continuation(NamedTuple):
    """The whole prompt of a body that continues a cached conversation."""

    conversation: CachedConversation
    boundary: Boundary
    rest: _Rest
    token_ids: array[int]
    char_count: int
    """Characters of the prompt's text."""
    successor: CachedConversation | None
    """What is to be cached instead of the conversation, or beside it."""

    @property
    def request(self) -> RoutingRequest:
        """The body's request. Of a chat's messages it has those that open it, and the new ones."""
        rest = self.rest
        if self.conversation.kind != "chat":
            return rest.request
        return rest.request.with_messages([*self.conversation.opening_messages, *rest.new_messages])

    @property
    def predecessor(self) -> CachedConversation | None:
        """The conversation that `successor` replaces."""
        return self.conversation if self.boundary is self.conversation.boundaries[-1] else None

    def outline(self) -> Outline | None:
        """Outline the whole chat. None where the new part depends on the template: a system message that comes late."""
        conversation = self.conversation
        if _depends_on_template(self.rest.request):
            return None
        fingerprints = conversation.message_fingerprints[: FINGERPRINT_BYTES * self.boundary.message_count]
        return Outline(
            fingerprints + fingerprint_messages(self.rest.new_messages),
            conversation.tool_fingerprints,
            conversation.options_digest,
        )


def is_cacheable(kind: ApiKind | None, size: int) -> bool:
    """Whether the conversation of a body of so many bytes may be cached."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= size <= BODY_BYTES_MAX


def cache_conversation(
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, tokenizer: Tokenizer | None
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole. None where it cannot be cached."""
    kind, chat, prompt_ids, text = request.kind, prompt.chat, prompt.token_ids, prompt.text
    template = None if tokenizer is None else tokenizer.chat_template
    if template is None or tokenizer is None or chat is None or prompt_ids is None or not _is_supported(request, chat):
        return None
    located = _locate_messages(body)
    chat_outline, messages = outline_chat(request), chat.messages
    if located is None or chat_outline is None or messages is None:
        return None
    messages_start, message_ends, messages_end = located
    is_chat = kind == "chat"
    opening_count = 1 + next((i for i, message in enumerate(messages) if not _is_instruction(message)), len(messages))
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    boundaries, stand_in, previous_count, shows_opening = list[Boundary](), StandIn(), 0, False
    compared_texts, system_messages = _find_compared_texts(template, chat), 0
    if not is_chat:
        source_system = getattr(request.source, "system", None)
        system_messages = 1 if source_system and messages[0].get("role") == "system" else 0
    for volatile_messages in _choose_volatile_messages(messages, len(message_ends), is_chat=is_chat):
        number = len(message_ends) - volatile_messages
        message_count = number
        if not is_chat:
            rest = _read_rest(kind, messages_start, message_ends[number - 1], body, template)
            if rest is None or rest.system_messages != system_messages:
                return None
            message_count = len(messages) - len(rest.new_messages)
            if messages[message_count:] != rest.new_messages:
                continue
        is_far_enough = max(opening_count, MESSAGES_MIN, previous_count + 1) <= message_count
        if not is_far_enough or message_count == len(messages):
            continue
        stand_in = stand_in.extend(messages[previous_count:message_count], compared_texts)
        previous_count = message_count
        cut = _cut(tokenizer, chat, stand_in, messages[message_count:], text, messages[0], shows_opening=shows_opening)
        if cut is None:
            continue
        tail_ids = tokenizer.encode_array(text[cut.position :], add_special_tokens=False)
        token_count, shows_opening = len(token_ids) - len(tail_ids), cut.shows_opening
        if token_ids[token_count:] != array(ID_TYPE, tail_ids):
            continue
        body_end = message_ends[number - 1]
        boundaries.append(
            Boundary(
                body_end, count_openings(body, body_end), message_count, token_count, cut.position, stand_in,
                cut.stand_in_text, cut.shows_opening, messages[message_count].get("role") == "user", volatile_messages,
            )
        )  # fmt: skip
    if not boundaries:
        return None
    return CachedConversation(
        kind, messages_start, _digest_template_inputs(template, chat, system_messages), system_messages,
        messages[:opening_count], chat_outline.messages[: FINGERPRINT_BYTES * boundaries[-1].message_count],
        chat_outline.tools, chat_outline.options_digest, boundaries, token_ids, len(body) - messages_end,
        _digest_end(body, messages_end), chat.with_messages(None) if is_chat else None,
        template.keeps_messages_as_sent,
    )  # fmt: skip


def _is_instruction(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _choose_volatile_messages(messages: list[Message], body_messages: int, *, is_chat: bool) -> list[int]:
    """Return how many of a body's messages are behind the boundaries to be made, most first."""
    choices = {1, VOLATILE_MESSAGES}
    if is_chat:
        last_question = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=0)
        choices.add(body_messages - last_question)
    return sorted((choice for choice in choices if 0 < choice < body_messages), reverse=True)


def continue_conversation(
    conversation: CachedConversation, boundary: Boundary, body: bytes, tokenizer: Tokenizer, *, further_differs: bool
) -> Continuation | None:  # fmt: skip
    """Read the prompt of a body that has this boundary. None where the template may have written what is before it
    otherwise, and where more than messages is another than before. `further_differs`: the body has other messages
    before further boundaries of the conversation, if there are any."""
    template = tokenizer.chat_template
    if template is None or boundary.object_count > OBJECTS_MAX - REST_OBJECTS_MAX:
        return None
    rest = _read_new_messages(conversation, boundary, body, template) or _read_rest(
        conversation.kind, conversation.messages_start, boundary.body_end, body, template
    )
    if (
        rest is None
        or rest.template_digest != conversation.template_digest
        or rest.system_messages != conversation.system_messages
    ):
        return None
    if conversation.kind == "messages" and not rest.new_messages:
        return None  # a last message of the assistant would be continued, and a cached one was not the last
    stand_in_text, shows_opening = boundary.stand_in_text, boundary.shows_opening
    try:
        rendered_text = _render(
            template, rest.chat, boundary.stand_in, rest.new_messages,
            conversation.opening_messages[0] if shows_opening else None,
        )  # fmt: skip
    except RequestError:
        return None
    text = rendered_text[len(stand_in_text) :]
    if not rendered_text.startswith(stand_in_text) or not tokenizer.starts_segment(text):
        return None
    if MARK in text or OPENING_MARK in text:
        return None  # what only stands in for something is shown
    new_boundary, position = _advance(
        conversation, boundary, rest, body, text, tokenizer, further_differs=further_differs
    ) or (None, 0)
    text_ids = _encode(tokenizer, text[:position])
    token_count = boundary.token_count + len(text_ids)
    text_ids += _encode(tokenizer, text[position:])
    token_ids = conversation.token_ids[: boundary.token_count + len(text_ids)]  # as long as it will be, where it can
    token_ids[boundary.token_count :] = text_ids
    continuation = Continuation(conversation, boundary, rest, token_ids, boundary.char_count + len(text), None)
    if new_boundary is None:
        return continuation
    new_boundary = msgspec.structs.replace(new_boundary, token_count=token_count)
    return continuation._replace(successor=_make_successor(continuation, new_boundary, body))


def _encode(tokenizer: Tokenizer, text: str) -> array[int]:
    ids = tokenizer.encode_array(text, add_special_tokens=False) if text else ()
    return ids if isinstance(ids, array) else array(ID_TYPE, ids)


def _advance(
    conversation: CachedConversation, boundary: Boundary, rest: _Rest, body: bytes, text: str, tokenizer: Tokenizer,
    *, further_differs: bool,
) -> tuple[Boundary, int] | None:  # fmt: skip
    """Make the next boundary of a body, without its number of tokens, and find where it cuts the text behind
    `boundary`. None where little would be won."""
    if len(body) - boundary.body_end < max(GROWTH_BYTES_MIN, boundary.body_end >> 5):
        return None
    template, is_last = tokenizer.chat_template, boundary is conversation.boundaries[-1]
    assert template is not None
    is_volatile = boundary.volatile_messages == VOLATILE_MESSAGES or (further_differs and not is_last)
    volatile_messages = VOLATILE_MESSAGES if is_volatile else 1
    number = len(rest.message_ends) - volatile_messages
    if number < 1 or _depends_on_template(rest.request):
        return None
    body_end, new_count = rest.message_ends[number - 1], number
    if conversation.kind != "chat":
        last_rest = _read_rest(conversation.kind, conversation.messages_start, body_end, body, template)
        if last_rest is None or last_rest.template_digest != conversation.template_digest:
            return None
        new_count = len(rest.new_messages) - len(last_rest.new_messages)
        if not 0 < new_count < len(rest.new_messages) or rest.new_messages[new_count:] != last_rest.new_messages:
            return None
    tail_messages = rest.new_messages[new_count:]
    stand_in = boundary.stand_in.extend(rest.new_messages[:new_count], _find_compared_texts(template, rest.chat))
    cut = _cut(
        tokenizer, rest.chat, stand_in, tail_messages, text, conversation.opening_messages[0],
        shows_opening=boundary.shows_opening,
    )  # fmt: skip
    if cut is None or not cut.position:
        return None
    object_count = boundary.object_count + count_openings(body[boundary.body_end : body_end])
    new_boundary = Boundary(
        body_end, object_count, boundary.message_count + new_count, 0, boundary.char_count + cut.position, stand_in,
        cut.stand_in_text, cut.shows_opening, tail_messages[0].get("role") == "user", volatile_messages,
    )  # fmt: skip
    return new_boundary, cut.position


def _make_successor(continuation: Continuation, new_boundary: Boundary, body: bytes) -> CachedConversation:
    conversation, boundary, rest, token_ids, _, _ = continuation
    boundaries = [earlier for earlier in conversation.boundaries if earlier.body_end <= boundary.body_end]
    while len(boundaries) >= BOUNDARIES_MAX:
        turn_starts = [i for i, earlier in enumerate(boundaries) if earlier.starts_turn]
        boundaries.pop(1 if turn_starts and turn_starts[-1] == 0 else 0)
    new_count = new_boundary.message_count - boundary.message_count
    fingerprints = conversation.message_fingerprints[: FINGERPRINT_BYTES * boundary.message_count]
    return CachedConversation(
        conversation.kind, conversation.messages_start, conversation.template_digest, conversation.system_messages,
        conversation.opening_messages, fingerprints + fingerprint_messages(rest.new_messages[:new_count]),
        conversation.tool_fingerprints, conversation.options_digest, [*boundaries, new_boundary], token_ids,
        len(body) - rest.messages_end, _digest_end(body, rest.messages_end),
        rest.chat.with_messages(None) if conversation.kind == "chat" else None, conversation.as_sent,
        conversation.model,
    )  # fmt: skip


# Rendering ------------------------------------------------------------------------------------------------------------


def _render(
    template: ChatTemplate, chat: RoutingRequest, stand_in: StandIn, messages: list[Message],
    first_message: Message | None,
) -> str:  # fmt: skip
    """Render messages behind those that stand in for what is before. `first_message`: of the chat, where the template
    may write that, and the tools, behind the boundary. Raises RequestError."""
    rendered_messages = [*stand_in.messages, *messages]
    if first_message is None:
        return render_chat(template, chat.replace(messages=rendered_messages, tools=chat.tools and _STAND_IN_TOOLS))
    if _is_instruction(first_message):
        rendered_messages[0] = first_message
    return render_chat(template, chat.with_messages(rendered_messages))


def _cut(
    tokenizer: Tokenizer, chat: RoutingRequest, stand_in: StandIn, tail_messages: list[Message], text: str,
    first_message: Message, *, shows_opening: bool,
) -> _Cut | None:  # fmt: skip
    """Find where the end of a prompt's text may be cut, if the last messages are those of the tail."""
    template = tokenizer.chat_template
    assert template is not None
    if len(stand_in.messages) > MESSAGES_MAX:
        return None
    try:
        rendered_text = _render(template, chat, stand_in, tail_messages, first_message if shows_opening else None)
    except RequestError:
        return None
    position = tokenizer.find_segment(text, len(text) - _count_common_end(text, rendered_text))
    if position is None or len(rendered_text) <= len(text) - position:
        return None
    stand_in_chars = len(rendered_text) - (len(text) - position)
    if not shows_opening and rendered_text.rfind(OPENING_MARK) > rendered_text.rfind(MARK):
        return _cut(tokenizer, chat, stand_in, tail_messages, text, first_message, shows_opening=True)
    return _Cut(position, rendered_text[:stand_in_chars], shows_opening)


def _count_common_end(first: str, second: str) -> int:
    """Return the number of characters with which both texts end."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def _find_compared_texts(template: ChatTemplate, chat: RoutingRequest) -> tuple[str, ...]:
    return find_compared_texts(template.select_source(has_tools=chat.tools is not None))


def _digest_template_inputs(template: ChatTemplate, chat: RoutingRequest, system_messages: int) -> bytes:
    """Digest what the prompt hangs on besides the messages of the body's array."""
    inputs = (
        chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
        template.keeps_messages_as_sent, (chat.messages or [])[:system_messages],
    )  # fmt: skip
    return blake2b(msgspec.json.encode(inputs), digest_size=16).digest()


def _is_supported(request: RoutingRequest, chat: RoutingRequest) -> bool:
    """Whether the prompt of a chat is that of its text, and is the same for every template that may come."""
    if chat.chat_template is not None or chat.scores_prompt or chat.has_media or chat.kind != "chat":
        return False
    return not (chat.continue_final_message or chat.add_special_tokens or _depends_on_template(request))


def _depends_on_template(request: RoutingRequest) -> bool:
    """Whether the chat that it stands for is another one for another template."""
    return isinstance(request.source, MessagesRequest) and depends_on_template(request.source)


# Bodies ---------------------------------------------------------------------------------------------------------------


def _read_new_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> _Rest | None:
    """Read the messages behind a boundary of a chat in which only messages are new. None where more is: what stands
    behind the messages has to be what the cached body had there."""
    bare_request, start, end = conversation.bare_request, boundary.body_end, len(body) - conversation.end_bytes
    if bare_request is None or template.keeps_messages_as_sent != conversation.as_sent:
        return None
    if not start <= end <= start + REST_BYTES_MAX or _digest_end(body, end) != conversation.end_digest:
        return None
    array_json = b"[{}%b]" % body[start:end]
    if count_openings(array_json) > REST_OBJECTS_MAX:
        return None
    try:
        messages = _messages_decoder.decode(array_json)
        message_ends = _find_item_ends(array_json, 0)[1:]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if has_media(messages):
        return None
    shift = start - len(b"[{}")
    return _Rest(
        bare_request, bare_request, messages[1:], conversation.system_messages, conversation.template_digest,
        [message_end + shift for message_end in message_ends], end,
    )  # fmt: skip


def _read_rest(
    kind: ApiKind, messages_start: int, prefix_end: int, body: bytes, template: ChatTemplate
) -> _Rest | None:
    """Read a body with a placeholder in place of its messages before `prefix_end`."""
    if messages_start + len(body) - prefix_end > REST_BYTES_MAX:
        return None
    short_body = b"%b%b%b" % (body[: messages_start + 1], _PLACEHOLDER_JSON, body[prefix_end:])
    if count_openings(short_body) > REST_OBJECTS_MAX:
        return None
    try:
        request = parse_routing_of_kind(kind, short_body)
        chat = request if request.source is None else convert_source_to_chat(request, template)
        located = _locate_messages(short_body, messages_start)
    except RequestError:
        return None
    messages = chat.messages or []
    system_messages = 0 if messages[:1] == [_PLACEHOLDER] else 1
    if located is None or messages[system_messages : system_messages + 1] != [_PLACEHOLDER]:
        return None
    if not _is_supported(request, chat):
        return None
    _, message_ends, messages_end = located
    shift = len(body) - len(short_body)
    return _Rest(
        request, chat, messages[system_messages + 1 :], system_messages,
        _digest_template_inputs(template, chat, system_messages),
        [message_end + shift for message_end in message_ends[1:]], messages_end + shift,
    )  # fmt: skip


def _locate_messages(body: bytes, messages_start: int | None = None) -> tuple[int, list[int], int] | None:
    """Locate a body's array of messages: its start, the end of each message, and the closing bracket. None where there
    is none, or more than one begins like it. `messages_start`: where it begins, if known."""
    try:
        array_json = bytes(_fields_decoder.decode(body).get("messages", b""))
        if messages_start is None:
            messages_start = body.find(array_json[:256])
        if not array_json.startswith(b"[") or not body.startswith(array_json, messages_start):
            return None
        message_ends = _find_item_ends(array_json, messages_start)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return messages_start, message_ends, messages_start + len(array_json) - 1


def _find_item_ends(array_json: bytes, start: int) -> list[int]:
    """Return the offsets at which the items of an array end, which itself begins at `start`."""
    position, ends = 1, list[int]()
    for item in _items_decoder.decode(array_json):
        while array_json[position] in b" \t\r\n,":
            position += 1
        position += len(memoryview(item))
        ends.append(start + position)
    return ends


def _digest_end(body: bytes, end: int) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(body)[end:])
