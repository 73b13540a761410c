"""Token ids from a worker: `POST /tokenize`, as vLLM and our engine answer it, for models whose files are not here.

It costs a round trip with the whole prompt, and the worker tokenises the prompt twice: the last resort before routing
by load alone. Bounded in time and memory; a fault of a worker never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Protocol

import aiohttp
import msgspec

from router.http_client import FetchError, fetch

log = logging.getLogger("router")

RESPONSE_S_MAX = 2.0
RESPONSE_BYTES_MAX = 16 << 20
"""A million ids of ten digits and more."""
RESPONSE_BYTES_PER_BYTE = 16
"""Bytes of a response for each byte of a request: a prompt has no more tokens than bytes, besides its template's."""
TEMPLATE_BYTES = 1 << 16
"""Bytes of a prompt that a template may add."""


class _TokenizeResponse(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


class RemoteWorker(Protocol):
    """A worker that may be asked for token ids."""

    @property
    def url(self) -> str: ...
    @property
    def sends_api_key(self) -> bool:
        """Whether requests to this worker may have the workers' API key."""


class RemoteTokenizer:
    """Has prompts tokenised by workers."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> None:
        """`headers` are sent to workers that may have the workers' API key."""
        self._session = session
        self._headers = headers or {}
        self._urls_by_model: dict[str, list[str]] = {}
        """Base model -> URLs of the workers that tokenised the text of `probe`."""
        self._urls_without_key: set[str] = set()
        """URLs of workers that must not have the workers' API key."""
        self._round_robin = count()

    def has_worker(self, model: str) -> bool:
        """Whether a worker tokenises for a base model."""
        return bool(self._urls_by_model.get(model))

    async def probe(self, model: str, worker: RemoteWorker) -> bool:
        """Find out whether a worker tokenises for a base model."""
        request_body = msgspec.json.encode({"model": model, "prompt": "a"})
        token_ids = await self.tokenize_at(worker, request_body)
        urls = self._urls_by_model.setdefault(model, [])
        if token_ids and worker.url not in urls:
            urls.append(worker.url)
        return bool(token_ids)

    async def tokenize_at(self, worker: RemoteWorker, request_body: bytes) -> list[int] | None:
        """Return the token ids from one worker; None if it has none."""
        if worker.sends_api_key:
            self._urls_without_key.discard(worker.url)
        else:
            self._urls_without_key.add(worker.url)
        return await self._post(worker.url, request_body)

    async def tokenize(self, request_body: bytes | None, model: str) -> Sequence[int] | None:
        """Return the token ids for a body of `build_tokenize_request` from the next worker of a base model."""
        urls = self._urls_by_model.get(model)
        if not urls or request_body is None:
            return None
        return await self._post(urls[next(self._round_robin) % len(urls)], request_body)

    def remove_worker(self, url: str) -> None:
        """Ask this worker no more."""
        self._urls_without_key.discard(url)
        for urls in self._urls_by_model.values():
            if url in urls:
                urls.remove(url)

    async def _post(self, url: str, request_body: bytes) -> list[int] | None:
        key_headers = {} if url in self._urls_without_key else self._headers
        expected_bytes = RESPONSE_BYTES_PER_BYTE * (len(request_body) + TEMPLATE_BYTES)
        try:
            status, response_body = await fetch(
                self._session,
                f"{url}/tokenize",
                method="POST",
                headers={**key_headers, "Content-Type": "application/json"},
                data=request_body,
                seconds=RESPONSE_S_MAX,
                bytes_max=min(RESPONSE_BYTES_MAX, expected_bytes),
            )
            return msgspec.json.decode(response_body, type=_TokenizeResponse).tokens if status == 200 else None
        except (FetchError, ValueError, RecursionError) as error:
            log.debug("%s/tokenize: %s", url, error)
            return None
