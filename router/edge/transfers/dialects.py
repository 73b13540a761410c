"""The words by which a router tells engines to move KV: for each dialect, the fields that a request gets.

All facts were seen with vLLM 0.32 or read in the sources of SGLang (docs/concepts/prefill-decode.md). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from prompts.kv_source import KV_PARAMS_FIELD, RemoteKVSource
from router.decide.workers import BLOCKCAST, MOONCAKE, NIXL, P2P, SGLANG, TransferFacts

Fields = Mapping[str, Any]
"""Top-level fields of a request's body, by name."""
_ROOMS: Final = 1 << 62
"""Number of rooms to draw from. SGLang takes 63 bits, and the next rooms for the other answers of a request."""


class Handover(NamedTuple):
    """One transfer of KV cache from a worker (the source) to another, as the requests to both workers describe it."""

    transfer_id: str
    """Id that no other transfer has."""
    source: TransferFacts
    """How the worker that sends the KV is reached, and how it does that."""
    rank: int | None = None
    """Data-parallel rank of the source; None if it has only one."""
    rank_count: int = 1
    """Number of data-parallel ranks of the source."""
    fleet_key: bytes | None = None
    """Secret key of the fleet, with which the name of the source is signed for engines of this project."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the source has cached, if the worker fetches a cached prefix."""

    @property
    def host(self) -> str:
        """Host at which the source sends KV."""
        return self.source.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port at which the source sends KV."""
        return int(self.source.address.rpartition(":")[2])


class Dialect(NamedTuple):
    """How one kind of engine is told to move KV. The functions return the fields that a request's body gets."""

    make_pull_fields: Callable[[Handover], Fields] | None = None
    """For a worker that pulls a cached prefix; None if the engine cannot."""
    make_prefill_fields: Callable[[Handover], Fields] | None = None
    """For the worker that computes a prompt for another; None if the engine cannot."""
    make_decode_fields: Callable[[Handover, bytes], Fields] | None = None
    """For the worker that answers this prompt. The second argument is the body of the prefill's answer, which is empty
    if both requests are sent at once. Raises msgspec.DecodeError if that answer lacks something."""
    is_concurrent: bool = False
    """Whether both requests are sent at once. Otherwise the decode is sent when the prefill was answered."""
    shortens_prefill: bool = True
    """Whether the prefill is asked for one token only. SGLang's prefill worker stops by itself."""


class _NixlParams(msgspec.Struct):
    """Fields without which vLLM's decoding process ends."""

    do_remote_prefill: Literal[True]
    remote_block_ids: list[Any]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int


class _NixlAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


def _make_blockcast_pull_fields(handover: Handover) -> Fields:
    assert handover.fleet_key is not None
    source = RemoteKVSource(
        kv_request_id=handover.transfer_id,
        remote_host=handover.host,
        remote_port=handover.port,
        cached_tokens=handover.cached_tokens,
    ).sign(handover.fleet_key)
    return {KV_PARAMS_FIELD: {"remote_kv_source": msgspec.to_builtins(source)}}


def _make_nixl_prefill_fields(handover: Handover) -> Fields:
    return {KV_PARAMS_FIELD: {"do_remote_decode": True, "do_remote_prefill": False}}


def _make_nixl_decode_fields(handover: Handover, prefill_answer: bytes) -> Fields:
    params = msgspec.json.decode(prefill_answer, type=_NixlAnswer).kv_transfer_params
    msgspec.json.decode(params, type=_NixlParams)
    return {KV_PARAMS_FIELD: params.copy()}


def _make_mooncake_prefill_fields(handover: Handover) -> Fields:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": handover.transfer_id}
    return {KV_PARAMS_FIELD: params}


def _make_mooncake_decode_fields(handover: Handover, prefill_answer: bytes) -> Fields:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": handover.transfer_id,
        "remote_bootstrap_addr": f"http://{handover.source.address}",
        "remote_engine_id": handover.source.engine_ids[handover.rank or 0],
    }
    return {KV_PARAMS_FIELD: params}


def _make_p2p_address(handover: Handover) -> dict[str, Any]:
    """Return where a worker of vLLM's P2P tier finds the source: each data-parallel rank has a port of its own."""
    port = handover.port + (handover.rank or 0)
    return {"kv_request_id": handover.transfer_id, "remote_host": handover.host, "remote_port": port}


def _make_p2p_pull_fields(handover: Handover) -> Fields:
    return {KV_PARAMS_FIELD: {"remote_kv_source": _make_p2p_address(handover)}}


def _make_p2p_prefill_fields(handover: Handover) -> Fields:
    return {KV_PARAMS_FIELD: {"remote_decoder": {"kv_request_id": handover.transfer_id}}}


def _make_p2p_decode_fields(handover: Handover, prefill_answer: bytes) -> Fields:
    return {KV_PARAMS_FIELD: {"remote_prefiller": _make_p2p_address(handover)}}


def _make_sglang_fields(handover: Handover) -> dict[str, Any]:
    """Return the meeting place of both workers. A room leads to one rank, which is its remainder by their number."""
    first_room = int(handover.transfer_id, 16) % _ROOMS
    room = first_room - first_room % handover.rank_count + (handover.rank or 0)
    return {"bootstrap_host": handover.host, "bootstrap_port": handover.port, "bootstrap_room": room}


def _make_sglang_prefill_fields(handover: Handover) -> Fields:
    rank_fields = {} if handover.rank is None else {"routed_dp_rank": handover.rank}
    return _make_sglang_fields(handover) | rank_fields


def _make_sglang_decode_fields(handover: Handover, prefill_answer: bytes) -> Fields:
    rank_fields = {} if handover.rank is None else {"disagg_prefill_dp_rank": handover.rank}
    return _make_sglang_fields(handover) | rank_fields


DIALECTS: Final[Mapping[str, Dialect]] = {
    BLOCKCAST: Dialect(make_pull_fields=_make_blockcast_pull_fields),
    NIXL: Dialect(make_prefill_fields=_make_nixl_prefill_fields, make_decode_fields=_make_nixl_decode_fields),
    MOONCAKE: Dialect(
        make_prefill_fields=_make_mooncake_prefill_fields, make_decode_fields=_make_mooncake_decode_fields
    ),
    P2P: Dialect(
        make_pull_fields=_make_p2p_pull_fields,
        make_prefill_fields=_make_p2p_prefill_fields,
        make_decode_fields=_make_p2p_decode_fields,
        is_concurrent=True,
    ),
    SGLANG: Dialect(
        make_prefill_fields=_make_sglang_prefill_fields,
        make_decode_fields=_make_sglang_decode_fields,
        is_concurrent=True,
        shortens_prefill=False,
    ),
}
"""Name of a dialect (`kv=` of --worker, or BLOCKCAST) -> its words."""
