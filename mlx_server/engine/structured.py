"""Outputs that fit a grammar: constraints compiled with llguidance, and their cursors over one output."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import llguidance

from mlx_server.engine.fair_slots import ANYONE, Asker
from mlx_server.engine.grammar_bounds import MAX_SOURCE_CHARS, check_length
from mlx_server.engine.grammar_threads import GrammarThreads
from mlx_server.engine.json_bounds import keep_bounds
from mlx_server.engine.lark import LarkWriter, json_options
from mlx_server.engine.structural_tag import structural_tag_grammar
from mlx_server.engine.structured_spec import StructuredKind, StructuredSpec
from mlx_server.engine.tokenizer import Tokenizer
from mlx_server.errors import InvalidRequestError, UnsupportedError

T = TypeVar("T")

_MAX_CACHED = 128
_MAX_CACHED_CHARS = 256 * 1024
"""Of the sources of all that is remembered: long ones may take a hundred megabytes."""


class GrammarCompiler:
    """Compiles constraints for one model's vocabulary, and remembers the latest. Every method but `beside` may be
    called from any thread; the first compilation takes about a second for the vocabulary's trie.

    `vocab_size` is the width of the model's logits, if it is not the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._cache: OrderedDict[StructuredSpec, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._threads = GrammarThreads()

    async def beside(self, work: Callable[[], T], param: str, asker: Asker = ANYONE) -> T:
        """Does `work` that compiles what a client has sent in its field `param`, on a thread that can bear it. On the
        event loop's thread; raises what the work raises, and as `GrammarThreads.run` does."""
        return await self._threads.run(work, param, asker)

    def compile(self, spec: StructuredSpec) -> CompiledGrammar:
        """Raises `InvalidRequestError` with the reason when there is no such grammar, or it is too long or complex;
        `UnsupportedError` when the model's tokenizer cannot be constrained. What is not known to be harmless is to be
        compiled in `beside`."""
        check_length(spec.source, MAX_SOURCE_CHARS, spec.param)
        with self._cache_lock:
            known = self._cache.get(spec)
            if known is not None:
                self._cache.move_to_end(spec)
                return known
        grammar = self._compile(spec)
        with self._cache_lock:
            self._cache[spec] = grammar
            self._forget_oldest()
        return grammar

    def _forget_oldest(self) -> None:
        num_chars = sum(len(spec.source) for spec in self._cache)
        while len(self._cache) > _MAX_CACHED or num_chars > _MAX_CACHED_CHARS:
            spec, _ = self._cache.popitem(last=False)
            num_chars -= len(spec.source)

    def warm_up(self) -> None:
        """Builds what all grammars share, so that the first request does not wait for it."""
        self._shared_vocabulary()

    def _compile(self, spec: StructuredSpec) -> CompiledGrammar:
        vocabulary = self._shared_vocabulary()
        try:
            grammar = _guidance_grammar(spec, self._tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refusal(spec, str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        ignored = [warning for warning in matcher.get_grammar_warnings() if not warning.startswith("Unknown format")]
        if ignored and spec.kind is StructuredKind.JSON_SCHEMA:
            raise _refusal(spec, "; ".join(ignored))
        matcher.compute_bitmask()  # warms what all cursors share, and finds out whether the grammar is too complex
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        return CompiledGrammar(matcher, vocabulary, self.vocab_size)

    def _shared_vocabulary(self) -> llguidance.LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._build_vocabulary()
            return self._vocabulary

    def _build_vocabulary(self) -> llguidance.LLTokenizer:
        backend = self._tokenizer.backend_json
        if backend is None:
            raise UnsupportedError("Structured output needs a fast tokenizer (tokenizer.json), which this model lacks.")
        num_tokens = max(self.vocab_size, self._tokenizer.vocab_size)
        eos_token_ids = sorted(token_id for token_id in self._tokenizer.eos_token_ids if token_id < num_tokens)
        try:
            return llguidance.LLTokenizer(backend, n_vocab=num_tokens, eos_token=eos_token_ids)
        except ValueError as error:
            raise UnsupportedError(f"Structured output does not work with this model's tokenizer: {error}.") from error


class CompiledGrammar:
    """A grammar at its beginning. `start` gives each output a cursor of its own; any thread."""

    def __init__(self, matcher: Any, vocabulary: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size

    def start(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, self._vocab_size)


class GrammarConstraint:
    """A cursor over one output (`request.TokenConstraint`). One thread at a time.

    The masks have `vocab_size` bits, filled up to whole 32-bit words. Once the grammar is complete and nothing
    may follow, they allow the end-of-sequence tokens only. When llguidance gives up in the middle of an output
    (`error`), no token is accepted any more, and the masks leave out the end of sequence: a broken output must not
    pass for a finished one.
    """

    def __init__(self, matcher: Any, vocabulary: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_mask_bytes = (vocab_size + 31) // 32 * 4
        self._eos_token_ids = frozenset(vocabulary.eos_tokens)

    @property
    def error(self) -> str | None:
        """Why llguidance has given up (its limits on time and memory), if it has."""
        return self._matcher.get_error().partition("\n")[0] or None

    def accept(self, token_id: int) -> bool:
        """Advances by one token; False, and nothing done, when the grammar forbids it."""
        if self.is_terminated():
            return token_id in self._eos_token_ids
        if token_id >= self._vocabulary.vocab_size:  # llguidance would take this for a failure of its own
            return False
        return self._consume([token_id]) or self._consume(self._spelling(token_id))

    def forced_tokens(self) -> list[int]:
        """Tokens that are the only continuation, already accepted; none where the vocabulary has no canonical
        tokenisation, since then they could differ from what the model would have written."""
        if not self._vocabulary.is_canonical or self._matcher.is_stopped():
            return []
        return [token_id for token_id in self._matcher.compute_ff_tokens() if self.accept(token_id)]

    def bitmask(self) -> bytes:
        """The allowed next tokens: bit `i % 8` of byte `i // 8` is token `i`."""
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            mask = self._all_but_eos()
        return mask[: self._num_mask_bytes]

    def is_terminated(self) -> bool:
        """Whether the output is complete and only an end of sequence may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _all_but_eos(self) -> bytes:
        mask = bytearray(b"\xff" * self._num_mask_bytes)
        for token_id in self._eos_token_ids:
            mask[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(mask)

    def _consume(self, token_ids: Sequence[int]) -> bool:
        if not token_ids or self._matcher.validate_tokens(token_ids) < len(token_ids):
            return False
        return bool(self._matcher.consume_tokens(token_ids))

    def _spelling(self, token_id: int) -> list[int]:
        """An added token in other tokens. Where a grammar forces its text, llguidance offers the token, but then
        understands the spelling only."""
        if not self._vocabulary.is_special_token(token_id) or token_id in self._eos_token_ids:
            return []
        text = self._vocabulary.decode_str([token_id])
        spelling: list[int] = self._vocabulary.greedy_tokenize(text)
        return spelling


def _guidance_grammar(spec: StructuredSpec, tokenizer: Tokenizer) -> str:
    """The constraint in llguidance's own form. Raises `ValueError`."""
    match spec.kind:
        case StructuredKind.JSON_SCHEMA | StructuredKind.JSON_OBJECT:
            overrides = {"lenient": True, **json_options(spec.whitespace_pattern)}
            schema = json.dumps(keep_bounds(json.loads(spec.source)), ensure_ascii=False)
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides))
        case StructuredKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(spec.source))
        case StructuredKind.CHOICE:
            writer = LarkWriter(tokenizer.added_tokens)
            return str(llguidance.LLMatcher.grammar_from_lark(writer.text(writer.one_of(json.loads(spec.source)))))
        case StructuredKind.STRUCTURAL_TAG:
            lark = structural_tag_grammar(json.loads(spec.source), tokenizer, json_options(spec.whitespace_pattern))
            return str(llguidance.LLMatcher.grammar_from_lark(lark))
        case StructuredKind.LARK | StructuredKind.GBNF:
            return str(llguidance.grammar_from(spec.kind.value, spec.source))


def _refusal(spec: StructuredSpec, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.param} cannot be compiled: {reason.strip()}", spec.param)
