"""Fields by which routers and engines agree which worker computes a request and where its KV is. No I/O.

A client that sets such a field can make a worker fetch KV from any address, which may end the worker's process or
poison its cache. So a router removes these fields from the requests of clients, and blanks those that answers have
(router/edge/response_redactor.py). The lists have the fields of vLLM, SGLang, TensorRT-LLM and Dynamo.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

# fmt: off
WORKER_FIELDS: Final = frozenset((
    # vLLM
    "kv_transfer_params", "ec_transfer_params", "kv_hints", "do_remote_prefill", "do_remote_decode", "remote_engine_id",
    "remote_block_ids", "remote_host", "remote_port", "request_id",
    # SGLang
    "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size", "session_params", "rid",
    # TensorRT-LLM
    "disaggregated_params", "ctx_request_id", "disagg_request_id",
    # Dynamo
    "backend_instance_id", "worker_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank",
    "decode_dp_rank", "routing_constraints", "prefill_result",
))
WORKER_HEADERS: Final = frozenset((
    # vLLM, SGLang
    "x-data-parallel-rank", "x-data-parallel-rank-decode",
    # llm-d
    "x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts-ports", "x-data-parallel-host-port",
    # Dynamo
    "x-worker-instance-id", "x-prefill-instance-id", "x-dp-rank", "x-prefill-dp-rank", "x-dynamo-token-data",
    "x-dynamo-routing-mode",
))
# fmt: on
"""Headers with the same meaning."""
CONTAINER_FIELDS: Final = ("vllm_xargs", "nvext", "extra_body", "extra_args", "sampling_params", "agent_context")
"""Objects in a body that may contain such fields too."""
_WORKER_FIELD_PREFIX: Final = "bootstrap_"


def is_worker_field(name: str) -> bool:
    """Whether a name is that of such a field."""
    return name in WORKER_FIELDS or name.startswith(_WORKER_FIELD_PREFIX)


def may_have_worker_fields(names: Iterable[str]) -> bool:
    """Whether a body with these top-level fields may contain such fields."""
    return any(name in CONTAINER_FIELDS or is_worker_field(name) for name in names)


def without_worker_fields(value: Any, allowed_fields: Collection[str]) -> Any:
    """Return a JSON value without such fields at any depth, except `allowed_fields`."""
    if isinstance(value, dict):
        return {
            name: without_worker_fields(item, allowed_fields)
            for name, item in value.items()
            if name in allowed_fields or not is_worker_field(name)
        }
    return [without_worker_fields(item, allowed_fields) for item in value] if isinstance(value, list) else value


def has_worker_address(request_id: bytes) -> bool:
    """Whether a request id has workers' addresses for vLLM's P2P connector, as in `___prefill_addr_HOST:PORT___...`."""
    return b"_addr_" in request_id
