"""Reasoning that is free, but bounded, before an answer that is not."""

from __future__ import annotations

from typing import Any

from constraint_worlds import EOS_ID, MODEL, WORLD, accepts, ids_of, spec_of, start
from text_worlds import make_tokenizer

from mlx_server.batching.speculation.drafting import allowed_drafts
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.text.reasoning import ReasoningConstraint, ReasoningMarkers, find_reasoning_markers
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import InvalidRequestError
from tests.embedders import embedder_tokenizer

THINK = ReasoningMarkers("<think>", "</think>")
THINK_ID, END_THINK_ID = ids_of("<think>")[0], ids_of("</think>")[0]
ANY_BUT_ENDS = set(range(WORLD.vocab_size)) - WORLD.eos_token_ids


def thinking(*, is_open: bool, max_tokens: int | None = None, **grammar: Any) -> ReasoningConstraint:
    answer = start(**grammar) if grammar else None
    return ReasoningConstraint(WORLD, THINK, WORLD.vocab_size, is_open=is_open, answer=answer, max_tokens=max_tokens)


def test_reasoning_is_free_and_the_answer_is_not() -> None:
    constraint = thinking(is_open=True, choice=["the"])
    assert constraint.is_reasoning
    assert MODEL.allowed_ids(constraint) == ANY_BUT_ENDS
    assert constraint.forced_tokens() == []
    assert accepts(constraint, "anything at all")
    assert not constraint.is_terminated()
    assert accepts(constraint, "</think>")
    assert not constraint.is_reasoning
    assert MODEL.allowed_ids(constraint) == {*ids_of("\n"), *ids_of("the")}
    assert accepts(constraint, "\n")
    assert not accepts(constraint, "\n")
    assert constraint.forced_tokens() == ids_of("the")
    assert constraint.is_terminated()
    assert MODEL.allowed_ids(constraint) == WORLD.eos_token_ids


def test_no_output_ends_in_its_reasoning_while_an_answer_has_to_come() -> None:
    constraint = thinking(is_open=True, choice=["the"])
    assert not constraint.accept(EOS_ID)
    assert accepts(constraint, "x</think>the")
    assert constraint.accept(EOS_ID)
    ahead = allowed_drafts((*ids_of("x"), EOS_ID, *ids_of("y")), thinking(is_open=True, choice=["the"]))
    assert ahead.token_ids == tuple(ids_of("x"))
    assert thinking(is_open=True, max_tokens=9).accept(EOS_ID), "nothing has to come"


def test_an_output_may_open_reasoning_or_answer_at_once() -> None:
    direct = thinking(is_open=False, choice=["the"])
    assert MODEL.allowed_ids(direct) == {THINK_ID, *ids_of("the")}
    assert accepts(direct, "the")
    assert direct.is_terminated()
    reasoned = thinking(is_open=False, choice=["the"])
    assert accepts(reasoned, "<think>")
    assert MODEL.allowed_ids(reasoned) == ANY_BUT_ENDS
    assert accepts(reasoned, "x</think>the")
    assert reasoned.is_terminated()
    assert not accepts(thinking(is_open=False, choice=["the"]), "x")


def test_the_end_marker_is_found_in_any_tokenisation() -> None:
    constraint = thinking(is_open=True, choice=["the"])
    for character in "x</think>":
        assert constraint.accept(ids_of(character)[0])
    assert not constraint.is_reasoning
    assert not accepts(constraint, "x")


def test_a_spent_budget_forces_the_end_marker() -> None:
    constraint = thinking(is_open=False, max_tokens=3, choice=["the"])
    assert accepts(constraint, "<think>ab")
    assert MODEL.allowed_ids(constraint) == ANY_BUT_ENDS
    assert accepts(constraint, "c")
    assert MODEL.allowed_ids(constraint) == {END_THINK_ID}
    assert not accepts(constraint, "d")
    assert constraint.forced_tokens() == [END_THINK_ID]
    assert accepts(constraint, "the")
    assert constraint.is_terminated()


def test_a_budget_without_a_grammar_leaves_the_answer_free() -> None:
    constraint = thinking(is_open=True, max_tokens=0)
    assert constraint.forced_tokens() == [END_THINK_ID]
    assert constraint.bitmask() is None
    assert accepts(constraint, "anything")
    assert constraint.bitmask() is None
    assert constraint.forced_tokens() == []
    assert not constraint.is_terminated()
    unopened = thinking(is_open=False)
    assert unopened.bitmask() is None
    assert accepts(unopened, "no thought")


def test_markers_of_several_tokens() -> None:
    markers = ReasoningMarkers("<think>hm", "</think>so")
    constraint = ReasoningConstraint(
        WORLD, markers, WORLD.vocab_size, is_open=False, answer=start(choice=["the"]), max_tokens=2
    )
    assert constraint.accept(THINK_ID)
    assert constraint.is_reasoning
    assert MODEL.allowed_ids(constraint) == {ids_of("h")[0]}
    assert not accepts(constraint, "x")
    assert WORLD.decode(constraint.forced_tokens()) == "hm"
    assert accepts(constraint, "</think>s")  # the budget ends in the middle of the marker
    assert WORLD.decode(constraint.forced_tokens()) == "</think>so"
    assert accepts(constraint, "the")


def test_an_answer_with_a_marker_of_its_own_is_reached_through_it() -> None:
    tokens = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
    tokenizer = make_tokenizer(special=tokens)
    markers = find_reasoning_markers(tokenizer)
    assert markers is not None
    answer = GrammarCompiler(tokenizer).compile(spec_of(choice=["the"])).start()
    constraint = ReasoningConstraint(tokenizer, markers, tokenizer.vocab_size, is_open=False, answer=answer)
    written = constraint.forced_tokens()
    assert constraint.is_reasoning
    for token_id in tokenizer.encode("hm<|end|><|start|>assistant"):
        assert constraint.accept(token_id)
        written.append(token_id)
    written += constraint.forced_tokens()
    assert constraint.is_terminated()
    assert tokenizer.decode(written, skip_special_tokens=False) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>the"
    )


def test_markers_are_written_without_what_the_tokenizer_puts_around_a_text() -> None:
    tokenizer = Tokenizer(embedder_tokenizer())
    assert len(tokenizer.encode("a")) == 2, "it ends each text with a token"

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def constraint(markers: ReasoningMarkers, **options: Any) -> ReasoningConstraint:
        return ReasoningConstraint(tokenizer, markers, tokenizer.vocab_size, **options)

    opening = constraint(THINK, is_open=False)
    assert opening.accept(plain("<")[0])
    assert opening.forced_tokens() == plain("think>")
    assert constraint(THINK, is_open=True, max_tokens=0).forced_tokens() == plain("</think>")
    grammar = GrammarCompiler(tokenizer).compile(spec_of(choice=["yes"]))
    answered = ReasoningMarkers("<think>", "</think>", answer_start="<answer>")
    closed = constraint(answered, is_open=True, max_tokens=0, answer=grammar.start())
    assert closed.forced_tokens()[: len(plain("</think><answer>"))] == [*plain("</think>"), *plain("<answer>")]
    broken = constraint(THINK, is_open=True, answer=grammar.start(), max_tokens=0)
    broken.forced_tokens()
    assert broken.accept(plain("\n")[0])
    assert broken.forced_tokens() == plain("yes")


def test_a_fork_goes_its_own_way() -> None:
    free = thinking(is_open=True)
    assert free.fork() is not None
    constraint = thinking(is_open=True, choice=["the", " world"])
    assert accepts(constraint, "x</think>\n")
    other = constraint.fork()
    assert other is not None
    assert accepts(other, "the")
    assert (other.is_terminated(), constraint.is_terminated()) == (True, False)
    assert accepts(constraint, " world")


def test_an_answer_that_cannot_be_forked_is_none() -> None:
    class Alone:
        def fork(self) -> None:
            return None

    answer: Any = Alone()
    assert ReasoningConstraint(WORLD, THINK, WORLD.vocab_size, is_open=True, answer=answer).fork() is None


def test_what_an_answer_failed_on_is_what_the_output_failed_on() -> None:
    class Failed:
        error = InvalidRequestError("too complex", "regex")

    answer: Any = Failed()
    failed = ReasoningConstraint(WORLD, THINK, WORLD.vocab_size, is_open=True, answer=answer)
    assert failed.error is Failed.error
    assert thinking(is_open=True).error is None


def test_a_marker_of_several_tokens_begins_with_its_first() -> None:
    markers = ReasoningMarkers("<think>\n", "</think>")
    constraint = ReasoningConstraint(WORLD, markers, WORLD.vocab_size, is_open=False, answer=start(choice=["the"]))
    assert MODEL.allowed_ids(constraint) == {THINK_ID, *ids_of("the")}
    assert accepts(constraint, "<think>")
    assert MODEL.allowed_ids(constraint) == set(ids_of("\n"))
    assert constraint.forced_tokens() == ids_of("\n")
    assert accepts(constraint, "free</think>the")
