"""Fields by which workers agree where KV lies are no client's to set: not in any API, spelling or way of reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.worker_fields import WORKER_FIELDS, WORKER_HEADERS
from router.prompting.body_fields import apply_edits, locate_fields

REMOTE = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1, 2]}
MESSAGES = [{"role": "user", "content": 'say "kv_transfer_params": {"a": 1}'}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/v1/own": {"model": "tiny", "more": [1]},
}
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vllm": ({"kv_transfer_params": REMOTE, "ec_transfer_params": {}, "kv_hints": 1}, {}),
    "sglang": ({"bootstrap_host": ["a"], "bootstrap_port": 1, "bootstrap_room": 2, "routed_dp_rank": 0}, {}),
    "sessions": ({"rid": "r", "session_params": {"id": "x"}, "data_parallel_rank": 3}, {}),
    "xargs": ({"vllm_xargs": {"kv_transfer_params": REMOTE, "top": 1}}, {"vllm_xargs": {"top": 1}}),
    "extra_body": ({"extra_body": {"a": [{"kv_hints": 1, "b": 2}]}}, {"extra_body": {"a": [{"b": 2}]}}),
    "nvext": (
        {"nvext": {"backend_instance_id": 7, "prefill_worker_id": 1, "greed_sampling": True, "extra": {"dp_rank": 1}}},
        {"nvext": {"greed_sampling": True, "extra": {}}},
    ),
    "harmless": ({"nvext": {"greed_sampling": True}, "user": "u"}, {"nvext": {"greed_sampling": True}, "user": "u"}),
}


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.data())
def test_what_is_left_of_a_body_is_json(names: list[str], dropped: set[str], data: st.DataObject) -> None:
    fields = {name: data.draw(st.sampled_from([1, "x", [{"a": 1}], None, {}])) for name in names}
    body = json.dumps(fields, indent=data.draw(st.sampled_from([None, 1]))).encode()
    cut = data.draw(st.integers(0, len(body)))
    new = data.draw(st.dictionaries(st.sampled_from("abgh"), st.integers(), max_size=3))
    new = {name: value for name, value in new.items() if name not in dropped}
    left = b"".join(apply_edits((body[:cut], body[cut:]), locate_fields(body).make_edits(new, dropped)))
    kept = {name: value for name, value in fields.items() if name not in dropped}
    assert json.loads(left) == {**kept, **new}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_clients_do_not_set_them(edge: Any, make_post: Any, path: str, spelling: str) -> None:
    sent, left = SPELLINGS[spelling]

    async def scenario() -> None:
        await edge.start(pass_routes=("/v1/own",))
        upstream = await edge.worker(edge.reply())
        for body in ({**BODIES[path], **sent}, {**sent, **BODIES[path]}):
            assert status(await edge.exchange(make_post(json.dumps(body).encode(), path.encode()))) == 200
            assert json.loads(upstream.received[-1].body) == {**BODIES[path], **left}

    edge.run(scenario())


@pytest.mark.parametrize("name", [rb'"\u006bv_transfer_params"', rb'"kv_transfer\u005fparams"'])
def test_escaped_names_are_the_same_names(edge: Any, make_post: Any, name: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply())
        body = json.dumps(CHAT).encode().replace(b"{", b"{" + name + b': {"a": 1}, ', 1)
        assert status(await edge.exchange(make_post(body))) == 200
        assert json.loads(upstream.received[-1].body) == CHAT

    edge.run(scenario())


def test_large_bodies_and_conversations_that_return_are_stripped_too(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply())
        messages = [{"role": "user", "content": f"{i} " + "word " * 400} for i in range(60)]
        for count in (10, 12, 14, 50, 60):
            body = {"kv_transfer_params": REMOTE, **CHAT, "messages": messages[:count], "bootstrap_room": 5}
            assert status(await edge.exchange(make_post(json.dumps(body).encode()))) == 200
            assert json.loads(upstream.received[-1].body) == {**CHAT, "messages": messages[:count]}

    edge.run(scenario())


def test_a_form_s_fields_are_emptied(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply())
        parts = {"model": "tiny", "kv_transfer_params": json.dumps(REMOTE), "vllm_xargs": '{"rid": 1, "a": 2}'}
        form = "".join(f'--B\r\ncontent-disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in parts.items())
        lines = ["POST /v1/audio/transcriptions HTTP/1.1", "host: r", "content-type: multipart/form-data; boundary=B"]
        body = f"{form}--B--\r\n"
        head = "\r\n".join([*lines, "connection: close", f"content-length: {len(body)}"])
        assert status(await edge.exchange(f"{head}\r\n\r\n{body}".encode())) == 200
        received = upstream.received[-1].body
        assert b"remote_host" not in received
        assert b'{"a":2}' in received

    edge.run(scenario())


def test_headers_and_ids_that_name_workers_are_not_passed_on(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply())
        named = [f"{name}: 10.0.0.1:9".encode() for name in WORKER_HEADERS]
        evil = b"x___prefill_addr_10.0.0.1:9___decode_addr_10.0.0.2:9_1"
        answer = await edge.exchange(make_post(json.dumps(CHAT).encode(), headers=[*named, b"x-request-id: " + evil]))
        assert status(answer) == 200
        (received,) = upstream.received
        assert not any(received.all(name.encode()) for name in WORKER_HEADERS)
        assert received.all(b"x-request-id") != [evil]

    edge.run(scenario())


def test_named_fields_pass_for_trusted_clients(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(passed_fields=("kv_transfer_params", "x-prefiller-host-port"))
        upstream = await edge.worker(edge.reply())
        body = {**CHAT, "kv_transfer_params": REMOTE, "rid": "1"}
        headers = [b"x-prefiller-host-port: p:1", b"x-worker-instance-id: 3"]
        assert status(await edge.exchange(make_post(json.dumps(body).encode(), headers=headers))) == 200
        (received,) = upstream.received
        assert json.loads(received.body) == {**CHAT, "kv_transfer_params": REMOTE}
        assert received.all(b"x-prefiller-host-port") == [b"p:1"]
        assert not received.all(b"x-worker-instance-id")

    edge.run(scenario())


def test_every_name_of_the_list_is_a_field_s() -> None:
    assert all(name == name.lower() and "-" not in name for name in WORKER_FIELDS)
    assert all(name == name.lower() for name in WORKER_HEADERS)


@pytest.mark.parametrize("value", [b"1e999", b'"\xff"'], ids=["infinity", "utf8"])
@pytest.mark.parametrize("container", [b"vllm_xargs", b"extra_body"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_a_container_that_only_workers_could_decode_is_refused(
    edge: Any, make_post: Any, path: str, container: bytes, value: bytes
) -> None:
    """Python's decoder reads 1e999 as infinity, so a worker would find the fields beside it."""

    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply(), "w", engine="vllm")
        fields = b'{"x":' + value + b',"kv_transfer_params":{"remote_host":"evil"}}'
        raw = json.dumps(BODIES[path]).encode()[:-1] + b',"' + container + b'":' + fields + b"}"
        answer = await edge.exchange(make_post(raw, path.encode()))
        assert answer.startswith(b"HTTP/1.1 400")
        assert worker.received == []

    edge.run(scenario())
