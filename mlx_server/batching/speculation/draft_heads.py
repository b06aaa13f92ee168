"""A model's own multi-token-prediction head as a draft model: it reads the model's hidden states as well as tokens.

The head's position j of a request stands for the hidden state of the request's position `first + j` and the token after
it. The model keeps the last hidden states of each request, so the head begins where these begin, and begins again if it
falls so far behind that it needs others, or has read as much as its context holds. It sees nothing before `first`;
drafts may be worse for that, but not wrong.

    a prompt of 300 tokens: hidden states of 44 to 299 are kept, and token 300 was drawn
    the head begins at a block boundary, 64: it reads 236 pairs, (hidden 64, token 65) to (hidden 299, token 300)

If the prefix cache had the beginning of a prompt, its hidden states were not computed. Then the head resumes from its
own K/V, if it has read the same tokens before from the same `first` on, and far enough that no hidden state is missing.

    the next turn: 400 tokens, of which the prefix cache had 320, and the head pairs up to (hidden 319, token 320)
    the head finds its pairs from 64 on, and reads (hidden 320, token 321) to (hidden 399, token 400)

Assistants and block drafters are heads, too, that read other things (`AssistantDrafts`, `BlockDrafts`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import Burst, BurstSteps, Follower
from mlx_server.batching.speculation.draft_costs import StepRoom
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import HELD_BY_ASSISTANTS, HELD_FEATURES, HELD_STATES, ScheduledChunk
from mlx_server.request import Request


class _AfterHidden(Request):
    """A request as its head counts it: from the token after the first hidden state on."""

    __slots__ = ("num_before",)

    num_before: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_before

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) - self.num_before

    def token_ids(self, start: int, stop: int) -> list[int]:
        return Request.token_ids(self, start + self.num_before, stop + self.num_before)


@dataclass(slots=True, eq=False)
class HeadFollower(Follower):
    """Drafts were made from the head's own hidden states, which are worse than the model's. So what was fed is computed
    again with the model's."""

    @classmethod
    def after(cls, request: Request, first: int, key: str) -> HeadFollower:
        """`request` from the hidden state of position `first` on. `key` names everything that this state depends on."""
        shadow = cls.shadow_of(request, _AfterHidden)
        assert isinstance(shadow, _AfterHidden)
        shadow.num_before = first + 1
        shadow.extra_keys = (key,)
        return cls(shadow, first=first)

    def begin_at(self, first: int) -> None:
        """Counts from the hidden state of position `first` on; what was computed is forgotten."""
        assert isinstance(self.shadow, _AfterHidden)
        if first != self.first:
            self.first, self.shadow.num_before, self.shadow.num_computed_tokens = first, first + 1, 0

    def num_behind(self) -> int:
        self.fed = ()
        return Follower.num_behind(self)


class _Held(NamedTuple):
    """Hidden states of positions [first, end); the last chunk computed those from `start` on. After a wrong draft among
    its `token_ids`, they are not those of the request."""

    first: int
    start: int
    end: int
    token_ids: tuple[int, ...]

    def right_end(self, request: Request) -> int:
        """The position up to which all hidden states are right."""
        if not self.token_ids:
            return self.end
        pairs = zip(self.token_ids, request.token_ids(self.start, min(self.end, request.num_tokens)))
        return self.start + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


_MAX_STARTS = 4096
"""Positions that are remembered as the `first` of a head."""


class HeadDrafts(DraftModel):
    """The policy of a model's head. A prefix in its cache is the tokens after a `first`, and everything before that."""

    _num_held = HELD_STATES

    def __init__(self, *args: object, max_held: int | None = None, **more: object) -> None:
        """Hidden states are kept of at most `max_held` requests at a time; None for no limit."""
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._max_held = max_held
        self._held: dict[str, _Held] = {}
        self._starts: OrderedDict[str, None] = OrderedDict()

    def on_chunk(self, chunk: ScheduledChunk) -> None:
        """A step of the model computes the chunk, and keeps its last hidden states."""
        held, start, end = self._held.get(chunk.request_id), chunk.start, chunk.start + chunk.num_tokens
        if held is None and self._max_held is not None and len(self._held) >= self._max_held:
            return
        first = start if held is None or start > held.end else held.first
        token_ids = (chunk.token_ids or ()) if chunk.num_drafts else ()
        self._held[chunk.request_id] = _Held(max(first, end - self._num_held), start, end, token_ids)

    def release(self, request: Request) -> None:
        super().release(request)
        self._held.pop(request.request_id, None)

    def _can_follow(self, request: Request) -> bool:
        """Whether the hidden states are there from where the head goes on to the last known token."""
        request_id = request.request_id
        held, last = self._held.get(request_id), request.num_tokens - 1
        if held is None or not held.first < last <= held.right_end(request):
            return False
        follower = self._followers.get(request_id)
        if follower is not None and not self._can_go_on(follower, held.first):
            self._release(follower)
            follower = None
        if follower is None:
            follower = self._begin(request, held.first)
            if follower is None:
                return False
            self._followers[request_id] = follower
        return self._is_within(follower.shadow)

    def _can_go_on(self, follower: Follower, first_held: int) -> bool:
        """Whether the head has its pairs up to the hidden states that are held, and there is room in its context."""
        return self._reached(follower) >= first_held and self._is_within(follower.shadow)

    def _begin(self, request: Request, first_held: int) -> HeadFollower | None:
        """A follower from an earlier `first` if it can go on from there, otherwise from the first block boundary that
        is held and leaves half of the head's context free; None if there is none."""
        first = max(first_held, request.num_tokens - self._max_tokens // 2)
        first = -(-first // BLOCK_SIZE) * BLOCK_SIZE
        if first >= request.num_tokens - 1:
            return None
        for earlier in range(0, first, BLOCK_SIZE):
            key = _key(request, earlier)
            if key in self._starts:
                follower = HeadFollower.after(request, earlier, key)
                if self._can_go_on(follower, first_held):
                    self._starts.move_to_end(key)
                    return follower
        key = _key(request, first)
        self._starts[key] = None
        self._starts.move_to_end(key)
        if len(self._starts) > _MAX_STARTS:
            self._starts.popitem(last=False)
        return HeadFollower.after(request, first, key)

    def _reached(self, follower: Follower) -> int:
        """The position of the request from which on the head needs hidden states."""
        shadow = follower.shadow
        if self.blocks.holds(shadow, 1):
            return follower.first + shadow.num_computed_tokens
        return follower.first + BLOCK_SIZE * self.blocks.num_cached(shadow)

    def _admit(self, steps: BurstSteps, follower: Follower, num_tokens: int, others: Iterable[Follower]) -> bool:
        """The cached pairs may have made room for another request of the same burst."""
        held = self._held[follower.shadow.request_id]
        return self._reached(follower) >= held.first and super()._admit(steps, follower, num_tokens, others)


def _key(request: Request, first: int) -> str:
    """Names everything that the hidden state of position `first` depends on: the model's own hash of the blocks before
    it (which includes images), or the request's extra keys and adapter, and its token."""
    num_blocks = first // BLOCK_SIZE
    if len(request.block_hashes) < num_blocks or any(image.end > first for image in request.images):
        return f"alone {request.request_id}"
    (token_id,) = request.token_ids(first, first + 1)
    if num_blocks:
        return f"{request.block_hashes[num_blocks - 1].hex()} {token_id}"
    return repr((request.extra_keys, request.adapter_key or request.adapter, token_id))


class AssistantDrafts(HeadDrafts):
    """The policy of an assistant, which reads the model's K/V, so it has nothing to compute of a request before it
    drafts. It is a head that begins anew at each burst, at the hidden state of the last position that the model has
    computed: a request of 300 tokens has one pair, (hidden 298, token 299), and its drafts. The blocks that it holds
    for them have no memory behind them."""

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


class BlockDrafts(HeadDrafts):
    """The policy of a block drafter, which was trained for blocks of `block_size` rows with `mask_token_id`: one step
    drafts all tokens of a burst, from features of the model. Like a head, it reads a hidden state of each position that
    the model has computed, but never its own, and no tokens but the last known one:

        a request of 300 known tokens, 0 to 299; features of positions 0 to 298 are kept; 3 tokens are to be drafted
        the chunk: features 0 to 298, then token 299 and three masks, whose rows give drafts of 300, 301 and 302
        the model accepts 300 and samples another token for 301: the next chunk has the features of 299 and 300, then
        the token in place of 301 and masks, and overwrites the block
    """

    _num_held = HELD_FEATURES

    def __init__(self, *args: object, block_size: int, mask_token_id: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._most = block_size - 1
        self._mask = mask_token_id

    def _best(self, rates: Mapping[str, float], most: int, room: StepRoom) -> Burst:
        return draft_burst.choose_burst(rates, min(most, self._most), room, self.costs, is_one_step=True)

    def _num_fed(self, depth: int) -> int:
        return depth + 1

    def _add(self, steps: BurstSteps, follower: Follower, num_known: int, depth: int, bitmask: bytes | None) -> None:
        (last,) = follower.shadow.token_ids(num_known - 1, num_known)
        block = (last, *[self._mask] * depth)
        steps.add(follower, num_known, is_sampling=True, bitmask=bitmask, block=block)
