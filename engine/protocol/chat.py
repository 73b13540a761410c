"""Answers of `/v1/chat/completions`: their structs, and their JSON whole and streamed. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta, ToolCallDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation, Usage
from engine.protocol.logprobs import join_json_list
from engine.protocol.openai import OpenAIFormatter, ResponseBase, StopReason, encoder
from engine.types import TokenLogprobs
from prompts import ChatRequest


class ChatLogprobs(Struct, frozen=True):
    content: Raw
    """A list that `engine.protocol.logprobs` wrote."""


class Function(Struct, frozen=True):
    """Function of a tool call. In a stream the name comes first, then the arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call, or a piece of one in a stream. Only pieces have an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    """vLLM's name of the reasoning; the next field is DeepSeek's and older vLLMs' name."""
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(ResponseBase, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(ResponseBase, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatFormatter(OpenAIFormatter):
    """Formats the answer to a chat, whole or as the chunks of a stream."""

    chunk_type = ChatChunk

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
        self._format_all_logprobs(choice, delta)
        role_chunk = self._format_role_chunk(choice) if self._is_first_delta(choice) else b""
        if self._is_text_only and delta.finish_reason is None and not delta.tool_calls:
            if not delta.reasoning and not delta.text:
                return role_chunk
            if delta.reasoning and delta.text:  # each in a chunk of its own, as some clients read only one field
                deltas = replace(delta, text=""), replace(delta, reasoning="")
                chunks = [self._format_chunk(choice, self._make_chunk_choice(choice, part)) for part in deltas]
                return role_chunk + b"".join(chunks)
        return role_chunk + self._format_chunk(choice, self._make_chunk_choice(choice, delta))

    def _make_chunk_choice(self, choice: Choice, delta: ChoiceDelta) -> ChatChunkChoice:
        """Convert new text, reasoning and tool calls to the `choices` entry of a chat completion chunk."""
        is_parsed_end = self._is_parsed and delta.finish_reason is not None
        has_other_fields = delta.reasoning or delta.tool_calls or is_parsed_end
        return ChatChunkChoice(
            index=choice.index,
            delta=Delta(
                content=delta.text if delta.text or not has_other_fields else UNSET,
                reasoning=delta.reasoning or UNSET,
                reasoning_content=delta.reasoning or UNSET,
                tool_calls=[_make_tool_call(call, is_complete=False) for call in delta.tool_calls] or UNSET,
            ),
            logprobs=self._flush_logprobs(choice),
            finish_reason=_get_finish_reason(delta.finish_reason, choice),
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            token_ids=self._get_visible_ids(delta.token_ids),
        )

    def format_response(self) -> bytes:
        """Return the whole answer."""
        generation = self._generation
        prompt_logprobs: Raw | UnsetType = UNSET
        if self._prompt_logprobs:
            prompt_logprobs = join_json_list(self._prompt_logprobs[generation.choices[0].index])
        response = ChatCompletion(
            **generation.make_common_fields(),
            choices=[self._make_choice(choice) for choice in generation.choices],
            usage=generation.compute_usage(),
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self._get_visible_ids(generation.prompts[0]),
        )
        return encoder.encode(response)

    def _make_choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=self._make_message(choice),
            logprobs=self._flush_logprobs(choice),
            finish_reason=_get_finish_reason(choice.finish_reason, choice) or "",
            stop_reason=choice.stop_reason,
            token_ids=self._get_visible_ids(choice.token_ids),
        )

    def _make_message(self, choice: Choice) -> ChatMessage:
        """Return the message of a choice. Without text it has no content if there are calls, or if the model
        reasons.
        """
        content = self._echoed_text + choice.text
        has_reasoning = self._generation.parser_config.reasoning_format is not None
        reasoning, calls = choice.reasoning or None, choice.tool_calls
        return ChatMessage(
            role=self._role,
            content=None if not content and (has_reasoning or calls) else content,
            tool_calls=[_make_tool_call(call, is_complete=True) for call in calls] or UNSET,
            reasoning=reasoning if has_reasoning else UNSET,
            reasoning_content=reasoning if has_reasoning else UNSET,
        )

    def _format_role_chunk(self, choice: Choice) -> bytes:
        """Return the first chunk of a choice, which has the role, the echoed text and the prompt's token ids."""
        chunk_choice = ChatChunkChoice(index=choice.index, delta=Delta(role=self._role, content=self._echoed_text))
        return self._format_chunk(
            choice, chunk_choice, prompt_token_ids=self._get_visible_ids(self._generation.prompts[0])
        )

    def _format_prompt_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        if choice.index == 0:  # all choices have one prompt
            self._prompt_logprobs[0] += map(self._logprobs.format_prompt, positions)

    def _format_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        if not self._hides_tokens:
            self._logprobs_by_choice[choice.index] += map(self._logprobs.format_chat, positions)

    def _flush_logprobs(self, choice: Choice) -> ChatLogprobs | None:
        """Return the logprobs that were formatted since the last call."""
        if not self._body.logprobs or self._hides_tokens:
            return None
        return ChatLogprobs(join_json_list(self._logprobs_by_choice.pop(choice.index, [])))


def _get_role_and_echoed_text(body: ChatRequest) -> tuple[str, str]:
    """Return (role of the answer, text of the last message if `echo` asks for it; else an empty string)."""
    last_message = body.messages[-1]
    generates = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if generates else str(last_message["role"])
    content = last_message.get("content")
    if body.echo and last_message["role"] == role and isinstance(content, str):
        return role, content
    return role, ""


def _make_tool_call(call: ToolCallDelta, *, is_complete: bool) -> ToolCall:
    has_name = call.name is not None
    return ToolCall(
        index=UNSET if is_complete else call.index,
        id=call.id or UNSET,
        type="function" if has_name else UNSET,
        function=Function(name=call.name or UNSET, arguments=call.arguments),
    )


def _get_finish_reason(reason: str | None, choice: Choice) -> str | None:
    """Return OpenAI's finish reason: "tool_calls" after calls, unless the request named the function."""
    ends_for_calls = choice.parser.has_tool_calls and not choice.parser.config.names_function
    return "tool_calls" if ends_for_calls and reason == "stop" else reason
