"""Reads what modules of an unchanged model return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlx_server.runtime.layers.products import mix_in


class Taps:
    """Calls `on_output` with the place of a module among `modules`, which are distinct, and what it has returned, after
    each of its calls. Their classes are replaced by subclasses, until `remove`. MLX thread only."""

    def __init__(self, modules: Iterable[Any], on_output: Callable[[int, Any], None]) -> None:
        self._modules = list(modules)
        for place, module in enumerate(self._modules):
            object.__setattr__(module, "_tap", lambda output, place=place: on_output(place, output))
            mix_in(module, _Tapped)

    def remove(self) -> None:
        """Restores the modules."""
        for module in self._modules:
            module.__class__ = type(module).__mro__[2]
            object.__delattr__(module, "_tap")


class _Tapped:
    _tap: Callable[[Any], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._tap(output)
        return output
