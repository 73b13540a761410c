"""Find the format that an answer must match in a checked body, whichever field asks for it. No I/O.

A format is a JSON object in the language of xgrammar's structural tags, which vLLM's clients send as they are
(`engine.structured_output.lark` lists the types). JSON schemas, regular expressions, choices and the calls that
`tool_choice` forces all become such formats; calls in the markup that the model's tool-call parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from engine.output.formats import CALL_FORMATS, ToolMarkup
from prompts import ChatRequest, CompletionRequest, bad_value, field_error
from prompts.chat_completions import Json, ResponseFormat, StructuredOutputs
from prompts.responses import CUSTOM_TOOL_SCHEMA, ClientTool
from simulation.spec import FIRST_TOOL, ScriptTurn

Format = dict[str, Any]
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RequestedConstraint(msgspec.Struct, frozen=True):
    """Format that an answer must match, and the field that asks for it."""

    param: str
    format: Format


class EncodedConstraint(msgspec.Struct, frozen=True):
    """A requested constraint on its way to the process that writes its grammar.

    The format is JSON, because its objects would take twenty times as much memory until the answer is complete.
    """

    param: str
    format_json: bytes
    reasoning_start_token: int | None = None
    """First token of an answer that begins with reasoning; None: the prompt begins the reasoning, or there is none."""
    reasoning_end_token: int | None = None
    """Token that ends the reasoning, which is not constrained; None: there is no reasoning."""

    def decode(self) -> RequestedConstraint:
        return RequestedConstraint(self.param, msgspec.json.decode(self.format_json))


def parse_requested_constraint(
    body: ChatRequest | CompletionRequest,
    call_format: str | None = None,
    grammars: Mapping[str, ClientTool] = MappingProxyType({}),
) -> RequestedConstraint | None:
    """Return the output format that a request asks for, such as a JSON schema; None if any answer is allowed.

    - If a tool call is required (`tool_choice`), the answer is calls, whatever `response_format` says, as with OpenAI.
    - If the text has a format (`response_format`) and tools may be called, the answer is such a text, or calls.
    - If tools may be called and the text is free, only calls have a format, if a tool is strict or has a grammar.

    `call_format`: name of the format in which the model writes calls; None: it writes none. `grammars`: custom tools
    with a grammar for their input, by name. Raises RequestError.
    """
    text_constraint = _parse_text_format(body)
    if not isinstance(body, ChatRequest):
        return text_constraint
    is_call_required, tools = _select_tools(body, grammars)
    if is_call_required and call_format is None:
        raise bad_value("tool_choice", body.tool_choice, "none or auto: no --tool-call-parser fits this model")
    if call_format is None or not (tools or is_call_required):
        return text_constraint
    markup = CALL_FORMATS[call_format].markup
    allows_several = body.parallel_tool_calls is not False and not names_function(body)
    if is_call_required:
        return RequestedConstraint("tool_choice", _make_calls_format(markup, tools, allows_several))
    if text_constraint is not None:
        calls_format = _make_calls_format(markup, tools, allows_several)
        either_format = {"type": "or", "elements": [text_constraint.format, calls_format]}
        return RequestedConstraint(text_constraint.param, either_format)
    if any(tool.is_strict or tool.grammar is not None for tool in tools):
        return RequestedConstraint("tools", _make_text_with_calls_format(markup, tools, allows_several))
    return None


def is_call_required(body: ChatRequest) -> bool:
    """Return whether the answer must be calls and nothing else. Raises RequestError."""
    return _select_tools(body, {}).is_call_required


def names_function(body: ChatRequest) -> bool:
    """Return whether a request names the one function that must be called."""
    return isinstance(body.tool_choice, dict) and body.tool_choice.get("type") != "allowed_tools"


def make_schema_format(schema: Json, whitespace: str | None = None) -> Format:
    """Return the format of JSON that matches a schema. `whitespace`: regular expression of the space between tokens."""
    format: Format = {"type": "json_schema", "json_schema": schema}
    if whitespace is not None:
        format["whitespace_pattern"] = whitespace
    return format


_PLAIN_PARAMETERS_KEYS = {"type", "title", "description", "properties", "required", "$schema", "$defs"}
"""Keywords of a schema whose properties are all that its objects have."""


def make_scripted_constraint(
    body: ChatRequest,
    script: Sequence[ScriptTurn],
    call_format: str | None,
    grammars: Mapping[str, ClientTool],
) -> RequestedConstraint:
    """Return the format that makes a simulated engine answer with the next turn of its script. Raises RequestError.

    A turn is a text, a call of a tool, or neither. The answer is random text if the turn is neither, or is a call that
    cannot be made: the request has no such tool, or there is no `call_format` (the name of the format of calls).
    `grammars`: custom tools with a grammar, by name.
    """
    turn = _find_next_turn(body, script)
    if turn.text is not None:
        return RequestedConstraint("messages", {"type": "const_string", "value": turn.text})
    random_text = RequestedConstraint("messages", {"type": "any_text"})
    if turn.call is None or call_format is None:
        return random_text
    tools = _select_tools(body, grammars).tools
    tool = next((tool for tool in tools if turn.call in (tool.name, FIRST_TOOL)), None)
    if tool is None:
        return random_text
    scripted_tools = [_restrict_to_turn(tool, turn)]
    calls_format = _make_calls_format(CALL_FORMATS[call_format].markup, scripted_tools, allows_several=False)
    return RequestedConstraint("tools", calls_format)


def _find_next_turn(body: ChatRequest, script: Sequence[ScriptTurn]) -> ScriptTurn:
    """Return the script's turn n for a conversation's n-th answer. After the last turn, the script begins anew."""
    answer_count: int = sum(message.get("role") == "assistant" for message in body.messages)
    if body.continue_final_message:  # the last answer is not complete
        answer_count -= 1
    return script[answer_count % len(script)]


def _restrict_to_turn(tool: _Tool, turn: ScriptTurn) -> _Tool:
    """Return a tool that takes only the arguments of a script's turn, or only declared ones if the turn has none."""
    if turn.arguments is None:
        return tool._replace(parameters=_forbid_undeclared_arguments(tool.parameters or {}))
    exact_schema = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in turn.arguments.items()},
        "required": list(turn.arguments),
        "additionalProperties": False,
    }
    return tool._replace(parameters=exact_schema, is_strict=True, grammar=None)


def _forbid_undeclared_arguments(parameters: Json) -> Json:
    """Return the schema of a tool's arguments, closed if it is plain: a client's function knows no other arguments."""
    if not isinstance(parameters, dict) or not parameters.keys() <= _PLAIN_PARAMETERS_KEYS:
        return parameters
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        return parameters
    if not all(isinstance(name, str) and name in properties for name in required):
        return parameters
    return {**parameters, "additionalProperties": False}


# Text -----------------------------------------------------------------------------------------------------------------


def _parse_text_format(body: ChatRequest | CompletionRequest) -> RequestedConstraint | None:
    """Return the format of the answer's text that `response_format` or `structured_outputs` asks for, if any."""
    form, outputs = body.response_format, body.structured_outputs
    response_constraint = None if form is None or form.type == "text" else _parse_response_format(form)
    if outputs is None:
        return response_constraint
    if response_constraint is not None:
        raise field_error("structured_outputs", "expected only where response_format is text")
    return _parse_structured_outputs(outputs)


def _parse_response_format(response_format: ResponseFormat) -> RequestedConstraint:
    """Return the output format that `response_format` asks for, with the path of the field that has it, for errors.

    OpenAI's types are any JSON object and a JSON schema. vLLM's structural tag has a format of xgrammar, or in its
    older form "structures" and "triggers". Raises RequestError if a field is missing.
    """
    if response_format.type == "json_object":
        return RequestedConstraint("response_format", make_schema_format({"type": "object"}))
    if response_format.type == "json_schema":
        named_schema = response_format.json_schema
        path = "response_format.json_schema" if named_schema is None else "response_format.json_schema.schema"
        if named_schema is None or named_schema.schema is None:
            raise field_error(path, "missing, expected a JSON schema")
        return RequestedConstraint(path, make_schema_format(named_schema.schema))
    tag_format, structures, triggers = response_format.format, response_format.structures, response_format.triggers
    if tag_format is not None:
        return RequestedConstraint("response_format.format", tag_format)
    if structures is None or triggers is None:
        raise field_error("response_format.format", "missing, expected the format of a structural tag")
    older_tag = parse_structural_tag({"structures": structures, "triggers": triggers}, "response_format")
    return RequestedConstraint("response_format.structures", older_tag)


def _parse_structured_outputs(outputs: StructuredOutputs) -> RequestedConstraint:
    """Return the output format that vLLM's field `structured_outputs` asks for, such as `{"regex": "[0-9]+"}`.

    Raises RequestError unless exactly one of the kinds ("json", "regex", ...) is set.
    """
    field = "structured_outputs"
    set_kinds = [kind for kind in KINDS if getattr(outputs, kind) not in (None, False)]  # False: json_object is off
    if len(set_kinds) != 1:
        kinds_text = ", ".join(set_kinds) or "none of them"
        raise field_error(field, f"got {kinds_text}, expected one of {', '.join(KINDS)}")
    if outputs.disable_additional_properties:
        option = f"{field}.disable_additional_properties"
        raise bad_value(option, True, 'false: say "additionalProperties": false in the schema')
    kind = set_kinds[0]
    param, value = f"{field}.{kind}", getattr(outputs, kind)
    format: Format
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else _decode_json_text(value, param)
        format = make_schema_format(schema, "" if outputs.disable_any_whitespace else outputs.whitespace_pattern)
    elif kind == "choice":
        if not value:
            raise bad_value(param, value, "at least one text")
        format = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
    elif kind == "structural_tag":
        format = parse_structural_tag(_decode_json_text(value, param), param)
    elif kind == "regex":
        format = {"type": "regex", "pattern": value}
    else:
        format = {"type": "grammar", "grammar": value}
    return RequestedConstraint(param, format)


def parse_structural_tag(tag: Json, param: str) -> Format:
    """Return the format in xgrammar's structural tag: `{"format": ...}`, or the older form with "structures".

    In the older form, text is free until one of the `triggers`; then the structure that begins so must follow.
    """
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        return dict(tag["format"])
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(structures, list) or not isinstance(tag.get("triggers"), list):
        raise bad_value(param, tag, 'an object with "format", or with "structures" and "triggers"')
    tags = []
    for number, structure in enumerate(structures):
        if not isinstance(structure, dict):
            raise bad_value(f"{param}.structures[{number}]", structure, "an object with begin, schema and end")
        schema = structure.get("schema")
        content = make_schema_format({} if schema is None else schema)
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _decode_json_text(value: Json, param: str) -> Json:
    """Return a JSON value that may be given as text. Raises RequestError if the text is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_value(param, value, f"JSON ({error})") from None


# Calls ----------------------------------------------------------------------------------------------------------------


class _Tool(NamedTuple):
    """A tool that may be called."""

    path: str
    """Field of the request that has the tool."""
    name: str
    parameters: Json
    is_strict: bool
    grammar: ClientTool | None
    """Grammar of the tool's free text; None: its input is arguments."""


def _list_tools(body: ChatRequest, grammars: Mapping[str, ClientTool]) -> list[_Tool]:
    tools = []
    for number, tool in enumerate(body.tools or ()):
        function = tool["function"]
        path, name, is_strict = f"tools[{number}].function", function["name"], bool(function.get("strict"))
        tools.append(_Tool(path, name, function.get("parameters"), is_strict, grammars.get(name)))
    return tools


class _ToolSelection(NamedTuple):
    """Tools that an answer may call, by the request's `tool_choice`."""

    is_call_required: bool
    tools: list[_Tool]


def _select_tools(body: ChatRequest, grammars: Mapping[str, ClientTool]) -> _ToolSelection:
    """Return the tools that `tool_choice` allows, and whether one of them must be called. Raises RequestError."""
    choice, tools = body.tool_choice, _list_tools(body, grammars)
    if choice is None or choice == "auto":
        return _ToolSelection(is_call_required=False, tools=tools)
    if choice == "none":
        return _ToolSelection(is_call_required=False, tools=[])
    if isinstance(choice, str) and choice != "required":
        raise bad_value("tool_choice", choice, '"none", "auto", "required" or an object that names a function')
    if not tools:
        raise bad_value("tool_choice", choice, "none or auto where no tools are given")
    if isinstance(choice, str):
        return _ToolSelection(is_call_required=True, tools=tools)
    tools_by_name = {tool.name: tool for tool in tools}
    if choice.get("type") == "allowed_tools":
        return _select_allowed_tools(choice, tools_by_name)
    named_tool = _find_named_tool(choice, "tool_choice", tools_by_name)
    return _ToolSelection(is_call_required=True, tools=[named_tool])


def _select_allowed_tools(choice: dict[str, Json], tools_by_name: Mapping[str, _Tool]) -> _ToolSelection:
    """Return the tools that a `tool_choice` of type allowed_tools lists. Raises RequestError."""
    allowed_tools = choice.get("allowed_tools", choice)
    if not isinstance(allowed_tools, dict):
        raise bad_value("tool_choice.allowed_tools", allowed_tools, "an object with mode and tools")
    mode, listed_tools = allowed_tools.get("mode"), allowed_tools.get("tools") or []
    if mode not in ("auto", "required"):
        raise bad_value("tool_choice.allowed_tools.mode", mode, '"auto" or "required"')
    path = "tool_choice.allowed_tools.tools"
    if not isinstance(listed_tools, list):
        raise bad_value(path, listed_tools, "an array of tools")
    tools = [_find_named_tool(tool, path, tools_by_name) for tool in listed_tools]
    return _ToolSelection(mode == "required", tools)


def _find_named_tool(choice: Json, path: str, tools_by_name: Mapping[str, _Tool]) -> _Tool:
    """Return the tool that `{"function": {"name": ...}}` names. Raises RequestError if there is none."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in tools_by_name:
        raise bad_value(f"{path}.function.name", name, f"one of the tools: {', '.join(tools_by_name)}")
    return tools_by_name[name]


def _make_tool_tags(markup: ToolMarkup, tools: Sequence[_Tool]) -> list[Format]:
    """Return the format of a call of each tool. Raises RequestError if the markup cannot hold a tool's name."""
    tags = []
    for tool in tools:
        if not markup.name_pattern.fullmatch(tool.name):
            raise bad_value(f"{tool.path}.name", tool.name, "a name that calls of this model can have")
        parameters_field = f"{tool.path}.parameters"
        schema = {} if tool.parameters is None else tool.parameters
        if not isinstance(schema, dict):
            raise bad_value(parameters_field, schema, "a JSON schema of an object")
        content = make_schema_format({**schema, "type": "object"}) | {"style": markup.style, "param": parameters_field}
        if tool.grammar is not None:
            content = _make_custom_tool_content(content, tool.grammar)
        elif not tool.is_strict:  # keywords that the compiler does not know are left out
            content["lenient"] = True
        written_name = json.dumps(tool.name, ensure_ascii=False) if markup.style == "json" else tool.name
        begin = markup.begin.replace("NAME", written_name)
        tags.append({"type": "tag", "begin": begin, "content": content, "end": markup.end})
    return tags


def _make_custom_tool_content(any_input_format: Format, tool: ClientTool) -> Format:
    """Return the format of a custom tool's arguments: one free text, `input`, that matches the tool's grammar.

    In JSON the arguments are `{"input": "TEXT"}`, where TEXT is the JSON-escaped form of what the grammar matches.
    `any_input_format`: format that allows any text, in the style of the model's markup.
    """
    if tool.syntax == "regex":
        input_schema = {"type": "string", "pattern": f"^(?:{tool.definition})$"}
        return {**any_input_format, "json_schema": {**CUSTOM_TOOL_SCHEMA, "properties": {"input": input_schema}}}
    quotes_by_style = {"json": ('{"input": "', '"}'), "python": ('input="', '"')}
    style = any_input_format["style"]
    if style not in quotes_by_style:  # XML ends a text by a marker, which the grammar could match as text, too
        return any_input_format
    opening, closing = quotes_by_style[style]
    elements: list[Format] = [
        {"type": "const_string", "value": opening},
        {"type": "escaped_lark", "definition": tool.definition, "tool": tool.name},
        {"type": "const_string", "value": closing},
    ]
    return {"type": "sequence", "elements": elements}


def _make_calls_format(markup: ToolMarkup, tools: Sequence[_Tool], allows_several: bool) -> Format:
    """Return the format of an answer that is calls and nothing else: several calls, or only one."""
    calls: Format = {
        "type": "tags_with_separator",
        "tags": _make_tool_tags(markup, tools),
        "separator": markup.separator,
        "at_least_one": True,
        "stop_after_first": not allows_several,
    }
    if not markup.calls_begin:
        return calls
    return {"type": "tag", "begin": markup.calls_begin, "content": calls, "end": markup.calls_end}


def _make_text_with_calls_format(markup: ToolMarkup, tools: Sequence[_Tool], allows_several: bool) -> Format:
    """Return the format of text that may have calls in it."""
    # A model that writes its calls as a list writes one list, so the answer is complete after the first list.
    is_list = bool(markup.calls_begin)
    tags = [_make_calls_format(markup, tools, allows_several)] if is_list else _make_tool_tags(markup, tools)
    return {
        "type": "triggered_tags",
        "triggers": [markup.trigger],
        "tags": tags,
        "stop_after_first": is_list or not allows_several,
    }
