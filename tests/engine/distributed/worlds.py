"""Servers of several ranks, as processes here: MLX's ring backend over loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from mlx_server import LLM, SamplingParams
from tests.homes import with_kernels
from tests.ports import HOST, free_ports

MAX_S = 240
"""More than ranks take to start, and a request to be answered, on a busy machine."""

END_S = 60
"""Much more than the 5 s in which ranks should end: that is measured elsewhere."""


class Ranks:
    """The processes of one server, rank 0 first."""

    def __init__(
        self, folder: Path, home: Path, size: int, options: Sequence[str], others: Sequence[str] | None = None
    ) -> None:
        """`others` are the options of all ranks but the first, if they have some of their own."""
        hostfile = home / "hosts.json"
        hostfile.write_text(json.dumps([[f"{HOST}:{port}"] for port in free_ports(size)]))
        command = [sys.executable, "-m", "mlx_server", "serve", str(folder), "--port", "0"]
        environ = {**os.environ, "MLX_SERVE_HOME": str(home), "MLX_HOSTFILE": str(hostfile)}
        self.logs = [home / f"rank-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            mine = options if rank == 0 or others is None else others
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [*command, "--served-model-name", "tiny", "--tensor-parallel-size", str(size), *mine],
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


@contextmanager
def serving(folder: Path, home: Path, size: int, *options: str) -> Iterator[tuple[Ranks, httpx.Client]]:
    ranks = Ranks(folder, with_kernels(home), size, options)
    timer = threading.Timer(MAX_S, lambda: [process.kill() for process in ranks.processes])
    timer.start()
    try:
        with httpx.Client(base_url=ranks.wait_until_ready(), timeout=MAX_S) as http:
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


def alone(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, **more: Any) -> list[list[int]]:
    """What one process answers."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **more})
    return [list(done.token_ids) for done in llm.generate(list(prompts), sampling, use_tqdm=False)]
