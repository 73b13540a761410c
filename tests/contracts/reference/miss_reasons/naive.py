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

from router.decide.messages import Decision, ReportedUsage
from router.index.protocol import Scope
from router.miss_reasons.analyzer import Prompt
from router.miss_reasons.attribution import MissContext, RemovedPrefix
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import GROUPS, MissExplanation, UncachedRange
from router.prompting.chat_outline import Outline

Message = tuple[int, int, int, int, int]
SYSTEM, USER, ASSISTANT = 0, 1, 2
THINKS, BILLED, CALLS = 8, 16, 32
NOT_LOST = ("new_session", "new_text", "partial_block", "not_compared")
BRANCHES = 4


@dataclass(eq=False)
class Past:
    scope: Scope
    ids: list[int]
    outline: Outline | None
    worker: str
    at_s: float
    session: str | None
    is_short: bool
    answer_tokens: int = 0

    @property
    def size(self) -> int:
        outline = self.outline
        return 600 + 4 * len(self.ids) + (0 if outline is None else 256 + len(outline.messages) + len(outline.tools))

    @property
    def known(self) -> int:
        return len(self.ids) + (self.answer_tokens - 1 if self.answer_tokens else 0)


@dataclass(eq=False)
class Begun:
    why: MissExplanation
    labels: list[tuple[Any, ...]]
    """Of each token from the first on: what tells its part from others, and the fields of that."""
    decision: Decision
    past: Past | None = None
    final: bool = False
    is_sampled: bool = False


class NaiveAnalyzer:
    def __init__(self, config: MissReasonsConfig) -> None:
        self.config = config
        self.pasts: list[Past] = []
        """The oldest first."""
        self.owners: dict[int, Past] = {}
        """key -> the last prompt that had it, kept or not."""
        self.last: list[Begun] = []
        self.turns: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def get(self, name: str) -> MissExplanation | None:
        return next((one.why for one in self.last if one.why.id == name), None)

    @property
    def used_bytes(self) -> int:
        return sum(past.size for past in self.pasts)

    @property
    def shorts(self) -> int:
        return sum(past.is_short for past in self.pasts)

    def explain(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
    ) -> MissExplanation:
        return self._explained(prompt, decision, block, gone, facts, now, wall)[0].why

    def record_placed(
        self,
        id: str,
        session: str | None,
        tokens: int,
        decision: Decision,
        gone: RemovedPrefix | None,
        now: float,
        wall: float,
    ) -> Begun:
        prompt = Prompt(id, array("I", range(tokens)), Scope("m"), None, session, is_history_incomplete=True)
        labels = labels_of(prompt, None, 0, decision, 1, gone, None, now)
        begun = Begun(why_of(prompt, decision, wall, labels), labels, decision)
        begun.why.is_compared = False
        self._remember(begun)
        return begun

    def record_compared(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
        is_sampled: bool,
    ) -> Begun:
        while self.pasts and now - self.pasts[0].at_s >= self.config.ttl_s:
            del self.pasts[0]
        begun, instead = self._explained(prompt, decision, block, gone, facts, now, wall)
        is_short = prompt.session is None and not prompt.chunk_keys
        past = Past(
            prompt.scope, list(prompt.token_ids), prompt.outline, decision.worker, now, prompt.session, is_short
        )
        begun.past, begun.final, begun.is_sampled = past, prompt.is_final, is_sampled
        if len(prompt.token_ids) >= block:
            self._put(past, prompt, instead)
        self._remember(begun)
        return begun

    def record_end(self, begun: Begun, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        why, decision = begun.why, begun.decision
        if usage is not None and usage.cached_tokens is not None:
            why.reported_cached_tokens = max(usage.cached_tokens, 0)
            reused = min(why.reported_cached_tokens, why.prompt_tokens)
            vouched = min(max(decision.terms.resident_tokens, reused), why.predicted_cached_tokens)
            begun.labels = [
                ("mispredicted", "mispredicted", {"worker": why.worker}) if reused <= at < vouched
                else ("not announced", "not_announced", {"worker": why.worker})
                if reused <= at < why.predicted_cached_tokens
                else ("reused",) if at < reused
                else label
                for at, label in enumerate(begun.labels)
            ]  # fmt: skip
            sum_up(why, begun.labels)
            self.sums["prompt"] += why.prompt_tokens
            self.sums["best"] += why.best_cached_tokens
            self.sums["chosen"] += why.predicted_cached_tokens
            self.sums["reported"] += why.reported_cached_tokens
        past = begun.past
        if past is None:
            return
        past.answer_tokens, past.at_s = answer_tokens, now
        if begun.is_sampled:
            self.turns[why.reason] += 1
            self.tokens.update(label[1] for label in begun.labels if label[0] not in ("cached", "reused"))
        if begun.final and past.session is not None:
            self.pasts = [one for one in self.pasts if one.session != past.session]

    def _remember(self, begun: Begun) -> None:
        self.last = [one for one in self.last if one.why.id != begun.why.id] + [begun]
        del self.last[: -self.config.requests_max]

    def _put(self, past: Past, prompt: Prompt, instead: Past | None) -> None:
        if instead is not None and instead.session == past.session and instead in self.pasts:
            self.pasts.remove(instead)
        most = self.config.memory_mb << 20
        if past.size > most:
            return
        self.pasts.append(past)
        if past.session is None:
            count, ends = len(prompt.chunk_keys), []
            while count:
                ends.append(prompt.chunk_keys[count - 1])
                count //= 2
            for key in [
                *(ends or prompt.short_keys[-1:]),
                *([] if prompt.opening_key is None else [prompt.opening_key]),
            ]:
                self.owners[key] = past
        else:
            branches = [one for one in self.pasts if one.session == past.session]
            for old in branches[:-BRANCHES]:
                self.pasts.remove(old)
        while self.used_bytes > most:
            del self.pasts[0]

    def _explained(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
    ) -> tuple[Begun, Past | None]:
        past = self._goes_on(prompt) or self._before(prompt)
        common = 0 if past is None else shared(past.ids, prompt.token_ids)
        labels = labels_of(prompt, past, common, decision, block, gone, facts, now)
        why = why_of(prompt, decision, wall, labels)
        why.is_compared = past is not None or not prompt.is_history_incomplete
        return Begun(why, labels, decision), past

    def _goes_on(self, prompt: Prompt) -> Past | None:
        begins = [] if prompt.opening_key is None else [prompt.opening_key]
        for past in self._candidates(prompt.session, None, [*prompt.short_keys, *prompt.chunk_keys, *begins]):
            size = len(past.ids)
            if past.scope == prompt.scope and size and list(prompt.token_ids[:size]) == past.ids:
                return past
        return None

    def _before(self, prompt: Prompt) -> Past | None:
        found = []
        for past in self._candidates(prompt.session, prompt.parent, prompt.chunk_keys):
            common = shared(past.ids, prompt.token_ids)
            if prompt.outline is not None and past.outline is not None:
                own, old = bare(prompt.outline, prompt.session is None), bare(past.outline, past.session is None)
                likeness = len(own & old)
                if not likeness or beside(past.outline, prompt.outline):
                    continue
            elif past.session is not None or common >= min(len(past.ids), len(prompt.token_ids)) / 2:
                likeness = common
            else:
                continue
            found.append((likeness, common, past))
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _candidates(self, session: str | None, parent: str | None, keys: Sequence[int]) -> list[Past]:
        if session is None:
            owners = [self.owners[key] for key in reversed(keys) if key in self.owners]
            return list(dict.fromkeys(past for past in owners if past in self.pasts))[:BRANCHES]
        newest_first = self.pasts[::-1]
        own = [past for past in newest_first if past.session == session]
        return own or [past for past in newest_first if parent is not None and past.session == parent]


def labels_of(
    prompt: Prompt, past: Past | None, common: int, decision: Decision, block: int, gone: RemovedPrefix | None,
    facts: MissContext | None, now: float,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Of each token: ("cached",), or (what tells its part from others, the reason, more fields of the part)."""
    length, best, first = len(prompt.token_ids), decision.most_cached, decision.predicted_cached_tokens
    had = 0 if best is None else best.cached_tokens
    goes_on = past is not None and common == len(past.ids)
    known = 0 if past is None else past.known if goes_on else common
    usable = min(known, length - 1) // block * block
    differs = None if past is None else differing(past.scope, prompt.scope)
    same_session = past is not None and past.session == prompt.session
    missing = min(max(first, had), length)
    looks_for_gone = past is None or differs is not None or missing < usable
    held = gone.end if gone is not None and looks_for_gone else 0
    missing = min(max(missing, held), length)
    is_lost = past is not None and differs is None and missing < min(common, length - 1) // block * block
    answer_from = max(missing, usable) if is_lost else missing

    def label(at: int) -> tuple[Any, ...]:
        if at < first:
            return ("cached",)
        if at < had and best is not None:
            times = {"chosen_ttft_s": decision.terms.ttft_s, "best_ttft_s": best.ttft_s}
            return "cached_elsewhere", "cached_elsewhere", {"worker": best.worker, **times}
        if at < held and gone is not None:
            return "gone", "evicted", {"worker": gone.worker, "lost_ago_s": round(now - gone.removed_s, 3)}
        if past is None:
            return "new", "not_compared" if prompt.is_history_incomplete else "new_session", {}
        assert facts is not None
        if differs is not None and at < common:
            return ("scope", differs, {}) if at < common // block * block else ("rest", "partial_block", {})
        if is_lost and at < usable:
            return ("lost", *lost(past, facts, now))
        if not goes_on and same_session and differs is None:
            if at < max(past.known, common + 1):
                return ("differs", *changed(past, prompt, common, facts))
        elif goes_on and answer_from < usable and prompt.outline is not None:
            message = len(messages(past.outline))
            how = answered(messages(prompt.outline), message)
            if how is not None and at < known:
                return "answer", how, {"position": max(answer_from, common), "message": message}
        elif at < known:
            return "rest of it", "partial_block", {}
        return "new", "new_text" if same_session else "new_session", {}

    return [label(at) for at in range(length)]


def why_of(prompt: Prompt, decision: Decision, wall: float, labels: list[tuple[Any, ...]]) -> MissExplanation:
    best = decision.most_cached or decision.terms
    why = MissExplanation(
        prompt.id, wall, prompt.session, decision.worker, len(prompt.token_ids), best.cached_tokens, best.worker,
        decision.predicted_cached_tokens, attempt=decision.attempt,
    )  # fmt: skip
    sum_up(why, labels)
    return why


def sum_up(why: MissExplanation, labels: list[tuple[Any, ...]]) -> None:
    why.uncached_ranges, at = [], 0
    for (name, *_), same in groupby(labels, key=lambda label: label[:1]):
        run = list(same)
        if name not in ("cached", "reused"):
            why.uncached_ranges.append(UncachedRange(run[0][1], at, at + len(run), **run[0][2]))
        at += len(run)
    lost = [part for part in why.uncached_ranges if part.reason not in NOT_LOST]
    why.lost_tokens = sum(part.end - part.start for part in lost)
    main = max(lost or why.uncached_ranges, key=lambda part: part.end - part.start, default=None)
    why.reason = "new_text" if main is None else main.reason
    why.position = None if main is None else main.start if main.position is None else main.position


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def messages(outline: Outline | None) -> list[Message]:
    words = array("I", b"" if outline is None else outline.messages).tolist()
    return [tuple(words[at : at + 5]) for at in range(0, len(words), 5)]  # type: ignore[misc]


def bare(outline: Outline, said: bool) -> set[int]:
    return {one[2] for one in messages(outline) if not said or one[3] & 7 != SYSTEM}


def beside(old: Outline, new: Outline) -> bool:
    """Other tools, another system prompt, and nobody answered what `old` asked."""
    before, after = messages(old), messages(new)
    system, own = ([one[2] for one in chat[:1] if one[3] & 7 == SYSTEM] for chat in (before, after))
    return old.tools != new.tools and system != own and answered(after, len(before)) is None


def differing(old: Scope, new: Scope) -> str | None:
    names = ("model", "lora", "salt")
    return next((name for name in names if getattr(old, name) != getattr(new, name)), None)


def lost(past: Past, facts: MissContext, now: float) -> tuple[str, dict[str, Any]]:
    emptied_s = facts.last_emptied_s(past.worker)
    if emptied_s is not None and emptied_s >= past.at_s:
        return "worker_lost", {"worker": past.worker, "lost_ago_s": round(now - emptied_s, 3)}
    is_old = facts.has_approximate_cache(past.worker) or now - past.at_s > 5
    return "evicted" if is_old else "not_announced", {"worker": past.worker}


def changed(past: Past, prompt: Prompt, common: int, facts: MissContext) -> tuple[str, dict[str, Any]]:
    how, message = "edited", None
    if past.outline is not None and prompt.outline is not None:
        how, message = difference(past.outline, prompt.outline, common / len(past.ids))
        tail, count = past.ids[common:], len(messages(past.outline))
        added = [at for at, one in enumerate(messages(prompt.outline)) if at >= count and one[3] & 7 == SYSTEM]
        if how == "re_encoded" and len(tail) > 16 and added:
            return "system_prompt", {"position": common, "message": added[0]}
        if how == "re_encoded" and len(tail) <= 16 and answered(messages(prompt.outline), count) is not None:
            how, message = "thinking_dropped" if facts.is_thinking(past.scope.model, tail) else how, count
    return how, {"position": common, "message": message}


def difference(before: Outline, after: Outline, share: float) -> tuple[str, int | None]:
    old, new = messages(before), messages(after)
    if before.tools != after.tools:
        return "tools", None
    others = [at for at, (one, other) in enumerate(zip(old, new)) if one[0] != other[0]]
    if others:
        parting = (share - 0.1) * sum(one[4] for one in old)
        reached = [at for at in others if sum(one[4] for one in old[: at + 1]) >= parting]
        at = others[0] if len(others) == 1 else (reached or others[-1:])[0]
        return how_changed(old, new, at), at
    if len(new) < len(old):
        return "truncated", len(new)
    if before.options_digest != after.options_digest:
        return "template_flag", None
    asked = max((at for at, one in enumerate(old) if one[3] & 7 == USER), default=-1)
    thoughts = [at for at, one in enumerate(old) if at > asked and one[3] & THINKS]
    return ("thinking_dropped", thoughts[0]) if thoughts else ("re_encoded", None)


def how_changed(old: list[Message], new: list[Message], at: int) -> str:
    one, other = old[at], new[at]
    if len(new) < len(old) or other[0] in [later[0] for later in old[at + 1 :]]:
        return "truncated"
    kind = one[3] | other[3]
    if one[2] == other[2] and kind & BILLED:
        return "billing_line"
    if one[1] == other[1]:
        return "tool_arguments"
    if one[2] == other[2] and kind & THINKS:
        return "thinking_dropped"
    return "system_prompt" if other[3] & 7 == SYSTEM else "edited"


def answered(chat: list[Message], at: int) -> str | None:
    if at >= len(chat) or chat[at][3] & 7 != ASSISTANT:
        return None
    return "thinking_dropped" if chat[at][3] & THINKS else "tool_arguments" if chat[at][3] & CALLS else "re_encoded"


def check_adds_up(why: MissExplanation) -> None:
    """Assert that the parts are all that was not reused, in order and without a gap."""
    reused = (
        why.predicted_cached_tokens
        if why.reported_cached_tokens is None
        else min(why.reported_cached_tokens, why.prompt_tokens)
    )
    edges = [(part.start, part.end) for part in why.uncached_ranges]
    assert all(start < end for start, end in edges), why
    assert [start for start, _ in edges] + [why.prompt_tokens] == [reused] + [end for _, end in edges], why
    assert all(part.reason in NOT_LOST or part.reason in GROUPS for part in why.uncached_ranges), why
