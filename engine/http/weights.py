"""Handlers for sleeping, waking up and reloading weights: vLLM's routes, with `--enable-sleep-mode`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from engine.http.body_workers import finish_uncancelled
from engine.http.request_body import receive_body
from engine.http.state import STATE, ServerState
from prompts import RequestError, bad_value
from prompts.chat_completions import decode_json


class RpcBody(msgspec.Struct):
    """A body of /collective_rpc."""

    method: str
    kwargs: dict[str, Any] = {}
    args: list[Any] = []
    timeout: float | None = None


_rpc_decoder = msgspec.json.Decoder(RpcBody)


async def sleep(request: web.Request) -> web.Response:
    """Let the engine sleep once running requests have ended. `?level=2` frees the weights in host memory, too."""
    state = request.app[STATE]
    level, mode = request.query.get("level", "1"), request.query.get("mode", "wait")
    if level not in ("1", "2"):
        raise bad_value("level", level, "1 or 2")
    if mode != "wait":
        raise bad_value("mode", mode, "wait")
    await finish_uncancelled(_change_weights(state, "sleep", level=int(level)))
    return web.json_response({"status": "sleeping", "level": int(level)})


async def wake_up(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if "tags" in request.query:
        raise bad_value("tags", request.query["tags"], "none: all wakes up at once")
    await finish_uncancelled(_change_weights(state, "wake"))
    return web.json_response({"status": "awake", "tags": None})


async def is_sleeping(request: web.Request) -> web.Response:
    return web.json_response({"is_sleeping": request.app[STATE].admission.is_asleep})


async def collective_rpc(request: web.Request) -> web.Response:
    """Reload the model's weights, from the folder `kwargs.weights_path` or from the last folder.

    The route is vLLM's, which calls any method of its workers and returns a list of their results. Here `method` must
    be `reload_weights`, which returns nothing.
    """
    state = request.app[STATE]
    body: RpcBody = decode_json(_rpc_decoder, await receive_body(request))
    if body.method != "reload_weights" or body.args:
        raise bad_value("method", body.method, "reload_weights, without args")
    path = body.kwargs.get("weights_path")
    has_other_arguments = bool(set(body.kwargs) - {"weights_path"})
    if has_other_arguments or not (path is None or isinstance(path, str)):
        raise bad_value("kwargs", body.kwargs, '{"weights_path": FOLDER} or none')
    if path is not None:
        path = resolve_weights_folder(path, (*state.config.weights_folders, state.info.model_path))
    await finish_uncancelled(_change_weights(state, "reload", path=path))
    return web.json_response({"results": [None]})


def resolve_weights_folder(path: str, roots: Sequence[str]) -> str:
    """Return the folder that `path` names, links followed. Raises RequestError 403 if it is not below `roots`."""
    folder = Path(os.path.realpath(path))
    if not any(folder.is_relative_to(os.path.realpath(root)) for root in roots):
        error = bad_value("kwargs.weights_path", path, "a folder below one of --allowed-weights-path, or MODEL's own")
        error.status, error.code = 403, "forbidden"
        raise error
    return str(folder)


async def _change_weights(state: ServerState, action: Literal["sleep", "wake", "reload"], **options: Any) -> None:
    """Let running requests end, and then put the engine to sleep, wake it up, or reload its weights.

    A failed change leaves the engine asleep or awake, as it was. Callers must not cancel this when their client leaves
    (`finish_uncancelled`). Raises RequestError 409 if the change fails, and at once if it does not apply.
    """
    async with state.weights_change_lock:
        is_asleep_at_end = state.admission.is_asleep
        if is_asleep_at_end != (action == "wake"):
            status = "asleep" if is_asleep_at_end else "awake"
            raise RequestError(f"{action}: the engine is {status}", code="conflict", status=409)
        state.admission.is_asleep = True  # no request is admitted while this waits
        try:
            await state.admission.wait_until_idle()
            await state.client.call_core(action, **options)
            is_asleep_at_end = action == "sleep"
        except ValueError as error:
            raise RequestError(str(error), code="conflict", status=409) from None
        finally:
            state.admission.is_asleep = is_asleep_at_end
