"""What each API key used: requests, prompt tokens, of them cached and computed, and tokens of answers.

Owns what is not written yet, and the file: SQLite, to which every process adds what is new, so that several processes,
or a router and the one that takes over from it, share one. Sums since the start are router/counters.py's. A key is kept
by a digest, never itself.
Where a worker does not say what it used, the router's own figures count, and `estimated` says for how many requests.
"""

from __future__ import annotations

import hashlib
import sqlite3

import msgspec

BUSY_S_MAX = 2.0


class Use(msgspec.Struct):
    """Sums."""

    requests: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Use) -> None:
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


NAMES = Use.__struct_fields__
EVERYBODY = "everybody"
"""Whose requests are where no keys are asked for."""


def digest(key: str) -> str:
    """What a key is called in the file."""
    return hashlib.sha256(b"blockcast ledger\0" + key.encode()).hexdigest()[:16]


class KeyLedger:
    """Of one process. Raises sqlite3.Error where the file cannot be used."""

    def __init__(self, keys: dict[str, str], path: str | None) -> None:
        """`keys`: name -> key; empty: one account for everybody."""
        names = {name: digest(key) for name, key in keys.items()} or {EVERYBODY: EVERYBODY}
        self._digests = names
        self._unwritten: dict[str, Use] = {}
        """Digest -> what is new."""
        self._path = path
        self.lasts = path is not None
        if path is not None:
            with self._open(path) as file:
                columns = ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in NAMES)
                file.execute(f"CREATE TABLE IF NOT EXISTS used (key TEXT PRIMARY KEY, {columns})")
                file.execute(f"SELECT key, {', '.join(NAMES)} FROM used").fetchone()

    def name(self, tenant: str) -> str | None:
        """The account of a tenant."""
        return EVERYBODY if EVERYBODY in self._digests else tenant if tenant in self._digests else None

    def note(self, account: str, use: Use) -> None:
        """A request ended."""
        if self._path is not None:
            self._unwritten.setdefault(self._digests[account], Use()).add(use)

    def take(self) -> dict[str, Use]:
        """What is to be written, by digest; give it to `write`, in any thread, or back to `untake`."""
        rows, self._unwritten = self._unwritten, {}
        return rows

    def untake(self, rows: dict[str, Use]) -> None:
        """It could not be written: keep it for the next time."""
        for name, use in rows.items():
            self._unwritten.setdefault(name, Use()).add(use)

    def write(self, rows: dict[str, Use]) -> None:
        """Add to the file, all or nothing. Raises sqlite3.Error."""
        if self._path is None or not rows:
            return
        marks = ", ".join("?" * (len(NAMES) + 1))
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in NAMES)
        values = [(key, *(getattr(use, name) for name in NAMES)) for key, use in rows.items()]
        with self._open(self._path) as file:
            file.executemany(f"INSERT INTO used VALUES ({marks}) ON CONFLICT (key) DO UPDATE SET {sums}", values)

    def kept(self) -> dict[str, Use]:
        """Name of the key, or the digest of one that is known no more -> what the file says. Raises sqlite3.Error."""
        if self._path is None:
            return {}
        names = {digest: name for name, digest in self._digests.items()}
        with self._open(self._path) as file:
            rows = file.execute(f"SELECT key, {', '.join(NAMES)} FROM used").fetchall()
        return {names.get(key, key): Use(*sums) for key, *sums in rows}

    @staticmethod
    def _open(path: str) -> _File:
        return _File(path)


class _File:
    """A connection that is closed in the end, and whose changes are made then."""

    def __init__(self, path: str) -> None:
        self._file = sqlite3.connect(path, timeout=BUSY_S_MAX)

    def __enter__(self) -> sqlite3.Connection:
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.commit()
            else:
                self._file.rollback()
        finally:
            self._file.close()
