"""`answered_tokens`: an answer that was begun elsewhere goes on as if it had never stopped."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from programs import call

pytestmark = [pytest.mark.live, pytest.mark.long]

PROMPT = "Give me some words, numbers and signs: "
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "seeded": {"temperature": 1.5, "seed": 7, "max_tokens": 40},
    "seeded among few": {"temperature": 1.2, "seed": -3, "top_k": 20, "top_p": 0.9, "max_tokens": 40},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 40},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3, "max_tokens": 40},
    "least": {"temperature": 1.5, "seed": 5, "min_tokens": 30, "max_tokens": 40, "stop": ["e", "a"]},
    "matching": {"temperature": 0, "structured_outputs": {"regex": "([a-z]{2,9} ){4,12}[.]"}, "max_tokens": 60},
    "stop string": {"temperature": 1.5, "seed": 11, "max_tokens": 60, "ignore_eos": True},
}


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer.read().decode().split("\n\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream_in_chunks(url: str, body: dict[str, Any], *, chunks: int) -> list[dict[str, Any]]:
    """Events of an answer in at least `chunks` chunks. A busy machine sends several tokens in one: then ask again."""
    for _ in range(10):
        answer = events(url, body)
        if sum(1 for event in answer if event["choices"]) >= chunks:
            return answer
    raise AssertionError(f"10 answers came in fewer than {chunks} chunks")


def join_events(chunks: list[dict[str, Any]]) -> tuple[list[tuple[str, list[int]]], str, dict[str, Any]]:
    """(text and tokens of each chunk, why it ended, usage)."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return [(choice["text"], choice["token_ids"]) for choice in choices], reasons[0], chunks[-1]["usage"]


def span_after(pieces: list[tuple[str, list[int]]], *, chunks: int) -> str:
    """Six characters that the answer does not hold before `chunks` of its chunks have been sent."""
    text = "".join(piece for piece, _ in pieces)
    start = len("".join(piece for piece, _ in pieces[:chunks]))
    return next(text[at : at + 6] for at in range(start, len(text) - 6) if text.find(text[at : at + 6]) == at)


@pytest.mark.parametrize("kind", BODIES)
def test_an_answer_goes_on_from_any_token(engine: Any, kind: str) -> None:
    url = engine.url + "/v1/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    body = {"model": "tiny", "prompt": PROMPT, **BODIES[kind], **options}
    if kind == "stop string":  # one that spans several tokens of this very answer
        pieces, _, _ = join_events(stream_in_chunks(url, body, chunks=12))
        body["stop"] = [span_after(pieces, chunks=6), "not in it"]
    full_events = stream_in_chunks(url, body, chunks=5)
    pieces, reason, usage = join_events(full_events)
    prompt = full_events[0]["choices"][0]["prompt_token_ids"]
    sent_ids: list[int] = []
    cuts = 0
    for at, (_, ids) in enumerate(pieces[:-1]):
        sent_ids += ids
        if not sent_ids or len(sent_ids) == len([i for _, piece_ids in pieces for i in piece_ids]):
            continue
        continued_events = events(url, {**body, "prompt": prompt + sent_ids, "answered_tokens": len(sent_ids)})
        continued_pieces, why, total = join_events(continued_events)
        assert "".join(text for text, _ in continued_pieces) == "".join(text for text, _ in pieces[at + 1 :]), (
            kind,
            sent_ids,
        )
        assert [i for _, token_ids in continued_pieces for i in token_ids] == [
            i for _, token_ids in pieces[at + 1 :] for i in token_ids
        ]
        assert why == reason
        assert {**total, "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
        assert continued_events[0]["choices"][0]["prompt_token_ids"] == prompt
        cuts += 1
    assert cuts >= 3


@pytest.mark.parametrize(
    "extra_fields", [{"answered_tokens": 3}, {"n": 2}, {"echo": True}, {"max_tokens": 2}, {"stop": ["a"]}]
)
def test_what_cannot_be_continued_is_refused(engine: Any, extra_fields: dict[str, Any]) -> None:
    status, _, answer = call(
        engine.url + "/v1/completions", {"prompt": [3, 4, 97], "answered_tokens": 2, **extra_fields}
    )
    if "stop" in extra_fields:  # of byte tokens, 'a' may be another id: what counts is that nothing breaks
        assert status in (200, 400)
    else:
        assert status == 400
        assert "answered_tokens" in answer["error"]["message"]
