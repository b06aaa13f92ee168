"""Whether a model's chat templates can be compiled, found when the model is loaded and not by its first request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_server.errors import ModelLoadError

_OTHER_FILES = ("chat_template.json", "tokenizer_config.json")


def check_chat_templates(hf: Any, folder: Path) -> None:
    """Compiles every template of the tokenizer `hf`, which came from `folder`; none is run. Raises `ModelLoadError`
    with the file and the line."""
    templates = hf.chat_template or {}
    named = templates if isinstance(templates, Mapping) else {"default": templates}
    for name, text in named.items():
        try:
            render_jinja_template(conversations=[], chat_template=text)
        except jinja2.TemplateSyntaxError as error:
            which = "" if templates is text else f" `{name}`"
            raise ModelLoadError(
                f"The chat template{which} in {_source(folder, text)} is not valid, line {error.lineno}: "
                f"{error.message}. Mend it there, or fetch the model again."
            ) from error


def _source(folder: Path, text: str) -> Path:
    """The file that the template stands in, as far as can be told."""
    paths = [*sorted(folder.glob("**/*.jinja")), *(folder / name for name in _OTHER_FILES)]
    found = (path for path in paths if path.is_file() and _holds(path, text))
    return next(found, folder)


def _holds(path: Path, text: str) -> bool:
    written = path.read_text(encoding="utf-8", errors="replace")
    return written == text if path.suffix == ".jinja" else '"chat_template"' in written
