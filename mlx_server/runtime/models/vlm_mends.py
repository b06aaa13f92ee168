"""Faults of mlx-vlm's language parts that are mended before they are served, on the instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def mend(language_model: nn.Module) -> None:
    """Mends what the probe at load may not see: it occurs with longer or shorter texts."""
    object.__setattr__(language_model, "_batch_invariant_decode", None)  # Qwen's, which goes around the layers
    for part in language_model.modules():
        kind = type(part).__name__
        if kind == "HyV4Indexer":  # its compiled choice of keys is right for the first context's length only
            part.__class__ = type(part).__base__
        elif kind == "Qwen4ExpQSAIndexer":
            object.__setattr__(part, "build_mask", partial(_mask_within, part.build_mask))


def _mask_within(build_mask: Callable[[Any], mx.array], selection: Any) -> mx.array:
    """The mask of the blocks that are chosen, of which -1 means none. mlx-vlm writes to four places before the mask for
    a block -1, which in contexts of two tokens are not in the array."""
    chosen = selection.selected_blocks
    selection.selected_blocks = mx.where(chosen < 0, selection.key_len, chosen)  # behind the mask: not written
    return build_mask(selection)
