"""A model and its weights, from its folder, by mlx-lm's loader."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_model as load_mlx_model

from mlx_server.errors import ModelLoadError, ServeError
from mlx_server.runtime.checks.image_probe import SAMPLES, TEXT_ONLY, not_served
from mlx_server.runtime.models.blueprint import model_classes
from mlx_server.runtime.models.embedder import checked_classes
from mlx_server.runtime.models.folder import read_headers, read_model_json
from mlx_server.runtime.models.vlm import INSTALL, is_installed

logger = logging.getLogger(__name__)


def load_folder(folder: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any], str]:
    """The model with its vision encoder if it has one and that can be loaded, else its text part; its configuration;
    and why there is no encoder. Weights are lazy. MLX thread. Raises `ModelLoadError`."""
    no_vision = why_blind(folder)
    if not no_vision:
        try:
            return *read_folder(folder, trust_remote_code, sees=True), ""
        except ModelLoadError as error:
            # Clients are told it, and the error names the folder.
            no_vision = "its vision encoder cannot be loaded; the server's log says why"
            logger.warning("%s is loaded without its vision encoder: %s", folder, error)
    return *read_folder(folder, trust_remote_code), no_vision


def why_blind(folder: Path) -> str:
    """Why the model in a folder is loaded without a vision encoder; empty if it may have one that is served."""
    config = read_model_json(folder / "config.json")
    if not config.get("vision_config"):
        return TEXT_ONLY
    if config.get("model_type") not in SAMPLES:
        return not_served(config.get("model_type"))
    names = {name for path in folder.glob("model*.safetensors") for name in read_headers(path)}
    if not any("vis" in name for name in names):
        return "its files have no weights of a vision encoder"
    return "" if is_installed() else f"mlx-vlm is not installed on the server: {INSTALL}"


def read_folder(folder: Path, trust_remote_code: bool, *, sees: bool = False) -> tuple[Any, dict[str, Any]]:
    """As `load_folder`: the text part, or the whole of a model that `sees`."""
    try:
        get_classes, lacking = checked_classes(folder)
        model, config = load_mlx_model(
            folder,
            lazy=True,
            model_config=lacking,
            get_model_classes=partial(model_classes, sees=True) if sees else get_classes,
            trust_remote_code=trust_remote_code,
        )
    except ServeError:
        raise
    except Exception as error:  # mlx-lm raises errors of any kind
        raise ModelLoadError(f"Cannot load the model in {folder}: {type(error).__name__}: {error}") from error
    return model, config
