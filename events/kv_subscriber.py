"""Print, filter and record the KV cache events of any worker, ours or vLLM's. Gaps are filled by replay.

\b
    kv_subscriber http://127.0.0.1:8000                       # asks the worker where its events are
    kv_subscriber tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
    kv_subscriber http://a:8000 http://b:8000 --from-start --type removed --json
    kv_subscriber http://a:8000 --state seen.json           # killed and started again, it goes on where it was
    kv_subscriber http://a:8000 --record capture.frames.jsonl.gz

Without --from-start or --snapshot it shows what happens from now on. Ctrl-C ends it.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

import events
from events import BlockRemoved, BlockStored, Event, Message, Notice, StartMode, StreamConfig, StreamSource
from events.frames import pack_seq
from events.sources import is_endpoint, make_default_source
from events.stream_types import StreamPosition
from options.command import NumberType

EVENT_CLASS_BY_NAME = {"stored": BlockStored, "removed": BlockRemoved, "cleared": events.AllBlocksCleared}
SHOWN_HASH_COUNT = 4
SAVE_INTERVAL_S = 0.2
CONNECT_PATIENCE_S = 3.0
"""Time after which a stream that is not connected yet is reported."""


@dataclass(frozen=True)
class EventFilter:
    """Selects the KV cache events to show, by the options of the command line. An empty field selects all."""

    types: tuple[str, ...] = ()
    """`stored`, `removed` or `cleared`."""
    groups: tuple[int, ...] = ()
    media: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """Texts of which a stream's name must contain one."""

    def matches_stream(self, stream_id: str) -> bool:
        return not self.holders or any(holder in stream_id for holder in self.holders)

    def matches(self, event: Event) -> bool:
        """Return whether to show an event. One that clears a cache is of every group, and without a medium of all."""
        shown_classes = tuple(EVENT_CLASS_BY_NAME[name] for name in self.types)
        if shown_classes and not isinstance(event, shown_classes):
            return False
        if isinstance(event, events.AllBlocksCleared):
            return not self.media or event.medium is None or event.medium in self.media
        if self.groups and (event.group_idx or 0) not in self.groups:
            return False
        return not self.media or event.medium in self.media


@dataclass
class PositionFile:
    """File with the position of the last batch shown of each stream, where the program continues when started again."""

    path: Path | None
    """None: positions are not saved."""
    position_by_stream: dict[str, StreamPosition] = field(default_factory=dict)
    saved_at: float = 0.0

    @classmethod
    def load(cls, path: Path | None) -> PositionFile:
        """Read the positions, if there is a file. Raises ClickException if it has another format."""
        if path is None or not path.exists():
            return cls(path)
        try:
            return cls(path, msgspec.json.decode(path.read_bytes(), type=dict[str, StreamPosition]))
        except msgspec.MsgspecError as error:
            raise click.ClickException(f"--state {path}: not a state file of kv_subscriber: {error}") from error

    def record(self, item: Message | Notice) -> None:
        """Remember the position of a batch, to be saved later. After a `Clear` notice a stream has no position."""
        if isinstance(item, Message):
            if item.position is not None:
                self.position_by_stream[item.stream_id] = item.position
        elif isinstance(item.content, events.Clear):
            self.position_by_stream.pop(item.stream_id, None)

    def save_if_due(self, now: float) -> None:
        if now - self.saved_at >= SAVE_INTERVAL_S:
            self.saved_at = now
            self.save()

    def save(self) -> None:
        """Write the file, by a rename, so that a kill leaves the old file or the new one."""
        if self.path is not None:
            temporary_path = self.path.with_name(self.path.name + ".new")
            temporary_path.write_bytes(msgspec.json.encode(self.position_by_stream))
            os.replace(temporary_path, self.path)


def format_hash(block_hash: int | bytes | None) -> str:
    if block_hash is None:
        return "the start"
    return block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash & (2**64 - 1):016x}"


def format_hashes(hashes: list[int | bytes]) -> str:
    text = " ".join(format_hash(block_hash)[:16] for block_hash in hashes[:SHOWN_HASH_COUNT])
    return text + (f" and {len(hashes) - SHOWN_HASH_COUNT} more" if len(hashes) > SHOWN_HASH_COUNT else "")


def format_event(event: Event, *, show_tokens: bool) -> str:
    if isinstance(event, events.AllBlocksCleared):
        return f"Cleared  {event.medium or 'everything'}"
    location = f"group {event.group_idx or 0} {event.medium or '?'}"
    if isinstance(event, BlockRemoved):
        return f"Removed  {location}: {format_hashes(event.block_hashes)}"
    attention = f" {event.kv_cache_spec_kind}" if event.kv_cache_spec_kind else ""
    lora_text = f" lora {event.lora_name}" if event.lora_name else ""
    parent_name = format_hash(event.parent_block_hash)[:16]
    sizes_text = f"{len(event.block_hashes)} x {event.block_size} tokens"
    tokens_text = f"\n         tokens {event.token_ids}" if show_tokens else ""
    hashes_text = format_hashes(event.block_hashes)
    return f"Stored   {location}{attention}{lora_text}: {sizes_text} after {parent_name}: {hashes_text}{tokens_text}"


def format_notice(notice: object) -> str:
    """Return the text to print for a notice: something that happened to a stream besides its batches."""
    if isinstance(notice, events.Gap):
        return f"GAP      seq {notice.first_seq} to {notice.next_seen - 1} are missing; asking for replay"
    if isinstance(notice, events.PublisherRestarted):
        return f"RESTART  {notice.reason}"
    if isinstance(notice, events.Clear):
        return f"FORGET   what was announced before does not count any more: {notice.reason}"
    if isinstance(notice, events.DuplicateBatch):
        return f"STALE    seq {notice.seq} came again"
    if isinstance(notice, events.DroppedMessages):
        return f"DROPPED  {notice.count} messages, because too many waited"
    if isinstance(notice, events.MalformedMessage):
        return f"BAD      {notice.reason}"
    assert isinstance(notice, events.Connection)
    return "UP       connected" if notice.up else "DOWN     connection lost"


def format_text_lines(item: Message | Notice, event_filter: EventFilter, *, show_tokens: bool) -> Iterator[str]:
    """Yield the lines to print for a notice, or for the selected events and the errors of a batch."""
    time_of_day = time.strftime("%H:%M:%S")
    if isinstance(item, Notice):
        yield f"{time_of_day} {item.stream_id} {format_notice(item.content)}"
        return
    seq_text = "snapshot" if item.seq is None else f"seq {item.seq}"
    origin = " (replayed)" if item.origin.value == "replay" else ""
    line_start = f"{time_of_day} {item.stream_id} {seq_text}{origin}"
    for event in filter(event_filter.matches, item.decoded_batch.batch.events):
        yield f"{line_start} {format_event(event, show_tokens=show_tokens)}"
    for error in item.decoded_batch.errors:
        yield f"{line_start} BAD      {error}"
    for event_type, count in item.decoded_batch.unknown_type_counts.items():
        yield f"{line_start} UNKNOWN  {count} x {event_type}"


def format_json_lines(item: Message | Notice, event_filter: EventFilter) -> Iterator[str]:
    """Yield a notice as a JSON object, or an object for each selected event and each error of a batch."""
    if isinstance(item, Notice):
        fields = {name: getattr(item.content, name) for name in item.content.__dataclass_fields__}
        yield json.dumps({"stream": item.stream_id, "notice": type(item.content).__name__, **fields})
        return
    batch = item.decoded_batch.batch
    common_fields = {"stream": item.stream_id, "seq": item.seq, "origin": item.origin.value, "ts": batch.ts}
    for event in filter(event_filter.matches, batch.events):
        yield _format_json_event(event, common_fields, batch.data_parallel_rank)
    for error in item.decoded_batch.errors:
        yield json.dumps({**common_fields, "malformed": error})
    for event_type, count in item.decoded_batch.unknown_type_counts.items():
        yield json.dumps({**common_fields, "unknown_type": event_type, "count": count})


def _format_json_event(event: Event, common_fields: dict[str, Any], rank: int | None) -> str:
    """Return an event as JSON: the fields of its batch, then its type and the fields that it sets."""
    fields = {name: value for name, value in msgspec.structs.asdict(event).items() if value is not None}
    try:
        line = {**common_fields, "dp_rank": rank, "type": type(event).__name__, **fields}
        return json.dumps(line, default=encode_value, skipkeys=True)
    except RecursionError:  # msgpack is read to a greater depth than JSON is written
        return json.dumps({**common_fields, "malformed": "keys of media that are nested too deeply"})


def encode_value(value: object) -> object:
    """Return bytes or a msgpack extension as `{"__bytes__": hex}`, and other values, such as times, as text."""
    data = value.data if isinstance(value, msgspec.msgpack.Ext) else value
    return {"__bytes__": data.hex()} if isinstance(data, bytes) else str(value)


def format_frames(item: Message) -> str:
    """Return a batch as a line of frames.jsonl, as in the golden captures."""
    frames = [item.topic.hex(), pack_seq(item.seq or 0).hex(), item.payload.hex()]
    return json.dumps({"t": time.time(), "stream": item.stream_id, "frames": frames})


def open_recording(path: Path | None) -> Any:
    """Return a context manager with a file for lines, or with None if `path` is None."""
    if path is None:
        return nullcontext()
    return gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")


def iter_sources(
    addresses: tuple[str, ...], replays: tuple[str, ...], topic: str | None, config: StreamConfig
) -> Iterator[StreamSource]:
    """Yield the streams of KV cache events at the addresses of the command line. Raises ClickException for a wrong one.

    An address is a publisher's (`tcp://`, `ipc://`), or the URL of a worker, which is asked for its publishers. The
    n-th of `replays` is the address where the n-th publisher sends missed batches again; there may be fewer.
    """
    endpoints = [address for address in addresses if "://" in address and not address.startswith("http")]
    if len(replays) > len(endpoints):
        raise click.UsageError(f"{len(replays)} --replay for {len(endpoints)} event addresses")
    replay_by_endpoint = dict(zip(endpoints, replays))
    for address in addresses:
        if address.startswith(("http://", "https://")):
            yield from discover_streams(address, topic, config)
        elif is_endpoint(address):
            yield StreamSource(address, address, replay_by_endpoint.get(address), topic, config)
        else:
            raise click.UsageError(f"{address!r}: expected tcp://HOST:PORT, ipc://PATH or a worker's http:// URL")


def discover_streams(worker_url: str, topic: str | None, config: StreamConfig) -> Iterator[StreamSource]:
    """Ask a worker where it publishes KV cache events, and yield the streams. Raises ClickException if it has none."""
    try:
        sources = events.discover(worker_url)
    except (events.EventsError, OSError) as error:
        raise click.ClickException(
            f"cannot ask {worker_url} for its event sources: {error}: is this a worker's address, and does it run?"
        ) from error
    if not sources:
        raise click.ClickException(f"{worker_url} publishes no events: start the worker with --kv-events-config")
    default_source = make_default_source(urlsplit(worker_url).hostname or "127.0.0.1")
    if sources == [default_source]:
        message = f"{worker_url} has no /kv_event_sources: connecting to vLLM's default, {sources[0].endpoint}"
        click.echo(message, err=True)
    for source in sources:
        yield StreamSource(
            stream_id=f"{worker_url}#{source.data_parallel_rank}" if len(sources) > 1 else worker_url,
            endpoint=source.endpoint,
            replay_endpoint=source.replay_endpoint,
            topic=topic or source.topic or None,
            config=config,
            snapshot_endpoint=source.snapshot_endpoint,
        )


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("addresses", nargs=-1, metavar="ENDPOINT|URL ...")
@click.option(
    "--replay", "replays", metavar="ENDPOINT", multiple=True, help="Replay address of the n-th tcp:// ENDPOINT."
)
@click.option(
    "--bind", "binds", metavar="ENDPOINT", multiple=True, help="Bind here for publishers that connect to a subscriber."
)
@click.option("--topic", metavar="TOPIC", help="Only this topic.")
@click.option("--from-start", is_flag=True, help="Begin with everything the worker can still replay.")
@click.option("--snapshot", is_flag=True, help="Begin with what is resident now (vLLM: what it can still replay).")
@click.option(
    "--type", "types", multiple=True, type=click.Choice(list(EVENT_CLASS_BY_NAME)), help="Only these event types."
)
@click.option("--group", "groups", metavar="N", multiple=True, type=int, help="Only these cache groups.")
@click.option("--medium", "media", metavar="MEDIUM", multiple=True, help="Only these media: GPU, CPU, STORAGE ...")
@click.option(
    "--holder",
    "holders",
    metavar="TEXT",
    multiple=True,
    help="Only streams whose name, a URL or topic, has TEXT in it.",
)
@click.option("--tokens", is_flag=True, help="Show token ids.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option(
    "--record", metavar="FILE", type=click.Path(path_type=Path), help="Write the raw frames (.jsonl or .jsonl.gz)."
)
@click.option(
    "--state", "state_path", metavar="FILE", type=click.Path(path_type=Path), help="Remember the last batch seen here."
)
@click.option("--batches", metavar="N", type=NumberType(int, 1), help="End after so many batches.")
def command(
    addresses: tuple[str, ...], replays: tuple[str, ...], binds: tuple[str, ...], topic: str | None, from_start: bool,
    snapshot: bool, types: tuple[str, ...], groups: tuple[int, ...], media: tuple[str, ...], holders: tuple[str, ...],
    tokens: bool, as_json: bool, record: Path | None, state_path: Path | None, batches: int | None,
) -> None:  # fmt: skip
    """Follow streams of KV cache events and print the events, until Ctrl-C or `batches` batches.

    The positions in the streams are saved to `state_path`, and the raw frames to `record`, if they are given.
    """
    if not addresses and not binds:
        raise click.UsageError("nothing to follow: give an event address, a worker's URL or --bind")
    start_mode = StartMode.RING if from_start else StartMode.LIVE
    if snapshot:
        start_mode = StartMode.SNAPSHOT
    position_file = PositionFile.load(state_path)
    event_filter = EventFilter(types, groups, media, holders)
    sources = [
        replace(source, resume_position=position_file.position_by_stream.get(source.stream_id))
        for source in iter_sources(addresses, replays, topic, StreamConfig(start_mode=start_mode))
        if event_filter.matches_stream(source.stream_id)
    ]
    format_lines = partial(format_text_lines, event_filter=event_filter, show_tokens=tokens)
    if as_json:
        format_lines = partial(format_json_lines, event_filter=event_filter)

    with events.Subscriber(sources) as subscriber, open_recording(record) as recording_file:
        for address in binds:
            subscriber.feed.bind(address, make_bound_source)
        items = receive_items(subscriber, position_file, sources)
        shown_items = (item for item in items if event_filter.matches_stream(item.stream_id))
        batch_count = 0
        with suppress(KeyboardInterrupt, BrokenPipeError):
            for item in shown_items:
                for line in format_lines(item):
                    print(line, flush=True)
                position_file.record(item)
                if isinstance(item, Message):
                    batch_count += 1
                    if recording_file is not None and item.seq is not None:
                        print(format_frames(item), file=recording_file, flush=True)
                if batch_count == batches:
                    break
        position_file.save()


def make_bound_source(topic: str) -> StreamSource:
    """Return the source of a publisher that connects to this program and publishes under `topic`."""
    return StreamSource(topic, endpoint="", topic=topic, config=StreamConfig(start_mode=StartMode.LIVE))


def receive_items(
    subscriber: events.Subscriber, position_file: PositionFile, sources: list[StreamSource]
) -> Iterator[Message | Notice]:
    """Yield batches and notices as they come, and save the positions in the streams from time to time.

    Streams that have sent nothing after CONNECT_PATIENCE_S are named on stderr, once.
    """
    endpoint_by_silent_stream = {source.stream_id: source.endpoint for source in sources}
    report_at = time.monotonic() + CONNECT_PATIENCE_S
    while True:
        item = subscriber.get(SAVE_INTERVAL_S)
        now = time.monotonic()
        position_file.save_if_due(now)
        if item is not None:
            endpoint_by_silent_stream.pop(item.stream_id, None)
        if now >= report_at:
            for endpoint in endpoint_by_silent_stream.values():
                message = f"{endpoint}: cannot connect yet: does a worker publish there (--kv-events-config)?"
                click.echo(message, err=True)
            endpoint_by_silent_stream.clear()
        if item is not None:
            yield item


def _handle_sigint(number: int, frame: object) -> None:
    """End the program, and ignore further signals: a terminal may send two, and the second would cut off the end."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(args: list[str] | None = None) -> None:
    """Console script `kv_subscriber`. `args` replace those of the process."""
    if args is None:
        signal.signal(signal.SIGINT, _handle_sigint)
    try:
        command(args=args, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (BrokenPipeError, KeyboardInterrupt, click.Abort):
        sys.exit(0)


if __name__ == "__main__":
    main()
