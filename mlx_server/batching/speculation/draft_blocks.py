"""A block drafter as a draft model: one step drafts all tokens of a burst, from features of the model.

Like a head, it reads a hidden state of each position that the model has computed, but never its own, and no tokens but
the last known one:

    a request of 300 known tokens, 0 to 299; features of positions 0 to 298 are kept, and 3 tokens are to be drafted
    the chunk: features 0 to 298, then token 299 and three masks, whose rows give drafts of 300, 301 and 302
    the model accepts 300 and samples another token for 301: the next chunk has the features of 299 and 300, then the
    token in place of 301 and masks, and overwrites the block
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import Burst, BurstSteps
from mlx_server.batching.speculation.draft_costs import RowCosts, StepRoom
from mlx_server.batching.speculation.draft_heads import HeadDrafts
from mlx_server.outputs import HELD_FEATURES
from mlx_server.request import Request


class BlockDrafts(HeadDrafts):
    """The policy of a block drafter, which was trained for blocks of `block_size` rows with `mask_token_id`."""

    _num_held = HELD_FEATURES

    def __init__(self, *args: object, block_size: int, mask_token_id: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._most = block_size - 1
        self._mask = mask_token_id

    def _best(self, rates: Mapping[str, float], most: int, room: StepRoom, target: RowCosts, wait_s: float) -> Burst:
        most = min(most, self._most)
        return draft_burst.choose_burst(rates, most, room, target, self.costs, wait_s, is_one_step=True)

    def _num_fed(self, depth: int) -> int:
        return depth + 1

    def _add(self, steps: BurstSteps, shadow: Request, num_known: int, depth: int, bitmask: bytes | None) -> None:
        (last,) = shadow.token_ids(num_known - 1, num_known)
        block = (last, *[self._mask] * depth)
        steps.add(shadow, num_known, is_sampling=True, bitmask=bitmask, block=block)
