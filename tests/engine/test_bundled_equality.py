"""The bundled model answers as plain mlx-lm does, token for token, alone and in a batch, cold and warm.

In float32 on the CPU. A tie could be decided by float order; these prompts have none in their first tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_server import LLM
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.runtime.models.loader import load
from tests.engine_worlds import answers, on_the_cpu
from tests.tiny_models import reference_generate

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at",
)
NUM_TOKENS = 8


@pytest.mark.slow
@on_the_cpu
def test_greedy_answers_equal_mlx_lms(bundled_model: Path) -> None:
    loaded = load(str(bundled_model))
    tokenizer = Tokenizer.from_folder(bundled_model)
    head = tokenizer.encode("You are a helpful assistant. Answer the question as well as you can. " * 3)
    prompts = [head + tokenizer.encode(text) for text in PROMPTS]
    wanted = [reference_generate(loaded.model, prompt, NUM_TOKENS).token_ids for prompt in prompts]
    lengths = [NUM_TOKENS] * len(prompts)
    with LLM(loaded, num_kv_blocks=64, max_chunk_tokens=24) as llm:
        assert [answers(llm, [prompt], [NUM_TOKENS])[0] for prompt in prompts] == wanted
        assert answers(llm, prompts, lengths) == wanted
        assert llm.stats().num_prefix_hit_tokens > 0
        assert llm.engine.reset_prefix_cache()
        assert answers(llm, prompts, lengths) == wanted
