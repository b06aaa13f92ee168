"""A model's memory is the system's again when it is unloaded."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import psutil
import pytest

from mlx_server import LLM
from tests.engine_worlds import greedy, on_the_cpu

TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)

pytestmark = [on_the_cpu, pytest.mark.skipif(TRIM is None, reason="is about glibc's arenas")]


def test_the_c_library_keeps_nothing_of_a_closed_model(bundled_model: Path) -> None:
    assert TRIM is not None
    TRIM(0)
    with LLM(str(bundled_model), num_kv_blocks=64, max_model_len=512) as llm:
        llm.generate([[7] * 200] * 2, greedy(4), use_tqdm=False)
    del llm
    gc.collect()
    process = psutil.Process()
    kept = process.memory_info().rss
    TRIM(0)
    assert kept - process.memory_info().rss < 48 * 2**20
