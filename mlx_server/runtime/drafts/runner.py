"""Combines the runners of a model and of its draft model, head, assistant or block drafter into one runner for an
executor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlx_server.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.drafts.assistant import AssistantBody, LentCache
from mlx_server.runtime.drafts.block_drafter import BlockBody, BlockRows
from mlx_server.runtime.drafts.heads import HeadLink
from mlx_server.runtime.drafts.hidden_states import HiddenStates
from mlx_server.runtime.model_runner import LaunchedStep, ModelRunner
from mlx_server.runtime.sampling.sampler import SampledBatch, Sampler, SampleRow

logger = logging.getLogger(__name__)


class DraftSampler(Sampler):
    """Samples a draft model's tokens with the same noise as the model's sampler. The noise depends on the width of the
    vocabulary, which models of one family may pad differently. Drafts are not counted for penalties; `observe` counts
    the accepted tokens.
    """

    def sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> SampledBatch:
        """As `Sampler.sample`, for logits of any width."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return super().sample(logits[:, : self.vocab_size], [replace(row, is_final=False) for row in rows])


class PathSampler(DraftSampler):
    """For a block drafter that chooses each draft by the one before it. All rows of a request come together, in the
    order of its drafts."""

    def __init__(self, body: BlockBody, vocab_size: int, entropy: bytes) -> None:
        super().__init__(vocab_size, entropy)
        self._body = body

    def sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> SampledBatch:
        link = self._body.link
        if link.carried is None or link.rows is None:
            return super().sample(logits, rows)
        hidden, before = link.carried[: len(rows), 0], link.rows.anchors
        tokens, order = list[mx.array](), list[int]()
        firsts = [index for index, row in enumerate(rows) if not row.drafts]
        depths = np.diff([*firsts, len(rows)])
        for place in range(depths.max()):
            longer = np.flatnonzero(depths > place)
            mine = [firsts[request] + place for request in longer]
            if len(longer) < before.shape[0]:
                still = np.searchsorted(np.flatnonzero(depths >= place), longer)
                before = before[mx.array(still.astype(np.int32))]
            taken = mx.array(mine)
            chosen = self._body.candidate_selector(logits[taken], hidden[taken], before)
            before = super().sample(chosen, [rows[index] for index in mine]).token_ids
            tokens.append(before)
            order += mine
        places = np.argsort(order).astype(np.int32)
        return SampledBatch(mx.concatenate(tokens)[mx.array(places)], None, [])


class HeadFeed:
    """Gives a head the hidden states for each step of a burst: first the model's, then its own."""

    def __init__(self, link: HeadLink, states: HiddenStates) -> None:
        self._link = link
        self.states = states
        self._rows: dict[str, int] = {}

    def give(self, chunks: Sequence[ScheduledChunk], *, is_first: bool) -> IntArray | None:
        """Call before the step with these chunks is launched. Returns its `blocks`."""
        carried, link = self._link.carried, self._link
        if is_first or carried is None:
            link.given = self.states.read(chunks)
        else:
            rows = [self._rows[chunk.request_id] for chunk in chunks]
            link.given = carried if rows == list(range(carried.shape[0])) else carried[mx.array(rows)]
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        self._rows = {chunk.request_id: end - 1 for chunk, end in zip(chunks, ends)}
        return None

    def end(self) -> None:
        """Call when the burst is launched: drops its hidden states."""
        self._link.given = self._link.carried = None

    def sampler(self, vocab_size: int, entropy: bytes) -> DraftSampler:
        """What the drafter's tokens are sampled with, for a model with this vocabulary and noise."""
        return DraftSampler(vocab_size, entropy)


class AssistantFeed(HeadFeed):
    """Gives an assistant hidden states and the K/V of the model that `target` runs."""

    def __init__(self, body: AssistantBody, states: HiddenStates, target: ModelRunner) -> None:
        super().__init__(body.link, states)
        self._body = body
        self._target = target
        self._seen: dict[str, int] = {}

    def give(self, chunks: Sequence[ScheduledChunk], *, is_first: bool) -> IntArray | None:
        super().give(chunks, is_first=is_first)
        if is_first:
            self._seen = {chunk.request_id: chunk.hidden_offset + chunk.start for chunk in chunks}
        seen = {chunk.request_id: self._seen[chunk.request_id] for chunk in chunks}
        positions = mx.array([position + 1 for position in seen.values()])
        self._body.link.lent = LentCache(self._target.cache, self._target.plans_at(seen), positions)
        return None

    def end(self) -> None:
        super().end()
        self._body.link.lent = None


class BlockFeed(HeadFeed):
    """Gives a block drafter the features for a burst, which is one step, and says which rows are blocks."""

    def __init__(self, body: BlockBody, states: HiddenStates) -> None:
        super().__init__(body.link, states)
        self._body = body

    def give(self, chunks: Sequence[ScheduledChunk], *, is_first: bool) -> IntArray | None:
        link = self._body.link
        link.given = self.states.read(
            [chunk._replace(num_tokens=chunk.num_tokens - chunk.num_block) for chunk in chunks]
        )
        link.rows = block_rows(chunks)
        if all(self._body.shape.causal):
            return None
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        spans = [(end - chunk.num_block, end) for chunk, end in zip(chunks, ends) if chunk.num_block]
        return np.array(spans, np.int32).reshape(-1, 2)

    def end(self) -> None:
        super().end()
        self._body.link.rows = None

    def sampler(self, vocab_size: int, entropy: bytes) -> DraftSampler:
        is_plain = not self._body.shape.selector_rank
        return super().sampler(vocab_size, entropy) if is_plain else PathSampler(self._body, vocab_size, entropy)


def block_rows(chunks: Sequence[ScheduledChunk]) -> BlockRows:
    """Where the features and blocks of a step are.

    Example: two features and a block of three, then one feature and a block of two: features are rows 0, 1, 5, blocks
    2, 3, 4, 6, 7 with the places 0 1 2 0 1; the order is 0 1 3 4 5 2 6 7.
    """
    is_block = np.concatenate([np.arange(c.num_tokens) >= c.num_tokens - c.num_block for c in chunks])
    places = [np.arange(chunk.num_block) for chunk in chunks]
    order = np.empty(len(is_block), np.int32)
    order[np.concatenate([np.flatnonzero(~is_block), np.flatnonzero(is_block)])] = np.arange(len(is_block))
    anchors = [(chunk.token_ids or ())[-chunk.num_block] for chunk in chunks if chunk.num_block]
    return BlockRows(
        blocks=mx.array(np.flatnonzero(is_block).astype(np.int32)),
        order=mx.array(order),
        places=mx.array(np.concatenate(places).astype(np.int32)),
        anchors=mx.array(anchors, dtype=mx.int32),
    )


class DraftingRunner:
    """Runs the model's steps, and `draft_steps` on the draft model, in the order of launch. Both have pools of their
    own, except an assistant. MLX thread only, except `wait`."""

    def __init__(self, target: ModelRunner, draft: ModelRunner, feed: HeadFeed | None = None) -> None:
        """From now on `draft` samples with the noise of `target`, and `target` keeps its hidden states for `feed`."""
        self._error: str | None = None
        self._target = target
        self._draft = draft
        self._feed = feed
        vocab_size, entropy = target.sampler.vocab_size, target.sampler.entropy
        draft.sampler = DraftSampler(vocab_size, entropy) if feed is None else feed.sampler(vocab_size, entropy)
        target.hidden_states = None if feed is None else feed.states

    def close_draft(self) -> None:
        """Frees the draft model's pools. The model's own runner is closed by its owner."""
        if self._feed is not None:
            self._feed.states.close()
        self._target.hidden_states = self._feed = None
        self._draft.close()

    @property
    def launch_is_host_only(self) -> bool:
        return self._target.launch_is_host_only and self._draft.launch_is_host_only

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Submits a step, or all draft steps at once: tokens pass from one to the next on the device. An error of the
        draft model ends drafting, but not the model: `fetch` reports it, and the draft model's pools are freed."""
        if not step.draft_steps:
            return self._target.launch(step)
        launched: list[LaunchedStep] = []
        try:
            if self._error is None:
                launched = self._launch_drafts(step.draft_steps)
        except Exception as error:  # of MLX or of the model's code
            self._fail(error)
        whole = launched[-1] if launched else self._target.launch(SchedulerOutput(step.step_id, ()))
        return replace(whole, step_id=step.step_id, draft_steps=tuple(launched) or (whole,))

    def _launch_drafts(self, steps: Sequence[SchedulerOutput]) -> list[LaunchedStep]:
        launched: list[LaunchedStep] = []
        try:
            for step in steps:
                blocks = None
                if self._feed is not None and step.chunks:
                    blocks = self._feed.give(step.chunks, is_first=not launched)
                launched.append(self._draft.launch(step, blocks))
        finally:
            if self._feed is not None:
                self._feed.end()  # otherwise it would keep the hidden states
        return launched

    def wait(self, launched: LaunchedStep) -> None:
        with suppress(Exception) if launched.draft_steps else nullcontext():  # `fetch` raises it again
            self._target.wait(launched)

    def fetch(self, launched: LaunchedStep) -> ModelRunnerOutput:
        if not launched.draft_steps:
            return self._target.fetch(launched)
        drafts: dict[str, tuple[int, ...]] = {}
        try:
            for draft_step in launched.draft_steps if self._error is None else ():
                for request_id, token_ids in self._draft.fetch_rows(draft_step).items():
                    drafts[request_id] = drafts.get(request_id, ()) + token_ids
        except Exception as error:  # MLX may report it only now
            self._fail(error)
        return ModelRunnerOutput(launched.step_id, {}, num_model_calls=0, drafts=drafts, draft_error=self._error)

    def _fail(self, error: Exception) -> None:
        self._error = str(error) or type(error).__name__
        logger.error("The draft model has failed and is not used any more: %s", self._error, exc_info=error)
        self.close_draft()
