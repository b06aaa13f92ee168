"""Multi-token-prediction heads: finds a model's head and loads it as a model that drafts.

A head is an additional decoder layer. It reads the model's last hidden state at a position and the embedding of the
next token, and predicts the token after that. Embedding and output matrix are the model's own:

    x = projection(concatenate(norm(embedding of token i + 1), norm(hidden state of i)))
    logits of token i + 2 = output matrix(norm(layer(x)))

For later tokens it reads its own hidden state instead of the model's. If a model was trained with several heads, only
the first one is used, repeatedly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import infer_quant_config

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.drafts.head_families import FAMILIES, Config, HeadFamily
from mlx_server.runtime.drafts.head_fetch import fetch_heads
from mlx_server.runtime.models.blueprint import build_model
from mlx_server.runtime.models.folder import read_headers, read_model_json
from mlx_server.runtime.models.loader import LoadedModel, Pieces, is_gpu, prepare_weights

_STACKED = re.compile(r"(.*mlp)\.experts\.0\.(\w+)\.(\w+)")


@dataclass(slots=True)
class HeadLink:
    """What a head shares with its model, and its inputs and outputs besides token ids. `given` are hidden states `[T,
    D]` after the model's last norm for the next call (None: it uses the embeddings instead); `carried` are the hidden
    states that the call leaves."""

    embed: Callable[[mx.array], mx.array]
    output: Callable[[mx.array], mx.array]
    last_norm: Callable[[], nn.Module]
    given: mx.array | None = None
    carried: mx.array | None = None


class HeadBody(nn.Module):  # type: ignore[misc]
    """The head before its output matrix."""

    def __init__(self, family: HeadFamily, layers: list[nn.Module], size: int, eps: float, link: HeadLink) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layers = layers
        if family.norm:
            self.norm = nn.RMSNorm(size, eps=eps)
        self.family = family
        self.link = link

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        link, family = self.link, self.family
        embedded = link.embed(ids)
        last_norm = link.last_norm()
        hidden = embedded if link.given is None else link.given.reshape(embedded.shape)
        if not family.reads_normed:
            hidden = (
                hidden / last_norm.weight
            )  # the state before the norm, apart from its length, which the next norm removes
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = self.projection(mx.concatenate(both if family.embedding_first else both[::-1], axis=-1))
        first = cache[0][0] if isinstance(cache[0], tuple | CacheList) else cache[0]
        mask = create_attention_mask(x, first, return_array=True)
        for layer, own in zip_longest(self.layers, cache):  # a layer with experts only has no cache
            x = layer(x, mask=mask, cache=own)
        normed: mx.array = (self.norm if family.norm else last_norm)(x)
        if link.given is not None:
            carried = normed if family.carries_normed else x if family.reads_normed else last_norm(x)
            link.carried = carried.reshape(-1, x.shape[-1])
        return normed


class DrafterModel(nn.Module):  # type: ignore[misc]
    """The base of models that only draft for another one, with the interface of mlx-lm's models, for a `ModelRunner` of
    their own. `model` is all but the output matrix."""

    model: Any

    def __init__(self, body: nn.Module, model_type: str) -> None:
        super().__init__()
        self.model = body
        self.model_type = model_type

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers


class HeadModel(DrafterModel):
    """A head."""

    model: HeadBody

    def __init__(self, body: HeadBody, caches: list[Any], model_type: str) -> None:
        super().__init__(body, model_type)
        object.__setattr__(self, "_empty_caches", caches)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model.link.output(self.model(inputs, cache or [None] * len(self.layers)))

    def make_cache(self) -> list[Any]:
        return deepcopy(self._empty_caches)


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The files with a model's head, and the names of its tensors in each. `config` is the model's."""

    family: HeadFamily
    config: Config
    names: Mapping[Path, list[str]]

    @property
    def one_layer(self) -> Config:
        """The configuration of a model whose only layers are like those of the head."""
        text = self.config.get("text_config")
        changes = {"num_hidden_layers": 1, **self.family.one_layer({**self.config, **(text or {})})}
        own = {"text_config": {**text, **changes}} if isinstance(text, dict) else changes
        return {**self.config, **own}


def find_heads(folder: Path | None, name: str, origin: str | None = None) -> HeadFiles:
    """Finds the head of the model `name` in `folder`: in its own weights, in a file `mtp*.safetensors` beside them, or
    fetched from the hub's model `origin`, which may take long. Any thread. Raises `NoHeadsError`, `ModelLoadError` or
    `DownloadError`."""
    config = {} if folder is None else read_model_json(folder / "config.json")
    family = FAMILIES.get(config.get("model_type", ""))
    if folder is None or family is None:
        kind = config.get("model_type", "a random one")
        raise _refused(name, f"its architecture is {kind}; heads are supported for {', '.join(sorted(FAMILIES))}")
    text = {**config, **(config.get("text_config") or {})}
    pattern = re.compile(family.prefix.replace("{layers}", str(text.get("num_hidden_layers"))))
    paths = sorted({*folder.glob("model*.safetensors"), *folder.glob("mtp*.safetensors")})
    found = {path: names for path in paths if (names := list(filter(pattern.match, read_headers(path))))}
    if not found and origin is not None:
        path = fetch_heads(origin, pattern)
        found = {path: list(read_headers(path))}
    if not found:
        raise _refused(name, "its files have no weights of a head; mlx-lm's conversions leave them out")
    return HeadFiles(family, config, found)


class NoHeadsError(ModelLoadError):
    """The model has no heads."""


def _refused(name: str, reason: str) -> NoHeadsError:
    return NoHeadsError(
        f"{name} has no multi-token-prediction heads: {reason}. Put them beside its weights as mtp.safetensors, name "
        "the original model with --mtp-from, or choose another --speculate."
    )


def load_head(files: HeadFiles, target: LoadedModel, dtype: str) -> Pieces[LoadedModel]:
    """Loads the head, in the type and the quantisation of its target model. MLX thread. Raises `ModelLoadError`."""
    try:
        head = _build(files, target)
    except (AttributeError, KeyError, ValueError) as error:  # missing weights, or a model of other code
        raise ModelLoadError(f"Cannot load the multi-token-prediction heads of {target.name}: {error}") from error
    yield 0.0
    yield from prepare_weights(head, dtype)
    text = files.config.get("text_config") or files.config
    config = {**text, "num_hidden_layers": len(head.layers), "vocab_size": target.vocab_size}
    return LoadedModel(f"the heads of {target.name}", head, config, None)


def _build(files: HeadFiles, target: LoadedModel) -> HeadModel:
    template = build_model(files.one_layer)
    owner = text_part(target.model)
    link = link_to(owner)
    norm = link.last_norm()
    body = HeadBody(files.family, list(template.layers), norm.weight.shape[0], norm.eps, link)
    head = HeadModel(body, make_prompt_cache(template), str(files.config["model_type"]))
    weights, is_packed = _read(files, template)
    packing = target.config.get("quantization")
    if is_packed:
        quantize_as_stored(head, packing, weights)
    body.load_weights(list(weights.items()))
    if is_gpu():
        head.set_dtype(norm.weight.dtype)
    if not is_packed:
        _quantize(head, packing, getattr(template, "quant_predicate", None) or (lambda *_: True))
    head.eval()
    return head


def text_part(model: Any) -> Any:
    """The part of a model with its layers and its output matrix: the language model, if it also sees."""
    return next(one for one in (getattr(model, "language_model", None), model) if isinstance(one, nn.Module))


def layers_of(model: Any) -> Any:
    """The layers of its `text_part`."""
    owner = text_part(model)
    return (owner if hasattr(owner, "layers") else owner[body_name(owner)]).layers


def link_to(owner: Any) -> HeadLink:
    """The link to a model's modules, which are looked up at each call, because they may have been replaced. `owner` is
    its `text_part`."""
    body = body_name(owner)
    embedding = _name(owner[body], "embed_tokens", "word_embeddings", "embeddings")
    norm = _name(owner[body], "norm", "norm_f")

    def find(name: str) -> Any:
        return getattr(getattr(owner, body), name)

    return HeadLink(
        embed=lambda ids: find(embedding)(ids),
        output=(lambda x: owner.lm_head(x)) if "lm_head" in owner else (lambda x: find(embedding).as_linear(x)),
        last_norm=lambda: find(norm),
    )


def scattered(logits: mx.array, tokens: mx.array, vocab_size: int) -> mx.array:
    """Logits `[..., vocab_size]` with `logits` `[..., N]` at `tokens` `[..., N]`; all others are less than any of
    these."""
    others = mx.broadcast_to(logits.min(axis=-1, keepdims=True) - 1, (*logits.shape[:-1], vocab_size))
    return mx.put_along_axis(others, tokens, logits, axis=-1)


def body_name(owner: nn.Module) -> str:
    """The attribute of a `text_part` that has all but the output matrix."""
    return _name(owner, "model", "backbone")


def _name(module: nn.Module, *names: str) -> str:
    return next((name for name in names if name in module), names[0])


def _read(files: HeadFiles, template: Any) -> tuple[dict[str, mx.array], bool]:
    """The head's weights by their names in `HeadBody`, and whether they are quantised. mlx-lm's code for the
    architecture converts the weights of the decoder layer, as those of a model with one layer."""
    family, weights = files.family, dict[str, mx.array]()
    layer: dict[str, mx.array] = {}
    is_original = False
    for path, names in files.names.items():
        arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True))
        is_original |= metadata.get("format") != "mlx"
        for name in names:
            match = re.match(family.prefix.replace("{layers}", r"\d+"), name)
            part = None if match is None else family.parts(name[match.end() :])
            if part is not None:
                (layer if part.startswith("layers.") else weights)[part] = arrays[name]
    has_stacked = any(_STACKED.fullmatch(name) for name in layer)
    sanitized = layer
    if hasattr(template, "sanitize"):
        body = body_name(text_part(template))
        sanitized = template.sanitize({f"{body}.{name}": array for name, array in layer.items()})
    layer = {f"layers.{name.partition('layers.')[2]}": array for name, array in sanitized.items()}
    _stack_experts(layer)
    if is_original and family.adds_one:
        # mlx-lm's code has already done it for the layer if it stacked experts: then it sees an original checkpoint.
        is_done = has_stacked and files.config["model_type"] == "qwen3_next"
        _add_one(weights if is_done else layer)
        if not is_done:
            _add_one(weights)
    for end, factor in family.scales(files.config).items():
        layer |= {name: factor * array for name, array in layer.items() if name.endswith(f".{end}")}
    weights.update(layer)
    return weights, any(name.endswith(".scales") for name in weights)


def _add_one(weights: dict[str, mx.array]) -> None:
    for name, array in weights.items():
        if array.ndim == 1 and "norm" in name:
            weights[name] = array + 1.0


def _stack_experts(weights: dict[str, mx.array]) -> None:
    """Stacks experts that are still separate: for some architectures, mlx-lm expects them in one tensor."""
    for name in [name for name in weights if _STACKED.fullmatch(name)]:
        mlp, product, kind = _STACKED.fullmatch(name).groups()  # type: ignore[union-attr]
        parts = list(_experts(weights, mlp, f"{product}.{kind}"))
        weights[f"{mlp}.switch_mlp.{product}.{kind}"] = mx.stack(parts)


def _experts(weights: dict[str, mx.array], mlp: str, name: str) -> Iterator[mx.array]:
    number = 0
    while (array := weights.pop(f"{mlp}.experts.{number}.{name}", None)) is not None:
        yield array
        number += 1


def quantize_as_stored(model: nn.Module, settings: object, weights: dict[str, mx.array]) -> None:
    """Quantises the modules of a head or drafter that have quantised `weights`, which are named without `model.`.
    `settings` are those of a config.json; nothing is done without them."""
    _quantize(model, settings, lambda path, module: _packing(weights, path, module))


def _packing(weights: dict[str, mx.array], path: str, module: Any) -> bool | dict[str, Any]:
    """The quantisation of a module's weights, derived from their shapes."""
    name = path.removeprefix("model.")
    packing: dict[str, Any] | None = infer_quant_config(name, module, weights) if f"{name}.scales" in weights else None
    return packing or False


def _quantize(head: nn.Module, settings: object, chosen: Callable[[str, Any], bool | dict[str, Any]]) -> None:
    """Quantises the head as the model's `settings` say, where `chosen` and the shapes allow it."""
    if not isinstance(settings, dict):
        return
    group_size, bits, mode = settings["group_size"], settings["bits"], settings.get("mode", "affine")

    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        choice = chosen(path, module)
        own_size = choice.get("group_size", group_size) if isinstance(choice, dict) else group_size
        if not choice or module.weight.shape[-1] % own_size:
            return False
        return {"group_size": group_size, "bits": bits, "mode": mode, **choice} if isinstance(choice, dict) else True

    nn.quantize(head, group_size=group_size, bits=bits, mode=mode, class_predicate=choose)
