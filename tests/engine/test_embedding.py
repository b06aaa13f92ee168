"""Embeddings and scores of whole models: sentence-transformers' formulas, what inputs become, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.engine.embeddings import DEFAULT_INSTRUCTION, InputReader, InputTruncation, pair_up
from mlx_server.engine.library.llm import LLM
from mlx_server.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from mlx_server.request import PoolingMethod
from mlx_server.sampling_params import SamplingParams
from tests.conformance import Subject
from tests.embedders import PROMPTS, Dense, TinyEmbedder, cosine, embedder_tokenizer, save_embedder
from tests.engine_worlds import random_prompts
from tests.tiny_models import reference_generate, save_model_folder, tiny_model

TEXTS = ["a", "What is the capital of China?", "x" * 150, "The capital of China is Beijing. " * 3, "é"]
"""Of 2 to 151 tokens: within a block, across blocks, and longer than a step of 64."""


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), max_num_batched_tokens=64, max_num_seqs=8, num_kv_blocks=64, **settings)  # type: ignore[arg-type]


def check(llm: LLM, tiny: TinyEmbedder) -> None:
    for found in llm.embed(TEXTS, use_tqdm=False):
        wanted = tiny.expected(found.prompt_token_ids)
        assert found.embedding.dtype == np.float32
        assert cosine(found.embedding, wanted) >= 0.9999
        np.testing.assert_allclose(found.embedding, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", [str(method) for method in PoolingMethod])
def test_every_pooling_is_sentence_transformers(mode: str, tmp_path: Path):
    tiny = save_embedder(tmp_path / "m", "llama", mode, is_normalized=False, is_body=False)
    with open_llm(tiny.folder) as llm:
        check(llm, tiny)


def test_dense_layers_follow_the_pooling(tmp_path: Path):
    dense = [
        Dense.random(64, 96, "torch.nn.modules.activation.Tanh", has_bias=True, seed=1),
        Dense.random(96, 48, "torch.nn.modules.linear.Identity", has_bias=False, seed=2),
    ]
    tiny = save_embedder(tmp_path / "m", "qwen3", "mean_tokens", dense=dense)
    with open_llm(tiny.folder) as llm:
        check(llm, tiny)
        assert llm.embed(["a"], use_tqdm=False)[0].embedding.shape == (48,)


def test_a_model_that_looks_both_ways_does(tmp_path: Path):
    """EmbeddingGemma's form, with inputs beyond its windows."""
    dense = [Dense.random(64, 128, "torch.nn.modules.linear.Identity", has_bias=False, seed=3)]
    tiny = save_embedder(tmp_path / "m", "gemma3_text", "mean_tokens", dense=dense, use_bidirectional_attention=True)
    texts = [text[:60] for text in TEXTS]
    with open_llm(tiny.folder) as llm:
        for found in llm.embed(texts, use_tqdm=False):
            wanted = tiny.expected(found.prompt_token_ids)
            assert cosine(found.embedding, wanted) >= 0.9999
            one_way = replace(tiny, is_bidirectional=False).expected(found.prompt_token_ids)
            assert len(found.prompt_token_ids) <= 2 or cosine(found.embedding, one_way) < 0.999
        with pytest.raises(ContextLengthError, match=r"151 tokens; .* takes 64"):
            llm.embed([TEXTS[2]])
        with pytest.raises(InvalidRequestError, match="is an embedding model"):
            llm.generate(["Hi"])


@pytest.mark.parametrize("architecture", ["lfm2", "mamba2", "deepseek_v32", "plamo", "gpt_bigcode"])
def test_other_kinds_of_models_pool_and_keep_no_states(architecture: str):
    """Recurrent ones, and those of which parts or all run group by group."""
    subject = Subject(architecture)
    prompts = random_prompts((3, 130, 40))
    with subject.make_llm(pooling="mean", max_num_batched_tokens=64, max_num_seqs=8) as llm:
        found = llm.embed(prompts, use_tqdm=False)
        assert llm.stats().num_state_checkpoints == 0
    body = next(
        getattr(subject.model, name) for name in ("model", "backbone", "transformer") if hasattr(subject.model, name)
    )
    for prompt, embedding in zip(prompts, found):
        hidden = np.array(body(mx.array([prompt]), make_prompt_cache(subject.model))[0])
        assert cosine(embedding.embedding, hidden.mean(0)) >= 0.9999


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    return save_embedder(tmp_path_factory.mktemp("embedder") / "qwen3-embedding", max_seq_length=200)


@pytest.fixture(scope="module")
def llm(tiny: TinyEmbedder) -> Iterator[LLM]:
    with open_llm(tiny.folder) as llm:
        yield llm


def test_nothing_is_kept_of_inputs(llm: LLM):
    llm.embed(TEXTS * 10, use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_cached_blocks, stats.num_free_blocks) == (0, stats.num_blocks)
    assert stats.num_generated_tokens == 0


def test_dimensions_are_cut_and_then_normalised(llm: LLM, tiny: TinyEmbedder):
    (found,) = llm.embed(["hello"], dimensions=10, use_tqdm=False)
    np.testing.assert_allclose(found.embedding, tiny.expected(found.prompt_token_ids, 10), atol=1e-5)
    assert np.linalg.norm(found.embedding) == pytest.approx(1.0)
    for dimensions in (0, 65):
        with pytest.raises(InvalidRequestError, match=f"dimensions is {dimensions}; .* 1 to 64"):
            llm.embed(["hello"], dimensions=dimensions)


def test_dimensions_that_a_model_was_not_trained_for_are_refused(tmp_path: Path):
    tiny = save_embedder(tmp_path / "m", matryoshka_dimensions=[16, 32])
    with open_llm(tiny.folder) as llm:
        assert llm.embed(["a"], dimensions=16, use_tqdm=False)[0].embedding.shape == (16,)
        with pytest.raises(InvalidRequestError, match="may have 16, 32"):
            llm.embed(["a"], dimensions=20)


def test_prompts_go_before_texts_by_their_names(llm: LLM):
    plain, asked = (llm.embed(["hello"], prompt_name=name, use_tqdm=False)[0] for name in (None, "query"))
    encode = llm.engine.tokenizer.encode
    assert plain.prompt_token_ids == tuple(encode("hello"))
    assert asked.prompt_token_ids == tuple(encode(PROMPTS["query"] + "hello"))
    with pytest.raises(InvalidRequestError, match=r"prompt_name is 'querry'; .* document, query; did you mean query"):
        llm.embed(["hello"], prompt_name="querry")


def test_what_is_cut_is_the_text_and_not_its_end_token(llm: LLM):
    end_id = llm.engine.tokenizer.encode("")[0]
    (found,) = llm.embed(["abcdefgh"], truncate_prompt_tokens=5, use_tqdm=False)
    assert found.prompt_token_ids == (*b"abcd", end_id) or llm.engine.tokenizer.decode(found.prompt_token_ids) == "abcd"
    assert found.prompt_token_ids[-1] == end_id
    (longest,) = llm.embed(["b" * 5000], truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(longest.prompt_token_ids) == 200
    assert longest.prompt_token_ids[-1] == end_id


class MergingTokenizer:
    """With special tokens, a text's first token is another one."""

    def part_of(self, text: str, *_: object, **__: object) -> str:
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, 50, 60, 70, 2] if add_special_tokens else [40, 60, 70]


@pytest.mark.parametrize(("side", "kept"), [("right", [1, 50, 60]), ("left", [60, 70, 2])])
def test_special_tokens_that_cannot_be_told_apart_are_cut_like_the_text(side: str, kept: list[int]):
    reader = InputReader(MergingTokenizer(), "m", 100, 320)  # type: ignore[arg-type]
    assert reader.of_text("abc", InputTruncation(3, side), "input") == kept  # type: ignore[arg-type]


def test_one_text_is_paired_with_any_number():
    assert pair_up(["q"], ["d"] * 300)[0] == [("q", "d")] * 300


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["hi", "y" * 200], r"prompts\[1\] has 201 tokens; .* takes 200"),
        (["z" * 100_000], "has more than .* takes 200"),
        (["hi", ""], r"prompts\[1\] is an empty text"),
        ([[]], "has no tokens"),
        ([[1, 5000]], "token id 5000; ids are 0 to 319"),
    ],
)
def test_wrong_inputs_are_named(llm: LLM, inputs: list[str], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        llm.embed(inputs)


def test_scores_of_an_embedder_are_cosines_with_the_prompts_of_both_sides(llm: LLM, tiny: TinyEmbedder):
    documents = ["one", "two", "one"]
    scores = llm.score("what?", documents, use_tqdm=False)
    encode = llm.engine.tokenizer.encode
    query = tiny.expected(encode(PROMPTS["query"] + "what?"))
    wanted = [cosine(query, tiny.expected(encode(document))) for document in documents]
    assert scores == pytest.approx(wanted, abs=1e-4)
    assert llm.score(["what?"], documents, use_tqdm=False) == pytest.approx(wanted, abs=1e-4)
    with pytest.raises(InvalidRequestError, match="text_1 has 2 texts and text_2 3"):
        llm.score(["what?", "who?"], documents)


def test_a_reranker_scores_by_yes_and_no(tmp_path: Path):
    model = tiny_model("qwen3")
    folder = save_model_folder(model.model, model.config, tmp_path / "Qwen3-Reranker-tiny", embedder_tokenizer())
    with LLM(str(folder), max_num_batched_tokens=256, num_kv_blocks=64) as llm:
        documents = ["Beijing", "Gravity is a force. " * 20]
        scores = llm.score("What is the capital of China?", documents, use_tqdm=False)
        tokenizer = llm.engine.tokenizer
        for document, score in zip(documents, scores):
            text = (
                "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
                f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: What is the capital of China?\n<Document>: {document}"
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
            logits = np.array(model.model(mx.array([tokenizer.encode(text, add_special_tokens=False)]))[0, -1])
            no, yes = (logits[tokenizer.token_to_id(word)] for word in ("no", "yes"))
            assert score == pytest.approx(np.exp(yes) / (np.exp(yes) + np.exp(no)), abs=1e-5)
        with pytest.raises(InvalidRequestError, match="is no embedding model"):
            llm.embed(["a"])
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)[0].token_ids


def test_any_causal_model_embeds_by_its_last_token_on_request(tmp_path: Path):
    model = tiny_model("llama")
    folder = save_model_folder(model.model, model.config, tmp_path / "m", embedder_tokenizer())
    prompt = list(range(1, 40))
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match="start this one with --pooling last"):
        llm.embed([prompt])
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match="cannot rank"):
        llm.score("a", ["b"])
    with open_llm(folder, pooling="last") as llm:
        (found,) = llm.embed([prompt], use_tqdm=False)
        last = np.array(model.model.model(mx.array([prompt]))[0, -1])
        np.testing.assert_allclose(found.embedding, last / np.linalg.norm(last), atol=1e-5)
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0.0), use_tqdm=False)
        assert list(answer.token_ids) == reference_generate(model.model, prompt, 5).token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "max_tokens"}, "has the pooling max_tokens"),
        ({"modules": ["Transformer", "Pooling", "LSTM"]}, "has a module LSTM"),
        ({"dense": [Dense.random(64, 8, "torch.nn.SiLU", has_bias=False, seed=1)]}, "has the activation SiLU"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: dict[str, object], message: str, tmp_path: Path):
    tiny = save_embedder(tmp_path / "m", **change)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=message):
        open_llm(tiny.folder)


def test_a_head_that_classifies_is_refused_by_name(tmp_path: Path):
    tiny = save_embedder(tmp_path / "m")
    weights = mx.load(str(tiny.folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(tiny.folder / "model.safetensors"), {**weights, "score.weight": mx.zeros((1, 64))})
    with pytest.raises(ModelLoadError, match=r"classifies sequences \(score.weight\)"):
        open_llm(tiny.folder)


def test_pooling_off_refuses_what_gives_no_text(tmp_path: Path):
    tiny = save_embedder(tmp_path / "m", "gemma3_text", "mean_tokens", use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention"):
        open_llm(tiny.folder, pooling="off")


def test_files_that_are_broken_are_named(tmp_path: Path):
    tiny = save_embedder(tmp_path / "m")
    (tiny.folder / "modules.json").write_text(json.dumps({"idx": 0}))
    with pytest.raises(ModelLoadError, match=r"Cannot read .*modules.json"):
        open_llm(tiny.folder)


def test_texts_are_paired_with_one_or_with_as_many():
    assert pair_up(["a"], ["b", "c"]) == ([("a", "b"), ("a", "c")], ("text_1", "text_2[{}]"))
    assert pair_up(["a", "b"], ["c", "d"])[0] == [("a", "c"), ("b", "d")]
    with pytest.raises(InvalidRequestError, match=r"^text_1 has 2 texts and text_2 1: send one for all") as caught:
        pair_up(["a", "b"], ["c"])
    assert caught.value.param == "text_1"
