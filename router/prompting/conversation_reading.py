"""Read a body that continues a cached conversation: only its part after the boundary that both share. No I/O.

A boundary is a place between two messages. The prompt is the cached token ids before it, and those of the text that is
rendered for the messages after it.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from prompts.anthropic import MessagesRequest, convert_turns, depends_on_template
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import (
    ApiKind,
    RoutingRequest,
    convert_source_to_chat,
    has_media,
    parse_body,
    raw_fields_decoder,
)
from prompts.schemas import Message
from prompts.tokenizer import ID_TYPE
from router.prompting.boundary_rendering import BoundaryRenderer, RenderedMessages, TemplateInputs
from router.prompting.conversation_cache import (
    BODY_BYTES_MAX,
    BODY_BYTES_MIN,
    BOUNDARIES_MAX,
    Boundary,
    CachedConversation,
)
from router.prompting.encode import RenderedPrompt, has_more_objects
from router.prompting.outline import FINGERPRINT_BYTES, Outline, fingerprint_messages
from router.prompting.placeholder_messages import NO_PLACEHOLDERS, is_system_message

TAIL_BYTES_MAX, TAIL_BRACKETS_MAX = 256 << 10, 2048
"""Largest part of a body that is read after a boundary, so that other requests do not wait."""
GROWTH_BYTES_MIN = 1024
"""A cached conversation is replaced by one that is longer by this number of bytes, or by a 32nd."""
TRAILING_MESSAGES = 3
"""Last messages that a client's next request may change: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Fewest messages of a chat before a boundary. The first message without the role `system` is among them."""
_START = Boundary(
    body_end=0, message_count=0, token_count=0, prefix=NO_PLACEHOLDERS, starts_turn=False, trailing_count=0,
)  # fmt: skip
"""The start of a conversation."""
_SEARCHED_BYTES = 256
"""Bytes of an array by which it is found in its body."""
_SENTINEL_MESSAGE: Message = {"role": "user", "content": secrets.token_hex(16)}
"""Message in a body in place of all messages before a boundary."""
_SENTINEL_JSON = msgspec.json.encode(_SENTINEL_MESSAGE)

_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class _MessagesArray(msgspec.Struct, frozen=True, eq=False):
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


class _BodyTail(msgspec.Struct, frozen=True, eq=False):
    """The new messages of a request body, and its other fields.

    The body is equal to a cached body up to a boundary between two messages. Messages before it are not read again.
    """

    request: RoutingRequest
    """The body's request, with a sentinel message in place of all before the boundary, or without messages."""
    inputs: TemplateInputs
    """The template's inputs besides `messages`, such as tools and options."""
    messages: list[Message]
    """Messages of the chat after the boundary."""
    messages_array: _MessagesArray
    """The body's array of messages, whose first item stands for all messages before the boundary."""

    def find_message_ends(self) -> list[int]:
        """Return the offsets in the body at which the messages after the boundary end."""
        return self.messages_array.find_message_ends()[1:]


class _Cut(NamedTuple):
    """A place between two messages at which a body and the text of its prompt can be cut for the next turn."""

    rendered: RenderedMessages
    """The messages that are cut, with their text: the whole conversation, or its part after an earlier boundary."""
    after: RenderedMessages
    """The messages after the cut, with their text."""
    body_end: int
    """Offset of the cut in the body."""
    trailing_count: int
    """Messages of the body after the cut."""

    def make_boundary(self, previous_boundary: Boundary, token_count: int) -> Boundary:
        """Make the boundary at this cut from the previous one. `token_count`: tokens of the prompt before the cut."""
        return Boundary(
            body_end=self.body_end,
            message_count=previous_boundary.message_count + len(self.rendered.messages) - len(self.after.messages),
            token_count=token_count,
            prefix=self.after.prefix,
            starts_turn=self.after.messages[0].get("role") == "user",
            trailing_count=self.trailing_count,
        )


class Continuation(msgspec.Struct, eq=False):
    """The prompt of a request that continues a cached conversation: cached token ids, and those of its new messages."""

    conversation: CachedConversation
    boundary: Boundary
    """Place between two messages up to which the request and the conversation are equal."""
    tail: _BodyTail
    """The messages after the boundary."""
    token_ids: array[int]
    """Token ids of the whole prompt."""
    successor: CachedConversation | None = None
    """Cache entry of this request, for the next turn."""

    @property
    def predecessor(self) -> CachedConversation | None:
        """The cached conversation that `successor` replaces; None if both stay in the cache."""
        return self.conversation if self.boundary is self.conversation.boundaries[-1] else None

    def outline(self) -> Outline | None:
        """Return fingerprints of all messages; None if the cached ones have none, or a template may change new ones."""
        if depends_on_template(self.tail.request.source):
            return None
        return _extend_outline(self.conversation.outline, self.boundary, self.tail.messages)


def is_cacheable(kind: ApiKind | None, body_bytes: int) -> bool:
    """Return whether the conversation of a body of this size may be cached."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= body_bytes <= BODY_BYTES_MAX


# A body that was read whole -------------------------------------------------------------------------------------------


def cache_conversation(
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, outline: Outline | None, renderer: BoundaryRenderer
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole, so that for its next turn only new messages are read.

    `prompt`: prompt of the body. `outline`: fingerprints of its messages, if they were made. Return None if the token
    ids depend on more than the prompt's text, or if the text cannot be cut between two messages.
    """
    chat, prompt_ids = prompt.chat, prompt.token_ids
    if chat is None or prompt_ids is None or not chat.messages or not _is_supported(request, chat):
        return None
    messages_array = _locate_messages(body, raw_fields_decoder.decode(body))
    if messages_array is None:
        return None

    messages = chat.messages
    has_system_field = request.kind != "chat" and bool(getattr(request.source, "system", None))
    system_message_count = 1 if has_system_field and is_system_message(messages[0]) else 0
    inputs_digest = _digest_inputs(renderer.template, chat, system_message_count)
    inputs = TemplateInputs(chat, inputs_digest, messages[0])

    rendered = RenderedMessages(renderer, NO_PLACEHOLDERS, inputs, messages, prompt.text)
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    boundaries = _make_first_boundaries(request, messages_array.find_message_ends(), rendered, token_ids)
    if not boundaries:
        return None
    is_chat = request.kind == "chat"
    return CachedConversation(
        kind=request.kind,
        messages_start=messages_array.start,
        inputs_digest=inputs_digest,
        first_message=messages[0],
        outline=_extend_outline(outline, boundaries[-1], []),
        boundaries=boundaries,
        token_ids=token_ids,
        chat=chat.replace(messages=None) if is_chat else None,
        end_json=body[messages_array.end :] if is_chat else b"",
        keeps_messages_as_sent=renderer.template.keeps_messages_as_sent,
    )


def _make_first_boundaries(
    request: RoutingRequest, message_ends: list[int], rendered: RenderedMessages, token_ids: array[int]
) -> list[Boundary]:
    """Return the boundaries of a body that was read whole: places after a message at which the next turn may continue.

    `message_ends`: offsets in the body at which its messages end. `rendered`: all messages with the text of the prompt,
    whose ids are `token_ids`. The boundaries are in ascending order.
    """
    system_count = sum(1 for _ in takewhile(is_system_message, rendered.messages))
    message_count_min = max(system_count + 1, MESSAGES_MIN)
    boundaries: list[Boundary] = []
    last_boundary = _START
    for trailing_count in _choose_trailing_counts(request, message_ends):
        count_min = max(message_count_min - last_boundary.message_count, 1)
        cut = _cut_before_last(request, message_ends, rendered, trailing_count, count_min=count_min)
        if cut is None:
            continue
        tail_ids = rendered.renderer.tokenizer.encode_array(cut.after.text, add_special_tokens=False)
        token_count = len(token_ids) - len(tail_ids)
        if token_ids[token_count:] == tail_ids:  # the ids can be cut at the same place as the text
            last_boundary = cut.make_boundary(last_boundary, token_count)
            boundaries.append(last_boundary)
            rendered = cut.after
    return boundaries


def _choose_trailing_counts(request: RoutingRequest, message_ends: list[int]) -> list[int]:
    """Choose where the next request can continue this one: return how many last messages are left out, most first.

    The next request of a client appends to this one, but may change its last few messages. In a chat, the last question
    and the messages after it may be left out too, as a template may write them otherwise once there is a new question.
    """
    message_count = len(message_ends)
    trailing_counts = {1, TRAILING_MESSAGES}
    if request.messages is not None:
        question_indices = [i for i, message in enumerate(request.messages) if message.get("role") == "user"]
        trailing_counts.add(message_count - max(question_indices, default=0))
    return sorted((count for count in trailing_counts if 0 < count < message_count), reverse=True)


def _cut_before_last(
    request: RoutingRequest,
    message_ends: list[int],
    rendered: RenderedMessages,
    trailing_count: int,
    *,
    count_min: int = 1,
) -> _Cut | None:
    """Cut a body and the text of its prompt before the last `trailing_count` messages of the body.

    `message_ends`: offsets in the body at which messages end. `rendered`: the chat messages to be cut, with their text.
    Return None if the text cannot be cut there, or if fewer than `count_min` chat messages come before the cut.
    """
    if trailing_count >= len(message_ends):
        return None
    later_count = trailing_count
    if isinstance(request.source, MessagesRequest):  # a message may become several of the chat, or none
        later_count = len(convert_turns(request.source.messages[-trailing_count:], skips_system=False))
    earlier_count = len(rendered.messages) - later_count
    if later_count == 0 or earlier_count < count_min:
        return None
    after = rendered.cut_after(earlier_count)
    if after is None:
        return None
    return _Cut(rendered, after, body_end=message_ends[-trailing_count - 1], trailing_count=trailing_count)


def continue_conversation(
    conversation: CachedConversation,
    boundary: Boundary,
    body: bytes,
    renderer: BoundaryRenderer,
    *,
    differs_before_next: bool = False,
) -> Continuation | None:
    """Tokenise the prompt of a body that is equal to a cached one up to `boundary`, a place between two messages.

    Only the messages after it are rendered and encoded; their ids are appended to the cached ones. Return None if more
    than the messages changed (tools, options), or if the template may write the cached messages otherwise now.
    `differs_before_next`: whether the body is known to differ from the cached one before the latter's next boundary.
    """
    template = renderer.template
    tail = _parse_new_chat_messages(conversation, boundary, body, template)
    if tail is None:
        tail = _parse_without_cached_messages(conversation, boundary, body, template)
    if tail is None or tail.inputs.digest != conversation.inputs_digest:
        return None
    if conversation.kind == "messages" and not tail.messages:
        return None  # the assistant's last message would be continued, which the cached ids do not allow
    rendered = renderer.render_new(boundary.prefix, tail.inputs, tail.messages)
    if rendered is None:
        return None
    cut = None
    new_bytes = len(body) - boundary.body_end
    if new_bytes >= max(GROWTH_BYTES_MIN, boundary.body_end // 32):  # enough for a cache entry of its own
        changes_last_messages = differs_before_next and boundary is not conversation.boundaries[-1]
        cut = _cut_tail(tail, rendered, boundary, changes_last_messages=changes_last_messages)
    return _append_new_tokens(conversation, boundary, tail, rendered, cut=cut, body=body)


def _append_new_tokens(
    conversation: CachedConversation,
    boundary: Boundary,
    tail: _BodyTail,
    rendered: RenderedMessages,
    *,
    cut: _Cut | None,
    body: bytes,
) -> Continuation:
    """Append the token ids of new messages to the cached ids before `boundary`; make the cache entry for the next turn.

    `tail`: the new messages. `rendered`: their text. `cut`: place among them at which the next turn can continue; texts
    before and after it are encoded separately, to count the tokens before it. Without a cut there is no cache entry.
    """
    tokenizer = rendered.renderer.tokenizer
    text_after_cut = "" if cut is None else cut.after.text
    new_ids = tokenizer.encode_array(rendered.text.removesuffix(text_after_cut), add_special_tokens=False)
    next_token_count = boundary.token_count + len(new_ids)
    if text_after_cut:
        new_ids += tokenizer.encode_array(text_after_cut, add_special_tokens=False)
    token_ids = conversation.token_ids[: boundary.token_count + len(new_ids)]
    token_ids[boundary.token_count :] = new_ids
    continuation = Continuation(conversation, boundary, tail, token_ids)
    if cut is not None:
        next_boundary = cut.make_boundary(boundary, next_token_count)
        continuation.successor = _make_successor(continuation, next_boundary, body)
    return continuation


def _cut_tail(
    tail: _BodyTail, rendered: RenderedMessages, boundary: Boundary, *, changes_last_messages: bool
) -> _Cut | None:
    """Cut the messages after a boundary where the next turn may continue them; None if they cannot be cut there.

    The cut is before the last message, or a few earlier if this client changes the last messages of its requests.
    """
    if len(tail.messages) <= 1 or depends_on_template(tail.request.source):
        return None
    cuts_earlier = changes_last_messages or boundary.trailing_count == TRAILING_MESSAGES
    trailing_count = TRAILING_MESSAGES if cuts_earlier else 1
    return _cut_before_last(tail.request, tail.find_message_ends(), rendered, trailing_count)


def _make_successor(continuation: Continuation, next_boundary: Boundary, body: bytes) -> CachedConversation:
    """Make the cache entry of a request that continues a cached conversation, for the turn after it.

    A boundary is a place between two messages at which a later request can continue. The new entry has those of the
    cached conversation up to the one at which this request continued, and then `next_boundary`.
    """
    conversation, boundary, tail = continuation.conversation, continuation.boundary, continuation.tail
    boundaries = [earlier for earlier in conversation.boundaries if earlier.body_end <= boundary.body_end]
    while len(boundaries) >= BOUNDARIES_MAX:
        _drop_boundary(boundaries)
    new_messages = tail.messages[: next_boundary.message_count - boundary.message_count]
    successor = msgspec.structs.replace(
        conversation,
        outline=_extend_outline(conversation.outline, boundary, new_messages),
        boundaries=[*boundaries, next_boundary],
        token_ids=continuation.token_ids,
    )
    if conversation.chat is not None and tail.inputs.chat is not conversation.chat:  # other fields were parsed anew
        successor.chat = tail.inputs.chat.replace(messages=None)
        successor.end_json = body[tail.messages_array.end :]
    return successor


def _drop_boundary(boundaries: list[Boundary]) -> None:
    """Drop the first boundary, or the second one if the first is the last that is before a user's message.

    Some templates rewrite the messages since the user's last one once the user sends another. The conversation can then
    be continued only from the boundary before them.
    """
    is_first_needed = boundaries[0].starts_turn and not any(boundary.starts_turn for boundary in boundaries[1:])
    boundaries.pop(1 if is_first_needed else 0)


def _extend_outline(outline: Outline | None, boundary: Boundary, new_messages: list[Message]) -> Outline | None:
    """Return the outline of the messages before a boundary and of new ones after it; None without an `outline`."""
    if outline is None:
        return None
    cached_fingerprints = outline.messages[: FINGERPRINT_BYTES * boundary.message_count]
    return outline._replace(messages=cached_fingerprints + fingerprint_messages(new_messages))


def _digest_inputs(template: ChatTemplate, chat: RoutingRequest, system_message_count: int) -> bytes:
    """Digest all inputs of a template besides a body's array of messages; system messages may be outside that array."""
    inputs = (
        chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
        template.keeps_messages_as_sent, (chat.messages or [])[:system_message_count],
    )  # fmt: skip
    return blake2b(msgspec.json.encode(inputs), digest_size=16).digest()


def _is_supported(request: RoutingRequest, chat: RoutingRequest) -> bool:
    """Return whether a chat's prompt is exactly the encoded text of its template, for every template that may come."""
    if chat.chat_template is not None or chat.scores_prompt or chat.has_media or chat.kind != "chat":
        return False
    return not (chat.continue_final_message or chat.add_special_tokens or depends_on_template(request.source))


# Bodies ---------------------------------------------------------------------------------------------------------------


def _parse_new_chat_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> _BodyTail | None:
    """Parse only the new messages of a chat, those after a boundary: its other fields are equal to the cached body's.

    This saves parsing the tools: a third of the time of a turn with 34 KB of them. Return None if the body is no chat,
    if its other fields are not equal, or if its messages cannot be read here.
    """
    chat = conversation.chat
    if chat is None or template.keeps_messages_as_sent != conversation.keeps_messages_as_sent:
        return None
    start, end = boundary.body_end, len(body) - len(conversation.end_json)
    if not start <= end <= start + TAIL_BYTES_MAX or not body.endswith(conversation.end_json):
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
    return _BodyTail(
        request=chat,
        inputs=TemplateInputs(chat, conversation.inputs_digest, conversation.first_message),
        messages=messages[1:],
        messages_array=_MessagesArray(start - len(array_start), array_json),
    )


def _parse_without_cached_messages(
    conversation: CachedConversation, boundary: Boundary, body: bytes, template: ChatTemplate
) -> _BodyTail | None:
    """Parse a body without its cached messages, those before a boundary; one sentinel message stands for them.

    Return None if the rest is too large or malformed, if the sentinel does not stay a message of its own, or if
    its token ids depend on more than the text of the prompt.
    """
    messages_start = conversation.messages_start
    if messages_start + len(body) - boundary.body_end > TAIL_BYTES_MAX:
        return None
    short_body = b"%b%b%b" % (body[: messages_start + 1], _SENTINEL_JSON, body[boundary.body_end :])
    if has_more_objects(short_body, TAIL_BRACKETS_MAX):
        return None
    try:
        request, fields = parse_body(conversation.kind, short_body)
        chat = request if request.source is None else convert_source_to_chat(request, template)
    except RequestError:
        return None
    messages_array = _locate_messages(short_body, fields, messages_start)
    messages = chat.messages or []
    if messages_array is None or _SENTINEL_MESSAGE not in messages[:2] or not _is_supported(request, chat):
        return None
    # A system text beside the array becomes the first message of the chat; the sentinel comes after it.
    system_message_count = messages.index(_SENTINEL_MESSAGE)
    inputs_digest = _digest_inputs(template, chat, system_message_count)
    removed_bytes = len(body) - len(short_body)
    return _BodyTail(
        request=request,
        inputs=TemplateInputs(chat, inputs_digest, conversation.first_message),
        messages=messages[system_message_count + 1 :],
        messages_array=_MessagesArray(messages_array.start + removed_bytes, messages_array.json),
    )


def _locate_messages(
    body: bytes, fields: dict[str, msgspec.Raw], messages_start: int | None = None
) -> _MessagesArray | None:
    """Find the array of messages in a body; return None if there is none, or if its offset is not certain.

    `fields`: top-level fields of the body. `messages_start`: offset of the array, if known. Else the body is searched
    for the first bytes of the array, which must be in it only once.
    """
    array_json = bytes(fields.get("messages", b""))
    if messages_start is None:
        first_bytes = array_json[:_SEARCHED_BYTES]
        messages_start = body.find(first_bytes)
        if body.find(first_bytes, messages_start + 1) >= 0:
            return None
    if not array_json.startswith(b"[") or not body.startswith(array_json, messages_start):
        return None
    return _MessagesArray(messages_start, array_json)
