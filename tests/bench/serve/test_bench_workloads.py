"""What `bench serve` sends and when: made-up shapes, files of prompts, recorded traces, arrivals."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_server.bench.serve import workloads
from mlx_server.bench.serve.run import Arrivals
from mlx_server.bench.serve.workloads import (
    SHAPES,
    Plan,
    Prompts,
    Recorded,
    TraceLine,
    Turn,
    make_plan,
    read_dataset,
    warm_up_sessions,
)
from mlx_server.errors import ConfigError

DATA = Path(__file__).parent / "bench_data"


def make_prompts(seed: int = 1) -> Prompts:
    return Prompts(1.0, seed)


def words(plan: Plan) -> list[list[str]]:
    """Of each session's first turn."""
    return [session.turns[0].messages[0]["content"].split() for session in plan.sessions]


def trace(name: str, **replay: object) -> Plan:
    return Recorded(read_dataset(DATA / name), **replay).plan(make_prompts())


# -- shapes


def test_a_shape_and_a_seed_decide_every_word():
    plans = [make_plan(SHAPES["mixed"], make_prompts(seed), seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_the_shared_prefix_is_shared_and_nothing_else():
    texts = words(make_plan(SHAPES["shared-prefix"], make_prompts(), 0))
    assert [len(text) for text in texts] == [1056] * 16
    assert len({tuple(text[:1024]) for text in texts}) == 1
    assert len({tuple(text[1024:]) for text in texts}) == 16


def test_mixed_lengths_spread_over_their_ranges():
    plan = make_plan(SHAPES["mixed"], make_prompts(), 0)
    lengths = [len(text) for text in words(plan)]
    outputs = [session.turns[0].max_tokens for session in plan.sessions]
    assert len(plan.sessions) == 32
    assert 16 <= min(lengths) < 600
    assert 1400 < max(lengths) <= 2048
    assert 8 <= min(outputs) < 80
    assert 180 < max(outputs) <= 256


def test_an_agent_has_long_common_instructions_and_turns_of_its_own():
    plan = make_plan(SHAPES["agent"], make_prompts(), 0)
    assert plan.num_requests == 8 * 4
    assert {tuple(text[:4096]) for text in words(plan)} == {tuple(words(plan)[0][:4096])}
    later = [turn.messages[0]["content"] for session in plan.sessions for turn in session.turns[1:]]
    assert {len(text.split()) for text in later} == {512}
    assert len(set(later)) == 24


def test_warm_up_is_as_long_as_the_plan_and_other_text():
    prompts = make_prompts()
    plan = make_plan(SHAPES["uniform"], prompts, 0)
    warm = warm_up_sessions(plan, prompts, 3)
    texts = [session.turns[0].messages[0]["content"] for session in warm]
    assert [len(text.split()) for text in texts] == [128] * 3
    assert not {" ".join(text) for text in words(plan)} & set(texts)


# -- files


def test_prompts_are_sent_as_they_are():
    lines = read_dataset(DATA / "prompts.jsonl")
    plan = Recorded(lines).plan(make_prompts())
    assert [session.turns[0].max_tokens for session in plan.sessions] == [12, 64, 5]
    assert [[m["role"] for m in session.turns[0].messages] for session in plan.sessions] == [
        ["user"],
        ["user"],
        ["system", "user"],
    ]
    assert plan.sessions[1].turns[0].messages[0]["content"] == "Name a stone."
    assert isinstance(lines[0], Turn)


def test_mooncakes_hash_ids_become_shared_text():
    assert read_dataset(DATA / "mooncake.jsonl")[1] == TraceLine(0.5, 1400, 26, (0, 1, 3))
    plan = trace("mooncake.jsonl")
    first, second, third = words(plan)
    assert [len(text) for text in (first, second, third)] == [1100, 1400, 300]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third[:300] != first[:300]
    assert [session.arrival_s for session in plan.sessions] == [0.0, 0.5, 3.0]
    assert [session.turns[0].max_tokens for session in plan.sessions] == [52, 26, 8]


def test_a_trace_may_be_shrunk_and_hurried():
    plan = trace("mooncake.jsonl", speed=2.0, shrink=4)
    first, second, _ = words(plan)
    assert (len(first), len(second)) == (275, 350)
    assert first[:256] == second[:256]
    assert [session.arrival_s for session in plan.sessions] == [0.0, 0.25, 1.5]
    assert [session.turns[0].max_tokens for session in plan.sessions] == [13, 6, 2]


def test_azures_lines_come_in_order_of_arrival():
    assert read_dataset(DATA / "azure.csv") == [
        TraceLine(0.0, 374, 44),
        TraceLine(pytest.approx(1.5), 879, 55),
        TraceLine(pytest.approx(3.25), 396, 109),
    ]
    assert [len(text) for text in words(trace("azure.csv"))] == [374, 879, 396]


@pytest.mark.parametrize("line_break", [b"\r", b"\r\n"])
def test_a_trace_may_have_any_line_breaks(line_break: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes((DATA / "azure.csv").read_bytes().replace(b"\n", line_break))
    assert read_dataset(tmp_path / "trace.csv") == read_dataset(DATA / "azure.csv")


def test_a_prompt_may_have_unicodes_line_separators(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    ((message,),) = [turn.messages for turn in read_dataset(tmp_path / "prompts.jsonl")]
    assert message["content"] == "a\u2028b"


def test_burstgpts_failed_requests_are_left_out():
    assert read_dataset(DATA / "burstgpt.csv") == [TraceLine(0.0, 472, 18), TraceLine(113.0, 417, 276)]
    assert read_dataset(DATA / "burstgpt.csv", limit=1) == [TraceLine(0.0, 472, 18)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "request 2 is not understood: KeyError"),
        ('{"prompt": 3}\n', "`prompt` is not text"),
        ('{"messages": [{"content": "a"}]}\n', "messages with role and content"),
        ('{"messages": [{"role": "user"}]}\n', "messages with role and content"),
        ('{"messages": ["role"]}\n', "request 1 is not understood"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "request 1: a time is not finite"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1}\n', "a length is below 0"),
        ('{"prompt": "a"}\n{"timestamp": 1, "input_length": 1, "output_length": 1}\n', "mixes prompts with lines"),
        ("a,b\n1,2\n", "request 1 is not understood"),
        ('{"prompt": "a"\n', "request 1 is not understood"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 1}', "request 1 is not understood: OverflowError"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "request 1 is not understood: RecursionError"),
        (f"TIMESTAMP,ContextTokens\n{'x' * 200_000},1", "is not CSV that can be read: field larger than field limit"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_dataset(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="Cannot read the dataset"):
        read_dataset(tmp_path / "none.jsonl")


# -- arrivals


def gaps(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times_s])]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness, variation):
    """The gamma distribution's coefficient of variation is 1 / sqrt(shape)."""
    times_s = Arrivals(5.0, burstiness=burstiness).times_s(20_000, seed=3)
    drawn = gaps(times_s)
    assert times_s[-1] == pytest.approx(20_000 / 5.0)
    assert statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(variation, rel=0.05)


def test_arrivals_repeat_with_their_seed():
    arrivals = Arrivals(2.0)
    assert arrivals.times_s(50, 1) == arrivals.times_s(50, 1) != arrivals.times_s(50, 2)
    assert arrivals.times_s(0, 1) == []


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_a_dataset_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_MAX_BYTES", 1_000_000)
    with pytest.raises(ConfigError, match="/dev/zero has more than 1,000,000 bytes; name a dataset or a trace"):
        read_dataset(Path("/dev/zero"))
