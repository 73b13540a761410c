"""What a fleet tells a router, told to a real one: the list of workers, drains, the other routers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import Program, await_true, call, ours

from fleet.books import Listed, changes, read_rows

pytestmark = pytest.mark.live
SPEC = '{"prefill_s_per_token": 0.0002, "kv_tokens": 40000}'


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(a router, a worker)."""
    folder = tmp_path_factory.mktemp("fleet")
    router = ours("router", "run", "--port", "0", "--peer-bind", "tcp://127.0.0.1:*")
    with (
        Program(router, folder / "router.log") as one,
        Program(ours("engine", "serve", "--port", "0", "--simulate", SPEC), folder / "engine.log") as other,
    ):
        yield one.await_line(), other.await_line()


def test_a_router_follows_the_list(urls: tuple[str, str]) -> None:
    router, worker = urls
    listed = [
        Listed({"url": worker, "id": "ours", "send_key": 1}),
        Listed(
            {"url": "http://127.0.0.1:9", "id": "gone", "events": "tcp://127.0.0.1:9", "replay": "tcp://127.0.0.1:9"}
        ),
    ]

    def rows() -> dict[str, Any]:
        return {name: (row.up, row.draining) for name, row in read_rows(call(f"{router}/workers")[1]).items()}

    def tell(*those: Listed) -> list[int]:
        known = read_rows(call(f"{router}/workers")[1])
        return [call(f"{router}{path}", body, method)[0] for method, path, body in changes(those, known)]

    assert tell(*listed) == [201, 201]
    assert await_true(lambda: rows() == {"ours": (True, False), "gone": (False, False)}, 30), rows()
    assert tell(*listed) == [], "what is known is not said again"
    draining = Listed(listed[0].settings, draining=True)
    assert tell(draining) == [200, 200], "one leaves, one drains"
    assert rows() == {"ours": (False, True)}
    assert tell(listed[0]) == [200]
    assert rows() == {"ours": (True, False)}
    assert tell() == [200]
    assert rows() == {}


def test_a_router_is_told_of_the_others(urls: tuple[str, str]) -> None:
    router = urls[0]
    peers = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"]
    assert call(f"{router}/peers", {"peers": peers}, "PUT") == (200, {"peers": sorted(peers)})
    assert call(f"{router}/peers", {"peers": []}, "PUT") == (200, {"peers": []})
    for wrong in ({"peers": "x"}, {"peers": ["x"]}, {}, {"peers": [], "more": 1}):
        assert call(f"{router}/peers", wrong, "PUT")[0] == 400, wrong
