"""Mutation testing: changes the code in one place at a time (a comparison, a number, a condition, a removed call) and
checks whether a test fails. A mutant that survives is either not tested or makes no difference; the share of survivors
measures the tests. Works on a copy of the checkout.

There are four rounds of tests, and the survivors of one go into the next: the tests in the module's folder of tests/
that import it or have its name; the others in that folder and the others that import it; those of its floor; the slow
ones. Nothing runs on the unchanged code but the tests that failed, which must pass there.

examples:
  ./scripts/mutate                                 # 50 places of batching/ and engine/
  ./scripts/mutate --sample 100 --seed 7 batching
  ./scripts/mutate --rounds 2 engine/text          # quick; survivors may be known to tests further away
  ./scripts/mutate --minutes 10 batching/blocks/block.py
"""

from __future__ import annotations

import argparse
import ast
import atexit
import compileall
import os
import random
import re
import shlex
import shutil
import signal
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
import psutil
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from parso.python.tree import Keyword

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_server"
TESTS = "-m pytest -x -q --tb=no --no-header -p no:cacheprovider"
MOST_S = 1800.0
FAST = "not slow and not full and not attack and not soak"
SLOW = "slow and not full and not attack and not soak"
NOTHING_RAN = re.compile(r"^(no tests ran|\d+ deselected) in ", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s:]+\.py(?:::\w+)*)", re.MULTILINE)

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


def main() -> int:
    args = _arguments()
    atexit.register(_end_tests)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    end_s = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        _copy_checkout(Path(folder))
        compileall.compile_dir(folder, quiet=1)  # mutants' tests write no bytecode
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        mutants = sampled(_modules(args.folders), args.sample, random.Random(args.seed))
        survivors, num_tried = mutants, 0
        for number in range(args.rounds):
            trying, survivors = survivors, []
            for index, mutant in enumerate(trying):
                if time.monotonic() > end_s:
                    survivors += trying[index:] if number else []
                    break
                num_tried += not number
                is_killed = kills(mutant, number)
                result = "killed" if is_killed else f"survived\n{_change(mutant)}"
                print(f"round {number + 1}, {index + 1}/{len(trying)} {_name(mutant)}: {result}", flush=True)
                survivors += [] if is_killed else [mutant]
        print(f"The survivors of {args.rounds} rounds:")
        for mutant in survivors:
            print(f"{_name(mutant)}\n{_change(mutant)}")
    print(f"{len(survivors)} of {num_tried} survived ({len(survivors) / max(1, num_tried):.0%}); seed {args.seed}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=["batching", "engine"], help=f"folders or files of {PACKAGE}/")
    parser.add_argument("--sample", type=int, default=50, help="number of places to change (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of tests, at most (default: all)")
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after them (default: %(default)s)")
    return parser.parse_args()


def _end_tests() -> None:
    """Ends tests that still run: a mutant may never end by itself, and its tests have a session of their own."""
    for process in psutil.Process().children(recursive=True):
        process.kill()


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


def kills(mutant: Mutant, number: int) -> bool:
    """Whether a test of this round fails on the mutant."""
    rounds = _rounds(mutant.path)
    if number >= len(rounds):
        return False
    tests, marks = rounds[number]
    with use_mutation(mutant.path, mutant.operator, mutant.occurrence):
        outcome, output = run_tests(_command(tests, marks), MOST_S)
    if outcome is TestOutcome.SURVIVED or NOTHING_RAN.search(output):
        return False
    for test in FAILED.findall(output):
        _check_unchanged(test)
    return True


@cache
def _rounds(path: Path) -> list[tuple[list[str], str]]:
    """The files of tests for a module, the nearest first, with the marks to run."""
    folders = path.parts[1:-1]
    floor, mirror = Path("tests", *folders[:1]), Path("tests", *folders)
    package, module = ".".join(path.parts[:-1]), path.stem
    imports = re.compile(rf"{package}\.{module}\b|from {package} import [^\n]*\b{module}\b")
    rounds: list[list[str]] = [[], [], []]
    for test in sorted(Path("tests").rglob("test_*.py")):
        is_importing = imports.search(test.read_text("utf-8")) is not None
        is_beside = bool(folders) and test.parent == mirror
        if is_beside and (is_importing or path.stem in test.stem):
            rounds[0].append(str(test))
        elif is_beside or is_importing:
            rounds[1].append(str(test))
        elif folders and floor in test.parents:
            rounds[2].append(str(test))
    if not any(rounds):
        sys.exit(f"No test names {path}.")
    return [*((tests, FAST) for tests in rounds if tests), ([test for tests in rounds for test in tests], SLOW)]


def _command(tests: Sequence[str], marks: str) -> str:
    limit_s = 30 if marks == FAST else 300  # a mutant may make a test wait forever
    limits = f"-o timeout={limit_s} -o faulthandler_timeout={2 * limit_s}"
    return f"{shlex.quote(sys.executable)} {TESTS} {limits} -m {shlex.quote(marks)} {shlex.join(tests)}"


@cache
def _check_unchanged(test: str) -> None:
    if run_tests(_command([test], f"{FAST} or {SLOW}"), MOST_S)[0] is not TestOutcome.SURVIVED:
        sys.exit(f"This test fails on the unchanged code: {test}")


def _change(mutant: Mutant) -> str:
    with use_mutation(mutant.path, mutant.operator, mutant.occurrence) as (original, mutated):
        old, new = (text.splitlines()[mutant.start[0] - 1].strip() for text in (original, mutated))
    return f"  - {old}\n  + {new}"


def _name(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.start[0]} {type(mutant.operator).__name__}"


if __name__ == "__main__":
    raise SystemExit(main())
