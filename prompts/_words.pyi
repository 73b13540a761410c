from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prompts.bpe_encoder import MergePairs, PatternRow

def begin_alike(first: bytes, second: bytes, length: int) -> bool: ...
def digest32(data: bytes, before: int, /) -> int: ...
def message_words(
    messages: list[Any],
    roles: dict[str, int],
    mark: bytes,
    line: bytes,
    other: Callable[[Any], tuple[int, ...]],
    /,
) -> bytes: ...
def count_openings(text: bytes, end: int = ...) -> int: ...
def digests(body: bytes, first: int, seed: int, end: int = ...) -> list[int]: ...
def digests_among(body: bytes, first: int, seed: int, among: Mapping[int, object], most: int) -> list[int]: ...

class Words:
    def __init__(
        self,
        steps: Sequence[Sequence[PatternRow]],
        seed: int,
        words_max: int,
        pairs: MergePairs | None = None,
        added: Sequence[tuple[str, int | None]] = (),
    ) -> None: ...
    def encode(
        self,
        text: str,
        learn: Callable[[str], list[int]],
        ask: Callable[[list[str]], list[list[int]]] | None = None,
    ) -> bytes | None: ...
    def __len__(self) -> int: ...
