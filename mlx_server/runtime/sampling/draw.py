"""Draws one token for each row of logits, and avoids sorting the vocabulary where possible.

A draw is an exponential race (the Gumbel-max trick): token t with weight w finishes after `E / w`, where E is
exponential, and the first token wins with probability w / sum(w). The race has two rounds, first between the sums of
the vocabulary's blocks and then inside the winning block, so a row needs `num_blocks + width` random numbers instead of
one for each token: 0.1 ms instead of 7 to 11 for 16 rows of 49,152 on a 2-core CPU; the race itself costs one block
sum. Every token keeps its exact probability up to float32 rounding, also in the tail: an inverse CDF in float32 would
lose tokens below 1e-7, and so would Gumbel noise `-log(-log(u))`, because u has 24 bits near 1. Here the short times
decide, and there `-log1p(-u)` has all 32 bits of u.

Random bits come from threefry with one key for each row (`mx.random`), so a row's noise does not depend on its batch.

Top tokens are found by blocks of the vocabulary, too: the k largest logits of a row are in the k blocks with the
largest maxima. One cheap reduction leaves k blocks to select from instead of a row of 50k to 260k logits, which MLX
sorts on Metal and passes to `nth_element` on the CPU (4 times slower than this for 16 rows of 49k and k = 64).
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_server.sampling_params import SamplingParams

SORTED_WIDTHS = (64, 1024)
"""Numbers of top tokens that are sorted for a top-k row; fixed, so that sums do not depend on other rows' k."""

DRAW_COUNTS = (16, 32, 64)
MAX_MISS_BITS = 32
"""All draws of a nucleus row are outside the nucleus with a probability of at most 2^-32."""


class Method(enum.Enum):
    """How a row's token is drawn. Rows with the same method are drawn together."""

    GREEDY = "greedy"
    RACE = "race"
    SORTED = "sorted"
    NUCLEUS = "nucleus"


class DrawMethod(NamedTuple):
    """`width` is the number of sorted tokens (SORTED) or of draws (NUCLEUS), otherwise 0."""

    method: Method
    width: int = 0


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Parameters of R rows on the device, each `[R, 1]` except `keys` `[R, 2]` uint32; None if no row uses them.

    For rows without it, `top_p` is infinite and `top_k` is 0 or -1.
    """

    keys: mx.array
    inverse_temperature: mx.array
    min_p: mx.array | None
    top_p: mx.array | None
    top_k: mx.array


def choose_method(params: SamplingParams, vocab_size: int) -> DrawMethod:
    """The cheapest exact method for a request; depends on its own parameters only."""
    if params.is_greedy:
        return DrawMethod(Method.GREEDY)
    if 0 < params.top_k < vocab_size:
        widths = (width for width in SORTED_WIDTHS if params.top_k <= width < vocab_size)
        return DrawMethod(Method.SORTED, next(widths, vocab_size))
    if params.top_p < 1.0:
        bits_a_draw = -math.log2(1.0 - params.top_p)
        counts = (count for count in DRAW_COUNTS if count * bits_a_draw >= MAX_MISS_BITS)
        num_draws = next(counts, None)
        return DrawMethod(Method.SORTED, vocab_size) if num_draws is None else DrawMethod(Method.NUCLEUS, num_draws)
    return DrawMethod(Method.RACE)


def draw(logits: mx.array, method: DrawMethod, columns: DrawColumns | None) -> mx.array:
    """Token ids `[R]` int32 for logits `[R, V]` of any float type; only GREEDY needs no columns.

    Filters in this order: keeps tokens whose weight is at least min_p times the largest weight, then those whose logit
    is not below the k-th largest, then those for which strictly likelier tokens have less than top_p of the remaining
    weight. All ties at a border are kept. A row without allowed tokens gives token 0.
    """
    if method.method is Method.GREEDY:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    assert columns is not None
    logits = logits.astype(mx.float32)
    peaks = row_peaks(logits)
    weights = _drop_below_min_p(softmax_weights(logits, peaks, columns.inverse_temperature), columns)
    if method.method is Method.NUCLEUS:
        return _draw_in_nucleus(weights, columns, method.width)
    if method.method is Method.SORTED:
        weights = weights * (logits >= _sorted_floor(logits, peaks, weights, columns, method.width))
    return _race(weights, columns.keys, 1)[:, 0]


def _drop_below_min_p(weights: mx.array, columns: DrawColumns) -> mx.array:
    return weights if columns.min_p is None else weights * (weights >= columns.min_p)


def _sorted_floor(logits: mx.array, peaks: mx.array, weights: mx.array, columns: DrawColumns, width: int) -> mx.array:
    """The smallest logit `[R, 1]` that top-k and top-p keep, from the `width` largest logits in order."""
    head = top_values(logits, width)
    ranks = mx.where(columns.top_k > 0, mx.minimum(columns.top_k, width), width)
    kth = mx.take_along_axis(head, ranks - 1, axis=-1)
    if columns.top_p is None:
        return kth
    head_weights = _drop_below_min_p(softmax_weights(head, peaks, columns.inverse_temperature), columns)
    above = mx.cumsum(head_weights * (head >= kth), axis=-1, inclusive=False)
    total = row_sums(weights * (logits >= kth))
    num_kept = (above < columns.top_p * total).sum(axis=-1, keepdims=True)
    last = mx.take_along_axis(head, mx.maximum(num_kept.astype(mx.int32), 1) - 1, axis=-1)
    return mx.maximum(kth, last)


def _draw_in_nucleus(weights: mx.array, columns: DrawColumns, num_draws: int) -> mx.array:
    """Draws from all tokens and takes the first draw inside the nucleus; each is inside with a probability of at least
    top_p.

    The nucleus itself is not computed. A draw is inside if likelier tokens have less than top_p of the weight, so among
    draws sorted by weight there is one border. log2(num_draws) masked sums over the row find it: 4 for top_p from 0.75
    on; sorting 49k logits costs as much as 60 such sums. If all draws are outside, which `choose_method` makes as rare
    as 2^-32, the heaviest draw is taken.
    """
    assert columns.top_p is not None
    token_ids = _race(weights, columns.keys, num_draws)
    drawn = mx.take_along_axis(weights, token_ids, axis=-1)
    ordered = mx.sort(drawn, axis=-1)[:, ::-1]
    limit = columns.top_p * row_sums(weights)
    border = mx.zeros((len(weights), 1), dtype=mx.int32)
    stride = num_draws // 2
    while stride:
        probe = mx.take_along_axis(ordered, border + stride, axis=-1)
        above = row_sums(weights * (weights > probe))
        border = border + stride * (above < limit)
        stride //= 2
    is_inside = drawn >= mx.take_along_axis(ordered, border, axis=-1)
    return mx.take_along_axis(token_ids, mx.argmax(is_inside, axis=-1, keepdims=True), axis=-1)[:, 0]


def _race(weights: mx.array, keys: mx.array, num_draws: int) -> mx.array:
    """Independent draws `[R, num_draws]` by the weights `[R, V]`, int32. A token with weight 0 never wins."""
    blocks = as_blocks(weights, 0.0)
    num_blocks, width = blocks.shape[1:]
    times = _exponentials(keys, (num_draws, num_blocks + width))
    winners = mx.argmax(blocks.sum(axis=-1)[:, None] / times[..., :num_blocks], axis=-1).astype(mx.int32)
    inside = mx.take_along_axis(blocks, winners[..., None], axis=1)
    return winners * width + mx.argmax(inside / times[..., num_blocks:], axis=-1).astype(mx.int32)


def _exponentials(keys: mx.array, shape: tuple[int, int]) -> mx.array:
    """Exponential random numbers `[R, *shape]`, row r from key r; above 2^-33, so that divisions are safe."""
    uniforms = mx.vmap(lambda key: mx.random.uniform(shape=shape, key=key))(keys)
    return -mx.log1p(-mx.maximum(uniforms, 2.0**-33))


LOWEST_PEAK = -3e38
"""Replaces the maximum of a row without allowed tokens, so that its weights are 0 instead of NaN."""

LOG2_E = 1.4426950408889634
ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: float32 numbers near it are integers, with the integer in their low bits."""
EXP2_COEFFICIENTS = (0.000153458083, 0.001339993119, 0.009618488971, 0.055503287771, 0.240226468905, 0.693147205737)
"""Coefficients of f^6 to f in 2^f, |f| <= 1/2, with constant term 1: relative error below 1e-8, fitted by weighted
least squares."""


def row_peaks(logits: mx.array) -> mx.array:
    """The maximum of each row of `[R, V]`, finite: `[R, 1]`."""
    return mx.maximum(mx.max(logits, axis=-1, keepdims=True), LOWEST_PEAK)


@mx.compile
def softmax_weights(logits: mx.array, peaks: mx.array, inverse_temperatures: mx.array) -> mx.array:
    """`exp((logits - peaks) * inverse_temperatures)`; float32 `[R, V]`, columns `[R, 1]`. 1 at the peak, 0 at -inf."""
    exponents = (logits - peaks) * inverse_temperatures
    return _exp_on_cpu(exponents) if mx.default_device() == mx.Device(mx.cpu) else mx.exp(exponents)


def _exp_on_cpu(x: mx.array) -> mx.array:
    """exp for x <= 0, from operations that a C++ compiler vectorises.

    On Linux, MLX's exp calls libm for each element: 8 to 12 ms for 16 x 49,152; this takes 1.5 to 2 ms.
    Relative error at most 2e-7 + 6e-8 |x| down to 2^-100; exactly 0 below 2^-126.
    """
    exponent = mx.maximum(x * LOG2_E, -126.0)
    rounded = exponent + ROUND_TO_INTEGER
    fraction = exponent - (rounded - ROUND_TO_INTEGER)
    power = EXP2_COEFFICIENTS[0] * fraction
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = (power + coefficient) * fraction
    shift = mx.left_shift(rounded.view(mx.int32), 23)  # drops the bits above the integer
    return ((power + 1.0).view(mx.int32) + shift).view(mx.float32) - 2.0**-126


PADDED_WIDTH = 128


class TopTokens(NamedTuple):
    """The largest logits of each row, descending, and their token ids: both `[R, k]`."""

    values: mx.array
    token_ids: mx.array


@functools.cache
def block_width(vocab_size: int) -> int:
    """The width of a block: a divisor of `vocab_size` near `sqrt(vocab_size) / 2`, otherwise 128 with padding.

    With a divisor, blocks are a view. Less than the square root favours the selection of top tokens.
    """
    if vocab_size <= PADDED_WIDTH:
        return vocab_size
    divisors = [width for width in range(32, 513) if vocab_size % width == 0]
    target = math.sqrt(vocab_size) / 2
    return min(divisors, key=lambda width: abs(math.log(width / target)), default=PADDED_WIDTH)


def as_blocks(rows: mx.array, fill: float) -> mx.array:
    """`[R, V]` as `[R, num_blocks, width]`: token t is at (t // width, t % width), with `fill` after the last token."""
    num_rows, vocab_size = rows.shape
    width = block_width(vocab_size)
    if vocab_size % width:
        rows = mx.pad(rows, [(0, 0), (0, -vocab_size % width)], constant_values=fill)
    return rows.reshape(num_rows, -1, width)


def row_sums(rows: mx.array) -> mx.array:
    """Sums of the rows of `[R, V]` as `[R, 1]`, by blocks: adding 50k float32 numbers in sequence loses 5e-5.

    The sums of blocks are added 32 at a time. For more than 64 numbers the order in MLX's Metal kernels depends on
    whether there are fewer than 32 rows, so a row's sum would depend on the number of rows.
    """
    sums = as_blocks(rows, 0.0).sum(axis=-1)
    sums = mx.pad(sums, [(0, 0), (0, -sums.shape[-1] % 32)])
    return sums.reshape(len(rows), -1, 32).sum(axis=-1).sum(axis=-1, keepdims=True)


def top_values(logits: mx.array, num_top: int) -> mx.array:
    """The `num_top` largest values of each row of `[R, V]`, descending: `[R, num_top]`."""
    if num_top < logits.shape[-1]:
        logits = mx.topk(_candidates(logits, num_top).values, num_top, axis=-1)
    return mx.sort(logits, axis=-1)[:, ::-1]


def top_tokens(logits: mx.array, num_top: int) -> TopTokens:
    """The `num_top` likeliest tokens of each row of `[R, V]`. Ties at the border are broken arbitrarily."""
    candidates = _candidates(logits, num_top)
    if num_top < candidates.values.shape[-1]:
        candidates = _take(candidates, mx.argpartition(candidates.values, -num_top, axis=-1)[:, -num_top:])
    return _take(candidates, mx.argsort(-candidates.values, axis=-1))


def _candidates(logits: mx.array, num_top: int) -> TopTokens:
    """A part of each row that contains its top tokens, unordered; the whole row if blocks save nothing."""
    width = block_width(logits.shape[-1])
    num_blocks = -(-logits.shape[-1] // width)
    if num_blocks < 2 * num_top:
        return TopTokens(logits, mx.broadcast_to(mx.arange(logits.shape[-1]), logits.shape))
    blocks = as_blocks(logits, -mx.inf)
    best = mx.argpartition(blocks.max(axis=-1), -num_top, axis=-1)[:, -num_top:, None]
    token_ids = best * width + mx.arange(width)
    values = mx.take_along_axis(blocks, best, axis=1)
    return TopTokens(values.reshape(len(logits), -1), token_ids.reshape(len(logits), -1))


def _take(tokens: TopTokens, order: mx.array) -> TopTokens:
    values = mx.take_along_axis(tokens.values, order, axis=-1)
    return TopTokens(values, mx.take_along_axis(tokens.token_ids, order, axis=-1))
