"""Logprobs of the engine in the three forms that answers have: chat, completions, and vLLM's prompt_logprobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api.bodies import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob
from engine.api.detokenizer import DetokenizerFactory
from engine.types import TokenLogprobs

FLOOR = -9999.0
"""JSON has no minus infinity; OpenAI's and vLLM's stand-in for "impossible"."""


class LogprobFormatter:
    """Spells token ids. `as_token_ids`: as `token_id:N`, for clients that must tell every token apart."""

    def __init__(self, factory: DetokenizerFactory, as_token_ids: bool = False) -> None:
        self._factory = factory
        self._as_token_ids = as_token_ids

    def spell(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return self._factory.token_bytes(token_id).decode("utf-8", "replace")

    def chat(self, positions: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
        content = []
        for position in positions:
            alternatives = [
                TopLogprob(self.spell(token_id), max(logprob, FLOOR), self._bytes(token_id))
                for token_id, logprob in position.top[:top]
            ]
            token_id = position.token_id
            content.append(
                ChatLogprob(self.spell(token_id), max(position.logprob, FLOOR), self._bytes(token_id), alternatives)
            )
        return ChatLogprobs(content)

    def completion(
        self, positions: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int
    ) -> CompletionLogprobs:
        """`ids[i]` is the token of `positions[i]`; a prompt's first has no logprob. `offset`: of the first text."""
        offsets: list[int] = []
        token_logprobs: list[float | None] = []
        tokens: list[str] = []
        top_logprobs: list[dict[str, float] | None] = []
        for position, token_id in zip(positions, ids):
            token = self.spell(token_id)
            offsets.append(offset)
            offset += len(token)
            tokens.append(token)
            if position is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
                continue
            token_logprobs.append(max(position.logprob, FLOOR))
            top = {token: max(position.logprob, FLOOR)}
            top.update((self.spell(other), max(logprob, FLOOR)) for other, logprob in position.top)
            top_logprobs.append(top)
        return CompletionLogprobs(offsets, token_logprobs, tokens, top_logprobs)

    def prompt(self, positions: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        made: PromptLogprobs = []
        for position in positions:
            if position is None:
                made.append(None)
                continue
            entries = {
                str(token_id): PromptLogprob(max(logprob, FLOOR), rank, self.spell(token_id))
                for rank, (token_id, logprob) in enumerate(position.top, 1)
            }
            own = PromptLogprob(max(position.logprob, FLOOR), position.rank, self.spell(position.token_id))
            made.append({str(position.token_id): own, **entries})
        return made

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._factory.token_bytes(token_id))
