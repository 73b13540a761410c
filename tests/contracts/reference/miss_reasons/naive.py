"""Why turns miss, found slowly: every token of a prompt is asked for its reason, and every prompt is looked at.

Shares with router/miss_reasons only the values that go in and come out. Prompts are lists, messages are tuples of five
numbers (as sent, JSON normalised, that without thinking, what it is, its length), and nothing is indexed or remembered.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from msgspec.structs import astuple

from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.index.protocol import Scope
from router.miss_reasons.attribution import MissFacts, Placement, RemovedPrefix
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import GROUPS, MissExplanation, UncachedRange
from router.miss_reasons.prompt_history import AnalyzedPrompt
from router.prompting.outline import Outline

Message = tuple[int, int, int, int, int]
SYSTEM, USER, ASSISTANT = 0, 1, 2
THINKS, BILLED, CALLS = 8, 16, 32
NOT_LOST = ("new_session", "new_text", "partial_block", "not_compared")
BRANCHES = 4


@dataclass(eq=False)
class PreviousPrompt:
    scope: Scope
    ids: list[int]
    outline: Outline | None
    worker: str
    at_s: float
    session: str | None
    answer_tokens: int = 0
    key_count: int = 0

    @property
    def size(self) -> int:
        outline = self.outline
        base = 1_100 + 40 * self.key_count + 4 * len(self.ids)
        return base + (0 if outline is None else 600 + 20 * len(messages(outline)))

    @property
    def cached_token_count(self) -> int:
        return len(self.ids) + (self.answer_tokens - 1 if self.answer_tokens else 0)


@dataclass(eq=False)
class NaiveRequest:
    why: MissExplanation
    labels: list[tuple[Any, ...]]
    """Of each token from the first on: what tells its part from others, and the fields of that."""
    decision: Decision
    previous: PreviousPrompt | None = None
    is_final: bool = False
    is_sampled: bool = False


class NaiveAnalyzer:
    def __init__(self, config: MissReasonsConfig) -> None:
        self.config = config
        self.history: list[PreviousPrompt] = []
        """The oldest first."""
        self.owners: dict[int, PreviousPrompt] = {}
        """key -> the last prompt that had it, kept or not."""
        self.requests: list[NaiveRequest] = []
        self.turns: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def get(self, name: str) -> MissExplanation | None:
        return next((request.why for request in self.requests if request.why.id == name), None)

    @property
    def used_bytes(self) -> int:
        return sum(past.size for past in self.history)

    def explain(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> MissExplanation:
        return self._explain(prompt, placement, facts)[0].why

    def record_placed(self, id: str, session: str | None, tokens: int, placement: Placement) -> NaiveRequest:
        decision, gone, _, now, wall = astuple(placement)
        route = RouteRequest("", "m", Scope("m"), None, tokens, session=session)
        prompt = AnalyzedPrompt(id, route, array("I", range(tokens)), None, is_history_incomplete=True)
        labels = labels_of(prompt, None, 0, decision, 1, gone, None, now)
        request = NaiveRequest(why_of(prompt, decision, wall, labels), labels, decision)
        request.why.is_compared = False
        self._store_request(request)
        return request

    def record_compared(
        self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts, is_sampled: bool
    ) -> NaiveRequest:
        decision, _, block, now, _ = astuple(placement)
        while self.history and now - self.history[0].at_s >= self.config.ttl_s:
            del self.history[0]
        request, replaced_prompt = self._explain(prompt, placement, facts)
        past = PreviousPrompt(
            prompt.route.scope, list(prompt.token_ids), prompt.outline, decision.worker, now, prompt.route.session,
            key_count=len(prompt.chunk_keys),
        )  # fmt: skip
        request.previous, request.is_final, request.is_sampled = past, prompt.route.is_final, is_sampled
        if len(prompt.token_ids) >= block:
            self._store_prompt(past, prompt, replaced_prompt)
        self._store_request(request)
        return request

    def record_end(self, request: NaiveRequest, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        why, decision = request.why, request.decision
        if usage is not None and usage.cached_tokens is not None:
            why.reported_cached_tokens = max(usage.cached_tokens, 0)
            reused_tokens = min(why.reported_cached_tokens, why.prompt_tokens)
            promised_tokens = min(max(decision.terms.resident_tokens, reused_tokens), why.predicted_cached_tokens)
            request.labels = [
                ("mispredicted", "mispredicted", {"worker": why.worker}) if reused_tokens <= at < promised_tokens
                else ("not announced", "not_announced", {"worker": why.worker})
                if reused_tokens <= at < why.predicted_cached_tokens
                else ("reused",) if at < reused_tokens
                else label
                for at, label in enumerate(request.labels)
            ]  # fmt: skip
            sum_up(why, request.labels)
            self.sums["prompt"] += why.prompt_tokens
            self.sums["best"] += why.best_cached_tokens
            self.sums["chosen"] += why.predicted_cached_tokens
            self.sums["reported"] += why.reported_cached_tokens
        previous_prompt = request.previous
        if previous_prompt is None:
            return
        previous_prompt.answer_tokens, previous_prompt.at_s = answer_tokens, now
        if request.is_sampled:
            self.turns[why.reason] += 1
            self.tokens.update(label[1] for label in request.labels if label[0] not in ("cached", "reused"))
        if request.is_final and previous_prompt.session is not None:
            self.history = [
                past_prompt for past_prompt in self.history if past_prompt.session != previous_prompt.session
            ]

    def _store_request(self, request: NaiveRequest) -> None:
        self.requests = [old_request for old_request in self.requests if old_request.why.id != request.why.id] + [
            request
        ]
        del self.requests[: -self.config.requests_max]

    def _store_prompt(
        self, past: PreviousPrompt, prompt: AnalyzedPrompt, replaced_prompt: PreviousPrompt | None
    ) -> None:
        if replaced_prompt is not None and replaced_prompt.session == past.session and replaced_prompt in self.history:
            self.history.remove(replaced_prompt)
        bytes_max = self.config.memory_mb << 20
        is_lost = past.session is None and not prompt.chunk_keys and prompt.opening_key is None
        if is_lost or past.size > bytes_max:
            return
        self.history.append(past)
        if past.session is None:
            count, ends = len(prompt.chunk_keys), []
            while count:
                ends.append(prompt.chunk_keys[count - 1])
                count //= 2
            for key in [
                *ends,
                *([] if prompt.opening_key is None else [prompt.opening_key]),
            ]:
                self.owners[key] = past
        else:
            branches = [stored_prompt for stored_prompt in self.history if stored_prompt.session == past.session]
            for old in branches[:-BRANCHES]:
                self.history.remove(old)
        while self.used_bytes > bytes_max:
            del self.history[0]

    def _explain(
        self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts
    ) -> tuple[NaiveRequest, PreviousPrompt | None]:
        decision, gone, block, now, wall = astuple(placement)
        past = self._find_extended(prompt) or self._find_similar(prompt)
        shared_tokens = 0 if past is None else shared(past.ids, prompt.token_ids)
        labels = labels_of(prompt, past, shared_tokens, decision, block, gone, facts, now)
        why = why_of(prompt, decision, wall, labels)
        why.is_compared = past is not None or not prompt.is_history_incomplete
        return NaiveRequest(why, labels, decision), past

    def _find_extended(self, prompt: AnalyzedPrompt) -> PreviousPrompt | None:
        begins = [] if prompt.opening_key is None else [prompt.opening_key]
        for past in self._candidates(prompt.route.session, None, [*prompt.chunk_keys, *begins]):
            size = len(past.ids)
            if past.scope == prompt.route.scope and size and list(prompt.token_ids[:size]) == past.ids:
                return past
        return None

    def _find_similar(self, prompt: AnalyzedPrompt) -> PreviousPrompt | None:
        matches = []
        for past in self._candidates(prompt.route.session, prompt.route.parent, prompt.chunk_keys):
            shared_tokens = shared(past.ids, prompt.token_ids)
            if prompt.outline is not None and past.outline is not None:
                new_digests = message_digests(prompt.outline, prompt.route.session is None)
                old_digests = message_digests(past.outline, past.session is None)
                likeness = len(new_digests & old_digests)
                if not likeness or is_other_conversation(past.outline, prompt.outline):
                    continue
            elif past.session is not None or shared_tokens >= min(len(past.ids), len(prompt.token_ids)) / 2:
                likeness = shared_tokens
            else:
                continue
            matches.append((likeness, shared_tokens, past))
        return max(matches, key=lambda candidate: candidate[:2])[2] if matches else None

    def _candidates(self, session: str | None, parent: str | None, keys: Sequence[int]) -> list[PreviousPrompt]:
        if session is None:
            owners = [self.owners[key] for key in reversed(keys) if key in self.owners]
            return list(dict.fromkeys(past for past in owners if past in self.history))[:BRANCHES]
        newest_first = self.history[::-1]
        session_prompts = [past for past in newest_first if past.session == session]
        return session_prompts or [past for past in newest_first if parent is not None and past.session == parent]


def labels_of(
    prompt: AnalyzedPrompt, past: PreviousPrompt | None, shared_tokens: int, decision: Decision, block: int,
    gone: RemovedPrefix | None, facts: MissFacts | None, now: float,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Of each token: ("cached",), or (what tells its part from others, the reason, more fields of the part)."""
    length, best, first = len(prompt.token_ids), decision.most_cached, decision.predicted_cached_tokens
    most_cached_tokens = 0 if best is None else best.cached_tokens
    is_extended = past is not None and shared_tokens == len(past.ids)
    known_tokens = 0 if past is None else past.cached_token_count if is_extended else shared_tokens
    usable = min(known_tokens, length - 1) // block * block
    differs = None if past is None else different_scope_field(past.scope, prompt.route.scope)
    same_session = past is not None and past.session == prompt.route.session
    missing = min(max(first, most_cached_tokens), length)
    looks_for_gone = past is None or differs is not None or missing < usable
    removed_end = gone.end_token if gone is not None and looks_for_gone else 0
    missing = min(max(missing, removed_end), length)
    is_lost = past is not None and differs is None and missing < min(shared_tokens, length - 1) // block * block
    answer_from = missing if differs is None else max(missing, min(shared_tokens, length))
    answer_from = max(missing, usable) if is_lost else answer_from

    def label(at: int) -> tuple[Any, ...]:
        if at < first:
            return ("cached",)
        if at < most_cached_tokens and best is not None:
            times = {"chosen_ttft_s": decision.terms.ttft_s, "best_ttft_s": best.ttft_s}
            return "cached_elsewhere", "cached_elsewhere", {"worker": best.worker, **times}
        if at < removed_end and gone is not None:
            return "gone", "evicted", {"worker": gone.worker, "lost_ago_s": round(now - gone.removed_at_s, 3)}
        if past is None:
            return "new", "not_compared" if prompt.is_history_incomplete else "new_session", {}
        assert facts is not None
        if differs is not None and at < shared_tokens:
            return ("scope", differs, {}) if at < shared_tokens // block * block else ("rest", "partial_block", {})
        if is_lost and at < usable:
            return ("lost", *lost_reason(past, facts, now))
        if not is_extended and same_session and differs is None:
            if at < max(past.cached_token_count, shared_tokens + 1):
                return ("differs", *change_reason(past, prompt, shared_tokens, facts))
        elif is_extended and answer_from < usable and prompt.outline is not None:
            message = len(messages(past.outline))
            reason = answer_reason(messages(prompt.outline), message)
            if reason is not None and at < known_tokens:
                return "answer", reason, {"position": max(answer_from, shared_tokens), "message": message}
        elif at < known_tokens:
            return "rest", "partial_block", {}
        return "new", "new_text" if same_session else "new_session", {}

    return [label(at) for at in range(length)]


def why_of(prompt: AnalyzedPrompt, decision: Decision, wall: float, labels: list[tuple[Any, ...]]) -> MissExplanation:
    best = decision.most_cached or decision.terms
    why = MissExplanation(
        prompt.request_id, wall, prompt.route.session, decision.worker, len(prompt.token_ids), best.cached_tokens,
        best.worker, decision.predicted_cached_tokens, attempt=decision.attempt,
    )  # fmt: skip
    sum_up(why, labels)
    return why


def sum_up(why: MissExplanation, labels: list[tuple[Any, ...]]) -> None:
    why.uncached_ranges, at = [], 0
    for (name, *_), equal_labels in groupby(labels, key=lambda label: label[:1]):
        run = list(equal_labels)
        if name not in ("cached", "reused"):
            why.uncached_ranges.append(UncachedRange(run[0][1], at, at + len(run), **run[0][2]))
        at += len(run)
    lost_ranges = [part for part in why.uncached_ranges if part.reason not in NOT_LOST]
    why.lost_tokens = sum(part.end - part.start for part in lost_ranges)
    main = max(lost_ranges or why.uncached_ranges, key=lambda part: part.end - part.start, default=None)
    why.reason = "new_text" if main is None else main.reason
    why.position = None if main is None else main.start if main.position is None else main.position


def shared(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ids, other_ids)) if a != b), min(len(ids), len(other_ids)))


def messages(outline: Outline | None) -> list[Message]:
    return [] if outline is None else list(zip(*outline.messages))


def message_digests(outline: Outline, has_session: bool) -> set[int]:
    return {message[2] for message in messages(outline) if not has_session or message[3] & 7 != SYSTEM}


def is_other_conversation(old: Outline, new: Outline) -> bool:
    """Other tools, another system prompt, and nobody answered what `old` asked."""
    before, after = messages(old), messages(new)
    old_system, new_system = (
        [message[2] for message in chat[:1] if message[3] & 7 == SYSTEM] for chat in (before, after)
    )
    has_other_inputs = old.tools_digest != new.tools_digest and old_system != new_system
    return has_other_inputs and answer_reason(after, len(before)) is None


def different_scope_field(old: Scope, new: Scope) -> str | None:
    names = ("model", "lora", "salt")
    return next((name for name in names if getattr(old, name) != getattr(new, name)), None)


def lost_reason(past: PreviousPrompt, facts: MissFacts, now: float) -> tuple[str, dict[str, Any]]:
    emptied_s = facts.last_emptied_s(past.worker)
    if emptied_s is not None and emptied_s >= past.at_s:
        return "worker_lost", {"worker": past.worker, "lost_ago_s": round(now - emptied_s, 3)}
    is_old = facts.has_approximate_cache(past.worker) or now - past.at_s > 5
    return "evicted" if is_old else "not_announced", {"worker": past.worker}


def change_reason(
    past: PreviousPrompt, prompt: AnalyzedPrompt, shared_tokens: int, facts: MissFacts
) -> tuple[str, dict[str, Any]]:
    reason, message = "edited", None
    if past.outline is not None and prompt.outline is not None:
        reason, message = difference(past.outline, prompt.outline, shared_tokens / len(past.ids))
        tail, count = past.ids[shared_tokens:], len(messages(past.outline))
        new_system_positions = [
            at for at, one in enumerate(messages(prompt.outline)) if at >= count and one[3] & 7 == SYSTEM
        ]
        if reason == "re_encoded" and len(tail) > 16 and new_system_positions:
            return "system_prompt", {"position": shared_tokens, "message": new_system_positions[0]}
        if reason == "re_encoded" and len(tail) <= 16 and answer_reason(messages(prompt.outline), count) is not None:
            reason, message = "thinking_dropped" if facts.is_thinking(past.scope.model, tail) else reason, count
    return reason, {"position": shared_tokens, "message": message}


def difference(before: Outline, after: Outline, share: float) -> tuple[str, int | None]:
    old, new = messages(before), messages(after)
    if before.tools_digest != after.tools_digest:
        return "tools", None
    changed_positions = [at for at, (message, new_message) in enumerate(zip(old, new)) if message[0] != new_message[0]]
    if changed_positions:
        characters_shared = (share - 0.1) * sum(message[4] for message in old)
        late_positions = [
            at for at in changed_positions if sum(message[4] for message in old[: at + 1]) >= characters_shared
        ]
        at = changed_positions[0] if len(changed_positions) == 1 else (late_positions or changed_positions[-1:])[0]
        return message_change(old, new, at), at
    if len(new) < len(old):
        return "truncated", len(new)
    if before.options_digest != after.options_digest:
        return "template_flag", None
    last_user = max((at for at, message in enumerate(old) if message[3] & 7 == USER), default=-1)
    thoughts = [at for at, message in enumerate(old) if at > last_user and message[3] & THINKS]
    return ("thinking_dropped", thoughts[0]) if thoughts else ("re_encoded", None)


def message_change(old: list[Message], new: list[Message], at: int) -> str:
    old_message, new_message = old[at], new[at]
    if len(new) < len(old) or new_message[0] in [later_message[0] for later_message in old[at + 1 :]]:
        return "truncated"
    kind = old_message[3] | new_message[3]
    if old_message[2] == new_message[2] and kind & BILLED:
        return "billing_line"
    if old_message[1] == new_message[1]:
        return "tool_arguments"
    if old_message[2] == new_message[2] and kind & THINKS:
        return "thinking_dropped"
    return "system_prompt" if new_message[3] & 7 == SYSTEM else "edited"


def answer_reason(chat: list[Message], at: int) -> str | None:
    if at >= len(chat) or chat[at][3] & 7 != ASSISTANT:
        return None
    return "thinking_dropped" if chat[at][3] & THINKS else "tool_arguments" if chat[at][3] & CALLS else "re_encoded"


def check_adds_up(why: MissExplanation) -> None:
    """Assert that the parts are all that was not reused, in order and without a gap."""
    reused_tokens = (
        why.predicted_cached_tokens
        if why.reported_cached_tokens is None
        else min(why.reported_cached_tokens, why.prompt_tokens)
    )
    edges = [(part.start, part.end) for part in why.uncached_ranges]
    assert all(start < end for start, end in edges), why
    assert [start for start, _ in edges] + [why.prompt_tokens] == [reused_tokens] + [end for _, end in edges], why
    assert all(part.reason in NOT_LOST or part.reason in GROUPS for part in why.uncached_ranges), why
