"""Parsers of workers' answers: `/v1/models`, `/kv_event_sources`, `/server_info`, `/metrics`. No I/O.

A worker may answer anything. A useless answer raises one DecodeError that says why, and parsing takes time in
proportion to its length. Numbers and names that are passed on to native code are bounded here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import mul
from typing import Annotated, Any, NamedTuple, TypeGuard

import msgspec

from events.sources import (
    BLOCK_TOKENS_MAX,
    NAME_CHARS_MAX,
    RANKS_MAX,
    BlockTokens,
    EventSource,
    Name,
    is_endpoint,
    parse_endpoint_host,
    parse_sources,
)
from events.types import DecodeError
from router.decide.load import EngineLoad
from router.decide.workers import VLLM, ServedModel

MODELS_MAX = 4096
TOKENS_MAX = 2**48
"""Most tokens of a context or a cache."""
OBJECTS_MAX = 32_768
"""Most lists and objects in an answer; 4,096 models of vLLM's have three each."""
LINE_CHARS_MAX = 8192
"""Longest line of metrics that is read."""
SLICE_BYTES = 64 << 10
METRICS_READ_BYTES_MAX = 256 << 10
"""Most bytes of metric lines that are read; 256 ranks with vLLM's lines of 800 bytes fit."""
LOAD_LINES_MAX = 8 * RANKS_MAX
"""Most metric lines about the load that are read."""
_VLLM_FRONTENDS = frozenset(("vllm-frontend-rs",))
"""Other names under which vLLM serves."""
REQUESTS_MAX = 10**6
"""Most requests that an engine can report."""
_VALUE_MAX_BY_KIND = {"running": REQUESTS_MAX, "waiting": REQUESTS_MAX, "received_kv_bytes": 2**60}
"""Kind of a figure of the load -> highest possible value; 1 for those that are not here."""
_LOAD_KIND_BY_METRIC = {
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage", "vllm:gpu_cache_usage_perc": "usage",
    "vllm:engine_sleep_state": "awake",
    "vllm:nixl_bytes_transferred_sum": "received_kv_bytes",
    "engine:kv_transfer_pulled_bytes_total": "received_kv_bytes",
    "sglang:num_running_reqs": "running", "sglang:num_queue_reqs": "waiting", "sglang:token_usage": "usage",
}  # fmt: skip
_LOAD_METRICS = "|".join(_LOAD_KIND_BY_METRIC)
_LOAD_PATTERN = re.compile(rf"^({_LOAD_METRICS})(\{{[^\n]{{0,{LINE_CHARS_MAX}}}\}})?[ \t]+(\S{{1,64}})", re.MULTILINE)
_METRIC_LINE_PATTERN = re.compile(
    rf"^(?:{_LOAD_METRICS}|[a-zA-Z0-9_:]{{0,64}}cache_config_info)[{{ \t][^\n]{{0,{LINE_CHARS_MAX}}}".encode(),
    re.MULTILINE,
)
_LABEL_PATTERN = re.compile(r'(?<!\w)(\w+)="([^"]*)"')


def parse_number(text: str) -> int | None:
    """Parse a whole number of up to 15 ASCII digits; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None


class ModelList(NamedTuple):
    """Models that a worker serves, as `GET /v1/models` lists them."""

    models: tuple[ServedModel, ...]
    """Base models first, then LoRA adapters."""
    roots: dict[str, str]
    """Folder, or name on a hub, from which the worker loaded each model, by model name."""
    engine: str = ""
    """Name of the engine, one for all of vLLM's frontends; empty if it is unknown."""


def read_models(body: bytes) -> ModelList:
    """Return the models in the body of a worker's answer to `GET /v1/models`. Raises DecodeError.

    Each model name has a card. A card with a `parent` is a LoRA adapter of that model. All cards without one are names
    of the same model, which share its cache: the first one is their base. `root` is the model's checkpoint.
    """
    cards = _decode_model_cards(body)
    engine = cards[0].get("owned_by") if cards else None
    if engine in _VLLM_FRONTENDS:
        engine = VLLM
    cards = [card for card in cards if _is_name(card.get("id"))]
    base_cards = [card for card in cards if not _is_name(card.get("parent"))]
    adapter_cards = [card for card in cards if _is_name(card.get("parent"))]
    models = [
        ServedModel(card["id"], base_cards[0]["id"], max_model_len=_accept_token_count(card.get("max_model_len")))
        for card in base_cards
    ]
    model_by_name = {model.name: model for model in models}
    models += [_read_adapter(card, model_by_name.get(card["parent"])) for card in adapter_cards]
    roots = {card["id"]: card["root"] for card in cards if _is_name(card.get("root"))}
    return ModelList(tuple(models), roots, engine if _is_name(engine) else "")


def _read_adapter(card: dict[str, Any], parent: ServedModel | None) -> ServedModel:
    """Return a LoRA adapter, which runs with the context of its parent unless its card says otherwise."""
    name, limit = card["id"], _accept_token_count(card.get("max_model_len"))
    if parent is None:
        return ServedModel(name, card["parent"], lora=name, max_model_len=limit)
    return ServedModel(name, parent.base, lora=name, max_model_len=limit or parent.max_model_len)


def read_sources(body: bytes, url: str) -> tuple[EventSource, ...]:
    """Return where the worker at `url` publishes its events, from its `/kv_event_sources`. Raises DecodeError."""
    _check_object_count(body, "/kv_event_sources")
    try:
        sources = parse_sources(body, url)
    except RecursionError:
        raise DecodeError("/kv_event_sources: nested too deeply") from None
    if len(sources) > RANKS_MAX:
        raise DecodeError(f"/kv_event_sources: {len(sources)} ranks, more than {RANKS_MAX}")
    for source in sources:
        for endpoint in list_endpoints(source):
            if not is_endpoint(endpoint):
                reason = f"{endpoint[:80]!r} is no address"
                raise DecodeError(f"/kv_event_sources: rank {source.data_parallel_rank}: {reason}")
        if source.kv_transfer is not None and parse_endpoint_host(source.kv_transfer.endpoint) is None:
            reason = f"{source.kv_transfer.endpoint[:80]!r} is no address of a peer"
            raise DecodeError(f"/kv_event_sources: rank {source.data_parallel_rank}: {reason}")
    return tuple(sources)


def list_endpoints(source: EventSource) -> list[str]:
    """Return the addresses that a worker names in one entry of `/kv_event_sources`."""
    transfer_endpoint = source.kv_transfer and source.kv_transfer.endpoint
    endpoints = (source.endpoint, source.replay_endpoint, source.snapshot_endpoint, transfer_endpoint)
    return [endpoint for endpoint in endpoints if endpoint]


class _Publisher(msgspec.Struct):
    """Publisher of cache events in the answer of SGLang to `GET /server_info`. Rank r publishes at port base + r."""

    endpoint_host: Name
    endpoint_port_base: int
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)] = 1
    topic: Name = ""
    block_size: BlockTokens | None = None
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Publisher | None = None


def read_publisher(body: bytes, url: str) -> tuple[EventSource, ...]:
    """Return where the SGLang worker at `url` publishes its events, from its `/server_info`; empty if it tells none."""
    try:
        publisher = msgspec.json.decode(body, type=_ServerInfo).kv_events
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    if publisher is None:
        return ()
    sources = [
        {
            "endpoint": f"tcp://{publisher.endpoint_host}:{publisher.endpoint_port_base + rank}",
            "replay_endpoint": publisher.replay_endpoint_port_base
            and f"tcp://{publisher.endpoint_host}:{publisher.replay_endpoint_port_base + rank}",
            "topic": publisher.topic,
            "block_size": publisher.block_size,
            "data_parallel_rank": rank,
        }
        for rank in range(publisher.dp_size)
    ]
    return read_sources(msgspec.json.encode(sources), url)


class EngineSizes(NamedTuple):
    """Sizes of a worker's caches and scheduler steps, as its engine reports them; None if unknown."""

    cache_tokens: int | None = None
    """Capacity of the KV cache, summed over ranks."""
    host_tokens: int | None = None
    """Capacity of the host tier of an engine of this project, summed over ranks."""
    block_size: int | None = None
    """Tokens of the longest cache block."""
    max_num_seqs: int | None = None
    """Most sequences of one scheduler step; of several ranks the least. Only engines of this project report it."""
    step_tokens: int | None = None
    """Most prefill tokens of one scheduler step; of several ranks the least."""
    is_shortest_first: bool = False
    """Whether an engine of this project computes the shortest prompt first (`--prefill-order`)."""


UNKNOWN_SIZES = EngineSizes()


def read_server_info(body: bytes) -> EngineSizes:
    """Read the answer of SGLang to `GET /server_info`, which tells the cache of one rank. Raises DecodeError."""
    info = _decode_object(body, "/server_info")
    ranks, cache_tokens = info.get("dp_size"), _accept_token_count(info.get("max_total_num_tokens"))
    if cache_tokens is not None and type(ranks) is int and 0 < ranks <= RANKS_MAX:
        cache_tokens *= ranks
    return EngineSizes(
        cache_tokens=_accept_token_count(cache_tokens),
        step_tokens=_accept_token_count(info.get("chunked_prefill_size")),  # -1: prompts are not cut
    )


def read_engine_sizes(metrics: str, *, reserved_blocks: int = 0) -> EngineSizes:
    """Return the sizes that an engine's metrics page reports, in one line `cache_config_info{...}` for each rank.

    `reserved_blocks`: number of cache blocks of each rank that no prompt can use.
    """
    labels_by_rank = list(itertools.islice(_iter_cache_labels(metrics), RANKS_MAX))

    def list_numbers(label: str) -> list[int]:
        """Return the number that each rank reports in a label; 0 if it reports none."""
        return [parse_number(labels.get(label, "")) or 0 for labels in labels_by_rank]

    block_sizes = list_numbers("block_size")
    block_size_candidates = [*block_sizes, *list_numbers("effective_attention_block_size")]
    cache_blocks = [max(blocks - reserved_blocks, 0) for blocks in list_numbers("num_gpu_blocks")]
    return EngineSizes(
        cache_tokens=_accept_token_count(sum(map(mul, cache_blocks, block_sizes))),
        host_tokens=_accept_token_count(sum(map(mul, list_numbers("num_cpu_blocks"), block_sizes))),
        block_size=max((size for size in block_size_candidates if 0 < size <= BLOCK_TOKENS_MAX), default=None),
        max_num_seqs=_accept_token_count(min(filter(None, list_numbers("max_num_seqs")), default=None)),
        step_tokens=_accept_token_count(min(filter(None, list_numbers("max_num_batched_tokens")), default=None)),
        is_shortest_first=any(labels.get("prefill_order") == "shortest" for labels in labels_by_rank),
    )


def _iter_cache_labels(metrics: str) -> Iterator[dict[str, str]]:
    """Yield the labels of each line `cache_config_info{...}`."""
    for line in metrics.splitlines():
        name, brace, labels = line[:LINE_CHARS_MAX].partition("{")
        if brace and name.endswith("cache_config_info") and not name.startswith("#"):
            yield dict(_LABEL_PATTERN.findall(labels))


def read_bootstrap(status: int, body: bytes, rank_count: int) -> tuple[str, ...]:
    """Return the engine ids in the answer of Mooncake's bootstrap server to `GET /query`, one for each rank.

    Requests to transfer KV name the engine by its id. Raises DecodeError if the answer has no id for some rank, or
    lists more ranks than `rank_count`, the number that the router knows by their event streams.
    """
    entries = _decode_object(body, "/query") if status == 200 else {}
    if len(entries) > rank_count:
        raise DecodeError(f"/query lists {len(entries)} ranks, and {rank_count} can be asked: name the events of each")
    engine_ids = []
    for rank in range(rank_count):
        entry = entries.get(str(rank))
        engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
        if not _is_name(engine_id):
            raise DecodeError(f"/query answers {status}, and names no engine of rank {rank}")
        engine_ids.append(engine_id)
    return tuple(engine_ids)


def select_metric_lines(page: bytes) -> Iterator[bytes]:
    """Yield those lines of a metrics page that the router uses, slice by slice, up to METRICS_READ_BYTES_MAX in all.

    The caller can do other work between slices, because a page of some megabytes takes long to search.
    """
    start = 0
    free_bytes = METRICS_READ_BYTES_MAX
    while start < len(page) and free_bytes > 0:
        end = _find_slice_end(page, start)
        is_one_long_line = end - start > SLICE_BYTES  # longer than any line that is used
        lines = b"" if is_one_long_line else b"\n".join(_METRIC_LINE_PATTERN.findall(page, start, end))
        if len(lines) > free_bytes:
            lines = lines[:free_bytes].rpartition(b"\n")[0]  # drop the line that was cut
            end = len(page)
        start = end
        free_bytes -= len(lines) + 1
        yield lines


def _find_slice_end(page: bytes, start: int) -> int:
    """Return the end of the last line that ends within SLICE_BYTES, or of the first line if that is longer."""
    if start + SLICE_BYTES >= len(page):
        return len(page)
    last_newline = page.rfind(b"\n", start, start + SLICE_BYTES)
    newline = last_newline if last_newline >= 0 else page.find(b"\n", start)
    return newline + 1 if newline >= 0 else len(page)


def read_loads(metrics: str, ranks: int) -> list[EngineLoad | None]:
    """Return the load of each data-parallel rank from a metrics page; None for a rank that reports no valid load.

    Reads the metrics of vLLM, which this project's engine has too, and of SGLang.
    """
    values_by_kind_of_ranks: list[dict[str, list[float]]] = [{} for _ in range(ranks)]
    for line in itertools.islice(_LOAD_PATTERN.finditer(metrics), LOAD_LINES_MAX):
        metric, label_text, value_text = line.groups()
        kind = _LOAD_KIND_BY_METRIC[metric]
        labels = dict(_LABEL_PATTERN.findall(label_text or ""))
        if kind == "awake" and labels.get("sleep_state") != "awake":
            continue  # the other series of that gauge are the sleep levels
        if labels.get("priority"):
            continue  # SGLang's part of the number without a priority
        rank = parse_number(labels.get("engine") or labels.get("dp_rank", "0")) if ranks > 1 else 0
        if rank is None or rank >= ranks:
            continue
        value = _parse_float(value_text)
        is_possible = 0.0 <= value <= _VALUE_MAX_BY_KIND.get(kind, 1.0)
        values_by_kind_of_ranks[rank].setdefault(kind, []).append(value if is_possible else math.nan)
    return [_make_load(values_by_kind) for values_by_kind in values_by_kind_of_ranks]


def _make_load(values_by_kind: Mapping[str, list[float]]) -> EngineLoad | None:
    """Return the load of one rank; None if its metrics tell neither its requests nor that it sleeps.

    `values_by_kind`: values of running, waiting, usage (share of the cache), awake and received_kv_bytes, one for each
    model of the rank. Values are added up, shares of the cache are averaged. NaN makes the total unknown.
    """
    total_by_kind: dict[str, float] = {}
    for kind, values in values_by_kind.items():
        total = sum(values)
        if not math.isnan(total):
            total_by_kind[kind] = total
    is_asleep = total_by_kind.get("awake") == 0
    if "running" not in total_by_kind or "waiting" not in total_by_kind:
        return EngineLoad(running=0, waiting=0, is_asleep=True) if is_asleep else None
    usage_total = total_by_kind.get("usage")
    return EngineLoad(
        running=int(total_by_kind["running"]),
        waiting=int(total_by_kind["waiting"]),
        usage=None if usage_total is None else usage_total / len(values_by_kind["usage"]),
        is_asleep=is_asleep,
        received_kv_bytes=total_by_kind.get("received_kv_bytes"),
    )


def are_ranks_asleep(loads: Iterable[EngineLoad | None]) -> bool | None:
    """Return whether all ranks of a worker sleep; None if no rank says."""
    rank_states = [load.is_asleep for load in loads if load is not None]
    return all(rank_states) if rank_states else None


def _parse_float(text: str) -> float:
    """Return a number; NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _decode_model_cards(body: bytes) -> list[dict[str, Any]]:
    cards = _decode_object(body, "/v1/models").get("data")
    if not isinstance(cards, list):
        raise DecodeError("/v1/models: `data` is not a list")
    if len(cards) > MODELS_MAX:
        raise DecodeError(f"/v1/models: {len(cards)} models, more than {MODELS_MAX}")
    return [card for card in cards if isinstance(card, dict)]


def _decode_object(body: bytes, path: str) -> dict[str, Any]:
    _check_object_count(body, path)
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DecodeError(f"{path}: got {type(value).__name__}, expected an object")
    return value


def _check_object_count(body: bytes, path: str) -> None:
    """Raise DecodeError for so many lists and objects that every client would wait while they are decoded."""
    if (count := body.count(b"[") + body.count(b"{")) > OBJECTS_MAX:
        raise DecodeError(f"{path}: {count} lists and objects, more than {OBJECTS_MAX}")


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX and value.isprintable()


def _accept_token_count(value: Any) -> int | None:
    """Return a valid number of tokens; None for anything else."""
    return value if type(value) is int and 0 < value <= TOKENS_MAX else None
