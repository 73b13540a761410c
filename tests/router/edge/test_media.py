"""Conversations with images stay where they began, at a price that load can outbid."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from core_by_hand import chosen_worker, make_core, request

from prompts.routing import parse_routing
from router.prompting.media import TOKENS_PER_MEDIUM, read_media

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 200
LONG = "data:image/png;base64," + "iVBORw0KGgo" * 9_000


def part(kind: str, image: str) -> dict[str, Any]:
    if kind == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image[22:]}}
    if kind == "responses":
        return {"type": "input_image", "image_url": image}
    return {"type": "image_url", "image_url": {"url": image}}


PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def body(kind: str, number: int, turns: int, image: str = IMAGE, system: bool = True) -> bytes:
    text = {"type": "input_text" if kind == "responses" else "text", "text": "What is it?"}
    turn_list: list[dict[str, Any]] = [{"role": "user", "content": [part(kind, f"{image}{number:04d}"), text]}]
    for turn in range(turns):
        turn_list.append({"role": "assistant", "content": f"answer {turn} " + "word " * 300})
        turn_list.append({"role": "user", "content": f"and then {turn}?"})
    if kind == "responses":
        return json.dumps({"model": "tiny", "instructions": "Look.", "input": turn_list}).encode()
    if kind == "messages":
        return json.dumps({"model": "tiny", "max_tokens": 5, "system": "Look.", "messages": turn_list}).encode()
    head = [{"role": "system", "content": "Look."}] if system else []
    return json.dumps({"model": "tiny", "max_tokens": 5, "messages": head + turn_list}).encode()


@pytest.mark.parametrize("kind", PATHS)
def test_turns_have_one_digest_and_conversations_another(kind: str) -> None:
    def read(data: bytes) -> Any:
        return read_media(parse_routing(PATHS[kind], data), data)

    turns = [read(body(kind, 1, turn)) for turn in range(4)]
    assert len({one.conversation_digest for one in turns}) == 1
    assert [one.estimated_tokens for one in turns] == sorted(one.estimated_tokens for one in turns)
    assert TOKENS_PER_MEDIUM <= turns[0].estimated_tokens < TOKENS_PER_MEDIUM + 100
    assert read(body(kind, 2, 1)).conversation_digest != turns[0].conversation_digest
    plain = json.dumps({"model": "m", "messages": [{"role": "user", "content": "an image"}], "input": "image"}).encode()
    assert read(plain) is None


def test_a_part_whose_type_is_no_text_is_no_medium() -> None:
    parts = [part("chat", IMAGE), *({"type": odd, "text": "x"} for odd in ([], {}, ["image_url"], None, 5))]
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
    found = read_media(parse_routing("/v1/chat/completions", data), data)
    assert found is not None
    assert found.estimated_tokens < 2 * TOKENS_PER_MEDIUM


def test_an_image_inside_of_a_tool_s_result_is_one() -> None:
    block = {"type": "tool_result", "tool_use_id": "t", "content": [part("messages", IMAGE)]}
    turns = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [block]}]
    data = json.dumps({"model": "m", "max_tokens": 1, "messages": turns}).encode()
    found = read_media(parse_routing("/v1/messages", data), data)
    assert found is not None
    assert found.estimated_tokens >= TOKENS_PER_MEDIUM


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("image", [IMAGE, LONG], ids=["short", "long"])
def test_turns_stay_on_one_worker(edge: Any, make_post: Any, kind: str, image: str) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        for _ in range(3):
            await edge.worker(edge.reply(), max_model_len=100_000)
        places: dict[int, set[str]] = {}
        for turn in range(4):
            for number in range(4):
                data = body(kind, number, turn, image)
                answer = await edge.exchange(make_post(data, PATHS[kind].encode()))
                assert answer.startswith(b"HTTP/1.1 200")
                place = answer.partition(b"x-blockcast-worker: ")[2].partition(b"\r\n")[0].decode()
                places.setdefault(number, set()).add(place)
        assert all(len(one) == 1 for one in places.values())
        assert len(set.union(*places.values())) > 1, "different conversations are spread"

    edge.run(scenario())


def test_load_outbids_a_home_and_a_worker_that_is_gone_is_none() -> None:
    core, _ = make_core("abc")
    now = 1.0
    home = chosen_worker(core.route(request("r0", None, prompt_tokens=3000, media_conversation=7), now))
    core.finish_request("r0", None, now)
    placed = core.explain(request("r1", None, prompt_tokens=3400, media_conversation=7), now)
    terms = next(one for one in placed.candidates if one.worker == home)  # type: ignore[union-attr]
    assert (placed.worker, terms.media_cached_tokens, terms.cached_tokens) == (home, 3000, 0)  # type: ignore[union-attr]
    other = core.explain(request("r1", None, prompt_tokens=3400, media_conversation=8), now)
    assert all(one.media_cached_tokens == 0 for one in other.candidates)  # type: ignore[union-attr]
    for number in range(40):
        core.route(request(f"busy{number}", None, prompt_tokens=20_000, worker=home), now)
    assert chosen_worker(core.route(request("r2", None, prompt_tokens=3400, media_conversation=7), now)) != home
    core.abort_request("r2", now)
    core.mark_worker_down(home, now, "gone")
    assert (
        chosen_worker(core.route(request("r3", None, prompt_tokens=3400, media_conversation=7), time.monotonic()))
        != home
    )
    core.check_invariants()
