"""Faults of the stream itself: gaps, restarts, late joins, a worker that dies. See event_faults_script.py."""

from __future__ import annotations

import functools
import time
from typing import Any

import event_faults_script
from event_faults_script import BLOCK, Probe, Script, removed, stored
from harness.workers import pack

case = functools.partial(event_faults_script.case, rounds=1)  # a stream breaks once


def _filled(s: Script) -> tuple[list[int], list[Any], Probe]:
    """A prompt that A holds wholly and B a little, already known to the router."""
    prompt, names = s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    known = Probe(prompt, 10 * BLOCK, s.on_b(prompt, 2))
    s.settle(known)
    return prompt, names, known


def _after(s: Script) -> Probe:
    """A prompt stored on A after the fault: is A still heard?"""
    prompt = s.tokens(10)
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK]))
    return Probe(prompt, 10 * BLOCK, s.on_b(prompt, 2))


# Gaps -----------------------------------------------------------------------------------------------------------------


def _gap(s: Script, *, replayed: bool) -> list[Probe]:
    prompt, names, _ = _filled(s)
    lost = s.tokens(10)
    s.a.publisher.publish(removed(names[::-1]), lost=True)
    s.a.publisher.publish(stored(s.names(10), lost[: 10 * BLOCK]), lost=True)
    probes = [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), _after(s)]
    if replayed:  # otherwise nobody can know of these blocks, and not to know costs one prefill
        probes.append(Probe(lost, 10 * BLOCK, s.on_b(lost, 2)))
    return probes


@case("a gap that replay covers")
def _(s: Script) -> list[Probe]:
    return _gap(s, replayed=True)


@case("a gap that replay of an older vLLM covers (no topic in replies)", replies_with_topic=False)
def _(s: Script) -> list[Probe]:
    return _gap(s, replayed=True)


@case("a gap without replay", replays=False)
def _(s: Script) -> list[Probe]:
    return _gap(s, replayed=False)


@case("a gap that the ring no longer covers")
def _(s: Script) -> list[Probe]:
    prompt, names, _ = _filled(s)
    s.a.publisher.publish(removed(names[::-1]), lost=True)
    s.a.publisher.trim(len(s.a.publisher.ring))
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), _after(s)]


@case("the last batch is lost, then silence", silent=True)
def _(s: Script) -> list[Probe]:
    prompt, names, _ = _filled(s)
    s.a.publisher.publish(removed(names[::-1]), lost=True)
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit")]


# Restarts -------------------------------------------------------------------------------------------------------------


@case("a restart at seq 0")
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    s.a.publisher.restart()
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), _after(s)]


@case("a restart whose seq is higher already when it is heard again")
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    seen = s.a.publisher.seq
    s.a.publisher.restart()
    early = s.tokens(10)
    s.a.publisher.publish(stored(s.names(10), early[: 10 * BLOCK]), lost=True)
    while s.a.publisher.seq <= seen + 3:
        s.a.publisher.publish(stored(s.names(1), s.tokens(1)[:BLOCK]), lost=True)
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), Probe(early, 10 * BLOCK, s.on_b(early, 2)), _after(s)]


@case("a restart whose next seq is just the one expected")
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    seen = s.a.publisher.seq
    s.a.publisher.restart()
    while s.a.publisher.seq < seen:
        s.a.publisher.publish(stored(s.names(1), s.tokens(1)[:BLOCK]), lost=True)
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), _after(s)]


@case("a restart of an idle worker", silent=True)
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    s.a.publisher.restart()
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit")]


@case("a restart of an idle worker without replay", silent=True, replays=False)
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    s.a.publisher.restart()
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit")]


@case("a worker dies and comes back empty")
def _(s: Script) -> list[Probe]:
    prompt, _, _ = _filled(s)
    orphaned = s.tokens(10)
    s.a.publisher.publish(stored(s.names(10), orphaned[: 10 * BLOCK]))
    meanwhile = Probe(orphaned, 0, s.on_b(orphaned, 2), wrong="stale hit", sudden=True)
    s.settle(Probe(orphaned, 10 * BLOCK, 2 * BLOCK))
    s.a.die()
    s.ask(meanwhile)
    s.a.come_back()
    s.a.publisher.await_subscriber()
    return [Probe(prompt, 0, 2 * BLOCK, wrong="stale hit"), _after(s)]


# Late joins -----------------------------------------------------------------------------------------------------------


# Each plays A's part before the router has the workers and leaves what is to be asked in `s.told`: (prompt, tokens that
# A holds, blocks that B will hold, what a wrong choice is).


def _ring(s: Script) -> None:
    prompt, gone, names = s.tokens(10), s.tokens(10), s.names(10)
    s.a.publisher.publish(stored(s.names(10), prompt[: 10 * BLOCK]))
    s.a.publisher.publish(stored(names, gone[: 10 * BLOCK]))
    s.a.publisher.publish(removed(names[::-1]))
    s.told = [(prompt, 10 * BLOCK, 2, "lost hit"), (gone, 0, 2, "stale hit")]


def _snapshot(s: Script) -> None:
    """The ring has lost the beginning; the publisher knows what is resident all the same."""
    _ring(s)
    kept = s.told[0][0][: 10 * BLOCK]
    s.a.publisher.trim(2)
    s.a.publisher.snapshot = [pack([time.time(), [stored(s.names(10), kept)], None])]


def _rest(s: Script) -> None:
    """The ring has lost the beginning and nobody knows it: what is left must not be taken for more than it is."""
    prompt, names, orphan = s.tokens(10), s.names(10), s.tokens(10)
    s.a.publisher.publish(stored(names, prompt[: 10 * BLOCK]))
    s.a.publisher.publish(stored(s.names(5), orphan[5 * BLOCK : 10 * BLOCK], names[4]))
    s.a.publisher.publish(removed(names[::-1]))
    s.a.publisher.trim(1)
    s.told = [(prompt, 0, 2, "stale hit"), (orphan[5 * BLOCK :], 0, 1, "false hit")]


def _joined(s: Script) -> list[Probe]:
    told = [Probe(prompt, a, s.on_b(prompt, blocks), wrong=wrong) for prompt, a, blocks, wrong in s.told]
    return [*told, _after(s)]


case("a late join that the ring covers", before=_ring)(_joined)
case("a late join with a snapshot", before=_snapshot)(_joined)
case("a late join that the ring no longer covers", before=_rest)(_joined)
case("a late join without replay", before=_rest, replays=False)(_joined)
