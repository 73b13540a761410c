"""The disk under host memory: what comes to host memory is written there, what a prompt finds there comes back to it.

It takes no part in the moves of the two memories above: a block there is a copy, and what the disk has does not depend
on what they have. Down: a block that has come to host memory, and before it those that it hangs from, wherever they
are, is held there (what only the device has is copied there, for this alone) until a thread has written it. Up: a
request whose prompt goes on on the disk waits while a thread reads these blocks into memory that is held for them; they
are then blocks of host memory as any others. It waits no longer than a bound in seconds, and is computed from there on.

Owns what is on its way to the disk and from it. Refuses to know files and threads (`Disk`) and clocks. Invariants: a
thread touches memory of the host only while it is held here and no step that was planned before touches it;
"STORAGE" is announced when the bytes are written, parents first, and taken back before a slot is used again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import islice

from engine.cache.disk.index import DiskIndex
from engine.cache.disk.jobs import Disk, DiskTotals, Read, Wait, Write
from engine.cache.host import HostTier
from engine.cache.nodes import DiskBlock, HashBlock, Node
from engine.cache.pool import Block
from engine.cache.prefix import FULL, PrefixTree
from engine.types import Move, Sequence, Way

log = logging.getLogger("engine.disk")

WAIT_S_MIN, WAIT_S_MAX = 0.1, 5.0
"""Bounds of how long a request waits for the disk; between them as long as computing the same would take."""
HELD_SHARE = 8
"""One part in so many of host memory is held for what is being written."""
READ_SHARE = 2
"""And one in so many for what is being read, and for those who wait for it."""
STAGED_MAX = 4
"""Blocks that only the device has, copied with one step."""
WANTED_MAX = 4096
"""Blocks that are to be written; beyond these the oldest is passed over."""
VISITED_MAX = 512
"""Nodes that are looked at for these between two steps."""
FAILURES_MAX = 3
"""Writes that fail in a row before no more are tried."""


class DiskTier:
    """Under `host`, whose blocks are all of one kind. `moves` is the plan's list, to which copies are added."""

    def __init__(self, disk: Disk, host: HostTier, tree: PrefixTree, moves: list[Move], block_size: int) -> None:
        assert len(host.pool.blocks_per_unit) == 1, "attention alone"
        self.disk = disk
        self.totals = DiskTotals()
        self.index = DiskIndex(disk.slots, disk.found)
        self._host = host
        self._tree = tree
        self._moves = moves
        self._block_size = block_size
        blocks = len(host.pool.units) * host.pool.blocks_per_unit[FULL]
        self._held_max = max(1, blocks // HELD_SHARE)
        self._read_max = max(1, blocks // READ_SHARE)
        self._wanted: OrderedDict[Node, None] = OrderedDict()
        self._stalled: dict[Node, list[Node]] = {}
        """Others of these, by the node above that cannot be held yet: the device has it, or it is on its way down."""
        self._visited = 0
        self._writes: deque[Write] = deque()
        """Not handed to the thread yet, parents first."""
        self._writing: dict[DiskBlock, Block[Node]] = {}
        self._done: list[Block[Node]] = []
        """Written, and held still, parents first."""
        self._staged: list[Write] = []
        """Of these, what the plan being made copies."""
        self._reads: deque[Read] = deque()
        """Not handed to the thread yet."""
        self._reading: dict[DiskBlock, Read] = {}
        """All of them."""
        self._waits: dict[Sequence, Wait] = {}
        self._open: dict[Wait, None] = {}
        """Those that are not over."""
        self._planned = self._over = 0
        """Steps."""
        self._failures = 0
        """Writes, since one succeeded."""
        self._given_up = False
        self._token_s: float | None = None
        """What computing a token of a prompt takes."""
        self._prompt_tokens = 0
        """Of the step that was over last."""
        self._now = 0.0
        for entry in self.index.by_path():
            tree.log.saved(entry)

    # ------------------------------------------------------------------ questions

    @property
    def busy(self) -> bool:
        """Whether the thread has something to do, or done something that was not taken in."""
        return bool(self._writing or self._reading or self._done or self._wanted)

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for it."""
        return bool(self._open)

    @property
    def usage(self) -> float:
        return self.index.used / self.index.slots

    # ------------------------------------------------------------------ down

    def arrived(self, owns: Iterable[tuple[Block[Node], int]]) -> None:
        """A step is over that has filled these (block of the host, content)."""
        for own, content in owns:
            if own.content != content:
                continue
            own.there = content
            node = own.node
            if node is not None and not self._given_up:
                self._wanted[node] = None
                self._wanted.move_to_end(node)
                self._retry(node)
        while len(self._wanted) > WANTED_MAX:
            self._wanted.popitem(last=False)
            self.totals.passed_over += 1

    def plan(self) -> list[Write]:
        """A step is planned. Returns what it copies to be written."""
        self._planned += 1
        if self._stalled:
            self._retry(next(iter(self._stalled)))
        self._save_wanted(stage=True)
        staged, self._staged = self._staged, []
        return staged

    def _save_wanted(self, *, stage: bool) -> None:
        self._visited = 0
        while self._wanted and self._room > 0 and self._visited < VISITED_MAX:
            node = next(iter(self._wanted))
            saved = self._save(node, stage)
            if saved is None:
                break
            del self._wanted[node]
            if isinstance(saved, Node):
                self._stalled.setdefault(saved, []).append(node)
            else:
                self.totals.passed_over += not saved
        while len(self._stalled) > WANTED_MAX:
            self.totals.passed_over += len(self._stalled.pop(next(iter(self._stalled))))
        self._flush()

    def _retry(self, stalls: Node) -> None:
        """It may be there now."""
        for node in self._stalled.pop(stalls, ()):
            self._wanted[node] = None

    @property
    def _room(self) -> int:
        """Blocks that may be held besides for the thread to write."""
        return self._held_max - len(self._writes) - len(self._writing) - len(self._done)

    def _save(self, node: Node, stage: bool) -> bool | Node | None:
        """Hold the path to `node` for the thread; False where that cannot be. None where there is no room just now;
        or the node of the path that cannot be held yet.

        `stage`: the step being planned may copy what only the device has.
        """
        if node not in self._tree or not node.on_host(FULL):
            return True  # it has left, and will come again or not
        path = self._missing(node)
        if path is None:
            return False
        parent, missing = path
        for one in missing:
            if self._room <= 0:
                return None
            found = self._hold(one, stage)
            if found is None:
                return one
            own, ready = found
            evicted: list[DiskBlock] = []
            entry = self.index.add(one.name, parent, evicted) if self.disk.fits(one.name) else None
            self._removed(evicted)
            if entry is None:
                self._host.released(own)
                return False
            write = Write(entry, own, ready)
            self._writes.append(write)
            if not ready:
                block = one.blocks[FULL]
                assert block is not None
                self._moves.append(Move(FULL, block.id, own.id, Way.TO_HOST))
                self._staged.append(write)
            one.entry = parent = entry
        if not missing and parent is not None:
            self.index.touch([parent])
        return True

    def _missing(self, node: Node) -> tuple[DiskBlock | None, list[Node]] | None:
        """(the entry above them, what of the path to `node` is not on the disk); None: its name is another's there."""
        path: list[Node] = []
        at: Node | None = node
        self._visited += 1
        while at is not None and (at.entry is None or at.entry.forgotten):
            self._visited += 1
            path.append(at)
            at = at.parent
        entry = None if at is None else at.entry
        while path:
            found = self.index.find(path[-1].name, entry)
            if found is None:
                break
            entry = path.pop().entry = found
        if any(self.index.is_taken(one.hash) for one in path):
            return None
        path.reverse()
        return entry, path

    def _hold(self, node: Node, stage: bool) -> tuple[Block[Node], bool] | None:
        """Host memory for the block's bytes, held, and whether they are there: else the step being planned brings them.

        None where they are on their way there, or cannot be brought now.
        """
        own = None if node.host is None else node.host[FULL]
        if own is not None:
            if own.there != own.content:
                return None
            return self._host.hold(node, FULL), True
        if not stage or not node.has(FULL) or len(self._staged) >= STAGED_MAX:
            return None
        own = self._host.pool.allocate(FULL)
        if own is None:
            return None
        self._host.renew(own)
        return own, False

    def _flush(self) -> None:
        """Hand on what is there, parents first."""
        while self._writes and self._writes[0].ready:
            write = self._writes.popleft()
            if write.entry.forgotten:
                self._host.released(write.own)
                self.index.released(write.entry)
            else:
                self._writing[write.entry] = write.own
                self.disk.write(write.entry, write.own.id)

    def _removed(self, entries: Iterable[DiskBlock]) -> None:
        for entry in entries:
            self._tree.log.unsaved(entry)

    # ------------------------------------------------------------------ steps

    def over(self, staged: Items[Write], prompt_tokens: int = 0, *, failed: bool = False) -> None:
        """A step is over that copied these and computed so many tokens of prompts; `failed`: or may not have."""
        self._over += 1
        self._prompt_tokens = prompt_tokens
        for write in staged:
            write.ready = True
            if failed and not write.entry.forgotten:
                self._removed(self.index.forget(write.entry))
        self._flush()

    def poll(self, now: float, then_s: float | None = None) -> None:
        """Between two plans: take in what the thread has done, and hand it what it may do.

        `then_s`: when that was done last, where since then the loop has waited for nothing but steps.
        """
        if then_s is not None and self._prompt_tokens >= self._block_size:
            self._learn(self._prompt_tokens, now - then_s)
        self._prompt_tokens = 0
        self._now = now
        for entry, succeeded in self.disk.done():
            if (own := self._writing.pop(entry, None)) is not None:
                self._done.append(own)
                self._was_written(entry, succeeded)
            else:
                self._was_read(self._reading.pop(entry), succeeded)
        if self.disk.lost:
            self._lose()
        self._begin_reads(self._planned + bool(self._moves))
        for wait in list(self._open):
            if now >= wait.until_s:
                self._end(wait)
        if self._done and (not self._writing or 2 * self._room < self._held_max):
            done, self._done = self._done, []
            self._release(done)
        self._save_wanted(stage=False)

    def _release(self, owns: list[Block[Node]]) -> None:
        """Let these go, parents first. What they hang from becomes younger than they are: by age it goes after them."""
        above: dict[Node, None] = {}
        for own in reversed(owns):
            at = None if own.node is None else own.node.parent
            self._host.released(own)
            while at is not None and at not in above:
                above[at] = None
                at = at.parent
        for node in sorted(above, key=lambda node: node.depth, reverse=True):
            if node.host is not None and (held := node.host[FULL]) is not None and not held.refs:
                self._host.pool.acquire(held)
                self._host.pool.release(held)

    def _learn(self, tokens: int, seconds: float) -> None:
        """Computing so many tokens of prompts took so long."""
        token_s = seconds / tokens
        self._token_s = token_s if self._token_s is None else 0.8 * self._token_s + 0.2 * token_s

    def _was_written(self, entry: DiskBlock, succeeded: bool) -> None:
        if not self._given_up:
            self._failures = 0 if succeeded else self._failures + 1
        self.totals.stored += succeeded
        self.totals.failed_writes += not succeeded
        if not entry.forgotten and succeeded:
            self.index.written(entry)
            self._tree.log.saved(entry)
            return
        if not entry.forgotten:
            self._removed(self.index.forget(entry))
        self.index.released(entry)
        if succeeded:
            self.disk.erase(entry)
        elif self._failures == FAILURES_MAX and not self._given_up:
            log.warning("%d writes in a row have failed: nothing more is written to the disk cache", FAILURES_MAX)
            self.give_up()

    # ------------------------------------------------------------------ up

    def awaits(self, seq: Sequence, known: Items[Node], names: Items[HashBlock], count: int) -> bool:
        """Whether `seq` should wait for the disk: of its first `count` blocks `names`, `known` is known.

        Begins to read what the disk has more.
        """
        wait = self._waits.get(seq)
        if wait is None:
            wait = self._waits[seq] = Wait(self._now)
            self._open[wait] = None
            entries = self.index.match(islice(names, count))
            self.index.touch(entries)
            wait.until_s += self._patience_s(len(entries) - len(known))
        if wait.over:
            return False
        if wait.asks:
            self._ask(wait, known, self.index.match(islice(names, count)))
        if not wait.asks and wait.last not in self._reading:
            self._end(wait)
        return not wait.over

    def forget(self, seq: Sequence) -> None:
        """The request is gone."""
        wait = self._waits.pop(seq, None)
        if wait is not None and not wait.over:
            self._end(wait)

    def _patience_s(self, blocks: int) -> float:
        if self._token_s is None:
            return WAIT_S_MAX
        return min(max(blocks * self._block_size * self._token_s, WAIT_S_MIN), WAIT_S_MAX)

    def _ask(self, wait: Wait, known: Items[Node], entries: Items[DiskBlock]) -> None:
        """Have read what `entries` have more than `known`, as far as there is room, and time."""
        rest = entries[len(known) :]
        wait.asks = False
        if not rest or self._now + self.disk.read_s(len(rest)) >= wait.until_s:
            return
        if rest[0] in self._reading:
            wait.last = next(entry for entry in reversed(rest) if entry in self._reading)
            return
        if known and not (known[-1].has(FULL) or known[-1].on_host(FULL)):
            wait.asks = True  # a step computes it; then what hangs from it can be taken in
            return
        room = self._read_max - len(self._reading) - sum(len(other.held) for other in self._open)
        if room <= 0:
            wait.asks = True
            return
        for node, entry in zip(known, entries):  # both are the same prefix: that of the request
            node.entry = entry
            own = None if node.host is None else node.host[FULL]
            if own is not None and own.there == own.content and len(wait.held) < room // 2:
                wait.held.append(self._host.hold(node, FULL))
        for entry in rest[: room - len(wait.held)]:
            own = None if entry in self._reading else self._host.pool.allocate(FULL)
            if own is None:
                break
            self._host.renew(own)
            self.index.pin(entry)
            read = self._reading[entry] = Read(entry, own, wait)
            self._reads.append(read)
            wait.last = entry
        if not self._moves:
            self._begin_reads(self._planned)

    def _begin_reads(self, behind: int) -> None:
        """Those that are new go behind so many steps."""
        for read in self._reads:
            if read.behind is None:
                read.behind = behind
        while self._reads and (first := self._reads[0].behind) is not None and first <= self._over:
            read = self._reads.popleft()
            self.disk.read(read.entry, read.own.id)

    def _was_read(self, read: Read, succeeded: bool) -> None:
        entry, own = read.entry, read.own
        self.index.unpin(entry)
        if not succeeded:
            self.totals.failed_reads += 1
            if not entry.forgotten:
                for one in self.index.forget(entry):
                    self._tree.log.unsaved(one)
                    self.disk.erase(one)
        elif not entry.forgotten and self._take_in(entry, own):
            self.totals.loaded += 1
            if not read.wait.over:
                read.wait.held.append(own)
                return
        self._host.released(own)

    def _take_in(self, entry: DiskBlock, own: Block[Node]) -> bool:
        """Give what was read its name in host memory, if what it hangs from is there or on the device still."""
        parent = None
        if entry.parent is not None:
            parent = self._tree.at(entry.parent.hash)
            if parent is None or parent.entry is not entry.parent or not (parent.has(FULL) or parent.on_host(FULL)):
                return False
        node = self._host.take_in(entry.name, parent, own)
        if node is not None:
            node.entry = entry
        return node is not None

    def _end(self, wait: Wait) -> None:
        wait.over, wait.asks = True, False
        del self._open[wait]
        held, wait.held = wait.held, []
        self._release(held)

    # ------------------------------------------------------------------ out

    def clear(self) -> None:
        """Every name is forgotten, as those of host memory are already."""
        self._wanted.clear()
        self._stalled.clear()
        self.index.clear()
        self.disk.clear()
        for wait in list(self._open):
            self._end(wait)

    def _lose(self) -> None:
        """What it has cannot be read any more, and is there no more for anybody."""
        self.give_up()
        for entry in [entry for entry in self.index if entry.parent is None]:
            self._removed(self.index.forget(entry))

    def give_up(self) -> None:
        """Write nothing more until the next start."""
        self._given_up = True
        self._wanted.clear()
        self._stalled.clear()

    def references(self) -> list[Block[Node]]:
        """Blocks of the host that are held, one entry each time."""
        held = [write.own for write in self._writes] + list(self._writing.values())
        held += self._done + [read.own for read in self._reading.values()]
        return held + [own for wait in self._open for own in wait.held]

    def check_invariants(self) -> None:
        self.index.check_invariants([*(write.entry for write in self._writes), *self._writing])
        assert all(read.entry.pins for read in self._reading.values())
        assert not self._staged
        assert set(self._open) == {wait for wait in self._waits.values() if not wait.over}
        assert self._room >= 0
        for read in self._reads:
            assert self._reading[read.entry] is read
