"""Output of benchmarks: Markdown tables, progress lines, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_server.errors import ServeError

_Item = TypeVar("_Item")


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(row, widths) for row in (header, rule, *rows))


def render_items(items: Iterable[_Item], columns: Mapping[str, Callable[[_Item], str]]) -> str:
    """A table with a row for each item; `columns` maps titles to functions that make the cells."""
    return render_table(list(columns), [[cell(item) for cell in columns.values()] for item in items])


def document_of(thing: object, *names: str) -> dict[str, Any]:
    """The named attributes, for JSON."""
    return {name: getattr(thing, name) for name in names}


def print_progress(progress: str) -> None:
    """Prints progress to stderr."""
    print(progress, file=sys.stderr, flush=True)


def write_json(path: Path | None, document: object) -> None:
    """Writes the document to the file of `--json`, if there is one. Raises `ServeError` if that fails, after printing
    the document, which may have taken hours."""
    if path is None:
        return
    text = json.dumps(document, indent=2, default=str)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(text)
        raise ServeError(f"--json: cannot write {path}: {error.strerror}. The figures are printed instead.") from error


def format_bytes(count: int) -> str:
    """In MiB below 10 GiB, else in GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10 * 1024 else f"{mebibytes / 1024:,.1f} GiB"


def format_rate(per_second: float) -> str:
    """With one decimal below 1,000."""
    return f"{per_second:,.1f}" if per_second < 1000 else f"{per_second:,.0f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]
    return f"| {' | '.join(padded)} |"
