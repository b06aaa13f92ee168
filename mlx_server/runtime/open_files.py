"""Keeps mlx-lm from changing how many files the process may open.

It lowers the limit to 2,048, and the hard one to 4,096 for good, when it is imported; where the hard limit is lower
already, the import fails. It does so for the conversion of models, which is not ours.
"""

from __future__ import annotations

import resource
import sys

_set_limit = resource.setrlimit


def _set_limit_for_others(kind: int, limits: tuple[int, int], /) -> None:
    if sys._getframe(1).f_globals.get("__name__") != "mlx_lm.utils":
        _set_limit(kind, limits)


def keep_limit() -> None:
    """Before mlx-lm is imported, by whomever and however: `setrlimit` does nothing for it from now on."""
    resource.setrlimit = _set_limit_for_others
