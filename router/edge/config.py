"""Settings of the HTTP edge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from options import SECRET, ConfigError, Flag, Key, Seconds
from router.http.config import ClientTimeouts, HttpLimits

KeyPriority = Annotated[str, Meta(pattern=r"^.+=-?\d{1,9}$", title="KEY=N", examples=["secret=-10"])]
KeyShare = Annotated[str, Meta(pattern=r"^.+=(\d{1,6}(\.\d{1,6})?)$", title="KEY=N", examples=["secret=2.5"])]
Pause = Annotated[float, Meta(ge=0, le=1e9, title="SECONDS")]
_TELLS = "((session|agent|parent|parent_agent|final)=)?"
SessionHeader = Annotated[
    str,
    Meta(pattern=rf"^{_TELLS}[!#-'*+.^_`|~\w-]{{1,64}}$", title="NAME", examples=["x-chat-id", "parent=x-parent-chat"]),
]
CorsOrigin = Annotated[
    str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^\s/,;]+)$", title="ORIGIN", examples=["https://app.example"])
]
ApiPath = Annotated[str, Meta(pattern=r"^/v1/[!-~]+$", title="PATH", examples=["/v1/files"])]

CONNECTIONS_MAX: Final = 20_000
"""Default of `connections_max`."""
WorkerField = Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}$", title="NAME", examples=["kv_transfer_params"])]


# fmt: off
@dataclass(frozen=True, slots=True)
class Timeouts:
    """All but `connect_s` are checked every `sweep_s`, so an expiry can come so much late."""

    connect_s: Annotated[Seconds, Flag("--connect-timeout"), "Longest wait for a connection to a worker."] = 5.0
    first_byte_s: Annotated[Seconds, Flag("--first-byte-timeout"),
        "Longest wait for the first byte of an answer."] = 600.0
    """An answer that is not streamed has its first byte when it is complete."""
    idle_s: Annotated[Seconds, Flag("--idle-timeout"), "Longest pause within an answer."] = 300.0
    """Applies to a silent worker and to a client that does not read."""
    total_s: Annotated[Seconds, Flag("--total-timeout"), "Longest time of a whole exchange."] = 3600.0
    sweep_s: Annotated[Seconds, "Time between two checks of all timeouts."] = 0.25


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Bounds, deadlines and keys of the edge."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    client_timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    api_keys: Annotated[tuple[Key, ...], SECRET, Flag("--api-key", metavar="KEY", env="ROUTER_API_KEY"),
        "Key that clients must send; ROUTER_API_KEY sets it too.",
        "Clients send it as Authorization: Bearer KEY, or x-api-key, with every request under /v1 or to /tokenize.",
    ] = field(default=(), repr=False)
    pass_routes: Annotated[tuple[ApiPath, ...], Flag("--pass-route", metavar="PATH"),
        "Pass this route to workers as well; /v1/x/* stands for all below it."] = ()
    passed_fields: Annotated[tuple[WorkerField, ...], Flag("--pass-worker-field", metavar="NAME"),
        "Let clients set this internal field or header of workers.",
        "Only where every client is trusted (docs/security.md)."] = ()
    cors_origins: Annotated[tuple[CorsOrigin, ...], Flag("--cors-origin", metavar="ORIGIN"),
        "Let web pages of this origin call /v1; * for all. [default: none]"] = ()
    session_headers: Annotated[tuple[SessionHeader, ...], Flag("--session-header", metavar="NAME"),
        "A header that names the session, besides the well-known ones.",
        "agent=NAME, parent=NAME, parent_agent=NAME and final=NAME name the headers that carry "
        "these (docs/reference/sessions.md)."] = ()
    key_requests_max: Annotated[int, Meta(ge=1, le=10**9, title="N"), Flag("--max-in-flight-by-key"),
        "Most requests of one API key at once; more are answered 429."] = 100_000
    key_tokens_max: Annotated[int, Meta(ge=1, le=10**15, title="N"), Flag("--max-tokens-by-key"),
        "Most prompt tokens of one API key at once; more are answered 429."] = 10**9
    priority_min: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, title="N"), Flag("--min-priority"),
        "Highest priority (lowest number) that clients may ask for."] = 0
    key_priorities: Annotated[tuple[KeyPriority, ...], SECRET, Flag("--key-priority", metavar="KEY=N"),
        "The --min-priority of one API key."] = field(default=(), repr=False)
    key_shares: Annotated[tuple[KeyShare, ...], SECRET, Flag("--key-share", metavar="KEY=N"),
        "With --fair: the weight of one API key; others have 1."
    ] = field(default=(), repr=False)
    tenant_salts: Annotated[bool, Flag(),
        "Keep the caches of API keys apart, by a cache_salt for each."] = False
    cache_headers: Annotated[bool, Flag(),
        "Send clients the worker and cached tokens (x-blockcast-* headers)."] = True
    continue_streams: Annotated[bool, Flag(),
        "Continue a stream at another worker if its worker dies, where exact."] = True
    connections_max: Annotated[int, Meta(ge=1, le=10**9, title="N"), Flag("--max-connections"),
        "Most connections of clients at once; more are answered 503."] = CONNECTIONS_MAX
    ready_s: Annotated[Pause, Flag("--ready-timeout"),
        "Longest that /readyz waits until the caches of all workers are known."] = 10.0
    unready_s: Annotated[Pause, Flag("--shutdown-delay"),
        "How long requests are still taken after SIGTERM, while /readyz is 503."] = 0.0
    shutdown_s: Annotated[Seconds, Flag("--shutdown-timeout"),
        "Longest that requests in flight may take after SIGTERM."] = 30.0

    def __post_init__(self) -> None:
        if any(share <= 0 for share in self.shares.values()):
            raise ConfigError("--key-share: got a share of 0, expected a number above 0")

    @property
    def shares(self) -> dict[str, float]:
        """API key -> share of fair turns."""
        return {key: float(share) for key, _, share in (text.rpartition("=") for text in self.key_shares)}

    @property
    def floors(self) -> dict[str, int]:
        """API key -> `priority_min` of this key."""
        pairs = [text.rpartition("=") for text in self.key_priorities]
        return {key: int(number) for key, _, number in pairs}
