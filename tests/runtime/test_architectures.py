"""Every model file of mlx-lm: served with plain mlx-lm's answers, or refused at load with the reason.

`python -m tests.runtime.test_architectures` prints the table.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_server import LLM
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.models import vlm
from mlx_server.runtime.models.loader import LoadedModel
from tests import metal_stand_ins
from tests.architectures import ARCHITECTURES, BROKEN, LEVELS, NEEDS_METAL, RECURRENT, REFUSED, config_of
from tests.conformance import CROWDED, HEADER, Subject, answer, check_crowd, worst_error
from tests.device_memory import active_bytes
from tests.engine_worlds import BACKENDS, random_prompts
from tests.tiny_models import byte_tokenizer, describe_model_folder, save_model_folder

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "architectures.md"
TOLERANCE = 5e-5
MAX_TRACED_BYTES = 4096
"""What tracing a tiny model may compute: constants like frequencies of rope. Its weights take more."""

MAX_SURPLUS_BYTES = CROWDED["num_kv_blocks"]
"""What is estimated beyond what is there: of a model that keeps nothing in blocks, a byte for each of them."""

CHOOSES_ON_THE_HOST = {"dbrx"}
"""Models that cannot be traced without being computed, since their code looks at which experts are chosen."""

SERVED = [name for name in ARCHITECTURES if name not in REFUSED]
"""Without those that need Metal, which may not be there."""

ALIKE = {
    *("apertus", "cohere", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "gemma", "glm", "glm4", "glm4_moe"),
    *("granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm3", "Klear", "lille-130m"),
    *("mimo", "minicpm", "mistral3", "nanochat", "nemotron", "olmo2", "olmoe", "phi", "phi3"),
    *("pixtral", "qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3"),
    *("solar_open", "stablelm", "starcoder2", "talkie", "telechat3"),
}
"""Model files whose layers keep what Llama's or Qwen3's with experts keep, and read a batch as these do."""

NO_MODELS = {
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"),
    "switch_layers",
}
"""Modules beside the models, which they share."""


def test_the_table_names_every_model_file():
    """If this fails, mlx-lm has a new architecture: give it a configuration in `tests/architectures.py`."""
    files = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    assert files - NO_MODELS == {*ARCHITECTURES, *NEEDS_METAL, *BROKEN}


def test_the_documentation_names_every_model_file_where_it_belongs():
    rows = dict(
        re.findall(r"^\| \*\*(.+?)\*\* \|.*\| (.*) \|$", DOCUMENTATION.read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = {kind: set(names.split(", ")) for kind, names in rows.items()}
    wanted = {level: {name for name in SERVED if LEVELS.get(name, "ragged") == level} for level in set(LEVELS.values())}
    wanted |= {"ragged": {name for name in SERVED if name not in LEVELS}, "refused": {*REFUSED, *BROKEN}}
    assert named == wanted | {"on Macs only": set(NEEDS_METAL)}


def test_at_least_110_model_files_are_served():
    assert len(SERVED) >= 110


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in SERVED]
)
def test_answers_in_a_crowd_are_those_given_alone(architecture: str, tmp_path: Path) -> None:
    """And what its pools take was estimated from the configuration alone, without reading weights."""
    estimated = estimate(architecture, tmp_path)
    row = check_crowd(Subject(architecture))
    print(HEADER, row, sep="\n")
    assert 0 <= estimated - row.pool_bytes <= MAX_SURPLUS_BYTES
    assert row.worst_error <= TOLERANCE
    assert row.level == LEVELS.get(architecture, "ragged")
    assert row.is_recurrent == (architecture in RECURRENT)
    if not row.level.startswith("whole model"):
        assert row.calls_per_step == 1


def estimate(architecture: str, folder: Path) -> int:
    """What the first pools of `CROWDED` will take, estimated from a folder that has no more than a configuration."""
    settings = Config(
        model=ModelConfig(model=str(describe_model_folder(config_of(architecture), folder))),
        cache=CacheConfig(num_kv_blocks=CROWDED["num_kv_blocks"]),
        scheduler=SchedulerConfig(max_num_seqs=CROWDED["max_num_seqs"]),
    )
    held = active_bytes()
    mx.reset_peak_memory()
    num_bytes = estimate_need(settings).kv_bytes
    if architecture not in CHOOSES_ON_THE_HOST:
        assert mx.get_peak_memory() - held < MAX_TRACED_BYTES, "the model was computed"
    return num_bytes


SCENARIOS = {
    "alone": {"max_num_seqs": 1},
    "synchronous": {"max_num_seqs": 3, "async_scheduling": False},
    "chunks of 7": {"max_num_seqs": 2, "max_chunk_tokens": 7},
    "crowded": CROWDED,
}


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", SERVED)
def test_answers_are_those_given_alone_however_they_come_about(architecture: str, backend: str) -> None:
    """Each prompt twice, so that prefixes hit in the second round."""
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((33, 1, 70, 40, 5), seed=1), (7, 9, 3, 26, 2)
    wanted = subject.wanted(prompts, max_tokens)
    for name, settings in SCENARIOS.items():
        with subject.make_llm(attention_backend=backend, **settings) as llm:
            for _ in range(2):
                assert worst_error(answer(llm, prompts, max_tokens), wanted) <= TOLERANCE, name


def test_sparse_attention_stays_sparse_where_the_probe_is_too_short_for_it() -> None:
    """The probe's prompts fit into the blocks that this model chooses."""
    config = config_of("minimax_m3_vl")
    config["text_config"] |= {"index_topk_blocks": 8}
    subject = Subject("minimax_m3_vl", config)
    prompts, max_tokens = random_prompts((150, 90)), (6, 6)
    with subject.make_llm() as llm:
        assert llm.info.level == LEVELS["minimax_m3_vl"]
        assert worst_error(answer(llm, prompts, max_tokens), subject.wanted(prompts, max_tokens)) <= TOLERANCE


@pytest.mark.parametrize("architecture", ["internlm2", "internlm3", "llama"])
def test_dynamic_scaling_for_contexts_that_are_not_served_costs_nothing(architecture: str, tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    subject = Subject(architecture, {**config_of(architecture), "rope_scaling": scaling})
    folder = save_model_folder(subject.model, subject.config, tmp_path / "m", byte_tokenizer())
    prompts, max_tokens = random_prompts((70, 33, 5)), (6, 9, 12)
    wanted = subject.wanted(prompts, max_tokens)
    with LLM(str(folder), num_kv_blocks=32, dtype="float32") as llm:
        assert llm.info.level == "ragged"
        assert worst_error(answer(llm, prompts, max_tokens), wanted) <= TOLERANCE


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_differs_is_refused_at_load(architecture: str, tmp_path: Path) -> None:
    subject = Subject(architecture)
    config = {name: value for name, value in subject.config.items() if value is not None}
    folder = save_model_folder(subject.model, config, tmp_path / "m", byte_tokenizer())
    with pytest.raises(ModelLoadError, match=REFUSED[architecture]):
        LLM(str(folder), num_kv_blocks=32)


@pytest.mark.skipif(mx.metal.is_available(), reason="where Metal is, the probe at load decides")
@pytest.mark.parametrize("architecture", NEEDS_METAL)
def test_metal_kernels_are_missed_before_weights_are_read(architecture: str, tmp_path: Path) -> None:
    folder = describe_model_folder(config_of(architecture), tmp_path)
    with pytest.raises(ModelLoadError, match=f"Models of type {architecture} run on Macs only: .* no Metal"):
        LLM(str(folder))


@pytest.mark.parametrize("architecture", NEEDS_METAL)
def test_with_stand_ins_for_its_kernels_it_is_served(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal_stand_ins.install(monkeypatch)
    estimated = estimate(architecture, tmp_path)
    row = check_crowd(Subject(architecture))
    assert (row.level, row.calls_per_step) == ("ragged", 1)
    assert row.pool_bytes == estimated
    assert row.worst_error <= TOLERANCE


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """mlx-lm's module ends the process where it is missing."""
    folder = describe_model_folder(config_of("olmo"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"Models of type olmo are not served: .* the package ai2-olmo"):
        LLM(str(folder))


def test_what_fails_in_mlx_lm_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))
    folder = describe_model_folder(config_of("olmo"), tmp_path)
    try:
        with pytest.raises(ModelLoadError, match="Models of type olmo do not run in mlx-lm itself: ValueError: "):
            LLM(str(folder))
    finally:
        sys.modules.pop("mlx_lm.models.olmo", None)


class Picky(nn.Module):
    """Knows one token only."""

    model_type = "picky"

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        if inputs.any():
            raise ValueError("there is no such token")
        rows = mx.zeros((1, 1, inputs.shape[1], 8))
        cache[0].update_and_fetch(rows, rows)
        return mx.zeros((*inputs.shape, 8))


def test_what_fails_for_some_tokens_only_is_refused_too() -> None:
    with pytest.raises(ModelLoadError, match=r"Models of type picky do not run in mlx-lm itself: .* no such token"):
        LLM(LoadedModel("picky", Picky(), {"vocab_size": 8}, None), max_model_len=64)


class Uncached(Picky):
    def make_cache(self) -> list[KVCache]:
        return self.make_cache()


def test_what_fails_to_make_its_caches_is_refused_too() -> None:
    with pytest.raises(ModelLoadError, match="Models of type picky do not run in mlx-lm itself: RecursionError"):
        LLM(LoadedModel("picky", Uncached(), {"vocab_size": 8}, None), max_model_len=64)


class OneCache(nn.Module):
    """A model with a cache of some kind. If that is for recurrent states, it keeps all that it has seen in it."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self._cache = cache

    def make_cache(self) -> list[Any]:
        return [self._cache]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if isinstance(cache[0], ArraysCache):
            seen = cache[0][0]
            cache[0][0] = inputs if seen is None else mx.concatenate([seen, inputs], axis=1)
        return mx.zeros((*inputs.shape, 8))


class Ring(KVCache):
    """Keeps the last tokens only, by an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 8


class Masked(KVCache):
    """Hides tokens."""

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


class Growing(KVCache):
    """Only grows in other steps."""

    step = 512


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (Ring(), "Layer 0 keeps its state in a Ring, which is not supported"),
        (Masked(), "Layer 0 keeps its state in a Masked, which is not supported"),
        (Growing(), "Layer 0 has a cache but stores nothing in it"),
        (ArraysCache(1), "Layer 0 keeps a recurrent state that grows after 9 tokens"),
        (RotatingKVCache(64, keep=4), "Layer 0 keeps its first 4 tokens outside its sliding window"),
        (CacheList(KVCache(), QuantizedKVCache()), "Layer 0 keeps its state in a QuantizedKVCache"),
        (KVCache(), "Layer 0 has a cache but stores nothing in it"),
    ],
)
def test_caches_that_cannot_be_paged_are_named(cache: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        discover_layers(OneCache(cache))


@pytest.mark.parametrize(
    ("is_installed", "remedy"),
    [
        (True, "Neither mlx-lm nor mlx-vlm knows it: update them, or convert the model"),
        (False, "mlx-lm does not know it; mlx-vlm may, but is not installed: pip install"),
    ],
)
def test_an_unknown_type_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool, remedy: str
) -> None:
    if is_installed:
        pytest.importorskip("mlx_vlm")
    else:
        monkeypatch.setattr(vlm, "is_installed", lambda: False)
    folder = describe_model_folder(config_of("llama") | {"model_type": "nonsense"}, tmp_path)
    with pytest.raises(ModelLoadError, match=f"Model type nonsense not supported\\. {remedy}"):
        LLM(str(folder))


def main() -> None:
    print(HEADER)
    for name in SERVED:
        print(check_crowd(Subject(name)), flush=True)
    for name, reason in REFUSED.items():
        print(f"{name:22} refused: {reason}")
    for name in NEEDS_METAL:
        print(f"{name:22} on Macs only")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
