"""Masks of the tokens that constrained answers may draw next: made on a thread beside the forward pass.

For each constrained sequence a matcher is kept in the sequence's row (see `RowAllocator`). A row costs nothing while
its answer is not constrained, at all or yet (`Constraint.reasoning_end_token`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.grammars import GrammarCompiler, describe_failure, summarize_error
from engine.types import Constraint, Sequence
from kernels.transfer import copy_to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MaskWords = npt.NDArray[np.uint32]
ALL_ALLOWED = 0xFFFFFFFF
"""Word of a mask that allows all its 32 tokens."""


@dataclass(slots=True)
class _MatcherState:
    """A grammar's matcher, and the number of tokens of the answer that it has read."""

    constraint: Constraint
    matcher: LLMatcher | None = None
    """None: the constrained part of the answer has not begun."""
    read_tokens: int = 0
    """Number of the answer's tokens that the matcher has read, or is about to read."""
    failure: str | None = None
    """Reason why the answer cannot go on."""
    is_reasoning: bool | None = None
    """Whether the answer is still in its reasoning; None: its first token will show that."""


@dataclass(slots=True)
class MaskRequest:
    """Inputs of one row's mask that the host knows when the step is prepared."""

    logits_row: int
    """Index of the row among the logits of the step."""
    state_row: int
    """Row of the sequence in the tables that are kept between steps; see `RowAllocator`."""
    state: _MatcherState
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
        self._matcher_states: dict[int, _MatcherState] = {}
        """Matcher of the sequence in each row of the per-sequence tables."""

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the matchers of these rows, because other sequences get the rows."""
        for row in rows:
            self._matcher_states.pop(row, None)

    def make_request(
        self, logits_row: int, state_row: int, seq: Sequence, end: int, banned_tokens: list[int]
    ) -> MaskRequest:
        """Collect the inputs of the mask of the tokens that a sequence's grammar allows at position `end`.

        `logits_row`: row of the sequence in the logits of this step. `state_row`: its row in the tables that are kept
        from step to step. `banned_tokens`: tokens that min_tokens forbids. The mask is made after the grammar matcher
        has read all tokens before `end`. The last of them may still be on the device, where the previous step draws it.
        """
        state = self._get_matcher_state(state_row, seq)
        host_end = min(end, len(seq.token_ids))
        unread_tokens = seq.token_ids[seq.prompt_len + state.read_tokens : host_end]
        tokens_on_device = end - host_end
        state.read_tokens += len(unread_tokens) + tokens_on_device
        return MaskRequest(logits_row, state_row, state, unread_tokens, tokens_on_device > 0, banned_tokens)

    def _get_matcher_state(self, state_row: int, seq: Sequence) -> _MatcherState:
        """Return the matcher state of the sequence in a row. It is made for the first mask of the sequence."""
        state = self._matcher_states.get(state_row)
        if state is None:
            constraint = seq.request.params.constraint
            assert constraint is not None
            state = self._matcher_states[state_row] = _MatcherState(constraint)
            if constraint.reasoning_end_token is None:
                state.is_reasoning = False
            elif constraint.reasoning_start_token is None:
                state.is_reasoning = True
        return state

    def submit(
        self, requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> Future[TokenMasks]:
        """Make masks on the thread. `read_last_tokens` waits for the previous step, and returns row -> drawn token."""
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

        Before that, each answer's grammar matcher reads the tokens that the answer got since its last mask. The newest
        one may still be on the device: `read_last_tokens` waits for it, and returns the last tokens by `state_row`.
        """
        last_tokens: Mapping[int, int] = {}
        if any(request.has_token_on_device for request in requests):
            last_tokens = read_last_tokens()
        masked_requests = [request for request in requests if self._read_new_tokens(request, last_tokens)]
        words_per_mask = ceil_div(self._grammars.vocabulary.token_count, 32)  # a bit for each token
        masks = np.full((len(masked_requests), words_per_mask), ALL_ALLOWED, np.uint32)
        self._fill_bits([request.state for request in masked_requests], masks)
        failure_by_logits_row: dict[int, str] = {}
        for request, mask in zip(masked_requests, masks):
            failure = _finish_mask(request, mask)
            if failure is not None:
                failure_by_logits_row[request.logits_row] = failure
        logits_rows = [request.logits_row for request in masked_requests]
        return TokenMasks(logits_rows, masks, failure_by_logits_row)

    def _read_new_tokens(self, request: MaskRequest, last_tokens: Mapping[int, int]) -> bool:
        """Let a row's grammar matcher read the new tokens. Returns whether the row needs a mask.

        `last_tokens`: token that the previous step drew, by state row, for rows with a token on the device.
        """
        new_tokens = request.new_tokens
        if request.has_token_on_device:
            new_tokens = [*new_tokens, last_tokens[request.state_row]]
        constrained_tokens = _skip_reasoning(request.state, new_tokens)
        if constrained_tokens is None:
            return bool(request.banned_tokens)
        self._advance_matcher(request.state, constrained_tokens)
        return True

    def _advance_matcher(self, state: _MatcherState, constrained_tokens: list[int]) -> None:
        """Let an answer's grammar matcher read the tokens that the answer has got.

        If a token does not match, or the matcher fails, `state.failure` gets the reason, with which the answer ends.
        """
        if state.failure is not None:
            return
        try:
            if state.matcher is None:
                state.matcher = self._grammars.make_matcher(state.constraint.lark_grammar)
            for token in constrained_tokens:
                if state.matcher.is_stopped():  # the grammar's text is complete, but with ignore_eos the answer goes on
                    break
                if not state.matcher.consume_token(token):
                    state.failure = f"the answer so far does not match: {summarize_error(state.matcher)}"
                    break
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
            state.failure = describe_failure(error)

    def _fill_bits(self, states: list[_MatcherState], bits: MaskWords) -> None:
        """Write to `bits[i]` the tokens that the grammar matcher of `states[i]` allows next, a bit for each token.

        A row stays as it is if no grammar binds the next token. Several masks are made in parallel. If that fails, they
        are made one by one, so that only the matcher at fault gets a `failure`.
        """
        live_rows = [index for index, state in enumerate(states) if _has_live_matcher(state)]
        if len(live_rows) > 1 and self._threads > 1:
            try:
                self._fill_bits_in_parallel([(states[index].matcher, index) for index in live_rows], bits)
                return
            except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
                describe_failure(error)  # logs the error
        for index in live_rows:
            matcher = states[index].matcher
            assert matcher is not None
            try:
                matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, bits[index].nbytes)
            except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
                states[index].failure = describe_failure(error)

    def _fill_bits_in_parallel(self, matchers: list[Any], bits: MaskWords) -> None:
        """Write to `bits[index]`, for each (matcher, index), the tokens that the matcher allows next."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))


def _skip_reasoning(state: _MatcherState, new_tokens: list[int]) -> list[int] | None:
    """Return the new tokens of an answer that its grammar must match: those after the reasoning, which is free text.

    Returns None while the reasoning goes on. The first token of an answer shows whether it begins with reasoning. Until
    that token comes, `state.is_reasoning` is None.
    """
    constraint = state.constraint
    if state.failure is not None:  # the answer ends with an error now
        return new_tokens
    if state.is_reasoning is None and new_tokens:
        start_token = constraint.reasoning_start_token
        state.is_reasoning = start_token is None or new_tokens[0] == start_token
    if not state.is_reasoning:
        return new_tokens
    if constraint.reasoning_end_token not in new_tokens:
        return None
    state.is_reasoning = False
    end_index = new_tokens.index(constraint.reasoning_end_token)
    return new_tokens[end_index + 1 :]


def _finish_mask(request: MaskRequest, row_bits: MaskWords) -> str | None:
    """Complete an answer's mask of allowed tokens, in place: forbid what min_tokens bans, and let reasoning begin.

    If the answer cannot go on, because its grammar matcher failed, allows all tokens and returns the reason.
    """
    state = request.state
    matcher = state.matcher
    if state.failure is None and matcher is not None and matcher.is_error():
        state.failure = summarize_error(matcher)
    if state.failure is not None:
        row_bits[:] = ALL_ALLOWED
        return state.failure
    if request.banned_tokens:
        _ban_unless_all(row_bits, request.banned_tokens)
    start_token = state.constraint.reasoning_start_token
    may_begin_reasoning = state.is_reasoning is None
    if start_token is not None and may_begin_reasoning:
        word, bit = divmod(start_token, 32)
        row_bits[word] |= np.uint32(1 << bit)
    return None


def _has_live_matcher(state: _MatcherState) -> bool:
    """Return whether the next token must match the grammar. Reasoning that has begun is free."""
    return state.failure is None and state.matcher is not None and not state.is_reasoning


def _ban_unless_all(bits: MaskWords, tokens: list[int]) -> None:
    """Forbid tokens, unless no allowed token would be left."""
    remaining_bits = bits.copy()
    for token in tokens:
        remaining_bits[token // 32] &= ~np.uint32(1 << token % 32)
    if remaining_bits.any():
        bits[:] = remaining_bits
