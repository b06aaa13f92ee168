"""What the pool's models are doing, those that were never loaded included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ModelReading:
    """One model of the pool at the moment of a scrape."""

    model_name: str
    state: str
    loads: Mapping[str, int]
    """By how they ended."""


class PoolMetrics(Collector):
    """States and loads of models."""

    def __init__(self, readings: Sequence[ModelReading], states: Sequence[str]) -> None:
        """`states` are all that a model can be in."""
        self._readings = readings
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "mlx_serve:model_state", "1 for the state that the model is in.", labels=("model_name", "state")
        )
        loads = CounterMetricFamily(
            "mlx_serve:model_loads", "Loads that have ended, by how.", labels=("model_name", "result")
        )
        for reading in self._readings:
            for state in self._states:
                states.add_metric((reading.model_name, state), float(state == reading.state))
            for result, number in reading.loads.items():
                loads.add_metric((reading.model_name, result), number)
        yield from (states, loads)
