"""Which handler answers a method and a path, and how its answer reaches the client.

Owns dispatch: paths with one `*`, HEAD, 403, 404 and 405, answers that take time and streams that end when the client
leaves. Refuses to know what is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from prompts.errors import RequestError
from prompts.paths import unknown_path_error
from router.http.answers import JSON, Header, MethodNotAllowed
from router.http.connection import ClientConnection, Work
from router.http.request import HttpRequest

KEPT_SHARE: Final = 0.05
KEPT_S_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer of a handler."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[Header, ...] = ()


Stream = Callable[[ClientConnection], Work]
"""Starts an answer that goes on until the client leaves."""
Handler = Callable[[HttpRequest, str], "Answer | Coroutine[Any, Any, Answer] | Stream"]
"""(request, what stands for `*` in the path) -> answer."""


class _Pending:
    """An asynchronous handler at work for a connection."""

    def __init__(self, connection: ClientConnection, answer: Coroutine[Any, Any, Answer]) -> None:
        self._connection = connection
        self._task = asyncio.get_running_loop().create_task(answer)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            return
        connection = self._connection
        raised = task.exception()  # not `result`: what raises here would keep the task, and so itself
        try:
            if raised is None:
                answer = task.result()
                connection.respond(answer.status, answer.body, answer.content_type, answer.headers)
            elif isinstance(raised, RequestError):
                connection.respond_error(raised)
            elif isinstance(raised, Exception):
                connection.crash(raised)
        except Exception as error:  # noqa: BLE001  a boundary
            connection.crash(error)

    def client_gone(self) -> None:
        self._task.cancel()

    def client_paused(self) -> None:
        """Answers are small."""

    def client_resumed(self) -> None:
        """Answers are small."""


class KeptPage:
    """A handler of a page that anybody may ask for: made again once it is older than making it allows, so that all who
    ask for it together take no more than KEPT_SHARE of the loop; a second old at most."""

    def __init__(self, make: Callable[[], Answer], now: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._now = now
        self._page: Answer | None = None
        self._until_s = 0.0

    def __call__(self, request: HttpRequest, argument: str) -> Answer:
        started = self._now()
        if self._page is None or started >= self._until_s:
            self._page = self._make()
            now = self._now()
            self._until_s = now + min((now - started) / KEPT_SHARE, KEPT_S_MAX)
        return self._page


class Routes:
    """(method, path) -> handler."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], tuple[Handler, bool]] = {}
        """(method, path) -> (handler, whether anybody may call it)."""

    def add(self, method: str, path: str, handler: Handler, *, public: bool) -> None:
        """Serve `path`, in which the second segment may be `*`, or all that follows the second one `**`."""
        self._routes[method, path] = (handler, public)

    def is_public(self, request: HttpRequest) -> bool:
        """Whether anybody may ask; also for what is not served at all."""
        found, _ = self._find("GET" if request.method == "HEAD" else request.method, request.path)
        return found is None or found[1]

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer a request that was let in, or raise RequestError."""
        found, argument = self._find("GET" if request.method == "HEAD" else request.method, request.path)
        if found is None:
            raise self._unknown(request)
        answer = found[0](request, argument)
        if isinstance(answer, Answer):
            connection.respond(answer.status, answer.body, answer.content_type, answer.headers)
        elif asyncio.iscoroutine(answer):
            connection.work = _Pending(connection, answer)
        else:
            assert callable(answer)
            connection.work = answer(connection)

    def _find(self, method: str, path: str) -> tuple[tuple[Handler, bool] | None, str]:
        exact = self._routes.get((method, path))
        if exact is not None:
            return exact, ""
        segments = path.split("/")
        if len(segments) >= 4 and (found := self._routes.get((method, "/".join([*segments[:3], "**"])))) is not None:
            return found, unquote("/".join(segments[3:]))
        if len(segments) >= 3:
            argument = unquote(segments[2])
            segments[2] = "*"
            return self._routes.get((method, "/".join(segments))), argument
        return None, ""

    def paths(self, *, public: bool = False) -> list[str]:
        """Every path, or those that anybody may ask for."""
        return [path for (_, path), (_, everybody) in self._routes.items() if everybody or not public]

    def methods_of(self, path: str) -> set[str]:
        """The methods of a path; none where it is not served."""
        methods = {method for method, _ in self._routes if self._find(method, path)[0] is not None}
        return methods | {"HEAD"} if "GET" in methods else methods

    def _unknown(self, request: HttpRequest) -> RequestError:
        methods = self.methods_of(request.path)
        return MethodNotAllowed(request, methods) if methods else unknown_path_error(request.path, self.paths())
