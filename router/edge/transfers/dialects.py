"""The words by which a router tells engines to move KV: for each dialect, the fields that a request gets.

All facts were seen with vLLM 0.32 or read in the sources of SGLang (docs/concepts/prefill-decode.md). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import msgspec

from prompts.kv_source import KV_PARAMS_FIELD, RemoteKVSource
from router.decide.workers import BLOCKCAST, MOONCAKE, NIXL, P2P, SGLANG, WorkerSpec

Fields = Mapping[str, Any]
"""Top-level fields of a request's body, by name."""
_ROOMS: Final = 1 << 62
"""Number of rooms to draw from. SGLang takes 63 bits, and the next rooms for the other answers of a request."""


@dataclass(frozen=True)
class Handover:
    """One transfer of KV cache from a worker (the source) to another, in the words of one kind of engine, a dialect.

    The methods return the fields by which the body of a request tells an engine of the transfer.
    """

    is_concurrent: ClassVar[bool] = False
    """Whether prefill and decode are sent at once. Otherwise the decode is sent when the prefill was answered."""
    shortens_prefill: ClassVar[bool] = True
    """Whether the prefill is asked for one token only. SGLang's prefill worker stops by itself."""

    transfer_id: str
    """Id that no other transfer has."""
    source: WorkerSpec
    """Worker that sends the KV."""
    rank: int | None
    """Data-parallel rank of the source; None if it has only one."""
    fleet_key: bytes | None
    """Secret key of the fleet, with which the name of the source is signed for engines of this project."""

    @property
    def host(self) -> str:
        """Host at which the source sends KV."""
        return self.source.transfer.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port at which the source sends KV."""
        return int(self.source.transfer.address.rpartition(":")[2])

    def make_pull_fields(self, cached_tokens: int) -> Fields | None:
        """Return the fields for a worker that pulls the prefix that the source has cached; None if engines cannot."""
        return None

    def make_prefill_fields(self) -> Fields:
        """Return the fields for a source that computes the prompt for another worker."""
        raise NotImplementedError

    def make_decode_fields(self, prefill_answer: bytes) -> Fields:
        """Return the fields for the worker that answers the prompt of a prefill.

        `prefill_answer`: body of the prefill's answer; empty if both requests are sent at once. Raises
        msgspec.DecodeError if that answer lacks something.
        """
        raise NotImplementedError


class _BlockcastHandover(Handover):
    def make_pull_fields(self, cached_tokens: int) -> Fields:
        assert self.fleet_key is not None
        source = RemoteKVSource(
            kv_request_id=self.transfer_id,
            remote_host=self.host,
            remote_port=self.port,
            cached_tokens=cached_tokens,
        ).sign(self.fleet_key)
        return {KV_PARAMS_FIELD: {"remote_kv_source": msgspec.to_builtins(source)}}


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


class _NixlHandover(Handover):
    def make_prefill_fields(self) -> Fields:
        return {KV_PARAMS_FIELD: {"do_remote_decode": True, "do_remote_prefill": False}}

    def make_decode_fields(self, prefill_answer: bytes) -> Fields:
        params = msgspec.json.decode(prefill_answer, type=_NixlAnswer).kv_transfer_params
        msgspec.json.decode(params, type=_NixlParams)
        return {KV_PARAMS_FIELD: params.copy()}


class _MooncakeHandover(Handover):
    def make_prefill_fields(self) -> Fields:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.transfer_id}
        return {KV_PARAMS_FIELD: params}

    def make_decode_fields(self, prefill_answer: bytes) -> Fields:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self.transfer_id,
            "remote_bootstrap_addr": f"http://{self.source.transfer.address}",
            "remote_engine_id": self.source.transfer.engine_ids[self.rank or 0],
        }
        return {KV_PARAMS_FIELD: params}


class _P2PHandover(Handover):
    """Words of vLLM's P2P tier."""

    is_concurrent = True

    def make_pull_fields(self, cached_tokens: int) -> Fields:
        return {KV_PARAMS_FIELD: {"remote_kv_source": self._make_address()}}

    def make_prefill_fields(self) -> Fields:
        return {KV_PARAMS_FIELD: {"remote_decoder": {"kv_request_id": self.transfer_id}}}

    def make_decode_fields(self, prefill_answer: bytes) -> Fields:
        return {KV_PARAMS_FIELD: {"remote_prefiller": self._make_address()}}

    def _make_address(self) -> dict[str, Any]:
        """Return where a worker finds the source: each data-parallel rank has a port of its own."""
        port = self.port + (self.rank or 0)
        return {"kv_request_id": self.transfer_id, "remote_host": self.host, "remote_port": port}


class _SglangHandover(Handover):
    is_concurrent = True
    shortens_prefill = False

    def make_prefill_fields(self) -> Fields:
        return self._make_fields("routed_dp_rank")

    def make_decode_fields(self, prefill_answer: bytes) -> Fields:
        return self._make_fields("disagg_prefill_dp_rank")

    def _make_fields(self, rank_field: str) -> Fields:
        """Return the meeting place of both workers. A room leads to one rank: its remainder by their number."""
        first_room = int(self.transfer_id, 16) % _ROOMS
        room = first_room - first_room % self.source.ranks + (self.rank or 0)
        fields = {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": room}
        return fields if self.rank is None else {**fields, rank_field: self.rank}


DIALECTS: Final[Mapping[str, type[Handover]]] = {
    BLOCKCAST: _BlockcastHandover,
    NIXL: _NixlHandover,
    MOONCAKE: _MooncakeHandover,
    P2P: _P2PHandover,
    SGLANG: _SglangHandover,
}
"""Name of a dialect (`kv=` of --worker, or BLOCKCAST) -> its words."""
