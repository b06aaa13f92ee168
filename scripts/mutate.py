"""Mutation testing: changes the code in one place at a time (a comparison, a number, a condition, a removed call) and
checks whether a test fails. A mutant that survives is either not tested or makes no difference; the share of survivors
measures the tests. Works on a copy of the checkout.

The nearest tests run first: those in the module's folder of tests/, then those that import it, then those of its floor,
then the slow ones. A mutant has survived if none fails.

examples:
  ./scripts/mutate                                 # 50 places of batching/ and engine/
  ./scripts/mutate --sample 100 --seed 7 batching
  ./scripts/mutate --minutes 10 batching/blocks/block.py
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from parso.python.tree import Keyword

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_server"
TESTS = "-m pytest -x -q --ff --tb=no --no-header"
NEVER = "not full and not attack and not soak"
NO_TESTS_COLLECTED = 5

Position = tuple[int, int]
"""Line, from 1, and column, from 0."""


class CallDeletion(Operator):  # type: ignore[misc]
    """Removes a statement that is only a call."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        is_call = (
            node.type == "atom_expr" and node.children[-1].type == "trailer" and node.children[-1].children[0] == "("
        )
        if is_call and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(1)\n", "pass\n"),)


@dataclass(frozen=True)
class Mutant:
    """The change that `operator` makes at number `occurrence` of the places in `path` that it can change."""

    path: Path
    operator: Operator
    occurrence: int
    start: Position


@dataclass(frozen=True)
class Suite:
    """A command that runs tests, and its timeout."""

    command: str
    timeout_s: float


def main() -> int:
    args = _arguments()
    end_s = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        _copy_checkout(Path(folder))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        mutants = sampled(_modules(args.folders), args.sample, random.Random(args.seed))
        num_tried, survivors = 0, []
        for mutant in mutants:
            if time.monotonic() > end_s:
                break
            diff = survival(mutant)
            num_tried += 1
            print(f"{num_tried}/{len(mutants)} {_name(mutant)}: {'killed' if diff is None else 'SURVIVED'}", flush=True)
            if diff is not None:
                survivors.append(diff)
    print(*survivors, sep="\n")
    print(f"{len(survivors)} of {num_tried} survived ({len(survivors) / max(1, num_tried):.0%}); seed {args.seed}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=["batching", "engine"], help=f"folders or files of {PACKAGE}/")
    parser.add_argument("--sample", type=int, default=50, help="number of places to change (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after them (default: %(default)s)")
    return parser.parse_args()


def _copy_checkout(folder: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def _modules(folders: Sequence[str]) -> list[Path]:
    """The modules in these folders, as paths in the copy."""
    paths = [Path(PACKAGE, name) for name in folders]
    missing = [path for path in paths if not path.exists()]
    if missing:
        sys.exit(f"There is no {missing[0]}.")
    return sorted({module for path in paths for module in ([path] if path.is_file() else path.rglob("*.py"))})


def sampled(modules: Sequence[Path], count: int, rng: random.Random) -> list[Mutant]:
    """One mutant at each of `count` places, however many mutants a place has."""
    places: dict[tuple[Path, Position], list[Mutant]] = {}
    for module in modules:
        for mutant in mutants_of(module):
            places.setdefault((mutant.path, mutant.start), []).append(mutant)
    chosen = rng.sample(list(places.values()), min(count, len(places)))
    return [rng.choice(mutants) for mutants in chosen]


def mutants_of(path: Path) -> Iterator[Mutant]:
    nodes = list(ast_nodes(get_ast_from_path(path)))
    annotations = list(_annotations(path.read_text(encoding="utf-8")))
    for operator in _operators():
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in annotations):
                yield Mutant(path, operator, occurrence, start)


@cache
def _operators() -> tuple[Operator, ...]:
    classes = [cosmic_ray.plugins.get_operator(name) for name in cosmic_ray.plugins.operator_names()]
    return (CallDeletion(), *(made() for made in classes if not made.arguments()))


def _annotations(source: str) -> Iterator[tuple[Position, Position]]:
    """The ranges of type annotations, which are never evaluated."""
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            note = getattr(node, name, None)
            if note is not None:
                yield (note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)


def survival(mutant: Mutant) -> str | None:
    """The mutant's change if no test fails, else None."""
    for tests, marks in _rounds(mutant.path):
        suite = suite_of(tests, marks)
        with use_mutation(mutant.path, mutant.operator, mutant.occurrence) as (original, mutated):
            if suite and run_tests(suite.command, suite.timeout_s)[0] is not TestOutcome.SURVIVED:
                return None
    line = mutant.start[0] - 1
    old, new = original.splitlines(), mutated.splitlines()
    return f"{_name(mutant)}\n  - {old[line].strip()}\n  + {new[line].strip()}"


def _rounds(path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """The tests of a module, the nearest first, with the marks to run: those of its folder, those that import it, those
    of its floor; then the slow ones."""
    folders = [Path("tests", *path.parts[1:end]) for end in range(len(path.parts) - 1, 1, -1)]
    mirrored = [str(folder) for folder in folders if folder.is_dir()]
    module = ".".join(path.with_suffix("").parts)
    importing = [
        str(test) for test in sorted(Path("tests").rglob("test_*.py")) if f"{module} " in test.read_text("utf-8")
    ]
    if not mirrored and not importing:
        sys.exit(f"No test names {module}.")
    around = (*mirrored[-1:], *(test for test in importing if not mirrored or not test.startswith(f"{mirrored[-1]}/")))
    for tests in dict.fromkeys((tuple(mirrored[:1]), tuple(importing), around)):
        if tests:
            yield tests, f"not slow and {NEVER}"
    yield around, f"slow and {NEVER}"


@cache
def suite_of(tests: tuple[str, ...], marks: str) -> Suite | None:
    """The tests with these marks, if there are any. They must pass on the unchanged code."""
    command = f"{shlex.quote(sys.executable)} {TESTS} -m {shlex.quote(marks)} {shlex.join(tests)}"
    start_s = time.monotonic()
    status = subprocess.run(shlex.split(command), stdout=subprocess.DEVNULL, check=False).returncode
    if status not in (0, NO_TESTS_COLLECTED):
        sys.exit(f"The tests fail on the unchanged code: {command}")
    return Suite(command, timeout_s=20 + 3 * (time.monotonic() - start_s)) if status == 0 else None


def _name(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.start[0]} {type(mutant.operator).__name__}"


if __name__ == "__main__":
    raise SystemExit(main())
