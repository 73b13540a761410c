"""Answers of `/v1/completions`: their JSON whole and streamed. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import Generation
from engine.protocol.logprobs import PendingLogprobs, join_json_list
from engine.protocol.openai import JsonObject, OpenAIFormatter
from engine.types import TokenLogprobs
from prompts import CompletionRequest


class CompletionFormatter(OpenAIFormatter):
    """Formats the answer to a completion request, whole or as the chunks of a stream."""

    chunk_object = response_object = "text_completion"

    def __init__(
        self, generation: Generation, body: CompletionRequest, factory: DetokenizerFactory, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts[i]`: text that is echoed before the choices of prompt i; empty if none is."""
        super().__init__(generation, body, factory, body.logprobs is not None)
        self._body = body
        self._prompt_texts = prompt_texts
        self._logprobs_by_choice: defaultdict[int, PendingLogprobs] = defaultdict(PendingLogprobs)

    def format_delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """Return the chunk of a delta; empty bytes if the delta has no text yet."""
        chunk_choice = self._make_choice(choice, delta, is_first=self._is_first_delta(choice))
        if self._is_text_only and delta.finish_reason is None and not chunk_choice["text"]:
            return b""
        return self._format_chunk(choice, chunk_choice)

    def _make_whole_choice(self, choice: Choice) -> JsonObject:
        return self._make_choice(choice, choice, is_first=True)

    def _make_choice(self, choice: Choice, part: Choice | ChoiceDelta, *, is_first: bool) -> JsonObject:
        """Return a whole choice, or a delta of one. Before the first part comes what is echoed of the prompt."""
        echoed_text = self._prompt_texts[choice.index // self._generation.n] if is_first else ""
        fields: JsonObject = {
            "index": choice.index,
            "text": echoed_text + part.text,
            "logprobs": self._flush_logprobs(choice),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if choice.index in self._prompt_logprobs:
            fields["prompt_logprobs"] = join_json_list(self._prompt_logprobs.pop(choice.index))
        fields |= self._show_ids(token_ids=part.token_ids)
        if is_first:
            fields |= self._show_ids(prompt_token_ids=self._generation.get_choice_prompt(choice))
        return fields

    def _format_prompt_position(self, choice: Choice, position: TokenLogprobs | None) -> None:
        if self._body.prompt_logprobs is not None:
            self._prompt_logprobs[choice.index].append(self._logprobs.format_prompt(position))
        if self._body.echo and self._body.logprobs is not None:
            self._format_position(choice, position)

    def _format_position(self, choice: Choice, position: TokenLogprobs | None) -> None:
        token_id = self._generation.get_choice_prompt(choice)[0] if position is None else position.token_id
        self._logprobs.add_completion(position, token_id, self._logprobs_by_choice[choice.index])

    def _flush_logprobs(self, choice: Choice) -> JsonObject | None:
        """Return the logprobs that were formatted since the last call."""
        return None if self._body.logprobs is None else self._logprobs_by_choice[choice.index].flush()
