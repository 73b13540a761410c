"""Token ids from a worker: `POST /tokenize`, as vLLM and our engine answer it, for models whose files are not here.

A round trip with the whole prompt, and the worker tokenises it twice: the last resort before routing by load alone.
Bounded in time; a worker's fault never raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Annotated, Protocol

import aiohttp
import msgspec

from router.http_client import FetchError, fetch

log = logging.getLogger("router")

ANSWER_S_MAX = 2.0
ANSWER_BYTES_MAX = 16 << 20
"""A million ids of ten digits and more."""
ID_BYTES, TEMPLATE_BYTES = 16, 1 << 16
"""A prompt has no more tokens than bytes, its template's apart: an answer of more would cost more than was sent."""


class _Answer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


class RemoteWorker(Protocol):
    """A worker, as far as asking it goes."""

    @property
    def url(self) -> str: ...
    @property
    def sends_api_key(self) -> bool:
        """It may be sent the workers' API key."""


class RemoteTokenizer:
    """Asks workers. `urls[model]` are those that answered before."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> None:
        self._session = session
        self._headers = headers or {}
        self._urls: dict[str, list[str]] = {}
        self._urls_without_key: set[str] = set()
        self._requests = 0

    def has_worker(self, model: str) -> bool:
        """Whether some worker tokenises for this base model."""
        return bool(self._urls.get(model))

    async def probe(self, model: str, url: str, *, sends_api_key: bool) -> bool:
        """Find out whether a worker tokenises. `sends_api_key`: it may be sent the workers' API key."""
        ids = await self.tokenize_at(
            url, msgspec.json.encode({"model": model, "prompt": "a"}), sends_api_key=sends_api_key
        )
        urls = self._urls.setdefault(model, [])
        if ids and url not in urls:
            urls.append(url)
        return bool(ids)

    async def tokenize_at(self, url: str, question: bytes, *, sends_api_key: bool) -> list[int] | None:
        """Return the token ids that one worker answers; None where it does not."""
        (self._urls_without_key.discard if sends_api_key else self._urls_without_key.add)(url)
        return (await self._post(url, question))[0]

    def forget(self, url: str) -> None:
        """The worker is gone."""
        self._urls_without_key.discard(url)
        for urls in self._urls.values():
            if url in urls:
                urls.remove(url)

    async def tokenize(self, question: bytes | None, model: str) -> tuple[Sequence[int] | None, float]:
        """Return the token ids (None: no answer) for a request of `build_tokenize_request`, and the seconds it took."""
        urls = self._urls.get(model)
        if not urls or question is None:
            return None, 0.0
        self._requests += 1
        return await self._post(urls[self._requests % len(urls)], question)

    async def _post(self, url: str, question: bytes) -> tuple[list[int] | None, float]:
        started_s = time.perf_counter()
        headers = {**({} if url in self._urls_without_key else self._headers), "Content-Type": "application/json"}
        ids = None
        try:
            status, answer = await fetch(
                self._session, f"{url}/tokenize", method="POST", headers=headers, data=question,
                seconds=ANSWER_S_MAX, bytes_max=min(ANSWER_BYTES_MAX, ID_BYTES * (len(question) + TEMPLATE_BYTES)),
            )  # fmt: skip
            if status == 200:
                ids = msgspec.json.decode(answer, type=_Answer).tokens
        except (FetchError, ValueError, RecursionError) as error:
            log.debug("%s/tokenize: %s", url, error)
        return ids, time.perf_counter() - started_s
