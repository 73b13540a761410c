"""docs/reference/routes.md has every route of the router and of the engine."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.http.server import build_app
from prompts.routing import API_KIND_BY_PATH

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "routes.md").read_text()
ROUTER_PART, _, ENGINE_PART = PAGE.partition("\n## Engine\n")


def test_every_route_of_the_router_is_listed(edge: Any) -> None:
    written = {"/v1/models/**": "/v1/models/{model}"}

    async def scenario() -> None:
        await edge.start()
        paths = {path for _, path in edge.routes._route_by_method_and_path} | set(API_KIND_BY_PATH)
        assert len(paths) > 12
        for path in paths:
            assert f"{written.get(path, path.replace('*', 'ID'))}`" in ROUTER_PART, path

    edge.run(scenario())


def test_every_route_of_the_engine_is_listed() -> None:
    config = SimpleNamespace(max_body_bytes=1, sleep_mode=True)
    state: Any = SimpleNamespace(config=config)
    paths = {resource.canonical for resource in build_app(state).router.resources()}
    assert len(paths) > 20
    for path in paths:
        written = re.sub(r"\{(\w+)[^}]*\}", r"{\1}", path)
        assert f"{written}`" in ENGINE_PART, path
