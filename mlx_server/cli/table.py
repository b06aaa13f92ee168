"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Aligned columns; those of the indices in `right`, numbers say, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def size(num_bytes: float) -> str:
    """`1.24 GB`, as disks and downloads are sold."""
    return f"{num_bytes / 1e9:.2f} GB"


def ago(seconds: float) -> str:
    """`5 min ago`: how long something is past."""
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    return f"{seconds // 3600:.0f} h ago" if seconds < 86400 else f"{seconds // 86400:.0f} d ago"
