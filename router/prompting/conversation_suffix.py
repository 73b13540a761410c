"""Read the suffix of a conversation that returns: what stands behind its cached prefix, and nothing else. Pure.

The body is read with one placeholder message in place of all cached ones, by the same code as any body; what was
decoded, rendered, encoded and outlined of the cached ones is reused. Invariant: ids, outline and fields are those that
the whole body has, or the result is None and the whole body is read.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from prompts.anthropic import MessagesRequest, depends_on_template
from prompts.bpe_encoder import count_openings
from prompts.chat_rendering import render_chat
from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, convert_source_to_chat, has_media, parse_routing_of_kind
from prompts.schemas import Message
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.prompting.chat_outline import FINGERPRINT_BYTES, Outline
from router.prompting.conversation_cache import (
    BODY_BYTES_MAX,
    BODY_BYTES_MIN,
    CHECKPOINTS_MAX,
    CachedConversation,
    Checkpoint,
)
from router.prompting.encode import CHARS_PER_TOKEN_MAX, OBJECTS_MAX, TOKENS_MAX, RenderedPrompt
from router.prompting.outline import fingerprint_messages, outline_chat

SUFFIX_BYTES_MAX, SUFFIX_OBJECTS_MAX = 256 << 10, 2048
"""Bounds on a suffix: decoding and rendering so much keeps nobody waiting."""
GROWTH_BYTES_MIN = 1024
"""A cached conversation is replaced by one that is longer by so many bytes, or by a 32nd."""
VOLATILE_MESSAGES = 3
"""Messages at the end that clients send otherwise the next time: coding agents mark their last turns for caching."""
MESSAGES_MIN = 3
"""Messages that a cached prefix has at least."""
_PLACEHOLDER: Message = {"role": "user", "content": secrets.token_hex(16)}
_PLACEHOLDER_JSON = msgspec.json.encode(_PLACEHOLDER)
_WHITE_SPACE = b" \t\r\n"


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class MessagesSpan(NamedTuple):
    """Offsets in a body: of its array of messages, and of the last messages in it."""

    start: int
    last_start: int
    """Where the last messages begin, or the white space before them."""
    end: int


class SuffixBody:
    """The suffix of a body, read behind the placeholder message."""

    def __init__(
        self,
        request: RoutingRequest,
        data: bytes,
        chat: RoutingRequest,
        system_messages: int,
        template_digest: bytes,
        first_new: int,
    ) -> None:
        self.request = request
        self.body_with_placeholder = data
        """Empty where only messages were read: the chat's opening messages then replace the placeholder."""
        self.chat = chat
        """The chat to be rendered."""
        self.system_messages = system_messages
        """Messages of the chat before the placeholder."""
        self.template_digest = template_digest
        assert chat.messages is not None
        self.new_messages: list[Message] = chat.messages[first_new:]


class SuffixResult:
    """The whole prompt of a body with a cached prefix."""

    def __init__(
        self,
        suffix: SuffixBody,
        conversation: CachedConversation,
        checkpoint: Checkpoint,
        token_ids: array[int],
        reused_tokens: int,
        suffix_text: str,
    ) -> None:
        self.suffix = suffix
        self.conversation = conversation
        self.checkpoint = checkpoint
        self.token_ids = token_ids
        self.reused_tokens = reused_tokens
        """Number of the first ids that are those of the cached prompt."""
        self.suffix_text = suffix_text
        """Text of the prompt from the last cached message on."""
        self._new_fingerprints: bytes | None = None

    @property
    def request(self) -> RoutingRequest:
        """The body's request. Of a chat's messages it has those that open it, and the new ones."""
        if self.conversation.kind != "chat" or not self.suffix.body_with_placeholder:
            return self.suffix.request
        return self.suffix.request.with_messages([*self.conversation.opening_messages, *self.suffix.new_messages])

    @property
    def new_fingerprints(self) -> bytes:
        """Fingerprints of the new messages, as router/prompting/chat_outline.py has them."""
        if self._new_fingerprints is None:
            self._new_fingerprints = fingerprint_messages(self.suffix.new_messages)
        return self._new_fingerprints

    def outline(self) -> Outline | None:
        """Outline the whole chat. None where the new part depends on the template: a system message that comes late."""
        conversation, request = self.conversation, self.suffix.request
        if request.source is not None and _depends_on_template(request):
            return None
        return Outline(
            conversation.message_fingerprints[: FINGERPRINT_BYTES * self.checkpoint.message_count]
            + self.new_fingerprints,
            conversation.tool_fingerprints,
            conversation.options_digest,
        )


def is_cacheable(kind: ApiKind | None, size: int) -> bool:
    """Whether a body of so many bytes may be known, or become so."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= size <= BODY_BYTES_MAX


def has_enough_messages(request: RoutingRequest) -> bool:
    """Whether there are messages enough before the last."""
    return len(getattr(request.source, "messages", None) or request.messages or ()) >= MESSAGES_MIN


def extend(
    conversation: CachedConversation, checkpoint: Checkpoint, body: bytes, tokenizer: Tokenizer, tokens_max: int | None
) -> SuffixResult | None:
    """What a body that has this beginning asks for. None where the whole must be read."""
    if checkpoint.object_count > OBJECTS_MAX - SUFFIX_OBJECTS_MAX:
        return None
    suffix = _read_new_messages(conversation, checkpoint, body, tokenizer) or _read_suffix(
        conversation.kind, conversation.messages_start, checkpoint.body_end, body, tokenizer
    )
    if (
        suffix is None
        or suffix.template_digest != conversation.template_digest
        or suffix.system_messages != conversation.system_messages
    ):
        return None
    if conversation.kind == "messages" and not suffix.new_messages:
        return None  # a last message of the assistant would be continued, and a known one was not the last
    assert suffix.chat.messages is not None
    opening_messages, tail_text = conversation.opening_messages, checkpoint.tail_text
    if (
        suffix.system_messages
        and suffix.chat.messages[: suffix.system_messages] != opening_messages[: suffix.system_messages]
    ):
        return None
    reused_tokens, text_start = checkpoint.token_count, 0
    try:
        suffix_text = _render_suffix(
            tokenizer,
            suffix,
            opening_messages[0],
            checkpoint.message_count,
            [checkpoint.second_last_message, checkpoint.last_message, *suffix.new_messages],
        )
        if _starts_with_tail(tokenizer, suffix_text, tail_text):
            reused_tokens, text_start = reused_tokens + checkpoint.tail_token_count, len(tail_text)
        suffix_ids = tokenizer.encode_array(suffix_text[text_start:], add_special_tokens=False)
    except RequestError:
        return None
    chars_max = ((tokens_max or TOKENS_MAX) + 1) * CHARS_PER_TOKEN_MAX
    if checkpoint.char_count + len(suffix_text) > chars_max or not tokenizer.starts_segment(suffix_text):
        return None
    token_ids = conversation.token_ids[
        : reused_tokens + len(suffix_ids)
    ]  # as long as it will be, where it can: it is not copied once more
    token_ids[reused_tokens:] = suffix_ids if isinstance(suffix_ids, array) else array(ID_TYPE, suffix_ids)
    return SuffixResult(suffix, conversation, checkpoint, token_ids, reused_tokens, suffix_text)


def cache_conversation(
    request: RoutingRequest, body: bytes, prompt: RenderedPrompt, tokenizer: Tokenizer | None
) -> CachedConversation | None:
    """Make the cache entry of a body that was read whole, up to its last message. None where it cannot be cached."""
    kind, chat, prompt_ids, prompt_text = request.kind, prompt.chat, prompt.token_ids, prompt.text
    if tokenizer is None or chat is None or prompt_ids is None or chat.messages is None or chat.has_media:
        return None
    if _depends_on_template(request):
        return None
    chat_outline, messages, checkpoints = outline_chat(request), chat.messages, list[Checkpoint]()
    opening_index = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if chat_outline is None or _has_developer_message(messages):
        return None
    for volatile_messages in (VOLATILE_MESSAGES, 1):
        span = _locate_last_messages(body, volatile_messages)
        suffix = None if span is None else _read_suffix(kind, span.start, span.last_start, body, tokenizer)
        if span is None or suffix is None or suffix.chat.messages is None:
            continue
        messages_start, checkpoint_end, messages_end = span
        message_count = len(messages) - len(suffix.new_messages)
        if (
            messages[: suffix.system_messages] != suffix.chat.messages[: suffix.system_messages]
            or messages[message_count:] != suffix.new_messages
        ):
            return None
        if message_count < MESSAGES_MIN or opening_index >= message_count:
            continue
        checkpoint = _make_checkpoint(
            tokenizer,
            body,
            checkpoint_end,
            suffix,
            messages[0],
            message_count,
            messages[message_count - 2 :],
            prompt_text,
            prompt_ids,
            len(prompt_text),
        )
        if checkpoint is not None:
            checkpoints.append(checkpoint)
            template_digest = suffix.template_digest
            system_messages = suffix.system_messages
            bare_request = _strip_messages(suffix)
    if not checkpoints:
        return None
    message_fingerprints = chat_outline.messages[: FINGERPRINT_BYTES * checkpoints[-1].message_count]
    token_ids = prompt_ids if isinstance(prompt_ids, array) else array(ID_TYPE, prompt_ids)
    assert tokenizer.chat_template is not None
    return CachedConversation(
        kind,
        messages_start,
        template_digest,
        system_messages,
        messages[: opening_index + 1],
        message_fingerprints,
        chat_outline.tools,
        chat_outline.options_digest,
        checkpoints,
        body,
        token_ids,
        messages_end,
        bare_request,
        tokenizer.chat_template.keeps_messages_as_sent,
    )


def advance_conversation(result: SuffixResult, body: bytes, tokenizer: Tokenizer) -> CachedConversation | None:
    """Make the entry that replaces the cached conversation which a body continues; None where little would be won."""
    suffix, conversation, checkpoint = result.suffix, result.conversation, result.checkpoint
    if len(body) - checkpoint.body_end < max(GROWTH_BYTES_MIN, checkpoint.body_end >> 5):
        return None
    volatile_messages = (
        conversation.volatile_messages if checkpoint is conversation.checkpoints[-1] else VOLATILE_MESSAGES
    )
    is_chat = conversation.kind == "chat"  # whose messages are those of the array, one for one
    if is_chat and len(suffix.new_messages) <= volatile_messages:
        return None
    body_with_placeholder = suffix.body_with_placeholder or _insert_placeholder(
        body, conversation.messages_start, checkpoint.body_end
    )
    span = _locate_last_messages(body_with_placeholder, volatile_messages, conversation.messages_start)
    if span is None:
        return None
    removed_bytes = len(body) - len(body_with_placeholder)
    checkpoint_end, messages_end = span.last_start + removed_bytes, span.end + removed_bytes
    if checkpoint_end <= checkpoint.body_end or _depends_on_template(suffix.request):
        return None
    new_message_count = len(suffix.new_messages) - volatile_messages
    if not is_chat:
        last_suffix = _read_suffix(conversation.kind, conversation.messages_start, checkpoint_end, body, tokenizer)
        if last_suffix is None or last_suffix.template_digest != conversation.template_digest:
            return None
        new_message_count = len(suffix.new_messages) - len(last_suffix.new_messages)
        if new_message_count < 1 or suffix.new_messages[new_message_count:] != last_suffix.new_messages:
            return None
    message_count = checkpoint.message_count + new_message_count
    tail_messages = [checkpoint.second_last_message, checkpoint.last_message, *suffix.new_messages]
    char_count = checkpoint.char_count + len(result.suffix_text)
    first_message = conversation.opening_messages[0]
    new_checkpoint = _make_checkpoint(
        tokenizer,
        body,
        checkpoint_end,
        suffix,
        first_message,
        message_count,
        tail_messages[new_message_count:],
        result.suffix_text,
        result.token_ids,
        char_count,
    )
    if new_checkpoint is None:
        return None
    message_fingerprints = (
        conversation.message_fingerprints[: FINGERPRINT_BYTES * checkpoint.message_count]
        + result.new_fingerprints[: FINGERPRINT_BYTES * new_message_count]
    )
    if not _starts_with_tail(
        tokenizer, result.suffix_text, checkpoint.tail_text
    ):  # its ids are not among those of this prompt
        checkpoint = checkpoint.without_tail()
    checkpoints = [earlier for earlier in conversation.checkpoints if earlier.body_end < checkpoint.body_end][
        2 - CHECKPOINTS_MAX :
    ] + [checkpoint, new_checkpoint]
    return CachedConversation(
        conversation.kind,
        conversation.messages_start,
        conversation.template_digest,
        conversation.system_messages,
        conversation.opening_messages,
        message_fingerprints,
        conversation.tool_fingerprints,
        conversation.options_digest,
        checkpoints,
        body,
        result.token_ids,
        messages_end,
        _strip_messages(suffix),
        conversation.as_sent,
        volatile_messages,
        conversation.model,
    )


def _starts_with_tail(tokenizer: Tokenizer, text: str, tail: str) -> bool:
    """Whether the text begins with this tail of a checkpoint, and is cut behind it: what a template writes behind a
    message may depend on the next one."""
    return text.startswith(tail) and tokenizer.starts_segment(text, len(tail))


def _depends_on_template(request: RoutingRequest) -> bool:
    """Whether the chat that it stands for is another one for another template."""
    return isinstance(request.source, MessagesRequest) and depends_on_template(request.source)


def _strip_messages(suffix: SuffixBody) -> RoutingRequest | None:
    """Return a chat without its messages; None for other kinds."""
    return None if suffix.request.source is not None else suffix.request.with_messages(None)


def _read_new_messages(
    conversation: CachedConversation, checkpoint: Checkpoint, body: bytes, tokenizer: Tokenizer
) -> SuffixBody | None:
    """Read the suffix of a chat in which only messages are new; None where more is: what stands behind the messages
    has to be what the cached body has there."""
    cached_body = conversation.body
    cached_end = conversation.messages_end
    bare_request = conversation.bare_request
    new_start = checkpoint.body_end
    messages_end = len(body) - len(cached_body) + cached_end
    template = tokenizer.chat_template
    if bare_request is None or template is None or template.keeps_messages_as_sent != conversation.as_sent:
        return None
    if not new_start <= messages_end <= new_start + SUFFIX_BYTES_MAX or body[messages_end:] != cached_body[cached_end:]:
        return None
    array_json = b"[{}%b]" % body[new_start:messages_end]
    if count_openings(array_json) > SUFFIX_OBJECTS_MAX:
        return None
    try:
        messages = _messages_decoder.decode(array_json)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if has_media(messages) or _has_developer_message(messages):
        return None
    messages[:1] = conversation.opening_messages
    request = bare_request.with_messages(messages)
    return SuffixBody(
        request,
        b"",
        request,
        conversation.system_messages,
        conversation.template_digest,
        len(conversation.opening_messages),
    )


def _has_developer_message(messages: list[Message]) -> bool:
    return "developer" in [message.get("role") for message in messages]


def _insert_placeholder(body: bytes, start: int, end: int) -> bytes:
    return b"%b%b%b" % (body[: start + 1], _PLACEHOLDER_JSON, body[end:])


def _read_suffix(
    kind: ApiKind, messages_start: int, prefix_end: int, body: bytes, tokenizer: Tokenizer
) -> SuffixBody | None:
    """Read a body with the placeholder in place of its messages before `prefix_end`."""
    template = tokenizer.chat_template
    if messages_start + len(body) - prefix_end > SUFFIX_BYTES_MAX or template is None:
        return None
    body_with_placeholder = _insert_placeholder(body, messages_start, prefix_end)
    if count_openings(body_with_placeholder) > SUFFIX_OBJECTS_MAX:
        return None
    try:
        request = parse_routing_of_kind(kind, body_with_placeholder)
        chat = request if request.source is None else convert_source_to_chat(request, template)
    except RequestError:
        return None
    messages = chat.messages or []
    system_message_count = 0 if messages[:1] == [_PLACEHOLDER] else 1
    if messages[system_message_count : system_message_count + 1] != [_PLACEHOLDER] or chat.kind != "chat":
        return None
    is_unsupported = chat.chat_template is not None or chat.scores_prompt or chat.has_media
    if is_unsupported or chat.continue_final_message or chat.add_special_tokens:
        return None
    if _has_developer_message(messages):
        return None
    if not template.has_suffix_template(has_tools=chat.tools is not None):
        return None
    template_inputs = msgspec.json.encode(
        (chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
         template.keeps_messages_as_sent)
    )  # fmt: skip
    return SuffixBody(
        request,
        body_with_placeholder,
        chat,
        system_message_count,
        blake2b(template_inputs, digest_size=16).digest(),
        system_message_count + 1,
    )


def _render_suffix(
    tokenizer: Tokenizer, suffix: SuffixBody, first_message: Message, message_count: int, tail_messages: list[Message]
) -> str:
    """Render from message `message_count` - 1 on, the second of `messages`. Raises RequestError."""
    template = tokenizer.chat_template
    assert template is not None
    filler_count = 2 - message_count % 2
    return render_chat(
        template,
        suffix.chat,
        suffix_start=filler_count + 1,
        variables_digest=suffix.template_digest,
        sent_messages=[*[first_message] * filler_count, *tail_messages],
    )


def _make_checkpoint(
    tokenizer: Tokenizer, body: bytes, body_end: int, suffix: SuffixBody, first_message: Message, message_count: int,
    tail_messages: list[Message], prompt_text: str, prompt_ids: Sequence[int], char_count: int,
) -> Checkpoint | None:  # fmt: skip
    """Make the checkpoint at `body_end`. `tail_messages`: of the chat, from `message_count` - 2 on.
    `prompt_text`: end of the prompt's text, which has `char_count` characters in all."""
    try:
        suffix_text = _render_suffix(tokenizer, suffix, first_message, message_count, tail_messages)
        suffix_ids = tokenizer.encode_array(suffix_text, add_special_tokens=False)
    except RequestError:
        return None
    token_count = len(prompt_ids) - len(suffix_ids)
    if token_count < 0 or not prompt_text.endswith(suffix_text) or not tokenizer.starts_segment(suffix_text):
        return None
    if array(ID_TYPE, prompt_ids[token_count:]) != array(ID_TYPE, suffix_ids):
        return None
    object_count = count_openings(body, body_end)
    tail_text = tokenizer.take_first_segments(suffix_text, len(str(tail_messages[1].get("content"))))
    tail_token_count = len(tokenizer.encode_array(tail_text, add_special_tokens=False))
    return Checkpoint(
        body_end,
        message_count,
        token_count,
        char_count - len(suffix_text),
        tail_text,
        tail_token_count,
        object_count,
        tail_messages[0],
        tail_messages[1],
    )


def _locate_last_messages(body: bytes, message_count: int, messages_start: int | None = None) -> MessagesSpan | None:
    """Locate the last `message_count` messages of a body. None where it has no more.
    `messages_start`: start of the array, if known."""
    try:
        raw_messages = bytes(_fields_decoder.decode(body).get("messages", b""))
        message_items = _items_decoder.decode(raw_messages)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if len(message_items) <= message_count:
        return None
    if messages_start is None:
        messages_start = body.find(raw_messages[:256])
    if not body.startswith(raw_messages, messages_start):
        return None  # the same beginning twice
    message_end = messages_end = messages_start + len(raw_messages) - 1
    for raw_message in reversed(message_items[-message_count:]):
        message_end = (
            _skip_white_space_back(body, _skip_white_space_back(body, message_end) - len(bytes(raw_message))) - 1
        )
    return MessagesSpan(messages_start, _skip_white_space_back(body, message_end), messages_end)


def _skip_white_space_back(body: bytes, position: int) -> int:
    """Return the start of the white space that ends at `position`."""
    while body[position - 1] in _WHITE_SPACE:
        position -= 1
    return position
