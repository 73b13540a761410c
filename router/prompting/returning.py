"""A conversation that returns: what stands behind its known beginning is read, and nothing else. Pure.

The body is read with one message of ours in place of all that are known, by the same code as any body: what was
decoded, rendered, encoded and outlined of those is what was made of them before. Invariant: ids, outline and fields are
those that the whole body has, or the answer is None and the whole body is read.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from prompts.anthropic import MessagesRequest, depends_on_template
from prompts.errors import RequestError
from prompts.messages import render_chat
from prompts.routing import Kind, RoutingRequest, chat_of, has_media, read_routing
from prompts.schemas import Message
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from prompts.words import count_openings
from router.prompting.conversation_cache import (
    BODY_BYTES_MAX,
    BODY_BYTES_MIN,
    CHECKPOINTS_MAX,
    CachedConversation,
    Checkpoint,
)
from router.prompting.encode import CHARS_A_TOKEN, OBJECTS_MAX, TOKENS_MAX, ReadPrompt
from router.prompting.outline import outline, words_of
from router.prompting.outlined import MESSAGE_BYTES, Outline

NEW_BYTES_MAX, NEW_OBJECTS_MAX = 256 << 10, 2048
"""Of a body without what is known of it: decoding and rendering so much keeps nobody waiting."""
LEARNED_BYTES = 1024
"""Known is what is longer by so much, or by a 32nd, than what was known before."""
CHANGED = 3
"""Messages at the end that clients send otherwise the next time: coding agents mark their last turns for caching."""
COUNT_MIN = 3
"""Messages of a chat before which nothing is known."""
_STANDIN: Message = {"role": "user", "content": secrets.token_hex(16)}
_STANDIN_JSON = msgspec.json.encode(_STANDIN)
_WHITE = b" \t\r\n"


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[dict[str, Any]])


class Rest:
    """A body with the stand-in, as it was read."""

    def __init__(
        self, parsed: RoutingRequest, data: bytes, chat: RoutingRequest, heads: int, told: bytes, before: int
    ) -> None:
        self.parsed = parsed
        self.data = data
        """Empty where nothing but messages was read: what opens the chat is then there instead of the stand-in."""
        self.chat = chat
        """What it is rendered of."""
        self.heads = heads
        """Messages of the chat before the stand-in."""
        self.told = told
        assert chat.messages is not None
        self.new: list[Message] = chat.messages[before:]


class Returned:
    """What a body asks for whose beginning is known."""

    def __init__(
        self, rest: Rest, known: CachedConversation, mark: Checkpoint, ids: array[int], kept: int, text: str
    ) -> None:
        self.rest, self.known, self.mark, self.ids, self.kept = rest, known, mark, ids, kept
        """`kept`: how many of the first ids are those of the known prompt."""
        self.text = text
        """From the last known message on."""
        self._words: bytes | None = None

    @property
    def parsed(self) -> RoutingRequest:
        """What it asks for. Of a chat's messages those are there that open it, and what is new."""
        if self.known.kind != "chat" or not self.rest.data:
            return self.rest.parsed
        return self.rest.parsed.with_messages([*self.known.opening_messages, *self.rest.new])

    @property
    def words(self) -> bytes:
        """Digests of the messages that are new, as router/prompting/outlined.py has them."""
        if self._words is None:
            self._words = words_of(self.rest.new)
        return self._words

    def outline(self) -> Outline | None:
        """As router/prompting/outline.py makes it of the whole chat, however much of that is known. None where what is
        new hangs on the template: a system message that comes late."""
        known, parsed = self.known, self.rest.parsed
        if parsed.source is not None and _depends(parsed):
            return None
        return Outline(
            known.message_fingerprints[: MESSAGE_BYTES * self.mark.message_count] + self.words,
            known.tool_fingerprints,
            known.options_digest,
        )


def may_return(kind: Kind | None, size: int) -> bool:
    """Whether a body of so many bytes may be known, or become so."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= size <= BODY_BYTES_MAX


def has_beginning(parsed: RoutingRequest) -> bool:
    """Whether there are messages enough before the last."""
    return len(getattr(parsed.source, "messages", None) or parsed.messages or ()) >= COUNT_MIN


def go_on(
    known: CachedConversation, mark: Checkpoint, body: bytes, tokenizer: Tokenizer, tokens_max: int | None
) -> Returned | None:
    """What a body that has this beginning asks for. None where the whole must be read."""
    if mark.object_count > OBJECTS_MAX - NEW_OBJECTS_MAX:
        return None
    rest = _read_on(known, mark, body, tokenizer) or _read(
        known.kind, known.messages_start, mark.body_end, body, tokenizer
    )
    if rest is None or rest.told != known.template_digest or rest.heads != known.system_messages:
        return None
    if known.kind == "messages" and not rest.new:
        return None  # a last message of the assistant would be continued, and a known one was not the last
    assert rest.chat.messages is not None
    opening, tail = known.opening_messages, mark.tail_text
    if rest.heads and rest.chat.messages[: rest.heads] != opening[: rest.heads]:
        return None
    kept, end = mark.token_count, 0
    try:
        text = _text(
            tokenizer, rest, opening[0], mark.message_count, [mark.second_last_message, mark.last_message, *rest.new]
        )
        if _has_tail(tokenizer, text, tail):
            kept, end = kept + mark.tail_token_count, len(tail)
        found = tokenizer.encode_array(text[end:], add_special_tokens=False)
    except RequestError:
        return None
    most = ((tokens_max or TOKENS_MAX) + 1) * CHARS_A_TOKEN
    if mark.char_count + len(text) > most or not tokenizer.starts_segment(text):
        return None
    ids = known.token_ids[: kept + len(found)]  # as long as it will be, where it can: it is not copied once more
    ids[kept:] = found if isinstance(found, array) else array(ID_TYPE, found)
    return Returned(rest, known, mark, ids, kept, text)


def learn(
    parsed: RoutingRequest, body: bytes, prompt: ReadPrompt, tokenizer: Tokenizer | None
) -> CachedConversation | None:
    """The beginning of a body that was read as a whole, up to its last message. None where it cannot be known."""
    kind, chat, ids, text = parsed.kind, prompt.chat, prompt.ids, prompt.text
    if tokenizer is None or chat is None or ids is None or chat.messages is None or chat.has_media:
        return None
    if _depends(parsed):
        return None
    drawn, messages, marks = outline(parsed), chat.messages, list[Checkpoint]()
    first = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if drawn is None or _has_developer(messages):
        return None
    for back in (CHANGED, 1):
        place = _before_last(body, back)
        rest = _read(kind, *place[:2], body, tokenizer) if place is not None else None
        if place is None or rest is None or rest.chat.messages is None:
            continue
        start, end, close = place
        count = len(messages) - len(rest.new)
        if messages[: rest.heads] != rest.chat.messages[: rest.heads] or messages[count:] != rest.new:
            return None
        if count < COUNT_MIN or first >= count:
            continue
        mark = _mark(tokenizer, body, end, rest, messages[0], count, messages[count - 2 :], text, ids, len(text))
        if mark is not None:
            marks.append(mark)
            told, heads, bare = rest.told, rest.heads, _bare(rest)
    if not marks:
        return None
    words = drawn.messages[: MESSAGE_BYTES * marks[-1].message_count]
    known_ids = ids if isinstance(ids, array) else array(ID_TYPE, ids)
    assert tokenizer.chat_template is not None
    return CachedConversation(
        kind, start, told, heads, messages[: first + 1], words, drawn.tools, drawn.flags, marks, body, known_ids, close,
        bare, tokenizer.chat_template.as_sent,
    )  # fmt: skip


def learn_more(returned: Returned, body: bytes, tokenizer: Tokenizer) -> CachedConversation | None:
    """What takes the place of the known beginning that this body has; None where little would be won."""
    rest, known, mark = returned.rest, returned.known, returned.mark
    if len(body) - mark.body_end < max(LEARNED_BYTES, mark.body_end >> 5):
        return None
    back = known.volatile_messages if mark is known.checkpoints[-1] else CHANGED
    chat = known.kind == "chat"  # whose messages are those of the array, one for one
    if chat and len(rest.new) <= back:
        return None
    data = rest.data or _with_standin(body, known.messages_start, mark.body_end)
    place = _before_last(data, back, known.messages_start)
    if place is None:
        return None
    end, close = (at + len(body) - len(data) for at in place[1:])
    if end <= mark.body_end or _depends(rest.parsed):
        return None
    fresh = len(rest.new) - back
    if not chat:
        last = _read(known.kind, known.messages_start, end, body, tokenizer)
        if last is None or last.told != known.template_digest:
            return None
        fresh = len(rest.new) - len(last.new)
        if fresh < 1 or rest.new[fresh:] != last.new:
            return None
    count, tail = mark.message_count + fresh, [mark.second_last_message, mark.last_message, *rest.new]
    chars = mark.char_count + len(returned.text)
    first = known.opening_messages[0]
    made = _mark(
        tokenizer, body, end, rest, first, count, tail[fresh:], returned.text, returned.ids, chars
    )  # fmt: skip
    if made is None:
        return None
    words = known.message_fingerprints[: MESSAGE_BYTES * mark.message_count] + returned.words[: MESSAGE_BYTES * fresh]
    if not _has_tail(tokenizer, returned.text, mark.tail_text):  # its ids are not among those of this prompt
        mark = mark.without_tail()
    marks = [one for one in known.checkpoints if one.body_end < mark.body_end][2 - CHECKPOINTS_MAX :] + [mark, made]
    return CachedConversation(
        known.kind, known.messages_start, known.template_digest, known.system_messages, known.opening_messages,
        words, known.tool_fingerprints, known.options_digest, marks, body,
        returned.ids, close, _bare(rest), known.as_sent, back, known.model,
    )  # fmt: skip


def _has_tail(tokenizer: Tokenizer, text: str, tail: str) -> bool:
    """Whether the text begins with this tail of a mark, and is cut behind it: what a template writes behind a message
    may hang on the next one."""
    return text.startswith(tail) and tokenizer.starts_segment(text, len(tail))


def _depends(parsed: RoutingRequest) -> bool:
    """Whether the chat that it stands for is another one for another template."""
    return isinstance(parsed.source, MessagesRequest) and depends_on_template(parsed.source)


def _bare(rest: Rest) -> RoutingRequest | None:
    """Without its messages, of a chat: those of other kinds are part of more."""
    return None if rest.parsed.source is not None else rest.parsed.with_messages(None)


def _read_on(known: CachedConversation, mark: Checkpoint, body: bytes, tokenizer: Tokenizer) -> Rest | None:
    """As `_read`, of a chat in which nothing but messages is new; None where more is. What stands behind the messages
    is that of the known body: between that and what is known, a list goes on."""
    before, before_close, bare, end = known.body, known.messages_end, known.bare_request, mark.body_end
    close = len(body) - len(before) + before_close
    template = tokenizer.chat_template
    if bare is None or template is None or template.as_sent != known.as_sent:
        return None
    if not end <= close <= end + NEW_BYTES_MAX or body[close:] != before[before_close:]:
        return None
    data = b"[{}%b]" % body[end:close]
    if count_openings(data) > NEW_OBJECTS_MAX:
        return None
    try:
        messages = _messages.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if has_media(messages) or _has_developer(messages):
        return None
    messages[:1] = known.opening_messages
    parsed = bare.with_messages(messages)
    return Rest(parsed, b"", parsed, known.system_messages, known.template_digest, len(known.opening_messages))


def _has_developer(messages: list[Message]) -> bool:
    return "developer" in [message.get("role") for message in messages]


def _with_standin(body: bytes, start: int, end: int) -> bytes:
    return b"%b%b%b" % (body[: start + 1], _STANDIN_JSON, body[end:])


def _read(kind: Kind, start: int, end: int, body: bytes, tokenizer: Tokenizer) -> Rest | None:
    """A body with the stand-in for its messages before `end`."""
    template = tokenizer.chat_template
    if start + len(body) - end > NEW_BYTES_MAX or template is None:
        return None
    data = _with_standin(body, start, end)
    if count_openings(data) > NEW_OBJECTS_MAX:
        return None
    try:
        parsed = read_routing(kind, data)
        chat = parsed if parsed.source is None else chat_of(parsed, template)
    except RequestError:
        return None
    messages = chat.messages or []
    heads = 0 if messages[:1] == [_STANDIN] else 1
    if messages[heads : heads + 1] != [_STANDIN] or chat.kind != "chat":
        return None
    programs = chat.chat_template is not None or chat.scores_prompt or chat.has_media
    if programs or chat.continue_final_message or chat.add_special_tokens:
        return None
    if _has_developer(messages):
        return None
    if not template.has_rest(has_tools=chat.tools is not None):
        return None
    told = msgspec.json.encode(
        (chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.add_generation_prompt,
         template.as_sent)
    )  # fmt: skip
    return Rest(parsed, data, chat, heads, blake2b(told, digest_size=16).digest(), heads + 1)


def _text(tokenizer: Tokenizer, rest: Rest, first: Message, count: int, messages: list[Message]) -> str:
    """From message `count` - 1 on, the second of `messages`. Raises RequestError."""
    template = tokenizer.chat_template
    assert template is not None
    firsts = 2 - count % 2
    return render_chat(template, rest.chat, behind=firsts + 1, told=rest.told, sent=[*[first] * firsts, *messages])


def _mark(
    tokenizer: Tokenizer, body: bytes, end: int, rest: Rest, first: Message, count: int,
    messages: list[Message], text: str, ids: Sequence[int], chars: int,
) -> Checkpoint | None:  # fmt: skip
    """The place before the last message of the body. `messages`: of the chat, from `count` - 2 on. `text`: the end of
    the prompt's, which has so many characters in all."""
    try:
        after = _text(tokenizer, rest, first, count, messages)
        found = tokenizer.encode_array(after, add_special_tokens=False)
    except RequestError:
        return None
    kept = len(ids) - len(found)
    if kept < 0 or not text.endswith(after) or not tokenizer.starts_segment(after):
        return None
    if array(ID_TYPE, ids[kept:]) != array(ID_TYPE, found):
        return None
    objects = count_openings(body, end)
    tail = tokenizer.first_segments(after, len(str(messages[1].get("content"))))
    tail_ids = len(tokenizer.encode_array(tail, add_special_tokens=False))
    return Checkpoint(end, count, kept, chars - len(after), tail, tail_ids, objects, messages[0], messages[1])


def _before_last(data: bytes, count: int, start: int | None = None) -> tuple[int, int, int] | None:
    """(where the array of messages begins, where the last `count` of them begin, or the white space before, where it
    ends) in a body that was read; None where it has no more. `start`: where that is known."""
    try:
        raw = bytes(_fields.decode(data).get("messages", b""))
        items = _items.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if len(items) <= count:
        return None
    if start is None:
        start = data.find(raw[:256])
    if not data.startswith(raw, start):
        return None  # the same beginning twice
    end = close = start + len(raw) - 1
    for item in reversed(items[-count:]):
        end = _back(data, _back(data, end) - len(bytes(item))) - 1
    return start, _back(data, end), close


def _back(data: bytes, at: int) -> int:
    """Before the white space that ends at `at`."""
    while data[at - 1] in _WHITE:
        at -= 1
    return at
