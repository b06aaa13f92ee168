"""Spans of a prompt chunk whose tokens see each other both ways (images of Gemma 3), in every backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator.worlds import make_backend

from mlx_server.runtime.attention.interface import AttentionBackend, ReferenceBackend
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from tests.attention_worlds import EIGHT_FOUR, Layer, Span, World

CHUNKS = [
    Span(300, 301),
    Span(264, 265, (264, 265)),  # all but one token are cached
    Span(0, 120, (30, 70)),  # text before and behind it
    Span(90, 130, (90, 130)),  # nothing else
    Span(64, 80, (64, 70)),  # its beginning is cached
    Span(10, 20, (12, 15)),  # no more rows than a kernel of decodes takes
    Span(5, 60),
]
BACKENDS = {
    "reference": ReferenceBackend,
    "cpu": lambda: CpuBackend(2),
    "gpu": make_backend,
}


def attend(name: str, world: World) -> np.ndarray:
    backend: AttentionBackend = BACKENDS[name]()
    return world.attend(backend, backend.make_pool(world.layer.spec, world.num_blocks))


@pytest.mark.parametrize("window", [None, 1, 25, 100])
@pytest.mark.parametrize("name", BACKENDS)
def test_they_see_all_of_their_span_and_what_is_before_it(name: str, window: int | None) -> None:
    world = World(Layer(4, 2, 64, 64, window, has_sinks=True), CHUNKS)
    assert list(world.step().both_ways) == [0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(attend(name, world), world.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_fewer_bits_are_read_in_place(name: str) -> None:
    world = World(Layer(4, 2, 64, 64, 40, bits=EIGHT_FOUR), CHUNKS)
    np.testing.assert_allclose(attend(name, world), world.expected(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [None, 50])
def test_on_a_cpu_a_row_has_the_bits_that_it_has_alone(window: int | None) -> None:
    """With text before the span, long contexts that several share, and others beside it."""
    layer = Layer(4, 2, 64, 64, window)
    spans = [Span(700, 701), Span(560, 700, (600, 690)), Span(0, 40)]
    world = World(layer, spans)
    whole = attend("cpu", world)
    alone = World(layer, spans[1:2])
    alone.rows, alone.tables, alone.num_blocks = world.rows[1:2], world.tables[1:2], world.num_blocks
    np.testing.assert_array_equal(attend("cpu", alone), whole[1:141])
    later = World(layer, [Span(620, 690, (620, 690))])
    later.rows, later.tables, later.num_blocks = [[x[:690] for x in world.rows[1]]], world.tables[1:2], world.num_blocks
    np.testing.assert_array_equal(attend("cpu", later), whole[61:131])
    text = replace(spans[1], image=(0, 0))
    world.spans[1] = text
    causal = attend("cpu", world)
    np.testing.assert_array_equal(causal[:41], whole[:41])
    assert np.abs(causal[41:130] - whole[41:130]).min(axis=(1, 2, 3)).max() > 0


def test_rows_cannot_be_computed_one_by_one() -> None:
    step = World(Layer(4, 2, 64, 64), [Span(0, 20, (3, 9))]).step()
    with pytest.raises(ValueError, match="both ways cannot be computed one by one"):
        step.by_row()


def test_text_is_planned_as_ever() -> None:
    step = World(Layer(4, 2, 64, 64), [Span(0, 20)]).step()
    assert step.both_ways.size == 0
    assert step.with_spans(np.zeros((0, 2), np.int32)).query_starts.tolist() == [0, 20]
