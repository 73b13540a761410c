"""Computes no step: makes tokens up, and takes as long as the service model says.

Steps follow each other on a timeline of their own: one begins when the one before was due, or when the first of its
requests came, so what scheduling costs here does not add up. What the machine cannot keep up with is lateness.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from zlib import crc32

from engine.core import SimulationLag
from engine.simulation.constrained import ConstrainedAnswers
from engine.types import Chunk, CopyDirection, StepPlan, StepResult, TokenLogprobs
from engine.types import Sequence as Running
from simulation.steps import StepTimes

REPORT_S = 10.0
FORGIVEN_S = 1.0
"""More than so much behind, the timeline begins anew: steps do not race to catch up."""
WORRYING_SHARE = 0.05
"""Of the step time: later than that in the mean is a warning."""

log = logging.getLogger("engine.simulation")


def step_seconds(times: StepTimes, plan: StepPlan, block_size: int) -> float:
    """What a step takes: its decodes, each chunk of prefill after what is computed of its sequence, and the blocks that
    come back from host memory. What goes there is copied beside it.
    """
    sequences = context = 0
    prefill_s = 0.0
    for chunk in plan.chunks:
        if chunk.end - chunk.start == 1 and chunk.end > chunk.seq.prompt_len:
            sequences += 1
            context += chunk.end
        else:
            prefill_s += times.prefill_s(chunk.end - chunk.start, chunk.start)
    loads = sum(move.direction is CopyDirection.FROM_HOST for move in plan.block_copies)
    return times.decode_s(sequences, context) + prefill_s + times.load_s_per_token * block_size * loads


class Answers:
    """The tokens that are said: words without meaning, or the lines of a script; the same for the same prompt."""

    def __init__(
        self, words: Sequence[int], eos_token_id: int, length: int | None, script: Sequence[Sequence[int]] = ()
    ) -> None:
        """`length`: of an answer of words, its end included; None: no end."""
        assert words
        self._words = words
        self._eos = eos_token_id
        self._length = length
        self._script = script

    def next(self, seq: Running) -> int:
        """The token after the last of `seq`. One that need not end at its end goes on."""
        said = seq.output_len
        if self._script:
            line = self._script[crc32(repr(seq.token_ids[: seq.prompt_len][-64:]).encode()) % len(self._script)]
            place = said % (len(line) + 1)
            return line[place] if place < len(line) else self._eos
        if self._length is not None and said + 1 == self._length:
            return self._eos
        return self._words[(seq.token_ids[-1] * 1_000_003 + said * 7_919 + seq.prompt_len) % len(self._words)]


class SimulatedRunner:
    """A Runner that sleeps. `close` it: it says how late its steps were."""

    def __init__(
        self,
        times: StepTimes,
        answers: Answers,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        block_size: int = 16,
        constrained: ConstrainedAnswers | None = None,
    ) -> None:
        """`clock`: the one that `Sequence.arrival_s` was read from."""
        self._times = times
        self._answers = answers
        self._constrained = constrained
        self._clock = clock
        self._sleep = sleep
        self._block_size = block_size
        self._due_s = 0.0
        self._all, self._lately = SimulationLag(), SimulationLag()
        self._tell_at_s = clock() + REPORT_S

    @property
    def lateness(self) -> SimulationLag:
        return self._all

    def execute(self, plan: StepPlan) -> StepResult:
        first_s = min(chunk.seq.arrival_s for chunk in plan.chunks)
        takes_s = step_seconds(self._times, plan, self._block_size)
        self._due_s = max(self._due_s, first_s) + takes_s
        result = StepResult([])
        for index, chunk in enumerate(plan.chunks):
            self._say(result, index, chunk)
            _add_logprobs(result, index, chunk)
        while (left_s := self._due_s - self._clock()) > 0:
            self._sleep(left_s)
        self._count(takes_s, -left_s)
        return result

    def _say(self, result: StepResult, index: int, chunk: Chunk) -> None:
        """Add the chunk's token to the result."""
        seq = chunk.seq
        token: int | str | None = self._answers.next(seq) if chunk.should_sample else None
        if token is not None and seq.request.params.constraint is not None:
            assert self._constrained is not None, "a constraint without grammars"
            token = self._constrained.next_token(seq, self._answers.next)
        if isinstance(token, str):
            result.failures[index] = token
            token = 0
        result.sampled_tokens.append(token)

    def close(self) -> None:
        if self._all.steps:
            _tell("in all", self._all)

    def _count(self, takes_s: float, late_s: float) -> None:
        self._all, self._lately = _with(self._all, takes_s, late_s), _with(self._lately, takes_s, late_s)
        now_s = self._due_s + late_s
        if late_s > FORGIVEN_S:
            self._due_s = now_s
        if now_s >= self._tell_at_s:
            _tell("lately", self._lately)
            self._tell_at_s, self._lately = now_s + REPORT_S, SimulationLag()


def _with(known: SimulationLag, takes_s: float, late_s: float) -> SimulationLag:
    return SimulationLag(
        steps=known.steps + 1,
        step_s=known.step_s + takes_s,
        lag_s=known.lag_s + late_s,
        lag_s_max=max(known.lag_s_max, late_s),
    )


def _tell(when: str, late: SimulationLag) -> None:
    log.log(
        logging.WARNING if late.lag_s > WORRYING_SHARE * late.step_s else logging.INFO,
        "simulated steps %s: %d of %.2f ms in the mean, late by %.3f ms in the mean, %.1f ms at most",
        when, late.steps, late.step_s / late.steps * 1e3, late.lag_s / late.steps * 1e3, late.lag_s_max * 1e3,
    )  # fmt: skip


def _add_logprobs(result: StepResult, index: int, chunk: Chunk) -> None:
    """Certainty, for those who ask."""
    params, token_ids = chunk.seq.request.params, chunk.seq.token_ids
    token = result.sampled_tokens[index]
    if params.logprobs is not None and token is not None:
        result.logprobs[index] = TokenLogprobs(token, 0.0, 1, [(token, 0.0)] * min(params.logprobs, 1))
    if params.prompt_logprobs is not None:
        result.prompt_logprobs[index] = [
            TokenLogprobs(token_id, 0.0, 1, []) for token_id in token_ids[chunk.start + 1 : chunk.end + 1]
        ]
