"""`mlx-serve bench kernels`: what it counts, how it times and chooses, and that the server takes the choice."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulator.worlds import make_backend

from mlx_server.bench.lab import attention, kernels
from mlx_server.bench.lab.attention import (
    Case,
    Copy,
    Timed,
    World,
    kernel_variants,
    make_measure,
    measure_copy,
    sweep,
)
from mlx_server.bench.lab.kernels import Result, Sweep, render_results, render_sweep
from mlx_server.cli.main import main
from mlx_server.errors import ServeError
from mlx_server.runtime.attention import backends
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.kernels.gpu import choice_files
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.variant_choice import load_choice, store_choices
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, check_variant, default_variant
from mlx_server.runtime.kernels.trials import median_times
from tests.attention_worlds import ALL_BITS
from tests.engine_worlds import on_the_cpu

SHAPE = DecodeShape(num_query_heads=8, num_kv_heads=2, key_dim=128, value_dim=128, dtype=mx.float16)
OTHER = replace(SHAPE, dtype=mx.bfloat16)
CHOICE = KernelVariant(heads_per_simdgroup=2, simdgroups=4, lanes_per_row=16, rows_ahead=2, partition_tokens=512)
TINY = DecodeShape(num_query_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, dtype=mx.float32)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    return tmp_path


def no_kernel(**definition: Any) -> Callable[..., Any]:
    """Stands in for MLX where kernels are made but never run."""
    return lambda **launch: pytest.fail(f"{definition['name']} was run")


# ---- the stored choice


def test_without_a_file_the_default_is_taken_silently(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_choice()(SHAPE) == default_variant(SHAPE)
    assert caplog.text == ""


def test_what_is_stored_is_loaded_for_its_shape_alone(home: Path) -> None:
    assert store_choices({SHAPE: CHOICE}) == home / "kernels" / "variants.json"
    assert default_variant(SHAPE) != CHOICE
    assert load_choice()(SHAPE) == CHOICE
    assert load_choice()(OTHER) == default_variant(OTHER)
    assert [path.name for path in (home / "kernels").iterdir()] == ["variants.json"]


def test_what_is_stored_is_for_its_bits_alone(home: Path) -> None:
    kinds = (None, *ALL_BITS)
    stored = {replace(SHAPE, bits=bits): replace(CHOICE, rows_ahead=1 + number) for number, bits in enumerate(kinds)}
    store_choices(stored)
    assert {shape: load_choice()(shape) for shape in stored} == stored


def test_storing_keeps_other_shapes_and_other_chips(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_load = replace(CHOICE, partition_tokens=None)
    for chip, shape, variant in (("M2", SHAPE, CHOICE), ("M4", SHAPE, by_load), ("M2", OTHER, by_load)):
        monkeypatch.setattr(choice_files, "chip_name", lambda chip=chip: chip)
        store_choices({shape: variant})
    choose = load_choice()
    assert (choose(SHAPE), choose(OTHER)) == (CHOICE, by_load)
    store_choices({SHAPE: default_variant(SHAPE)})
    assert load_choice()(SHAPE) == default_variant(SHAPE)
    monkeypatch.setattr(choice_files, "chip_name", lambda: "M4")
    assert load_choice()(SHAPE) == by_load
    assert load_choice()(OTHER) == default_variant(OTHER)


def edited(**changes: Any) -> Callable[[dict[str, Any]], str]:
    return lambda document: json.dumps({**document, **changes})


def with_entry(part: str, **changes: Any) -> Callable[[dict[str, Any]], str]:
    def edit(document: dict[str, Any]) -> str:
        document["choices"][0][part].update(changes)
        return json.dumps(document)

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda document: "{", "JSONDecodeError"),
        (lambda document: "[]", "TypeError"),
        (lambda document: "\x00\udcff", "Error"),
        (edited(version=0), "it was measured with other kernels"),
        (edited(kernels="0123456789abcdef"), "it was measured with other kernels"),
        (edited(choices=None), "TypeError"),
        (edited(choices=[[]]), "TypeError"),
        (edited(choices=[{}]), "KeyError"),
        (with_entry("variant", lanes_per_row=64), "64 lanes cannot split rows"),
        (with_entry("variant", simdgroups=9), "9 simdgroups"),
        (with_entry("variant", rows_ahead="4"), "'4' is not a positive whole number"),
        (with_entry("variant", rows_ahead=True), "True is not a positive whole number"),
        (with_entry("variant", colour=3), "TypeError"),
        (with_entry("shape", num_kv_heads=0), "0 is not a positive whole number"),
        (with_entry("shape", key_dim=72), "key head_dim 72"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_and_replaced(
    edit: Callable[[dict[str, Any]], str], reason: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = store_choices({SHAPE: CHOICE, OTHER: CHOICE})
    text = edit(json.loads(path.read_text()))
    path.write_bytes(text.encode(errors="surrogateescape"))
    choose = load_choice()
    assert (choose(SHAPE), choose(OTHER)) == (default_variant(SHAPE), default_variant(OTHER))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.message
    assert reason in record.message
    store_choices({OTHER: CHOICE})
    assert (load_choice()(SHAPE), load_choice()(OTHER)) == (default_variant(SHAPE), CHOICE)


def test_a_file_that_cannot_be_opened_is_ignored_with_one_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "kernels" / "variants.json").mkdir(parents=True)
    assert load_choice()(SHAPE) == default_variant(SHAPE)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_choice_reaches_the_backend(home: Path) -> None:
    store_choices({SHAPE: CHOICE})
    backend = MetalBackend(no_kernel, num_cores=4, choose_variant=load_choice())
    assert backend.variant(SHAPE) == CHOICE
    assert backend.variant(OTHER) == default_variant(OTHER)


@pytest.mark.parametrize(("name", "function"), [("metal", "metal_kernel"), ("cuda", "cuda_kernel")])
def test_the_server_makes_its_backends_with_the_choice(
    name: str, function: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it can be seen without a GPU: the shape asked for while the backend proves itself."""
    seen = []
    monkeypatch.setattr(mx.fast, function, no_kernel)
    monkeypatch.setattr(getattr(mx, name), "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "some chip", "architecture": "applegpu_g14s"})

    def look(backend: Any, spec: LayerSpec) -> Generator[float, None, float]:
        seen.append(backend.variant(DecodeShape.of(spec, 8)))
        yield 1.0
        return 0.0

    monkeypatch.setattr(backends, "_self_test", look)
    store_choices({SHAPE: CHOICE})
    assert backends.choose_backend(name, [SHAPE.spec]).name == name
    assert seen == [CHOICE]


# ---- cases and bytes


def test_bytes_that_must_move_equal_a_count_by_hand() -> None:
    # K and V: 3 x 100 rows of 2 heads x 128 elements; queries and results: 3 tokens of 8 heads; all of 2 bytes
    assert Case(SHAPE, 3, 1, 100).required_bytes == 2 * (3 * 100 * 2 * 128 * 2) + 2 * (3 * 8 * 128 * 2) == 319_488
    # 40 of 70 tokens of 4-byte elements: K/V of 70 rows, queries and results of 40
    assert Case(TINY, 1, 40, 70).required_bytes == 2 * (70 * 2 * 16 * 4) + 2 * (40 * 4 * 16 * 4) == 38_400


def test_small_cases_take_all_layers_and_large_ones_fewer() -> None:
    assert Case(SHAPE, 1, 1, 64).num_layers(8) == 8
    assert Case(SHAPE, 64, 1, 1024).num_layers(8) == 4  # 64 MiB each of 256
    assert Case(SHAPE, 512, 1, 4096).num_layers(8) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(TINY, 3, 1, 1),
        Case(TINY, 2, 1, 70),
        Case(TINY, 2, 1, 300),
        Case(TINY, 1, 40, 70),
        Case(TINY, 1, 32, 32),
        Case(TINY, 1, 20, 290),
    ],
)
def test_both_sides_attend_over_the_same_rows(case: Case) -> None:
    world = World(case, 2, ReferenceBackend())
    paged, contiguous = world.paged(ReferenceBackend())(), world.contiguous()()
    assert paged.shape == (case.num_sequences, case.num_queries, 4, 16)
    assert mx.abs(paged - contiguous).max().item() < 1e-5
    assert mx.abs(paged).max().item() > 1e-3


class Wrong(ReferenceBackend):
    def attend(self, *args: Any, **kwargs: Any) -> mx.array:
        return super().attend(*args, **kwargs) + 0.01


def test_the_speed_of_wrong_results_is_not_reported() -> None:
    with pytest.raises(ServeError, match=r"reference backend is off by .* 4 heads on 2 of 16, float32"):
        kernels.measure_case(Case(TINY, 1, 1, 40), Wrong(), 1, 1)


# ---- timing


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def candidate(self, name: str, *times_s: float) -> Callable[[], None]:
        """Takes `times_s` one after the other, the last one forever."""
        left = list(times_s)

        def run() -> None:
            self.calls.append(name)
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_candidates_are_warmed_up_and_measured_in_turns() -> None:
    clock = FakeClock()
    slow, fast = clock.candidate("a", 100, 100, 5, 9, 6), clock.candidate("b", 100, 100, 1, 2, 3)
    assert median_times([slow, fast], 3, clock) == [6, 2]
    assert "".join(clock.calls) == "abab" + "ab" + "ba" + "ab"


def test_a_copy_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.timeit, "repeat", lambda work, **_: [4.0, 2.0, 8.0])
    copy = measure_copy(1000)
    assert copy.num_bytes == 1000
    assert copy.bytes_per_s == 2 * 1000 * 8 / 2.0  # the best of 4, 2 and 8 s


# ---- the sweep


def test_variants_are_the_default_first_then_all_that_differ_and_can_be_launched() -> None:
    variants = kernel_variants(SHAPE)
    assert variants[0] == default_variant(SHAPE)
    for variant in variants:
        check_variant(SHAPE, variant)
    cuts = {
        (v.heads_per_simdgroup, v.head_simdgroups(SHAPE), v.streams(SHAPE), v.lanes_per_row, v.rows_ahead)
        for v in variants
    }
    assert len(cuts) == len(variants) == 3 * 4 * 3 * 2
    assert {v.heads_per_simdgroup for v in variants} == {1, 2, 4}
    assert {v.lanes_per_row for v in kernel_variants(replace(SHAPE, key_dim=80, value_dim=80))} == {8}


def test_the_sweep_picks_the_fastest_cut_then_its_fastest_partition() -> None:
    cut = KernelVariant(heads_per_simdgroup=2, simdgroups=4, lanes_per_row=16, rows_ahead=2)

    def measure(variant: KernelVariant) -> tuple[float, ...]:
        if replace(variant, partition_tokens=None) != cut:
            return (3.0, 3.0)
        return {None: (1.0, 4.0), 256: (9.0, 9.0), 512: (1.0, 3.0), 1024: (2.0, 2.0), 2048: (9.0, 9.0)}[
            variant.partition_tokens
        ]

    timed = sweep(SHAPE, measure)
    assert timed[0] == Timed(replace(cut, partition_tokens=512), (1.0, 3.0))
    # the geometric mean of 1 and 4 is that of 2 and 2, and below 3
    assert {one.variant.partition_tokens for one in timed[1:3]} == {None, 1024}
    assert len(timed) == len(kernel_variants(SHAPE)) + 4


def test_variants_that_do_not_run_are_left_out() -> None:
    default = default_variant(SHAPE)
    timed = sweep(SHAPE, lambda variant: (1.0,) if variant.simdgroups == 2 else None)
    assert {one.variant.simdgroups for one in timed} == {2}
    assert default.simdgroups != 2
    assert sweep(SHAPE, lambda variant: None) == []


class Gpu(ReferenceBackend):
    """Attends like the reference, and says of its variants what a GPU would."""

    def __init__(self, variant: KernelVariant, allowed: int) -> None:
        self._variant = replace(variant, simdgroups=min(allowed, variant.simdgroups))

    def variant(self, shape: DecodeShape) -> KernelVariant:
        return self._variant


def test_a_variant_is_measured_in_every_case_unless_it_would_run_as_another() -> None:
    worlds = [World(Case(TINY, 1, 1, context), 2, ReferenceBackend()) for context in (1, 40)]
    measure = make_measure(worlds, lambda variant: Gpu(variant, allowed=4), 1)  # type: ignore[arg-type,return-value]
    times_s = measure(CHOICE)
    assert times_s is not None
    assert len(times_s) == 2
    assert measure(replace(CHOICE, simdgroups=8)) is None


def test_the_sweeps_table_shows_times_and_the_default() -> None:
    case, default = Case(SHAPE, 3, 1, 100), default_variant(SHAPE)
    slow = [Timed(replace(CHOICE, rows_ahead=4 + i), (0.5,)) for i in range(10)]
    found = Sweep((case,), (Timed(CHOICE, (0.001,)), *slow, Timed(default, (0.002,))))
    assert found.best == CHOICE
    lines = render_sweep(found).splitlines()
    assert lines[0] == "8 heads on 2 of 128, float16: 12 variants over 1 decodes, 0.32 MB must move"
    assert len(lines) == 4 + 10 + 1
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == ["2", "4", "16", "2", "512", "1.000", "2.00x"]
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")][-1] == "1.00x"


# ---- the command


def test_results_are_read_against_the_copy() -> None:
    case = Case(SHAPE, 3, 1, 100)
    result = Result(case, 8, "metal", case.required_bytes / 50e9, case.required_bytes / 20e9, 0.0)
    text = render_results([result], Copy("MLX on the GPU", 2**28, 100e9))
    assert text.startswith(
        "metal backend, float16. Copy bandwidth: 100.0 GB/s, read and written (MLX on the GPU, 268 MB"
    )
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert cells == ["decode 3 x 100", "8x2x128", "full", "0.006", "0.016", "2.50x", "0.32", "50.0", "50%"]


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=on_the_cpu), "reference"])
def test_the_command_measures_every_case(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    shapes = ["--heads", "4x2x16", "3x3x8", "--batch", "1", "3", "--context", "40", "--prefill", "20x70", "--products"]
    argv = [
        "bench",
        "kernels",
        "--backend",
        backend,
        *shapes,
        "--dtype",
        "float32",
        "--quick",
        "--copy-mib",
        "1",
        "--json",
        str(path),
    ]
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith(f"{backend} backend, float32. Copy bandwidth: ")
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:2]) for line in table[4:]]
    cases = ("decode 1 x 40", "decode 3 x 40", "prefill 20 of 70")
    assert rows == [(case, heads) for heads in ("4x2x16", "3x3x8") for case in cases]

    document = json.loads(path.read_text())
    assert document["benchmark"] == "kernels"
    assert document["sweeps"] == []
    assert document["copy"]["num_bytes"] == 2**20
    first = document["results"][0]
    assert first["required_bytes"] == 2 * (40 * 2 * 16 * 4) + 2 * (4 * 16 * 4)
    assert first["bytes_per_s"] == pytest.approx(first["required_bytes"] / first["time_s"])
    assert first["share_of_copy"] == pytest.approx(first["bytes_per_s"] / document["copy"]["bytes_per_s"])
    assert first["speedup"] == pytest.approx(first["mlx_time_s"] / first["time_s"])
    assert (first["num_layers"], first["backend"]) == (8, backend)
    assert max(result["max_difference"] for result in document["results"]) < 1e-5


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=on_the_cpu), "reference"])
def test_quantised_rows_are_measured_beside_whole_ones(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    shape = ["--heads", "4x2x32", "--batch", "3", "--context", "40", "--prefill", "20x70", "--products"]
    small = ["--kv-bits", "full", "8", "4", "--dtype", "float32", "--quick", "--copy-mib", "1", "--json", str(path)]
    argv = ["bench", "kernels", "--backend", backend, *shape, *small]
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in table[4:]]
    cases = ("decode 3 x 40", "prefill 20 of 70")
    assert rows == [(case, "4x2x32", bits) for bits in ("full", "8", "4") for case in cases]

    results = json.loads(path.read_text())["results"]
    assert [result["kv_bits"] for result in results] == [None, None, "8", "8", "4", "4"]
    tokens = 3 * 2 * 4 * 32 * 4  # queries and results
    assert [result["required_bytes"] - tokens for result in results[::2]] == [
        3 * 40 * 2 * 2 * row for row in (32 * 4, 32 + 8, 16 + 8)
    ]
    assert max(result["max_difference"] for result in results) < 1e-4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--heads", "3x2x64"], "3 query heads do not divide over 2 KV heads"),
        (["--heads", "4x2"], "'4x2' is not 3 positive whole numbers"),
        (["--prefill", "1x64"], "a chunk of 1 is not 2 to 64 tokens"),
        (["--prefill", "65x64"], "a chunk of 65 is not 2 to 64 tokens"),
        (["--batch", "0"], "0 is not a whole number of at least 1"),
        (["--products", "64x65"], "'64x65': K must be a multiple of 64, and N x K at least 512"),
        (["--json", "/nonexistent/out.json"], "cannot write /nonexistent/out.json"),
        (["--heads", "4x2x80", "--kv-bits", "8"], "--kv-bits needs head dimensions that are multiples of 32"),
        pytest.param(
            *(["--backend", "cpu", "--dtype", "float16", "--quick", "--copy-mib", "1"], "stores float32"),
            marks=on_the_cpu,
        ),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.slow
def test_the_command_sweeps_a_gpus_kernels_and_serves_with_the_best(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, on kernels that really run: those of the GPU, or of the emulator where there is none."""
    shape = DecodeShape(num_query_heads=2, num_kv_heads=1, key_dim=64, value_dim=64, dtype=mx.float32)
    variants = [KernelVariant(1, 2, 32, 2), KernelVariant(2, 1, 32, 2)]
    monkeypatch.setattr(kernels, "choose_backend", lambda name, specs: make_backend(choose_variant=load_choice()))
    monkeypatch.setattr(
        kernels, "backend_with", lambda name: lambda variant: make_backend(choose_variant=lambda shape: variant)
    )
    monkeypatch.setattr(attention, "kernel_variants", lambda shape: variants)
    monkeypatch.setattr(attention, "_PARTITIONS", (32,))
    path = home / "out.json"
    argv = ["--heads", "2x1x64", "--dtype", "float32", "--batch", "2", "--context", "40", "--prefill", "--products"]
    small = ["--layers", "2", "--repeat", "1", "--copy-mib", "1", "--json", str(path)]
    assert main(["bench", "kernels", *argv, *small]) == 0
    assert caplog.text == ""

    document = json.loads(path.read_text())
    (found,), (result,) = document["sweeps"], document["results"]
    best = found["variants"][0]
    chosen = KernelVariant(**{field.name: best[field.name] for field in fields(KernelVariant)})
    assert len(found["variants"]) == 3
    assert chosen in [replace(v, partition_tokens=tokens) for v in variants for tokens in (None, 32)]
    assert load_choice()(shape) == chosen
    assert result["backend"] == make_backend().name
    assert "2 heads on 1 of 64, float32: 3 variants over 1 decodes" in capsys.readouterr().out
