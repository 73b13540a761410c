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


def case(name: str, **fields: Any) -> Callable[[Callable[[Play], list[Probe]]], None]:
    return lambda play: CASES.append(Case(name, play, **fields))


def event_case(
    name: str, batches: Callable[[Chain], list[Batch]], blocks_a: int, blocks_b: int, wrong: str = "lost hit", *,
    blocks: int = 10, make_name: Callable[[Any], Any] = lambda rng: rng.getrandbits(64), **fields: Any,
) -> None:  # fmt: skip
    """A case of one prompt: A publishes these batches about it and can then reuse `a` blocks, B holds `b` of them."""

    @case(name, **fields)
    def _(s: Play) -> list[Probe]:
        chain = s.chain(blocks, make_name)
        s.publish(*batches(chain))
        return [s.probe(chain, blocks_a, blocks_b, wrong)]


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

event_case("a block is removed and stored again", lambda c: [c.stored(), c.removed(5, 6), c.stored(5, 6)], 10, 8)
event_case(
    "a hole: a block is removed and its children stay", lambda c: [c.stored(), c.removed(5, 6)], 5, 7, "stale hit"
)
event_case("one of two copies is removed", lambda c: [c.stored(), c.stored(), c.removed()], 10, 6)
event_case("both copies are removed", lambda c: [c.stored(), c.stored(), c.removed(), c.removed()], 0, 2, "stale hit")
event_case("one batch comes twice, then its blocks are removed once",
     lambda c: [c.stored(), AGAIN, c.removed()], 0, 2, "stale hit")  # fmt: skip
event_case("signed hashes", lambda c: [c.stored(0, 6), c.stored(6)], 10, 8, make_name=lambda rng: -rng.getrandbits(63))
event_case("arrays and maps in one batch",
     lambda c: [[c.stored(0, 4), as_array(c.stored(4, 8)), c.stored(8)]], 10, 8)  # fmt: skip
event_case("a malformed and an unknown event in a batch of good ones", lambda c: [[
    c.stored(0, 5), block_stored([1, 2], c.tokens[:BLOCK], size=0), {"type": "BlockStored", "block_hashes": "many"},
    {"type": "BlockPainted", "colour": 3}, c.stored(5)]], 10, 8)  # fmt: skip
event_case("an unreadable batch between two good ones",
     lambda c: [c.stored(0, 5), pack([1.0, [block_stored([3], [1] * BLOCK)], None])[:-9], c.stored(5)],
     10, 8)  # fmt: skip
event_case("a topic", lambda c: [c.stored()], 10, 2, publisher={"topic": "kv@worker@model"})


@case("32-byte hashes")
def _(s: Play) -> list[Probe]:
    kept, gone = (s.chain(blocks, lambda rng: rng.randbytes(32)) for blocks in (10, 6))
    s.publish(kept.stored(0, 6), kept.stored(6), gone.stored(), gone.removed())
    return [s.probe(kept, 10, 8), s.probe(gone, 0, 2, "stale hit")]


@case("array events")
def _(s: Play) -> list[Probe]:
    kept, gone = s.chain(10), s.chain(6)
    s.publish(*([as_array(event)] for event in (kept.stored(), gone.stored(), gone.removed())))
    return [s.probe(kept, 10, 8), s.probe(gone, 0, 2, "stale hit")]


@case("workers with different block sizes", block_size_b=64)
def _(s: Play) -> list[Probe]:
    probes = []
    for a in (10, 6):
        prompt = s.chain(12)
        s.publish(prompt.stored(0, a))
        s.b.publisher.publish(block_stored(s.chain(2).names, prompt.tokens[: 2 * 64], size=64))
        probes.append(Probe(prompt.tokens, a * BLOCK, 2 * 64))
    return probes


# What belongs to whom -------------------------------------------------------------------------------------------------

PEPPER = [["pepper"], *[None] * 9]
event_case("salted blocks and a request without the salt", lambda c: [c.stored(extra_keys=PEPPER)], 0, 2, "false hit")
event_case("a salt on the event, as SGLang sends it", lambda c: [c.stored(cache_salt="pepper")], 0, 2, "false hit")
event_case("the GPU copy goes, the CPU copy stays",
     lambda c: [c.stored(), c.stored(medium="CPU"), c.removed()], 20, 2, blocks=20)  # fmt: skip
event_case("the CPU copy goes too", lambda c: [c.stored(), c.stored(medium="CPU"), c.removed(),
                                             c.removed(medium="CPU")], 0, 2, "stale hit", blocks=20)  # fmt: skip
event_case("the end of a prompt moves to the host, children told last",  # as our engine says it, in one batch
     lambda c: [c.stored(), [c.stored(9, medium="CPU"), c.removed(9)]], 20, 2, blocks=20)  # fmt: skip
event_case("all of it moves to the host, and half is evicted there",
     lambda c: [c.stored(), [c.stored(medium="CPU"), c.removed()], c.removed(5, medium="CPU")], 5, 8, "stale hit",
     blocks=20)  # fmt: skip
event_case("it moves to the host and back", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], [c.stored(), c.removed(medium="CPU")]], 20, 2,
     blocks=20)  # fmt: skip
event_case("it moves to the host and back, and leaves the device", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], [c.stored(), c.removed(medium="CPU")], c.removed()], 0, 2,
     "stale hit", blocks=20)  # fmt: skip
event_case("both memories lose it, the disk keeps it", lambda c: [
    c.stored(), [c.stored(medium="CPU"), c.removed()], c.stored(medium="STORAGE"), c.removed(medium="CPU")], 20, 2,
     blocks=20)  # fmt: skip
event_case("the disk loses its end too", lambda c: [
    c.stored(), c.stored(medium="STORAGE"), c.removed(), c.removed(5, medium="STORAGE")], 5, 8, "stale hit",
     blocks=20)  # fmt: skip
event_case("found on the disk at the start, then the disk is lost", lambda c: [
    c.stored(medium="STORAGE"), c.stored(0, 4), c.removed(medium="STORAGE")], 4, 8, "stale hit", blocks=20)  # fmt: skip
event_case(
    "half in a medium that nobody knows", lambda c: [c.stored(0, 10), c.stored(10, medium="TAPE")], 20, 2, blocks=20
)
event_case("children of an unknown parent, then the parent", lambda c: [c.stored(5), c.stored(0, 5)], 10, 8)


@case("children of an unknown parent")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.publish(chain.stored(5))
    return [s.probe(chain.tokens[5 * BLOCK :], 0, 1, "false hit"), s.probe(chain, 0, 1, "false hit")]


@case("two workers name blocks alike, one removes its own")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.publish(chain.stored())
    s.b.publisher.publish(chain.stored())
    s.wait_until_predicted()
    s.b.publisher.publish(chain.removed(2))
    return [Probe(chain.tokens, 10 * BLOCK, 2 * BLOCK)]


@case("AllBlocksCleared by one of two workers")
def _(s: Play) -> list[Probe]:
    old, new, other = s.chain(), s.chain(), s.chain()
    s.publish(old.stored(), other.stored())
    probe = s.probe(other, 0, 4, "stale hit")
    s.publish({"type": "AllBlocksCleared"}, new.stored())
    return [s.probe(old, 0, 2, "stale hit"), probe, s.probe(new, 10, 2)]


@case("salted blocks and a request with the salt")
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.publish(chain.stored(extra_keys=PEPPER))
    s.b.publisher.publish(chain.stored(0, 2, extra_keys=PEPPER[:2]))
    return [s.probe(chain, 10, 2, salt="pepper")]


def tuned(s: Play, chain: Chain, end: int) -> dict[str, Any]:
    return {**chain.stored(0, end, extra_keys=[[s.a.lora]] * end), "lora_id": 1, "lora_name": s.a.lora}


@case("blocks of a LoRA and a request for the base model", has_lora=True)
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.publish(tuned(s, chain, 10))
    return [s.probe(chain, 0, 2, "false hit")]


@case("blocks of a LoRA and a request for it", has_lora=True)
def _(s: Play) -> list[Probe]:
    chain = s.chain()
    s.publish(tuned(s, chain, 10))
    s.b.publisher.publish(tuned(s, chain, 2))
    return [Probe(chain.tokens, 10 * BLOCK, 2 * BLOCK, uses_lora=True)]


# Groups of hybrid models ----------------------------------------------------------------------------------------------

event_case("a sliding window that left the end of the prefix",  # full attention holds 10 blocks, the window the first 6
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)], c.removed(6, group_idx=1)], 6, 8, "false hit",
     second_group="window")  # fmt: skip
event_case("a sliding window that left the beginning of the prefix",  # what lies before the window is not needed
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)], c.removed(0, 6, group_idx=1)], 10, 8,
     second_group="window")  # fmt: skip
event_case("a recurrent state that is kept at one point only",  # full attention holds 10 blocks, the state is that of 4
     lambda c: [[c.stored(**FULL), c.state_stored(4)]], 4, 6, "false hit", second_group="state")  # fmt: skip
event_case("a sliding window that moved to the host",
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)],
                [c.stored(15, **WINDOW, medium="CPU"), c.removed(15, group_idx=1)]], 20, 2, blocks=20,
     second_group="window")  # fmt: skip
event_case("a sliding window that left the host, too",  # full attention holds 20 blocks, the window the first 6
     lambda c: [[c.stored(**FULL), c.stored(**WINDOW)],
                [c.stored(6, **WINDOW, medium="CPU"), c.removed(6, group_idx=1)],
                c.removed(6, group_idx=1, medium="CPU")], 6, 8, "false hit", blocks=20,
     second_group="window")  # fmt: skip
event_case("a recurrent state that moved to the host", lambda c: [[c.stored(**FULL), c.state_stored(20)], [
    {**c.state_stored(20), "medium": "CPU"}, c.removed(19, group_idx=1)]], 20, 2, blocks=20,
    second_group="state")  # fmt: skip
event_case("a recurrent state that is gone from the host, too", lambda c: [[c.stored(**FULL), c.state_stored(20)], [
    {**c.state_stored(20), "medium": "CPU"}, c.removed(19, group_idx=1)], c.removed(19, group_idx=1, medium="CPU")],
     0, 3, "false hit", blocks=20, second_group="state")  # fmt: skip
event_case("a recurrent state that is gone",
     lambda c: [[c.stored(**FULL), c.state_stored(10)], c.removed(9, group_idx=1)], 0, 3, "false hit",
     second_group="state")  # fmt: skip


# Gaps: a stream breaks once, so these have one round ------------------------------------------------------------------


def shared_prompt(s: Play) -> Chain:
    """A prompt that A holds wholly and B a little, already known to the router."""
    chain = s.chain()
    s.publish(chain.stored())
    s.wait_until_predicted(s.probe(chain, 10, 2))
    return chain


def lost_probe(chain: Chain) -> Probe:
    """What `filled` stored, when A has lost it."""
    return Probe(chain.tokens, 0, 2 * BLOCK, "stale hit")


def fresh_probe(s: Play) -> Probe:
    """A prompt stored on A after the fault: is A still heard?"""
    chain = s.chain()
    s.publish(chain.stored())
    return s.probe(chain, 10, 2)


def lose_batches(s: Play) -> list[Probe]:
    chain, unseen = shared_prompt(s), s.chain()
    s.publish(chain.removed(), unseen.stored(), drop=True)
    probes = [lost_probe(chain), fresh_probe(s)]
    if s.a.publisher.replay_endpoint is None:
        return probes  # nobody can know of these blocks, and not to know costs one prefill
    return [*probes, s.probe(unseen, 10, 2)]


case("a gap that replay covers", rounds=1)(lose_batches)
case("a gap that replay of an older vLLM covers (no topic in replies)", rounds=1,
     publisher={"replies_with_topic": False})(lose_batches)  # fmt: skip
case("a gap without replay", rounds=1, publisher={"has_replay": False})(lose_batches)


@case("a gap that the ring no longer covers", rounds=1)
def _(s: Play) -> list[Probe]:
    chain = shared_prompt(s)
    s.publish(chain.removed(), drop=True)
    s.a.publisher.drop_oldest(len(s.a.publisher.replay_buffer))
    return [lost_probe(chain), fresh_probe(s)]


@case("the last batch is lost, then silence", rounds=1, is_silent=True)
def _(s: Play) -> list[Probe]:
    chain = shared_prompt(s)
    s.publish(chain.removed(), drop=True)
    return [lost_probe(chain)]


# Restarts -------------------------------------------------------------------------------------------------------------


def restart_publisher(s: Play, *dropped_batches: Batch, seq_ahead: int | None = None) -> Chain:
    """A's publisher begins anew; heard again once it is so many seqs ahead of its past life, or at once."""
    chain, last_seq = shared_prompt(s), s.a.publisher.seq
    s.a.publisher.restart()
    s.publish(*dropped_batches, drop=True)
    while seq_ahead is not None and s.a.publisher.seq < last_seq + seq_ahead:
        s.publish(s.chain(1).stored(), drop=True)
    s.a.publisher.await_subscriber()
    return chain


@case("a restart at seq 0", rounds=1)
def _(s: Play) -> list[Probe]:
    return [lost_probe(restart_publisher(s)), fresh_probe(s)]


@case("a restart whose seq is higher already when it is heard again", rounds=1)
def _(s: Play) -> list[Probe]:
    early = s.chain()
    return [lost_probe(restart_publisher(s, early.stored(), seq_ahead=4)), s.probe(early, 10, 2), fresh_probe(s)]


@case("a restart whose next seq is just the one expected", rounds=1)
def _(s: Play) -> list[Probe]:
    return [lost_probe(restart_publisher(s, seq_ahead=0)), fresh_probe(s)]


def restart_idle(s: Play) -> list[Probe]:
    return [lost_probe(restart_publisher(s))]


case("a restart of an idle worker", rounds=1, is_silent=True)(restart_idle)
case("a restart of an idle worker without replay", rounds=1, is_silent=True, publisher={"has_replay": False})(
    restart_idle
)


@case("a worker dies and comes back empty", rounds=1)
def _(s: Play) -> list[Probe]:
    chain, orphaned = shared_prompt(s), s.chain()
    s.publish(orphaned.stored())
    s.wait_until_predicted(s.probe(orphaned, 10, 2))
    s.a.kill()
    s.send_probe(Probe(orphaned.tokens, 0, 2 * BLOCK, "stale hit", is_sudden=True))
    s.a.restart()
    s.a.publisher.await_subscriber()
    return [lost_probe(chain), fresh_probe(s)]


# Late joins: A's part is played before the router has the workers; `s.probe_plans` is asked later ---------------------


def join_covered(s: Play) -> None:
    resident, removed_chain = s.chain(), s.chain()
    s.publish(resident.stored(), removed_chain.stored(), removed_chain.removed())
    s.probe_plans = [(resident.tokens, 10, 2, "lost hit"), (removed_chain.tokens, 0, 2, "stale hit")]


def join_with_snapshot(s: Play) -> None:
    """The ring has lost the beginning; the publisher knows what is resident all the same."""
    join_covered(s)
    s.a.publisher.drop_oldest(2)
    s.a.publisher.snapshot = [pack([time.time(), [Chain(s.probe_plans[0][0], s.chain().names).stored()], None])]


def join_uncovered(s: Play) -> None:
    """The ring has lost the beginning and nobody knows it: what is left must not be taken for more than it is."""
    removed_chain, orphan = s.chain(), s.chain()
    s.publish(
        removed_chain.stored(),
        Chain(orphan.tokens, removed_chain.names[:5] + orphan.names[5:]).stored(5),
        removed_chain.removed(),
    )
    s.a.publisher.drop_oldest(1)
    s.probe_plans = [(removed_chain.tokens, 0, 2, "stale hit"), (orphan.tokens[5 * BLOCK :], 0, 1, "false hit")]


def probe_joined(s: Play) -> list[Probe]:
    return [*(s.probe(*probe_fields) for probe_fields in s.probe_plans), fresh_probe(s)]


case("a late join that the ring covers", rounds=1, before=join_covered)(probe_joined)
case("a late join with a snapshot", rounds=1, before=join_with_snapshot)(probe_joined)
case("a late join that the ring no longer covers", rounds=1, before=join_uncovered)(probe_joined)
case("a late join without replay", rounds=1, before=join_uncovered, publisher={"has_replay": False})(probe_joined)
