"""The dashboard in a real headless Chromium: it fills, opens by keyboard, fits a phone, and its console stays clean."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from programs import ADMIN_KEY, Program, call, until

pytestmark = [pytest.mark.live, pytest.mark.slow]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
        until(lambda: [row["state"] for row in call(workers)[2]["workers"]] == ["up", "up"], "two workers are up")

        def talk() -> None:
            shared = " ".join(f"word {number}" for number in range(150))
            count = 0
            while not stop.is_set():
                count += 1
                messages = [
                    {"role": "system", "content": shared},
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_dashboard_in_chromium(url: str, tmp_path: Path, width: int, scheme: Any) -> None:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    complaints = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{url}/dashboard#{quote(ADMIN_KEY)}")
        page.wait_for_selector("#decisions details")
        page.wait_for_selector("#tree .chip", timeout=30_000)
        page.wait_for_function("document.querySelectorAll('#workers .state.up').length === 2")
        page.locator("#decisions summary").first.focus()
        page.keyboard.press("Enter")
        opened = page.locator("#decisions details[open]")
        opened.first.wait_for()
        page.wait_for_timeout(2500)  # updates go on, the opened row stays open
        assert opened.count() == 1
        rows = opened.first.locator("table tr").count()
        assert rows >= 2
        page.locator("#hold").focus()
        page.keyboard.press("Space")
        assert page.locator("#hold").get_attribute("aria-pressed") == "true"
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "the page scrolls sideways"
        page.screenshot(path=tmp_path / f"dashboard-{width}-{scheme}.png", full_page=True)
        browser.close()
    assert complaints == []
