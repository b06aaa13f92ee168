"""A recorded run of steps: operations on named arrays, and what the host did between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spec:
    """An array's shape, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Op:
    """A primitive, or a kernel by its own name. `arguments` are the primitive's, as MLX exports them."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A step that is submitted to MLX: the requested arrays, and all that Python refers to at that moment."""

    roots: tuple[str, ...]
    held: frozenset[str]


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for everything submitted so far."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The recorded run. `constants` maps the arrays that existed before to the address of their memory; a view has the
    address of its pool. `pools` are those of them that the caches hold."""

    ops: tuple[Op, ...]
    specs: dict[str, Spec]
    events: tuple[Submission | Wait, ...]
    constants: dict[str, int]
    pools: frozenset[str]

    @property
    def num_steps(self) -> int:
        return sum(isinstance(event, Submission) for event in self.events)
