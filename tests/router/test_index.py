"""The index contract over every implementation, and the captures of real engines through predict_hits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from router.index import ReferenceIndex, make_index
from router.view import PrefixIndex

TESTS = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    from importlib.machinery import SourceFileLoader

    name = f"loaded_{path.stem}"
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules[name])
    return sys.modules[name]


contract = load(TESTS / "contracts" / "index_contract.py")


def native(seed: int | None = None) -> PrefixIndex:
    pytest.importorskip("router._native", reason="the native index was not built")
    return make_index("native", seed)


index_factories = [pytest.param(ReferenceIndex, id="reference"), pytest.param(native, id="native")]


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", index_factories)
def test_contract(factory: Callable[[], PrefixIndex], check: Any) -> None:
    made: list[PrefixIndex] = []

    def make() -> PrefixIndex:
        made.append(factory())
        return made[-1]

    check(make)
    for index in made:
        if isinstance(index, ReferenceIndex):
            index.check_invariants()


@pytest.mark.parametrize("check", contract.SEEDED_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", index_factories)
def test_seeded_contract(factory: Callable[[int], PrefixIndex], check: Any) -> None:
    check(factory)


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_predicts_what_real_engines_reused(kind: str) -> None:
    """Every request of every capture but the one after a reset that vLLM announces with the next request."""
    if kind == "native":
        native()
    predict_hits = load(TESTS.parent / "scripts" / "predict_hits")
    captures = sorted(path for path in (TESTS / "golden" / "vllm").glob("*/*.json.gz"))
    captures = [path for path in captures if path.with_name(path.name.replace(".json", ".frames.jsonl")).exists()]
    assert len(captures) >= 26
    rows = [row for capture in captures for row in predict_hits.predict(capture, make_index(kind))]  # type: ignore[arg-type]
    wrong = [(Path(row.capture).stem, row.request) for row in rows if row.predicted != row.cached]
    assert wrong == [("reset.json", 2)]
    assert sum(row.cached > 0 for row in rows) > 25


def test_make_index_rejects_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="auto, native or reference"):
        make_index("fast")  # type: ignore[arg-type]
