"""Describe this router and list its models: `/`, `/version` and `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from prompts.errors import RequestError
from router.decide.core import RouterCore
from router.decide.workers import ServedModel, WorkerState
from router.http.request import HttpRequest
from router.http.routes import CachedPage, Response, Routes

_SERVING_STATES = (WorkerState.UP, WorkerState.PROBING, WorkerState.DRAINING)


class DescriptionRoutes:
    """HTTP routes `/` and `/version`, which describe the router to anybody who asks."""

    def __init__(self, version: str, forwarded_paths: Collection[str]) -> None:
        """`forwarded_paths`: paths of requests that the router forwards to workers."""
        self._version = version
        self._forwarded_paths = list(forwarded_paths)

    def register(self, routes: Routes) -> None:
        """Add `/` and `/version` to `routes`. `/` lists all public paths of `routes`, also of those added later."""

        def describe(request: HttpRequest, _: str) -> Response:
            body = {
                "name": "blockcast router",
                "version": self._version,
                "forwarded_to_workers": self._forwarded_paths,
                "paths": routes.list_paths(public=True),
            }
            return Response(msgspec.json.encode(body))

        version_page = Response(msgspec.json.encode({"version": self._version}))
        routes.add("GET", "/", describe, public=True)
        routes.add("GET", "/version", lambda *_: version_page, public=True)


class ModelRoutes:
    """HTTP routes `/v1/models` and `/v1/models/NAME`: the models that workers serve, in OpenAI's format."""

    def __init__(self, core: RouterCore, model_by_alias: Mapping[str, str], now: Callable[[], float]) -> None:
        self._core = core
        self._model_by_alias = model_by_alias
        self._now = now
        self._created_at = int(time.time())

    def register(self, routes: Routes) -> None:
        routes.add("GET", "/v1/models", CachedPage(self._list_models, self._now), public=True)
        routes.add("GET", "/v1/models/**", self._describe_model, public=True)

    def _list_models(self) -> Response:
        return Response(msgspec.json.encode({"object": "list", "data": list(self._make_model_cards().values())}))

    def _describe_model(self, request: HttpRequest, name: str) -> Response:
        card = self._make_model_cards().get(name)
        if card is None:
            raise RequestError(
                f"model {name[:200]!r}: no worker serves it", param="model", code="model_not_found", status=404
            )
        return Response(msgspec.json.encode(card))

    def _make_model_cards(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of served models and aliases, by name, with the longest context of any worker."""
        card_by_name: dict[str, dict[str, Any]] = {}
        for worker in self._core.workers.values():
            if worker.state not in _SERVING_STATES:
                continue
            for name, model in worker.models.items():
                card = card_by_name.setdefault(name, self._make_model_card(name, model))
                card["max_model_len"] = max(card["max_model_len"] or 0, model.max_model_len or 0) or None
        for alias, name in self._model_by_alias.items():
            if name in card_by_name:
                card_by_name[alias] = card_by_name[name] | {"id": alias}
        return card_by_name

    def _make_model_card(self, name: str, model: ServedModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_at,
            "owned_by": "blockcast",
            "root": model.base,
            "parent": model.base if model.lora else None,
            "max_model_len": model.max_model_len,
        }
