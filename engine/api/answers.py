"""From finished or growing choices to the bytes of an answer: whole bodies, and SSE chunks made for speed.

A chunk that carries nothing but text, the usual one, is two constant halves around a JSON string. The halves come
from encoding the same struct that every other chunk uses, so both ways give the same shape. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from engine.api.bodies import (
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
)
from engine.api.choice import Choice, Piece
from engine.api.detokenizer import DetokenizerFactory
from engine.api.generation import Generation
from engine.api.logprobs import LogprobFormatter
from engine.types import TokenLogprobs
from prompts import ChatRequest, CompletionRequest

DONE = b"data: [DONE]\n\n"
_MARK = "\ue000text\ue000"
_encoder = msgspec.json.Encoder()


def sse(data: object) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


class ChatAnswer:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, generation: Generation, body: ChatRequest, factory: DetokenizerFactory) -> None:
        self._generation = generation
        self._body = body
        self._logprobs = LogprobFormatter(factory, bool(body.return_tokens_as_token_ids))
        self._role, self._echo = _chat_role(body)
        self._options = StreamSettings(body)
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._begun: set[int] = set()
        self._is_plain = not body.logprobs and not body.return_token_ids and not self._options.continuous

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The chunks that one piece becomes; empty while its text is held back."""
        head = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            head = self._first(choice)
        if self._is_plain and piece.finish_reason is None:
            if not piece.text:
                return head
            before, after = self._halves(choice)
            return head + before + _encoder.encode(piece.text) + after
        made = ChatChunkChoice(
            index=choice.index,
            delta=Delta(content=piece.text),
            logprobs=self._scores(piece.logprobs),
            finish_reason=piece.finish_reason,
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=piece.token_ids if self._body.return_token_ids else UNSET,
        )
        return head + sse(self._chunk(choice, made))

    def usage(self) -> bytes:
        """The last chunk, where it was asked for."""
        if not self._options.usage:
            return b""
        generation = self._generation
        return sse(ChatChunk(**generation.head(), choices=[], usage=generation.usage()))

    def whole(self) -> bytes:
        generation, body = self._generation, self._body
        first = generation.choices[0]
        answer = ChatCompletion(
            **generation.head(),
            choices=[self._choice(choice) for choice in generation.choices],
            usage=generation.usage(),
            prompt_logprobs=UNSET if first.prompt_logprobs is None else self._logprobs.prompt(first.prompt_logprobs),
            prompt_token_ids=generation.prompts[0] if body.return_token_ids else UNSET,
        )
        return _encoder.encode(answer)

    def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(self._role, self._echo + choice.text),
            logprobs=self._scores(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _first(self, choice: Choice) -> bytes:
        ids = self._generation.prompts[0] if self._body.return_token_ids else UNSET
        made = ChatChunkChoice(index=choice.index, delta=Delta(role=self._role, content=self._echo))
        return sse(msgspec.structs.replace(self._chunk(choice, made), prompt_token_ids=ids))

    def _halves(self, choice: Choice) -> tuple[bytes, bytes]:
        halves = self._plain.get(choice.index)
        if halves is None:
            halves = _split(
                lambda mark: self._chunk(choice, ChatChunkChoice(index=choice.index, delta=Delta(content=mark)))
            )
            self._plain[choice.index] = halves
        return halves

    def _chunk(self, choice: Choice, made: ChatChunkChoice) -> ChatChunk:
        generation = self._generation
        return ChatChunk(
            **generation.head(),
            choices=[made],
            usage=generation.usage_of(choice) if self._options.continuous else UNSET,
        )

    def _scores(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._logprobs.chat(positions, self._body.top_logprobs or 0)


class CompletionAnswer:
    """Answers of `/v1/completions`."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, factory: DetokenizerFactory, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts[i]` is echoed before the choices of prompt i; empty strings where nothing is."""
        self._generation = generation
        self._body = body
        self._logprobs = LogprobFormatter(factory, bool(body.return_tokens_as_token_ids))
        self._prompt_texts = prompt_texts
        self._options = StreamSettings(body)
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._is_plain = body.logprobs is None and not body.return_token_ids and not self._options.continuous

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The chunk that one piece becomes; empty while its text is held back."""
        text = piece.text
        begins = choice.index not in self._begun
        if begins:
            self._begun.add(choice.index)
            if self._generation.echo_only:
                text = ""
            text = self._prompt_texts[choice.index // self._generation.n] + text
        if self._is_plain and piece.finish_reason is None:
            if not text:
                return b""
            before, after = self._halves(choice)
            return before + _encoder.encode(text) + after
        made = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._scores(choice, piece.logprobs, piece.token_ids, with_prompt=begins),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(choice) if begins else UNSET,
        )
        return sse(self._chunk(choice, made))

    def usage(self) -> bytes:
        """The last chunk, where it was asked for."""
        if not self._options.usage:
            return b""
        generation = self._generation
        return sse(Completion(**generation.head(), choices=[], usage=generation.usage()))

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
        text = "" if self._generation.echo_only else choice.text
        shows_prompt = self._body.prompt_logprobs is not None and choice.prompt_logprobs is not None
        return CompletionChoice(
            index=choice.index,
            text=self._prompt_texts[choice.index // self._generation.n] + text,
            logprobs=self._scores(choice, choice.logprobs, choice.token_ids, with_prompt=True),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=self._logprobs.prompt(choice.prompt_logprobs or ()) if shows_prompt else UNSET,
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(choice),
        )

    def _prompt_ids(self, choice: Choice) -> list[int] | msgspec.UnsetType:
        return self._generation.prompt_of(choice) if self._body.return_token_ids else UNSET

    def _scores(
        self, choice: Choice, positions: Sequence[TokenLogprobs], ids: Sequence[int], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        scored: list[TokenLogprobs | None] = [] if self._generation.echo_only else list(positions)
        ids = [] if self._generation.echo_only else list(ids)
        if with_prompt and self._body.echo and choice.prompt_logprobs is not None:
            scored = [*choice.prompt_logprobs, *scored]
            ids = [*self._generation.prompt_of(choice), *ids]
        made = self._logprobs.completion(scored, ids, self._offsets.get(choice.index, 0))
        if made.tokens:
            self._offsets[choice.index] = made.text_offset[-1] + len(made.tokens[-1])
        return made

    def _halves(self, choice: Choice) -> tuple[bytes, bytes]:
        halves = self._plain.get(choice.index)
        if halves is None:
            halves = _split(lambda mark: self._chunk(choice, CompletionChoice(index=choice.index, text=mark)))
            self._plain[choice.index] = halves
        return halves

    def _chunk(self, choice: Choice, made: CompletionChoice) -> Completion:
        generation = self._generation
        return Completion(
            **generation.head(),
            choices=[made],
            usage=generation.usage_of(choice) if self._options.continuous else UNSET,
        )


class StreamSettings:
    """`stream_options` of a body, resolved."""

    def __init__(self, body: ChatRequest | CompletionRequest) -> None:
        options = body.stream_options
        self.usage = bool(options and options.include_usage)
        self.continuous = self.usage and bool(options and options.continuous_usage_stats)


def _split(make: Callable[[str], object]) -> tuple[bytes, bytes]:
    before, after = sse(make(_MARK)).split(_encoder.encode(_MARK))
    return before, after


def _chat_role(body: ChatRequest) -> tuple[str, str]:
    """(role of the answer, text of the last message to put before it where `echo` asks for it)."""
    last = body.messages[-1]
    generates = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if generates else str(last["role"])
    content = last.get("content")
    if body.echo and last["role"] == role and isinstance(content, str):
        return role, content
    return role, ""
