"""What an index predicts from the recorded event frames of a real engine, beside what the engine said it reused.

A capture is NAME.json.gz with NAME.frames.jsonl.gz beside it (tests/golden/README.md). Before request i the index has
seen the frames with `after_request` <= i, no more and no less. A request right after a reset that was announced late
cannot be right.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.index.protocol import HolderId, PrefixIndex, Scope


@dataclass(frozen=True)
class Row:
    """One request: what the index predicted and what the engine reported, in tokens."""

    capture: str
    request: int
    predicted_tokens: int
    cached_tokens: int


def load(capture: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the capture, its raw frames)."""
    frames_path = capture.with_name(capture.name.removesuffix(".json.gz") + ".frames.jsonl.gz")
    with gzip.open(capture) as file:
        capture_data = json.load(file)
    with gzip.open(frames_path) as file:
        frames = [json.loads(line) for line in file]
    return capture_data, frames


def scope_of(request: dict[str, Any], model: str, base_name: str | None) -> Scope:
    """A server capture names a LoRA as the body's model; a class capture has `lora` and `cache_salt` on top."""
    body = request.get("body")
    if not body:
        return Scope(model, request.get("cache_salt"), request.get("lora"))
    model_name = body.get("model")
    return Scope(
        model, body.get("cache_salt"), model_name if base_name is not None and model_name != base_name else None
    )


def cached_tokens(request: dict[str, Any]) -> int | None:
    """What the engine reused, or None where the request is none (a reset) or failed."""
    if "cached_tokens" in request:
        return request["cached_tokens"]
    usage = request.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0) if usage else None


def predict(capture: Path, index: PrefixIndex) -> Iterator[Row]:
    """Rows of one capture, in order."""
    capture_data, frames = load(capture)
    cmd, flag, model = capture_data.get("cmd") or [], "--served-model-name", f"model of {capture}"
    base_name = cmd[cmd.index(flag) + 1] if flag in cmd else None
    holders: dict[int, HolderId] = {}
    frame_count = 0
    for position, request in enumerate(capture_data["requests"]):
        while frame_count < len(frames) and frames[frame_count]["after_request"] <= position:
            frame = frames[frame_count]
            frame_count += 1
            if frame.get("restarted"):  # the recorder's connection broke: what was heard before means nothing any more
                for holder in holders.values():
                    index.clear(holder)
                continue
            rank_offset = int(frame.get("port_offset") or 0)  # ranks publish on ports of their own: each is a holder
            if rank_offset not in holders:
                holders[rank_offset] = index.add_holder(model)
            report = index.ingest(holders[rank_offset], bytes.fromhex(frame["frames"][-1]))
            assert not report.malformed, f"{capture}: frame {frame_count}: {report.malformed}"
        reported_tokens = cached_tokens(request)
        prompt = request.get("prompt_token_ids")
        if reported_tokens is None or not prompt:
            continue
        matches = index.match(prompt, scope_of(request, model, base_name))
        if "rank" in request:  # it was sent to one rank: what the others hold is of no use to it
            matches = [match for match in matches if match.holder == holders.get(request["rank"])]
        predicted_tokens = max((match.tokens for match in matches), default=0)
        yield Row(capture.name, position, predicted_tokens, reported_tokens)
