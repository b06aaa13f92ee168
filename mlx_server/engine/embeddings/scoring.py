"""How well two texts fit: what is computed for pairs, and the scores that come of it.

pairs -> Scorer.plan() -> inputs, each a request with Scorer.params -> results -> ScorePlan.scores()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlx_server.engine.embeddings.embedding import Embedder, InputReader, InputTruncation
from mlx_server.errors import InvalidRequestError, ModelLoadError
from mlx_server.pooling_params import PoolingParams, Vector

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own, for requests that give none."""

_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""What Qwen3-Reranker was trained to be asked, around instruction, query and document."""


_SIDES = ("query", "document")
"""Prompts that folders have for both texts of a pair."""


def pair_up(firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """One first text goes with each second one; several go with one each. `names` are their fields. Raises
    `InvalidRequestError`."""
    if len(firsts) == 1:
        firsts = [*firsts] * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequestError(
            f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}: send one for all, or one for each.",
            names[0],
        )
    return list(zip(firsts, seconds))


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """What is computed for some pairs, and how its results become a score of each pair."""

    inputs: list[list[int]]
    scores: Callable[[Sequence[Vector]], list[float]]


class Scorer(Protocol):
    """Scores pairs of texts, the first of which is the query. Any thread."""

    params: PoolingParams

    def plan(
        self,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
        truncation: InputTruncation,
        instruction: str | None = None,
    ) -> ScorePlan:
        """`names` are the fields of both texts, for errors, which add the number of the pair. Raises
        `InvalidRequestError`."""
        ...


class YesNoScorer:
    """Asks a model whether a document fits a query, as Qwen3-Reranker was trained: the score is the softmax of the
    logits of "yes" and "no" at "yes", 0 to 1."""

    def __init__(self, reader: InputReader) -> None:
        """Raises `ModelLoadError` for a tokenizer without these words."""
        self._reader = reader
        ids = [reader.tokenizer.token_to_id(word) for word in ("no", "yes")]
        if None in ids:
            raise ModelLoadError(
                "The model's tokenizer has no single tokens `yes` and `no`, so it cannot rank by them. Start it with "
                "another --pooling."
            )
        self.params = PoolingParams(logit_ids=tuple(token_id for token_id in ids if token_id is not None))
        encode = reader.tokenizer.encode
        self._beginning, self._end = (encode(text, add_special_tokens=False) for text in (_BEGINNING, _END))

    def plan(
        self,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
        truncation: InputTruncation,
        instruction: str | None = None,
    ) -> ScorePlan:
        """What is cut of a long pair is the end of the document, or the beginning of the query."""
        asked = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: "
        inputs = []
        for index, (query, document) in enumerate(pairs):
            text = f"{asked}{query}\n<Document>: {document}"
            num_taken, what = len(self._beginning) + len(self._end), f"{names[1]}[{index}]"
            middle = self._reader.of_text(text, truncation, what, num_taken=num_taken, add_special_tokens=False)
            inputs.append([*self._beginning, *middle, *self._end])
        return ScorePlan(inputs, lambda results: list(map(_softmax_of_yes, results)))


def _softmax_of_yes(logits: Vector) -> float:
    no, yes = np.frombuffer(logits, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


class CosineScorer:
    """The cosine of both texts' vectors, each text computed once. They get the folder's prompts for queries and
    documents, where it has both."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.params = embedder.params

    def plan(
        self,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
        truncation: InputTruncation,
        instruction: str | None = None,
    ) -> ScorePlan:
        embedder = self._embedder
        if instruction is not None:
            raise InvalidRequestError(
                "This model scores by vectors, which take no instruction; leave it out.", "instruction"
            )
        has_both = embedder.prompt_names.issuperset(_SIDES)
        prompts = [embedder.prompt(side if has_both else None) for side in _SIDES]
        places: dict[tuple[str, str], int] = {}
        inputs: list[list[int]] = []
        asked: list[tuple[int, int]] = []
        for index, pair in enumerate(pairs):
            place = []
            for prompt, text, name in zip(prompts, pair, names):
                if (prompt, text) not in places:
                    places[prompt, text] = len(inputs)
                    inputs.append(embedder.token_ids(text, prompt, truncation, f"{name}[{index}]"))
                place.append(places[prompt, text])
            asked.append((place[0], place[1]))
        return ScorePlan(inputs, lambda results: self._cosines(results, asked))

    def _cosines(self, results: Sequence[Vector], pairs: Sequence[tuple[int, int]]) -> list[float]:
        vectors = [self._embedder.vector(result) for result in results]
        lengths = [float(np.linalg.norm(vector)) or 1.0 for vector in vectors]
        return [float(vectors[a] @ vectors[b]) / (lengths[a] * lengths[b]) for a, b in pairs]
