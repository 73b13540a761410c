"""Workers: their descriptions and states, and the models that they serve.

Sockets belong to the edge, which probes and reports, load to the tracker, caches to the index. Invariant: only an UP
worker is eligible, or a PROBING one for a single request.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.decide.messages import TransferKind
from router.index.protocol import HolderId

BLOCKCAST, VLLM = "blockcast", "vllm"
"""Engines with fields and routes that the router knows."""


class WorkerState(str, enum.Enum):
    """State of a worker.

    UP takes requests. STARTING was never reached yet. DRAINING only finishes its requests. SLEEPING has released its
    memory until its operator wakes it. DOWN is broken. PROBING is DOWN after its pause, when one request may try it.
    """

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    DOWN = "down"
    PROBING = "probing"


class CacheView(str, enum.Enum):
    """Source of the router's knowledge of a worker's cache."""

    EVENTS = "events"
    APPROXIMATE = "approximate"
    """No events: an LRU of the prompts that this router sent there, with the advertised capacity."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model name that a worker serves."""

    name: str
    base: str
    """Model under which events and the index have its KV; equals `name` unless that is an alias or a LoRA."""
    lora: str | None = None
    max_model_len: int | None = None


PREFILL_ROLE, DECODE_ROLE = "prefill", "decode"
"""Roles of workers that compute prompts for others, and that answer prompts which others computed."""
NIXL, MOONCAKE, P2P, SGLANG = "nixl", "mooncake", "p2p", "sglang"
KINDS_BY_DIALECT = {
    BLOCKCAST: frozenset((TransferKind.PULL,)),
    NIXL: frozenset((TransferKind.PREFILL,)),
    MOONCAKE: frozenset((TransferKind.PREFILL,)),
    P2P: frozenset((TransferKind.PULL, TransferKind.PREFILL)),
    SGLANG: frozenset((TransferKind.PREFILL,)),
}
"""How a request names its transfer (router/edge/transfers/dialects.py) -> the kinds of transfer that it can name."""


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """Facts that a worker reports about moving KV to and from other workers. By default, it moves none."""

    group: str = ""
    """Workers with the same text can read each other's KV: equal engine, version, model, dtype, block size and number
    of tensor-parallel ranks. Empty: the worker moves no KV."""
    kinds: frozenset[TransferKind] = frozenset()
    """Kinds of transfer that the engine can make, if the engine at the other end can make them, too."""
    can_give: bool = True
    """Whether the worker may send KV."""
    can_take: bool = True
    """Whether the worker may receive KV."""
    bytes_per_token: float = 0.0
    """Bytes of KV of one token, on all tensor-parallel ranks together."""
    gb_s: float = 0.0
    """Rate at which the worker says that KV comes from it, in 1e9 bytes a second; 0 if it does not say."""
    dialect: str = ""
    """Form in which a request tells the engine about its transfer: a key of `KINDS_BY_DIALECT`."""
    address: str = ""
    """HOST:PORT where other workers ask for KV; empty if the dialect needs none."""
    engine_ids: tuple[str, ...] = ()
    """Name of the engine's process in the dialect, for each data-parallel rank; empty if the dialect needs none."""
    needs_partner: bool = False
    """Whether the worker serves no request alone, as SGLang's with a role: one computes the prompt, another answers."""


NO_TRANSFERS = TransferFacts()


def may_transfer(source: TransferFacts, destination: TransferFacts, kind: TransferKind) -> bool:
    """Return whether KV may move between two workers."""
    is_same_group = bool(source.group) and source.group == destination.group
    return is_same_group and kind in source.kinds & destination.kinds and source.can_give and destination.can_take


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Description of a worker, from its operator or from discovery."""

    worker_id: str
    """Stable name of the worker, by default host:port of the URL."""
    url: str
    models: tuple[ServedModel, ...] = ()
    roles: frozenset[str] = frozenset()
    """Roles of the worker, such as "prefill" or "decode"."""
    ranks: int = 1
    """Number of data-parallel ranks, each with a cache of its own."""
    engine: str = ""
    """`owned_by` of its models: BLOCKCAST, VLLM ..., or empty."""
    cache_view: CacheView = CacheView.EVENTS
    cache_tokens: int | None = None
    """Advertised capacity of the KV cache, all ranks together; None if unknown."""
    host_tokens: int | None = None
    """Advertised capacity of the KV cache in host memory, which the events include; None if unknown."""
    max_num_seqs: int | None = None
    """Sequences that each rank runs at once; None if unknown, so that 256 are assumed."""
    step_tokens: int | None = None
    """Most tokens of one step of a rank; None if unknown, so that it is taken from the configuration."""
    block_size: int | None = None
    is_shortest_first: bool = False
    """Whether the engine computes the prompt with the least remaining prefill first, else the oldest prompt."""
    transfer: TransferFacts = NO_TRANSFERS


@dataclass(slots=True)
class Worker:
    """A worker and its state in the core."""

    spec: WorkerSpec
    health: WorkerState
    """STARTING, UP, DOWN or PROBING: the state without draining and sleeping."""
    models: dict[str, ServedModel] = field(default_factory=dict)
    """Served models by name."""
    holders: list[HolderId] = field(default_factory=list)
    """Holder in the index for each rank."""
    failures: int = 0
    """Number of consecutive failures."""
    open_until_s: float = 0.0
    """End of the present pause of the circuit breaker."""
    open_s: float = 0.0
    """Length of the last pause."""
    probe: str | None = None
    """Id of the request that probes the worker."""
    refusal_pause_s: float = 0.0
    """Last pause for which requests were sent elsewhere because the worker refused some; 0 once it serves one."""
    avoided_until_s: float = -math.inf
    """End of that pause."""
    last_answer_at_s: float = -math.inf
    """Time of the last byte of any answer from the worker."""
    health_reason: str = ""
    """Why the worker is DOWN."""
    is_lost: bool = False
    """Whether its cache was forgotten because nothing answered there. No request or health check succeeded since."""
    announced_state: WorkerState | None = None
    """State that was last reported to `WorkerRegistry.on_state_change`; None for a new worker."""
    drain_reason: str = ""
    """Why new requests are stopped; empty while they are not."""
    is_asleep: bool = False
    """Whether the engine says that it sleeps."""

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def is_drained(self) -> bool:
        return bool(self.drain_reason)

    @property
    def state(self) -> WorkerState:
        if self.is_drained:
            return WorkerState.DRAINING
        if self.is_asleep and self.health in (WorkerState.UP, WorkerState.PROBING):
            return WorkerState.SLEEPING
        return self.health

    @property
    def state_reason(self) -> str:
        if self.is_drained:
            return f"{self.drain_reason}; down: {self.health_reason}" if self.is_down else self.drain_reason
        return "its engine sleeps" if self.state is WorkerState.SLEEPING else self.health_reason

    def describe_state(self, now: float) -> str:
        """Return `state_reason`, or how long a worker that is up is still avoided because of its refusals."""
        pause_s = self.avoided_until_s - now
        if pause_s <= 0 or self.state is not WorkerState.UP:
            return self.state_reason
        return f"avoided for another {math.ceil(pause_s)} s: refuses (429, 5xx) what others serve"

    @property
    def is_down(self) -> bool:
        return self.health in (WorkerState.DOWN, WorkerState.PROBING)


def find_unusable_reason(worker: Worker) -> str | None:
    """Return the reason why a worker takes no new request, or None."""
    if worker.state is WorkerState.UP:
        return None
    if worker.state is WorkerState.PROBING:
        return None if worker.probe is None else "probing"
    return str(worker.state.value)


def merge_models(workers: Iterable[Worker]) -> dict[str, ServedModel]:
    """Return the models that some started worker serves, by name, each with its longest context."""
    models: dict[str, ServedModel] = {}
    for worker in workers:
        if worker.state in (WorkerState.DOWN, WorkerState.STARTING):
            continue
        for model in worker.models.values():
            longest_model = models.get(model.name)
            if longest_model is None or (model.max_model_len or 0) > (longest_model.max_model_len or 0):
                models[model.name] = model
    return models


def find_base_conflict(spec: WorkerSpec, workers: Iterable[Worker]) -> str:
    """Return a message if a new worker and one of `workers` take one model name as an alias of different models.

    The cache of a worker is looked up under the model's first name. So a request for the common name would find the
    cache of only one of the two. Return "" if there is no such conflict.
    """
    own_models = [model for model in spec.models if model.lora is None]
    for worker in workers:
        if worker.worker_id == spec.worker_id:
            continue
        for model in own_models:
            other_model = worker.models.get(model.name)
            if other_model is not None and other_model.base != model.base:
                return (
                    f"lists {model.name} as a name of {model.base}, and {worker.worker_id} as one of "
                    f"{other_model.base}: requests find the cache of only one of them, so give both the same first name"
                )
    return ""
