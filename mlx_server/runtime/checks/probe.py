"""Checks at load that a model computes in a ragged batch what it computes alone: its name alone proves nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import BlockIds, ScheduledChunk
from mlx_server.runtime.attention.cache_views import UnpageableError
from mlx_server.runtime.attention.regroup import Level, Scope, possible_levels
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.layers import model_failure
from mlx_server.runtime.layers.adapters import NONE, AdapterRows
from mlx_server.runtime.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_PROMPTS = (BLOCK_SIZE + 9, 2, 14)
"""Prompt lengths of three requests: one crosses a block, and comes in two chunks beside the others' decodes; one is
shorter than what convolutions and n-grams see."""

_NUM_BLOCKS = 5
TOLERANCES = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
"""Largest difference of logits relative to the largest logit. bfloat16 has 8 bits, over many layers."""


class Probe:
    """A few prompts and plain mlx-lm's logits for them, which a runner must give: without adapters, and then in batches
    of two adapters and none, until each adapter has been in one. MLX thread.

    Make it before the runner: the model must be as mlx-lm has built it, with at most `adapters` in it.
    """

    def __init__(self, model: Any, vocab_size: int, adapters: AdapterRows) -> None:
        """Raises `ModelLoadError` if the model does not run in mlx-lm itself, or if its logits are not `vocab_size`
        wide, or NaN."""
        rng = np.random.default_rng(0)
        self._model_type = getattr(model, "model_type", type(model).__name__)
        self._sequences = [rng.integers(1, vocab_size, size=length + 1).tolist() for length in _PROMPTS]
        num_adapters = len(adapters.names)
        batches = [(NONE,) * len(_PROMPTS)]
        batches += [(first, NONE, (first + 1) % num_adapters) for first in range(0, num_adapters, 2)]
        try:
            plain = {
                (index, owner): _plain_logits(model, sequence, adapters, owner)
                for index, sequence in enumerate(self._sequences)
                for owner in dict.fromkeys(owners[index] for owners in batches)
            }
        except ModelLoadError:
            raise
        except Exception as error:  # model code, and MLX below it
            raise model_failure(model, error) from error
        self._wanted = {owners: [plain[place] for place in enumerate(owners)] for owners in batches}
        self._dtype = plain[0, NONE].dtype
        width = plain[0, NONE].shape[-1]
        if width != vocab_size:
            raise ModelLoadError(f"The logits are {width} wide, and vocab_size is {vocab_size}.")

    def find_level(self, runner: ModelRunner) -> None:
        """Runs mixed steps of prompt chunks and decodes at one level after the other, at each first with the head
        on selected rows only, then on all rows. The runner stays at the first level that gives the model's own
        logits. Raises `ModelLoadError` if none does. The pools are released again."""
        reasons: dict[str, str] = {}
        for level in possible_levels(runner.cache.layers):
            for selects_rows in (True, False) if runner.forward.can_select_rows else (False,):
                runner.forward.use(level, selects_rows=selects_rows)
                reason = self._difference(runner)
                if reason is None:
                    _log_level(level)
                    return
                reasons[str(level)] = reason
        tried = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
        raise ModelLoadError(f"Models of type {self._model_type} cannot be served in a paged batch yet ({tried}).")

    def error(self, runner: ModelRunner) -> float:
        """Largest difference of logits relative to the largest logit, as the runner is now. The pools are released
        again."""
        try:
            return _largest([self._batch_error(runner, owners) for owners in self._wanted])
        finally:
            runner.cache.release()

    def _batch_error(self, runner: ModelRunner, owners: tuple[int, ...]) -> float:
        got, wanted = _ragged_logits(runner, self._sequences, owners), self._wanted[owners]
        if got[0].shape != wanted[0].shape:
            raise ValueError(f"its logits are {got[0].shape[-1]} wide instead of {wanted[0].shape[-1]}")
        return _largest([relative_error(ours, theirs) for ours, theirs in zip(got, wanted, strict=True)])

    def _difference(self, runner: ModelRunner) -> str | None:
        """Why the ragged batch is not good enough, or None if it is."""
        try:
            worst = self.error(runner)
        except UnpageableError as error:
            return f"a layer asks for {error}"
        except Exception as error:  # model code met something it was not written for
            return f"{type(error).__name__}: {error}"
        tolerance = TOLERANCES[self._dtype]
        if not worst <= tolerance:
            return f"its logits differ by {worst:.1e} of the largest, more than {tolerance:g}"
        return None


def _log_level(level: Level) -> None:
    if level.scope is not Scope.NOTHING:
        loss = "" if level.batches_decodes else "; decodes are not batched there"
        logger.info("Run group by group instead of once a step: %s%s.", level, loss)


def _plain_logits(model: Any, sequence: Sequence[int], adapters: AdapterRows, owner: int) -> mx.array:
    """Logits after the prompt and after one more token, `[2, vocabulary]`, with the adapter `owner`."""
    cache = make_prompt_cache(model)
    with adapters.step(np.array([owner])):
        prompt = model(mx.array([sequence[:-1]]), cache=cache)[0, -1]
        decode = model(mx.array([sequence[-1:]]), cache=cache)[0, -1]
    logits = mx.stack([prompt, decode])
    if owner == NONE and mx.isnan(logits).all():
        raise ModelLoadError(
            f"The model's logits are no numbers (NaN) in plain mlx-lm, too{_where_nan(model)}: fetch it again, or take "
            "another copy."
        )
    if owner != NONE and mx.isnan(logits).any():
        raise ModelLoadError(
            f"With the adapter {adapters.names[owner]} the model's logits are no numbers (NaN): its file is broken, or "
            "made for other weights."
        )
    mx.eval(logits)
    return logits


def _where_nan(model: Any) -> str:
    """The first weights that hold what is no number."""
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and mx.isnan(array).any():
            return f", since {name} holds NaN"
    return ""


def _largest(errors: list[float]) -> float:
    """NaN if one of them is, which `max` may skip."""
    return float(np.max(errors))


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    mine, plain = _to_host(ours), _to_host(theirs)
    is_finite = np.isfinite(plain)  # some models forbid tokens with -inf
    difference = np.subtract(mine, plain, out=np.zeros_like(plain), where=mine != plain)
    return float(np.abs(difference).max() / (np.abs(plain[is_finite]).max(initial=0.0) + 1e-9))


def _to_host(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


def _ragged_logits(runner: ModelRunner, sequences: list[list[int]], owners: tuple[int, ...]) -> list[mx.array]:
    """The same logits from three steps: the long prompt's first chunk with the others' whole prompts; its rest beside
    the others' decodes; its decode. `owners` are the sequences' adapters. The second step's chunk passes for one with
    drafts, so that recurrent states are read in one slot and written in another."""
    names = ("long", "short", "middle")
    ids_of = dict(zip(names, sequences, strict=True))
    owner_of = dict(zip(names, owners, strict=True))
    cut = BLOCK_SIZE - 3
    windows = runner.cache.windows
    runner.cache.allocate(len(windows) * _NUM_BLOCKS, num_slots=len(_PROMPTS) + 1)
    tables = BlockTables(windows)
    for name in names:
        tables.add(name)

    def run(*chunks: ScheduledChunk, rows: Sequence[int]) -> mx.array:
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids or ()]
        row_owners = np.repeat([owner_of[chunk.request_id] for chunk in chunks], [chunk.num_tokens for chunk in chunks])
        logits = runner.forward(tables.plan(chunks), mx.array(ids), rows, row_owners)
        mx.eval(logits, *runner.cache.state())
        return logits

    def blocks(*ids: int) -> BlockIds:
        """The blocks `ids` of each layer group's own range."""
        return tuple(tuple(group * _NUM_BLOCKS + block_id for block_id in ids) for group in range(len(windows)))

    def chunk(name: str, start: int, end: int, block_ids: BlockIds = (), num_drafts: int = 0) -> ScheduledChunk:
        token_ids = tuple(ids_of[name][start:end])
        return ScheduledChunk(name, start, end - start, token_ids, block_ids, True, 0, num_drafts=num_drafts)

    long, short, middle = (len(sequence) - 1 for sequence in sequences)
    first = run(
        chunk("long", 0, cut, blocks(2, 0)),
        chunk("short", 0, short, blocks(3)),
        chunk("middle", 0, middle, blocks(4)),
        rows=[cut + short - 1, cut + short + middle - 1],
    )
    second = run(
        chunk("short", short, short + 1),
        chunk("middle", middle, middle + 1),
        chunk("long", cut, long, num_drafts=1),
        rows=[0, 1, 1 + long - cut],
    )
    third = run(chunk("long", long, long + 1), rows=[0])
    return [
        mx.stack([second[2], third[0]]),
        mx.stack([first[0], second[0]]),
        mx.stack([first[1], second[1]]),
    ]
