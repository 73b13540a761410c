"""Read a body that continues a cached conversation: only its part after the boundary that both share. No I/O.

The prompt is the cached token ids and those of the text that is rendered after the boundary (router/prompting/
boundary_rendering.py). Which templates allow this is tried out when they are loaded (router/prompting/
template_trial.py).
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import msgspec

from prompts.anthropic import MessagesRequest, depends_on_template
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import (
    ApiKind,
    RoutingRequest,
    convert_source_to_chat,
    has_media,
    parse_routing_of_kind,
    raw_fields_decoder,
)
from prompts.schemas import Message
from prompts.tokenizer import ID_TYPE
from router.prompting.boundary_rendering import BoundaryRenderer, Cut, RenderedMessages, TemplateInputs
from router.prompting.conversation_cache import (
    BODY_BYTES_MAX,
    BODY_BYTES_MIN,
    BOUNDARIES_MAX,
    Boundary,
    CachedConversation,
    ChatFields,
    OtherInputs,
)
from router.prompting.encode import RenderedPrompt, has_more_objects
from router.prompting.outline import FINGERPRINT_BYTES, Outline, fingerprint_messages
from router.prompting.placeholder_messages import PlaceholderMessages, is_system_message

TAIL_BYTES_MAX, TAIL_BRACKETS_MAX = 256 << 10, 2048
"""Largest part of a body that is read after a boundary, so that other requests do not wait."""
GROWTH_BYTES_MIN = 1024
"""A cached conversation is replaced by one that is longer by this number of bytes, or by a 32nd."""
TRAILING_MESSAGES = 3
"""Last messages that a client's next request may change: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Fewest messages of a chat before a boundary. The first message without the role `system` is among them."""
_SENTINEL_MESSAGE: Message = {"role": "user", "content": secrets.token_hex(16)}
"""Message in a body in place of all messages before a boundary."""
_SENTINEL_JSON = msgspec.json.encode(_SENTINEL_MESSAGE)

_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class _MessagesArray(msgspec.Struct, frozen=True, eq=False):
    """A body's array of messages: its place and its bytes."""

    start: int
    """Offset in the body."""
    json: bytes

    @property
    def end(self) -> int:
        """Offset of the closing bracket."""
        return self.start + len(self.json) - 1

    def find_message_ends(self) -> list[int]:
        """Return the offsets in the body at which the messages end."""
        position, ends = 1, list[int]()
        for item in _items_decoder.decode(self.json):
            while self.json[position] in b" \t\r\n,":
                position += 1
            position += len(memoryview(item))
            ends.append(self.start + position)
        return ends


class _WholeConversation(msgspec.Struct, frozen=True, eq=False):
    """A body that was read whole and its prompt, for which a cache entry is to be made."""

    kind: ApiKind
    body: bytes
    messages_start: int
    """Offset in the body of its array of messages."""
    message_ends: list[int]
    """Offsets in the body at which its messages end."""
    inputs: TemplateInputs
    other_inputs: OtherInputs
    messages: list[Message]
    """Messages of the chat that was rendered."""
    text: str
    """Text of the prompt."""
    token_ids: array[int]

    @property
    def opening_message_count(self) -> int:
        """Number of messages up to the first that is not the system's."""
        return 1 + sum(1 for _ in takewhile(is_system_message, self.messages))


class _BodyTail(msgspec.Struct, frozen=True, eq=False):
    """The new part of a body that continues a cached one: its last messages, and what else the template depends on.

    It begins at a boundary, a place between two messages up to which both bodies are equal.
    """

    request: RoutingRequest
    """The body's request, with a sentinel instead of the cached messages, or without messages."""
    chat: RoutingRequest
    """The chat that is rendered; it differs from `request` in Anthropic's format."""
    new_messages: list[Message]
    """Messages of the chat after the boundary."""
    other_inputs: OtherInputs
    messages_array: _MessagesArray
    """The body's array of messages, of which a first one stands for all before the boundary."""

    def find_message_ends(self) -> list[int]:
        """Return the offsets in the body at which the new messages end."""
        return self.messages_array.find_message_ends()[1:]


class Continuation(msgspec.Struct, eq=False):
    """The whole prompt of a body that continues a cached conversation.

    It was made of the cached token ids before `boundary` and of the newly read `tail`.
    """

    conversation: CachedConversation
    boundary: Boundary
    tail: _BodyTail
    token_ids: array[int]
    char_count: int
    """Characters of the prompt's text."""
    successor: CachedConversation | None = None
    """Conversation to be cached instead of `conversation`, or beside it."""

    @property
    def predecessor(self) -> CachedConversation | None:
        """The conversation that `successor` replaces."""
        return self.conversation if self.boundary is self.conversation.boundaries[-1] else None

    def outline(self) -> Outline | None:
        """Outline the whole chat; None if the new part depends on the template, as a late system message does.

        None also if the cached messages were not outlined.
        """
        if _depends_on_template(self.tail.request):
            return None
        return _extend_outline(self.conversation.outline, self.boundary, self.tail.new_messages)


def is_cacheable(kind: ApiKind | None, body_bytes: int) -> bool:
    """Return whether the conversation of a body of this size may be cached."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= body_bytes <= BODY_BYTES_MAX


def cache_conversation(
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, outline: Outline | None, renderer: BoundaryRenderer
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole, so that the next turn can be read from its end on.

    `prompt` is the body's prompt, and `outline` that of its messages, if one was made. Return None if the prompt
    depends on more than its text, or if the text has no place after a message where it may be cut.
    """
    chat, prompt_ids = prompt.chat, prompt.token_ids
    if chat is None or prompt_ids is None or not chat.messages or not _is_supported(request, chat):
        return None
    messages = chat.messages
    messages_array = _locate_messages(body)
    if messages_array is None:
        return None
    has_system_field = request.kind != "chat" and bool(getattr(request.source, "system", None))
    other_inputs = _read_other_inputs(renderer.template, chat, int(has_system_field and is_system_message(messages[0])))
    whole = _WholeConversation(
        kind=request.kind,
        body=body,
        messages_start=messages_array.start,
        message_ends=messages_array.find_message_ends(),
        inputs=TemplateInputs(chat, other_inputs.digest, messages[0]),
        other_inputs=other_inputs,
        messages=messages,
        text=prompt.text,
        token_ids=prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids),
    )
    boundaries = _make_first_boundaries(whole, renderer)
    if not boundaries:
        return None
    chat_fields = None
    if request.kind == "chat":
        as_sent = renderer.template.keeps_messages_as_sent
        chat_fields = ChatFields.make(chat, body, messages_array.end, keeps_messages_as_sent=as_sent)
    return CachedConversation(
        kind=request.kind,
        messages_start=messages_array.start,
        other_inputs=other_inputs,
        first_message=messages[0],
        outline=_extend_outline(outline, boundaries[-1], []),
        boundaries=boundaries,
        token_ids=whole.token_ids,
        chat_fields=chat_fields,
    )


def _make_first_boundaries(whole: _WholeConversation, renderer: BoundaryRenderer) -> list[Boundary]:
    """Return the boundaries of a body that was read whole, in ascending order.

    A boundary is a place after a message up to which the next request may be equal. Placeholder messages stand for the
    messages before it when a later request is rendered.
    """
    boundaries: list[Boundary] = []
    messages = whole.messages
    placeholders = PlaceholderMessages()
    placeholder_count = 0  # messages of the chat for which the placeholders stand
    has_late_system = False
    markers = renderer.find_markers(whole.inputs.chat)
    for trailing_count in _choose_trailing_counts(whole):
        message_count = _count_messages_before(whole, trailing_count, renderer.template)
        message_count_min = max(whole.opening_message_count, MESSAGES_MIN, placeholder_count + 1)
        if message_count is None or not message_count_min <= message_count < len(messages):
            continue
        extended = placeholders.extend(messages[placeholder_count:message_count], markers)
        if extended is None:  # no placeholder can stand for one of the messages, and later boundaries include it
            break
        placeholders, placeholder_count = extended, message_count
        cut = renderer.cut(
            placeholders, whole.inputs, messages[message_count:], whole.text, has_late_system=has_late_system
        )
        if cut is None:
            continue
        has_late_system = cut.rendered.has_late_system
        boundary = _make_boundary(whole, message_count, trailing_count, cut, renderer)
        if boundary is not None:
            boundaries.append(boundary)
    return boundaries


def _make_boundary(
    whole: _WholeConversation, message_count: int, trailing_count: int, cut: Cut, renderer: BoundaryRenderer
) -> Boundary | None:
    """Make the boundary after the first `message_count` messages of a chat, where the text of its prompt can be cut.

    Return None if the text after the cut has other tokens when it is encoded on its own.
    """
    tail_ids = renderer.tokenizer.encode_array(whole.text[cut.position :], add_special_tokens=False)
    token_count = len(whole.token_ids) - len(tail_ids)
    if whole.token_ids[token_count:] != tail_ids:
        return None
    return Boundary(
        body_end=whole.message_ends[-trailing_count - 1],
        message_count=message_count,
        token_count=token_count,
        char_count=cut.position,
        rendered=cut.rendered,
        starts_turn=whole.messages[message_count].get("role") == "user",
        trailing_count=trailing_count,
    )


def _choose_trailing_counts(whole: _WholeConversation) -> list[int]:
    """Choose where the next request can continue this one: return how many last messages are left out, most first.

    The next request of a client appends to this one, but may change its last few messages. In a chat, the last question
    and the messages after it may be left out too, as a template may write them otherwise once there is a new question.
    """
    message_count = len(whole.message_ends)
    trailing_counts = {1, TRAILING_MESSAGES}
    if whole.kind == "chat":  # also a boundary before the last question
        question_indices = [i for i, message in enumerate(whole.messages) if message.get("role") == "user"]
        trailing_counts.add(message_count - max(question_indices, default=0))
    return sorted((count for count in trailing_counts if 0 < count < message_count), reverse=True)


def _count_messages_before(whole: _WholeConversation, trailing_count: int, template: ChatTemplate) -> int | None:
    """Count the chat's messages that were made from all but the last `trailing_count` messages of the body.

    Return None if a message of the chat was made from messages on both sides, so that the chat cannot be cut there.
    """
    if whole.kind == "chat":
        return len(whole.message_ends) - trailing_count
    body_end = whole.message_ends[-trailing_count - 1]
    tail = _read_tail(whole.kind, whole.messages_start, body_end, whole.body, template)
    if tail is None or tail.other_inputs.system_message_count != whole.other_inputs.system_message_count:
        return None
    return _count_before_tail(whole.messages, tail)


def _count_before_tail(messages: list[Message], tail: _BodyTail) -> int | None:
    """Count the messages of a chat before those of a tail of its body; None if the chat does not end with these.

    In Anthropic's format one message of a body may become several of the chat, or several may become one.
    """
    count = len(messages) - len(tail.new_messages)
    return count if count >= 0 and messages[count:] == tail.new_messages else None


def continue_conversation(
    conversation: CachedConversation,
    boundary: Boundary,
    body: bytes,
    renderer: BoundaryRenderer,
    *,
    further_differs: bool = False,
) -> Continuation | None:
    """Tokenise the prompt of a body that is equal to a cached one up to `boundary`, a place between two messages.

    Only the messages after it are rendered and encoded; their ids are appended to the cached ones. Return None if more
    than the messages changed (tools, options), or if the template may write the cached messages otherwise now.
    `further_differs`: the body is known to differ from the cached one before its next boundary.
    """
    tail = _read_chat_tail(conversation, boundary, body, renderer.template) or _read_tail(
        conversation.kind, conversation.messages_start, boundary.body_end, body, renderer.template
    )
    if tail is None or not _has_same_inputs(conversation, tail):
        return None
    inputs = TemplateInputs(tail.chat, tail.other_inputs.digest, conversation.first_message)
    new_messages = renderer.render_new(boundary.rendered, inputs, tail.new_messages)
    if new_messages is None:
        return None
    next_boundary = _find_next_boundary(
        conversation, boundary, tail, new_messages, body, further_differs=further_differs
    )
    text, text_ids, next_position = new_messages.text, array(ID_TYPE), 0
    if next_boundary is not None:  # the text is encoded in two parts to count the tokens before the next boundary
        next_position = next_boundary.char_count - boundary.char_count
        text_ids = renderer.tokenizer.encode_array(text[:next_position], add_special_tokens=False)
    next_token_count = boundary.token_count + len(text_ids)
    text_ids += renderer.tokenizer.encode_array(text[next_position:], add_special_tokens=False)
    token_ids = conversation.token_ids[: boundary.token_count + len(text_ids)]  # often the final length: no copy later
    token_ids[boundary.token_count :] = text_ids
    continuation = Continuation(conversation, boundary, tail, token_ids, boundary.char_count + len(text))
    if next_boundary is not None:
        next_boundary = msgspec.structs.replace(next_boundary, token_count=next_token_count)
        continuation.successor = _make_successor(continuation, next_boundary, body)
    return continuation


def _has_same_inputs(conversation: CachedConversation, tail: _BodyTail) -> bool:
    """Whether a template gets the same tools, options and system text as it got for the cached conversation."""
    if conversation.kind == "messages" and not tail.new_messages:
        return False  # a last message of the assistant would be continued, and a cached one was not the last
    return tail.other_inputs == conversation.other_inputs


def _find_next_boundary(
    conversation: CachedConversation,
    boundary: Boundary,
    tail: _BodyTail,
    new_messages: RenderedMessages,
    body: bytes,
    *,
    further_differs: bool,
) -> Boundary | None:
    """Make a boundary near the end of a continued body, at which the next request of the conversation can continue.

    Its number of tokens is not set yet. Return None if the boundary would save little, or if the prompt's text cannot
    be cut there.
    """
    has_grown = len(body) - boundary.body_end >= max(GROWTH_BYTES_MIN, boundary.body_end // 32)
    if not has_grown or len(tail.new_messages) < 2 or _depends_on_template(tail.request):
        return None
    message_ends = tail.find_message_ends()
    trailing_count = _choose_next_trailing_count(conversation, boundary, further_differs=further_differs)
    body_message_count = len(message_ends) - trailing_count
    if body_message_count <= 0:
        return None
    body_end = message_ends[body_message_count - 1]
    new_count: int | None = body_message_count
    if conversation.kind != "chat":
        new_count = _count_new_before(conversation, tail, body_end, body, new_messages.renderer.template)
    if not new_count:
        return None
    cut = new_messages.cut(new_count)
    if cut is None or not cut.position:
        return None
    return Boundary(
        body_end=body_end,
        message_count=boundary.message_count + new_count,
        token_count=0,
        char_count=boundary.char_count + cut.position,
        rendered=cut.rendered,
        starts_turn=tail.new_messages[new_count].get("role") == "user",
        trailing_count=trailing_count,
    )


def _count_new_before(
    conversation: CachedConversation, tail: _BodyTail, body_end: int, body: bytes, template: ChatTemplate
) -> int | None:
    """Count the new messages of a chat that were made from the body up to `body_end`.

    Return None if a message was made from both sides of that place, so that the chat cannot be cut there.
    """
    last_tail = _read_tail(conversation.kind, conversation.messages_start, body_end, body, template)
    if last_tail is None or not _has_same_inputs(conversation, last_tail):
        return None
    return _count_before_tail(tail.new_messages, last_tail)


def _choose_next_trailing_count(conversation: CachedConversation, boundary: Boundary, *, further_differs: bool) -> int:
    """Return how many messages should follow the next boundary: several if this client changes its last messages."""
    is_last_boundary = boundary is conversation.boundaries[-1]
    changes_last_messages = further_differs and not is_last_boundary
    return TRAILING_MESSAGES if changes_last_messages or boundary.trailing_count == TRAILING_MESSAGES else 1


def _make_successor(continuation: Continuation, next_boundary: Boundary, body: bytes) -> CachedConversation:
    """Make the cache entry of a continued body: the cached conversation with its new messages and one boundary more.

    If there are too many boundaries, the first one is dropped. The newest boundary before a user's message is kept,
    because some templates write the messages after it otherwise when the next question comes.
    """
    conversation, boundary, tail = continuation.conversation, continuation.boundary, continuation.tail
    boundaries = [earlier for earlier in conversation.boundaries if earlier.body_end <= boundary.body_end]
    while len(boundaries) >= BOUNDARIES_MAX:
        turn_starts = [i for i, earlier in enumerate(boundaries) if earlier.starts_turn]
        is_first_needed = bool(turn_starts) and turn_starts[-1] == 0
        boundaries.pop(1 if is_first_needed else 0)
    new_count = next_boundary.message_count - boundary.message_count
    fields = conversation.chat_fields
    if fields is not None and tail.chat is not fields.request:  # the body had to be parsed: it may have other fields
        as_sent = fields.keeps_messages_as_sent
        fields = ChatFields.make(tail.chat, body, tail.messages_array.end, keeps_messages_as_sent=as_sent)
    return msgspec.structs.replace(
        conversation,
        outline=_extend_outline(conversation.outline, boundary, tail.new_messages[:new_count]),
        boundaries=[*boundaries, next_boundary],
        token_ids=continuation.token_ids,
        chat_fields=fields,
    )


def _extend_outline(outline: Outline | None, boundary: Boundary, new_messages: list[Message]) -> Outline | None:
    """Return the outline of the messages before a boundary and of new ones after it; None without an `outline`."""
    if outline is None:
        return None
    cached_fingerprints = outline.messages[: FINGERPRINT_BYTES * boundary.message_count]
    return outline._replace(messages=cached_fingerprints + fingerprint_messages(new_messages))


def _read_other_inputs(template: ChatTemplate, chat: RoutingRequest, system_message_count: int) -> OtherInputs:
    """Return all inputs of a template but the messages of the body's array, as a digest.

    The first `system_message_count` messages of the chat are not from that array.
    """
    inputs = (
        chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
        template.keeps_messages_as_sent, (chat.messages or [])[:system_message_count],
    )  # fmt: skip
    return OtherInputs(blake2b(msgspec.json.encode(inputs), digest_size=16).digest(), system_message_count)


def _is_supported(request: RoutingRequest, chat: RoutingRequest) -> bool:
    """Return whether a chat's prompt is exactly the encoded text of its template, for every template that may come."""
    if chat.chat_template is not None or chat.scores_prompt or chat.has_media or chat.kind != "chat":
        return False
    return not (chat.continue_final_message or chat.add_special_tokens or _depends_on_template(request))


def _depends_on_template(request: RoutingRequest) -> bool:
    """Whether a body in Anthropic's format becomes another chat for another template."""
    return isinstance(request.source, MessagesRequest) and depends_on_template(request.source)


# Bodies ---------------------------------------------------------------------------------------------------------------


def _read_chat_tail(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> _BodyTail | None:
    """Read a chat's messages after a boundary without parsing its other fields, of which tools may be most of a body.

    Return None if the body is no chat, if its other fields are not those of the cached body, or if its messages cannot
    be read here. For a request of 4 KB without tools, parsing the whole body costs a tenth more instructions.
    """
    fields, start = conversation.chat_fields, boundary.body_end
    if fields is None or template.keeps_messages_as_sent != fields.keeps_messages_as_sent:
        return None
    end = fields.find_messages_end(body, start)
    if end is None or end - start > TAIL_BYTES_MAX:
        return None
    # The body has a comma after the boundary: an empty object before it completes the array.
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
    return _BodyTail(
        request=fields.request,
        chat=fields.request,
        new_messages=messages[1:],
        other_inputs=conversation.other_inputs,
        messages_array=_MessagesArray(start - len(array_start), array_json),
    )


def _read_tail(
    kind: ApiKind, messages_start: int, prefix_end: int, body: bytes, template: ChatTemplate
) -> _BodyTail | None:
    """Read a body without its messages before `prefix_end`, in whose place it gets a sentinel message.

    None if the rest is too large, or if its chat depends on more than the text of its messages.
    """
    if messages_start + len(body) - prefix_end > TAIL_BYTES_MAX:
        return None
    short_body = b"%b%b%b" % (body[: messages_start + 1], _SENTINEL_JSON, body[prefix_end:])
    if has_more_objects(short_body, TAIL_BRACKETS_MAX):
        return None
    try:
        request = parse_routing_of_kind(kind, short_body)
        chat = request if request.source is None else convert_source_to_chat(request, template)
        messages_array = _locate_messages(short_body, messages_start)
    except RequestError:
        return None
    # A system text beside the array becomes the first message of the chat; the sentinel comes after it.
    messages = chat.messages or []
    system_message_count = 0 if messages[:1] == [_SENTINEL_MESSAGE] else 1
    if messages_array is None or messages[system_message_count : system_message_count + 1] != [_SENTINEL_MESSAGE]:
        return None
    if not _is_supported(request, chat):
        return None
    removed_bytes = len(body) - len(short_body)
    return _BodyTail(
        request=request,
        chat=chat,
        new_messages=messages[system_message_count + 1 :],
        other_inputs=_read_other_inputs(template, chat, system_message_count),
        messages_array=_MessagesArray(messages_array.start + removed_bytes, messages_array.json),
    )


def _locate_messages(body: bytes, messages_start: int | None = None) -> _MessagesArray | None:
    """Return a body's array of messages; None if its place cannot be told, or if there is none.

    `messages_start`: offset of the array, if known. Else the array is searched by its first bytes.
    """
    try:
        array_json = bytes(raw_fields_decoder.decode(body).get("messages", b""))
        if messages_start is None:
            messages_start = body.find(array_json[:256])
        if not array_json.startswith(b"[") or not body.startswith(array_json, messages_start):
            return None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return _MessagesArray(messages_start, array_json)
