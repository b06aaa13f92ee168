"""This project's engine, as a system to compare: the same offline `LLM` that users have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlx_server import LLM, SamplingParams
from mlx_server.bench.systems import Generated
from mlx_server.bench.workloads import Workload
from mlx_server.runtime.models.loader import LoadedModel

_POOLS_BESIDE_MLX = frozenset({"cpu"})
"""Backends whose pools MLX's own count of memory does not see."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One setting of the engine; the fields are `LLM`'s."""

    model: LoadedModel
    attention_backend: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: str

    @property
    def label(self) -> str:
        return f"mlx-serve, {self.attention_backend}"

    @contextmanager
    def session(self) -> Iterator[Callable[[Workload], Generated]]:
        """An engine of its own on the shared weights: its prefix cache starts empty."""
        with LLM(
            self.model,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory=self.kv_cache_memory,
            attention_backend=self.attention_backend,
        ) as llm:
            yield lambda workload: _generate(llm, workload)


def _generate(llm: LLM, workload: Workload) -> Generated:
    completions = llm.generate(
        [request.prompt_token_ids for request in workload.requests],
        [
            SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
            for request in workload.requests
        ],
        progress=False,
    )
    return Generated(
        token_ids=tuple(completion.token_ids for completion in completions),
        num_cached_tokens=sum(completion.num_cached_tokens for completion in completions),
        num_host_bytes=_host_bytes(llm),
    )


def _host_bytes(llm: LLM) -> int:
    """What the pool takes beside MLX: such pools cost nothing before a block is written."""
    if llm.info.backend not in _POOLS_BESIDE_MLX:
        return 0
    return llm.stats().num_cached_blocks * llm.info.block_bytes
