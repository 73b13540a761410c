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
from router.prompting.turn_memo import PlainTurn, TurnMemo, read_plain_turn

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


class Cut(msgspec.Struct, frozen=True, eq=False):
    """A place at which a prompt's text may be cut, and the placeholders that stand for the messages before it."""

    position: int
    rendered: RenderedPlaceholders


class BoundaryRenderer:
    """Renders messages of conversations after a boundary, by the template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self.tokenizer = tokenizer
        self.template: ChatTemplate = tokenizer.chat_template
        self.memo = TurnMemo()

    def find_markers(self, chat: RoutingRequest) -> tuple[str, ...]:
        """Return the strings for which the template searches message texts."""
        return find_template_markers(self._select_source(chat))

    def _select_source(self, chat: RoutingRequest) -> str:
        return self.template.select_source(has_tools=chat.tools is not None)

    def render_new(
        self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> RenderedMessages | None:
        """Render the new messages of a conversation, those after the cached ones.

        `rendered` has the short placeholders that stand for the cached messages. The memo may know the text around a
        few plain texts. None if the template refuses the messages, or may have written the text before the boundary in
        another way.
        """
        render = partial(self.render_after, rendered, inputs)
        turn = None if rendered.has_late_system else self._read_plain_turn(rendered, inputs, messages)
        text = render(messages) if turn is None else self.memo.fill_or_render(turn, messages, render)
        if text is None or not self.tokenizer.cut_tokens.starts_with_cut(text):
            return None
        return RenderedMessages(self, rendered, inputs, messages, turn, text)

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

    def cut(
        self,
        placeholders: PlaceholderMessages,
        inputs: TemplateInputs,
        tail_messages: list[Message],
        text: str,
        *,
        has_late_system: bool,
    ) -> Cut | None:
        """Find where the prompt `text` can be cut before its last messages, the tail; None if nowhere.

        The tail is also rendered after short placeholders. If a prompt `<user>A long question<user>Why?` becomes
        `<user>qz7vkx<user>Why?`, both end with `<user>Why?`. So the template writes the tail regardless of the texts
        before it, and the prompt can be cut there. `has_late_system`: whether the template is known to write the system
        text or the tools after the placeholders, so that the real ones are needed.
        """
        short_text = self._render(placeholders, inputs, tail_messages, has_late_system=has_late_system)
        if short_text is None:
            return None
        if not has_late_system and short_text.rfind(SYSTEM_FILLER) > short_text.rfind(FILLER):
            has_late_system = True
            short_text = self._render(placeholders, inputs, tail_messages, has_late_system=True) or ""
        common_chars = _count_common_end(text, short_text)
        position = self.tokenizer.cut_tokens.find_cut(text, len(text) - common_chars)
        if position is None:
            return None
        placeholder_chars = len(short_text) - (len(text) - position)
        if placeholder_chars <= 0:
            return None
        placeholder_text = short_text[:placeholder_chars]
        return Cut(position, RenderedPlaceholders.make(placeholders, placeholder_text, has_late_system=has_late_system))

    def render_after(
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
        text and tools. Return None if the template refuses the messages.
        """
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
    """The new messages of a conversation and their text, which can be cut for the next turn.

    They were rendered after short placeholders that stand for the cached messages before them.
    """

    renderer: BoundaryRenderer
    rendered: RenderedPlaceholders
    """The placeholders of the boundary."""
    inputs: TemplateInputs
    messages: list[Message]
    turn: PlainTurn | None
    """The messages as the memo takes them; None if it does not."""
    text: str
    """The prompt's text after the boundary."""

    def cut(self, count: int) -> Cut | None:
        """Find where the text can be cut after the first `count` messages; None if nowhere.

        The memo keeps the place, so that the next conversation with messages of this kind is cut without a rendering.
        """
        cut = self._cut_by_memo(count)
        if cut is not None:
            return cut
        renderer, inputs, rendered = self.renderer, self.inputs, self.rendered
        placeholders = rendered.placeholders.extend(self.messages[:count], renderer.find_markers(inputs.chat))
        if placeholders is None:
            return None
        cut = renderer.cut(
            placeholders, inputs, self.messages[count:], self.text, has_late_system=rendered.has_late_system
        )
        if cut is not None and self.turn is not None and not cut.rendered.has_late_system:
            renderer.memo.add_next_placeholders(self.turn.key, count, cut.rendered)
            tail_turn, tail_text = self.turn.after(count, cut.rendered.digest), self.text[cut.position :]
            renderer.memo.add(tail_turn, tail_text, partial(renderer.render_after, cut.rendered, inputs))
        return cut

    def _cut_by_memo(self, count: int) -> Cut | None:
        memo = self.renderer.memo
        next_rendered = None if self.turn is None else memo.find_next_placeholders(self.turn.key, count)
        if self.turn is None or next_rendered is None:
            return None
        tail_text = memo.fill(self.turn.after(count, next_rendered.digest))
        if tail_text is None or not self.text.endswith(tail_text):
            return None
        return Cut(len(self.text) - len(tail_text), next_rendered)


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
