"""One model over several processes here, as it would be over several Macs: MLX's ring backend over loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mlx.utils import tree_flatten

from mlx_server import LLM, SamplingParams
from mlx_server.cli.main import main
from mlx_server.config import load_config
from mlx_server.engine.distributed.leader import Leader
from mlx_server.engine.distributed.rank_link import Link, Memory, RankLostError, Stop
from mlx_server.engine.distributed.ranks import check_shardable
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.outputs import BlockMove, NewRequestData, PoolChange, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.memory import read_memory
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.sharding import shard_model
from tests.engine_worlds import built, make_folder, on_the_cpu, random_prompts
from tests.homes import with_kernels
from tests.tiny_models import byte_tokenizer, save_model_folder

HOST = "127.0.0.1"
MOST_S = 240
"""More than ranks take to start, and a request to be answered, on a busy machine."""

END_S = 60
"""Much more than the 5 s in which ranks should end: that is measured elsewhere."""

PREFIX, *OTHERS = random_prompts([100, 40, 70, 1050, 1060], seed=3)


class Ranks:
    """The processes of one server, rank 0 first."""

    def __init__(self, folder: Path, home: Path, size: int, options: Sequence[str]) -> None:
        hostfile = home / "hosts.json"
        hostfile.write_text(json.dumps([[f"{HOST}:{port}"] for port in free_ports(size)]))
        command = [sys.executable, "-m", "mlx_server", "serve", str(folder), "--port", "0"]
        environ = {**os.environ, "MLX_SERVE_HOME": str(home), "MLX_HOSTFILE": str(hostfile)}
        self.logs = [home / f"rank-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [*command, "--served-model-name", "tiny", "--tensor-parallel-size", str(size), *options],
                    env={**environ, "MLX_RANK": str(rank)},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                )
            self.processes.append(process)

    def wait_until_ready(self) -> str:
        """The server's address."""
        out = self.processes[0].stdout
        assert out is not None
        line = out.readline()
        assert "is ready" in line, self.said()
        return line.split()[3].removesuffix("/v1")

    def statuses(self) -> list[int]:
        """The exit statuses of all."""
        return [process.wait(END_S) for process in self.processes]

    def said(self) -> str:
        return "\n".join(log.read_text("utf-8", "replace") for log in self.logs)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def serving(folder: Path, home: Path, size: int, *options: str) -> Iterator[tuple[Ranks, httpx.Client]]:
    ranks = Ranks(folder, with_kernels(home), size, options)
    timer = threading.Timer(MOST_S, lambda: [process.kill() for process in ranks.processes])
    timer.start()
    try:
        with httpx.Client(base_url=ranks.wait_until_ready(), timeout=MOST_S) as http:
            yield ranks, http
    finally:
        timer.cancel()
        for process in ranks.processes:
            process.kill()
            process.communicate()


def complete(http: httpx.Client, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The answer's only choice, with `cached` tokens of the prompt."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **more}
    answer = http.post("/v1/completions", json={"model": "tiny", "temperature": 0.0, **body})
    assert answer.status_code == 200, answer.text
    done = answer.json()
    return {**done["choices"][0], "cached": done["usage"]["prompt_tokens_details"]["cached_tokens"]}


def metric(http: httpx.Client, name: str, label: str = "") -> float:
    values = re.findall(rf"^{name}\{{.*{label}.*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, values))


def parameters() -> list[tuple[str, Any]]:
    named: list[tuple[str, Any]] = tree_flatten(built("llama").model.parameters())
    return named


def alone(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, **more: Any) -> list[list[int]]:
    """What one process answers."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **more})
    return [list(done.token_ids) for done in llm.generate(list(prompts), sampling, use_tqdm=False)]


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
            told = [position.token.logprob for position in known.prompt_logprobs[-20:]]
            assert drawn["logprobs"]["token_logprobs"] == pytest.approx(told, abs=1e-3), "unseeded"

        long = OTHERS[2:]
        assert tokens(long, 150) == alone(one, long, 150), "with a pool that grows, and is too small for both"
        assert metric(http, "mlx_serve:kv_pool_growths_total") > 0
        assert metric(http, "vllm:num_preemptions_total") > 0

        assert http.post("/admin/models/unload", json={"model": "tiny"}).status_code == 200
        assert complete(http, PREFIX, 20)["token_ids"] == alone(one, [PREFIX], 20)[0], "loaded again"

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
                begun.wait(MOST_S)
                return [*said, *lines]

        streams = [clients.submit(stream, prompt) for prompt in OTHERS[:2]]
        begun.wait(MOST_S)
        ranks.processes[1].kill()
        for done in streams:
            *_, last, end = [line for line in done.result(END_S) if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503, ranks.said()
            assert end == "data: [DONE]"
        assert ranks.statuses() == [1, -signal.SIGKILL, 1], ranks.said()


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
    with pytest.raises(ConfigError, match=f"{reason}, which does not go with --tensor-parallel-size 2: "):
        check_shardable(load_config(flags={"tensor_parallel_size": "2", **flags}))


def test_several_models_are_refused(tmp_path: Path):
    path = tmp_path / "models.toml"
    path.write_text('[fleet]\ntensor_parallel_size = 2\n[[models]]\nid = "a"\nmodel = "x"\n')
    with pytest.raises(ConfigError, match="models is a, which does not go with --tensor-parallel-size 2: "):
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


# --- between ranks ----------------------------------------------------------------------------------------------------


def linked(work: Callable[[Link], None], tokens: tuple[bytes, bytes] = (b"t" * 32, b"t" * 32)) -> Link:
    """Rank 0's end of a link; `work` has the other one, on a thread of its own."""
    with socket.create_server((HOST, 0)) as server:

        def connect() -> None:
            try:
                link = Link(socket.create_connection(server.getsockname()), tokens[1], is_leader=False)
            except RankLostError:
                return
            work(link)
            link.close()

        threading.Thread(target=connect, daemon=True).start()
        return Link(server.accept()[0], tokens[0], is_leader=True)


def test_a_step_arrives_as_it_was_sent():
    sampling = SamplingParams(seed=3, stop=["x"], logit_bias={5: 1.5}, allowed_token_ids=(1, 2), stop_token_ids=(9,))
    chunks = (
        ScheduledChunk("a", 0, 3, (1, 2, 3), ((1,),), True, 0, allowed_bitmask=b"\x01\x00", checkpoint=4),
        ScheduledChunk("b", 7, 3, (4, 5, 6), ((), (2,)), True, 5, num_drafts=2, draft_bitmasks=(None, b"\xff")),
        ScheduledChunk("c", 9, 1, None, ((),), True, 8, recent_token_ids=(7,)),
    )
    step = SchedulerOutput(
        8,
        chunks,
        (NewRequestData("a", (1, 2, 3), (), sampling, frozenset({2, 4}), 1),),
        ("gone",),
        num_prompt_tokens=3,
        pool_change=PoolChange(9, (BlockMove(1, 2),), 3),
    )

    def echo(link: Link) -> None:
        link.send(link.receive())

    link = linked(echo)
    link.send(step)
    assert link.receive() == step
    with pytest.raises(RankLostError, match="its process has ended"):
        link.receive()
    link.close()


def test_who_does_not_know_the_secret_is_no_rank():
    with pytest.raises(RankLostError, match="no rank of this group"):
        linked(lambda link: None, (b"t" * 32, b"u" * 32))


def test_pools_are_booked_by_the_rank_that_has_least_room():
    reading = replace(read_memory(), available_bytes=12345)
    answered = threading.Event()

    def work(link: Link) -> None:
        link.send(Memory(reading))
        link.receive()
        answered.set()
        assert isinstance(link.receive(), Stop)

    leader = Leader(SimpleNamespace(), {1: linked(work)}, MLXThread())
    assert answered.wait(END_S)
    assert leader.read_memory() == reading
    leader.close()


def test_a_rank_that_stops_when_it_is_told_to_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("mlx_server.engine.distributed.leader._GRACE_S", 3600.0)  # else this process ended with it

    def work(link: Link) -> None:
        assert isinstance(link.receive(), Stop)

    leader = Leader(SimpleNamespace(), {1: linked(work)}, MLXThread())
    tell = leader.tell

    def tell_and_see_it_go(message: Any) -> None:
        tell(message)
        for reader in leader._readers:
            reader.join(END_S)

    monkeypatch.setattr(leader, "tell", tell_and_see_it_go)
    leader.close()
    assert caplog.messages == []
