"""Short placeholder messages, which are rendered in place of the cached messages of a conversation. No I/O.

A template may write a message in another way because of later messages. For example, it drops the reasoning before the
last question. There is a placeholder for each kind of cached message. If the template writes the placeholders as
before, it would also write the cached messages as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from prompts.chat_completions import Message

MESSAGES_MAX: Final = 64
"""Most placeholders: a conversation of more kinds of messages has no boundary."""
PIECES_MAX: Final = 33
"""Most pieces of a text between and including its markers (16 markers): no boundary follows a message with more."""
PARTS_MAX: Final = 16
"""Most parts of a message, besides plain texts in a row."""
EDGE_CHARS: Final = 16
"""Characters kept at each end of a shortened text."""
FILLER: Final = "qz7vkx"
"""Letters in the shortened texts of `_FILLED_FIELDS`, by which placeholders are recognised in a rendered prompt."""
SYSTEM_FILLER: Final = "w9jxhp"
"""The filler of system texts and tools, which templates may write after later messages."""
_ITEMS_MAX: Final = 2
"""Items kept at each end of a list, and at the start of an object deep in a message."""
_DEPTH_MAX: Final = 6
_MARKER: Final = re.compile(
    r"""(?P<q1>['"])(?P<left>[^'"]{3,64})(?P=q1)\s+(?:not\s+)?in\b
    |\.(?:startswith|endswith|r?split|r?find|index|count|replace|r?partition)\(\s*(?P<q2>['"])(?P<argument>[^'"]{3,64})(?P=q2)
    """,
    re.VERBOSE,
)
_FILLED_FIELDS: Final = ("content", "reasoning_content", "reasoning")
"""Fields whose texts get a filler, which ends the text that placeholders and real messages have in common.

So the placeholders' text has a thought of each kind, and a template that drops thoughts later writes another text.
"""
_PLAIN_TEXT_PART: Final = "text", ("text",)
"""Description of a part that is a text without markers."""
_Kind = tuple[object, ...]


class _UnsupportedMessageError(Exception):
    """A message has too many markers or parts for a short placeholder."""


class _Placeholder(NamedTuple):
    kind: _Kind
    """Everything by which a template may tell the message from others, besides its texts."""
    message: Message


class _ShortPart(NamedTuple):
    """A part of a message's content with a short text."""

    description: tuple[object, object]
    """Type of the part and description of its text, for the message's kind; None for the text if there is none."""
    value: Any


class PlaceholderMessages(msgspec.Struct, frozen=True, eq=False):
    """Short messages (placeholders) that are rendered in place of the cached messages of a conversation.

    New messages are rendered after them instead of after the whole conversation: ten questions with their answers
    become one short question and one short answer. There is at least one placeholder for each kind of message. Messages
    are of one kind if a template can only tell them apart by their texts, as two questions.
    """

    earlier_turns: tuple[_Placeholder, ...] = ()
    """Placeholders for messages before the last user message."""
    last_turn: tuple[_Placeholder, ...] = ()
    """Placeholders for the last user message and the messages after it."""

    @property
    def messages(self) -> list[Message]:
        """The placeholder messages. If the last two turns have equal kinds, one stands for both.

        So a conversation of equal turns has the same placeholders after each turn: one question and one answer.
        """
        earlier_turns, turn_length = self.earlier_turns, len(self.last_turn)
        earlier_kinds = [placeholder.kind for placeholder in earlier_turns[-turn_length:]]
        last_kinds = [placeholder.kind for placeholder in self.last_turn]
        if earlier_kinds == last_kinds:
            earlier_turns = earlier_turns[:-turn_length]
        return [placeholder.message for placeholder in (*earlier_turns, *self.last_turn)]

    def extend(self, messages: Iterable[Message], markers: tuple[str, ...]) -> PlaceholderMessages | None:
        """Return placeholders that stand for these further messages too; None if there would be too many, or too long.

        `markers`: texts for which the template searches, such as "</think>"; placeholders keep them. Rounds of a tool
        loop that repeat the same kinds of messages are folded into one round.
        """
        earlier_turns, last_turn = list(self.earlier_turns), list(self.last_turn)
        for message in messages:
            if message.get("role") == "user" and last_turn:
                for placeholder in last_turn:
                    _append_or_fold_loop(earlier_turns, placeholder)
                last_turn = []
            try:
                _append_or_fold_loop(last_turn, _make_placeholder(message, markers))
            except _UnsupportedMessageError:
                return None
        extended = PlaceholderMessages(tuple(earlier_turns), tuple(last_turn))
        return extended if len(extended.messages) <= MESSAGES_MAX else None


class RenderedPlaceholders(msgspec.Struct, frozen=True, eq=False):
    """Short messages in place of the cached messages of a conversation, and the text that a template wrote for them.

    If the template writes the same text again before new messages, these do not change how it writes the cached ones.
    """

    placeholders: PlaceholderMessages
    text: str
    digest: int
    """Digest of the messages and the text."""
    has_late_system: bool
    """Whether the template may write the system text or tools after the placeholders; it then gets the real ones."""

    @classmethod
    def make(cls, placeholders: PlaceholderMessages, text: str, *, has_late_system: bool) -> RenderedPlaceholders:
        digest = xxhash.xxh3_64_intdigest(msgspec.json.encode((placeholders.messages, text)))
        return cls(placeholders, text, digest, has_late_system)


NO_PLACEHOLDERS: Final = RenderedPlaceholders(PlaceholderMessages(), "", 0, has_late_system=False)
"""Placeholders before a whole conversation."""


@lru_cache(maxsize=64)
def find_template_markers(template_source: str) -> tuple[str, ...]:
    """Return the strings for which a template searches message texts, such as `</think>`."""
    matches = _MARKER.finditer(template_source)
    return tuple(dict.fromkeys((match["left"] or match["argument"]).replace("\\n", "\n") for match in matches))


def is_system_message(message: Message) -> bool:
    """Whether a message has the role of the system or of a developer."""
    return message.get("role") in ("system", "developer")


def _append_or_fold_loop(placeholders: list[_Placeholder], new_placeholder: _Placeholder) -> None:
    """Append a placeholder, or replace the last placeholders by it if a loop begins again with its kind.

    One round of a tool loop is enough: kinds A B C B C become A B C. When the second B comes, C is kept, as it is the
    first of its kind: A B C B. When the second C comes, nothing after the first C is new, so C replaces C B.
    """
    for index in reversed(range(len(placeholders))):
        last_kind = placeholders[index].kind
        if last_kind == new_placeholder.kind:
            placeholders[index:] = [new_placeholder]
            return
        if all(placeholder.kind != last_kind for placeholder in placeholders[:index]):
            break  # it is the first of its kind
    placeholders.append(new_placeholder)


def _make_placeholder(message: Message, markers: tuple[str, ...]) -> _Placeholder:
    """Return a copy of a message with short texts, and the kind of the message.

    Messages of one kind are equal in everything by which a template may decide: the role, and for each field whether it
    is a list or a text, which `markers` it has (as `</think>`), and whether text, white space or nothing is between.
    """
    content_filler = SYSTEM_FILLER if is_system_message(message) else FILLER
    description_by_field: dict[str, object] = {"role": message.get("role")}
    short_message: Message = {}
    for name, value in message.items():
        filler = content_filler if name in _FILLED_FIELDS else ""
        if name == "role":
            short_message[name] = _shorten_value(value, 0)
        elif isinstance(value, str):
            pieces = _split_at_markers(value, markers)
            description_by_field[name] = _describe_text(pieces)
            short_message[name] = _shorten_text(pieces, filler)
        elif isinstance(value, list) and name == "content":
            short_parts = _shorten_parts(value, markers, filler)
            description_by_field[name] = tuple([part.description for part in short_parts])
            short_message[name] = [part.value for part in short_parts]
        else:
            description_by_field[name] = _describe_value(value)
            short_message[name] = _shorten_value(value, 0)
    descriptions = [(name, value) for name, value in description_by_field.items() if value is not None]
    descriptions.sort(key=lambda description: description[0])
    return _Placeholder(tuple(descriptions), short_message)


def _shorten_parts(parts: list[Any], markers: tuple[str, ...], filler: str) -> list[_ShortPart]:
    """Return the parts of a content with short texts. Of plain texts in a row, the first two are kept.

    So ten texts become two, or three if the last part is among them, which is always kept. Raises
    _UnsupportedMessageError if more than PARTS_MAX parts remain.
    """
    short_parts: list[_ShortPart] = []
    for i, part in enumerate(parts):
        short_part = _shorten_part(part, markers, filler)
        is_last = i == len(parts) - 1
        last_descriptions = [kept.description for kept in (*short_parts[-2:], short_part)]
        if last_descriptions == [_PLAIN_TEXT_PART] * 3 and not is_last:
            continue
        if len(short_parts) == PARTS_MAX:
            raise _UnsupportedMessageError
        short_parts.append(short_part)
    return short_parts


def _shorten_part(part: Any, markers: tuple[str, ...], filler: str) -> _ShortPart:
    """Return a part with a short text. A part is a text alone, or an object such as {"type": "text", "text": "Hi"}."""
    part_type, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("text", part)
    if not isinstance(text, str):
        return _ShortPart((part_type, None), _shorten_value(part, 0))
    pieces = _split_at_markers(text, markers)
    short_text = _shorten_text(pieces, filler)
    short_value = {**_shorten_value(part, 0), "text": short_text} if isinstance(part, dict) else short_text
    return _ShortPart((part_type, _describe_text(pieces)), short_value)


def _split_at_markers(text: str, markers: tuple[str, ...]) -> list[str]:
    """Split a text at its markers; every second piece is a marker."""
    if not any(marker in text for marker in markers):
        return [text]
    pieces = _compile_markers(markers).split(text)
    if len(pieces) > PIECES_MAX:
        raise _UnsupportedMessageError
    return pieces


@lru_cache(maxsize=64)
def _compile_markers(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _describe_text(pieces: list[str]) -> tuple[str, ...]:
    """Return the markers of a text, and what is between them."""
    return tuple(piece if i % 2 else _describe_piece(piece) for i, piece in enumerate(pieces))


def _describe_piece(piece: str) -> str:
    if not piece:
        return "empty"
    return "space" if piece.isspace() else "text"


def _describe_value(value: Any) -> object:
    """Return the type of a value, and whether a list has one item or several; a truth value and null as they are."""
    if isinstance(value, list):
        return "list", min(len(value), 2)
    return value if value is None or isinstance(value, bool) else type(value).__name__


def _shorten_text(pieces: list[str], filler: str) -> str:
    """Return a text with short pieces between its markers; a content without markers is the filler alone."""
    if len(pieces) == 1 and filler:
        return filler if _describe_piece(pieces[0]) == "text" else pieces[0]
    return "".join(piece if i % 2 else _shorten_piece(piece, filler) for i, piece in enumerate(pieces))


def _shorten_piece(piece: str, filler: str) -> str:
    """Return both ends of a piece with the filler between them."""
    if _describe_piece(piece) != "text":
        return piece
    start_chars = min(EDGE_CHARS, len(piece) // 2)
    return piece[:start_chars] + filler + piece[max(start_chars, len(piece) - EDGE_CHARS) :]


def _shorten_value(value: Any, depth: int) -> Any:
    """Return a value with both ends of its texts and lists, and the first items of objects deep in it."""
    if isinstance(value, str):
        return value if len(value) <= 2 * EDGE_CHARS else value[:EDGE_CHARS] + value[-EDGE_CHARS:]
    if depth > _DEPTH_MAX:
        return None
    if isinstance(value, list):
        items = value if len(value) <= 2 * _ITEMS_MAX else [*value[:_ITEMS_MAX], *value[-_ITEMS_MAX:]]
        return [_shorten_value(item, depth + 1) for item in items]
    if isinstance(value, dict):
        names = list(value) if depth < 3 else list(value)[:_ITEMS_MAX]
        return {name: _shorten_value(value[name], depth + 1) for name in names}
    return value
