"""Masks of the tokens that constrained answers may draw next: made on a thread beside the forward pass.

For each constrained sequence a matcher is kept in the sequence's row (see `RowAllocator`). A row costs nothing while
its answer is not constrained, at all or yet (`Constraint.reasoning_end_token`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammars import GrammarCompiler, GrammarError, summarize_error
from engine.types import Constraint, Sequence
from kernels.transfer import copy_to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MaskWords = npt.NDArray[np.uint32]
_LOGIT_SUMMANDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)
"""[256, 8]: values to add to the logits of eight tokens, by the byte of their mask bits."""
_LISTED_DIVISOR = 4
"""Tokens are listed one by one if fewer than one in so many is allowed, or forbidden."""
_SHORT_LIST_DIVISOR = 32
"""Sampling reads only the allowed tokens if they are fewer than one in so many."""
_ENTRIES_MAX = 64
"""Most recent masks with a cached list of tokens. The same few masks are used again and again inside a string."""


@dataclass(slots=True)
class _MatcherState:
    """A grammar's matcher, and how much of the answer it has read."""

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
    """Input of the mask of one row, as far as the host knows it when the step is prepared."""

    logits_row: int
    """Index of the row among the logits."""
    state_row: int
    """Row of the state that is kept between steps."""
    state: _MatcherState
    new_tokens: list[int]
    """Tokens of the answer that the matcher has not read."""
    has_token_on_device: bool
    """Whether one more token comes from the previous step."""
    banned_tokens: list[int]
    """Tokens that min_tokens bans now, unless the grammar allows no others."""


@dataclass(slots=True)
class CpuMasks:
    """Masks in the form that is cheapest to apply on a CPU. Indices are into the flat logits [rows * vocab]."""

    forbidden_indices: npt.NDArray[np.int64]
    """Forbidden tokens of rows with most tokens allowed."""
    sparse_rows: list[int]
    """Rows with few tokens allowed."""
    allowed_indices: npt.NDArray[np.int64]
    """Allowed tokens of the `sparse_rows`."""
    dense_rows: list[tuple[int, npt.NDArray[np.float32]]]
    """(row, summands [vocab]: -inf for a forbidden token, else 0) of the other rows."""
    short_rows: list[int]
    """Rows with very few tokens allowed. Their logits are not masked; `Sampler` reads the allowed ones only."""
    short_row_ids: npt.NDArray[np.int64]
    """[short rows, tokens]: allowed tokens of each of the `short_rows` by rising id, padded with -1."""


@dataclass(slots=True)
class TokenMasks:
    """The masks of a step."""

    logits_rows: list[int]
    """Rows of the logits that have a mask."""
    bits: MaskWords
    """[masks, words]: a bit for each token, set if the token may be drawn."""
    cpu_masks: CpuMasks | None
    """Masks in the form for a CPU; None on a GPU."""
    failures: dict[int, str]
    """Row of the logits -> reason why the answer cannot go on; the token drawn in that row means nothing."""


class Masks:
    """Makes the token masks of constrained rows. Must be closed."""

    def __init__(self, grammars: GrammarCompiler, vocab_size: int, device: torch.device, threads: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None
        self._token_lists = _TokenListCache(vocab_size)
        self._matcher_states: dict[int, _MatcherState] = {}

    def reset_rows(self, rows: Rows[int] | None = None) -> None:
        """Forget the matchers of these rows (None: of all), because other sequences get the rows."""
        for row in list(self._matcher_states) if rows is None else rows:
            self._matcher_states.pop(row, None)

    def make_request(self, logits_row: int, row: int, seq: Sequence, end: int, banned_tokens: list[int]) -> MaskRequest:
        """Collect the input of the mask for the token at `end`."""
        constraint = seq.request.params.constraint
        assert constraint is not None
        state = self._matcher_states.get(row)
        if state is None:
            state = self._matcher_states[row] = _MatcherState(constraint)
            if constraint.reasoning_end_token is None:
                state.is_reasoning = False
            elif constraint.reasoning_start_token is None:
                state.is_reasoning = True
        known_tokens = min(end, len(seq.token_ids))
        new_tokens = seq.token_ids[seq.prompt_len + state.read_tokens : known_tokens]
        state.read_tokens += len(new_tokens) + (end - known_tokens)
        return MaskRequest(logits_row, row, state, new_tokens, known_tokens < end, banned_tokens)

    def submit(
        self, requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> Future[TokenMasks]:
        """Make masks on the thread. `read_last_tokens` waits for the previous step, and returns row -> drawn token."""
        return self._thread.submit(self._compute_masks, requests, read_last_tokens)

    def apply(self, logits: Tensor, masks: TokenMasks) -> None:
        """Set the logits [rows, vocab] of forbidden tokens to -inf, in place."""
        if not masks.logits_rows:
            return
        if masks.cpu_masks is not None:
            _apply_on_cpu(logits, masks.cpu_masks)
            return
        device_bits = copy_to_device(masks.bits.view(np.uint8), self._device)
        bit = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=self._device)
        is_forbidden = ((device_bits[:, :, None] & bit) == 0).flatten(1)[:, : self._vocab_size]
        logits_rows = copy_to_device(np.array(masks.logits_rows, np.int64), self._device)
        logits.index_copy_(
            0, logits_rows, logits.index_select(0, logits_rows).masked_fill_(is_forbidden, float("-inf"))
        )

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # On the thread --------------------------------------------------------------------------------------------------

    def _compute_masks(
        self, requests: list[MaskRequest], read_last_tokens: Callable[[], Mapping[int, int]]
    ) -> TokenMasks:
        """Let the matchers read their new tokens, and make the mask of each row that needs one."""
        tokens: Mapping[int, int] = (
            read_last_tokens() if any(request.has_token_on_device for request in requests) else {}
        )
        masked_requests = []
        for request in requests:
            new_tokens = (
                [*request.new_tokens, tokens[request.state_row]] if request.has_token_on_device else request.new_tokens
            )
            if self._advance_matcher(request.state, new_tokens) or request.banned_tokens:
                masked_requests.append(request)
        bits = np.full((len(masked_requests), -(-self._grammars.vocabulary.token_count // 32)), 0xFFFFFFFF, np.uint32)
        self._fill_bits(
            [
                (request.state.matcher, index)
                for index, request in enumerate(masked_requests)
                if _has_live_matcher(request.state)
            ],
            bits,
        )
        failures: dict[int, str] = {}
        for index, request in enumerate(masked_requests):
            state = request.state
            if state.failure is None and state.matcher is not None and state.matcher.is_error():
                state.failure = summarize_error(state.matcher)
            if state.failure is not None:
                failures[request.logits_row] = state.failure
                bits[index] = 0xFFFFFFFF
                continue
            if request.banned_tokens:
                _ban_unless_all(bits[index], request.banned_tokens)
            if state.is_reasoning is None and state.constraint.reasoning_start_token is not None:
                _allow_token(bits[index], state.constraint.reasoning_start_token)
        logits_rows = [request.logits_row for request in masked_requests]
        cpu_masks = self._token_lists.make_cpu_masks(logits_rows, bits) if self._device.type == "cpu" else None
        return TokenMasks(logits_rows, bits, cpu_masks, failures)

    def _advance_matcher(self, state: _MatcherState, new_tokens: list[int]) -> bool:
        """Let the matcher read the new tokens. Returns whether the row has a mask."""
        if state.failure is not None:
            return True
        constraint = state.constraint
        if state.is_reasoning is None and new_tokens:
            state.is_reasoning = (
                constraint.reasoning_start_token is None or new_tokens[0] == constraint.reasoning_start_token
            )
        if state.is_reasoning:
            if constraint.reasoning_end_token not in new_tokens:
                return False
            new_tokens = new_tokens[new_tokens.index(constraint.reasoning_end_token) + 1 :]
            state.is_reasoning = False
        if state.matcher is None:
            try:
                state.matcher = self._grammars.make_matcher(constraint.lark_grammar)
            except GrammarError as error:
                state.failure = str(error)
                return True
        for token in new_tokens:
            if state.matcher.is_stopped():
                break  # with ignore_eos the answer goes on after its end
            if not state.matcher.consume_token(token):
                state.failure = f"the answer so far does not match: {summarize_error(state.matcher)}"
                break
        return True

    def _fill_bits(self, matchers: list[Any], bits: MaskWords) -> None:
        """Write the mask of each (matcher, index) to `bits[index]`."""
        if not matchers:
            return
        if len(matchers) == 1 or self._threads == 1:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, bits[index].nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))


class _TokenListCache:
    """Converts masks to `CpuMasks`, and caches the lists of tokens of recent masks."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: OrderedDict[bytes, tuple[bool, npt.NDArray[np.int64] | None]] = OrderedDict()

    def make_cpu_masks(self, logits_rows: list[int], bits: MaskWords) -> CpuMasks:
        """Return the masks `bits` [masks, words] of these rows of logits in the form for a CPU."""
        empty, vocab_size = np.empty(0, np.int64), self._vocab_size
        forbidden_indices, allowed_indices, short_row_ids = [empty], [empty], list[npt.NDArray[np.int64]]()
        sparse_rows, short_rows = list[int](), list[int]()
        dense_rows: list[tuple[int, npt.NDArray[np.float32]]] = []
        for logits_row, row in zip(logits_rows, bits.view(np.uint8)):
            is_allowed_list, ids = self._list_tokens(row)
            if ids is None:
                dense_rows.append((logits_row, np.take(_LOGIT_SUMMANDS, row, axis=0).reshape(-1)[:vocab_size]))
            elif not is_allowed_list:
                forbidden_indices.append(ids + logits_row * vocab_size)
            elif 0 < _SHORT_LIST_DIVISOR * len(ids) <= vocab_size:
                short_rows.append(logits_row)
                short_row_ids.append(ids)
            else:
                sparse_rows.append(logits_row)
                allowed_indices.append(ids + logits_row * vocab_size)
        padded_ids = np.full((len(short_rows), max(map(len, short_row_ids), default=0)), -1, np.int64)
        for row_ids, ids in zip(padded_ids, short_row_ids):
            row_ids[: len(ids)] = ids
        return CpuMasks(
            np.concatenate(forbidden_indices),
            sparse_rows,
            np.concatenate(allowed_indices),
            dense_rows,
            short_rows,
            padded_ids,
        )

    def _list_tokens(self, row: npt.NDArray[np.uint8]) -> tuple[bool, npt.NDArray[np.int64] | None]:
        """Return the shorter of the lists of allowed and of forbidden tokens, cached by the bitmask `row`.

        The first value says whether the list is of allowed tokens. The second is None if both lists would be long.
        """
        key = row.tobytes()
        entry = self._entries.get(key)
        if entry is None:
            is_allowed = np.unpackbits(row, count=self._vocab_size, bitorder="little").view(np.bool_)
            count = int(np.count_nonzero(is_allowed))
            lists_forbidden = _LISTED_DIVISOR * (self._vocab_size - count) <= self._vocab_size
            is_listed = lists_forbidden or _LISTED_DIVISOR * count <= self._vocab_size
            entry = self._entries[key] = (
                not lists_forbidden,
                np.flatnonzero(~is_allowed if lists_forbidden else is_allowed) if is_listed else None,
            )
            if len(self._entries) > _ENTRIES_MAX:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry


def _apply_on_cpu(logits: Tensor, masks: CpuMasks) -> None:
    """Mask logits [rows, vocab] in place."""
    flat = logits.view(-1)
    if len(masks.forbidden_indices):
        flat.index_fill_(0, torch.from_numpy(masks.forbidden_indices), float("-inf"))
    if masks.sparse_rows:
        allowed_indices = torch.from_numpy(masks.allowed_indices)
        allowed_logits = flat.index_select(0, allowed_indices)
        for logits_row in masks.sparse_rows:
            logits[logits_row].fill_(float("-inf"))
        flat.index_copy_(0, allowed_indices, allowed_logits)
    for logits_row, summands in masks.dense_rows:
        logits[logits_row].add_(torch.from_numpy(summands))


def _has_live_matcher(state: _MatcherState) -> bool:
    return state.failure is None and state.matcher is not None


def _allow_token(bits: MaskWords, token: int) -> None:
    bits[token // 32] |= np.uint32(1 << token % 32)


def _forbid_tokens(bits: MaskWords, tokens: list[int]) -> None:
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)


def _ban_unless_all(bits: MaskWords, tokens: list[int]) -> None:
    """Forbid tokens, unless no token would be left."""
    remaining_bits = bits.copy()
    _forbid_tokens(remaining_bits, tokens)
    if remaining_bits.any():
        bits[:] = remaining_bits
