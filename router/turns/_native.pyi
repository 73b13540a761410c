from collections.abc import Callable
from typing import Any

from router.turns.why import Asked, Facts, Outliner, Placed, PromptFacts

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

class Looked:
    """A request whose conversation is looked at, from when it was priced until its end."""

class Waiting:
    """First bytes and ends that are looked at together."""

    def __init__(self, ledger: Ledger, waiting_max: int, tokens_max: int) -> None:
        """So many, of prompts with so many tokens, are looked at without waiting."""

    def entered(self, asked: Asked, outline: Outliner, body: tuple[object, ...], /) -> Looked:
        """Raises as `Ledger.explained` does. `body`: what `elsewhere` is given, where that may be wanted, or ()."""

    def first(self, one: Looked, placed: Placed, now: float, /) -> bool:
        """Its first byte came. Whether it is time to `settle`, here and below."""

    def end(
        self, one: Looked, reported: int, answer_tokens: int, now: float, is_whole: bool, is_logged: bool, /
    ) -> bool:
        """Its end came; nothing is done where no first byte did. `reported`: as in `Ledger.ended`, of a whole answer;
        of others nothing is counted."""

    def settle(
        self,
        facts: PromptFacts,
        wall_s: float,
        elsewhere: Callable[[Looked, Any], None],
        log: Callable[[Begun], None],
        failed: Callable[[Exception], None],
        /,
    ) -> None:
        """Look at all that waits, and `Ledger.tell`. `wall_s`: what the clock on the wall is ahead. `elsewhere`: told
        of those whose conversation was changed, and of which all messages are to be outlined before they are `begun`;
        `log`: of those that are logged; `failed`: what one of them raised, which ends it."""

    def begun(
        self, one: Looked, outline: Outliner, facts: PromptFacts, wall_s: float, log: Callable[[Begun], None], /
    ) -> None: ...
    @property
    def tokens(self) -> int:
        """That those keep that wait, and nobody else."""

    def __len__(self) -> int: ...
