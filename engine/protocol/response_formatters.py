"""From finished or growing choices to the bytes of an answer: whole bodies, and SSE chunks made for speed.

A chunk that carries nothing but text, the usual one, is a JSON string between constant parts. The parts come from
encoding the same struct that every other chunk uses, so both ways give the same shape. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.output.choice import Choice, ChoiceDelta
from engine.output.delta_builder import ToolCallDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation
from engine.protocol.logprobs import SLICE_POSITIONS, LogprobFormatter, PendingLogprobs, join_json_list
from engine.protocol.response_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Function,
    ToolCall,
)
from engine.types import TokenLogprobs, count_logprobs
from prompts import ChatRequest, CompletionRequest, RequestError

SSE_DONE = b"data: [DONE]\n\n"
_PLACEHOLDER = "\ue000text\ue000"
_encoder = msgspec.json.Encoder()


def encode_sse(data: object) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


class _OpenAIFormatter:
    """Formats the parts that answers of both OpenAI endpoints have in common."""

    chunk_type: type[ChatChunk] | type[Completion]
    """Struct of a streamed chunk."""

    def __init__(
        self,
        generation: Generation,
        body: ChatRequest | CompletionRequest,
        factory: DetokenizerFactory,
        has_logprobs: bool,
    ) -> None:
        stream_options = body.stream_options
        self._generation = generation
        self._logprobs = LogprobFormatter(factory, bool(body.return_tokens_as_token_ids))
        self._includes_ids = bool(body.return_token_ids)
        self._includes_usage = bool(stream_options and stream_options.include_usage)
        self._has_continuous_usage = self._includes_usage and bool(
            stream_options and stream_options.continuous_usage_stats
        )
        self._is_text_only = not (has_logprobs or self._includes_ids or self._has_continuous_usage)
        self._text_chunk_parts: dict[tuple[int, bool], list[bytes]] = {}
        self._begun_choices: set[int] = set()
        self._prompt_logprobs: defaultdict[int, list[bytes]] = defaultdict(list)
        """`prompt_logprobs` of each choice that shows any."""

    def format_logprob_slice(self, choice: Choice, delta: ChoiceDelta) -> int:
        """Format the delta's next logprobs; return how many, 0 where none is left. `format_delta` formats all."""
        if delta.prompt_logprobs:
            prompt_logprobs = delta.prompt_logprobs[:SLICE_POSITIONS]
            del delta.prompt_logprobs[:SLICE_POSITIONS]
            self._format_prompt_logprobs(choice, prompt_logprobs)
            return count_logprobs(prompt_logprobs)
        sampled_logprobs = delta.logprobs[:SLICE_POSITIONS]
        del delta.logprobs[:SLICE_POSITIONS]
        if sampled_logprobs:
            self._format_logprobs(choice, sampled_logprobs)
        return count_logprobs(sampled_logprobs)

    def _format_all_logprobs(self, choice: Choice, delta: ChoiceDelta) -> None:
        while self.format_logprob_slice(choice, delta):
            pass

    def _format_prompt_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        raise NotImplementedError

    def _format_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        raise NotImplementedError

    def format_end(self) -> bytes:
        """Return the bytes that follow the last piece: the usage, where the request asks for it."""
        generation = self._generation
        if not self._includes_usage:
            return SSE_DONE
        return (
            encode_sse(self.chunk_type(**generation.make_common_fields(), choices=[], usage=generation.compute_usage()))
            + SSE_DONE
        )

    def format_error(self, error: RequestError) -> bytes:
        """Return the bytes that end a stream that was cut off."""
        return encode_sse(error.body()) + SSE_DONE

    def _format_chunk(self, choice: Choice, chunk_choice: Any, **fields: Any) -> bytes:
        generation = self._generation
        usage = generation.compute_choice_usage(choice) if self._has_continuous_usage else UNSET
        return encode_sse(
            self.chunk_type(**generation.make_common_fields(), choices=[chunk_choice], usage=usage, **fields)
        )

    def _format_text_chunk(self, choice: Choice, text: str, *, is_reasoning: bool = False) -> bytes:
        """The chunk of a text, the empty one's being empty."""
        if not text:
            return b""
        choice_key = (choice.index, is_reasoning)
        if choice_key not in self._text_chunk_parts:
            self._text_chunk_parts[choice_key] = self._format_chunk(
                choice, self._make_text_choice(choice, _PLACEHOLDER, is_reasoning)
            ).split(_encoder.encode(_PLACEHOLDER))
        return _encoder.encode(text).join(self._text_chunk_parts[choice_key])

    def _make_text_choice(self, choice: Choice, text: str, is_reasoning: bool) -> ChatChunkChoice | CompletionChoice:
        raise NotImplementedError

    def _is_first_delta(self, choice: Choice) -> bool:
        is_first = choice.index not in self._begun_choices
        self._begun_choices.add(choice.index)
        return is_first

    def _get_visible_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._includes_ids else UNSET


class ChatFormatter(_OpenAIFormatter):
    """Answers of `/v1/chat/completions`."""

    chunk_type = ChatChunk

    def __init__(self, generation: Generation, body: ChatRequest, factory: DetokenizerFactory) -> None:
        parser_config = generation.parser_config
        self._hides_tokens = parser_config.reasoning_format is not None and not parser_config.shows_reasoning
        """Tokens and their logprobs would show the thought."""
        super().__init__(generation, body, factory, bool(body.logprobs))
        self._includes_ids = self._includes_ids and not self._hides_tokens
        self._body = body
        self._role, self._echoed_text = _get_role_and_echoed_text(body)
        self._logprobs_by_choice: defaultdict[int, list[bytes]] = defaultdict(list)

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """The chunks that one piece becomes; empty while its text is held back."""
        self._format_all_logprobs(choice, delta)
        if _has_only_prompt_logprobs(delta):
            return b""
        first_chunk = self._format_first_chunk(choice) if self._is_first_delta(choice) else b""
        if self._is_text_only and delta.finish_reason is None and not delta.tool_calls:
            return (
                first_chunk
                + self._format_text_chunk(choice, delta.reasoning, is_reasoning=True)
                + self._format_text_chunk(choice, delta.text)
            )
        chunk_choice = ChatChunkChoice(
            index=choice.index,
            delta=_make_chat_delta(delta, choice),
            logprobs=self._flush_logprobs(choice),
            finish_reason=_get_finish_reason(delta.finish_reason, choice),
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            token_ids=self._get_visible_ids(delta.token_ids),
        )
        return first_chunk + self._format_chunk(choice, chunk_choice)

    def format_response(self) -> bytes:
        generation = self._generation
        first_choice = generation.choices[0]
        response = ChatCompletion(
            **generation.make_common_fields(),
            choices=[self._make_choice(choice) for choice in generation.choices],
            usage=generation.compute_usage(),
            prompt_logprobs=join_json_list(self._prompt_logprobs[first_choice.index])
            if self._prompt_logprobs
            else UNSET,
            prompt_token_ids=self._get_visible_ids(generation.prompts[0]),
        )
        return _encoder.encode(response)

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

    def _format_first_chunk(self, choice: Choice) -> bytes:
        chunk_choice = ChatChunkChoice(index=choice.index, delta=Delta(role=self._role, content=self._echoed_text))
        return self._format_chunk(
            choice, chunk_choice, prompt_token_ids=self._get_visible_ids(self._generation.prompts[0])
        )

    def _make_text_choice(self, choice: Choice, text: str, is_reasoning: bool) -> ChatChunkChoice:
        delta = Delta(reasoning=text, reasoning_content=text) if is_reasoning else Delta(content=text)
        return ChatChunkChoice(index=choice.index, delta=delta)

    def _format_prompt_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        if choice.index == 0:  # all choices have the same prompt
            self._prompt_logprobs[0] += map(self._logprobs.format_prompt, positions)

    def _format_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        if not self._hides_tokens:
            self._logprobs_by_choice[choice.index] += map(self._logprobs.format_chat, positions)

    def _flush_logprobs(self, choice: Choice) -> ChatLogprobs | None:
        """Return the logprobs that were formatted since the last call."""
        if not self._body.logprobs or self._hides_tokens:
            return None
        return ChatLogprobs(join_json_list(self._logprobs_by_choice.pop(choice.index, [])))


class CompletionFormatter(_OpenAIFormatter):
    """Answers of `/v1/completions`."""

    chunk_type = Completion

    def __init__(
        self, generation: Generation, body: CompletionRequest, factory: DetokenizerFactory, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts[i]` is echoed before the choices of prompt i; empty strings where nothing is."""
        super().__init__(generation, body, factory, body.logprobs is not None)
        self._body = body
        self._prompt_texts = prompt_texts
        self._logprobs_by_choice: defaultdict[int, PendingLogprobs] = defaultdict(PendingLogprobs)

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """The chunk that one piece becomes; empty while its text is held back."""
        self._format_all_logprobs(choice, delta)
        if _has_only_prompt_logprobs(delta):
            return b""
        text, is_first = delta.text, self._is_first_delta(choice)
        if is_first:
            text = self._prepend_prompt(choice, text)
        if self._is_text_only and delta.finish_reason is None:
            return self._format_text_chunk(choice, text)
        chunk_choice = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._flush_logprobs(choice),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._get_visible_ids(delta.token_ids),
            prompt_token_ids=self._get_visible_ids(self._generation.get_choice_prompt(choice)) if is_first else UNSET,
        )
        return self._format_chunk(choice, chunk_choice)

    def format_response(self) -> bytes:
        generation = self._generation
        response = Completion(
            **generation.make_common_fields(),
            choices=[self._make_choice(choice) for choice in generation.choices],
            usage=generation.compute_usage(),
            system_fingerprint=None,
        )
        return _encoder.encode(response)

    def _make_choice(self, choice: Choice) -> CompletionChoice:
        assert choice.finish_reason is not None
        prompt_logprobs = self._prompt_logprobs.pop(choice.index, None)
        return CompletionChoice(
            index=choice.index,
            text=self._prepend_prompt(choice, choice.text),
            logprobs=self._flush_logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=UNSET if prompt_logprobs is None else join_json_list(prompt_logprobs),
            token_ids=self._get_visible_ids(choice.token_ids),
            prompt_token_ids=self._get_visible_ids(self._generation.get_choice_prompt(choice)),
        )

    def _prepend_prompt(self, choice: Choice, text: str) -> str:
        generation = self._generation
        return self._prompt_texts[choice.index // generation.n] + ("" if generation.is_echo_only else text)

    def _make_text_choice(self, choice: Choice, text: str, is_reasoning: bool) -> CompletionChoice:
        return CompletionChoice(index=choice.index, text=text)

    def _format_prompt_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        body = self._body
        if body.prompt_logprobs is not None:
            self._prompt_logprobs[choice.index] += map(self._logprobs.format_prompt, positions)
        if body.echo and body.logprobs is not None:
            self._add_logprobs(choice, positions)

    def _format_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        if not self._generation.is_echo_only:
            self._add_logprobs(choice, positions)

    def _add_logprobs(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        logprobs = self._logprobs_by_choice[choice.index]
        for position in positions:
            token_id = self._generation.get_choice_prompt(choice)[0] if position is None else position.token_id
            self._logprobs.add_completion(position, token_id, logprobs)

    def _flush_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        """Return the logprobs that were formatted since the last call."""
        return None if self._body.logprobs is None else self._logprobs_by_choice[choice.index].flush()


def _has_only_prompt_logprobs(delta: ChoiceDelta) -> bool:
    """Whether a piece has no text yet: the core sends the logprobs of a long prompt in parts."""
    return not delta.token_ids and delta.finish_reason is None


def _get_role_and_echoed_text(body: ChatRequest) -> tuple[str, str]:
    """(role of the answer, text of the last message to put before it where `echo` asks for it)."""
    last_message = body.messages[-1]
    generates = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if generates else str(last_message["role"])
    content = last_message.get("content")
    if body.echo and last_message["role"] == role and isinstance(content, str):
        return role, content
    return role, ""


def _make_chat_delta(delta: ChoiceDelta, choice: Choice) -> Delta:
    has_other_fields = (
        delta.reasoning or delta.tool_calls or (choice.parser is not None and delta.finish_reason is not None)
    )
    return Delta(
        content=UNSET if has_other_fields and not delta.text else delta.text,
        reasoning=delta.reasoning or UNSET,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=[_make_tool_call(call, is_complete=False) for call in delta.tool_calls] or UNSET,
    )


def _make_tool_call(call: ToolCallDelta, *, is_complete: bool) -> ToolCall:
    has_name = call.name is not None
    return ToolCall(
        index=UNSET if is_complete else call.index,
        id=call.id or UNSET,
        type="function" if has_name else UNSET,
        function=Function(name=call.name or UNSET, arguments=call.arguments),
    )


def _get_finish_reason(reason: str | None, choice: Choice) -> str | None:
    """OpenAI's: an answer that ends after calls ends for them, unless the function was named in the request."""
    parser = choice.parser
    ends_for_calls = parser is not None and parser.has_tool_calls and not parser.config.names_function
    return "tool_calls" if ends_for_calls and reason == "stop" else reason
