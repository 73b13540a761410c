"""Bodies that `engine serve` takes as vLLM's documentation shows them, and wrong ones, of which it names the field."""

from __future__ import annotations

import gzip
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from programs import call

pytestmark = pytest.mark.live

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
]

DOCUMENTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
                              "max_tokens": 64, "presence_penalty": 1.5,
                              "chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/chat/completions", {"model": "tiny", "max_completion_tokens": 8,
                              "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]}),
    ("/v1/completions", {"model": "tiny", "prompt": "A robot may not injure a human being", "n": 2, "best_of": 2,
                         "logprobs": 3, "stop": ["\n"], "frequency_penalty": 0.1, "logit_bias": {"50": -100}}),
    ("/v1/completions", {"prompt": "Hello, my name is", "min_tokens": 3, "max_tokens": 5, "ignore_eos": True,
                         "repetition_penalty": 1.1, "min_p": 0.05, "stop_token_ids": [7],
                         "skip_special_tokens": False, "spaces_between_special_tokens": False}),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4, 5, 6]], "max_tokens": 2,
                         "return_token_ids": True, "priority": 1, "cache_salt": "tenant-1"}),
    ("/v1/completions", {"model": "tiny", "prompt": "x y z " * 40, "truncate_prompt_tokens": 10, "max_tokens": 2,
                         "prompt_logprobs": 1, "request_id": "mine-1"}),
    ("/v1/chat/completions", {"model": "tiny", "max_tokens": 4, "continue_final_message": True,
                              "add_generation_prompt": False, "echo": True,
                              "messages": [{"role": "user", "content": "Count"},
                                           {"role": "assistant", "content": "One, two,"}]}),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "tool_choice": "auto",
                              "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {
                                  "type": "object", "properties": {"location": {"type": "string"}}}}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), DOCUMENTED)
@pytest.mark.parametrize("stream", [False, True])
def test_documented_bodies_work_unchanged(engine: Any, path: str, body: dict[str, Any], stream: bool) -> None:
    if stream and ("prompt_logprobs" in body):
        pytest.skip("prompt_logprobs are not streamed, as in vLLM")
    if not stream:
        status, _, answer = call(engine.url + path, body)
        assert status == 200, answer
        assert answer["choices"]
        assert answer["usage"]["completion_tokens"] >= 1
        return
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(engine.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_what_only_vllm_answers_hold(engine: Any) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "return_token_ids": True, "prompt_logprobs": 2, "ignore_eos": True,
            "request_id": "abc", "return_tokens_as_token_ids": True, "logprobs": 1}  # fmt: skip
    _, _, answer = call(engine.url + "/v1/completions", body)
    assert answer["id"] == "cmpl-abc"
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert len(choice["token_ids"]) == 3
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["prompt_logprobs"][0] is None
    assert {"logprob", "rank", "decoded_token"} == set(choice["prompt_logprobs"][1]["2"])


@pytest.mark.parametrize(("side", "kept"), [("right", [1, 2]), ("left", [4, 5])])
def test_a_prompt_is_truncated_at_the_side_that_the_client_names(engine: Any, side: str, kept: list[int]) -> None:
    body = {"prompt": [1, 2, 3, 4, 5], "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    _, _, answer = call(engine.url + "/v1/completions", {**body, "max_tokens": 1})
    assert answer["choices"][0]["prompt_token_ids"] == kept


def test_echo_in_a_continued_chat(engine: Any) -> None:
    path, body = DOCUMENTED[8]
    _, _, answer = call(engine.url + path, {**body, "temperature": 0})
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"].startswith("One, two,")


RECORDED = Path(__file__).parents[1] / "golden" / "vllm" / "recorded-0.32.0" / "answers.json.gz"


def test_what_vllm_refuses_and_takes(start_engine: Any) -> None:
    """Every request of a recorded story gets the status that vLLM gave; a prompt that is too long is told the limit."""
    engine = start_engine("--max-model-len", "4096", "--served-model-name", "tiny")
    with gzip.open(RECORDED) as file:
        exchanges = [e for e in json.load(file)["exchanges"] if e["body"] is not None and not e["headers"]]
    assert len(exchanges) > 25
    answers = {e["label"]: call(engine.url + e["path"], e["body"]) for e in exchanges}
    expected = {e["label"]: e["status"] for e in exchanges}
    assert {label: answer[0] for label, answer in answers.items()} == expected
    for label in ("too long", "chat too long"):
        assert "4096" in answers[label][2]["error"]["message"]
    for name in ("chat", "chat continued"):
        our_answers = [answers[f"{name}, echo {echo}"][2] for echo in (False, True)]
        vllm_answers = [json.loads(e["answer"]) for e in exchanges if e["label"].startswith(f"{name}, echo")]
        plain, echoed_text, before, after = (
            a["choices"][0]["message"]["content"] for a in (*our_answers, *vllm_answers)
        )
        assert (echoed_text == plain) == (after == before)


# ---------------------------------------------------------------- wrong input

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
WRONG: list[tuple[str, Any, int, str | None]] = [
    ("/v1/chat/completions", b"{not json", 400, None),
    ("/v1/chat/completions", b"", 400, None),
    ("/v1/chat/completions", b"[]", 400, None),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    ("/v1/chat/completions", b"[" * 100_000, 400, None),
    ("/v1/chat/completions", {**CHAT, "model": "gpt-5"}, 404, "model"),
    ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"model": "tiny"}, 400, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400, "temperature"),
    ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("/v1/chat/completions", {**CHAT, "top_p": 0}, 400, "top_p"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": True}, 400, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "n": 0}, 400, "n"),
    ("/v1/chat/completions", {**CHAT, "n": 100_000}, 400, "n"),
    ("/v1/chat/completions", {**CHAT, "stream": "yes"}, 400, "stream"),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 5}, 400, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 50}, 400, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 1000}}, 400, "logit_bias[...]"),
    ("/v1/chat/completions", {**CHAT, "seed": 2**70}, 400, "seed"),
    ("/v1/chat/completions", {**CHAT, "min_tokens": 10}, 400, "min_tokens"),
    ("/v1/chat/completions", {**CHAT, "stop": ""}, 400, "stop"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"not": {}}}}}, 400, "response_format.json_schema.schema"),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex"),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"grammar": "x"}}, 400, "structured_outputs.grammar"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x " * 9000}]}, 400, "messages"),
    ("/v1/completions", {"model": "tiny"}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt[1]"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt[0]"),
    ("/v1/completions", {"prompt": [10_000_000]}, 400, "prompt[0]"),
    ("/v1/completions", {"prompt": "hi", "suffix": "x"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "hi", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "hi", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {**CHAT, "chat_template": "{% for i in range(3000) %}{{ i }}{% endfor %}"}, 400, "chat_template"),
    ("/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ("/detokenize", {"tokens": [10**8]}, 400, "tokens[0]"),
    ("/v1/nothing", {}, 404, None),
    ("/health", {}, 405, None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
def test_wrong_input_gets_an_error_that_names_the_field(
    engine: Any, path: str, body: Any, status: int, param: str | None
) -> None:
    response_status, headers, answer = call(engine.url + path, body)
    error = answer["error"]
    assert (response_status, error["param"]) == (status, param), error
    assert headers["Content-Type"] == "application/json"
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_messages_hold_the_numbers(engine: Any) -> None:
    _, _, answer = call(engine.url + "/v1/completions", {"prompt": [5] * 2048, "max_tokens": 1})
    message = answer["error"]["message"]
    assert message.startswith("This model's maximum context length is 2048 tokens. However, you requested 2048 tokens")
    assert answer["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_has_no_room_is_shorter_than_allowed(engine: Any) -> None:
    """As vLLM: what a client allows is no promise."""
    body = {"prompt": [5] * 2040, "max_tokens": 9, "ignore_eos": True}
    status, _, answer = call(engine.url + "/v1/completions", body)
    assert (status, answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (200, 8, "length")
    _, _, answer = call(engine.url + "/v1/completions", {"prompt": "x", "model": "other"})
    assert answer["error"]["code"] == "model_not_found"
