"""`bench compare`: verdicts on known figures, and tiny HTTP servers that are started, measured and always ended."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_server.bench import compare, servers
from mlx_server.bench.compare import Figure, Turns, figures_of, judge
from mlx_server.bench.servers import Server
from mlx_server.errors import ConfigError, ServeError

FAKE = Path(__file__).parent / "bench_fake_server.py"
COMMAND = f"{sys.executable} {FAKE} {{port}}"
LATENCY = Figure("ttft", "TTFT")
RATE = Figure("rate", "rate", is_rate=True, by_output=True)
URLS = ("--url", "a=http://127.0.0.1:1", "--url", "b=http://127.0.0.1:1")
SMALL = ("--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--num-warmups", "0")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(argv)


def turns(name: str, *values: float, num_output: int = 100, failed: int = 0) -> Turns:
    common = {"total_output_tokens": num_output, "failed": failed}
    return Turns(name, tuple({"ttft": value, "rate": value, **common} for value in values))


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def wait_until(condition, what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def noted_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


# -- verdicts


def test_ranges_apart_make_a_verdict_with_a_ratio_of_medians_and_the_spread_of_rounds():
    verdict = judge(LATENCY, turns("a", 100, 110, 90), turns("b", 300, 200, 220))
    assert (verdict.factor, verdict.low, verdict.high) == (2.2, pytest.approx(200 / 110), 3.0)
    assert (verdict.is_better, verdict.reason) == (True, "")
    assert judge(LATENCY, turns("b", 300, 200, 220), turns("a", 100, 110, 90)).is_better is False


def test_a_rate_is_better_when_it_is_higher():
    verdict = judge(RATE, turns("a", 50, 60, 55), turns("b", 10, 11, 12))
    assert (verdict.factor, verdict.is_better) == (5.0, True)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (turns("a", 100, 210, 90), turns("b", 300, 200, 220), "within the spread"),
        (turns("a", 1, 1, 1), turns("b", 1, 1, 1), "within the spread"),
        (turns("a", 1, 1), turns("b", 9, 9), "fewer than 3 rounds"),
        (turns("a", 1, 1, 1, failed=1), turns("b", 9, 9, 9), "requests failed"),
        (Turns("a", (None, None, None)), turns("b", 9, 9, 9), "requests failed"),
        (turns("a", 0, 0, 0), turns("b", 9, 9, 9), "a figure is 0"),
    ],
)
def test_a_verdict_is_refused_with_its_reason(first, second, reason):
    verdict = judge(LATENCY, first, second)
    assert (verdict.is_better, verdict.reason) == (None, reason)


def test_answers_of_other_lengths_make_no_verdict_on_throughput():
    first, second = turns("a", 9, 9, 9, num_output=100), turns("b", 1, 1, 1, num_output=90)
    assert judge(RATE, first, second).reason == "answers differ in length"
    assert judge(LATENCY, first, second).is_better is False


def test_the_table_tells_medians_ranges_and_who_leads():
    ours, theirs = turns("ours", 100, 110, 90), turns("theirs", 300, 200, 220)
    table = compare.render([ours, theirs], [LATENCY])
    assert "| TTFT           | 100 (90.0-110) | 220 (200-300) | 2.20x (1.82-3.00) |   ours |" in table
    assert "| output tokens  |            100 |           100 |" in table


def test_the_first_is_held_against_the_best_of_the_others():
    ours, slow, fast = turns("ours", 10, 11, 12), turns("slow", 30, 31, 32), turns("fast", 5, 6, 7)
    lost, broken = turns("lost", 1, 1, 1, failed=1), Turns("broken", (None,))
    table = compare.render([ours, slow, lost, broken, fast], [LATENCY, RATE])
    latency, rate = (next(line for line in table.splitlines() if f"| {name} " in line) for name in ("TTFT", "rate"))
    assert latency.split("|")[-3:-1] == [" 0.55x (0.50-0.58) ", "   fast "]
    assert rate.split("|")[-3:-1] == [" 0.35x (0.33-0.38) ", "   slow "]
    assert "no verdict: requests failed" in compare.render([ours, lost], [LATENCY])


def test_the_intruder_is_judged_by_the_gaps_it_makes():
    assert figures_of("long-prompt-intruder", has_goodput=False)[0].key == "worst_gap_ms"
    assert figures_of("uniform", has_goodput=True)[-1].key == "request_goodput"


# -- servers


@pytest.mark.slow
def test_turns_interleave_and_every_turn_has_a_server_of_its_own(tmp_path, capsys):
    pids = {name: tmp_path / name for name in ("a", "b")}
    argv = [f"--server={name}={COMMAND} {token_ms} {pids[name]}" for name, token_ms in (("a", 0), ("b", 30))]
    out = tmp_path / "out.json"
    assert compare.run(parsed(*argv, *SMALL, "--rounds", "3", "--json", str(out))) == 0
    printed = capsys.readouterr()
    order = [line.split(":")[0] for line in printed.err.splitlines()]
    assert order == [f"uniform, round {number}, {name}" for number in (1, 2, 3) for name in ("a", "b")]
    started = [pid for path in pids.values() for pid in noted_pids(path)]
    assert len(set(started)) == 3 * 2 * 2
    wait_until(lambda: not any(map(is_running, started)), "a server or its child still runs")
    document = json.loads(out.read_text())
    (result,) = document["results"]
    assert [turn["seed"] for turn in result["turns"]["a"]] == [0, 1, 2]
    ttft = next(v for v in result["verdicts"] if v["figure"] == "mean_ttft_ms")
    assert (ttft["first"], ttft["second"]) == ("a", "b")
    assert ttft["low"] <= ttft["factor"] <= ttft["high"]
    assert document == json.loads(printed.out.splitlines()[-1])


def test_each_number_of_threads_has_tables_and_reaches_the_servers_and_their_commands(capsys):
    model = "env FAKE_MODELS=$OPENBLAS_NUM_THREADS,{threads}"
    shell = f"sh -c 'exec {model} {COMMAND}'"
    argv = [f"--server=a={shell}", f"--server=b={shell}", *SMALL, "--rounds", "1", "--threads", "1", "3"]
    assert compare.run(parsed(*argv)) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("uniform")] == [
        "uniform (rounds: 1, threads: 1)",
        "uniform (rounds: 1, threads: 3)",
    ]
    results = json.loads(printed.splitlines()[-1])["results"]
    names = ("model_id", "seed")
    found = [(one["threads"], *(turn[name] for name in names)) for one in results for turn in one["turns"]["a"]]
    assert found == [(1, "1", 0), (3, "3", 1)]


def test_runs_with_different_seeds_share_no_prompt(monkeypatch):
    """A server of --url keeps what earlier runs sent in its prefix cache."""
    seeds = []

    def note(_, load, *__):
        seeds.append(load.seed)
        raise ServeError("not measured")

    monkeypatch.setattr(compare, "_take_turn", note)
    for seed in ("-1", "0", "1", "2"):
        compare.run(parsed("--url", "a=http://a", "--url", "b=http://b", *SMALL, "--rounds", "3", "--seed", seed))
    assert len(seeds) == 24
    assert len(set(seeds)) == 12


def test_a_server_that_cannot_start_is_reported_with_its_last_words_and_the_others_go_on(tmp_path, capsys):
    argv = [f"--server=good={COMMAND}", f"--server=bad=env FAKE_START=broken {COMMAND}"]
    assert compare.run(parsed(*argv, *SMALL, "--rounds", "1")) == 1
    printed = capsys.readouterr()
    assert "bad ended with status 1 before it was ready: no such model: broken" in printed.err
    assert "no verdict: requests failed" in printed.out
    assert json.loads(printed.out.splitlines()[-1])["results"][0]["turns"]["good"][0]["completed"] == 2


def test_a_command_that_does_not_exist_is_named(tmp_path):
    server = Server(name="x", command="/no/such/program {port}")
    with (
        pytest.raises(ServeError, match=r"x: cannot run /no/such/program: No such file"),
        server.session(model=None, log_path=tmp_path / "log", start_timeout_s=5),
    ):
        pass


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    noted = tmp_path / "pids"
    slow = Server(name="x", command=f"env FAKE_START=slow {COMMAND} 0 {noted}")
    with (
        pytest.raises(ServeError, match=r"did not answer 200 at /health or /v1/models within 1 s"),
        slow.session(model=None, log_path=tmp_path / "log", start_timeout_s=1),
    ):
        pass
    wait_until(lambda: not any(map(is_running, noted_pids(noted))), "it still runs")


def test_a_running_server_is_used_at_its_url(tmp_path):
    started = Server(name="x", command=COMMAND)
    with started.session(model=None, log_path=tmp_path / "log", start_timeout_s=20) as url:
        given = Server(name="y", url=url)
        with given.session(model=None, log_path=tmp_path / "log", start_timeout_s=20) as same:
            assert same == url


@pytest.mark.usefixtures("dead_proxy")
def test_urls_may_end_in_the_path_of_the_api(tmp_path, capsys):
    started = Server(name="x", command=COMMAND)
    with started.session(model=None, log_path=tmp_path / "log", start_timeout_s=20) as url:
        urls = ["--url", f"a={url}/v1", "--url", f"b={url}/"]
        assert compare.run(parsed(*SMALL, *urls, "--rounds", "1", "--start-timeout", "2")) == 0
    assert "uniform, round 1, a: " in capsys.readouterr().err


def test_what_ignores_the_request_to_end_is_killed(tmp_path):
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        servers.end_group(process, grace_s=0.1)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_turn_ends_the_servers(tmp_path, number):
    noted = tmp_path / "pids"
    argv = [f"--server=a={COMMAND} 500 {noted}", f"--server=b={COMMAND}", *SMALL, "--output-len", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_server", "bench", "compare", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(noted_pids(noted)) == 2, "the server did not start")
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_running, noted_pids(noted))), "a server or its child still runs")


@pytest.mark.parametrize(
    ("listed", "wanted", "asked"),
    [("fake", None, "fake"), ("x,{folder}", "{folder}", "{folder}"), ("x,{name}", "{folder}", "{name}")],
)
def test_each_server_is_asked_for_the_model_under_its_own_name(tmp_path, monkeypatch, listed, wanted, asked):
    words = {"folder": str(tmp_path), "name": tmp_path.name}
    monkeypatch.setenv("FAKE_MODELS", listed.format(**words))
    model = wanted and wanted.format(**words)
    server = Server(name="a", command=COMMAND)
    with server.session(model=model, log_path=tmp_path / "log", start_timeout_s=20) as url:
        found = compare._find_model(url, parsed(*(["--model", model] if model else [])))
    assert found == (None if wanted is None else asked.format(**words))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Servers to compare: 0; name at least two"),
        (["--server", "a=x {port}"], "Servers to compare: 1; name at least two"),
        (["--server", "a=x {port}", "--url", "a=http://h"], "the same name"),
        (["--server", "a=x", "--url", "b=http://h"], "has no {port}"),
        (["--server", "a=x {port} {model}", "--url", "b=http://h"], "name it with --model"),
        (["--server", "x {port}"], "write NAME="),
        (["--server", "c=serve '{port}", *URLS], "The command of c is not understood: No closing quotation"),
        (["--url", "c=localhost:8000", *URLS], r"--url c: localhost:8000 is not a URL; write one like http://"),
        (["--url", "c=/v1", *URLS], r"--url c: /v1 is not a URL"),
        (["--url", "c=http://[", *URLS], r"--url c: http://\[ is not a URL"),
        (["--url", "c=http://h:x", *URLS], r"--url c: http://h:x is not a URL"),
        ([*URLS, "--threads", "1", "2"], "--threads has no effect on servers that are given by --url"),
        ([*URLS, "--streams", "2", "--workload", "uniform", "mixed"], "effect on uniform and mixed: --streams"),
    ],
)
def test_wrong_options_are_refused_before_any_server_starts(argv, message):
    with pytest.raises(ConfigError, match=message):
        compare.run(parsed(*argv))


def test_options_that_change_one_of_the_workloads_are_taken():
    args = [*URLS, "--workload", "uniform", "long-prompt-intruder", "--max-concurrency", "4", "--streams", "2"]
    assert compare.run(parsed(*args, "--rounds", "1", "--start-timeout", "0.01")) == 1  # no server is there
