"""Short messages that stand in for the cached ones when only the rest of a conversation is rendered. Pure.

A template may write a message in another way because of what comes later: it drops the thoughts before the last
question, or moves the tools to it. So every kind of message that was cached has one here, in an order that the
conversation has, with shortened texts. As long as the template writes these as it did when the boundary was made, it
would write the cached ones as they were written then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from prompts.schemas import Message

MESSAGES_MAX: Final = 64
"""Messages of a stand-in: a conversation of more kinds of messages is not cached."""
EDGE_CHARS: Final = 16
"""Characters that a shortened text has of either end."""
_PIECES_MAX: Final = 8
"""Pieces at either end of a text that is cut at compared texts."""
MARK: Final = "qz7vkx"
"""Letters put into every shortened text, so that it ends like the text that it stands for, and no earlier."""
OPENING_MARK: Final = "w9jxhp"
"""The same for texts of the system, and for tools: templates may write these late."""
_ITEMS_MAX: Final = 2
"""Items of a shortened list, and of an object below a message's own fields."""
_DEPTH_MAX: Final = 6
_COMPARED_TEXT: Final = re.compile(
    r"""(?P<q1>['"])(?P<left>[^'"]{3,64})(?P=q1)\s+(?:not\s+)?in\b
    |\.(?:startswith|endswith|r?split|r?find|index|count|replace|r?partition)\(\s*(?P<q2>['"])(?P<argument>[^'"]{3,64})(?P=q2)
    """,
    re.VERBOSE,
)
_Kind = tuple[object, ...]


class _Entry(NamedTuple):
    kind: _Kind
    message: Message
    is_first: bool
    """Whether no entry before it has its kind."""


class StandIn(msgspec.Struct, frozen=True, eq=False):
    """Messages that stand in for those before a boundary."""

    earlier: tuple[_Entry, ...] = ()
    """Those before the last message of the user."""
    turn: tuple[_Entry, ...] = ()
    """The last message of the user and those behind it."""

    @property
    def messages(self) -> list[Message]:
        return [entry.message for entry in (*self._earlier_turns(), *self.turn)]

    def _earlier_turns(self) -> tuple[_Entry, ...]:
        """Return `earlier` without its last turn, where that is like the one behind it."""
        turn_count = len(self.turn)
        kinds = [entry.kind for entry in self.earlier[-turn_count:]]
        return self.earlier[:-turn_count] if kinds == [entry.kind for entry in self.turn] else self.earlier

    def extend(self, messages: Iterable[Message], compared_texts: Sequence[str]) -> StandIn:
        """Return the stand-in for the messages of this one and for those that follow."""
        earlier, turn = list(self.earlier), list(self.turn)
        for message in messages:
            if message.get("role") == "user" and turn:
                for entry in turn:
                    _append(earlier, entry.kind, entry.message)
                turn = []
            contained_texts = _find_contained_texts(message.get("content"), compared_texts)
            _append(turn, _classify(message, contained_texts), _shorten_message(message, contained_texts))
        return StandIn(tuple(earlier), tuple(turn))


@lru_cache(maxsize=64)
def find_compared_texts(template_source: str) -> tuple[str, ...]:
    """Return the texts that a template looks for in others, such as `</think>`."""
    matches = _COMPARED_TEXT.finditer(template_source)
    return tuple(dict.fromkeys(_unescape(match["left"] or match["argument"]) for match in matches))


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n")


def _append(entries: list[_Entry], kind: _Kind, message: Message) -> None:
    """Append a message. Where its kind stands further up, and no kind is first behind that, what is between them goes:
    a loop that the conversation has run through once more."""
    for index in reversed(range(len(entries))):
        entry = entries[index]
        if entry.kind == kind:
            entries[index:] = [_Entry(kind, message, entry.is_first)]
            return
        if entry.is_first:
            break
    entries.append(_Entry(kind, message, all(entry.kind != kind for entry in entries)))


def _find_contained_texts(content: Any, compared_texts: Sequence[str]) -> list[str]:
    if isinstance(content, str):
        return [text for text in compared_texts if text in content] if content else []
    if not isinstance(content, list):
        return []
    part_texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return [
        text
        for text in compared_texts
        if any(isinstance(part_text, str) and text in part_text for part_text in part_texts)
    ]


def _classify(message: Message, contained_texts: list[str]) -> _Kind:
    """Return the kind of a message: all that a template may decide by, besides what the message says."""
    content = message.get("content")
    form: object
    if isinstance(content, str):
        form = bool(content.strip()) if len(content) < 64 else True
    elif isinstance(content, list):
        form = [part.get("type") if isinstance(part, dict) else "text" for part in content[: 2 * _ITEMS_MAX]]
    else:
        form = None
    fields = [name for name, value in message.items() if value is not None and name not in ("role", "content")]
    calls = message.get("tool_calls")
    has_several_calls = isinstance(calls, list) and len(calls) > 1
    positions = [_locate_text(content, text) for text in contained_texts]
    return (message.get("role"), form, contained_texts, positions, sorted(fields), has_several_calls)


def _locate_text(content: Any, text: str) -> tuple[bool, bool, int]:
    """Return whether a message begins with a compared text, whether it ends with it, and how often it has it."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(part for part in parts if isinstance(part, str))
    return content.startswith(text), content.endswith(text), min(content.count(text), 2)


def _shorten_message(message: Message, contained_texts: list[str]) -> Message:
    result = {name: _shorten(value, 0) for name, value in message.items() if name != "content"}
    if "content" in message:
        mark = OPENING_MARK if message.get("role") in ("system", "developer") else MARK
        result["content"] = _shorten_content(message["content"], contained_texts, mark)
    return result


def _shorten_content(content: Any, contained_texts: list[str], mark: str) -> Any:
    if isinstance(content, str):
        return _shorten_text(content, contained_texts, mark)
    if not isinstance(content, list):
        return content
    return [
        {**_shorten(part, 0), "text": _shorten_text(part["text"], contained_texts, mark)}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _shorten_text(part, contained_texts, mark)
        if isinstance(part, str)
        else _shorten(part, 0)
        for part in _select_items(content)
    ]


def _shorten(value: Any, depth: int) -> Any:
    """Return a value with both ends of its texts and lists, and the first items of objects deep in it."""
    if isinstance(value, str):
        return value if len(value) <= 2 * EDGE_CHARS else value[:EDGE_CHARS] + value[-EDGE_CHARS:]
    if depth > _DEPTH_MAX:
        return None
    if isinstance(value, list):
        return [_shorten(item, depth + 1) for item in _select_items(value)]
    if isinstance(value, dict):
        names = list(value) if depth < 3 else list(value)[:_ITEMS_MAX]
        return {name: _shorten(value[name], depth + 1) for name in names}
    return value


def _select_items(items: list[Any]) -> list[Any]:
    return items if len(items) <= 2 * _ITEMS_MAX else [*items[:_ITEMS_MAX], *items[-_ITEMS_MAX:]]


def _shorten_text(text: str, contained_texts: list[str], mark: str) -> str:
    """Return both ends of a text with the mark between them, and the compared texts in it with what is beside them."""
    contained_texts = [contained_text for contained_text in contained_texts if contained_text in text]
    if not contained_texts:
        return mark if text and not text.isspace() else text
    pieces = re.split(f"({'|'.join(map(re.escape, contained_texts))})", text)
    if len(pieces) > 2 * _PIECES_MAX:
        pieces = [*pieces[:_PIECES_MAX], *pieces[-_PIECES_MAX - 1 :]]
    return "".join(piece if i % 2 else _shorten_piece(piece, mark) for i, piece in enumerate(pieces))


def _shorten_piece(text: str, mark: str) -> str:
    if not text or text.isspace():
        return text
    start_chars = min(EDGE_CHARS, len(text) // 2)
    return text[:start_chars] + mark + text[max(start_chars, len(text) - EDGE_CHARS) :]
