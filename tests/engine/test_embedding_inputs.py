"""How inputs are prepared, cut and refused, and how results become vectors and scores: without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_server.engine.embeddings import (
    CosineScorer,
    Embedder,
    InputReader,
    InputTruncation,
    Pooling,
    YesNoScorer,
    capabilities,
    check_generates,
    embedder_of,
    scorer_of,
)
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from mlx_server.request import PoolingMethod
from mlx_server.runtime.pooling import PoolingSpec
from tests.embedders import embedder_tokenizer
from tests.text_worlds import make_tokenizer

TOKENIZER = Tokenizer(embedder_tokenizer())
(END_ID,) = TOKENIZER.encode("")
NOT_AT_ALL, TO_THE_LIMIT = InputTruncation(), InputTruncation(-1)
PATHS = ("query", "documents[{}]")


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def reader(max_tokens: int = 10, tokenizer: Tokenizer | None = TOKENIZER) -> InputReader:
    return InputReader(tokenizer, "m", max_tokens, TOKENIZER.vocab_size)


def embedder(max_tokens: int = 10, num_dimensions: int | None = 8, **spec: Any) -> Embedder:
    return Embedder(PoolingSpec(**spec), reader(max_tokens), num_dimensions)


def as_bytes(*numbers: float) -> bytes:
    return np.array(numbers, np.float32).tobytes()


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "truncation", "options", "expected"),
    [
        ("abcdefghi", NOT_AT_ALL, {}, [*ids_of("abcdefghi"), END_ID]),
        ("abcdefghij", NOT_AT_ALL, {"add_special_tokens": False}, ids_of("abcdefghij")),
        ("abcdefghijkl", TO_THE_LIMIT, {}, [*ids_of("abcdefghi"), END_ID]),
        ("abcdefghijkl", TO_THE_LIMIT, {"num_taken": 4}, [*ids_of("abcde"), END_ID]),
        ("abcdefghijkl", InputTruncation(99), {}, [*ids_of("abcdefghi"), END_ID]),
        ("abcdefghijkl", InputTruncation(6), {"num_taken": 4}, [*ids_of("a"), END_ID]),
        ("abcdefghijkl", InputTruncation(4, "left"), {}, [*ids_of("jkl"), END_ID]),
        ("abcdefghijkl", InputTruncation(4, "left"), {"add_special_tokens": False}, ids_of("ijkl")),
        ("abc", InputTruncation(4), {}, [*ids_of("abc"), END_ID]),
    ],
)
def test_texts_are_cut_to_what_is_asked_for_and_the_limit(text, truncation, options, expected) -> None:
    assert reader().of_text(text, truncation, "input", **options) == expected


@pytest.mark.parametrize(
    ("token_ids", "truncation", "expected"),
    [
        (range(10), NOT_AT_ALL, range(10)),
        (range(12), TO_THE_LIMIT, range(10)),
        (range(12), InputTruncation(3), range(3)),
        (range(12), InputTruncation(3, "left"), range(9, 12)),
        (range(3), InputTruncation(3, "left"), range(3)),
        (range(1), InputTruncation(1), range(1)),
    ],
)
def test_ids_are_cut_as_they_are(token_ids: range, truncation: InputTruncation, expected: range) -> None:
    assert reader().of_ids(list(token_ids), truncation, "input") == list(expected)


@pytest.mark.parametrize(
    ("read", "kind", "words"),
    [
        (
            lambda: reader().of_text("abcdefghij", NOT_AT_ALL, "input"),
            ContextLengthError,
            "input has 11 tokens; m takes 10",
        ),
        (lambda: reader().of_text("abc", NOT_AT_ALL, "it", num_taken=7), ContextLengthError, "it has 11 tokens"),
        (
            lambda: reader().of_text("ab " * 99_999, NOT_AT_ALL, "it"),
            ContextLengthError,
            "it has more than [0-9]+ tokens",
        ),
        (
            lambda: reader().of_text("", NOT_AT_ALL, "it", add_special_tokens=False),
            InvalidRequestError,
            "it has no tokens",
        ),
        (
            lambda: reader().of_text("abc", InputTruncation(1), "it"),
            InvalidRequestError,
            "leaves 1 tokens, but .* adds 1",
        ),
        (
            lambda: reader().of_text("abc", InputTruncation(4), "it", num_taken=4),
            InvalidRequestError,
            "is 4, which .* above 4",
        ),
        (
            lambda: reader().of_text("abc", TO_THE_LIMIT, "it", num_taken=10),
            InvalidRequestError,
            "is -1, which leaves no",
        ),
        (lambda: reader().of_ids(list(range(11)), NOT_AT_ALL, "it"), ContextLengthError, "it has 11 tokens"),
        (lambda: reader().of_ids([], NOT_AT_ALL, "it"), InvalidRequestError, "it has no tokens"),
        (lambda: reader().of_ids([10**6], NOT_AT_ALL, "it"), InvalidRequestError, "it has the token id 1000000"),
        (lambda: reader(tokenizer=None).of_text("a", NOT_AT_ALL, "it"), InvalidRequestError, "m has no tokenizer"),
        (lambda: embedder().token_ids("", "before", NOT_AT_ALL, "it"), InvalidRequestError, "it is an empty text"),
    ],
)
def test_what_cannot_be_read_says_why(read, kind, words) -> None:
    with pytest.raises(kind, match=words):
        read()


def test_a_prompt_goes_before_texts_and_not_before_ids() -> None:
    assert embedder().token_ids("cd", "ab", NOT_AT_ALL, "it") == [*ids_of("abcd"), END_ID]
    assert embedder().token_ids("cd", "ab", NOT_AT_ALL, "it", add_special_tokens=False) == ids_of("abcd")
    assert embedder().token_ids([1, 2], "ab", NOT_AT_ALL, "it") == [1, 2]


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "default", "asked", "expected"),
    [
        ({}, None, (None, None), ""),
        ({"query": "Q: "}, None, (None, None), ""),
        ({"query": "Q: "}, "query", (None, None), "Q: "),
        ({"query": "Q: "}, "gone", (None, None), ""),
        ({"query": "Q: ", "clustering": "C: "}, "query", ("clustering", None), "C: "),
        ({"query": "Q: ", "clustering": "C: "}, None, ("clustering", "query"), "C: "),
        ({"query": "Q: "}, None, (None, "query"), "Q: "),
        ({"query": "Q: "}, None, (None, "search_query"), "Q: "),
        ({"query": "Q: ", "search_query": "S: "}, None, (None, "search_query"), "S: "),
        ({"document": "D: "}, None, (None, "passage"), "D: "),
        ({"document": "D: "}, None, (None, "search_document"), "D: "),
        ({"query": "Q: "}, "query", (None, "document"), ""),
        ({"clustering": "C: "}, None, (None, "clustering"), "C: "),
    ],
)
def test_the_prompt_is_that_of_the_name_or_of_the_input_type(prompts, default, asked, expected) -> None:
    assert embedder(prompts=prompts, default_prompt_name=default).prompt(*asked) == expected


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("querry", None), r"prompt_name is 'querry'; this model's prompts are: document, query.*query"),
        ((None, "classification"), "input_type is 'classification'; this model's prompts are: document, query"),
    ],
)
def test_an_unknown_prompt_is_refused_with_those_there_are(asked: tuple[str | None, str | None], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        embedder(prompts={"query": "Q: ", "document": ""}).prompt(*asked)
    with pytest.raises(InvalidRequestError, match="this model's prompts are: none"):
        embedder().prompt(*asked)


# --- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "num_dimensions", "allowed", "refused"),
    [
        ((), 8, (None, 1, 8), {0: "1 to 8", 9: "1 to 8"}),
        ((), None, (None, 1, 10**6), {0: "1 to all that they have"}),
        ((4, 2), 8, (None, 2, 4, 8), {3: "have 2, 4", 9: "have 2, 4"}),
    ],
)
def test_dimensions_are_those_of_the_vectors(trained, num_dimensions, allowed, refused) -> None:
    subject = embedder(num_dimensions=num_dimensions, matryoshka_dimensions=trained)
    for dimensions in allowed:
        subject.check_dimensions(dimensions)
    for dimensions, words in refused.items():
        with pytest.raises(
            InvalidRequestError, match=f"dimensions is {dimensions}; this model's vectors may {words}|{words}"
        ):
            subject.check_dimensions(dimensions)


def test_vectors_are_cut_and_then_normalised_if_the_model_s_are() -> None:
    result = as_bytes(3, 4, 12)
    assert embedder().vector(result, 2).tolist() == pytest.approx([0.6, 0.8])
    assert embedder().vector(result).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert embedder(normalizes=False).vector(result, 2).tolist() == [3, 4]
    assert embedder().vector(as_bytes(0, 0)).tolist() == [0, 0]
    assert embedder().vector(result).dtype == np.float32


@pytest.mark.parametrize("is_whole", [False, True])
def test_requests_pool_as_the_model_does(is_whole: bool) -> None:
    params = embedder(method=PoolingMethod.MEAN, is_bidirectional=is_whole).params
    assert (params.method, params.is_whole) == (PoolingMethod.MEAN, is_whole)


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizes", [False, True])
def test_cosines_do_not_depend_on_lengths_and_each_text_is_computed_once(normalizes: bool) -> None:
    scorer = CosineScorer(embedder(normalizes=normalizes))
    plan = scorer.plan([("a", "b"), ("a", "c"), ("b", "a"), ("a", "d")], PATHS, NOT_AT_ALL)
    assert plan.inputs == [[*ids_of(text), END_ID] for text in "abcd"]
    scores = plan.scores([as_bytes(2, 0), as_bytes(3, 4), as_bytes(-5, 0), as_bytes(0, 0)])
    assert scores == pytest.approx([0.6, -1.0, 0.6, 0.0])


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({"query": "Q", "document": "D"}, None, ["Qa", "Da"]),
        ({"query": "Q"}, None, ["a"]),
        ({"query": "Q"}, "query", ["Qa"]),
    ],
)
def test_both_sides_have_prompts_only_if_the_model_has_both(prompts, default, expected) -> None:
    scorer = CosineScorer(embedder(prompts=prompts, default_prompt_name=default))
    assert scorer.plan([("a", "a")], PATHS, NOT_AT_ALL).inputs == [[*ids_of(text), END_ID] for text in expected]
    with pytest.raises(InvalidRequestError, match=r"documents\[1\] is an empty text"):
        scorer.plan([("a", "a"), ("a", "")], PATHS, NOT_AT_ALL)
    with pytest.raises(InvalidRequestError, match=r"^query is an empty text"):
        scorer.plan([("", "a"), ("", "a")], PATHS, NOT_AT_ALL)
    with pytest.raises(InvalidRequestError, match="take no instruction"):
        scorer.plan([("a", "a")], PATHS, NOT_AT_ALL, "Find it")


def test_a_reranker_s_prompt_has_the_instruction_and_its_scores_are_of_yes_and_no() -> None:
    scorer = YesNoScorer(reader(1000))
    (own,), (asked,) = (
        scorer.plan([("why", "so")], PATHS, NOT_AT_ALL, instruction).inputs for instruction in (None, "Find it")
    )
    text = TOKENIZER.decode(asked, skip_special_tokens=False)
    assert "<|im_start|>user\n<Instruct>: Find it\n<Query>: why\n<Document>: so<|im_end|>" in text
    assert text == TOKENIZER.decode(own, skip_special_tokens=False).replace(
        "Given a web search query, retrieve relevant passages that answer the query", "Find it"
    )
    scores = scorer.plan([("a", "b")] * 4, PATHS, NOT_AT_ALL).scores(
        [as_bytes(0, 0), as_bytes(0, 1), as_bytes(2, 1), as_bytes(9000, 0)]
    )
    assert scores == pytest.approx([0.5, 0.7311, 0.2689, 0.0], abs=1e-4)
    num_around = len(own) - len(scorer.plan([("why", "")], PATHS, NOT_AT_ALL).inputs[0])
    assert num_around == len("so")
    short = YesNoScorer(reader(len(own) - 1))
    with pytest.raises(ContextLengthError, match=rf"documents\[0\] has {len(own)} tokens"):
        short.plan([("why", "so")], PATHS, NOT_AT_ALL)
    (cut,) = short.plan([("why", "so")], PATHS, TO_THE_LIMIT).inputs
    assert "<Document>: s<|im_end|>" in TOKENIZER.decode(cut, skip_special_tokens=False)


def test_a_tokenizer_without_yes_and_no_ranks_nothing() -> None:
    plain = make_tokenizer()
    with pytest.raises(ModelLoadError, match="no single tokens `yes` and `no`"):
        YesNoScorer(InputReader(plain, "m", 10, plain.vocab_size))


# --- what a model is good for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (None, ["completion"]),
        (PoolingSpec(), ["completion", "embedding", "rerank"]),
        (PoolingSpec(is_embedder_only=True), ["embedding", "rerank"]),
        (PoolingSpec(is_reranker=True), ["completion", "rerank"]),
    ],
)
def test_what_is_served_is_listed_and_the_rest_refused(spec: PoolingSpec | None, kinds: list[str]) -> None:
    assert capabilities(spec) == kinds
    pooling = None if spec is None else Pooling.of(spec, reader(), 8)
    for kind, ask in (("completion", check_generates), ("embedding", embedder_of), ("rerank", scorer_of)):
        if kind in kinds:
            ask(pooling, "m")
        else:
            with pytest.raises(InvalidRequestError, match=r"^m "):
                ask(pooling, "m")


def test_only_a_model_without_vectors_sees() -> None:
    assert capabilities(None, sees=True) == ["completion", "vision"]
