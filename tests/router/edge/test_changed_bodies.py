"""Bodies that the router changes hold each field once, and no spelling of a field passes by what the router changes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import RequestError
from prompts.routing import parse_routing
from router.prompting.body_fields import apply_edits, locate_fields
from router.prompting.encode import read_large_request
from router.tenancy.config import TenancyConfig
from router.tenancy.model_names import ModelNames

LONG = {"text": "x" * 100_000}
"""Makes a body one that a helper process reads."""
KEY = b"Authorization: Bearer one"


def decode_without_duplicates(data: bytes) -> dict[str, Any]:
    """Read a body as serde's derived structs do, which refuse a field that comes twice."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in found}) == len(found), f"a field twice: {[name for name, _ in found]}"
        return dict(found)

    fields: dict[str, Any] = json.loads(data, object_pairs_hook=pairs)
    return fields


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


VALUES = st.none() | st.integers(-5, 5) | st.text(max_size=5) | st.just([{"priority": '"}'}]) | st.just(-1.5e-3)


@given(
    st.dictionaries(st.text(max_size=3) | st.sampled_from(["priority", "cache_salt"]), VALUES),
    st.sampled_from(["", " ", "\r\n\t"]),
    st.sampled_from([None, 1, " "]),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_given_fields_win_and_the_rest_stays(fields: dict[str, Any], space: str, indent: Any, cuts: list[int]) -> None:
    data = (space + json.dumps(fields, indent=indent) + space).encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    new: dict[str, object] = {"cache_salt": 'x"}', "priority": 3}
    assert decode_without_duplicates(b"".join(apply_edits(pieces, locate_fields(data).make_edits(new)))) == {
        **fields,
        **new,
    }


@given(st.permutations(["a", "b", "c"]), st.sampled_from(["1", "12", '"1"', '{"a":1,"b":2}', "[1]"]))
def test_a_field_that_comes_twice_is_found(names: list[str], value: str) -> None:
    for other in ("1", "12", '"1"', '"1,"', '{"a":1,"c":[]}', "[1]", "null"):
        values = ["0", other, "2", value]
        data = "{" + ",".join(f'"{name}": {one}' for name, one in zip([*names, names[0]], values, strict=True)) + "}"
        with pytest.raises(RequestError, match=f"{names[0]}: the body has this field twice"):
            locate_fields(data.encode())
    with pytest.raises(RequestError, match=r"priority: .*twice"):
        locate_fields(rb'{"priority": 1, "x": {}, "\u0070riority": 1}')


def test_no_field_is_said_twice_to_workers(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", tenant_salts=True, api_keys=("one",), key_priorities=("one=5",))
        worker = await edge.worker(edge.reply())
        names = ModelNames(TenancyConfig(model_aliases=("gpt=tiny",), model_fallbacks=("gone=tiny",)))
        edge.dispatcher.reader.model_names = names
        for more in ({}, LONG):
            for sent in ({}, {"cache_salt": "x"}, {"priority": 0}, {"priority": "2"}, {"priority": None}):
                for model in ("gpt", "gone", "tiny"):
                    data = json.dumps({"model": model, "prompt": [1], **sent, **more}).encode()
                    assert status(await edge.exchange(make_post(data, b"/v1/completions", [KEY]))) == 200
                    got = decode_without_duplicates(worker.received[-1].body)
                    assert got["model"] == "tiny"
                    assert got["priority"] == 5
                    assert got["cache_salt"].endswith(sent.get("cache_salt", ""))
                    assert set(got) == {"model", "prompt", "cache_salt", "priority", *more}
        data = b'{"model":"gpt","prompt":[1],"model":"tiny"}'
        answer = await edge.exchange(make_post(data, b"/v1/completions", [KEY]))
        assert status(answer) == 400
        assert b"model: the body has this field twice" in answer

    edge.run(scenario())


def test_large_turns_stay_on_the_side_of_their_canary(edge: Any, make_post: Any) -> None:
    """Conversations without a session, of which a later turn is so large that a process reads it."""

    async def scenario() -> None:
        await edge.start(policy="kv")
        workers = {model: await edge.worker(edge.reply(), model=model) for model in ("tiny", "new")}
        edge.dispatcher.reader.model_names = ModelNames(TenancyConfig(model_canaries=("tiny=new:0.5",)))
        later_turns = [{"role": "assistant", "content": LONG["text"]}, {"role": "user", "content": "and now?"}]
        models_by_path: dict[str, set[str]] = {}
        for path, field in (("chat/completions", "messages"), ("messages", "messages"), ("responses", "input")):
            for number in range(12):
                turns = [{"role": "user", "content": f"question {number}"}]
                models = []
                for sent_turns in (turns, turns + later_turns):
                    data = json.dumps({"model": "tiny", "max_tokens": 16, field: sent_turns}).encode()
                    assert status(await edge.exchange(make_post(data, f"/v1/{path}".encode()))) == 200
                    models += [model for model, worker in workers.items() if worker.received]
                    for worker in workers.values():
                        worker.received.clear()
                assert models == [models[0]] * 2
                models_by_path.setdefault(path, set()).update(models)
        assert list(models_by_path.values()) == [{"tiny", "new"}] * 3

    edge.run(scenario())


PRIORITIES: list[tuple[str, int | None]] = [
    ("-5.0", 0), ('"-5"', 0), ('" -5 "', 0), ('"-5.0"', 0), ("-1180591620717411303424", 0), ("-9223372036854775809", 0),
    ('"-1_0"', 0), ("-0", 0), ("true", 1), ("7", 7), ('"7"', 7), ("null", 0), ("-0.5", None), ("[-5]", None),
    ('"high"', None), ("{}", None),
]  # fmt: skip


@pytest.mark.parametrize(("spelled", "read"), PRIORITIES)
def test_no_spelling_of_a_priority_passes_the_floor(edge: Any, make_post: Any, spelled: str, read: int | None) -> None:
    """The router counts what workers read (pydantic's rules), and a worker gets no number below the floor."""

    async def scenario() -> None:
        await edge.start(policy="kv")
        worker = await edge.worker(edge.reply())
        taken = []
        edge.proxy.on_end.append(lambda exchange: taken.append(exchange.route and exchange.route.priority))
        for path, fields in (
            (b"/v1/completions", {"prompt": [1]}), (b"/v1/completions", LONG),
            (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            (b"/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
            (b"/v1/responses", {"input": "a"}), (b"/v1/embeddings", {"input": "a"}),
        ):  # fmt: skip
            data = json.dumps({"model": "tiny", **fields}).encode()[:-1] + b', "priority": ' + spelled.encode() + b"}"
            answer = await edge.exchange(make_post(data, path))
            if read is None:
                assert status(answer) == 400
                assert b"priority: got" in answer
                continue
            assert status(answer) == 200, (path, answer)
            assert taken[-1] == read
            sent = decode_without_duplicates(worker.received[-1].body)["priority"]
            assert sent is None or int(sent) >= 0
        assert read is not None or not worker.received

    edge.run(scenario())


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        ("", "utf-8-sig"), ("", "utf-16"), ("", "utf-16-le"), ("", "utf-16-be"), ("", "utf-32"), ("", "utf-32-be"),
        ("\ufeff", "utf-16-be"), ("\ufeff", "utf-32-be"),
    ],
)  # fmt: skip
def test_no_encoding_passes_the_floor(edge: Any, make_post: Any, mark: str, encoding: str) -> None:
    """Python's workers read JSON in any of these."""

    async def scenario() -> None:
        await edge.start(policy="kv", pass_routes=("/v1/own",))
        await edge.worker(edge.reply())
        for path in (b"/v1/completions", b"/v1/messages", b"/v1/embeddings", b"/v1/own"):
            data = f'{mark} {{"model": "tiny", "prompt": [1], "priority": -5}}'.encode(encoding)
            answer = await edge.exchange(make_post(data, path))
            assert status(answer) == 400
            assert b"in UTF-8 without a byte order mark" in answer

    edge.run(scenario())


@pytest.mark.parametrize(
    ("fields", "stream", "most", "least"),
    [
        ({"stream": "true", "n": "3", "max_tokens": "5"}, True, 15, 0), ({"stream": 1, "max_tokens": 5.0}, True, 5, 0),
        ({"stream": "off", "n": 2.0, "max_completion_tokens": " 7 ", "max_tokens": 1}, False, 14, 0),
        ({"stream": "no", "max_tokens": "x", "min_tokens": "2"}, False, 0, 2), ({"stream": "maybe"}, False, 0, 0),
        ({"max_tokens": "4", "ignore_eos": "yes"}, False, 4, 4), ({"max_tokens": "1e3"}, False, 0, 0),
    ],
)  # fmt: skip
def test_numbers_and_flags_are_read_as_workers_read_them(
    fields: dict[str, Any], stream: bool, most: int, least: int
) -> None:
    data = json.dumps({"model": "tiny", "prompt": [1], **fields}).encode()
    parsed = parse_routing("/v1/completions", data)
    assert (parsed.stream, parsed.output_tokens_max, parsed.output_tokens_min) == (stream, most, least)
    large = read_large_request(data, "completion")
    assert (large.stream, large.output_tokens_max, large.output_tokens_min) == (stream, most, least)
