"""Makes the tables of docs/models-tested.md from tests of tiny models and real templates; `python -m
tests.models_tested` writes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.utils import MODEL_REMAPPING

from mlx_server.engine.text.reasoning import find_reasoning_markers
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.checks import kv_loss
from mlx_server.runtime.checks.image_families import IMAGE_FAMILIES
from mlx_server.runtime.drafts.head_families import FAMILIES
from mlx_server.runtime.models.tool_parsers import find_tool_parser
from tests.architectures import ARCHITECTURES, BROKEN, NEEDS_METAL, REFUSED, config_of
from tests.conformance import Subject
from tests.text_worlds import make_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "models-tested.md"
TEMPLATES = Path(__file__).parent / "engine" / "text" / "chat_templates"
UNSEEN = [name for name in IMAGE_FAMILIES if name not in ARCHITECTURES]
"""mlx-lm has no code of this name."""

_BOTH_WAYS = {
    "gemma3": ", on a GPU without `--batch-invariant`",
    "gemma4": ", larger ones on a GPU without `--batch-invariant`",
    "gemma4_unified": ", on a GPU without `--batch-invariant`",
}
"""Images that see both ways."""

_HEADS = {"head_dim": 64, "global_head_dim": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 32}
_WIDTH = {"hidden_size": 256, "n_embd": 256, "d_model": 256, "block_dim": 256}
_WIDER: tuple[dict[str, Any], ...] = (
    _HEADS,
    _WIDTH,
    {**_HEADS, **_WIDTH},
    {**_WIDTH, "head_dim": 64, "v_head_dim": 64, "qk_nope_head_dim": 64},
    {**_HEADS, "v_head_dim": 64, "qk_nope_head_dim": 64},
    {"head_dim": 32, "num_attention_heads": 2},
)
"""Changes that make dimensions multiples of 32, as in real models."""

_ENTRIES = {"openai-gpt-oss-120b": ("<|constrain|>", "<|call|>", "<|message|>", "<|channel|>")}
"""Special tokens of vocabularies, by template, since a template need not contain them."""

YES, UNTESTED, NONE = "yes", "not tested", "–"


@dataclass(frozen=True, slots=True)
class Row:
    """The facts about an architecture, as texts of the table."""

    name: str
    text: str
    images: str = NONE
    speculation: str = NONE
    kv_bits: str = NONE
    disk: str = NONE

    def __str__(self) -> str:
        return f"| {self.name} | {self.text} | {self.images} | {self.speculation} | {self.kv_bits} | {self.disk} |"


def text_of(level: str) -> str:
    """The text for a model that is served at `level`."""
    return YES if level == "ragged" else f"yes ({level})"


def row_of(name: str) -> Row:
    """Loads tiny models of the architecture, which takes a second."""
    if name in UNSEEN:
        code = f"as {MODEL_REMAPPING[name]}" if name in MODEL_REMAPPING else "by mlx-vlm's code"
        return Row(name, code, _images(name), UNTESTED, UNTESTED, UNTESTED)
    if name in {*REFUSED, *BROKEN}:
        return Row(name, "refused")
    if name in NEEDS_METAL:
        return Row(name, "on Macs only", speculation=UNTESTED, kv_bits=UNTESTED, disk=UNTESTED)
    subject = Subject(name)
    subject.wanted([[1, 2, 3]], [2])  # constants belong to the thread that makes them
    with subject.make_llm(speculate="ngram") as llm:
        cache = llm.engine._parts.runner.cache
        refusal, has_kv = BlockContents(cache).refusal(), bool(cache.paged)
        drafts = llm.engine.scheduler.speculation is not None
        level = llm.info.level
    return Row(
        name,
        text_of(level),
        _images(name),
        (f"{YES}, own heads" if name in FAMILIES else YES) if drafts else "no",
        _kv_bits(name) if has_kv else NONE,
        YES if refusal is None else f"no: {refusal}",
    )


def _images(name: str) -> str:
    return YES + _BOTH_WAYS.get(name, "") if name in IMAGE_FAMILIES else NONE


def _kv_bits(name: str) -> str:
    for change in _WIDER:
        try:
            subject = Subject(name, _changed(config_of(name), change))
            subject.wanted([[1, 2, 3]], [2])
            # Random weights lose more than a model's that has learnt something.
            with mock.patch.object(kv_loss, "_MAX_DIVERGENCE", np.inf), subject.make_llm(kv_bits="8"):
                return YES
        except (ConfigError, ModelLoadError, ValueError):  # mlx-lm's own for what fits no such model
            continue
    return UNTESTED


def _changed(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Also in the part on text, where there is one."""
    inner = {name: _changed(value, change) for name, value in config.items() if name == "text_config"}
    return {**config, **change, **inner}


def template_row(path: Path) -> str:
    template = path.read_text(encoding="utf-8")
    shown = re.findall(r"<[^<>\s{}]{2,40}>|\[/?[A-Z_]{4,}\]", template)
    names = sorted({*shown, *_ENTRIES.get(path.stem, ())})
    tokenizer = make_tokenizer(added=names, chat_template=template)
    parser, markers = find_tool_parser(tokenizer.hf), find_reasoning_markers(tokenizer)
    calls = "JSON without tags" if parser is None else f"`{parser.name}`"
    return f"| {path.stem} | {calls} | {'no' if markers is None else f'`{markers.start}`'} |"


def architecture_table() -> str:
    names = sorted({*ARCHITECTURES, *NEEDS_METAL, *BROKEN, *UNSEEN}, key=str.lower)
    head = "| `model_type` | text | images | speculation | K/V in fewer bits | prefixes on disk |\n|" + " --- |" * 6
    return "\n".join([head, *(str(row_of(name)) for name in names)])


def template_table() -> str:
    head = "| template | tool calls are read as | reasoning begins with |\n|" + " --- |" * 3
    return "\n".join([head, *map(template_row, sorted(TEMPLATES.glob("*.jinja")))])


def with_tables(page: str) -> str:
    """The page with both tables replaced, each between its marks."""
    for name, table in (("architectures", architecture_table()), ("templates", template_table())):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        page, count = re.subn(pattern, lambda found: found[1] + table + found[2], page, flags=re.DOTALL)  # noqa: B023
        assert count == 1, name
    return page


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    mx.set_default_device(mx.cpu)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
