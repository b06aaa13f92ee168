"""What a model gives beside text, or instead of it, and what is refused of a model that does not."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_server.engine.embeddings.embedding import Embedder, InputReader
from mlx_server.engine.embeddings.scoring import CosineScorer, Scorer, YesNoScorer
from mlx_server.errors import InvalidRequestError
from mlx_server.runtime.models.embedder import PoolingSpec


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model gives beside text, or instead of it. `embedder` is None if it only ranks."""

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
    """What a model does, in Ollama's and llama.cpp's words; None is one that pools nothing. `sees` images."""
    if spec is None:
        return ["completion", *(["vision"] if sees else [])]
    kinds = {"completion": not spec.is_embedder_only, "embedding": not spec.is_reranker, "rerank": True}
    return [kind for kind, is_there in kinds.items() if is_there]


def check_generates(pooling: Pooling | None, model_name: str) -> None:
    """Raises `InvalidRequestError` for a model that gives no text."""
    if pooling is not None and pooling.spec.is_embedder_only:
        raise InvalidRequestError(
            f"{model_name} is an embedding model: it gives vectors at /v1/embeddings, and no text. Send chats and "
            "completions to another model; GET /v1/models lists them.",
            "model",
        )


def embedder_of(pooling: Pooling | None, model_name: str) -> Embedder:
    """Raises `InvalidRequestError` for a model that gives no vectors."""
    if pooling is None or pooling.embedder is None:
        raise InvalidRequestError(
            f"{model_name} is no embedding model: its folder has none of sentence-transformers' files (modules.json). "
            "Name one that is, or start this one with --pooling last for its last token's hidden state as a vector.",
            "model",
        )
    return pooling.embedder


def scorer_of(pooling: Pooling | None, model_name: str) -> Scorer:
    """Raises `InvalidRequestError` for a model that scores nothing."""
    if pooling is None:
        raise InvalidRequestError(
            f"{model_name} ranks nothing: it is neither Qwen3-Reranker nor an embedding model. Name one that is, or "
            "start this one with --pooling rank if it was trained to answer with yes or no.",
            "model",
        )
    return pooling.scorer
