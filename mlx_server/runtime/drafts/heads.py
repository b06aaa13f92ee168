"""Multi-token-prediction heads: where a model's head is found, and the head as a model that drafts.

A head is one more decoder layer. It reads the model's last hidden state of a position and the embedding of the token
behind it, and predicts the token behind that; embedding and output matrix are the model's own:

    x = projection(concatenate(norm(embedding of token i + 1), norm(hidden state of i)))
    logits of token i + 2 = output matrix(norm(layer(x)))

For the token after that it gets its own hidden state in place of the model's. A model that was trained with several
heads is drafted for by its first one, over and over.
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

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.drafts.head_families import FAMILIES, Config, HeadFamily
from mlx_server.runtime.drafts.head_fetch import fetched_heads
from mlx_server.runtime.models.blueprint import build_model
from mlx_server.runtime.models.folder import read_headers, read_model_json
from mlx_server.runtime.models.loader import LoadedModel, Pieces, is_gpu, prepare_weights

_STACKED = re.compile(r"(.*mlp)\.experts\.0\.(\w+)\.(\w+)")


@dataclass(slots=True)
class HeadLink:
    """What a head shares with its model, and what goes in and out of it beside token ids: `given` are hidden states
    `[T, D]` behind the model's last norm for its next call, which makes do with embeddings without; `carried` are those
    that it leaves then."""

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
            hidden = hidden / last_norm.weight  # as before the norm but for the length, which the next norm takes out
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = self.projection(mx.concatenate(both if family.embedding_first else both[::-1], axis=-1))
        first = cache[0][0] if isinstance(cache[0], tuple | CacheList) else cache[0]
        mask = create_attention_mask(x, first, return_array=True)
        for layer, own in zip_longest(self.layers, cache):  # one of experts alone has no cache
            x = layer(x, mask=mask, cache=own)
        normed: mx.array = (self.norm if family.norm else last_norm)(x)
        if link.given is not None:
            carried = normed if family.carries_normed else x if family.reads_normed else last_norm(x)
            link.carried = carried.reshape(-1, x.shape[-1])
        return normed


class HeadModel(nn.Module):  # type: ignore[misc]
    """A head in the form of mlx-lm's models, for a `ModelRunner` of its own."""

    def __init__(self, body: HeadBody, caches: list[Any], model_type: str) -> None:
        super().__init__()
        self.model = body
        self.model_type = model_type
        object.__setattr__(self, "_empty_caches", caches)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model.link.output(self.model(inputs, cache or [None] * len(self.layers)))

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def make_cache(self) -> list[Any]:
        return deepcopy(self._empty_caches)


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Where the head of a model is: names of tensors by file. `config` is the model's."""

    family: HeadFamily
    config: Config
    names: Mapping[Path, list[str]]

    @property
    def one_layer(self) -> Config:
        """The configuration of a model whose only layers are like the head's."""
        text = self.config.get("text_config")
        changes = {"num_hidden_layers": 1, **self.family.one_layer({**self.config, **(text or {})})}
        own = {"text_config": {**text, **changes}} if isinstance(text, dict) else changes
        return {**self.config, **own}


def find_heads(folder: Path | None, name: str, origin: str | None = None) -> HeadFiles:
    """The head of the model `name` in `folder`: in its own weights, in a file `mtp*.safetensors` beside them, or
    fetched from the hub's model `origin`. Any thread, and as long as that takes. Raises `NoHeadsError`,
    `ModelLoadError` or `DownloadError`."""
    config = {} if folder is None else read_model_json(folder / "config.json")
    family = FAMILIES.get(config.get("model_type", ""))
    if folder is None or family is None:
        kind = config.get("model_type", "a random one")
        raise _refused(name, f"its architecture, {kind}, is none of {', '.join(sorted(FAMILIES))}")
    text = {**config, **(config.get("text_config") or {})}
    pattern = re.compile(family.prefix.replace("{layers}", str(text.get("num_hidden_layers"))))
    paths = sorted({*folder.glob("model*.safetensors"), *folder.glob("mtp*.safetensors")})
    found = {path: names for path in paths if (names := list(filter(pattern.match, read_headers(path))))}
    if not found and origin is not None:
        path = fetched_heads(origin, pattern)
        found = {path: list(read_headers(path))}
    if not found:
        raise _refused(name, "there are no weights of a head in its files, as conversions of mlx-lm leave them out")
    return HeadFiles(family, config, found)


class NoHeadsError(ModelLoadError):
    """A model has none."""


def _refused(name: str, reason: str) -> NoHeadsError:
    return NoHeadsError(
        f"{name} has no multi-token-prediction heads: {reason}. Put them beside its weights as mtp.safetensors, name "
        "the model that it was converted from with --mtp-from, or choose another --speculate."
    )


def load_head(files: HeadFiles, target: LoadedModel, dtype: str) -> Pieces[LoadedModel]:
    """The head in memory, in the target's type, and quantised as it is. MLX thread; raises `ModelLoadError`."""
    try:
        head = _build(files, target)
    except (AttributeError, KeyError, ValueError) as error:  # weights that lack something, or another code's model
        raise ModelLoadError(f"Cannot load the multi-token-prediction heads of {target.name}: {error}") from error
    yield 0.0
    yield from prepare_weights(head, dtype)
    text = files.config.get("text_config") or files.config
    config = {**text, "num_hidden_layers": len(head.layers), "vocab_size": target.vocab_size}
    return LoadedModel(f"the heads of {target.name}", head, config, None)


def _build(files: HeadFiles, target: LoadedModel) -> HeadModel:
    template = build_model(files.one_layer)
    owner = _language_model(target.model)
    link = _link(owner)
    norm = link.last_norm()
    body = HeadBody(files.family, list(template.layers), norm.weight.shape[0], norm.eps, link)
    head = HeadModel(body, make_prompt_cache(template), str(files.config["model_type"]))
    weights, is_packed = _read(files, template)
    packing = target.config.get("quantization")
    if is_packed:
        _quantize(head, packing, lambda path, module: _packing(weights, path, module))
    body.load_weights(list(weights.items()))
    if is_gpu():
        head.set_dtype(norm.weight.dtype)
    if not is_packed:
        _quantize(head, packing, getattr(template, "quant_predicate", None) or (lambda *_: True))
    head.eval()
    return head


def _language_model(model: Any) -> Any:
    return next(one for one in (getattr(model, "language_model", None), model) if isinstance(one, nn.Module))


def _link(owner: Any) -> HeadLink:
    """Looks the model's modules up at each call: they may have been replaced."""
    body = _name(owner, "model", "backbone")
    embedding = _name(owner[body], "embed_tokens", "word_embeddings", "embeddings")
    norm = _name(owner[body], "norm", "norm_f")

    def find(name: str) -> Any:
        return getattr(getattr(owner, body), name)

    return HeadLink(
        embed=lambda ids: find(embedding)(ids),
        output=(lambda x: owner.lm_head(x)) if "lm_head" in owner else (lambda x: find(embedding).as_linear(x)),
        last_norm=lambda: find(norm),
    )


def _name(module: nn.Module, *names: str) -> str:
    return next((name for name in names if name in module), names[0])


def _read(files: HeadFiles, template: Any) -> tuple[dict[str, mx.array], bool]:
    """The head's weights by their names in a `HeadBody`, and whether they are packed. mlx-lm's own code for the
    architecture converts those of the decoder layer, as the first layer of a model with one."""
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
        body = _name(_language_model(template), "model", "backbone")
        sanitized = template.sanitize({f"{body}.{name}": array for name, array in layer.items()})
    layer = {f"layers.{name.partition('layers.')[2]}": array for name, array in sanitized.items()}
    _stack_experts(layer)
    if is_original and family.adds_one:
        # mlx-lm's code has done it for the layer if it has stacked experts, which tells it that this is no conversion
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
    """Of experts that are still one by one: mlx-lm expects those of some architectures in one tensor."""
    for name in [name for name in weights if _STACKED.fullmatch(name)]:
        mlp, product, kind = _STACKED.fullmatch(name).groups()  # type: ignore[union-attr]
        parts = list(_experts(weights, mlp, f"{product}.{kind}"))
        weights[f"{mlp}.switch_mlp.{product}.{kind}"] = mx.stack(parts)


def _experts(weights: dict[str, mx.array], mlp: str, name: str) -> Iterator[mx.array]:
    number = 0
    while (array := weights.pop(f"{mlp}.experts.{number}.{name}", None)) is not None:
        yield array
        number += 1


def _packing(weights: Mapping[str, mx.array], path: str, module: Any) -> bool | dict[str, int]:
    """How the weights of a module are packed, told from their shapes."""
    name = path.removeprefix("model.")
    scales = weights.get(f"{name}.scales")
    if scales is None:
        return False
    depth = module.weight.shape[-1]
    bits = 32 * weights[f"{name}.weight"].shape[-1] // depth
    return {"bits": bits, "group_size": depth // scales.shape[-1]}


def _quantize(head: HeadModel, settings: object, chosen: Callable[[str, Any], bool | dict[str, int]]) -> None:
    """As the model is quantised by its `settings`, as far as `chosen` and the shapes allow."""
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
