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

from engine.api.choice import Choice, ChoiceDelta
from engine.api.detokenizer import DetokenizerFactory
from engine.api.generation import Generation
from engine.api.logprobs import SLICE_POSITIONS, LogprobFormatter, PendingLogprobs, json_list
from engine.api.response_types import (
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
from engine.api.tool_calls import ToolCallDelta
from engine.types import TokenLogprobs, count_logprobs
from prompts import ChatRequest, CompletionRequest, RequestError

DONE = b"data: [DONE]\n\n"
_MARK = "\ue000text\ue000"
_encoder = msgspec.json.Encoder()


def sse(data: object) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


class _OpenAIFormatter:
    """What both endpoints' answers have in common."""

    envelope: type[ChatChunk] | type[Completion]
    """Of a chunk."""

    def __init__(
        self, generation: Generation, body: ChatRequest | CompletionRequest, factory: DetokenizerFactory, scored: bool
    ) -> None:
        options = body.stream_options
        self._generation = generation
        self._logprobs = LogprobFormatter(factory, bool(body.return_tokens_as_token_ids))
        self._shows_ids = bool(body.return_token_ids)
        self._usage = bool(options and options.include_usage)
        self._continuous = self._usage and bool(options and options.continuous_usage_stats)
        self._is_plain = not (scored or self._shows_ids or self._continuous)
        self._parts: dict[tuple[int, bool], list[bytes]] = {}
        self._begun: set[int] = set()
        self._prompt_scores: defaultdict[int, list[bytes]] = defaultdict(list)
        """`prompt_logprobs` of each choice that shows any."""

    def format_slice(self, choice: Choice, piece: ChoiceDelta) -> int:
        """Format the piece's next logprobs; return how many, 0 where none is left. `piece` formats what is left."""
        if piece.prompt_logprobs:
            prompt_part = piece.prompt_logprobs[:SLICE_POSITIONS]
            del piece.prompt_logprobs[:SLICE_POSITIONS]
            self._format_prompt(choice, prompt_part)
            return count_logprobs(prompt_part)
        part = piece.logprobs[:SLICE_POSITIONS]
        del piece.logprobs[:SLICE_POSITIONS]
        if part:
            self._format(choice, part)
        return count_logprobs(part)

    def _format_all(self, choice: Choice, piece: ChoiceDelta) -> None:
        while self.format_slice(choice, piece):
            pass

    def _format_prompt(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        raise NotImplementedError

    def _format(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        raise NotImplementedError

    def end(self) -> bytes:
        """What follows the last piece: the usage, where it was asked for."""
        generation = self._generation
        if not self._usage:
            return DONE
        return sse(self.envelope(**generation.head(), choices=[], usage=generation.usage())) + DONE

    def failed(self, error: RequestError) -> bytes:
        """What ends a stream that broke off."""
        return sse(error.body()) + DONE

    def _chunk(self, choice: Choice, made: Any, **fields: Any) -> bytes:
        generation = self._generation
        usage = generation.usage_of(choice) if self._continuous else UNSET
        return sse(self.envelope(**generation.head(), choices=[made], usage=usage, **fields))

    def _plain(self, choice: Choice, text: str, *, thought: bool = False) -> bytes:
        """The chunk of a text, the empty one's being empty."""
        if not text:
            return b""
        key = (choice.index, thought)
        if key not in self._parts:
            self._parts[key] = self._chunk(choice, self._text(choice, _MARK, thought)).split(_encoder.encode(_MARK))
        return _encoder.encode(text).join(self._parts[key])

    def _text(self, choice: Choice, text: str, thought: bool) -> ChatChunkChoice | CompletionChoice:
        raise NotImplementedError

    def _begins(self, choice: Choice) -> bool:
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        return begins

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._shows_ids else UNSET


class ChatFormatter(_OpenAIFormatter):
    """Answers of `/v1/chat/completions`."""

    envelope = ChatChunk

    def __init__(self, generation: Generation, body: ChatRequest, factory: DetokenizerFactory) -> None:
        plan = generation.plan
        self._hides = plan.reasoning_format is not None and not plan.shows_reasoning
        """Tokens and their logprobs would show the thought."""
        super().__init__(generation, body, factory, bool(body.logprobs))
        self._shows_ids = self._shows_ids and not self._hides
        self._body = body
        self._role, self._echo = _chat_role(body)
        self._scored: defaultdict[int, list[bytes]] = defaultdict(list)

    def piece(self, choice: Choice, piece: ChoiceDelta) -> bytes:
        """The chunks that one piece becomes; empty while its text is held back."""
        self._format_all(choice, piece)
        if _only_scores_prompt(piece):
            return b""
        head = self._first(choice) if self._begins(choice) else b""
        if self._is_plain and piece.finish_reason is None and not piece.calls:
            return head + self._plain(choice, piece.thought, thought=True) + self._plain(choice, piece.text)
        made = ChatChunkChoice(
            index=choice.index,
            delta=_delta(piece, choice),
            logprobs=self._scores(choice),
            finish_reason=_reason(piece.finish_reason, choice),
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=self._ids(piece.token_ids),
        )
        return head + self._chunk(choice, made)

    def whole(self) -> bytes:
        generation = self._generation
        first = generation.choices[0]
        answer = ChatCompletion(
            **generation.head(),
            choices=[self._choice(choice) for choice in generation.choices],
            usage=generation.usage(),
            prompt_logprobs=json_list(self._prompt_scores[first.index]) if self._prompt_scores else UNSET,
            prompt_token_ids=self._ids(generation.prompts[0]),
        )
        return _encoder.encode(answer)

    def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=self._message(choice),
            logprobs=self._scores(choice),
            finish_reason=_reason(choice.finish_reason, choice) or "",
            stop_reason=choice.stop_reason,
            token_ids=self._ids(choice.token_ids),
        )

    def _message(self, choice: Choice) -> ChatMessage:
        content, told = self._echo + choice.text, self._generation.plan.reasoning_format is not None
        thought, calls = choice.thought or None, choice.calls
        return ChatMessage(
            role=self._role,
            content=None if not content and (told or calls) else content,
            tool_calls=[_call(call, whole=True) for call in calls] or UNSET,
            reasoning=thought if told else UNSET,
            reasoning_content=thought if told else UNSET,
        )

    def _first(self, choice: Choice) -> bytes:
        made = ChatChunkChoice(index=choice.index, delta=Delta(role=self._role, content=self._echo))
        return self._chunk(choice, made, prompt_token_ids=self._ids(self._generation.prompts[0]))

    def _text(self, choice: Choice, text: str, thought: bool) -> ChatChunkChoice:
        delta = Delta(reasoning=text, reasoning_content=text) if thought else Delta(content=text)
        return ChatChunkChoice(index=choice.index, delta=delta)

    def _format_prompt(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        if choice.index == 0:  # all choices have the same prompt
            self._prompt_scores[0] += map(self._logprobs.format_prompt, positions)

    def _format(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        if not self._hides:
            self._scored[choice.index] += map(self._logprobs.format_chat, positions)

    def _scores(self, choice: Choice) -> ChatLogprobs | None:
        """What was formatted since the last call."""
        if not self._body.logprobs or self._hides:
            return None
        return ChatLogprobs(json_list(self._scored.pop(choice.index, [])))


class CompletionFormatter(_OpenAIFormatter):
    """Answers of `/v1/completions`."""

    envelope = Completion

    def __init__(
        self, generation: Generation, body: CompletionRequest, factory: DetokenizerFactory, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts[i]` is echoed before the choices of prompt i; empty strings where nothing is."""
        super().__init__(generation, body, factory, body.logprobs is not None)
        self._body = body
        self._prompt_texts = prompt_texts
        self._scored: defaultdict[int, PendingLogprobs] = defaultdict(PendingLogprobs)

    def piece(self, choice: Choice, piece: ChoiceDelta) -> bytes:
        """The chunk that one piece becomes; empty while its text is held back."""
        self._format_all(choice, piece)
        if _only_scores_prompt(piece):
            return b""
        text, begins = piece.text, self._begins(choice)
        if begins:
            text = self._with_prompt(choice, text)
        if self._is_plain and piece.finish_reason is None:
            return self._plain(choice, text)
        made = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._scores(choice),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self._ids(piece.token_ids),
            prompt_token_ids=self._ids(self._generation.prompt_of(choice)) if begins else UNSET,
        )
        return self._chunk(choice, made)

    def whole(self) -> bytes:
        generation = self._generation
        answer = Completion(
            **generation.head(),
            choices=[self._choice(choice) for choice in generation.choices],
            usage=generation.usage(),
            system_fingerprint=None,
        )
        return _encoder.encode(answer)

    def _choice(self, choice: Choice) -> CompletionChoice:
        assert choice.finish_reason is not None
        prompt_scores = self._prompt_scores.pop(choice.index, None)
        return CompletionChoice(
            index=choice.index,
            text=self._with_prompt(choice, choice.text),
            logprobs=self._scores(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=UNSET if prompt_scores is None else json_list(prompt_scores),
            token_ids=self._ids(choice.token_ids),
            prompt_token_ids=self._ids(self._generation.prompt_of(choice)),
        )

    def _with_prompt(self, choice: Choice, text: str) -> str:
        generation = self._generation
        return self._prompt_texts[choice.index // generation.n] + ("" if generation.echo_only else text)

    def _text(self, choice: Choice, text: str, thought: bool) -> CompletionChoice:
        return CompletionChoice(index=choice.index, text=text)

    def _format_prompt(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        body = self._body
        if body.prompt_logprobs is not None:
            self._prompt_scores[choice.index] += map(self._logprobs.format_prompt, positions)
        if body.echo and body.logprobs is not None:
            self._add(choice, positions)

    def _format(self, choice: Choice, positions: Sequence[TokenLogprobs]) -> None:
        if not self._generation.echo_only:
            self._add(choice, positions)

    def _add(self, choice: Choice, positions: Sequence[TokenLogprobs | None]) -> None:
        scores = self._scored[choice.index]
        for position in positions:
            token_id = self._generation.prompt_of(choice)[0] if position is None else position.token_id
            self._logprobs.add_completion(position, token_id, scores)

    def _scores(self, choice: Choice) -> CompletionLogprobs | None:
        """What was formatted since the last call."""
        return None if self._body.logprobs is None else self._scored[choice.index].flush()


def _only_scores_prompt(piece: ChoiceDelta) -> bool:
    """Whether the piece says nothing yet: the core sends the logprobs of a long prompt in parts."""
    return not piece.token_ids and piece.finish_reason is None


def _chat_role(body: ChatRequest) -> tuple[str, str]:
    """(role of the answer, text of the last message to put before it where `echo` asks for it)."""
    last = body.messages[-1]
    generates = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if generates else str(last["role"])
    content = last.get("content")
    if body.echo and last["role"] == role and isinstance(content, str):
        return role, content
    return role, ""


def _delta(piece: ChoiceDelta, choice: Choice) -> Delta:
    other = piece.thought or piece.calls or (choice.speech is not None and piece.finish_reason is not None)
    return Delta(
        content=UNSET if other and not piece.text else piece.text,
        reasoning=piece.thought or UNSET,
        reasoning_content=piece.thought or UNSET,
        tool_calls=[_call(call, whole=False) for call in piece.calls] or UNSET,
    )


def _call(call: ToolCallDelta, *, whole: bool) -> ToolCall:
    begins = call.name is not None
    return ToolCall(
        index=UNSET if whole else call.index,
        id=call.id or UNSET,
        type="function" if begins else UNSET,
        function=Function(name=call.name or UNSET, arguments=call.arguments),
    )


def _reason(reason: str | None, choice: Choice) -> str | None:
    """OpenAI's: an answer that ends after calls ends for them, unless the function was named in the request."""
    speech = choice.speech
    called = speech is not None and speech.has_tool_calls and not speech.config.names_function
    return "tool_calls" if called and reason == "stop" else reason
