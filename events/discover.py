"""Asks a worker over HTTP where its events are, with the standard library only."""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import urlsplit

from events.errors import DecodeError
from events.sources import EventSource, default_sources, parse_sources

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Workers are neighbours: a proxy of the environment is not for them."""


def discover(worker_url: str, timeout_s: float = 5.0) -> list[EventSource]:
    """The event sources of the worker at `worker_url`; vLLM's default address if it does not know the path.

    Raises DecodeError if the worker answers something else, OSError if it cannot be reached.
    """
    if urlsplit(worker_url).scheme not in ("http", "https"):
        raise DecodeError(f"worker {worker_url!r}: expected an http:// or https:// URL")
    try:
        with _DIRECT.open(worker_url.rstrip("/") + "/kv_event_sources", timeout=timeout_s) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 405):
                return default_sources(urlsplit(worker_url).hostname or "127.0.0.1")
            raise DecodeError(f"{error.url} answered {error.code} {error.reason}") from error
    return parse_sources(body, worker_url)
