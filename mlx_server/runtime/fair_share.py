"""Whose turn it is on a device that several share: by the time each has had, not by the number of its turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Account:
    weight: float
    spent_s: float
    """Device seconds over weight, on the common scale of all members."""


class FairShare(Generic[T]):
    """Weighted fair queueing: among those who have work, the one that has had least of the device goes next.

    Somebody with steps of 10 ms beside somebody with steps of 200 ms gets twenty of them for each of those.
    Who comes back after a pause starts where the others are: time not used is not saved up. Not thread-safe.
    """

    def __init__(self) -> None:
        self._accounts: dict[T, _Account] = {}  # the one served longest ago first: equals take turns
        self._now_s = 0.0

    def add(self, member: T, weight: float = 1.0) -> None:
        """`weight` is the member's share relative to the others'."""
        assert weight > 0.0, "a member without a share would never be served"
        self._accounts[member] = _Account(weight, self._now_s)

    def remove(self, member: T) -> None:
        del self._accounts[member]

    def __iter__(self) -> Iterator[T]:
        """All members, with work or without."""
        return iter(self._accounts)

    def next(self, has_work: Callable[[T], bool]) -> T | None:
        """Who goes next; None if nobody has work."""
        ready = [member for member in self._accounts if has_work(member)]
        if not ready:
            return None
        chosen = min(ready, key=self._start_s)
        self._now_s = self._start_s(chosen)
        account = self._accounts.pop(chosen)
        account.spent_s = self._now_s
        self._accounts[chosen] = account
        return chosen

    def charge(self, member: T, seconds: float) -> None:
        """The member has had the device for so long. One that has left since is not asked to pay."""
        account = self._accounts.get(member)
        if account is not None:
            account.spent_s += seconds / account.weight

    def _start_s(self, member: T) -> float:
        return max(self._accounts[member].spent_s, self._now_s)
