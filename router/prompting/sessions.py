"""Which session a request belongs to, told by the names that clients send without being asked. Pure.

Owns the table of those names. Refuses to know what is done with a session. Invariant: what leaves here is printable and
at most NAME_CHARS_MAX characters long, whatever came in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from prompts.routing import RoutingRequest

NAME_CHARS_MAX = 64
"""Longer names, and those that cannot be printed, are known by their digest."""

Tells = Literal["session", "agent", "parent", "parent_agent", "final"]
Names = dict[Tells, str]


class Name(NamedTuple):
    """One row: where a client says what."""

    where: Literal["header", "body"]
    name: str
    tells: Tells
    sent_by: str


NAMES = (
    Name("header", "x-session-id", "session", "OpenCode, and who follows this page"),
    Name("header", "x-claude-code-session-id", "session", "Claude Code"),
    Name("header", "x-dynamo-session-id", "session", "clients of Dynamo"),
    Name("header", "session-id", "session", "Codex"),
    Name("header", "session_id", "session", "Codex, older"),
    Name("header", "x-session-affinity", "session", "OpenCode"),
    Name("header", "x-smg-routing-key", "session", "clients of SMG"),
    Name("body", "prompt_cache_key", "session", "Codex, OpenAI's clients"),
    Name("body", "metadata.user_id", "session", "Claude Code, Anthropic's clients"),
    Name("body", "user", "session", "OpenAI's clients"),
    Name("header", "x-claude-code-agent-id", "agent", "Claude Code: a sub-agent of the session"),
    Name("header", "thread-id", "agent", "Codex: a thread of the session; the main thread is called as the session"),
    Name("header", "x-parent-session-id", "parent", "OpenCode"),
    Name("header", "x-dynamo-parent-session-id", "parent", "clients of Dynamo"),
    Name("header", "x-claude-code-parent-agent-id", "parent_agent", "Claude Code: who started the sub-agent"),
    Name("header", "x-codex-parent-thread-id", "parent_agent", "Codex: the thread that started this one"),
    Name("header", "x-dynamo-session-final", "final", "clients of Dynamo: `true` or `1` with the last request"),
)
"""Of several that tell the same, the first that is there counts."""


class Headers(Protocol):
    """Headers of a request, by names in lower case."""

    def __iter__(self) -> Iterator[bytes]: ...

    def get(self, name: bytes, /) -> bytes | None: ...


class Session(NamedTuple):
    """What a request says of itself."""

    name: str | None = None
    parent: str | None = None
    """The session that started this one: both begin alike."""
    final: bool = False
    """No request of the session will follow."""

    def of_tenant(self, tenant: str) -> Session:
        """The same, told apart from sessions that other tenants call so."""
        name, parent, final = self
        own = [None if one is None else bounded(f"{tenant}/{one}") for one in (name, parent)]
        return Session(own[0], own[1], final)


class SessionNames:
    """The table, with what the operator adds in front of it."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        """`more`: headers, each `NAME` or `TELLS=NAME`."""
        added = [_row(text) for text in more]
        rows = [*added, *NAMES]
        self._headers = [(row.name.lower().encode(), row.tells) for row in rows if row.where == "header"]
        self._names = frozenset(name for name, _ in self._headers)

    def told(self, headers: Headers) -> Names:
        """What headers tell."""
        found: Names = {}
        if self._names.isdisjoint(headers):
            return found
        for name, tells in self._headers:
            if tells not in found and (value := headers.get(name)):
                found[tells] = value.decode("latin-1")
        return found

    @staticmethod
    def of(told: Names, parsed: RoutingRequest) -> Session:
        """The session of a request whose headers told this, and with this body."""
        name = told.get("session") or parsed.prompt_cache_key or parsed.metadata_user_id or parsed.user
        if not name:
            return _NONE
        parent, agent = told.get("parent"), told.get("agent")
        if agent is not None and agent != name:
            above = told.get("parent_agent", name)
            parent = name if above == name else f"{name}/{above}"
            name = f"{name}/{agent}"
        name, parent = bounded(name), None if parent is None else bounded(parent)
        return Session(name, None if parent == name else parent, told.get("final", "").lower() in ("true", "1"))


_NONE = Session()


def _row(text: str) -> Name:
    tells, _, name = text.rpartition("=")
    return Name("header", name, tells or "session", "")  # type: ignore[arg-type]


def bounded(name: str) -> str:
    """Shorten a session's name to NAME_CHARS_MAX printable characters."""
    if len(name) <= NAME_CHARS_MAX and name.isprintable():
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAME_CHARS_MAX // 2).hexdigest()
