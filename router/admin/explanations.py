"""Why a request goes where it goes, and why its prompt was not cached: `/route` and `/requests`."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

import msgspec

from prompts.errors import RequestError, bad_value
from prompts.routing import API_KIND_BY_PATH
from router.admin.json_body import decode_object
from router.decide.messages import Refuse
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext
from router.edge.request_reader import RequestReader
from router.http.request import HttpRequest
from router.http.routes import Response, Routes

_RESPONSE_ID_PREFIX_PATTERN = re.compile("^(?:chatcmpl-|cmpl-|msg_|resp_)")
"""Prefix that engines put before the request's id to name their response."""


class ExplanationRoutes:
    """Explains decisions and cache misses."""

    def __init__(self, proxy: Proxy, request_reader: RequestReader, reasons: MissReasonsRecorder) -> None:
        self._core = proxy.core
        self._now = proxy.now
        self._request_reader = request_reader
        self._reasons = reasons

    def register(self, routes: Routes) -> None:
        routes.add("POST", "/route", self._explain_route, public=False)
        routes.add("GET", "/requests/*", self._explain_request, public=False)
        routes.add("POST", "/requests/watch", self._watch_session, public=False)

    async def _explain_route(self, request: HttpRequest, _: str) -> Response:
        """Answer `POST /route`: explain to which worker a request with these headers and this body would go now.

        `?path=` names the route that the request is for. Without it, the body tells whether it is a chat or a
        completion. The request is not forwarded, and changes no later decision.
        """
        context = RequestContext(request, "", self._now(), "explained")
        await self._request_reader.read(context, _read_explained_path(request))
        assert context.body is not None
        prompt = context.body.prompt
        route = self._request_reader.build_route_request(context)
        decision = self._core.explain(route, self._now())
        if isinstance(decision, Refuse):
            raise RequestError(decision.message, param=None, code=decision.code, status=decision.status)
        context.route, context.decision = route, decision
        body = {
            **decision.to_json_fields(),
            "tokenized": prompt.token_ids is not None,
            "tokenize_ms": round(prompt.seconds * 1e3, 3),
            "why": self._reasons.explain(context),
        }
        for name in ("request_id", "decided_s"):  # meaningless, because the request is not sent
            del body[name]
        return Response(msgspec.json.encode(body))

    def _explain_request(self, request: HttpRequest, name: str) -> Response:
        """Explain why an earlier request went to its worker, and why its prompt was not cached.

        `name`: the request's x-request-id, or the id of its response, which ends with it.
        """
        for request_id in (name, _RESPONSE_ID_PREFIX_PATTERN.sub("", name)):
            description = self._reasons.describe_request(request_id)
            if description is not None:
                return Response(msgspec.json.encode(description))
        message = f"request {name[:200]!r}: {self._describe_missing_explanation()}"
        raise RequestError(message, param=None, code="unknown_request", status=404)

    def _describe_missing_explanation(self) -> str:
        if not self._reasons.is_enabled:
            return "this router runs with --no-reasons, so requests are not explained"
        return (
            "unknown. Give its x-request-id, or the id of its answer. Only the latest miss_reasons.requests_max "
            "requests are known, and only those whose prompts the router tokenised"
        )

    def _watch_session(self, request: HttpRequest, _: str) -> Response:
        """Compare each prompt of a session with the one before, from its next request on."""
        session_name = decode_object(request.body).get("session")
        if not isinstance(session_name, str) or not session_name:
            raise bad_value("session", session_name, "the name of a session, as GET /requests/ID tells it")
        if not self._reasons.is_enabled:
            message = f"session: {self._describe_missing_explanation()}"
            raise RequestError(message, param=None, code="reasons_off", status=409)
        self._reasons.watch(session_name)
        return Response(msgspec.json.encode({"session": session_name, "watched": self._reasons.watched_session_count}))


def _read_explained_path(request: HttpRequest) -> str | None:
    """Return the path in the query of `/route`; None if it has none. Raises RequestError for a path outside /v1/."""
    paths = parse_qs(request.target.partition(b"?")[2].decode("latin-1")).get("path")
    if not paths:
        return None
    if not paths[0].startswith("/v1/"):
        message = f"path: got {paths[0][:200]!r}, expected a route under /v1/, such as {', '.join(API_KIND_BY_PATH)}"
        raise RequestError(message, param="path")
    return paths[0]
