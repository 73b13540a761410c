"""State that all handlers share: facts of the loaded model, the client of the core, counters and admission."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from engine.config import ServerConfig
from engine.core_messages import CoreInfo
from engine.http.api_keys import ApiKeys
from engine.http.body_workers import BodyReader
from engine.http.metrics import ServerMetrics
from engine.http.response_store import ResponseStore
from engine.output.detokenizer import DetokenizerFactory
from engine.output.formats import resolve_formats
from engine.process.client import EngineClient, EngineDeadError, OutputStream
from engine.protocol.params import ModelLimits
from engine.types import KVSource, Request
from prompts import RequestError, Tokenizer, bad_value
from prompts.errors import field_error
from prompts.kv_source import RemoteKVSource

RETRY_AFTER_S = 1
"""Value of the Retry-After header."""
IDLE_POLL_S = 0.02
"""Time between two looks at whether the last request has been answered."""


class ServerState:
    """Facts of the model, the client of the core, counters and admission, which all handlers share."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        info: CoreInfo,
        tokenizer: Tokenizer,
        folder: str,
        *,
        fleet_key: bytes | None = None,
    ) -> None:
        """Collect what the HTTP handlers share, for a model that the engine core (`client`) has loaded.

        `folder`: folder of the tokenizer. `fleet_key`: key for block transfers between engines; None: off.
        """
        self.config = config
        self.client = client
        self.api_keys = ApiKeys(config.api_keys, config.admin_api_key)
        self._fleet_key = fleet_key

        # The model, and what reads and writes its text.
        self.info = info
        self.model_names = config.served_model_names or (info.model_name,)
        self.limits = _make_limits(config, info, tokenizer, has_transfers=fleet_key is not None)
        self.reader = BodyReader(tokenizer, self.limits, folder, config.chat_template)
        self.detokenizer_factory = DetokenizerFactory(tokenizer.hf_tokenizer)

        self.response_store = ResponseStore()
        self.metrics = ServerMetrics()
        self.start_time_s = int(time.time())

        # Requests in progress, and whether new ones are admitted.
        self.active_request_count = 0
        """Generating requests that are being answered."""
        self._reading_request_count = 0
        """Number of bodies that are being parsed. Each counts as one waiting sequence, until its number is known."""
        self._request_numbers = itertools.count()
        self.is_draining = False
        self.is_asleep = False
        """Whether no request is admitted because the engine sleeps, or is about to, or gets other weights."""
        self.weights_change_lock = asyncio.Lock()

    def check_model(self, model: str | None) -> None:
        """Raise RequestError 404 for a model that is not served. None is the served model."""
        if model is not None and model not in self.model_names:
            error = bad_value("model", model, f"one of {', '.join(self.model_names)}")
            error.status, error.code = 404, "model_not_found"
            raise error

    def get_tenant(self, request: web.Request) -> str:
        """Return the name under which the client of a request takes turns with other clients."""
        return self.api_keys.get_tenant(request.headers, request.remote)

    @contextmanager
    def reserve_admission(self) -> Iterator[None]:
        """Count a request as waiting while its body is parsed, in a `with` block. Raises RequestError 503 or 429."""
        self._check_capacity(1)
        self._reading_request_count += 1
        try:
            yield
        finally:
            self._reading_request_count -= 1

    def check_kv_source(self, remote_source: RemoteKVSource | None) -> KVSource | None:
        """Return the peer that a body names as the source of cached blocks. Raises RequestError 403."""
        if remote_source is None or self._fleet_key is None:
            return None
        remote_source.check_signature(self._fleet_key)
        return KVSource(remote_source.remote_host, remote_source.remote_port, remote_source.cached_tokens)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Submit all sequences of a request, or none of them. Raises RequestError 503, 429 or 400."""
        limit = self.config.max_queue
        if limit and len(requests) > limit:
            raise field_error("n", f"{len(requests)} sequences, expected at most {limit} (--max-queue)")
        self._check_capacity(len(requests) - 1)
        return self.client.submit(requests)

    def check_available(self) -> None:
        """Raise RequestError 503 while no new request can be admitted."""
        self.check_running()
        if self.is_draining:
            raise make_unavailable_error("the server is shutting down")
        if self.is_asleep:
            raise make_unavailable_error("the engine sleeps, or is given other weights")

    def check_running(self) -> None:
        """Raise RequestError 503 if the core has died."""
        if self.client.death_reason is not None:
            raise EngineDeadError(self.client.death_reason)

    def _check_capacity(self, additional_sequences: int) -> None:
        """Raise RequestError 429 if `--max-queue` forbids so many more sequences, and 503 if none is admitted."""
        self.check_available()
        limit = self.config.max_queue
        current_sequences = self.client.in_flight_count + self._reading_request_count
        if limit and current_sequences + additional_sequences > limit:
            raise RequestError(
                f"the engine is full: {current_sequences} sequences are running or waiting, at most {limit} may",
                code="queue_full",
                status=429,
            )

    async def wait_until_idle(self) -> None:
        """Wait until no generating request is being answered."""
        while self.active_request_count:
            await asyncio.sleep(IDLE_POLL_S)

    def make_request_prefix(self) -> str:
        """Return a new prefix for the ids of a request's sequences in the core, such as "1f" for "1f-0" and "1f-1"."""
        return format(next(self._request_numbers), "x")


STATE = web.AppKey("state", ServerState)
"""Key of the state in the HTTP application."""


def _make_limits(config: ServerConfig, info: CoreInfo, tokenizer: Tokenizer, *, has_transfers: bool) -> ModelLimits:
    """Return the properties of the loaded model by which request bodies are validated, such as its context length."""
    call_format, reasoning_format = resolve_formats(
        config.tool_call_parser, config.reasoning_parser, tokenizer.chat_template
    )
    return ModelLimits(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        default_sampling=info.default_sampling,
        call_format=call_format,
        reasoning_format=reasoning_format,
        constraint_refusal=info.no_constraint_reason,
        script=info.script,
        has_transfers=has_transfers,
    )


def make_unavailable_error(message: str) -> RequestError:
    return RequestError(message, code="unavailable", status=503)
