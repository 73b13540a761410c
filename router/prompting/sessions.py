"""The session of a request, read from the names that clients send on their own. Pure.

Owns the table of those names. Refuses to know what is done with a session. Invariant: what leaves here is printable and
at most MAX_NAME_CHARS characters long, whatever came in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from prompts.routing import RoutingRequest

MAX_NAME_CHARS = 64
"""Longer names, and those that cannot be printed, are known by their digest."""

Meaning = Literal["session", "agent", "parent", "parent_agent", "final"]
NameByMeaning = dict[Meaning, str]


class NameSource(NamedTuple):
    """A header or body field in which clients name a session, an agent or a parent."""

    location: Literal["header", "body"]
    name: str
    meaning: Meaning
    client_names: str


NAME_SOURCES = (
    NameSource("header", "x-session-id", "session", "OpenCode, and who follows this page"),
    NameSource("header", "x-claude-code-session-id", "session", "Claude Code"),
    NameSource("header", "x-dynamo-session-id", "session", "clients of Dynamo"),
    NameSource("header", "session-id", "session", "Codex"),
    NameSource("header", "session_id", "session", "Codex, older"),
    NameSource("header", "x-session-affinity", "session", "OpenCode"),
    NameSource("header", "x-smg-routing-key", "session", "clients of SMG"),
    NameSource("body", "prompt_cache_key", "session", "Codex, OpenAI's clients"),
    NameSource("body", "metadata.user_id", "session", "Claude Code, Anthropic's clients"),
    NameSource("body", "user", "session", "OpenAI's clients"),
    NameSource("header", "x-claude-code-agent-id", "agent", "Claude Code: a sub-agent of the session"),
    NameSource(
        "header", "thread-id", "agent", "Codex: a thread of the session; the main thread is called as the session"
    ),
    NameSource("header", "x-parent-session-id", "parent", "OpenCode"),
    NameSource("header", "x-dynamo-parent-session-id", "parent", "clients of Dynamo"),
    NameSource("header", "x-claude-code-parent-agent-id", "parent_agent", "Claude Code: who started the sub-agent"),
    NameSource("header", "x-codex-parent-thread-id", "parent_agent", "Codex: the thread that started this one"),
    NameSource("header", "x-dynamo-session-final", "final", "clients of Dynamo: `true` or `1` with the last request"),
)
"""Sources of names; the first one present counts."""


class Session(NamedTuple):
    """The session of a request, as its client names it."""

    name: str | None = None
    parent_name: str | None = None
    """The session that started this one: both begin alike."""
    is_final: bool = False
    """No request of the session will follow."""

    def add_tenant(self, tenant: str) -> Session:
        """Return this session with the tenant's name in front, apart from equally named ones of other tenants."""
        name, parent, is_final = self
        names = [
            None if session_name is None else shorten_name(f"{tenant}/{session_name}")
            for session_name in (name, parent)
        ]
        return Session(names[0], names[1], is_final)


class SessionNames:
    """The table, with what the operator adds in front of it."""

    def __init__(self, extra_headers: Sequence[str] = ()) -> None:
        """`extra_headers`: each `NAME` or `MEANING=NAME`."""
        extra_rows = [_parse_extra_header(text) for text in extra_headers]
        rows = [*extra_rows, *NAME_SOURCES]
        self._header_meanings = [(row.name.lower().encode(), row.meaning) for row in rows if row.location == "header"]
        self.header_names = frozenset(name for name, _ in self._header_meanings)
        """Names of headers, in lower case, without any of which a request names nothing in its headers."""

    def read_headers(self, get_header: Callable[[bytes], bytes | None]) -> NameByMeaning:
        """Read the names in headers. `get_header` returns the value of a lower-case name."""
        name_by_meaning: NameByMeaning = {}
        for name, meaning in self._header_meanings:
            if meaning not in name_by_meaning and (value := get_header(name)):
                name_by_meaning[meaning] = value.decode("latin-1")
        return name_by_meaning

    @staticmethod
    def make_session(name_by_meaning: NameByMeaning, request: RoutingRequest) -> Session:
        """Return the session of a request with these names in its headers, and with this body."""
        name = name_by_meaning.get("session") or request.prompt_cache_key or request.metadata_user_id or request.user
        if not name:
            return _NO_SESSION
        parent, agent = name_by_meaning.get("parent"), name_by_meaning.get("agent")
        if agent is not None and agent != name:
            parent_agent = name_by_meaning.get("parent_agent", name)
            parent = name if parent_agent == name else f"{name}/{parent_agent}"
            name = f"{name}/{agent}"
        name, parent = shorten_name(name), None if parent is None else shorten_name(parent)
        return Session(
            name, None if parent == name else parent, name_by_meaning.get("final", "").lower() in ("true", "1")
        )


_NO_SESSION = Session()


def _parse_extra_header(text: str) -> NameSource:
    meaning, _, name = text.rpartition("=")
    return NameSource("header", name, meaning or "session", "")  # type: ignore[arg-type]


def shorten_name(name: str) -> str:
    """Shorten a session's name to MAX_NAME_CHARS printable characters."""
    if len(name) <= MAX_NAME_CHARS and name.isprintable():
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=MAX_NAME_CHARS // 2).hexdigest()
