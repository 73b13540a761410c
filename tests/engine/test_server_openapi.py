"""The published document speaks of the routes that exist, and of bodies as they are read."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from engine.config import ServerConfig
from engine.http.openapi import document
from engine.http.server import OPEN_PATHS, build_app
from prompts.schemas import MAX_N


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(document(has_keys=True))
    return decoded


def test_every_route_is_described_and_no_other(spec: dict[str, Any]) -> None:
    state = MagicMock(config=ServerConfig())
    routes = {
        (route.method.lower(), route.resource.canonical.replace(":.+", ""))
        for route in build_app(state).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == {(method, path) for path, methods in spec["paths"].items() for method in methods}


def test_open_paths_need_no_key_and_the_others_do(spec: dict[str, Any]) -> None:
    for path, methods in spec["paths"].items():
        for described in methods.values():
            assert ("security" in described) == (path not in OPEN_PATHS)
            assert ("401" in described["responses"]) == (path not in OPEN_PATHS)


def test_all_references_resolve(spec: dict[str, Any]) -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for inner in value.values() for ref in references(inner)]
        return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []

    schemas = spec["components"]["schemas"]
    assert {ref.rsplit("/", 1)[1] for ref in references(spec)} <= set(schemas)
    temperature = schemas["ChatRequest"]["properties"]["temperature"]
    assert {"type": "number", "minimum": 0.0, "maximum": 1000.0} in temperature["anyOf"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]


def test_what_the_engine_refuses_is_no_part_of_a_body(spec: dict[str, Any]) -> None:
    schemas = spec["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": MAX_N}
        assert fields["guided_json"]["type"] == fields["best_of"]["type"] == "null"
        assert fields["use_beam_search"]["enum"] == [False, None]
    assert schemas["ChatRequest"]["properties"]["messages"] == {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Message"},
        "minItems": 1,
    }
    assert len(schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]) == 4
    assert "anyOf" in spec["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_token_ids_are_of_the_models_vocabulary() -> None:
    spec = msgspec.json.decode(document(has_keys=False, vocab_size=2048))
    ids = spec["components"]["schemas"]["DetokenizeBody"]["properties"]["tokens"]["items"]
    assert ids == {"type": "integer", "minimum": 0, "maximum": 2047}
    assert b"4294967295" not in msgspec.json.encode(spec)
