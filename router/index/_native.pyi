from collections.abc import Sequence
from typing import Any

from router.index.protocol import Tokens

class Prompt:
    def __init__(self, token_ids: Sequence[int] | bytes) -> None: ...
    def __len__(self) -> int: ...

class IngestReport:
    stored: int
    removed: int
    cleared: int
    parked: int
    unknown_removals: int
    unknown_copies: int
    unknown_events: int
    refused: int
    malformed_events: int
    malformed: list[str]

class Ingesting:
    @property
    def report(self) -> IngestReport: ...
    def step(self) -> bool: ...

def extra_work() -> int: ...

class Match:
    holder: int
    tokens: int
    gpu_tokens: int
    pinned_tokens: int
    tier_tokens: tuple[int, int, int, int]

class Index:
    def __init__(self, seed: int) -> None: ...
    @property
    def seed(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
    def add_holder(self, name: str, model: str) -> int: ...
    def remove_holder(self, holder: int) -> None: ...
    def clear(self, holder: int) -> None: ...
    def set_reannounces(self, holder: int, reannounces: bool) -> None: ...
    def ingest(self, holder: int, payload: bytes) -> IngestReport: ...
    def begin(self, holder: int, payload: bytes) -> Ingesting: ...
    def unpin(self, pin: int) -> None: ...
    def _declare_groups(self, holder: int, groups: Sequence[tuple[Any, ...]]) -> None: ...
    def _match(
        self,
        token_ids: Tokens,
        model: str,
        salt: str | None,
        lora: str | None,
        media: Sequence[tuple[int, str]],
    ) -> list[Match]: ...
    def _chunk_keys(
        self,
        token_ids: Tokens,
        model: str,
        salt: str | None,
        lora: str | None,
        media: Sequence[tuple[int, str]],
        chunk_tokens: int,
    ) -> list[int]: ...
    def _pin(
        self,
        holder: int,
        token_ids: Tokens,
        model: str,
        salt: str | None,
        lora: str | None,
        media: Sequence[tuple[int, str]],
    ) -> int: ...
    def _stats(self) -> tuple[int, int, int, int, int]: ...
    def _groups(self, holder: int) -> list[tuple[Any, ...]]: ...
    def _dump_rows(self, holder: int) -> list[tuple[int, int, tuple[int, int, int, int, int]]]: ...
