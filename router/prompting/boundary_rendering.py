"""Render only the new messages of a conversation, and find where a prompt's text may be cut for its next turn.

New messages are rendered after short placeholder messages instead of the cached ones. If the template writes the
placeholders as before, the prompt is the cached text and what the template writes after the placeholders. That part
begins with a token at which the tokenizer cuts any text, so that its ids do not depend on the text before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from options.bounded_dict import BoundedDict
from prompts.chat_completions import Message
from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import RoutingRequest
from prompts.template_environment import read_clock
from prompts.tokenizer import Tokenizer
from router.prompting.placeholder_messages import (
    FILLER,
    SYSTEM_FILLER,
    PlaceholderMessages,
    RenderedPlaceholders,
    find_template_markers,
    is_system_message,
)
from router.prompting.turn_pieces import (
    TURNS_STORED_MAX,
    PlainTurn,
    TurnKey,
    TurnPieces,
    read_plain_turn,
    split_at_texts,
)

_PLACEHOLDER_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {"name": SYSTEM_FILLER, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]


class TemplateInputs(msgspec.Struct, frozen=True, eq=False):
    """Everything that a chat template gets besides the new messages of a conversation."""

    chat: RoutingRequest
    digest: bytes
    """Digest of the inputs besides messages."""
    first_message: Message
    """First message of the chat, which templates may write late if it is the system's."""


class BoundaryRenderer:
    """Renders messages of conversations after a boundary, by the template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self.tokenizer = tokenizer
        self.template: ChatTemplate = tokenizer.chat_template
        self._pieces_by_turn: BoundedDict[TurnKey, TurnPieces | None] = BoundedDict(TURNS_STORED_MAX)
        """None for turns of which the template changes the texts."""

    def render_new(
        self, prefix: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> RenderedMessages | None:
        """Render the new messages of a conversation, but not the earlier messages, of which the token ids are cached.

        `prefix`: short placeholder messages and their text, in place of the earlier messages. Return None if the
        template refuses the messages, if the new ones may change what it writes for the earlier ones, or if the new
        text cannot be encoded without the text before it.
        """
        turn = read_plain_turn(messages, self._find_markers(inputs.chat))
        if turn is None or prefix.has_late_system:
            text = self._render_after(prefix, inputs, messages)
            rendered = None if text is None else RenderedMessages(self, prefix, inputs, messages, text)
        else:
            rendered = self._render_plain_turn(prefix, inputs, messages, turn)
        if rendered is None or not self.tokenizer.cut_tokens.starts_with_cut(rendered.text):
            return None
        return rendered

    def _render_plain_turn(
        self, prefix: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message], turn: PlainTurn
    ) -> RenderedMessages | None:
        """Render messages that are each a role and a text (`turn`); None if the template refuses them.

        The template is used for the first turn with a key. What it writes around the texts is stored, and later turns
        with the same key are made from that.
        """
        key = TurnKey(prefix.digest, inputs.digest, turn.frames, read_clock(self._select_source(inputs.chat)))
        pieces = self._pieces_by_turn.get(key)
        text = self._render_after(prefix, inputs, messages) if pieces is None else pieces.fill(turn.texts)
        if text is None:
            return None
        if key not in self._pieces_by_turn:
            pieces = self._pieces_by_turn[key] = self._find_pieces(prefix, inputs, turn, text)
        return RenderedMessages(self, prefix, inputs, messages, text, pieces, turn.texts)

    def _find_pieces(
        self, prefix: RenderedPlaceholders, inputs: TemplateInputs, turn: PlainTurn, text: str
    ) -> TurnPieces | None:
        """Return what the template writes around the texts of a turn; None if it does more than to insert the texts.

        The turn is rendered with random texts, and split at them. The result must give `text` with the turn's texts.
        """
        random_turn = turn.randomize()
        random_text = self._render_after(prefix, inputs, random_turn.make_messages())
        pieces = None if random_text is None else split_at_texts(random_text, random_turn.texts)
        return pieces if pieces is not None and pieces.fill(turn.texts) == text else None

    def encode(self, text: str) -> array[int]:
        """Return the token ids of a text that a template has written, which has its special tokens already."""
        return self.tokenizer.encode_array(text, add_special_tokens=False)

    def _find_markers(self, chat: RoutingRequest) -> tuple[str, ...]:
        return find_template_markers(self._select_source(chat))

    def _select_source(self, chat: RoutingRequest) -> str:
        return self.template.select_source(has_tools=chat.tools is not None)

    def _render_after(
        self, prefix: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> str | None:
        """Return what the template writes for messages after placeholders.

        None if it refuses the messages, or if it writes the placeholders in another way than before, or a second time.
        """
        whole_text = self._render(prefix.placeholders, inputs, messages, has_late_system=prefix.has_late_system)
        if whole_text is None or not whole_text.startswith(prefix.text):
            return None
        text = whole_text.removeprefix(prefix.text)
        return None if FILLER in text or SYSTEM_FILLER in text else text

    def find_cut(self, rendered: RenderedMessages, count: int) -> RenderedMessages | None:
        """Find where the text of messages can be cut after the first `count`; return the later ones with their text.

        They are rendered once more, after short placeholders for the first messages: `<user>A long question<user>Why?`
        becomes `<user>qz7vkx<user>Why?`. The common end `<user>Why?` does not depend on the earlier texts, so the text
        can be cut within it. Return None if the tokenizer allows no cut there.
        """
        prefix, inputs, later_messages = rendered.prefix, rendered.inputs, rendered.messages[count:]
        placeholders = prefix.placeholders.extend(rendered.messages[:count], self._find_markers(inputs.chat))
        if placeholders is None:
            return None
        has_late_system = prefix.has_late_system
        short_text = self._render(placeholders, inputs, later_messages, has_late_system=has_late_system)
        if short_text is not None and not has_late_system and _ends_with_system(short_text):
            has_late_system = True  # the template writes the system text last, so no placeholder may stand for it
            short_text = self._render(placeholders, inputs, later_messages, has_late_system=True)
        if short_text is None:
            return None
        common_end_start = len(rendered.text) - _count_common_end(rendered.text, short_text)
        position = self.tokenizer.cut_tokens.find_cut(rendered.text, common_end_start)
        if not position:  # no cut, or one with nothing before it
            return None
        later_text = rendered.text[position:]
        placeholder_text = short_text.removesuffix(later_text)
        if not placeholder_text:
            return None
        later_prefix = RenderedPlaceholders.make(placeholders, placeholder_text, has_late_system=has_late_system)
        return RenderedMessages(self, later_prefix, inputs, later_messages, later_text)

    def _render(
        self,
        placeholders: PlaceholderMessages,
        inputs: TemplateInputs,
        messages: list[Message],
        *,
        has_late_system: bool,
    ) -> str | None:
        """Render messages after placeholders, which are short messages in place of the earlier ones.

        A placeholder stands for the system text too, and for the tools, unless `has_late_system`: the template may
        write these after the earlier messages. Return None if the template refuses the messages, or may take too long.
        """
        if not self.template.is_bounded:
            return None
        all_messages = [*placeholders.messages, *messages]
        if has_late_system and is_system_message(inputs.first_message):
            all_messages[0] = inputs.first_message
        tools = inputs.chat.tools
        if tools and not has_late_system:
            tools = _PLACEHOLDER_TOOLS
        try:
            return render_chat(self.template, inputs.chat.replace(messages=all_messages, tools=tools))
        except RequestError:
            return None


class RenderedMessages(msgspec.Struct, frozen=True, eq=False):
    """The last messages of a conversation, and the part of its prompt's text that a chat template writes for them.

    The text can be cut between two messages, so that only messages after the cut are rendered for the next turn.
    """

    renderer: BoundaryRenderer
    prefix: RenderedPlaceholders
    """Short messages that were rendered in place of the earlier ones; none for a whole conversation."""
    inputs: TemplateInputs
    messages: list[Message]
    text: str
    pieces: TurnPieces | None = None
    """Text that the template writes around the texts of messages, whatever these are; None if it is unknown."""
    message_texts: Sequence[str] = ()
    """Texts of the messages, if `pieces` are known."""

    def cut_before_last(self, later_count: int) -> RenderedMessages | None:
        """Return the last messages with their part of the text; None if the text cannot be cut before them.

        To find a cut, messages are rendered again. If the `pieces` are known, the cut is stored with them: other texts
        between the same pieces are cut there without rendering.
        """
        count = len(self.messages) - later_count
        if later_count == 0 or count < 1:
            return None
        stored_cut = None if self.pieces is None else self.pieces.cuts.get(count)
        if stored_cut is not None:
            later_chars = stored_cut.template_chars + sum(map(len, self.message_texts[count:]))
            later_text = self.text[len(self.text) - later_chars :]
            return RenderedMessages(self.renderer, stored_cut.prefix, self.inputs, self.messages[count:], later_text)
        later = self.renderer.find_cut(self, count)
        if later is not None and self.pieces is not None and not later.prefix.has_late_system:
            later_template_chars = len(later.text) - sum(map(len, self.message_texts[count:]))
            self.pieces.store_cut(count, later_template_chars, later.prefix)
        return later


def _ends_with_system(text: str) -> bool:
    """Whether the last placeholder in a text is the system text's or that of the tools, not a later message's."""
    return text.rfind(SYSTEM_FILLER) > text.rfind(FILLER)


def _count_common_end(first: str, second: str) -> int:
    """Return the number of characters with which both texts end, by bisection, which compares slices at a time."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low
