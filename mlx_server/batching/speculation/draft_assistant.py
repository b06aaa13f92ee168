"""An assistant as a draft model: it reads the model's K/V, so it has nothing to compute of a request before it drafts.

To the policy it is a head that begins anew at each burst, at the hidden state of the last position that the model has
computed: a request of 300 tokens has one pair, (hidden 298, token 299), and its drafts. The blocks that it holds for
them have no memory behind them.
"""

from __future__ import annotations

from mlx_server.batching.speculation.draft_heads import HeadDrafts, HeadFollower
from mlx_server.outputs import HELD_BY_ASSISTANTS
from mlx_server.request import Request


class AssistantDrafts(HeadDrafts):
    """The policy of an assistant."""

    _num_held = HELD_BY_ASSISTANTS

    def _can_follow(self, request: Request) -> bool:
        held, last = self._held.get(request.request_id), request.num_tokens - 1
        if held is None or not held.first < last <= held.right_end(request):
            return False
        follower = self._followers.get(request.request_id)
        if follower is None:
            self._followers[request.request_id] = HeadFollower.after(request, last - 1, "")
        else:
            assert isinstance(follower, HeadFollower)
            follower.begin_at(last - 1)
        return True
