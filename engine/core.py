"""The engine: requests in, one step at a time, outputs and cache events out.

Start reading here. A step is: the scheduler plans, the runner computes, the scheduler takes the result in, and what
the cache gained or lost is published. Where steps overlap, the next one is planned and begun before the result of this
one is waited for. The core is driven by one thread; it knows no sockets and no clock (`now` is an argument). The
publisher must not block: it is called in the step loop, after the compute.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from engine.cache.spec import CacheSpec
from engine.grammars import GrammarCompiler
from engine.scheduler import RequestRefusedError, Scheduler
from engine.types import FinishReason, Request, RunnerLostError, SequenceOutput, StepPlan, StepResult
from events import Event
from simulation.spec import ScriptTurn

log = logging.getLogger(__name__)

FAILURES_MAX = 10
"""Steps that fail one after the other before the engine ends: what no request can mend, a new process may."""

GRAMMAR_WAIT_S = 0.01
"""How long a step waits for a grammar where there is nothing else to do: commands are read between steps."""

PublishEvents = Callable[[Collection[Event]], None]
"""Takes what a step changed. The events are made when it is iterated, on whatever thread that is."""


class Runner(Protocol):
    """Computes a step on a device. Any exception but RunnerLostError fails that step's requests and nothing else."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class OverlappingRunner(Protocol):
    """A runner that computes a step while the next one is planned."""

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin the step, behind those that were begun before; what is returned waits for its result.

        Either may raise, as `execute` does. What plan and sequences say is read before this returns. Where one step
        fails, nothing is asked of those that were begun after it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """A loaded and measured model that computes steps on its device, or the simulation of one."""

    cache_spec: CacheSpec
    unit_count: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    make_runner: Callable[[tuple[int, ...], GrammarCompiler | None], Runner]
    """From the token ids that end an answer, and what constrained answers match. Called once, after the cache is made.
    """
    close: Callable[[], None]
    """End what the steps need besides this process; idempotent."""
    watch_for_loss: Callable[[Callable[[str], None]], None]
    """From now on call back, on any thread, with the reason why no further step can be computed."""
    get_simulation_lag: Callable[[], SimulationLag | None]
    step_tokens_max: int
    """In one step, at most."""
    overlaps_steps: bool = False
    """Whether the runner is an `OverlappingRunner` and steps overlap."""
    host_unit_count: int = 0
    """Units of host memory under the cache."""
    load_bytes_max: int | None = None
    """Most bytes that a step with decodes loads from host memory; None: no limit."""
    get_copy_s: Callable[[], float] = lambda: 0.0
    """Time spent on copies to host memory and back, where the steps wait for them."""
    target_prefill_tokens: int | None = None
    """The field of `SchedulerConfig`."""
    script_turns: tuple[ScriptTurn, ...] = ()
    """Answers turn by turn, where steps are simulated; empty: random text."""
    sleep: Callable[[int], None] = lambda level: None
    """Free memory while nothing runs: level 1 the cache and the weights on the device, level 2 all weights.
    The cache is lost. Raises ValueError where that is impossible."""
    wake: Callable[[], None] = lambda: None
    """Allocate it again and load dropped weights. Raises ValueError, OSError, MemoryError and sleeps on."""
    reload_weights: Callable[[str | None], None] = lambda path: None
    """Compute with the weights of this checkpoint's folder, or None: of the last one, from now on. Raises as `wake`;
    the weights are then the old ones."""


class SimulationLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far simulated steps lag behind the times that they should take. Seconds."""

    step_count: int = 0
    step_s: float = 0.0
    """Seconds that the steps should have taken."""
    lag_s: float = 0.0
    """Sum of the seconds by which steps ended late."""
    lag_s_max: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, and totals since the start."""

    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    """Share of the cache's memory that running sequences hold, 0 .. 1, without what could be evicted."""
    token_limit: int
    """Tokens (prompt and output) that one sequence can have: the model's length or what the cache can hold."""
    prefix_cache_queries: int
    """Prompt tokens looked up."""
    prefix_cache_hits: int
    """Prompt tokens found in the cache."""
    host_cache_hits: int
    """Prompt tokens found in host memory, also counted in `prefix_cache_hits`."""
    host_cache_usage: float
    """Used share of the host memory under the cache, 0 .. 1; 0 without host memory."""
    host_stored_bytes: int
    host_loaded_bytes: int
    host_copy_s: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    finished_requests: int
    step_count: int
    failed_steps: int


class _CompilingRequest(NamedTuple):
    """A request that waits for its grammar."""

    request: Request
    arrival_s: float
    grammar_future: Future[Any]


class EngineCore:
    """The step loop over a scheduler and a runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        publish: PublishEvents,
        *,
        overlaps_steps: bool = False,
        grammars: GrammarCompiler | None = None,
        get_copy_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`overlaps_steps`: the runner is `OverlappingRunner`; a step is planned and begun while another is computed.

        `grammars`: what constrained answers match; None: no request may have a constraint.
        `get_copy_s`: as an Executor's.
        """
        self.scheduler = scheduler
        self._submit_step: Callable[[StepPlan], Callable[[], StepResult]] = lambda plan: partial(runner.execute, plan)
        if overlaps_steps:
            assert isinstance(runner, OverlappingRunner)
            self._submit_step = runner.submit
        self._steps_in_flight_max = 1 + overlaps_steps
        self._steps_in_flight: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        """Steps that were begun, oldest first, and what waits for the result of each."""
        self._publish_step_events = publish
        self._grammars = grammars
        self._get_copy_s = get_copy_s
        self._compiling_requests: dict[str, _CompilingRequest] = {}
        """Requests that wait for their grammar to be compiled, by id."""
        self._step_count = 0
        self._failed_steps = 0
        self._consecutive_failures = 0
        """Failed steps since the last one that was computed."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or bool(self._compiling_requests)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRefusedError, a ValueError, for one that can never be served.

        One whose grammar must be compiled is queued when that is done; no step waits for it.
        """
        constraint = request.params.constraint
        if constraint is not None:
            if self._grammars is None:
                raise RequestRefusedError(f"{constraint.param}: this engine has no grammars")
            if (grammar_future := self._grammars.start_compiling(constraint.lark_grammar)) is not None:
                self._compiling_requests[request.request_id] = _CompilingRequest(request, now, grammar_future)
                return
        self.scheduler.add(request, now)

    def abort(self, request_ids: Iterable[str]) -> list[SequenceOutput]:
        """End requests; their last outputs (finish_reason ABORT). Unknown or finished ids are passed over."""
        outputs = (self._abort_request(request_id) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    def _abort_request(self, request_id: str) -> SequenceOutput | None:
        if self._compiling_requests.pop(request_id, None) is None:
            return self.scheduler.abort(request_id)
        return SequenceOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    def step(self, now: float) -> Collection[SequenceOutput]:
        """Plan and begin a step, then wait for the oldest in flight, if no further step may begin or there is none.

        Returns the outputs of the step that was waited for. Raises RunnerLostError.
        """
        rejected = self._add_compiled() if self._compiling_requests else []
        plan = self.scheduler.schedule()
        if plan is not None and plan.chunks:
            self._begin_step(plan)
            should_wait = len(self._steps_in_flight) == self._steps_in_flight_max
        else:
            should_wait = bool(self._steps_in_flight)
        outputs = self._finish_step() if should_wait else []
        self._publish_events()
        return [*rejected, *outputs] if rejected else outputs

    def _add_compiled(self) -> list[SequenceOutput]:
        """Queue the requests that have their grammar; return the last outputs of those that cannot be served."""
        if not self.scheduler.has_work:
            wait({entry.grammar_future for entry in self._compiling_requests.values()}, GRAMMAR_WAIT_S, FIRST_COMPLETED)
        compiled_ids = [
            request_id for request_id, entry in self._compiling_requests.items() if entry.grammar_future.done()
        ]
        rejected = []
        for request_id in compiled_ids:
            request, arrival_s, grammar_future = self._compiling_requests.pop(request_id)
            try:
                grammar_future.result()
                self.scheduler.add(request, arrival_s)
            except ValueError as error:
                output = SequenceOutput(request_id=request_id, token_ids=[], error=str(error), is_client_error=True)
                output.finish_reason = FinishReason.ERROR
                rejected.append(output)
        return rejected

    def _begin_step(self, plan: StepPlan) -> None:
        self._step_count += 1
        try:
            wait_for_result = self._submit_step(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is told after those of the steps before
            wait_for_result = partial(_raise, error)
        self._steps_in_flight.append((plan, wait_for_result))

    def _finish_step(self) -> Collection[SequenceOutput]:
        """Take in the result of the oldest step that is out."""
        plan, wait_for_result = self._steps_in_flight.popleft()
        try:
            result = wait_for_result()
        except RunnerLostError:
            raise
        except Exception as error:
            log.exception("step %d failed; its %d requests end with an error", self._step_count, len(plan.chunks))
            self._failed_steps += 1
            self._consecutive_failures += 1
            if self._consecutive_failures >= FAILURES_MAX:
                raise RunnerLostError(
                    f"{FAILURES_MAX} steps failed in a row, the last with {_describe_error(error)}"
                ) from error
            self._step_count -= len(self._steps_in_flight)
            self._steps_in_flight.clear()  # what was begun after it stands on it
            return self.scheduler.fail(plan, f"the engine failed to compute a step: {_describe_error(error)}")
        self._consecutive_failures = 0
        return self.scheduler.apply(plan, result)

    def reset_prefix_cache(self) -> None:
        """Forget everything that is cached, and say so at once. Running sequences keep what they hold."""
        self.scheduler.cache.reset()
        self._publish_events()

    def stats(self) -> EngineStats:
        usage, totals = self.scheduler.cache.usage, self.scheduler.totals
        return EngineStats(
            running_requests=self.scheduler.running_count,
            waiting_requests=self.scheduler.waiting_count + len(self._compiling_requests),
            kv_cache_usage=usage.live_units / usage.total_units,
            token_limit=self.scheduler.token_limit,
            prefix_cache_queries=totals.prefix_queried_tokens,
            prefix_cache_hits=totals.prefix_hit_tokens,
            host_cache_hits=totals.host_hit_tokens,
            host_cache_usage=usage.host_usage,
            host_stored_bytes=usage.host_stored_bytes,
            host_loaded_bytes=usage.host_loaded_bytes,
            host_copy_s=self._get_copy_s(),
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=totals.preemptions,
            finished_requests=totals.finished_requests,
            step_count=self._step_count,
            failed_steps=self._failed_steps,
        )

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def _publish_events(self) -> None:
        events = self.scheduler.cache.take_events()
        if events is not None:
            self._publish_step_events(events)


def _raise(error: Exception) -> StepResult:
    raise error


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
