"""Small engines for tests: tiny random models with small pools, and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.runtime.models.loader import LoadedModel
from tests.tiny_models import (
    VOCAB_SIZE,
    TinyModel,
    byte_tokenizer,
    reference_generate,
    save_model_folder,
    tiny_model,
)

NATIVE_BACKEND = "cpu" if mx.default_device() == mx.cpu else "auto"
BACKENDS = ("reference", NATIVE_BACKEND)
on_the_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="is about MLX computing on the CPU")


@lru_cache(maxsize=1)
def built(architecture: str) -> TinyModel:
    """A tiny model, built once for successive tests of one architecture."""
    return tiny_model(architecture)


def make_llm(architecture: str, **settings: Any) -> LLM:
    """An `LLM` with a tiny model and no tokenizer. By default it does not draft, because random models repeat
    themselves and many tests count steps."""
    model, config = built(architecture)
    loaded = LoadedModel(architecture, model, dict(config), None)
    size = {} if "num_kv_blocks" in settings else {"kv_cache_memory": "8MB"}
    return LLM(loaded, **{**size, "max_model_len": 1024, "speculate": "off", **settings})


def make_folder(path: Path, architecture: str = "llama") -> Path:
    """A model folder with a tokenizer that has a token for each byte."""
    model, config = built(architecture)
    return save_model_folder(model, dict(config), path, byte_tokenizer())


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


def plain_greedy(architecture: str, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[list[int]]:
    """The answers of plain mlx-lm, one prompt at a time; computed once for all tests that ask."""
    return [list(_plain_answer(architecture, tuple(p), n)) for p, n in zip(prompts, max_tokens, strict=True)]


@cache
def _plain_answer(architecture: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return reference_generate(built(architecture).model, prompt, max_tokens).token_ids


def answers(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[list[int]]:
    """Greedy answers of the engine, all prompts in one batch."""
    done = llm.generate(prompts, [greedy(n) for n in max_tokens], use_tqdm=False)
    return [list(completion.token_ids) for completion in done]
