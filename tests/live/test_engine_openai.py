"""`engine serve` as its users see it: the official client, curl, the routes about itself, clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from programs import call, wait_until

from router.fleet.worker_responses import read_engine_sizes

pytestmark = pytest.mark.live

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
]
TEXT = "San Francisco is a city that many people visit, and the reasons they give for it are " * 8


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="EMPTY", max_retries=0, timeout=60) as client:
        yield client


def read_metrics(engine: Any) -> str:
    with urllib.request.urlopen(engine.url + "/metrics", timeout=10) as response:
        return str(response.read().decode())


def metric(engine: Any, name: str) -> float:
    for line in read_metrics(engine).splitlines():
        if line.startswith((name + "{", name + " ")):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


# ---------------------------------------------------------------- the official client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_spells_the_same_text(client: openai.OpenAI) -> None:
    full_answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, temperature=0)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=40, temperature=0, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == full_answer.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == full_answer.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert full_answer.usage is not None
    assert chunks[-1].usage.completion_tokens == full_answer.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "Never seen before: " + TEXT

    def read_cached_tokens() -> int:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert read_cached_tokens() == 0
    second_count = read_cached_tokens()
    assert second_count > 0
    assert second_count % 16 == 0


def test_several_prompts_and_samples(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["one", "two", "three"], n=2, max_tokens=4, temperature=0.9, seed=3
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    second_answer = client.completions.create(
        model="tiny", prompt=["one", "two", "three"], n=2, max_tokens=4, temperature=0.9, seed=3
    )
    assert [choice.text for choice in second_answer.choices] == [choice.text for choice in answer.choices]
    assert answer.choices[0].text != answer.choices[1].text


def test_samples_stream_side_by_side(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    finish_counts: dict[int, int] = {}
    for chunk in client.completions.create(model="tiny", prompt="x", n=3, max_tokens=8, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finish_counts[choice.index] = finish_counts.get(choice.index, 0) + (choice.finish_reason is not None)
    assert finish_counts == {0: 1, 1: 1, 2: 1}
    full_answer = client.completions.create(model="tiny", prompt="x", n=3, max_tokens=8, seed=1)
    assert [choice.text for choice in full_answer.choices] == [texts[i] for i in range(3)]


def test_token_id_prompts(client: openai.OpenAI, engine: Any) -> None:
    _, _, tokens = call(engine.url + "/tokenize", {"prompt": "San Francisco is a"})
    by_ids = client.completions.create(model="tiny", prompt=tokens["tokens"], max_tokens=6, temperature=0)
    by_text = client.completions.create(model="tiny", prompt="San Francisco is a", max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token


def test_completion_logprobs_with_echo_score_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="San Francisco is", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "San Francisco is"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == "San Francisco is"
    scores: list[Any] = list(choice.logprobs.token_logprobs or [])
    assert scores[0] is None
    assert all(score <= 0 for score in scores[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, engine: Any, include: bool, stream: bool) -> None:
    full_text = client.completions.create(model="tiny", prompt="Tell me", max_tokens=30, temperature=0).choices[0].text
    stop = full_text[len(full_text) // 2 : len(full_text) // 2 + 4]
    expected = full_text[: full_text.index(stop)] + (stop if include else "")
    extra = {"include_stop_str_in_output": include}
    answer: Any = client.completions.create(
        model="tiny", prompt="Tell me", max_tokens=30, temperature=0, stop=[stop], stream=stream, extra_body=extra
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop
    wait_until(lambda: metric(engine, "vllm:num_requests_running") == 0, "no request runs")


def test_continuous_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 5 or chunks[-2].choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_curl_streams(engine: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True})
    command = ["curl", "-sN", engine.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])


# ---------------------------------------------------------------- the rest of the API


def test_tokenize_and_detokenize(engine: Any) -> None:
    _, _, answer = call(engine.url + "/tokenize", {"prompt": "naïve café 🙂", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    _, _, detokenized_answer = call(engine.url + "/detokenize", {"tokens": answer["tokens"]})
    assert detokenized_answer["prompt"] == "naïve café 🙂"
    _, _, chat = call(engine.url + "/tokenize", {"messages": MESSAGES})
    _, _, completion = call(engine.url + "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    assert chat["count"] == completion["usage"]["prompt_tokens"]


def test_facts_of_the_cache(engine: Any) -> None:
    _, _, groups = call(engine.url + "/kv_cache/groups")
    assert groups == [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}]
    _, _, sources = call(engine.url + "/kv_event_sources")
    assert sources["0"]["endpoint"].startswith("tcp://127.0.0.1:")
    assert sources["0"]["block_size"] == 16
    assert sources["0"]["epoch"]


def test_reset_forgets_the_prefixes(engine: Any) -> None:
    body = {"prompt": "Reset me. " + TEXT, "max_tokens": 1}
    url = engine.url + "/v1/completions"
    call(url, body)
    assert call(url, body)[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert call(engine.url + "/reset_prefix_cache", b"")[0] == 200
    assert call(url, body)[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_have_vllms_names(engine: Any) -> None:
    """Each metric moves by what one answer of 64 tokens, to a prompt that is then cached, costs."""
    wait_until(lambda: metric(engine, "vllm:num_requests_running") == 0, "no request runs")
    success = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
    single_counts = (
        success, "vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count", "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
    )  # fmt: skip
    names = (*single_counts, "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
             "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
             "vllm:inter_token_latency_seconds_count")  # fmt: skip
    body = {"prompt": "Count me. " + TEXT, "max_tokens": 64, "ignore_eos": True}
    call(engine.url + "/v1/completions", body)
    before = {name: metric(engine, name) for name in names}
    usage = call(engine.url + "/v1/completions", body)[2]["usage"]
    increases = {name: metric(engine, name) - before[name] for name in names}
    assert {name: increases[name] for name in single_counts} == dict.fromkeys(single_counts, 1)
    assert increases["vllm:generation_tokens_total"] == 64
    # Some tokens may arrive together on a busy machine, but not all of so many.
    assert 1 <= increases["vllm:inter_token_latency_seconds_count"] <= 63
    assert (
        increases["vllm:prompt_tokens_total"] == increases["vllm:prefix_cache_queries_total"] == usage["prompt_tokens"]
    )
    assert increases["vllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert metric(engine, "vllm:num_requests_running") == metric(engine, "vllm:num_requests_waiting") == 0
    assert metric(engine, "vllm:num_preemptions_total") == 0
    assert 0 <= metric(engine, "vllm:kv_cache_usage_perc") < 1
    assert metric(engine, "vllm:cache_config_info") == 1
    sizes = read_engine_sizes(read_metrics(engine))
    assert sizes.max_num_seqs is not None
    assert sizes.step_tokens is not None
    assert 1 <= sizes.max_num_seqs <= sizes.step_tokens


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(engine: Any, stream: bool) -> None:
    wait_until(lambda: metric(engine, "vllm:num_requests_running") == 0, "no request runs")
    body = {"prompt": TEXT, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    address = urlsplit(engine.url)
    connection = http.client.HTTPConnection(str(address.hostname), int(address.port or 0), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        response = connection.getresponse()
        assert response.read(6) == b"data: "
    wait_until(lambda: metric(engine, "vllm:num_requests_running") == 1, "the request runs")
    assert metric(engine, "vllm:kv_cache_usage_perc") > 0
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    if stream:
        response.close()
    wait_until(lambda: metric(engine, "vllm:num_requests_running") == 0, "no request runs")
    wait_until(lambda: metric(engine, "vllm:kv_cache_usage_perc") == 0, "its blocks are free")


@pytest.mark.long
def test_a_slow_reader_stalls_nobody(engine: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4}
    address = urlsplit(engine.url)
    with socket.create_connection((address.hostname, address.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        data = json.dumps(body).encode()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        wait_until(lambda: metric(engine, "vllm:num_requests_running") == 4, "four sequences run")
        status, _, answer = call(engine.url + "/v1/completions", {"prompt": "y", "max_tokens": 5})
        assert (status, answer["object"]) == (200, "text_completion")
        wait_until(lambda: metric(engine, "vllm:num_requests_running") == 0, "no request runs", 60)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        slow.settimeout(30)
        received_bytes = b""
        while not received_bytes.endswith(b"0\r\n\r\n"):
            received_bytes += slow.recv(65536)
        assert b"data: [DONE]" in received_bytes
        assert received_bytes.count(b"data: ") < 6000, "what was not read in time is merged"
