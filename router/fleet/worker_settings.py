"""Settings of one worker, as an operator gives them by `--worker` or `POST /workers`: their keys and rules. No I/O."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from events.sources import is_endpoint
from options import ConfigError
from options.addresses import bracket_host, get_default_port
from router.decide.workers import BLOCKCAST, DECODE_ROLE, KINDS_BY_DIALECT, MOONCAKE, P2P, PREFILL_ROLE, SGLANG


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker as an operator describes it with `--worker`. The worker is asked for values that are not given."""

    url: str
    """Empty if another program sends requests to the worker, and asks this router only which one to take."""
    worker_id: str
    events: tuple[str, ...] = ()
    """PUB endpoints, one for each data-parallel rank; empty: discover them."""
    replay: tuple[str, ...] = ()
    topic: str = ""
    no_events: bool = False
    """`events=none`: estimate the cache from the requests that were sent there."""
    roles: frozenset[str] = frozenset()
    kv: str = ""
    """Protocol by which the worker exchanges KV blocks with others; empty: as the worker says."""
    bootstrap: str = ""
    """HOST:PORT where other workers ask for the worker's KV; empty: its host and BOOTSTRAP_PORT."""
    cache_tokens: int | None = None
    """Capacity of the KV cache."""
    max_num_seqs: int | None = None
    """Sequences that the worker runs at once; None: as the worker says."""
    is_shortest_first: bool | None = None
    """`prefill_order=shortest`: whether the shortest prompt is computed first; None: as the worker says."""
    reannounces: bool = False
    """`reannounce=1`: the worker may publish cache hits as newly stored blocks."""
    sends_api_key: bool = True
    """Whether requests to the worker get the workers' API key."""
    model: str = ""
    """Model that the worker serves, if it has no URL to be asked at."""
    root: str = ""
    """Folder, or name on a hub, of the model's tokenizer."""
    block_size: int | None = None


_WORKER_ID_PATTERN = re.compile(r"[!-~\u00a1-\U0010ffff]{1,255}")
"""Characters of a worker's id, which stands in headers and metrics."""
_BOOTSTRAP_PATTERN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,255}):(?P<port>[1-9][0-9]{0,4})")
_HOST_LABEL_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""One label of a host's name; with underscores, which names of containers have."""


@lru_cache(maxsize=8192)
def parse_worker_flag(text: str) -> WorkerSettings:
    """Parse a value of `--worker`: a URL, or `key=value` pairs. Raises ConfigError naming the part that is wrong.

    Forms: `http://host:8000`; or `url=...,events=tcp://...;tcp://...,replay=...,topic=...,id=...,roles=a;b,
    cache_tokens=N,max_num_seqs=N,prefill_order=shortest,reannounce=1`; or `model=...,root=...,block_size=N` in place of
    `url`, if other programs send the requests to the worker. Data-parallel ranks are separated by `;`.

    Results are cached, because lists come again with each change: parsing 2,000 pods took the event loop 130 ms.
    """
    value_by_key: dict[str, str] = {}
    if re.match(r"[a-z_]+=", text) is None:
        value_by_key["url"] = text
    else:
        for part in text.split(","):
            key, separator, value = part.partition("=")
            if not separator:
                raise ConfigError(f"worker: got {part!r} in {text!r}, expected key=value")
            if key in value_by_key:
                raise ConfigError(f"worker: {key} is given twice in {text!r}")
            value_by_key[key] = value
    return _make_worker_settings(value_by_key)


def parse_worker_settings(values: Mapping[str, Any]) -> WorkerSettings:
    """Parse the JSON body of `POST /workers`. Without `send_key`, the worker gets no API key. Raises ConfigError."""
    value_by_key = {"send_key": "0"}
    for key, value in values.items():
        number = int(value) if isinstance(value, float) and value.is_integer() else value  # JSON may write 5 as 5.0
        if not isinstance(number, str) and not (isinstance(number, int) and key not in _TEXT_KEYS):
            raise ConfigError(f"worker: {key} is {value!r}, expected a string")
        value_by_key[key] = str(number)
    return _make_worker_settings(value_by_key)


def _make_worker_settings(value_by_key: Mapping[str, str]) -> WorkerSettings:
    """Make WorkerSettings from the keys and values of `--worker url=...,id=...`. Raises ConfigError."""
    _check_keys(value_by_key)
    no_events = value_by_key.get("events") == "none"
    fields: dict[str, Any] = {"url": "", "no_events": no_events}
    for key, value in value_by_key.items():
        if key == "events" and no_events:
            continue
        fields[_KEYS[key].field_name] = _KEYS[key].parse(key, value)

    _check_transfer_values(value_by_key)
    endpoints = fields.get("events", ())
    replay_endpoints = fields.get("replay", ())
    if replay_endpoints and len(replay_endpoints) != len(endpoints):
        raise ConfigError(f"worker: {len(replay_endpoints)} replay endpoints for {len(endpoints)} event endpoints")
    if not fields["url"] and not endpoints:
        events = value_by_key["events"]
        raise ConfigError(f"worker: events={events!r}, expected an endpoint where there is no url=")
    fields["worker_id"] = fields.get("worker_id") or derive_worker_id(fields["url"])
    if _WORKER_ID_PATTERN.fullmatch(fields["worker_id"]) is None:
        raise ConfigError(f"worker: id={fields['worker_id']!r}, expected up to 255 printable characters without spaces")
    return WorkerSettings(**fields)


def _check_keys(value_by_key: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown key of `--worker`, a missing key, or keys that exclude each other.

    A worker with a URL is asked for its model and block size. A worker without one needs `model`, `events` and `id`.
    """
    unknown_key = next((key for key in value_by_key if key not in _KEYS), None)
    if unknown_key is not None:
        closest_keys = difflib.get_close_matches(unknown_key, _KEYS, 1)
        hint = f", the nearest is {closest_keys[0]}" if closest_keys else ""
        raise ConfigError(f"--worker: unknown key {unknown_key!r}{hint}; expected {', '.join(_KEYS)}")
    keys_without_url = {"model", "root", "block_size"} & value_by_key.keys()
    if keys_without_url and "url" in value_by_key:
        raise ConfigError(
            f"worker: {min(keys_without_url)}= and url=: expected one of them, a worker with a URL is asked"
        )
    required_keys = ("model", "events", "id") if keys_without_url else ("url",)
    missing_key = next((key for key in required_keys if not value_by_key.get(key)), None)
    if missing_key is not None:
        raise ConfigError(f"worker: {missing_key}= is missing")


def _check_transfer_values(value_by_key: Mapping[str, str]) -> None:
    """Raise ConfigError if `kv`, `bootstrap` and `roles` do not fit together."""
    kv, bootstrap, roles = (value_by_key.get(key) for key in ("kv", "bootstrap", "roles"))
    if bootstrap is not None:
        match = _BOOTSTRAP_PATTERN.fullmatch(bootstrap)
        if match is None or int(match["port"]) > 65535 or kv not in (MOONCAKE, SGLANG, P2P):
            expected = f"HOST:PORT with kv={MOONCAKE}, kv={SGLANG} or kv={P2P}"
            raise ConfigError(f"worker: bootstrap={bootstrap!r}, expected {expected}")
    if kv == P2P and bootstrap is None:  # no default port: after a pull from a wrong one, vLLM's further pulls fail
        raise ConfigError(f"worker: kv={P2P}: expected bootstrap=HOST:PORT, the address of the worker's P2P tier")
    if kv == SGLANG and roles not in (PREFILL_ROLE, DECODE_ROLE):
        expected = f"roles={PREFILL_ROLE} or roles={DECODE_ROLE}"
        raise ConfigError(f"worker: kv={SGLANG} with roles={roles!r}, expected {expected}")


def normalise_url(url: str) -> str:
    """Return a worker's address as `http://host:port`, without a trailing slash or `/v1`. Raises ConfigError."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"worker url: got {url!r}: {error}, expected one http://host:port") from error
    has_more_than_address = bool(parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not parts.hostname or has_more_than_address or port == 0:
        raise ConfigError(f"worker url: got {url!r}, expected http://host:port")
    if parts.username is not None:
        raise ConfigError(f"worker url: got one with a user in it for {parts.hostname!r}, expected http://host:port")
    if not _is_valid_host(parts.hostname) or not url.isprintable() or " " in url:
        raise ConfigError(f"worker url: got {url!r}: nothing can have that address, expected http://host:port")
    host = bracket_host(parts.hostname)
    host_port = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{host_port}{parts.path.rstrip('/').removesuffix('/v1')}"


def _is_valid_host(host: str) -> bool:
    """Return whether a text is an IP address or can be a host name. It is not resolved."""
    if ":" in host or host.rpartition(".")[2].isdigit():
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True
    try:
        labels = host.rstrip(".").encode("idna").decode().split(".")
    except UnicodeError:
        return False
    return all(_HOST_LABEL_PATTERN.fullmatch(label) for label in labels)


def derive_worker_id(url: str) -> str:
    """Return the id of a worker without a given one: host:port (and path) of its normalised URL."""
    parts = urlsplit(url)
    port = parts.port or get_default_port(parts.scheme)
    return f"{bracket_host(parts.hostname or '')}:{port}{parts.path}"


def _split_endpoints(text: str) -> tuple[str, ...]:
    """Return the ZeroMQ endpoints of all ranks, which `;` separates. Raises ConfigError."""
    endpoints = tuple(text.split(";")) if text else ()
    for endpoint in endpoints:
        if not is_endpoint(endpoint):
            raise ConfigError(f"worker: endpoint {endpoint!r}, expected one like tcp://host:5557")
    return endpoints


def _split_roles(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(";")))


class _Key(NamedTuple):
    """Rule for one key of `--worker key=value,...`: the field of WorkerSettings that it sets, and its valid values."""

    field_name: str
    convert: Callable[[str], Any] = str
    """Converts the text of a value to the field's value. Raises ConfigError."""
    pattern: str = r"[\s\S]*"
    """Regular expression that valid texts match as a whole."""
    expected: str = ""
    """Description of valid texts for error messages."""

    def parse(self, key: str, text: str) -> Any:
        """Return the field's value. Raises ConfigError, which names the `key`, for a text that is not valid."""
        if re.fullmatch(self.pattern, text) is None:
            raise ConfigError(f"worker: {key}={text!r}, expected {self.expected}")
        return self.convert(text)


_make_number_key = partial(_Key, convert=int, pattern="(?=0*[1-9])[0-9]{1,15}", expected="a positive number")
_make_switch_key = partial(_Key, convert="1".__eq__, pattern="[01]", expected="0 or 1")
_KV_DIALECTS = tuple(dialect for dialect in KINDS_BY_DIALECT if dialect != BLOCKCAST)
"""Values of `kv=`: dialects of engines that do not say themselves that they move KV."""
_TEXT_KEYS = {
    "url": _Key("url", normalise_url),
    "events": _Key("events", _split_endpoints),
    "replay": _Key("replay", _split_endpoints),
    "topic": _Key("topic"),
    "id": _Key("worker_id"),
    "roles": _Key("roles", _split_roles),
    "kv": _Key("kv", pattern="|".join(_KV_DIALECTS), expected=" or ".join(_KV_DIALECTS)),
    "bootstrap": _Key("bootstrap"),
    "prefill_order": _Key("is_shortest_first", "shortest".__eq__, "arrival|shortest", "arrival or shortest"),
    "model": _Key("model"),
    "root": _Key("root"),
}
_KEYS = _TEXT_KEYS | {
    "cache_tokens": _make_number_key("cache_tokens"),
    "max_num_seqs": _make_number_key("max_num_seqs"),
    "block_size": _make_number_key("block_size"),
    "reannounce": _make_switch_key("reannounces"),
    "send_key": _make_switch_key("sends_api_key"),
}
"""All keys of `--worker`. `model`, `root` and `block_size` replace `url`."""
