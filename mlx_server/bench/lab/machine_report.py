"""`mlx-serve doctor --report`: writes what an issue about this machine needs to one file.

Each stage runs even if another has failed; a failure is reported with its traceback. The user's paths, the names of
user and host, and secrets are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import io
import json
import logging
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import mlx.core as mx
import psutil
from huggingface_hub import constants

import mlx_server
from mlx_server.bench.instruments import describe_environment
from mlx_server.bench.lab.attention import Case, measure_copy
from mlx_server.bench.lab.kernels import measure_case, render_results
from mlx_server.bench.lab.products import MLX, Weight, measure_products, own_products, render_products
from mlx_server.bench.lab.soak import SoakResult, memory_before_and_after, soak
from mlx_server.bench.servers import Server
from mlx_server.bench.tables import format_bytes, format_rate, render_table
from mlx_server.clients import NO_PROXY
from mlx_server.config import DEFAULT_MODEL, FEWER_KV, Config, ModelConfig, home, settings
from mlx_server.engine.models.facts import read_facts
from mlx_server.errors import ServeError
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from mlx_server.runtime.kernels.gpu.choice_files import dtype_name
from mlx_server.runtime.kernels.gpu.product_choice import product_failure
from mlx_server.runtime.kernels.gpu.products import Form, ProductKernels, ProductShape
from mlx_server.runtime.kernels.gpu.variants import HEAD_DIMS, DecodeShape
from mlx_server.runtime.kernels.trials import exhaust

_QUESTION, _ANSWER = "What is 2 + 2?", "4"
_START_S = 300.0
_NUM_LOG_LINES = 60
_NUM_HEADS, _NUM_KV_HEADS = 8, 2
_REPEATS = 3
_SIDE = 2048
_NUM_ROWS = (1, 2, 4, 8, 16, 32)
_COPY_BYTES = 128 * 2**20
_NUM_LAYERS = 8
_VARIABLES = re.compile(r"MLX_(?!SERVE_).*|MTL_.*|METAL_.*")
_SECRET_VARIABLE = re.compile(r".*(TOKEN|KEY|SECRET|PASSWORD)", re.IGNORECASE)
_MIN_SECRET_CHARS = 6
_SECRET_FORMS = {
    r"\bhf_[A-Za-z0-9]{20,}|\bmlxs_[\w-]{20,}": "<secret>",
    r"(\w://)[^\s/]+@": r"\1<secret>@",
    r"(\w://[^\s?'\"]+\?)[^\s'\"]+": r"\1<secret>",
}
"""Tokens of the hub, our keys; users and queries of URLs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a stage in Markdown, and its problems; or why it was skipped."""

    text: str
    problems: Sequence[str] = ()
    is_skipped: bool = False

    @property
    def result(self) -> str:
        """In words."""
        return "; ".join(self.problems) or ("skipped" if self.is_skipped else "passed")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that has run or was skipped. It failed if the finding has problems."""

    title: str
    elapsed_s: float
    finding: Finding


def make_report(config: Config, soak_s: float, on_stage: Callable[[str], None]) -> tuple[str, bool]:
    """Runs all stages, which takes a minute or two besides the soak. Returns the report, and whether none failed."""
    with tempfile.TemporaryDirectory(prefix="mlx-serve-report-") as folder:
        log = Path(folder) / "server.log"
        stages: dict[str, Callable[[], Finding]] = {
            "Machine": lambda: _machine(config),
            "Self-tests of the kernels": self_tests,
            "Timings of attention": _timings,
            "Products of few rows": product_tests,
            "A chat over HTTP": lambda: _chat(config, log),
            "Soak": lambda: _soak(config, soak_s),
        }
        with _logs_kept() as logged:
            done = []
            for title, run in stages.items():
                on_stage(title)
                done.append(_run(title, run))
        served = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    texts = {"in this process": logged.getvalue(), "of the server": served}
    logs = "\n\n".join(f"### {where}\n{_block(text.splitlines()[-_NUM_LOG_LINES:])}" for where, text in texts.items())
    return redact(_render(done, logs), config), not any(stage.finding.problems for stage in done)


def redact(text: str, config: Config) -> str:
    """The text without secrets, the user's paths, those of the configured models included, and the names of user and
    host. Secrets are known by their form, or as values of settings and variables that are named so."""
    for secret in sorted(_secrets(config), key=len, reverse=True):
        text = text.replace(secret, "<secret>")
    for form, shown in _SECRET_FORMS.items():
        text = re.sub(form, shown, text)
    folders = _folders(config)
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, folders[folder])
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError):  # a user of a container may have no entry
        names.add(getpass.getuser())
    for name in sorted(names - {"", "root"}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", text)
    return text


def _secrets(config: Config) -> set[str]:
    ours = {getattr(getattr(config, setting.section), setting.name) for setting in settings() if setting.is_secret}
    others = {value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name)}
    return {value for value in ours | others if value and len(value) >= _MIN_SECRET_CHARS}


def _folders(config: Config) -> dict[str, str]:
    """What to write for each folder, as it is written and with links resolved."""
    models = [Path(name).parent for name in (config.model.model, *(entry.model for entry in config.models))]
    shown = {folder: "<models>" for folder in models if folder.is_absolute() or folder.parts[:1] == ("..",)}
    shown |= {Path(tempfile.gettempdir()): "<tmp>", Path(sys.prefix): "<python>"}
    shown |= {Path(mlx_server.__file__).parents[1]: "<package>", Path(constants.HF_HUB_CACHE): "<hub>"}
    shown[Path.cwd()] = "."
    with contextlib.suppress(RuntimeError, ServeError):  # a user of a container may have no home
        shown |= {home(): "<mlx-serve>", Path.home(): "~"}
    found = {str(path): word for folder, word in shown.items() for path in (folder, folder.resolve())}
    return {path: word for path, word in found.items() if path not in ("/", "..")}


def _run(title: str, run: Callable[[], Finding]) -> Stage:
    start_s = time.perf_counter()
    try:
        finding = run()
    except Exception as error:  # any failure belongs in the report
        finding = Finding(_block(traceback.format_exc().splitlines()), [f"{type(error).__name__}: {error}"])
    return Stage(title, time.perf_counter() - start_s, finding)


def _machine(config: Config) -> Finding:
    """Versions, chip, system, memory, and the settings that differ from the defaults; values of texts may be secret and
    are left out."""
    facts: dict[str, object] = {
        **describe_environment(),
        "macos": platform.mac_ver()[0] or f"none: {platform.system()}",
        "device_info": mx.device_info(),
        "memory": {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": mx.get_peak_memory()},
        "variables": {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)},
        "wired": {"setting": config.memory.wire_memory, **_wired_by_the_system()},
        "settings (this report uses model and wire_memory)": _changed_settings(config),
    }
    return Finding(_block(json.dumps(facts, indent=2, default=str).splitlines(), "json"))


def _wired_by_the_system() -> dict[str, object]:
    """On a Mac: the bytes that all processes have wired, and the GPU's limit in MB (0: the system's default)."""
    wired = getattr(psutil.virtual_memory(), "wired", None)
    if wired is None:
        return {}
    limit = subprocess.run(["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, check=False)
    return {"bytes": wired, "iogpu.wired_limit_mb": limit.stdout.strip()}


def _changed_settings(config: Config) -> dict[str, object]:
    found = {}
    for setting in settings():
        value = getattr(getattr(config, setting.section), setting.name)
        if value != setting.default:
            is_shown = setting.type is not str or bool(setting.choices)
            found[setting.name] = value if is_shown else "<another>"
    return found


def self_tests() -> Finding:
    """The self-test of the chosen backend, for every head size and type that has a kernel."""
    is_cpu = mx.default_device() == mx.cpu
    rows, problems = [], []
    for spec in _specs(is_cpu):
        backend = choose_backend("auto", [spec])
        exhaust(backend.warm_up(spec, _NUM_HEADS))
        reason = None
        if isinstance(backend, GpuBackend):
            reason = backend.supports(spec, _NUM_HEADS) or (
                "K/V is written by scatter" if backend.needs_synchronous_steps else None
            )
            unshared = backend.shared_failure(spec, _NUM_HEADS)
            if reason is None and unshared is not None:
                reason = f"reads of K/V are not shared: {unshared}"
        elif not is_cpu:
            reason = f"the {backend.name} backend is used on a GPU"
        name = f"{dtype_name(spec.dtype)} {spec.key_dim}" + ("" if spec.bits is None else f" in {spec.bits.words}")
        rows.append((name, backend.name, reason or "passed"))
        if reason is not None:
            problems.append(f"{name}: {reason}")
    return Finding(render_table(("type and head size", "backend", "result"), rows), problems)


def _specs(is_cpu: bool) -> Iterable[LayerSpec]:
    dtypes = (mx.float32,) if is_cpu else (mx.float16, mx.bfloat16, mx.float32)
    for dtype in dtypes:
        for dim in HEAD_DIMS:
            yield LayerSpec(_NUM_KV_HEADS, dim, dim, dtype)
        for bits in FEWER_KV:
            yield LayerSpec(_NUM_KV_HEADS, 128, 128, dtype, KvBits.of(bits))


def _timed_dtype() -> mx.Dtype:
    return mx.float32 if mx.default_device() == mx.cpu else mx.float16


def _timings() -> Finding:
    shape = DecodeShape(16, 8, 128, 128, _timed_dtype())
    backend = choose_backend("auto", [shape.spec])
    exhaust(backend.warm_up(shape.spec, shape.num_query_heads))
    cases = [Case(shape, 1, 1, 2048), Case(shape, 8, 1, 512), Case(shape, 1, 256, 1024)]
    copy = measure_copy(_COPY_BYTES)
    return Finding(render_results([measure_case(case, backend, _NUM_LAYERS, _REPEATS) for case in cases], copy))


def product_tests() -> Finding:
    """Products of few rows: on a Mac each form by the test that it has at load, then times beside MLX's products."""
    rows, problems = [], []
    for weight in _weights((mx.float16, mx.bfloat16)) if mx.metal.is_available() else ():
        layer, kernels = weight.make_layer(), ProductKernels.of_metal()
        shape = ProductShape.of(layer)
        assert shape is not None
        for form in Form:
            failure = exhaust(product_failure(kernels.of(form, shape), shape, layer))
            rows.append((str(weight), str(form), failure or "passed"))
            problems += [] if failure is None else [f"{form} form, {weight}: {failure}"]
    products, is_cpu = own_products(), mx.default_device() == mx.cpu
    results = []
    for weight in _weights((_timed_dtype(),)):
        num_layers = 1 if is_cpu else weight.cold_layers  # for so many MLX needs minutes on a CPU
        results += measure_products(weight, _NUM_ROWS, products, num_layers, _REPEATS)
    problems += [
        f"{one.product}, {one.weight}: a row among {one.num_rows} has other bits"
        for one in results
        if one.product != MLX and not one.has_same_bits
    ]
    tests = [render_table(("weight", "form", "result"), rows)] if rows else []
    return Finding("\n\n".join([*tests, render_products(results, measure_copy(_COPY_BYTES))]), problems)


def _weights(dtypes: Iterable[mx.Dtype]) -> Iterator[Weight]:
    for dtype in dtypes:
        for bits in (4, 8, None):
            yield Weight(_SIDE, _SIDE, bits, dtype)


def _model(config: Config) -> str:
    """The configured model; of several, the first, which is the default one."""
    return config.models[0].model if config.models else config.model.model


def _chat(config: Config, log: Path) -> Finding:
    """One question to a server in its own process, with default settings and a key, in case other servers run. A model
    that generates no text is only loaded."""
    key = secrets.token_hex(16)
    environ = {name: value for name, value in os.environ.items() if name not in {setting.env for setting in settings()}}
    environ["MLX_SERVE_SERVER_API_KEY"] = key
    wire = "--wire-memory" if config.memory.wire_memory else "--no-wire-memory"
    command = f"{{python}} -m mlx_server serve --model {{model}} --port {{port}} {wire}"
    body = {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "max_completion_tokens": 40}
    server = Server(name="mlx-serve", command=command, environ=environ)
    with server.session(model=_model(config), log_path=log, start_timeout_s=_START_S) as url:
        if _embeds_only(config):
            return _skipped(config)
        start_s = time.perf_counter()
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(headers=headers, timeout=_START_S, mounts=NO_PROXY) as http:
            response = http.post(f"{url}/v1/chat/completions", json=body)
        elapsed_s = time.perf_counter() - start_s
    if response.status_code != httpx.codes.OK:
        raise ServeError(f"The server answered {response.status_code}: {response.text}")
    answer = str(response.json()["choices"][0]["message"]["content"])
    num_tokens = int(response.json()["usage"]["completion_tokens"])
    problems = [] if num_tokens and answer.strip() else ["the answer is empty"]
    if _model(config) == DEFAULT_MODEL and _ANSWER not in answer:
        problems.append(f"the answer does not contain {_ANSWER}")
    quoted = "> " + answer.replace("\n", "\n> ")
    return Finding(f"{_QUESTION}\n\n{quoted}\n\n{num_tokens} tokens in {elapsed_s:.2f} s", problems)


def _soak(config: Config, seconds: float) -> Finding:
    if _embeds_only(config):
        return _skipped(config)
    result = asyncio.run(soak(_model(config), seconds, wire_memory=config.memory.wire_memory))
    return Finding(render_table(("what", "found"), _soak_rows(result)), result.problems)


def _embeds_only(config: Config) -> bool:
    """Whether the model's files say that it generates no text; call it when they are on this machine."""
    facts = read_facts(_model(config))
    kinds = [] if facts is None else facts.capabilities(_model(config), ModelConfig().pooling)
    return "embedding" in kinds and "completion" not in kinds


def _skipped(config: Config) -> Finding:
    text = (
        f"Skipped: {_model(config)} is an embedding model, which generates no text. Configure another model in "
        "[model] or first in [[models]], or none for the bundled one."
    )
    return Finding(text, is_skipped=True)


def _soak_rows(result: SoakResult) -> list[tuple[str, str]]:
    stats, (before, after) = result.stats, memory_before_and_after(result.samples)
    num_tokens = stats.num_generated_tokens + stats.num_prompt_tokens_computed
    return [
        ("backend", result.backend),
        ("seconds of load", f"{result.elapsed_s:.1f}"),
        ("requests answered, aborted", f"{result.num_whole}, {result.num_aborted}"),
        ("answers equal to those given alone", f"{result.num_equal} of {result.num_whole}"),
        ("tokens a second, prompts included", format_rate(num_tokens / stats.busy_time_s if stats.busy_time_s else 0)),
        ("prompt tokens from the prefix cache", f"{stats.num_prefix_hit_tokens:,}"),
        ("preemptions, blocks evicted", f"{stats.num_preemptions}, {stats.num_block_evictions}"),
        ("blocks free at the end", f"{stats.num_free_blocks} of {stats.num_blocks}"),
        ("copies of KV pools", f"{result.num_pool_moves}"),
        ("MLX's memory, second and last quarter", f"{format_bytes(int(before))}, {format_bytes(int(after))}"),
        ("MLX's memory, peak", format_bytes(int(mx.get_peak_memory()))),
        ("MLX's memory, kept for reuse", format_bytes(int(mx.get_cache_memory()))),
        ("process at the end", format_bytes(psutil.Process().memory_info().rss)),
    ]


@contextmanager
def _logs_kept() -> Iterator[io.StringIO]:
    """Collects the log lines of this package."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger("mlx_server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _render(stages: Sequence[Stage], logs: str) -> str:
    rows = [(stage.title, stage.finding.result.replace("|", "/"), f"{stage.elapsed_s:.1f}") for stage in stages]
    kind = "a Mac" if sys.platform == "darwin" else f"{platform.system()}, not a Mac"
    summary = render_table(("stage", "result", "s"), rows)
    parts = [f"# Report of mlx-serve on {kind}", summary]
    parts += [f"## {stage.title}\n{stage.finding.text}" for stage in stages]
    return "\n\n".join([*parts, f"## Logs\n{logs}"]) + "\n"


def _block(lines: Sequence[str], language: str = "") -> str:
    return "\n".join([f"```{language}", *lines, "```"])
