"""State that all handlers share: facts of the loaded model, the client of the core, counters."""

from __future__ import annotations

import asyncio
import itertools
import time

from aiohttp import web

from engine.config import ServerConfig
from engine.core_messages import CoreInfo
from engine.http.admission import Admission
from engine.http.api_keys import ApiKeys
from engine.http.body_workers import BodyReader
from engine.http.metrics import ServerMetrics
from engine.http.response_store import ResponseStore
from engine.output.detokenizer import DetokenizerFactory
from engine.output.formats import resolve_formats
from engine.process.client import EngineClient
from engine.protocol.params import ModelLimits
from engine.types import KVSource
from prompts import Tokenizer, bad_value
from prompts.kv_source import RemoteKVSource


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

        self.admission = Admission(client, config.max_queue)
        self._request_numbers = itertools.count()
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

    def check_kv_source(self, remote_source: RemoteKVSource | None) -> KVSource | None:
        """Return the peer that a body names as the source of cached blocks. Raises RequestError 403."""
        if remote_source is None or self._fleet_key is None:
            return None
        remote_source.check_signature(self._fleet_key)
        return KVSource(remote_source.remote_host, remote_source.remote_port, remote_source.cached_tokens)

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
