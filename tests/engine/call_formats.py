"""What each tool-call format looks like: one `FormatExample` for each row of `CALL_FORMATS`, used by several tests."""

from __future__ import annotations

from dataclasses import dataclass

CITY = '{"city": "Säckingen 🙂", "days": 3}'


@dataclass(frozen=True, kw_only=True)
class FormatExample:
    """Texts in one format of tool calls."""

    template: str
    """Part of a chat template by which the format is chosen."""
    find: str
    """A call of `find` with the arguments CITY; other text and other calls may stand beside it."""
    weather: str
    """A call of `weather` that its schema in test_constraint.py allows."""
    time: str
    """A call of `time` without arguments."""
    wrong: str
    """A call that the schemas do not allow."""
    patch: str | None
    """A call of `patch` with the custom input %s in JSON; None if the format writes texts without quotation marks."""
    scraps: list[str]
    """Pieces of calls and of text, which a test joins at random. § marks what must not be lost."""


EXAMPLES: dict[str, FormatExample] = {
    "hermes": FormatExample(
        template='<tool_call>\\n{"name": <function-name>, ...}\\n</tool_call>',
        find=f'Gut, 🙂:<tool_call>{{"name": "find", "arguments": {CITY}}}</tool_call>',
        weather='<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin", "days": 3}}\n</tool_call>',
        time='<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        wrong='<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>',
        patch='<tool_call>\n{"name": "patch", "arguments": {"input": %s}}\n</tool_call>',
        scraps=["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', "{", "}", '{"x": "§"}'],
    ),
    "qwen3_coder": FormatExample(
        template="<tool_call>\n<function=example_function_name>\n<parameter=x>",
        find="é<tool_call>\n<function=find>\n<parameter=city>\nSäckingen 🙂\n</parameter></function></tool_call>",
        weather=(
            "<tool_call>\n<function=weather>\n<parameter=city>\nBer\nlin\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
        ),
        time="<tool_call>\n<function=time>\n</function>\n</tool_call>",
        wrong=(
            "<tool_call>\n<function=weather>\n<parameter=city>\nB\n</parameter>\n<parameter=unit>\nX\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        patch=None,
        scraps=[
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "f>",
            "</function>",
            "<parameter=",
            "x>",
            "\n§",
            "</parameter>",
        ],
    ),
    "llama3_json": FormatExample(
        template='{"name": function name, "parameters": dictionary of argument name and its value}',
        find=f'{{"name": "find", "parameters": {CITY}}}',
        weather='{"name": "weather", "parameters": {"city": "Berlin"}}',
        time='{"name": "time", "parameters": {}}',
        wrong='{"name": "weather", "parameters": {"city": 1}}',
        patch='{"name": "patch", "parameters": {"input": %s}}',
        scraps=["<|python_tag|>", '{"name": "f", ', '"parameters": ', "{", "}", ";", '{"x": "§"}'],
    ),
    "mistral": FormatExample(
        template='{{- "[TOOL_CALLS] [" }}',
        find=f"é[TOOL_CALLS]find{CITY}[TOOL_CALLS]find{{}}",
        weather='[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Berlin"}}]',
        time='[TOOL_CALLS][{"name": "time", "arguments": {}}]',
        wrong='[TOOL_CALLS][{"name": "other", "arguments": {}}]',
        patch='[TOOL_CALLS][{"name": "patch", "arguments": {"input": %s}}]',
        scraps=["[TOOL_CALLS]", "[ARGS]", "f", "{", "}", '{"name": "f", "arguments": {}}', "[", "]", ";"],
    ),
    "pythonic": FormatExample(
        template="[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        find='[find(city="Säckingen 🙂", days=3), find()]',
        weather='[weather(city="Berlin", metric=True, unit="C", more=["a", "b"])]',
        time="[time()]",
        wrong='[weather(city="Berlin", unit="X")]',
        patch="[patch(input=%s)]",
        scraps=["[", "f(", "a=", "1", '"§"', "'", ")", "]", ",", "\\", "{", "<|python_start|>", "<|python_end|>"],
    ),
    "granite": FormatExample(
        template="<|start_of_role|>assistant<|end_of_role|><|tool_call|>",
        find=f'<|tool_call|>[{{"name": "find", "arguments": {CITY}}}]',
        weather='<|tool_call|>[{"name": "weather", "arguments": {"city": "Berlin"}}]',
        time='<|tool_call|>[{"name": "time", "arguments": {}}]',
        wrong='<|tool_call|>[{"name": "weather", "arguments": {}}]',
        patch='<|tool_call|>[{"name": "patch", "arguments": {"input": %s}}]',
        scraps=["<|tool_call|>", "<tool_call>", "[", "]", '{"name": "f", ', '"arguments": {}', "}", ","],
    ),
}
