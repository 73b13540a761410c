"""Bodies of the three APIs shaped like the traffic of coding agents, drawn from a seed; none is copied from anybody.

One `Agent` is a session: a long system prompt that changes a line with every request, tools, turns of thinking, calls
and results, sub-agents, pictures. Every body is a new request of that session, or of a new one.
"""

from __future__ import annotations

import json
import random
from typing import Any

Body = dict[str, Any]
WORDS = [
    "the", "file", "path", "search", "read", "write", "edit", "list", "test", "run", "error", "line", "return", "value",
    "function", "class", "cache", "router", "block", "token", "because", "however", "\u00e9t\u00e9", "\u4f60\u597d",
    "\U0001f642", "<tag>", "{json}",
]  # fmt: skip
TOOL_NAMES = ("read_file", "run_command", "search", "edit", "list_files")


class Agent:
    """The next body of a session, in one of the three APIs."""

    def __init__(self, rng: random.Random, model: str, chars_max: int = 20_000) -> None:
        self.rng, self.model, self.chars_max = rng, model, chars_max
        self.system = self.words(120)
        self.tools = [self.tool(name) for name in rng.sample(TOOL_NAMES, rng.randrange(1, 5))]
        self.turns: list[Body] = []
        """In Anthropic's form."""

    def words(self, count: int) -> str:
        rng = self.rng
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, count + 1)))
        return text + rng.choice(("", "", ".", "\n", "\n\n", "  "))

    def value(self, depth: int = 0) -> Any:
        rng = self.rng
        simple = (rng.randrange(-5, 10**6), rng.random() * 100, True, None, self.words(5), "", 1.0, 'quo"te\\', "<&>'")
        if depth > 2 or rng.random() < 0.6:
            return rng.choice(simple)
        if rng.random() < 0.5:
            return [self.value(depth + 1) for _ in range(rng.randrange(3))]
        return {rng.choice(WORDS): self.value(depth + 1) for _ in range(rng.randrange(3))}

    def tool(self, name: str) -> Body:
        rng = self.rng
        properties = {rng.choice(WORDS): {"type": "string", "description": self.words(6)} for _ in range(3)}
        schema: Body = {"properties": properties, "required": list(properties)[:1]}
        schema = {"type": "object", **schema} if rng.random() < 0.7 else schema
        made: Body = {"name": name, "input_schema": schema}
        if rng.random() < 0.8:
            made["description"] = self.words(30)
        if rng.random() < 0.2:
            made["cache_control"] = {"type": "ephemeral"}
        if rng.random() < 0.2:
            made["strict"] = rng.random() < 0.5
        return made

    # Turns ------------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """What the session's next request has more than its last."""
        rng = self.rng
        if sum(len(str(turn)) for turn in self.turns) > self.chars_max:
            self.turns = []
        if not self.turns or rng.random() < 0.3:
            self.turns.append({"role": "user", "content": self.asked()})
            return
        calls = [
            {"type": "tool_use", "id": f"toolu_{rng.randrange(10**9)}", "name": rng.choice(self.tools)["name"],
             "input": {rng.choice(WORDS): self.value() for _ in range(rng.randrange(4))}}
            for _ in range(rng.randrange(3))
        ]  # fmt: skip
        said: list[Body] = []
        if rng.random() < 0.5:
            said.append({"type": "thinking", "thinking": self.words(30), "signature": "s"})
        if rng.random() < 0.7 or not calls:
            said.append({"type": "text", "text": self.words(40)})
        if calls and rng.random() < 0.3:
            said += [calls[0], {"type": "thinking", "thinking": self.words(10), "signature": "t"}, *calls[1:]]
        else:
            said += calls
        self.turns.append({"role": "assistant", "content": said})
        results: list[Body] = [self.result(call["id"]) for call in calls]
        if not results or rng.random() < 0.4:
            results.append({"type": "text", "text": self.words(20)})
        self.turns.append({"role": "user", "content": results})

    def asked(self) -> Any:
        if self.rng.random() < 0.5:
            return self.words(60)
        return [{"type": "text", "text": self.words(30)} for _ in range(self.rng.randrange(1, 4))]

    def result(self, call_id: str) -> Body:
        rng = self.rng
        content: Any = self.words(80)
        if rng.random() < 0.5:
            content = [{"type": "text", "text": self.words(40)} for _ in range(rng.randrange(3))]
        made: Body = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        if rng.random() < 0.1:
            del made["content"]
        if rng.random() < 0.2:
            made["is_error"] = rng.random() < 0.5
        return made

    # Bodies -----------------------------------------------------------------------------------------------------------

    def messages(self, **more: Any) -> Body:
        """Of `/v1/messages`."""
        rng = self.rng
        system: Any = self.system
        if rng.random() < 0.6:
            line = f"x-anthropic-billing-header: cch={rng.randrange(10**9)};"
            system = [{"type": "text", "text": line}] * (rng.random() < 0.7)
            system += [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}]
        elif rng.random() < 0.3:
            system = f"x-anthropic-billing-header: {rng.randrange(99)}\n{self.system}"
        turns = list(self.turns)
        if rng.random() < 0.3:
            reminder: Any = rng.choice(
                (self.words(9), [{"type": "text", "text": self.words(9)}], "x-anthropic-billing-header")
            )
            turns.insert(rng.randrange(len(turns) + 1), {"role": "system", "content": reminder})
        if rng.random() < 0.1:
            named = {"type": "tool_reference", "name": self.tools[0]["name"]}
            change = {"type": rng.choice(("tool_addition", "tool_removal")), "tool": named}
            turns.append({"role": "system", "content": [change]})
        body: Body = {"model": self.model, "max_tokens": 6, "messages": turns, "temperature": 0}
        if rng.random() < 0.9:
            body["system"] = system
        if rng.random() < 0.8:
            body["tools"] = self.tools
            if rng.random() < 0.3:
                body["tool_choice"] = {"type": rng.choice(("auto", "none"))}
        if rng.random() < 0.3:
            body["thinking"] = rng.choice(({"type": "disabled"}, {"type": "adaptive"}))
        if rng.random() < 0.2:
            body["output_config"] = {"effort": rng.choice(("low", "high", "max"))}
        if rng.random() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        return {**body, **more}

    def chat(self, **more: Any) -> Body:
        """The same session as a chat."""
        messages: list[Body] = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            blocks = turn["content"]
            if isinstance(blocks, str):
                messages.append(turn)
                continue
            for block in blocks:
                if block["type"] == "tool_result":
                    content = block.get("content") or ""
                    messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
            texts = [block for block in blocks if block["type"] == "text"]
            calls = [
                {"id": block["id"], "type": "function",
                 "function": {"name": block["name"], "arguments": json.dumps(block["input"])}}
                for block in blocks if block["type"] == "tool_use"
            ]  # fmt: skip
            thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
            made: Body = {"role": turn["role"]}
            if turn["role"] == "assistant" or texts:
                made["content"] = texts or None
                made |= {"tool_calls": calls} if calls else {}
                made |= {"reasoning": thoughts} if thoughts else {}
                messages.append(made)
        tools = [
            {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in self.tools
        ]
        return {"model": self.model, "messages": messages, "tools": tools, "max_tokens": 6, "temperature": 0, **more}

    def responses(self, **more: Any) -> Body:
        """Of `/v1/responses`."""
        rng = self.rng
        body: Body = {"model": self.model, "max_output_tokens": 6, "temperature": 0, "store": False}
        body["input"] = self.items()
        if len(self.turns) == 1 and isinstance(self.turns[0]["content"], str) and rng.random() < 0.7:
            body["input"] = self.turns[0]["content"]
        if rng.random() < 0.8:
            body["instructions"] = self.system
        if rng.random() < 0.8:
            body["tools"] = [self.response_tool(tool) for tool in self.tools]
            if rng.random() < 0.2:
                body["tools"].append({"type": "web_search_preview"})
            if rng.random() < 0.3:
                body["tool_choice"] = rng.choice(("auto", "none"))
        if rng.random() < 0.3:
            body["reasoning"] = {"effort": rng.choice(("none", "low", "high"))}
        if rng.random() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        if rng.random() < 0.5:
            body["prompt_cache_key"] = "k"
        return {**body, **more}

    def response_tool(self, tool: Body) -> Body:
        rng = self.rng
        made = {"type": "function", "name": tool["name"], "parameters": tool["input_schema"]}
        made |= {"description": tool["description"]} if "description" in tool else {}
        made |= {"strict": rng.choice((True, False, None))} if rng.random() < 0.6 else {}
        if rng.random() < 0.1:
            return {"type": "namespace", "name": "space", "description": "d", "tools": [made]}
        if rng.random() < 0.1:
            return {"type": "custom", "name": tool["name"], "description": "free text"}
        return made

    def items(self) -> list[Body]:
        rng, made = self.rng, list[Body]()
        if rng.random() < 0.3:
            made.append({"role": rng.choice(("developer", "system")), "content": self.words(20)})
        for turn in self.turns:
            blocks = turn["content"]
            if isinstance(blocks, str):
                made.append({"role": "user", "content": blocks, **({"type": "message"} if rng.random() < 0.5 else {})})
                continue
            for block in blocks:
                made.append(self.item(turn["role"], block))
        return made

    def item(self, role: str, block: Body) -> Body:
        rng = self.rng
        if block["type"] == "tool_use":
            return {"type": "function_call", "call_id": block["id"], "name": block["name"],
                    "arguments": json.dumps(block["input"])}  # fmt: skip
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            if isinstance(content, list):
                content = [{"type": "input_text", "text": part["text"]} for part in content]
            return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": content}
        if block["type"] == "thinking":
            thought = {"type": "reasoning_text", "text": block["thinking"]}
            return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]}
        if role == "user":
            return {"role": "user", "content": [{"type": "input_text", "text": block["text"]}]}
        content = [{"type": "output_text", "text": block["text"]}]
        whole = {"id": "msg_1", "status": "completed"} if rng.random() < 0.5 else {}
        if rng.random() < 0.2:
            return {"role": "assistant", "content": block["text"]}
        return {"type": "message", "role": "assistant", "content": content, **whole}


def bodies(count: int, model: str, seed: int, *, chars_max: int = 20_000) -> list[tuple[str, Body]]:
    """(path, body), of a few sessions that take turns."""
    rng = random.Random(seed)
    agents = [Agent(rng, model, chars_max) for _ in range(4)]
    made: list[tuple[str, Body]] = []
    for _ in range(count):
        if rng.random() < 0.03:
            agents[rng.randrange(4)] = Agent(rng, model, chars_max)
        agent = rng.choice(agents)
        agent.go_on()
        kind = rng.randrange(5)
        if kind == 0:
            made.append(("/v1/chat/completions", agent.chat()))
        else:
            made.append(("/v1/messages", agent.messages()) if kind < 3 else ("/v1/responses", agent.responses()))
    return made
