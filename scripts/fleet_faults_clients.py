"""The clients of scripts/fleet_faults: conversations through two routers, as behind a balancer."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import click

TALKS = 6


class Clients:
    """Conversations that go on until they are told to end; `exact` holds some while nothing happens."""

    def __init__(self, routers: list[str]) -> None:
        self.routers = routers
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._end = threading.Event()
        self._serial = 0
        self._threads = [threading.Thread(target=self._talk_on, args=(i,), daemon=True) for i in range(TALKS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"

    def _talk_on(self, number: int) -> None:
        while not self._end.is_set():
            messages = []
            opening = f"{number} {time.monotonic()}"
            for turn in range(6):
                messages.append({"role": "user", "content": f"talk {opening} turn {turn}: " + "why is it so? " * 12})
                outcome, text, _ = self.ask(messages, number + turn)
                self.counts[outcome] += 1
                if outcome != "answered" and outcome != "cut after its first byte":
                    self.faults.append(f"{outcome}: {text}")
                if outcome == "answered":
                    messages.append({"role": "assistant", "content": text})
                if self._end.wait(0.2):
                    return

    def ask(self, messages: list[Any], first: int) -> tuple[str, str, tuple[int, int] | None]:
        """(outcome, text, (predicted, reported)). The other router is asked where nothing has come from the first."""
        body = {"messages": messages, "max_tokens": 12, "stream": True, "temperature": 0,
                "stream_options": {"include_usage": True}}  # fmt: skip
        why = ""
        for attempt in range(20):  # a balancer's health checks would have left the dead one out sooner
            router = self.routers[(first + attempt) % len(self.routers)]
            text, began, figures, ended = "", False, None, False
            connection = http.client.HTTPConnection(urlsplit(router).netloc, timeout=120)
            try:
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                if answer.status != 200:
                    why = f"{answer.status} {answer.read()[:300]!r}"
                    self.counts[f"status {answer.status}, asked again"] += 1
                    time.sleep(0.25)
                    continue
                predicted = int(answer.headers["x-blockcast-predicted-cached-tokens"])
                for line in answer:
                    began = began or line.startswith(b"data: ")
                    ended = ended or line.startswith(b"data: [DONE]")
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                        if usage := chunk.get("usage"):
                            figures = predicted, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if ended:
                    return "answered", text, figures
                why = "the answer ends without its end"
            except (OSError, http.client.HTTPException) as error:
                why = repr(error)
            finally:
                connection.close()
            if began:
                return "cut after its first byte", why, None
            self.counts["refused or reset before a byte, asked again"] += 1
            time.sleep(0.25)
        return "not answered", why, None

    def exact(self) -> tuple[int, int]:
        """(requests, of which mispredicted) of new conversations, through both routers in turn."""
        pairs = []
        self._serial += 1
        talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
        for turn in range(4):
            time.sleep(1)  # the events of all answers have reached both routers
            for number, messages in enumerate(talks):
                text = f"quiet {self._serial}.{number} turn {turn}: " + "and what then? " * 20
                messages.append({"role": "user", "content": text})
                outcome, text, figures = self.ask(messages, turn)
                if outcome != "answered" or figures is None:
                    self.faults.append(f"in quiet: {outcome}: {text}")
                    continue
                pairs.append(figures)
                messages.append({"role": "assistant", "content": text})
        if not any(reported for _, reported in pairs):
            self.faults.append("in quiet: nothing was cached at all")
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        if wrong:
            click.echo(f"    predicted and reported: {wrong}")
        return len(pairs), len(wrong)
