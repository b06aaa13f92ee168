"""Executes steps: block tables and index arrays on the host, a forward pass of an unchanged mlx-lm model over a ragged
batch, and one pass of the sampler."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_server.outputs import (
    ModelRunnerOutput,
    NewRequestData,
    PoolChange,
    PositionLogprobs,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
)
from mlx_server.runtime.attention.interface import IntArray, StepPlan
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.drafts.hidden_states import HiddenStates, KeptRows
from mlx_server.runtime.forward import ModelForward
from mlx_server.runtime.layers.adapters import NONE, AdapterRows
from mlx_server.runtime.pooling import NO_POOLING, PooledBatch, Pooler
from mlx_server.runtime.sampling.edits import ScoredTokens, score_tokens
from mlx_server.runtime.sampling.sampler import SampledBatch, SampledRows, Sampler, SampleRow, plan_samples
from mlx_server.runtime.vision import ImageEncoder
from mlx_server.sampling_params import SamplingParams


class _Copied(NamedTuple):
    """What a step's copies have saved, and how long they took."""

    saved: tuple[memoryview, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt positions that a step scores: their rows in the batch, the token ids that follow them, the numbers of
    likeliest tokens to return, and how many positions each request has, in this order."""

    rows: list[int]
    next_ids: list[int]
    num_tops: list[int]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A submitted step whose results may not be computed yet. `rows` are the sampled rows, `num_calls` counts the calls
    of the model, and `scored` has `num_scored` positions of each request's prompt."""

    step_id: int
    num_calls: int
    rows: list[SampledRows]
    sampled: SampledBatch | None
    scored: ScoredTokens | None
    num_scored: dict[str, int]
    pooled: PooledBatch | None
    arrays: list[mx.array]
    copied: _Copied
    end: mx.array
    """Evaluated with the step, only for the thread that waits for it: two threads must not wait for one array, since
    MLX marks it as available without a lock."""
    draft_steps: tuple[LaunchedStep, ...] = ()

    def wait(self) -> None:
        """Returns when the device has finished the step. Drops its arrays: with a reference from here, the next step
        could not write a pool in place."""
        mx.eval(*self.arrays)
        self.arrays.clear()


class ModelRunner:
    """One model's forward passes, and the state of its running requests.

    MLX thread only, except `wait`. `launch` submits a step without waiting for it; it reads tokens sampled by the step
    before on the device. `fetch` waits. Steps are launched and fetched in order, with at most one launched ahead of the
    one being fetched. The first step after a request's end drops its state.
    """

    def __init__(
        self, model: Any, cache: PagedKVCache, vocab_size: int, adapters: AdapterRows, pooler: Pooler | None = None
    ) -> None:
        """`adapters` are those in `model`. Without a `pooler`, hidden states are pooled as they are."""
        self.cache = cache
        self.images: ImageEncoder | None = None
        self.forward = ModelForward(model, cache, adapters)
        self.sampler = Sampler(vocab_size)
        self.hidden_states: HiddenStates | None = None  # where they are kept, if a head drafts
        self._pooler = pooler or Pooler()
        self._tables = BlockTables(cache.windows)
        self._scored_prompts: dict[str, tuple[tuple[int, ...], int]] = {}
        self._adapters: dict[str, int] = {}
        self._previous: LaunchedStep | None = None
        self._contents = BlockContents(cache)

    @property
    def launch_is_host_only(self) -> bool:
        """Whether `launch` takes host time only, since it does not wait for the step before."""
        states = self.hidden_states
        return not self.cache.needs_synchronous_steps and (states is None or not states.needs_synchronous_steps)

    @property
    def _keeps_last(self) -> bool:
        return self.hidden_states is not None and self.hidden_states.are_last

    @property
    def num_pooled_dimensions(self) -> int | None:
        """The size of pooled vectors, if layers after the pooling set it."""
        return self._pooler.num_dimensions

    def close(self) -> None:
        """Restores the model and frees the pools."""
        self.forward.close()
        self._contents.forget()
        self.images = None
        self.cache.release()

    def warm_up_sampler(self) -> None:
        """Draws once: MLX compiles functions at the first draw, which no request should wait for."""
        sampling = SamplingParams(temperature=1.0, top_p=0.9)
        self.sampler.add(NewRequestData("warm-up", (0,), (), sampling, frozenset()))
        logits = mx.zeros((1, self.sampler.vocab_size))
        self.sampler.sample(logits, [SampleRow("warm-up", 0, None)]).fetch()
        self.sampler.drop("warm-up")

    def launch(self, step: SchedulerOutput, blocks: IntArray | None = None) -> LaunchedStep:
        """Builds and submits a step. `blocks` are rows that see each other, see `ModelForward`."""
        copied = self._copy_and_change(step)
        self._update_requests(step)  # after loading: requests may resume from a loaded state
        if not step.chunks:
            return LaunchedStep(step.step_id, 0, [], None, None, {}, None, [], copied, mx.array(0))
        for chunk in step.chunks:
            if chunk.token_ids is not None:
                num_known = chunk.num_tokens - max(chunk.num_drafts, chunk.num_block)
                known = chunk.recent_token_ids or chunk.token_ids[:num_known]
                self.sampler.observe(chunk.request_id, known, chunk.start + num_known)
        plans = self._tables.plan(step.chunks)
        ends = plans[0].query_starts[1:].tolist()
        sampled_rows, samples, rows = plan_samples(step.chunks, ends)
        prompts = self._plan_scores(step.chunks, ends)
        rows += prompts.rows
        num_rows = len(rows)
        pooling = self._pooler.plan(step.chunks, ends) if self._pooler.requests else NO_POOLING
        rows += pooling.logit_rows
        kept_rows = None if self.hidden_states is None else self.hidden_states.plan(step.chunks, ends)
        last_rows = kept_rows.rows if kept_rows is not None and self._keeps_last else []
        owners = self._owners(step.chunks)
        images = None if self.images is None else self.images.rows(step.chunks, plans[0].positions)
        hidden_rows = [*last_rows, *pooling.hidden_rows]
        logits = self.forward(plans, self._input_ids(step.chunks), rows, owners, hidden_rows, images, blocks)
        kept = [(self._tables.state_slot(c.request_id), c.checkpoint) for c in step.chunks if c.checkpoint is not None]
        if kept:
            self.cache.keep_states(kept)
        sampled = self.sampler.sample(logits[: len(samples)], samples) if samples else None
        scored = None
        if prompts.rows:
            scored = score_tokens(logits[len(samples) : num_rows], np.array(prompts.next_ids), prompts.num_tops)
        hidden = self.forward.take_hidden()
        arrays = [*self.cache.state(), *self._keep_hidden(kept_rows, hidden)]
        if sampled is not None:
            arrays += sampled.arrays()
        if scored is not None:
            arrays += scored.arrays()
        pooled = None
        if pooling is not NO_POOLING:
            own = None if hidden is None else hidden[len(last_rows) :]
            pooled = self._pooler.pool(pooling, own, logits[num_rows:])
            arrays += pooled.arrays()
        if not self.launch_is_host_only and self._previous is not None:
            self._previous.wait()
        end = mx.stop_gradient(mx.array(0))  # costs the device nothing
        mx.async_eval(*arrays, end)  # type: ignore[no-untyped-call]
        num_calls = self.forward.num_calls
        self._previous = LaunchedStep(
            step.step_id,
            num_calls,
            sampled_rows,
            sampled,
            scored,
            prompts.counts,
            pooled,
            arrays,
            copied,
            end,
        )
        return self._previous

    def _keep_hidden(self, kept: KeptRows | None, hidden: mx.array | None) -> list[mx.array]:
        """Stores hidden states for a head or block drafter; returns the arrays to evaluate."""
        if self.hidden_states is None or kept is None:
            return []
        self.hidden_states.keep(kept, hidden)
        return self.hidden_states.arrays()

    def wait(self, launched: LaunchedStep) -> None:
        """Returns when the device has finished a launched step. For one thread of any kind: it only waits for the
        step's last event, and makes no stream."""
        launched.end.item()

    def fetch(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Waits for a launched step and reads its results."""
        launched.wait()
        tokens: Sequence[SampledToken] = launched.sampled.fetch() if launched.sampled is not None else ()
        prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
        if launched.scored is not None:
            scored = iter(launched.scored.fetch())
            prompt_logprobs = {name: list(islice(scored, count)) for name, count in launched.num_scored.items()}
        sampled = {rows.request_id: rows.take(tokens) for rows in launched.rows}
        return ModelRunnerOutput(
            launched.step_id,
            sampled,
            prompt_logprobs=prompt_logprobs,
            num_model_calls=launched.num_calls,
            pooled={} if launched.pooled is None else launched.pooled.fetch(),
            copy_time_s=launched.copied.seconds,
            saved_blocks=launched.copied.saved,
        )

    def fetch_rows(self, launched: LaunchedStep) -> dict[str, tuple[int, ...]]:
        """Waits for a launched step and reads the token ids of all its sampled rows, by request: for a drafter, whose
        drafts nothing has checked yet."""
        launched.wait()
        tokens = [] if launched.sampled is None else launched.sampled.fetch()
        ends = {rows: rows.first + 1 + len(rows.drafts) for rows in launched.rows}
        return {r.request_id: tuple(token.token_id for token in tokens[r.first : end]) for r, end in ends.items()}

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._tables.drop(request_id)
            self.sampler.drop(request_id)
            if self.hidden_states is not None:
                self.hidden_states.drop(request_id)
            self._scored_prompts.pop(request_id, None)
            self._adapters.pop(request_id, None)
            self._pooler.drop(request_id)
            if self.images is not None:
                self.images.drop(request_id)
        resumed: list[tuple[int, int]] = []
        for data in step.new_requests:
            self._tables.add(data.request_id)
            self.sampler.add(data)
            self._pooler.add(data)
            if self.hidden_states is not None and data.sampling.speculate:
                self.hidden_states.add(data.request_id)
            if self.images is not None:
                self.images.add(data)
            if data.adapter is not None:
                self._adapters[data.request_id] = self.forward.adapters.keys.index(data.adapter)
            num_top = data.sampling.prompt_logprobs
            if num_top is not None and not data.output_token_ids:
                self._scored_prompts[data.request_id] = (data.prompt_token_ids, num_top)
            if data.checkpoint is not None:
                resumed.append((data.checkpoint, self._tables.state_slot(data.request_id)))
        if resumed:
            self.cache.resume_states(resumed)

    def plans_at(self, positions: Mapping[str, int]) -> tuple[StepPlan, ...]:
        """Plans for one row of each of these running requests, that sees what is stored up to a position, without the
        blocks before the window of the token after it, which may have been given up."""
        chunks = [ScheduledChunk(name, position, 1, None, (), False, 0) for name, position in positions.items()]
        return tuple(self._tables.plan(chunks, num_ahead=1))

    def _copy_and_change(self, step: SchedulerOutput) -> _Copied:
        """Saves blocks, changes the pools, then loads blocks."""
        saved: tuple[memoryview, ...] = ()
        copies, seconds = step.copies, 0.0
        if copies is not None:
            if self._contents.may_be_in_use and self._previous is not None:
                self._previous.wait()
            began_s = time.perf_counter()
            saved = self._contents.read(copies.saved)
            seconds = time.perf_counter() - began_s
        if step.pool_change is not None:
            self._change_pools(step.pool_change)
        if copies is not None:
            began_s = time.perf_counter()
            self._contents.write(copies.loaded)
            seconds += time.perf_counter() - began_s
        return _Copied(saved, seconds)

    def _change_pools(self, change: PoolChange) -> None:
        """Waits for the step before, which may still use the pools."""
        if self._previous is not None:
            self._previous.wait()
        self._contents.forget()
        self.cache.change(change)
        self._tables.move(change.moves)
        mx.clear_cache()  # returns the freed memory to the system

    def _owners(self, chunks: Sequence[ScheduledChunk]) -> IntArray | None:
        """The adapter of each row of the step, `[T]`; None if no running request has one."""
        if not self._adapters:
            return None
        owners = np.array([self._adapters.get(chunk.request_id, NONE) for chunk in chunks], dtype=np.int32)
        return np.repeat(owners, [chunk.num_tokens for chunk in chunks])

    def _plan_scores(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> PromptScores:
        """Chunk i ends before row `ends[i]` of the batch."""
        scores = PromptScores([], [], [], {})
        if not self._scored_prompts:
            return scores
        for chunk, end_row in zip(chunks, ends):
            prompt, num_top = self._scored_prompts.get(chunk.request_id, ((), 0))
            following = prompt[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
            if following:
                first_row, count = end_row - chunk.num_tokens, len(following)
                scores.rows.extend(range(first_row, first_row + count))
                scores.next_ids.extend(following)
                scores.num_tops.extend([num_top] * count)
                scores.counts[chunk.request_id] = count
        return scores

    def _input_ids(self, chunks: Sequence[ScheduledChunk]) -> mx.array:
        """The step's input ids `[T]`: known ids from the host, and ids that the step before is still sampling."""
        known: list[int] = []
        pending: list[int] = []
        names: list[str] = []
        for chunk in chunks:
            if chunk.token_ids is None:
                pending.append(len(known))
                names.append(chunk.request_id)
                known.append(0)
            else:
                known.extend(chunk.token_ids)
        ids = mx.array(known, dtype=mx.int32)
        if not pending:
            return ids
        previous = self._previous
        assert previous is not None
        assert previous.sampled is not None
        sampled: mx.array = previous.sampled.token_ids
        rows = {rows.request_id: rows.first for rows in previous.rows}
        wanted = [rows[name] for name in names]
        if wanted != list(range(sampled.size)):
            sampled = sampled[mx.array(wanted, dtype=mx.int32)]
        if len(pending) == len(known):
            return sampled
        ids[mx.array(pending, dtype=mx.int32)] = sampled
        return ids
