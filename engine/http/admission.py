"""Admission of requests to the engine: refused while it is full (`--max-queue`), ends, sleeps, or has died."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.process.client import EngineClient, EngineDeadError, OutputStream
from engine.types import Request
from prompts import RequestError
from prompts.errors import field_error

RETRY_AFTER_S = 1
"""Value of the Retry-After header."""
IDLE_POLL_S = 0.02
"""Time between two looks at whether the last request has been answered."""


class Admission:
    """Counts the requests in progress, and decides whether new ones are admitted."""

    def __init__(self, client: EngineClient, queue_max: int) -> None:
        """Begin without requests. `queue_max`: most sequences that run or wait; 0: no limit."""
        self._client = client
        self._queue_max = queue_max
        self.active_request_count = 0
        """Generating requests that are being answered."""
        self._reading_request_count = 0
        """Number of bodies that are being parsed. Each counts as one waiting sequence, until its number is known."""
        self.is_draining = False
        self.is_asleep = False
        """Whether no request is admitted because the engine sleeps, or is about to, or gets other weights."""

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Count a request as waiting while its body is parsed, in a `with` block. Raises RequestError 503 or 429."""
        self._check_capacity(1)
        self._reading_request_count += 1
        try:
            yield
        finally:
            self._reading_request_count -= 1

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Submit all sequences of a request, or none of them. Raises RequestError 503, 429 or 400."""
        limit = self._queue_max
        if limit and len(requests) > limit:
            raise field_error("n", f"{len(requests)} sequences, expected at most {limit} (--max-queue)")
        self._check_capacity(len(requests) - 1)
        return self._client.submit(requests)

    def check_available(self) -> None:
        """Raise RequestError 503 while no new request can be admitted."""
        self.check_running()
        if self.is_draining:
            raise make_unavailable_error("the server is shutting down")
        if self.is_asleep:
            raise make_unavailable_error("the engine sleeps, or is given other weights")

    def check_running(self) -> None:
        """Raise RequestError 503 if the core has died."""
        if self._client.death_reason is not None:
            raise EngineDeadError(self._client.death_reason)

    def _check_capacity(self, additional_sequences: int) -> None:
        """Raise RequestError 429 if `--max-queue` forbids so many more sequences, and 503 if none is admitted."""
        self.check_available()
        limit = self._queue_max
        current_sequences = self._client.in_flight_count + self._reading_request_count
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


def make_unavailable_error(message: str) -> RequestError:
    return RequestError(message, code="unavailable", status=503)
