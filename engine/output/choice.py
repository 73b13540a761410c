"""One sequence of an answer while it grows: outputs of the core come in, final text and logprobs come out. No I/O.

A choice has the token counts and the finish reason. If a stop string ends it, its delta says that the core's sequence
must be aborted, and the server does so.
"""

from __future__ import annotations

from dataclasses import replace

from engine.output.delta_builder import ChoiceDelta, ToolCallDelta
from engine.output.detokenizer import DetokenizerFactory
from engine.output.parser import OutputParser, OutputParserConfig
from engine.types import FinishReason, SamplingParams, SequenceOutput

PLAIN_TEXT_CONFIG = OutputParserConfig()


class Choice:
    """One of the `n` answers to a prompt, while it grows.

    It turns the tokens that the engine's core process reports into text, reasoning and calls. For an answer that is not
    streamed, it also collects them, but no logprobs: there may be millions.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        detokenizer_factory: DetokenizerFactory,
        *,
        keeps_text: bool,
        skip_special_tokens: bool = True,
        parser_config: OutputParserConfig = PLAIN_TEXT_CONFIG,
    ) -> None:
        """Create answer number `index` of a request, without any tokens yet.

        `keeps_text`: collect the text and the token ids of an answer that is returned whole. `skip_special_tokens`:
        show no special tokens in the text. `parser_config`: formats in which the model writes reasoning and tool calls.
        """
        self.index = index
        self.params = params
        self.detokenizer = detokenizer_factory.create(skip_special_tokens, parser_config.special_markers)
        self.parser = OutputParser(parser_config, params)
        self.keeps_text = keeps_text

        # Token counts, for the usage in the response.
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0

        # What was generated so far. Strings are kept in pieces and joined once.
        self.texts: list[str] = []
        self.reasoning_texts: list[str] = []
        self.call_parts: list[tuple[ToolCallDelta, list[str]]] = []
        """First delta of each tool call, and the arguments in its later deltas."""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_texts)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """Return all calls so far, each as one delta."""
        return [
            replace(first_delta, arguments=first_delta.arguments + "".join(more_arguments))
            for first_delta, more_arguments in self.call_parts
        ]

    def resume(self, token_ids: list[int]) -> None:
        """Continue an answer that another engine began with `token_ids`, of which the text was sent already."""
        self.push(SequenceOutput(request_id="", token_ids=token_ids))
        self.texts, self.reasoning_texts, self.call_parts, self.token_ids = [], [], [], []

    def push(self, output: SequenceOutput) -> ChoiceDelta:
        """Add newly generated tokens. Return the text, reasoning and tool calls that they add, for a stream to send."""
        assert self.finish_reason is None, "a finished choice gets no tokens"
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        delta = self._decode(output)
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = output.prompt_logprobs
        self._collect(delta)
        return delta

    def _collect(self, delta: ChoiceDelta) -> None:
        """Add a delta to the whole answer: token counts and tool calls always, text if it is kept."""
        self.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        for call in delta.tool_calls:
            if call.name is not None:
                self.call_parts.append((call, []))
            elif self.call_parts:  # empty if another engine began the answer, and sent the beginning of this call
                _, more_arguments = self.call_parts[-1]
                more_arguments.append(call.arguments)
        if self.keeps_text:
            self.texts.append(delta.text)
            self.reasoning_texts.append(delta.reasoning)
            self.token_ids.extend(delta.token_ids)

    def _parse_tokens(self, output: SequenceOutput) -> int:
        """Detokenize and parse the tokens one by one, up to the first stop string. Return how many were parsed.

        A stop token at the end becomes no text, unless the request says so.
        """
        hides_last_token = output.finish_reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        text_token_count = len(output.token_ids) - hides_last_token
        for token_count, token_id in enumerate(output.token_ids, 1):
            is_text = token_count <= text_token_count
            text = self.detokenizer.push([token_id]) if is_text else ""
            if output.finish_reason is not None and token_count == len(output.token_ids):
                text += self.detokenizer.flush()
            self.parser.push(text, may_stop=self.completion_tokens + token_count > self.params.min_tokens)
            self.reasoning_tokens += is_text and self.parser.is_reasoning
            if self.parser.stop_string is not None:
                return token_count
        return len(output.token_ids)

    def _decode(self, output: SequenceOutput) -> ChoiceDelta:
        """Detokenize and parse new tokens, up to the first stop string. Return what they add to the answer.

        The engine core looks for stop tokens only. A stop string that is found here ends the answer, and later tokens
        are dropped. If the core has not ended the sequence itself, the delta asks the caller to abort the sequence.
        """
        parser = self.parser
        token_count = self._parse_tokens(output)
        if output.finish_reason is not None and not output.token_ids:
            parser.push(self.detokenizer.flush(), may_stop=False)
        if output.finish_reason is not None or parser.stop_string is not None:
            parser.finish()
        delta = parser.build_delta()
        delta.token_ids = output.token_ids[:token_count]
        delta.logprobs = (output.logprobs or [])[:token_count]
        if parser.stop_string is not None:
            delta.finish_reason = "stop"
            delta.stop_reason = parser.stop_string
            delta.should_abort = output.finish_reason is None
        elif output.finish_reason is not None:
            delta.finish_reason = output.finish_reason.value
            delta.stop_reason = output.stop_token_id
        return delta
