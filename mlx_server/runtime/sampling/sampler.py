"""Turns a step's logits into token ids: all rows at once, each by its request's parameters.

The stages, in vLLM's order: log-probabilities of the raw logits; bitmasks and allowed ids; bans of `min_tokens` and
bias; penalties; then each draw method on its rows: temperature, min-p, top-k, top-p and the draw (`draw.py`). Each
stage runs only on the rows that need it. All stages work row by row, so a row's token depends on its logits,
parameters, seed and position, and on nothing else in the batch.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_server.outputs import NewRequestData, SampledToken, ScheduledChunk
from mlx_server.runtime.sampling.draw import DrawColumns, DrawMethod, Method, choose_method, draw
from mlx_server.runtime.sampling.edits import (
    Bitmask,
    PenaltyTable,
    ScoredTokens,
    TokenOffsets,
    add_offsets,
    apply_bitmasks,
    edit_rows,
    score_tokens,
)
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits. `num_output_tokens` is the position in the output of the token to sample, from 0.

    `allowed_bitmask` is a `Bitmask` (llguidance's int32 words, little endian); None allows all tokens. `drafts` are
    assumed to be in the output before it. Rows of a request with drafts are not `is_final`: `observe` later counts its
    tokens.
    """

    request_id: str
    num_output_tokens: int
    allowed_bitmask: bytes | None = None
    drafts: tuple[int, ...] = ()
    is_final: bool = True


class SampledRows(NamedTuple):
    """The sampled rows of one request in one step: `[first, first + 1 + len(drafts))`."""

    request_id: str
    first: int
    drafts: tuple[int, ...]

    def take(self, tokens: Sequence[SampledToken]) -> SampledToken:
        """The request's result from the tokens of all rows. The token after a draft counts only if the draft equals the
        token that was sampled in its place.

        Example: drafts 5 6 7, sampled 5 6 9 2: 5 and 6 are accepted, 9 is the next token, and 2 followed a wrong draft.
        """
        mine = tokens[self.first : self.first + 1 + len(self.drafts)]
        pairs = zip(self.drafts, mine)
        num_accepted = next((i for i, (d, token) in enumerate(pairs) if d != token.token_id), len(self.drafts))
        return mine[num_accepted]._replace(accepted=tuple(mine[:num_accepted]))


def plan_samples(
    chunks: Sequence[ScheduledChunk], ends: Sequence[int]
) -> tuple[list[SampledRows], list[SampleRow], list[int]]:
    """The requests to sample for, their sample rows, and the rows of the batch after which they sample. Chunk i ends
    before row `ends[i]`."""
    sampled: list[SampledRows] = []
    samples: list[SampleRow] = []
    rows: list[int] = []
    for chunk, end in zip(chunks, ends):
        if not chunk.is_sampling:
            continue
        request_id, position = chunk.request_id, chunk.num_output_tokens
        if not chunk.num_drafts:
            sampled.append(SampledRows(request_id, len(samples), ()))
            samples.append(SampleRow(request_id, position, chunk.allowed_bitmask))
            rows.append(end - 1)
            continue
        drafts = (chunk.token_ids or ())[-chunk.num_drafts :]
        bitmasks = chunk.allowed_bitmask, *(chunk.draft_bitmasks or (None,) * len(drafts))
        sampled.append(SampledRows(request_id, len(samples), drafts))
        for place, bitmask in enumerate(bitmasks):
            samples.append(SampleRow(request_id, position + place, bitmask, drafts[:place], is_final=False))
        rows += range(end - 1 - len(drafts), end)
    return sampled, samples, rows


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The sampled tokens of one step. `token_ids` `[S]` int32 can be the input of the next step before the host knows
    them.

    `scores` has an entry for each of `scored_rows`. Requests may be dropped, and later steps sampled, before `fetch`.
    """

    token_ids: mx.array
    scores: ScoredTokens | None
    scored_rows: list[int]

    def arrays(self) -> list[mx.array]:
        """The arrays to submit with the step (`mx.async_eval`)."""
        return [self.token_ids, *(() if self.scores is None else self.scores.arrays())]

    def fetch(self) -> list[SampledToken]:
        """Waits for the values; one entry for each row, in order. MLX thread only."""
        tokens = [SampledToken(token_id) for token_id in np.array(self.token_ids).tolist()]
        if self.scores is not None:
            for row, logprobs in zip(self.scored_rows, self.scores.fetch(), strict=True):
                tokens[row] = SampledToken(tokens[row].token_id, logprobs)
        return tokens


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What the sampler needs for a request, computed once at admission. `banned` adds -inf to tokens that would end the
    output too early.

    `seed_key` and a position determine the noise at that position, so preemption, prefix hits and other requests in the
    batch do not change it.
    """

    params: SamplingParams
    method: DrawMethod
    seed_key: bytes
    bias: TokenOffsets | None
    banned: TokenOffsets | None
    allowed_bitmask: Bitmask | None

    def noise_key(self, position: int) -> bytes:
        """Eight bytes for the token at `position` of the output."""
        return hashlib.blake2b(position.to_bytes(8, "little"), key=self.seed_key, digest_size=8).digest()


class Sampler:
    """Samples for the requests that were added. MLX thread only; builds graphs and never waits.

    `vocab_size` is the width of the logits, which may exceed the tokenizer's vocabulary.
    """

    def __init__(self, vocab_size: int, entropy: bytes | None = None) -> None:
        """Samplers with equal `entropy` and vocabulary use the same noise for a request's token at a position."""
        self.vocab_size = vocab_size
        self.entropy = entropy or secrets.token_bytes(32)
        self.agree: Callable[[mx.array], mx.array] | None = None  # makes all ranks use the same ids
        self._plans: dict[str, RequestPlan] = {}
        self._penalties = PenaltyTable(vocab_size)

    def add(self, data: NewRequestData) -> None:
        """Starts a request at its admission, or restarts it when it resumes, and counts its known output tokens."""
        self._plans[data.request_id] = plan_request(data, self.vocab_size, self.entropy)
        if data.sampling.has_penalties:
            self._penalties.add(data.request_id, data.prompt_token_ids, data.output_token_ids)

    def drop(self, request_id: str) -> None:
        """Forgets a request, even if its batch was not fetched yet; unknown ones are ignored."""
        self._plans.pop(request_id, None)
        self._penalties.drop(request_id)

    def observe(self, request_id: str, token_ids: Sequence[int], end: int) -> None:
        """Counts tokens of a request for its penalties, if they were not counted yet. The last one is at position `end
        - 1`.

        Needed for tokens that a grammar forced and for accepted drafts; harmless for others.
        """
        self._penalties.observe(request_id, token_ids, end)

    def sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> SampledBatch:
        """Samples one token for each row of `logits` `[S, V]` of any float type, S >= 1. Evaluates nothing.

        May be called before the previous step is fetched. A row without allowed tokens gives token 0.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{logits.shape} for {len(rows)} rows"
        plans = [self._plans[row.request_id] for row in rows]
        penalized = [i for i, row in enumerate(rows) if row.request_id in self._penalties]
        counted = [i for i in penalized if rows[i].is_final]
        edited = self._penalize(_offset_rows(_mask_rows(logits, rows, plans), rows, plans), rows, plans, penalized)
        token_ids = _draw_rows(edited, rows, plans)
        if self.agree is not None:
            token_ids = self.agree(token_ids)
        scored_rows = [i for i, plan in enumerate(plans) if plan.params.logprobs is not None]
        scores = None
        if scored_rows:
            num_tops = [plans[i].params.logprobs or 0 for i in scored_rows]
            scores = score_tokens(_take(logits, scored_rows), _take(token_ids, scored_rows), num_tops)
        if counted:
            self._penalties.count([rows[i].request_id for i in counted], _take(token_ids, counted))
        return SampledBatch(token_ids, scores, scored_rows)

    def _penalize(
        self, logits: mx.array, rows: Sequence[SampleRow], plans: Sequence[RequestPlan], penalized: list[int]
    ) -> mx.array:
        if not penalized:
            return logits
        names = [rows[i].request_id for i in penalized]
        params = [plans[i].params for i in penalized]
        drafts = [rows[i].drafts for i in penalized]
        return edit_rows(
            logits.astype(mx.float32), penalized, lambda part: self._penalties.apply(part, names, params, drafts)
        )


def plan_request(data: NewRequestData, vocab_size: int, entropy: bytes) -> RequestPlan:
    """The plan of a request. Ignores ids outside the vocabulary, which the API refuses.

    Without a seed, the noise depends on the request's id and the process's `entropy`, so it stays the same when a
    request resumes.
    """
    params = data.sampling
    name = data.request_id.encode() if params.seed is None else params.seed.to_bytes(8, "little", signed=True)
    key = entropy if params.seed is None else b"seed"
    bias = params.logit_bias
    stops = data.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else frozenset()
    return RequestPlan(
        params=params,
        method=choose_method(params, vocab_size),
        seed_key=hashlib.blake2b(name, key=key, digest_size=32).digest(),
        bias=_token_offsets({token_id: bias[token_id] for token_id in _known(bias, vocab_size)}),
        banned=_token_offsets(dict.fromkeys(_known(stops, vocab_size), -np.inf)),
        allowed_bitmask=_packed(params.allowed_token_ids, vocab_size),
    )


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


def _token_offsets(values: dict[int, float]) -> TokenOffsets | None:
    if not values:
        return None
    return TokenOffsets(np.array(list(values), np.int32), np.array(list(values.values()), np.float32))


def _packed(token_ids: Iterable[int] | None, vocab_size: int) -> Bitmask | None:
    if token_ids is None:
        return None
    is_allowed = np.zeros(vocab_size, dtype=np.bool_)
    is_allowed[_known(token_ids, vocab_size)] = True
    return np.packbits(is_allowed, bitorder="little")


def _mask_rows(logits: mx.array, rows: Sequence[SampleRow], plans: Sequence[RequestPlan]) -> mx.array:
    """Applies bitmasks and allowed ids. Like `_offset_rows`, returns the same array if no row has any."""
    bitmasks = {i: mask for i in range(len(rows)) if (mask := _bitmask(rows[i], plans[i])) is not None}
    if not bitmasks:
        return logits
    masks = list(bitmasks.values())
    return edit_rows(logits.astype(mx.float32), list(bitmasks), lambda part: apply_bitmasks(part, masks))


def _offset_rows(logits: mx.array, rows: Sequence[SampleRow], plans: Sequence[RequestPlan]) -> mx.array:
    """Applies bias, and bans until `min_tokens`."""
    offsets = [(i, offset) for i in range(len(rows)) for offset in _offsets(rows[i], plans[i])]
    if not offsets:
        return logits
    return add_offsets(logits.astype(mx.float32), [i for i, _ in offsets], [offset for _, offset in offsets])


def _bitmask(row: SampleRow, plan: RequestPlan) -> Bitmask | None:
    if row.allowed_bitmask is None:
        return plan.allowed_bitmask
    bitmask = np.frombuffer(row.allowed_bitmask, dtype=np.uint8)
    if plan.allowed_bitmask is None:
        return bitmask
    size = min(len(bitmask), len(plan.allowed_bitmask))
    return bitmask[:size] & plan.allowed_bitmask[:size]


def _offsets(row: SampleRow, plan: RequestPlan) -> list[TokenOffsets]:
    offsets = [] if plan.bias is None else [plan.bias]
    if plan.banned is not None and row.num_output_tokens < plan.params.min_tokens:
        offsets.append(plan.banned)
    return offsets


def _draw_rows(logits: mx.array, rows: Sequence[SampleRow], plans: Sequence[RequestPlan]) -> mx.array:
    """One token for each row, `[S]`: draws the rows of each method together, and restores their order."""
    groups: dict[DrawMethod, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault(plan.method, []).append(i)
    parts = []
    for method, group in groups.items():
        columns = None if method.method is Method.GREEDY else _columns([(rows[i], plans[i]) for i in group])
        parts.append(draw(_take(logits, group), method, columns))
    if len(parts) == 1:
        return parts[0]
    order = [i for group in groups.values() for i in group]
    return mx.concatenate(parts)[mx.array(np.argsort(order))]


def _columns(members: Sequence[tuple[SampleRow, RequestPlan]]) -> DrawColumns:
    """The parameters of rows with one draw method, on the device."""
    params = [plan.params for _, plan in members]
    keys = b"".join(plan.noise_key(row.num_output_tokens) for row, plan in members)
    uses_min_p = any(p.min_p > 0.0 for p in params)
    uses_top_p = any(p.top_p < 1.0 for p in params)
    return DrawColumns(
        keys=mx.array(np.frombuffer(keys, dtype="<u4").reshape(-1, 2)),
        inverse_temperature=_column([1.0 / p.temperature for p in params]),
        min_p=_column([p.min_p for p in params]) if uses_min_p else None,
        top_p=_column([p.top_p if p.top_p < 1.0 else math.inf for p in params]) if uses_top_p else None,
        top_k=mx.array([p.top_k for p in params])[:, None],
    )


def _column(values: list[float]) -> mx.array:
    return mx.array(values)[:, None]


def _take(array: mx.array, rows: list[int]) -> mx.array:
    return array if len(rows) == array.shape[0] else array[mx.array(rows)]
