"""What the core is asked of one request, and what it decides. Plain, so that compiled code reads fields in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.index.protocol import PromptMemory, Scope

_FIELDS = (
    "request_id", "model", "scope", "token_ids", "prompt_tokens", "like", "alike", "output_max", "output_min",
    "stream", "priority", "worker", "session", "parent", "final", "subset", "role", "deadline_s", "ttft_s_max",
    "tenant", "share", "kinds",
)  # fmt: skip

_DECIDED = (
    "request_id", "worker", "rank", "attempt", "prompt_tokens", "predicted_cached_tokens", "predicted_ttft_s", "terms",
    "decided_s", "waited_s", "best", "candidates", "not_eligible",
)  # fmt: skip


class RouteRequest:
    """One request that needs a worker. `model` is the name the client asked for, `scope.model` its base model."""

    __slots__ = _FIELDS

    def __init__(
        self,
        request_id: str,
        model: str,
        scope: Scope,
        token_ids: Sequence[int] | None,
        prompt_tokens: int,
        like: PromptMemory | None = None,
        alike: int | None = None,
        output_max: int = 0,
        output_min: int = 0,
        stream: bool = True,
        priority: int = 0,
        worker: str | None = None,
        session: str | None = None,
        parent: str | None = None,
        final: bool = False,
        subset: frozenset[str] | None = None,
        role: str | None = None,
        deadline_s: float | None = None,
        ttft_s_max: float | None = None,
        tenant: str = "",
        share: float = 1.0,
        kinds: list[tuple[str, int | str | None]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.scope = scope
        self.token_ids = token_ids
        """The prompt; None where it could not be tokenised here: then only load decides."""
        self.prompt_tokens = prompt_tokens
        """len(token_ids), or an estimate where they are None."""
        self.like = like
        """Of a prompt that may begin as this one does."""
        self.alike = alike
        """Tokens that both are known to begin with; None where they have to be compared."""
        self.output_max = output_max
        """Most tokens that may be generated; 0 where the client does not say. A bound, never an expectation."""
        self.output_min = output_min
        """Fewest tokens that will be generated, where the client forbids an earlier end."""
        self.stream = stream
        """Whether the first token will be seen as it comes; otherwise its time is estimated."""
        self.priority = priority
        """Lower is served earlier, as in vLLM; only the reordering queue looks at it."""
        self.worker = worker
        """The worker the client pinned the request to, or None."""
        self.session = session
        """The conversation it belongs to, of a bounded length, or None. Key of affinity and of the `sticky` policy."""
        self.parent = parent
        """The session that started this one: its prompts begin alike."""
        self.final = final
        """No request of the session will follow."""
        self.subset = subset
        """Workers that may be chosen, as a gateway says; None: all."""
        self.role = role
        """Role label a worker must carry, or None for any."""
        self.deadline_s = deadline_s
        """Absolute time after which a held request is refused; None takes the queue's default."""
        self.ttft_s_max = ttft_s_max
        """The longest predicted wait for its first token with which it is taken; None: the configured one."""
        self.tenant = tenant
        """Whose it is: fair turns are between tenants."""
        self.share = share
        """What a turn of its tenant's counts is divided by it."""
        self.kinds = kinds
        """What answers its own will be like, once router/decide/lengths.py has worked it out."""

    def replaced(self, **changes: Any) -> RouteRequest:
        """The same but for these fields."""
        return RouteRequest(**{name: getattr(self, name) for name in _FIELDS} | changes)


class Decision:
    """Where one attempt of a request goes, and why: a worker, and what its price is made of (`messages.Terms`)."""

    __slots__ = _DECIDED

    def __init__(
        self,
        request_id: str,
        worker: str,
        rank: int | None,
        attempt: int,
        prompt_tokens: int,
        predicted_cached_tokens: int,
        predicted_ttft_s: float,
        terms: Any,
        decided_s: float,
        waited_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.worker = worker
        self.rank = rank
        """Data-parallel rank whose cache matched best, where the worker has several; else None."""
        self.attempt = attempt
        """0 for the first, counted up by retries."""
        self.prompt_tokens = prompt_tokens
        self.predicted_cached_tokens = predicted_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.terms = terms
        self.decided_s = decided_s
        self.waited_s = waited_s
        """How long the reordering queue held it."""
        self.best: Any = None
        """Of the candidate that has most of the prompt cached, where that is more than the worker has."""
        self.candidates: list[Any] = []
        """Every candidate's terms, cheapest first; filled only where an explanation was asked for."""
        self.not_eligible: dict[str, str] = {}
        """worker -> why it was not a candidate; filled with `candidates`."""

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in _DECIDED}


class Forward:
    """Send the request to the decision's worker now."""

    __slots__ = ("decision", "request_id")

    def __init__(self, request_id: str, decision: Decision) -> None:
        self.request_id = request_id
        self.decision = decision
