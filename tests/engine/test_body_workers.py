"""Bodies are read alike wherever they are read, and one that takes too long or too much ends with its process."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.http import body_workers
from engine.http.api_keys import ApiKeys
from engine.http.body_workers import BodyReader
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import (
    ECHOED_BYTES_MAX,
    read_chat,
    read_completion,
    read_count,
    read_messages,
    read_response,
)
from engine.protocol.tokenize import read_detokenize, read_tokenize
from engine.structured_output.constraint import EncodedConstraint
from engine.tiny.model import Recipe, cached_model
from prompts import ChatTemplate, RequestError, Tokenizer

LIMITS = ModelLimits(max_model_len=50_000, vocab_size=2048)
LONG = "so it goes " * 7_000
MESSAGES = [{"role": "system", "content": LONG}, {"role": "assistant", "content": "and then"}]
BEFORE = json.dumps([{"role": "system", "content": "old"}, {"role": "user", "content": "q"}]).encode()
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def with_reader(use: Callable[[BodyReader], Awaitable[Any]], chat_template: str | None = None) -> Any:
    async def run() -> Any:
        folder = cached_model(Recipe())
        tokenizer = Tokenizer.load(folder, chat_template=chat_template)
        reader = BodyReader(tokenizer, LIMITS, str(folder), chat_template)
        try:
            return await use(reader)
        finally:
            reader.close()

    return asyncio.run(run())


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("odd_parsers")


@pytest.mark.parametrize(
    ("work", "body"),
    [
        (read_chat, {"messages": MESSAGES, "logit_bias": {"5": 1}, "stop": ["a"], "top_k": 3, "stream": True}),
        (read_chat, {"messages": MESSAGES, "echo": True, "tools": [{"function": {"name": "f"}}]}),
        (read_chat, {"messages": [*MESSAGES, {"role": 5}]}),
        (read_messages, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5, "stream": True}),
        (read_messages, {"messages": [{"role": "bob", "content": LONG}], "max_tokens": 5}),
        (partial(read_response, BEFORE), {"input": LONG, "instructions": "x", "tools": [TOOL, TOOL], "stop": "a"}),
        (partial(read_response, None), {"input": [{"role": "user", "content": LONG}, {"type": "nonsense"}]}),
        (read_completion, {"prompt": LONG, "echo": True, "logprobs": 2}),
        (read_completion, {"prompt": ["a", LONG], "n": 2, "seed": 4}),
        (read_completion, {"prompt": [7] * 40_000, "echo": True, "truncate_prompt_tokens": 9}),
        (read_completion, {"prompt": [7] * 60_000}),
        (read_completion, {"prompt": ["a"] * 30_000}),
        (read_tokenize, {"prompt": LONG, "return_token_strs": True}),
        (read_tokenize, {"messages": MESSAGES}),
        (read_detokenize, {"tokens": [70] * 30_000}),
        (read_detokenize, {"tokens": [70] * 30_000 + [2048]}),
    ],
)
def test_a_body_is_read_alike_wherever_it_is_read(work: Any, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(body).encode()
    assert len(data) > body_workers.THREAD_BYTES_MAX

    async def outcome(reader: BodyReader) -> Any:
        try:
            return await reader.read(work, data)
        except RequestError as error:
            return error.body(), error.status

    process_outcome = with_reader(outcome)
    monkeypatch.setattr(body_workers, "INLINE_BYTES_MAX", 1 << 30)
    monkeypatch.setattr(body_workers, "THREAD_BYTES_MAX", 1 << 30)
    assert with_reader(outcome) == process_outcome


def test_what_is_given_back_of_a_long_body_is_short() -> None:
    body = {
        "messages": MESSAGES,
        "chat_template_kwargs": {"a": [LONG]},
        "documents": [{"a": LONG}],
        "vllm_xargs": {"a": 1},
        "kv_transfer_params": {"a": [LONG], "remote_kv_source": {"a": LONG}},
    }
    reading = with_reader(lambda reader: reader.read(read_chat, json.dumps(body).encode()))
    assert len(repr(reading.body)) < 5_000
    assert reading.body.messages == [{"role": "assistant"}]


@pytest.mark.parametrize("name", ["sleeps", "takes_memory", "dies"])
def test_one_that_takes_too_much_ends_alone(odd: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(reader: BodyReader) -> None:
        data = b"x" * 100_000
        size, pid = await reader.read(odd.length, data)
        assert size == len(data)
        assert pid != os.getpid()
        monkeypatch.setattr(body_workers, "READ_S_MAX", 2.0 if name == "sleeps" else 30.0)
        bad = [reader.read(getattr(odd, name), data) for _ in range(3)]  # one more than there are processes
        for outcome in await asyncio.gather(*bad, return_exceptions=True):
            assert isinstance(outcome, RequestError)
            assert outcome.status == 400
        monkeypatch.setattr(body_workers, "READ_S_MAX", 30.0)
        assert await reader.read(odd.length, data) != (size, pid)
        assert len(reader._process_pool.processes) <= body_workers.PROCESS_COUNT

    with_reader(use)


def test_a_client_who_leaves_costs_no_process(odd: Any) -> None:
    async def use(reader: BodyReader) -> None:
        data = b"x" * 100_000
        _, pid = await reader.read(odd.length, data)
        leaving = asyncio.ensure_future(reader.read(odd.length, data))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(*(reader.read(odd.length, data) for _ in range(3)))
        assert pid in {process.child.pid for process in reader._process_pool.processes if process.child is not None}

    with_reader(use)


def make_grammar(lark: str) -> EncodedConstraint:
    return EncodedConstraint("x", json.dumps({"type": "grammar", "grammar": lark}).encode())


def test_clients_take_turns_at_the_processes(odd: Any, monkeypatch: Any) -> None:
    """One client's hundred large bodies, or slow grammars, kept all others waiting."""
    monkeypatch.setattr(body_workers, "PROCESS_COUNT", 1)  # so that bodies end in the order in which they begin

    async def use(reader: BodyReader) -> None:
        finished: list[str] = []

        async def read(tenant: str) -> None:
            await reader.read(odd.length, b"x" * 100_000, tenant=tenant)
            finished.append(tenant)

        async def check(tenant: str, number: int) -> None:
            await reader.check(make_grammar(f'start: "{number}"'), tenant)
            finished.append(tenant)

        await asyncio.gather(*[read("greedy") for _ in range(12)], read("other"))
        assert finished.index("other") <= 2
        finished.clear()
        await asyncio.gather(*[check("greedy", number) for number in range(8)], check("other", 8))
        assert finished.index("other") <= 2

    with_reader(use)


def test_checked_grammars_take_a_bounded_memory(monkeypatch: Any) -> None:
    """Of 4,096 grammars of a million characters each, 4 GB were kept."""
    monkeypatch.setattr(body_workers, "CHECKED_BYTES_MAX", 1_000)
    checked_numbers: list[str] = []

    async def check_in_process(reader: BodyReader, requested: EncodedConstraint, tenant: str) -> str:
        grammar: str = requested.decode().format["grammar"]
        checked_numbers.append(grammar[:1])
        return grammar

    monkeypatch.setattr(BodyReader, "_check_in_process", check_in_process)

    async def use(reader: BodyReader) -> None:
        for number in "012130":
            await reader.check(make_grammar(number + "🙂" * 75))
        assert sum(map(len, reader._checked_grammars.values())) == reader._checked_bytes == 903
        results = await asyncio.gather(*[reader.check(make_grammar("4" + "🙂" * 75)) for _ in range(3)])
        assert {result.lark_grammar for result in results} == {"4" + "🙂" * 75}
        assert len(reader._checked_grammars) == 3
        await reader.check(make_grammar("5" * 2_000))
        assert not reader._checked_grammars

    with_reader(use)
    assert "".join(checked_numbers[:5]) == "01230"


def test_a_format_is_held_as_small_as_it_was_sent() -> None:
    """A schema of 300 KB took 7 MB, in the server's process, until the answer was complete."""
    schema = {"enum": [{}] * 100_000}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    data = json.dumps({"messages": [{"role": "user", "content": "x"}], "response_format": form}).encode()
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    read_chat(data, tokenizer, LIMITS)
    tracemalloc.start()
    parsed_request = read_chat(data, tokenizer, LIMITS)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parsed_request.constraint is not None
    assert held_bytes < 2 * len(data)


@pytest.mark.parametrize("calls", ["qwen3_coder", "pythonic"])
def test_a_schema_of_which_no_grammar_can_be_written_costs_its_request_alone(calls: str) -> None:
    """Its grammar was written on the event loop, in 2^64 steps."""
    node = {"anyOf": [{"$ref": "#/$defs/node"}] * 2 + [{"type": "string"}]}
    parameters = {"$defs": {"node": node}, "properties": {"a": {"$ref": "#/$defs/node"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    limits = ModelLimits(max_model_len=1000, vocab_size=2048, call_format=calls)

    async def use(reader: BodyReader) -> None:
        requested = read_chat(json.dumps(body).encode(), tokenizer, limits).constraint
        assert requested is not None
        with pytest.raises(RequestError, match="takes more time or memory") as error_info:
            await reader.check(requested)
        assert (error_info.value.status, error_info.value.param) == (400, "tool_choice")
        assert (await reader.check(make_grammar('start: "a"'))).lark_grammar == 'start: "a"'

    with_reader(use)


def test_a_client_is_known_by_its_key_or_else_by_its_address() -> None:
    headers = {"Authorization": "Bearer k1"}
    assert ApiKeys(["k1", "k2"], None).get_tenant(headers, "10.0.0.1") == "k1"
    assert ApiKeys([], None).get_tenant(headers, "10.0.0.1") == "10.0.0.1"


def test_what_a_body_goes_on_from_counts_for_where_it_is_read(odd: Any) -> None:
    async def use(reader: BodyReader) -> list[int]:
        pids = [await reader.read(odd.length, b"{}", extra_bytes=extra_bytes) for extra_bytes in (0, 10_000, 10**7)]
        return [pid for _, pid in pids]

    inline_pid, thread_pid, apart_pid = with_reader(use)
    assert inline_pid == thread_pid == os.getpid() != apart_pid


def test_what_is_long_is_not_repeated_in_answers() -> None:
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    body = {"input": "hi", "instructions": "so it goes " * (ECHOED_BYTES_MAX // 11 + 1), "tools": [TOOL]}
    reading = read_response(None, json.dumps(body).encode(), tokenizer, LIMITS)
    assert reading.response_context is not None
    echoed_fields = json.loads(reading.response_context.echoed_fields)
    assert (echoed_fields["tools"], echoed_fields["instructions"]) == ([TOOL], None)
    assert json.loads(reading.response_context.messages)[0]["content"] == body["instructions"]


@pytest.mark.parametrize(
    ("work", "body", "param", "words"),
    [
        (read_chat, {"messages": [{"role": "user", "content": LONG}]}, "messages", "OpenAI"),
        (read_completion, {"prompt": LONG}, "prompt", "OpenAI"),
        (read_completion, {"prompt": ["a", LONG]}, "prompt[1]", "OpenAI"),
        (partial(read_response, None), {"input": LONG}, "input", "OpenAI"),
        (read_messages, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}, "messages", "Anthropic"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_so_in_the_words_that_clients_match(
    work: Any, body: Any, param: str, words: str
) -> None:
    """Claude Code compacts on the one, LiteLLM and OpenCode know the other."""
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    data = json.dumps(body).encode()
    count = max(map(len, work(data, tokenizer, LIMITS).prompts))
    with pytest.raises(RequestError) as error_info:
        work(data, tokenizer, ModelLimits(max_model_len=100, vocab_size=2048))
    error = error_info.value
    assert (error.status, error.param, error.code) == (400, param, "context_length_exceeded")
    if words == "Anthropic":
        match = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+) maximum", error.message)
        assert match is not None
        assert [int(number) for number in match.groups()] == [count, 100]
    else:
        start = f"This model's maximum context length is 100 tokens. However, you requested {count} tokens"
        assert error.message.startswith(start)


def test_an_image_for_a_model_that_reads_text_is_refused_in_the_words_that_clients_know() -> None:
    """Claude Code goes on without the image where it reads these first words."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    for content in ([image], [result]):
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}
        for work in (read_messages, read_count):
            with pytest.raises(RequestError, match=r"^Could not process image: messages\[0\]\.content\[0\] is one"):
                work(json.dumps(body).encode(), tokenizer, LIMITS)


def test_a_prefilled_answer_costs_what_the_same_chat_costs() -> None:
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    turns = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,"}]
    chat = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    expected = read_chat(json.dumps(chat).encode(), tokenizer, LIMITS).prompts
    body = json.dumps({"messages": turns, "max_tokens": 5}).encode()
    assert read_messages(body, tokenizer, LIMITS).prompts == expected
    assert json.loads(read_count(body, tokenizer, LIMITS)[1]) == {"input_tokens": len(expected[0])}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_image"}]}]},
         "input[1].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
         "input[0].output[0].type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": []}, "input"),
    ],
)  # fmt: skip
def test_errors_of_responses_name_their_own_fields(body: Any, param: str) -> None:
    tokenizer = Tokenizer.load(cached_model(Recipe()))
    with pytest.raises(RequestError) as error_info:
        read_response(None, json.dumps(body).encode(), tokenizer, LIMITS)
    assert error_info.value.param == param
    assert error_info.value.message.startswith(param)


def test_a_template_that_does_not_end_costs_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body made it run for ever on the event loop."""
    rounds = "{% for i in range(99999) %}"
    template = "{% if messages[0].content == 'loop' %}" + rounds * 2 + "{% endfor %}" * 2 + "{% endif %}{{ messages }}"
    monkeypatch.setattr(body_workers, "READ_S_MAX", 5.0)

    async def use(reader: BodyReader) -> None:
        looping, other = (
            json.dumps({"messages": [{"role": "user", "content": content}]}).encode() for content in ("loop", "other")
        )
        before = await reader.read(read_chat, other)
        with pytest.raises(RequestError, match="takes more time or memory"):
            await reader.read(read_chat, looping)
        assert (await reader.read(read_chat, other)).prompts == before.prompts

    with_reader(use, template)


SLOW_TEMPLATE = (
    "{% if messages[0].content.startswith('slow') %}" + "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    + "{% endif %}{{ messages[0].content }}"
)  # fmt: skip


@pytest.fixture
def render_limits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Limits of the renderings in this process. Bodies that are parsed in another process give their size."""
    limits_s: list[float] = []
    render = ChatTemplate.render

    def render_and_record(template: ChatTemplate, *args: Any, **fields: Any) -> str:
        limits_s.append(template.seconds_max)
        return render(template, *args, **fields)

    async def read_in_process(reader: BodyReader, parse: Any, data: bytes, tenant: str) -> int:
        return len(data)

    monkeypatch.setattr(ChatTemplate, "render", render_and_record)
    monkeypatch.setattr(BodyReader, "_read_in_process", read_in_process)
    monkeypatch.setattr(body_workers, "RENDER_S_MAX", 0.01)
    return limits_s


def make_chat(content: str, size: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "user": "x" * (size - 50)}).encode()


def test_a_slow_chat_sends_no_other_to_a_process(render_limits_s: list[float]) -> None:
    """All later bodies were parsed in processes, then those of an eighth of its size, for ten minutes."""

    async def use(reader: BodyReader) -> None:
        slow_chat = make_chat("slow", 4000)
        assert await reader.read(read_chat, slow_chat) == len(slow_chat)
        for size in (100, 4_000, 60_000):
            assert (await reader.read(read_chat, make_chat("quick", size))).prompts

    with_reader(use, SLOW_TEMPLATE)


def test_slow_chats_hold_the_event_loop_for_a_short_time_each(render_limits_s: list[float]) -> None:
    async def use(reader: BodyReader) -> None:
        for size in (60_000, 30_000, 7_000, 4_000, 900, 100) * 4:
            data = make_chat("slow", size)
            assert await reader.read(read_chat, data) == len(data)

    with_reader(use, SLOW_TEMPLATE)
    assert render_limits_s == [0.01] * 24
