"""Read a body that continues a cached conversation: only its part after the boundary that both share. No I/O.

A boundary is a place between two messages. The prompt is the cached token ids before it, and those of the text that is
rendered for the messages after it. For example, a body with messages 1 to 5 was read whole, and its boundary is before
message 5. If the next body has messages 1 to 7, only 5, 6 and 7 are rendered and encoded, and the boundary moves to
before message 7.
"""

from __future__ import annotations

from array import array
from itertools import takewhile

import msgspec

from prompts.anthropic import MessagesRequest, convert_turn, depends_on_template
from prompts.chat_completions import Message
from prompts.routing import RoutingRequest
from prompts.tokenizer import ID_TYPE
from router.prompting.boundary_rendering import BoundaryRenderer, RenderedMessages, TemplateInputs
from router.prompting.conversation_cache import Boundary, BoundaryLocation, CachedConversation
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
"""Last messages that the next request of some clients changes: coding agents mark their last turns for caching."""
MESSAGES_MIN = 2
"""Fewest messages of a chat before a boundary. The first message without the role `system` is among them."""


class Continuation(msgspec.Struct, eq=False):
    """A request that continues a cached conversation, as it was read: its new messages, and all of its token ids."""

    conversation: CachedConversation
    """Cache entry that an earlier request left."""
    boundary: Boundary
    """Place between two messages up to which both requests are equal. The new messages are those after it."""
    request: RoutingRequest
    """The request without the messages before the boundary."""
    new_messages: list[Message]
    """New messages as the chat template gets them."""
    token_ids: array[int]
    """Token ids of the whole prompt: the cached ones before the boundary, then those of the new messages."""
    cache_entry: CachedConversation | None = None
    """New cache entry, for the next request. None: so little is new that `conversation` serves for that too."""
    read_s: float = 0.0
    """Time that reading the new messages took."""

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
    messages_array = locate_messages(body)
    if messages_array is None:
        return None
    inputs = _read_inputs(request, chat, chat.messages, renderer)
    rendered = RenderedMessages(renderer, NO_PLACEHOLDERS, inputs, chat.messages, prompt.text)
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    boundaries = _make_first_boundaries(request, messages_array.find_message_ends(), rendered, token_ids)
    if not boundaries:
        return None
    if outline is not None:  # the next turn adds its own messages behind the last boundary
        outline = outline.replace_end(boundaries[-1].message_count, [])
    return CachedConversation(
        kind=request.kind,
        messages_start=messages_array.start,
        inputs_digest=inputs.digest,
        first_message=inputs.first_message,
        outline=outline,
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
    message_count = len(rendered.messages)
    system_count = sum(1 for _ in takewhile(is_system_message, rendered.messages))
    later_count_max = message_count - max(system_count + 1, MESSAGES_MIN)
    boundaries: list[Boundary] = []
    for trailing_count in _choose_trailing_counts(request, message_ends):
        later_count = _count_chat_messages(request, trailing_count)
        later = rendered.cut_before_last(later_count) if later_count <= later_count_max else None
        if later is None:
            continue
        later_ids = rendered.renderer.encode(later.text)
        token_count = len(token_ids) - len(later_ids)
        if token_ids[token_count:] == later_ids:  # the ids can be cut at the same place as the text
            boundaries.append(_make_boundary(later, message_ends, trailing_count, message_count, token_count))
            rendered = later
    return boundaries


def _make_boundary(
    later: RenderedMessages, message_ends: list[int], trailing_count: int, message_count: int, token_count: int
) -> Boundary:
    """Make the boundary before `later` messages, which are the last `trailing_count` of the body.

    `message_count`, `token_count`: messages of the whole chat, and tokens of its prompt before the boundary.
    """
    return Boundary(
        body_end=message_ends[-trailing_count - 1],
        message_count=message_count - len(later.messages),
        token_count=token_count,
        placeholders=later.prefix,
        starts_turn=later.messages[0].get("role") == "user",
        trailing_count=trailing_count,
    )


def _choose_trailing_counts(request: RoutingRequest, message_ends: list[int]) -> list[int]:
    """Choose where the next request can continue this one: return how many last messages are left out, most first.

    The next request of a client appends to this one, but may change its last 1 or 3 messages. In a chat, the last
    question and the messages after it may be left out too, as a template may write them otherwise once there is a new
    question. So ten messages of which the sixth is the last question give [5, 3, 1].
    """
    message_count = len(message_ends)
    trailing_counts = {1, TRAILING_MESSAGES}
    if request.messages is not None:
        question_indices = [i for i, message in enumerate(request.messages) if message.get("role") == "user"]
        trailing_counts.add(message_count - max(question_indices, default=0))
    return sorted((count for count in trailing_counts if 0 < count < message_count), reverse=True)


def _count_chat_messages(request: RoutingRequest, trailing_count: int) -> int:
    """Return how many messages of the chat the last `trailing_count` messages of the body become.

    A message of Anthropic's API may become several, or none.
    """
    if isinstance(request.source, MessagesRequest):
        return sum(len(convert_turn(turn)) for turn in request.source.messages[-trailing_count:])
    return trailing_count


# A body that continues a cached conversation --------------------------------------------------------------------------


def continue_conversation(
    match: BoundaryLocation, body: bytes, renderer: BoundaryRenderer, trailing_count: int = 1
) -> Continuation | None:
    """Tokenise the prompt of a body that is equal to a cached one up to a boundary, a place between two messages.

    Only the messages after it are rendered and encoded; their ids are appended to the cached ones. Return None if more
    than the messages changed (tools, options), or if the template may write the cached messages otherwise now.
    `trailing_count`: last messages of the body that its next turn may change.
    """
    conversation, boundary = match.conversation, match.boundary
    partial_body = parse_new_messages(conversation, boundary, body, renderer.template)
    if partial_body is None:
        return None
    request, new_messages = partial_body.request, partial_body.new_messages
    if conversation.kind == "messages" and not new_messages:
        return None  # the assistant's last message would be continued, which the cached ids do not allow
    rendered = renderer.render_new(boundary.placeholders, partial_body.inputs, new_messages)
    if rendered is None:
        return None
    token_ids = conversation.token_ids[: boundary.token_count]
    continuation = Continuation(conversation, boundary, request, new_messages, token_ids)
    trailing = None  # messages after the next boundary, if the next turn gets one of its own
    new_bytes = len(body) - boundary.body_end
    if new_bytes >= max(GROWTH_BYTES_MIN, boundary.body_end // 32) and not depends_on_template(request.source):
        trailing = rendered.cut_before_last(_count_chat_messages(request, trailing_count))
    if trailing is None:
        token_ids += renderer.encode(rendered.text)
        return continuation
    # The text may be cut before the trailing messages: the ids of both parts are those of the whole.
    token_ids += renderer.encode(rendered.text.removesuffix(trailing.text))
    message_ends = partial_body.find_new_message_ends()
    message_count = boundary.message_count + len(new_messages)
    next_boundary = _make_boundary(trailing, message_ends, trailing_count, message_count, token_count=len(token_ids))
    token_ids += renderer.encode(trailing.text)
    continuation.cache_entry = conversation.extend(
        boundary, next_boundary, new_messages, token_ids, partial_body.other_fields
    )
    return continuation
