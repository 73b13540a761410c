"""Spans of requests: whose child they are, what they say, what the worker is told; and that they are sent."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from options import ConfigError
from router.app.tracing import Tracing

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def trace(edge: Any, share: float, exporter: Any = None, endpoint: str = "http://127.0.0.1:9") -> Tracing:
    tracing = Tracing(endpoint, share, "1.2.3", exporter)
    edge.proxy.tracer = tracing.begin
    edge.proxy.on_end.append(lambda exchange: tracing.end(exchange, edge.proxy.now()))
    return tracing


def test_a_traced_request_and_its_worker(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        exporter = InMemorySpanExporter()
        tracing = trace(edge, 0.0, exporter)
        traceparent = b"traceparent: 00-%b-%b-01" % (TRACE.encode(), PARENT.encode())
        await edge.exchange(make_post(CHAT, headers=[traceparent]))
        tracing._provider.force_flush()
        spans = {span.name: span for span in exporter.get_finished_spans()}
        root = spans["POST /v1/chat/completions"]
        assert f"{root.context.trace_id:032x}" == TRACE
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == PARENT
        (told,) = worker.received[-1].all(b"traceparent")
        assert told.decode() == f"00-{TRACE}-{root.context.span_id:016x}-01"
        assert root.attributes is not None
        assert root.attributes["blockcast.outcome"] == "status_200"
        assert root.attributes["blockcast.worker"] == "w0"
        for name in ("read and decide", "answer"):
            child = spans[name]
            assert child.parent is not None
            assert child.parent.span_id == root.context.span_id
            assert root.start_time <= child.start_time <= child.end_time <= root.end_time  # type: ignore[operator]
        assert any(name.startswith("blockcast.terms.") for name in spans["read and decide"].attributes or {})
        assert [event.name for event in spans["answer"].events] == ["first byte"]
        tracing.close()

    edge.run(scenario())


@pytest.mark.parametrize(
    ("share", "header", "spans"),
    [
        (0.0, b"", 0),
        (1.0, b"", 3),
        (1.0, b"traceparent: 00-%b-%b-00" % (TRACE.encode(), PARENT.encode()), 0),
        (0.0, b"traceparent: 00-%b-01" % TRACE.encode(), 0),
        (1.0, b"traceparent: \xff\xfe" + b"0" * 9000, 3),
    ],
)
def test_what_is_traced(edge: Any, make_post: Any, share: float, header: bytes, spans: int) -> None:
    """What is not traced passes as it came; what is no traceparent is none."""

    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        exporter = InMemorySpanExporter()
        tracing = trace(edge, share, exporter)
        await edge.exchange(make_post(CHAT, headers=[header] if header else []))
        tracing._provider.force_flush()
        assert len(exporter.get_finished_spans()) == spans
        passed = worker.received[-1].all(b"traceparent")
        if spans:
            assert len(passed) == 1
            assert passed[0].startswith(b"00-")
        else:
            assert passed == ([header.split(b": ", 1)[1]] if header else [])
        tracing.close()

    edge.run(scenario())


def test_an_sdk_that_its_variable_disables_traces_nothing(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        exporter = InMemorySpanExporter()
        tracing = trace(edge, 1.0, exporter)
        answer = await edge.exchange(make_post(CHAT))
        assert answer.startswith(b"HTTP/1.1 200")
        assert worker.received[-1].all(b"traceparent") == []
        assert exporter.get_finished_spans() == ()
        tracing.close()

    edge.run(scenario())


def test_spans_reach_a_collector(edge: Any, make_post: Any) -> None:
    payloads: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        payloads.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(body=b"", content_type="application/x-protobuf")

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await edge.start()
        tracing = trace(edge, 1.0, endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}")
        await edge.exchange(make_post(CHAT))  # no worker: 503
        await asyncio.to_thread(tracing.close)
        await runner.cleanup()

    edge.run(scenario())
    (resource,) = payloads[0].resource_spans
    assert "blockcast-router" in {each.value.string_value for each in resource.resource.attributes}
    (span,) = resource.scope_spans[0].spans
    assert span.status.code == 2


def test_a_collector_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app.tracing.CLOSE_S_MAX", 0.01)
    release, has_begun, has_ended = threading.Event(), threading.Event(), threading.Event()

    class SilentExporter(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            has_begun.set()
            release.wait(10)
            has_ended.set()
            return super().export(spans)

    tracing = Tracing("http://127.0.0.1:9", 1.0, "1.2.3", SilentExporter())
    tracing._tracer.start_span("a request").end()
    tracing.close()
    assert has_begun.wait(10)
    assert not has_ended.is_set()
    release.set()


def test_files_that_another_package_put_over_those_of_opentelemetry_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("older")
    older.__file__ = "older.py"
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", older)
    with pytest.raises(ConfigError, match=r"xds-protos.*force-reinstall"):
        Tracing("http://127.0.0.1:9", 0.0, "1.2.3")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"install blockcast\[otel\]"):
        Tracing("http://127.0.0.1:9", 0.0, "1.2.3")
