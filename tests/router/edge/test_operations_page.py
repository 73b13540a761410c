"""docs/operations.md against the program: every metric and every route is there, and nothing that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from prompts.routing import API_KIND_BY_PATH
from router.app.cli import cli
from router.app.metrics_page import build_feed_families, render_metrics

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()


def test_every_flag_that_is_named_exists() -> None:
    """All of them are in docs/configuration.md, which tests/options holds against the program."""
    assert isinstance(cli, click.Group)
    flags = {
        option
        for parameter in cli.commands["run"].params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }
    table = PAGE.partition("## Flags")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(--[a-z-]+)[^`]*`", table)) - {"--help"}
    assert named <= flags


def test_every_metric_is_explained_and_exists(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())
        chat = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
        await edge.exchange(make_post(chat))
        answer = await edge.exchange(b"GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        types = dict(re.findall(r"^# TYPE blockcast_router_(\w+) (\w+)$", answer.decode(), re.MULTILINE))
        table = PAGE.partition("## Metrics")[2].partition("\n## ")[0]
        rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"events_NAME_total"}
        assert named == set(types)

    edge.run(scenario())


def test_every_counter_of_event_streams_is_explained() -> None:
    from router.fleet.worker_stream import StreamCounters

    row = next(row for row in PAGE.splitlines() if row.startswith("| `events_NAME_total`"))
    for name in StreamCounters.__slots__:
        assert re.search(rf"\b{name}\b", row), name
    page = render_metrics(build_feed_families({"w0": dict.fromkeys(StreamCounters.__slots__, 1)})).decode()
    assert "blockcast_router_events_stored_total" in page


def test_every_route_is_listed(edge: Any) -> None:
    listed = PAGE.partition("## Routes")[2].partition("\n## ")[0]
    written = {"/v1/models/**": "/v1/models/{model}"}

    async def scenario() -> None:
        await edge.start()
        paths = {path for _, path in edge.admin.routes._route_by_method_and_path} | set(API_KIND_BY_PATH)
        assert len(paths) > 12
        for path in paths:
            assert f"{written.get(path, path.replace('*', 'ID'))}`" in listed, path

    edge.run(scenario())
