"""Clients of one tier share it equally, whatever each of them sends."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.fair_order import FairOrder, OrderedRequests
from mlx_server.batching.limits import QueueLimits
from mlx_server.errors import QueueFullError, QuotaExceededError
from mlx_server.outputs import ModelRunnerOutput, RequestOutput, SampledToken
from mlx_server.request import Priority, Request, RequestStatus
from tests.batching.worlds import make_request, make_scheduler, step_seconds, waiting


class Device:
    """A scheduler and a clock that moves on by what steps take: 50 ms if anyone decodes, and 1 ms for each token of a
    longer chunk. Each client that floods keeps its number of requests open."""

    def __init__(self, num_blocks: int = 4000, **limits: Any) -> None:
        limits = {"target_step_s": 0.15, "context_doubling_tokens": 1e12, "aging_rate": 0.1, **limits}
        self.scheduler = make_scheduler(num_blocks, **limits)
        self.now = 100.0
        self.requests: dict[str, Request] = {}
        self.first_token_s: dict[str, float] = {}
        self.started: list[str] = []
        self.floods: dict[str, tuple[Any, ...]] = {}
        self.served: Counter[str] = Counter()  # tokens of each client

    def add(self, client: str, num_tokens: int, max_tokens: int, priority: Priority = Priority.NORMAL) -> str:
        name = f"{client}{len(self.requests)}"
        token_ids = [1000 + len(self.requests), *[0] * (num_tokens - 1)]
        request = make_request(name, token_ids, max_tokens, priority=priority, arrival_s=self.now, client=client)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def flood(self, client: str, num_open: int, *sizes: Any) -> None:
        """`sizes` are those of `add`; a length may be a function."""
        self.floods[client] = sizes
        for _ in range(num_open):
            self._add_flood(client)

    def step(self) -> None:
        output = self.scheduler.schedule(self.now)
        assert output is not None, "nothing can run"
        self.started += [data.request_id for data in output.new_requests]
        for chunk in output.chunks:
            self.served[self.requests[chunk.request_id].client] += chunk.num_tokens + chunk.is_sampling
        seconds = step_seconds(output)
        self.now += seconds
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        for result in self.scheduler.update(ModelRunnerOutput(output.step_id, sampled, step_time_s=seconds)):
            self._take(result)
        if output.step_id % 16 == 0:  # it takes longer than the step
            self.scheduler.check_integrity()

    def run_until_first_token(self, name: str, most_steps: int = 2000) -> float:
        """How long after its arrival a request has its first token."""
        for _ in range(most_steps):
            if name in self.first_token_s:
                return self.first_token_s[name] - self.requests[name].arrival_s
            self.step()
        raise AssertionError(f"{name} has no token after {most_steps} steps")

    def _take(self, result: RequestOutput) -> None:
        self.first_token_s.setdefault(result.request_id, self.now)
        client = self.requests[result.request_id].client
        if result.finish_reason is not None and client in self.floods:
            self._add_flood(client)

    def _add_flood(self, client: str) -> None:
        sizes = [size() if callable(size) else size for size in self.floods[client]]
        self.add(client, *sizes)


def test_a_request_does_not_wait_for_the_hundred_of_another_client() -> None:
    device, rng = Device(max_num_seqs=8), random.Random(1)
    device.flood("A", 100, 200, lambda: rng.randint(5, 60))
    for _ in range(40):
        device.step()
    name = device.add("B", 200, 10)
    num_started = len(device.started)
    device.run_until_first_token(name)
    before = device.started[num_started : device.started.index(name)]
    assert len(before) <= 1, "it starts when a seat is free"
    again = device.add("A", 200, 10)
    num_started = len(device.started)
    device.run_until_first_token(again)
    assert device.started.index(again) - num_started >= 90, "requests of one client keep their order"


def test_without_another_client_nothing_is_counted() -> None:
    device = Device(max_num_seqs=2)
    device.flood("A", 5, 40, 3)
    for _ in range(30):
        device.step()
    assert device.started == sorted(device.started, key=lambda name: device.requests[name].arrival_s)
    order = device.scheduler._table.waiting._tiers[Priority.NORMAL]
    assert not order.is_shared


def test_the_example_of_the_docstring() -> None:
    order, stream = FairOrder(), make_request("stream", 8, 100, client="A")
    requests = [make_request(f"a{index}", 200, 100, arrival_s=index, client="A") for index in range(9)]
    requests += [make_request(f"b{index}", 300, 100, arrival_s=50 + index, client="B") for index in range(2)]
    order.push(stream, 0.0, 8)
    order.remove(stream)
    order.start(stream)
    stream.num_computed_tokens = 50_000
    for request in requests:
        order.push(request, request.arrival_s, request.num_tokens)
        order.begin_to_wait(request)
    stream.num_computed_tokens += 10
    order.settle()
    found = []
    for _ in range(5):
        request = order.first()
        assert request is not None
        found.append((request.request_id, order.turn(requests[0])[0], order.turn(requests[-1])[0]))
        order.remove(request)
        order.end_to_wait(request)
        order.start(request)
        order.count(request, request.num_tokens)
    assert found == [
        ("b0", 50_010, 50_000),
        ("a0", 50_010, 50_300),
        ("a1", 50_210, 50_300),
        ("b1", 50_410, 50_300),
        ("a2", 50_410, 50_600),
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([2, 4, 8]),
    st.tuples(*[st.sampled_from([20, 200, 1500])] * 2),
    st.tuples(*[st.sampled_from([3, 20, 60])] * 2),
    st.tuples(*[st.sampled_from([9, 12, 40])] * 2),
)
def test_clients_that_wait_get_the_same_tokens(
    seed: int, max_num_seqs: int, prompts: tuple[int, int], outputs: tuple[int, int], num_open: tuple[int, int]
) -> None:
    """Two clients that always wait differ at most by what all seats may hold, as in Sheng et al., whatever lengths and
    numbers of requests they send. In order of arrival, one would get as many times more as it has requests open."""
    rng = random.Random(seed)
    device = Device(max_num_seqs=max_num_seqs, max_num_batched_tokens=512)
    for client, size, num_tokens, count in zip("AB", prompts, outputs, num_open):
        device.flood(
            client, count, lambda size=size: rng.randint(1, size), lambda most=num_tokens: rng.randint(1, most)
        )
    largest = max(size + 2 * num_tokens for size, num_tokens in zip(prompts, outputs))
    for _ in range(150):
        device.step()
        assert abs(device.served["A"] - device.served["B"]) <= max_num_seqs * largest + 512


def test_short_prompts_with_long_outputs_gain_nothing() -> None:
    """They may overtake longer ones of their own client, but would take every other seat of another one's."""
    device = Device(max_num_seqs=8)
    device.flood("A", 40, 10, 100)
    device.flood("B", 40, 200, 20)
    for _ in range(600):
        device.step()
    assert abs(device.served["A"] - device.served["B"]) <= 8 * (10 + 2 * 100)


def test_many_small_prompts_gain_nothing() -> None:
    """Half of the tokens go to the least work, but not to the client with the least work."""
    device = Device(max_num_seqs=64)
    device.flood("A", 100, 20, 1)
    for client in "BCD":
        device.flood(client, 20, 400, 1)
    for _ in range(100):
        device.step()
    assert max(device.served.values()) - min(device.served.values()) <= 2 * 401


def test_who_leaves_with_more_than_others_comes_back_with_it() -> None:
    """A sends eight, waits for all of them, and sends eight again; B always waits. In the end they differ by what eight
    seats of A hold at most. If A were forgotten whenever it has no request, it would get seven times as much."""
    device = Device(max_num_seqs=8)
    device.flood("B", 40, 300, 5)
    for _ in range(1200):
        if not any(request.client == "A" for request in device.scheduler.in_order()):
            for _ in range(8):
                device.add("A", 10, 300)
        device.step()
    assert abs(device.served["A"] - device.served["B"]) <= 8 * (10 + 2 * 300)


def test_who_waits_for_a_prefix_saves_nothing_up() -> None:
    """B's first request is parked while A computes its prefix. The twenty that B sends then take turns with A's."""
    device = Device(max_num_seqs=2, max_num_batched_tokens=64)
    device.add("A", 3000, 1)
    device.step()
    parked = make_request("parked", device.requests["A0"].prompt_token_ids, 1, arrival_s=device.now, client="B")
    device.requests["parked"] = parked
    device.scheduler.add_request(parked)
    device.flood("A", 30, 40, 1)
    while device.requests["A0"].num_computed_tokens < 2800:
        device.step()
    for _ in range(20):
        device.add("B", 40, 1)
    num_started = len(device.started)
    while len(device.started) < num_started + 20:
        device.step()
    assert Counter(name[0] for name in device.started[num_started:])["A"] >= 8


def test_a_long_prompt_gets_half_of_the_tokens_beside_a_flood_of_short_ones() -> None:
    device = Device(max_num_seqs=16)
    device.flood("A", 50, 100, 1)
    for _ in range(5):
        device.step()
    before = device.served.copy()
    name = device.add("B", 20_000, 1)
    device.run_until_first_token(name)
    given = device.served - before
    assert given["B"] == 20_001
    assert given["A"] <= 1.1 * given["B"], "before it there were only prompts of the other client"


def test_what_a_client_did_not_use_is_not_saved_up() -> None:
    """B's single stream needs little for a long time; when B floods, too, both get the same from then on."""
    device = Device(max_num_seqs=8)
    device.flood("A", 40, 100, 20)
    device.add("B", 10, 400)
    for _ in range(350):
        device.step()
    assert device.served["A"] > 10 * device.served["B"]
    device.flood("B", 40, 100, 20)
    before = device.served.copy()
    for _ in range(200):
        device.step()
    given = device.served - before
    assert given["A"] == pytest.approx(given["B"], rel=0.15)


def test_a_client_without_requests_is_forgotten() -> None:
    device = Device(max_num_seqs=4)
    for index in range(50):
        device.run_until_first_token(device.add(f"client {index}", 40, 1))
    device.add("A", 40, 1)
    device.step()
    assert len(device.scheduler._table.waiting._tiers[Priority.NORMAL].clients) <= 2


def test_in_a_worse_tier_clients_share_what_age_gives_it() -> None:
    """HIGH takes all it can. LOW's eighth does not go to A alone, whose hundred requests are all older than B's. B's
    request, which has not aged itself, gets the eighth once it has started; otherwise it took 92 steps."""
    device = Device(max_num_seqs=8)
    device.flood("A", 100, 100, 5, Priority.LOW)
    device.flood("H", 40, 300, 5, Priority.HIGH)
    for _ in range(100):
        device.step()
    name = device.add("B", 100, 5, Priority.LOW)
    num_started = len(device.started)
    while name not in device.started:
        device.step()
    before = [other for other in device.started[num_started : device.started.index(name)] if other.startswith("A")]
    assert len(before) <= 2
    for _ in range(20):
        device.step()
    assert name in device.first_token_s


def test_clients_take_turns_within_a_step() -> None:
    """One step starts sixteen requests: what it gives to each counts at once."""
    device = Device(max_num_seqs=16)
    for client in "AB":
        for _ in range(20):
            device.add(client, 10, 5)
    device.step()
    assert Counter(name[0] for name in device.started) == {"A": 8, "B": 8}


def test_a_start_looks_at_each_client_of_its_own_tier_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that starts many requests of many clients would hold up the streams otherwise: it was six times."""
    looks, first = [], OrderedRequests.first
    device = Device(max_num_seqs=16)
    for number in range(90):
        device.add(f"client {number}", 10, 5, Priority(number % 3))

    def looked(of_client: OrderedRequests) -> Request | None:
        looks.append(of_client)
        return first(of_client)

    monkeypatch.setattr(OrderedRequests, "first", looked)
    device.step()
    assert len(device.started) == 16
    assert len(looks) <= (16 + 3) * 30 + 2 * 16


def test_long_streams_count_while_they_run() -> None:
    """A's four streams are half of its share: of the requests that come beside them, it starts fewer than B."""
    device = Device(max_num_seqs=8)
    for _ in range(4):
        device.add("A", 10, 2000)
    device.step()
    device.flood("A", 30, 50, 3)
    device.flood("B", 30, 50, 3)
    for _ in range(300):
        device.step()
    assert abs(device.served["A"] - device.served["B"]) <= 8 * (50 + 2 * 3) + 4 * 2


def test_streams_count_between_prompts_that_run_while_none_waits() -> None:
    device = Device(max_num_seqs=16)
    for _ in range(10):
        device.add("A", 32, 5000)
    device.step()
    prompts = [device.requests[device.add(client, 12_000, 10)] for client in "AB"]
    before = device.served.copy()
    for _ in range(60):
        device.step()
    assert all(request.status is RequestStatus.RUNNING for request in prompts), "none waits"
    served = device.served - before
    assert abs(served["A"] - served["B"]) < 200


def test_who_runs_before_an_older_request_of_another_client_has_not_aged_past_it() -> None:
    """Eight clients' requests run and B's is next, since A has had more; but A's, which waits, is the oldest. So none
    that runs is promoted when HIGH comes, as the oldest of all would be."""
    device = Device(max_num_seqs=8)
    device.now = 60.0
    for _ in range(9):
        device.add("A", 40, 30, Priority.LOW)
    device.step()
    clients = "CDEFGIJK"
    for client, arrival_s in [*((client, 70.0) for client in clients), ("B", 95.0)]:
        device.now = arrival_s
        device.add(client, 40, 200, Priority.LOW)
        device.step()
    while len(device.started) < 16:
        device.step()
    assert {name[0] for name in device.started[8:]} == set(clients)
    device.now = 105.0
    device.step()
    high = device.add("H", 40, 5, Priority.HIGH)
    device.run_until_first_token(high)
    assert not [name for name in device.started[8:16] if device.requests[name].is_promoted]


def test_a_preempted_request_is_not_counted_twice() -> None:
    device = Device(num_blocks=70, max_num_seqs=8)
    device.flood("A", 12, 150, 600)
    device.flood("B", 12, 150, 600)
    for _ in range(1500):
        device.step()
    assert device.scheduler.counters.num_tokens_recomputed > 0
    order, tokens = device.scheduler._table.waiting._tiers[Priority.NORMAL], Counter[str]()
    order.settle()
    for request in device.requests.values():
        tokens[request.client] += request.num_ever_computed + request.num_output_tokens
    assert tokens == {name: client.level for name, client in order.clients.items()}
    assert tokens["A"] == pytest.approx(tokens["B"], abs=4 * (150 + 2 * 600)), "about four run at a time"


@pytest.mark.parametrize(("client", "num_cached"), [("B", 320), ("A", 0)])
def test_a_client_s_prefix_outlives_the_flood_of_another(client: str, num_cached: int) -> None:
    """And not its own flood: of one client, the least recently used goes."""
    device = Device(num_blocks=100, max_num_seqs=2)
    chat = [5] * 330
    device.scheduler.add_request(make_request("first", chat, 1, client=client, arrival_s=device.now))
    device.requests["first"] = device.scheduler._table.requests["first"]
    device.run_until_first_token("first")
    device.flood("A", 4, 200, 1)
    while device.scheduler.counters.num_block_evictions < 400:
        device.step()
    request = make_request("second", [*chat, 6], 1, client=client, arrival_s=device.now)
    device.requests["second"] = request
    device.scheduler.add_request(request)
    device.run_until_first_token("second")
    assert request.num_cached_tokens == num_cached


# --- the queue's limits ---------------------------------------------------------------------------------------


def ids(outputs: list[RequestOutput]) -> list[str]:
    return [output.request_id for output in outputs]


def test_a_full_queue_has_room_for_a_client_with_fewer_requests() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_num_waiting=9))
    for index in range(9):
        scheduler.add_request(make_request(f"a{index}", client="A", arrival_s=index))
    displaced: list[RequestOutput] = []
    for index in range(4):
        displaced += scheduler.add_request(make_request(f"b{index}", client="B", arrival_s=10 + index))
    assert ids(displaced) == ["a8", "a7", "a6", "a5"]
    error = displaced[0].error
    assert isinstance(error, QueueFullError)
    assert error.message == (
        "The queue is full (waiting requests: 9), and one of a key that has fewer waiting has taken this one's place. "
        "Try again later."
    )
    assert error.reason == "displaced"
    for client in "AB":
        with pytest.raises(QueueFullError, match="Waiting requests: 9"):
            scheduler.add_request(make_request("one more", client=client, arrival_s=20))
    assert ids(scheduler.add_request(make_request("c", client="C", arrival_s=21))) == ["a4"]
    scheduler.check_integrity()
    assert len(waiting(scheduler)) == 9


def test_a_client_with_more_gives_way_though_the_fullest_one_cannot() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_queued_tokens=190))
    for name, num_tokens in (("a0", 5), ("a1", 95), ("c0", 30), ("c1", 30), ("c2", 30)):
        scheduler.add_request(make_request(name, num_tokens, client=name[0], arrival_s=len(name)))
    assert ids(scheduler.add_request(make_request("b", 20, client="b", arrival_s=9))) == ["c2"]


def test_a_queue_full_of_tokens_has_room_for_a_client_with_fewer() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_queued_tokens=100))
    scheduler.add_request(make_request("a0", 70, client="A"))
    scheduler.add_request(make_request("a1", 30, client="A", arrival_s=1))
    with pytest.raises(QueueFullError, match="Waiting prompt tokens: 100; this request has 40"):
        scheduler.add_request(make_request("b", 40, client="B", arrival_s=2))  # it would need both places
    assert ids(scheduler.add_request(make_request("b", 30, client="B", arrival_s=2))) == ["a1"]
    scheduler.check_integrity()


def test_worse_tiers_go_before_fuller_clients() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_num_waiting=4))
    for index in range(3):
        scheduler.add_request(make_request(f"a{index}", client="A", arrival_s=index))
    scheduler.add_request(make_request("low", client="C", priority=Priority.LOW))
    assert ids(scheduler.add_request(make_request("b0", client="B", arrival_s=5))) == ["low"]
    assert ids(scheduler.add_request(make_request("b1", client="B", arrival_s=6))) == ["a2"]


def test_who_asks_to_run_later_does_not_fill_its_tiers_queue() -> None:
    scheduler = make_scheduler(tiers={"free": QueueLimits(max_num_waiting=3)})
    for index in range(3):
        request = make_request(f"a{index}", client="A", tier="free", priority=Priority.LOW, arrival_s=index)
        scheduler.add_request(request)
    displaced = scheduler.add_request(make_request("b0", client="B", tier="free", arrival_s=5))
    assert ids(displaced) == ["a2"]
    assert displaced[0].error is not None
    assert "one of a key that has fewer waiting" in displaced[0].error.message
    with pytest.raises(QuotaExceededError):
        scheduler.add_request(make_request("a3", client="A", tier="free", arrival_s=6))


def test_a_tiers_own_limit_is_shared_too() -> None:
    limits = QueueLimits(max_num_waiting=3)
    scheduler = make_scheduler(queue=QueueLimits(max_num_waiting=5), tiers={"free": limits, "paid": limits})
    for index in range(3):
        scheduler.add_request(make_request(f"a{index}", client="A", tier="free", arrival_s=index))
        if index < 2:
            scheduler.add_request(make_request(f"p{index}", client="P", tier="paid", arrival_s=index))
    displaced = scheduler.add_request(make_request("b0", client="B", tier="free", arrival_s=5))
    assert ids(displaced) == ["a2"]
    assert displaced[0].error is not None
    assert displaced[0].error.message.startswith("The queue of tier free is full (waiting requests: 3), and one of a")
    with pytest.raises(QuotaExceededError, match="Waiting requests of tier free: 3"):
        scheduler.add_request(make_request("b1", client="B", tier="free", arrival_s=6))
    assert {request.request_id for request in waiting(scheduler)} == {"a0", "a1", "b0", "p0", "p1"}
    scheduler.check_integrity()
