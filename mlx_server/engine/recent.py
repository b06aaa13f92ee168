"""What was used most recently, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key; the longest unused are forgotten first. Any thread."""

    def __init__(self, limit: int, size: Callable[[K, V], int] = lambda key, value: 1) -> None:
        """`limit` is for the sizes of all values together."""
        self._limit = limit
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None if it is not known."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Remembers a value, unless it is larger than the limit."""
        size = self._size(key, value)
        if size > self._limit:
            return
        with self._lock:
            if key in self._values:
                self._total -= self._size(key, self._values.pop(key))
            self._values[key] = value
            self._total += size
            while self._total > self._limit:
                self._total -= self._size(*self._values.popitem(last=False))
