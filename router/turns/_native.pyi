from array import array
from collections.abc import Sequence

from router.index.protocol import Scope
from router.turns.why import Facts, Outliner, Placed

REASONS: tuple[str, ...]

class Asked:
    """A prompt whose answer has begun, or that is asked about."""

    def __init__(
        self,
        fields: tuple[
            str,
            array[int],
            Scope,
            Sequence[int],
            Sequence[int],
            int | None,
            str | None,
            str | None,
            str,
            int,
            int,
            bool,
        ],
        /,
    ) -> None:
        """(id that the client knows it by, token ids, scope, digests of its chunks; of its first chunk's beginnings,
        where its session has no name and it has no chunk, or others have none; of what its user said first, where its
        session has no name: conversations with one system prompt may have all their chunks in common; session, parent,
        its worker's target, tokens of that one's blocks, how many ids are as they were sampled where the encoder would
        choose others, whether nothing comes after it). Raises TypeError where the ids are no array of type I,
        ValueError where a block has no token."""

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
    ) -> None: ...
    def explained(
        self, asked: Asked, placed: Placed, facts: Facts, outline: Outliner, now: float, at: float, /
    ) -> Begun: ...
    def begun(
        self, asked: Asked, placed: Placed, facts: Facts, outline: Outliner, now: float, at: float, /
    ) -> Begun: ...
    def ended(self, begun: Begun, reported: int, answer_tokens: int, now: float, /) -> None:
        """`reported`: -1 where its worker does not tell what it reused."""

    def goes_on(self, asked: Asked) -> bool: ...
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
