"""What the HTTP edge can be told."""

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
    """Checked a few times a second, so an expiry can come up to `sweep_s` late."""

    connect_s: Annotated[Seconds, Flag("--connect-timeout"), "To reach a worker."] = 5.0
    first_byte_s: Annotated[Seconds, Flag("--first-byte-timeout"),
        "From the request's end to the answer's first byte."] = 600.0
    """An answer that is not streamed starts when it is complete."""
    idle_s: Annotated[Seconds, Flag("--idle-timeout"), "Without a byte in the middle of an answer."] = 300.0
    """Whichever side is to blame."""
    total_s: Annotated[Seconds, Flag("--total-timeout"), "From the request to the answer's end."] = 3600.0
    sweep_s: Annotated[Seconds, "Between two looks at all these."] = 0.25


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Bounds, deadlines and keys of the edge."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    client_timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    api_keys: Annotated[tuple[Key, ...], SECRET, Flag("--api-key", metavar="KEY", env="ROUTER_API_KEY"),
        "Require Authorization: Bearer KEY (or x-api-key) under /v1. May be repeated; or set ROUTER_API_KEY.",
    ] = field(default=(), repr=False)
    pass_routes: Annotated[tuple[ApiPath, ...], Flag("--pass-route", metavar="PATH"),
        "Pass this route to workers too, /v1/x/* all below it, besides those of OpenAI's that answer prompts. May "
        "be repeated."] = ()
    passed_fields: Annotated[tuple[WorkerField, ...], Flag("--pass-worker-field", metavar="NAME"),
        "Let clients set this field, or header, that is workers' own (docs/security.md has the list): where every "
        "client is trusted. May be repeated."] = ()
    cors_origins: Annotated[tuple[CorsOrigin, ...], Flag("--cors-origin", metavar="ORIGIN"),
        "Let pages of this origin (https://app.example; * for all) call /v1 from browsers. May be repeated. "
        "[default: none]"] = ()
    session_headers: Annotated[tuple[SessionHeader, ...], Flag("--session-header", metavar="NAME"),
        "A header that names the session, looked at before those that are known anyway (docs/routing.md); "
        "agent=NAME, parent=NAME, parent_agent=NAME, final=NAME: that tells those. May be repeated."] = ()
    key_requests_max: Annotated[int, Meta(ge=1, le=10**9, title="N"), Flag("--max-in-flight-by-key"),
        "Requests of one API key in flight or queued; more are answered 429."] = 100_000
    key_tokens_max: Annotated[int, Meta(ge=1, le=10**15, title="N"), Flag("--max-tokens-by-key"),
        "Prompt tokens of one API key's requests in flight; a request that would be more is answered 429."] = 10**9
    priority_min: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, title="N"), Flag("--min-priority"),
        "The lowest number, which is the highest priority, that clients may ask for; lower ones count as this."] = 0
    key_priorities: Annotated[tuple[KeyPriority, ...], SECRET, Flag("--key-priority", metavar="KEY=N"),
        "Another --min-priority for one API key. May be repeated."] = field(default=(), repr=False)
    key_shares: Annotated[tuple[KeyShare, ...], SECRET, Flag("--key-share", metavar="KEY=N"),
        "With --fair, the share of one API key beside the others', which have 1 each. May be repeated."
    ] = field(default=(), repr=False)
    tenant_salts: Annotated[bool, Flag(),
        "Give each API key's prompts a cache_salt of its own, so that keys share no cache."] = False
    cache_headers: Annotated[bool, Flag(),
        "Tell clients which worker answered and how much of the prompt was cached there (x-blockcast-*)."] = True
    continue_streams: Annotated[bool, Flag(),
        "Have another worker complete an answer whose worker died in the middle, where that is exact."] = True
    connections_max: Annotated[int, Meta(ge=1, le=10**9, title="N"), Flag("--max-connections"),
        "Of clients, as far as file descriptors are enough; more are answered 503."] = CONNECTIONS_MAX
    ready_s: Annotated[Pause, Flag("--ready-timeout"),
        "Until then /readyz waits for the caches of the workers to be known."] = 10.0
    unready_s: Annotated[Pause, Flag("--shutdown-delay"),
        "After SIGTERM /readyz is 503 for so long while requests are still taken."] = 0.0
    shutdown_s: Annotated[Seconds, Flag("--shutdown-timeout"), "For requests in flight after SIGTERM."] = 30.0

    def __post_init__(self) -> None:
        if any(share <= 0 for share in self.shares.values()):
            raise ConfigError("--key-share: got a share of 0, expected a number above 0")

    @property
    def shares(self) -> dict[str, float]:
        """API key -> its share."""
        return {key: float(share) for key, _, share in (text.rpartition("=") for text in self.key_shares)}

    @property
    def floors(self) -> dict[str, int]:
        """API key -> its own `priority_min`."""
        pairs = [text.rpartition("=") for text in self.key_priorities]
        return {key: int(number) for key, _, number in pairs}
