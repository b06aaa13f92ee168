"""The load-time probe: compares a model's logits in a ragged batch with those of plain mlx-lm. Also the requests of
this and other checks."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.cache_views import UnpageableError
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.attention.regroup import Level, Scope, possible_levels
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.layers import model_failure
from mlx_server.runtime.checks.choices import CHOICE_TOLERANCES, Choice, find_choices, with_few
from mlx_server.runtime.layers.adapters import NONE, AdapterRows
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.vision import ImageRows

logger = logging.getLogger(__name__)

_PROMPTS = (BLOCK_SIZE + 9, 2, 14)
"""Prompt lengths of three requests. The first crosses a block boundary and is computed in two chunks beside the others'
decodes; the second is shorter than the reach of convolutions and n-grams."""

TOLERANCES = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
"""Largest accepted difference of logits relative to the largest logit. bfloat16 has 8 bits, and errors add up over the
layers."""


class TrialRequests:
    """Requests named by the keys of `sequences`, whose tokens are computed in any chunks by a runner's forward pass,
    without scheduler or sampler. Each has its own blocks, in descending order of their ids.

    Allocates the runner's pools again; the caller releases them. MLX thread.
    """

    def __init__(self, runner: ModelRunner, sequences: Mapping[str, Sequence[int]]) -> None:
        self._runner = runner
        self._sequences = dict(sequences)
        self._num_each = -(-max(map(len, sequences.values())) // BLOCK_SIZE)
        windows = runner.cache.windows
        self._groups = range(len(windows))
        # One more slot than requests, for the state behind a chunk with drafts.
        runner.cache.allocate(len(windows) * len(sequences) * self._num_each, num_slots=len(sequences) + 1)
        self._tables = BlockTables(windows)
        for name in sequences:
            self._tables.add(name)

    def blocks(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The ids of a request's blocks in each layer group."""
        rank, count = list(self._sequences).index(name), len(self._sequences)
        firsts = [(group * count + rank) * self._num_each for group in self._groups]
        return tuple(tuple(reversed(range(first, first + self._num_each))) for first in firsts)

    def chunk(self, name: str, start: int, end: int, num_drafts: int = 0) -> ScheduledChunk:
        """Tokens [start, end) of a request. All its blocks come with its first chunk."""
        ids = tuple(self._sequences[name][start:end])
        blocks = self.blocks(name) if start == 0 else ()
        return ScheduledChunk(name, start, end - start, ids, blocks, True, 0, num_drafts=num_drafts)

    def run(
        self,
        chunks: Sequence[ScheduledChunk],
        rows: Sequence[int],
        owners: IntArray | None = None,
        images: ImageRows | None = None,
    ) -> mx.array:
        """One step with these chunks, single tokens first: logits `[len(rows), vocabulary]` of these rows, evaluated.
        `owners` and `images` are as for `ModelForward`."""
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids or ()]
        logits = self._runner.forward(self._tables.plan(chunks), mx.array(ids), rows, owners, images=images)
        mx.eval(logits, *self._runner.cache.state())
        return logits


@dataclass(slots=True)
class Probe:
    """A few prompts and plain mlx-lm's logits for them, which a runner must reproduce: without adapters, and then in
    batches with two adapters and one request without, until each adapter has been in a batch; then once more, without
    adapters, with few tokens to choose for layers that choose among more than the prompts have. MLX thread.

    Make it before the runner: the model must be as mlx-lm built it, apart from `adapters`. Other models' steps may run
    at each yield.

    `_expected` has plain mlx-lm's logits of all sequences for each choice of their adapters, while the layers of
    `_choices` have few tokens to choose.
    """

    _model_type: str
    _sequences: list[list[int]]
    _expected: dict[tuple[int, ...], list[mx.array]]
    _choices: Sequence[Choice]
    _with_few: Probe | None = None

    @classmethod
    def in_pieces(cls, model: Any, vocab_size: int, adapters: AdapterRows) -> Generator[float, None, Probe]:
        """Raises `ModelLoadError` if the model fails in mlx-lm itself, or if its logits are NaN or not `vocab_size`
        wide."""
        num_adapters = len(adapters.keys)
        batches = [(NONE,) * len(_PROMPTS)]
        batches += [(first, NONE, (first + 1) % num_adapters) for first in range(0, num_adapters, 2)]
        probe = yield from cls._of(model, vocab_size, adapters, _PROMPTS, batches, ())
        if choices := find_choices(model, max(_PROMPTS)):
            longest = max([_PROMPTS[0], *[choice.num_tokens + 9 for choice in choices]])
            lengths = (longest, 2, longest - 7)
            probe._with_few = yield from cls._of(model, vocab_size, adapters, lengths, batches[:1], choices)
        return probe

    @classmethod
    def _of(
        cls,
        model: Any,
        vocab_size: int,
        adapters: AdapterRows,
        lengths: Sequence[int],
        batches: Sequence[tuple[int, ...]],
        choices: Sequence[Choice],
    ) -> Generator[float, None, Probe]:
        rng = np.random.default_rng(0)
        sequences = [rng.integers(1, vocab_size, size=length + 1).tolist() for length in lengths]
        plain: dict[tuple[int, int], mx.array] = {}
        for index, sequence in enumerate(sequences):
            for owner in dict.fromkeys(owners[index] for owners in batches):
                try:
                    with with_few(choices):
                        plain[index, owner] = _plain_logits(model, sequence, adapters, owner)
                except ModelLoadError:
                    raise
                except Exception as error:  # model code, and MLX below it
                    raise model_failure(model, error) from error
                yield 1.0
        width = plain[0, NONE].shape[-1]
        if width != vocab_size:
            raise ModelLoadError(f"The logits are {width} wide, and vocab_size is {vocab_size}.")
        expected = {owners: [plain[place] for place in enumerate(owners)] for owners in batches}
        return cls(getattr(model, "model_type", type(model).__name__), sequences, expected, choices)

    def find_level(self, runner: ModelRunner) -> Generator[float, None, None]:
        """Runs mixed steps of prompt chunks and decodes at one level after another, at each level first with the head
        on selected rows only, then on all rows. The runner stays at the first level with the model's own logits. Raises
        `ModelLoadError` if there is none. Releases the pools."""
        reasons: dict[str, str] = {}
        for level in possible_levels(runner.cache.layers):
            for selects_rows in (True, False) if runner.forward.can_select_rows else (False,):
                runner.forward.use(level, selects_rows=selects_rows)
                reason = yield from self.difference(runner)
                if reason is None:
                    _log_level(level)
                    return
                reasons[str(level)] = reason
        tried = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
        raise ModelLoadError(f"Models of type {self._model_type} cannot be served in a paged batch yet ({tried}).")

    def difference(self, runner: ModelRunner) -> Generator[float, None, str | None]:
        """Why the ragged batch is not good enough at the runner's current level, or None if it is. Releases the
        pools."""
        try:
            worst = yield from self._error(runner)
        except UnpageableError as error:
            return f"a layer asks for {error}"
        except Exception as error:  # any error of the model's code
            return f"{type(error).__name__}: {error}"
        finally:
            runner.cache.release()
        dtype = next(iter(self._expected.values()))[0].dtype
        tolerance = (CHOICE_TOLERANCES if self._choices else TOLERANCES)[dtype]
        if not worst <= tolerance:
            where = " where its layers choose the tokens that they attend to" if self._choices else ""
            return f"its logits differ by {worst:.1e} of the largest, more than {tolerance:g}{where}"
        return None if self._with_few is None else (yield from self._with_few.difference(runner))

    def _error(self, runner: ModelRunner) -> Generator[float, None, float]:
        """The largest difference of logits relative to the largest logit."""
        errors = []
        for owners, expected in self._expected.items():
            got = yield from _ragged_logits(runner, self._sequences, owners, self._choices)
            if got[0].shape != expected[0].shape:
                raise ValueError(f"its logits are {got[0].shape[-1]} wide instead of {expected[0].shape[-1]}")
            errors += [relative_error(ours, theirs) for ours, theirs in zip(got, expected, strict=True)]
        return _largest(errors)


def _log_level(level: Level) -> None:
    if level.scope is not Scope.NOTHING:
        loss = "" if level.batches_decodes else "; decodes are not batched there"
        logger.info("Runs once a group instead of once a step: %s%s.", level, loss)


def _plain_logits(model: Any, sequence: Sequence[int], adapters: AdapterRows, owner: int) -> mx.array:
    """Logits after the prompt and after one more token, `[2, vocabulary]`, with the adapter `owner`."""
    cache = make_prompt_cache(model)
    with adapters.step(np.array([owner])):
        prompt = model(mx.array([sequence[:-1]]), cache=cache)[0, -1]
        decode = model(mx.array([sequence[-1:]]), cache=cache)[0, -1]
    logits = mx.stack([prompt, decode])
    if owner == NONE and mx.isnan(logits).all():
        raise ModelLoadError(
            f"The model's logits are NaN in plain mlx-lm, too{_where_nan(model)}: fetch it again, or use another copy."
        )
    if owner != NONE and mx.isnan(logits).any():
        raise ModelLoadError(
            f"With the adapter {adapters.name_of(owner)} the model's logits are NaN: its file is broken, or made for "
            "other weights."
        )
    mx.eval(logits)
    return logits


def _where_nan(model: Any) -> str:
    """The first weights with NaN, in words for an error."""
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and mx.isnan(array).any():
            return f", since {name} holds NaN"
    return ""


def _largest(errors: list[float]) -> float:
    """The largest error; NaN if any is NaN, which Python's `max` may skip."""
    return float(np.max(errors))


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    mine, plain = _to_host(ours), _to_host(theirs)
    is_finite = np.isfinite(plain)  # some models forbid tokens with -inf
    difference = np.subtract(mine, plain, out=np.zeros_like(plain), where=mine != plain)
    return float(np.abs(difference).max() / (np.abs(plain[is_finite]).max(initial=0.0) + 1e-9))


def _to_host(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


def _ragged_logits(
    runner: ModelRunner, sequences: list[list[int]], owners: tuple[int, ...], choices: Sequence[Choice]
) -> Generator[float, None, list[mx.array]]:
    """The same logits from three steps: the long prompt's first chunk with the other prompts; its rest with the others'
    decodes; its decode. `owners` are the sequences' adapters. The second step marks its chunk as one with drafts, so
    that recurrent states are read from one slot and written to another."""
    names = ("long", "short", "middle")
    trial = TrialRequests(runner, dict(zip(names, sequences, strict=True)))
    owner_of = dict(zip(names, owners, strict=True))
    cut = BLOCK_SIZE - 3

    def run(*chunks: ScheduledChunk, rows: Sequence[int]) -> mx.array:
        row_owners = np.repeat([owner_of[chunk.request_id] for chunk in chunks], [chunk.num_tokens for chunk in chunks])
        with with_few(choices):  # not while other steps run: they may be of the same layers
            return trial.run(chunks, rows, row_owners)

    chunk = trial.chunk
    long, short, middle = (len(sequence) - 1 for sequence in sequences)
    first = run(
        chunk("long", 0, cut),
        chunk("short", 0, short),
        chunk("middle", 0, middle),
        rows=[cut + short - 1, cut + short + middle - 1],
    )
    yield 1.0
    second = run(
        chunk("short", short, short + 1),
        chunk("middle", middle, middle + 1),
        chunk("long", cut, long, num_drafts=1),
        rows=[0, 1, 1 + long - cut],
    )
    yield 1.0
    third = run(chunk("long", long, long + 1), rows=[0])
    yield 1.0
    return [
        mx.stack([second[2], third[0]]),
        mx.stack([first[0], second[0]]),
        mx.stack([first[1], second[1]]),
    ]
