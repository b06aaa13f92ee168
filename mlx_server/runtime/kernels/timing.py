"""Candidates measured in turns, so that what slows the machine meanwhile slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

Clock = Callable[[], float]

_NUM_WARM_UPS = 2


def median_times(
    candidates: Sequence[Callable[[], object]], num_repeats: int, clock: Clock = time.perf_counter
) -> list[float]:
    """Median seconds of each candidate, warmed up, then measured in turns that begin with another one each time."""
    for _ in range(_NUM_WARM_UPS):
        for candidate in candidates:
            candidate()
    times: list[list[float]] = [[] for _ in candidates]
    for repeat in range(num_repeats):
        for offset in range(len(candidates)):
            index = (repeat + offset) % len(candidates)
            start_s = clock()
            candidates[index]()
            times[index].append(clock() - start_s)
    return [statistics.median(column) for column in times]
