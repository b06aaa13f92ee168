"""Drafts: what the n-gram drafter finds, how many a step carries, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.batching.speculation.draft_costs import Acceptance, RowCosts, StepRoom, choose_depths
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.batching.speculation.lookup import History, NgramDrafter
from mlx_server.request import Request
from mlx_server.sampling_params import SamplingParams
from tests.batching.worlds import make_request


def _request(name: str, prompt: Sequence[int], *, tenant: str = "", output: Sequence[int] = ()) -> Request:
    request = Request(
        name,
        list(prompt),
        SamplingParams(),
        arrival_s=0.0,
        max_total_tokens=len(prompt) + 100,
        extra_keys=(tenant,) if tenant else (),
    )
    request.output_token_ids += output
    return request


def _longest_match(tokens: Sequence[int], tail: Sequence[int], most: int) -> list[int]:
    """What `History.find` says, by trying every place."""
    for depth in range(min(8, len(tail)), 2, -1):
        for end in range(len(tokens) - 1, depth - 1, -1):
            if list(tokens[end - depth : end]) == list(tail[-depth:]):
                return list(tokens[end : end + most])
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    most=st.integers(1, 9),
)
def test_a_history_finds_what_followed_the_latest_longest_match(tokens: list[int], cuts: list[int], most: int) -> None:
    history, first = History(), 0
    for cut in [*sorted(cuts), len(tokens)]:
        history.extend(tokens[first:cut])
        first = max(first, cut)
    assert history.find(history.tail(), most) == _longest_match(tokens, tokens[-8:], most)


def test_the_longest_match_wins_over_the_latest() -> None:
    history = History()
    history.extend([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3])
    assert history.find(history.tail(), 2) == [4, 8]


def test_a_match_ends_at_the_beginning_of_a_history() -> None:
    """The history fills its array, so what lies before its first token in the array is its last one."""
    history = History()
    history.extend([1, 2, 3, 4, 9, 1, 2, 3, 5, *range(100, 343), 3, 1, 2, 3])
    assert len(history._tokens) == history.num_tokens
    assert history.find(history.tail(), 1) == [5]


def test_a_bounded_history_forgets_its_older_half() -> None:
    history = History(100)
    history.extend(list(range(1000, 1100)))
    history.extend([5])
    assert history.num_tokens == 50
    assert history.find([1060, 1061, 1062], 2) == [1063, 1064]
    assert history.find([1010, 1011, 1012], 2) == []


def test_a_request_is_drafted_from_its_own_tokens_and_then_from_its_tenant_s_outputs() -> None:
    drafter = NgramDrafter()
    first = _request("first", [50, 51], tenant="a", output=[1, 2, 3, 4, 5])
    drafter.propose(first, 4)
    drafter.forget(first)

    assert drafter.propose(_request("second", [70, 1, 2, 3], tenant="a"), 4) == [4, 5]
    assert drafter.propose(_request("other", [70, 1, 2, 3], tenant="b"), 4) == []
    assert drafter.propose(_request("own", [1, 2, 3, 7, 1, 2, 3], tenant="a"), 4) == [7, 1, 2, 3]
    replaced = _request("replaced", [70, 1, 2, 3], tenant="a")
    replaced.adapter_key = "of another content"
    assert drafter.propose(replaced, 4) == []


def test_drafts_do_not_run_from_one_output_into_the_next() -> None:
    drafter = NgramDrafter()
    for name, output in (("first", [1, 2, 3, 4]), ("second", [5, 6, 7])):
        request = _request(name, [50], output=output)
        drafter.propose(request, 1)
        drafter.forget(request)
    assert drafter.propose(_request("third", [60, 2, 3, 4]), 4) == []
    assert drafter.propose(_request("fourth", [60, 1, 2, 3]), 4) == [4]


def _costs(seconds: dict[int, float]) -> RowCosts:
    costs = RowCosts()
    for rows, cost in seconds.items():
        for _ in range(1 + 4):  # the first may compile
            costs.observe(rows, cost)
    return costs


def test_the_worked_example_of_depths() -> None:
    costs = _costs({1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013, 8: 0.020})
    assert choose_depths({"a": 7}, {"a": 0.8}, StepRoom(1, costs, 100)) == {"a": 4}
    assert choose_depths({"a": 7}, {"a": 0.8}, StepRoom(1, costs, 2)) == {"a": 2}


def test_no_draft_where_rows_cost_what_they_bring() -> None:
    costs = _costs({rows: 0.001 * rows for rows in (1, 2, 4, 8, 16)})
    assert choose_depths({"a": 7, "b": 7}, {"a": 0.9, "b": 0.9}, StepRoom(2, costs, 100)) == {}


def test_the_likelier_drafts_come_first() -> None:
    costs = _costs({2: 0.010, 4: 0.010, 6: 0.030})
    assert choose_depths({"a": 4, "b": 4}, {"a": 0.9, "b": 0.5}, StepRoom(2, costs, 100)) == {"a": 2}


def test_nothing_is_drafted_before_a_plain_step_was_timed() -> None:
    assert choose_depths({"a": 7}, {"a": 0.9}, StepRoom(1, RowCosts(), 100)) == {}


def _num_steps_until_tried(costs: RowCosts) -> int:
    """Single rows take 10 ms; two are tried once they seem to take less than 15."""
    for num_steps in range(10_000):
        if costs.seconds(2) < 0.015:
            return num_steps
        costs.observe(1, 0.010)
    raise AssertionError("never tried")


def test_what_tries_show_to_be_slow_is_tried_less_often_until_it_is_not() -> None:
    costs = _costs({1: 0.010, 2: 0.020})
    waits = []
    for seconds in (0.020, 0.020, 0.020, 0.017, 0.020):
        waits.append(_num_steps_until_tried(costs))
        costs.observe(2, seconds)
    assert [round(num_steps, -1) for num_steps in waits] == [130, 230, 430, 430, 120]


@given(
    seconds=st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), st.floats(1e-4, 1.0), min_size=1),
    proposed=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), max_size=4),
    most=st.integers(0, 12),
)
def test_depths_are_within_what_was_proposed(seconds: dict[int, float], proposed: dict[str, int], most: int) -> None:
    depths = choose_depths(proposed, dict.fromkeys(proposed, 0.7), StepRoom(4, _costs(seconds), most))
    assert sum(depths.values()) <= most
    assert all(1 <= depth <= proposed[name] for name, depth in depths.items())


def test_who_is_always_wrong_stops_and_tries_again_seldom() -> None:
    speculation = Speculation(NgramDrafter(), 4)
    speculation.costs = _costs({1: 0.010, 2: 0.012, 4: 0.014, 6: 0.018})
    request = _request("a", [1, 2, 3, 7, 8, 9, 1, 2, 3])
    num_tries = 0
    for _ in range(400):
        drafts = speculation.choose({request: 4}, StepRoom(1, speculation.costs)).get("a")
        if drafts is not None:
            num_tries += 1
            speculation.on_result("a", len(drafts.token_ids), 0)
    assert 2 <= num_tries <= 20


def test_counters_tell_drafts_and_the_places_that_were_right() -> None:
    speculation = Speculation(NgramDrafter(), 4)
    speculation.on_result("a", 3, 2)
    speculation.on_result("a", 2, 1)
    counters = speculation.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 5, 3)
    assert counters.num_accepted_by_place == {0: 2, 1: 1, 2: 0, 3: 0}


def test_acceptance_counts_only_what_was_compared() -> None:
    acceptance = Acceptance()
    acceptance.add(7, 3)
    assert (acceptance.num_agreed, acceptance.num_compared) == (3, 4)
    assert acceptance.rate(0.5) == pytest.approx((3 + 1) / (4 + 2))


def test_a_step_is_tried_at_twice_the_rows_that_were_measured_at_most() -> None:
    costs = _costs({4: 0.010})
    assert sum(choose_depths(dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 0.9), StepRoom(4, costs)).values()) == 4


def test_drafts_do_not_make_a_step_longer_than_its_limit() -> None:
    costs = _costs({1: 0.010, 2: 0.012, 4: 0.016, 8: 0.024})
    assert choose_depths({"a": 7}, {"a": 0.95}, StepRoom(1, costs, limit_s=0.016)) == {"a": 3}


def test_waiting_for_the_host_counts_against_drafts() -> None:
    costs = _costs({8: 0.010, 12: 0.0101, 16: 0.0102})
    assert choose_depths({"a": 8}, {"a": 0.9}, StepRoom(8, costs))
    assert choose_depths({"a": 8}, {"a": 0.9}, StepRoom(8, costs, wait_s=0.01)) == {}


def test_one_slow_step_is_not_believed() -> None:
    costs = _costs({1: 0.010, 8: 0.012})
    costs.observe(8, 1.0)
    assert costs.seconds(8) == pytest.approx(0.012 * 1.1)
    costs.observe(8, 0.012)
    assert costs.seconds(8) == pytest.approx(0.012 * 1.05)


def test_what_was_slow_once_is_tried_again_and_then_known() -> None:
    """Steps of eight rows met a slow minute, and are not run any more; then what they are known to take shrinks until
    they look worth a try, but never below what fewer rows take."""
    costs = _costs({1: 0.010, 8: 0.080})
    for _ in range(100):
        costs.observe(1, 0.010)
    assert costs.seconds(8) == pytest.approx(0.080)
    num_steps = 0
    while not choose_depths({"a": 7}, {"a": 0.9}, StepRoom(1, costs)):
        costs.observe(1, 0.010)
        num_steps += 1
    assert 10 < num_steps < 200
    for _ in range(1000):
        costs.observe(1, 0.010)
    assert costs.seconds(8) == pytest.approx(0.010)
    costs.observe(8, 0.040)
    assert costs.seconds(8) == pytest.approx(0.060)


def test_what_steps_between_two_kinds_cost_does_not_fade_while_they_run() -> None:
    """Nine streams after eight: nine rows are read between eight, which are not run any more, and twelve."""
    costs = _costs({rows: 0.010 + 0.001 * rows for rows in range(1, 10)})
    for _ in range(1000):
        costs.observe(9, 0.019)
    assert costs.seconds(9) == pytest.approx(0.019, rel=0.1)


def test_a_new_request_is_tried_again_after_others_were_wrong() -> None:
    speculation = Speculation(NgramDrafter(), 4)
    speculation.costs = _costs({1: 0.010, 2: 0.0115, 4: 0.013, 8: 0.020})
    for _ in range(40):
        speculation.on_result("wrong", 3, 0)
    request = _request("new", [1, 2, 3, 7, 8, 9, 1, 2, 3])
    tries = [bool(speculation.choose({request: 4}, StepRoom(1, speculation.costs))) for _ in range(400)]
    assert not tries[0]
    assert any(tries)


def test_the_wait_of_one_hiccup_is_not_believed_for_ever() -> None:
    speculation = Speculation(NgramDrafter(), 4)
    speculation.costs = _costs({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.020})
    request = _request("a", [1, 2, 3, 7, 8, 9, 1, 2, 3])
    for _ in range(20):
        speculation.observe(4, 0.013, 60.0, is_drafted=True)
    assert not speculation.choose({request: 4}, StepRoom(1, speculation.costs, wait_s=speculation.wait_s))
    for _ in range(300):
        speculation.observe(1, 0.010, 0.0, is_drafted=False)
    assert speculation.choose({request: 4}, StepRoom(1, speculation.costs, wait_s=speculation.wait_s))


def test_what_a_wrong_draft_has_computed_again_counts() -> None:
    """As in the worked example; and less is drafted the more is known that would come again."""
    costs = _costs({1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013, 8: 0.020})
    assert choose_depths({"a": 7}, {"a": 0.8}, StepRoom(1, costs, num_known={"a": 1})) == {"a": 3}
    dear = _costs({1: 0.010, 4: 0.014, 8: 0.020, 16: 0.032})
    depths = [choose_depths({"a": 4}, {"a": 0.4}, StepRoom(1, dear, num_known={"a": known})) for known in (1, 12)]
    assert depths[0] != {}
    assert depths[1] == {}


def test_what_the_sender_predicts_is_drafted_from_the_first_token_on() -> None:
    """And goes on behind a place where the output has gone another way."""
    drafter = NgramDrafter()
    predicted = (50, 51, 52, 53, 54, 55, 56, 57)
    request = make_request("r", [1, 2, 3, 4, 5], 40, prediction_token_ids=predicted)
    other = make_request("other", [1, 2, 3, 4, 5], 40)
    for one in (request, other):
        one.output_token_ids.append(50)
    assert drafter.propose(request, 3) == [51, 52, 53]
    assert not drafter.propose(other, 3)
    request.output_token_ids += [51, 99, 53, 54]
    assert not drafter.propose(request, 3)
    request.output_token_ids.append(55)
    assert drafter.propose(request, 3) == [56, 57]
    drafter.forget(request)
    assert not drafter._predicted


def test_samples_of_one_prompt_share_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDrafter()
    num_read = []
    extend = History.extend
    monkeypatch.setattr(History, "extend", lambda self, ids: (num_read.append(len(ids)), extend(self, ids))[-1])
    predicted = tuple(range(50, 90))
    samples = [make_request(name, [1, 2, 3, 4, 5], 40, prediction_token_ids=predicted) for name in "abcd"]
    for one in samples:
        one.output_token_ids.append(50)
        assert drafter.propose(one, 3) == [51, 52, 53]
    assert num_read.count(5 + 40) == 1
    for one in samples:
        drafter.forget(one)
    assert not drafter._predictions
