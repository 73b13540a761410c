"""Handlers that do not generate: models, stored responses, health, metrics, the cache, tokenising."""

from __future__ import annotations

import platform
from typing import Any

import msgspec
from aiohttp import web

from engine.config import __version__
from engine.http.body_workers import BodyParser
from engine.http.metrics import collect_families
from engine.http.request_body import receive_body
from engine.http.state import STATE
from events.sources import encode_sources
from options.metrics import TEXT_FORMAT, render_metrics
from prompts import field_error

_JSON = "application/json"


def json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=_JSON)


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    cards = [_make_model_card(request, name) for name in state.model_names]
    return json_response({"object": "list", "data": cards})


async def show_model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    request.app[STATE].check_model(name)
    return json_response(_make_model_card(request, name))


def _make_model_card(request: web.Request, name: str) -> dict[str, Any]:
    state = request.app[STATE]
    return {
        "id": name,
        "object": "model",
        "created": state.start_time_s,
        "owned_by": "blockcast",
        "root": state.info.model_path,
        "parent": None,
        "max_model_len": state.info.max_model_len,
    }


async def show_response(request: web.Request) -> web.Response:
    stored_response = request.app[STATE].response_store.get(request.match_info["response_id"], "response_id")
    if request.query.get("stream", "false") != "false":
        raise field_error("stream", "a stored response is not streamed, ask for it whole")
    return web.Response(body=stored_response.response, content_type=_JSON)


async def delete_response(request: web.Request) -> web.Response:
    name = request.match_info["response_id"]
    request.app[STATE].response_store.delete(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def check_health(request: web.Request) -> web.Response:
    """Answer 200 while new requests are admitted. `x-core-silent-seconds`: age of the oldest unanswered ping."""
    state = request.app[STATE]
    state.admission.check_available()
    return web.Response(headers={"x-core-silent-seconds": f"{state.client.ping_core():.1f}"})


def list_paths(app: web.Application) -> list[str]:
    """Return every path of a route that has no name in it."""
    paths = {resource.canonical for resource in app.router.resources()}
    return sorted(path for path in paths if "{" not in path)


async def show_paths(request: web.Request) -> web.Response:
    """Answer with the program, its version and its paths."""
    paths = list_paths(request.app)
    return json_response({"name": "blockcast engine", "version": __version__, "paths": paths})


async def show_version(request: web.Request) -> web.Response:
    return json_response({"version": __version__, "engine": "blockcast", "python": platform.python_version()})


async def show_metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    families = collect_families(state.metrics, state.client, state.info, state.model_names[0])
    return web.Response(body=render_metrics(families), headers={"Content-Type": TEXT_FORMAT})


async def list_kv_event_sources(request: web.Request) -> web.Response:
    return web.Response(body=encode_sources(request.app[STATE].info.event_sources), content_type=_JSON)


async def list_kv_cache_groups(request: web.Request) -> web.Response:
    return json_response(request.app[STATE].info.groups)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes and announce that. Running sequences keep their blocks."""
    state = request.app[STATE]
    state.admission.check_running()
    await state.client.call_core("reset")
    return web.Response()


async def parse_and_respond(request: web.Request, *, parse: BodyParser[tuple[str | None, bytes]]) -> web.Response:
    """Answer a request by its body alone. `parse` returns the requested model and the answer."""
    state = request.app[STATE]
    model, answer = await state.reader.read(parse, await receive_body(request), tenant=state.get_tenant(request))
    state.check_model(model)
    return web.Response(body=answer, content_type=_JSON)
