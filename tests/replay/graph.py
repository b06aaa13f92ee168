"""A recorded run of steps: operations over named arrays, and what the host did between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spec:
    """An array's shape, and how many bytes an element takes."""

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
    """A primitive; of a kernel, by the kernel's own name. `arguments` are the primitive's, as MLX exports them."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A step given to MLX: the arrays asked for, and all that Python code still refers to at that moment."""

    roots: tuple[str, ...]
    held: frozenset[str]


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for everything that is submitted."""


@dataclass(frozen=True, slots=True)
class Graph:
    """`constants` are the arrays that were there before, by the address of their memory: a view has its pool's.
    `pools` are those of them that the caches keep."""

    ops: tuple[Op, ...]
    specs: dict[str, Spec]
    events: tuple[Submission | Wait, ...]
    constants: dict[str, int]
    pools: frozenset[str]

    @property
    def num_steps(self) -> int:
        return sum(isinstance(event, Submission) for event in self.events)
