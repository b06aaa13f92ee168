"""Builds models from their configuration: without weights, to find out what they keep of tokens before they are loaded,
and with the weights of a folder, by mlx-lm's loader. Also loads folders with a model's body only, as embedders are
published."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import MODEL_REMAPPING, _get_classes
from mlx_lm.utils import load_model as load_mlx_model

from mlx_server.errors import ModelLoadError, ServeError
from mlx_server.runtime.attention.interface import ReferenceBackend
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.checks.image_families import IMAGE_FAMILIES, TEXT_ONLY, not_served
from mlx_server.runtime.layers.cpu import bfloat16_weights, native_library
from mlx_server.runtime.models import vlm
from mlx_server.runtime.models.folder import added_token_id, only_drafts, read_headers, read_model_json, refuse_foreign
from mlx_server.runtime.models.vision_towers import TOWER_FAMILIES, tower_classes
from mlx_server.runtime.vision import ReadsImages

_MISSING_PACKAGES = {"olmo": "ai2-olmo"}
"""Packages without which some of mlx-lm's modules exit the process when they are imported."""

_ENCODER = "an encoder, which gives vectors or classes of a text; for vectors, see docs/embeddings.md"
_SPEECH = "it transcribes or generates speech, and this server is for text"
_PICTURES = "it compares or generates images, and this server is for text"
_OTHER_KINDS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "electra"), _ENCODER),
    **dict.fromkeys(("whisper", "wav2vec2", "speecht5", "parakeet"), _SPEECH),
    **dict.fromkeys(("clip", "siglip", "siglip2", "vit", "stable_diffusion"), _PICTURES),
    **dict.fromkeys(("t5", "bart", "mbart", "m2m_100"), "it has an encoder and a decoder, which mlx-lm does not run"),
}
"""Known types of models that are not language models."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
"""Types of weights by their names in settings."""


def model_classes(config: Mapping[str, Any], *, sees: bool = False) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes for the model and for its arguments; mlx-vlm's if mlx-lm has none. With the vision encoder
    (`sees`) mlx-vlm's, or mlx-lm's with mlx-vlm's encoder. Raises `ModelLoadError` if neither knows `config`."""
    refuse_foreign(config)
    if only_drafts(config):
        raise ModelLoadError("It only drafts for another model: name that one, and this with --draft-model.")
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelLoadError("The configuration has no model_type; add it to config.json.")
    kind = _OTHER_KINDS.get(model_type)
    if kind is not None and not _is_in_mlx_lm(model_type):
        raise ModelLoadError(f"This is a model of type {model_type}: {kind}.")
    others = _vlm_classes(config) if sees or not _is_in_mlx_lm(model_type) else None
    if others is not None and model_type not in TOWER_FAMILIES:
        return others
    try:
        classes: tuple[type[nn.Module], Any] = _get_classes(dict(config))
    except SystemExit as error:
        package = _MISSING_PACKAGES.get(model_type, "that is not installed")
        raise ModelLoadError(
            f"Models of type {model_type} are not served: mlx-lm's module for them needs the package {package}."
        ) from error
    except ValueError as error:
        if vlm.is_installed():
            remedy = "Neither mlx-lm nor mlx-vlm knows it: update them, or convert the model to a type that they know."
        else:
            remedy = f"mlx-lm does not know it; mlx-vlm may, but is not installed: {vlm.INSTALL}."
        raise ModelLoadError(f"{error} {remedy}") from error
    if model_type in _READERS:
        classes = _READERS[model_type](classes[0]), classes[1]
    return classes if others is None else tower_classes(classes, others, model_type)


def _with_split_projections(model_class: type[nn.Module]) -> type[nn.Module]:
    """mlx-lm's Kimi-VL with the loading of its Kimi K2.5, which has the same text part: that splits `kv_b_proj`, as
    makers publish it, into the parts that the model has."""
    from mlx_lm.models.kimi_k25 import Model as KimiK25

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        sanitized: dict[str, mx.array] = KimiK25.sanitize(self, model_class.sanitize(self, weights))
        return sanitized

    return type(model_class.__name__, (model_class,), {"sanitize": sanitize, "__module__": model_class.__module__})


def _reading_mlx_vlms_names(model_class: type[nn.Module]) -> type[nn.Module]:
    """mlx-lm's Gemma 3n, which also loads files that mlx-vlm has converted: there `model.language_model.layers` is
    called `language_model.model.layers`, and `model.vision_tower` `vision_tower`."""

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        names = (name.replace("language_model.model.", "language_model.") for name in weights)
        whole = (name if name.startswith("model.") else f"model.{name}" for name in names)
        sanitized: dict[str, mx.array] = model_class.sanitize(self, dict(zip(whole, weights.values())))
        return sanitized

    return type(model_class.__name__, (model_class,), {"sanitize": sanitize, "__module__": model_class.__module__})


_READERS = {"kimi_vl": _with_split_projections, "gemma3n": _reading_mlx_vlms_names}
"""What reads more forms of files than mlx-lm's own class, by the type of the model."""


def _is_in_mlx_lm(model_type: str) -> bool:
    name = MODEL_REMAPPING.get(model_type, model_type)
    return importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def _vlm_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any] | None:
    """mlx-vlm's classes; None if it has none or is not installed."""
    if not vlm.is_installed():
        return None
    try:
        return vlm.vlm_classes(config)
    except ImportError as error:
        raise ModelLoadError(
            f"mlx-vlm's module for models of type {config['model_type']} cannot be imported ({error}). "
            f"Install what it needs: {vlm.INSTALL}."
        ) from error


def build_model(config: Mapping[str, Any], *, sees: bool = False) -> nn.Module:
    """The model of `config` with mlx-lm's own initial weights, which are lazy. Classes as for `model_classes`. Raises
    `ModelLoadError` if it cannot be built."""
    model_class, arguments_class = model_classes(config, sees=sees)
    try:
        return model_class(arguments_class.from_dict(dict(config)))
    except Exception as error:  # mlx-lm raises errors of any kind
        library = "mlx-vlm" if issubclass(model_class, ReadsImages) else "mlx-lm"
        raise ModelLoadError(
            f"{library} cannot build a model of type {config['model_type']} from this config.json "
            f"({type(error).__name__}: {error}): correct it, or fetch the model again."
        ) from error


def build_blank(config: Mapping[str, Any], dtype: mx.Dtype, *, sees: bool = False) -> nn.Module:
    """As `build_model`, with zeros of type `dtype` that take no memory; tables of integers stay, and are lazy. Any
    thread; computes nothing."""
    model = build_model(config, sees=sees)

    def zeros_like(parameter: mx.array) -> mx.array:
        is_floating = mx.issubdtype(parameter.dtype, mx.floating)
        return mx.broadcast_to(mx.array(0, dtype), parameter.shape) if is_floating else parameter

    model.update(tree_map(zeros_like, model.parameters()))
    return model.eval()


def predict_cache(config: Mapping[str, Any], dtype: str) -> PagedKVCache:
    """The caches that the model of `config` will have with weights of type `dtype`, one of `DTYPES`, not allocated. Any
    thread. Raises `ModelLoadError` if the configuration shows that the model cannot be served.

    MLX keeps compiled functions for each thread until it ends. A worker thread may end together with Python, and then
    the process aborts (mlx#4110). So this runs in a thread of its own, which clears them while Python is there. MLX
    gives each thread a stream, whose own thread never ends; so these threads share one.
    """
    stream = _shared_stream()

    def cache() -> PagedKVCache:
        mx.set_default_stream(stream)
        try:
            return PagedKVCache(discover_layers(build_blank(config, DTYPES[dtype])), ReferenceBackend())
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(1, thread_name_prefix="blueprint") as thread:
        return thread.submit(cache).result()


@lru_cache(maxsize=1)
def _shared_stream() -> mx.Stream:
    return mx.new_thread_unsafe_stream(mx.default_device())


def bfloat16_shapes(config: Mapping[str, Any], *, sees: bool = False) -> list[tuple[int, ...]]:
    """The shapes of the weights that the model of `config` keeps in bfloat16 on the CPU if they are stored in it. Empty
    without the native library, which this may build. Any thread. Raises `ModelLoadError` as `build_model`."""
    if native_library() is None:
        return []
    return [tuple(weight.shape) for _, weight in bfloat16_weights(build_blank(config, mx.bfloat16, sees=sees))]


logger = logging.getLogger(__name__)


def load_folder(folder: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any], str]:
    """The model with its vision encoder if there is one that can be loaded, otherwise its text part; its configuration;
    and why there is no encoder. Weights are lazy. MLX thread. Raises `ModelLoadError`."""
    no_vision = why_no_vision(folder)
    if not no_vision:
        try:
            return *read_folder(folder, trust_remote_code, sees=True), ""
        except ModelLoadError as error:
            # Clients see this text, and the error names the folder.
            no_vision = "its vision encoder cannot be loaded; the server's log says why"
            logger.warning("%s is loaded without its vision encoder: %s", folder, error)
    return *read_folder(folder, trust_remote_code), no_vision


def why_no_vision(folder: Path) -> str:
    """Why the model in a folder is loaded without a vision encoder; empty if it may have a supported one."""
    config = read_model_json(folder / "config.json")
    if not config.get("vision_config"):
        return TEXT_ONLY
    if config.get("model_type") not in IMAGE_FAMILIES:
        return not_served(config.get("model_type"))
    names = {name for path in folder.glob("model*.safetensors") for name in read_headers(path)}
    if not any("vis" in name for name in names):
        return "its files have no weights of a vision encoder"
    return "" if vlm.is_installed() else f"mlx-vlm is not installed on the server: {vlm.INSTALL}"


def read_folder(folder: Path, trust_remote_code: bool, *, sees: bool = False) -> tuple[Any, dict[str, Any]]:
    """As `load_folder`, for the text part, or with `sees` for the whole model."""
    try:
        get_classes, lacking = checked_classes(folder)
        model, config = load_mlx_model(
            folder,
            lazy=True,
            model_config=lacking | _settings_lacking(folder),
            get_model_classes=_checking_groups(partial(model_classes, sees=True) if sees else get_classes),
            trust_remote_code=trust_remote_code,
        )
    except ServeError:
        raise
    except Exception as error:  # mlx-lm raises errors of any kind
        raise ModelLoadError(
            f"Cannot load the model in {folder} ({type(error).__name__}: {error}). Correct its config.json, or "
            "fetch it again."
        ) from error
    return model, config


_Classes = Callable[[dict[str, Any]], tuple[type[nn.Module], Any]]


def _checking_groups(get_classes: _Classes) -> _Classes:
    """The classes of models that refuse quantized weights with more groups in a row than config.json has numbers: MLX
    would divide by zero, which ends the process."""

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
        model_class, arguments_class = get_classes(config)

        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            named: dict[str, mx.array] = model_class.sanitize(self, weights) if is_sanitized else weights
            rows = {f"{name.removesuffix('weight')}scales": row for name, row in tree_flatten(self.parameters())}
            for name in rows.keys() & named.keys():
                if rows[name].shape[-1] < named[name].shape[-1]:
                    raise ValueError(f"{name} {named[name].shape} is for rows longer than {rows[name].shape[-1]}")
            return named

        is_sanitized = hasattr(model_class, "sanitize")
        members = {"sanitize": sanitize, "__module__": model_class.__module__}
        return type(model_class.__name__, (model_class,), members), arguments_class

    return classes


_IMAGE_TOKENS = {
    "internvl_chat": "<IMG_CONTEXT>",
    "deepseekocr": "<image>",
    "deepseekocr_2": "<image>",
    "minicpmv4_6": "<|image_pad|>",
}
"""Of models whose configuration does not name them."""


def _settings_lacking(folder: Path) -> dict[str, Any]:
    """For the configuration of models as their makers publish them: the token of images, which only the tokenizer
    names, InternVL's text part under the usual name, and the form of DeepSeek V4's weights in MLX."""
    config = read_model_json(folder / "config.json")
    model_type = config.get("model_type")
    settings = {"text_config": config.get("text_config", {})} if model_type == "internvl_chat" else {}
    if model_type in _IMAGE_TOKENS and vlm.placeholder_id(config) < 0:
        found = added_token_id(folder, _IMAGE_TOKENS[model_type])
        settings |= {} if found is None else {"image_token_index": found}
    if model_type == "deepseek_v4" and "quantization" not in config and config.get("quantization_config"):
        settings["quantization"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}  # experts in 4 bits, by their shapes
    return settings


def checked_classes(folder: Path) -> tuple[_Classes, dict[str, Any]]:
    """For mlx-lm's loader: the function that finds the classes of the model in `folder`, and additions to its
    configuration. If the folder has a model's body only, its weights get the names that they have in the whole model.
    Raises `ModelLoadError`."""
    names = {name for path in folder.glob("model*.safetensors") for name in read_headers(path)}
    heads = sorted(name for name in names if name.split(".")[0] in ("score", "classifier"))
    if heads:
        raise ModelLoadError(
            f"The model in {folder} classifies sequences ({heads[0]}), and mlx-lm does not load such heads. To rank, "
            "use a model that answers with yes or no, such as the original Qwen3-Reranker."
        )
    if not any(name.startswith("layers.") for name in names) or any(name.startswith("model.") for name in names):
        return model_classes, {}

    def classes_of_body(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
        model_class, arguments_class = model_classes(config)

        class Whole(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                named = {name if name.startswith("lm_head.") else f"model.{name}": w for name, w in weights.items()}
                sanitized: dict[str, mx.array] = super().sanitize(named) if hasattr(model_class, "sanitize") else named
                return sanitized

        return Whole, arguments_class

    # Without a head of its own, the model uses its embeddings as head, which vectors do not need.
    return classes_of_body, {} if "lm_head.weight" in names else {"tie_word_embeddings": True}
