"""The index contract over every implementation, and what it predicts from the captures of real engines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import index_contract as contract
import pytest
from captures import predict
from reference import ReferenceIndex
from reference.digest import Digester

from router.index import make_index
from router.index.protocol import PrefixIndex

TESTS = Path(__file__).resolve().parent.parent


index_factories = [pytest.param(ReferenceIndex, id="reference"), pytest.param(make_index, id="native")]


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", index_factories)
def test_contract(factory: Callable[[], PrefixIndex], check: Any) -> None:
    indexes: list[PrefixIndex] = []

    def make() -> PrefixIndex:
        indexes.append(factory())
        return indexes[-1]

    check(make)
    for index in indexes:
        if isinstance(index, ReferenceIndex):
            index.check_invariants()


@pytest.mark.parametrize("check", contract.SEEDED_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", index_factories)
def test_seeded_contract(factory: Callable[[int], PrefixIndex], check: Any) -> None:
    check(factory)


@pytest.mark.parametrize("factory", index_factories)
def test_predicts_what_real_engines_reused(factory: Callable[[], PrefixIndex]) -> None:
    """Every request of every capture but the one after a reset that vLLM announces with the next request."""
    captures = sorted(path for path in (TESTS / "golden" / "vllm").glob("*/*.json.gz"))
    captures = [path for path in captures if path.with_name(path.name.replace(".json", ".frames.jsonl")).exists()]
    assert len(captures) >= 26
    rows = [row for capture in captures for row in predict(capture, factory())]
    wrong = [(Path(row.capture).stem, row.request) for row in rows if row.predicted_tokens != row.cached_tokens]
    assert wrong == [("reset.json", 2)]
    assert sum(row.cached_tokens > 0 for row in rows) > 25


@pytest.mark.parametrize("factory", index_factories)
def test_readers_beside_a_writer(factory: Callable[[], PrefixIndex]) -> None:
    """What a reader sees is always the state between two batches: the whole prompt or nothing of it."""
    index = factory()
    holders = [index.add_holder("m") for _ in range(3)]
    store, clear = contract.batch(contract.store_prompt(8)), contract.batch(contract.AllBlocksCleared())
    lengths: set[int] = set()
    faults: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                pin = index.pin(holders[0], contract.PROMPT, contract.SCOPE)
                lengths.update(match.tokens for match in index.match(contract.PROMPT, contract.SCOPE))
                index.stats()
                index.unpin(pin)
        except BaseException as error:
            faults.append(error)
            raise

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(300):
        index.ingest(holders[turn % 3], store)
        index.ingest(holders[(turn + 1) % 3], clear)
    stop.set()
    for reader in readers:
        reader.join()
    assert not faults
    assert lengths <= {0, 128}
    assert index.stats().pins == 0


def test_without_the_native_index_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.index._native", None)
    with pytest.raises(ImportError, match="pip install"):
        make_index()


def test_digests_do_not_depend_on_how_a_prompt_is_cut() -> None:
    digester = Digester(7)
    tokens = list(range(1000, 1100))
    full_digest = digester.extend(5, tokens)
    for cut in (1, 3, 16, 40, 41, 99):
        head = digester.extend(5, tokens[:cut])
        assert head + digester.extend(head[-1], tokens[cut:]) == full_digest
    assert len({*full_digest}) == len(full_digest)
    assert digester.make_opaque(5) not in (5, *full_digest)
    scopes = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"), ("ab", ""), ("b", "a")]
    assert len({digester.start("m", salt, lora) for salt, lora in scopes}) == len(scopes)
    assert Digester().seed != Digester().seed
