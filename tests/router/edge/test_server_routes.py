"""What the router answers itself, who may ask for it, and what slow or hostile clients get."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.tokenizer import Checkpoint, Tokenizer
from router.app.accounting import RequestAccounting
from router.app.api_keys import AdminGuard
from router.decide.workers import ServedModel
from router.http.config import ClientTimeouts, HttpLimits
from router.prompting.model_tokenizers import LoadedTokenizer

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: r", "Connection: close", *headers, "", ""]).encode()


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.lower().split(": ", 1) for line in lines), body


VLLM_PATHS = (
    "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify", "/v2/embed",
    "/v1/decisions", "/v1/systemone",
)  # fmt: skip


def test_texts_are_made_tokens_vectors_and_scores_by_a_worker_of_their_model(edge: Any, make_post: Any) -> None:
    """Short and long ones, for who brings a key; a model that nobody serves is a 404, another method a 405."""

    async def scenario() -> None:
        await edge.start(policy="kv", api_keys=("k",))
        workers = {name: await edge.worker(edge.reply(b'{"count": 1}'), model=name) for name in ("m-a", "m-b")}
        for path in (name.encode() for name in VLLM_PATHS):
            for text in ("hello", "x " * 200_000):
                for model, other in (("m-a", "m-b"), ("m-b", "m-a")):
                    body = json.dumps({"prompt": text, "model": model}).encode()
                    answer = await edge.exchange(make_post(body, path, (b"Authorization: Bearer k",)))
                    assert answer.endswith(b'{"count": 1}')
                    sent = workers[model].received.pop()
                    assert (sent.line.split()[1], sent.body) == (path, body)
                    assert not workers[other].received
            body = json.dumps({"prompt": "hello", "model": "nobody"}).encode()
            assert parts(await edge.exchange(make_post(body, path, (b"Authorization: Bearer k",))))[0] == 404
            assert parts(await edge.exchange(make_post(body, path)))[0] == 401
            assert parts(await edge.exchange(get(path.decode(), "Authorization: Bearer k")))[0] == 405

    edge.run(scenario())


@pytest.mark.parametrize("size", [10, 300_000])
def test_workers_are_asked_for_a_model_that_nobody_serves(edge: Any, make_post: Any, size: int) -> None:
    """Once for each request; what they serve now is what counts, also for a long body, which is read elsewhere."""

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply(b'"answered"'), "a")
        asked: list[str] = []

        async def look_for(model: str) -> None:
            asked.append(model)
            if model == "tuned":
                spec = edge.core.workers["a"].spec
                models = (*spec.models, ServedModel("tuned", "tiny", lora="tuned"))
                edge.core.add_worker(dataclasses.replace(spec, models=models), edge.now())

        edge.dispatcher.discover_model = look_for
        for model, status, body in (
            ("tuned", 200, b'"answered"'), ("tuned", 200, b'"answered"'), ("nobody", 404, b"No worker serves model"),
            ("tiny", 200, b'"answered"'),
        ):  # fmt: skip
            sent = json.dumps({"model": model, "prompt": "x " * size}).encode()
            answer = await edge.exchange(make_post(sent, b"/v1/completions"))
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            assert body in answer
        assert asked == ["tuned", "nobody"]

    edge.run(scenario())


def test_a_model_that_a_worker_may_serve_which_was_never_reached_is_no_mistake_of_the_client(
    edge: Any, make_post: Any
) -> None:
    """SDKs repeat a 503, and give up at a 404: the model's worker may be loading it."""

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply(b'"answered"'), "a")
        unreached_counts = [1, 0]
        outcomes: list[str] = []
        edge.proxy.on_end.append(lambda context: outcomes.append(context.outcome))

        async def look_for(model: str) -> int:
            return unreached_counts.pop(0)

        edge.dispatcher.discover_model = look_for
        post = make_post(b'{"model": "late", "prompt": "x"}', b"/v1/completions")
        status, headers, body = parts(await edge.exchange(post))
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "no_worker")
        assert "served: tiny. Not reached: 1." in json.loads(body)["error"]["message"]
        assert outcomes == ["refused_no_worker"], "the alert on errors of the router counts refusals"
        assert parts(await edge.exchange(post))[0] == 404

    edge.run(scenario())


def test_health_models_and_metrics(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        edge.proxy.on_end.append(RequestAccounting(edge.proxy).record_ended_request)
        assert parts(await edge.exchange(get("/health")))[0] == 503
        await edge.worker(edge.reply())
        status, _, body = parts(await edge.exchange(get("/health")))
        assert (status, json.loads(body)["workers_up"]) == (200, 1)
        (worker_id,) = edge.core.workers
        edge.core.set_draining(worker_id, 0.0)
        status, _, body = parts(await edge.exchange(make_post(b'{"messages": [{"role": "user", "content": "x"}]}')))
        assert (status, json.loads(body)["error"]["message"]) == (503, "No worker of model 'tiny' is up: 1 draining.")
        edge.core.set_draining(worker_id, 0.0, is_draining=False)
        status, headers, body = parts(await edge.exchange(get("/health", method="HEAD")))
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0
        models = json.loads(parts(await edge.exchange(get("/v1/models")))[2])
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 4096)]
        assert json.loads(parts(await edge.exchange(get("/v1/models/tiny")))[2]) == models["data"][0]
        for unknown in ("/v1/models/other", "/v1/models/a/b", "/v1/models/a%2Fb", "/v1/models/"):
            status, _, body = parts(await edge.exchange(get(unknown)))
            assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found"), unknown
        await edge.exchange(make_post(CHAT))
        edge.fleet.waiting["never"] = "refused"
        page = parts(await edge.exchange(get("/metrics")))[2].decode()
        assert "# HELP blockcast_router_requests_total" in page
        assert 'blockcast_router_worker_up{worker="w0"} 1.0' in page
        assert 'blockcast_router_worker_up{worker="never"} 0.0' in page
        assert 'blockcast_router_worker_state{state="up",worker="w0"} 1.0' in page
        assert 'blockcast_router_worker_state{state="down",worker="w0"} 0.0' in page
        assert 'blockcast_router_worker_state{state="starting",worker="never"} 1.0' in page
        answered = '{model="tiny",stream="false",worker="w0"} 1.0'
        assert "blockcast_router_request_seconds_count" + answered in page
        assert "blockcast_router_time_to_first_byte_seconds_count" + answered in page

    edge.run(scenario())


def test_workers_route_and_drain(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply())
        await edge.worker(edge.reply())
        rows = json.loads(parts(await edge.exchange(get("/workers")))[2])["workers"]
        assert [row["worker_id"] for row in rows] == ["w0", "w1"]
        status, _, body = parts(await edge.exchange(make_post(CHAT, b"/route")))
        explanation = json.loads(body)
        assert status == 200
        assert {one["worker"] for one in explanation["candidates"]} == {"w0", "w1"}
        assert edge.core.counters["routed"] == 0
        assert parts(await edge.exchange(make_post(b"", b"/workers/w0/drain")))[0] == 200
        for _ in range(3):
            assert parts(await edge.exchange(make_post(CHAT)))[1]["x-blockcast-worker"] == "w1"
        for body in (b'{"on":1}', b'{"off":true}', b'{"on":true,"force":true}'):
            status, _, answer = parts(await edge.exchange(make_post(body, b"/workers/w0/drain")))
            assert status == 400
            assert json.loads(answer)["error"]["message"].startswith("on: got ")
        assert parts(await edge.exchange(get("/workers/w0", method="DELETE")))[0] == 200
        assert parts(await edge.exchange(get("/workers/w0", method="DELETE")))[0] == 404
        assert parts(await edge.exchange(make_post(b"{}", b"/workers")))[0] == 400
        edge.fleet.waiting["h:1"] = "cannot connect"
        status, _, answer = parts(await edge.exchange(make_post(b"", b"/workers/h:1/drain")))
        assert status == 409
        assert "never reached" in json.loads(answer)["error"]["message"]

    edge.run(scenario())


def test_a_router_that_ends_closes_each_connection_after_its_answer(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply())
        edge.listener.close_after_answers()
        for request in (make_post(CHAT), get("/health")):
            assert b"Connection: close\r\n" in request
            answer = await edge.exchange(request.replace(b"Connection: close\r\n", b""))  # to the end of the connection
            status, headers, _ = parts(answer)
            assert (status, headers["connection"]) == (200, "close")

    edge.run(scenario())


def test_the_root_tells_what_answers_here(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start(api_keys=("secret",))
        status, _, body = parts(await edge.exchange(get("/")))
        about = json.loads(body)
        assert (status, about["name"], about["version"]) == (200, "blockcast router", "test")
        assert {"/health", "/v1/models"} <= set(about["paths"])
        assert "/workers" not in about["paths"]
        assert parts(await edge.exchange(get("/", method="HEAD")))[0] == 200
        assert parts(await edge.exchange(get("/", method="POST")))[0] == 405

    edge.run(scenario())


def test_unknown_paths_and_methods(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        status, _, body = parts(await edge.exchange(get("/nothing")))
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
        for path, meant in (
            ("/chat/completions", "/v1/chat/completions"), ("/v1/chat/completions/", "/v1/chat/completions"),
            ("/v1/responses/", "/v1/responses"), ("/workers/w0/drain/", None), ("/metrics/", "/metrics"),
        ):  # fmt: skip
            status, _, body = parts(await edge.exchange(get(path, method="POST")))
            assert (status, json.loads(body)["error"]["code"]) == (404, "not_found"), path
            assert meant is None or f"did you mean {meant}?" in json.loads(body)["error"]["message"]
        status, _, body = parts(await edge.exchange(get("/v1/v1/messages", method="POST")))
        assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
        assert "did you mean /v1/messages?" in json.loads(body)["error"]["message"]
        status, _, body = parts(await edge.exchange(get("/health", method="PUT")))
        assert status == 405
        assert "GET" in json.loads(body)["error"]["message"]

    edge.run(scenario())


def test_admin_routes_are_closed_to_others(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(guard=AdminGuard("secret", ()).refuse)
        for request in (get("/workers"), make_post(b"", b"/workers/w0/drain"), make_post(CHAT, b"/route")):
            status, _, body = parts(await edge.exchange(request))
            assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden")
        assert parts(await edge.exchange(get("/v1/models")))[0] == 200

    edge.run(scenario())


def test_api_keys(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(api_keys=("first", "second"))
        await edge.worker(edge.reply())
        for wrong in ([], [b"Authorization: Bearer other"], [b"Authorization: Basic first"], [b"Authorization: first"]):
            status, headers, body = parts(await edge.exchange(make_post(CHAT, headers=wrong)))
            assert (status, headers["www-authenticate"]) == (401, "bearer")
            assert headers["x-should-retry"] == "false"  # or Claude Code repeats it for three minutes
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for right in (b"first", b"second"):
            answer = await edge.exchange(make_post(CHAT, headers=[b"authorization: bearer " + right]))
            assert parts(answer)[0] == 200
        assert parts(await edge.exchange(get("/v1/models")))[0] == 401
        assert parts(await edge.exchange(get("/v1/models/tiny")))[0] == 401
        assert parts(await edge.exchange(get("/v1/files")))[0] == 401
        assert parts(await edge.exchange(get("/health")))[0] == 200

    edge.run(scenario())


def test_pipelined_requests_are_answered_in_order(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            number = int(json.loads(request.body)["n"])
            await asyncio.sleep(0.03 - number * 0.005)
            await edge.reply(b"%d" % number)(request, reader, writer)

        await edge.start()
        await edge.worker(script)
        bodies = [json.dumps({"model": "tiny", "prompt": "x", "n": n}).encode() for n in range(5)]
        data = b"".join(make_post(body, b"/v1/completions", close=n == 4) for n, body in enumerate(bodies))
        answer = await edge.exchange(data)
        pieces = answer.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [piece.partition(b"\r\n\r\n")[2] for piece in pieces] == [b"0", b"1", b"2", b"3", b"4"]

    edge.run(scenario())


def test_expect_continue(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(limits=HttpLimits(body_bytes_max=200))
        worker = await edge.worker(edge.reply())
        head, _, body = make_post(CHAT, headers=[b"Expect: 100-continue"]).partition(b"\r\n\r\n")
        reader, writer = await edge.connect()
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert parts(await reader.read(-1))[0] == 200
        assert worker.received[0].all(b"expect") == []
        writer.close()
        reader, writer = await edge.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 201\r\n\r\n")
        assert parts(await reader.read(-1))[0] == 413
        writer.close()

    edge.run(scenario())


def test_slow_loris_is_cut_off_and_others_are_served(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(client_timeouts=ClientTimeouts(request_s=20, keep_alive_s=30))
        await edge.worker(edge.reply())
        slow = [await edge.connect() for _ in range(5)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX-")
        assert parts(await edge.exchange(make_post(CHAT)))[0] == 200
        connections = edge.listener.connections
        await edge.until(lambda: sum(connection._parser.has_partial_request for connection in connections) == len(slow))
        edge.advance(21)
        for reader, writer in slow:
            assert parts(await reader.read(-1))[0] == 408
            writer.close()
        edge.advance(21)
        await edge.until(lambda: not connections)
        reader, writer = await edge.connect()
        await edge.until(lambda: connections)
        edge.advance(31)
        assert await reader.read(-1) == b""  # idle for longer than keep_alive_s
        writer.close()

    edge.run(scenario())


def test_early_error_can_be_read_by_a_client_that_is_still_sending(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start(limits=HttpLimits(body_bytes_max=1000))
        reader, writer = await edge.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(50):
            writer.write(b"x" * 65536)
            await asyncio.sleep(0)
        status, headers, body = parts(await reader.read(-1))
        assert (status, headers["connection"]) == (413, "close")
        assert "1000 bytes" in json.loads(body)["error"]["message"]
        writer.close()

    edge.run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: r\r\nX: \x00\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: r\r\n\r\n",
        b"\x00" * 100,
        b"A" * 200_000,
        b"GET /" + b"%ff" * 40_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
def test_garbage_gets_a_4xx_and_nothing_else(edge: Any, data: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        status, headers, _ = parts(await edge.exchange(data))
        assert 400 <= status < 500 or status == 505
        assert headers["connection"] == "close"
        assert worker.received == []

    edge.run(scenario())


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/route"])
@pytest.mark.parametrize(
    "body",
    [b"{", b"[" * 50_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"model":1e999}', b'{"prompt":[1e400]}', b"", b"null",
     b'{"model":"tiny","prompt":[-1,2]}', b'{"model":"tiny","prompt":[99999999999999999999]}',
     b'{"model":"tiny","prompt":[[],{}]}', b'{"model":"tiny","messages":[{"content":{"a":1}}]}',
     b'{"model":"\\ud800","prompt":"x"}', b'{"model":"tiny","prompt":"\\ud800"}', b'{"model":null,"max_tokens":-5}'],
)  # fmt: skip
def test_hostile_bodies_never_fail_the_router(edge: Any, make_post: Any, path: bytes, body: bytes) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply(b"{}", status=b"422 No"))
        status, _, _ = parts(await edge.exchange(make_post(body, path)))
        assert 200 <= status < 500

    edge.run(scenario())


def test_a_clients_own_template_is_never_run(edge: Any, make_post: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1024, 4096)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    }

    async def scenario() -> None:
        await edge.start(policy="kv")
        edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(
            Tokenizer.load(tmp_path), Checkpoint(str(tmp_path))
        )
        worker = await edge.worker(edge.reply(b"{}", status=b"400 No"))
        status, headers, _ = parts(await edge.exchange(make_post(json.dumps(body).encode())))
        assert (status, headers["x-blockcast-predicted-cached-tokens"]) == (400, "0")
        assert json.loads(worker.received[0].body) == body

    edge.run(scenario())


def test_connections_over_the_limit_get_a_503(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(connections_max=2)
        await edge.worker(edge.reply())
        connections = [await edge.connect() for _ in range(2)]
        for _, writer in connections:
            writer.write(make_post(CHAT, close=False))
        for reader, _ in connections:
            await reader.readuntil(b"\r\n\r\n")
        status, headers, _ = parts(await edge.exchange(make_post(CHAT)))
        assert (status, headers["retry-after"]) == (503, "1")
        for _, writer in connections:
            writer.close()

    edge.run(scenario())


def test_wishes_are_headers_and_wrong_ones_are_named(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", core={"queue": {"fair": True, "enqueue_above_s": 0.0}})
        gate = asyncio.Event()

        await edge.worker(edge.gated(gate))
        first = asyncio.create_task(
            edge.exchange(make_post(CHAT[:-1] + b', "stream": true}', headers=[b"x-blockcast-priority: 3"]))
        )
        await edge.until(lambda: edge.core.get_attempts())
        late = make_post(CHAT, headers=[b"x-blockcast-deadline-ms: 60"])
        refused = asyncio.create_task(edge.exchange(late))
        await edge.until(lambda: edge.core.snapshot(edge.now()).queued_requests)
        edge.advance(0.061)
        status, headers, body = parts(await refused)
        assert (status, json.loads(body)["error"]["code"]) == (503, "deadline")
        assert "retry-after" in headers
        gate.set()
        assert parts(await first)[0] == 200
        for name, value in (("priority", "high"), ("deadline-ms", "0"), ("deadline-ms", "99999999999")):
            header = f"x-blockcast-{name}: {value}".encode()
            status, _, body = parts(await edge.exchange(make_post(CHAT, headers=[header])))
            assert status == 400
            assert f"x-blockcast-{name}" in json.loads(body)["error"]["message"]
        status, _, body = parts(await edge.exchange(make_post(CHAT, headers=[b"x-blockcast-role: big"])))
        assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_role")

    edge.run(scenario())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions", "/v1/chat/completions"])
def test_what_is_long_but_no_text_is_passed_on(edge: Any, make_post: Any, path: str) -> None:
    """A batch, an upload, an inline image: their bytes say nothing of any prompt's tokens."""
    bodies = {
        "/v1/embeddings": json.dumps({"model": "tiny", "input": ["some words"] * 4000}).encode(),
        "/v1/audio/transcriptions": b"--boundary\r\n" + bytes(range(256)) * 400,
        "/v1/chat/completions": json.dumps(
            {"model": "tiny", "messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}]}]}
        ).encode(),
    }  # fmt: skip

    async def scenario() -> None:
        await edge.start(policy="kv")
        worker = await edge.worker(edge.reply())
        assert parts(await edge.exchange(make_post(bodies[path], path.encode())))[0] == 200
        assert worker.received[0].body == bodies[path]

    edge.run(scenario())
