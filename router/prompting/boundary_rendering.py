"""Render the messages after a boundary of a conversation, and find where a prompt's text may be cut.

The new messages are rendered after placeholder messages (router/prompting/placeholder_messages.py) instead of the
cached ones. If the template writes the placeholders as it did when the boundary was made, the prompt is the cached text
and what the template writes after the placeholders. The second part begins with a token at which the tokenizer cuts any
text, so that its ids do not depend on the text before it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import RoutingRequest
from prompts.schemas import Message
from prompts.tokenizer import Tokenizer
from router.prompting.placeholder_messages import (
    FILLER,
    SYSTEM_FILLER,
    PlaceholderMessages,
    RenderedPlaceholders,
    find_template_markers,
    is_system_message,
)
from router.prompting.turn_memo import PlainTurn, TurnKey, TurnPieces, find_pieces, read_plain_turn

PIECES_MAX = 1024
"""Most turns whose pieces are remembered; all are dropped when there are more."""
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
        self._pieces_by_key: dict[TurnKey, TurnPieces | None] = {}
        """Turn -> what the template writes around its texts; None if it changes these texts."""

    def render_new(
        self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> RenderedMessages | None:
        """Render the new messages of a conversation, those after the cached ones.

        `rendered` has the short placeholders that stand for the cached messages. The memo may know the text around a
        few plain texts. None if the template refuses the messages, or may have written the text before the boundary in
        another way.
        """
        turn = None if rendered.has_late_system else self._read_plain_turn(rendered, inputs, messages)
        pieces = None if turn is None else self._pieces_by_key.get(turn.key)
        if turn is not None and pieces is not None:
            text: str | None = pieces.fill(turn.texts)
        else:
            text = self._render_after(rendered, inputs, messages)
            if turn is not None and text is not None and turn.key not in self._pieces_by_key:
                pieces = find_pieces(turn, text, partial(self._render_after, rendered, inputs))
                if len(self._pieces_by_key) >= PIECES_MAX:
                    self._pieces_by_key.clear()
                self._pieces_by_key[turn.key] = pieces
        if text is None or not self.tokenizer.cut_tokens.starts_with_cut(text):
            return None
        return RenderedMessages(self, rendered, inputs, messages, text, turn, pieces)

    def _read_plain_turn(
        self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> PlainTurn | None:
        """Return messages as the memo takes them; None if the template may change their texts."""
        template_source = self._select_source(inputs.chat)
        return read_plain_turn(
            messages,
            find_template_markers(template_source),
            prefix_digest=rendered.digest,
            inputs_digest=inputs.digest,
            clock=self.template.read_clock(template_source),
        )

    def _select_source(self, chat: RoutingRequest) -> str:
        return self.template.select_source(has_tools=chat.tools is not None)

    def _render_after(
        self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> str | None:
        """Return what the template writes for messages after placeholders.

        None if it refuses the messages, or if it writes the placeholders in another way than before, or a second time.
        """
        short_text = self._render(rendered.placeholders, inputs, messages, has_late_system=rendered.has_late_system)
        if short_text is None or not short_text.startswith(rendered.text):
            return None
        text = short_text[len(rendered.text) :]
        return None if FILLER in text or SYSTEM_FILLER in text else text

    def cut(self, before: RenderedMessages, count: int) -> RenderedMessages | None:
        """Cut a text after the first `count` messages, and return the messages after them; None if it cannot be cut.

        They are rendered after short placeholders too: `<user>A long question<user>Why?` becomes
        `<user>qz7vkx<user>Why?`. Both end with `<user>Why?`. So the template writes the last messages regardless of the
        texts before them, and the text can be cut there.
        """
        inputs, messages, text = before.inputs, before.messages[count:], before.text
        markers = find_template_markers(self._select_source(inputs.chat))
        placeholders = before.rendered.placeholders.extend(before.messages[:count], markers)
        if placeholders is None:
            return None
        has_late_system = before.rendered.has_late_system
        short_text = self._render(placeholders, inputs, messages, has_late_system=has_late_system) or ""
        if not has_late_system and short_text.rfind(SYSTEM_FILLER) > short_text.rfind(FILLER):
            has_late_system = True
            short_text = self._render(placeholders, inputs, messages, has_late_system=True) or ""
        position = self.tokenizer.cut_tokens.find_cut(text, len(text) - _count_common_end(text, short_text))
        if not position or len(short_text) <= len(text) - position:
            return None
        text_after = text[position:]
        placeholder_text = short_text[: len(short_text) - len(text_after)]
        rendered = RenderedPlaceholders.make(placeholders, placeholder_text, has_late_system=has_late_system)
        return RenderedMessages(self, rendered, inputs, messages, text_after)

    def _render(
        self,
        placeholders: PlaceholderMessages,
        inputs: TemplateInputs,
        messages: list[Message],
        *,
        has_late_system: bool,
    ) -> str | None:
        """Render messages after placeholders, which are short messages in place of the earlier ones.

        The first placeholder stands for the system text, and the tools are replaced too. With `has_late_system`, the
        template may write the system text and the tools after the earlier messages, so it is given the real system
        text and tools. Return None if the template refuses the messages, or may take too long.
        """
        if not self.template.is_bounded:
            return None
        chat, all_messages = inputs.chat, [*placeholders.messages, *messages]
        tools = chat.tools
        if has_late_system:
            if is_system_message(inputs.first_message):
                all_messages[0] = inputs.first_message
        elif tools:
            tools = _PLACEHOLDER_TOOLS
        try:
            return render_chat(self.template, chat.replace(messages=all_messages, tools=tools))
        except RequestError:
            return None


class RenderedMessages(msgspec.Struct, frozen=True, eq=False):
    """The messages of a conversation after a boundary, and their text, which can be cut for the next turn.

    If they are not the whole conversation, placeholders stand for the messages before them.
    """

    renderer: BoundaryRenderer
    rendered: RenderedPlaceholders
    """Placeholders for the messages before these."""
    inputs: TemplateInputs
    messages: list[Message]
    text: str
    """Text of the prompt after the boundary."""
    turn: PlainTurn | None = None
    """The messages as the memo takes them; None if it does not."""
    pieces: TurnPieces | None = None
    """Pieces that the memo has for the turn; None if it has none."""

    def cut(self, count: int) -> RenderedMessages | None:
        """Return the messages after the first `count`, with their part of the text; None if the text cannot be divided.

        A cut that was found by rendering is stored in `pieces`. Other messages with the same `turn.key` share these
        pieces, and are cut without rendering.
        """
        turn, pieces = self.turn, self.pieces
        if turn is None or pieces is None:
            return self.renderer.cut(self, count)
        stored_cut = pieces.cuts.get(count)
        if stored_cut is not None:
            later_messages, later_texts = self.messages[count:], turn.texts[count:]
            text_start = len(self.text) - stored_cut.fixed_chars - sum(map(len, later_texts))
            return RenderedMessages(
                self.renderer, stored_cut.rendered, self.inputs, later_messages, self.text[text_start:]
            )
        after = self.renderer.cut(self, count)
        if after is not None and not after.rendered.has_late_system:
            pieces.add_cut(turn.texts, count, len(after.text), after.rendered)
        return after


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
