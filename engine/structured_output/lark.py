"""Write a format as a grammar in Lark, as llguidance reads it. No I/O.

A format is an object with a `type`, as in xgrammar's structural tags: const_string, json_schema (in the styles json,
qwen_xml and python), regex, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags,
tags_with_separator, escaped_lark (a grammar of a JSON string's text); or grammar, which stands alone. Other types are
refused. Schemas and patterns are checked by the compiler.

Texts that are one token each (`<tool_call>`, `[TOOL_CALLS]`) become tokens of the grammar: models write them so, and no
text of a grammar matches a special token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.structured_output.call_arguments import PYTHON_OPTIONS, ArgumentWriter
from engine.structured_output.constraint import Format, RequestedConstraint
from engine.structured_output.escaped_lark import UnsupportedGrammar, escape_grammar
from engine.structured_output.lark_rules import (
    ANY_TEXT,
    GrammarRules,
    escape_literal,
    json_directive,
    quote,
    slash_regex,
)
from prompts import bad_value, field_error
from prompts.chat_completions import Json

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,64}"
"""Default white space between two tokens of JSON: one or two spaces, or a line break with an indentation.

JSON sets no bound, but a model that has written many spaces may write nothing else until its end.
"""
FORMATS_MAX = 4096
"""Most formats in one constraint."""
DEPTH_MAX = 64
"""Most formats inside each other."""


def write_lark(constraint: RequestedConstraint, tokens: Mapping[str, int]) -> str:
    """Return the grammar. `tokens`: text -> id of the token that stands for it. Raises RequestError."""
    if constraint.format.get("type") == "grammar":
        return _get_text(constraint.param, constraint.format, "grammar")
    return _LarkWriter(tokens).write(constraint)


class _LarkWriter:
    """Writes one grammar, as rules that refer to each other by name.

    A method `write_x` returns the body of the rule for a format of type x, after adding the rules of the formats inside
    it. For `{"type": "star", "content": {"type": "regex", "pattern": "[0-9]"}}` the rule r0: /[0-9]/ is added, and
    `r0*` is returned. `path`: place of the format in the request, for errors.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules = GrammarRules(tokens)
        self._format_count = 0
        self._depth = 0
        """Number of formats around the one that is being written."""

    def write(self, constraint: RequestedConstraint) -> str:
        start_rule = self._write_format(constraint.param, constraint.format)
        return "\n".join(["%llguidance {}", f"start: {start_rule}", *self._rules.lines]) + "\n"

    def _write_format(self, path: str, format: Json) -> str:
        """Add the rule of a format. Return the rule's name."""
        self._format_count += 1
        if self._format_count > FORMATS_MAX or self._depth > DEPTH_MAX:
            raise field_error(path, "too many formats, or too deep in each other")
        format_type = format.get("type") if isinstance(format, dict) else None
        write = _WRITERS.get(format_type) if isinstance(format_type, str) else None
        if write is None:
            raise bad_value(f"{path}.type", format_type, f"one of {', '.join(_WRITERS)}")
        self._depth += 1
        body = write(self, path, format)
        self._depth -= 1
        return self._rules.add_rule(body)

    def write_const_string(self, path: str, format: Format) -> str:
        return self._rules.write_text(_get_text(path, format, "value"))

    def write_regex(self, path: str, format: Format) -> str:
        return slash_regex(_get_text(path, format, "pattern"))

    def write_any_text(self, path: str, format: Format) -> str:
        """Return a terminal that matches any text in which none of the format's `excludes` occurs."""
        excluded_texts = format.get("excludes") or []
        if not isinstance(excluded_texts, list) or not all(isinstance(text, str) and text for text in excluded_texts):
            raise bad_value(f"{path}.excludes", excluded_texts, "texts")
        exclusions = [f"~/(?s:.*){escape_literal(text)}(?s:.*)/" for text in excluded_texts if text not in self._tokens]
        return self._rules.add_terminal(" & ".join([ANY_TEXT, *exclusions])) if exclusions else ANY_TEXT

    def write_escaped_lark(self, path: str, format: Format) -> str:
        try:
            return f"%lark {{\n{escape_grammar(_get_text(path, format, 'definition'))}\n}}"
        except UnsupportedGrammar as error:
            problem = f"the grammar of the tool {format.get('tool')!r} cannot be matched: {error}"
            raise field_error(path, problem) from None

    def write_json_schema(self, path: str, format: Format) -> str:
        """Return a grammar expression for the values that match a JSON schema (`format["json_schema"]`).

        The format's `style` says how values are written: "json", "qwen_xml" (Qwen3-Coder's parameters) or "python" (the
        arguments of a call). `path`: place of the format in the request, for errors. Raises RequestError.
        """
        schema = format.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise bad_value(f"{path}.json_schema", schema, "a JSON schema")
        whitespace = format.get("whitespace_pattern", WHITESPACE)
        if not isinstance(whitespace, str):
            raise bad_value(f"{path}.whitespace_pattern", whitespace, "a regular expression")
        options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        if format.get("lenient"):
            options["lenient"] = True
        style = format.get("style", "json")
        if style == "json":
            return json_directive(schema, options)
        param = format.get("param", path)
        if style == "qwen_xml":
            return ArgumentWriter(self._rules, param, schema, options).write_xml()
        if style == "python":
            return ArgumentWriter(self._rules, param, schema, options | PYTHON_OPTIONS).write_python()
        raise bad_value(f"{path}.style", style, '"json", "qwen_xml" or "python"')

    def write_sequence(self, path: str, format: Format) -> str:
        return " ".join(self._write_elements(path, format, "elements"))

    def write_or(self, path: str, format: Format) -> str:
        elements = _get_list(path, format, "elements")
        has_plain_texts = all(_is_plain(element, self._tokens) for element in elements)
        if has_plain_texts and len(elements) > 1:  # one terminal, however many texts there are
            return self._rules.add_terminal(" | ".join(quote(element["value"]) for element in elements))
        return " | ".join(self._write_elements(path, format, "elements"))

    def _write_elements(self, path: str, format: Format, name: str) -> list[str]:
        items = _get_list(path, format, name)
        return [self._write_format(f"{path}.{name}[{i}]", item) for i, item in enumerate(items)]

    def write_repeat(self, path: str, format: Format) -> str:
        """Return an expression of a format that comes `min` to `max` times; -1 as `max` means no end."""
        min_count, max_count = format.get("min"), format.get("max")
        for name, value in (("min", min_count), ("max", max_count)):
            if type(value) is not int or not -1 <= value < 2**31:
                raise bad_value(f"{path}.{name}", value, "a count, -1 for no end")
        assert isinstance(min_count, int)
        assert isinstance(max_count, int)
        if min_count < 0 or (max_count != -1 and max_count < max(min_count, 1)):
            raise bad_value(f"{path}.max", max_count, "at least min, and 1")
        upper_bound = "" if max_count == -1 else max_count
        return f"{self.write_content(path, format)}{{{min_count},{upper_bound}}}"

    def write_content(self, path: str, format: Format) -> str:
        return self._write_format(f"{path}.content", format.get("content"))

    def write_tag(self, path: str, format: Format) -> str:
        return f"{self._rules.write_text(_get_text(path, format, 'begin'))} {self._write_tag_tail(path, format)}"

    def _write_tag_tail(self, path: str, format: Format) -> str:
        """Return an expression of a tag's content and its end: `end` is a text, or a list of alternative texts."""
        ends = format.get("end")
        if not isinstance(ends, list) or not ends:
            ends = [ends]
        if not all(isinstance(end, str) for end in ends):
            raise bad_value(f"{path}.end", format.get("end"), "a text, or texts")
        content = format.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._write_text_until(self.write_any_text(f"{path}.content", content), ends)
        end_expression = " | ".join(map(self._rules.write_text, ends))
        return f"{self._write_format(f'{path}.content', content)} ({end_expression})"

    def _write_text_until(self, free_text: str, ends: list[str]) -> str:
        """Return an expression of text up to the first of `ends`, and that end. `free_text`: terminal of the text.

        A rule that matches any text would go on past an end. Only a `lazy` rule stops at the first match, and it cannot
        have tokens in it. An end with a token needs no lazy rule, because no text matches a special token.
        """
        texts = [end for end in ends if self._rules.write_text(end) == quote(end)]
        alternatives = [f"{free_text} {self._rules.write_text(end)}" for end in ends if end not in texts]
        if texts:
            alternatives.append(self._rules.add_rule(f"{free_text} ({' | '.join(map(quote, texts))})", "[lazy]"))
        return f"({' | '.join(alternatives)})"

    def write_triggered_tags(self, path: str, format: Format) -> str:
        """Return a grammar expression for free text with tags in it, such as tool calls between <tool_call> marks.

        The text is free until one of the `triggers` comes, such as "<tool_call>". Then one of the `tags` that begin
        with this trigger must follow.
        """
        triggers = _get_list(path, format, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise field_error(path, "expected triggers that are texts, not empty")
        free_text = self.write_any_text(path, format)
        alternatives = []
        for trigger, tag_rules in self._write_tags_by_trigger(path, format, triggers).items():
            text_and_trigger = self._write_text_until(free_text, [trigger])
            alternatives.append(self._rules.add_rule(f"{text_and_trigger} ({' | '.join(tag_rules)})"))
        text_and_tag = self._rules.add_rule(" | ".join(alternatives))
        must_come = format.get("at_least_one")
        if not format.get("stop_after_first"):
            return f"{text_and_tag}{'+' if must_come else '*'} {free_text}"
        return text_and_tag if must_come else f"{text_and_tag} | {free_text}"

    def _write_tags_by_trigger(self, path: str, format: Format, triggers: list[str]) -> dict[str, list[str]]:
        """Add a rule for each tag of a format, for what follows the tag's trigger. Return the rules by trigger."""
        rules_by_trigger: dict[str, list[str]] = {}
        for number, tag in enumerate(_get_list(path, format, "tags")):
            tag_path = f"{path}.tags[{number}]"
            begin = _get_text(tag_path, tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise bad_value(f"{tag_path}.begin", begin, f"a text that begins with one of {', '.join(triggers)}")
            tag_tail = f"{self._rules.write_text(begin[len(trigger) :])} {self._write_tag_tail(tag_path, tag)}"
            rules_by_trigger.setdefault(trigger, []).append(self._rules.add_rule(tag_tail))
        return rules_by_trigger

    def write_tags_with_separator(self, path: str, format: Format) -> str:
        tags = self._write_elements(path, format, "tags")
        tag = self._rules.add_rule(" | ".join(tags))
        separator = self._rules.write_text(_get_text(path, format, "separator"))
        tag_list = tag if format.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return tag_list if format.get("at_least_one") else f"({tag_list})?"


_WRITERS: dict[str, Callable[[_LarkWriter, str, Format], str]] = {
    "const_string": _LarkWriter.write_const_string,
    "json_schema": _LarkWriter.write_json_schema,
    "escaped_lark": _LarkWriter.write_escaped_lark,
    "regex": _LarkWriter.write_regex,
    "any_text": _LarkWriter.write_any_text,
    "sequence": _LarkWriter.write_sequence,
    "or": _LarkWriter.write_or,
    "optional": lambda writer, path, format: writer.write_content(path, format) + "?",
    "star": lambda writer, path, format: writer.write_content(path, format) + "*",
    "plus": lambda writer, path, format: writer.write_content(path, format) + "+",
    "repeat": _LarkWriter.write_repeat,
    "tag": _LarkWriter.write_tag,
    "triggered_tags": _LarkWriter.write_triggered_tags,
    "tags_with_separator": _LarkWriter.write_tags_with_separator,
}


def _get_text(path: str, format: Json, name: str) -> str:
    value = format.get(name) if isinstance(format, dict) else None
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", value, "a text")
    return value


def _get_list(path: str, format: Format, name: str) -> list[Json]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise bad_value(f"{path}.{name}", value, "an array that is not empty")
    return value


def _is_plain(format: Json, tokens: Mapping[str, int]) -> bool:
    """Return whether a format is a constant text without texts of tokens."""
    value = format.get("value") if isinstance(format, dict) and format.get("type") == "const_string" else None
    return isinstance(value, str) and not any(token in value for token in tokens)
