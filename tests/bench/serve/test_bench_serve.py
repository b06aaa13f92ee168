"""`bench serve` on a scripted server in virtual time: its definitions to the millisecond, its load, its command."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from scripted_servers import ScriptedServer, TimedEvents, evenly
from virtual_threads import run_virtually

from mlx_server.bench.serve import command
from mlx_server.bench.serve.client import CHAT, RequestRecord, StreamClient, Target, Tier
from mlx_server.bench.serve.report import ARRAYS, describe_requests, render, render_summary, summarise
from mlx_server.bench.serve.run import Arrivals, Intruder, Load, describe_intrusion, measure, send_all
from mlx_server.bench.serve.workloads import SHAPES, Prompts, Session, Shape, Span, Turn, user_message
from mlx_server.cli.main import main
from mlx_server.errors import ConfigError, ServeError

DATA = Path(__file__).parent / "bench_data"


def record(sent_s: float, times_s: list[float], **more: object) -> RequestRecord:
    made = RequestRecord("all", sent_s, times_s, num_prompt_tokens=10, num_output_tokens=len(times_s))
    for name, value in more.items():
        setattr(made, name, value)
    return made


def ms(times_s: list[float]) -> list[float]:
    return [round(1e3 * time_s, 6) for time_s in times_s]


def stream(transport: httpx.AsyncBaseTransport, text: str = "a b c d", max_tokens: int = 4, **options: object):
    async def main() -> RequestRecord:
        client = StreamClient(Target(base_url="http://test", transport=transport, **options), "m")
        try:
            return await client.stream([user_message(text)], max_tokens)
        finally:
            await client.close()

    return run_virtually(main())


def measured(server: ScriptedServer, load: Load, **options: object) -> dict:
    target = Target(base_url="http://test", transport=server, **options)
    return run_virtually(measure(target, load))


def load_of(shape: Shape, **more: object) -> Load:
    return Load(name="made up", workload=shape, **more)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


# -- definitions


def test_a_chat_stream_is_timed_to_the_millisecond():
    half_a_character = {"choices": [{"delta": {"content": ""}, "finish_reason": None}]}
    two_at_once = b"".join(
        f"data:{json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': None}]})}\n\n".encode()
        for text in ("lo", "!")
    )
    got = stream(
        TimedEvents(
            (0.050, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
            (0.120, {"choices": [{"delta": {"reasoning": "so"}, "finish_reason": None}]}),
            (0.135, b": keep-alive\n\n"),
            (0.150, half_a_character),
            (0.175, {"choices": [{"delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]}),
            (0.240, two_at_once),
            (0.300, {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}),
            (0.900, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}),
            (0.950, b"data: [DONE]\n\n"),
        ),
        endpoint=CHAT,
    )
    assert got.error is None
    assert ms([got.ttft_s, got.e2e_s]) == [120, 240]
    assert ms(got.gaps_s) == [30, 25, 65, 0]
    assert got.tpot_s == pytest.approx(0.120 / 6)  # by the usage's count, not by the events'
    assert (got.num_prompt_tokens, got.num_output_tokens, got.text) == (9, 7, "Hello!")


def test_a_text_stream_is_timed_to_the_millisecond():
    got = stream(
        TimedEvents(
            (0.080, {"choices": [{"text": "", "finish_reason": None}]}),
            (0.090, {"choices": [{"text": "x", "finish_reason": None}]}),
            (0.110, {"choices": [{"text": "y", "finish_reason": "length"}]}),
            (0.500, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}),
        )
    )
    assert ms([got.ttft_s, got.e2e_s, got.tpot_s]) == [80, 110, 15]
    assert ms(got.gaps_s) == [10, 20]


def test_characters_that_unicode_calls_ends_of_lines_are_text():
    text = "a\u0085b\u2028c\u2029d"
    event = json.dumps({"choices": [{"text": text, "finish_reason": None}]}, ensure_ascii=False)
    got = stream(TimedEvents((0.080, f"data: {event}\n\n".encode())))
    assert (got.error, got.text) == (None, text)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"error": {"message": "the engine died"}}, "the engine died"),
        (b"data: {broken\n\n", "JSONDecodeError"),
        ({"choices": ["?"]}, "AttributeError"),
        (b": nothing more\n\n", "without a token"),
    ],
)
def test_a_stream_that_breaks_is_recorded_with_its_error(event, error):
    got = stream(TimedEvents((0.1, event)))
    assert not got.is_complete
    assert error in got.error


def test_a_whole_run_has_vllms_figures_to_the_millisecond():
    """Two at a time: the first of each pair waits 100 ms for its token, the second 300 ms."""
    server = ScriptedServer(lambda asked: [0.2 * asked.num_open - 0.1 + 0.05 * i for i in range(asked.num_tokens)])
    shape = Shape(2, 0, Span(20, 20), Span(5, 5))
    result = measured(server, load_of(shape, goodput={"ttft": 100.001, "tpot": 50.001}))
    figures = {name: value for name, value in result.items() if name.endswith("_ms")}
    assert {name: round(value, 3) for name, value in figures.items()} == {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p90_ttft_ms": 280,
        "p95_ttft_ms": 290,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 50,
        "median_tpot_ms": 50,
        "std_tpot_ms": 0,
        "p90_tpot_ms": 50,
        "p95_tpot_ms": 50,
        "p99_tpot_ms": 50,
        "mean_itl_ms": 50,
        "median_itl_ms": 50,
        "std_itl_ms": 0,
        "p90_itl_ms": 50,
        "p95_itl_ms": 50,
        "p99_itl_ms": 50,
        "mean_e2el_ms": 400,
        "median_e2el_ms": 400,
        "std_e2el_ms": 100,
        "p90_e2el_ms": 480,
        "p95_e2el_ms": 490,
        "p99_e2el_ms": 498,
        "max_itl_ms": 50,
    }
    assert result["duration"] == pytest.approx(0.5)
    assert result["request_goodput"] == pytest.approx(1 / 0.5)
    assert result["output_throughput"] == pytest.approx(10 / 0.5)
    assert result["total_token_throughput"] == pytest.approx(50 / 0.5)
    assert (result["completed"], result["failed"]) == (2, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["total_cached_tokens"]) == (40, 10, 6)
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (10.0, 2)
    assert ms(result["ttfts"]) == [100, 300]
    assert [ms(gaps) for gaps in result["itls"]] == [[50] * 4] * 2
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([20, 20], [5, 5], ["", ""])


def test_peaks_are_counted_by_whole_seconds():
    records = [record(10.0, [10.5, 11.2, 11.9]), record(11.5, [11.6, 13.4])]
    summary = summarise(records, 4.0, {})
    assert (summary["max_output_tokens_per_s"], summary["max_concurrent_requests"]) == (3.0, 2)
    assert summary["request_goodput"] is None


def test_failed_requests_count_nowhere_but_in_failed():
    summary = summarise([record(1.0, [1.2, 1.3]), record(3.0, [3.1], error="HTTP 503")], 2.0, {"e2el": 301.0})
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (1, 1, 2)
    assert summary["request_goodput"] == 0.5
    table = render_summary(summary)
    assert "| TTFT |" in table
    assert re.search(r"good requests +\| +1 of 2 \|", table)


def test_each_request_is_described_from_the_first_one_on():
    found = describe_requests([record(10.0, [10.25, 10.75]), record(10.5, [11.5], error="HTTP 503")])
    names = ("start_times", "ttfts", "itls", "output_lens", "errors")
    assert [found[name] for name in names] == [[0.0, 0.5], [0.25, 0.0], [[0.5], []], [2, 0], ["", "HTTP 503"]]


def test_a_request_of_one_token_meets_any_limit_of_tpot():
    assert summarise([record(1.0, [1.2])], 1.0, {"tpot": 1.0})["request_goodput"] == 1.0


def test_percentiles_interpolate_between_ranks():
    summary = summarise([record(0.0, [ttft_s]) for ttft_s in (3.0, 1.0, 2.0)], 3.0, {})
    assert [summary[f"{kind}_ttft_ms"] for kind in ("median", "p90", "p95")] == pytest.approx([2000, 2800, 2900])
    assert summary["p99_itl_ms"] == summary["mean_tpot_ms"] == 0.0  # of no values
    assert re.search(r"\| TPOT +(\| +- ){6}\|", render_summary(summary))


def test_the_document_has_vllms_keys():
    """Those that `vllm bench serve --save-result --save-detailed` writes, without texts and audio."""
    whole = "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput"
    whole += " output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"
    whole += " input_lens output_lens ttfts itls start_times errors backend model_id num_prompts request_rate"
    whole += " burstiness max_concurrency"
    spreads = {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    }
    result = measured(ScriptedServer(), load_of(Shape(1, 0, Span(5, 5), Span(2, 2))))
    assert set(whole.split()) | spreads <= set(result)


# -- load


def scrape(drafts: int, drafted: int, accepted: int, *by_position: int) -> str:
    """As vLLM has it, for two engines of which the second has drafted nothing."""
    name, labels = "vllm:spec_decode_num", 'engine="0",model_name="m {x} 1"'
    return "\n".join(
        [
            f"# HELP {name}_drafts_total Number of spec decoding drafts.",
            f"{name}_drafts_created{{{labels}}} 1.7e+09",
            f"{name}_drafts_total{{{labels}}} {drafts}.0",
            f'{name}_drafts_total{{engine="1",model_name="m"}} 0.0',
            f"{name}_draft_tokens_total{{{labels}}} {drafted:e}",
            f"{name}_accepted_tokens_total{{{labels}}} {accepted}.0",
            *(
                f'{name}_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {count}.0'
                for at, count in enumerate(by_position)
            ),
        ]
    )


def test_drafts_of_the_run_alone_have_vllms_keys_and_a_table():
    server = ScriptedServer(scrapes=[scrape(100, 300, 120, 80, 40, 0), scrape(120, 360, 162, 98, 52, 12)])
    shape = Shape(4, 0, Span(20, 20), Span(5, 5))
    result = measured(server, load_of(shape))
    assert {name: value for name, value in result.items() if "spec_decode" in name} == {
        "spec_decode_acceptance_rate": 70.0,
        "spec_decode_acceptance_length": pytest.approx(3.1),
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 42,
        "spec_decode_per_position_acceptance_rates": [0.9, 0.6, 0.6],
    }
    shown = render(result)
    assert "70.0 %" in shown
    assert "90.0 %, 60.0 %, 60.0 %" in shown
    assert "3.10" in shown


def test_tokens_a_model_call_are_those_of_the_run_alone():
    def calls(num_calls: int, num_tokens: int) -> str:
        name = 'model_name="m {x} 1"'
        return (
            f'mlx_serve:model_calls_total{{{name}}} {num_calls}.0\nmlx_serve:model_calls_total{{model_name="n"}} 5.0\n'
            f"vllm:generation_tokens_total{{{name}}} {num_tokens}.0\nvllm:generation_tokens_created{{{name}}} 1e9"
        )

    shape = Shape(4, 0, Span(20, 20), Span(5, 5))
    for load in (load_of(shape), Load(name="intruder", workload=Intruder(2, 60, 500))):
        result = measured(ScriptedServer(scrapes=[calls(100, 100), calls(108, 120)]), load)
        assert result["output_tokens_per_model_call"] == 2.5
        assert "output tokens a model call: 2.50" in render(result)
    for scrapes in ([], ["up 1", "up 1"], [calls(9, 9), calls(9, 9)], [calls(9, 9), calls(2, 2)]):
        result = measured(ScriptedServer(scrapes=scrapes), load_of(shape))
        assert "output_tokens_per_model_call" not in result


def test_counters_of_a_server_that_others_use_are_left_out_with_a_word(capsys):
    counted = [f'vllm:generation_tokens_total{{model_name="m"}} {count}.0' for count in (100, 140)]
    calls = [f'mlx_serve:model_calls_total{{model_name="m"}} {count}.0' for count in (50, 70)]
    scrapes = ["\n".join(lines) for lines in zip(counted, calls, strict=True)]
    result = measured(ScriptedServer(scrapes=[*scrapes]), load_of(Shape(4, 0, Span(20, 20), Span(5, 5))))
    assert "output_tokens_per_model_call" not in result
    assert capsys.readouterr().err == (
        "Figures by the server's counters are left out: it made 40 output tokens in the run, which has 20. Measure a "
        "server that nobody else uses.\n"
    )
    result = measured(ScriptedServer(scrapes=[*scrapes]), load_of(Shape(8, 0, Span(20, 20), Span(5, 5))))
    assert result["output_tokens_per_model_call"] == 2.0


@pytest.mark.parametrize(
    "scrapes",
    [
        [],  # no such route
        ["up 1", "up 1"],  # no such series
        [scrape(0, 0, 0, 0), scrape(0, 0, 0, 0)],  # no speculative decoding
        [scrape(7, 21, 5, 5), scrape(7, 21, 5, 5)],  # none in the run
        [scrape(7, 21, 5, 5), scrape(1, 3, 1, 1)],  # another server than before
    ],
)
def test_a_server_without_drafts_has_no_figures_of_them(scrapes):
    result = measured(ScriptedServer(scrapes=scrapes), load_of(Shape(2, 0, Span(20, 20), Span(5, 5))))
    assert result["completed"] == 2
    assert not any("spec_decode" in name for name in result)
    assert "speculative" not in render(result)


def test_concurrency_is_bounded():
    server = ScriptedServer()
    result = measured(server, load_of(Shape(10, 0, Span(9, 9), Span(3, 3)), max_concurrency=4))
    assert (len(server.measured), server.most_open, result["completed"]) == (10, 4, 10)
    assert result["duration"] == pytest.approx(3 * 0.12)


def test_requests_arrive_at_the_rate_and_are_timed_from_when_they_are_sent():
    server = ScriptedServer(evenly(5.0, 0.0))
    result = measured(server, load_of(Shape(100, 0, Span(5, 5), Span(1, 1)), arrivals=Arrivals(4.0)))
    starts = result["start_times"]
    assert starts == sorted(starts)
    assert result["duration"] == pytest.approx(100 / 4.0 + 5.0)
    assert ms(result["ttfts"]) == [5000.0] * 100
    assert (result["request_rate"], result["burstiness"]) == (4.0, 1.0)


def test_a_failing_server_is_reported_by_its_answers():
    server = ScriptedServer(refused_key="bad")
    tiers = (Tier("good", "k1", 1.0), Tier("bad", "bad", 1.0))
    result = measured(server, load_of(Shape(40, 0, Span(5, 5), Span(2, 2)), tiers=tiers))
    assert result["failed"] == result["groups"].count("bad") > 5
    assert result["tiers"]["bad"]["completed"] == 0
    assert result["tiers"]["good"]["completed"] == result["completed"] == 40 - result["failed"]
    assert {error for error in result["errors"] if error} == {'HTTP 401: {"error":{"message":"busy"}}'}


def test_tiers_send_their_keys_by_weight_and_are_summed_up_each():
    server = ScriptedServer(lambda asked: [1.0 if asked.key == "k2" else 0.25])
    tiers = (Tier("gold", "k1", 1.0), Tier("free", "k2", 3.0))
    result = measured(server, load_of(Shape(400, 0, Span(5, 5), Span(1, 1)), tiers=tiers, goodput={"ttft": 500.0}))
    keys = [asked.key for asked in server.measured]
    assert 60 < keys.count("k1") < 140
    assert keys.count("k1") + keys.count("k2") == 400
    assert result["tiers"]["gold"]["completed"] == keys.count("k1")
    assert [result["tiers"][name]["mean_ttft_ms"] for name in ("gold", "free")] == pytest.approx([250, 1000])
    assert result["request_goodput"] == result["tiers"]["gold"]["request_goodput"] > 0
    assert result["tiers"]["free"]["request_goodput"] == 0


def test_warm_up_is_not_measured_and_shares_no_words_with_what_is():
    server = ScriptedServer()
    result = measured(server, load_of(Shape(3, 0, Span(40, 40), Span(4, 4)), num_warmups=5))
    assert result["completed"] == 3
    warm, measured_prompts = [[a.prompt for a in part] for part in (server.measured[:5], server.measured[5:])]
    assert len(measured_prompts) == 3
    assert not set(warm) & set(measured_prompts)
    assert {len(prompt.split()) for prompt in warm} == {40}


def failing(*numbers: int) -> ScriptedServer:
    """A server whose answers to these requests, counted from the first after the calibration, have no token."""
    server = ScriptedServer()
    answered = evenly(0.1, 0.1)
    server.script = lambda asked: [] if len(server.measured) - 1 in numbers else answered(asked)
    return server


WARMED = {"small": Shape(3, 0, Span(40, 40), Span(4, 4)), "intruder": Intruder(2, 40, 500)}


@pytest.mark.parametrize("workload", WARMED.values(), ids=list(WARMED))
def test_failed_warm_ups_are_said_and_end_the_run_if_nothing_is_warm(workload, capsys):
    result = measured(failing(0, 2), Load(name="x", workload=workload, num_warmups=3))
    assert result["failed"] == 0
    assert "2 of 3 warm-up requests failed: the stream ended without a token" in capsys.readouterr().err
    server = failing(0, 1)
    with pytest.raises(ServeError, match=r"http://test cannot be measured: all 2 warm-up requests failed: the stream"):
        measured(server, Load(name="x", workload=workload, num_warmups=2))
    assert len(server.measured) == 2


def test_a_warm_prefix_that_cannot_be_sent_ends_the_run():
    server = failing(0)
    with pytest.raises(ServeError, match=r"the request that warms the shared prefix failed: the stream ended without"):
        measured(server, load_of(SHAPES["shared-prefix-warm"]))
    assert len(server.measured) == 1


def test_a_warm_prefix_is_sent_once_before_and_a_cold_one_is_not():
    cold, warm = ScriptedServer(), ScriptedServer()
    measured(cold, load_of(SHAPES["shared-prefix"]))
    result = measured(warm, load_of(SHAPES["shared-prefix-warm"]))
    assert (len(cold.measured), len(warm.measured), result["completed"]) == (16, 17, 16)
    first, *rest = warm.measured
    assert all(asked.prompt.split()[:1024] == first.prompt.split()[:1024] for asked in rest)
    assert all(asked.arrived_s > first.arrived_s for asked in rest)


def test_workloads_with_one_seed_begin_with_different_text():
    server, length = ScriptedServer(), Span(40, 40)
    for name, prefix_len in (("random", 0), ("uniform", 0), ("shared-prefix", 64), ("uniform", 0)):
        measured(server, Load(name=name, workload=Shape(1, prefix_len, length, Span(2, 2))))
    beginnings = [asked.prompt.split()[:8] for asked in server.asked[2::3]]
    assert len({tuple(words) for words in beginnings}) == 3
    assert beginnings[1] == beginnings[3]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_turn_sends_what_was_said_before(endpoint):
    server = ScriptedServer()
    shape = Shape(2, 6, Span(4, 4), Span(3, 3), turns=3)
    result = measured(server, load_of(shape, max_concurrency=1), endpoint=endpoint)
    assert result["completed"] == 6
    first, second, third = server.measured[:3]
    for earlier, later in ((first, second), (second, third)):
        assert later.prompt.startswith(f"{earlier.prompt} a0 a1 a2 ")
    assert [len(asked.prompt.split()) for asked in (first, second, third)] == [10, 17, 24]
    assert len({asked.prompt[: len(" ".join(first.prompt.split()[:6]))] for asked in server.measured}) == 1
    if endpoint == "chat":
        assert [message["role"] for message in third.body["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert third.path == "/v1/chat/completions"


def test_a_conversation_ends_at_its_first_failure():
    sessions = [Session(tuple(Turn((user_message("a"),), 2) for _ in range(3)))]

    async def main() -> list[RequestRecord]:
        client = StreamClient(Target(base_url="http://test", transport=ScriptedServer(status=503)), "m")
        return await send_all(client, sessions)

    assert [got.error for got in run_virtually(main())] == ['HTTP 503: {"error":{"message":"busy"}}']


def test_lengths_are_counted_in_the_servers_tokens_whatever_its_template_adds():
    async def main() -> Prompts:
        client = StreamClient(Target(base_url="http://test", endpoint=CHAT, transport=ScriptedServer()), "m")
        return await Prompts.calibrate(client, seed=1)

    prompts = run_virtually(main())
    assert [len(prompts.text(count).split()) for count in (1, 50, 4096)] == [1, 50, 4096]
    assert prompts.named_text("a", 50).split()[:20] == prompts.named_text("a", 20).split()
    assert prompts.named_text("a", 20) != prompts.named_text("b", 20)


def test_a_server_that_does_not_count_is_refused():
    silent = TimedEvents((0.1, {"choices": [{"text": "x", "finish_reason": None}]}))
    with pytest.raises(
        ServeError, match="http://test cannot be measured: it did not count a prompt's tokens: no usage"
    ):
        measured(silent, load_of(SHAPES["random"]), model="m")


def test_fields_of_the_body_can_be_added_and_left_out():
    server = ScriptedServer()
    shape = Shape(1, 0, Span(5, 5), Span(2, 2))
    measured(server, load_of(shape), extra_body={"ignore_eos": None, "top_k": 3}, model="mine", api_key="secret")
    asked = server.measured[0]
    assert "ignore_eos" not in asked.body
    assert (asked.body["top_k"], asked.body["model"], asked.key) == (3, "mine", "secret")


# -- the intruder


def test_the_intruder_comes_once_every_stream_decodes():
    """Tokens come every 100 ms, but for the time that the long prompt takes."""

    def script(asked):
        if len(asked.prompt.split()) > 400:
            return [0.7 + 0.1 * index for index in range(8)]
        times_s = [0.1 * (index + 1) for index in range(asked.num_tokens)]
        return [time_s + (0.6 if time_s > 0.85 else 0.0) for time_s in times_s]

    server = ScriptedServer(script)
    result = measured(server, Load(name="intruder", workload=Intruder(3, 40, 500)))
    assert server.measured[-1].prompt.count(" ") == 499
    assert server.measured[-1].arrived_s - server.measured[0].arrived_s == pytest.approx(0.8)
    assert result["groups"] == ["intruder", "stream", "stream", "stream"]
    assert result["intruder_prompt_tokens"] == 500
    figures = [result[name] for name in ("worst_gap_ms", "worst_gap_before_ms", "intruder_ttft_ms")]
    assert figures == pytest.approx([700, 100, 700])


def test_a_long_prompt_of_other_words_warms_the_server_before():
    server = ScriptedServer(evenly(0.1, 0.1))
    result = measured(server, Load(name="intruder", workload=Intruder(2, 40, 500), num_warmups=2))
    lengths = [len(asked.prompt.split()) for asked in server.measured]
    assert (lengths, result["completed"]) == ([500, 500, 32, 32, 500], 3)
    assert len({asked.prompt for asked in server.measured}) == 5


def test_streams_that_end_before_the_intruder_answers_are_refused():
    server = ScriptedServer(lambda asked: [0.01 * i for i in range(asked.num_tokens)] if asked.num_open < 3 else [9.0])
    with pytest.raises(ServeError, match="raise --output-len"):
        measured(server, Load(name="intruder", workload=Intruder(2, 20, 500)))


def test_gaps_are_of_the_time_that_the_long_prompt_took():
    streamed = record(0.0, [1.0, 1.1, 1.3, 2.0, 2.9])
    figures = describe_intrusion(record(1.25, [1.8]), streamed)
    assert figures["worst_gap_ms"] == pytest.approx(700)  # 1.3 to 2.0 began before the first token came
    assert figures["worst_gap_before_ms"] == pytest.approx(100)
    with pytest.raises(ServeError, match="raise --output-len"):
        describe_intrusion(record(1.25, [3.0]), streamed)


# -- the command


@pytest.fixture
def on_scripted(monkeypatch):
    """`bench serve` on a scripted server, in virtual time."""
    server = ScriptedServer()
    make = command.Target
    monkeypatch.setattr(command, "Target", lambda **fields: make(**fields, transport=server))
    monkeypatch.setattr(command.asyncio, "run", run_virtually)
    return server


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has this device")
def test_figures_that_cannot_be_written_are_printed(on_scripted, capsys):
    with pytest.raises(ServeError, match=r"--json: cannot write /dev/full: No space left .* are printed instead"):
        command.run(parsed("--num-prompts", "2", "--output-len", "3", "--json", "/dev/full"))
    printed = capsys.readouterr().out
    table, _, whole = printed.partition("\n{\n")
    assert json.loads(table.splitlines()[-1])["completed"] == 2
    assert json.loads("{" + whole)["output_lens"] == [3, 3]


def test_the_command_prints_tables_then_one_line_of_json(on_scripted, tmp_path, capsys):
    path = tmp_path / "out.json"
    argv = ["--num-prompts", "6", "--output-len", "3", "--goodput", "ttft:150", "--json", str(path)]
    assert command.run(parsed(*argv, "--tier", "gold=k1", "--tier", "free=k2:2")) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert "| gold |" in printed
    assert "| TTFT | 100.0 |" in printed
    assert (figures["completed"], figures["model_id"], set(figures["tiers"])) == (6, "scripted", {"gold", "free"})
    written = json.loads(path.read_text())
    assert figures == {name: value for name, value in written.items() if name in figures}
    assert set(written) - set(figures) == ARRAYS
    assert len(written["ttfts"]) == 6


async def test_a_server_that_closes_a_connection_after_its_answer_fails_no_request():
    """It promises to keep the connection, and closes it without an answer when the next request comes."""
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    served: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head.lower())[1]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(event), event))
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(Target(base_url=f"http://127.0.0.1:{port}"), "m")
        records = [await client.stream([user_message("x")], 1) for _ in range(2)]
        await client.close()
        await asyncio.gather(*[task for task in served if task is not None])
    assert [record.error for record in records] == [None, None]


def test_requests_arrive_at_the_rate_that_the_flags_say(on_scripted, tmp_path):
    path = tmp_path / "out.json"
    flags = ["--request-rate", "4", "--burstiness", "1e9"]
    assert command.run(parsed(*flags, "--num-prompts", "4", "--json", str(path))) == 0
    arrived_s = [asked.arrived_s for asked in on_scripted.measured]
    assert [later - earlier for earlier, later in pairwise(arrived_s)] == pytest.approx([0.25] * 3, rel=1e-3)
    assert json.loads(path.read_text())["request_rate"] == 4.0


def test_a_trace_is_replayed_as_the_flags_say(on_scripted):
    trace = ["--dataset", str(DATA / "burstgpt.csv"), "--trace-speed", "10"]
    assert command.run(parsed(*trace, "--trace-shrink", "4")) == 0
    first, second = on_scripted.measured
    assert second.arrived_s - first.arrived_s == pytest.approx(11.3)
    assert [len(asked.prompt.split()) for asked in (first, second)] == [118, 104]
    assert [asked.num_tokens for asked in (first, second)] == [4, 69]


def test_a_terminal_sees_how_far_it_is_and_a_file_does_not(on_scripted, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = []
    for stream_class in (Terminal, io.StringIO):
        monkeypatch.setattr(command.sys, "stderr", stream_class())
        assert command.run(parsed("--num-prompts", "6")) == 0
        seen.append(command.sys.stderr.getvalue())
    assert "0/6" in seen[0]
    assert seen[1] == ""


def test_the_intruders_figures_are_reported_in_words(on_scripted, capsys):
    on_scripted.script = evenly(0.1, 0.1)
    assert command.run(parsed("--workload", "long-prompt-intruder", "--streams", "2", "--output-len", "99")) == 0
    assert "worst gap of a stream: 100 ms (before it: 100 ms)" in capsys.readouterr().out


def test_failed_requests_are_named_and_make_the_exit_status(on_scripted, capsys):
    on_scripted.refused_key = "k2"
    assert command.run(parsed("--num-prompts", "20", "--tier", "gold=k1", "--tier", "free=k2")) == 1
    assert "x HTTP 401" in capsys.readouterr().out


def test_the_key_may_come_from_the_environment(on_scripted, monkeypatch):
    monkeypatch.setenv("BENCH_API_KEY", "from-env")
    assert command.run(parsed("--num-prompts", "1")) == 0
    assert {asked.key for asked in on_scripted.asked} == {"from-env"}


def test_a_server_that_is_no_openai_server_is_named(monkeypatch):
    class BrokenTransport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json={"models": []})

    target = Target(base_url="http://test", transport=BrokenTransport())
    with pytest.raises(ServeError, match="http://test does not answer like an OpenAI-compatible server"):
        asyncio.run(measure(target, load_of(SHAPES["random"])))


def test_a_server_that_is_not_there_is_named(unused_tcp_port):
    target = Target(base_url=f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(ServeError, match=r"cannot be measured: no server answers there. Start one, or set --url"):
        asyncio.run(measure(target, load_of(SHAPES["random"])))


@pytest.mark.parametrize("verb", ["serve", "invariance"])
def test_commands_that_measure_one_server_take_its_url(verb, unused_tcp_port, capsys):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert main(["bench", verb, "--url", url]) == 1
    error = capsys.readouterr().err
    assert url in error
    assert "set --url" in error


PROMPTS, TRACE = (["--dataset", str(DATA / name)] for name in ("prompts.jsonl", "burstgpt.csv"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--goodput", "speed:9"], "NAME:MS"),
        (["--goodput", "ttft:\N{SUPERSCRIPT TWO}"], "NAME:MS"),
        (["--burstiness", "2"], "needs --request-rate"),
        (["--tier", "a=k", "--tier", "a=l"], "names a tier twice"),
        (["--tier", "a=k", "--api-key", "l"], "--api-key has no effect beside --tier"),
        (
            ["--workload", "long-prompt-intruder", "--num-prompts", "2", "--turns", "3", "--tier", "a=k"],
            "Without effect on long-prompt-intruder: --num-prompts, --tier, --turns",
        ),
        (
            [
                "--workload",
                "long-prompt-intruder",
                "--prefix-len",
                "0",
                "--request-rate",
                "1",
                "--max-concurrency",
                "2",
            ],
            "Without effect on long-prompt-intruder: --max-concurrency, --prefix-len, --request-rate",
        ),
        (["--workload", "long-prompt-intruder", "--output-len", "9-99"], "9-99, but long-prompt-intruder takes one"),
        (["--streams", "2", "--intruder-len", "9"], "Without effect on random: --intruder-len, --streams"),
        (["--workload", "uniform", "--trace-speed", "2"], "Without effect on uniform: --trace-speed"),
        ([*PROMPTS, "--trace-shrink", "4", "--input-len", "9"], "on a file of prompts: --input-len, --trace-shrink"),
        ([*PROMPTS, "--output-len", "9-99"], "--output-len is 9-99, but a file of prompts takes one length"),
        ([*TRACE, "--output-len", "9"], "Without effect on a trace: --output-len"),
        ([*TRACE, "--trace-speed", "2", "--request-rate", "1"], "--trace-speed has no effect beside --request-rate"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(argv, message):
    with pytest.raises(ConfigError, match=message):
        command.run(parsed(*argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--request-rate", "0"], "0 is not a finite number above 0"),
        (["--request-rate", "inf"], "inf is not a finite number above 0"),
        (["--request-rate", "x"], "x is not a finite number above 0"),
        (["--input-len", "9-3"], "is not a range"),
        (["--tier", "nokey"], "NAME=KEY"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--extra-body", "{"], "is not JSON: "),
        (["--num-prompts", "0"], "0 is not a whole number of at least 1"),
        (["--num-prompts", "1.5"], "1.5 is not a whole number of at least 1"),
        (["--json", "/nonexistent/x.json"], "cannot write /nonexistent/x.json: its folder does not exist"),
        (["--json", "/"], "/ is a folder"),
        (["--workload", "random", "--dataset", "x"], "--dataset: not allowed with argument --workload"),
    ],
)
def test_values_out_of_bounds_are_refused_by_the_parser(argv, message, capsys):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert message in capsys.readouterr().err


def test_flags_replace_a_workloads_own_lengths():
    args = parsed("--num-prompts", "3", "--input-len", "5-9", "--turns", "2")
    assert command.shape(args, SHAPES["agent"]) == Shape(3, 4096, Span(5, 9), Span(64, 64), turns=2)
    assert command.tier("gold=a:b:2.5") == Tier("gold", "a:b", 2.5)
