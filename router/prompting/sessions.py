"""The session of a request, by the names that clients send on their own. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from prompts.anthropic import CountRequest
from prompts.responses import ResponsesRequest
from prompts.routing import RoutingRequest

MAX_NAME_CHARS = 64
"""Longer names, and names that cannot be printed, are replaced by their digest."""

OPENING_ITEMS = 256
"""Characters or token ids of a completion's prompt that `digest_opening` reads."""

DIGESTED_CHARS = 256
"""Characters of the first user message that `digest_first_user_message` reads."""

Meaning = Literal["session", "agent", "parent", "parent_agent", "final"]
NameByMeaning = dict[Meaning, str]


class NameSource(NamedTuple):
    """A header or body field in which clients name a session, an agent or a parent."""

    location: Literal["header", "body"]
    name: str
    meaning: Meaning
    client_names: str


NAME_SOURCES = (
    NameSource("header", "x-session-id", "session", "OpenCode, and clients that follow this page"),
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
    NameSource("header", "x-claude-code-parent-agent-id", "parent_agent", "Claude Code: starter of the sub-agent"),
    NameSource("header", "x-codex-parent-thread-id", "parent_agent", "Codex: the thread that started this one"),
    NameSource("header", "x-dynamo-session-final", "final", "clients of Dynamo: `true` or `1` with the last request"),
)
"""Sources of names; the first one present counts."""


class Session(NamedTuple):
    """The session of a request, as its client names it."""

    name: str | None = None
    parent_name: str | None = None
    """Session that started this one, with whose prompt it may begin."""
    is_final: bool = False
    """No request of the session will follow."""

    def add_tenant(self, tenant: str) -> Session:
        """Return this session with the tenant's name before its names, so that tenants share no sessions."""
        name = None if self.name is None else shorten_name(f"{tenant}/{self.name}")
        parent_name = None if self.parent_name is None else shorten_name(f"{tenant}/{self.parent_name}")
        return Session(name, parent_name, self.is_final)


class SessionNames:
    """Reads the name of a request's session from the headers and body fields in which clients send it.

    A name has a meaning: that of the session, of an agent in the session, or of the session or agent that started it.
    """

    def __init__(self, extra_headers: Sequence[str] = ()) -> None:
        """Make a reader of the headers in NAME_SOURCES and of `extra_headers`, which take precedence.

        An extra header is given as `NAME` if it has the name of a session, or else as `MEANING=NAME`, for example
        `agent=X-Agent`.
        """
        extra_sources = []
        for text in extra_headers:
            meaning, _, name = text.rpartition("=")
            extra_sources.append(NameSource("header", name, meaning or "session", ""))  # type: ignore[arg-type]
        header_sources = [source for source in (*extra_sources, *NAME_SOURCES) if source.location == "header"]
        self._header_meanings = [(source.name.lower().encode(), source.meaning) for source in header_sources]
        self.header_names = frozenset(name for name, _ in self._header_meanings)
        """Lower-case names of all headers that name a session."""

    def read_headers(self, get_header: Callable[[bytes], bytes | None]) -> NameByMeaning:
        """Read the names in headers. `get_header` returns the value of a header by its lower-case name."""
        name_by_meaning: NameByMeaning = {}
        for header_name, meaning in self._header_meanings:
            if meaning in name_by_meaning:  # an earlier header takes precedence
                continue
            value = get_header(header_name)
            if value:
                name_by_meaning[meaning] = value.decode("latin-1")
        return name_by_meaning

    @staticmethod
    def make_session(name_by_meaning: NameByMeaning, request: RoutingRequest) -> Session:
        """Return the session of a request by the names in its headers, or else in the fields of its body.

        Each agent of a session counts as a session of its own. For example, agent `a` of session `s` gets the name
        `s/a`. Its parent is `s/b` if agent `b` started it, or else `s`.
        """
        body_name = request.prompt_cache_key or request.metadata_user_id or request.user
        name = name_by_meaning.get("session") or body_name
        if not name:
            return Session()
        parent_name = name_by_meaning.get("parent")
        agent = name_by_meaning.get("agent", name)
        parent_agent = name_by_meaning.get("parent_agent", name)
        if agent != name:  # the main agent has the name of the session
            parent_name = name if parent_agent == name else f"{name}/{parent_agent}"
            name = f"{name}/{agent}"
        name = shorten_name(name)
        parent_name = None if parent_name is None else shorten_name(parent_name)
        if parent_name == name:  # no session is its own parent
            parent_name = None
        is_final = name_by_meaning.get("final", "").lower() in ("true", "1")
        return Session(name, parent_name, is_final)


def shorten_name(name: str) -> str:
    """Shorten a session's name to MAX_NAME_CHARS printable characters."""
    if len(name) <= MAX_NAME_CHARS and name.isprintable():
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=MAX_NAME_CHARS // 2).hexdigest()


def digest_first_user_message(request: RoutingRequest) -> int:
    """Digest the first message of a body's user: a name that all turns of a conversation share."""
    content: Any = request.prompt
    source = request.source
    if isinstance(source, ResponsesRequest):
        content = source.input if isinstance(source.input, str) else _find_first_user_content(source.input)
    elif source is not None:
        content = _find_first_user_content(source.messages)
    elif request.messages is not None:
        content = _find_first_user_content(request.messages)
    if isinstance(content, list):
        content = repr(content[:16])
    return digest_name(content[:DIGESTED_CHARS] if isinstance(content, str) else repr(None))


def digest_opening(request: RoutingRequest) -> str:
    """Digest the beginning of a conversation, up to the first message of the user: it is the same in all turns."""
    source, messages = request.source, request.messages
    opening: object = request.prompt[:OPENING_ITEMS] if isinstance(request.prompt, (str, list)) else None
    if messages:
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
        opening = messages[: first + 1]
    elif isinstance(source, CountRequest):
        opening = source.system, source.messages[:1]
    elif source is not None:
        opening = source.instructions, source.input if isinstance(source.input, str) else source.input[:1]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(opening))


def digest_name(name: str) -> int:
    """Digest a name to 32 bits."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def _find_first_user_content(messages: Sequence[Any]) -> Any:
    """Return the text, or its first part, of the first message that is not the system's."""
    for message in messages:
        if _get_field(message, "role") not in ("system", "developer"):
            content = _get_field(message, "content")
            if isinstance(content, list) and content:
                return _get_field(content[0], "text") or content
            return content
    return None


def _get_field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
