"""Requests of one batch, each with an adapter of its own or none, are answered as mlx-lm answers each of them alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_server import LLM
from mlx_server.config import BLOCK_SIZE, Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ConfigError, InvalidRequestError, ModelLoadError, ModelNotFoundError
from mlx_server.model_entries import Adapter
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.cache_views import UnpageableError, row_groups
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.adapters import NONE, AdaptedLinear, AdapterRows, ColumnLayout, LowRank, install_adapters
from mlx_server.runtime.models.loader import load, load_in_pieces
from tests.adapter_files import plain_model, save_adapter, write_adapter, write_model
from tests.conformance import CROWDED, NUM_LOGPROBS, Answers, Subject, preempt_every, worst_error
from tests.engine_worlds import greedy, random_prompts
from tests.runtime.test_architectures import SERVED
from tests.tiny_models import Reference, reference_generate, save_model_folder

LENGTHS = (60, 61, 70, 63, 1, 5, 33)
MAX_TOKENS = (8, 6, 3, 6, 4, 12, 5)
ADAPTERS = ("wide", None, "late", "wide", "late", None, "wide")
"""Of the prompts of those lengths."""


def two_adapters(folder: Path, tmp_path: Path) -> dict[str, Path]:
    """Of different ranks, scales and layers."""
    return {
        "wide": write_adapter(folder, tmp_path / "wide", rank=6, scale=3.0, seed=1),
        "late": write_adapter(folder, tmp_path / "late", rank=2, scale=8.0, num_layers=1, seed=2),
    }


def settings_of(adapters: dict[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in adapters.items()}


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], adapters: Sequence[str | None]
) -> Answers:
    before = llm.stats().num_preemptions
    params = [greedy(n, logprobs=NUM_LOGPROBS) for n in max_tokens]
    completions = llm.generate(prompts, params, adapters=adapters, use_tqdm=False)
    return Answers(completions, llm.stats().num_preemptions - before, 0, 0)


def wanted(
    folder: Path,
    paths: dict[str, Path],
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    adapters: Sequence[str | None],
) -> list[Reference]:
    """mlx-lm's own answers, from a model for each adapter."""
    models = {name: plain_model(folder, None if name is None else paths[name]) for name in dict.fromkeys(adapters)}
    return [reference_generate(models[a], p, n) for p, n, a in zip(prompts, max_tokens, adapters, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "level"),
    [
        ("qwen3", "ragged"),
        ("qwen3_moe", "ragged"),
        ("gpt_oss", "ragged"),
        ("qwen3_5", "recurrent mixers"),
        ("nemotron_h", "recurrent mixers"),
        ("deepseek_v3", "mixers"),
        ("gemma2", "mixers, one request at a time"),
        ("mistral4", "whole model"),
    ],
)
def test_a_mixed_batch_answers_as_mlx_lm_does_with_each_adapter_alone(
    architecture: str, level: str, tmp_path: Path
) -> None:
    """Prompts come in chunks, requests join, leave and are preempted; then the same prompts again, from the cache."""
    folder = write_model(architecture, tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = wanted(folder, paths, prompts, MAX_TOKENS, ADAPTERS)
    plain = wanted(folder, paths, prompts, MAX_TOKENS, [None] * len(prompts))
    for adapter, tuned, base in zip(ADAPTERS, expected, plain, strict=True):
        change = mx.abs(tuned.logits[0] - base.logits[0]).max() / mx.abs(base.logits[0]).max()
        assert change == 0 if adapter is None else change > 1e-2
    with LLM(str(folder), adapters=settings_of(paths), **CROWDED) as llm:
        assert llm.info.level == level
        preempt_every(7, llm.engine.scheduler)
        first = answer(llm, prompts, MAX_TOKENS, ADAPTERS)
        assert first.num_preemptions > 0
        assert worst_error(first, expected) < 1e-4
        assert worst_error(answer(llm, prompts, MAX_TOKENS, [None] * len(prompts)), plain) < 1e-4
        again = answer(llm, prompts[2:3], MAX_TOKENS[2:3], ADAPTERS[2:3])
        assert worst_error(again, expected[2:3]) < 1e-4


WITHOUT_ADAPTERS = {
    "afm7": "mlx-lm does not find the parameters of its own layers in the file",
    "gemma3n": "the model reads the weight of a layer that has an adapter",
    "kimi_k3": "the model reads the weight of a layer that has an adapter",
    "recurrent_gemma": "mlx-lm's model cannot be frozen",
}
"""Served, but not with adapters of mlx-lm, in plain mlx-lm either."""


@pytest.mark.full
@pytest.mark.parametrize("architecture", [name for name in SERVED if name not in WITHOUT_ADAPTERS])
def test_every_architecture_has_adapters(architecture: str, tmp_path: Path) -> None:
    subject = Subject(architecture)
    folder = save_model_folder(subject.model, subject.config, tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = wanted(folder, paths, prompts, MAX_TOKENS, ADAPTERS)
    adapters = [Adapter(name, str(path)) for name, path in paths.items()]
    loaded = replace(exhaust(load_in_pieces(ModelConfig(model="base"), folder, adapters)), folder=None)
    mx.eval(loaded.model(mx.array([[1] * 9])))  # constants that are not parameters belong to the thread that makes them
    with LLM(loaded, **CROWDED) as llm:
        assert worst_error(answer(llm, prompts, MAX_TOKENS, ADAPTERS), expected) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_quantised_layers_have_adapters(architecture: str, tmp_path: Path) -> None:
    folder = write_model(architecture, tmp_path / "base", bits=4)
    paths = two_adapters(folder, tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = wanted(folder, paths, prompts, MAX_TOKENS, ADAPTERS)
    with LLM(str(folder), adapters=settings_of(paths), **CROWDED) as llm:
        assert worst_error(answer(llm, prompts, MAX_TOKENS, ADAPTERS), expected) < 1e-4


@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_have_adapters(is_tied: bool, tmp_path: Path) -> None:
    """The head gets only the rows that sample, and those whose prompts are scored."""
    folder = write_model("llama", tmp_path / "base", tie_word_embeddings=is_tied)
    keys = ["model.embed_tokens", *([] if is_tied else ["lm_head"])]
    paths = {
        "ends": write_adapter(folder, tmp_path / "ends", keys=keys, seed=1),
        "inside": write_adapter(folder, tmp_path / "inside", keys=["mlp.up_proj", *keys[-1:]], rank=3, seed=2),
    }
    prompts, adapters = random_prompts(LENGTHS), ("ends", None, "inside", "inside", "ends", None, "ends")
    expected = wanted(folder, paths, prompts, MAX_TOKENS, adapters)
    with LLM(str(folder), adapters=settings_of(paths), **CROWDED) as llm:
        assert worst_error(answer(llm, prompts, MAX_TOKENS, adapters), expected) < 1e-4
        scored = llm.generate(prompts, greedy(1, prompt_logprobs=0), adapters=adapters, use_tqdm=False)
    model = plain_model(folder, paths["inside"])
    logits = model(mx.array([prompts[2]]))[0]
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    for position, entry in enumerate(scored[2].prompt_logprobs):
        assert entry.token.logprob == pytest.approx(logprobs[position][prompts[2][position + 1]], abs=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_no_prefix_is_shared_between_adapters(architecture: str, tmp_path: Path) -> None:
    folder = write_model(architecture, tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    prompt, other = random_prompts((3 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5))
    with LLM(str(folder), adapters=settings_of(paths), num_kv_blocks=32, max_model_len=256) as llm:

        def num_cached(adapter: str | None) -> int:
            return llm.generate([prompt], greedy(1), adapters=adapter, use_tqdm=False)[0].num_cached_tokens

        assert [num_cached(adapter) for adapter in (None, "wide", "late")] == [0, 0, 0]
        assert [num_cached(adapter) for adapter in (None, "wide", "late")] == [3 * BLOCK_SIZE] * 3
        assert llm.stats().num_prompt_tokens_computed == 3 * len(prompt) + 3
        together = llm.generate([other] * 3, greedy(1), adapters=[None, "wide", "late"], use_tqdm=False)
        assert [completion.num_cached_tokens for completion in together] == [0, 0, 0]


def test_rows_without_an_adapter_touch_none(tmp_path: Path) -> None:
    """What is multiplied with these weights is no number."""
    folder = write_model("llama", tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = wanted(folder, paths, prompts, MAX_TOKENS, [None] * len(prompts))
    loaded = load(str(folder), adapters=[Adapter(name, str(path)) for name, path in paths.items()])
    with LLM(loaded, **CROWDED) as llm:
        for name, array in tree_flatten(loaded.model.parameters()):
            if "lora" in name:
                array[...] = float("nan")
                mx.eval(array)
        assert worst_error(answer(llm, prompts, MAX_TOKENS, [None] * len(prompts)), expected) < 1e-4
        broken = answer(llm, prompts[:1], (1,), ["wide"]).completions[0]
        assert np.isnan(broken.logprobs[0].token.logprob)


def test_a_layer_computes_only_for_adapters_that_are_there() -> None:
    rows = AdapterRows(("a", "b", "c"))
    layout = ColumnLayout((0, 1, 2), (4, 2, 3))
    assert rows.columns(layout) is None
    with rows.step(np.array([NONE, NONE])):
        assert rows.columns(layout) is None
    with rows.step(np.array([1, 1, 1])):
        columns = rows.columns(layout)
        assert (columns.span, columns.owners) == (slice(4, 6), None)
        assert rows.columns(ColumnLayout((0, 2), (4, 3))) is None
    with rows.step(np.array([2, NONE, 1])):
        columns = rows.columns(layout)
        assert columns.span == slice(4, 9)
        assert columns.owners.tolist() == [1, 1, 2, 2, 2]
        kept = rows.keep_own(columns, mx.ones((3, 1, 5)))
        assert kept.squeeze(1).tolist() == [[0, 0, 1, 1, 1], [0] * 5, [1, 1, 0, 0, 0]]
        with pytest.raises(UnpageableError, match="adapters for 4 rows, of a batch 3 x 1"):
            rows.keep_own(columns, mx.ones((4, 1, 5)))
        rows.select([2, 0])
        kept = rows.keep_own(rows.columns(layout), mx.ones((2, 5)))
        assert kept.tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert rows.columns(layout) is None


def graph_of(output: mx.array) -> str:
    graph = io.StringIO()
    mx.export_to_dot(graph, output)
    return graph.getvalue()


def num_products(output: mx.array) -> int:
    return graph_of(output).count('label ="Matmul"')


@pytest.mark.parametrize("num_adapters", [1, 2, 5])
def test_a_layer_costs_two_products_however_many_adapters_a_batch_has(num_adapters: int) -> None:
    indices = range(num_adapters)
    rows = AdapterRows([str(index) for index in indices])
    parts = [LowRank(index, mx.ones((8, 2 + index)), mx.ones((2 + index, 6))) for index in indices]
    layer = AdaptedLinear(nn.Linear(8, 6, bias=False), parts, rows)
    layer.base.weight = mx.zeros((6, 8))
    x = mx.ones((num_adapters + 1, 1, 8))
    assert num_products(layer(x)) == 1
    for owners in ([0] * len(x), [NONE, *indices]):
        with rows.step(np.array(owners)):
            assert num_products(layer(x)) == 3
    with rows.step(np.array([NONE, *indices])):
        added = layer(x)
    assert added.squeeze(1).tolist() == [[0.0] * 6, *([8.0 * (2 + index)] * 6 for index in indices)]


def test_a_group_has_its_own_rows() -> None:
    tables = BlockTables()
    for name in "abc":
        tables.add(name)
    plan = tables.plan(
        [
            ScheduledChunk("a", 0, 1, (0,), ((1,),), True, 0),
            ScheduledChunk("b", 0, 1, (0,), ((2,),), True, 0),
            ScheduledChunk("c", 0, 3, (0,) * 3, ((3,),), True, 0),
        ]
    )
    decodes, chunk = row_groups(plan, batches_decodes=True)
    rows, layout = AdapterRows(("a", "b")), ColumnLayout((0, 1), (1, 1))
    with rows.step(np.array([1, NONE, 0, 0, 0])):
        with rows.group(decodes):
            columns = rows.columns(layout)
            assert rows.keep_own(columns, mx.ones((2, 1, 1))).reshape(-1).tolist() == [1, 0]
        with rows.group(chunk):
            assert rows.columns(layout).owners is None
            rows.select([2])
            assert rows.columns(layout).span == slice(0, 1)
        assert rows.columns(layout).span == slice(0, 2)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_an_adapter_that_cannot_differ_by_request_is_the_models_own(kind: str, tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "base")
    adapter = write_adapter(folder, tmp_path / "tuned", kind)
    prompts, adapters = random_prompts(LENGTHS), [None] * len(LENGTHS)
    expected = wanted(folder, {"tuned": adapter}, prompts, MAX_TOKENS, ["tuned"] * len(prompts))
    with LLM(str(folder), adapters=[str(adapter)], **CROWDED) as llm:
        assert llm.engine.model_name == "base:tuned"
        for asked in (adapters, ["tuned"] * len(prompts)):
            assert worst_error(answer(llm, prompts, MAX_TOKENS, asked), expected) < 1e-4
        with pytest.raises(ModelNotFoundError, match=r"`base:other` does not exist. The adapters of base: tuned."):
            answer(llm, prompts[:1], (1,), ["other"])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("dora", r"The adapter odd makes model\.layers\.\d+\.\S+ a DoRALinear, which cannot differ by request"),
        ("full", "The adapter odd replaces weights of the model, which cannot differ by request"),
    ],
)
def test_beside_others_it_is_refused_with_the_remedy(kind: str, what: str, tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "base")
    odd, other = write_adapter(folder, tmp_path / "odd", kind), write_adapter(folder, tmp_path / "other")
    with pytest.raises(ModelLoadError, match=rf"{what}; serve the model with this adapter alone: --adapter {odd} and"):
        LLM(str(folder), adapters=[str(other), str(odd)])


class _Router(nn.Module):
    """Experts without the layer around them that mlx-lm's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = SwitchLinear(8, 8, num_experts=2)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [_Router()]


def test_a_layer_of_another_kind_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = save_adapter(_Model(), tmp_path / "odd")
    with pytest.raises(
        ModelLoadError, match=r"The adapter odd makes layers\.0\.up_proj a LoRASwitchLinear, .* `mlx_lm\.fuse`"
    ):
        install_adapters(_Model(), (Adapter("odd", str(path)),))


def test_what_is_no_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "base")
    good = write_adapter(folder, tmp_path / "good")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"has no adapter_config.json and no adapters.safetensors; .*mlx_lm.lora"):
        LLM(str(folder), adapters=[str(good), str(tmp_path / "empty")])
    with pytest.raises(
        ModelLoadError, match="There is no folder /nowhere: an adapter is a folder, or an id of the hub"
    ):
        LLM(str(folder), adapters=["/nowhere"])
    wrong = write_adapter(write_model("qwen3", tmp_path / "other", hidden_size=32), tmp_path / "wrong")
    with pytest.raises(ModelLoadError, match=r"(?s)The adapter .*wrong does not fit the model.*does not match"):
        LLM(str(folder), adapters=[str(good), str(wrong)])


def test_one_that_gives_no_numbers_is_refused_by_name(tmp_path: Path) -> None:
    """In a batch it would spoil the answers of others."""
    folder = write_model("llama", tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    weights = mx.load(str(paths["late"] / "adapters.safetensors"))
    broken = {name: array * float("nan") for name, array in weights.items()}
    mx.save_safetensors(str(paths["late"] / "adapters.safetensors"), broken)
    with pytest.raises(ModelLoadError, match="With the adapter late the model's logits are NaN"):
        LLM(str(folder), adapters=settings_of(paths))


def test_adapters_are_named_by_their_folders_or_by_hand(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    (prompt,) = random_prompts((5,))
    with LLM(str(folder), adapters=[str(paths["wide"]), f"other={paths['late']}"], max_model_len=64) as llm:
        assert llm.engine.names.adapters == ("wide", "other")
        with pytest.raises(ModelNotFoundError, match=r"`base:late` .* The adapters of base: wide, other."):
            llm.generate([prompt], greedy(1), adapters="late", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="There are 1 prompts and 2 adapters"):
            llm.generate([prompt], greedy(1), adapters=["wide", None], use_tqdm=False)
    with pytest.raises(ConfigError, match=r"a/x and b/x are both called x; .* as OTHER=b/x"):
        LLM(str(folder), adapters=["a/x", "b/x"])
    with pytest.raises(ConfigError, match="A loaded model has its adapters already"):
        LLM(load(str(folder)), adapters=["a/x"])


def test_their_weights_are_booked_and_counted(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "base")
    paths = two_adapters(folder, tmp_path)
    sizes = [
        sum(array.nbytes for array in mx.load(str(path / "adapters.safetensors")).values()) for path in paths.values()
    ]
    named = ":".join(map(str, paths.values()))
    needs = [estimate_need(Config(model=ModelConfig(model=str(folder), adapter=text))) for text in (None, named)]
    assert needs[1].weights_bytes - needs[0].weights_bytes == sum(sizes)
    held = [load(str(folder), adapters=some).weight_bytes for some in ((), ModelConfig(adapter=named).adapters)]
    assert held[1] - held[0] == sum(sizes)


def test_the_model_is_left_whole_without_adapters(tmp_path: Path) -> None:
    model = plain_model(write_model("qwen3_moe", tmp_path / "base"))
    modules = dict(model.named_modules())
    install_adapters(model, ())
    assert dict(model.named_modules()) == modules


def test_nothing_is_kept_of_initial_weights_that_were_replaced(tmp_path: Path) -> None:
    """mlx-lm draws them for the model and for the adapter, and MLX's random state refers to what is not computed."""
    folder = write_model("llama", tmp_path / "base")
    load(str(folder), adapters=[Adapter("own", str(write_adapter(folder, tmp_path / "own")))])
    assert "->" not in graph_of(mx.random.state[0])
