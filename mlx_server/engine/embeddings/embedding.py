"""Between texts and vectors: what a model that pools reads of an input, and what becomes of its result.

text -> Embedder.token_ids() -> a request with Embedder.params -> Vector -> Embedder.vector()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ContextLengthError, InvalidRequestError, did_you_mean
from mlx_server.pooling_params import PoolingParams, Vector
from mlx_server.runtime.models.embedder import PoolingSpec

FloatArray = npt.NDArray[np.float32]

_ROLES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}
"""What hosted services call both sides of a search, by the names that most folders give their prompts."""


@dataclass(frozen=True, slots=True)
class InputTruncation:
    """How a long input is to be cut: to `num_tokens`, with what the tokenizer adds (-1 is the most that the model
    takes, None not at all), losing the side `side`."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "right"


class InputReader:
    """Makes token ids of texts, bounded by what a model takes. Any thread."""

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
        """The ids of `text`, for which `num_taken` of the model's tokens are not there. `what` names it in errors:
        `ContextLengthError` for one that is too long and not to be cut."""
        tokenizer, keep = self.tokenizer, self._num_kept(truncation, num_taken)
        limit = self.max_tokens - num_taken
        part = tokenizer.part_of(text, limit if keep is None else keep, is_end=truncation.side == "left")
        token_ids = tokenizer.encode(part, add_special_tokens=add_special_tokens)
        if keep is not None and len(token_ids) > keep:
            return self._cut(part, token_ids, keep, truncation, add_special_tokens)
        self._check(len(token_ids) + num_taken, what, is_part=len(part) < len(text))
        return token_ids

    def of_ids(self, token_ids: Sequence[int], truncation: InputTruncation, what: str) -> list[int]:
        """Ids as a client gives them, checked and cut. Raises `InvalidRequestError`."""
        for extreme in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= extreme < self._vocab_size:
                raise InvalidRequestError(
                    f"{what} has the token id {extreme}; ids are 0 to {self._vocab_size - 1}.", what
                )
        keep = self._num_kept(truncation, 0)
        if keep is not None and len(token_ids) > keep:
            return list(token_ids[len(token_ids) - keep :] if truncation.side == "left" else token_ids[:keep])
        self._check(len(token_ids), what)
        return list(token_ids)

    def _num_kept(self, truncation: InputTruncation, num_taken: int) -> int | None:
        wanted = truncation.num_tokens
        if wanted is None:
            return None
        keep = (self.max_tokens if wanted == -1 else min(wanted, self.max_tokens)) - num_taken
        if keep < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {wanted}, which leaves no token of an input; it must be above {num_taken}.",
                "truncate_prompt_tokens",
            )
        return keep

    def _check(self, num_tokens: int, what: str, *, is_part: bool = False) -> None:
        if num_tokens == 0:
            raise InvalidRequestError(f"{what} has no tokens; send at least one.", what)
        if num_tokens > self.max_tokens or is_part:
            more = "more than " if is_part else ""
            raise ContextLengthError(
                f"{what} has {more}{num_tokens} tokens; {self._model_name} takes {self.max_tokens}. Shorten it, or "
                "send truncate_prompt_tokens: -1 to have it cut.",
                what,
            )

    def _cut(
        self, text: str, token_ids: list[int], keep: int, truncation: InputTruncation, has_special_tokens: bool
    ) -> list[int]:
        """Cuts the text's own tokens; those that the tokenizer puts around it stay, as the last one is what many models
        pool."""
        plain = self.tokenizer.encode(text, add_special_tokens=False) if has_special_tokens else token_ids
        num_added = len(token_ids) - len(plain)
        places = range(num_added + 1)
        first = next((at for at in places if token_ids[at : at + len(plain)] == plain), None)
        if first is None:  # the text's own tokens are others beside the special ones: there is no telling them apart
            plain, num_added, first = token_ids, 0, 0
        if keep <= num_added:
            raise InvalidRequestError(
                f"truncate_prompt_tokens leaves {keep} tokens, and the tokenizer adds {num_added} to each text.",
                "truncate_prompt_tokens",
            )
        kept = plain[: keep - num_added] if truncation.side == "right" else plain[num_added - keep :]
        return [*token_ids[:first], *kept, *token_ids[first + len(plain) :]]


class Embedder:
    """One model that gives vectors. Any thread."""

    def __init__(self, spec: PoolingSpec, reader: InputReader, num_dimensions: int | None) -> None:
        """`num_dimensions` are those of its vectors, if that can be told."""
        self.reader = reader
        self.params = PoolingParams(spec.method, is_whole=spec.is_bidirectional)
        self._spec = spec
        self._num_dimensions = num_dimensions

    @property
    def prompt_names(self) -> frozenset[str]:
        """Of the texts that the model's folder has to go before inputs."""
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
        """Those of a text with the prompt `before` it, or of an input that is ids already. Raises `InvalidRequestError`
        with `what` for one that is empty or too long."""
        if not isinstance(item, str):
            return self.reader.of_ids(item, truncation, what)
        if not item:
            raise InvalidRequestError(f"{what} is an empty text; leave it out.", what)
        return self.reader.of_text(before + item, truncation, what, add_special_tokens=add_special_tokens)

    def prompt(self, prompt_name: str | None, input_type: str | None = None) -> str:
        """What goes before each text: the folder's prompt of that name, or for what hosted services call the input's
        type. For a query or a document without a prompt that is nothing. Raises `InvalidRequestError` for names that
        mean nothing to the model."""
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
        """Raises `InvalidRequestError` for more than the vectors have, or others than the model was trained for."""
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
        """The embedding: the first `dimensions` numbers of a request's result, of length 1 if the model's vectors are
        (Matryoshka: cut first, then normalised)."""
        numbers = np.frombuffer(result, np.float32)[:dimensions]
        if not self._spec.normalizes:
            return numbers
        return (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype(np.float32)
