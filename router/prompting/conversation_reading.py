"""Read a body that continues a cached conversation: only its part after the boundary that both share. No I/O.

A boundary is a place between two messages. The prompt is the cached token ids before it, and those of the text that is
rendered for the messages after it. For example, a body with messages 1 to 5 was read whole, and its boundary is before
message 5. If the next body has messages 1 to 7, only 5, 6 and 7 are rendered and encoded, and the boundary moves to
before message 7.
"""

from __future__ import annotations

from array import array
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import msgspec

from prompts.anthropic import MessagesRequest, convert_turns, depends_on_template
from prompts.routing import RoutingRequest, raw_fields_decoder
from prompts.schemas import Message
from prompts.tokenizer import ID_TYPE
from router.prompting.boundary_rendering import BoundaryRenderer, RenderedMessages, TemplateInputs
from router.prompting.conversation_cache import Boundary, CachedConversation
from router.prompting.encode import RenderedPrompt
from router.prompting.outline import Outline
from router.prompting.partial_body import (
    digest_inputs,
    get_other_fields,
    is_text_prompt,
    locate_messages,
    parse_new_messages,
)
from router.prompting.placeholder_messages import NO_PLACEHOLDERS, is_system_message

GROWTH_BYTES_MIN = 1024
"""A turn has a cache entry of its own if it adds so many bytes to those before its boundary, and a 32nd of them."""
TRAILING_MESSAGES = 3
"""Last messages that a client's next request may change: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Fewest messages of a chat before a boundary. The first message without the role `system` is among them."""


class _Cut(NamedTuple):
    """A place between two messages at which a body and the text of its prompt can be cut for the next turn."""

    earlier_count: int
    """Messages before the cut: of the whole conversation, or of its part after an earlier boundary."""
    after: RenderedMessages
    """The messages after the cut, with their text."""
    body_end: int
    """Offset of the cut in the body."""
    trailing_count: int
    """Messages of the body after the cut."""

    def make_boundary(self, message_offset: int, token_count: int) -> Boundary:
        """Make the boundary at this cut. Before the messages that are cut, there are `message_offset` others."""
        return Boundary(
            body_end=self.body_end,
            message_count=message_offset + self.earlier_count,
            token_count=token_count,
            placeholders=self.after.prefix,
            starts_turn=self.after.messages[0].get("role") == "user",
            trailing_count=self.trailing_count,
        )


class Continuation(msgspec.Struct, eq=False):
    """The prompt of a request that continues a cached conversation: cached token ids, and those of its new messages."""

    conversation: CachedConversation
    boundary: Boundary
    """Place between two messages up to which the request and the conversation are equal."""
    request: RoutingRequest
    """The request, without the messages before the boundary."""
    new_messages: list[Message]
    """Messages of the chat after the boundary."""
    token_ids: array[int]
    """Token ids of the whole prompt."""
    cache_entry: CachedConversation | None = None
    """Cache entry by which the next turn is read; None if `conversation` serves for that as well."""
    read_s: float = 0.0
    """Time that reading the new messages took."""

    @property
    def replaced_entry(self) -> CachedConversation | None:
        """The cached conversation that `cache_entry` replaces; None if both stay in the cache."""
        return self.conversation if self.boundary is self.conversation.boundaries[-1] else None

    def outline(self) -> Outline | None:
        """Return fingerprints of all messages; None if the cached ones have none, or a template may change new ones."""
        is_certain = not depends_on_template(self.request.source)
        return self.conversation.outline_with(self.boundary, self.new_messages) if is_certain else None


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
    return CachedConversation(
        kind=request.kind,
        messages_start=messages_array.start,
        inputs_digest=inputs.digest,
        first_message=inputs.first_message,
        outline=None if outline is None else outline.replace_end(boundaries[-1].message_count, []),
        boundaries=boundaries,
        token_ids=token_ids,
        other_fields=get_other_fields(request, body, messages_array, renderer.template),
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
    for trailing_count in _choose_trailing_counts(request, message_ends):
        message_offset = boundaries[-1].message_count if boundaries else 0
        count_min = max(message_count_min - message_offset, 1)
        cut = _cut_before_last(request, message_ends, rendered, trailing_count, count_min=count_min)
        if cut is None:
            continue
        later_ids = rendered.renderer.tokenizer.encode_array(cut.after.text, add_special_tokens=False)
        token_count = len(token_ids) - len(later_ids)
        if token_ids[token_count:] == later_ids:  # the ids can be cut at the same place as the text
            boundaries.append(cut.make_boundary(message_offset, token_count))
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
    return _Cut(earlier_count, after, body_end=message_ends[-trailing_count - 1], trailing_count=trailing_count)


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
    partial_body = parse_new_messages(conversation, boundary, body, renderer.template)
    if partial_body is None:
        return None
    request, new_messages = partial_body.request, partial_body.new_messages
    if conversation.kind == "messages" and not new_messages:
        return None  # the assistant's last message would be continued, which the cached ids do not allow
    rendered = renderer.render_new(boundary.placeholders, partial_body.inputs, new_messages)
    if rendered is None:
        return None
    cut = None
    is_worthwhile = len(body) - boundary.body_end >= max(GROWTH_BYTES_MIN, boundary.body_end // 32)
    if is_worthwhile and not depends_on_template(request.source):
        trailing_count = _count_trailing_messages(conversation, boundary, differs_before_next=differs_before_next)
        _, *new_message_ends = partial_body.messages_array.find_message_ends()
        cut = _cut_before_last(request, new_message_ends, rendered, trailing_count)

    encode = partial(renderer.tokenizer.encode_array, add_special_tokens=False)
    text_after_cut = "" if cut is None else cut.after.text
    token_ids = conversation.token_ids[: boundary.token_count]
    token_ids += encode(rendered.text.removesuffix(text_after_cut))
    continuation = Continuation(conversation, boundary, request, new_messages, token_ids)
    if cut is not None:
        next_boundary = cut.make_boundary(boundary.message_count, token_count=len(token_ids))
        token_ids += encode(text_after_cut)
        continuation.cache_entry = conversation.extend(
            boundary, next_boundary, new_messages, token_ids, partial_body.other_fields
        )
    return continuation


def _count_trailing_messages(conversation: CachedConversation, boundary: Boundary, *, differs_before_next: bool) -> int:
    """Return how many last messages the next turn may change: a few if this client has changed such messages before."""
    has_changed_messages = differs_before_next and boundary is not conversation.boundaries[-1]
    return TRAILING_MESSAGES if has_changed_messages or boundary.trailing_count == TRAILING_MESSAGES else 1
