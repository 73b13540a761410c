from collections.abc import Callable, Mapping
from typing import Any

def digest32(data: bytes, before: int, /) -> int:
    """Return a 32-bit digest of data that follows other data with the digest `before`."""

def message_words(
    messages: list[Any],
    roles: dict[str, int],
    mark: bytes,
    line: bytes,
    words_of_message: Callable[[Any], tuple[int, ...]],
    /,
) -> bytes:
    """Return the five numbers of each message (router/prompting/outline.py) as unsigned 32-bit integers.

    `words_of_message` returns those of one message. It is not called for plain messages: a role and a text without
    `mark`, and without a line that starts with `line` if the role's number in `roles` is 0.
    """

def count_openings(text: bytes, end: int = ...) -> int:
    """Count `[` and `{` before an offset: JSON has at most so many lists and objects there."""

def digests(body: bytes, first: int, seed: int, end: int = ...) -> list[int]:
    """Return digests of prefixes of a body, up to `end`.

    The first prefix has `first` bytes. Each doubling of the length is divided into eight steps.
    """

def digests_among(body: bytes, first: int, seed: int, among: Mapping[int, object], most: int) -> list[int]:
    """Return the `digests` of a body that are keys of `among`, at most `most`, the longest prefix first."""
