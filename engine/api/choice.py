"""One sequence of an answer while it grows: outputs of the core in, text and logprobs that are final out.

Owns detokenising, token counts and the finish reason of one choice; its `speech` reads the text. Pure: what it decides
(a stop string ended it, so the core should be told) it returns; the server acts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

from engine.api.detokenizer import Detokenizer, DetokenizerFactory
from engine.api.output_parser import OutputParser, OutputParserConfig, ParsedDelta
from engine.api.tool_calls import ToolCallDelta
from engine.types import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class ChoiceDelta:
    """What one output added to a choice. `token_ids` and `logprobs` may run ahead of `text`, which can be held back.

    An answer takes logprobs out as it formats them."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    thought: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    aborts: bool = False
    """A stop string ended the choice: the core still runs it and must be told."""


@dataclass(slots=True)
class Choice:
    """`text`, `thought`, `token_ids` hold the whole answer so far where `keep` is set, for answers sent at the end;
    `logprobs` and `prompt_logprobs` where `keeps_logprobs` is set, for `LLM`."""

    index: int
    params: SamplingParams
    detokenizer: Detokenizer
    keep: bool
    keeps_logprobs: bool = False
    speech: OutputParser | None = None
    """None: all is text, and no string stops it."""
    completion_tokens: int = 0
    thought_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    called: list[tuple[ToolCallDelta, list[str]]] = field(default_factory=list)
    """The first piece of each call, and the arguments of those after it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)

    @property
    def calls(self) -> list[ToolCallDelta]:
        """Whole ones."""
        return [replace(first, arguments=first.arguments + "".join(rest)) for first, rest in self.called]

    def go_on(self, token_ids: list[int]) -> None:
        """Begin where an answer that began with `token_ids` stands: what they said already is not said again."""
        self.push(SequenceOutput(request_id="", token_ids=token_ids))
        self.texts, self.thoughts, self.called, self.token_ids = [], [], [], []

    def push(self, output: SequenceOutput) -> ChoiceDelta:
        """Take one output of this choice's sequence. Must not be called after it has finished."""
        assert self.finish_reason is None
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        piece = self._decode(output)
        piece.prompt_logprobs = output.prompt_logprobs or []
        self.completion_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        for call in piece.calls:
            if call.name is not None:
                self.called.append((call, []))
            elif self.called:  # else its beginning was told by the engine that this answer goes on from
                self.called[-1][1].append(call.arguments)
        if self.keep:
            self.texts.append(piece.text)
            self.thoughts.append(piece.thought)
            self.token_ids.extend(piece.token_ids)
        if self.keeps_logprobs:
            self.logprobs.extend(piece.logprobs)
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = [*(self.prompt_logprobs or ()), *output.prompt_logprobs]
        return piece

    def _decode(self, output: SequenceOutput) -> ChoiceDelta:
        ids, logprobs, reason = output.token_ids, output.logprobs or [], output.finish_reason
        spoken = self._spoken(output)
        if self.speech is None:
            text = self.detokenizer.push(spoken)
            if reason is not None:
                text += self.detokenizer.flush()
            ended = None if reason is None else reason.value
            return ChoiceDelta(text, ids, logprobs, finish_reason=ended, stop_reason=output.stop_token_id)
        said = ParsedDelta()
        for i, token_id in enumerate(ids):  # those after the one that completes a stop string are not counted
            text = self.detokenizer.push([token_id]) if i < len(spoken) else ""
            if reason is not None and i == len(ids) - 1:
                text += self.detokenizer.flush()
            self.speech.push(text, said, may_stop=self.completion_tokens + i + 1 > self.params.min_tokens)
            self.thought_tokens += i < len(spoken) and self.speech.is_reasoning
            if said.stop_string is not None:
                self.speech.finish(said)
                return self._piece(
                    said, ids[: i + 1], logprobs[: i + 1], "stop", said.stop_string, aborts=reason is None
                )
        if reason is not None:
            if not ids:
                self.speech.push(self.detokenizer.flush(), said, may_stop=False)
            self.speech.finish(said)
        return self._piece(said, ids, logprobs, None if reason is None else reason.value, output.stop_token_id)

    def _piece(
        self,
        said: ParsedDelta,
        ids: list[int],
        logprobs: list[TokenLogprobs],
        reason: str | None,
        stop_reason: str | int | None,
        aborts: bool = False,
    ) -> ChoiceDelta:
        assert self.speech is not None
        thought = "".join(said.reasoning) if self.speech.config.shows_reasoning else ""
        return ChoiceDelta(
            "".join(said.text), ids, logprobs, finish_reason=reason, stop_reason=stop_reason, thought=thought,
            calls=_merged(said.calls), aborts=aborts,
        )  # fmt: skip

    def _spoken(self, output: SequenceOutput) -> list[int]:
        """The ids that become text: not the token that ended the sequence, unless it was asked for."""
        stopped = output.finish_reason is FinishReason.STOP
        if stopped and output.token_ids and not self.params.include_stop_str_in_output:
            return output.token_ids[:-1]
        return output.token_ids


def _merged(pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """One piece of each call."""
    merged = []
    for _, group in groupby(pieces, key=lambda piece: piece.index):
        first, *rest = group
        merged.append(replace(first, arguments="".join([first.arguments, *(piece.arguments for piece in rest)])))
    return merged


PLAIN_TEXT_CONFIG = OutputParserConfig()


def new_choice(
    index: int,
    params: SamplingParams,
    factory: DetokenizerFactory,
    *,
    keep: bool,
    keeps_logprobs: bool = False,
    skip_special_tokens: bool = True,
    plan: OutputParserConfig = PLAIN_TEXT_CONFIG,
) -> Choice:
    """`plan`: how its text is read."""
    return Choice(
        index=index,
        params=params,
        detokenizer=factory.create(skip_special_tokens, plan.special_markers),
        keep=keep,
        keeps_logprobs=keeps_logprobs,
        speech=OutputParser(plan, params) if params.stop or plan.reasoning_format or plan.call_format else None,
    )
