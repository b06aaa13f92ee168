"""The memory budget: one ledger for all models of a process. It counts what is booked, whether or not it was used yet:
weights, KV pools and room for the temporaries of steps. The system's memory is read for each question, so other
programs count, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from mlx_server.config import MemoryConfig
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.errors import InsufficientMemoryError
from mlx_server.runtime.memory import MemoryReading, bounded_memory, read_memory
from mlx_server.setting import parse_share

_AUTO_SHARE = 0.9
"""Of the device's recommended limit. It is below the pressure at which no more requests are admitted."""


class MemoryBudget:
    """What all models of the process may hold together. While there are models, MLX has the same limit. Event-loop
    thread only."""

    def __init__(
        self, limit_bytes: int, reserve_bytes: int = 0, read: Callable[[], MemoryReading] = read_memory
    ) -> None:
        """`limit_bytes` limits what is held; `reserve_bytes` of the system's memory are left to other programs. `read`
        reads the memory as it is now."""
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self._read = read
        self._shares: list[MemoryShare] = []
        self._bound = ExitStack()

    @classmethod
    def of(cls, settings: MemoryConfig, read: Callable[[], MemoryReading] = read_memory) -> MemoryBudget:
        """The budget that `[memory]` describes, on this machine."""
        reading = read()
        if settings.memory_limit == "auto":
            limit = int(_AUTO_SHARE * reading.device_bytes)
        else:
            limit = parse_share(settings.memory_limit, reading.device_bytes)
        return cls(limit, parse_share(settings.memory_reserve, reading.total_bytes), read)

    def read(self) -> MemoryReading:
        """The memory as if all that is booked for steps of loaded models were in use."""
        loaded = [share for share in self._shares if share.is_settled]
        steps = sum(share.need.activation_bytes for share in loaded)
        return self._read().with_steps(sum(share.need.total_bytes for share in loaded) - steps, steps)

    @property
    def held_bytes(self) -> int:
        return sum(share.need.total_bytes for share in self._shares)

    @property
    def free_bytes(self) -> int:
        """What may be booked now: within the limit, without the reserve and what loading models need."""
        return self.free_for(None)

    def pending_bytes(self, asking: MemoryShare | None) -> int:
        """What models other than `asking` are loading: not yet visible in the system's memory, but not free either."""
        return sum(s.need.total_bytes for s in self._shares if s is not asking and not s.is_settled)

    def free_for(self, asking: MemoryShare | None) -> int:
        """What `asking` may book now."""
        return max(0, self._room_for(asking))

    def missing_bytes(self, need: MemoryNeed) -> int:
        """How much must be freed before `need` fits; 0 if it fits."""
        return max(0, need.total_bytes - self._room_for(None))

    def _room_for(self, asking: MemoryShare | None) -> int:
        """As `free_for`; negative where more is used than there is."""
        unused = self.read().available_bytes - self.reserve_bytes - self.pending_bytes(asking)
        return min(self.limit_bytes - self.held_bytes, unused)

    def take(self, owner: str, need: MemoryNeed) -> MemoryShare:
        """Books what loading `owner` will need. Raises `InsufficientMemoryError` with the numbers."""
        if self.missing_bytes(need):
            raise InsufficientMemoryError(self._refusal(owner, need))
        if not self._shares:
            self._bound.enter_context(bounded_memory(self.limit_bytes))
        share = MemoryShare(self, owner, need)
        self._shares.append(share)
        return share

    def forget(self, share: MemoryShare) -> None:
        """Removes the share: its owner holds nothing any more."""
        self._shares.remove(share)
        if not self._shares:
            self._bound.close()

    def _refusal(self, owner: str, need: MemoryNeed) -> str:
        reading = self.read()
        holders = ", ".join(f"{share.owner} {_mib(share.need.total_bytes)}" for share in self._shares)
        return (
            f"The model {owner} needs {_mib(need.total_bytes)} (weights {_mib(need.weights_bytes)}, activations "
            f"{_mib(need.activation_bytes)}, first KV blocks {_mib(need.kv_bytes)}), and {_mib(self.free_bytes)} may "
            f"be used: the limit is {_mib(self.limit_bytes)}, held are {_mib(self.held_bytes)}"
            f"{f' ({holders})' if holders else ''}; {_mib(reading.available_bytes)} are available on the system, "
            f"of which {_mib(self.reserve_bytes)} stay in reserve. Unload a model, take a smaller or quantised one, "
            "lower --max-num-batched-tokens, --num-kv-blocks or --memory-reserve, close other programs, or raise "
            "--memory-limit."
        )


class MemoryShare:
    """What one model has booked in a budget: its `need`. `grow` and `shrink` change the KV part of it."""

    def __init__(self, budget: MemoryBudget, owner: str, need: MemoryNeed) -> None:
        self.owner = owner
        self.need = need
        self.is_settled = False
        self._budget = budget

    def growable_bytes(self, pressure: float) -> int:
        """The most that `grow` can book before memory reaches that pressure."""
        pending = self._budget.pending_bytes(self)
        return max(0, min(self._free_bytes, self._budget.read().room_below(pressure) - pending))

    @property
    def limit_bytes(self) -> int:
        """The limit for all models together."""
        return self._budget.limit_bytes

    @property
    def kv_limit_bytes(self) -> int:
        """The most that the KV pool could ever have: the budget without this model's weights and activations."""
        return max(0, self._budget.limit_bytes - self.need.weights_bytes - self.need.activation_bytes)

    @property
    def kv_room_bytes(self) -> int:
        """What the KV pool could have now: what is booked for it, and what is free."""
        return min(self.kv_limit_bytes, self.need.kv_bytes + self._free_bytes)

    def read(self) -> MemoryReading:
        """The machine's memory now."""
        return self._budget.read()

    def join(self, need: MemoryNeed) -> bool:
        """Books what is loaded besides the model. Returns False, and books nothing, if that much is not free."""
        if need.total_bytes > self._free_bytes:
            return False
        self.need = self.need.plus(need)
        return True

    def part(self, need: MemoryNeed) -> None:
        """Unbooks what is not loaded besides the model any more."""
        self.need = replace(self.need, weights_bytes=self.need.weights_bytes - need.weights_bytes)

    def settle(self, need: MemoryNeed) -> None:
        """Replaces the estimate by what the loaded model really takes."""
        self.need = need
        self.is_settled = True

    def grow(self, num_bytes: int) -> bool:
        """Books more for the KV pool. Returns False, and books nothing, if that much is not free."""
        if num_bytes > self._free_bytes:
            return False
        self._add_kv(num_bytes)
        return True

    def shrink(self, num_bytes: int) -> None:
        """Unbooks a part of the KV pool that was freed."""
        assert num_bytes <= self.need.kv_bytes, "more was freed than booked"
        self._add_kv(-num_bytes)

    def release(self) -> None:
        """Ends the share: the model is unloaded."""
        self._budget.forget(self)

    @property
    def _free_bytes(self) -> int:
        return self._budget.free_for(self)

    def _add_kv(self, num_bytes: int) -> None:
        self.need = replace(self.need, kv_bytes=self.need.kv_bytes + num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
