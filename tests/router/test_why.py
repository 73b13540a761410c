"""Why a turn missed: conversations with planted causes of every class, real template, tokenizer, core and index."""

from __future__ import annotations

import json
import random
import runpy
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
from router.decide.workers import ServedModel, WorkerSpec
from router.edge.reasons import KnownFacts
from router.index import make_index
from router.index.protocol import Scope
from router.miss_reasons.analyzer import Prompt, compute_short_keys
from router.miss_reasons.attribution import RemovedPrefix, first_missing_token
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.differences import classify_difference, find_added_system_prompt
from router.miss_reasons.explanation import GROUPS, NO_LOSS, MissExplanation
from router.prompting.chat_outline import HAS_THOUGHTS, Outline
from router.prompting.conversation_turn import digest_first_user_message
from router.prompting.outline import _fingerprint_message, fingerprint_messages, outline_chat

BLOCK = 16
CHUNK = CoreConfig().working_set.chunk_tokens
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
        self.analyzer = BothAnalyzers(MissReasonsConfig(), self.core.index.shared)
        self.emptied: dict[str, float] = {}
        self.held: dict[str, dict[tuple[int, ...], int]] = {"a": {}, "b": {}}
        self.count = self.names = 0

    def ask(
        self, body: dict[str, Any], session: str | None = None, **changes: Any
    ) -> tuple[RouteRequest, RoutingRequest]:
        parsed = parse_routing("/v1/chat/completions", json.dumps(body).encode())
        ids = array("I", self.tokenizer.encode(self.tokenizer.render_chat_text(parsed), False))
        self.count += 1
        scope = Scope("m", parsed.cache_salt, "tuned" if parsed.model == "tuned" else None)
        route = RouteRequest(f"r{self.count}", parsed.model or "m", scope, ids, len(ids), session=session, **changes)
        return route, parsed

    def send(
        self,
        body: dict[str, Any],
        session: str | None = None,
        answer: str = "",
        *,
        sampled: list[int] | None = None,
        announce: bool = True,
        gap: float = 10.0,
        reported: Callable[[int], int] = lambda cached: cached,
        compare: bool = True,
        **changes: Any,
    ) -> MissExplanation:
        """One request, answered with `answer`, of which `sampled` are the ids unless the encoder's are meant."""
        self.now += gap
        self.core.tick(self.now)
        route, parsed = self.ask(body, session, **changes)
        placed = self.core.route(route, self.now)
        assert isinstance(placed, Forward)
        decision = placed.decision
        prompt, facts = self.prompt(route, parsed), KnownFacts(self.core, self.emptied, lambda _: self.tokenizer)
        found = self.core.index.gone(prompt.token_ids, route.scope, first_missing_token(decision), BLOCK)
        gone = None if found is None else RemovedPrefix(found[0], self.holders[found[1]], found[2])
        if compare:
            explained = self.analyzer.explain(prompt, decision, BLOCK, gone, facts, self.now, 0.0)
            begun = self.analyzer.record_compared(prompt, decision, BLOCK, gone, facts, self.now, 0.0)
            assert explained == self.analyzer.why(begun)
        else:
            begun = self.analyzer.record_placed(prompt, decision, gone, self.now, 0.0)
        ids = list(route.token_ids or ())
        said = self.tokenizer.encode(answer, False) if sampled is None else sampled
        if announce:
            self.store(decision.worker, [*ids, *said][:-1], route.scope)
        usage = ReportedUsage(len(ids), reported(decision.predicted_cached_tokens), len(said))
        self.core.finish_request(route.request_id, usage, self.now + 0.5)
        self.analyzer.record_end(begun, usage, len(said), self.now + 0.5)
        self.now += 0.5
        why = self.analyzer.why(begun)
        check_adds_up(why)
        return why

    @property
    def holders(self) -> dict[int, str]:
        return {worker.holders[0]: name for name, worker in self.core.workers.items()}

    def prompt(self, route: RouteRequest, parsed: RoutingRequest) -> Prompt:
        ids: Any = route.token_ids
        keys = self.core.index.chunk_keys(ids, route.scope, CHUNK)
        short = route.session is None and self.analyzer.needs_short_keys(keys)
        return Prompt(
            route.request_id, ids, route.scope, outline_chat(parsed), route.session, route.parent, keys,
            compute_short_keys(self.core.index, ids, route.scope, CHUNK) if short else (),
            digest_first_user_message(parsed) if route.session is None else None, route.is_final,
        )  # fmt: skip

    def store(self, worker: str, ids: list[int], scope: Scope) -> None:
        names, parent = [], None
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = (hash(scope), *ids[:end])
            if key not in self.held[worker]:
                self.names += 1
                self.held[worker][key] = self.names
                names.append((self.held[worker][key], parent, ids[end - BLOCK : end]))
            parent = self.held[worker][key]
        events = [BlockStored([n], p, t, BLOCK, None, "GPU", scope.lora, cache_salt=scope.salt) for n, p, t in names]
        self.tell(worker, *events)

    def resident(self, ids: list[int], scope: Scope) -> int:
        """Of the prompt, at the worker that holds most of it."""
        ends = range(BLOCK, len(ids), BLOCK)
        held = [[(hash(scope), *ids[:end]) in known for end in ends] + [False] for known in self.held.values()]
        return BLOCK * max(known.index(False) for known in held)

    def remove(self, worker: str, ids: list[int], scope: Scope, keep: int) -> None:
        ends = range(len(ids) // BLOCK * BLOCK, keep, -BLOCK)
        known = [self.held[worker].pop((hash(scope), *ids[:end]), None) for end in ends]
        self.tell(worker, BlockRemoved([name for name in known if name is not None], "GPU"))

    def tell(self, worker: str, *events: Any) -> None:
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
        self.shared = fleet.resident(self.ids(), Scope("m"))
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

    def turn(self, answer: str, *, thought: str = "", calls: Any = None, **changes: Any) -> MissExplanation:
        """Send it, and append the answer to its messages as a client does."""
        text = f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer
        for call in calls or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]))
            text += f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
        why = self.send(text + "<|im_end|>", **changes)
        message = {"role": "assistant", "content": answer}
        self.messages.append({**message, **({"reasoning_content": thought} if thought else {}),
                              **({"tool_calls": calls} if calls else {})})  # fmt: skip
        return why

    def send(self, answer: str = "", **changes: Any) -> MissExplanation:
        self.last = self.ids()
        return self.fleet.send(self.body, self.name, answer, **changes)

    def call(self, number: int) -> None:
        arguments = json.dumps({"path": self.words(5), "limit": self.rng.randrange(99), "deep": {"x": 1, "a": [2]}})
        calls = [{"id": f"c{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}]
        self.turn("Let me look.", thought=self.words(20), calls=calls)
        self.messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": self.words(30)})

    def ids(self) -> list[int]:
        return list(self.fleet.ask(self.body)[0].token_ids or ())

    def under(self, reason: str) -> Planted:
        """The next turn, under another key: another conversation may have left its first words there."""
        route, _ = self.fleet.ask(self.body)
        position = self.fleet.resident(list(route.token_ids or ()), route.scope)
        return self.send(), reason, position, None


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def after(conversation: Conversation, reason: str, message: int | None = None) -> Planted:
    """The next turn, which the client changed: its ids leave those of the last prompt."""
    position = common(conversation.last, conversation.ids())
    return conversation.send(), reason, position, message


def new_session(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    return one.opening, "new_session", one.shared, None


def new_text(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    said = len(fleet.tokenizer.encode(one.messages[-1]["content"] + "<|im_end|>", False))
    position = len(one.last) + said - 1
    one.user()
    return one.send(), "new_text", position, None


def billing_line(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    before, _, after_it = one.messages[0]["content"].partition("cch=")
    one.messages[0]["content"] = f"{before}cch={one.words(3)}\n" + after_it.partition("\n")[2]
    one.user()
    return after(one, "billing_line", 0)


def thinking_of_earlier_turns(fleet: Fleet) -> Planted:
    one = Conversation(fleet, loop=True)
    one.turn(one.words(30), thought=one.words(20))
    one.user()
    return after(one, "thinking_dropped", 4)


def thinking_that_the_client_drops(fleet: Fleet) -> Planted:
    one = Conversation(fleet, loop=True)
    del one.messages[4]["reasoning_content"]
    return after(one, "thinking_dropped", 4)


def tool_arguments(fleet: Fleet) -> Planted:
    one = Conversation(fleet, loop=True)
    function = one.messages[4]["tool_calls"][0]["function"]
    arguments = json.loads(function["arguments"])
    one.messages[4]["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
    return after(one, "tool_arguments", 4)


def tools_in_another_order(fleet: Fleet) -> Planted:
    one = Conversation(fleet, tools=True)
    one.body["tools"] = one.body["tools"][1:] + one.body["tools"][:1]
    one.user()
    return after(one, "tools")


def another_tool(fleet: Fleet) -> Planted:
    one = Conversation(fleet, tools=True)
    one.body["tools"] = one.body["tools"][:2]
    one.user()
    return after(one, "tools")


def system_prompt(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.messages[0]["content"] += one.words(3)
    one.user()
    return after(one, "system_prompt", 0)


def template_flag(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.body["chat_template_kwargs"] = {"effort": "high"}
    one.user()
    return after(one, "template_flag")


def truncated(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    del one.messages[1 : fleet.rng.choice([2, 3])]
    one.user()
    return after(one, "truncated", 1)


def edited(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.messages[3]["content"] = one.words(25)
    one.user()
    return after(one, "edited", 3)


def an_answer_encoded_otherwise(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    encode, answer, cut = fleet.tokenizer.encode, one.words(60), fleet.rng.randrange(10, 60)
    sampled = [*encode(answer[:cut], False), *(i for c in answer[cut:] for i in encode(c, False))]
    one.turn(answer, sampled=[*sampled, *encode("<|im_end|>", False)])
    one.user()
    prompt = len(one.last)
    position = prompt + common(sampled, one.ids()[prompt:])
    return one.send(), "re_encoded", max(position // BLOCK * BLOCK, prompt), len(one.messages) - 2


def salt(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.body["cache_salt"] = one.words(2)
    one.user()
    return one.under("salt")


def lora(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.body["model"] = "tuned"
    one.user()
    return one.under("lora")


def evicted(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    ids, scope, keep = one.ids(), Scope("m"), BLOCK * fleet.rng.randrange(2, 8)
    fleet.now += 1.0
    fleet.remove(one.opening.worker, ids, scope, keep)
    why = one.send()
    part = next(part for part in why.uncached_ranges if part.reason == "evicted")
    assert (part.worker, part.lost_ago_s) == (one.opening.worker, 10.0)
    assert fleet.resident(ids, scope) >= part.end, "announced again"
    return why, "evicted", keep, None


def worker_lost(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    worker = one.opening.worker
    fleet.now += 2.0
    fleet.core.index.clear(fleet.core.workers[worker].holders[0])
    fleet.held[worker].clear()
    fleet.emptied[worker] = fleet.now
    position = fleet.resident(one.ids(), Scope("m"))
    return one.send(), "worker_lost", position, None


def elsewhere(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    for number in range(30):
        busy = RouteRequest(f"busy{number}", "m", Scope("m"), [7] * 9000 + [number], 9001, worker=one.opening.worker)
        fleet.core.route(busy, fleet.now)
    why = one.send(gap=0.01)
    for number in range(30):
        fleet.core.abort_request(f"busy{number}", fleet.now)
    part = next(part for part in why.uncached_ranges if part.reason == "cached_elsewhere")
    assert (part.worker, why.best_worker) == (one.opening.worker, one.opening.worker) != (why.worker, why.worker)
    assert part.best_ttft_s is not None
    assert part.chosen_ttft_s is not None
    assert part.best_ttft_s > part.chosen_ttft_s
    return why, "cached_elsewhere", why.predicted_cached_tokens, None


def not_announced(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    one.turn(one.words(40), announce=False)
    one.user()
    position = fleet.resident(one.ids(), Scope("m"))
    return one.send(gap=1.0), "not_announced", position, None


def mispredicted(fleet: Fleet) -> Planted:
    one = Conversation(fleet)
    one.user()
    position = fleet.resident(one.ids(), Scope("m")) - 2 * BLOCK
    return one.send(reported=lambda cached: cached - 2 * BLOCK), "mispredicted", position, None


CAUSES = (
    new_session, new_text, billing_line, thinking_of_earlier_turns, thinking_that_the_client_drops, tool_arguments,
    tools_in_another_order, another_tool, system_prompt, template_flag, truncated, edited, an_answer_encoded_otherwise,
    salt, lora, evicted, worker_lost, elsewhere, not_announced, mispredicted,
)  # fmt: skip
TURNS = 12
"""Of each cause."""


def test_planted_causes_are_named_and_placed(tokenizer: Tokenizer) -> None:
    seed = random.randrange(2**32)
    fleet = Fleet(tokenizer, random.Random(seed))
    wrong, turns = [], 0
    for cause in random.Random(seed).sample(CAUSES * TURNS, len(CAUSES) * TURNS):
        why, reason, position, message = cause(fleet)
        turns += 1
        main = next((part for part in why.uncached_ranges if part.reason == why.reason), None)
        told = (why.reason, why.position, main.message if main is not None else None)
        if told != (reason, position, message):
            wrong.append((cause.__name__, told, (reason, position, message), why.prompt_tokens))
    assert turns >= 200
    named = [one for one in wrong if one[1][0] != one[2][0]]
    assert len(named) <= 0.02 * turns, (seed, named)
    assert not [one for one in wrong if one not in named], (seed, wrong)
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
    one = Conversation(fleet, tools=True)
    name, question = f"beside-{title_first}-{tool}", one.messages[1]
    context = {"role": "user", "content": one.words(30)}
    main = {**one.body, "messages": [{"role": "system", "content": one.words(60)}, context, question]}
    title = {"model": "m", "messages": [{"role": "system", "content": one.words(40)}, question]}
    if tool is not None:
        title["tools"] = [{"type": "function", "function": {"name": tool, "parameters": {"type": "object"}}}]
    first, second = (title, main) if title_first else (main, title)
    assert fleet.send(first, name, "An answer.").reason == "new_session"
    beside = fleet.send(second, name, "An answer.")
    assert (beside.reason, beside.lost_tokens) == ("new_session", 0)
    for _ in range(2):
        answer, user = {"role": "assistant", "content": "An answer."}, {"role": "user", "content": one.words(60)}
        main = {**main, "messages": [*main["messages"], answer, user]}
        went_on = fleet.send(main, name, "An answer.")
        assert (went_on.reason, went_on.lost_tokens) == ("new_text", 0)
    system = {"role": "system", "content": "Another."}
    changed = {**main, "messages": [system, *main["messages"][1:], answer, user], "tools": []}
    assert fleet.send(changed, name).reason == "tools", "the answer stands there: it goes on, whatever else changed"


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "disabled"}}], ids=["system-between", "no-thinking"])
def test_a_body_whose_chat_hangs_on_the_template_is_outlined_all_the_same(more: dict[str, Any]) -> None:
    """Claude Code puts system messages between the others: each of its turns was called edited."""
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    body = json.dumps({"model": "m", "max_tokens": 5, "system": "s", "messages": messages[: 1 if more else 3], **more})
    made = outline_chat(parse_routing("/v1/messages", body.encode()))
    assert made is not None
    assert made.message_count == (2 if more else 4)


def test_a_system_message_that_the_template_put_first_is_named(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, random.Random(7))
    one = Conversation(fleet)
    body = one.body
    before, after = (outline_chat(parse_routing("/v1/chat/completions", json.dumps(sent).encode())) for sent in (
        body, {**body, "messages": [*body["messages"], {"role": "assistant", "content": "Yes."},
                                    {"role": "system", "content": "Now this."}, {"role": "user", "content": "Go on."}]},
    ))  # fmt: skip
    assert before is not None
    assert after is not None
    assert find_added_system_prompt(before, after) == before.message_count + 1
    assert find_added_system_prompt(before, before) is None


def test_what_decision_and_index_tell_needs_no_comparison(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, random.Random(4))
    one = Conversation(fleet)
    one.user()
    ids, keep, worker, counted = one.ids(), 4 * BLOCK, one.opening.worker, dict(fleet.analyzer.tokens)
    fleet.remove(worker, ids, Scope("m"), keep)
    why = one.send(compare=False)
    assert [part.reason for part in why.uncached_ranges] == ["evicted", "not_compared"]
    assert (why.reason, why.position, why.uncached_ranges[0].worker, why.uncached_ranges[0].lost_ago_s) == (
        "evicted",
        keep,
        worker,
        10.0,
    )
    assert fleet.resident(ids, Scope("m")) >= why.uncached_ranges[0].end, "announced again"

    one.user()
    for number in range(30):
        busy = RouteRequest(f"busy{number}", "m", Scope("m"), [7] * 9000 + [number], 9001, worker=why.worker)
        fleet.core.route(busy, fleet.now)
    away = one.send(gap=0.01, compare=False)
    assert (away.reason, away.uncached_ranges[0].worker) == ("cached_elsewhere", why.worker)
    assert away.worker != why.worker
    for number in range(30):
        fleet.core.abort_request(f"busy{number}", fleet.now)

    position = fleet.resident(one.ids(), Scope("m")) - 2 * BLOCK
    less = one.send(compare=False, reported=lambda cached: cached - 2 * BLOCK)
    assert (less.reason, less.position, less.uncached_ranges[0].end) == ("mispredicted", position, position + 2 * BLOCK)
    assert fleet.analyzer.tokens == counted, "the share alone is counted by reason"


def test_every_reason_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = [line.split("|") for line in manual.splitlines() if line.startswith("| `")]
    told = {(name.strip("` "), row[2].strip()) for row in rows for name in row[1].split(",")}
    assert {*GROUPS.items(), *((reason, "none") for reason in NO_LOSS)} <= told
    assert not set(GROUPS) & NO_LOSS


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_body_of_another_api_is_outlined_as_the_chat_it_stands_for(path: str) -> None:
    def read(texts: list[str]) -> Outline:
        roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(texts))]
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        body = {"model": "m", "max_tokens": 5, "messages": turns, "system": "s"}
        if path == "/v1/responses":
            body = {"model": "m", "input": turns, "instructions": "s"}
        found = outline_chat(parse_routing(path, json.dumps(body).encode()))
        assert found is not None
        return found

    old, new = read(["one", "two", "three"]), read(["one", "twos", "three", "four", "five"])
    assert old.message_count == 4
    assert classify_difference(old, new, 0.6) == ("edited", 2)


@pytest.mark.parametrize("content", ["", "Hello.", "Grüße, 世界 😀", "half \ud83d of a pair", "x" * 5000])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "nobody"])
def test_what_is_outlined_at_once_is_what_is_outlined_piece_by_piece(role: str, content: str) -> None:
    plain = array("I", fingerprint_messages([{"role": role, "content": content}]))
    in_parts = array("I", fingerprint_messages([{"role": role, "content": [{"type": "text", "text": content}]}]))
    assert plain == in_parts
    assert plain[4] == len(content)
    thought = array("I", fingerprint_messages([{"role": role, "content": f"<think>so</think>{content}"}]))
    assert thought[0] != thought[2] == plain[2]
    assert thought[3] == plain[3] | HAS_THOUGHTS


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
    assert array("I", fingerprint_messages([message])).tolist() == list(_fingerprint_message(message))


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
