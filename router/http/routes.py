"""Routes: which handler answers a method and a path, and how its answer reaches the client.

Paths may have one `*` or end with `**`. Covers HEAD, 404, 405, and asynchronous handlers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from prompts.errors import RequestError
from prompts.unknown_paths import make_unknown_path_error
from router.http.connection import ClientConnection, TaskResponder
from router.http.local_replies import JSON, Header, make_method_error
from router.http.request import HttpRequest

RENDER_SHARE: Final = 0.05
"""Largest share of the time in which a `CachedPage` is rendered."""
MAX_PAGE_CACHE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Response:
    """Complete answer of a handler."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[Header, ...] = ()


Handler = Callable[[HttpRequest, str], "Response | Coroutine[Any, Any, Response]"]
"""Answers a request; the text is the part of the path that `*` stands for."""


class _Route(NamedTuple):
    handler: Handler
    is_public: bool
    """Whether anybody may send requests."""


async def _respond_later(connection: ClientConnection, answer: Coroutine[Any, Any, Response]) -> None:
    """Await an asynchronous handler, and answer with its result or its exception."""
    try:
        response = await answer
        connection.respond(response.status, response.body, response.content_type, response.headers)
    except RequestError as error:
        connection.respond_error(error)
    except Exception as error:  # noqa: BLE001  a fault in one handler must not stop the others
        connection.crash(error)


class CachedPage:
    """Handler of a page that takes long to render, such as the metrics: requests share a cached page for a while.

    A page is cached for so long that rendering takes at most RENDER_SHARE of the time of the event loop, however many
    requests there are, but not longer than MAX_PAGE_CACHE_S.
    """

    def __init__(self, render: Callable[[], Response], clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._cached_page: Response | None = None
        self._expires_s = 0.0

    def __call__(self, request: HttpRequest, argument: str) -> Response:
        """Return the page. All requests get the same one, whatever they ask."""
        started_s = self._clock()
        if self._cached_page is None or started_s >= self._expires_s:
            self._cached_page = self._render()
            ended_s = self._clock()
            render_s = ended_s - started_s
            self._expires_s = ended_s + min(render_s / RENDER_SHARE, MAX_PAGE_CACHE_S)
        return self._cached_page


class Routes:
    """The routes that a process answers itself, by method and path."""

    def __init__(self) -> None:
        self._route_by_method_and_path: dict[tuple[str, str], _Route] = {}

    def add(self, method: str, path: str, handler: Handler, *, public: bool) -> None:
        """Serve `path`. Its second segment may be `*`, or its rest after that segment `**`."""
        self._route_by_method_and_path[method, path] = _Route(handler, public)

    def is_public(self, request: HttpRequest) -> bool:
        """Return whether anybody may send the request; True also for a path that is not served."""
        route, _ = self._find_route("GET" if request.method == "HEAD" else request.method, request.path)
        return route is None or route.is_public

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer an admitted request, or raise RequestError."""
        route, argument = self._find_route("GET" if request.method == "HEAD" else request.method, request.path)
        if route is None:
            raise self._make_route_error(request)
        response = route.handler(request, argument)
        if isinstance(response, Response):
            connection.respond(response.status, response.body, response.content_type, response.headers)
        else:
            connection.responder = TaskResponder(_respond_later(connection, response))

    def _find_route(self, method: str, path: str) -> tuple[_Route | None, str]:
        """Return the route of a path, or None, and the part of the path that `*` or `**` stands for.

        The path `/a/b/c` matches the first of these patterns that has a route: `/a/b/c`, `/a/b/**`, `/a/*/c`.
        """
        segments = path.split("/")  # the first one is empty
        patterns_and_arguments = [(path, "")]
        if len(segments) > 3:
            rest_pattern = "/".join([*segments[:3], "**"])
            patterns_and_arguments.append((rest_pattern, "/".join(segments[3:])))
        if len(segments) > 2:
            segment_pattern = "/".join([*segments[:2], "*", *segments[3:]])
            patterns_and_arguments.append((segment_pattern, segments[2]))
        for pattern, argument in patterns_and_arguments:
            route = self._route_by_method_and_path.get((method, pattern))
            if route is not None:
                return route, unquote(argument)
        return None, ""

    def list_paths(self, *, public: bool = False) -> list[str]:
        """Return all paths, or those that anybody may request."""
        return [path for (_, path), route in self._route_by_method_and_path.items() if route.is_public or not public]

    def list_methods(self, path: str) -> set[str]:
        """Return the methods of a path; empty if it is not served."""
        methods = {
            method for method, _ in self._route_by_method_and_path if self._find_route(method, path)[0] is not None
        }
        return methods | {"HEAD"} if "GET" in methods else methods

    def _make_route_error(self, request: HttpRequest) -> RequestError:
        methods = self.list_methods(request.path)
        if methods:
            return make_method_error(request, methods)
        return make_unknown_path_error(request.path, self.list_paths())
