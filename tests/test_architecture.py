"""The floors of the package, enforced over its source: imports go down only, and each library has its place."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "mlx_server"
ROOT = Path(__file__).parents[1]
MAX_LINES = 450

VOCABULARY = {
    "request",
    "sampling_params",
    "outputs",
    "config",
    "combinations",
    "clients",
    "fleet",
    "setting",
    "tiers",
    "model_entries",
    "errors",
    "environment",
}
EVERYTHING = {
    *("vocabulary", "kv_disk", "batching", "runtime", "observability", "engine", "pool", "api", "cli", "bench"),
    "__init__",
}
MAY_IMPORT: dict[str, set[str]] = {
    "vocabulary": {"vocabulary"},
    "kv_disk": {"vocabulary", "kv_disk"},
    "batching": {"vocabulary", "batching"},
    "runtime": {"vocabulary", "runtime"},
    "observability": {"vocabulary", "observability"},
    "engine": {"vocabulary", "kv_disk", "batching", "runtime", "observability", "engine"},
    "pool": {"vocabulary", "kv_disk", "engine", "pool"},
    "api": {"vocabulary", "kv_disk", "engine", "pool", "observability", "api"},
    "cli": EVERYTHING,
    "bench": EVERYTHING,
    "__init__": {"vocabulary", "engine"},
    "__main__": {"cli"},
}
ONLY_IN = {
    "mlx": {"runtime", "bench"},
    "mlx_lm": {"runtime", "bench"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "sse_starlette": {"api"},
    "uvicorn": {"api"},
    "redis": {"api"},
    "logfire": {"observability"},
    "opentelemetry": {"observability"},
    "prometheus_client": {"observability"},
}
BLACK_BOX = "bench.serve.command"
"""The HTTP client: it, and what it imports from bench, knows nothing of the server but the vocabulary."""

Sources = Mapping[str, str]
"""Source text by module name within the package, like `runtime.kernels.cpu`; a package's own is `runtime.__init__`."""


def read_sources() -> dict[str, str]:
    folder = ROOT / PACKAGE
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
    }


def imports(module: str, source: str) -> Iterator[str]:
    """Full names that `module` imports, anywhere in it; `a.b.*` for a wildcard."""
    package = [PACKAGE, *module.split(".")][:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def floor_of(module: str) -> str | None:
    top = module.split(".")[0]
    if top in VOCABULARY:
        return "vocabulary"
    return top if top in MAY_IMPORT else None


def inner_target(name: str) -> str | None:
    """What an import names within the package; None for a library's."""
    return name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else None


def floor_of_target(target: str) -> str:
    """Like `floor_of`; a name that is on no floor is one that the package itself offers, like `LLM`."""
    return floor_of(target) or "__init__"


def violations(sources: Sources) -> list[str]:
    """Everything that breaks the rules, as `module: what`."""
    found = []
    for module, source in sorted(sources.items()):
        faults = [*length_faults(source), *import_faults(module, source)]
        found += [f"{module}: {fault}" for fault in faults]
    return found + black_box_faults(sources)


def length_faults(source: str) -> Iterator[str]:
    num_lines = source.count("\n")
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines, the most is {MAX_LINES}"


def import_faults(module: str, source: str) -> Iterator[str]:
    floor = floor_of(module)
    if floor is None:
        yield "is on no floor"
        return
    for name in imports(module, source):
        if name.endswith(".*"):
            yield f"imports everything of {name[:-2]}"
        target = inner_target(name)
        if target is not None:
            if floor_of_target(target) not in MAY_IMPORT[floor]:
                yield f"imports {target}, which {floor} may not"
            continue
        library = name.split(".")[0]
        if floor not in ONLY_IN.get(library, {floor}):
            yield f"imports {library}, which only {' and '.join(sorted(ONLY_IN[library]))} may"
        if floor == "vocabulary" and library not in {*sys.stdlib_module_names, "pydantic", PACKAGE}:
            yield f"imports {library}, and the vocabulary needs nothing but Python and pydantic"


def black_box_faults(sources: Sources) -> Iterator[str] | list[str]:
    reached, found = [BLACK_BOX] if BLACK_BOX in sources else [], []
    for module in reached:
        for name in imports(module, sources[module]):
            target = inner_target(name)
            if target is None or floor_of(target) == "vocabulary":
                continue
            candidates = [target, target.rpartition(".")[0]]
            inside = next((c for c in candidates if c in sources and floor_of(c) == "bench"), None)
            if inside is None:
                found.append(f"{module}: imports {target}, and {BLACK_BOX} knows the server from outside only")
            elif inside not in reached:
                reached.append(inside)
    return found


def test_the_package_keeps_its_floors():
    sources = read_sources()
    assert "runtime.attention.interface" in sources
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        (
            "batching.scheduler",
            "from mlx_server.runtime.sampling.sampler import Sampler",
            "imports runtime.sampling.sampler.Sampler, which",
        ),
        (
            "runtime.executor",
            "import mlx_server.batching.scheduler",
            "imports batching.scheduler, which runtime may not",
        ),
        ("runtime.loader", "from mlx_server.engine import engine", "which runtime may not"),
        ("runtime.kernels.cpu", "from ...batching import block", "imports batching.block, which runtime may not"),
        (
            "engine.engine",
            "def f():\n    from mlx_server.pool import memory",
            "imports pool.memory, which engine may not",
        ),
        ("api.app", "from mlx_server.runtime.models.loader import load", "which api may not"),
        ("pool.memory", "from ..batching.block import Block", "which pool may not"),
        ("observability.metrics", "from mlx_server.engine.engine import AsyncEngine", "which observability may not"),
        ("request", "from mlx_server.batching.blocks.block import Block", "which vocabulary may not"),
        ("request", "import numpy as np", "imports numpy, and the vocabulary needs nothing but Python"),
        ("batching.blocks.block", "import mlx.core as mx", "imports mlx, which only bench and runtime may"),
        ("engine.chat", "from mlx_lm.utils import load", "imports mlx_lm, which only bench and runtime may"),
        ("cli.doctor", "import mlx.core as mx", "imports mlx, which only"),
        ("engine.engine", "from fastapi import FastAPI", "imports fastapi, which only api may"),
        ("pool.memory", "from starlette.responses import Response", "imports starlette, which only api may"),
        ("engine.chat", "from mlx_server.errors import *", "imports everything of mlx_server.errors"),
        ("engine.engine", "from mlx_server import LLM", "imports LLM, which engine may not"),
        ("runtime.loader", "from mlx_server.helpers import f", "imports helpers.f, which runtime may not"),
        ("helpers", "x = 1", "is on no floor"),
        ("utils.text", "x = 1", "is on no floor"),
        ("batching.blocks.block", "\n" * 451, "451 lines, the most is 450"),
        (
            "bench.serve.command",
            "from mlx_server.engine.engine import AsyncEngine",
            "knows the server from outside only",
        ),
    ],
)
def test_a_planted_violation_is_found(module, source, fault):
    found = violations({module: source})
    assert len(found) == 1
    assert found[0].startswith(f"{module}: ")
    assert fault in found[0]


def test_the_black_box_is_closed_through_what_it_imports():
    found = violations(
        {
            "bench.serve.command": "from mlx_server.bench.load import Load\nfrom mlx_server.bench import tables",
            "bench.load": "import httpx\nfrom mlx_server.errors import ServeError",
            "bench.tables": "from mlx_server.runtime.machine import Machine",
            "bench.throughput": "from mlx_server.runtime.machine import Machine",
        }
    )
    assert found == [
        "bench.tables: imports runtime.machine.Machine, and bench.serve.command knows the server from outside only"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batching.scheduler", "import heapq\nfrom mlx_server.outputs import SchedulerOutput"),
        ("runtime.kernels.cpu", "import mlx.core as mx\nfrom ..attention import StepPlan\nfrom . import build"),
        ("engine.engine", "from mlx_server.runtime.executor import MLXExecutor\nfrom mlx_server.batching import block"),
        ("api.app", "from fastapi import FastAPI\nfrom mlx_server.pool.model_pool import ModelPool"),
        ("bench.throughput", "import mlx_lm\nfrom mlx_server.engine.engine import AsyncEngine"),
        ("cli.main", "from mlx_server.api.server import serve"),
        ("bench.throughput", "from mlx_server import LLM, SamplingParams"),
        ("request", "import enum\nfrom mlx_server import errors"),
        ("__main__", "from mlx_server.cli.main import main"),
    ],
)
def test_what_goes_down_is_allowed(module, source):
    assert violations({module: source}) == []


def test_tests_mirror_the_package():
    """A folder of tests has the name of the folder that it tests, and each floor has one."""
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py") if ".venv" not in path.parts}
    folders -= {Path(), Path("attack"), Path("soak")}  # of the whole server
    assert folders
    assert [str(folder) for folder in sorted(folders) if not (ROOT / PACKAGE / folder).is_dir()] == []
    floors = {folder.name for folder in (ROOT / PACKAGE).iterdir() if (folder / "__init__.py").is_file()}
    assert floors <= {folder.parts[0] for folder in folders}


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone, and can only collect one of two in the same run."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py") if ".venv" not in path.parts)
    assert [name for name, count in names.items() if count > 1] == []
