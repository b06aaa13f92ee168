"""Vectors and scores instead of text: how inputs become token ids, and how pooled results become embeddings and scores.

text -> Embedder.token_ids() -> a request with Embedder.params -> Vector -> Embedder.vector()
pairs -> Scorer.plan() -> inputs, each a request with Scorer.params -> results -> ScorePlan.scores()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mlx_server.engine.text.tokenizer import Tokenizer, check_ids
from mlx_server.errors import ContextLengthError, InvalidRequestError, ModelLoadError, did_you_mean
from mlx_server.request import PoolingParams, Vector
from mlx_server.runtime.pooling import PoolingSpec

FloatArray = npt.NDArray[np.float32]

_ROLES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}
"""The input types of hosted services, and the names that most folders give the matching prompts."""


@dataclass(frozen=True, slots=True)
class InputTruncation:
    """How to cut a long input: to `num_tokens`, including what the tokenizer adds (-1: to the model's limit; None: not
    at all), by removing tokens from `side`. `asked_by` is how a request asks for that, for errors."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "right"
    asked_by: str = "truncate_prompt_tokens: -1"


class InputReader:
    """Converts inputs to token ids, within the model's limit. Any thread."""

    def __init__(self, tokenizer: Tokenizer | None, model_name: str, max_tokens: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `InvalidRequestError` for a model without one."""
        if self._tokenizer is None:
            raise InvalidRequestError(f"The model {self._model_name} has no tokenizer; send token ids.", "input")
        return self._tokenizer

    def of_text(
        self, text: str, truncation: InputTruncation, what: str, *, num_taken: int = 0, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of `text`. `num_taken` tokens of the limit are used by other text. `what` names the input in errors.
        Raises `ContextLengthError` if the text is too long and must not be cut."""
        tokenizer, keep = self.tokenizer, self._num_kept(truncation, num_taken)
        limit = self.max_tokens - num_taken
        part = tokenizer.part_of(text, limit if keep is None else keep, is_end=truncation.side == "left")
        token_ids = tokenizer.encode(part, add_special_tokens=add_special_tokens)
        if keep is not None and len(token_ids) > keep:
            return self._cut(part, token_ids, keep, truncation, add_special_tokens)
        self._check(len(token_ids) + num_taken, what, truncation, is_part=len(part) < len(text))
        return token_ids

    def of_ids(self, token_ids: Sequence[int], truncation: InputTruncation, what: str) -> list[int]:
        """Checks and cuts a client's token ids. Raises `InvalidRequestError`."""
        check_ids(what, token_ids, self._vocab_size)
        keep = self._num_kept(truncation, 0)
        if keep is not None and len(token_ids) > keep:
            return list(token_ids[len(token_ids) - keep :] if truncation.side == "left" else token_ids[:keep])
        self._check(len(token_ids), what, truncation)
        return list(token_ids)

    def _num_kept(self, truncation: InputTruncation, num_taken: int) -> int | None:
        wanted = truncation.num_tokens
        if wanted is None:
            return None
        keep = (self.max_tokens if wanted == -1 else min(wanted, self.max_tokens)) - num_taken
        if keep < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {wanted}, which leaves no token of input; it must be above {num_taken}.",
                "truncate_prompt_tokens",
            )
        return keep

    def _check(self, num_tokens: int, what: str, truncation: InputTruncation, *, is_part: bool = False) -> None:
        if num_tokens == 0:
            raise InvalidRequestError(f"{what} has no tokens; send at least one.", what)
        if num_tokens > self.max_tokens or is_part:
            more = "more than " if is_part else ""
            raise ContextLengthError(
                f"{what} has {more}{num_tokens} tokens; {self._model_name} takes {self.max_tokens}. Shorten it, or "
                f"send {truncation.asked_by} to have it cut.",
                what,
            )

    def _cut(
        self, text: str, token_ids: list[int], keep: int, truncation: InputTruncation, has_special_tokens: bool
    ) -> list[int]:
        """Cuts the text's own tokens, and keeps those that the tokenizer puts around them: many models pool the last
        one."""
        plain = self.tokenizer.encode(text, add_special_tokens=False) if has_special_tokens else token_ids
        num_added = len(token_ids) - len(plain)
        places = range(num_added + 1)
        first = next((at for at in places if token_ids[at : at + len(plain)] == plain), None)
        if first is None:  # special tokens change how the text is tokenized, so they cannot be told apart
            plain, num_added, first = token_ids, 0, 0
        if keep <= num_added:
            raise InvalidRequestError(
                f"truncate_prompt_tokens leaves {keep} tokens, but the tokenizer adds {num_added} to each text.",
                "truncate_prompt_tokens",
            )
        kept = plain[: keep - num_added] if truncation.side == "right" else plain[num_added - keep :]
        return [*token_ids[:first], *kept, *token_ids[first + len(plain) :]]


class Embedder:
    """One model that gives vectors. Any thread."""

    def __init__(self, spec: PoolingSpec, reader: InputReader, num_dimensions: int | None) -> None:
        """`num_dimensions` is the length of its vectors, if known."""
        self.reader = reader
        self.params = PoolingParams(spec.method, is_whole=spec.is_bidirectional)
        self._spec = spec
        self._num_dimensions = num_dimensions

    @property
    def prompt_names(self) -> frozenset[str]:
        """The names of the model's own prompts, which may precede inputs."""
        return frozenset(self._spec.prompts)

    def token_ids(
        self,
        item: str | Sequence[int],
        before: str,
        truncation: InputTruncation,
        what: str,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The ids of a text with the prompt `before`, or of an input that is ids already. Raises `InvalidRequestError`,
        which names `what`, if the input is empty or too long."""
        if not isinstance(item, str):
            return self.reader.of_ids(item, truncation, what)
        if not item:
            raise InvalidRequestError(f"{what} is an empty text; leave it out.", what)
        return self.reader.of_text(before + item, truncation, what, add_special_tokens=add_special_tokens)

    def prompt(self, prompt_name: str | None, input_type: str | None = None) -> str:
        """The text that precedes each input: the folder's prompt with that name, or the one for a hosted service's
        `input_type`. It is empty for a query or document if the folder has no prompt for these. Raises
        `InvalidRequestError` for unknown names."""
        known = self._spec.prompts
        if prompt_name is not None:
            return self._prompt_named(prompt_name, prompt_name, "prompt_name")
        if input_type is None:
            return known.get(self._spec.default_prompt_name or "", "")
        role = _ROLES.get(input_type)
        if role is not None and not known.keys() & {role, input_type}:
            return ""
        return self._prompt_named(input_type if input_type in known else role or input_type, input_type, "input_type")

    def _prompt_named(self, name: str, given: str, field: str) -> str:
        known = self._spec.prompts
        if name not in known:
            names, hint = ", ".join(sorted(known)) or "none", did_you_mean(name, known)
            raise InvalidRequestError(f"{field} is {given!r}; this model's prompts are: {names}{hint}.", field)
        return known[name]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises `InvalidRequestError` for more dimensions than the vectors have, or a number that the model was not
        trained for."""
        if dimensions is None:
            return
        trained = self._spec.matryoshka_dimensions
        if trained and dimensions not in (*trained, self._num_dimensions):
            listed = ", ".join(map(str, sorted({*trained})))
            raise InvalidRequestError(
                f"dimensions is {dimensions}; this model's vectors may have {listed}.", "dimensions"
            )
        if dimensions < 1 or (self._num_dimensions is not None and dimensions > self._num_dimensions):
            most = self._num_dimensions or "all that they have"
            raise InvalidRequestError(
                f"dimensions is {dimensions}; this model's vectors may have 1 to {most}.", "dimensions"
            )

    def vector(self, result: Vector, dimensions: int | None = None) -> FloatArray:
        """The embedding: the first `dimensions` numbers of a request's result, then normalised to length 1 if the
        model's vectors are (Matryoshka)."""
        numbers = np.frombuffer(result, np.float32)[:dimensions]
        if not self._spec.normalizes:
            return numbers
        return (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype(np.float32)


DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default."""

_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Qwen3-Reranker's prompt before and after instruction, query and document."""

_SIDES = ("query", "document")
"""The names of prompts for the two texts of a pair."""


def pair_up(firsts: Sequence[str], seconds: Sequence[str]) -> tuple[list[tuple[str, str]], tuple[str, str]]:
    """Pairs a single text of the field `text_1` with each one of `text_2`, or several with one each. Returns the pairs,
    and the `paths` that `Scorer.plan` takes. Raises `InvalidRequestError`."""
    paths = ("text_1[{}]" if len(firsts) > 1 else "text_1", "text_2[{}]" if len(seconds) > 1 else "text_2")
    if len(firsts) == 1:
        firsts = [*firsts] * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequestError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: send one for all, or one for each.", "text_1"
        )
    return list(zip(firsts, seconds)), paths


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The inputs to compute for some pairs, and a function from their results to each pair's score."""

    inputs: list[list[int]]
    scores: Callable[[Sequence[Vector]], list[float]]


class YesNoScorer:
    """Asks a model whether a document fits a query, as Qwen3-Reranker was trained: the score is the probability of
    "yes" in the softmax of the logits of "yes" and "no"."""

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
        paths: tuple[str, str],
        truncation: InputTruncation,
        instruction: str | None = None,
    ) -> ScorePlan:
        """A long pair loses the end of its document, or the beginning of its query."""
        asked = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: "
        inputs = []
        for index, (query, document) in enumerate(pairs):
            text = f"{asked}{query}\n<Document>: {document}"
            num_taken, what = len(self._beginning) + len(self._end), paths[1].format(index)
            middle = self._reader.of_text(text, truncation, what, num_taken=num_taken, add_special_tokens=False)
            inputs.append([*self._beginning, *middle, *self._end])
        return ScorePlan(inputs, lambda results: list(map(_softmax_of_yes, results)))


def _softmax_of_yes(logits: Vector) -> float:
    no, yes = np.frombuffer(logits, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


class CosineScorer:
    """Scores by the cosine of both texts' vectors; each distinct text is computed once. Uses the folder's prompts for
    queries and documents if it has both."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.params = embedder.params

    def plan(
        self,
        pairs: Sequence[tuple[str, str]],
        paths: tuple[str, str],
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
            for prompt, text, path in zip(prompts, pair, paths):
                if (prompt, text) not in places:
                    places[prompt, text] = len(inputs)
                    inputs.append(embedder.token_ids(text, prompt, truncation, path.format(index)))
                place.append(places[prompt, text])
            asked.append((place[0], place[1]))
        return ScorePlan(inputs, lambda results: self._cosines(results, asked))

    def _cosines(self, results: Sequence[Vector], pairs: Sequence[tuple[int, int]]) -> list[float]:
        vectors = [self._embedder.vector(result) for result in results]
        lengths = [float(np.linalg.norm(vector)) or 1.0 for vector in vectors]
        return [float(vectors[a] @ vectors[b]) / (lengths[a] * lengths[b]) for a, b in pairs]


Scorer: TypeAlias = YesNoScorer | CosineScorer
"""Scores pairs of texts, the first of which is the query. `plan` raises `InvalidRequestError`; its `paths` say where
both texts are in the request, with `{}` for the pair's index. Any thread."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """A model's vectors and scores. `embedder` is None if the model only ranks."""

    embedder: Embedder | None
    scorer: Scorer
    spec: PoolingSpec

    @classmethod
    def of(cls, spec: PoolingSpec, reader: InputReader, num_dimensions: int | None) -> Pooling:
        """Raises `ModelLoadError`."""
        if spec.is_reranker:
            return cls(None, YesNoScorer(reader), spec)
        embedder = Embedder(spec, reader, num_dimensions)
        return cls(embedder, CosineScorer(embedder), spec)


def capabilities(spec: PoolingSpec | None, *, sees: bool = False) -> list[str]:
    """A model's capabilities, in Ollama's and llama.cpp's words. `spec` is None for a model that does not pool; `sees`
    says whether it reads images."""
    if spec is None:
        return ["completion", *(["vision"] if sees else [])]
    kinds = {"completion": not spec.is_embedder_only, "embedding": not spec.is_reranker, "rerank": True}
    return [kind for kind, is_there in kinds.items() if is_there]


def check_generates(pooling: Pooling | None, model_name: str) -> None:
    """Raises `InvalidRequestError` for a model that generates no text."""
    if pooling is not None and pooling.spec.is_embedder_only:
        raise InvalidRequestError(
            f"{model_name} is an embedding model: it gives vectors at /v1/embeddings, and generates no text. Send "
            "chats and completions to another model; GET /v1/models lists them.",
            "model",
        )


def embedder_of(pooling: Pooling | None, model_name: str) -> Embedder:
    """Raises `InvalidRequestError` for a model that gives no vectors."""
    if pooling is None or pooling.embedder is None:
        raise InvalidRequestError(
            f"{model_name} is no embedding model: its folder has no files of sentence-transformers (modules.json). "
            "Name an embedding model, or start this one with --pooling last to use its last token's hidden state.",
            "model",
        )
    return pooling.embedder


def scorer_of(pooling: Pooling | None, model_name: str) -> Scorer:
    """Raises `InvalidRequestError` for a model that gives no scores."""
    if pooling is None:
        raise InvalidRequestError(
            f"{model_name} cannot rank: it is neither Qwen3-Reranker nor an embedding model. Name such a model, or "
            "start this one with --pooling rank if it was trained to answer with yes or no.",
            "model",
        )
    return pooling.scorer
