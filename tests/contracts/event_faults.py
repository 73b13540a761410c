"""What a router believes of its workers when their KV events go wrong: how a case is made, played and judged.

Two scripted workers behind the router publish by hand-made msgpack over raw ZeroMQ what real engines publish, also what
they publish when something breaks. After each fault the router is asked for prompts whose right worker is known:

    right      the request went to the worker that holds more of its prompt, and every worker's predicted tokens are
               the true ones
    stale hit  the router believes in blocks that are gone
    false hit  the router believes in blocks that never could serve this prompt
    lost hit   the router does not know of blocks that are there
    failed     no answer

A case scripts two workers (A and B) and asks for prompts of its own, so that cases do not disturb each other. Every
prompt has a truth: the tokens that each worker could really reuse. The truths of a prompt never tie, so the right
worker is known. Prompts of the kind `control` are asked first: a router that hears nothing fails there, and not only
where its deafness happens to be wrong.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.programs import Program, module_command, request_json, wait_until
from harness.workers import BLOCK, Publisher, ScriptedWorker, block_removed, block_stored

START_S_MAX = 60.0
SETTLE_S_MAX = 12.0
"""How long the router may take to believe the truth."""
_SEVERITY = ("failed", "stale hit", "false hit", "lost hit", "right")
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
WINDOW["kv_cache_spec_sliding_window"] = 4 * BLOCK
STATE: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
AGAIN = "the last batch once more"
Batch = Any
"""An event, a list of events, the bytes of a payload, or AGAIN."""


@dataclass(frozen=True)
class Chain:
    """A prompt of whole blocks with a rest that no block holds, and the names of its blocks."""

    tokens: list[int]
    names: list[Any]

    def stored(self, start: int = 0, end: int | None = None, **fields: Any) -> dict[str, Any]:
        """The event of its blocks [start, end)."""
        end = len(self.names) if end is None else end
        parent = self.names[start - 1] if start else None
        return block_stored(self.names[start:end], self.tokens[start * BLOCK : end * BLOCK], parent, **fields)

    def removed(self, start: int = 0, end: int | None = None, **fields: Any) -> dict[str, Any]:
        return block_removed(self.names[start:end][::-1], **fields)

    def state_stored(self, blocks: int) -> dict[str, Any]:
        """Of a recurrent state that was saved after so many."""
        return block_stored([self.names[blocks - 1]], self.tokens[: blocks * BLOCK], **STATE)


@dataclass(frozen=True)
class Probe:
    """One prompt and what each worker really holds of it, in tokens."""

    tokens: list[int]
    a: int
    b: int
    fault: str = "lost hit"
    """What it is where the router chooses the other worker."""
    is_control: bool = False
    salt: str | None = None
    uses_lora: bool = False
    is_sudden: bool = False
    """Asked before anybody can know what happened: only the answer counts, not the prediction."""


@dataclass(frozen=True)
class Case:
    name: str
    play: Callable[[Play], list[Probe]]
    before: Callable[[Play], None] | None = None
    """Played before the router gets the workers."""
    is_silent: bool = False
    """The fault consists in silence: nothing may be published after it."""
    rounds: int = 3
    """How often it is played, with fresh prompts each time: a router that cannot tell must not be right by luck."""
    publisher: dict[str, Any] = field(default_factory=dict)
    block_size_b: int = BLOCK
    has_lora: bool = False
    second_group: str = ""
    """A hybrid model: `window` or `state` beside full attention."""


@dataclass
class Row:
    case: str
    verdict: str
    detail: str = ""
    """The first thing that was wrong."""


class Router:
    """`router run`; workers come and go through its admin API."""

    def __init__(self, *args: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = module_command("router", "run", "--port", "0", "--log-level", "error", *args)
        self._program = Program(command, Path(self._folder.name) / "router.log")
        self.url = self._program.await_line()

    def attach(self, workers: list[ScriptedWorker]) -> None:
        """Add these workers and wait until their events are followed. Raises RuntimeError where they are not."""
        for worker in workers:
            status, answer = request_json(f"{self.url}/workers", {"url": worker.url})
            if status != 201:
                raise RuntimeError(f"POST /workers answers {status}: {answer}")
        ids = {f"127.0.0.1:{worker.port}" for worker in workers}

        def following() -> bool:
            rows = {row["worker_id"]: row for row in request_json(f"{self.url}/workers")[1]["workers"]}
            return ids <= rows.keys() and all(
                rows[i]["state"] == "up" and all(s["up"] and s["phase"] == "live" for s in rows[i]["events"]["streams"])
                for i in ids
            )

        if not wait_until(following, START_S_MAX):
            raise RuntimeError(f"workers not followed: {request_json(f'{self.url}/workers')[1]}")

    def predict_tokens(self, body: dict[str, Any]) -> dict[int, int] | None:
        """Return port of a worker -> tokens of the prompt that the router predicts as cached; None: no answer."""
        status, answer = request_json(f"{self.url}/route", body)
        if status != 200:
            return None
        return {int(row["worker"].rpartition(":")[2]): row["cached_tokens"] for row in answer["candidates"]}

    def detach(self, workers: list[ScriptedWorker]) -> None:
        for worker in workers:
            request_json(f"{self.url}/workers/127.0.0.1:{worker.port}", method="DELETE")

    def close(self) -> None:
        self._program.stop()
        self._folder.cleanup()


class Play:
    """One case against one router: what the case plays with, and what was found."""

    def __init__(self, router: Router, case: Case, seed: int) -> None:
        self._router, self._case = router, case
        self._verdicts: list[tuple[str, str]] = []
        """(verdict, detail) of each prompt asked."""
        self.rng = random.Random(seed)
        sizes = (BLOCK, case.block_size_b)
        workers = [ScriptedWorker(f"faults-{seed}", Publisher(**case.publisher), block_size=size) for size in sizes]
        for worker in workers:
            worker.lora = f"tuned-{seed}" if case.has_lora else None
        self.a, self.b = self._workers = workers
        self.probe_plans: list[tuple[list[int], int, int, str]] = []
        """What a case's `before` leaves to its `play`: a prompt, blocks on A, blocks that B will get, what is wrong."""

    def run(self) -> Row:
        try:
            return self._run()
        except Exception as error:  # what a router does to a case is a finding, and the others still run  # noqa: BLE001
            return Row(self._case.name, "failed", f"{type(error).__name__}: {error}")
        finally:
            self._router.detach(self._workers)
            for worker in self._workers:
                worker.close()

    def _run(self) -> Row:
        if self._case.before is not None:
            self._case.before(self)
        self._router.attach(self._workers)
        unsubscribed_urls = [worker.url for worker in self._workers if not worker.publisher.await_subscriber()]
        for play in (Play._control, *[self._case.play] * self._case.rounds):
            probes = play(self)
            self.wait_until_predicted(*probes)
            for probe in probes:
                self.send_probe(probe)
        verdict, detail = min(self._verdicts, key=lambda one: _SEVERITY.index(one[0]))
        if unsubscribed_urls:
            detail = f"nobody subscribed to {', '.join(unsubscribed_urls)}. {detail}"
        return Row(self._case.name, verdict, detail)

    # What a case says -------------------------------------------------------------------------------------------------

    def chain(self, blocks: int = 10, name: Callable[[random.Random], Any] = lambda rng: rng.getrandbits(64)) -> Chain:
        tokens = [self.rng.randrange(1000, 30000) for _ in range(blocks * BLOCK + 5)]
        return Chain(tokens, [name(self.rng) for _ in range(blocks)])

    def publish(self, *batches: Batch, drop: bool = False) -> None:
        """A publishes; or (`lost`) only keeps for replay."""
        for batch in batches:
            if batch is AGAIN:
                self.a.publisher.resend_last()
            elif isinstance(batch, bytes):
                self.a.publisher.publish(payload=batch)
            else:
                self.a.publisher.publish(*(batch if isinstance(batch, list) else [batch]), drop=drop)

    def probe(self, prompt: Chain | list[int], a: int, b: int, fault: str = "lost hit", **fields: Any) -> Probe:
        """B stores `b` blocks of the prompt now; A can reuse `a` of them."""
        tokens = prompt.tokens if isinstance(prompt, Chain) else prompt
        self._store(self.b, tokens, b)
        return Probe(tokens, a * BLOCK, b * BLOCK, fault, **fields)

    def _store(self, worker: ScriptedWorker, tokens: list[int], blocks: int) -> None:
        """The worker holds so many blocks in every group of its model, under names of its own."""
        blocks_chain = Chain(tokens, self.chain(blocks).names)
        second_events = {
            "": [],
            "window": [blocks_chain.stored(**WINDOW)],
            "state": [blocks_chain.state_stored(blocks)],
        }[self._case.second_group]
        worker.publisher.publish(
            blocks_chain.stored(**FULL) if second_events else blocks_chain.stored(), *second_events
        )

    def _control(self) -> list[Probe]:
        """Two plain prompts, one on each worker: does the router follow them at all?"""
        probes = []
        for worker, a, b in ((self.a, 8, 1), (self.b, 1, 8)):
            prompt = self.chain(8)
            for holder, blocks in ((worker, 8), (self.b if worker is self.a else self.a, 1)):
                self._store(holder, prompt.tokens, blocks)
            probes.append(Probe(prompt.tokens, a * BLOCK, b * BLOCK, is_control=True))
        return probes

    # What the router makes of it --------------------------------------------------------------------------------------

    def wait_until_predicted(self, *probes: Probe) -> None:
        """Give the router the time to apply what was published: until it predicts these truths."""
        # What comes last on each stream is waited for, so that nothing is judged before it was applied. A fault that
        # consists in silence must not be broken by such a mark.
        marks = [] if self._case.is_silent or any(probe.is_control for probe in probes) else self._control()
        wait_until(lambda: all(self._predicted_tokens(p) == (p.a, p.b) for p in [*marks, *probes]), SETTLE_S_MAX)

    def send_probe(self, probe: Probe) -> None:
        """Ask for the prompt right now, and judge."""
        predicted = self._predicted_tokens(probe)
        counts_before = [len(worker.completion_bodies) for worker in self._workers]
        status, answer = request_json(f"{self._router.url}/v1/completions", self._body(probe))
        is_chosen = [len(worker.completion_bodies) > count for worker, count in zip(self._workers, counts_before)]
        truth = (probe.a, probe.b)
        description = f"truth {truth}" + (f", predicted {predicted}" if predicted is not None else "")
        if status != 200:
            self._verdicts.append(("failed", f"status {status}: {str(answer)[:100]}"))
        elif predicted is not None and predicted != truth and not probe.is_sudden:
            is_too_high = any(p > t for p, t in zip(predicted, truth))
            fault = probe.fault if probe.fault != "lost hit" else "false hit"
            self._verdicts.append((fault if is_too_high else "lost hit", description))
        elif is_chosen.index(True) != truth.index(max(truth)):
            name = "lost hit" if probe.is_control else probe.fault
            detail = f"went to {'AB'[is_chosen.index(True)]}, {description}" + " (before the fault)" * probe.is_control
            self._verdicts.append((name, detail))
        else:
            self._verdicts.append(("right", description))

    def _body(self, probe: Probe) -> dict[str, Any]:
        model = self.a.lora if probe.uses_lora else self.a.model
        body = {"model": model, "prompt": probe.tokens, "max_tokens": 1, "temperature": 0}
        return body if probe.salt is None else {**body, "cache_salt": probe.salt}

    def _predicted_tokens(self, probe: Probe) -> tuple[int, int] | None:
        """What the router predicts on A and on B."""
        predicted = self._router.predict_tokens(self._body(probe))
        return None if predicted is None else (predicted.get(self.a.port, 0), predicted.get(self.b.port, 0))
