"""What was used most recently is kept, and never more than the limit."""

from __future__ import annotations

import random

from mlx_server.engine.recent import Recent


def test_the_longest_unused_are_forgotten_first() -> None:
    recent = Recent[str, str](2)
    recent.put("a", "A")
    recent.put("b", "B")
    assert recent.get("a") == "A"
    recent.put("c", "C")
    assert [recent.get(key) for key in "abc"] == ["A", None, "C"]


def test_what_is_larger_than_the_limit_displaces_nothing() -> None:
    recent = Recent[str, str](5, lambda key, value: len(value))
    recent.put("a", "AAA")
    recent.put("b", "BBBBBB")
    assert [recent.get(key) for key in "ab"] == ["AAA", None]


def test_all_sizes_together_stay_within_the_limit_and_as_much_as_fits_is_kept() -> None:
    rng, recent, used = random.Random(0), Recent[int, str](100, lambda key, value: len(value)), dict[int, str]()
    for _ in range(2000):
        key, value = rng.randrange(20), "x" * rng.randint(0, 40)
        recent.put(key, value)
        used.pop(key, None)
        used[key] = value
        while sum(map(len, used.values())) > 100:
            del used[next(iter(used))]
        key = rng.randrange(20)
        assert recent.get(key) == used.get(key)
        if key in used:
            used[key] = used.pop(key)
