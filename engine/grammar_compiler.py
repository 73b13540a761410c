"""Compiles the grammars of constrained answers, with llguidance: outside of steps, bounded and cached.

A client's grammar may be too large, too slow, or crash its compiler. So `check_grammar` runs first, in a process that
may die (`engine.http.body_workers`). A grammar that passes is compiled again in the core, on a thread, by
`GrammarCompiler`. Each mask has limits, too: a matcher that exceeds one fails for good, with an error for its request.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

from prompts import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

GRAMMARS_MAX = 256
GRAMMAR_CHARS_MAX = 16 << 20
"""Most characters of all cached grammars, unless there is only one; `GRAMMARS_MAX` bounds their number."""
_POSITION_PREFIX = re.compile(r"^at \d+\(\d+\): ")
"""Position in the generated grammar, which means nothing to a client."""
_EXCERPT = re.compile(r"\s*(\d+ \||\^+\s*$|$)")
"""Lines of an error that quote the grammar, or point at a place in it."""
_NO_STATE = " <non-verbose/>"
"""Mark of llguidance where `verbose_errors` would show its state."""
_NO_TOKEN_ALLOWED = "NoExtensionBias"
_ERROR_PREFIX = "failed to compile JSON schema: "
ERROR_CHARS_MAX = 400
WALK_TOKENS = 96
WALK_S_MAX = 1.0
"""Most CPU seconds for `WALK_TOKENS` tokens: a hundred times those of a slow schema in use."""


def find_unsupported_reason(tokenizer: Tokenizer) -> str | None:
    """Return the reason why answers cannot be constrained here; None: they can."""
    if find_spec("llguidance") is None:
        return "the package `llguidance` is missing on the server: install blockcast[engine]"
    if not tokenizer.eos_token_ids:
        return "this model's tokenizer names no token that ends an answer"
    return None


def read_added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return text -> id of each token that was added to the vocabulary, such as special tokens."""
    return {token.content: token_id for token_id, token in tokenizer.hf_tokenizer.get_added_tokens_decoder().items()}


class GrammarError(ValueError):
    """Error of a grammar that cannot be compiled or followed. The message is for the client."""


class GrammarVocabulary:
    """A model's vocabulary as the library llguidance needs it to compile grammars, which constrain answers.

    A large vocabulary takes seconds to convert, and tens of megabytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Convert a tokenizer's vocabulary. `vocab_size`: number of logits, which may be more than there are tokens."""
        from llguidance import LLParserLimits, LLTokenizer

        self.token_count = max(vocab_size, tokenizer.vocab_size)
        """Number of bits in a mask of allowed tokens."""
        self.added_tokens = read_added_tokens(tokenizer)
        self.end_token_ids = [token for token in tokenizer.eos_token_ids if token < self.token_count]
        self.ll_tokenizer: LLTokenizer = LLTokenizer(
            tokenizer.hf_tokenizer.to_str(),
            n_vocab=self.token_count,
            eos_token=self.end_token_ids,
            slices=LLTokenizer.json_slices(),  # makes masks for JSON faster
        )
        # Below llguidance's defaults, because a client's grammar must not delay the requests of others.
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000,
            step_lexer_fuel=50_000,
            step_max_items=10_000,
            max_items_in_row=1_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )

    def compile(self, lark: str) -> LLMatcher:
        """Compile a grammar in Lark. Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.ll_tokenizer, lark, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(summarize_error(matcher))
        return matcher


class GrammarCompiler:
    """Compiles the grammars that answers must match on a thread, and caches the results. Must be closed.

    A grammar is text in Lark's format. It is compiled to a matcher, which reads the tokens of an answer and tells which
    tokens may come next. A request waits for `start_compiling` before it is scheduled, and then gets a copy of the
    cached matcher.
    """

    def __init__(self, load: Callable[[], GrammarVocabulary]) -> None:
        """Start without grammars. `load`: makes the vocabulary. It is called on the compiling thread."""
        self._compile_executor = ThreadPoolExecutor(1, "grammar")
        self._lock = Lock()
        self._load_vocabulary = load
        self._future_by_grammar: dict[str, Future[LLMatcher]] = {}
        """Compilations that have not ended, or ended only now."""
        self._matcher_by_grammar: OrderedDict[str, LLMatcher] = OrderedDict()
        """Matchers of recent grammars, the least recently used first."""

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """Vocabulary, which is made for the first constrained answer."""
        return self._load_vocabulary()

    def start_compiling(self, lark: str) -> Future[LLMatcher] | None:
        """Start to compile a grammar. Returns a future, which may raise GrammarError; None: the grammar is cached."""
        if lark in self._matcher_by_grammar:
            return None
        future = self._future_by_grammar.get(lark)
        if future is None or future.done():
            self._future_by_grammar = {text: f for text, f in self._future_by_grammar.items() if not f.done()}
            future = self._compile_executor.submit(self._compile, lark)
            self._future_by_grammar[lark] = future
        return future

    def make_matcher(self, lark: str) -> LLMatcher:
        """Return a matcher for a new answer. Raises GrammarError."""
        with self._lock:
            cached_matcher = self._matcher_by_grammar.get(lark)
            if cached_matcher is not None:
                self._matcher_by_grammar.move_to_end(lark)
        if cached_matcher is None:  # evicted since it was compiled
            cached_matcher = self._compile(lark)
        return cached_matcher.deep_copy()

    def close(self) -> None:
        self._compile_executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, lark: str) -> LLMatcher:
        """Compile a grammar and cache its matcher, evicting the oldest ones. Raises GrammarError."""
        matcher = self.vocabulary.compile(lark)
        matcher.compute_bitmask()  # the first one costs most: now, not in a step
        with self._lock:
            matchers = self._matcher_by_grammar
            matchers[lark] = matcher
            while len(matchers) > GRAMMARS_MAX or (len(matchers) > 1 and sum(map(len, matchers)) > GRAMMAR_CHARS_MAX):
                matchers.popitem(last=False)
        return matcher


def check_grammar(vocabulary: GrammarVocabulary, grammar_text: str) -> str:
    """Check a client's grammar, in Lark or GBNF, by drawing a random answer from it, and return the grammar in Lark.

    Raises GrammarError if the grammar cannot be used, or takes too long. The compiler may crash on a hostile grammar,
    so this runs in a process of its own.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(grammar_text)
    except Exception as error:
        raise GrammarError(f"not a grammar in GBNF: {error}") from error
    matcher = vocabulary.compile(lark)
    rng = random.Random(0)
    begin_s = time.thread_time()
    for _ in range(WALK_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(summarize_error(matcher))
        if time.thread_time() - begin_s > WALK_S_MAX:
            raise GrammarError(f"too slow to follow: {WALK_TOKENS} tokens take more than {WALK_S_MAX:g} s")
        if matcher.is_stopped():
            break
        matcher.consume_token(_draw_allowed_token(mask, rng))
    return lark


def describe_failure(error: BaseException) -> str:
    """Return why a matcher cannot go on, for the client. Raises `error` again if it is to end this program."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    if isinstance(error, GrammarError):
        return str(error)
    log.error("a grammar's matcher failed", exc_info=error)
    return f"the grammar cannot be followed: {type(error).__name__}: {error}"[:ERROR_CHARS_MAX]


def summarize_error(matcher: LLMatcher) -> str:
    """Return the matcher's error in one line, without the excerpts of the grammar."""
    lines = _POSITION_PREFIX.sub("", matcher.get_error()).splitlines()
    message = " ".join(line.strip() for line in lines if not _EXCERPT.match(line))
    message = message.removeprefix(_ERROR_PREFIX).removesuffix(_NO_STATE)
    if message == _NO_TOKEN_ALLOWED:
        return "no text can match it"
    return message[:ERROR_CHARS_MAX] or "unknown error"


def _draw_allowed_token(mask: bytes, rng: random.Random) -> int:
    """Draw a token that the mask allows. The mask has one bit for each token.

    The first byte with an allowed token after a random start is taken. `lstrip` finds it, because a loop over a mask
    of which few bits are set would take a millisecond for each token.
    """
    start = rng.randrange(len(mask))
    rotated_mask = mask[start:] + mask[:start]
    skipped_bytes = len(rotated_mask) - len(rotated_mask.lstrip(b"\0"))
    byte_index = (start + skipped_bytes) % len(mask)
    return 8 * byte_index + rng.choice([bit for bit in range(8) if mask[byte_index] >> bit & 1])
