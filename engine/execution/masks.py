"""Which tokens constrained rows may draw next: made on a thread beside the forward, applied before a draw.

Of each constrained sequence in a row (see `Seats`) its matcher is kept, with how much of its answer it has read. A row
whose answer is not constrained yet (`Constraint.reasoning_end_token`), or not at all, costs nothing.
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

from engine.grammars import GrammarError, Grammars, story
from engine.types import Constraint, Sequence
from kernels.transfer import to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MaskWords = npt.NDArray[np.uint32]
_SUMMANDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)
"""Of eight tokens, by the byte of their bits."""
_SOME = 4
"""Where fewer than one in so many tokens may be drawn, or may not, these are named one by one."""
_FEW = 32
"""Where fewer than one in so many may be drawn, nothing else is looked at."""
_KEPT_MAX = 64
"""Of the masks used last, the tokens that they name are kept: most answers are within a text most of the time."""


@dataclass(slots=True)
class _MatcherState:
    """A matcher and how far it is."""

    constraint: Constraint
    matcher: LLMatcher | None = None
    """None: it has not begun."""
    read: int = 0
    """Tokens of the answer that it has seen."""
    failed: str | None = None
    thinks: bool | None = None
    """None: its first token will say."""


@dataclass(slots=True)
class MaskRequest:
    """What a row's mask is made of, as far as the host knows it when the step is drafted."""

    place: int
    """Of the row among the logits."""
    row: int
    """Of what is kept."""
    follower: _MatcherState
    new: list[int]
    """Tokens of the answer that the matcher has not seen."""
    fed: bool
    """One more comes from the step before."""
    banned: list[int]
    """Tokens that min_tokens bans now: what the grammar needs it gets all the same."""


@dataclass(slots=True)
class CpuMasks:
    """Masks in the form that costs least to apply there. Indices are into the logits [rows * vocab]."""

    barred: npt.NDArray[np.int64]
    """Of the rows in which most may be drawn."""
    only: list[int]
    """Places of the rows in which few may be drawn,"""
    allowed: npt.NDArray[np.int64]
    """and these few."""
    others: list[tuple[int, npt.NDArray[np.float32]]]
    """(place, [tokens]: -inf where it may not, else 0)."""
    few: list[int]
    """Places of the rows in which very few may be drawn: their logits are left as they are,"""
    few_ids: npt.NDArray[np.int64]
    """and these are drawn from, [rows, the most that any has], by rising id; the rest of a row is -1."""


@dataclass(slots=True)
class TokenMasks:
    """The masks of a step."""

    places: list[int]
    """Rows of logits that have one."""
    bits: MaskWords
    """[places, words]: a bit for each token, set where it may be drawn."""
    cpu: CpuMasks | None
    failed: dict[int, str]
    """Place -> why its matcher cannot go on; what is drawn there means nothing."""


class Masks:
    """Of all rows. `close` it."""

    def __init__(self, grammars: Grammars, vocab_size: int, device: torch.device, threads: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None
        self._named = _TokenListCache(vocab_size)
        self._followers: dict[int, _MatcherState] = {}

    def forget(self, rows: Rows[int] | None = None) -> None:
        """These rows (None: all) belong to others now."""
        for row in list(self._followers) if rows is None else rows:
            self._followers.pop(row, None)

    def want(self, place: int, row: int, seq: Sequence, end: int, banned: list[int]) -> MaskRequest:
        """What is known of the mask for the token at `end`."""
        constraint = seq.request.params.constraint
        assert constraint is not None
        follower = self._followers.get(row)
        if follower is None:
            thinks = (
                False
                if constraint.reasoning_end_token is None
                else None
                if constraint.reasoning_start_token is not None
                else True
            )
            follower = self._followers[row] = _MatcherState(constraint, thinks=thinks)
        known = min(end, len(seq.token_ids))
        new = seq.token_ids[seq.prompt_len + follower.read : known]
        follower.read += len(new) + (end - known)
        return MaskRequest(place, row, follower, new, known < end, banned)

    def begin(self, wanted: list[MaskRequest], drawn: Callable[[], Mapping[int, int]]) -> Future[TokenMasks]:
        """Make the masks. `drawn`: row -> the token that the step before drew there; it may wait."""
        return self._thread.submit(self._make, wanted, drawn)

    def apply(self, logits: Tensor, allowed: TokenMasks) -> None:
        """Set the logits [rows, vocab] of what may not be drawn to -inf, in place."""
        if not allowed.places:
            return
        if allowed.cpu is not None:
            _apply_on_cpu(logits, allowed.cpu)
            return
        there = to_device(allowed.bits.view(np.uint8), self._device)
        bit = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=self._device)
        barred = ((there[:, :, None] & bit) == 0).flatten(1)[:, : self._vocab_size]
        places = to_device(np.array(allowed.places, np.int64), self._device)
        logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(barred, float("-inf")))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # On the thread --------------------------------------------------------------------------------------------------

    def _make(self, wanted: list[MaskRequest], drawn: Callable[[], Mapping[int, int]]) -> TokenMasks:
        tokens: Mapping[int, int] = drawn() if any(one.fed for one in wanted) else {}
        masked = []
        for one in wanted:
            new = [*one.new, tokens[one.row]] if one.fed else one.new
            if self._read(one.follower, new) or one.banned:
                masked.append(one)
        bits = np.full((len(masked), -(-self._grammars.words.count // 32)), 0xFFFFFFFF, np.uint32)
        self._fill([(one.follower.matcher, at) for at, one in enumerate(masked) if _lives(one.follower)], bits)
        failed: dict[int, str] = {}
        for at, one in enumerate(masked):
            follower = one.follower
            if follower.failed is None and follower.matcher is not None and follower.matcher.is_error():
                follower.failed = story(follower.matcher)
            if follower.failed is not None:
                failed[one.place] = follower.failed
                bits[at] = 0xFFFFFFFF
                continue
            if one.banned:
                _ban(bits[at], one.banned)
            if follower.thinks is None and follower.constraint.reasoning_start_token is not None:
                _set(bits[at], follower.constraint.reasoning_start_token)
        places = [one.place for one in masked]
        cpu = self._named.on_cpu(places, bits) if self._device.type == "cpu" else None
        return TokenMasks(places, bits, cpu, failed)

    def _read(self, follower: _MatcherState, new: list[int]) -> bool:
        """Advance the matcher over these; whether the row has a mask."""
        if follower.failed is not None:
            return True
        constraint = follower.constraint
        if follower.thinks is None and new:
            follower.thinks = constraint.reasoning_start_token is None or new[0] == constraint.reasoning_start_token
        if follower.thinks:
            if constraint.reasoning_end_token not in new:
                return False
            new = new[new.index(constraint.reasoning_end_token) + 1 :]
            follower.thinks = False
        if follower.matcher is None:
            try:
                follower.matcher = self._grammars.matcher(constraint.lark)
            except GrammarError as error:
                follower.failed = str(error)
                return True
        for token in new:
            if follower.matcher.is_stopped():
                break  # whoever ignores the end repeats it
            if not follower.matcher.consume_token(token):
                follower.failed = f"the answer so far does not match: {story(follower.matcher)}"
                break
        return True

    def _fill(self, matchers: list[Any], bits: MaskWords) -> None:
        if not matchers:
            return
        if len(matchers) == 1 or self._threads == 1:
            for matcher, at in matchers:
                matcher.unsafe_compute_mask_ptr(bits[at].ctypes.data, bits[at].nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))


class _TokenListCache:
    """The tokens that masks name, and of those used last what they named."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kept: OrderedDict[bytes, tuple[bool, npt.NDArray[np.int64] | None]] = OrderedDict()

    def on_cpu(self, places: list[int], bits: MaskWords) -> CpuMasks:
        none, vocab_size = np.empty(0, np.int64), self._vocab_size
        barred, allowed, few_ids = [none], [none], list[npt.NDArray[np.int64]]()
        only, few = list[int](), list[int]()
        others: list[tuple[int, npt.NDArray[np.float32]]] = []
        for place, row in zip(places, bits.view(np.uint8)):
            may, ids = self._ids(row)
            if ids is None:
                others.append((place, np.take(_SUMMANDS, row, axis=0).reshape(-1)[:vocab_size]))
            elif not may:
                barred.append(ids + place * vocab_size)
            elif 0 < _FEW * len(ids) <= vocab_size:
                few.append(place)
                few_ids.append(ids)
            else:
                only.append(place)
                allowed.append(ids + place * vocab_size)
        padded = np.full((len(few), max(map(len, few_ids), default=0)), -1, np.int64)
        for row_ids, ids in zip(padded, few_ids):
            row_ids[: len(ids)] = ids
        return CpuMasks(np.concatenate(barred), only, np.concatenate(allowed), others, few, padded)

    def _ids(self, row: npt.NDArray[np.uint8]) -> tuple[bool, npt.NDArray[np.int64] | None]:
        """(whether they may be drawn or may not, these tokens); None: they are too many either way."""
        key = row.tobytes()
        found = self._kept.get(key)
        if found is None:
            may = np.unpackbits(row, count=self._vocab_size, bitorder="little").view(np.bool_)
            count = int(np.count_nonzero(may))
            most = _SOME * (self._vocab_size - count) <= self._vocab_size
            some = most or _SOME * count <= self._vocab_size
            found = self._kept[key] = (not most, np.flatnonzero(~may if most else may) if some else None)
            if len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _apply_on_cpu(logits: Tensor, masks: CpuMasks) -> None:
    flat = logits.view(-1)
    if len(masks.barred):
        flat.index_fill_(0, torch.from_numpy(masks.barred), float("-inf"))
    if masks.only:
        allowed = torch.from_numpy(masks.allowed)
        kept = flat.index_select(0, allowed)
        for place in masks.only:
            logits[place].fill_(float("-inf"))
        flat.index_copy_(0, allowed, kept)
    for place, summands in masks.others:
        logits[place].add_(torch.from_numpy(summands))


def _lives(follower: _MatcherState) -> bool:
    return follower.failed is None and follower.matcher is not None


def _set(bits: MaskWords, token: int) -> None:
    bits[token // 32] |= np.uint32(1 << token % 32)


def _unset(bits: MaskWords, tokens: list[int]) -> None:
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)


def _ban(bits: MaskWords, tokens: list[int]) -> None:
    """Take these out, unless nothing is left."""
    without = bits.copy()
    _unset(without, tokens)
    if without.any():
        bits[:] = without
