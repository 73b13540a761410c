"""Whose doing it is that a prompt was not cached. Which reason it was is found out in router/turns/native/why.cpp."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from router.decide.messages import Terms
from router.index.protocol import Scope
from router.prompting.outlined import Outlined

NO_LOSS = frozenset(("new_session", "new_text", "block_rest"))
"""Had to be computed, whoever it was sent to."""
GROUPS = {
    **dict.fromkeys(("billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments",
                     "truncated", "edited", "re_encoded", "salt", "lora", "model"), "workload"),
    **dict.fromkeys(("evicted", "worker_lost"), "capacity"),
    "elsewhere": "routing",
    **dict.fromkeys(("not_announced", "mispredicted"), "index"),
}  # fmt: skip
"""reason -> whose doing it is."""
BLOCK_TOKENS: Final = 16
"""Where a worker does not tell."""


Outliner: TypeAlias = "Callable[[int], Outlined | None] | Outlined"
"""The outline of a prompt's messages, or what makes it: from that one on, or of all. None where it is no chat, or that
part is not known."""
Asked: TypeAlias = (
    "tuple[str, array[int], array[int] | None, int, bool, Scope, Sequence[int], Sequence[int], int | None, str | None,"
    "str | None, int, bool]"
)
"""A prompt whose answer has begun, or that is asked about: (id that the client knows it by, its token ids, ids that are
kept anyway, `kept`: how many of those it begins with, whether its own are all kept anyway too, scope, digests of its
chunks; of its first chunk's beginnings, where its session has no name and it has no chunk, or others have none; of what
its user said first, where its session has no name: conversations with one system prompt may have all their chunks in
common; session, parent, how many ids are as they were sampled where the encoder would choose others, whether nothing
comes after it)."""
Placed = tuple[str, int, int, int, float, int, Terms | None]
"""(worker, tokens of its blocks, tokens predicted to be cached, of them resident, predicted TTFT, attempt, the worker
that has more)."""
Looked: TypeAlias = list[Any]
"""A request whose conversation is looked at, from when it was priced: [Asked, Outliner, what its body is read with once
more where that may be wanted or None, whether its answer has begun, what came of that or None]. The first three until
its first byte was looked at. Of a body that returned nothing holds its text, nor its bytes but for that."""
First: TypeAlias = tuple[Looked, Placed, float]
"""(whose first byte it is, where that came from, when)."""
End: TypeAlias = tuple[Looked, int, int, float, bool, bool]
"""(whose end it is, tokens that its worker says it reused or -1, tokens of its answer, when, whether that is whole: of
others nothing is counted, whether it is logged)."""


class Facts(Protocol):
    """What is asked only where something is missing."""

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        """(end, worker, when) of what behind this position was held and removed, in blocks of so many tokens."""

    def emptied(self, worker_id: str) -> float | None:
        """When a worker last lost all it held; None where it did not."""

    def thinks(self, ids: list[int]) -> bool:
        """Whether what a few tokens say begins or ends a thought."""

    def guessed(self, worker_id: str) -> bool:
        """Whether a worker's cache is guessed: it tells nothing of what it removes."""


class PromptFacts(Protocol):
    """What is asked of many prompts, one after the other."""

    def about(self, asked: Asked) -> Facts:
        """The facts of one of them, until others are asked for."""

    def shorts(self, asked: Asked) -> Sequence[int]:
        """Digests of its first chunk's beginnings."""
