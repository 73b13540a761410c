from collections.abc import Callable, Sequence
from typing import Any

from router.turns.why import Asked, End, Facts, First, Looked, Outliner, Placed, PromptFacts

REASONS: tuple[str, ...]

class Begun:
    """One request, from its first byte on."""

    def told(self) -> tuple[object, ...]: ...

class Ledger:
    def __init__(
        self,
        bytes_max: int,
        keep_s: float,
        branches_max: int,
        whys_max: int,
        turns: dict[str, int],
        tokens: dict[str, int],
        sums: dict[str, int],
    ) -> None:
        """`turns`, `tokens`, `sums`: what `tell` adds to."""

    def explained(
        self, asked: Asked, placed: Placed, facts: Facts, outline: Outliner, now: float, at: float, /
    ) -> Begun:
        """Raises TypeError where the ids are no array of type I, ValueError where a block has no token, or more ids
        or messages are said to be shared than there are."""

    def begun(
        self, asked: Asked, placed: Placed, facts: Facts, outline: Outliner, now: float, at: float, /
    ) -> Begun: ...
    def ended(self, begun: Begun, reported: int, answer_tokens: int, now: float, /) -> None:
        """`reported`: -1 where its worker does not tell what it reused."""

    def settle(
        self,
        waiting: Sequence[First | End],
        facts: PromptFacts,
        wall_s: float,
        elsewhere: Callable[[Looked, Asked, Placed, float, Any], None],
        log: Callable[[Begun], None],
        failed: Callable[[Exception], None],
        /,
    ) -> None:
        """Look at a list of them, and `tell`. `wall_s`: what the clock on the wall is ahead. `elsewhere`: told of those
        whose conversation was changed, with their body, of which all messages are to be outlined before they have
        `begun_elsewhere`; `log`: of those that are logged; `failed`: what one of them raised, which ends it."""

    def begun_elsewhere(
        self,
        looked: Looked,
        asked: Asked,
        placed: Placed,
        now: float,
        outline: Outliner,
        facts: PromptFacts,
        wall_s: float,
        log: Callable[[Begun], None],
        /,
    ) -> None: ...
    def tell(self) -> None: ...
    def goes_on(self, asked: Asked, /) -> bool:
        """Whether it begins with a conversation's last prompt, every token of it."""

    def get(self, id: str) -> Begun | None: ...
    def outlined(self, session: str) -> int: ...
    def holds_together(self) -> bool: ...
    @property
    def prompts(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def shorts(self) -> int: ...
    def __len__(self) -> int: ...
