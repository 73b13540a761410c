"""A model's chat template: messages in, the prompt's text out, exactly as Hugging Face transformers renders it.

Rendering is a pure function of its arguments, except where a template asks for the date (`strftime_now`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext

from prompts.content_format import ContentFormat, detect_content_format
from prompts.errors import RequestError, field_error
from prompts.template_environment import (
    RenderContext,
    RenderLimitError,
    TemplateEnvironment,
    is_in_time,
    make_environment,
)

Message = dict[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TEMPLATE_CHARS_MAX = 1 << 18
"""Longest template; the longest known one has 20,000 characters."""
TRIAL_S_MAX = 0.1
"""Most CPU time of a template for a chat of four words; one that needs more counts as one that refuses the chat."""


class ChatTemplateError(ValueError):
    """A template that is too long, or does not compile."""


class TemplateLimitError(RequestError):
    """A chat for which the model's template needs more time or memory than it may."""


class _CompiledTemplate:
    """A chat template compiled by Jinja. Raises ChatTemplateError if it is too long or does not compile."""

    def __init__(self, source: str, environment: TemplateEnvironment | None = None) -> None:
        """Compile a template, by default for the environment of transformers."""
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ChatTemplateError(f"chat template: {len(source)} characters, expected at most {TEMPLATE_CHARS_MAX}")
        try:
            tree, self._template = (environment or make_environment()).compile_with_time_checks(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            # For example, a number of thousands of digits, or an expression too deep for Python's parser.
            raise ChatTemplateError(f"chat template: {error}") from error
        self.source = source
        self.content_format: ContentFormat = detect_content_format(tree)
        """Whether the template wants the content of messages as a string or as parts."""
        self._globals = dict(self._template.globals)

    def render(self, variables: dict[str, Any], seconds_max: float) -> str:
        """Return the text that the template writes. Raises RenderLimitError if that takes too much CPU time."""
        # Jinja's own `render` is slower, as it copies the globals each time.
        context = self._template.new_context({**self._globals, **variables}, shared=True)
        assert isinstance(context, RenderContext)
        if seconds_max < math.inf:
            context.set_time_limit(seconds_max)
        text = "".join(self._template.root_render_func(context))
        is_in_time(context, None)  # raises, if the last operation took too long
        return text


_compile_template = lru_cache(maxsize=64)(_CompiledTemplate)


@lru_cache(maxsize=64)
def _needs_system_first(source: str) -> bool:
    """Return whether a chat template refuses a system message after other messages, by rendering such a chat.

    As in vLLM, templates get only Jinja's own functions here. One that calls others fails, and counts as refusing.
    """
    sample_messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        template = _CompiledTemplate(source, TemplateEnvironment([jinja2.ext.loopcontrols]))
        template.render({"messages": sample_messages, "add_generation_prompt": False}, TRIAL_S_MAX)
    except Exception:  # noqa: BLE001  a template is a program, which may raise anything
        return True
    return False


class ChatTemplate:
    """The templates of one model: usually one, sometimes several by name (`default`, `tool_use`, `rag`).

    `variables`: the special tokens that templates read. Raises ChatTemplateError for a faulty template.
    """

    def __init__(self, templates: str | Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._variables = dict(variables or {})
        self.keeps_messages_as_sent = False
        """Whether templates get messages as before transformers 5.23: with nulls, and with reasoning under one name."""
        for source in self._templates.values():
            _compile_template(source)
        self.seconds_max = math.inf
        """Most CPU time of a rendering."""
        self.is_bounded = True
        """Whether all renderings have kept to the limit. If not, a server may render elsewhere; nothing is refused."""

    def replace(self, name_or_source: str) -> ChatTemplate:
        """Return one of the model's templates by its name, or another template by its text."""
        return ChatTemplate(self._templates.get(name_or_source, name_or_source), self._variables)

    def select_source(self, *, has_tools: bool = False) -> str:
        """Return the template of a chat with or without tools."""
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise RequestError(
            f"this model has several chat templates and no default; name one of {sorted(self._templates)}",
            param="chat_template",
        )

    def find_content_format(self, *, has_tools: bool = False) -> ContentFormat:
        """Return whether the template of a chat wants `content` as a string or as parts."""
        return _compile_template(self.select_source(has_tools=has_tools)).content_format

    def needs_system_first(self) -> bool:
        """Return whether one of the templates refuses a system message after another message, by vLLM's test."""
        sources = (self.select_source(has_tools=has_tools) for has_tools in (False, True))
        return any(_needs_system_first(source) for source in sources)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt's text, equal to that of transformers' `apply_chat_template(..., tokenize=False)`.

        `add_generation_prompt`: the prompt ends with the start of an answer. `continue_final_message`: it ends after
        the text of the last message. Raises RequestError for messages that the template refuses (`raise_exception`) or
        cannot render.
        """
        if not messages:
            raise field_error("messages", "got an empty array, expected at least one message")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        template = _compile_template(self.select_source(has_tools=tools is not None))
        context = {
            **self._variables,
            **variables,
            "messages": [self._convert_message(message) for message in messages],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            return self._render_continuation(template, context)
        return self._render(template, context)

    def _convert_message(self, message: Message) -> Message:
        """Return a message as transformers from 5.23 on gives it to templates."""
        is_plain = len(message) == 2 and message.get("content") is not None and message.get("role") is not None
        if is_plain or self.keeps_messages_as_sent:
            return message
        return _add_reasoning_names({name: value for name, value in message.items() if value is not None})

    def _render_continuation(self, template: _CompiledTemplate, context: dict[str, Any]) -> str:
        """Render a chat up to the end of the content of its last message, which the model is to continue.

        The message is rendered with a tag after its text. What the template writes after the tag is cut off.
        """
        *earlier_messages, final_message = context["messages"]
        has_calls = bool(final_message.get("tool_calls"))
        if has_calls:
            without_calls = {name: value for name, value in final_message.items() if name != "tool_calls"}
            final_message = {**without_calls, "content": final_message.get("content") or ""}
        tagged_message, final_text = _tag_message(final_message, template.source)
        tagged_text = self._render(template, {**context, "messages": [*earlier_messages, tagged_message]})
        if not has_calls:
            return _cut_at_tag(tagged_text, final_text)
        return _remove_turn_ending(self._render(template, context), _get_text_after_tag(tagged_text))

    def _render(self, template: _CompiledTemplate, context: dict[str, Any]) -> str:
        """Render a template. Raises RequestError if the template fails, or takes too much time or memory."""
        try:
            return template.render(context, self.seconds_max)
        except (RenderLimitError, MemoryError) as error:
            problem = "the chat template needs too much memory" if isinstance(error, MemoryError) else str(error)
            if self.seconds_max == math.inf:
                raise RequestError(problem, param="messages") from error
            self.is_bounded = False  # so the router renders this model's chats in worker processes from now on
            raise TemplateLimitError(problem, param="messages") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except (
            TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError, RuntimeError,
        ) as error:  # fmt: skip
            # The template is a program that failed on what the client sent, so the client gets the error.
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"the chat template failed on these messages: {reason}", param="messages") from error


def _add_reasoning_names(message: Message) -> Message:
    """Give reasoning under all three names that templates read; a missing name gets the text of the first present."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, "reasoning": reasoning, **message, "reasoning_content": reasoning}


def _tag_message(message: Message, template_source: str) -> tuple[Message, str]:
    """Return a message with a tag after its last text, and that text. Raises RequestError if it has no text."""
    content = message.get("content")
    if content is None:
        raise field_error("continue_final_message", 'the last message has no "content" to continue')
    if "content" not in template_source:
        raise field_error("continue_final_message", 'the chat template does not read "content"')
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_TAG}, content
    parts = content if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        text = parts[index].get("text") if isinstance(parts[index], dict) else None
        if isinstance(text, str):
            tagged_part = {**parts[index], "text": text + _CONTINUE_TAG}
            return {**message, "content": [*parts[:index], tagged_part, *parts[index + 1 :]]}, text
    raise field_error("continue_final_message", "the last message has no text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    """Return the text before the tag, trimmed at its end if the template trimmed the message."""
    stripped_tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or stripped_tag not in text:
        raise field_error("continue_final_message", "the chat template does not show the last message as it was sent")
    position = text.rindex(stripped_tag)
    return text[:position] if text.startswith(_CONTINUE_TAG, position) else text[:position].rstrip()


def _get_text_after_tag(text: str) -> str:
    """Return what the template writes after a message: the end of a turn."""
    _, tag, ending = text.rpartition(_CONTINUE_TAG)
    return ending if tag else text.rpartition(_CONTINUE_TAG.strip())[2]


def _remove_turn_ending(text: str, ending: str) -> str:
    """Remove the end of the last turn after its tool calls, which transformers would drop."""
    if not text.endswith(ending):
        problem = "the chat template ends a message with tool_calls in a way of its own"
        raise field_error("continue_final_message", f"{problem}, expected a last message without tool_calls")
    return text.removesuffix(ending)
