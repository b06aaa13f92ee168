"""Layers that choose which tokens they attend to (sparse attention), with few to choose: so short prompts show whether
they choose as plain mlx-lm does, which otherwise takes thousands of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_BLOCK_LIMITS = {
    "index_topk_blocks": ("index_block_size", "index_local_blocks"),
    "sparse_topk_blocks": ("sparse_block_size", "sparse_init_blocks", "sparse_local_blocks"),
    "topk_blocks": ("block_size", "init_blocks", "local_blocks"),
    "block_topk": ("compress_ratio",),
}
"""By the attribute of a layer that says how many blocks it chooses: those with a block's tokens, and with the blocks
that it always takes."""

_FEW_TOKENS, _MOST_TOKENS = 16, 640

CHOICE_TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.3, mx.bfloat16: 0.3}
"""Largest accepted difference of logits relative to the largest, with few to choose. In half precision, rounding swaps
tokens at the edge of a choice. In 12 and in 40 layers of DeepSeek V3.2's form with random weights, errors of 0.4 % in
each product made a difference of 0.03 to 0.26, and wrong choices one of 0.36 to 0.82."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layer that attends to all tokens of a context up to `reach`, by its attribute `name`. If that is set to `few`,
    it chooses among `num_tokens`."""

    layer: Any
    name: str
    few: int
    num_tokens: int
    reach: int


def find_choices(model: Any, num_seen: int) -> list[Choice]:
    """The layers of a model that attend to all of `num_seen` tokens, but not to all of many. Layers that take more than
    `_MOST_TOKENS` to show it are left out."""
    modules = model.modules()
    helpers = [vars(module)["indexer"] for module in modules if "indexer" in vars(module)]  # which are no modules
    choices = [choice for layer in (*modules, *helpers) if (choice := _choice(layer)) is not None]
    return [
        choice
        for choice in choices
        if choice.reach >= num_seen
        and choice.num_tokens <= _MOST_TOKENS
        and getattr(choice.layer, choice.name) > choice.few
    ]


def _choice(layer: Any) -> Choice | None:
    if isinstance(getattr(layer, "index_topk", None), int):
        few = max(_FEW_TOKENS, getattr(layer, "index_kpool", 1))  # tokens are chosen by pools of so many
        ratio = getattr(getattr(layer, "compressor", None), "compress_ratio", 1)  # or windows of so many are chosen
        return Choice(layer, "index_topk", few, 2 * few * ratio, layer.index_topk * ratio)
    for name, (size, *always) in _BLOCK_LIMITS.items():
        most, num_tokens = getattr(layer, name, None), getattr(layer, size, None)
        if isinstance(most, int) and isinstance(num_tokens, int):
            few = 1 + sum(getattr(layer, each, None) or 0 for each in always)
            return Choice(layer, name, few, (few + 1) * num_tokens, most * num_tokens)
    return None


@contextmanager
def with_few(choices: Sequence[Choice]) -> Iterator[None]:
    """Has the layers choose few until the end."""
    whole = [getattr(choice.layer, choice.name) for choice in choices]
    for choice in choices:
        setattr(choice.layer, choice.name, choice.few)
    try:
        yield
    finally:
        for choice, many in zip(choices, whole):
            setattr(choice.layer, choice.name, many)
