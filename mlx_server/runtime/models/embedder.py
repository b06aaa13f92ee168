"""What a model's folder says of vectors and scores: the files that sentence-transformers writes beside a model.

modules.json                        which modules follow the model: Pooling, Dense, Normalize
1_Pooling/config.json               how hidden states become one vector
2_Dense/config.json, *.safetensors  a linear layer behind it, with an activation
config_sentence_transformers.json   prompts by name, that go before a text
sentence_bert_config.json           the most tokens of a text
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_server.errors import ModelLoadError
from mlx_server.request import PoolingMethod
from mlx_server.runtime.models.folder import read_headers, read_model_json
from mlx_server.runtime.pooling import ACTIVATIONS, DenseLayer

_SETTINGS = {"last": PoolingMethod.LAST, "mean": PoolingMethod.MEAN, "cls": PoolingMethod.CLS}
_NEWER_NAMES = {"cls": PoolingMethod.CLS, "mean": PoolingMethod.MEAN, "weightedmean": PoolingMethod.WEIGHTED_MEAN}
_YES_NO_NAMES = re.compile(r"qwen3[-_.]?reranker", re.IGNORECASE)
_REMEDY = "Start the model with --pooling to say how its vectors are made, or with --pooling off."


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What a model gives beside text, or instead of it.

    With `is_reranker` the probability of "yes" after a query and a document; else vectors: pooled by `method`, sent
    through the layers in the folders `dense`, and of length 1 if it `normalizes`. `prompts` are texts to put before an
    input, by name. `max_tokens` bounds an input, if the folder says so; `matryoshka_dimensions` are those that the
    vectors may be cut to, if it says so. A model that `is_bidirectional` sees all of its input at each position. One
    that `is_embedder_only` gives no text.
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
    """What the model `name` in `folder` (None: random weights) pools by, unless told otherwise by the `setting`
    --pooling; None if it gives text only. Raises `ModelLoadError` for what cannot be served so."""
    is_bidirectional = config.get("use_bidirectional_attention") in (True, "all") or config.get("is_causal") is False
    if setting == "off":
        if is_bidirectional:
            raise ModelLoadError(
                f"{name} sees all of its input at each position (use_bidirectional_attention), so it gives vectors and "
                "no text. Leave --pooling at auto."
            )
        return None
    if setting == "rank" or (setting == "auto" and _is_yes_no(name, folder, config)):
        if is_bidirectional:
            raise ModelLoadError(f"{name} gives vectors, not a next token: it cannot rank. Leave --pooling at auto.")
        return PoolingSpec(is_reranker=True)
    has_files = folder is not None and (folder / "modules.json").is_file()
    if setting == "auto" and not has_files and not is_bidirectional:
        return None
    dimensions = config.get("matryoshka_dimensions") or ()
    spec = PoolingSpec(
        # What sentence-transformers does with a model that says nothing.
        _SETTINGS.get(setting, PoolingMethod.MEAN),
        matryoshka_dimensions=tuple(size for size in dimensions if isinstance(size, int)),
        is_bidirectional=is_bidirectional,
        is_embedder_only=has_files or is_bidirectional,
    )
    return _with_files(spec, folder, setting) if has_files and folder is not None else spec


def load_dense(spec: PoolingSpec | None) -> tuple[DenseLayer, ...]:
    """The layers behind the pooling, in float32. MLX thread. Raises `ModelLoadError`."""
    return () if spec is None else tuple(map(_dense, spec.dense))


def _is_yes_no(name: str, folder: Path | None, config: Mapping[str, Any]) -> bool:
    """Whether a model is Qwen3-Reranker: only its name says so, or what others' servers are told in the
    configuration."""
    names = [name, "" if folder is None else folder.name, str(config.get("_name_or_path", ""))]
    return config.get("classifier_from_token") == ["no", "yes"] or any(map(_YES_NO_NAMES.search, names))


def _with_files(spec: PoolingSpec, folder: Path, setting: str) -> PoolingSpec:
    """`spec` with what sentence-transformers' files say; the method only if the setting does not."""
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
            raise ModelLoadError(f"{folder / 'modules.json'} has a module {kind}, which is not served. {_REMEDY}")
    settings = read_model_json(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    named = {str(name): text for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    bounds = read_model_json(folder / "sentence_bert_config.json")
    most = bounds.get("max_seq_length")
    default = settings.get("default_prompt_name")
    return replace(
        spec,
        dense=tuple(dense),
        normalizes=normalizes,
        prompts={name: text for name, text in named.items() if isinstance(text, str)},
        default_prompt_name=default if isinstance(default, str) else None,
        max_tokens=most if isinstance(most, int) else None,
    )


def _modules(folder: Path) -> Sequence[tuple[str, Path]]:
    """The kinds of the modules in their order, and the folder of each."""
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
            f"{path} asks for the pooling {', '.join(found) or 'of nothing'}; one of {', '.join(sorted(known))} is "
            f"served. {_REMEDY}"
        )
    if config.get("include_prompt", True) is not True:
        raise ModelLoadError(
            f"{path} leaves prompts out of the pooling (include_prompt), which is not served. {_REMEDY}"
        )
    return PoolingMethod(found[0])


def _dense(folder: Path) -> DenseLayer:
    config = read_model_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"{folder / 'config.json'} has the activation {activation}; {', '.join(ACTIVATIONS)} are served. {_REMEDY}"
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
