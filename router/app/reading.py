"""A client's request as the core is asked about it: one reading, for what is routed and for what `/route` explains.

Owns what path, headers and body mean for routing. Refuses to know who asks and what becomes of the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec

from prompts.errors import bad_value
from prompts.routing import RoutingRequest, parse_routing
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.http.request import HttpRequest
from router.index.protocol import Scope
from router.prompting.reader import PromptReader, estimate_tokens

COMPLETIONS = frozenset(("/v1/chat/completions", "/v1/completions"))
ESTIMATE_MAX = 131_072
"""Tokens, of a prompt for a model that does not tell how many it takes."""
_JSON_STARTS = (b"{", b" ", b"\n", b"\r", b"\t")
_NOTHING_READ = RoutingRequest(kind="other")

Read = tuple[Sequence[int] | None, float]
"""(the prompt's token ids, None where they cannot be had; seconds that reading it took)."""


class Asked:
    """What a request asks for."""

    __slots__ = (
        "base",
        "body_bytes",
        "deadline_ms",
        "lora",
        "model",
        "parsed",
        "priority",
        "role",
        "session",
        "worker",
    )

    def __init__(self, request: HttpRequest, parsed: RoutingRequest, model: str, base: str, lora: str | None) -> None:
        """Raises RequestError naming the header that cannot be read."""
        self.parsed = parsed
        self.model = model
        self.base = base
        self.lora = lora
        self.body_bytes = len(request.body)
        priority = _integer(request, b"x-blockcast-priority", -(2**31), 2**31 - 1)
        self.priority = parsed.priority if priority is None else priority
        self.deadline_ms = _integer(request, b"x-blockcast-deadline-ms", 1, 86_400_000)
        """How long the router may hold the request."""
        self.worker = _text(request.header(b"x-blockcast-worker"))
        self.role = _text(request.header(b"x-blockcast-role"))
        self.session = _text(request.header(b"x-session-id")) or parsed.user


class Reading:
    """From HTTP to the core's words, in two steps: what is asked for, then the prompt's tokens."""

    def __init__(self, core: RouterCore, prompts: PromptReader) -> None:
        self._core = core
        self._prompts = prompts
        self._scopes: dict[tuple[str, str | None], Scope] = {}

    def asked(self, request: HttpRequest, path: str | None = None) -> Asked:
        """What a request sent to `path` (None: told by its body) asks for. Raises RequestError."""
        completes = request.method == "POST" and (path is None or path in COMPLETIONS)
        if not completes and request.body[:1] not in _JSON_STARTS:
            parsed = _NOTHING_READ
        else:
            parsed = parse_routing(path or "", request.body)
        if not completes and parsed.kind != "other":
            parsed = msgspec.structs.replace(parsed, kind="other")
        elif path is None:
            parsed = msgspec.structs.replace(parsed, kind="completion" if parsed.messages is None else "chat")
        model, base, lora = self._model(parsed.model)
        return Asked(request, parsed, model, base, lora)

    def tokens(self, asked: Asked) -> Read | asyncio.Future[Read]:
        """The prompt's token ids: at once where that is quick, else later."""
        prompts, base = self._prompts, asked.base
        if asked.parsed.kind == "other":
            return None, 0.0
        if prompts.asks(base):
            return asyncio.ensure_future(prompts.ask(asked.parsed, base))
        tokenizer = prompts.get(base)
        if tokenizer is None or prompts.is_quick(asked.body_bytes):
            return prompts.read(asked.parsed, tokenizer)
        return prompts.run(asked.parsed, tokenizer)

    def route_request(
        self, asked: Asked, token_ids: Sequence[int] | None, request_id: str, started_s: float
    ) -> RouteRequest:
        """What the core is asked."""
        parsed = asked.parsed
        if token_ids is not None and parsed.truncate_prompt_tokens == -1:
            longest = self._longest(asked)
            if longest is not None and len(token_ids) >= longest:
                token_ids = token_ids[1 - longest :]  # as vLLM: the end of the prompt, and room for one token
        return RouteRequest(
            request_id=request_id,
            model=asked.model,
            scope=self._scope(asked.base, parsed.cache_salt, asked.lora),
            token_ids=token_ids,
            prompt_tokens=len(token_ids) if token_ids is not None else self._estimate(asked),
            stream=parsed.stream,
            priority=asked.priority,
            worker=asked.worker,
            session=asked.session,
            role=asked.role,
            deadline_s=None if asked.deadline_ms is None else started_s + asked.deadline_ms / 1000.0,
        )

    def _estimate(self, asked: Asked) -> int:
        """What a prompt that was not tokenised may come to: never more than its model takes, or an image in a body
        would price its worker out."""
        return min(estimate_tokens(asked.body_bytes), self._longest(asked) or ESTIMATE_MAX)

    def _longest(self, asked: Asked) -> int | None:
        """The longest context that a worker has for the model, in tokens."""
        served = self._core.resolve_model(asked.model)
        return served.max_model_len if served is not None else None

    def _model(self, name: str | None) -> tuple[str, str, str | None]:
        """(name, base model, LoRA) of what the client asked for; without a name, the first model there is."""
        if name is None:
            name = next((model for worker in self._core.workers.values() for model in worker.models), "")
        served = self._core.resolve_model(name)
        return (name, name, None) if served is None else (name, served.base, served.lora)

    def _scope(self, base: str, salt: str | None, lora: str | None) -> Scope:
        """Without a salt, the same object for every request of a model that somebody serves."""
        if salt is not None:
            return Scope(base, salt, lora)
        known = self._scopes.get((base, lora))
        if known is None:
            known = Scope(base, None, lora)
            if self._core.resolve_model(lora or base) is not None:
                self._scopes[base, lora] = known
        return known


def _integer(request: HttpRequest, name: bytes, low: int, high: int) -> int | None:
    value = request.header(name)
    if value is None:
        return None
    if re.fullmatch(rb"-?[0-9]{1,10}", value) is None or not low <= int(value) <= high:
        raise bad_value(name.decode(), value.decode("latin-1"), f"an integer from {low} to {high}")
    return int(value)


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value else None
