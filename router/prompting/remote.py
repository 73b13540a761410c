"""Token ids asked of a worker: `POST /tokenize`, as vLLM and our engine answer it, for models whose files are not here.

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
        self._unkeyed: set[str] = set()
        self._turn = 0

    def knows(self, model: str) -> bool:
        """Some worker tokenises for this base model."""
        return bool(self._urls.get(model))

    async def learn(self, model: str, url: str, *, keyed: bool) -> bool:
        """Find out whether a worker tokenises; True where it does. `keyed`: it may be sent the workers' API key."""
        ids = await self.of(url, msgspec.json.encode({"model": model, "prompt": "a"}), keyed=keyed)
        known = self._urls.setdefault(model, [])
        if ids and url not in known:
            known.append(url)
        return bool(ids)

    async def of(self, url: str, question: bytes, *, keyed: bool) -> list[int] | None:
        """What one worker answers; None where it does not."""
        (self._unkeyed.discard if keyed else self._unkeyed.add)(url)
        return (await self._ask(url, question))[0]

    def forget(self, url: str) -> None:
        """The worker is gone."""
        self._unkeyed.discard(url)
        for urls in self._urls.values():
            if url in urls:
                urls.remove(url)

    async def put(self, question: bytes | None, model: str) -> tuple[Sequence[int] | None, float]:
        """(token ids of the prompt or None, seconds it took), for what router/prompting/encode.py would ask."""
        urls = self._urls.get(model)
        if not urls or question is None:
            return None, 0.0
        self._turn += 1
        return await self._ask(urls[self._turn % len(urls)], question)

    async def _ask(self, url: str, question: bytes) -> tuple[list[int] | None, float]:
        started = time.perf_counter()
        headers = {**({} if url in self._unkeyed else self._headers), "Content-Type": "application/json"}
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
        return ids, time.perf_counter() - started
