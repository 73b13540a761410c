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
    full_sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    if not has_top_k.all():
        full_sums = _compute_weights(values, peak, settings).sum(-1, dtype=torch.float64).masked_fill_(has_top_k, 0.0)
    top_k_max = int((settings.top_k * has_top_k).max())
    candidate_count = min(vocab, max(MIN_CANDIDATE_COUNT, 2 * top_k_max))
    if candidate_count == vocab:
        return _draw_index(_keep_likeliest(values, peak, settings, full_sums), settings.uniforms)
    candidate_ids = values.topk(candidate_count, sorted=False).indices.sort().values
    candidates = values.gather(1, candidate_ids)
    weights = _keep_likeliest(candidates, peak, settings, full_sums)
    tokens = candidate_ids.gather(1, _draw_index(weights, settings.uniforms)[:, None])[:, 0]
    # If a candidate that equals the least one is kept, then a token that is not a candidate could be kept, too.
    least_kept_values = candidates.masked_fill(weights == 0.0, float("inf")).amin(-1)
    rows = (candidates.amin(-1) == least_kept_values).nonzero()[:, 0].tolist()
    if rows:
        row_settings = settings.select_rows(rows)
        row_weights = _keep_likeliest(values[rows], peak[rows], row_settings, full_sums[rows])
        tokens[rows] = _draw_index(row_weights, row_settings.uniforms)
    return tokens


def _keep_likeliest(values: Tensor, peak: Tensor, settings: DrawSettings, full_sums: Tensor) -> Tensor:
    """Return the weight of each token as a share of its row's greatest weight; 0 if top_k or top_p drops the token.

    A row's tokens are sorted by falling logit. top_k keeps the first ones, and top_p keeps the tokens before which the
    running sum of weights is less than its share of a whole. The whole is the sum of what top_k keeps. Without top_k it
    is the sum of all tokens, of which only some may be given here, so the caller knows it.

    values and the result: [rows, n], for all tokens or the likeliest n. peak: largest logit of each row. full_sums:
    [rows] fp64, weights of all tokens; 0 for a row with top_k.
    """
    sorted_values, token_order = values.sort(descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=values.device)
    weights = _compute_weights(sorted_values, peak, settings)
    weights.masked_fill_(ranks >= settings.top_k[:, None], 0.0)
    running_sums = weights.cumsum(-1, dtype=torch.float64)
    whole = torch.where(full_sums > 0.0, full_sums, running_sums[:, -1])
    # A token is kept if the sum before it is less than this. So the first is always kept, and without top_p all are.
    sufficient_sums = (whole * settings.top_p).clamp_(min=1e-300)
    sufficient_sums.masked_fill_(settings.top_p >= 1.0, float("inf"))
    kept_weights = weights.masked_fill_(running_sums - weights >= sufficient_sums[:, None], 0.0)
    return torch.zeros_like(kept_weights).scatter_(1, token_order, kept_weights)


def _draw_index(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw an index of each row of weights [rows, n], with a probability in proportion to the index's weight.

    The index is the first one at which the running sum of the weights exceeds `uniforms` times their sum. With the
    weights [1, 3] and 0.5 as the uniform number, the running sums 1 and 4 are compared with 2: index 1 is drawn.
    """
    indices = []
    for group_weights, group_uniforms in zip(torch.split(weights, ROWS_AT_ONCE), torch.split(uniforms, ROWS_AT_ONCE)):
        running_sums = group_weights.cumsum(-1, dtype=torch.float64)
        total = running_sums[:, -1:].contiguous()
        index = torch.searchsorted(running_sums, group_uniforms.double()[:, None] * total, right=True)
        # By rounding, the product may be the whole sum. Then the last weight that is not zero is drawn.
        last_index = torch.searchsorted(running_sums, total)
        indices.append(index.minimum(last_index)[:, 0])
    return torch.cat(indices)
