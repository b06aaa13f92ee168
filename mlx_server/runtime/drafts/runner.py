"""Combines the runners of a model and of its draft model or head into one runner for an executor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx

from mlx_server.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
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


class HeadFeed:
    """Gives a head the hidden states for each step of a burst: first the model's, then its own."""

    def __init__(self, link: HeadLink, states: HiddenStates) -> None:
        self._link = link
        self.states = states
        self._rows: dict[str, int] = {}

    def give(self, chunks: Sequence[ScheduledChunk], *, is_first: bool) -> None:
        """Call before the step with these chunks is launched."""
        carried, link = self._link.carried, self._link
        if is_first or carried is None:
            link.given = self.states.read(chunks)
        else:
            rows = [self._rows[chunk.request_id] for chunk in chunks]
            link.given = carried if rows == list(range(carried.shape[0])) else carried[mx.array(rows)]
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        self._rows = {chunk.request_id: end - 1 for chunk, end in zip(chunks, ends)}

    def end(self) -> None:
        """Call when the burst is launched: drops its hidden states."""
        self._link.given = self._link.carried = None


class DraftingRunner:
    """Runs the model's steps, and `draft_steps` on the draft model, in the order of launch. Both have pools of their
    own. MLX thread only, except `wait`."""

    def __init__(self, target: ModelRunner, draft: ModelRunner, feed: HeadFeed | None = None) -> None:
        """From now on `draft` samples with the noise of `target`, and `target` keeps its hidden states for `feed`."""
        self._error: str | None = None
        self._target = target
        self._draft = draft
        self._feed = feed
        draft.sampler = DraftSampler(target.sampler.vocab_size, target.sampler.entropy)
        target.hidden_states = None if feed is None else feed.states

    def close_draft(self) -> None:
        """Frees the draft model's pools. The model's own runner is closed by its owner."""
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
                if self._feed is not None and step.chunks:
                    self._feed.give(step.chunks, is_first=not launched)
                launched.append(self._draft.launch(step))
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
                for request_id, token in self._draft.fetch(draft_step).sampled.items():
                    drafts[request_id] = (*drafts.get(request_id, ()), token.token_id)
        except Exception as error:  # MLX may report it only now
            self._fail(error)
        return ModelRunnerOutput(launched.step_id, {}, num_model_calls=0, drafts=drafts, draft_error=self._error)

    def _fail(self, error: Exception) -> None:
        self._error = str(error) or type(error).__name__
        logger.error("The draft model has failed and is not used any more: %s", self._error, exc_info=error)
        self.close_draft()
