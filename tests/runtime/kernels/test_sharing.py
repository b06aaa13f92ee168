"""Which rows read K/V together, and the work items of that, as the host plans them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.runtime.kernels import sharing
from mlx_server.runtime.kernels.gpu.shared_work import SharedWork, make_shared_work
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, rows_at_once, shared_tiles, shared_variant
from mlx_server.runtime.kernels.sharing import Readers, Run, find_runs

SHAPE = DecodeShape(32, 8, 128, 128, mx.float16)
VARIANT = shared_variant(SHAPE)


def readers_of(tables: Sequence[Sequence[int]], contexts: Sequence[int], counts: Sequence[int] = ()) -> Readers:
    wide = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(wide, tables, strict=True):
        row[: len(table)] = table
    sizes = np.array(counts or [1] * len(tables), np.int32)
    return Readers(wide, np.cumsum(sizes, dtype=np.int32) - sizes, sizes, np.array(contexts, np.int32))


def alike(count: int, num_shared: int, num_blocks: int) -> Readers:
    """Requests with so many leading blocks in common."""
    tables = np.arange(count * num_blocks).reshape(count, num_blocks)
    tables[:, :num_shared] = tables[0, :num_shared]
    return readers_of(tables.tolist(), [num_blocks * 32] * count)


def found(readers: Readers) -> list[tuple[int, int, list[int]]]:
    return [(run.first, run.end, run.members.tolist()) for run in find_runs(readers)]


def work_of(readers: Readers, runs: list[Run], window: int | None = None, num_cores: int = 16) -> SharedWork:
    return make_shared_work(readers, runs, window, SHAPE, VARIANT, num_cores)


def num_kv_rows(work: SharedWork) -> int:
    """Tokens whose K and V under one KV head are loaded, each time that they are."""
    return int((work.items[:, 2] - work.items[:, 1]).sum()) * shared_tiles(SHAPE, VARIANT)


# ---- runs


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MIN_BLOCKS", 1)
    readers = readers_of([[7, 3, 9, 4], [7, 3, 9, 5], [7, 3, 6], [2, 8, 1]], [120, 125, 80, 70])
    assert found(readers) == [(0, 2, [0, 1, 2]), (2, 3, [0, 1])]
    work = work_of(readers, find_runs(readers), num_cores=1)
    assert [[*item[:3], item[5]] for item in work.items.tolist()] == [
        [0, 0, 64, 3],
        [0, 64, 96, 2],
        [0, 96, 120, 1],
        [1, 96, 125, 1],
        [2, 64, 80, 1],
        [3, 0, 70, 1],
    ]
    assert num_kv_rows(work) == 235
    assert np.diff(work.starts).tolist() == [3, 3, 2, 1]


def test_a_run_is_of_whole_blocks_that_all_rows_see() -> None:
    table = list(range(9))
    assert found(readers_of([table, table], [288, 288])) == [(0, 9, [0, 1])]
    assert found(readers_of([table, table], [288, 287])) == [(0, 8, [0, 1])]
    assert found(readers_of([table, table], [288, 288], [1, 2])) == [(0, 8, [0, 1])]
    assert found(readers_of([table, table], [288, 127])) == []


def test_short_runs_are_part_of_what_follows_them() -> None:
    """All share two blocks, which is too few to read apart; two of them share eight."""
    base = [100, 101]
    tables = [base + [10 * r + i for i in range(8)] for r in range(3)]
    tables.append([*tables[0][:8], 70, 71])
    assert found(readers_of(tables, [320, 160, 160, 320])) == [(0, 8, [0, 3])]


def test_what_saves_little_is_not_shared() -> None:
    assert found(alike(16, 32, 100)) == [(0, 32, list(range(16)))]
    assert found(alike(16, 32, 125)) == []
    assert found(alike(16, 0, 100)) == []
    assert found(alike(1, 32, 100)) == []
    assert found(readers_of([[0]], [0])) == []


def test_there_are_few_runs_however_tables_branch() -> None:
    """Each request leaves the others four blocks later than the one before."""
    tables = np.arange(64 * 300).reshape(64, 300)
    for row in range(1, 64):
        tables[row, : 4 * (64 - row)] = tables[row - 1, : 4 * (64 - row)]
    assert len(find_runs(readers_of(tables.tolist(), [9600] * 64))) <= 16


# ---- items


def check_cover(readers: Readers, work: SharedWork, window: int | None) -> None:
    """Each row's items are what it sees, once, in the order of its partial results; the first counts the sinks."""
    seen: dict[int, list[tuple[int, int, int, int]]] = {}
    for table, first, end, is_first, entry, size, _, _ in work.items.tolist():
        assert 1 <= size <= rows_at_once(SHAPE, VARIANT)
        for query, result, low, high in work.rows[entry : entry + size].tolist():
            owner = int(np.searchsorted(readers.queries, query, side="right")) - 1
            blocks = slice(first // 32, -(-end // 32))
            assert (readers.tables[table, blocks] == readers.tables[owner, blocks]).all()
            context = int(readers.contexts[owner] - readers.counts[owner] + 1 + query - readers.queries[owner])
            assert (low, high) == (0 if window is None else max(0, context - window), context)
            seen.setdefault(query, []).append((result, max(first, low), min(end, high), is_first))
    assert sorted(seen) == readers.rows.tolist()
    results = sorted(result for parts in seen.values() for result, *_ in parts)
    assert results == list(range(len(work.rows)))
    for row, query in enumerate(readers.rows.tolist()):
        parts = sorted(seen[query])
        assert [part[0] for part in parts] == list(range(work.starts[row], work.starts[row + 1]))
        assert [part[3] for part in parts] == [1] + [0] * (len(parts) - 1)
        visible = [token for _, first, end, _ in parts for token in range(first, end)]
        (entry,) = {tuple(rest) for q, _, *rest in work.rows.tolist() if q == query}
        assert visible == list(range(*entry))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("window", [None, 1, 40, 400])
def test_every_row_sees_each_of_its_tokens_once(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 24))
    contexts = rng.integers(16, 700, count)
    counts = rng.integers(1, 1 + np.minimum(contexts, 16))
    tables = np.arange(count * 22).reshape(count, 22)
    for row in range(1, count):
        shared = int(rng.integers(0, 22))
        tables[row, :shared] = tables[rng.integers(0, row), :shared]
    readers = readers_of(tables.tolist(), contexts.tolist(), counts.tolist())
    runs = find_runs(readers) if window is None else []
    check_cover(readers, work_of(readers, runs, window, int(rng.integers(1, 41))), window)


def test_the_shared_part_of_16_requests_is_read_twice() -> None:
    """Eight rows of four heads each fit a threadgroup."""
    readers = alike(16, 32, 40)
    apart, together = (num_kv_rows(work_of(readers, runs)) for runs in ([], find_runs(readers)))
    assert (apart, together) == (16 * 1280, 2 * 1024 + 16 * 256)


def test_items_fill_the_gpu_and_are_no_longer_than_an_even_share() -> None:
    for readers in (alike(16, 32, 40), alike(64, 64, 80), alike(2, 100, 101)):
        items = work_of(readers, find_runs(readers), num_cores=16).items
        longest = (items[:, 2] - items[:, 1]).max()
        total = (items[:, 2] - items[:, 1]).sum()
        assert longest <= max(total / 16 + 32, 128)
