"""Answers of `/v1/chat/completions`: their JSON whole and streamed. No I/O."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta, ToolCallDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation
from engine.protocol.logprobs import join_json_list
from engine.protocol.openai import JsonObject, OpenAIFormatter
from engine.types import TokenLogprobs
from prompts import ChatRequest


class ChatFormatter(OpenAIFormatter):
    """Formats the answer to a chat, whole or as the chunks of a stream."""

    chunk_object, response_object = "chat.completion.chunk", "chat.completion"

    def __init__(self, generation: Generation, body: ChatRequest, factory: DetokenizerFactory) -> None:
        parser_config = generation.parser_config
        self._hides_tokens = parser_config.reasoning_format is not None and not parser_config.shows_reasoning
        """Whether token ids and logprobs are left out, because they would show hidden reasoning."""
        self._is_parsed = bool(parser_config.reasoning_format or parser_config.call_format or body.stop)
        """Whether answers may have reasoning, calls or stop strings."""
        super().__init__(generation, body, factory, bool(body.logprobs))
        self._includes_ids = self._includes_ids and not self._hides_tokens
        self._body = body
        self._role, self._echoed_text = _get_role_and_echoed_text(body)
        self._logprobs_by_choice: defaultdict[int, list[bytes]] = defaultdict(list)

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the chunks of a delta, before them the role if it is the first; empty bytes if there are none."""
        role_chunk = self._format_role_chunk(choice) if self._is_first_delta(choice) else b""
        if self._is_text_only and delta.finish_reason is None and not delta.tool_calls:
            if not delta.reasoning and not delta.text:
                return role_chunk
            if delta.reasoning and delta.text:  # each in a chunk of its own, as some clients read only one field
                deltas = replace(delta, text=""), replace(delta, reasoning="")
                return role_chunk + b"".join(self._format_delta_chunk(choice, part) for part in deltas)
        return role_chunk + self._format_delta_chunk(choice, delta)

    def _format_delta_chunk(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return one chunk with new text, reasoning and tool calls."""
        is_parsed_end = self._is_parsed and delta.finish_reason is not None
        has_other_fields = delta.reasoning or delta.tool_calls or is_parsed_end
        message: JsonObject = {}
        if delta.text or not has_other_fields:
            message["content"] = delta.text
        if delta.reasoning:
            message |= _name_reasoning(delta.reasoning)
        if delta.tool_calls:
            message["tool_calls"] = [{"index": call.index, **_make_tool_call(call)} for call in delta.tool_calls]
        return self._format_chunk(choice, self._make_choice(choice, delta, delta=message))

    def _make_choice(self, choice: Choice, part: Choice | ChoiceDelta, **message: JsonObject) -> JsonObject:
        """Return a whole choice with its `message`, or a delta of one with its `delta`."""
        fields = {
            "index": choice.index,
            **message,
            "logprobs": self._flush_logprobs(choice),
            "finish_reason": _get_finish_reason(part.finish_reason, choice),
        }
        if part.finish_reason is not None:
            fields["stop_reason"] = part.stop_reason
        return fields | self._show_ids(token_ids=part.token_ids)

    def _make_response_fields(self) -> JsonObject:
        fields = {}
        if self._prompt_logprobs:
            fields["prompt_logprobs"] = join_json_list(self._prompt_logprobs[0])
        return fields | self._show_ids(prompt_token_ids=self._generation.prompts[0])

    def _make_whole_choice(self, choice: Choice) -> JsonObject:
        return self._make_choice(choice, choice, message=self._make_message(choice))

    def _make_message(self, choice: Choice) -> JsonObject:
        """Return the message of a choice. Without text it has no content if there are calls, or if the model
        reasons.
        """
        content = self._echoed_text + choice.text
        has_reasoning = self._generation.parser_config.reasoning_format is not None
        calls = choice.tool_calls
        message: JsonObject = {
            "role": self._role,
            "content": None if not content and (has_reasoning or calls) else content,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_make_tool_call(call) for call in calls]
        return message | (_name_reasoning(choice.reasoning or None) if has_reasoning else {})

    def _format_role_chunk(self, choice: Choice) -> bytes:
        """Return the first chunk of a choice, which has the role, the echoed text and the prompt's token ids."""
        chunk_choice = {
            "index": choice.index,
            "delta": {"role": self._role, "content": self._echoed_text},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._format_chunk(choice, chunk_choice, **self._show_ids(prompt_token_ids=self._generation.prompts[0]))

    def _format_prompt_position(self, choice: Choice, position: TokenLogprobs | None) -> None:
        if choice.index == 0:  # all choices have one prompt
            self._prompt_logprobs[0].append(self._logprobs.format_prompt(position))

    def _format_position(self, choice: Choice, position: TokenLogprobs) -> None:
        if not self._hides_tokens:
            self._logprobs_by_choice[choice.index].append(self._logprobs.format_chat(position))

    def _flush_logprobs(self, choice: Choice) -> JsonObject | None:
        """Return the logprobs that were formatted since the last call."""
        if not self._body.logprobs or self._hides_tokens:
            return None
        return {"content": join_json_list(self._logprobs_by_choice.pop(choice.index, []))}


def _get_role_and_echoed_text(body: ChatRequest) -> tuple[str, str]:
    """Return (role of the answer, text of the last message if `echo` asks for it; else an empty string)."""
    last_message = body.messages[-1]
    generates = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if generates else str(last_message["role"])
    content = last_message.get("content")
    if body.echo and last_message["role"] == role and isinstance(content, str):
        return role, content
    return role, ""


def _make_tool_call(call: ToolCallDelta) -> JsonObject:
    """Return a tool call, or a piece of one. Only the first piece has the id and the name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"arguments": call.arguments, "name": call.name}}


def _name_reasoning(reasoning: str | None) -> JsonObject:
    """Return the reasoning under vLLM's name, and under the name that DeepSeek and older vLLMs have."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _get_finish_reason(reason: str | None, choice: Choice) -> str | None:
    """Return OpenAI's finish reason: "tool_calls" after calls, unless the request named the function."""
    ends_for_calls = choice.parser.has_tool_calls and not choice.parser.config.names_function
    return "tool_calls" if ends_for_calls and reason == "stop" else reason
