"""What steps of real-size models take on a Mac, by MLX's rules: memory, command buffers, dispatches and barriers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from replay.encoder import Limits
from replay.graph import Submission
from replay.metal import Replay, replay
from replay.models import CONFIGS, build, config_of
from replay.record import record
from replay.traffic import KINDS

from mlx_server.engine.memory.need import step_bytes

HYBRID = "qwen3.5-35b-a3b"
FEW_BLOCKS = 64
"""Pools that a command buffer hardly counts, so that it has the most room for temporaries."""


def run(model: str, kind: str, num_elements: int, num_blocks: int = FEW_BLOCKS, **options: Any) -> Replay:
    """Three steps, one launched ahead."""
    graph = record(
        config_of(model),
        KINDS[kind],
        num_steps=3,
        num_elements=num_elements,
        num_blocks=num_blocks,
        **options,
    )
    return replay(graph, Limits(num_elements=num_elements))


# ---- memory


def booked(model: str, num_tokens: int, num_elements: int, by_row_cores: int = 0) -> int:
    config = config_of(model)
    return step_bytes(
        config,
        weights_bytes=sum(weight.nbytes for _, weight in tree_flatten(build(config).parameters())),
        num_tokens=num_tokens,
        num_seqs=64,
        context_tokens=config["max_position_embeddings"],
        item_bytes=mx.bfloat16.size,
        buffer_elements=num_elements << 20,
        by_row_cores=by_row_cores,
    )


def check_peak(model: str, num_elements: int) -> None:
    """No kind of step takes more than is booked, and some take half of it."""
    most = booked(model, 2048, num_elements)
    peaks = [run(model, kind, num_elements).peak_bytes for kind in ("prefill", "prefill-at-30k", "mixed")]
    assert most / 2 <= max(peaks) <= most
    assert run(model, "prefill-512", num_elements).peak_bytes <= booked(model, 512, num_elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model in ("llama-3-8b", "gemma-4-e2b") else [pytest.mark.full])
        for model in CONFIGS
        if model != HYBRID
    ],
)
def test_temporaries_take_no_more_than_is_booked(model: str) -> None:
    check_peak(model, 96)


@pytest.mark.full
@pytest.mark.parametrize("num_elements", [192, 384])
@pytest.mark.parametrize("model", [model for model in CONFIGS if model != HYBRID])
def test_temporaries_take_no_more_than_is_booked_on_larger_macs(model: str, num_elements: int) -> None:
    check_peak(model, num_elements)


@pytest.mark.slow
def test_temporaries_of_a_hybrid_take_no_more_than_is_booked() -> None:
    check_peak(HYBRID, 96)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_cores", "num_elements"),
    [
        ("llama-3-8b", 16, 96),
        ("gemma-4-e2b", 80, 384),
        pytest.param("llama-3-8b", 80, 384, marks=pytest.mark.full),
        pytest.param("gemma-4-e2b", 16, 96, marks=pytest.mark.full),
    ],
)
def test_exact_steps_take_no_more_than_is_booked(model: str, num_cores: int, num_elements: int) -> None:
    """Prompts are computed like decodes, whose partial results MLX keeps until a command buffer has ended."""
    most = booked(model, 2048, num_elements, num_cores)
    peaks = [
        run(model, kind, num_elements, is_exact=True, num_cores=num_cores).peak_bytes
        for kind in ("prefill-512", "prefill-at-30k", "mixed")
    ]
    assert most / 2.5 <= max(peaks) <= most


def test_half_a_gigabyte_is_not_booked_for_a_tiny_model() -> None:
    """Two steps are the most that are launched."""
    tiny: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    need = step_bytes(
        tiny,
        weights_bytes=10**6,
        num_tokens=2048,
        num_seqs=64,
        context_tokens=512,
        item_bytes=2,
        buffer_elements=96 << 20,
    )
    assert 2**20 < need < 64 * 2**20


def test_the_memory_limit_bounds_temporaries() -> None:
    """MLX waits rather than take more, as far as whole command buffers allow."""
    graph = record(config_of("llama-3-8b", 8), KINDS["prefill"], num_steps=3, num_blocks=FEW_BLOCKS)
    free, bounded = (replay(graph, Limits(memory_bytes=limit)).peak_bytes for limit in (None, 400 * 2**20))
    assert free > 1000 * 2**20
    assert bounded < 900 * 2**20


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-3-12b"])
def test_python_keeps_no_temporaries_alive(model: str, kind: str) -> None:
    """While a step is computed: nothing but the logits of the rows that sample."""
    graph = record(config_of(model, 6), KINDS[kind], num_steps=2)
    vocab_size = config_of(model)["vocab_size"]
    for event in graph.events:
        assert isinstance(event, Submission)
        kept = [graph.specs[name] for name in event.held - graph.pools - graph.constants.keys()]
        assert {spec.shape[-1] for spec in kept if spec.num_bytes > 2**16} <= {vocab_size}


# ---- command buffers

DECODE_BUFFERS = {
    ("llama-3-8b", 96): (14, 0.75),
    ("llama-3-8b", 192): (7, 1.0),
    ("llama-3.2-1b", 96): (4, 1.0),
    ("qwen3-30b-a3b", 192): (26, 0.4),
    ("qwen3-30b-a3b", 384): (14, 0.75),
    ("gemma-3-12b", 192): (12, 0.9),
    ("gemma-4-e2b", 96): (9, 1.0),
}
"""By the elements of a command buffer: at most so many a decode step, and at least that share of the step left to do
when the host has submitted it."""


@pytest.mark.parametrize(("model", "num_elements"), DECODE_BUFFERS)
def test_a_decode_step_is_a_few_command_buffers(model: str, num_elements: int) -> None:
    most, lead = DECODE_BUFFERS[model, num_elements]
    step = run(model, "decode", num_elements, num_blocks=4096).steps[-1]
    assert step.num_command_buffers <= most
    assert step.lead >= lead


@pytest.mark.parametrize(
    ("model", "num_elements"),
    [
        pytest.param(*place, marks=[] if place[0] in ("llama-3-8b", "gemma-4-e2b") else [pytest.mark.full])
        for place in DECODE_BUFFERS
    ],
)
def test_a_decode_step_over_small_pools_is_a_few_command_buffers(model: str, num_elements: int) -> None:
    most, lead = DECODE_BUFFERS[model, num_elements]
    step = run(model, "decode", num_elements).steps[-1]
    assert step.num_command_buffers <= most
    assert step.lead >= lead


# ---- dispatches and barriers

UNBOUNDED = Limits(num_ops=10**9, num_elements=10**6)
LAYER_COSTS = {
    ("llama-3-8b", 2, 4): {"decode": (17, 13), "prefill": (20, 15), "mixed": (25, 16)},
    ("qwen3-30b-a3b", 2, 4): {"decode": (37, 24), "prefill": (54, 39), "mixed": (59, 40)},
    (HYBRID, 4, 8): {"decode": (57.75, 32.25), "prefill": (79.25, 47.25), "mixed": (108, 53.25)},
    ("gemma-3-12b", 6, 12): {"decode": (22, 17), "prefill": (39.5, 26), "mixed": (48, 25)},
    ("gemma-4-e2b", 10, 20): {"decode": (26.8, 23), "prefill": (36, 28.2), "mixed": (43, 29.6)},
}
"""Of two numbers of layers of a model: dispatches and barriers that each layer between them takes, on average."""

STEP_COSTS = {"llama-3-8b": (601, 441), "qwen3-30b-a3b": (1833, 1177), "gemma-3-12b": (1114, 842)}
"""Dispatches and barriers of a whole decode step."""


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.full), "mixed"])
@pytest.mark.parametrize(("model", "few", "more"), LAYER_COSTS)
def test_a_layer_takes_no_more_dispatches_and_barriers(model: str, few: int, more: int, kind: str) -> None:
    steps = [
        replay(record(config_of(model, num_layers), KINDS[kind], num_steps=2), UNBOUNDED).steps[-1]
        for num_layers in (few, more)
    ]
    dispatches, barriers = LAYER_COSTS[model, few, more][kind]
    assert (steps[1].num_dispatches - steps[0].num_dispatches) / (more - few) <= dispatches
    assert (steps[1].num_barriers - steps[0].num_barriers) / (more - few) <= barriers


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "llama-3-8b" else [pytest.mark.full]) for model in STEP_COSTS]
)
def test_a_step_takes_no_more_dispatches_and_barriers(model: str) -> None:
    step = replay(record(config_of(model), KINDS["decode"], num_steps=2), UNBOUNDED).steps[-1]
    assert (step.num_dispatches, step.num_barriers) <= STEP_COSTS[model]


@pytest.mark.parametrize("bits", [4, None])
def test_own_products_take_as_many_dispatches_and_barriers_as_mlx_s(bits: int | None) -> None:
    """And exact attention takes as many as another in a decode step."""
    graphs = [
        record(config_of("llama-3-8b", 3), KINDS["decode"], num_steps=2, bits=bits, is_exact=is_exact)
        for is_exact in (False, True)
    ]
    theirs, own = (replay(graph, UNBOUNDED) for graph in graphs)
    num_products = 2 * (3 * 7 + 1)
    assert sum(dispatch.op == "kernel product_vector" for dispatch in own.encoder.dispatches) == num_products
    counts = [(step.num_dispatches, step.num_barriers) for step in (theirs.steps[-1], own.steps[-1])]
    assert counts[0] == counts[1]
