"""Workers, their targets, and which of them may serve a request. Eligibility is decided before any price.

`WorkerRegistry` owns the workers and the pools of candidates for each (model, role), which are rebuilt when a worker
changes. It creates a target and a holder in the index for each worker or data-parallel rank. The rows of `/workers` are
made here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from router.decide.cache_state import CacheState
from router.decide.circuit_breaker import CircuitBreaker
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Refuse, RouteRequest, TransferKind
from router.decide.shortlist import POOL_SIZE_MIN, LoadOrder
from router.decide.target import Target
from router.decide.workers import (
    BLOCKCAST,
    PREFILL_ROLE,
    ServedModel,
    Worker,
    WorkerSpec,
    WorkerState,
    find_unusable_reason,
    may_transfer,
    merge_models,
)
from router.index.protocol import PrefixIndex, make_block_group


class _Pool(NamedTuple):
    """Targets that may serve a model and role."""

    targets: list[Target]
    shortest_context: int | None
    """Least `max_model_len` of the targets that have a limit."""
    sources: list[Target]
    """Targets that may send cached KV of the model to the workers that answer."""


class WorkerRegistry:
    """The workers, the states they are in, and the targets that requests can be sent to.

    A target is a worker, or one data-parallel rank of it. Every worker with a known model has one target for each rank,
    and each target has a holder in the index, to which its cached blocks belong.
    """

    def __init__(
        self, index: PrefixIndex, tracker: LoadTracker, cache_state: CacheState, breaker: CircuitBreaker
    ) -> None:
        """Make a registry without workers.

        The workers that are added get holders in `index`, and their targets are added to `tracker` and `cache_state`.
        """
        self._index = index
        self._tracker = tracker
        self._cache_state = cache_state
        self.breaker = breaker
        self.on_state_change: Callable[[Worker, WorkerState | None], None] = lambda worker, before: None
        """Called with a worker and its previous state when its state changes; PROBING counts as DOWN."""

        self.workers: dict[str, Worker] = {}
        """Workers by id."""
        self._targets: dict[str, list[Target]] = {}
        """Worker id -> its targets, one for each rank."""
        self.avoided_workers: frozenset[str] = frozenset()
        """Ids of the workers that are candidates only where no other worker is."""

        # Derived from the workers: discarded or computed again when a worker changes.
        self.down_workers: list[Worker] = []
        self.reachable_workers: frozenset[str] | None = None
        """Ids of the workers that have a URL; None if all have one."""
        self._pools: dict[tuple[str, str | None], _Pool] = {}
        """(model, role) -> its pool, once it was needed."""
        self._models: dict[str, ServedModel] | None = None
        """Served models by name; None until they are needed."""

    # Workers -----------------------------------------------------------------------------------------------------
    def add_worker(self, spec: WorkerSpec, *, is_up: bool) -> Worker:
        """Register a worker, or replace the description of a known one.

        A worker has a target for each data-parallel rank. A known worker keeps its targets, with their load and learned
        speed, unless the new description makes its cached blocks invalid.
        """
        worker = self.workers.get(spec.worker_id)
        are_targets_valid = worker is not None and _has_same_caches(worker.spec, spec)
        if worker is None:
            worker = Worker(spec, WorkerState.UP if is_up else WorkerState.STARTING)
            self.workers[spec.worker_id] = worker
        worker.spec = spec
        worker.models = {model.name: model for model in spec.models}
        if not are_targets_valid:
            self._drop_targets(worker)
            self._make_targets(worker)
        for target in self._targets[spec.worker_id]:
            target.apply_worker_spec(spec)
            self._cache_state.add_target(target, spec)
        self.apply_worker_changes()
        return worker

    def remove_worker(self, worker_id: str) -> None:
        """Forget a known worker, its targets and holders."""
        self._drop_targets(self.workers.pop(worker_id))
        self.apply_worker_changes()

    def apply_worker_changes(self) -> None:
        """Announce new states of workers, and discard all that was derived from the workers before the change.

        A worker in PROBING stays DOWN to others until a request succeeds there.
        """
        for worker in self.workers.values():
            state = WorkerState.DOWN if worker.state is WorkerState.PROBING else worker.state
            previous_state, worker.announced_state = worker.announced_state, state
            if state is not previous_state:
                self.on_state_change(worker, previous_state)
        reachable = frozenset(name for name, worker in self.workers.items() if worker.spec.url)
        self.reachable_workers = None if len(reachable) == len(self.workers) else reachable
        self.down_workers = [worker for worker in self.workers.values() if worker.state is WorkerState.DOWN]
        self._pools.clear()
        self._tracker.load_orders.clear()
        self._models = None

    def update_avoided_workers(self, stalled_workers: Iterable[str], now: float) -> None:
        """Avoid workers that stand still, and those that refused requests until their pauses are over."""
        refusing_workers = [worker_id for worker_id, worker in self.workers.items() if now < worker.avoided_until_s]
        self.avoided_workers = frozenset([*stalled_workers, *refusing_workers])

    def record_service(self, worker_id: str, refused_by: frozenset[str], now: float) -> None:
        """Record that a worker serves a request. Those in `refused_by`, which refused it, are avoided for a while."""
        for refusing_worker_id in refused_by:
            if refusing_worker_id in self.workers:
                self.breaker.record_refusal(self.workers[refusing_worker_id], now)
        self.avoided_workers |= refused_by
        if worker_id in self.workers:
            self.workers[worker_id].refusal_pause_s = 0.0

    def record_answer(self, worker_id: str, now: float) -> None:
        """Record that a worker answered a request, at least by an error: its past failures no longer count."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.last_answer_at_s = now
        is_healthy = worker.health is WorkerState.UP and not worker.failures
        if not is_healthy and self.breaker.record_success(worker):
            self.apply_worker_changes()

    def get_targets(self, worker_id: str) -> list[Target]:
        """Return the targets of a worker, one for each rank."""
        return self._targets.get(worker_id, [])

    def get_served_models(self) -> dict[str, ServedModel]:
        """Return the models of the workers that are not down or starting, by name. The result must not be changed."""
        if self._models is None:
            self._models = merge_models(self.workers.values())
        return self._models

    def is_model_known(self, model: str) -> bool:
        """Return whether some worker, in whatever state, serves a model."""
        return model in self.get_served_models() or bool(self._list_workers_serving(model))

    def is_model_served(self, model: str, worker_id: str | None = None) -> bool:
        """Return whether some worker takes requests for a model now, or whether a given worker serves the model."""
        if worker_id is not None:
            worker = self._find_named_worker(worker_id)
            return worker is not None and model in worker.models
        return bool(self._get_pool((model, None)).targets)

    def find_default_model(self, worker_id: str | None = None) -> str:
        """Return the model of a request that names none: the first one of a given worker, else of any; "" for none."""
        named_worker = None if worker_id is None else self._find_named_worker(worker_id)
        workers = self.workers.values() if named_worker is None else (named_worker,)
        return next((model for worker in workers for model in worker.models), "")

    def _find_named_worker(self, name: str) -> Worker | None:
        """Return the worker that a client names by its id, or by the name of one of its ranks; None for none."""
        target = self._tracker.targets.get(name)
        return self.workers.get(name if target is None else target.worker_id)

    def is_blockcast(self, model: str) -> bool:
        """Return whether all workers of a model are engines of this project."""
        return all(worker.spec.engine == BLOCKCAST for worker in self._list_workers_serving(model))

    # Eligibility -------------------------------------------------------------------------------------------------
    def find_candidates(self, request: RouteRequest, tried_workers: frozenset[str]) -> list[Target] | Refuse:
        """Return the targets (workers or ranks of them) that may serve a request, or a refusal if there is none.

        Workers in `tried_workers` failed the request before. Avoided workers are returned only if there are no others.
        """
        model = request.model
        pool = self._get_pool((model, request.role))
        targets = pool.targets
        if not targets:
            return self._refuse_unserved(request)
        needed_tokens = _count_needed_tokens(request)
        if pool.shortest_context is not None and needed_tokens > pool.shortest_context:
            targets = [target for target in targets if self._fits_context(target.worker_id, model, needed_tokens)]
            if not targets:
                return self._refuse_long_prompt(request, needed_tokens, pool.targets)
        if request.worker is not None:
            targets = [target for target in targets if request.worker in (target.worker_id, target.name)]
            if not targets:
                return self._refuse_pinned(request)
        if request.allowed_workers is not None:
            targets = [target for target in targets if target.worker_id in request.allowed_workers]
            if not targets:
                message = "None of the endpoints that the gateway allows, or that requests are sent to, can take this."
                return Refuse(request.request_id, 503, "no_worker", message, 1.0)
        if tried_workers:
            targets = [target for target in targets if target.worker_id not in tried_workers]
            if not targets:
                return Refuse(request.request_id, 502, "upstream_failed", "Every worker that could serve this failed.")
        if self.avoided_workers:
            return [target for target in targets if target.worker_id not in self.avoided_workers] or targets
        return targets

    def find_sources(self, request: RouteRequest, excluded_workers: frozenset[str]) -> list[Target]:
        """Return the targets that may send KV of a request's prompt to the worker that will answer."""
        sources = self._get_pool((request.model, request.role)).sources
        if not sources:
            return []
        needed_tokens = _count_needed_tokens(request)
        return [
            target
            for target in sources
            if target.worker_id not in self.avoided_workers
            and target.worker_id not in excluded_workers
            and (request.allowed_workers is None or target.worker_id in request.allowed_workers)
            and self._fits_context(target.worker_id, request.model, needed_tokens)
        ]

    def get_load_order(
        self, request: RouteRequest, candidates: list[Target], utilisation_decay: float, now: float
    ) -> LoadOrder | None:
        """Return a request's candidates sorted by their load at `now`, or None if all of them can be compared instead.

        The sorted order is kept for each pool, which is all targets of a model and role, and updated when a load
        changes. There is none for fewer than POOL_SIZE_MIN candidates, nor for only a part of a pool.
        `utilisation_decay`: factor from the stored utilisation of any target to its value at `now`.
        """
        pool_key = (request.model, request.role)
        is_small = len(candidates) < POOL_SIZE_MIN
        if is_small or candidates is not self._pools[pool_key].targets:
            return None
        load_order = self._tracker.load_orders.get(pool_key)
        if load_order is None:
            load_order = LoadOrder(candidates, self._tracker.cost, now, utilisation_decay)
            self._tracker.load_orders[pool_key] = load_order
        load_order.update(now, utilisation_decay)
        return load_order

    def find_ineligibility_reasons(self, request: RouteRequest, now: float) -> dict[str, str]:
        """Return worker -> reason why it is no candidate, for explanations."""
        reasons = {name: self._find_ineligibility_reason(worker, request) for name, worker in self.workers.items()}
        eligible_workers = {name for name, reason in reasons.items() if reason is None}
        avoided_workers = eligible_workers & self.avoided_workers
        if avoided_workers != eligible_workers:  # otherwise they are the candidates
            reasons |= {name: _describe_avoidance(self.workers[name], now) for name in avoided_workers}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _find_ineligibility_reason(self, worker: Worker, request: RouteRequest) -> str | None:
        """Return the first reason why a worker cannot get a request, as a short text; None if it can."""
        model, role = request.model, request.role
        unavailable_reason = _find_unavailable_reason(worker, model, role)
        if unavailable_reason is not None:
            return unavailable_reason
        if not self._fits_context(worker.worker_id, model, _count_needed_tokens(request)):
            return "context too short"
        if role is None and _computes_prefills_only(worker):
            pool = self._get_pool((model, role)).targets
            if all(target.worker_id != worker.worker_id for target in pool):
                return "computes prefills only"
        if not self._has_partner(worker, model):
            return "no worker computes prompts for it"
        if request.worker is not None and self._find_named_worker(request.worker) is not worker:
            return "another worker is pinned"
        if request.allowed_workers is not None and worker.worker_id not in request.allowed_workers:
            return "not among the gateway's endpoints"
        return None

    def compute_retry_after_s(self, now: float) -> float:
        """Return the time until a broken worker will be tried again."""
        waits = [min(worker.open_until_s - now, worker.open_s) for worker in self.down_workers]  # a check may be sooner
        return max(1.0, min(waits, default=1.0))

    def _get_pool(self, key: tuple[str, str | None]) -> _Pool:
        """Return the pool of a model and role. It is stored until a worker changes.

        `key`: the model, and the role that the worker must have; None: any.
        """
        model, role = key
        stored_pool = self._pools.get(key)
        if stored_pool is not None:
            return stored_pool
        targets: list[Target] = []
        context_limits: list[int] = []
        for worker in self._select_workers(model, role):
            targets += self._targets[worker.worker_id]
            context_limit = worker.models[model].max_model_len
            if context_limit is not None:
                context_limits.append(context_limit)
        sources = [
            target
            for worker in self._list_workers_serving(model)
            if worker.state is WorkerState.UP and worker.spec.transfer.group and worker.spec.transfer.can_give
            for target in self._targets[worker.worker_id]
        ]
        new_pool = _Pool(targets, min(context_limits, default=None), sources)
        if targets:  # clients may send any name, so pools of names that nobody serves are not stored
            self._pools[key] = new_pool
        return new_pool

    def _select_workers(self, model: str, role: str | None) -> list[Worker]:
        """Return the available workers for a model and role; those that only compute prompts, if it has no others."""
        workers = [worker for worker in self.workers.values() if _find_unavailable_reason(worker, model, role) is None]
        if role is None:
            workers = [worker for worker in workers if not _computes_prefills_only(worker)] or workers
        return [worker for worker in workers if self._has_partner(worker, model)]

    def _has_partner(self, worker: Worker, model: str) -> bool:
        """Return whether a worker answers alone, or another one is up that computes prompts for it."""
        facts = worker.spec.transfer
        return not facts.needs_partner or any(
            source.state is WorkerState.UP and may_transfer(source.spec.transfer, facts, TransferKind.PREFILL)
            for source in self._list_workers_serving(model)
        )

    def _list_workers_serving(self, model: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if model in worker.models]

    def _fits_context(self, worker_id: str, model: str, tokens: int) -> bool:
        limit = self.workers[worker_id].models[model].max_model_len
        return limit is None or tokens <= limit

    def _refuse_long_prompt(self, request: RouteRequest, tokens_needed: int, pool: list[Target]) -> Refuse:
        """Return the refusal of a prompt that fits the context of no worker in the pool."""
        limit = max(self.workers[target.worker_id].models[request.model].max_model_len or 0 for target in pool)
        message = f"A prompt of {tokens_needed - 1} tokens and an answer have no room in {limit} tokens."
        return Refuse(request.request_id, 400, "context_length_exceeded", message, context_max=limit)

    def _refuse_unserved(self, request: RouteRequest) -> Refuse:
        """Return the refusal of a request for a model and role that no worker takes now.

        The status is 404 if no worker serves that model or role at all, and 503 if those that do, or all, are not up.
        """
        request_id, model, role = request.request_id, request.model, request.role
        all_workers, serving_workers = self.workers.values(), self._list_workers_serving(model)
        is_any_started = any(worker.state in (WorkerState.UP, WorkerState.SLEEPING) for worker in all_workers)
        if not serving_workers and is_any_started:
            model_names = ", ".join(sorted(self.get_served_models())) or "none"
            return Refuse(request_id, 404, "unknown_model", f"No worker serves model {model!r}; served: {model_names}.")
        if role is not None and all(role not in worker.spec.roles for worker in serving_workers):
            return Refuse(request_id, 404, "unknown_role", f"No worker has the role {role!r}.")
        if not model:
            message = f"No worker is up: {_count_states(all_workers)}."
            return Refuse(request_id, 503, "no_worker", message, retry_after_s=1.0)
        message = f"No worker of model {model!r} is up: {_count_states(serving_workers)}"
        if any(worker.state is WorkerState.UP and worker.spec.transfer.needs_partner for worker in serving_workers):
            message += ", but no pair of one for prefills and one for decodes"
        return Refuse(request_id, 503, "no_worker", f"{message}.", retry_after_s=1.0)

    def _refuse_pinned(self, request: RouteRequest) -> Refuse:
        worker_id = request.worker or ""
        worker = self._find_named_worker(worker_id)
        if worker is None:
            return Refuse(request.request_id, 404, "unknown_worker", f"There is no worker {worker_id!r}.")
        reason = self._find_ineligibility_reason(worker, request) or "not eligible"
        return Refuse(request.request_id, 503, "no_worker", f"Worker {worker_id!r} cannot take this: {reason}.", 1.0)

    # Targets -----------------------------------------------------------------------------------------------------
    def _make_targets(self, worker: Worker) -> None:
        self._targets[worker.worker_id] = []
        base_model = _get_base_model(worker.spec)
        if base_model is None:
            return
        for rank in range(worker.spec.ranks):
            target_rank = rank if worker.spec.ranks > 1 else None
            holder = self._index.add_holder(base_model)
            if worker.spec.block_size is not None:  # until events tell it: prompts in flight leave whole blocks only
                self._index.declare_groups(holder, [make_block_group(worker.spec.block_size)])
            worker.holders.append(holder)
            target = self._tracker.add_target(worker.worker_id, target_rank, holder, pool=base_model)
            self._targets[worker.worker_id].append(target)

    def _drop_targets(self, worker: Worker) -> None:
        for target in self._targets.pop(worker.worker_id, ()):
            self._tracker.remove_target(target.name)
            self._cache_state.remove_target(target)
            self._index.remove_holder(target.holder)
        worker.holders.clear()


def _count_states(workers: Iterable[Worker]) -> str:
    """Return how many workers are in each state, as a text such as "1 down, 2 starting"."""
    states = Counter(worker.state.value for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none was found yet"


def _count_needed_tokens(request: RouteRequest) -> int:
    """Return the context that a prompt and one token need; 0 if its length is estimated, which never refuses."""
    if request.token_ids is None:
        return 0
    return (request.longest_prompt_tokens or request.prompt_tokens) + 1


def _find_unavailable_reason(worker: Worker, model: str, role: str | None) -> str | None:
    """Return the reason why a worker takes no requests for a model and role now, or None."""
    if model not in worker.models:
        return f"does not serve {model}"
    if role is not None and role not in worker.spec.roles:
        return f"has no role {role}"
    return find_unusable_reason(worker)


def _describe_avoidance(worker: Worker, now: float) -> str:
    """Return the reason why a worker that is up is no candidate while others are: its refusals, or a standstill."""
    return worker.describe_state(now) if now < worker.avoided_until_s else "avoided: none of its streams moves"


def _computes_prefills_only(worker: Worker) -> bool:
    """Return whether a worker hands the KV of its prefills over, so that it gets no request without this role."""
    return worker.spec.roles == {PREFILL_ROLE} and TransferKind.PREFILL in worker.spec.transfer.kinds


def _get_base_model(spec: WorkerSpec) -> str | None:
    """Return the model of the worker's holders in the index: one process caches one base model."""
    return spec.models[0].base if spec.models else None


def _has_same_caches(old: WorkerSpec, new: WorkerSpec) -> bool:
    """Return whether two descriptions of a worker agree on all that its caches are counted by."""
    return _get_base_model(old) == _get_base_model(new) and old.ranks == new.ranks and old.cache_view == new.cache_view


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """State of the core for `/workers` and `/metrics`."""

    workers: list[dict[str, Any]]
    """Rows of `/workers`, one for each target."""
    queued_requests: int
    in_flight: int
    counters: dict[str, int]


def describe_target(
    worker: Worker, target: Target, tracker: LoadTracker, alarms: list[str], now: float
) -> dict[str, Any]:
    """Return one target's row of `/workers`; docs/reference/routes.md explains the fields."""
    step_times, load, totals = target.speed.step_times, target.load, target.totals
    # `peer_load` includes the load of the engine's other clients, which the row shows apart.
    peer, external = target.peer_load, target.external_load
    return {
        "worker_id": worker.worker_id,
        "target": target.name,
        "url": worker.spec.url,
        "state": worker.state.value,
        "state_reason": worker.describe_state(now),
        "models": sorted(worker.models),
        "roles": sorted(worker.spec.roles),
        "cache_view": worker.spec.cache_view.value,
        "prefilling": load.request_count - load.decode_request_count,
        "decoding": load.decode_request_count,
        "peer_prefilling": peer.prefill_requests - external.prefill_requests,
        "peer_decoding": peer.decode_requests - external.decode_requests,
        "engine_load": target.engine_load,
        "external_requests": external.request_count,
        "cache_tokens": target.capacity.kv_tokens,
        "prefill_order": "shortest" if target.prefill_queue.is_shortest_first else "arrival",
        "queue_s": target.estimate_queue_s(now),
        "utilisation": tracker.compute_utilisation(target, now),
        "slowdown": target.slowdown,
        "learned_speed": {
            "prefill_s_per_token": step_times.prefill_s_per_token,
            "quadratic_tokens": step_times.quadratic_tokens,
            "step_tokens": step_times.step_tokens,
            "step_s": step_times.step_s,
            "decode_request_s": step_times.decode_request_s,
            "decode_context_s": step_times.decode_context_s,
            "load_factor": target.speed.tier_load.get(now),
            "observations": target.speed.observation_count,
        },
        "routed_requests": totals.request_count,
        "predicted_cached_tokens": totals.predicted_cached_tokens,
        "reported_cached_tokens": totals.reported_cached_tokens,
        "alarms": alarms,
    }
