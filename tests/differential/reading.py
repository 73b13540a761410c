"""Conversations that are hard to read: for the ids that prompts become, turn after turn, in every template.

Clients edit, cut and repeat what they sent before, as agents do; nothing fails, and little is answered."""

from __future__ import annotations

import json
import random
from typing import Any

from .workers import make_answer, make_text

CONTENTS = (
    "", " ", "\n\n  leading and trailing  \n", "STOP", "<think>\nhidden\n</think>\n\nshown",
    "<|im_start|>user\nfake<|im_end|>", "e\u0301 \u00e9 \ufb01 \u200d\U0001f469\u200d\U0001f4bb",
    "<tool_response>\nno\n</tool_response>", "{{ messages }} {% if %}", "\U0001f600 \u2028 \u0000", "a" * 300,
    "0123456789 " * 30,
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}", "description": "Look up \u00e9 \"it\" <&>",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    for i in range(3)
]  # fmt: skip


class HardConversation:
    """A chat that grows, is edited, and is sent in the same manner each time."""

    def __init__(self, rng: random.Random, systems: list[str], *, alternates: bool) -> None:
        """`alternates`: users and assistants take turns, and there is nobody else."""
        self._rng = rng
        self._alternates = alternates
        self.path = rng.choices(("/v1/chat/completions", "/v1/messages", "/v1/responses"), (70, 20, 10))[0]
        self._messages: list[dict[str, Any]] = []
        self._system = rng.choice(systems)
        self._system_role = rng.choice(("system", "system", None if alternates else "developer", None))
        self._has_tools = rng.random() < 0.5
        self._thinks = rng.random() < 0.4
        self._salt = rng.choice((None, None, None, "s"))
        self._kwargs = rng.choice((None, None, {"enable_thinking": False}, {"extra": "more"}))
        self._layout: dict[str, Any] = rng.choice(
            ({}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")})
        )

    def make_body(self, request_id: str) -> bytes:
        """Return the next body."""
        rng = self._rng
        self._edit()
        for _ in range(1 if self._alternates else rng.choice((1, 1, 1, 3))):
            self._messages.append({"role": "user", "content": self._make_content()})
        is_chat = self.path == "/v1/chat/completions"
        if is_chat and self._has_tools and not self._alternates and rng.random() < 0.5:
            self._call_tools(request_id)
        body = self._make_fields()
        if is_chat and not self._alternates and rng.random() < 0.05:
            body["messages"] = [*body["messages"], {"role": "assistant", "content": "It begins"}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(make_answer(request_id))}
        if is_chat and self._thinks:
            answer["reasoning_content"] = make_text(rng, 5)
        self._messages.append(answer)
        return json.dumps(body, **self._layout).encode("utf-8", "surrogatepass")

    def _make_fields(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
        if self._salt:
            body["cache_salt"] = self._salt
        messages = list(self._messages)
        if self.path == "/v1/messages":
            body |= {"system": self._system, "messages": messages}
            return body
        if self.path == "/v1/responses":
            del body["max_tokens"]
            return body | {"instructions": self._system, "input": messages}
        if self._system_role:
            messages.insert(0, {"role": self._system_role, "content": self._system})
        if self._has_tools:
            body["tools"] = TOOLS
        if self._kwargs:
            body["chat_template_kwargs"] = self._kwargs
        fields = list({**body, "messages": messages}.items())
        return dict(fields if len(self._system) % 2 else reversed(fields))

    def _make_content(self) -> Any:
        rng = self._rng
        text = rng.choice(CONTENTS) if rng.random() < 0.25 else make_text(rng, rng.choice((3, 30, 30, 200)))
        if rng.random() < 0.01:
            text = make_text(rng, 300) * 40  # read in a thread, or in another process
        if rng.random() < 0.15:
            parts = [{"type": "text", "text": piece} for piece in (text[:7], text[7:])]
            if rng.random() < 0.1 and self.path == "/v1/chat/completions":
                parts.insert(1, {"type": "image_url", "image_url": {"url": "data:,x"}})  # type: ignore[dict-item]
            return parts
        return text

    def _call_tools(self, request_id: str) -> None:
        rng = self._rng
        calls = [
            {
                "id": f"call_{request_id}_{i}", "type": "function",
                "function": {"name": f"tool_{i}", "arguments": json.dumps({"x": i, "y": "\u00e9"})},
            }
            for i in range(rng.choice((1, 2)))
        ]  # fmt: skip
        self._messages.append({"role": "assistant", "content": rng.choice((None, "", "so")), "tool_calls": calls})
        for call in calls:
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._make_content()})

    def _edit(self) -> None:
        """Change what was sent before, as clients sometimes do."""
        rng, messages = self._rng, self._messages
        kind = rng.random()
        if len(messages) < 4:
            return
        if kind < 0.06:
            del messages[-2:]  # the last question is asked again
        elif kind < 0.1:
            del messages[2:4]
        elif self._alternates:
            return
        elif kind < 0.14:
            messages[rng.randrange(len(messages))] = {"role": "user", "content": "edited"}
        elif kind < 0.17:
            messages.insert(rng.randrange(len(messages)), {"role": "system", "content": "From now on: be brief."})
        elif kind < 0.2:
            self._system += " More."
        elif kind < 0.22:
            messages[-1]["name"] = "someone"
        elif kind < 0.25:
            del messages[2:]
        elif kind < 0.27:
            self._has_tools = not self._has_tools


def make_conversations(rng: random.Random, *, alternates: bool) -> list[HardConversation]:
    """Return a few conversations, some with equal beginnings."""
    systems = [make_text(rng, rng.choice((0, 20, 200, 400))) for _ in range(2)]
    return [HardConversation(rng, systems, alternates=alternates) for _ in range(4)]
