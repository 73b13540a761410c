"""The router's HTTP application: paths, their methods, and the tenant of each request.

Under `/v1/`, and for `/tokenize`, requests go to workers (router/app/dispatch.py). What looks at or changes the router
itself is in router/admin.
"""

from __future__ import annotations

from typing import Final

from prompts.paths import make_unknown_path_error
from router.app.dispatch import RequestDispatcher
from router.app.guard import ApiKeys, Guard
from router.edge.config import EdgeConfig
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.edge.request_reader import TOKENIZE_PATHS, is_worker_path
from router.http.connection import ClientConnection
from router.http.cors import CorsPolicy
from router.http.fair_scheduler import REQUESTS_PER_ITERATION, FairScheduler
from router.http.local_replies import MethodNotAllowed, UpgradeRequired
from router.http.request import HttpRequest
from router.http.routes import Routes

FORWARDED_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Methods that --pass-route forwards. Other methods are about this server itself."""
LOCAL_PATHS = {"/v1/models": ("GET", "HEAD")}
MODEL_PATH_PREFIX: Final = "/v1/models/"
"""Prefix of a model's path: its name, which may have slashes, follows."""
FORWARDED_PATHS = {
    **dict.fromkeys((
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations", *TOKENIZE_PATHS,
    ), ("POST",)),
    "/v1/responses/*": ("DELETE", "GET", "HEAD", "POST"),
}  # fmt: skip
"""Forwarded paths and their methods. Other routes under /v1 change a worker, or use data that only one worker has."""


class WorkerRoutes:
    """Routes of requests that are forwarded to workers."""

    def __init__(
        self, dispatcher: RequestDispatcher, local_routes: Routes, config: EdgeConfig, *, is_enabled: bool = True
    ) -> None:
        """`local_routes` answers the list of models. `is_enabled`: False if nothing else under /v1/ is served."""
        self.dispatcher = dispatcher
        self._local_routes = local_routes
        self._keys = ApiKeys(config.api_keys)
        forwarded_paths: dict[str, tuple[str, ...]] = {}
        if is_enabled:
            forwarded_paths = FORWARDED_PATHS | dict.fromkeys(config.pass_routes, FORWARDED_METHODS)
        self.paths: dict[str, tuple[str, ...]] = LOCAL_PATHS | forwarded_paths
        """Methods of each path."""
        self._folders = [(path[:-1], methods) for path, methods in forwarded_paths.items() if path.endswith("/*")]
        """(prefix, methods) of the path patterns that end in `*`."""

    def get_methods(self, path: str) -> tuple[str, ...] | None:
        """Return the methods of a path; None if the path is not served."""
        if path.startswith(MODEL_PATH_PREFIX) and ".." not in path:
            return LOCAL_PATHS["/v1/models"]
        return self.paths.get(path) or self._get_folder_methods(path)

    def _get_folder_methods(self, path: str) -> tuple[str, ...] | None:
        """Return the methods of the path pattern under which a path is; None if there is none."""
        if ".." in path or "%" in path:
            return None
        return next((methods for folder, methods in self._folders if path.startswith(folder) and path != folder), None)

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Check the head of a request, and return its tenant. Raises RequestError if the request is refused."""
        is_preflight = request.method == "OPTIONS"  # browsers send this request without the API key
        tenant = connection.peer if is_preflight else self._keys.find_tenant(connection, request)
        self._check_route(request, is_preflight=is_preflight)
        return tenant

    def _check_route(self, request: HttpRequest, *, is_preflight: bool) -> None:
        """Raise RequestError for an unknown path, an upgrade, or a method that the path does not have."""
        path = request.path
        methods = self.get_methods(path)
        if methods is None:
            raise make_unknown_path_error(
                path,
                [*self.paths, *self._local_routes.list_paths()],
                reason="this path is not forwarded to workers; --pass-route forwards it",
            )
        if b"websocket" in request.headers.lines_by_name.get(b"upgrade", b"").lower():
            raise UpgradeRequired(path)
        if request.method not in methods and not is_preflight:
            raise MethodNotAllowed(request, methods)

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Forward a request to a worker, unless the router itself has the answer. Raises RequestError."""
        path = request.path
        if request.method == "OPTIONS":
            allowed_methods = ", ".join(sorted(["OPTIONS", *(self.get_methods(path) or ())]))
            connection.respond(200, b"", headers=[(b"allow", allowed_methods.encode())])
        elif path == "/v1/models" or path.startswith(MODEL_PATH_PREFIX):
            self._local_routes.handle(connection, request)
        else:
            self.dispatcher.dispatch(connection, request, Exchange)


class RouterApp:
    """HTTP application of one address: passes requests on to the routes of workers, or to those of the router itself.

    Needs a running event loop.
    """

    def __init__(self, proxy: Proxy, worker_routes: WorkerRoutes, local_routes: Routes, guard: Guard) -> None:
        """`guard`: checks requests for local routes that are not public."""
        self.limits = proxy.config.limits
        self.budget = proxy.budget
        self.scheduler = proxy.pool.scheduler
        self.arrival_scheduler = FairScheduler(REQUESTS_PER_ITERATION)
        self.is_ending = False
        self.now = proxy.now
        self._metrics = proxy.metrics
        self._worker_routes = worker_routes
        self._local_routes = local_routes
        self._guard = guard
        self._cors = CorsPolicy(proxy.config.cors_origins) if proxy.config.cors_origins else None

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Return the tenant of a request, by its head. Raises RequestError if the request is refused."""
        path = request.path
        if is_worker_path(path):
            return self._worker_routes.admit(connection, request)
        if not self._local_routes.list_methods(path):
            raise make_unknown_path_error(path, [*self._worker_routes.paths, *self._local_routes.list_paths()])
        if not self._local_routes.is_public(request):
            self._guard(connection, request)
        return connection.peer

    def build_cors_headers(self, request: HttpRequest) -> bytes:
        """Return the CORS lines of any answer to a request: none on admin routes, which serve their own page only."""
        path = request.path
        if self._cors is None or not is_worker_path(path):
            return b""
        return self._cors.build_header_lines(request, self._worker_routes.get_methods(path) or ())

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer a request, now or later. Raises RequestError."""
        if is_worker_path(request.path):
            self._worker_routes.handle(connection, request)
        else:
            self._local_routes.handle(connection, request)

    def record_rejection(self, status: int) -> None:
        self._metrics.http_errors[str(status)] += 1

    def record_crash(self, place: str, error: Exception) -> None:
        self._metrics.record_crash(place, error)
