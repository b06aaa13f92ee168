"""Keeps mlx-lm from changing how many files the process may open.

It lowers the limit to 2,048, and the hard one to 4,096 for good, when it is imported; where the hard limit is lower
already, the import fails. It does so for the conversion of models, which is not ours.
"""

from __future__ import annotations

import importlib.util
import resource
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LOWERS_IT = "mlx_lm.utils"


class _Finder(MetaPathFinder):
    """Finds that one module as others would, and runs it while `setrlimit` does nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOWERS_IT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _keeping_limits(spec.loader.exec_module)  # type: ignore[assignment, method-assign]
        return spec


def _keeping_limits(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run_keeping_limits(module: ModuleType) -> None:
        plain, resource.setrlimit = resource.setrlimit, lambda *_: None
        try:
            run(module)
        finally:
            resource.setrlimit = plain

    return run_keeping_limits


def keep_limit() -> None:
    """Before mlx-lm is imported; does nothing once it is."""
    if _LOWERS_IT not in sys.modules:
        sys.meta_path.insert(0, _Finder())
