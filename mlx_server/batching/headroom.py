"""How many free blocks admission leaves to those who run."""

from __future__ import annotations

from collections.abc import Collection

from mlx_server.batching.layer_groups import LayerGroups, num_blocks_for
from mlx_server.request import Request


class AdmissionHeadroom:
    """Free blocks that admission leaves to the running requests' future tokens.

    The share of their remaining output that is kept free falls a little with every step and jumps when a
    preemption shows that it was too small: SGLang's adaptive new-token ratio. It differs in that the
    remaining output of a request counts up to a cap, since most clients leave `max_tokens` open.
    """

    _MAX_REMAINING = 1024

    def __init__(
        self,
        groups: LayerGroups | None = None,
        *,
        initial: float = 0.3,
        least: float = 0.02,
        decay: float = 0.002,
        jump: float = 0.2,
    ) -> None:
        self.ratio = initial
        self._windows = (groups or LayerGroups()).windows
        self._least = least
        self._decay = decay
        self._jump = jump

    def num_blocks(self, running: Collection[Request]) -> int:
        """Blocks to keep free beside `running`. Where layers see a window only, a request whose window is full gives
        up as much as it takes."""
        return sum([self._num_blocks(running, window) for window in self._windows])

    def _num_blocks(self, running: Collection[Request], window: int | None) -> int:
        remaining = 0
        for request in running:
            num_tokens = request.num_tokens
            most = self._MAX_REMAINING if window is None else min(self._MAX_REMAINING, max(0, window - num_tokens))
            remaining += min(request.max_total_tokens - num_tokens, most)
        return num_blocks_for(int(self.ratio * remaining))

    def on_step(self) -> None:
        self.ratio = max(self._least, self.ratio - self._decay)

    def on_preemption(self) -> None:
        self.ratio = min(1.0, self.ratio + self._jump)
