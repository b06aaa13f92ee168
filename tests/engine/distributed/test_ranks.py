"""One model over several processes here, as it would be over several Macs: MLX's ring backend over loopback."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlx_server import LLM, SamplingParams
from mlx_server.cli.main import main
from mlx_server.config import load_config
from mlx_server.engine.distributed.ranks import check_shardable
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.runtime.layers.sharding import shard_model
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.engine.distributed.worlds import END_S, MAX_S, Ranks, alone, complete, metric, serving
from tests.engine_worlds import built, make_folder, on_the_cpu, random_prompts
from tests.homes import with_kernels
from tests.tiny_models import byte_tokenizer, save_model_folder

PREFIX, *OTHERS = random_prompts([100, 40, 70, 1050, 1060], seed=3)


def parameters() -> list[tuple[str, Any]]:
    named: list[tuple[str, Any]] = tree_flatten(built("llama").model.parameters())
    return named


@on_the_cpu
@pytest.mark.slow
def test_two_ranks_answer_as_one_process_and_end_together(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    with (
        serving(folder, tmp_path / "home", 2, "--kv-cache-memory", "860kB") as (ranks, http),
        LLM(str(folder), kv_cache_memory="8MB") as one,
        ThreadPoolExecutor(4) as clients,
    ):
        cut = sum(array.nbytes for name, array in parameters() if "proj" in name)
        whole = sum(array.nbytes for _, array in parameters()) - cut
        assert metric(http, "mlx_serve:model_memory_bytes", 'use="weights"') == whole + cut / 2

        def ask(prompts: Sequence[list[int]], max_tokens: int, **more: Any) -> list[dict[str, Any]]:
            return list(clients.map(lambda prompt: complete(http, prompt, max_tokens, **more), prompts))

        def tokens(prompts: Sequence[list[int]], max_tokens: int, **more: Any) -> list[list[int]]:
            return [choice["token_ids"] for choice in ask(prompts, max_tokens, **more)]

        short = [PREFIX, *OTHERS[:2]]
        assert tokens(short, 20) == alone(one, short, 20), "greedy"
        hit = complete(http, PREFIX, 20)
        assert hit["cached"] == 96
        assert hit["token_ids"] == alone(one, [PREFIX], 20)[0], "behind a cached prefix"
        seeded = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
        assert tokens(short, 20, **seeded) == alone(one, short, 20, **seeded), "seeded"

        # Other ranks draw with random numbers of their own. Had one of them gone on with another token than rank 0
        # has shown, the log-probabilities of what follows would not be those of the shown text.
        for prompt, drawn in zip(short, ask(short, 20, temperature=1.5, presence_penalty=1.0, logprobs=0)):
            [known] = one.generate(
                [prompt + drawn["token_ids"]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )
            reported = [position.token.logprob for position in known.prompt_logprobs[-20:]]
            assert drawn["logprobs"]["token_logprobs"] == pytest.approx(reported, abs=1e-3), "unseeded"

        long = OTHERS[2:]
        assert tokens(long, 60) == alone(one, long, 60), "with a pool that grows, and is too small for both"
        assert metric(http, "mlx_serve:kv_pool_growths_total") > 0
        assert metric(http, "vllm:num_preemptions_total") > 0

        assert http.post("/admin/models/unload", json={"model": "tiny"}).status_code == 200
        assert complete(http, PREFIX, 20)["token_ids"] == alone(one, [PREFIX], 20)[0], "loaded again"
        ranks.processes[1].send_signal(signal.SIGINT)
        assert complete(http, PREFIX, 20)["cached"] == 96, "rank 1 goes on after a first signal"

        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.statuses() == [0, 0], ranks.said()


@on_the_cpu
@pytest.mark.slow
def test_the_end_of_one_rank_ends_all_streams_and_all_ranks(tmp_path: Path):
    config = {**built("llama").config, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    config |= {"hidden_size": 96, "intermediate_size": 192}
    folder = save_model_folder(build_random(config, 1), config, tmp_path / "model", byte_tokenizer())
    with serving(folder, tmp_path / "home", 3) as (ranks, http), ThreadPoolExecutor(2) as clients:
        with LLM(str(folder), kv_cache_memory="8MB") as one:
            assert complete(http, PREFIX, 20)["token_ids"] == alone(one, [PREFIX], 20)[0]
        begun = threading.Barrier(3)

        def stream(prompt: list[int]) -> list[str]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 3900, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                said = [next(lines)]
                begun.wait(MAX_S)
                return [*said, *lines]

        streams = [clients.submit(stream, prompt) for prompt in OTHERS[:2]]
        begun.wait(MAX_S)
        ranks.processes[1].kill()
        for done in streams:
            *_, last, end = [line for line in done.result(END_S) if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503, ranks.said()
            assert end == "data: [DONE]"
        assert ranks.statuses() == [1, -signal.SIGKILL, 1], ranks.said()


@on_the_cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.full),  # experts
        pytest.param("gpt_oss", marks=pytest.mark.full),  # experts, windows and sinks
        "qwen3_5",  # recurrent states
    ],
)
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # transformers'
def test_models_of_other_kinds_answer_over_ranks_as_alone(architecture: str, tmp_path: Path):
    config = config_of(architecture)
    folder = save_model_folder(build_random(config, 1), config, tmp_path / "model", byte_tokenizer())
    with (
        serving(folder, tmp_path / "home", 2) as (ranks, http),
        LLM(str(folder), kv_cache_memory="8MB") as one,
        ThreadPoolExecutor(3) as clients,
    ):
        prompts = [PREFIX, *OTHERS[:2]]
        expected = alone(one, prompts, 20)
        got = list(clients.map(lambda prompt: complete(http, prompt, 20)["token_ids"], prompts))
        assert got == expected, "three at a time"
        assert complete(http, PREFIX, 20)["token_ids"] == expected[0], "behind a cached prefix"
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.statuses() == [0, 0], ranks.said()


@on_the_cpu
@pytest.mark.slow
def test_ranks_with_other_settings_end_and_say_which(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    options = [["--max-num-seqs", "8"], ["--max-num-seqs", "4"]]
    ranks = Ranks(folder, with_kernels(tmp_path / "home"), 2, *options)
    assert ranks.statuses() == [2, 1], ranks.said()
    first, second = (log.read_text("utf-8") for log in ranks.logs)
    assert "max_num_seqs is 4 on rank 1, but 8 on rank 0; it must be the same on all ranks." in first
    assert "Rank 0 is lost: its process has ended" in second
    for process in ranks.processes:
        process.communicate()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"adapter": "mine=/there"}, "adapter is mine=/there"),
        ({"draft_model": "smollm2"}, "draft_model is smollm2"),
        ({"speculate": "mtp"}, "speculate is mtp"),
        ({"batch_invariant": "true"}, "batch_invariant is True"),
        ({"kv_bits": "8"}, "kv_bits is 8"),
        ({"kv_disk": "1GB"}, "kv_disk is 1GB"),
        ({"model_folders": "/there"}, "model_folders is /there"),
        ({"pulled_models": "true"}, "pulled_models is True"),
    ],
)
def test_what_does_not_work_with_several_ranks_is_refused_by_name(flags: dict[str, str], reason: str):
    with pytest.raises(ConfigError, match=f"{reason}, which does not work with --tensor-parallel-size 2: "):
        check_shardable(load_config(flags={"tensor_parallel_size": "2", **flags}))


def test_several_models_are_refused(tmp_path: Path):
    path = tmp_path / "models.toml"
    path.write_text('[fleet]\ntensor_parallel_size = 2\n[[models]]\nid = "a"\nmodel = "x"\n')
    with pytest.raises(ConfigError, match="models is a, which does not work with --tensor-parallel-size 2: "):
        check_shardable(load_config(path))


def test_a_rank_that_was_not_launched_as_one_says_how_to(monkeypatch, capsys):
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert main(["serve", "random:mini", "--port", "0", "--tensor-parallel-size", "2"]) == 2
    assert "MLX_RANK is not set: start the ranks with `mlx.launch --hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "heads", "reason"),
    [
        (SimpleNamespace(model_type="gemma3_text"), {}, "gemma3_text cannot be spread .* has no `shard`"),
        (built("llama").model, {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads 9, which 2"),
        (built("llama").model, {"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads 3, which 2"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: Any, heads: dict[str, int], reason: str):
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ModelLoadError, match=reason):
        shard_model(model, heads.get, group)


def test_a_rank_needs_memory_for_its_part():
    one, two = (
        estimate_need(load_config(flags={"model": "random:mini", "tensor_parallel_size": str(size)})) for size in (1, 2)
    )
    embeddings = 2 * 16_384 * 384 * 4
    assert two.weights_bytes == embeddings + (one.weights_bytes - embeddings) // 2
    assert two.kv_bytes == one.kv_bytes // 2
