from collections.abc import Callable, Sequence

Pairs = tuple[list[int], list[int], list[int], list[int]]
Row = tuple[int, int, int, int, int, bool, list[int], int]

class Words:
    def __init__(
        self, steps: Sequence[Sequence[Row]], seed: int, words_max: int, pairs: Pairs | None = None
    ) -> None: ...
    def encode(self, text: str, start: int, learn: Callable[[str], list[int]]) -> bytes | None: ...
    def __len__(self) -> int: ...
