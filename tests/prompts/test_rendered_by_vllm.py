"""What a real vLLM made of random chats, token by token: our reading of roles, parts, tools and thoughts is its."""

from __future__ import annotations

import gzip
import json
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts import RequestError, Tokenizer, parse_routing, template_environment
from prompts.routing import convert_source_to_chat
from tests.prompts import chat_templates

ALL = chat_templates.ALL

CAPTURE = Path(__file__).parents[1] / "golden" / "vllm" / "rendered-0.32.0" / "chats.json.gz"
CASES = json.loads(gzip.decompress(CAPTURE.read_bytes()))
AGENTS = json.loads(gzip.decompress((CAPTURE.parent / "agents.json.gz").read_bytes()))


class TheDay(datetime):
    """Of the capture: a template writes the date."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> TheDay:
        return cls(2026, 11, 22, tzinfo=tz)


@pytest.mark.parametrize("name", ALL)
def test_the_same_tokens(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, 4096, 4096)
    tokenizer = Tokenizer.load(tmp_path, chat_template=ALL[name])
    monkeypatch.setattr(template_environment, "datetime", TheDay)
    cases = [case for case in CASES if case["template"] == name]
    assert len(cases) > 20
    for case in cases:
        ids = tokenizer.encode_chat(parse_routing("/v1/chat/completions", json.dumps(case["body"]).encode()))
        assert tokenizer.decode(ids, False) == tokenizer.decode(case["tokens"], False), case["body"]
        assert list(ids) == case["tokens"], case["body"]


@pytest.mark.parametrize("name", ["gemma", "mistral", "qwen3"])
def test_the_same_tokens_of_the_traffic_of_agents(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, 4096, 4096)
    tokenizer = Tokenizer.load(tmp_path, chat_template=ALL[name])
    cases = [case for case in AGENTS if case["template"] == name]
    assert {case["path"] for case in cases if case["tokens"]} == {
        "/v1/chat/completions", "/v1/messages", "/v1/responses"
    }  # fmt: skip
    for case in cases:
        routing_request = parse_routing(case["path"], json.dumps(case["body"]).encode())
        try:
            chat_request = (
                routing_request
                if routing_request.source is None
                else convert_source_to_chat(routing_request, tokenizer.chat_template)
            )
            ids: list[int] | None = list(tokenizer.encode_chat(chat_request))
        except RequestError:
            ids = None
        assert ids == case["tokens"], case["body"]
