import argparse
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest
from tiny_models import VOCAB_SIZE, byte_tokenizer, reference_generate, save_model_folder, tiny_model

from mlx_server.bench import throughput
from mlx_server.bench.systems import (
    CHAT_WORKLOADS,
    WORKLOADS,
    Batched,
    Generated,
    OurEngine,
    Sequential,
    Workload,
    WorkloadRequest,
    make_chat_workload,
    make_warm_up,
    make_workload,
)
from mlx_server.bench.tables import format_bytes, format_rate, render_table
from mlx_server.bench.throughput import Row, Turn, compare, count_model_calls, take_turn
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError, ModelLoadError, ServeError
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.random_models import build_random

SMALL = Workload(
    "small",
    tuple(
        WorkloadRequest(tuple((7 * i + j) % 256 for j in range(length)), count)
        for i, (length, count) in enumerate([(9, 6), (5, 6), (9, 3)])
    ),
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").model


@pytest.fixture
def reference(model):
    return tuple(
        tuple(reference_generate(model, request.prompt_token_ids, request.num_output_tokens).token_ids)
        for request in SMALL.requests
    )


# Workloads


def test_uniform_is_16_requests_of_128_in_and_128_out():
    workload = make_workload("uniform", 1000, seed=0)
    assert [(len(r.prompt_token_ids), r.num_output_tokens) for r in workload.requests] == [(128, 128)] * 16
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (2048, 2048)


def test_shared_prefix_shares_its_first_1024_tokens_and_no_more():
    workload = make_workload("shared-prefix", 1000, seed=0)
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert [(len(r.prompt_token_ids), r.num_output_tokens) for r in workload.requests] == [(1056, 32)] * 16
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:] for prompt in prompts}) == 16


def test_mixed_stays_within_its_ranges_and_fills_them():
    workload = make_workload("mixed", 1000, seed=0)
    lengths = [len(request.prompt_token_ids) for request in workload.requests]
    counts = [request.num_output_tokens for request in workload.requests]
    assert len(lengths) == 32
    assert 16 <= min(lengths) < 256
    assert 1792 < max(lengths) <= 2048
    assert 8 <= min(counts) < 40
    assert 224 < max(counts) <= 256


@pytest.mark.parametrize("name", WORKLOADS)
def test_name_vocabulary_and_seed_decide_every_token(name):
    workload = make_workload(name, 500, seed=3)
    assert workload == make_workload(name, 500, seed=3)
    assert workload != make_workload(name, 500, seed=4)
    ids = {token for request in workload.requests for token in request.prompt_token_ids}
    assert ids <= set(range(500))
    assert len(ids) > 400


def test_a_workload_of_decodes_has_enough_streams_for_the_largest_batch():
    workload = make_workload("decode", 500, seed=0)
    assert len(workload.requests) == 64
    assert workload.num_output_tokens == 8 * workload.num_prompt_tokens


def test_published_figures_can_be_repeated_with_the_same_tokens():
    assert make_workload("mixed", 16_384, seed=0).num_prompt_tokens == 34_398
    assert make_workload("uniform", 16_384, seed=0).requests[0].prompt_token_ids[:3] == (5999, 3346, 2136)


def test_the_warm_up_leaves_no_full_block():
    assert all(len(r.prompt_token_ids) + r.num_output_tokens < 32 for r in make_warm_up(1000).requests)


def test_a_shorter_workload_has_the_first_requests_of_the_whole():
    workload = make_workload("mixed", 1000, seed=0)
    assert workload.first(3).requests == workload.requests[:3]
    assert workload.first(None) == workload


@pytest.mark.parametrize("name", CHAT_WORKLOADS)
def test_chats_are_decided_by_seed_and_tokenizer_and_differ_from_each_other(name):
    tokenizer = Tokenizer(byte_tokenizer())
    workload = make_chat_workload(name, tokenizer, seed=3)
    assert workload == make_chat_workload(name, tokenizer, seed=3)
    assert len({request.prompt_token_ids for request in workload.requests}) == len(workload.requests) == 16
    assert workload.first(2).temperature == workload.temperature == (0.8 if name == "chat" else 0.0)


def test_an_edit_is_one_renaming_in_60_lines():
    tokenizer = Tokenizer(byte_tokenizer())
    prompt = tokenizer.hf.decode(make_chat_workload("edit", tokenizer, seed=0).requests[0].prompt_token_ids)
    assert prompt.partition("<|im_end|>")[0].partition("file.\n\n")[2].count("\n") in range(57, 61)
    old = re.search(r"rename the function (\w+) to \1_0\.", prompt)[1]
    assert prompt.count(f"def {old}(") == 1


def test_chats_need_a_chat_template():
    with pytest.raises(ConfigError, match="no tokenizer with a chat template"):
        make_chat_workload("edit", None, seed=0)


# Counting


def test_every_call_of_the_model_is_counted_with_its_positions(model):
    with count_model_calls(model) as calls:
        model(mx.zeros((3, 5), dtype=mx.int32))
        model(mx.zeros((4, 1), dtype=mx.int32), cache=None)
    assert (calls.num_calls, calls.num_positions) == (2, 19)
    model(mx.zeros((1, 1), dtype=mx.int32))
    assert calls.num_calls == 2


def test_other_models_of_its_class_are_not_counted(model):
    with count_model_calls(model) as calls:
        tiny_model("qwen3").model(mx.zeros((3, 5), dtype=mx.int32))
    assert (calls.num_calls, calls.num_positions) == (0, 0)


def test_counting_ends_when_the_body_fails(model):
    before = type(model).__call__
    with pytest.raises(ZeroDivisionError), count_model_calls(model):
        _ = 1 / 0
    assert type(model).__call__ is before


# The two systems of mlx-lm


def test_one_by_one_computes_each_prompt_once_and_one_token_ahead(model, reference):
    turn = take_turn(Sequential(model), SMALL, make_warm_up(VOCAB_SIZE), model)
    assert turn.token_ids == reference
    # A request: all but the last prompt token in one call, that one in the next, then every output token.
    assert turn.num_model_calls == sum(2 + r.num_output_tokens for r in SMALL.requests)
    assert turn.num_prompt_tokens_computed == SMALL.num_prompt_tokens + len(SMALL.requests)
    assert turn.num_cached_tokens is None


def test_batched_counts_its_padding(model, reference):
    system = Batched(model, 512, 8, 32)
    turn = take_turn(system, SMALL, make_warm_up(VOCAB_SIZE), model)
    assert turn.token_ids == reference
    # One prefill of 3 rows padded to 8 tokens, then 7 calls: the last prompt tokens and 6 outputs each, one
    # of them ahead; the third row leaves after its 3 outputs and the one ahead.
    assert turn.num_model_calls == 1 + 7
    positions = 3 * 8 + 7 + 7 + 4
    assert turn.num_prompt_tokens_computed == positions - SMALL.num_output_tokens + 3


def test_a_small_prefill_step_cuts_prompts_into_more_calls(model, reference):
    system = Batched(model, 4, 1, 32)
    turn = take_turn(system, SMALL, make_warm_up(VOCAB_SIZE), model)
    assert turn.token_ids == reference
    assert turn.num_prompt_tokens_computed == SMALL.num_prompt_tokens + len(SMALL.requests)


# Our engine


def engine_on(model, **changes):
    _, config = tiny_model("qwen3")
    settings = {"attention_backend": "reference", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return OurEngine(LoadedModel("tiny", model, config, folder=None), kv_cache_memory="4MiB", **(settings | changes))


def test_the_engine_computes_no_position_twice_and_calls_the_model_once_a_step(model, reference):
    turn = take_turn(engine_on(model), SMALL, make_warm_up(VOCAB_SIZE), model)
    assert turn.token_ids == reference
    assert turn.num_prompt_tokens_computed == SMALL.num_prompt_tokens
    assert turn.num_model_calls == 6  # all three prompts fit the first step, and the longest output has 6 tokens
    assert turn.num_cached_tokens == 0


def test_the_engine_computes_a_shared_prefix_once(model):
    shared = tuple(range(64))
    workload = Workload("shared", tuple(WorkloadRequest((*shared, 100 + i, 200 + i), 4) for i in range(5)))
    turn = take_turn(engine_on(model, max_num_batched_tokens=128), workload, make_warm_up(VOCAB_SIZE), model)
    assert turn.num_prompt_tokens_computed == 64 + 5 * 2
    assert turn.num_cached_tokens == 4 * 64


def test_each_session_of_the_engine_starts_with_an_empty_prefix_cache_and_leaves_the_model_whole(model):
    workload = Workload("long", (WorkloadRequest(tuple(range(100)), 2),))
    turns = [take_turn(engine_on(model), workload, make_warm_up(VOCAB_SIZE), model) for _ in range(2)]
    assert [turn.num_cached_tokens for turn in turns] == [0, 0]
    assert model(mx.zeros((2, 7), dtype=mx.int32)).shape == (2, 7, VOCAB_SIZE)


def test_pools_beside_mlx_count_with_the_blocks_that_hold_something(model):
    workload = Workload("long", (WorkloadRequest(tuple(range(100)), 2),))
    try:
        with engine_on(model, attention_backend="cpu").session() as generate:
            generated = generate(workload)
    except ConfigError as error:
        pytest.skip(f"no native backend: {error}")
    layers, kv_heads, key_and_value = 3, 2, 2 * 32
    assert generated.num_host_bytes == (100 // 32) * layers * 32 * kv_heads * key_and_value * 4


# Comparing


@dataclass
class ScriptedSystem:
    """Answers with given tokens, and writes down what is done to it."""

    label: str
    log: list[str]
    answers: tuple[tuple[int, ...], ...] = ((1, 2), (3,))
    num_cached_tokens: int | None = None
    num_host_bytes: int = 0

    @contextmanager
    def session(self):
        self.log.append(f"open {self.label}")
        yield self.generate
        self.log.append(f"close {self.label}")

    def generate(self, workload):
        self.log.append(f"{workload.name} {self.label}")
        return Generated(self.answers, self.num_cached_tokens, self.num_host_bytes)


class NotCalled:
    def __call__(self, inputs):
        raise AssertionError("not called")


NO_MODEL = NotCalled()


PAIR = Workload("pair", (WorkloadRequest((1,) * 6, 2), WorkloadRequest((2,) * 4, 1)))


def test_turns_rotate_and_each_is_opened_warmed_up_and_closed(capsys):
    log = []
    systems = [ScriptedSystem("A", log), ScriptedSystem("B", log)]
    compare(systems, PAIR, make_warm_up(9), NO_MODEL, num_turns=2)
    one_turn = [f"{action} {label}" for label in "AB" for action in ("open", "warm-up", "pair", "close")]
    assert log == one_turn + one_turn
    seen = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert seen == ["turn 1, A", "turn 1, B", "turn 2, A", "turn 2, B"]


def test_too_short_an_output_is_an_error_and_the_system_is_closed():
    system = ScriptedSystem("A", [], answers=((1,), (3,)))
    with pytest.raises(ServeError, match="A: request 0 got 1 output tokens instead of 2"):
        take_turn(system, PAIR, make_warm_up(9), NO_MODEL)
    assert system.log[-1] == "close A"


def test_memory_beside_mlx_is_part_of_the_peak():
    turn = take_turn(ScriptedSystem("A", [], num_host_bytes=10**15), PAIR, make_warm_up(9), NO_MODEL)
    assert 10**15 <= turn.peak_memory_bytes < 2 * 10**15


def make_row(system, elapsed_s, token_ids=((1, 2), (3,)), num_cached=None, peak=2**20):
    turns = tuple(Turn(s, 5, 7, peak + i, num_cached, token_ids) for i, s in enumerate(elapsed_s))
    return Row(system, PAIR, turns)


def test_a_row_shows_medians_the_worst_peak_and_hits():
    row = make_row(ScriptedSystem("A", []), [3.0, 1.0, 2.0], num_cached=4)
    assert row.output_rates == (1.0, 3.0, 1.5)
    assert row.output_rate == 1.5
    assert row.total_rate == pytest.approx(13 / 2.0)
    assert row.hit_rate == 0.4
    assert row.peak_memory_bytes == 2**20 + 2
    assert make_row(ScriptedSystem("A", []), [1.0]).hit_rate is None


def test_equal_outputs_are_counted_by_request():
    system = ScriptedSystem("A", [])
    assert make_row(system, [1.0]).num_equal_outputs(make_row(system, [1.0], ((1, 2), (4,)))) == 1


# Tables and JSON


def test_a_table_is_padded_markdown():
    assert render_table(("system", "rate"), [("A", "10.0"), ("longer", "9")]) == (
        "| system | rate |\n| ------ | ---: |\n| A      | 10.0 |\n| longer |    9 |"
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 MiB"), (3 * 2**20 // 2, "2 MiB"), (2**33, "8,192 MiB"), (25 * 2**29, "12.5 GiB")]
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("rate", "text"), [(0.04, "0.0"), (12.34, "12.3"), (999.94, "999.9"), (12345.6, "12,346")])
def test_rates_for_people(rate, text):
    assert format_rate(rate) == text


def test_ratios_are_to_the_best_batch_setting(model):
    def batched(step):
        return Batched(model, step, 8, 32)

    rows = [
        make_row(ScriptedSystem("A", []), [1.0], num_cached=4),
        make_row(batched(2048), [5.0]),
        make_row(batched(512), [2.0]),
    ]
    lines = throughput.render_rows(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert (cells[0][7], cells[1][7]) == ("0.60", "0.60")
    assert cells[0] == ["A", "3.0", "3.0-3.0", "13.0", "2.00x", "7", "5", cells[0][7], "1 MiB", "40.0%", "2/2"]
    assert cells[1] == [
        "mlx-lm batch 2048x8",
        "0.6",
        "0.6-0.6",
        "2.6",
        "0.40x",
        "7",
        "5",
        cells[1][7],
        "1 MiB",
        "none",
        "2/2",
    ]
    assert cells[2][4] == "1.00x"


def test_without_a_batch_row_there_is_no_ratio():
    table = throughput.render_rows([make_row(ScriptedSystem("A", []), [1.0])])
    assert table.splitlines()[2].split("|")[5].strip() == ""


# The command


def parse(*argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    throughput.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_command_prints_a_table_and_writes_every_turn(tmp_path, capsys):
    model, config = tiny_model("llama")
    folder = save_model_folder(model, config, tmp_path / "model", byte_tokenizer())
    file = tmp_path / "out.json"
    options = (
        "--workload uniform --num-requests 2 --repeat 2 --batch-prefill 512x8 --attention-backend reference "
        f"--kv-cache-memory 8MiB --json {file}"
    )
    assert throughput.run(parse("--model", str(folder), *options.split())) == 0
    printed = capsys.readouterr()
    assert "uniform: 2 requests, 256 prompt and 256 output tokens" in printed.out
    assert printed.err.count("mlx-lm, one by one: ") == 2
    document = json.loads(file.read_text())
    assert document["settings"]["batch_prefill"] == [[512, 8]]
    (result,) = document["results"]
    systems = {system["label"]: system for system in result["systems"]}
    calls = {label: [turn["num_model_calls"] for turn in system["turns"]] for label, system in systems.items()}
    assert calls["mlx-lm, one by one"] == [2 * 130] * 2
    assert calls["mlx-lm batch 512x8"] == [130] * 2
    # A step an output token; the prompts ride along, in as many steps as measured speed decides.
    assert all(128 <= count <= 136 for count in calls["mlx-serve, reference"])
    assert [system["num_outputs_as_first_row"] for system in systems.values()] == [2, 2, 2]
    assert systems["mlx-serve, reference"]["prefix_hit_rate"] == 0.0


def test_what_a_model_keeps_beside_its_weights_reaches_the_thread_of_the_engine(tmp_path, capsys):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {**tiny_model("llama").config, "rope_scaling": {**scaling, "original_max_position_embeddings": 1024}}
    folder = save_model_folder(build_random(config, seed=0), config, tmp_path / "model", byte_tokenizer())
    options = "--systems engine --num-requests 1 2 --repeat 1 --attention-backend reference --kv-cache-memory 8MiB"
    assert throughput.run(parse("--model", str(folder), *options.split())) == 0
    printed = capsys.readouterr().out
    assert "mlx-serve, reference" in printed
    assert [f"uniform: {count} requests" in printed for count in (1, 2, 16)] == [True, True, False]


def test_each_way_to_speculate_has_a_row_with_the_same_outputs(tmp_path, capsys):
    model, config = tiny_model("llama")
    folder = save_model_folder(model, config, tmp_path / "model", byte_tokenizer())
    options = (
        "--workload chat --systems engine --speculate off ngram --num-requests 2 --repeat 1 --kv-cache-memory 8MiB"
    )
    assert throughput.run(parse("--model", str(folder), *options.split())) == 0
    printed = capsys.readouterr().out
    assert [f"speculate {kind}" in printed for kind in ("off", "ngram", "auto")] == [True, True, False]
    assert printed.count("2/2") == 2


def test_an_unknown_model_is_refused():
    with pytest.raises(ModelLoadError, match="no random model `random:huge`"):
        throughput.run(parse("--model", "random:huge"))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(argparse.ArgumentError, match=r"cannot write .*: its folder does not exist"):
        parse("--model", "random:huge", "--json", str(tmp_path / "missing" / "out.json"))


@pytest.mark.parametrize(
    "options",
    [
        "--repeat 0",
        "--repeat many",
        "--seed x",
        "--batch-prefill 512",
        "--batch-prefill 0x8",
        "--systems vllm",
        "--workload huge",
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(argparse.ArgumentError):
        parse(*options.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--workload uniform --num-requests 17", "--num-requests is 17, but uniform has only 16 requests"),
        ("--speculate ngram --draft-model any", "Without effect on these systems.*--draft-model"),
        ("--systems batch --draft-model any", "Without effect on batch: --draft-model"),
        (
            "--systems sequential batch --speculate off --attention-backend cpu --kv-cache-memory 1GiB",
            "Without effect on sequential, batch: --attention-backend, --kv-cache-memory, --speculate",
        ),
        ("--systems engine --batch-prefill 512x1", "Without effect on engine: --batch-prefill"),
        ("--systems sequential --max-num-seqs 4", "Without effect on sequential: --max-num-seqs"),
    ],
)
def test_options_without_effect_are_refused_before_anything_is_measured(options, message):
    with pytest.raises(ConfigError, match=message):
        throughput.run(parse(*options.split()))
