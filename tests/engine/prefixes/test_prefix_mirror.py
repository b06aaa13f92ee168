"""What is offered of a prefix cache is what requests hit, whatever happened to the cache before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from mlx_server.batching.blocks.prefix_cache import BlocksStored, most_hit
from mlx_server.engine.prefixes.mirror import ANNOUNCE_AGAIN_S, Announcement, PrefixMirror
from mlx_server.request import FinishReason
from tests.batching.worlds import ScriptedSupply, World, make_request, make_scheduler, prompt


@dataclass
class Listener:
    """What a subscriber to all announcements knows: the announced blocks, and each one's parent."""

    parents: dict[bytes, bytes | None] = field(default_factory=dict)

    def apply(self, announcement: Announcement) -> None:
        if announcement.is_cleared:
            self.parents.clear()
        for block_hash in announcement.removed:
            del self.parents[block_hash]
        for chain in announcement.stored:
            for block in chain:
                parent = None if block.parent is None else block.parent.block_hash
                assert parent is None or parent in self.parents, "a block comes behind one that nobody knows"
                assert len(block.token_ids) == 32
                self.parents[block.block_hash] = parent

    def predict_hits(self, block_hashes: Sequence[bytes]) -> int:
        return next((index for index, h in enumerate(block_hashes) if h not in self.parents), len(block_hashes))


class Followed:
    """A scheduler's world whose prefix cache is listened to."""

    def __init__(self, windows: Sequence[int | None], num_checkpoints: int | None, is_async: bool) -> None:
        num_blocks = 24 * len(windows)
        self.supply = ScriptedSupply(num_blocks // 2)
        scheduler = make_scheduler(
            num_blocks // 2,
            max_blocks=num_blocks,
            supply=self.supply,
            windows=windows,
            num_checkpoints=num_checkpoints,
            is_async=is_async,
            max_num_seqs=4,
            max_num_batched_tokens=100,
            deduplicate_prefixes=num_checkpoints is None,
        )
        self.world = World(scheduler, depth=2 if is_async else 1)
        self.blocks = scheduler.blocks
        self.mirror = PrefixMirror(self.blocks.groups.windows, has_states=num_checkpoints is not None)
        self.listener = Listener()
        self.blocks.watch_prefixes(self.mirror.apply)
        self.is_exact = windows == (None,) and num_checkpoints is None
        self._ids = count()
        self._now = count()

    def add(self, token_ids: list[int], max_tokens: int, salt: str | None = None) -> None:
        keys = () if salt is None else (salt,)
        self.world.add(make_request(f"r{next(self._ids)}", token_ids, max_tokens, extra_keys=keys))

    def listen(self) -> None:
        self.listener.apply(self.mirror.take(float(next(self._now))))

    def lose_unused(self) -> None:
        for block in [block for _, block in self.blocks._cache if not block.ref_cnt]:
            self.blocks._lose(block)

    def check(self, token_ids: list[int], salt: str | None = None) -> tuple[int, int]:
        """Blocks predicted and hit; what is predicted of a whole chain is hit as a whole."""
        keys = () if salt is None else (salt,)
        request = make_request(f"p{next(self._ids)}", token_ids, 1, extra_keys=keys)
        num_hit = len(self.blocks.find_prefix(request))
        predicted = self.listener.predict_hits(request.block_hashes[: most_hit(request)])
        assert num_hit <= predicted
        is_last = predicted > 0 and request.block_hashes[predicted - 1] not in self.listener.parents.values()
        if self.is_exact or is_last:
            assert num_hit == predicted
        return predicted, num_hit


KINDS = [
    ((None,), None),
    ((None, 40), None),
    ((24,), None),
    ((1, 32), None),
    ((None, 1, 70), None),
    ((None,), 3),
    ((None, 40), 3),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("windows", "num_checkpoints"), KINDS, ids=str)
def test_what_is_offered_is_what_is_hit(windows, num_checkpoints, is_async):
    num_hits = num_cleared = 0
    for seed in range(3):
        rng = random.Random(seed)
        followed = Followed(windows, num_checkpoints, is_async)
        world, asked = followed.world, []
        for _ in range(60):
            kind = rng.random()
            if kind < 0.45:
                shared = rng.choice([0, 40, 96, 160])
                token_ids = prompt(shared) + prompt(rng.randint(1, 80), first=rng.choice([300, 400, 500]))
                salt = rng.choice([None, None, "s"])
                asked.append((token_ids, salt))
                followed.add(token_ids, rng.randint(1, 40), salt)
            elif kind < 0.5 and world.requests:
                world.scheduler.finish_request(rng.choice(list(world.requests)), FinishReason.ABORT)
            elif kind < 0.55:
                followed.blocks.shrink(rng.randint(1, 8))
            elif kind < 0.6 and not world.has_requests and not world.runner.num_submitted:
                num_cleared += followed.blocks.reset_prefix_cache()
            for _ in range(rng.randint(1, 12)):
                world.step()
            if rng.random() < 0.7:  # changes of several steps may come together
                followed.listen()
                for token_ids, salt in asked[-12:]:
                    longer = token_ids + [1] * 33
                    num_hits += sum(followed.check(tokens, salt)[1] for tokens in (token_ids, longer, token_ids[:70]))
        world.finish()
        followed.blocks.reset_prefix_cache()
        followed.listen()
        assert followed.listener.parents == {}
        assert len(followed.mirror) == 0, "nothing is remembered of what is gone"
    assert num_hits > 0


def test_a_hit_is_reported_again_after_a_minute_from_the_first_block_on():
    followed = Followed((None,), None, is_async=False)
    followed.add(prompt(100), 1)
    followed.world.finish()
    followed.mirror.take(0.0)
    for now, num_announced in ((1.0, 0), (ANNOUNCE_AGAIN_S, 3), (ANNOUNCE_AGAIN_S + 1, 0)):
        followed.add(prompt(100), 1)
        followed.world.finish()
        again = followed.mirror.take(now)
        assert sum(map(len, again.stored)) == num_announced
        assert not again.removed
        assert not again.is_cleared


def test_a_block_that_is_lost_and_found_between_two_announcements_is_not_announced():
    followed = Followed((None,), None, is_async=False)
    followed.add(prompt(100), 1)
    followed.world.finish()
    followed.listen()
    for block_hash in list(followed.listener.parents):
        block = followed.blocks.cached_block(block_hash)
        assert block is not None
        followed.blocks._lose(block)
    followed.add(prompt(100), 1)
    followed.world.finish()
    announcement = followed.mirror.take(1.0)
    assert announcement.removed == []
    assert announcement.stored == []


def test_one_middle_block_that_is_lost_takes_back_all_behind_it():
    """A pool's cut may take a block from the middle of a prefix; what is behind is cached and hit by nobody."""
    followed = Followed((None,), None, is_async=False)
    followed.add(prompt(130), 1)
    followed.world.finish()
    followed.listen()
    request = make_request("p", prompt(130), 1)
    followed.blocks.find_prefix(request)
    middle = followed.blocks.cached_block(request.block_hashes[1])
    assert middle is not None
    followed.blocks._lose(middle)
    followed.listen()
    assert followed.listener.predict_hits(request.block_hashes) == 1
    assert len(followed.listener.parents) == 1
    followed.add(prompt(130), 1)
    followed.world.finish()
    followed.listen()
    assert followed.listener.predict_hits(request.block_hashes) == 4


@pytest.mark.parametrize("windows", [(1,), (5,), (1, 5)])
def test_a_prefix_is_offered_that_goes_on_behind_blocks_which_no_layer_has_any_more(windows: tuple[int, ...]) -> None:
    """Windows within a block: a chunk of 100 tokens ends there, and the blocks before are lost until the next one."""
    followed = Followed(windows, None, is_async=False)
    followed.add(prompt(288), 10)
    request = followed.world.requests["r0"]
    while not request.output_token_ids:
        followed.world.step()
        followed.lose_unused()
        followed.listen()
    assert followed.check([*request.prompt_token_ids, 1]) == (9, 9)
    followed.world.finish()
    followed.lose_unused()
    followed.listen()
    assert followed.listener.parents == {}


def test_a_block_is_announced_once_each_time_it_comes_to_the_disk_or_leaves_it():
    mirror = PrefixMirror((None,), is_on_disk=lambda block_hash: False)
    mirror.apply(BlocksStored(0, None, (b"a",), [1] * 32, (0,), (), None))
    mirror.change_disk(b"of another model", True)
    announced = []
    for is_there in (False, True, True, False, False, True):
        mirror.change_disk(b"a", is_there)
        changes = mirror.take(0.0)
        announced.append(([block.block_hash for block in changes.on_disk], changes.removed_from_disk))
    assert announced == [([], []), ([b"a"], []), ([], []), ([], [b"a"]), ([], []), ([b"a"], [])]


def test_steps_of_64_announce_one_change_a_block():
    """What a step pays for events: an append for each block that it fills, and nothing in between."""
    world = World(make_scheduler(64 * 6, max_num_batched_tokens=2048))
    changes: list[object] = []
    world.scheduler.blocks.watch_prefixes(changes.append)
    world.add(*(make_request(f"r{index}", prompt(31, first=index), 65) for index in range(64)))
    world.step()
    changes.clear()
    steps = 0
    while len(world.running_ids()) == 64:
        world.step()
        steps += 1
    assert steps == 64
    assert len(changes) == 64 * 2
