"""Draws a token from each row of logits: the definition, and an implementation in plain torch.

The weight of a token is exp(logit / temperature). Tokens are ordered by falling logit, and tokens with equal logits by
rising id. Three settings decide which tokens can be drawn:

1. `min_p` keeps the tokens that weigh at least this share of the heaviest token;
2. `top_k` keeps at most so many of these, the first in the order;
3. `top_p` keeps the fewest of these, the first in the order, that together have this share of the weight.

The drawn token is the first one, by id, at which the running sum of the kept weights exceeds `uniforms` times their
sum. So a row draws the same token in any batch. NaN counts as -inf. A row of -inf alone yields token 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOGIT = 3.3895313892515355e38
"""The largest bf16. A logit of +inf counts as this."""
ROWS_AT_ONCE = 8
"""Rows of which the running sums are in memory at once: 10 MB for 150,000 tokens.

Beyond 32 MB, glibc takes new pages from the system each time, which costs more than the sums.
"""
MIN_CANDIDATE_COUNT = 256
"""Least number of likeliest tokens among which `top_k` and `top_p` are tried, before all tokens are sorted."""


class KeptWeights(NamedTuple):
    """Weights of the tokens that `top_k` and `top_p` keep."""

    weights: Tensor
    """[rows, tokens]; 0 for the tokens that are not kept."""
    incomplete_rows: list[int]
    """Rows to draw again from all tokens, as tokens outside of the given ones could be kept."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Sampling settings of the rows of a matrix of logits: tensors of [rows], on the device of the logits."""

    temperature: Tensor
    """fp32; 0: the row takes the likeliest token."""
    min_p: Tensor
    """fp32 in [0, 1]; 0 keeps all."""
    top_k: Tensor
    """int32, at least 1; the vocabulary's size or more keeps all."""
    top_p: Tensor
    """fp32; 1 or more keeps all. At least one token is kept."""
    uniforms: Tensor
    """fp64: random numbers in [0, 1), each of which chooses its row's token."""

    def select_rows(self, rows: Tensor | list[int]) -> DrawSettings:
        """Return the settings of some rows. `rows`: mask or indices."""
        return DrawSettings(
            self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows], self.uniforms[rows]
        )


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Draw the next token of each row of logits: [rows] int64. Waits for the device. logits: [rows, vocab].

    Every row first gets its likeliest token. In rows that draw at random, the drawn token then replaces it.
    """
    values = logits.float()
    peak, tokens = values.max(-1)  # the first of equal ones
    has_only_finite_peaks = math.isfinite(peak.sum().item())
    if not has_only_finite_peaks:  # a row has NaN, which `max` takes for the greatest, or an infinite peak
        values = values.nan_to_num(nan=float("-inf"), posinf=MAX_LOGIT, neginf=float("-inf"))
        peak, tokens = values.max(-1)
    unfiltered_rows, filtered_rows = _find_random_rows(settings, peak, values.shape[1])
    for rows, draw_rows in ((unfiltered_rows, _draw_unfiltered), (filtered_rows, _draw_filtered)):
        if len(rows) == len(tokens):  # all rows at once, without copies
            return draw_rows(values, peak, settings)
        if rows:
            tokens[rows] = draw_rows(values[rows], peak[rows], settings.select_rows(rows))
    return tokens


def _find_random_rows(settings: DrawSettings, peak: Tensor, vocab: int) -> tuple[list[int], list[int]]:
    """Return the rows that draw at random: those without `top_k` and `top_p`, and those with one of them.

    Rows of NaN and -inf only, which have a `peak` of -inf, are not among them: they yield token 0.
    """
    unfiltered_rows: list[int] = []
    filtered_rows: list[int] = []
    columns = (settings.temperature, settings.top_k, settings.top_p, peak)
    for row, (temperature, top_k, top_p, highest) in enumerate(zip(*(column.tolist() for column in columns))):
        if temperature > 0.0 and highest > -math.inf:
            is_filtered = top_k < vocab or top_p < 1.0
            (filtered_rows if is_filtered else unfiltered_rows).append(row)
    return unfiltered_rows, filtered_rows


def _compute_weights(values: Tensor, peak: Tensor, settings: DrawSettings) -> Tensor:
    """Return the weight of each token as a share of the row's greatest weight; 0 for shares below `min_p`."""
    weights = (values - peak[:, None]).div_(settings.temperature[:, None])
    # Clamped, because exp(-inf) is slow on a CPU; weights under 2e-35 become 0.
    weights = torch.threshold_(weights.clamp_(min=-80.0).exp_(), 2e-35, 0.0)
    return weights.masked_fill_(weights < settings.min_p[:, None], 0.0) if settings.min_p.any() else weights


def _draw_unfiltered(values: Tensor, peak: Tensor, settings: DrawSettings) -> Tensor:
    return _draw_index(_compute_weights(values, peak, settings), settings.uniforms)


def _draw_filtered(values: Tensor, peak: Tensor, settings: DrawSettings) -> Tensor:
    """Draw the tokens of rows with `top_k` or `top_p`: [rows]. values: [rows, vocab], logits. peak: their maxima.

    Sorting whole rows is slow. So the filters are first applied to some hundred of the likeliest tokens (candidates).
    Rows in which other tokens could be kept, too, are then drawn again, among all tokens.
    """
    vocab = values.shape[1]
    has_top_k = settings.top_k < vocab
    full_sums = None if has_top_k.all() else _compute_weights(values, peak, settings).sum(-1, dtype=torch.float64)
    top_k_max = int((settings.top_k * has_top_k).max())
    candidate_count = min(vocab, max(MIN_CANDIDATE_COUNT, 2 * top_k_max))
    if candidate_count == vocab:
        return _draw_index(_keep_likeliest(values, peak, settings, has_top_k, full_sums).weights, settings.uniforms)
    candidate_ids = values.topk(candidate_count, sorted=False).indices.sort().values
    kept = _keep_likeliest(values.gather(1, candidate_ids), peak, settings, has_top_k, full_sums)
    candidate_index = _draw_index(kept.weights, settings.uniforms)
    tokens = candidate_ids.gather(1, candidate_index[:, None])[:, 0]
    rows = kept.incomplete_rows
    if rows:
        row_settings = settings.select_rows(rows)
        row_sums = None if full_sums is None else full_sums[rows]
        row_weights = _keep_likeliest(values[rows], peak[rows], row_settings, has_top_k[rows], row_sums).weights
        tokens[rows] = _draw_index(row_weights, row_settings.uniforms)
    return tokens


def _keep_likeliest(
    values: Tensor, peak: Tensor, settings: DrawSettings, has_top_k: Tensor, full_sums: Tensor | None
) -> KeptWeights:
    """Return the weights of the tokens that `top_k` and `top_p` keep, as shares of each row's greatest weight.

    values: [rows, n], logits of all tokens or of the likeliest n. peak: largest logit of each row. has_top_k: whether
    each row has `top_k`. full_sums: sum of each row's weights over all tokens; None if every row has `top_k`.
    """
    sorted_values, token_order = values.sort(descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=values.device)
    weights = _compute_weights(sorted_values, peak, settings)
    weights.masked_fill_(ranks >= settings.top_k[:, None], 0.0)
    running_sums = weights.cumsum(-1, dtype=torch.float64)
    row_sums = running_sums[:, -1]
    if full_sums is not None:
        row_sums = torch.where(has_top_k, row_sums, full_sums)
    # A token is kept if the sum before it is less than this. So the first is always kept, and without `top_p` all are.
    sufficient_sums = (row_sums * settings.top_p).clamp_(min=1e-300)
    sufficient_sums.masked_fill_(settings.top_p >= 1.0, float("inf"))
    kept_weights = weights.masked_fill_(running_sums - weights >= sufficient_sums[:, None], 0.0)
    # A row is incomplete if its smallest value is kept or equals one that is: a token outside could then be kept, too.
    last_kept_values = sorted_values.gather(1, kept_weights.count_nonzero(-1)[:, None] - 1)
    incomplete_rows = (sorted_values[:, -1:] >= last_kept_values).nonzero()[:, 0].tolist()
    return KeptWeights(torch.zeros_like(kept_weights).scatter_(1, token_order, kept_weights), incomplete_rows)


def _draw_index(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw an index of each row of weights [rows, n], with a probability in proportion to the index's weight.

    The index is the first one at which the running sum of the weights exceeds `uniforms` times their sum. With the
    weights [1, 3] and 0.5 as the uniform number, the running sums 1 and 4 are compared with 2: index 1 is drawn.
    """
    groups = zip(torch.split(weights, ROWS_AT_ONCE), torch.split(uniforms, ROWS_AT_ONCE))
    return torch.cat([_search_running_sums(some_weights, some_uniforms) for some_weights, some_uniforms in groups])


def _search_running_sums(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return what `_draw_index` returns, for few rows."""
    running_sums = weights.cumsum(-1, dtype=torch.float64)
    total = running_sums[:, -1:].contiguous()
    index = torch.searchsorted(running_sums, uniforms.double()[:, None] * total, right=True)
    # By rounding, the product may be the whole sum. Then the last weight that is not zero is drawn.
    last_index = torch.searchsorted(running_sums, total)
    return index.minimum(last_index)[:, 0]
