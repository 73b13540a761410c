"""Token ids asked of a worker: `POST /tokenize`, as vLLM and our engine answer it, for models whose files are not here.

A round trip with the whole prompt, and the worker tokenises it twice: the last resort before routing by load alone.
Bounded in time; a worker's fault never raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from prompts.routing import RoutingRequest

log = logging.getLogger("router")

ANSWER_S_MAX = 2.0
CHAT_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


class _Answer(msgspec.Struct):
    tokens: list[int]


class RemoteTokenizer:
    """Asks workers. `urls[model]` are those that answered before."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> None:
        self._session = session
        self._headers = headers or {}
        self._urls: dict[str, list[str]] = {}
        self._turn = 0

    def knows(self, model: str) -> bool:
        """Some worker tokenises for this base model."""
        return bool(self._urls.get(model))

    async def learn(self, model: str, url: str) -> bool:
        """Find out whether a worker tokenises; True where it does."""
        ids, _ = await self._ask(url, {"model": model, "prompt": "a"})
        known = self._urls.setdefault(model, [])
        if ids and url not in known:
            known.append(url)
        return bool(ids)

    def forget(self, url: str) -> None:
        """The worker is gone."""
        for urls in self._urls.values():
            if url in urls:
                urls.remove(url)

    async def read(self, parsed: RoutingRequest, model: str) -> tuple[Sequence[int] | None, float]:
        """(token ids of the prompt to route on or None, seconds it took)."""
        urls = self._urls.get(model)
        body = request_body(parsed, model)
        if not urls or body is None:
            return None, 0.0
        self._turn += 1
        return await self._ask(urls[self._turn % len(urls)], body)

    async def _ask(self, url: str, body: dict[str, Any]) -> tuple[list[int] | None, float]:
        started = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        headers = {**self._headers, "Content-Type": "application/json"}
        ids = None
        try:
            data = msgspec.json.encode(body)
            async with self._session.post(f"{url}/tokenize", data=data, headers=headers, timeout=timeout) as answer:
                content = await answer.read()
                if answer.status == 200:
                    ids = msgspec.json.decode(content, type=_Answer).tokens
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, msgspec.DecodeError) as error:
            log.debug("%s/tokenize: %s", url, error or type(error).__name__)
        return ids, time.perf_counter() - started


def request_body(parsed: RoutingRequest, model: str) -> dict[str, Any] | None:
    """What to ask for a request; None where it holds no text to tokenise, or what cannot be asked (images)."""
    if parsed.scores_prompt or parsed.has_media:
        return None
    if parsed.kind == "chat":
        if parsed.messages is None:
            return None
        given = {name: getattr(parsed, name) for name in CHAT_FIELDS}
        return {"model": model, **{name: value for name, value in given.items() if value is not None}}
    prompt = parsed.prompt
    first = prompt if isinstance(prompt, str) else prompt[0] if prompt else None
    if not isinstance(first, str):
        return None
    return {"model": model, "prompt": first, "add_special_tokens": parsed.add_special_tokens is not False}
