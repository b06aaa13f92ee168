"""Compiles grammars with llguidance, and follows each output with a cursor.

Clients' grammars are compiled on threads of their own, not on the event loop. A grammar that fails in the middle of an
output ends only its own request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Generic, TypeVar

import llguidance

from mlx_server.engine.fair_slots import ANYONE, FairSlots, Requester, in_daemon_thread, own_clock, take_error
from mlx_server.engine.grammar.endless import endless_rule
from mlx_server.engine.grammar.schema import MAX_SOURCE_CHARS, check_length, check_references, keep_bounds
from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec
from mlx_server.engine.grammar.structural_tag import LarkWriter, json_options, structural_tag_grammar
from mlx_server.engine.recent import Recent
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import InvalidRequestError, OverloadedError, UnsupportedError
from mlx_server.request import TokenConstraint

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_CACHED_CHARS = 256 * 1024
"""Limits the sources of all cached grammars together: long ones may take a hundred megabytes."""

_LEAST_CHARS = _MAX_CACHED_CHARS // 128
"""What a grammar counts at least, so that at most 128 are kept."""

_MAX_REMEMBERED_CHARS = 4 * 2**20
"""Limits the grammars that are remembered as written, with what they were written from: an agent's tools take some ten
thousand characters, and their grammar may take ten times as many."""

_STACK_BYTES = 256 * 2**20
"""Three times what the deepest grammars of `MAX_SOURCE_CHARS` need; a stack overflow in native code ends the process.
This is address space: memory is used only as deep as the recursion goes."""

_RETRY_S = 5.0

_TIMES = re.compile(r" \(\d+ times\)$")

_SERVED = {
    'Unimplemented keys: ["uniqueItems"]': "uniqueItems",
    "oneOf not fully supported, falling back to anyOf. This may cause validation errors in some cases.": "oneOf",
}
"""llguidance's warnings that are no reason to refuse a schema, and the keyword that the answer names as not
enforced."""

_TOLERANCE_S = 0.01
"""The shortest wait, so that the loop does not spin near a limit."""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, and caches the most recent ones. Any thread may call `compile`;
    clients' grammars are compiled on one of `threads`.

    `fault` says why grammars do not work with the model's tokenizer, if they do not.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        """`vocab_size` is the width of the model's logits, if that is not the tokenizer's size. Takes about a second to
        build the vocabulary's trie: not for the event loop."""
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.threads = GrammarThreads()
        self.fault: str | None = None
        self._tokenizer = tokenizer
        self._vocabulary = self._build_vocabulary()
        self._cache = Recent[StructuredSpec, CompiledGrammar](
            _MAX_CACHED_CHARS, lambda spec, grammar: max(len(spec.source), _LEAST_CHARS)
        )
        self._written = Recent[str, Any](
            _MAX_REMEMBERED_CHARS, lambda given, written: max(len(given) + len(written.spec.source), _LEAST_CHARS)
        )

    def written(self, write: Callable[..., T], given: Mapping[str, Any]) -> T:
        """What `write(**given)` returns, which has a grammar as its `spec`. Clients send the same tools at every turn,
        and to write their grammar may take half a second; so the most recent results are kept. `given` is JSON, and one
        engine has one `write`."""
        key = json.dumps(given)
        written: T | None = self._written.get(key)
        if written is None:
            written = write(**given)
            self._written.put(key, written)
        return written

    def compile(self, spec: StructuredSpec) -> CompiledGrammar:
        """Raises `InvalidRequestError` with the reason if the grammar is invalid, too long or too complex, and
        `UnsupportedError` if grammars do not work with the model's tokenizer."""
        check_length(spec.source, MAX_SOURCE_CHARS, spec.param)
        grammar = self._cache.get(spec)
        if grammar is None:
            grammar = self._compile(spec)
            self._cache.put(spec, grammar)
        return grammar if grammar.param == spec.param else replace(grammar, param=spec.param)

    def _compile(self, spec: StructuredSpec) -> CompiledGrammar:
        if self._vocabulary is None:
            raise UnsupportedError(self.fault or "")
        try:
            grammar = _guidance_grammar(spec, self._tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refusal(spec, str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        found = (_TIMES.sub("", warning) for warning in matcher.get_grammar_warnings())
        warnings = [warning for warning in found if not warning.startswith("Unknown format")]
        ignored = [warning for warning in warnings if warning not in _SERVED]
        if ignored and spec.kind is StructuredKind.JSON_SCHEMA:
            raise _refusal(spec, "; ".join(ignored))
        matcher.compute_bitmask()  # fills the cache that all cursors share
        beginning = GrammarConstraint(matcher, self._vocabulary, self.vocab_size)
        if fault := beginning.fault():
            raise _refusal(spec, fault)
        if spec.kind in (StructuredKind.LARK, StructuredKind.GBNF) and (rule := endless_rule(grammar)) is not None:
            raise _refusal(spec, f"no output can end in its rule {rule}, which always needs itself again")
        notes = dict.fromkeys(keyword for warning in warnings for keyword in _keywords(warning))
        return CompiledGrammar(beginning, tuple(notes), spec.param, self._named_in(spec.source))

    def _named_in(self, source: str) -> frozenset[int]:
        """The special tokens whose text is in a constraint; escapes in regexes count as their characters."""
        plain, tokenizer = source.replace("\\", ""), self._tokenizer
        special = tokenizer.special_token_ids.difference(tokenizer.eos_token_ids)
        return frozenset(token_id for token_id in special if tokenizer.token_text(token_id) in plain)

    def _build_vocabulary(self) -> llguidance.LLTokenizer | None:
        """Sets `fault` and returns None if that is impossible."""
        backend = self._tokenizer.backend_json
        if backend is None:
            self.fault = "Structured output needs a fast tokenizer (tokenizer.json), which this model lacks."
            return None
        num_tokens = max(self.vocab_size, self._tokenizer.vocab_size)
        eos_token_ids = sorted(token_id for token_id in self._tokenizer.eos_token_ids if token_id < num_tokens)
        try:
            return llguidance.LLTokenizer(backend, n_vocab=num_tokens, eos_token=eos_token_ids)
        except ValueError as error:
            self.fault = f"Structured output does not work with this model's tokenizer: {error}."
            return None


def _keywords(warning: str) -> Sequence[str]:
    """The keywords that a warning of llguidance is about."""
    keys = _UNIMPLEMENTED.fullmatch(warning)
    return (_SERVED.get(warning, warning),) if keys is None else json.loads(keys[1])


_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")


def _guidance_grammar(spec: StructuredSpec, tokenizer: Tokenizer) -> str:
    """The grammar in llguidance's own form. Raises `ValueError`."""
    match spec.kind:
        case StructuredKind.JSON_SCHEMA:
            overrides = {"lenient": True, **json_options(spec.whitespace_pattern)}
            value = json.loads(spec.source)
            check_references(value)
            schema = json.dumps(keep_bounds(value), ensure_ascii=False)
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides))
        case StructuredKind.CHOICE:
            ids = tokenizer.added_tokens.items()
            writer = LarkWriter({text: token_id for text, token_id in ids if token_id not in tokenizer.eos_token_ids})
            return str(llguidance.LLMatcher.grammar_from_lark(writer.text(writer.one_of(json.loads(spec.source)))))
        case StructuredKind.STRUCTURAL_TAG:
            lark = structural_tag_grammar(json.loads(spec.source), tokenizer, json_options(spec.whitespace_pattern))
            return str(llguidance.LLMatcher.grammar_from_lark(lark))
        case StructuredKind.REGEX | StructuredKind.LARK | StructuredKind.GBNF:
            return str(llguidance.grammar_from(spec.kind.value, spec.source))


def _refusal(spec: StructuredSpec, fault: str) -> InvalidRequestError:
    is_clients = spec.kind in (StructuredKind.LARK, StructuredKind.REGEX) and not spec.fields
    place = None if is_clients else _PLACE.match(fault)
    param = spec.param if place is None else spec.field_at(int(place["line"]))
    reason = _plain(fault if is_clients else _LISTING.sub("", fault[place.end() if place is not None else 0 :]))
    return InvalidRequestError(f"{param} cannot be compiled: {reason}", param)


_PLACE = re.compile(r"at (?P<line>\d+)\(\d+\): (failed to compile JSON schema: )?")
_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""Where llguidance has found a fault, and the lines around it: of no use if the client has not written them."""


def _plain(fault: str) -> str:
    """llguidance's words for a fault, or better ones."""
    if "NoExtensionBias" in fault:  # llguidance's name for it
        return "no output can fit it, since a part of it consists only of itself"
    if (limit := _FORCED_LIMIT.search(fault)) is not None:
        return (
            f"it forces too much text at one place, perhaps without an end (the limit is {limit[1]} items); shorten "
            "the text, or give a rule that repeats itself another alternative"
        )
    return fault.partition(_NON_VERBOSE)[0].strip()


_FORCED_LIMIT = re.compile(r"Too many items \(limit (\d+); ff_tokens\)")
_NON_VERBOSE = "\n<non-verbose/>"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar. `start` returns a new cursor for each output, a copy of the one at its `beginning`; any
    thread. `notes` name the keywords of the schema that the grammar does not enforce, `param` the request's field.
    `kept_token_ids` are the special tokens whose text it has: they stay in the output's text."""

    beginning: GrammarConstraint
    notes: tuple[str, ...]
    param: str
    kept_token_ids: frozenset[int]

    def start(self) -> GrammarConstraint:
        cursor = self.beginning.fork()
        cursor.param = self.param
        return cursor


class GrammarConstraint:
    """A cursor over one output (`request.TokenConstraint`). One thread at a time.

    The masks have `vocab_size` bits, rounded up to whole 32-bit words. When the grammar is complete and nothing may
    follow, they allow only the end-of-sequence tokens. If llguidance fails in the middle of an output (`error`), no
    token is accepted any more, and the masks exclude the end of sequence: a broken output must not look finished.
    `param` is the request's field.
    """

    def __init__(self, matcher: Any, vocabulary: Any, vocab_size: int, param: str | None = None) -> None:
        self.param = param
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_mask_bytes = (vocab_size + 31) // 32 * 4
        self._eos_token_ids = frozenset(vocabulary.eos_tokens)

    @property
    def error(self) -> InvalidRequestError | None:
        """Why llguidance has failed (its limits on time and memory), if it has. Takes as long as a mask."""
        fault = self.fault()
        return InvalidRequestError(_plain(fault), self.param) if fault else None

    def fault(self) -> str:
        """The same in llguidance's words; empty if it has not failed. A limit that it has passed while it checked
        tokens, or found what is forced, shows only at its next step, so this tries one."""
        ahead = self.fork()
        ahead.bitmask()
        if not ahead._matcher.is_stopped():
            for token_id in ahead._matcher.compute_ff_tokens()[:1]:
                ahead.accept(token_id)
        return str(ahead._matcher.get_error())

    def accept(self, token_id: int) -> bool:
        """Advances by one token. Returns False, and changes nothing, if the grammar forbids it."""
        if self.is_terminated():
            return token_id in self._eos_token_ids
        if token_id >= self._vocabulary.vocab_size:  # llguidance would fail for good
            return False
        return self._consume([token_id]) or self._consume(self._spelling(token_id))

    def forced_tokens(self) -> list[int]:
        """The tokens that are the only continuation. They are accepted already. None if the vocabulary has no canonical
        tokenisation, since the model might then have written the text in other tokens."""
        if not self._vocabulary.is_canonical or self._matcher.is_stopped():
            return []
        return [token_id for token_id in self._matcher.compute_ff_tokens() if self.accept(token_id)]

    def bitmask(self) -> bytes:
        """The allowed next tokens: bit `i % 8` of byte `i // 8` is token `i`."""
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            mask = self._without_eos(b"\xff" * self._num_mask_bytes)
        elif len(mask.strip(b"\0")) == 1 and not self._matcher.is_accepting():
            mask = self._with_spelled_eos(mask)
        return mask[: self._num_mask_bytes]

    def fork(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, 8 * self._num_mask_bytes, self.param)

    def is_terminated(self) -> bool:
        """Whether the output is complete, so that only an end of sequence may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _without_eos(self, mask: bytes) -> bytes:
        changed = bytearray(mask)
        for token_id in self._eos_token_ids:
            changed[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(changed)

    def _with_spelled_eos(self, mask: bytes) -> bytes:
        """If a grammar forces the text of an end-of-sequence token, llguidance offers the token, which would end the
        output, but accepts only the spelling. Offers the first token of that."""
        changed = bytearray(self._without_eos(mask))
        for token_id in self._eos_token_ids:
            if mask[token_id // 8] >> token_id % 8 & 1:
                first = self._vocabulary.greedy_tokenize(self._vocabulary.decode_str([token_id]))[0]
                changed[first // 8] |= 1 << first % 8
        return bytes(changed)

    def _consume(self, token_ids: Sequence[int]) -> bool:
        if not token_ids or self._matcher.validate_tokens(token_ids) < len(token_ids):
            return False
        return bool(self._matcher.consume_tokens(token_ids))

    def _spelling(self, token_id: int) -> list[int]:
        """An added token's text in other tokens. If a grammar forces this text, llguidance offers the token, but then
        accepts only the spelling."""
        if not self._vocabulary.is_special_token(token_id) or token_id in self._eos_token_ids:
            return []
        text = self._vocabulary.decode_str([token_id])
        spelling: list[int] = self._vocabulary.greedy_tokenize(text)
        return spelling


class GuardedConstraint:
    """A `request.TokenConstraint` that never raises. After `inner` has failed, it accepts no token, and its mask has
    one token that is not in `end_ids`: the request ends with an error at its next token, and does not look finished."""

    def __init__(self, inner: TokenConstraint, request_id: str, end_ids: Collection[int]) -> None:
        self._inner = inner
        self._request_id = request_id
        self._end_ids = end_ids
        self._has_failed = False

    def accept(self, token_id: int) -> bool:
        return self._guarded(lambda: self._inner.accept(token_id), bool)

    def forced_tokens(self) -> Sequence[int]:
        return self._guarded(self._inner.forced_tokens, tuple)

    def bitmask(self) -> bytes | None:
        return self._guarded(self._inner.bitmask, self._last_mask)

    def fork(self) -> TokenConstraint | None:
        inner = self._guarded(self._inner.fork, lambda: None)
        return None if inner is None else GuardedConstraint(inner, self._request_id, self._end_ids)

    def is_terminated(self) -> bool:
        return self._guarded(self._inner.is_terminated, bool)

    @property
    def error(self) -> InvalidRequestError | None:
        return self._guarded(lambda: self._inner.error, lambda: None)

    def _guarded(self, call: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self._has_failed:
            return otherwise()
        try:
            return call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in a native library is not an Exception
            self._has_failed = True
            logger.exception("The grammar of %s has failed", self._request_id)
            return otherwise()

    def _last_mask(self) -> bytes:
        token_id = next(token_id for token_id in count() if token_id not in self._end_ids)
        return bytes(token_id // 8) + bytes((1 << token_id % 8,))


class GrammarThreads:
    """A few threads, so that hostile grammars cannot use all cores or delay the tokenizing of prompts. Better tiers
    come first, and the keys of a tier take turns. Event-loop thread only, except for the work itself.

    A grammar that uses too much processor time is refused: its client must simplify it. If the wall time runs out
    first, the machine is busy, and the client should try again.
    """

    def __init__(self, num_threads: int = 4, cpu_limit_s: float = 10.0, patience_s: float = 30.0) -> None:
        """`patience_s` limits the wait for a thread, and separately the wait for the work."""
        self._cpu_limit_s = cpu_limit_s
        self._patience_s = patience_s
        self._slots = FairSlots(num_threads)

    async def run(self, work: Callable[[], T], param: str, requester: Requester = ANYONE) -> T:
        """Returns or raises what `work` does. Raises `InvalidRequestError` with the request's field `param` if the work
        takes too much processor time, and `OverloadedError` if it got too little of it, or if no thread was free in
        time. Abandoned work continues, and keeps its thread until it is done."""
        try:
            async with asyncio.timeout(self._patience_s):
                slot = await self._slots.acquire(requester)
        except TimeoutError:
            raise OverloadedError(
                f"The compilation of other requests' grammars takes more than {self._patience_s:g} s; try again.",
                _RETRY_S,
            ) from None
        timed = _Timed(work)
        working = asyncio.ensure_future(in_daemon_thread(timed, stack_bytes=_STACK_BYTES))
        working.add_done_callback(take_error)
        working.add_done_callback(lambda _: slot.release())
        await self._wait(working, timed, param)
        return working.result()

    async def _wait(self, working: asyncio.Future[T], timed: _Timed[T], param: str) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while not working.done():
            cpu_left_s = self._cpu_limit_s - timed.cpu_s()
            time_left_s = deadline_s - time.monotonic()
            if cpu_left_s <= 0:
                raise InvalidRequestError(
                    f"{param} takes more than {self._cpu_limit_s:g} s of processor time to compile; make it simpler.",
                    param,
                )
            if time_left_s <= 0:
                raise OverloadedError(
                    f"{param} could not be compiled in {self._patience_s:g} s, of which the machine gave it "
                    f"{timed.cpu_s():.1f} s: it is busy with other things. Try again.",
                    _RETRY_S,
                )
            # A thread's processor time cannot grow faster than wall time.
            await asyncio.wait((working,), timeout=max(_TOLERANCE_S, min(cpu_left_s, time_left_s)))


class _Timed(Generic[T]):
    """Work whose processor time other threads can read."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._clock: Callable[[], float] = float

    def __call__(self) -> T:
        self._clock = own_clock()
        return self._work()

    def cpu_s(self) -> float:
        """The time so far; 0 before the work has begun, and meaningless after its end."""
        try:
            return self._clock()
        except OSError:  # it has just ended
            return 0.0
