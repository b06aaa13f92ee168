"""Records what the product's runner submits to MLX, without computing it."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, Literal
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_server.outputs import HELD_STATES, SchedulerOutput
from mlx_server.runtime.attention.regroup import possible_levels
from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.drafts.hidden_states import HiddenStates
from mlx_server.runtime.drafts.layer_taps import FeatureStates
from mlx_server.runtime.drafts.runner import AssistantFeed, DraftingRunner, HeadFeed
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.pool import buffer_address
from mlx_server.runtime.kernels.gpu.products import Form, ProductKernels, form_maker
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.layers.products import install_products
from mlx_server.runtime.model_runner import ModelRunner
from replay import models, stand_ins
from replay.graph import Graph, Op, Spec, Submission, Wait
from replay.traffic import Drafting, Traffic

_NUM_CORES = 16
_NUM_SLOTS = 64
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float, np.ndarray, FrameType)
"""Types of objects that hold no arrays of a step, or do not keep them alive."""


def record(
    config: dict[str, Any],
    traffic: Traffic,
    *,
    num_steps: int = 1,
    num_elements: int = 96,
    num_blocks: int = 4096,
    kv_bits: int | None = None,
    bits: int | None = 4,
    is_exact: bool = False,
    num_cores: int = _NUM_CORES,
) -> Graph:
    """The graph of `num_steps` steps, each submitted before the host waits for the one before, by a new runner with the
    Metal backend for a GPU of `num_cores`. A command buffer has `num_elements` times 2^20 elements, a pool `num_blocks`
    blocks. `is_exact` as with --batch-invariant: products by this project's kernels, attention by rows."""
    with (
        patch.dict(os.environ, MLX_MAX_MB_PER_BUFFER=str(num_elements)),
        recording(lambda: models.build(config, bits), config["vocab_size"], num_blocks, kv_bits) as recorder,
    ):
        if is_exact:
            backend = recorder.runner.cache.backend
            assert isinstance(backend, MetalBackend)
            backend.by_row = True
            backend._num_cores = num_cores
            install_products(recorder.runner.forward.model, form_maker(ProductKernels.of_metal(), Form.VECTOR))
        num_groups = len(recorder.runner.cache.windows)
        return recorder.graph([traffic.step(index, num_groups) for index in range(num_steps)])


@dataclass(frozen=True, slots=True)
class Recorder:
    """A runner whose steps are recorded."""

    runner: ModelRunner
    names: set[str]

    def graph(self, steps: Sequence[SchedulerOutput]) -> Graph:
        with stand_ins.installed():
            return _trace([self.runner], steps, self.names)


@contextmanager
def recording(
    build: Callable[[], Any], vocab_size: int, num_blocks: int = 256, kv_bits: int | None = None
) -> Iterator[Recorder]:
    """Builds a model and its runner."""
    install_seam()
    with _kernel_names() as names:
        model = build()
        install_seam()  # reaches the modules of the model's code
        yield Recorder(_make_runner(model, vocab_size, num_blocks, kv_bits), names)


def record_drafting(
    config: dict[str, Any],
    draft_config: dict[str, Any] | Literal["eagle"] | None,
    traffic: Drafting,
    *,
    num_rounds: int = 2,
    num_blocks: int = 256,
) -> Graph:
    """Like `record`, for a model with a draft model of `draft_config`, an EAGLE-3 drafter, or its own head if there is
    none, or its assistant if it is a Gemma 4: in each round a burst of drafts, and the step that checks them."""
    install_seam()
    with _kernel_names() as names:
        vocab_size = config["vocab_size"]
        target = _make_runner(models.build(config), vocab_size, num_blocks, None)
        feed: HeadFeed | None = None
        if config["model_type"] == "gemma4_text":
            assistant = models.build_assistant_of(config, target.forward.model)
            draft = _make_runner(assistant, vocab_size, num_blocks, None)
            with _untried():
                states = HiddenStates(target.cache.backend.make_rows, 4, config["hidden_size"], mx.bfloat16)
            feed = AssistantFeed(assistant.model, states, target)
        elif draft_config == "eagle":
            eagle = models.build_eagle_of(config, target.forward.model)
            draft = _make_runner(eagle, vocab_size, num_blocks, None)
            body, layers = eagle.model, target.forward.model.layers
            tapped = [layers[index] for index in body.shape.tapped(len(layers))]
            with _untried():
                make_rows, size = target.cache.backend.make_rows, config["hidden_size"]
                features = FeatureStates(tapped, body.features, make_rows, 4, size, mx.bfloat16, HELD_STATES)
            feed = HeadFeed(body.link, features)
        elif draft_config is None:
            head = models.build_head(config, target.forward.model)
            draft = _make_runner(head, vocab_size, num_blocks, None)
            with _untried():
                states = HiddenStates(target.cache.backend.make_rows, 4, config["hidden_size"], mx.bfloat16)
            feed = HeadFeed(head.model.link, states)
        else:
            draft = _make_runner(models.build(draft_config), vocab_size, num_blocks, None)
        runner = DraftingRunner(target, draft, feed)
        steps = list(traffic.steps(num_rounds, len(target.cache.windows), len(draft.cache.windows)))
        with stand_ins.installed():
            return _trace([target, draft], steps, names, runner)


def _make_runner(model: Any, vocab_size: int, num_blocks: int, kv_bits: int | None) -> ModelRunner:
    cache = PagedKVCache(discover_layers(model), UntestedMetal(num_cores=_NUM_CORES))
    if kv_bits is not None:
        cache.quantize(KvBits(kv_bits, kv_bits))
    runner = ModelRunner(model, cache, vocab_size, AdapterRows())
    runner.forward.use(possible_levels(cache.layers)[0], selects_rows=True)
    with _untried():
        cache.allocate(num_blocks, num_slots=_NUM_SLOTS)
    return runner


class UntestedMetal(MetalBackend):
    """For steps of which nothing is computed, so that kernels cannot be tested."""

    def warm_up(self, *args: Any, **options: Any) -> Iterator[float]:
        yield from ()


@contextmanager
def _untried() -> Iterator[None]:
    """Makes pools and rows that take no memory, with kernels that cannot be tried here."""
    with (
        patch.object(mx, "zeros", models.zeros),
        patch.object(gpu_backend, "write_failure", lambda *_: None),
        patch.object(gpu_backend, "row_failure", lambda *_: None),
    ):
        yield


@contextmanager
def _kernel_names() -> Iterator[set[str]]:
    """The names of all kernels that are made within the block; MLX adds suffixes to them."""
    names: set[str] = set()
    make = mx.fast.metal_kernel

    def metal_kernel(*, name: str, **definition: Any) -> Any:
        names.add(name)
        return make(name=name, **definition)

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        stand_ins._kernel.cache_clear()
        yield names


@dataclass(frozen=True, slots=True)
class _Submitted:
    roots: list[mx.array]
    held: list[mx.array]


@dataclass(slots=True)
class _Trace:
    """What happens in a traced call, and what MLX exports about it afterwards. An update of a part of an array makes
    the same Python object refer to another array, so copies of the objects are kept."""

    pools: list[mx.array]
    weights: set[int]
    events: list[_Submitted | Wait] = field(default_factory=list)
    exported: list[dict[str, Any]] = field(default_factory=list)

    def submit(self, *arrays: Any) -> None:
        """Replaces `mx.async_eval`."""
        roots = [copy(value) for _, value in tree_flatten(list(arrays))]
        held = _reachable(inspect.currentframe())
        self.events.append(_Submitted(roots, [copy(array) for array in held if id(array) not in self.weights]))

    def wait(self, *arrays: Any) -> None:
        """Replaces `mx.eval`."""
        self.events.append(Wait())

    def outputs(self) -> list[mx.array]:
        """All arrays whose names are needed."""
        found = list(self.pools)
        for event in self.events:
            if isinstance(event, _Submitted):
                found += [*event.roots, *event.held]
        return found


def _trace(
    runners: Sequence[ModelRunner],
    steps: Sequence[SchedulerOutput],
    kernel_names: set[str],
    whole: DraftingRunner | None = None,
) -> Graph:
    """The graph of the first of `runners`, or of all of them as one `whole`."""
    launch = runners[0].launch if whole is None else whole.launch
    pools = _arrays_in([(runner.cache, runner.hidden_states) for runner in runners])
    weights = {id(array) for array in _arrays_in([runner.forward for runner in runners])} - {id(pool) for pool in pools}
    trace = _Trace([copy(pool) for pool in pools], weights)

    def run(_: mx.array) -> list[mx.array]:
        for step in steps:
            launch(step)
        return trace.outputs()

    with ExitStack() as stack:
        stack.enter_context(patch.object(mx, "async_eval", trace.submit))
        stack.enter_context(patch.object(mx, "eval", trace.wait))
        export: Callable[..., None] = mx.export_function
        export(trace.exported.append, run, mx.zeros((1,)))
    return _read(trace, kernel_names)


def _read(trace: _Trace, kernel_names: set[str]) -> Graph:
    specs: dict[str, Spec] = {}
    constants: dict[str, int] = {}
    ops: list[Op] = []
    names: list[str] = []
    for entry in trace.exported:
        if entry["type"] == "outputs":
            names = [name for name, _, _ in entry["outputs"]]
        elif entry["type"] == "constants":
            for name, value in entry["constants"]:
                specs[name] = Spec(value.shape, value.itemsize)
                constants[name] = buffer_address(value) if value.size else 0
        elif entry["type"] == "primitive":
            for name, shape, dtype in [*entry["inputs"], *entry["outputs"]]:
                specs[name] = Spec(tuple(shape), dtype.size)
            ops.append(_op(entry, kernel_names))
    for name, array in zip(names, trace.outputs(), strict=True):
        specs.setdefault(name, Spec(array.shape, array.itemsize))
    return Graph(tuple(ops), specs, tuple(_events(trace, names)), constants, frozenset(names[: len(trace.pools)]))


def _events(trace: _Trace, names: Sequence[str]) -> Iterator[Submission | Wait]:
    place = len(trace.pools)
    for event in trace.events:
        if isinstance(event, Wait):
            yield event
            continue
        roots = names[place : place + len(event.roots)]
        place += len(event.roots)
        held = names[place : place + len(event.held)]
        place += len(event.held)
        yield Submission(tuple(roots), frozenset(held))


def _op(entry: dict[str, Any], kernel_names: set[str]) -> Op:
    name, arguments = entry["name"], entry["arguments"]
    if name == "CustomKernel":
        full = arguments[0].removeprefix("custom_kernel_")
        own = max((known for known in kernel_names if full.startswith(known)), key=len)
        is_contiguous = next(value for value in arguments[8:] if isinstance(value, bool))
        name = f"kernel {own.partition('__')[0]}"  # without its sizes
        if own.startswith(stand_ins.PREFIX):
            name = own.removeprefix(stand_ins.PREFIX).removesuffix("_")
        arguments = [is_contiguous]
    inputs, outputs = (tuple(array for array, _, _ in entry[side]) for side in ("inputs", "outputs"))
    return Op(name, inputs, outputs, tuple(arguments))


def _reachable(frame: FrameType | None) -> list[mx.array]:
    """The arrays that `frame` and its callers refer to, up to the traced call."""
    found: list[Any] = []
    frame = frame.f_back if frame is not None else None  # `submit` itself
    while frame is not None and frame.f_code.co_name != "run":
        if frame.f_code.co_name != "submit":
            found.append(dict(frame.f_locals))
        frame = frame.f_back
    return _arrays_in(found)


def _arrays_in(roots: Sequence[Any]) -> list[mx.array]:
    seen: set[int] = set()
    arrays: list[mx.array] = []
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            arrays.append(item)
        else:
            stack.extend(gc.get_referents(item))
    return arrays
