"""A whole cluster in one thread: workers, routers and the network between them, on a virtual clock, from one seed.

    Cluster(seed).run()

plays a random history of requests and faults, lets everything go quiet, and raises AssertionError (with the seed)
where a router's index is not the union of what its workers really hold. The stream machine, the index, the ring, the
shadow and the engine's cache are the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from network import Faults, SimPublisher, Wire
from workers import ForeignWorker, OurWorker, Prompt, Worker, draw_prompt

from events import Apply, Clear, Instruction, RequestReplay, RequestSnapshot, StreamConfig, StreamPhase, StreamState
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.replay_replies import SeqAndPayload
from router.index.protocol import PrefixIndex, Scope

MODEL = "model"
TICK_S = 0.05
ACTIVE_TICKS = 240
QUIET_TICKS = 1200

MakeIndex = Callable[[], PrefixIndex]
MakeStream = Callable[[StreamConfig], StreamState]


class Node:
    """A worker with its publisher, through crashes."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.kind = rng.choice([OurWorker, OurWorker, ForeignWorker])
        self.ring_size = rng.choice([3, 20, 10_000])
        self.up = False
        self.start()

    def start(self) -> None:
        self.worker: Worker = self.kind(self.rng)
        self.publisher = SimPublisher(self.ring_size, self.kind.snapshots)
        self.up = True

    @property
    def ring_covers_all(self) -> bool:
        return self.publisher.next_seq <= self.ring_size


class Link:
    """A router's view of one worker: stream state, the wire to it, and the reply under way."""

    def __init__(self, node: Node, router: Router, rng: random.Random, make_stream: MakeStream) -> None:
        self.node, self.router, self.rng = node, router, rng
        self.holder = router.index.add_holder(MODEL)
        self.stream = make_stream(StreamConfig(max_recent_batches=rng.choice([2, 16, 1024]), max_early_batches=64))
        self.wire = Wire(rng)
        self.reply: tuple[int, Iterator[SeqAndPayload]] | None = None
        self.cut_until = 0.0

    def perform(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, Apply):
                report = self.router.index.ingest(self.holder, instruction.payload)
                assert not report.malformed, report.malformed
            elif isinstance(instruction, Clear):
                self.router.index.clear(self.holder)
            elif isinstance(instruction, RequestReplay | RequestSnapshot):
                start = instruction.start_seq if isinstance(instruction, RequestReplay) else SNAPSHOT_SEQ
                reachable = self.node.up and now >= self.cut_until
                self.reply = (instruction.request_id, self.node.publisher.reply(start, now)) if reachable else None

    def connect(self, now: float) -> None:
        self.wire.reset(now)
        self.reply = None
        self.perform(self.stream.on_connected(now), now)

    def disconnect(self, now: float) -> None:
        self.wire.reset(now)
        self.reply = None
        self.perform(self.stream.on_disconnected(), now)

    def advance(self, now: float, faults: Faults) -> None:
        """Deliver what is due and a few messages of the reply under way; then let the stream look at the clock."""
        for seq, payload in self.wire.due(now):
            self.perform(self.stream.on_live_batch(seq, payload, now), now)
        for _ in range(self.rng.randrange(1, 8)):
            if self.reply is None:
                break
            if self.rng.random() < faults.lose_reply:
                self.reply = None
                break
            request_id, messages = self.reply
            seq, payload = next(messages)
            if seq == END_SEQ:
                self.reply = None
                self.perform(self.stream.on_reply_end(request_id, now), now)
            else:
                self.perform(self.stream.on_reply(request_id, seq, payload, now), now)
        self.perform(self.stream.on_tick(now), now)


class Router:
    def __init__(self, nodes: list[Node], rng: random.Random, make_index: MakeIndex, make_stream: MakeStream) -> None:
        self._nodes, self._rng, self._make_index, self._make_stream = nodes, rng, make_index, make_stream
        self.start()

    def start(self) -> None:
        self.index = self._make_index()
        self.links = [Link(node, self, self._rng, self._make_stream) for node in self._nodes]


class Cluster:
    """One seed's history. `make_index` and `make_stream` can be replaced, also by broken ones."""

    def __init__(self, seed: int, make_index: MakeIndex, make_stream: MakeStream = StreamState) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = Faults.draw(self.rng)
        self.nodes = [Node(f"worker-{i}", self.rng) for i in range(self.rng.choice([1, 2, 3]))]
        routers = range(self.rng.choice([1, 1, 2]))
        self.routers = [Router(self.nodes, self.rng, make_index, make_stream) for _ in routers]

    def run(self) -> None:
        for link in self._links():
            if self.rng.random() < 0.8:  # the others join late
                link.connect(self.now)
        for _ in range(ACTIVE_TICKS):
            self._inject_fault()
            self._tick(act=True)
        self.faults = Faults()
        for node in self.nodes:
            if not node.up:
                node.start()
        for link in self._links():
            link.cut_until = 0.0
            if not link.stream.is_online:
                link.connect(self.now)
        for node in self.nodes:
            for events in node.worker.finish(self.now):
                self._publish(node, events)
        for _ in range(QUIET_TICKS):
            self._tick(act=False)
        self.check()

    def check(self) -> None:
        """Every index equals the union of what is resident; where a foreign ring was too small, it holds no more."""
        for router in self.routers:
            entries = 0
            for link in router.links:
                story = f"seed {self.seed}, {link.node.name} ({link.node.kind.__name__}, ring {link.node.ring_size})"
                assert link.stream.phase is StreamPhase.LIVE, f"{story}: still in {link.stream.phase}"
                exact = link.node.kind.snapshots or link.node.ring_covers_all
                entry_count = self._check_link(router, link, exact, story)
                entries += entry_count
            assert router.index.stats().entries == entries, f"seed {self.seed}: the index holds other entries"

    def _check_link(self, router: Router, link: Link, exact: bool, story: str) -> int:
        probe_rng = random.Random(self.seed)
        for _ in range(150):
            prompt = draw_prompt(probe_rng)
            actual_tokens = link.node.worker.usable(prompt)
            predicted_tokens = self._predict(router, link, prompt)
            if exact:
                assert predicted_tokens == actual_tokens, (
                    f"{story}: predicted {predicted_tokens} of {prompt}, really {actual_tokens}"
                )
            else:
                assert predicted_tokens <= actual_tokens, (
                    f"{story}: promises {predicted_tokens} of {prompt}, really {actual_tokens}"
                )
        entry_count = sum(int(str(group["blocks"])) for group in router.index.groups(link.holder))
        if exact:
            resident = link.node.worker.resident_count()
            assert entry_count == resident, f"{story}: {entry_count} blocks in the index, {resident} in the worker"
        return entry_count

    def _predict(self, router: Router, link: Link, prompt: Prompt) -> int:
        matches = router.index.match(list(prompt[0]), Scope(MODEL, salt=prompt[1]))
        return next((match.tokens for match in matches if match.holder == link.holder), 0)

    def _links(self) -> Iterator[Link]:
        for router in self.routers:
            yield from router.links

    def _publish(self, node: Node, events: list) -> None:
        if not events:
            return
        seq, payload = node.publisher.publish(events, self.now)
        for link in self._links():
            if link.node is node and link.stream.is_online and self.now >= link.cut_until:
                link.wire.send(seq, payload, self.now, self.faults)

    def _tick(self, act: bool) -> None:
        self.now += TICK_S
        if act:
            for node in self.nodes:
                if node.up:
                    self._publish(node, node.worker.act(self.now))
        for link in self._links():
            link.advance(self.now, self.faults)

    def _inject_fault(self) -> None:
        rng, faults = self.rng, self.faults
        for node in self.nodes:
            if node.up and rng.random() < faults.crash:
                node.up = False
                for link in self._links():
                    if link.node is node:
                        link.disconnect(self.now)
            elif not node.up and rng.random() < 0.1:
                node.start()
        for router in self.routers:
            if rng.random() < faults.restart_router:
                router.start()
        for link in self._links():
            if link.stream.is_online and rng.random() < faults.cut:
                if rng.random() < 0.5:
                    link.disconnect(self.now)
                else:  # nobody notices: a full queue somewhere
                    link.cut_until = self.now + rng.random() * 2
            elif not link.stream.is_online and link.node.up and rng.random() < 0.2:
                link.connect(self.now)
