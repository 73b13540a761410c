"""The router's HTTP application: paths, their methods, and the tenant of each request.

Under `/v1/`, and for `/tokenize`, requests go to workers (router/app/dispatch.py). What looks at or changes the router
itself is in router/admin.
"""

from __future__ import annotations

from typing import Final

from prompts.unknown_paths import make_unknown_path_error
from router.app.api_keys import ApiKeys, Guard
from router.app.dispatch import RequestDispatcher
from router.edge.config import EdgeConfig
from router.edge.exchange import Exchange
from router.edge.request_reader import UNVERSIONED_PATHS, is_worker_path
from router.http.connection import ClientConnection
from router.http.cors import CorsPolicy
from router.http.fair_scheduler import REQUESTS_PER_ITERATION, FairScheduler
from router.http.local_replies import make_method_error, make_upgrade_error
from router.http.request import HttpRequest
from router.http.routes import Routes

MethodsByPath = dict[str, tuple[str, ...]]
"""Methods of each path. `*` at the end of a path: any end."""
FORWARDED_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Methods that --pass-route forwards. Other methods are about this server itself."""
LOCAL_PATHS: MethodsByPath = {"/v1/models": ("GET", "HEAD")}
MODEL_PATH_PREFIX: Final = "/v1/models/"
"""Prefix of a model's path: its name, which may have slashes, follows."""
FORWARDED_PATHS: MethodsByPath = {
    **dict.fromkeys((
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations", "/v1/decisions",
        "/v1/systemone", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
        "/v1/images/generations", *UNVERSIONED_PATHS,
    ), ("POST",)),
    "/v1/responses/*": ("DELETE", "GET", "HEAD", "POST"),
}  # fmt: skip
"""Forwarded paths and their methods. Other routes under /v1 change a worker, or use data that only one worker has."""


def list_forwarded_paths(config: EdgeConfig) -> MethodsByPath:
    """Return the paths that are forwarded to workers, with those of --pass-route."""
    return FORWARDED_PATHS | dict.fromkeys(config.pass_routes, FORWARDED_METHODS)


class RouterApp:
    """HTTP application of one address: forwards requests to workers, or passes them to the routes of the router itself.

    Needs a running event loop.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, forwarded_paths: MethodsByPath, local_routes: Routes, guard: Guard
    ) -> None:
        """Make the application. `dispatcher` takes the requests for workers, and `local_routes` answer the others.

        `guard` checks requests for routes of the operator.
        """
        proxy, config = dispatcher.proxy, dispatcher.proxy.config
        self.dispatcher = dispatcher
        self._local_routes = local_routes

        # Attributes that the HTTP connections use.
        self.limits = config.limits
        self.budget = proxy.budget
        self.metrics = proxy.metrics
        self.scheduler = FairScheduler()
        self.arrival_scheduler = FairScheduler(REQUESTS_PER_ITERATION)
        self.is_ending = False
        self.now = proxy.now

        # What requests are checked against.
        self._guard = guard
        self._keys = ApiKeys(config.api_keys)
        self._cors = CorsPolicy(config.cors_origins) if config.cors_origins else None
        self._methods_by_path = LOCAL_PATHS | forwarded_paths
        """Methods of each path under `/v1/`, and of each other path that is forwarded."""

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Return the tenant of a request, by its head. Raises RequestError if the request is refused."""
        path = request.path
        if is_worker_path(path):
            return self.admit_worker_request(connection, request)
        if not self._local_routes.list_methods(path):
            raise make_unknown_path_error(path, self._list_paths())
        if not self._local_routes.is_public(request):
            self._guard(connection, request)
        return connection.peer

    def admit_worker_request(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Check the head of a request for a worker, and return its tenant: the name of its API key, or its address.

        Raises RequestError for a wrong key, an unknown path, an upgrade, or a method that the path does not have.
        """
        path = request.path
        is_preflight = request.method == "OPTIONS"  # browsers send such a request without the API key
        tenant = connection.peer if is_preflight else self._keys.find_tenant(connection, request)
        methods = self._get_methods(path)
        if methods is None:
            reason = "this path is not forwarded to workers; --pass-route forwards it"
            raise make_unknown_path_error(path, self._list_paths(), reason=reason)
        if b"websocket" in request.headers.lines_by_name.get(b"upgrade", b"").lower():
            raise make_upgrade_error(path)
        if request.method not in methods and not is_preflight:
            raise make_method_error(request, methods)
        return tenant

    def _list_paths(self) -> list[str]:
        return [*self._methods_by_path, *self._local_routes.list_paths()]

    def _get_methods(self, path: str) -> tuple[str, ...] | None:
        """Return the methods of a path for workers; None if the path is not served."""
        if path.startswith(MODEL_PATH_PREFIX) and ".." not in path:
            return LOCAL_PATHS["/v1/models"]
        methods = self._methods_by_path.get(path)
        if methods is not None or ".." in path or "%" in path:
            return methods
        for pattern, pattern_methods in self._methods_by_path.items():
            if pattern.endswith("/*") and path.startswith(pattern[:-1]) and path != pattern[:-1]:
                return pattern_methods
        return None

    def build_cors_headers(self, request: HttpRequest) -> bytes:
        """Return the CORS lines of any answer to a request: none on admin routes, which serve their own page only."""
        if self._cors is None or not is_worker_path(request.path):
            return b""
        return self._cors.build_header_lines(request, self._get_methods(request.path) or ())

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer a request, now or later. Raises RequestError."""
        if is_worker_path(request.path):
            self.handle_worker_request(connection, request)
        else:
            self._local_routes.handle(connection, request)

    def handle_worker_request(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Forward a request to a worker, unless the router itself has the answer. Raises RequestError."""
        path = request.path
        if request.method == "OPTIONS":
            allowed_methods = ", ".join(sorted(["OPTIONS", *(self._get_methods(path) or ())]))
            connection.respond(200, b"", headers=[(b"allow", allowed_methods.encode())])
        elif path == "/v1/models" or path.startswith(MODEL_PATH_PREFIX):
            self._local_routes.handle(connection, request)
        else:
            self.dispatcher.dispatch(connection, request, Exchange)
