"""Answers of a simulated engine that must match a grammar: a few words as free text, and an early end."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from engine.grammar_compiler import GrammarCompiler, GrammarError, summarize_error
from engine.types import Sequence
from options.bounded_dict import BoundedDict
from prompts import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

CLOSING_TEXTS = ('"', "}", "]", ",")
"""Texts that end a part of JSON, chosen whenever the grammar allows. Strings come first, as they may hold brackets."""
PARAMETER_END_TAG = "</parameter>"
TAG_END = f"\n{PARAMETER_END_TAG}\n"
"""End of an argument of a tool call without quotation marks. The argument may contain all `CLOSING_TEXTS`."""
DEFAULT_ANSWER_TOKENS = 12
"""Tokens after which an answer ends as soon as it may, if the simulation gives no length."""
MAX_CANDIDATES = 64
MAX_MATCHERS = 4096


@dataclass(slots=True)
class _MatcherState:
    """A matcher, and how much of the answer it has read."""

    matcher: LLMatcher
    read_token_count: int = 0
    forced_token_ids: deque[int] = field(default_factory=deque)
    """Next tokens, which the grammar forces, as the tokenizer encodes their text, so that the next prompt is cached."""


class ConstrainedAnswers:
    """Makes answers of a simulation that match a grammar. The same prompt and grammar give the same answer."""

    def __init__(self, grammars: GrammarCompiler, tokenizer: Tokenizer, eos_token_id: int, length: int | None) -> None:
        """Start without answers. `length`: tokens after which an answer ends as soon as it may; None: a default."""
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._answer_length = DEFAULT_ANSWER_TOKENS if length is None else length
        self._tag_end_ids = tokenizer.hf_tokenizer.encode(TAG_END, add_special_tokens=False).ids
        self._matcher_states: BoundedDict[str, _MatcherState] = BoundedDict(MAX_MATCHERS)

    def next_token(self, seq: Sequence, preferred_token: int) -> int:
        """Return the next token of `seq`, a sequence with an answer that must match a grammar.

        It is the token that the grammar forces, or one of those that it allows: `preferred_token` where possible. The
        grammar does not apply to reasoning. Reasoning that the prompt began ends at once; reasoning that the answer
        begins is of preferred tokens. Raises GrammarError if the answer cannot go on.
        """
        constraint = seq.request.params.constraint
        assert constraint is not None
        answer_tokens = seq.token_ids[seq.prompt_len :]
        reasoning_end = constraint.reasoning_end_token
        prompt_began_reasoning = constraint.reasoning_start_token is None
        first_token = answer_tokens[0] if answer_tokens else preferred_token
        has_reasoning = prompt_began_reasoning or first_token == constraint.reasoning_start_token
        if reasoning_end is not None and has_reasoning:
            if reasoning_end not in answer_tokens:
                return reasoning_end if prompt_began_reasoning else preferred_token
            answer_tokens = answer_tokens[answer_tokens.index(reasoning_end) + 1 :]
        state = self._advance_matcher(seq.request.request_id, constraint.lark_grammar, answer_tokens)
        if not state.forced_token_ids:
            state.forced_token_ids = deque(state.matcher.compute_ff_tokens())
        if state.forced_token_ids:
            return state.forced_token_ids[0]
        has_tags = PARAMETER_END_TAG in constraint.lark_grammar  # tool calls have their arguments between tags
        return self._choose_token(answer_tokens, state, preferred_token, has_tags=has_tags)

    def _choose_token(
        self, answer_tokens: list[int], state: _MatcherState, preferred_token: int, *, has_tags: bool
    ) -> int:
        """Return the first of these tokens that the grammar allows. Raises GrammarError if it allows none.

        The end of the answer, once it is long enough; with `has_tags`, the end tag of a tool call's argument after a
        value; the preferred token, unless the last one was a word; a token that closes a part of JSON; the token that
        the answer has least often.
        """
        allowed_bitmask: bytes = state.matcher.compute_bitmask()  # has a bit for each token
        if state.matcher.is_error():
            raise GrammarError(summarize_error(state.matcher))

        def is_allowed(token: int) -> bool:
            byte_index, bit = token >> 3, token & 7
            return byte_index < len(allowed_bitmask) and bool(allowed_bitmask[byte_index] >> bit & 1)

        may_end = is_allowed(self._eos_token_id)
        may_prefer = is_allowed(preferred_token) and preferred_token != self._eos_token_id
        is_long_enough = len(answer_tokens) + 1 >= self._answer_length
        if may_end and (is_long_enough or not may_prefer):
            return self._eos_token_id
        tag_ids = self._list_next_tag_ids(answer_tokens) if has_tags and not may_end else []
        if tag_ids and state.matcher.validate_tokens(tag_ids) == len(tag_ids):
            state.forced_token_ids = deque(tag_ids)
            return tag_ids[0]
        if may_prefer and (may_end or not self._ends_with_word(answer_tokens)):
            return preferred_token
        candidates = list(islice(filter(is_allowed, self._token_order), MAX_CANDIDATES))
        if not candidates:
            return self._eos_token_id
        if self._tokenizer.hf_tokenizer.decode([candidates[0]]) in CLOSING_TEXTS:
            return candidates[0]
        return min(candidates, key=Counter(answer_tokens).__getitem__)  # the rarest so far, so that repetitions end

    def _advance_matcher(self, request_id: str, lark: str, answer_tokens: list[int]) -> _MatcherState:
        """Let the matcher of a request read the new tokens of its answer, and return its state."""
        matcher_state = self._matcher_states.get(request_id)
        if matcher_state is None or matcher_state.read_token_count > len(answer_tokens):
            matcher_state = _MatcherState(self._grammars.make_matcher(lark))
        for token in answer_tokens[matcher_state.read_token_count :]:
            if matcher_state.forced_token_ids and matcher_state.forced_token_ids.popleft() != token:
                matcher_state.forced_token_ids.clear()
            if matcher_state.matcher.is_stopped() or not matcher_state.matcher.consume_token(token):
                break
        matcher_state.read_token_count = len(answer_tokens)
        self._matcher_states[request_id] = matcher_state
        return matcher_state

    def _list_next_tag_ids(self, answer_tokens: list[int]) -> list[int]:
        """Return the tokens of TAG_END that are to come, if the answer ends with a value, perhaps with some of them.

        Another engine may have written these. Without a value, no token is to come.
        """
        for written_count in reversed(range(len(self._tag_end_ids))):
            value_index = len(answer_tokens) - written_count - 1
            is_written = answer_tokens[value_index + 1 :] == self._tag_end_ids[:written_count]
            if value_index >= 0 and is_written and self._is_value(answer_tokens[value_index]):
                return self._tag_end_ids[written_count:]
        return []

    def _is_value(self, token: int) -> bool:
        last_char = self._tokenizer.hf_tokenizer.decode([token])[-1:]
        return last_char.isalnum() or last_char in CLOSING_TEXTS[:3]

    def _ends_with_word(self, answer_tokens: list[int]) -> bool:
        return bool(answer_tokens) and self._tokenizer.hf_tokenizer.decode(answer_tokens[-1:]).strip().isalpha()

    @cached_property
    def _token_order(self) -> list[int]:
        """All token ids in the order of preference: closing texts, words, other texts, white space."""
        return sorted(range(self._grammars.vocabulary.token_count), key=self._get_sort_key)

    def _get_sort_key(self, token: int) -> tuple[int, int]:
        text = self._tokenizer.hf_tokenizer.decode([token], skip_special_tokens=False)
        if text in CLOSING_TEXTS:
            return 0, CLOSING_TEXTS.index(text)
        if text.isalnum():
            return 1, token
        return (3, token) if not text or text.isspace() else (2, token)
