"""The engine: requests in, one step at a time, outputs and cache events out.

Start reading here. In each step the scheduler makes a plan, the runner computes it, and the scheduler applies the
result. Then the events of the cache are published, before the tokens of the step are returned. A failed step ends its
requests and empties the cache. If steps overlap, the next step is planned and begun while this step is computed. One
thread drives the core, which knows no sockets and no clock (`now` is an argument).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.active_requests import SchedulerTotals
from engine.cache.host_tier import HostUsage
from engine.cache.spec import CacheSpec
from engine.grammar_compiler import GrammarCompiler
from engine.scheduler import RequestRefusedError, Scheduler
from engine.transfer.block_exchange import BlockMemory
from engine.transfer.interface import Transfers, TransferStats
from engine.types import FinishReason, Request, RunnerLostError, SequenceOutput, StepPlan, StepResult
from events import Event
from simulation.spec import ScriptTurn

log = logging.getLogger(__name__)

FAILURES_MAX = 10
"""Failed steps in a row after which the engine ends, because only a new process may help."""

PREPARATION_WAIT_S = 0.002
"""Longest wait of a step for a grammar or for blocks when there is no other work."""

PublishEvents = Callable[[Iterable[Event]], None]
"""Publishes the events of a step, which are made while they are iterated."""


class Runner(Protocol):
    """Computes steps on a device."""

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step after all earlier ones. Returns a function that waits for the step's result.

        RunnerLostError of either ends the engine; any other exception ends only the requests of the step. If steps
        overlap, the plan and its sequences are not read after `submit` returns. If a step fails, the core does not ask
        for the results of later steps in flight.
        """
        ...


class Model(Protocol):
    """Interface of a loaded model, real or simulated. `sleep`, `wake` and `reload` are called only while no step runs.

    A step is one forward pass over a batch of requests.
    """

    def make_runner(self, eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None) -> Runner:
        """Make the runner, which computes steps. Called once. `eos_token_ids`: tokens that end an answer."""
        ...

    def get_block_memory(self) -> BlockMemory | None:
        """Return access to the contents of KV cache blocks, to move them between engines.

        None if this is a simulation that does not know the size of its blocks. Called after `make_runner`.
        """
        ...

    def watch_for_loss(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost`, on any thread, with the reason once no further step can be computed."""

    def get_copy_s(self) -> float:
        """Return the seconds for which steps have waited for copies to host memory and back."""
        ...

    def get_simulation_lag(self) -> SimulationLag | None:
        """Return how late simulated steps end; None if steps are real."""

    def close(self) -> None:
        """End the processes and threads that compute steps. Idempotent."""

    def sleep(self, level: int) -> None:
        """Free the cache and the device's copy of the weights; level 2 also frees the copy in host memory.

        The content of the cache is lost. Raises ValueError if the model cannot sleep.
        """

    def wake(self) -> None:
        """Allocate the cache again, and restore the weights. Raises ValueError, OSError, MemoryError, RuntimeError.

        After an error the model stays asleep.
        """

    def reload(self, path: str | None) -> None:
        """Load the weights from the checkpoint folder `path`, or again from the last folder if `path` is None.

        Raises the errors of `wake`. After an error the model keeps its weights.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """A loaded model, and the sizes of its KV cache and of its forward steps."""

    model: Model
    cache_spec: CacheSpec
    unit_count: int
    """Units of KV cache memory on the device. A unit holds one or more blocks."""
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    step_tokens_max: int
    """Most tokens of one step."""
    overlaps_steps: bool = False
    """Whether a step is planned while the one before is computed."""
    host_unit_count: int = 0
    """Units of KV cache memory on the host, to which evicted blocks move."""
    target_prefill_tokens: int | None = None
    """Prompt tokens of a step after which it starts no further request; None: as many as the step has room for."""
    script_turns: tuple[ScriptTurn, ...] = ()
    """Answers of a simulation, turn by turn; empty: random text."""


class SimulationLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far simulated steps end later than they should."""

    step_count: int = 0
    step_s: float = 0.0
    """Seconds that all steps should have taken together."""
    lag_s: float = 0.0
    """Sum of the seconds by which steps ended late."""
    lag_s_max: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics for the engine's metrics: present values, such as `running_requests`, and totals since the start."""

    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    """Share of the cache's memory that running sequences hold, 0 .. 1; cached blocks do not count."""
    totals: SchedulerTotals
    failed_steps: int
    host_memory: HostUsage
    host_copy_s: float
    """Seconds for which steps have waited for copies to host memory and back."""
    transfers: TransferStats | None = None
    """Statistics of blocks that moved from and to peers; None if transfers are off."""


class _PreparingRequest(NamedTuple):
    """A request that waits for its grammar to be compiled, or for blocks of a peer, before it is queued."""

    request: Request
    arrival_s: float
    futures: list[Future[Any]]

    @property
    def is_prepared(self) -> bool:
        return all(future.done() for future in self.futures)

    def find_error(self) -> BaseException | None:
        errors = (future.exception() for future in self.futures if not future.cancelled())
        return next((error for error in errors if error is not None), None)


class _StepInFlight(NamedTuple):
    """A step that the runner has begun to compute."""

    plan: StepPlan
    wait_for_result: Callable[[], StepResult]
    """Waits for the step's end. Returns its result, or raises its error."""


class EngineCore:
    """Runs the step loop: plans steps, has them computed, applies their results, and publishes the cache's events."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        publish: PublishEvents,
        *,
        overlaps_steps: bool = False,
        grammars: GrammarCompiler | None = None,
        transfers: Transfers | None = None,
        model: Model | None = None,
    ) -> None:
        """Make a core without requests.

        `runner` computes the steps that the `scheduler` plans. `publish`: publishes the KV cache events of each step.
        `overlaps_steps`: plan a step while the one before is computed. `grammars`: without it, requests for answers
        that match a grammar are refused. `transfers`: moves blocks from and to other engines ("peers"); None: there are
        none. `model`: needed to sleep and to change weights.
        """
        self.scheduler = scheduler
        self._publish_step_events = publish
        self._grammars = grammars
        self.transfers = Transfers() if transfers is None else transfers
        self._model = model
        self._sleep_level = 0
        """Level of the sleep, 1 or 2; 0: awake."""
        self._preparing_requests: dict[str, _PreparingRequest] = {}
        """Requests that wait for their grammar or for blocks of a peer, by request id."""
        self._on_work: Callable[[], None] = lambda: None
        """Called when a request is prepared, so that it can be queued."""

        self._submit_step = runner.submit
        self._steps_in_flight_max = 2 if overlaps_steps else 1
        self._steps_in_flight: deque[_StepInFlight] = deque()
        """Steps that the runner computes, oldest first."""
        self._step_count = 0
        self._failed_steps = 0
        self._consecutive_failures = 0
        """Failed steps since the last step that was computed."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests, steps in flight, or blocks to copy for a peer."""
        return self.scheduler.has_work or bool(self._preparing_requests) or self.transfers.has_copies

    @property
    def can_step(self) -> bool:
        """Whether a step has something to do now: not while all requests wait for grammars or for blocks of peers."""
        return self.scheduler.has_work or self.transfers.has_copies or bool(self._find_prepared_ids())

    def watch(self, on_work: Callable[[], None]) -> None:
        """Have `on_work` called, on any thread, when `can_step` may have become true without a command."""
        self._on_work = on_work
        self.transfers.watch(on_work)

    def add(self, request: Request, now: float) -> None:
        """Queue a request once its grammar is compiled and blocks of its prompt are pulled from a peer, if it has any.

        Steps with other requests run meanwhile. Raises RequestRefusedError if the request is refused at once, without a
        wait; a later refusal is an output of `step`.
        """
        grammar_future = self._start_compiling(request)
        pull_future = self.transfers.start_pull(request)
        futures = [future for future in (grammar_future, pull_future) if future is not None]
        if not futures:
            self.scheduler.add(request, now)
            return
        self._preparing_requests[request.request_id] = _PreparingRequest(request, now, futures)
        for future in futures:
            future.add_done_callback(lambda _: self._on_work())

    def _start_compiling(self, request: Request) -> Future[Any] | None:
        """Start to compile the grammar that a request's answer must match; None if there is no need."""
        constraint = request.params.constraint
        if constraint is None:
            return None
        if self._grammars is None:
            raise RequestRefusedError(f"{constraint.param}: this engine has no grammars")
        return self._grammars.start_compiling(constraint.lark_grammar)

    def abort(self, request_ids: Iterable[str]) -> list[SequenceOutput]:
        """End requests and return their last outputs. Ids of unknown or finished requests are ignored.

        Full blocks of running requests stay cached for other prompts.
        """
        outputs = (self._abort_request(request_id) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    def _abort_request(self, request_id: str) -> SequenceOutput | None:
        if self._preparing_requests.pop(request_id, None) is None:
            return self.scheduler.abort(request_id)
        self.transfers.stop_waiting(request_id)
        return SequenceOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    def step(self, now: float) -> list[SequenceOutput]:
        """Begin one step (a forward pass over a batch), finish at most one, and return the outputs for clients.

        If steps overlap, the first call begins step 1, the second begins step 2 and finishes step 1, and so on. If
        no step can be planned, the oldest step in flight is finished. Before copies for peers, all steps in flight are.
        Raises RunnerLostError.
        """
        outputs = self._copy_blocks_of_peers() if self.transfers.has_copies else []
        if self._preparing_requests:
            outputs += self._add_prepared()
        plan = self.scheduler.schedule(now)
        if plan is not None and plan.chunks:
            self._begin_step(plan)
            must_finish_step = len(self._steps_in_flight) == self._steps_in_flight_max
        else:
            must_finish_step = bool(self._steps_in_flight)
        if must_finish_step:
            outputs += self._finish_step()
        self._publish_events()
        return outputs

    def _copy_blocks_of_peers(self) -> list[SequenceOutput]:
        """Copy KV cache blocks that came from other engines, or that these want, after finishing the steps in flight.

        Returns the outputs of these steps. If the copies fail, the cache is emptied, and running requests start again.
        """
        outputs: list[SequenceOutput] = []
        while self._steps_in_flight:
            outputs += self._finish_step()
        try:
            self.transfers.copy_blocks()
        except RunnerLostError:
            raise
        except Exception:
            log.exception("copying blocks of a peer failed; the prefix cache is emptied")
            self._failed_steps += 1
            self.transfers.abandon_pulls()
            self.scheduler.restart_running()
        return outputs

    def _add_prepared(self) -> list[SequenceOutput]:
        """Queue the requests that are prepared. Returns the last outputs of requests that cannot be served.

        If there is no other work, wait a moment for one to become prepared.
        """
        prepared_ids = self._find_prepared_ids()
        has_other_work = self.scheduler.has_work or self.transfers.has_copies
        if not prepared_ids and not has_other_work:
            futures = [future for entry in self._preparing_requests.values() for future in entry.futures]
            wait([future for future in futures if not future.done()], PREPARATION_WAIT_S, FIRST_COMPLETED)
            prepared_ids = self._find_prepared_ids()
        outputs = (self._queue_prepared(request_id) for request_id in prepared_ids)
        return [output for output in outputs if output is not None]

    def _queue_prepared(self, request_id: str) -> SequenceOutput | None:
        """Pass a request to the scheduler, after its grammar was compiled and its blocks came from a peer.

        If one of these failed, or the scheduler refuses the request, returns an output with the error instead.
        """
        preparing_request = self._preparing_requests.pop(request_id)
        self.transfers.stop_waiting(request_id)
        error = preparing_request.find_error()
        if error is None:
            try:
                self.scheduler.add(preparing_request.request, preparing_request.arrival_s)
                return None
            except ValueError as refusal:
                error = refusal
        if isinstance(error, ValueError):
            return SequenceOutput.from_error(request_id, str(error), is_client_error=True)
        log.error("a request could not be prepared", exc_info=error)  # such as a panic of llguidance, no Exception
        message = f"the engine failed to prepare the request: {_describe_error(error)}"
        return SequenceOutput.from_error(request_id, message)

    def _find_prepared_ids(self) -> list[str]:
        """Return the ids of the requests that are prepared: grammars are compiled, and blocks are pulled."""
        return [request_id for request_id, entry in self._preparing_requests.items() if entry.is_prepared]

    def _begin_step(self, plan: StepPlan) -> None:
        """Begin to compute a step. If that fails, the error is raised later, when the step is finished."""
        self._step_count += 1
        try:
            wait_for_result = self._submit_step(plan)
        except Exception as error:  # noqa: BLE001 - the steps before must be finished first
            wait_for_result = partial(_raise, error)
        self._steps_in_flight.append(_StepInFlight(plan, wait_for_result))

    def _finish_step(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and apply its result, or end its requests with an error."""
        plan, wait_for_result = self._steps_in_flight.popleft()
        try:
            result = wait_for_result()
        except RunnerLostError:
            raise
        except Exception as error:
            step_number = self._step_count - len(self._steps_in_flight)
            log.exception("step %d failed; its %d requests end with an error", step_number, len(plan.chunks))
            return self._fail_step(plan, error)
        self._consecutive_failures = 0
        return self.scheduler.apply(plan, result)

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        """End the requests of a failed step with an error. Raises RunnerLostError after too many failures in a row."""
        self._failed_steps += 1
        self._consecutive_failures += 1
        if self._consecutive_failures >= FAILURES_MAX:
            raise RunnerLostError(
                f"{FAILURES_MAX} steps failed in a row, the last with {_describe_error(error)}"
            ) from error
        # A later step in flight needs the tokens of the failed step, so it is dropped and does not count.
        self._step_count -= len(self._steps_in_flight)
        self._steps_in_flight.clear()
        self.transfers.abandon_pulls()  # as after a reset: a failed step empties the cache
        return self.scheduler.fail(plan, f"the engine failed to compute a step: {_describe_error(error)}")

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and publish the event at once. Running sequences keep their blocks."""
        self.transfers.abandon_pulls()
        self.scheduler.cache.reset()
        self._publish_events()

    def sleep(self, level: int) -> None:
        """Free the memory of the cache and of the weights until `wake`. Level 2 also frees the weights in host memory.

        All cached prefixes are lost, and that is published. The HTTP process refuses requests meanwhile; this method
        does not. Raises ValueError while there are requests, while asleep, or if this engine cannot sleep.
        """
        self._get_idle_model(asleep=False).sleep(level)
        self._sleep_level = level
        self.reset_prefix_cache()

    def wake(self) -> None:
        """End the sleep with an empty cache. Raises ValueError unless asleep, and the errors of `Model.wake`."""
        self._get_idle_model(asleep=True).wake()
        level, self._sleep_level = self._sleep_level, 0
        if level == 2:  # the weights were read again, from files that may have changed
            self._forget_old_weights(None)
        else:
            self.reset_prefix_cache()

    def reload_weights(self, path: str | None) -> None:
        """Load the weights from the checkpoint folder `path`; None: from the last folder again.

        All cached prefixes are lost. Raises ValueError while there are requests or while asleep, and the errors of
        `Model.reload`.
        """
        self._get_idle_model(asleep=False).reload(path)
        self._forget_old_weights(path)

    def _get_idle_model(self, *, asleep: bool) -> Model:
        """Return the model for an operation on its weights.

        Steps in flight, in which all requests have ended, are finished first. Raises ValueError while there are
        requests, or if the engine is not as `asleep` demands.
        """
        assert self._model is not None
        if self.scheduler.has_requests or self._preparing_requests:
            raise ValueError("sequences are running")
        while self._steps_in_flight:
            self._finish_step()
        if bool(self._sleep_level) != asleep:
            raise ValueError(f"the engine is {'asleep' if self._sleep_level else 'awake'}")
        return self._model

    def _forget_old_weights(self, path: str | None) -> None:
        """Drop all KV of earlier weights, here and at peers. `path`: folder of the new weights; None: the last one."""
        self.reset_prefix_cache()
        self.transfers.change_weights(path)

    def stats(self) -> EngineStats:
        """Return the engine's statistics, which its metrics show."""
        cache = self.scheduler.cache
        return EngineStats(
            running_requests=self.scheduler.running_count,
            waiting_requests=self.scheduler.waiting_count + len(self._preparing_requests),
            kv_cache_usage=cache.used_share,
            totals=copy(self.scheduler.totals),
            failed_steps=self._failed_steps,
            host_memory=cache.host_tier.measure_usage(),
            host_copy_s=0.0 if self._model is None else self._model.get_copy_s(),
            transfers=self.transfers.stats,
        )

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def _publish_events(self) -> None:
        events = self.scheduler.cache.take_events()
        if events is not None:
            self._publish_step_events(events)


def _raise(error: Exception) -> StepResult:
    raise error


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
