"""Drafters in folders of their own, each made for one larger model: how any of them is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.drafts.heads import DrafterModel, quantize_as_stored, scattered
from mlx_server.runtime.models.folder import read_model_json
from mlx_server.runtime.models.loader import LoadedModel, Pieces, is_gpu, prepare_weights

Weights = dict[str, mx.array]


class BuiltDrafter(NamedTuple):
    """A drafter before its `weights` are in, which have the names in `model`. `config` describes its layers."""

    model: DrafterModel
    weights: Weights
    config: Mapping[str, Any]


ReadDrafter = Callable[[Mapping[str, Any], Weights, LoadedModel], BuiltDrafter]
"""Builds a drafter from its config.json and its files' tensors for a model. Raises `LookupError`, `TypeError` or
`ValueError` if they are of another kind or for another model."""


def load_drafter(read: ReadDrafter, name: str, folder: Path, target: LoadedModel, dtype: str) -> Pieces[LoadedModel]:
    """Loads the drafter in `folder` for its `target` model. MLX thread. Raises `ModelLoadError`."""
    try:
        model, layers = _build(read, folder, target)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # sizes of 0, other code
        reason = f"its config.json has no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ModelLoadError(f"Cannot load {name} to draft for {target.name}: {reason}.") from error
    yield 0.0
    yield from prepare_weights(model, dtype)
    return LoadedModel(name, model, {**layers, "vocab_size": target.vocab_size}, None)


def _build(read: ReadDrafter, folder: Path, target: LoadedModel) -> tuple[DrafterModel, Mapping[str, Any]]:
    """The model, and the configuration of its layers."""
    config = read_model_json(folder / "config.json")
    others = config.get("quantization_config") or {}
    if method := others.get("quant_method"):
        raise ValueError(f"its weights are quantised with {method}; take them unquantised, or quantised by MLX")
    stored: Weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored |= cast(Weights, mx.load(str(path)))
    model, weights, layers = read(config, stored, target)
    by_body = {name.removeprefix("model."): array for name, array in weights.items()}
    quantize_as_stored(model, config.get("quantization"), by_body)
    model.load_weights(list(weights.items()))
    if is_gpu():
        model.set_dtype(model.model.link.last_norm().weight.dtype)
    model.eval()
    return model, layers


_UNSUPPORTED = {".kv_b_proj.": "latent attention (MLA)", ".experts.": "experts"}
"""Layers that are neither Llama's nor Qwen3's, by parts of their tensors' names."""

_UNREAD = ("t2d", "mask_hidden", "verifier_")


def own_weights(stored: Weights) -> Weights:
    """Tensors by their names in an `OutputModel`. SGLang calls the first layer `midlayer`. Raises `ValueError` for
    those of layers that are not supported."""
    weights: Weights = {}
    for name, array in stored.items():
        for part, what in _UNSUPPORTED.items():
            if part in name:
                raise ValueError(f"its layers have {what}, which is not supported")
        own = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if own.endswith("_codebook"):
            own = f"{own}.weight"
        if not own.startswith(_UNREAD):
            weights[own if own.startswith(("d2t", "lm_head.")) else f"model.{own}"] = array
    return weights


class OutputModel(DrafterModel):
    """A drafter with an output matrix of its own, perhaps for the most frequent tokens only, `d2t` more than the place
    of each; or with its embeddings or the model's output matrix in place of one."""

    def __init__(self, body: nn.Module, model_type: str, size: int, vocab_size: int) -> None:
        """`size` is that of the body's hidden states, `vocab_size` the model's."""
        super().__init__(body, model_type)
        self._size, self._vocab_size = size, vocab_size
        self._is_tied = False

    def take_output(self, weights: Weights, num_tokens: int, *, is_tied: bool) -> Weights:
        """Makes the output for `num_tokens` as the `weights` have it; returns those to load. An `is_tied` drafter with
        embeddings and no matrix has the embeddings. Raises `ValueError` if there are none for fewer tokens than the
        model's, or `d2t` names tokens that it does not have."""
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(self._size, num_tokens, bias=False)
        elif num_tokens != self._vocab_size:
            raise ValueError(f"it has no lm_head for its {num_tokens} of the model's {self._vocab_size} tokens")
        self._is_tied = is_tied and "embed_tokens" in self.model
        if num_tokens == self._vocab_size:
            return {name: array for name, array in weights.items() if name != "d2t"}
        self.d2t = mx.zeros((num_tokens,), mx.int32)
        return {**weights, "d2t": self._checked(weights.get("d2t", self.d2t).astype(mx.int32))}

    def own_logits(self, hidden: mx.array) -> mx.array:
        """Logits of the drafter's own tokens for hidden states `[..., D]`."""
        if "lm_head" in self:
            logits: mx.array = self.lm_head(hidden)
        else:
            logits = (self.model.embed_tokens.as_linear if self._is_tied else self.model.link.output)(hidden)
        return logits

    def spread(self, logits: mx.array) -> mx.array:
        """`own_logits` at their places among all tokens; those of all others are less."""
        if "d2t" not in self:
            return logits
        tokens = mx.arange(self.d2t.size, dtype=mx.int32) + self.d2t
        return scattered(logits, mx.broadcast_to(tokens, logits.shape), self._vocab_size)

    def _checked(self, d2t: mx.array) -> mx.array:
        """Raises `ValueError` if it names tokens that the model does not have: MLX would write there."""
        tokens = mx.arange(d2t.size, dtype=mx.int32) + d2t
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self._vocab_size:
            raise ValueError(
                f"its d2t names tokens {least} to {most}, the model has {self._vocab_size}; fetch it again"
            )
        return d2t


def add_biases(attention: nn.Module) -> None:
    """Gives the projections of an attention module biases."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        rows, columns = attention[name].weight.shape
        attention[name] = nn.Linear(columns, rows, bias=True)


def check_sizes(kind: str, sizes: Mapping[str, tuple[object, object]]) -> None:
    """Raises `ValueError` unless each size that a drafter of this `kind` was made for is that of the model, the
    second."""
    for name, (wanted, found) in sizes.items():
        if wanted != found:
            raise ValueError(f"its {name} is {wanted}, the model has {found}; take the {kind} made for this model")
