"""Parts that the answers of OpenAI's endpoints have in common, whole and as chunks of a stream. No I/O.

Fields that only vLLM has (`token_ids`, `prompt_token_ids`, `prompt_logprobs`) are left out unless the request asks for
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation
from engine.protocol.logprobs import LogprobFormatter
from engine.types import TokenLogprobs
from prompts import ChatRequest, CompletionRequest, RequestError

SSE_DONE = b"data: [DONE]\n\n"
encoder = msgspec.json.Encoder()
JsonObject = dict[str, Any]


def encode_sse(data: object) -> bytes:
    return b"data: " + encoder.encode(data) + b"\n\n"


class OpenAIFormatter:
    """Base of the formatters of chats and completions. A subclass makes the choices of a chunk, and formats
    logprobs.
    """

    chunk_object: ClassVar[str]
    """Value of the field `object` of a streamed chunk."""
    response_object: ClassVar[str]
    """Value of the field `object` of a whole answer."""

    def __init__(
        self,
        generation: Generation,
        body: ChatRequest | CompletionRequest,
        factory: DetokenizerFactory,
        has_logprobs: bool,
    ) -> None:
        """Create the formatter of one HTTP request, before its answers begin.

        `generation`: the answers (choices), which grow meanwhile. `body`: the request. Its fields say what is shown
        beside the text. `factory`: has the texts of tokens. `has_logprobs`: whether the request asks for logprobs of
        generated tokens.
        """
        self._generation = generation
        self._common_fields = {
            "id": generation.id,
            "object": self.chunk_object,
            "created": generation.created,
            "model": generation.model,
        }
        self._logprobs = LogprobFormatter(factory, bool(body.return_tokens_as_token_ids))

        # What a chunk of a stream shows.
        options = body.stream_options
        self._includes_ids = bool(body.return_token_ids)
        self._includes_usage = options is not None and bool(options.include_usage)
        """Whether the usage is sent after the last chunk."""
        self._has_continuous_usage = self._includes_usage and bool(options and options.continuous_usage_stats)
        """Whether each chunk has the usage so far."""
        self._is_text_only = not (has_logprobs or self._includes_ids or self._has_continuous_usage)
        """Whether chunks have nothing but text, so that a chunk without text is not sent."""

        self._begun_choices: set[int] = set()
        """Indices of the choices of which a chunk was sent."""
        self._prompt_logprobs: defaultdict[int, list[bytes]] = defaultdict(list)
        """`prompt_logprobs` by index of the choice that shows them."""

    def format_logprobs(self, choice: Choice, delta: ChoiceDelta) -> Iterator[None]:
        """Format the logprobs of a delta, for the next chunk or the whole answer, and remove them.

        Yields after every position, so that the server can serve other requests in between.
        """
        for prompt_position in delta.prompt_logprobs:
            self._format_prompt_position(choice, prompt_position)
            yield
        for position in delta.logprobs:
            self._format_position(choice, position)
            yield
        delta.prompt_logprobs, delta.logprobs = [], []

    def _format_prompt_position(self, choice: Choice, position: TokenLogprobs | None) -> None:
        """Format the logprobs of a prompt token."""
        raise NotImplementedError

    def _format_position(self, choice: Choice, position: TokenLogprobs) -> None:
        """Format the logprobs of a sampled token."""
        raise NotImplementedError

    def format_response(self) -> bytes:
        """Return the whole answer."""
        response = {
            **self._common_fields,
            "object": self.response_object,
            "choices": [self._make_whole_choice(choice) for choice in self._generation.choices],
            "usage": self._generation.compute_usage(),
            "system_fingerprint": None,
            **self._make_response_fields(),
        }
        return encoder.encode(response)

    def _make_whole_choice(self, choice: Choice) -> JsonObject:
        """Return the entry of a finished choice in `choices`."""
        raise NotImplementedError

    def _make_response_fields(self) -> JsonObject:
        """Return the fields that only this API has in a whole answer, beside its choices."""
        return {}

    def format_end(self) -> bytes:
        """Return the bytes after the last delta: the usage if the request asks for it, and the end of the stream."""
        if not self._includes_usage:
            return SSE_DONE
        usage = self._generation.compute_usage()
        return encode_sse({**self._common_fields, "choices": [], "usage": usage}) + SSE_DONE

    def format_error(self, error: RequestError) -> bytes:
        """Return the bytes that end a stream that was cut off."""
        return encode_sse(error.body()) + SSE_DONE

    def _format_chunk(self, choice: Choice, chunk_choice: JsonObject, **fields: Any) -> bytes:
        chunk = {**self._common_fields, "choices": [chunk_choice]}
        if self._has_continuous_usage:
            chunk["usage"] = self._generation.compute_usage(choice)
        return encode_sse(chunk | fields)

    def _is_first_delta(self, choice: Choice) -> bool:
        is_first = choice.index not in self._begun_choices
        self._begun_choices.add(choice.index)
        return is_first

    def _show_ids(self, **token_ids: list[int]) -> JsonObject:
        """Return fields with token ids if the request asks for them; else no fields."""
        return token_ids if self._includes_ids else {}
