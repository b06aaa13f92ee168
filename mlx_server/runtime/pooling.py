"""Vectors and scores: how a model's folder says that it pools, and the pooling of hidden states in a ragged batch.

Every method is a weighted sum over positions, with weights that depend on the prompt's length. So each chunk adds its
part to the sum of the chunks before, and only rows with a weight are read. Example: MEAN over a prompt of 5 tokens in
chunks of 3 and 2 has the weights 0.2 0.2 0.2 | 0.2 0.2, in two parts of one sum. LAST reads no row of the first chunk
and one of the second.

The files of sentence-transformers beside a model:

    modules.json                        the modules after the model: Pooling, Dense, Normalize
    1_Pooling/config.json               how hidden states become one vector
    2_Dense/config.json, *.safetensors  a linear layer after the pooling, with an activation
    config_sentence_transformers.json   named prompts that precede a text
    sentence_bert_config.json           the maximum number of tokens of a text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_server.errors import ModelLoadError
from mlx_server.outputs import NewRequestData, ScheduledChunk
from mlx_server.request import PoolingMethod, Vector
from mlx_server.runtime.models.folder import read_headers, read_model_json

FloatArray = npt.NDArray[np.float32]

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = MappingProxyType(
    {"Identity": lambda x: x, "Tanh": mx.tanh, "ReLU": nn.relu, "GELU": nn.gelu, "Sigmoid": mx.sigmoid}
)
"""By the names of torch's classes, which sentence-transformers' files contain."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """`activation(x @ weight.T + bias)` of pooled vectors, in float32. `weight` is `[out, in]`, `bias` `[out]`."""

    weight: mx.array
    bias: mx.array | None
    activation: str

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.weight.T
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


_SETTINGS = {"last": PoolingMethod.LAST, "mean": PoolingMethod.MEAN, "cls": PoolingMethod.CLS}
_NEWER_NAMES = {"cls": PoolingMethod.CLS, "mean": PoolingMethod.MEAN, "weightedmean": PoolingMethod.WEIGHTED_MEAN}
_YES_NO_NAMES = re.compile(r"qwen3[-_.]?reranker", re.IGNORECASE)
_REMEDY = "Start the model with --pooling METHOD to choose how its vectors are made, or with --pooling off."


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What a model gives besides text, or instead of it.

    With `is_reranker`, it gives the probability of "yes" after a query and a document. Otherwise it gives vectors:
    pooled by `method`, sent through the layers in the folders `dense`, and scaled to length 1 if it `normalizes`.
    `prompts` are texts to put before an input, by name. If the folder says so, `max_tokens` limits an input, and
    vectors may be cut to `matryoshka_dimensions`. With `is_bidirectional`, each position sees the whole input. With
    `is_embedder_only`, the model gives no text.
    """

    method: PoolingMethod = PoolingMethod.LAST
    is_reranker: bool = False
    dense: tuple[Path, ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int | None = None
    matryoshka_dimensions: tuple[int, ...] = ()
    is_bidirectional: bool = False
    is_embedder_only: bool = False


def read_pooling(folder: Path | None, name: str, config: Mapping[str, Any], setting: str) -> PoolingSpec | None:
    """How the model `name` in `folder` (None: random weights) pools, by its files and the `setting` --pooling; None if
    it gives text only. Raises `ModelLoadError` if it cannot be served so."""
    is_bidirectional = config.get("use_bidirectional_attention") in (True, "all") or config.get("is_causal") is False
    if setting == "off":
        if is_bidirectional:
            raise ModelLoadError(
                f"{name} is bidirectional (use_bidirectional_attention), so it gives vectors and no text. Leave "
                "--pooling at auto."
            )
        return None
    if setting == "rank" or (setting == "auto" and _is_yes_no(name, folder, config)):
        if is_bidirectional:
            raise ModelLoadError(f"{name} is bidirectional, so it cannot rank. Leave --pooling at auto.")
        return PoolingSpec(is_reranker=True)
    has_files = folder is not None and (folder / "modules.json").is_file()
    if setting == "auto" and not has_files and not is_bidirectional:
        return None
    dimensions = config.get("matryoshka_dimensions") or ()
    spec = PoolingSpec(
        # sentence-transformers' default.
        _SETTINGS.get(setting, PoolingMethod.MEAN),
        matryoshka_dimensions=tuple(size for size in dimensions if isinstance(size, int)),
        is_bidirectional=is_bidirectional,
        is_embedder_only=has_files or is_bidirectional,
    )
    return _with_files(spec, folder, setting) if has_files and folder is not None else spec


def load_dense(spec: PoolingSpec | None) -> tuple[DenseLayer, ...]:
    """The layers after the pooling, in float32. MLX thread. Raises `ModelLoadError`."""
    return () if spec is None else tuple(map(_dense, spec.dense))


def _is_yes_no(name: str, folder: Path | None, config: Mapping[str, Any]) -> bool:
    """Whether a model is Qwen3-Reranker, by its name, or by the configuration for other servers."""
    names = [name, "" if folder is None else folder.name, str(config.get("_name_or_path", ""))]
    return config.get("classifier_from_token") == ["no", "yes"] or any(map(_YES_NO_NAMES.search, names))


def _with_files(spec: PoolingSpec, folder: Path, setting: str) -> PoolingSpec:
    """`spec` completed by sentence-transformers' files; the method only if the setting leaves it open."""
    dense: list[Path] = []
    normalizes = False
    for kind, path in _modules(folder):
        if kind == "Pooling" and setting == "auto":
            spec = replace(spec, method=_method(path / "config.json"))
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            normalizes = True
        elif kind not in ("Transformer", "Pooling"):
            raise ModelLoadError(f"{folder / 'modules.json'} has a module {kind}, which is not supported. {_REMEDY}")
    settings = read_model_json(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    named = {str(name): text for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    bounds = read_model_json(folder / "sentence_bert_config.json")
    max_tokens = bounds.get("max_seq_length")
    default = settings.get("default_prompt_name")
    return replace(
        spec,
        dense=tuple(dense),
        normalizes=normalizes,
        prompts={name: text for name, text in named.items() if isinstance(text, str)},
        default_prompt_name=default if isinstance(default, str) else None,
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
    )


def _modules(folder: Path) -> Sequence[tuple[str, Path]]:
    """The kind and the folder of each module, in order."""
    path = folder / "modules.json"
    try:
        modules = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda module: int(module["idx"]))
        return [(str(module["type"]).rpartition(".")[2], folder / str(module["path"])) for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error!r}. Pull the model again.") from error


def _method(path: Path) -> PoolingMethod:
    config = read_model_json(path)
    found = [name.removeprefix("pooling_mode_") for name in config if name.startswith("pooling_mode_") and config[name]]
    if isinstance(mode := config.get("pooling_mode"), str):
        found = [_NEWER_NAMES.get(mode, mode)]
    known = {str(method) for method in PoolingMethod}
    if len(found) != 1 or found[0] not in known:
        raise ModelLoadError(
            f"{path} has the pooling {', '.join(found) or 'none'}; supported is one of {', '.join(sorted(known))}. "
            f"{_REMEDY}"
        )
    if config.get("include_prompt", True) is not True:
        raise ModelLoadError(
            f"{path} excludes prompts from the pooling (include_prompt), which is not supported. {_REMEDY}"
        )
    return PoolingMethod(found[0])


def _dense(folder: Path) -> DenseLayer:
    config = read_model_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"{folder / 'config.json'} has the activation {activation}; supported are {', '.join(ACTIVATIONS)}. "
            f"{_REMEDY}"
        )
    path = folder / "model.safetensors"
    read_headers(path)  # raises
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    if "linear.weight" not in weights:
        raise ModelLoadError(f"{path} has no linear.weight; pull the model again.")
    bias = weights.get("linear.bias")
    layer = DenseLayer(
        weights["linear.weight"].astype(mx.float32), None if bias is None else bias.astype(mx.float32), activation
    )
    mx.eval(layer.weight, *(() if layer.bias is None else (layer.bias,)))
    return layer


@dataclass(frozen=True, slots=True)
class _Part:
    """One request's part of a step: the planned hidden rows from `first` on, with `weights`. The last part `ends` the
    request."""

    request_id: str
    first: int
    weights: FloatArray
    ends: bool


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """The rows of the batch whose hidden states are pooled, and the rows whose logits are scores, each with its
    request."""

    hidden_rows: list[int]
    parts: list[_Part]
    logit_rows: list[int]
    scored: dict[str, mx.array]
    """The token ids whose logits are scores, by request, in the order of `logit_rows`."""


NO_POOLING = PoolingPlan([], [], [], {})
"""The plan of a step in which no request pools."""


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """The lazy results of requests that end with a step, and the sums of others, which are evaluated with the step."""

    vectors: mx.array | None
    request_ids: list[str]
    scores: dict[str, mx.array]
    sums: list[mx.array]

    def arrays(self) -> list[mx.array]:
        """The arrays to submit with the step."""
        return [*(() if self.vectors is None else (self.vectors,)), *self.scores.values(), *self.sums]

    def fetch(self) -> dict[str, Vector]:
        """Waits for the values."""
        rows: FloatArray = np.zeros((0, 0), np.float32) if self.vectors is None else np.array(self.vectors)
        found = {request_id: row.tobytes() for request_id, row in zip(self.request_ids, rows, strict=True)}
        return found | {request_id: np.array(scores).tobytes() for request_id, scores in self.scores.items()}


class Pooler:
    """The state of requests that pool. MLX thread only."""

    def __init__(self, dense: Sequence[DenseLayer] = ()) -> None:
        """`dense` are the layers after the pooling, in order. `requests` has the requests that pool, by id."""
        self.requests: dict[str, NewRequestData] = {}
        self._dense = tuple(dense)
        self._sums: dict[str, mx.array] = {}

    @property
    def num_dimensions(self) -> int | None:
        """The length of vectors if there are dense layers; None if it is that of the hidden states."""
        return self._dense[-1].weight.shape[0] if self._dense else None

    def add(self, data: NewRequestData) -> None:
        """Adds a request at its admission, or again after a preemption; ignored if it does not pool."""
        if data.pooling is not None:
            self.requests[data.request_id] = data

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        self.requests.pop(request_id, None)
        self._sums.pop(request_id, None)

    def plan(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> PoolingPlan:
        """The rows that pooling needs from a step. Chunk i ends before row `ends[i]`."""
        plan = PoolingPlan([], [], [], {})
        for chunk, end_row in zip(chunks, ends):
            data = self.requests.get(chunk.request_id)
            if data is None or data.pooling is None:
                continue
            end, num_tokens = chunk.start + chunk.num_tokens, len(data.prompt_token_ids)
            if data.pooling.logit_ids:
                if end == num_tokens:
                    plan.logit_rows.append(end_row - 1)
                    plan.scored[chunk.request_id] = mx.array(data.pooling.logit_ids)
                continue
            positions, weights = position_weights(data.pooling.method, num_tokens, chunk.start, end)
            plan.parts.append(_Part(chunk.request_id, len(plan.hidden_rows), weights, end == num_tokens))
            plan.hidden_rows.extend(end_row - end + position for position in positions)
        return plan

    def pool(self, plan: PoolingPlan, hidden: mx.array | None, logits: mx.array) -> PooledBatch:
        """Adds up the plan's hidden rows, `[rows, D]`, and selects scores from its rows of logits. Evaluates
        nothing."""
        done: dict[str, mx.array] = {}
        open_sums: list[mx.array] = []
        rows = None if hidden is None else hidden.astype(mx.float32)
        for part in plan.parts:
            total = self._sums.pop(part.request_id, None)
            if rows is not None and part.weights.size:
                mine = rows[part.first : part.first + part.weights.size]
                new = (mx.array(part.weights)[:, None] * mine).sum(axis=0)
                total = new if total is None else total + new
            if total is None:
                continue
            if part.ends:
                done[part.request_id] = total
            else:
                self._sums[part.request_id] = total
                open_sums.append(total)
        vectors = None
        if done:
            vectors = mx.stack(list(done.values()))
            for layer in self._dense:
                vectors = layer(vectors)
        scores = {
            request_id: logits[index, ids].astype(mx.float32)
            for index, (request_id, ids) in enumerate(plan.scored.items())
        }
        return PooledBatch(vectors, list(done), scores, open_sums)


def position_weights(method: PoolingMethod, num_tokens: int, start: int, end: int) -> tuple[range, FloatArray]:
    """The positions in [start, end) of a prompt that contribute to its vector, and their weights."""
    if method in (PoolingMethod.LAST, PoolingMethod.CLS):
        position = num_tokens - 1 if method is PoolingMethod.LAST else 0
        positions = range(position, position + 1) if start <= position < end else range(0)
        return positions, np.ones(len(positions), np.float32)
    positions = range(start, end)
    if method is PoolingMethod.WEIGHTED_MEAN:
        weights = np.arange(start + 1, end + 1) / (num_tokens * (num_tokens + 1) / 2)
        return positions, weights.astype(np.float32)
    share = 1.0 / num_tokens if method is PoolingMethod.MEAN else num_tokens**-0.5
    return positions, np.full(len(positions), share, np.float32)
