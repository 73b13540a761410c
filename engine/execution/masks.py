"""Masks of the tokens that constrained answers may draw next: made on a thread beside the forward pass.

For each constrained sequence a matcher is kept in the sequence's row (see `RowAllocator`). A row costs nothing while
its answer is not constrained, at all or yet (`Constraint.reasoning_end_token`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.grammar_compiler import GrammarCompiler, describe_failure, summarize_error
from engine.types import Constraint, Sequence
from kernels.host_copies import copy_to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MaskWords = npt.NDArray[np.uint32]
ALL_ALLOWED = 0xFFFFFFFF
"""Word of a mask that allows all its 32 tokens."""


class _AnswerPart(Enum):
    """Part of an answer to which its next token belongs. The first token shows whether it begins with reasoning."""

    FIRST_TOKEN = "first token"
    REASONING = "reasoning"  # free text, up to its end token
    CONSTRAINED = "constrained"  # text that must match the grammar


class _AnswerMatcher:
    """Lets the grammar's matcher read one answer, and says which tokens may come next.

    The grammar binds the answer after its reasoning, which is free text. If the answer does not match, or the matcher
    fails, `failure` is the reason, with which the answer ends.
    """

    def __init__(self, constraint: Constraint, grammars: GrammarCompiler) -> None:
        self._constraint = constraint
        self._grammars = grammars
        self.matcher: LLMatcher | None = None
        """None: the constrained part of the answer has not begun."""
        self.requested_tokens = 0
        """Number of the answer's tokens that were read, or are in a `MaskRequest`."""
        self.failure: str | None = None
        self.part = _AnswerPart.FIRST_TOKEN
        if constraint.reasoning_end_token is None:
            self.part = _AnswerPart.CONSTRAINED
        elif constraint.reasoning_start_token is None:  # the prompt has begun the reasoning
            self.part = _AnswerPart.REASONING

    def read(self, new_tokens: list[int]) -> None:
        """Read the tokens that the answer got since the last call, before the mask of its next token is made.

        The matcher reads those of the constrained part. Sets `failure` if they do not match the grammar.
        """
        if self.failure is None:
            constrained_tokens = self._skip_reasoning(new_tokens)
            if not self.is_reasoning:
                self._match(constrained_tokens)

    @property
    def is_reasoning(self) -> bool:
        return self.part is _AnswerPart.REASONING

    def _skip_reasoning(self, new_tokens: list[int]) -> list[int]:
        """Return those of the answer's next tokens that come after its reasoning, and set `part` to the last one's."""
        constraint = self._constraint
        if self.part is _AnswerPart.FIRST_TOKEN and new_tokens:
            begins_reasoning = new_tokens[0] == constraint.reasoning_start_token
            self.part = _AnswerPart.REASONING if begins_reasoning else _AnswerPart.CONSTRAINED
        if not self.is_reasoning:
            return new_tokens
        if constraint.reasoning_end_token not in new_tokens:
            return []
        self.part = _AnswerPart.CONSTRAINED
        return new_tokens[new_tokens.index(constraint.reasoning_end_token) + 1 :]

    def _match(self, new_tokens: list[int]) -> None:
        """Let the matcher read tokens of the constrained part. At the first call, the matcher is made."""
        try:
            if self.matcher is None:
                self.matcher = self._grammars.make_matcher(self._constraint.lark_grammar)
            for token in new_tokens:
                if self.matcher.is_stopped():  # the grammar's text is complete, but with ignore_eos the answer goes on
                    break
                if not self.matcher.consume_token(token):
                    self.failure = f"the answer so far does not match: {summarize_error(self.matcher)}"
                    break
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
            self.failure = describe_failure(error)

    @property
    def binds_next_token(self) -> bool:
        """Whether the next token must match the grammar. Reasoning that has begun is free."""
        return self.failure is None and not self.is_reasoning

    def finish_mask(self, bits: MaskWords, banned_tokens: list[int]) -> None:
        """Complete the mask of the tokens that the grammar allows next, in place.

        Forbids the `banned_tokens` of min_tokens, and allows the token that begins reasoning, if it may come now. If
        the matcher failed, all tokens are allowed, because the answer ends with an error.
        """
        if self.failure is None and self.matcher is not None and self.matcher.is_error():
            self.failure = summarize_error(self.matcher)
        if self.failure is not None:
            bits[:] = ALL_ALLOWED
            return
        if banned_tokens:
            _ban_unless_all(bits, banned_tokens)
        if self.part is _AnswerPart.FIRST_TOKEN:
            start_token = self._constraint.reasoning_start_token
            assert start_token is not None
            word, bit = divmod(start_token, 32)
            bits[word] |= np.uint32(1 << bit)


@dataclass(slots=True)
class MaskRequest:
    """Inputs of one row's mask that the host knows when the step is prepared."""

    logits_row: int
    """Row of the sequence in the logits of this step."""
    state_row: int
    """Row that the sequence keeps from step to step, in the tables of all running sequences (`RowAllocator`)."""
    answer: _AnswerMatcher
    new_tokens: list[int]
    """Tokens of the answer that the matcher has not read."""
    has_token_on_device: bool
    """Whether the matcher must read one more token, which the previous step draws."""
    banned_tokens: list[int]
    """Tokens that min_tokens bans now, unless the grammar allows no others."""


@dataclass(slots=True)
class TokenMasks:
    """The masks of one step's constrained rows."""

    logits_rows: list[int]
    """Rows of the logits that have a mask."""
    bits: MaskWords
    """[masks, words]: a bit for each token, set if the token may be drawn."""
    failures: dict[int, str]
    """Row of the logits -> reason why the answer cannot go on; the token drawn in that row means nothing."""


class Masks:
    """Makes the masks of constrained rows, on a thread beside the forward pass. Must be closed."""

    def __init__(self, grammars: GrammarCompiler, vocab_size: int, device: torch.device, threads: int) -> None:
        """Start without matchers. `vocab_size`: number of logits. `threads`: threads that make masks at once."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None
        is_allowed = torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1
        self._summands_by_byte = torch.where(is_allowed, 0.0, float("-inf")).to(device)
        """[256, 8]: values to add to the logits of eight tokens, by the byte of their mask bits."""
        self._answer_by_row: dict[int, _AnswerMatcher] = {}
        """Matcher of the sequence in each row of the per-sequence tables, from the sequence's first mask on."""

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the matchers of these rows, because other sequences get the rows."""
        for row in rows:
            self._answer_by_row.pop(row, None)

    def make_request(
        self, logits_row: int, state_row: int, seq: Sequence, end: int, banned_tokens: list[int]
    ) -> MaskRequest:
        """Collect the inputs of the mask of the tokens that a sequence's grammar allows at position `end`.

        The other parameters: see `MaskRequest`. The mask is made after the grammar matcher has read all tokens before
        `end`. The last of them may still be on the device, where the previous step draws it.
        """
        answer = self._answer_by_row.get(state_row)
        if answer is None:
            constraint = seq.request.params.constraint
            assert constraint is not None
            answer = self._answer_by_row[state_row] = _AnswerMatcher(constraint, self._grammars)
        host_end = min(end, len(seq.token_ids))
        unread_tokens = seq.token_ids[seq.prompt_len + answer.requested_tokens : host_end]
        tokens_on_device = end - host_end
        answer.requested_tokens += len(unread_tokens) + tokens_on_device
        return MaskRequest(logits_row, state_row, answer, unread_tokens, tokens_on_device > 0, banned_tokens)

    def submit(
        self, requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> Future[TokenMasks]:
        """Make masks on the thread. `read_last_tokens` waits for the previous step: `state_row` -> drawn token."""
        return self._thread.submit(self._compute_masks, requests, read_last_tokens)

    def apply(self, logits: Tensor, masks: TokenMasks) -> None:
        """Set the logits [rows, vocab] of forbidden tokens to -inf, in place."""
        if not masks.logits_rows:
            return
        mask_bytes = copy_to_device(masks.bits.view(np.uint8).reshape(-1), self._device)
        summands = self._summands_by_byte.index_select(0, mask_bytes.int()).view(len(masks.logits_rows), -1)
        logits_rows = copy_to_device(np.array(masks.logits_rows, np.int64), self._device)
        logits.index_add_(0, logits_rows, summands[:, : self._vocab_size])

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compute_masks(
        self, requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> TokenMasks:
        """Make the masks of the tokens that may be drawn next, one for each answer that may not draw every token now.

        An answer in its reasoning may draw every token, unless min_tokens bans some. `read_last_tokens`: see `submit`.
        """
        _read_new_tokens(requests, read_last_tokens)
        masked_requests = [request for request in requests if request.banned_tokens or not request.answer.is_reasoning]
        words_per_mask = ceil_div(self._grammars.vocabulary.token_count, 32)  # a bit for each token
        masks = np.full((len(masked_requests), words_per_mask), ALL_ALLOWED, np.uint32)
        self._fill_bits([request.answer for request in masked_requests], masks)
        for request, mask in zip(masked_requests, masks):
            request.answer.finish_mask(mask, request.banned_tokens)
        failures = {r.logits_row: r.answer.failure for r in masked_requests if r.answer.failure is not None}
        return TokenMasks(logits_rows=[r.logits_row for r in masked_requests], bits=masks, failures=failures)

    def _fill_bits(self, answers: list[_AnswerMatcher], bits: MaskWords) -> None:
        """Write to `bits[i]` the tokens that the grammar matcher of `answers[i]` allows next, a bit for each token.

        A row stays as it is if no grammar binds the next token. Several masks are made in parallel. If that fails, they
        are made one by one, so that only the matcher at fault gets a `failure`.
        """
        bound_rows = [row for row, answer in enumerate(answers) if answer.binds_next_token]
        if len(bound_rows) > 1 and self._threads > 1:
            try:
                self._fill_bits_in_parallel([(answers[row].matcher, row) for row in bound_rows], bits)
                return
            except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
                describe_failure(error)  # logs the error
        for row in bound_rows:
            matcher = answers[row].matcher
            assert matcher is not None
            try:
                matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
            except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
                answers[row].failure = describe_failure(error)

    def _fill_bits_in_parallel(self, matchers: list[Any], bits: MaskWords) -> None:
        """Write to `bits[row]`, for each (matcher, row), the tokens that the matcher allows next."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))


def _read_new_tokens(requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]) -> None:
    """Let each answer's matcher read the tokens that the answer got since its last mask, also one on the device."""
    last_tokens: Mapping[int, int] = {}
    if any(request.has_token_on_device for request in requests):
        last_tokens = read_last_tokens()  # of the previous step, by `state_row`
    for request in requests:
        device_tokens = [last_tokens[request.state_row]] if request.has_token_on_device else []
        request.answer.read([*request.new_tokens, *device_tokens])


def _ban_unless_all(bits: MaskWords, tokens: list[int]) -> None:
    """Forbid tokens, unless no allowed token would be left."""
    remaining_bits = bits.copy()
    for token in tokens:
        remaining_bits[token // 32] &= ~np.uint32(1 << token % 32)
    if remaining_bits.any():
        bits[:] = remaining_bits
