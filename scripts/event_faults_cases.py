"""What a worker can say that is easily taken for something else: encodings, copies, owners, tiers, groups.

See event_faults_script.py for what a case is.
"""

from __future__ import annotations

from event_faults_script import (
    BLOCK,
    CLEARED,
    FULL,
    STATE,
    WINDOW,
    Probe,
    Script,
    case,
    removed,
    removed_array,
    stored,
    stored_array,
)
from harness.workers import pack

# Names and encodings --------------------------------------------------------------------------------------------------


@case("a block is removed and stored again")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    pub = s.a.publisher
    pub.publish(stored(names, prompt[: 10 * BLOCK]))
    pub.publish(removed([names[5]]))
    pub.publish(stored([names[5]], prompt[5 * BLOCK : 6 * BLOCK], names[4]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


@case("a hole: a block is removed and its children stay")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    s.a.publisher.publish(removed([names[5]]))
    return [Probe(prompt, 5 * BLOCK, s.on_b(prompt, 7), wrong="stale hit")]


@case("one of two copies is removed")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    for _ in range(2):
        s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    s.a.publisher.publish(removed(names[::-1]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 6))]


@case("both copies are removed")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    for _ in range(2):
        s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    for _ in range(2):
        s.a.publisher.publish(removed(names[::-1]))
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="stale hit")]


@case("one batch comes twice, then its blocks are removed once")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    s.a.publisher.repeat()
    s.a.publisher.publish(removed(names[::-1]))
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="stale hit")]


@case("32-byte hashes")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), [s.rng.randbytes(32) for _ in range(10)]
    s.a.publisher.publish(stored(names[:6], prompt[: 6 * BLOCK]))
    s.a.publisher.publish(stored(names[6:], prompt[6 * BLOCK : 10 * BLOCK], names[5]))
    gone = s.tokens(6)
    others = [s.rng.randbytes(32) for _ in range(6)]
    s.a.publisher.publish(stored(others, gone[: 6 * BLOCK]))
    s.a.publisher.publish(removed(others))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8)), Probe(gone, 0, s.on_b(gone, 2), wrong="stale hit")]


@case("signed hashes")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), [-s.rng.getrandbits(63) for _ in range(10)]
    s.a.publisher.publish(stored(names[:6], prompt[: 6 * BLOCK]))
    s.a.publisher.publish(stored(names[6:], prompt[6 * BLOCK : 10 * BLOCK], names[5]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


@case("array events")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored_array(names, prompt[: 10 * BLOCK]))
    gone, others = s.tokens(6), s.names(6)
    s.a.publisher.publish(stored_array(others, gone[: 6 * BLOCK]))
    s.a.publisher.publish(removed_array(others))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8)), Probe(gone, 0, s.on_b(gone, 2), wrong="stale hit")]


@case("arrays and maps in one batch")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(
        stored(names[:4], prompt[: 4 * BLOCK]),
        stored_array(names[4:8], prompt[4 * BLOCK : 8 * BLOCK], names[3]),
        stored(names[8:], prompt[8 * BLOCK : 10 * BLOCK], names[7]),
    )
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


@case("a malformed and an unknown event in a batch of good ones")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(
        stored(names[:5], prompt[: 5 * BLOCK]),
        stored(s.names(2), prompt[:BLOCK], size=0),
        {"type": "BlockStored", "block_hashes": "many"},
        {"type": "BlockPainted", "colour": 3},
        stored(names[5:], prompt[5 * BLOCK : 10 * BLOCK], names[4]),
    )
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


@case("an unreadable batch between two good ones")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names[:5], prompt[: 5 * BLOCK]))
    s.a.publisher.publish(payload=pack([1.0, [stored(s.names(1), [1] * BLOCK)], None])[:-9])
    s.a.publisher.publish(stored(names[5:], prompt[5 * BLOCK : 10 * BLOCK], names[4]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


@case("a topic", topic="kv@worker@model")
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 2))]


@case("workers with different block sizes", block_size_b=64)
def _(s: Script) -> list[Probe]:
    probes = []
    for a_blocks, b_blocks in ((10, 2), (6, 2)):
        prompt = s.tokens(12)
        s.a.publisher.publish(stored(s.names(a_blocks), prompt[: a_blocks * BLOCK]))
        s.b.publisher.publish(stored(s.names(b_blocks), prompt[: b_blocks * 64], size=64))
        probes.append(Probe(prompt, a_blocks * BLOCK, b_blocks * 64))
    return probes


# What belongs to whom -------------------------------------------------------------------------------------------------


@case("two workers name blocks alike, one removes its own")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    for worker in (s.a, s.b):
        worker.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    s.settle()
    s.b.publisher.publish(removed(names[2:][::-1]))
    return [Probe(prompt, 10 * BLOCK, 2 * BLOCK)]


@case("AllBlocksCleared by one of two workers")
def _(s: Script) -> list[Probe]:
    old, new, other = s.tokens(10), s.tokens(10), s.tokens(10)
    for prompt in (old, other):
        s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK]))
    s.b.publisher.publish(stored(s.names(4), other[: 4 * BLOCK]))
    s.a.publisher.publish(CLEARED)
    s.a.publisher.publish(stored(s.names(10), new[: 10 * BLOCK]))
    return [
        Probe(old, 0, s.on_b(old, 2), wrong="stale hit"),
        Probe(other, 0, 4 * BLOCK, wrong="stale hit"),
        Probe(new, 10 * BLOCK, s.on_b(new, 2)),
    ]


@case("salted blocks and a request without the salt")
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    keys = [["pepper"], *[None] * 9]
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK], extra_keys=keys))
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="false hit")]


@case("salted blocks and a request with the salt")
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    keys = [["pepper"], *[None] * 9]
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK], extra_keys=keys))
    s.on_b(prompt, 2)
    s.b.publisher.publish(stored(s.names(2), prompt[: 2 * BLOCK], extra_keys=[["pepper"], None]))
    return [Probe(prompt, 10 * BLOCK, 2 * BLOCK, salt="pepper")]


@case("a salt on the event, as SGLang sends it")
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK], cache_salt="pepper"))
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="false hit")]


@case("blocks of a LoRA and a request for the base model", lora=True)
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    event = stored(s.names(10), prompt[: 10 * BLOCK], extra_keys=[[s.a.lora]] * 10)
    s.a.publisher.publish({**event, "lora_id": 1, "lora_name": s.a.lora})
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="false hit")]


@case("blocks of a LoRA and a request for it", lora=True)
def _(s: Script) -> list[Probe]:
    prompt = s.tokens(10)
    for worker, blocks in ((s.a, 10), (s.b, 2)):
        event = stored(s.names(blocks), prompt[: blocks * BLOCK], extra_keys=[[worker.lora]] * blocks)
        worker.publisher.publish({**event, "lora_id": 1, "lora_name": worker.lora})
    return [Probe(prompt, 10 * BLOCK, 2 * BLOCK, lora=True)]


@case("the GPU copy goes, the CPU copy stays")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(20), s.names(20)
    s.a.publisher.publish(stored(names, prompt[: 20 * BLOCK]))
    s.a.publisher.publish(stored(names, prompt[: 20 * BLOCK], medium="CPU"))
    s.a.publisher.publish(removed(names[::-1]))
    return [Probe(prompt, 20 * BLOCK, s.on_b(prompt, 2))]


@case("the CPU copy goes too")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(20), s.names(20)
    s.a.publisher.publish(stored(names, prompt[: 20 * BLOCK]))
    s.a.publisher.publish(stored(names, prompt[: 20 * BLOCK], medium="CPU"))
    s.a.publisher.publish(removed(names[::-1]))
    s.a.publisher.publish(removed(names[::-1], medium="CPU"))
    return [Probe(prompt, 0, s.on_b(prompt, 2), wrong="stale hit")]


@case("children of an unknown parent")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names[5:], prompt[5 * BLOCK : 10 * BLOCK], names[4]))
    tail = prompt[5 * BLOCK :]
    return [Probe(tail, 0, s.on_b(tail, 1), wrong="false hit"), Probe(prompt, 0, s.on_b(prompt, 1), wrong="false hit")]


@case("children of an unknown parent, then the parent")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names[5:], prompt[5 * BLOCK : 10 * BLOCK], names[4]))
    s.a.publisher.publish(stored(names[:5], prompt[: 5 * BLOCK]))
    return [Probe(prompt, 10 * BLOCK, s.on_b(prompt, 8))]


# Groups of hybrid models ----------------------------------------------------------------------------------------------


@case("a sliding window that left the end of the prefix", second_group="window")
def _(s: Script) -> list[Probe]:
    """Full attention holds 10 blocks, the window only the first 6 of them: 6 blocks can be used."""
    prompt, names = s.tokens(10), s.names(10)
    tokens = prompt[: 10 * BLOCK]
    s.a.publisher.publish(stored(names, tokens, **FULL), stored(names, tokens, **WINDOW))
    s.a.publisher.publish(removed(names[6:][::-1], group_idx=1))
    others, tokens = s.names(8), prompt[: 8 * BLOCK]
    s.b.publisher.publish(stored(others, tokens, **FULL), stored(others, tokens, **WINDOW))
    return [Probe(prompt, 6 * BLOCK, 8 * BLOCK, wrong="false hit")]


@case("a sliding window that left the beginning of the prefix", second_group="window")
def _(s: Script) -> list[Probe]:
    """What lies before the window is not needed: all 10 blocks can be used."""
    prompt, names = s.tokens(10), s.names(10)
    tokens = prompt[: 10 * BLOCK]
    s.a.publisher.publish(stored(names, tokens, **FULL), stored(names, tokens, **WINDOW))
    s.a.publisher.publish(removed(names[:6], group_idx=1))
    others, tokens = s.names(8), prompt[: 8 * BLOCK]
    s.b.publisher.publish(stored(others, tokens, **FULL), stored(others, tokens, **WINDOW))
    return [Probe(prompt, 10 * BLOCK, 8 * BLOCK)]


@case("a recurrent state that is kept at one point only", second_group="state")
def _(s: Script) -> list[Probe]:
    """Full attention holds 10 blocks, the state was saved after 4: 4 blocks can be used."""
    prompt, names = s.tokens(10), s.names(10)
    tokens = prompt[: 10 * BLOCK]
    s.a.publisher.publish(stored(names, tokens, **FULL), stored([names[3]], tokens[: 4 * BLOCK], **STATE))
    others, tokens = s.names(6), prompt[: 6 * BLOCK]
    s.b.publisher.publish(stored(others, tokens, **FULL), stored([others[5]], tokens, **STATE))
    return [Probe(prompt, 4 * BLOCK, 6 * BLOCK, wrong="false hit")]


@case("a recurrent state that is gone", second_group="state")
def _(s: Script) -> list[Probe]:
    prompt, names = s.tokens(10), s.names(10)
    tokens = prompt[: 10 * BLOCK]
    s.a.publisher.publish(stored(names, tokens, **FULL), stored([names[9]], tokens, **STATE))
    s.a.publisher.publish(removed([names[9]], group_idx=1))
    others, tokens = s.names(3), prompt[: 3 * BLOCK]
    s.b.publisher.publish(stored(others, tokens, **FULL), stored([others[2]], tokens, **STATE))
    return [Probe(prompt, 0, 3 * BLOCK, wrong="false hit")]
