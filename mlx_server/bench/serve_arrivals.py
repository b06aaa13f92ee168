"""When requests arrive: all at once, at a rate, or at a rate that grows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is evener. The rate goes from `rate` to `end_rate` requests a second over the run, by equal
    steps a request, or by equal factors if `is_exponential`."""

    rate: float
    end_rate: float | None = None
    is_exponential: bool = False
    burstiness: float = 1.0

    def times_s(self, count: int, seed: int) -> list[float]:
        """Of `count` requests, from the start of the run. A constant rate is met exactly: the last request
        comes at `count / rate`, so that runs with different seeds offer the same load."""
        rng = random.Random(f"arrivals:{seed}")
        rates = [self._rate(index / max(count - 1, 1)) for index in range(count)]
        gaps = (rng.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness)) for rate in rates)
        times = list(accumulate(gaps))
        if self.end_rate is not None or not times or times[-1] == 0.0:
            return times
        scale = count / self.rate / times[-1]
        return [time * scale for time in times]

    def describe_ramp(self) -> dict[str, float | str]:
        """Under vLLM's keys; nothing for a constant rate."""
        if self.end_rate is None:
            return {}
        return {
            "ramp_up_strategy": "exponential" if self.is_exponential else "linear",
            "ramp_up_start_rps": self.rate,
            "ramp_up_end_rps": self.end_rate,
        }

    def _rate(self, progress: float) -> float:
        if self.end_rate is None:
            return self.rate
        if self.is_exponential:
            return float(self.rate * (self.end_rate / self.rate) ** progress)
        return self.rate + (self.end_rate - self.rate) * progress
