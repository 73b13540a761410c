"""Read a body that continues a cached conversation: only what stands behind the boundary that both share. Pure.

The prompt is the cached ids and those of the text that is rendered behind the boundary (router/prompting/
boundary_rendering.py). Which templates allow this is tried out when they are loaded (router/prompting/
template_trial.py).
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import xxhash

from prompts.anthropic import MessagesRequest, depends_on_template
from prompts.body_digests import count_openings
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, convert_source_to_chat, has_media, parse_routing_of_kind
from prompts.schemas import Message
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.prompting.boundary_rendering import BoundaryRenderer, TemplateInputs, is_instruction
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
from router.prompting.stand_in import StandIn

REST_BYTES_MAX, REST_OBJECTS_MAX = 256 << 10, 2048
"""Bounds on what is read behind a boundary: decoding and rendering so much keeps nobody waiting."""
GROWTH_BYTES_MIN = 1024
"""A cached conversation is replaced by one that is longer by so many bytes, or by a 32nd."""
VOLATILE_MESSAGES = 3
"""Messages at the end that clients send otherwise the next time: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Messages of a chat before a boundary; the first that is not the system's is among them."""
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
    array_json: bytes
    """The new messages behind another one, as an array."""
    array_shift: int
    """Offset of that array in the body, if it were there."""
    messages_end: int
    """Offset in the body: end of its array of messages."""

    def find_message_ends(self) -> list[int]:
        """Return the offsets in the body at which its new messages end."""
        return _find_item_ends(self.array_json, self.array_shift)[1:]


class _MessagesLocation(NamedTuple):
    """Offsets in a body: of its array of messages, of the ends of these, and of the closing bracket."""

    start: int
    message_ends: list[int]
    end: int


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
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, renderer: BoundaryRenderer
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole. None where it cannot be cached."""
    kind, chat, prompt_ids = request.kind, prompt.chat, prompt.token_ids
    if chat is None or prompt_ids is None or chat.messages is None or not _is_supported(request, chat):
        return None
    location, chat_outline, messages = _locate_messages(body), outline_chat(request), chat.messages
    if location is None or chat_outline is None:
        return None
    has_system = kind != "chat" and bool(getattr(request.source, "system", None)) and is_instruction(messages[0])
    system_messages, template = int(has_system), renderer.template
    inputs = TemplateInputs(chat, _digest_template_inputs(template, chat, system_messages), messages[0])
    opening_count = 1 + next((i for i, message in enumerate(messages) if not is_instruction(message)), len(messages))
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    boundaries = _make_first_boundaries(
        kind, body, location, prompt.text, token_ids, messages, opening_count, inputs, system_messages, renderer
    )
    if not boundaries:
        return None
    return CachedConversation(
        kind, location.start, inputs.digest, system_messages, messages[:opening_count],
        chat_outline.messages[: FINGERPRINT_BYTES * boundaries[-1].message_count], chat_outline.tools,
        chat_outline.options_digest, boundaries, token_ids, len(body) - location.end, _digest_end(body, location.end),
        chat.with_messages(None) if kind == "chat" else None, template.keeps_messages_as_sent,
    )  # fmt: skip


def _make_first_boundaries(
    kind: ApiKind, body: bytes, location: _MessagesLocation, text: str, token_ids: array[int], messages: list[Message],
    opening_count: int, inputs: TemplateInputs, system_messages: int, renderer: BoundaryRenderer,
) -> list[Boundary]:  # fmt: skip
    """Make the boundaries of a body that was read whole, the furthest last."""
    boundaries, stand_in, previous_count, shows_opening = list[Boundary](), StandIn(), 0, False
    compared_texts = renderer.find_compared_texts(inputs.chat)
    for volatile_messages in _choose_volatile_messages(kind, messages, len(location.message_ends)):
        number = len(location.message_ends) - volatile_messages
        body_end, message_count = location.message_ends[number - 1], number
        if kind != "chat":
            rest = _read_rest(kind, location.start, body_end, body, renderer.template)
            if rest is None or rest.system_messages != system_messages:
                return []
            message_count = len(messages) - len(rest.new_messages)
            if messages[message_count:] != rest.new_messages:
                continue
        is_far_enough = max(opening_count, MESSAGES_MIN, previous_count + 1) <= message_count
        if not is_far_enough or message_count == len(messages):
            continue
        stand_in = stand_in.extend(messages[previous_count:message_count], compared_texts)
        previous_count = message_count
        cut = renderer.cut(stand_in, inputs, messages[message_count:], text, shows_opening=shows_opening)
        if cut is None:
            continue
        tail_ids = renderer.tokenizer.encode_array(text[cut.position :], add_special_tokens=False)
        token_count, shows_opening = len(token_ids) - len(tail_ids), cut.shows_opening
        if token_ids[token_count:] == array(ID_TYPE, tail_ids):
            boundaries.append(
                Boundary(
                    body_end, count_openings(body, body_end), message_count, token_count, cut.position, *cut[1:],
                    messages[message_count].get("role") == "user", volatile_messages,
                )
            )  # fmt: skip
    return boundaries


def _choose_volatile_messages(kind: ApiKind, messages: list[Message], body_messages: int) -> list[int]:
    """Return how many of a body's messages are behind the boundaries to be made, most first."""
    choices = {1, VOLATILE_MESSAGES}
    if kind == "chat":
        last_question = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=0)
        choices.add(body_messages - last_question)
    return sorted((choice for choice in choices if 0 < choice < body_messages), reverse=True)


def continue_conversation(
    conversation: CachedConversation,
    boundary: Boundary,
    body: bytes,
    renderer: BoundaryRenderer,
    further_differs: bool = False,
) -> Continuation | None:
    """Read the prompt of a body that has this boundary. None where the template may have written what is before it
    otherwise, and where more than messages is another than before. `further_differs`: the body has other messages
    before further boundaries of the conversation, if there are any."""
    template, tokenizer = renderer.template, renderer.tokenizer
    if boundary.object_count > OBJECTS_MAX - REST_OBJECTS_MAX:
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
    inputs = TemplateInputs(rest.chat, rest.template_digest, conversation.opening_messages[0])
    text = renderer.render_behind(boundary, inputs, rest.new_messages)
    if text is None:
        return None
    new_boundary, position = _advance(
        conversation, boundary, rest, inputs, body, text, renderer, further_differs=further_differs
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
    conversation: CachedConversation, boundary: Boundary, rest: _Rest, inputs: TemplateInputs, body: bytes, text: str,
    renderer: BoundaryRenderer, *, further_differs: bool,
) -> tuple[Boundary, int] | None:  # fmt: skip
    """Make the next boundary of a body, without its number of tokens, and find where it cuts the text behind
    `boundary`. None where little would be won."""
    if len(body) - boundary.body_end < max(GROWTH_BYTES_MIN, boundary.body_end >> 5):
        return None
    is_last = boundary is conversation.boundaries[-1]
    is_volatile = boundary.volatile_messages == VOLATILE_MESSAGES or (further_differs and not is_last)
    volatile_messages = VOLATILE_MESSAGES if is_volatile else 1
    message_ends = rest.find_message_ends()
    number = len(message_ends) - volatile_messages
    if number < 1 or _depends_on_template(rest.request):
        return None
    body_end, new_count = message_ends[number - 1], number
    if conversation.kind != "chat":
        last_rest = _read_rest(conversation.kind, conversation.messages_start, body_end, body, renderer.template)
        if last_rest is None or last_rest.template_digest != conversation.template_digest:
            return None
        new_count = len(rest.new_messages) - len(last_rest.new_messages)
        if not 0 < new_count < len(rest.new_messages) or rest.new_messages[new_count:] != last_rest.new_messages:
            return None
    cut = renderer.cut_behind(boundary, inputs, rest.new_messages, new_count, text)
    if cut is None or not cut.position:
        return None
    object_count = boundary.object_count + count_openings(body[boundary.body_end : body_end])
    new_boundary = Boundary(
        body_end, object_count, boundary.message_count + new_count, 0, boundary.char_count + cut.position, *cut[1:],
        rest.new_messages[new_count].get("role") == "user", volatile_messages,
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
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if has_media(messages):
        return None
    return _Rest(
        bare_request, bare_request, messages[1:], conversation.system_messages, conversation.template_digest,
        array_json, start - len(b"[{}"), end,
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
        location = _locate_messages(short_body, messages_start)
    except RequestError:
        return None
    messages = chat.messages or []
    system_messages = 0 if messages[:1] == [_PLACEHOLDER] else 1
    if location is None or messages[system_messages : system_messages + 1] != [_PLACEHOLDER]:
        return None
    if not _is_supported(request, chat):
        return None
    shift = len(body) - len(short_body)
    return _Rest(
        request, chat, messages[system_messages + 1 :], system_messages,
        _digest_template_inputs(template, chat, system_messages),
        short_body[location.start : location.end + 1], location.start + shift, location.end + shift,
    )  # fmt: skip


def _locate_messages(body: bytes, messages_start: int | None = None) -> _MessagesLocation | None:
    """Locate a body's array of messages. None where there is none, or more than one begins like it. `messages_start`:
    where it begins, if known."""
    try:
        array_json = bytes(_fields_decoder.decode(body).get("messages", b""))
        if messages_start is None:
            messages_start = body.find(array_json[:256])
        if not array_json.startswith(b"[") or not body.startswith(array_json, messages_start):
            return None
        message_ends = _find_item_ends(array_json, messages_start)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return _MessagesLocation(messages_start, message_ends, messages_start + len(array_json) - 1)


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
