"""Runner that makes tokens up, and sleeps as long as the step would take on the simulated device.

Steps follow each other on a timeline of their own. A step begins when the previous one should have ended, or when the
first of its requests arrived. So the time that scheduling takes here does not add up. A step that ends later than it
should have is counted as lag.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

from engine.core import SimulationLag
from engine.grammar_compiler import describe_failure
from engine.simulation.constrained import ConstrainedAnswers
from engine.types import Chunk, CopyDirection, StepPlan, StepResult, TokenLogprobs
from engine.types import Sequence as EngineSequence
from simulation.steps import StepTimes

REPORT_S = 10.0
RESYNC_LAG_S = 1.0
"""Lag after which the timeline begins anew, so that steps do not race to catch up."""
LAG_WARNING_SHARE = 0.05
"""Mean lag, as a share of the step time, above which there is a warning."""

log = logging.getLogger("engine.simulation")


def compute_step_seconds(times: StepTimes, plan: StepPlan, block_size: int) -> float:
    """Return the seconds of a step: its decodes, its chunks of prefill, and blocks loaded from host memory.

    Copies to host memory take no time, because they are made while the step is computed.
    """
    decode_count, context_tokens, prefill_s = 0, 0, 0.0
    for chunk in plan.chunks:
        chunk_tokens = chunk.end - chunk.start
        is_decode = chunk_tokens == 1 and chunk.end > chunk.seq.prompt_len
        if is_decode:
            decode_count += 1
            context_tokens += chunk.end
        else:
            prefill_s += times.compute_prefill_s(chunk_tokens, chunk.start)
    loaded_block_count = sum(copy.direction is CopyDirection.FROM_HOST for copy in plan.block_copies)
    load_s = times.load_s_per_token * block_size * loaded_block_count
    return times.compute_decode_s(decode_count, context_tokens) + prefill_s + load_s


class SimulatedAnswers:
    """Makes up the tokens of answers: words chosen by a hash, or lines of a script.

    The same prompt always gets the same answer.
    """

    def __init__(
        self, words: Sequence[int], eos_token_id: int, length: int | None, script: Sequence[Sequence[int]] = ()
    ) -> None:
        """Choose from `words`, which are token ids, or answer with the lines of `script`, each a list of token ids.

        `length` is the number of tokens of an answer of words, the end token included; None means that it does not end.
        """
        assert words
        self._word_ids = words
        self._eos_token_id = eos_token_id
        self._answer_length = length
        self._script = script

    def next_token(self, seq: EngineSequence) -> int:
        """Return the token after the last one of `seq`. After the end of a line, the line begins again."""
        output_len = seq.output_len
        if self._script:
            # A hash of the prompt's last tokens chooses the line.
            prompt_end = seq.token_ids[: seq.prompt_len][-64:]
            prompt_hash = crc32(repr(prompt_end).encode())
            line = self._script[prompt_hash % len(self._script)]
            token_index = output_len % (len(line) + 1)
            return line[token_index] if token_index < len(line) else self._eos_token_id
        if self._answer_length is not None and output_len + 1 == self._answer_length:
            return self._eos_token_id
        # Large primes spread neighbouring tokens and positions over all words.
        word_hash = seq.token_ids[-1] * 1_000_003 + output_len * 7_919 + seq.prompt_len
        return self._word_ids[word_hash % len(self._word_ids)]


class SimulatedRunner:
    """Implements `engine.core.Runner` by sleeping. `close` logs how late its steps were."""

    def __init__(
        self,
        times: StepTimes,
        answers: SimulatedAnswers,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        block_size: int = 16,
        constrained_answers: ConstrainedAnswers | None = None,
    ) -> None:
        """Make a runner with the step times of a simulated device. `clock`: the clock of `Sequence.arrival_s`.

        `constrained_answers`: makes answers that must match a grammar; None: requests have no grammars.
        """
        self._times = times
        self._answers = answers
        self._constrained_answers = constrained_answers
        self._clock = clock
        self._sleep = sleep
        self._block_size = block_size
        self._due_at_s = 0.0
        """When the last step should have ended."""
        self.simulation_lag = SimulationLag()
        """How late the steps ended, since the start."""
        self._recent_lag = SimulationLag()
        """How late they ended since the last report in the log."""
        self._next_report_at_s = clock() + REPORT_S

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Return a function that makes up the tokens of a step, and sleeps until the step's simulated end."""
        return partial(self._execute, plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        """Make up the tokens of a step, and sleep until its simulated end.

        The step begins when the one before should have ended, or when the first of its requests arrived.
        """
        first_arrival_s = min(chunk.seq.arrival_s for chunk in plan.chunks)
        step_s = compute_step_seconds(self._times, plan, self._block_size)
        self._due_at_s = max(self._due_at_s, first_arrival_s) + step_s
        result = StepResult([])
        for index, chunk in enumerate(plan.chunks):
            self._add_token(result, index, chunk)
            _add_logprobs(result, index, chunk)
        remaining_s = self._due_at_s - self._clock()
        while remaining_s > 0:
            self._sleep(remaining_s)
            remaining_s = self._due_at_s - self._clock()
        self._record_lag(step_s, -remaining_s)
        return result

    def _add_token(self, result: StepResult, index: int, chunk: Chunk) -> None:
        """Add the token of a chunk to the result; or, if its grammar fails, the reason."""
        seq = chunk.seq
        token = self._answers.next_token(seq) if chunk.should_sample else None
        if token is not None and seq.request.params.constraint is not None:
            assert self._constrained_answers is not None, "a constraint without grammars"
            try:
                token = self._constrained_answers.next_token(seq, token)
            except BaseException as error:  # noqa: BLE001 - see describe_failure
                result.failure_by_chunk[index] = describe_failure(error)
        result.sampled_tokens.append(token)

    def close(self) -> None:
        if self.simulation_lag.step_count:
            _log_lag("in all", self.simulation_lag)

    def _record_lag(self, step_s: float, lag_s: float) -> None:
        """Count how late a step ended, and log that every REPORT_S. After a long lag the timeline begins anew."""
        self.simulation_lag = _add_step(self.simulation_lag, step_s, lag_s)
        self._recent_lag = _add_step(self._recent_lag, step_s, lag_s)
        now_s = self._due_at_s + lag_s
        if lag_s > RESYNC_LAG_S:
            self._due_at_s = now_s
        if now_s >= self._next_report_at_s:
            _log_lag("lately", self._recent_lag)
            self._next_report_at_s, self._recent_lag = now_s + REPORT_S, SimulationLag()


def _add_step(lag: SimulationLag, step_s: float, lag_s: float) -> SimulationLag:
    return SimulationLag(
        step_count=lag.step_count + 1,
        step_s=lag.step_s + step_s,
        lag_s=lag.lag_s + lag_s,
        lag_s_max=max(lag.lag_s_max, lag_s),
    )


def _log_lag(period: str, lag: SimulationLag) -> None:
    log.log(
        logging.WARNING if lag.lag_s > LAG_WARNING_SHARE * lag.step_s else logging.INFO,
        "simulated steps %s: %d of %.2f ms in the mean, late by %.3f ms in the mean, %.1f ms at most",
        period, lag.step_count, lag.step_s / lag.step_count * 1e3, lag.lag_s / lag.step_count * 1e3,
        lag.lag_s_max * 1e3,
    )  # fmt: skip


def _add_logprobs(result: StepResult, index: int, chunk: Chunk) -> None:
    """Add logprobs of 0, which is certainty, if the request wants any."""
    params, token_ids = chunk.seq.request.params, chunk.seq.token_ids
    token = result.sampled_tokens[index]
    if params.logprobs is not None and token is not None:
        result.logprobs_by_chunk[index] = TokenLogprobs.pack(token, 0.0, 1, [(token, 0.0)] * min(params.logprobs, 1))
    if params.prompt_logprobs is not None:
        result.prompt_logprobs_by_chunk[index] = [
            TokenLogprobs.pack(token_id, 0.0, 1, []) for token_id in token_ids[chunk.start + 1 : chunk.end + 1]
        ]
