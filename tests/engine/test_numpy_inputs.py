"""Token ids and parameters that come from NumPy, as data sets hold them, are those of Python to the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import SamplingParams
from tests.engine_worlds import make_llm

PLAIN: dict[str, Any] = {
    "max_tokens": 6,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.5,
    "seed": 7,
    "logit_bias": {5: 1.0},
    "stop_token_ids": (300,),
    "allowed_token_ids": tuple(range(100)),
    "logprobs": 1,
    "ignore_eos": True,
}
NUMPY: dict[str, Any] = {
    "max_tokens": np.int64(6),
    "min_tokens": np.int32(2),
    "temperature": np.float32(0.5),
    "top_k": np.int64(20),
    "top_p": np.float64(0.5),
    "seed": np.int64(7),
    "logit_bias": {np.int64(5): np.float32(1.0)},
    "stop_token_ids": np.array([300]),
    "allowed_token_ids": np.arange(100),
    "logprobs": np.int8(1),
    "ignore_eos": True,
}


def test_numpy_s_numbers_ask_for_the_same():
    assert SamplingParams(**NUMPY) == SamplingParams(**PLAIN)
    with make_llm("llama") as llm:
        prompt = [1, 2, 3, 4]
        (expected,) = llm.generate([prompt], SamplingParams(**PLAIN), use_tqdm=False)
        for ids in (np.array(prompt), [np.int64(token_id) for token_id in prompt], np.array(prompt, dtype=np.uint8)):
            (found,) = llm.generate([ids], SamplingParams(**NUMPY), use_tqdm=False)
            assert found == expected
            assert all(type(token_id) is int for token_id in found.prompt_token_ids)


@pytest.mark.parametrize("prompt", [np.array([1.0, 2.0]), [1, 2.5], [1, None], np.array([[1, 2], [3, 4]])])
def test_what_is_no_token_id_is_refused_and_the_engine_goes_on(prompt: Any):
    with make_llm("llama") as llm:
        with pytest.raises(InvalidRequestError, match="prompt must be made of integers"):
            llm.generate([prompt], use_tqdm=False)
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("name", ["seed", "max_tokens", "top_k"])
def test_parameters_that_are_no_integers_are_refused(name: str):
    with pytest.raises(InvalidRequestError, match=f"{name} must be made of integers"):
        SamplingParams(**{name: np.float64(2.5)})
