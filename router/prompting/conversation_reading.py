"""Read a body that continues a cached conversation: only its part after the boundary that both share. No I/O.

A boundary is a place between two messages. The prompt is the cached token ids before it, and those of the text that is
rendered for the messages after it. For example, a body with messages 1 to 5 was read whole, and its boundary is before
message 5. If the next body has messages 1 to 7, only 5, 6 and 7 are rendered and encoded, and the boundary moves to
before message 7.
"""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import NamedTuple

import msgspec

from prompts.anthropic import MessagesRequest, convert_turns, depends_on_template
from prompts.routing import RoutingRequest, raw_fields_decoder
from prompts.schemas import Message
from prompts.tokenizer import ID_TYPE
from router.prompting.body_tail import BodyTail, digest_inputs, is_text_prompt, locate_messages, parse_tail
from router.prompting.boundary_rendering import BoundaryRenderer, RenderedMessages, TemplateInputs
from router.prompting.conversation_cache import BOUNDARIES_MAX, Boundary, CachedConversation
from router.prompting.encode import RenderedPrompt
from router.prompting.outline import FINGERPRINT_BYTES, Outline, fingerprint_messages
from router.prompting.placeholder_messages import NO_PLACEHOLDERS, is_system_message

GROWTH_BYTES_MIN = 1024
"""A turn has a cache entry of its own if it adds so many bytes to those before its boundary, and a 32nd of them."""
TRAILING_MESSAGES = 3
"""Last messages that a client's next request may change: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Fewest messages of a chat before a boundary. The first message without the role `system` is among them."""
_START = Boundary(
    body_end=0, message_count=0, token_count=0, prefix=NO_PLACEHOLDERS, starts_turn=False, trailing_count=0,
)  # fmt: skip
"""The start of a conversation."""


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
    tail: BodyTail
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


# A body that was read whole -------------------------------------------------------------------------------------------


def cache_conversation(
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, outline: Outline | None, renderer: BoundaryRenderer
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole, so that for its next turn only new messages are read.

    `prompt`: prompt of the body. `outline`: fingerprints of its messages, if they were made. Return None if the token
    ids depend on more than the prompt's text, or if the text cannot be cut between two messages.
    """
    chat, prompt_ids = prompt.chat, prompt.token_ids
    if chat is None or prompt_ids is None or not chat.messages or not is_text_prompt(request, chat):
        return None
    messages_array = locate_messages(body, raw_fields_decoder.decode(body))
    if messages_array is None:
        return None
    inputs = _read_inputs(request, chat, chat.messages, renderer)
    rendered = RenderedMessages(renderer, NO_PLACEHOLDERS, inputs, chat.messages, prompt.text)
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    boundaries = _make_first_boundaries(request, messages_array.find_message_ends(), rendered, token_ids)
    if not boundaries:
        return None
    is_chat = request.kind == "chat"
    return CachedConversation(
        kind=request.kind,
        messages_start=messages_array.start,
        inputs_digest=inputs.digest,
        first_message=inputs.first_message,
        outline=_extend_outline(outline, boundaries[-1], []),
        boundaries=boundaries,
        token_ids=token_ids,
        chat=chat.replace(messages=None) if is_chat else None,
        end_json=body[messages_array.end :] if is_chat else b"",
        keeps_messages_as_sent=renderer.template.keeps_messages_as_sent,
    )


def _read_inputs(
    request: RoutingRequest, chat: RoutingRequest, messages: list[Message], renderer: BoundaryRenderer
) -> TemplateInputs:
    """Return what a chat template gets besides the messages of a body.

    `chat`: the request as a chat, with `messages`. The first of them is the `system` field of an Anthropic request.
    """
    has_system_field = request.kind != "chat" and bool(getattr(request.source, "system", None))
    system_message_count = 1 if has_system_field and is_system_message(messages[0]) else 0
    return TemplateInputs(chat, digest_inputs(renderer.template, chat, system_message_count), messages[0])


def _make_first_boundaries(
    request: RoutingRequest, message_ends: list[int], rendered: RenderedMessages, token_ids: array[int]
) -> list[Boundary]:
    """Return the boundaries of a body that was read whole: places after a message at which the next turn may continue.

    `message_ends`: offsets in the body at which its messages end. `rendered`: all messages with the text of the prompt,
    whose ids are `token_ids`. The boundaries are in ascending order: each cuts the messages that the previous one left.
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
        later_ids = rendered.renderer.tokenizer.encode_array(cut.after.text, add_special_tokens=False)
        token_count = len(token_ids) - len(later_ids)
        if token_ids[token_count:] == later_ids:  # the ids can be cut at the same place as the text
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


# A body that continues a cached conversation --------------------------------------------------------------------------


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
    tail = parse_tail(conversation, boundary, body, renderer.template)
    if tail is None:
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


def _cut_tail(
    tail: BodyTail, rendered: RenderedMessages, boundary: Boundary, *, changes_last_messages: bool
) -> _Cut | None:
    """Cut the messages after a boundary where the next turn may continue them; None if they cannot be cut there.

    The cut is before the last message, or a few earlier if this client changes the last messages of its requests.
    """
    if len(tail.messages) <= 1 or depends_on_template(tail.request.source):
        return None
    cuts_earlier = changes_last_messages or boundary.trailing_count == TRAILING_MESSAGES
    trailing_count = TRAILING_MESSAGES if cuts_earlier else 1
    return _cut_before_last(tail.request, tail.find_message_ends(), rendered, trailing_count)


def _append_new_tokens(
    conversation: CachedConversation,
    boundary: Boundary,
    tail: BodyTail,
    rendered: RenderedMessages,
    *,
    cut: _Cut | None,
    body: bytes,
) -> Continuation:
    """Append the token ids of new messages to the cached ids before `boundary`.

    `tail`: the new messages. `rendered`: their text. `cut`: place among them at which the next turn of the conversation
    can continue; with it, the result also has the cache entry for that turn.
    """
    tokenizer = rendered.renderer.tokenizer
    text_after_cut = "" if cut is None else cut.after.text
    token_ids = conversation.token_ids[: boundary.token_count]
    token_ids += tokenizer.encode_array(rendered.text.removesuffix(text_after_cut), add_special_tokens=False)
    continuation = Continuation(conversation, boundary, tail, token_ids)
    if cut is not None:
        next_boundary = cut.make_boundary(boundary, token_count=len(token_ids))
        token_ids += tokenizer.encode_array(text_after_cut, add_special_tokens=False)
        continuation.successor = _make_successor(continuation, next_boundary, body)
    return continuation


def _make_successor(continuation: Continuation, next_boundary: Boundary, body: bytes) -> CachedConversation:
    """Make the cache entry of a request that continues a cached conversation, for the turn after it.

    The new entry has the boundaries of the cached conversation up to the one at which this request continued, and then
    `next_boundary`.
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
