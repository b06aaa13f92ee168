"""A small vocabulary with its grammars, and a random model that obeys their masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from text_worlds import make_tokenizer

from mlx_server.engine.grammar.constraints import GrammarCompiler, GrammarConstraint
from mlx_server.engine.grammar.spec import StructuredSpec, parse_structured
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.request import TokenConstraint


class RandomModel:
    """Chooses any token that the mask allows, preferring ends and single characters. At times it writes one of
    `endings` as long as that is allowed, since random tokens would hardly ever form it."""

    def __init__(self, tokenizer: Tokenizer, endings: Sequence[str] = ()) -> None:
        self._endings = [tokenizer.encode(text, add_special_tokens=False) for text in endings]
        self._ending: list[int] = []
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.tokenizer = tokenizer
        self.ends = np.array([i in tokenizer.eos_token_ids for i in range(len(texts))])
        self.closes = np.array([bool(set(b'"]}') & set(text)) for text in texts])
        self.is_short = np.array([len(text) == 1 and not text.isspace() for text in texts])

    def allowed(self, constraint: TokenConstraint) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = constraint.bitmask()
        if mask is None:
            return np.ones(self.tokenizer.vocab_size, np.bool_)
        assert len(mask) == (self.tokenizer.vocab_size + 31) // 32 * 4
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(np.bool_)
        assert not bits[self.tokenizer.vocab_size :].any()
        return bits[: self.tokenizer.vocab_size]

    def allowed_ids(self, constraint: TokenConstraint) -> set[int]:
        return {int(i) for i in np.flatnonzero(self.allowed(constraint))}

    def write(self, constraint: TokenConstraint, seed: int, *, max_tokens: int = 400) -> list[int] | None:
        """The ids of a finished output without its end; None if it did not finish."""
        rng, ids = random.Random(seed), list[int]()
        while len(ids) < max_tokens:
            ids += constraint.forced_tokens()
            if constraint.is_terminated():
                return ids
            allowed = self.allowed(constraint)
            assert allowed.any(), f"a dead end after {self.tokenizer.decode(ids)!r}"
            impatience = len(ids) / max_tokens
            if (allowed & self.ends).any() and rng.random() < 0.3 + impatience:
                return ids
            token_id = self._choose(allowed & ~self.ends, rng, impatience)
            assert constraint.accept(token_id)
            ids.append(token_id)
        return None

    def _choose(self, allowed: np.ndarray[Any, np.dtype[np.bool_]], rng: random.Random, impatience: float) -> int:
        if not self._ending and self._endings and rng.random() < 0.1:
            self._ending = list(rng.choice(self._endings))
        if self._ending:
            token_id = self._ending.pop(0)
            if allowed[token_id]:
                return token_id
            self._ending = []
        for preferred, chance in ((self.closes, 0.2 + impatience), (self.is_short, 0.7)):
            if (allowed & preferred).any() and rng.random() < chance:
                allowed = allowed & preferred
        return int(rng.choice(np.flatnonzero(allowed)))


WORLD = make_tokenizer(added=("<tool_call>", "</tool_call>", "<think>", "</think>"), special=("[TOOL_CALLS]", "[ARGS]"))
COMPILER = GrammarCompiler(WORLD)
MODEL = RandomModel(WORLD)
EOS_ID = min(WORLD.eos_token_ids)


def spec_of(**structured_outputs: Any) -> StructuredSpec:
    spec = parse_structured({"structured_outputs": structured_outputs})
    assert spec is not None
    return spec


def start(**structured_outputs: Any) -> GrammarConstraint:
    return COMPILER.compile(spec_of(**structured_outputs)).start()


def ids_of(text: str) -> list[int]:
    return WORLD.encode(text, add_special_tokens=False)


def accepts(constraint: TokenConstraint, text: str) -> bool:
    return all(constraint.accept(token_id) for token_id in ids_of(text))


def is_whole(constraint: GrammarConstraint, text: str) -> bool:
    """Whether `text` is an output of the grammar."""
    return accepts(constraint, text) and constraint.accept(EOS_ID)
