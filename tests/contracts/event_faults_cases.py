"""Faults of event streams, case by case. What a worker can say that is easily taken for something else: encodings,
copies, owners, tiers, groups; then faults of the stream itself: gaps, restarts, late joins, a worker that dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from event_faults import AGAIN, FULL, WINDOW, Batch, Case, Chain, Play, Probe
from harness.workers import BLOCK, block_stored, pack

CASES: list[Case] = []


def case(name: str, **more: Any) -> Callable[[Callable[[Play], list[Probe]]], None]:
    return lambda play: CASES.append(Case(name, play, **more))


def says(
    name: str, batches: Callable[[Chain], list[Batch]], a: int, b: int, wrong: str = "lost hit", *,
    blocks: int = 10, named: Callable[[Any], Any] = lambda rng: rng.getrandbits(64), **more: Any,
) -> None:  # fmt: skip
    """A case of one prompt: A publishes these batches about it and can then reuse `a` blocks, B holds `b` of them."""

    @case(name, **more)
    def _(s: Play) -> list[Probe]:
        chain = s.chain(blocks, named)
        s.say(*batches(chain))
        return [s.probe(chain, a, b, wrong)]


def as_array(event: dict[str, Any]) -> list[Any]:
    """As vLLM wrote it before June 2026."""
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], "GPU"]
    return [
        "BlockStored",
        event["block_hashes"],
        event["parent_block_hash"],
        event["token_ids"],
        BLOCK,
        None,
        "GPU",
        None,
    ]


# Names and encodings --------------------------------------------------------------------------------------------------

says("a block is removed and stored again", lambda c: [c.stored(), c.removed(5, 6), c.stored(5, 6)], 10, 8)
says("a hole: a block is removed and its children stay", lambda c: [c.stored(), c.removed(5, 6)], 5, 7, "stale hit")
says("one of two copies is removed", lambda c: [c.stored(), c.stored(), c.removed()], 10, 6)
says("both copies are removed", lambda c: [c.stored(), c.stored(), c.removed(), c.removed()], 0, 2, "stale hit")
says("one batch comes twice, then its blocks are removed once",
     lambda c: [c.stored(), AGAIN, c.removed()], 0, 2, "stale hit")  # fmt: skip
says("signed hashes", lambda c: [c.stored(0, 6), c.stored(6)], 10, 8, named=lambda rng: -rng.getrandbits(63))
says("arrays and maps in one batch",
     lambda c: [[c.stored(0, 4), as_array(c.stored(4, 8)), c.stored(8)]], 10, 8)  # fmt: skip
says("a malformed and an unknown event in a batch of good ones", lambda c: [[
    c.stored(0, 5), block_stored([1, 2], c.tokens[:BLOCK], size=0), {"type": "BlockStored", "block_hashes": "many"},
    {"type": "BlockPainted", "colour": 3}, c.stored(5)]], 10, 8)  # fmt: skip
says("an unreadable batch between two good ones",
     lambda c: [c.stored(0, 5), pack([1.0, [block_stored([3], [1] * BLOCK)], None])[:-9], c.stored(5)],
     10, 8)  # fmt: skip
says("a topic", lambda c: [c.stored()], 10, 2, publisher={"topic": "kv@worker@model"})


@case("32-byte hashes")
def _(s: Play) -> list[Probe]:
    kept, gone = (s.chain(blocks, lambda rng: rng.randbytes(32)) for blocks in (10, 6))
    s.say(kept.stored(0, 6), kept.stored(6), gone.stored(), gone.removed())
    return [s.probe(kept, 10, 8), s.probe(gone, 0, 2, "stale hit")]


@case("array events")
def _(s: Play) -> list[Probe]:
    kept, gone = s.chain(10), s.chain(6)
    s.say(*([as_array(event)] for event in (kept.stored(), gone.stored(), gone.removed())))
    return [s.probe(kept, 10, 8), s.probe(gone, 0, 2, "stale hit")]


@case("workers with different block sizes", block_size_b=64)
def _(s: Play) -> list[Probe]:
    probes = []
    for a in (10, 6):
        prompt = s.chain(12)
        s.say(prompt.stored(0, a))
        s.b.publisher.publish(block_stored(s.chain(2).names, prompt.tokens[: 2 * 64], size=64))
        probes.append(Probe(prompt.tokens, a * BLOCK, 2 * 64))
    return probes


# What belongs to whom -------------------------------------------------------------------------------------------------

PEPPER = [["pepper"], *[None] * 9]
says("salted blocks and a request without the salt", lambda c: [c.stored(extra_keys=PEPPER)], 0, 2, "false hit")
says("a salt on the event, as SGLang sends it", lambda c: [c.stored(cache_salt="pepper")], 0, 2, "false hit")
says("the GPU copy goes, the CPU copy stays",
     lambda c: [c.stored(), c.stored(medium="CPU"), c.removed()], 20, 2, blocks=20)  # fmt: skip
says("the CPU copy goes too", lambda c: [c.stored(), c.stored(medium="CPU"), c.removed(), c.removed(medium="CPU")],
     0, 2, "stale hit", blocks=20)  # fmt: skip
says("the end of a prompt moves to the host, children told last",  # as our engine says it, in one batch
     lambda c: [c.stored(), [c.stored(9, medium="CPU"), c.removed(9)]], 20, 2, blocks=20)  # fmt: skip
says("all of it moves to the host, and half is evicted there",
     lambda c: [c.stored(), [c.stored(medium="CPU"), c.removed()], c.removed(5, medium="CPU")], 5, 8, "stale hit",
     blocks=20)  # fmt: skip
says("it moves to the host and back", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], [c.stored(), c.removed(medium="CPU")]], 20, 2,
     blocks=20)  # fmt: skip
says("it moves to the host and back, and leaves the device", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], [c.stored(), c.removed(medium="CPU")], c.removed()], 0, 2,
     "stale hit", blocks=20)  # fmt: skip
says("both memories lose it, the disk keeps it", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], c.stored(medium="STORAGE"), c.removed(medium="CPU")], 20, 2,
     blocks=20)  # fmt: skip
says("the disk loses its end too", lambda c: [
    c.stored(), c.stored(medium="STORAGE"), c.removed(), c.removed(5, medium="STORAGE")], 5, 8, "stale hit",
     blocks=20)  # fmt: skip
says("found on the disk at the start, then the disk is lost", lambda c: [
    c.stored(medium="STORAGE"), c.stored(0, 4), c.removed(medium="STORAGE")], 4, 8, "stale hit", blocks=20)  # fmt: skip
says("half in a medium that nobody knows", lambda c: [c.stored(0, 10), c.stored(10, medium="TAPE")], 20, 2, blocks=20)
says("children of an unknown parent, then the parent", lambda c: [c.stored(5), c.stored(0, 5)], 10, 8)


@case("children of an unknown parent")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.say(chain.stored(5))
    return [s.probe(chain.tokens[5 * BLOCK :], 0, 1, "false hit"), s.probe(chain, 0, 1, "false hit")]


@case("two workers name blocks alike, one removes its own")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.say(chain.stored())
    s.b.publisher.publish(chain.stored())
    s.settle()
    s.b.publisher.publish(chain.removed(2))
    return [Probe(chain.tokens, 10 * BLOCK, 2 * BLOCK)]


@case("AllBlocksCleared by one of two workers")
def _(s: Play) -> list[Probe]:
    old, new, other = s.chain(), s.chain(), s.chain()
    s.say(old.stored(), other.stored())
    probe = s.probe(other, 0, 4, "stale hit")
    s.say({"type": "AllBlocksCleared"}, new.stored())
    return [s.probe(old, 0, 2, "stale hit"), probe, s.probe(new, 10, 2)]


@case("salted blocks and a request with the salt")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.say(chain.stored(extra_keys=PEPPER))
    s.b.publisher.publish(chain.stored(0, 2, extra_keys=PEPPER[:2]))
    return [s.probe(chain, 10, 2, salt="pepper")]


def tuned(s: Play, chain: Chain, end: int) -> dict[str, Any]:
    return {**chain.stored(0, end, extra_keys=[[s.a.lora]] * end), "lora_id": 1, "lora_name": s.a.lora}


@case("blocks of a LoRA and a request for the base model", lora=True)
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.say(tuned(s, chain, 10))
    return [s.probe(chain, 0, 2, "false hit")]


@case("blocks of a LoRA and a request for it", lora=True)
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.say(tuned(s, chain, 10))
    s.b.publisher.publish(tuned(s, chain, 2))
    return [Probe(chain.tokens, 10 * BLOCK, 2 * BLOCK, lora=True)]


# Groups of hybrid models ----------------------------------------------------------------------------------------------

says("a sliding window that left the end of the prefix",  # full attention holds 10 blocks, the window the first 6
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)], c.removed(6, group_idx=1)], 6, 8, "false hit",
     second_group="window")  # fmt: skip
says("a sliding window that left the beginning of the prefix",  # what lies before the window is not needed
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)], c.removed(0, 6, group_idx=1)], 10, 8,
     second_group="window")  # fmt: skip
says("a recurrent state that is kept at one point only",  # full attention holds 10 blocks, the state is that of 4
     lambda c: [[c.stored(**FULL), c.state(4)]], 4, 6, "false hit", second_group="state")  # fmt: skip
says("a sliding window that moved to the host",
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)],
                [c.stored(15, **WINDOW, medium="CPU"), c.removed(15, group_idx=1)]], 20, 2, blocks=20,
     second_group="window")  # fmt: skip
says("a sliding window that left the host, too",  # full attention holds 20 blocks, the window the first 6
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)],
                [c.stored(6, **WINDOW, medium="CPU"), c.removed(6, group_idx=1)],
                c.removed(6, group_idx=1, medium="CPU")], 6, 8, "false hit", blocks=20,
     second_group="window")  # fmt: skip
says("a recurrent state that moved to the host", lambda c: [[c.stored(**FULL), c.state(20)], [
    {**c.state(20), "medium": "CPU"}, c.removed(19, group_idx=1)]], 20, 2, blocks=20, second_group="state")  # fmt: skip
says("a recurrent state that is gone from the host, too", lambda c: [[c.stored(**FULL), c.state(20)], [
    {**c.state(20), "medium": "CPU"}, c.removed(19, group_idx=1)], c.removed(19, group_idx=1, medium="CPU")], 0, 3,
     "false hit", blocks=20, second_group="state")  # fmt: skip
says("a recurrent state that is gone",
     lambda c: [[c.stored(**FULL), c.state(10)], c.removed(9, group_idx=1)], 0, 3, "false hit",
     second_group="state")  # fmt: skip


# Gaps: a stream breaks once, so these have one round ------------------------------------------------------------------


def filled(s: Play) -> Chain:
    """A prompt that A holds wholly and B a little, already known to the router."""
    chain = s.chain()
    s.say(chain.stored())
    s.settle(s.probe(chain, 10, 2))
    return chain


def gone(chain: Chain) -> Probe:
    """What `filled` stored, when A has lost it."""
    return Probe(chain.tokens, 0, 2 * BLOCK, "stale hit")


def after(s: Play) -> Probe:
    """A prompt stored on A after the fault: is A still heard?"""
    chain = s.chain()
    s.say(chain.stored())
    return s.probe(chain, 10, 2)


def gap(s: Play) -> list[Probe]:
    chain, lost = filled(s), s.chain()
    s.say(chain.removed(), lost.stored(), lost=True)
    found = [gone(chain), after(s)]
    if s.a.publisher.replay_endpoint is None:
        return found  # nobody can know of these blocks, and not to know costs one prefill
    return [*found, s.probe(lost, 10, 2)]


case("a gap that replay covers", rounds=1)(gap)
case("a gap that replay of an older vLLM covers (no topic in replies)", rounds=1,
     publisher={"replies_with_topic": False})(gap)  # fmt: skip
case("a gap without replay", rounds=1, publisher={"replays": False})(gap)


@case("a gap that the ring no longer covers", rounds=1)
def _(s: Play) -> list[Probe]:
    chain = filled(s)
    s.say(chain.removed(), lost=True)
    s.a.publisher.drop_oldest(len(s.a.publisher.replay_buffer))
    return [gone(chain), after(s)]


@case("the last batch is lost, then silence", rounds=1, silent=True)
def _(s: Play) -> list[Probe]:
    chain = filled(s)
    s.say(chain.removed(), lost=True)
    return [gone(chain)]


# Restarts -------------------------------------------------------------------------------------------------------------


def restarted(s: Play, *unheard: Batch, ahead: int | None = None) -> Chain:
    """A's publisher begins anew; heard again once it is so many seqs ahead of its past life, or at once."""
    chain, seen = filled(s), s.a.publisher.seq
    s.a.publisher.restart()
    s.say(*unheard, lost=True)
    while ahead is not None and s.a.publisher.seq < seen + ahead:
        s.say(s.chain(1).stored(), lost=True)
    s.a.publisher.await_subscriber()
    return chain


@case("a restart at seq 0", rounds=1)
def _(s: Play) -> list[Probe]:
    return [gone(restarted(s)), after(s)]


@case("a restart whose seq is higher already when it is heard again", rounds=1)
def _(s: Play) -> list[Probe]:
    early = s.chain()
    return [gone(restarted(s, early.stored(), ahead=4)), s.probe(early, 10, 2), after(s)]


@case("a restart whose next seq is just the one expected", rounds=1)
def _(s: Play) -> list[Probe]:
    return [gone(restarted(s, ahead=0)), after(s)]


def idle(s: Play) -> list[Probe]:
    return [gone(restarted(s))]


case("a restart of an idle worker", rounds=1, silent=True)(idle)
case("a restart of an idle worker without replay", rounds=1, silent=True, publisher={"replays": False})(idle)


@case("a worker dies and comes back empty", rounds=1)
def _(s: Play) -> list[Probe]:
    chain, orphaned = filled(s), s.chain()
    s.say(orphaned.stored())
    s.settle(s.probe(orphaned, 10, 2))
    s.a.kill()
    s.ask(Probe(orphaned.tokens, 0, 2 * BLOCK, "stale hit", sudden=True))
    s.a.restart()
    s.a.publisher.await_subscriber()
    return [gone(chain), after(s)]


# Late joins: A's part is played before the router has the workers; `s.told` is what will be asked ---------------------


def ring(s: Play) -> None:
    kept, gone = s.chain(), s.chain()
    s.say(kept.stored(), gone.stored(), gone.removed())
    s.told = [(kept.tokens, 10, 2, "lost hit"), (gone.tokens, 0, 2, "stale hit")]


def snapshot(s: Play) -> None:
    """The ring has lost the beginning; the publisher knows what is resident all the same."""
    ring(s)
    s.a.publisher.drop_oldest(2)
    s.a.publisher.snapshot = [pack([time.time(), [Chain(s.told[0][0], s.chain().names).stored()], None])]


def rest(s: Play) -> None:
    """The ring has lost the beginning and nobody knows it: what is left must not be taken for more than it is."""
    lost, orphan = s.chain(), s.chain()
    s.say(lost.stored(), Chain(orphan.tokens, lost.names[:5] + orphan.names[5:]).stored(5), lost.removed())
    s.a.publisher.drop_oldest(1)
    s.told = [(lost.tokens, 0, 2, "stale hit"), (orphan.tokens[5 * BLOCK :], 0, 1, "false hit")]


def joined(s: Play) -> list[Probe]:
    return [*(s.probe(*told) for told in s.told), after(s)]


case("a late join that the ring covers", rounds=1, before=ring)(joined)
case("a late join with a snapshot", rounds=1, before=snapshot)(joined)
case("a late join that the ring no longer covers", rounds=1, before=rest)(joined)
case("a late join without replay", rounds=1, before=rest, publisher={"replays": False})(joined)
