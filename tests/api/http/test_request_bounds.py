"""One request cannot hold the event loop: what is too much is refused before it is parsed, and what is much is read
beside the loop, one body at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import tracemalloc
from collections import Counter
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.api.auth.keys import Caller
from mlx_server.api.http import access, request_bounds
from mlx_server.api.http.parser import MAX_HEADERS, MAX_SMALL_CHUNKS
from mlx_server.api.http.request_bounds import (
    MAX_BACKSLASHES,
    MAX_CONTAINERS,
    MAX_ECHO_CHARS,
    MAX_MEMBERS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    MAX_VALUES,
)
from mlx_server.api.http.text_turns import LARGE_BYTES, TextWorkers
from mlx_server.api.openai.completions import MAX_SEQUENCES
from mlx_server.engine.fair_slots import Requester
from mlx_server.errors import QuotaExceededError
from mlx_server.request import Priority
from mlx_server.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS
from mlx_server.tiers import Tier
from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

JSON = {"content-type": "application/json"}
MESSAGE = user("x")[0]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the thread of each parse."""
    threads: list[str] = []
    parse = request_bounds.from_json

    def recorded(body: bytes, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(body, **options)

    monkeypatch.setattr(request_bounds, "from_json", recorded)
    return threads


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("[" + "[]," * MAX_CONTAINERS + "[]]", f"{MAX_CONTAINERS} lists and objects"),
        ("[" + "{}," * MAX_CONTAINERS + "{}]", f"{MAX_CONTAINERS} lists and objects"),
        ("[" * (MAX_CONTAINERS + 1), f"{MAX_CONTAINERS} lists and objects"),
        ("{" + '"":1,' * MAX_MEMBERS + '"a":1}', f"{MAX_MEMBERS} members"),
        ("[" + "1," * MAX_VALUES + "1]", f"{MAX_VALUES} values"),
        ('"' + r"\n" * (MAX_BACKSLASHES + 1) + '"', f"{MAX_BACKSLASHES} backslashes"),
    ],
    ids=["lists", "objects", "nested", "members", "values", "escapes"],
)
async def test_too_many_values_are_refused_before_they_are_parsed(
    world: World, parsed: list[str], field: str, limit: str
):
    answer = await world.http.post("/v1/completions", content=f'{{"prompt":"a","x":{field}}}', headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert limit in answer.json()["error"]["message"]
    assert parsed == []


async def test_what_stands_in_strings_does_not_count(world: World, parsed: list[str]):
    text = '[{":,"}]\\"' * (MAX_CONTAINERS // 2)
    answer = await world.complete(user=text)
    assert answer.status_code == 200, answer.text
    assert len(parsed) == 1


VALUES = st.recursive(
    st.none() | st.integers() | st.text('"\\[]{},: ué', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[,:a', max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(value=VALUES, slice_bytes=st.integers(1, 9), is_ascii=st.booleans())
@settings(max_examples=200, deadline=None)
async def test_the_count_is_exact_wherever_the_slices_end(value: Any, slice_bytes: int, is_ascii: bool):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_bounds, "_SLICE_BYTES", slice_bytes)
        outside = b"".join(request_bounds._outside_strings(body))
    assert outside.count(b"[") + outside.count(b"{") == num_containers(value)
    assert outside.count(b":") == num_members(value)


def num_containers(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(num_containers, inner))


def num_members(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(num_members, inner))


@pytest.mark.parametrize(("depth", "status"), [(200, 200), (201, 400), (5000, 400)])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
async def test_nesting_is_bounded(world: World, opening: str, closing: str, depth: int, status: int):
    field = opening * (depth - 1) + "1" + closing * (depth - 1)  # the body is one more
    answer = await world.http.post("/v1/completions", content=f'{{"prompt":"a","x":{field}}}', headers=JSON)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["message"] == "The body is nested more than 200 levels deep; flatten it."


MESSAGES = [MESSAGE] * (MAX_MESSAGES + 1)
CAPS: list[tuple[str, dict[str, Any], str, int]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "messages", MAX_MESSAGES),
    ("/v1/messages", {"max_tokens": 1, "messages": MESSAGES}, "messages", MAX_MESSAGES),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}, "messages", MAX_MESSAGES),
    ("/tokenize", {"messages": MESSAGES}, "messages", MAX_MESSAGES),
    ("/v1/responses", {"input": MESSAGES}, "input", MAX_MESSAGES),
    ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
    ("/v1/completions", {"prompt": ["a"] * (MAX_SEQUENCES + 1)}, "prompt", MAX_SEQUENCES),
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop", MAX_STOP_STRINGS),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(MAX_LOGIT_BIAS + 1)}},
        "logit_bias",
        MAX_LOGIT_BIAS,
    ),
    ("/v1/completions", {"prompt": "a", "model": "n" * (MAX_NAME_CHARS + 1)}, "model", MAX_NAME_CHARS),
    ("/tokenize", {"prompt": "a", "model": "n" * (MAX_NAME_CHARS + 1)}, "model", MAX_NAME_CHARS),
    (
        "/v1/responses",
        {"input": "a", "metadata": {"a": "x" * MAX_ECHO_CHARS}},
        "metadata",
        MAX_ECHO_CHARS,
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "field", "limit"), CAPS, ids=[f"{path} {field}" for path, _, field, _ in CAPS]
)
async def test_counts_and_names_are_bounded(world: World, path: str, body: dict[str, Any], field: str, limit: int):
    answer = await world.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in error["message"]
    assert str(limit) in error["message"]
    assert len(answer.content) < 5000


async def test_a_million_wrong_entries_are_one_error(world: World):
    answer = await world.complete(prompt="a", allowed_token_ids=["x"] * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].count("valid integer") == 1


@pytest.mark.parametrize("name", ["n" * 12_000, "n" * 12_000 + "/x"])
async def test_long_names_in_paths_are_not_repeated_whole(world: World, name: str):
    answer = await world.http.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    assert len(answer.content) < 5000


async def test_large_bodies_are_read_beside_the_loop(world: World, parsed: list[str]):
    assert (await world.complete(user="x")).status_code == 200
    assert (await world.complete(user="x" * 20_000)).status_code == 200
    small, large = parsed
    assert small == threading.current_thread().name
    assert large.startswith("bodies")


async def test_bodies_are_parsed_one_at_a_time_by_priority_and_key_in_turn():
    workers, done, may_go = TextWorkers(8), [], threading.Event()
    greedy, modest, high = (
        Requester("greedy", Priority.LOW),
        Requester("modest", Priority.LOW),
        Requester("vip", Priority.HIGH),
    )

    def work(name: str) -> None:
        may_go.wait(5)
        done.append(name)

    reads = [asyncio.create_task(workers.parse(greedy, 1, lambda n=f"greedy {i}": work(n))) for i in range(4)]
    await asyncio.sleep(0)
    reads.append(asyncio.create_task(workers.parse(modest, 1, lambda: work("modest"))))
    reads.append(asyncio.create_task(workers.parse(high, 1, lambda: work("high"))))
    gone = asyncio.create_task(workers.parse(high, 1, lambda: work("gone")))
    await asyncio.sleep(0)
    gone.cancel()
    may_go.set()
    await asyncio.gather(*reads)
    assert done == ["greedy 0", "high", "greedy 1", "modest", "greedy 2", "greedy 3"]


async def test_a_body_of_usual_size_does_not_wait_for_large_ones():
    workers, go = TextWorkers(10), threading.Event()
    large = asyncio.create_task(workers.parse(Requester("large"), LARGE_BYTES + 1, lambda: go.wait(1)))
    await asyncio.sleep(0)
    assert await workers.parse(Requester("usual"), LARGE_BYTES, lambda: "parsed") == "parsed"
    assert not large.done()
    go.set()
    assert await large


async def test_a_client_that_leaves_while_its_body_is_parsed_keeps_the_turn():
    workers, may_go, order = TextWorkers(8), threading.Event(), []
    gone = asyncio.create_task(workers.parse(Requester("gone"), 1, lambda: order.append(may_go.wait(5))))
    await asyncio.sleep(0.01)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    low = asyncio.create_task(workers.parse(Requester("low", Priority.LOW), 1, lambda: order.append("low")))
    high = asyncio.create_task(workers.parse(Requester("high", Priority.HIGH), 1, lambda: order.append("high")))
    await asyncio.sleep(0.05)
    assert workers._parser._work_queue.qsize() == 0  # they wait for the turn, and not in the thread's own queue
    may_go.set()
    await asyncio.gather(low, high)
    assert order == [True, "high", "low"]


def caller(identity: str, priority: Priority) -> Caller:
    return Caller(identity, Tier(name=priority.name.lower(), priority=priority))


async def test_bytes_that_wait_to_be_read_are_bounded_by_key_and_tier(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "MAX_HELD_BYTES", 100)
    counted: Counter[str] = Counter()
    first, second, third = (access.HeldBody(counted, caller(name, Priority.LOW)) for name in "abc")
    first.add(60)
    with pytest.raises(QuotaExceededError, match=r"60 bytes of bodies from the key a .* at most 100"):
        first.add(60)
    second.add(100)
    with pytest.raises(QuotaExceededError, match=r"160 bytes of bodies from the tier low .* at most 200"):
        third.add(60)
    second.release()
    second.release()
    third.add(60)
    for held in (first, third):
        held.release()
    assert not counted


async def test_a_caller_s_bodies_in_waiting_are_refused_with_429(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "MAX_HELD_BYTES", 1000)
    world.configure_server()
    answer = await world.complete(user="x" * 2000)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert 'mlx_serve:quota_refusals_total{tier="default"} 1.0' in (await world.http.get("/metrics")).text
    assert (await world.complete(user="x" * 200)).status_code == 200
    assert (await world.complete(user="x" * 700)).status_code == 200


PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/api/chat": "messages",
}


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_count_until_their_prompts_are_made(world: World, monkeypatch: pytest.MonkeyPatch, path: str):
    """They may wait long for a model, for images or for their turn in a thread."""
    monkeypatch.setattr(access, "MAX_HELD_BYTES", 1000)
    world.configure_server()
    is_formatting, may_go_on = world.hold_formatting(monkeypatch)
    world.engine.gate.clear()

    def ask() -> asyncio.Task[httpx.Response]:
        message = {"role": "user", "content": "Hi", "junk": "x" * 600}
        return asyncio.create_task(world.http.post(path, json={PATHS[path]: [message], "max_tokens": 5}))

    first = ask()
    await until(is_formatting.is_set)
    refused = await ask()
    assert (refused.status_code, "are not read yet" in refused.text) == (429, True)
    may_go_on.set()
    await until(lambda: world.engine.requests)
    second = ask()
    await until(lambda: len(world.engine.requests) == 2)
    world.engine.gate.set()
    assert [(await one).status_code for one in (first, second)] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"])
async def test_bodies_count_while_their_tokens_wait_to_be_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(access, "MAX_HELD_BYTES", 1000)
    world.configure_server()
    is_formatting, may_go_on = world.hold_formatting(monkeypatch)
    message = {"role": "user", "content": "Hi", "junk": "x" * 600}
    body = {"input" if "responses" in path else "messages": [message]}
    first = asyncio.create_task(world.http.post(path, json=body))
    await until(is_formatting.is_set)
    refused = await world.http.post(path, json=body)
    assert (refused.status_code, "are not read yet" in refused.text) == (429, True)
    may_go_on.set()
    assert (await first).status_code == 200
    assert (await world.http.post(path, json=body)).status_code == 200


LONG_TEXT = "word " * 100_000
CUT: dict[str, Any] = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 5}
JUNK = {"role": "user", "content": "Hi", "junk": ["x" * 1000 + str(number) for number in range(1000)]}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "given"),
    [
        *((path, {field: [JUNK]}) for path, field in PATHS.items()),
        *((path, CUT) for path in ("/v1/completions", "/api/generate")),
        ("/api/generate", {**CUT, "raw": True}),
    ],
)
async def test_what_nobody_reads_is_not_held_while_an_answer_is_generated(
    world: World, path: str, given: dict[str, Any], is_streamed: bool
):
    world.engine.gate.clear()
    body = {**given, "max_tokens": 5, "stream": is_streamed}
    tracemalloc.start()
    try:
        asking = [asyncio.create_task(world.http.post(path, json=body)) for _ in range(3)]
        await until(lambda: len(world.engine.requests) == 3)
        gc.collect()
        parsed = tracemalloc.Filter(True, request_bounds.__file__)
        traces = tracemalloc.take_snapshot().filter_traces([parsed]).traces
    finally:
        tracemalloc.stop()
    world.engine.gate.set()
    assert [(await one).status_code for one in asking] == [200] * 3
    assert sum(trace.size for trace in traces) < 500_000


async def test_too_many_header_fields_are_refused_before_they_are_parsed(world: World):
    for number, status in ((MAX_HEADERS, b"200"), (MAX_HEADERS + 1, b"400")):
        reader, writer = await world.connect()
        fields = b"".join(b"x-%d: a\r\n" % index for index in range(number - 2))
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + fields + b"\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        writer.close()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_lines_of_a_body_are_no_header_fields(world: World, end: bytes):
    """However its head's lines end."""
    reader, writer = await world.connect()
    body = b'{"prompt": "a"' + b"\n" * (2 * MAX_HEADERS) + b"}"
    head = (b"POST /v1/completions HTTP/1.1", b"host: localhost", b"connection: close")
    lines = (*head, b"content-type: application/json", b"content-length: %d" % len(body), b"", body)
    writer.write(end.join(lines))
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    writer.close()


@pytest.mark.parametrize(("number", "is_read"), [(MAX_SMALL_CHUNKS, True), (MAX_SMALL_CHUNKS + 10, False)])
async def test_a_body_in_crumbs_is_refused(world: World, number: int, is_read: bool):
    reader, writer = await world.connect()
    text = json.dumps({"prompt": "a", "user": ""}).encode()
    body = text[:-2] + b"x" * (number - len(text)) + text[-2:]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
    writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # what is not read any more may cost the client the answer
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200") == is_read
    assert len(world.engine.requests) == is_read
    writer.close()


@pytest.mark.parametrize(("host", "words"), [("localhost", b"4096 small chunks; send"), ("elsewhere.example", b"")])
async def test_crumbs_are_refused_in_words_unless_an_answer_was_sent_before(
    world: World, host: str, words: bytes, caplog: pytest.LogCaptureFixture
):
    """A foreign host is refused before the body is read."""
    reader, writer = await world.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n" % host.encode()
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n{\r\n")
    if not words:
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 403")
    for _ in range(MAX_SMALL_CHUNKS + MAX_SMALL_CHUNKS // 1024):  # each KiB allows one more
        writer.write(b"1\r\n \r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 400") if words else not answer
    assert words in answer
    assert "Traceback" not in caplog.text
    writer.close()


async def test_a_number_that_is_too_large_is_found_behind_many():
    values = "1, " * (request_bounds._SLICE_VALUES + 5)
    assert request_bounds.parse_json(f"[{values}2.5]".encode())[-1] == 2.5
    with pytest.raises(RequestValidationError):
        request_bounds.parse_json(f"[{values}1e999]".encode())


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ud83d…\uD83D\uDE42", "\ufffd…\U0001f642"),
        (r"\uDE42\ud83d\n", "\ufffd\ufffd\n"),
        (r"\\ud83d\\\ud83d", "\\ud83d\\\ufffd"),
    ],
)
async def test_half_an_emoji_ends_no_session(world: World, written: str, read: str):
    """Agents cut tools' results by UTF-16 units, and send what they have kept at every turn."""
    for body in (f'{{"messages": [{{"role": "user", "content": "{written}"}}]}}', f'{{"prompt": "{written}"}}'):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await world.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert read in world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids)
