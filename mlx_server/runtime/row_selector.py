"""Keeps the head of a model from computing logits that nobody reads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.adapter_rows import AdapterRows

_BODIES = ("model", "backbone", "transformer")
"""What mlx-lm's models call the part before their head."""


class RowSelector:
    """Stands before the body of a model and passes on only the rows of its hidden states that will
    be sampled, counted over the whole batch: the head then computes S rows of logits instead of T.

    It is set beside the module tree, in the instance's own namespace, so that parameters, quantisation and
    saving see the model as it was; `remove` takes it away again. Other attributes pass through.
    """

    def __init__(self, owner: Any, name: str, adapters: AdapterRows) -> None:
        self._owner = owner
        self._name = name
        self._adapters = adapters
        self._inner = getattr(owner, name)
        self.rows: list[int] | None = None

    @classmethod
    def install(cls, model: Any, adapters: AdapterRows) -> RowSelector | None:
        """Puts a selector into `model`, or into the language model inside it; None if there is no body that is
        called apart from a head. `adapters` are told of the rows that the head gets."""
        owners = [owner for owner in (model, getattr(model, "language_model", None)) if isinstance(owner, nn.Module)]
        for owner in owners:
            children = owner.children()
            name = next((name for name in _BODIES if isinstance(children.get(name), nn.Module)), None)
            if name is not None:
                selector = cls(owner, name, adapters)
                object.__setattr__(owner, name, selector)
                return selector
        return None

    def remove(self) -> None:
        """Restores the model."""
        vars(self._owner).pop(self._name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._inner(*args, **kwargs)
        if self.rows is None:
            return hidden
        self._adapters.select(self.rows)
        return hidden.reshape(-1, 1, hidden.shape[-1])[mx.array(self.rows, dtype=mx.int32)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
