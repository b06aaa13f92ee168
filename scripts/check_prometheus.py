"""Starts a server and a Prometheus that scrapes it, sends light load, puts the server to sleep and wakes it once, and
queries every dashboard expression and every series of vLLM."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.prometheus_tools import complaints, dashboard_expressions  # noqa: E402
from tests.vllm_dashboard import expressions  # noqa: E402
from tests.vllm_series import sample_names  # noqa: E402

_NUM_CLIENTS = 2
_READY_S = 180
_SCRAPED_S = 11
"""Long enough for two scrapes."""

_MIN_REQUESTS = 20
"""Requests of each client, enough for every expression to have data from several scrapes."""

_MAX_S = 900
"""Longest time for these requests, on a slow machine."""

_CONFIGURED_TARGET = "localhost:8000"


def main() -> int:
    args = _arguments()
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus is None or promtool is None:
        sys.exit("prometheus and promtool are not on the PATH (Debian: apt-get install prometheus).")
    server_url, prometheus_url = (f"http://127.0.0.1:{port}" for port in (args.port, args.prometheus_port))
    serve = [sys.executable, "-m", "mlx_server", "serve", "--model", args.model, "--port", str(args.port)]
    serve += ["--served-model-name", "checked", "--kv-cache-metrics", "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(_process(serve))
        _wait_for(f"{server_url}/health", server)
        config = (ROOT / "configs" / "prometheus.yml").read_text(encoding="utf-8")
        assert _CONFIGURED_TARGET in config
        path = folder / "prometheus.yml"
        path.write_text(config.replace(_CONFIGURED_TARGET, f"127.0.0.1:{args.port}"), encoding="utf-8")
        storage = [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{args.prometheus_port}"]
        scraper = stack.enter_context(_process([prometheus, f"--config.file={path}", *storage, "--log.level=warn"]))
        _wait_for(f"{prometheus_url}/-/ready", scraper)
        begun_s = time.monotonic()
        num_requests = _load(server_url, args.seconds)
        took_s = time.monotonic() - begun_s
        print(f"{num_requests} requests in {took_s:.0f} s")
        for route in ("/sleep", "/wake_up"):
            httpx.post(server_url + route, timeout=_READY_S).raise_for_status()
        time.sleep(_SCRAPED_S)
        exposition = httpx.get(f"{server_url}/metrics").content
        found = complaints(promtool, exposition)
        print("promtool check metrics:", "\n".join(found) if found else "no complaints, except about vLLM's names")
        num_empty = _ask_all(prometheus_url, f"{math.ceil(time.monotonic() - begun_s)}s")
    return 1 if found or num_empty else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check-prometheus", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="model to serve (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=60, help="shortest time under load (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9350, help="of the server (default: %(default)s)")
    parser.add_argument("--prometheus-port", type=int, default=9351, help="of Prometheus (default: %(default)s)")
    return parser.parse_args()


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.2)
    sys.exit(f"{url} did not become ready within {_READY_S} s, or its process has ended (see above).")


def _load(url: str, seconds: float) -> int:
    """Runs clients in two tiers that each send one request after another, with prompts that share a prefix. Lasts at
    least `seconds`, and until each client has `_MIN_REQUESTS` answers, but at most `_MAX_S`. Returns the number of
    answers."""
    begun_s, counts = time.monotonic(), [0] * _NUM_CLIENTS

    def goes_on(index: int) -> bool:
        took_s = time.monotonic() - begun_s
        return took_s < seconds or (counts[index] < _MIN_REQUESTS and took_s < _MAX_S)

    def client(index: int) -> None:
        rng = random.Random(index)
        with httpx.Client(base_url=url, timeout=_MAX_S) as http:
            while goes_on(index):
                prompt = [*range(1, 65), *(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 64)))]
                body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "priority": index}
                http.post("/v1/completions", json=body).raise_for_status()
                counts[index] += 1

    threads = [threading.Thread(target=client, args=(index,)) for index in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _ask_all(url: str, window: str) -> int:
    """Queries every expression and prints its values. Returns the number of expressions without data."""
    dashboards = {
        "vLLM": expressions("checked", window),
        "ours": dashboard_expressions(".*", window),
        "sleep": {"times": [f"increase(vllm:sleep_mode_operation_duration_seconds_count[{window}]) > 0"]},
        "name": {name: [name] for name in sample_names()},
    }
    num_asked, num_empty = 0, 0
    for name, panels in dashboards.items():
        for title, panel in panels.items():
            for expression in panel:
                answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
                values = [float(series["value"][1]) for series in answer["data"]["result"]]
                numbers = [value for value in values if not math.isnan(value)]
                num_asked, num_empty = num_asked + 1, num_empty + (not numbers)
                shown = ", ".join(f"{value:.4g}" for value in numbers[:4]) + (" ..." if len(numbers) > 4 else "")
                print(f"{name:5} {title:45} {shown or 'NO DATA: ' + expression}")
    print(f"{num_asked} expressions, {num_empty} of them without data")
    return num_empty


if __name__ == "__main__":
    raise SystemExit(main())
