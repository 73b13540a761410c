"""Render the messages after a boundary of a conversation, and find where a prompt's text may be cut.

The new messages are rendered after placeholder messages (router/prompting/placeholder_messages.py) instead of the
cached ones. If the template writes the placeholders as it did when the boundary was made, the prompt is the cached text
and what the template writes after the placeholders. The second part begins with a token at which the tokenizer cuts any
text, so that its ids do not depend on the text before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
from router.prompting.turn_memo import MemoKey, PlainTurn, TurnMemo, read_plain_texts

CHECK_INTERVAL: Final = 64
"""One in this many texts of the memo, and of continued conversations, is compared with the template's own text."""
_PLACEHOLDER_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {"name": SYSTEM_FILLER, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]


class TemplateInputs(NamedTuple):
    """Everything that a chat template gets besides the new messages of a conversation."""

    chat: RoutingRequest
    digest: bytes
    """Digest of the inputs besides messages."""
    first_message: Message
    """First message of the chat, which templates may write late if it is the system's."""


class Cut(NamedTuple):
    """A place at which a prompt's text may be cut, and the placeholders that stand for the messages before it."""

    position: int
    rendered: RenderedPlaceholders


class BoundaryRenderer:
    """Renders chats by the template of one tokenizer: whole, or only the new messages of a cached conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self.tokenizer = tokenizer
        self.template: ChatTemplate = tokenizer.chat_template
        self._memo = TurnMemo()
        self._fill_count = 0
        self.is_wrong = False
        """Whether any text of the memo differed from the template's own text."""

    def find_markers(self, chat: RoutingRequest) -> tuple[str, ...]:
        """Return the strings for which the template searches message texts."""
        return find_template_markers(self.template.select_source(has_tools=chat.tools is not None))

    def render_whole(self, chat: RoutingRequest) -> str:
        """Render all messages of a chat. For a short chat of plain texts, the memo may know what the template writes.

        Every `CHECK_INTERVAL`-th text of the memo is compared with the template's own text, and `is_wrong` is set if
        they differ. Raises RequestError.
        """
        plain_chat = None if _has_options(chat) else self._read_plain_chat(chat)
        if plain_chat is None:
            return render_chat(self.template, chat)
        text = self._memo.fill(plain_chat)
        if text is None:
            text = render_chat(self.template, chat)
            self._memo.add(plain_chat, text, lambda messages: self._try_render(chat.replace(messages=messages)))
            return text
        self._fill_count += 1
        if self._fill_count % CHECK_INTERVAL:
            return text
        template_text = render_chat(self.template, chat)
        self.is_wrong |= text != template_text
        return template_text

    def prepare(self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]) -> NewMessages:
        """Return an object that renders the new messages of a conversation, those after the cached ones.

        `rendered` has the short placeholders that stand for the cached messages. If the new messages are plain texts,
        they get a key under which the memo may have what the template writes around such texts.
        """
        turn = None
        if not rendered.has_late_system:
            turn = self._make_plain_turn(rendered.digest, inputs.digest, inputs.chat, messages)
        return NewMessages(self, self._memo, rendered, inputs, messages, turn)

    def cut(
        self,
        placeholders: PlaceholderMessages,
        inputs: TemplateInputs,
        tail_messages: list[Message],
        text: str,
        *,
        has_late_system: bool,
    ) -> Cut | None:
        """Find where the prompt `text` can be cut before its last messages, the tail.

        The tail is rendered after placeholders. Where both texts are equal up to their ends, the template writes the
        tail regardless of what came before. `has_late_system`: whether the template writes the system text or the tools
        after the placeholders; if it turns out to, the search is repeated with the real ones. None if there is no such
        place at which the tokenizer cuts.
        """
        try:
            short_text = self._render(placeholders, inputs, tail_messages, has_late_system=has_late_system)
        except RequestError:
            return None
        common_chars = _count_common_end(text, short_text)
        position = self.tokenizer.cut_tokens.find_cut(text, len(text) - common_chars)
        if position is None:
            return None
        placeholder_chars = len(short_text) - (len(text) - position)
        if placeholder_chars <= 0:
            return None
        if not has_late_system and short_text.rfind(SYSTEM_FILLER) > short_text.rfind(FILLER):
            return self.cut(placeholders, inputs, tail_messages, text, has_late_system=True)
        placeholder_text = short_text[:placeholder_chars]
        return Cut(position, RenderedPlaceholders.make(placeholders, placeholder_text, has_late_system=has_late_system))

    def _read_plain_chat(self, chat: RoutingRequest) -> PlainTurn | None:
        inputs_digest = b"%d%d" % (chat.add_generation_prompt is not False, self.template.keeps_messages_as_sent)
        return self._make_plain_turn(0, inputs_digest, chat, chat.messages or [])

    def _make_plain_turn(
        self, prefix_digest: int, inputs_digest: bytes, chat: RoutingRequest, messages: list[Message]
    ) -> PlainTurn | None:
        plain = read_plain_texts(messages, self.find_markers(chat))
        if plain is None:
            return None
        clock = self.template.read_clock(has_tools=chat.tools is not None)
        roles = tuple([message["role"] for message in messages])
        return PlainTurn(MemoKey(prefix_digest, inputs_digest, roles, plain.edges, clock), plain.texts)

    def render_after(
        self, rendered: RenderedPlaceholders, inputs: TemplateInputs, messages: list[Message]
    ) -> str | None:
        """Return what the template writes for messages after placeholders.

        None if it refuses the messages, or if it writes the placeholders in another way than before, or a second time.
        """
        try:
            short_text = self._render(rendered.placeholders, inputs, messages, has_late_system=rendered.has_late_system)
        except RequestError:
            return None
        text = short_text[len(rendered.text) :]
        is_as_before = short_text.startswith(rendered.text) and FILLER not in text and SYSTEM_FILLER not in text
        return text if is_as_before else None

    def _try_render(self, chat: RoutingRequest) -> str | None:
        try:
            return render_chat(self.template, chat)
        except RequestError:
            return None

    def _render(
        self,
        placeholders: PlaceholderMessages,
        inputs: TemplateInputs,
        messages: list[Message],
        *,
        has_late_system: bool,
    ) -> str:
        """Render messages after placeholders. Raises RequestError.

        The system text and the tools are placeholders too, unless the template writes them late: then they are the real
        ones.
        """
        chat, all_messages = inputs.chat, [*placeholders.messages, *messages]
        if not has_late_system:
            tools = chat.tools and _PLACEHOLDER_TOOLS
            return render_chat(self.template, chat.replace(messages=all_messages, tools=tools))
        if is_system_message(inputs.first_message):
            all_messages[0] = inputs.first_message
        return render_chat(self.template, chat.replace(messages=all_messages))


class NewMessages:
    """The new messages of a conversation: renders them, and finds where their text can be cut for the next turn.

    They are rendered after short placeholders that stand for the cached messages before them. For a few plain texts,
    the memo may know the result.
    """

    def __init__(
        self,
        renderer: BoundaryRenderer,
        memo: TurnMemo,
        rendered: RenderedPlaceholders,
        inputs: TemplateInputs,
        messages: list[Message],
        turn: PlainTurn | None,
    ) -> None:
        """`rendered`: the placeholders of the boundary. `turn`: the messages as the memo takes them, if it does."""
        self._renderer = renderer
        self._memo = memo
        self._rendered = rendered
        self._inputs = inputs
        self._messages = messages
        self._turn = turn

    def render(self) -> str | None:
        """Return the prompt's text after the boundary.

        None if the template refuses the messages, or may have written the text before the boundary in another way.
        """
        text = None if self._turn is None else self._memo.fill(self._turn)
        if text is None:
            text = self._render(self._rendered, self._messages)
            if text is not None and self._turn is not None:
                self._memo.add(self._turn, text, lambda others: self._render(self._rendered, others))
        return text if text is not None and self._renderer.tokenizer.cut_tokens.starts_with_cut(text) else None

    def cut(self, count: int, text: str) -> Cut | None:
        """Find where `text`, which `render` returned, can be cut after the first `count` messages; None if nowhere."""
        cut = self._cut_by_memo(count, text)
        if cut is not None:
            return cut
        renderer, inputs, rendered = self._renderer, self._inputs, self._rendered
        placeholders = rendered.placeholders.extend(self._messages[:count], renderer.find_markers(inputs.chat))
        if placeholders is None:
            return None
        cut = renderer.cut(placeholders, inputs, self._messages[count:], text, has_late_system=rendered.has_late_system)
        if cut is not None and self._turn is not None and not cut.rendered.has_late_system:
            self._remember_cut(self._turn, cut, count, text)
        return cut

    def _cut_by_memo(self, count: int, text: str) -> Cut | None:
        if self._turn is None:
            return None
        next_rendered = self._memo.find_next_placeholders(self._turn.key, count)
        if next_rendered is None:
            return None
        tail_text = self._memo.fill(self._turn.after(count, next_rendered.digest))
        if tail_text is None or not text.endswith(tail_text):
            return None
        return Cut(len(text) - len(tail_text), next_rendered)

    def _remember_cut(self, turn: PlainTurn, cut: Cut, count: int, text: str) -> None:
        self._memo.add_next_placeholders(turn.key, count, cut.rendered)
        tail_turn = turn.after(count, cut.rendered.digest)
        self._memo.add(tail_turn, text[cut.position :], lambda others: self._render(cut.rendered, others))

    def _render(self, rendered: RenderedPlaceholders, messages: list[Message]) -> str | None:
        return self._renderer.render_after(rendered, self._inputs, messages)


def _has_options(chat: RoutingRequest) -> bool:
    """Whether a chat has inputs of a template besides messages and a generation prompt."""
    options = (
        chat.tools, chat.documents, chat.chat_template_kwargs, chat.reasoning_effort, chat.chat_template,
        chat.continue_final_message or None,
    )  # fmt: skip
    return any(option is not None for option in options)


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
