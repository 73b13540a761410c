"""The native index behind the PrefixIndex protocol.

Owns the conversion of scopes, groups and dumps; `ingest`, `clear`, `unpin` and the like are the C++ methods themselves.
Refuses to know any semantics: those are in router/index/native.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from router.index._native import Index, Prompt
from router.index.dump import DumpGroup, encode_dump
from router.index.protocol import HolderId, IndexStats, Match, PinId, Scope, Tokens


class NativeIndex(Index):
    """PrefixIndex in C++: one writer at a time, any number of readers, the GIL released while it works."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(secrets.randbits(64) if seed is None else seed & (1 << 64) - 1)

    def declare_groups(self, holder: HolderId, groups: Sequence[Mapping[str, Any]]) -> None:
        fields = ("group_idx", "kind", "block_size", "sliding_window")
        self._declare_groups(holder, [tuple(group.get(field) for field in fields) for group in groups])

    def prepare(self, token_ids: Sequence[int] | bytes) -> Prompt:
        return Prompt(token_ids)

    def match(self, token_ids: Tokens, scope: Scope) -> list[Match]:
        return cast(list[Match], self._match(token_ids, scope.model, scope.salt, scope.lora, scope.media))

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        return self._chunk_keys(token_ids, scope.model, scope.salt, scope.lora, scope.media, chunk_tokens)

    def pin(self, holder: HolderId, token_ids: Tokens, scope: Scope) -> PinId:
        return PinId(self._pin(holder, token_ids, scope.model, scope.salt, scope.lora, scope.media))

    def stats(self) -> IndexStats:
        return IndexStats(*self._stats())

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        rows = sorted(self._groups(holder), key=lambda row: -1 if row[0] is None else row[0])
        fields = ("group_idx", "kind", "block_size", "sliding_window", "blocks", "silent")
        return [dict(zip(fields, row)) for row in rows]

    def dump(self, holder: HolderId) -> list[bytes]:
        heard = [row for row in self._groups(holder) if row[6]]
        groups = [DumpGroup(key, kind, size, window, sparse) for key, kind, size, window, _, _, _, sparse in heard]
        rows: Iterator[tuple[int, int, Any]] = iter(self._dump_rows(holder))
        return encode_dump(self.fingerprint, groups, rows)
