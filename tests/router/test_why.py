"""Why a turn missed: conversations with planted causes of every class, real template, tokenizer, core and index."""

from __future__ import annotations

import json
import random
import runpy
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.miss_reasons.lockstep import BothAnalyzers
from reference.miss_reasons.naive import check_adds_up

from engine.tiny.tokenizer import cached_tokenizer
from events.codec import encode_batch
from events.types import BlockRemoved, BlockStored, EventBatch
from prompts.routing import RoutingRequest, parse_routing
from prompts.tokenizer import Tokenizer
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.messages import Forward, ReportedUsage, RouteRequest
from router.decide.recent_prompts import CHUNK_TOKENS
from router.decide.workers import ServedModel, WorkerSpec
from router.edge.miss_reasons_recorder import FactsAdapter
from router.index import make_index
from router.index.protocol import Scope
from router.miss_reasons.attribution import Placement, RemovedPrefix, find_first_missing_token
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.differences import classify_difference, find_added_system_prompt
from router.miss_reasons.explanation import GROUPS, NO_LOSS, MissExplanation
from router.miss_reasons.prompt_history import AnalyzedPrompt
from router.prompting.outline import HAS_THOUGHTS, Outline, _fingerprint_message, outline_chat
from router.prompting.sessions import digest_first_user_message

BLOCK = 16
CHUNK = CHUNK_TOKENS
QWEN3 = runpy.run_path(str(Path(__file__).parents[1] / "prompts" / "chat_templates.py"))["QWEN3"]
TEMPLATE = "{% if effort is defined %}<|im_start|>system\nReasoning effort: {{ effort }}<|im_end|>\n{% endif %}" + QWEN3
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name} " * 6, "parameters": {"a": 1, "b": 2}}}
    for name in ("read_file", "write_file", "run")
]
WORDS = ("the quick brown fox jumps over a lazy dog while seven wizards mix potions of jade and quartz").split()  # noqa: SIM905
END = "<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(cached_tokenizer(), TEMPLATE)


Planted = tuple[MissExplanation, str, int, int | None]
"""(what was said, the reason that was planted, its position, the message it is in)."""


class Fleet:
    """Two workers whose caches hold what they were sent until a test takes it away, behind the real core."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer, self.rng, self.now = tokenizer, rng, 0.0
        self.core = RouterCore(make_index(seed=7), CoreConfig(pin_grace_s=0.25))
        models = (ServedModel("m", "m"), ServedModel("tuned", "m", "tuned"))
        for name in "ab":
            self.core.add_worker(WorkerSpec(name, f"http://{name}", models, block_size=BLOCK), 0.0)
        self.analyzer = BothAnalyzers(MissReasonsConfig(), self.core.index.count_common_tokens)
        self.block_names_by_worker: dict[str, dict[tuple[int, ...], int]] = {"a": {}, "b": {}}
        self.count = self.names = 0

    def make_request(
        self, body: dict[str, Any], session: str | None = None, **changes: Any
    ) -> tuple[RouteRequest, RoutingRequest]:
        routing_request = parse_routing("/v1/chat/completions", json.dumps(body).encode())
        ids = array("I", self.tokenizer.encode(self.tokenizer.render_chat_text(routing_request), False))
        self.count += 1
        scope = Scope("m", routing_request.cache_salt, "tuned" if routing_request.model == "tuned" else None)
        route = RouteRequest(
            f"r{self.count}", routing_request.model or "m", scope, ids, len(ids), session=session, **changes
        )
        return route, routing_request

    def send(
        self,
        body: dict[str, Any],
        session: str | None = None,
        answer: str = "",
        *,
        sampled_ids: list[int] | None = None,
        announce: bool = True,
        gap: float = 10.0,
        report_cached: Callable[[int], int] = lambda cached_tokens: cached_tokens,
        compare: bool = True,
        **changes: Any,
    ) -> MissExplanation:
        """One request, answered with `answer`, of which `sampled` are the ids unless the encoder's are meant."""
        self.now += gap
        self.core.tick(self.now)
        route, routing_request = self.make_request(body, session, **changes)
        placement = self.core.route(route, self.now)
        assert isinstance(placement, Forward)
        decision = placement.decision
        prompt = self.prompt(route, routing_request)
        facts = FactsAdapter(self.core, lambda _: self.tokenizer)
        removal = self.core.index.find_lost_blocks(
            prompt.token_ids, route.scope, find_first_missing_token(decision), BLOCK
        )
        removed_prefix = None if removal is None else RemovedPrefix(removal[0], self.holders[removal[1]], removal[2])
        known = Placement(decision, removed_prefix, BLOCK, self.now, 0.0)
        if compare:
            explanation = self.analyzer.explain(prompt, known, facts)
            record = self.analyzer.record_compared(prompt, known, facts)
            assert explanation == self.analyzer.explanation_of(record)
        else:
            record = self.analyzer.record_placed(prompt, known)
        ids = list(route.token_ids or ())
        answer_ids = self.tokenizer.encode(answer, False) if sampled_ids is None else sampled_ids
        if announce:
            self.store(decision.worker, [*ids, *answer_ids][:-1], route.scope)
        usage = ReportedUsage(len(ids), report_cached(decision.predicted_cached_tokens), len(answer_ids))
        self.core.finish_request(route.request_id, usage, self.now + 0.5)
        self.analyzer.record_end(record, usage, len(answer_ids), self.now + 0.5)
        self.now += 0.5
        why = self.analyzer.explanation_of(record)
        check_adds_up(why)
        return why

    @property
    def holders(self) -> dict[int, str]:
        return {worker.holders[0]: name for name, worker in self.core.workers.items()}

    def prompt(self, route: RouteRequest, routing_request: RoutingRequest) -> AnalyzedPrompt:
        ids: Any = route.token_ids
        keys = self.core.index.chunk_keys(ids, route.scope, CHUNK)
        return AnalyzedPrompt(
            route.request_id, route, ids, outline_chat(routing_request), keys,
            digest_first_user_message(routing_request) if route.session is None else None,
        )  # fmt: skip

    def store(self, worker: str, ids: list[int], scope: Scope) -> None:
        names, parent = [], None
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = (hash(scope), *ids[:end])
            if key not in self.block_names_by_worker[worker]:
                self.names += 1
                self.block_names_by_worker[worker][key] = self.names
                names.append((self.block_names_by_worker[worker][key], parent, ids[end - BLOCK : end]))
            parent = self.block_names_by_worker[worker][key]
        events = [BlockStored([n], p, t, BLOCK, None, "GPU", scope.lora, cache_salt=scope.salt) for n, p, t in names]
        self.publish(worker, *events)

    def resident(self, ids: list[int], scope: Scope) -> int:
        """Of the prompt, at the worker that holds most of it."""
        ends = range(BLOCK, len(ids), BLOCK)
        are_resident = [
            [(hash(scope), *ids[:end]) in block_names for end in ends] + [False]
            for block_names in self.block_names_by_worker.values()
        ]
        return BLOCK * max(block_names.index(False) for block_names in are_resident)

    def remove(self, worker: str, ids: list[int], scope: Scope, keep: int) -> None:
        ends = range(len(ids) // BLOCK * BLOCK, keep, -BLOCK)
        removed_names = [self.block_names_by_worker[worker].pop((hash(scope), *ids[:end]), None) for end in ends]
        self.publish(worker, BlockRemoved([name for name in removed_names if name is not None], "GPU"))

    def publish(self, worker: str, *events: Any) -> None:
        holder = self.core.workers[worker].holders[0]
        report = self.core.index.ingest(holder, encode_batch(EventBatch(0.0, list(events))), self.now)
        assert not report.malformed


class Conversation:
    """A session with a system prompt, tools and thoughts, two turns old."""

    def __init__(self, fleet: Fleet, *, tools: bool = False, loop: bool = False) -> None:
        self.fleet, self.rng = fleet, fleet.rng
        self.name = f"s{fleet.rng.getrandbits(60)}"
        self.body: dict[str, Any] = {"model": "m", "messages": [{"role": "system", "content": self.system()}]}
        if tools:
            self.body["tools"] = fleet.rng.sample(TOOLS, 3)
        self.user()
        self.shared_tokens = fleet.resident(self.ids(), Scope("m"))
        self.opening = self.turn(self.words(40))
        self.user()
        if loop:
            for number in range(2):
                self.call(number)
        else:
            self.turn(self.words(40))

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count)) + "."

    def system(self) -> str:
        return f"You help. {self.words(90)}\nx-anthropic-billing-header: cch={self.words(3)}\n{self.words(30)}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.body["messages"]

    def user(self) -> None:
        self.messages.append({"role": "user", "content": self.words(self.rng.randrange(20, 60))})

    def turn(self, answer: str, *, thinking: str = "", calls: Any = None, **changes: Any) -> MissExplanation:
        """Send it, and append the answer to its messages as a client does."""
        text = f"<think>\n{thinking}\n</think>\n\n{answer}" if thinking else answer
        for call in calls or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]))
            text += f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
        why = self.send(text + "<|im_end|>", **changes)
        message = {"role": "assistant", "content": answer}
        self.messages.append({**message, **({"reasoning_content": thinking} if thinking else {}),
                              **({"tool_calls": calls} if calls else {})})  # fmt: skip
        return why

    def send(self, answer: str = "", **changes: Any) -> MissExplanation:
        self.last = self.ids()
        return self.fleet.send(self.body, self.name, answer, **changes)

    def call(self, number: int) -> None:
        arguments = json.dumps({"path": self.words(5), "limit": self.rng.randrange(99), "deep": {"x": 1, "a": [2]}})
        calls = [{"id": f"c{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}]
        self.turn("Let me look.", thinking=self.words(20), calls=calls)
        self.messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": self.words(30)})

    def ids(self) -> list[int]:
        return list(self.fleet.make_request(self.body)[0].token_ids or ())

    def send_under(self, reason: str) -> Planted:
        """The next turn, under another key: another conversation may have left its first words there."""
        route, _ = self.fleet.make_request(self.body)
        position = self.fleet.resident(list(route.token_ids or ()), route.scope)
        return self.send(), reason, position, None


def common_prefix_length(ids: list[int], other_ids: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(ids, other_ids)) if x != y), min(len(ids), len(other_ids)))


def send_changed(conversation: Conversation, reason: str, message: int | None = None) -> Planted:
    """The next turn, which the client changed: its ids leave those of the last prompt."""
    position = common_prefix_length(conversation.last, conversation.ids())
    return conversation.send(), reason, position, message


def new_session(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    return conversation.opening, "new_session", conversation.shared_tokens, None


def new_text(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    answer_tokens = len(fleet.tokenizer.encode(conversation.messages[-1]["content"] + "<|im_end|>", False))
    position = len(conversation.last) + answer_tokens - 1
    conversation.user()
    return conversation.send(), "new_text", position, None


def billing_line(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    before, _, after_it = conversation.messages[0]["content"].partition("cch=")
    conversation.messages[0]["content"] = f"{before}cch={conversation.words(3)}\n" + after_it.partition("\n")[2]
    conversation.user()
    return send_changed(conversation, "billing_line", 0)


def thinking_of_earlier_turns(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet, loop=True)
    conversation.turn(conversation.words(30), thinking=conversation.words(20))
    conversation.user()
    return send_changed(conversation, "thinking_dropped", 4)


def thinking_that_the_client_drops(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet, loop=True)
    del conversation.messages[4]["reasoning_content"]
    return send_changed(conversation, "thinking_dropped", 4)


def tool_arguments(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet, loop=True)
    function = conversation.messages[4]["tool_calls"][0]["function"]
    arguments = json.loads(function["arguments"])
    conversation.messages[4]["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
    return send_changed(conversation, "tool_arguments", 4)


def tools_in_another_order(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet, tools=True)
    conversation.body["tools"] = conversation.body["tools"][1:] + conversation.body["tools"][:1]
    conversation.user()
    return send_changed(conversation, "tools")


def another_tool(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet, tools=True)
    conversation.body["tools"] = conversation.body["tools"][:2]
    conversation.user()
    return send_changed(conversation, "tools")


def system_prompt(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.messages[0]["content"] += conversation.words(3)
    conversation.user()
    return send_changed(conversation, "system_prompt", 0)


def template_flag(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.body["chat_template_kwargs"] = {"effort": "high"}
    conversation.user()
    return send_changed(conversation, "template_flag")


def truncated_conversation(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    del conversation.messages[1 : fleet.rng.choice([2, 3])]
    conversation.user()
    return send_changed(conversation, "truncated", 1)


def edited_message(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.messages[3]["content"] = conversation.words(25)
    conversation.user()
    return send_changed(conversation, "edited", 3)


def an_answer_encoded_otherwise(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    encode, answer, cut = fleet.tokenizer.encode, conversation.words(60), fleet.rng.randrange(10, 60)
    sampled_ids = [*encode(answer[:cut], False), *(i for c in answer[cut:] for i in encode(c, False))]
    conversation.turn(answer, sampled_ids=[*sampled_ids, *encode("<|im_end|>", False)])
    conversation.user()
    prompt = len(conversation.last)
    position = prompt + common_prefix_length(sampled_ids, conversation.ids()[prompt:])
    return conversation.send(), "re_encoded", max(position // BLOCK * BLOCK, prompt), len(conversation.messages) - 2


def salt(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.body["cache_salt"] = conversation.words(2)
    conversation.user()
    return conversation.send_under("salt")


def lora(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.body["model"] = "tuned"
    conversation.user()
    return conversation.send_under("lora")


def evicted_blocks(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    ids, scope, keep = conversation.ids(), Scope("m"), BLOCK * fleet.rng.randrange(2, 8)
    fleet.now += 1.0
    fleet.remove(conversation.opening.worker, ids, scope, keep)
    why = conversation.send()
    part = next(part for part in why.uncached_ranges if part.reason == "evicted")
    assert (part.worker, part.lost_ago_s) == (conversation.opening.worker, 10.0)
    assert fleet.resident(ids, scope) >= part.end, "announced again"
    return why, "evicted", keep, None


def worker_lost(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    worker = conversation.opening.worker
    fleet.now += 2.0
    fleet.core.index.clear(fleet.core.workers[worker].holders[0])
    fleet.block_names_by_worker[worker].clear()
    fleet.core.cache_state.cleared_at_s[worker] = fleet.now
    position = fleet.resident(conversation.ids(), Scope("m"))
    return conversation.send(), "worker_lost", position, None


def elsewhere(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    for number in range(30):
        busy = RouteRequest(
            f"busy{number}", "m", Scope("m"), [7] * 9000 + [number], 9001, worker=conversation.opening.worker
        )
        fleet.core.route(busy, fleet.now)
    why = conversation.send(gap=0.01)
    for number in range(30):
        fleet.core.abort_request(f"busy{number}", fleet.now)
    part = next(part for part in why.uncached_ranges if part.reason == "cached_elsewhere")
    assert (
        (part.worker, why.best_worker)
        == (conversation.opening.worker, conversation.opening.worker)
        != (why.worker, why.worker)
    )
    assert part.best_ttft_s is not None
    assert part.chosen_ttft_s is not None
    assert part.best_ttft_s > part.chosen_ttft_s
    return why, "cached_elsewhere", why.predicted_cached_tokens, None


def not_announced(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    conversation.turn(conversation.words(40), announce=False)
    conversation.user()
    position = fleet.resident(conversation.ids(), Scope("m"))
    return conversation.send(gap=1.0), "not_announced", position, None


def mispredicted_cache(fleet: Fleet) -> Planted:
    conversation = Conversation(fleet)
    conversation.user()
    position = fleet.resident(conversation.ids(), Scope("m")) - 2 * BLOCK
    return (
        conversation.send(report_cached=lambda cached_tokens: cached_tokens - 2 * BLOCK),
        "mispredicted",
        position,
        None,
    )


CAUSES = (
    new_session, new_text, billing_line, thinking_of_earlier_turns, thinking_that_the_client_drops, tool_arguments,
    tools_in_another_order, another_tool, system_prompt, template_flag, truncated_conversation, edited_message,
    an_answer_encoded_otherwise, salt, lora, evicted_blocks, worker_lost, elsewhere, not_announced,
    mispredicted_cache,
)  # fmt: skip
TURNS = 12
"""Of each cause."""


def test_planted_causes_are_named_and_placed(tokenizer: Tokenizer) -> None:
    seed = random.randrange(2**32)
    fleet = Fleet(tokenizer, random.Random(seed))
    mistakes, turns = [], 0
    for cause in random.Random(seed).sample(CAUSES * TURNS, len(CAUSES) * TURNS):
        why, reason, position, message = cause(fleet)
        turns += 1
        main = next((part for part in why.uncached_ranges if part.reason == why.reason), None)
        explained_cause = (why.reason, why.position, main.message if main is not None else None)
        if explained_cause != (reason, position, message):
            mistakes.append((cause.__name__, explained_cause, (reason, position, message), why.prompt_tokens))
    assert turns >= 200
    wrong_reasons = [mistake for mistake in mistakes if mistake[1][0] != mistake[2][0]]
    assert len(wrong_reasons) <= 0.02 * turns, (seed, wrong_reasons)
    assert not [mistake for mistake in mistakes if mistake not in wrong_reasons], (seed, mistakes)
    analyzer = fleet.analyzer
    assert sum(analyzer.tokens.values()) == analyzer.sums["prompt"] - analyzer.sums["reported"], (
        "they add up to all that was computed"
    )
    assert set(analyzer.tokens) - NO_LOSS <= set(GROUPS)


@pytest.mark.parametrize("title_first", [True, False], ids=["title-first", "title-between"])
@pytest.mark.parametrize("tool", [None, "title"], ids=["no-tools", "a-tool-of-its-own"])
def test_a_title_beside_the_main_turn_is_its_own_beginning(
    tokenizer: Tokenizer, title_first: bool, tool: str | None
) -> None:
    """It has the user's first words, other tools and another system prompt; the main turns go on from each other."""
    fleet = Fleet(tokenizer, random.Random(5))
    conversation = Conversation(fleet, tools=True)
    name, question = f"beside-{title_first}-{tool}", conversation.messages[1]
    context = {"role": "user", "content": conversation.words(30)}
    main = {**conversation.body, "messages": [{"role": "system", "content": conversation.words(60)}, context, question]}
    title = {"model": "m", "messages": [{"role": "system", "content": conversation.words(40)}, question]}
    if tool is not None:
        title["tools"] = [{"type": "function", "function": {"name": tool, "parameters": {"type": "object"}}}]
    first, second = (title, main) if title_first else (main, title)
    assert fleet.send(first, name, "An answer.").reason == "new_session"
    title_result = fleet.send(second, name, "An answer.")
    assert (title_result.reason, title_result.lost_tokens) == ("new_session", 0)
    for _ in range(2):
        answer = {"role": "assistant", "content": "An answer."}
        user = {"role": "user", "content": conversation.words(60)}
        main = {**main, "messages": [*main["messages"], answer, user]}
        next_turn = fleet.send(main, name, "An answer.")
        assert (next_turn.reason, next_turn.lost_tokens) == ("new_text", 0)
    system = {"role": "system", "content": "Another."}
    changed_body = {**main, "messages": [system, *main["messages"][1:], answer, user], "tools": []}
    assert fleet.send(changed_body, name).reason == "tools", (
        "the answer stands there: it goes on, whatever else changed"
    )


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "disabled"}}], ids=["system-between", "no-thinking"])
def test_a_body_whose_chat_hangs_on_the_template_is_outlined_all_the_same(fields: dict[str, Any]) -> None:
    """Claude Code puts system messages between the others: each of its turns was called edited."""
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    body = json.dumps(
        {"model": "m", "max_tokens": 5, "system": "s", "messages": messages[: 1 if fields else 3], **fields}
    )
    chat_outline = outline_chat(parse_routing("/v1/messages", body.encode()))
    assert chat_outline is not None
    assert chat_outline.message_count == (2 if fields else 4)


def test_a_system_message_that_the_template_put_first_is_named(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, random.Random(7))
    conversation = Conversation(fleet)
    body = conversation.body
    before, after = (outline_chat(parse_routing("/v1/chat/completions", json.dumps(chat).encode())) for chat in (
        body, {**body, "messages": [*body["messages"], {"role": "assistant", "content": "Yes."},
                                    {"role": "system", "content": "Now this."}, {"role": "user", "content": "Go on."}]},
    ))  # fmt: skip
    assert before is not None
    assert after is not None
    assert find_added_system_prompt(before, after) == before.message_count + 1
    assert find_added_system_prompt(before, before) is None


def test_what_decision_and_index_tell_needs_no_comparison(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, random.Random(4))
    conversation = Conversation(fleet)
    conversation.user()
    ids = conversation.ids()
    keep = 4 * BLOCK
    worker = conversation.opening.worker
    tokens_by_reason = dict(fleet.analyzer.tokens)
    fleet.remove(worker, ids, Scope("m"), keep)
    why = conversation.send(compare=False)
    assert [part.reason for part in why.uncached_ranges] == ["evicted", "not_compared"]
    assert (why.reason, why.position, why.uncached_ranges[0].worker, why.uncached_ranges[0].lost_ago_s) == (
        "evicted",
        keep,
        worker,
        10.0,
    )
    assert fleet.resident(ids, Scope("m")) >= why.uncached_ranges[0].end, "announced again"

    conversation.user()
    for number in range(30):
        busy = RouteRequest(f"busy{number}", "m", Scope("m"), [7] * 9000 + [number], 9001, worker=why.worker)
        fleet.core.route(busy, fleet.now)
    elsewhere_result = conversation.send(gap=0.01, compare=False)
    assert (elsewhere_result.reason, elsewhere_result.uncached_ranges[0].worker) == ("cached_elsewhere", why.worker)
    assert elsewhere_result.worker != why.worker
    for number in range(30):
        fleet.core.abort_request(f"busy{number}", fleet.now)

    position = fleet.resident(conversation.ids(), Scope("m")) - 2 * BLOCK
    mispredicted_result = conversation.send(
        compare=False, report_cached=lambda cached_tokens: cached_tokens - 2 * BLOCK
    )
    assert (mispredicted_result.reason, mispredicted_result.position, mispredicted_result.uncached_ranges[0].end) == (
        "mispredicted",
        position,
        position + 2 * BLOCK,
    )
    assert fleet.analyzer.tokens == tokens_by_reason, "the share alone is counted by reason"


def test_every_reason_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "how-to" / "explain-a-miss.md").read_text()
    rows = [line.split("|") for line in manual.splitlines() if line.startswith("| `")]
    documented_reasons = {(name.strip("` "), row[2].strip()) for row in rows for name in row[1].split(",")}
    assert {*GROUPS.items(), *((reason, "none") for reason in NO_LOSS)} <= documented_reasons
    assert not set(GROUPS) & NO_LOSS


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_body_of_another_api_is_outlined_as_the_chat_it_stands_for(path: str) -> None:
    def read(texts: list[str]) -> Outline:
        roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(texts))]
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        body = {"model": "m", "max_tokens": 5, "messages": turns, "system": "s"}
        if path == "/v1/responses":
            body = {"model": "m", "input": turns, "instructions": "s"}
        chat_outline = outline_chat(parse_routing(path, json.dumps(body).encode()))
        assert chat_outline is not None
        return chat_outline

    old, new = read(["one", "two", "three"]), read(["one", "twos", "three", "four", "five"])
    assert old.message_count == 4
    assert classify_difference(old, new, 0.6) == ("edited", 2)


def test_a_chat_nested_too_deeply_to_be_digested_has_no_outline() -> None:
    """Arguments of a tool call can be decoded on their own, but are too deep to be encoded inside of their message."""
    outlines = []
    for depth in range(500, 1000):
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
        chat = {"messages": [{"role": "assistant", "content": "a", "tool_calls": [call]}]}
        outlines.append(outline_chat(parse_routing("/v1/chat/completions", json.dumps(chat).encode())))
    assert outlines[0] is not None
    # Later versions allow calls of C functions a depth that these arguments do not reach.
    if sys.version_info < (3, 12):
        assert None in outlines


def test_a_message_without_a_role_is_more_than_its_text() -> None:
    named, other = {"name": "a", "content": "hi"}, {"name": "b", "content": "hi"}
    assert _fingerprint_message(named).sent_digest != _fingerprint_message(other).sent_digest


@pytest.mark.parametrize("content", ["", "Hello.", "Grüße, 世界 😀", "half \ud83d of a pair", "x" * 5000])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "nobody"])
def test_what_is_outlined_at_once_is_what_is_outlined_piece_by_piece(role: str, content: str) -> None:
    plain = _fingerprint_message({"role": role, "content": content})
    in_parts = _fingerprint_message({"role": role, "content": [{"type": "text", "text": content}]})
    assert plain == in_parts
    assert plain.chars == len(content)
    with_thinking = _fingerprint_message({"role": role, "content": f"<think>so</think>{content}"})
    assert with_thinking.sent_digest != with_thinking.content_digest == plain.content_digest
    assert with_thinking.kind == plain.kind | HAS_THOUGHTS


@pytest.mark.parametrize("seed", range(300))
def test_marks_are_seen_wherever_they_stand(seed: int) -> None:
    """Halves of marks, at its beginning, its end, between; billing lines where a system says them."""
    rng = random.Random(seed)
    pieces = [
        "<think>",
        "</think>",
        "<thin",
        "\n",
        "x-anthropic-billing-header: c=1",
        "x-anthropic-billing-head",
        "<t",
        "x-",
    ]
    text = "".join(rng.choice([*pieces, "a" * rng.randrange(40), "ü"]) for _ in range(rng.randrange(12)))
    message = {"role": rng.choice(["system", "user"]), "content": text[rng.randrange(4) :]}
    assert _fingerprint_message(message) == _fingerprint_message(message | {"name": None}), (
        "a message of more than a text"
    )


@pytest.mark.parametrize(("repeats", "words"), [(8, 12), (200, 300), (80, 4), (200, 4)])
def test_a_conversation_without_a_name_goes_on(tokenizer: Tokenizer, repeats: int, words: int) -> None:
    """From less than a chunk to more than one, and beyond, beside others that begin with the same system prompt: that
    alone makes nobody's turn an edited one of somebody else's."""
    rng = random.Random(20)
    fleet = Fleet(tokenizer, rng)
    system = {"role": "system", "content": "You help. " * repeats}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(6)]
    lengths = set()
    for turn in range(5):
        for talk in talks:
            talk.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
            why = fleet.send({"model": "m", "messages": talk}, answer="So be it." + END)
            talk.append({"role": "assistant", "content": "So be it."})
            reasons = [part.reason for part in why.uncached_ranges if part.reason != "partial_block"]
            assert reasons == ["new_text" if turn else "new_session"], (turn, why)
            lengths.add(why.prompt_tokens > CHUNK)
    assert lengths == ({False, True} if repeats == 8 else {True})
    # In the third and fourth case all first turns end in the chunk in which the system prompt does.
