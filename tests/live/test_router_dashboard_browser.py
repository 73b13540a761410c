"""The dashboard in a real headless Chromium: it fills, opens by keyboard, fits a phone, and its console stays clean."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def start(log: Path, ready: str, *args: str) -> tuple[subprocess.Popen[bytes], str]:
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", *args], stdout=file, stderr=subprocess.STDOUT)
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and process.poll() is None:
        found = re.search(ready, log.read_text(errors="replace"), re.MULTILINE)
        if found:
            return process, found.group(1)
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"{args} is not ready:\n{log.read_text(errors='replace')}")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router before two engines, with conversations going on."""
    folder = tmp_path_factory.mktemp("dashboard")
    processes = []
    stop = threading.Event()
    try:
        engines = []
        for number in range(2):
            process, engine = start(
                folder / f"e{number}.log", r"^ready +(http://\S+)$", "engine", "serve", "--port", "0"
            )
            processes.append(process)
            engines.append(engine)
        ready = r"^router listening on (http://\S+)$"
        process, router = start(folder / "router.log", ready, "router", "run", "--port", "0", *engines)
        processes.append(process)
        while urllib.request.urlopen(f"{router}/workers").read().count(b'"state":"up"') < 2:
            time.sleep(0.1)

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
    finally:
        stop.set()
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


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
        page.goto(f"{url}/dashboard")
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
