"""No body of any size stalls the streams of others, and what it took of memory is given back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from tests.attack.bodies import ATTACKS, many
from tests.attack.worlds import Target, read_answer, target

pytestmark = [pytest.mark.attack, pytest.mark.timeout(600)]

MAX_GAP_S = 0.25
MAX_GROWTH_BYTES = 512 * 1024 * 1024


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("attacked")) as attacked:
        yield attacked


@pytest.fixture
def watched(attacked: Target) -> Target:
    """The target, its gaps counted from now on."""
    time.sleep(0.5)
    attacked.worst_gap_s()
    return attacked


@pytest.mark.parametrize("name", ATTACKS)
def test_one_body_stalls_nobody(watched: Target, name: str):
    attack = ATTACKS[name]
    body = attack.body()
    watched.worst_gap_s()
    answer = watched.post(attack.path, body)
    gap_s = watched.worst_gap_s()
    print(f"\n{name}: {gap_s:.3f} s, {answer.status}")
    assert answer.status == attack.status, answer.body[:500]
    assert len(answer.body) < 10_000
    assert gap_s <= MAX_GAP_S


def assert_no_stall(watched: Target, name: str) -> None:
    gap_s = watched.worst_gap_s()
    print(f"\n{name}: {gap_s:.3f} s")
    assert gap_s <= MAX_GAP_S


def test_nor_do_eight_at_once(watched: Target):
    body = many(b'{"prompt":"a","max_tokens":1,"x":[', b"[]", b"]}", 130_000)()
    watched.worst_gap_s()
    senders = [threading.Thread(target=watched.post, args=("/v1/completions", body)) for _ in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert_no_stall(watched, "eight bodies of 130,000 lists at once")


def test_nor_do_a_thousand_heads_of_1600_fields(watched: Target):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"%d:x\r\n" % i for i in range(1600))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(watched.connect()) for _ in range(1000)]
        watched.worst_gap_s()
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + b"\r\n")
        assert_no_stall(watched, "1,000 heads of 1,600 fields")


def test_nor_does_a_body_of_a_million_chunks(watched: Target):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with watched.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1_000_000 + b"0\r\n\r\n")
        assert read_answer(connection).status in (0, 400)
    assert_no_stall(watched, "a million chunks of one byte")


def test_memory_is_bounded_and_given_back(attacked: Target):
    before = attacked.rss_bytes
    for _ in range(3):
        for attack in ATTACKS.values():
            attacked.post(attack.path, attack.body())
    after = attacked.rss_bytes
    print(f"\nresident: {before / 2**20:.0f} -> {after / 2**20:.0f} MiB")
    assert after - before < MAX_GROWTH_BYTES
