"""Render what is behind a boundary of a conversation, and find where a prompt's text may be cut.

The new messages are rendered behind a few short ones that stand in for the cached messages (router/prompting/
stand_in.py). As long as the template writes these as it did when the boundary was made, the prompt is the cached text
and what is written behind them. That begins with a token at which any text is cut, so that its ids do not hang on what
is before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import xxhash

from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import RoutingRequest
from prompts.schemas import Message
from prompts.tokenizer import Tokenizer
from router.prompting.conversation_cache import Boundary
from router.prompting.stand_in import MARK, MESSAGES_MAX, OPENING_MARK, StandIn, find_compared_texts
from router.prompting.turn_memo import MemoEntry, NextState, TurnMemo, read_plain_texts

CHECK_INTERVAL: Final = 64
"""One text of the memo, and one continued conversation, in so many is compared with the whole."""
_STAND_IN_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {"name": OPENING_MARK, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]


class TemplateInputs(NamedTuple):
    """What a template is given besides messages."""

    chat: RoutingRequest
    digest: bytes
    first_message: Message
    """The chat's own: where it is the system's, templates may write it late."""


class Cut(NamedTuple):
    """Where a text is cut, and what a boundary there has of the template."""

    position: int
    stand_in: StandIn
    stand_in_text: str
    state: int
    shows_opening: bool


class BoundaryRenderer:
    """Renders by the template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self.tokenizer = tokenizer
        self.template: ChatTemplate = tokenizer.chat_template
        self._memo = TurnMemo()
        self._fill_count = 0
        self.is_wrong = False
        """Whether a text of the memo was not the template's."""

    def find_compared_texts(self, chat: RoutingRequest) -> tuple[str, ...]:
        """Return what the template looks for in texts."""
        return find_compared_texts(self.template.select_source(has_tools=chat.tools is not None))

    def render_whole(self, chat: RoutingRequest) -> str:
        """Render a chat, from the memo if it is a few texts and has no options. Raises RequestError."""
        messages = chat.messages or []
        options = (
            chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.chat_template,
            chat.continue_final_message or None,
        )  # fmt: skip
        has_options = any(option is not None for option in options)
        inputs_key = b"%d%d" % (chat.add_generation_prompt is not False, self.template.keeps_messages_as_sent)
        entry = None if has_options else self._find_entry(0, inputs_key, chat, messages)
        if entry is None:
            return render_chat(self.template, chat)
        text = self._memo.fill(*entry)
        if text is None:
            text = render_chat(self.template, chat)
            self._memo.add(*entry, text, lambda marked: self._try_render(chat.with_messages(marked)))
            return text
        self._fill_count += 1
        if self._fill_count % CHECK_INTERVAL == 0:
            template_text = render_chat(self.template, chat)
            self.is_wrong |= text != template_text
            return template_text
        return text

    def render_behind(self, boundary: Boundary, inputs: TemplateInputs, messages: list[Message]) -> str | None:
        """Return the prompt's text behind a boundary. None where the template may have written what is before it
        otherwise, or refuses the messages."""
        entry = self._find_entry_behind(boundary, inputs, messages)
        text = None if entry is None else self._memo.fill(*entry)
        if text is None:
            first_message = inputs.first_message if boundary.shows_opening else None

            def render(behind: list[Message]) -> str | None:
                return self._render_behind(boundary.stand_in, boundary.stand_in_text, inputs, behind, first_message)

            text = render(messages)
            if text is not None and entry is not None:
                self._memo.add(*entry, text, render)
        return text if text is not None and self.tokenizer.starts_segment(text) else None

    def cut_behind(
        self, boundary: Boundary, inputs: TemplateInputs, messages: list[Message], count: int, text: str
    ) -> Cut | None:
        """Find where the text behind a boundary may be cut for the next one, behind `count` of the messages."""
        tail_messages, entry = messages[count:], self._find_entry_behind(boundary, inputs, messages)
        next_state = None if entry is None else self._memo.find_next_state(entry.key, count)
        if next_state is not None:
            tail_entry = self._find_entry(next_state.state, inputs.digest, inputs.chat, tail_messages)
            tail_text = None if tail_entry is None else self._memo.fill(*tail_entry)
            if tail_text is not None and text.endswith(tail_text):
                return Cut(len(text) - len(tail_text), *next_state, shows_opening=False)
        stand_in = boundary.stand_in.extend(messages[:count], self.find_compared_texts(inputs.chat))
        cut = self.cut(stand_in, inputs, tail_messages, text, shows_opening=boundary.shows_opening)
        if cut is not None and entry is not None and not cut.shows_opening:
            self._memo.add_next_state(entry.key, count, NextState(stand_in, cut.stand_in_text, cut.state))
            tail_entry = self._find_entry(cut.state, inputs.digest, inputs.chat, tail_messages)
            if tail_entry is not None:
                self._memo.add(
                    *tail_entry, text[cut.position :],
                    lambda behind: self._render_behind(stand_in, cut.stand_in_text, inputs, behind, None),
                )  # fmt: skip
        return cut

    def _find_entry_behind(
        self, boundary: Boundary, inputs: TemplateInputs, messages: list[Message]
    ) -> MemoEntry | None:
        if boundary.shows_opening:
            return None
        return self._find_entry(boundary.state, inputs.digest, inputs.chat, messages)

    def _find_entry(
        self, state: int, inputs_key: bytes, chat: RoutingRequest, messages: list[Message]
    ) -> MemoEntry | None:
        """Return where the memo may have what is written of messages; None where it never has."""
        texts = read_plain_texts(messages, self.find_compared_texts(chat))
        if texts is None:
            return None
        clock = self.template.read_clock(has_tools=chat.tools is not None)
        return MemoEntry((state, inputs_key, tuple([message["role"] for message in messages]), clock), texts)

    def cut(
        self, stand_in: StandIn, inputs: TemplateInputs, tail_messages: list[Message], text: str, *, shows_opening: bool
    ) -> Cut | None:
        """Find where the end of a prompt's text may be cut, if its last messages are those of the tail."""
        if len(stand_in.messages) > MESSAGES_MAX:
            return None
        try:
            rendered_text = self._render(
                stand_in, inputs, tail_messages, inputs.first_message if shows_opening else None
            )
        except RequestError:
            return None
        position = self.tokenizer.find_segment(text, len(text) - _count_common_end(text, rendered_text))
        if position is None or len(rendered_text) <= len(text) - position:
            return None
        if not shows_opening and rendered_text.rfind(OPENING_MARK) > rendered_text.rfind(MARK):
            return self.cut(stand_in, inputs, tail_messages, text, shows_opening=True)
        stand_in_text = rendered_text[: len(rendered_text) - (len(text) - position)]
        state = xxhash.xxh3_64_intdigest(msgspec.json.encode((stand_in.messages, stand_in_text)))
        return Cut(position, stand_in, stand_in_text, state, shows_opening)

    def _render_behind(
        self, stand_in: StandIn, stand_in_text: str, inputs: TemplateInputs, messages: list[Message],
        first_message: Message | None,
    ) -> str | None:  # fmt: skip
        """Return what is written behind the stand-in. None where that is written otherwise, or shown again."""
        try:
            rendered_text = self._render(stand_in, inputs, messages, first_message)
        except RequestError:
            return None
        text = rendered_text[len(stand_in_text) :]
        is_as_before = rendered_text.startswith(stand_in_text) and MARK not in text and OPENING_MARK not in text
        return text if is_as_before else None

    def _try_render(self, chat: RoutingRequest) -> str | None:
        try:
            return render_chat(self.template, chat)
        except RequestError:
            return None

    def _render(
        self, stand_in: StandIn, inputs: TemplateInputs, messages: list[Message], first_message: Message | None
    ) -> str:
        """Render messages behind a stand-in. `first_message`: of the chat, where the template may write that, and the
        tools, late. Raises RequestError."""
        rendered_messages, chat = [*stand_in.messages, *messages], inputs.chat
        if first_message is None:
            tools = chat.tools and _STAND_IN_TOOLS
            return render_chat(self.template, chat.replace(messages=rendered_messages, tools=tools))
        if is_instruction(first_message):
            rendered_messages[0] = first_message
        return render_chat(self.template, chat.with_messages(rendered_messages))


def is_instruction(message: Message) -> bool:
    """Whether a message is the system's."""
    return message.get("role") in ("system", "developer")


def _count_common_end(first: str, second: str) -> int:
    """Return the number of characters with which both texts end."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low
