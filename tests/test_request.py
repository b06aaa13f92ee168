"""What a sampled token does to its request."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.request import FinishReason, Request, append_token
from tests.batching.worlds import FakeConstraint, make_request


def in_flight(**extra: object) -> Request:
    request = make_request("r", 4, **extra)  # type: ignore[arg-type]
    request.num_in_flight = 1
    return request


def test_a_token_is_appended_and_no_longer_in_flight() -> None:
    request = in_flight(max_tokens=3)
    assert append_token(request, 7) is None
    assert request.output_token_ids == [7]
    assert request.num_in_flight == 0


def test_the_last_token_ends_by_length() -> None:
    request = in_flight(max_tokens=2)
    assert append_token(request, 7) is None
    assert append_token(request, 8) is FinishReason.LENGTH
    assert append_token(in_flight(max_tokens=1), 7) is FinishReason.LENGTH


def test_an_end_of_sequence_stops_even_as_the_last_token() -> None:
    for max_tokens in (1, 5):
        request = in_flight(max_tokens=max_tokens, eos_token_ids=frozenset({9}))
        assert append_token(request, 9) is FinishReason.STOP
        assert request.stop_reason is None
        assert request.output_token_ids == [9]


def test_end_of_sequence_can_be_ignored_but_stop_ids_cannot() -> None:
    request = in_flight(eos_token_ids=frozenset({9, 10}), ignore_eos=True, stop_token_ids=(10,))
    assert append_token(request, 9) is None
    assert append_token(request, 10) is FinishReason.STOP
    assert request.stop_reason == 10


def test_a_stop_id_is_named() -> None:
    request = in_flight(stop_token_ids=(5, 6))
    assert append_token(request, 6) is FinishReason.STOP
    assert request.stop_reason == 6


def test_a_grammar_forces_what_has_no_alternative() -> None:
    request = in_flight(max_tokens=10, constraint=FakeConstraint(6, forced={1: (50, 51), 4: (60,)}))
    assert append_token(request, 7) is None
    assert request.output_token_ids == [7, 50, 51]
    assert append_token(request, 8) is None
    assert request.output_token_ids == [7, 50, 51, 8, 60]
    assert append_token(request, 9) is FinishReason.STOP
    assert request.output_token_ids == [7, 50, 51, 8, 60, 9]


def test_a_grammar_may_end_with_what_it_forces() -> None:
    request = in_flight(max_tokens=10, constraint=FakeConstraint(3, forced={1: (50, 51)}))
    assert append_token(request, 7) is FinishReason.STOP
    assert request.output_token_ids == [7, 50, 51]


def test_forced_tokens_stop_at_the_bound() -> None:
    request = in_flight(max_tokens=2, constraint=FakeConstraint(9, forced={1: (50, 51, 52)}))
    assert append_token(request, 7) is FinishReason.LENGTH
    assert request.output_token_ids == [7, 50]


def test_forced_tokens_can_be_stop_ids() -> None:
    request = in_flight(max_tokens=9, stop_token_ids=(51,), constraint=FakeConstraint(9, forced={1: (50, 51, 52)}))
    assert append_token(request, 7) is FinishReason.STOP
    assert request.output_token_ids == [7, 50, 51]
    assert request.stop_reason == 51


def test_a_grammar_that_is_complete_stops() -> None:
    request = in_flight(max_tokens=1, constraint=FakeConstraint(1))
    assert append_token(request, 7) is FinishReason.STOP


def test_the_bound_ends_an_incomplete_grammar() -> None:
    request = in_flight(max_tokens=1, constraint=FakeConstraint(3, forced={1: (50,)}))
    assert append_token(request, 7) is FinishReason.LENGTH
    assert request.output_token_ids == [7]


def test_a_token_that_the_grammar_refuses_is_an_error() -> None:
    request = in_flight(constraint=FakeConstraint(3, refused=frozenset({7})))
    assert append_token(request, 7) is FinishReason.ERROR


def test_end_of_sequence_is_no_matter_of_the_grammar() -> None:
    constraint = FakeConstraint(3, refused=frozenset({9}))
    request = in_flight(eos_token_ids=frozenset({9}), constraint=constraint)
    assert append_token(request, 9) is FinishReason.STOP
    assert constraint.accepted == []


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({}, FinishReason.STOP),
        ({"allowed_token_ids": (0, 5)}, FinishReason.STOP),
        ({"allowed_token_ids": (5,)}, FinishReason.ERROR),
        ({"min_tokens": 1}, FinishReason.STOP),
        ({"min_tokens": 2}, FinishReason.ERROR),
    ],
)
def test_token_0_ends_an_answer_only_if_it_was_allowed(sampling: dict[str, Any], reason: FinishReason) -> None:
    """It is also what a row without any allowed token gives."""
    for num_before in (0, 1):
        constraint = FakeConstraint(3)  # allows token 0 after one other
        request = in_flight(eos_token_ids=frozenset({0}), constraint=constraint, **sampling)
        for _ in range(num_before):
            assert append_token(request, 7) is None
        assert append_token(request, 0) is (reason if num_before else FinishReason.ERROR)


def test_an_answer_whose_forced_end_is_cut_is_not_complete() -> None:
    constraint = FakeConstraint(4, forced={1: (50, 51, 52)})
    request = in_flight(max_tokens=3, constraint=constraint)
    assert append_token(request, 9) is FinishReason.LENGTH
    assert constraint.is_terminated()
    assert request.output_token_ids == [9, 50, 51]


def test_an_answer_that_is_complete_at_the_bound_has_stopped() -> None:
    request = in_flight(max_tokens=4, constraint=FakeConstraint(4, forced={1: (50, 51, 52)}))
    assert append_token(request, 9) is FinishReason.STOP


def test_who_wants_logprobs_has_every_token_sampled() -> None:
    request = in_flight(max_tokens=9, logprobs=1, constraint=FakeConstraint(4, forced={1: (50, 51, 52)}))
    assert append_token(request, 9) is None
    assert request.output_token_ids == [9]
