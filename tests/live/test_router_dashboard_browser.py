"""The dashboard in a real headless Chromium: it fills, opens by keyboard, fits a phone, and its console stays clean."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from programs import ADMIN_KEY, Program, call, wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]
PAGE = Path(__file__).resolve().parents[2] / "router" / "admin" / "dashboard.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def looks(width: int, scheme: str) -> list[Any]:
    """Widths and schemes; all but this one take minutes together and are not part of scripts/test."""
    every = [(w, s) for w in (390, 1280) for s in ("light", "dark")]
    return [pytest.param(*look, marks=() if look == (width, scheme) else pytest.mark.slow) for look in every]


@contextlib.contextmanager
def chromium(width: int, scheme: Any, picture: Path, *, may_complain: bool = False) -> Iterator[Any]:
    """A page of so many pixels; at its end it fits its width, is photographed, and has complained of nothing."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    complaints = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "the page scrolls sideways"
        page.screenshot(path=picture, full_page=True)
        browser.close()
    assert may_complain or complaints == []


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router before two engines, with conversations going on."""
    folder = tmp_path_factory.mktemp("dashboard")
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(stop.set)

        def start(name: str, *args: str) -> str:
            program = Program(folder / f"{name}.log", *args)
            stack.callback(program.close)
            return program.await_ready().url

        engines = [start(f"e{number}", "engine", "serve", "--port", "0") for number in range(2)]
        router = start("router", "router", "run", "--port", "0", *engines)
        workers = f"{router}/workers"
        wait_until(lambda: [row["state"] for row in call(workers)[2]["workers"]] == ["up", "up"], "two workers are up")

        def talk() -> None:
            prefix = " ".join(f"word {number}" for number in range(150))
            count = 0
            while not stop.is_set():
                count += 1
                messages = [
                    {"role": "system", "content": prefix},
                    {"role": "user", "content": f"{count % 3} " * 80},
                    {"role": "user", "content": f"question {count}"},
                ]
                body = {"messages": messages, "max_tokens": 4, "stream": count % 2 == 0}
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{router}/v1/chat/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request) as answer:
                    answer.read()

        thread = threading.Thread(target=talk)
        thread.start()
        yield router
        stop.set()
        thread.join()


@pytest.mark.parametrize(("width", "scheme"), looks(390, "dark"))
def test_dashboard_in_chromium(url: str, tmp_path: Path, width: int, scheme: Any) -> None:
    with chromium(width, scheme, tmp_path / f"dashboard-{width}-{scheme}.png") as page:
        page.goto(f"{url}/dashboard#{quote(ADMIN_KEY)}")
        page.wait_for_selector("#decisions details")
        page.wait_for_function("document.querySelectorAll('#workers .state.up').length === 2")
        assert not page.locator("#tools").is_visible(), "two workers need no search"
        assert not page.locator("#alarms").is_visible()
        assert page.locator(".tile.good").inner_text().split("\n") == ["Healthy", "2 of 2 workers up"]
        page.wait_for_selector("#slowest li")
        reason = page.locator("#slowest small").first.inner_text()
        assert re.search(r"\d m?s (to compute \d+ of \d+ tokens|behind other prompts|more than predicted)", reason)
        page.locator("#workers .card summary").first.focus()
        page.wait_for_timeout(1500)  # cards are made anew each second, and keep the focus
        page.keyboard.press("Enter")
        page.wait_for_timeout(1500)  # and stay open
        assert "cached blocks" in page.locator("#workers .card details[open]").inner_text()
        for section in (
            ("#tiles", "#chart", "#rates", "#workers", "#slowest") if width > 1000 else ("#tiles", "#slowest")
        ):
            assert page.locator(section).bounding_box()["y"] < 900, f"{section} is on the first screen"
        page.locator("#decisions summary").first.focus()
        page.keyboard.press("Enter")
        open_details = page.locator("#decisions details[open]")
        open_details.first.wait_for()
        page.wait_for_timeout(2500)  # updates go on, the opened row stays open
        assert open_details.count() == 1
        rows = open_details.first.locator("table tr").count()
        assert rows >= 2
        cells = open_details.first.locator("tr.won td").all_inner_texts()
        price = next(float(cell[2:]) for cell in cells if cell.startswith("= "))
        terms = [float(cell) for cell in cells[2 : cells.index(f"= {price:.4f}")]]
        assert sum(terms) == pytest.approx(price, abs=1e-4 * len(terms)), "a price adds up"
        page.locator("#hold").focus()
        page.keyboard.press("Space")
        assert page.locator("#hold").get_attribute("aria-pressed") == "true"


def test_a_key_that_is_not_entered_is_asked_for_once(url: str, tmp_path: Path) -> None:
    with chromium(1280, "light", tmp_path / "dashboard-no-key.png", may_complain=True) as page:
        questions: list[str] = []

        def dismiss(dialog: Any) -> None:
            questions.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", dismiss)
        page.goto(f"{url}/dashboard")
        page.wait_for_function("document.querySelector('#link').textContent.includes('reload')")
        page.wait_for_timeout(2500)  # updates come each second
        assert questions == ["Admin key of this router"]


def make_workers(count: int) -> dict[str, Any]:
    """A state of so many workers, two in trouble."""
    groups = [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "blocks": 700, "silent": False}]
    stream = {"rank": 0, "phase": "live", "last_seq": 5, "groups": groups, "gaps": 0, "restarts": 0, "malformed": 0}
    rows = []
    for i in range(count):
        row = {
            "worker_id": f"gpu{i}:8000",
            "target": f"gpu{i}:8000",
            "state": "up",
            "state_reason": "",
            "queue_s": 0.01 * (i % 7),
        }
        row |= {
            "prefilling": 0,
            "decoding": i % 9,
            "utilisation": 0.2,
            "routed_requests": i,
            "predicted_cached_tokens": 0,
        }
        row |= {
            "reported_cached_tokens": 0,
            "models": ["m"],
            "cache_view": "events",
            "alarms": [],
            "cache_tokens": 16_000,
        }
        row["events"] = {"streams": [{**stream, "problems": []}]}
        rows.append(row)
    rows[count // 2]["alarms"] = ["predictions drift"]
    rows[-1] |= {"state": "down", "state_reason": "connect failure"}
    index = {"entries": 350_000}
    return {
        "workers": rows,
        "in_flight": 3,
        "queued": 0,
        "index": index,
        "version": "0.1.0",
        "cache_miss_tokens": {"evicted": 90},
    }


@contextlib.contextmanager
def fake_router(updates: dict[str, Any]) -> Iterator[str]:
    """The page before a router that tells a viewer this once, and then only its state."""

    class FakeRouterHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/dashboard"
            is_first = self.path.endswith("?after=0")
            news = {**updates, "now": 100.0} if is_first else {**updates, "now": 100.0, "points": [], "decisions": []}
            body = PAGE.read_bytes() if is_page else json.dumps(news).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeRouterHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def crowd() -> Iterator[str]:
    """The page before a router that tells of 500 workers."""
    point = {"prompt_tokens": 10, "predicted_tokens": 5, "reported_prompt_tokens": 10, "actual_tokens": 4, "retried": 1}
    point |= {"ttft_p50_ms": 90.0, "ttft_p99_ms": None}
    points = [{"at": float(i), "requests_per_s": 900.0 + i, "failed": i % 3, **point} for i in range(60)]
    with fake_router({"state": make_workers(500), "points": points, "decisions": []}) as url:
        yield url


@pytest.mark.parametrize(("width", "scheme"), looks(1280, "light"))
def test_five_hundred_workers_with_an_alarm(crowd: str, tmp_path: Path, width: int, scheme: Any) -> None:
    with chromium(width, scheme, tmp_path / f"crowd-{width}-{scheme}.png") as page:
        page.goto(f"{crowd}/dashboard")
        page.wait_for_function("document.querySelectorAll('.cell').length === 500")
        alarm_text = page.locator("#alarms").inner_text()
        assert "1 of 500 workers down: gpu499:8000" in alarm_text
        assert "499 of 500 workers up, 2 in trouble" in page.locator(".tile.bad").first.inner_text()
        assert "gpu250:8000: predictions drift" in alarm_text
        assert page.locator("#alarms").is_visible()
        assert page.title().startswith("⚠")
        assert [page.locator(".cell b").nth(i).inner_text() for i in range(2)] == ["gpu250:8000", "gpu499:8000"]
        page.fill("#search", "gpu49")
        assert page.locator(".cell").count() == 11
        page.fill("#search", "")
        page.select_option("#sort", "name")
        assert page.locator(".cell b").nth(2).inner_text() == "gpu2:8000", "numbers in names count as numbers"
        page.select_option("#sort", "trouble")
        page.locator(".cell").first.click()
        assert "predictions drift" in page.locator("#workers .card").inner_text()
        assert "99th percentile" in page.locator("#tiles").inner_text()
        assert "–" in page.locator(".tile", has_text="99th percentile").inner_text(), "nothing was measured"
        assert page.evaluate("document.documentElement.scrollHeight") < 3300
        assert not page.locator("#moving").is_visible(), "no worker moves KV"


def make_terms(worker: str, cost: float, transfer: dict[str, Any] | None) -> dict[str, Any]:
    parts = {"decode_s": 0.0, "congestion_s": 0.0, "pressure_s": 0.0, "tie_break_s": 0.0, "shared_s": 0.0}
    parts |= {"ttft_s": cost, "queue_s": 0.0, "prefill_s": cost / 2, "slowdown": 1.0}
    return {"worker": worker, "cost": cost, "cached_tokens": 1800, "transfer": transfer, **parts}


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_kv_that_moves(tmp_path: Path, width: int) -> None:
    pull = {"kind": "pull", "source": "gpu0:8000", "rank": None, "tokens": 1800, "transfer_s": 0.05}
    decision = {"id": "r1", "worker": "gpu1:8000", "transfer": pull, "stream": True, "outcome": "status_200", "at": 1.0}
    decision |= {"prompt_tokens": 2000, "predicted_cached_tokens": 1800, "cached_tokens": 1800, "ttft_s": 0.2}
    decision |= {"predicted_ttft_s": 0.1, "queued_s": 0.0, "why": [], "tokenized": True, "model": "m"}
    decision["candidates"] = [make_terms("gpu1:8000", 0.1, pull), make_terms("gpu1:8000", 0.3, None)]
    point = {"prompt_tokens": 10, "predicted_tokens": 5, "reported_prompt_tokens": 10, "actual_tokens": 4, "retried": 0}
    point |= {"requests_per_s": 2.0, "failed": 0, "ttft_p50_ms": 90.0, "ttft_p99_ms": 95.0}
    point |= {
        "pulls": 1,
        "prefills": 0,
        "moved_tokens": 1800,
        "moved_bytes": 7_400_000,
        "transfer_s": 0.05,
        "computed_locally": 2,
    }
    state = make_workers(3) | {"counters": {"failed_transfers": 2}, "kv_transfers": {"pull": {"started": 20}}}
    group = {"group": "g", "dialect": "nixl", "sources": [], "destinations": ["gpu1:8000"]}
    state["kv_groups"] = [group | {"problem": "no worker gives KV: each computes its prompts"}]
    points = [{"at": float(i), **point} for i in range(20)]
    updates = {"state": state, "points": points, "decisions": [decision]}
    with fake_router(updates) as url, chromium(width, "light", tmp_path / f"moving-{width}.png") as page:
        page.goto(f"{url}/dashboard")
        page.wait_for_selector("#moves li")
        text = page.locator("#moves").inner_text()
        for part in ("0.5 a second", "20 requests, 25 % of all", "36.0 k", "1800 tokens, 7.4 MB, 50 ms for each",
                     "40", "failed since the start", "no KV moves in nixl", "no worker gives KV"):  # fmt: skip
            assert part in text, (part, text)
        page.locator("#decisions summary").first.click()
        assert page.locator("#decisions summary .worker").inner_text() == "gpu1:8000, pulls from gpu0:8000"
        assert page.locator("#decisions tr.won").count() == 1, "the plan that was not taken is another row"
        assert "to move 1800 tokens from gpu0:8000" in page.locator("#slowest").inner_text()
