"""What all handlers share: the loaded model's facts, the client of the core, counters, and who may come in.

Owns admission (model name, queue limit, draining, a dead core) and nothing of how answers look.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from engine.api.detokenizer import DetokenizerFactory
from engine.api.output_parser import resolve_formats
from engine.api.params import ModelLimits
from engine.config import ServerConfig
from engine.http.body_workers import BodyReader
from engine.http.metrics import MetricsPage, ServerMetrics
from engine.http.response_store import ResponseStore
from engine.messages import CoreInfo
from engine.process.client import EngineClient, OutputStream
from engine.types import Request
from prompts import RequestError, Tokenizer, bad_value
from prompts.errors import format_value

RETRY_AFTER_S = 1
ASLEEP = "the engine sleeps, or is given other weights"


class ServerState:
    """One serving HTTP process. Made once the core is ready."""

    def __init__(
        self, config: ServerConfig, client: EngineClient, info: CoreInfo, tokenizer: Tokenizer, folder: str
    ) -> None:
        """`folder`: of the tokenizer."""
        self.config = config
        self.client = client
        self.info = info
        self.tokenizer = tokenizer
        self.factory = DetokenizerFactory(tokenizer.hf)
        self.names = config.served_model_names or (info.model_name,)
        calls, thought = resolve_formats(config.tool_call_parser, config.reasoning_parser, tokenizer.chat_template)
        self.limits = ModelLimits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            default_sampling=info.default_sampling,
            call_format=calls,
            reasoning_format=thought,
            constraint_refusal=info.unconstrained,
            script=info.script,
        )
        self.stored = ResponseStore()
        self.reader = BodyReader(tokenizer, self.limits, folder, config.chat_template)
        self.metrics = ServerMetrics()
        self.page = MetricsPage(self.metrics, client, info, self.names[0])
        self.created = int(time.time())
        self.draining = False
        self.asleep = False
        """Or about to be, or to have other weights: nothing new is taken in."""
        self.changing = asyncio.Lock()
        self.active = 0
        """Completion requests being answered."""
        self._entering = 0
        """Requests that are being read; each counts as one sequence."""
        self._names = frozenset(self.names)
        self._api_keys = tuple(key.encode() for key in config.api_keys)
        self._admin_keys = () if config.admin_api_key is None else (config.admin_api_key.encode(),)
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_key(self, authorization: str | None, x_api_key: str | None = None) -> None:
        """Compare a bearer token, or without one Anthropic's header, with the API keys in constant time. Raises
        RequestError 401."""
        if self._api_keys and not _matches(self._api_keys, authorization, x_api_key):
            raise RequestError(
                "Incorrect or missing API key: expected the header Authorization: Bearer KEY, or x-api-key: KEY",
                param=None,
                code="invalid_api_key",
                status=401,
            )

    def check_admin_key(self, authorization: str | None, x_api_key: str | None = None) -> None:
        """Whether the operator asks. Raises RequestError: 401 for another key, 403 where only clients have keys."""
        if self._admin_keys:
            if not _matches(self._admin_keys, authorization, x_api_key):
                raise RequestError(
                    "Incorrect or missing admin key: expected the header Authorization: Bearer KEY with the key of "
                    "--admin-api-key",
                    param=None,
                    code="invalid_api_key",
                    status=401,
                )
        elif self._api_keys:
            raise RequestError(
                "an operator's route, which no client's key opens: start the engine with --admin-api-key",
                param=None,
                code="forbidden",
                status=403,
            )

    def check_model(self, model: str | None) -> None:
        """None is the served model. Raises RequestError 404 for another."""
        if model is not None and model not in self._names:
            error = bad_value("model", model, f"one of {', '.join(self.names)}")
            error.status, error.code = 404, "model_not_found"
            raise error

    @contextmanager
    def admission(self) -> Iterator[None]:
        """A place for a request that is being read. Raises RequestError 503 or 429."""
        self._admit(1)
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Let the sequences of an admitted request in, all or none. Raises RequestError 503, 429 or 400."""
        limit = self.config.max_queue
        if limit and len(requests) > limit:
            raise RequestError(f"n: {len(requests)} sequences, expected at most {limit} (--max-queue)", param="n")
        self._admit(len(requests) - 1)
        return self.client.submit(requests)

    def _admit(self, more: int) -> None:
        if self.client.dead is not None:
            raise not_running(self.client.dead)
        if self.draining:
            raise unavailable("the server is shutting down")
        if self.asleep:
            raise unavailable(ASLEEP)
        limit, inside = self.config.max_queue, self.client.in_flight + self._entering
        if limit and inside + more > limit:
            raise RequestError(
                f"the engine is full: {inside} sequences are running or waiting, at most {limit} may",
                param=None,
                code="queue_full",
                status=429,
            )

    def enter(self) -> None:
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no completion request is being answered."""
        await self._idle.wait()

    def unique_id(self) -> str:
        """Names a request's sequences in the core."""
        return format(next(self._numbers), "x")

    async def body(self, request: web.Request) -> bytes:
        """The request's body. Raises RequestError: 408 where it takes too long, 400 where the client leaves before.

        A compressed body is refused: a few bytes may stand for gigabytes.
        """
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() not in ("", "identity"):
            raise RequestError(f"Content-Encoding: got {format_value(encoding)}, expected none", param=None, status=415)
        if not request.can_read_body or request.content.is_eof():
            return await request.read()
        try:
            return await asyncio.wait_for(request.read(), self.config.body_timeout_s)
        except asyncio.TimeoutError:
            raise RequestError(
                f"the body did not arrive within {self.config.body_timeout_s:.0f} s",
                param=None,
                code="request_timeout",
                status=408,
            ) from None
        except ConnectionError:
            raise RequestError("the client left before its request was complete", param=None) from None

    def close(self) -> None:
        self.reader.close()


def _matches(keys: Sequence[bytes], authorization: str | None, x_api_key: str | None) -> bool:
    scheme, _, given = (authorization or "").partition(" ")
    token = (given if scheme.lower() == "bearer" else x_api_key or "").strip().encode()
    matches = [hmac.compare_digest(token, key) for key in keys]  # all, so that time tells nothing
    return any(matches)


def unavailable(message: str) -> RequestError:
    return RequestError(message, param=None, code="unavailable", status=503)


def not_running(reason: object) -> RequestError:
    return unavailable(f"the engine is not running: {reason}")


def random_id() -> str:
    return uuid.uuid4().hex
