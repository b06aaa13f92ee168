"""The emulator's error for a faulty kernel."""

from __future__ import annotations


class EmulatorError(Exception):
    """A fault in a kernel. `kind` is one of lint, compile, launch, divergence, data race, out of bounds, undefined
    behaviour, written input."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
