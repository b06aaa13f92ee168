"""`mlx-serve doctor --report`: one file for an issue, whatever fails, with nothing in it that is the user's own."""

from __future__ import annotations

import dataclasses
import getpass
import itertools
import json
import os
import re
from pathlib import Path

import mlx.core as mx
import pytest
from emulator.kernel import Emulator
from emulator.worlds import toolchain

from mlx_server.bench.lab import machine_report, soak
from mlx_server.bench.lab.machine_report import product_tests, redact, self_tests
from mlx_server.cli.main import main
from mlx_server.config import Config, ModelConfig, ServerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.model_entries import ModelEntry
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.products import ProductKernels
from mlx_server.runtime.kernels.gpu.variants import HEAD_DIMS
from tests.embedders import save_embedder
from tests.engine_worlds import make_folder
from tests.runtime.kernels.test_product_choice import HostKernels

STAGES = [
    "Machine",
    "Self-tests of the kernels",
    "Timings of attention",
    "Products of few rows",
    "A chat over HTTP",
    "Soak",
]
SECTIONS = [*STAGES, "Logs"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model is served and soaked, with few requests, and little is copied."""
    monkeypatch.setenv("MLX_SERVE_MODEL_MODEL", str(make_folder(tmp_path / "model")))
    monkeypatch.setenv("MLX_SERVE_SERVER_API_KEY", "sesame-42")
    monkeypatch.setenv("MLX_SERVE_SCHEDULER_MAX_NUM_SEQS", "17")
    monkeypatch.setattr(soak, "_NUM_CASES", 4)
    for name, value in (("_COPY_BYTES", 2**20), ("_NUM_LAYERS", 1), ("_REPEATS", 1), ("_SIDE", 64)):
        monkeypatch.setattr(machine_report, name, value)


def written(path: Path) -> tuple[list[str], dict[str, str]]:
    """The titles of a report's sections, and the results of its stages."""
    lines = path.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:] if line.startswith("|")][
        : len(STAGES)
    ]
    return [line[3:] for line in lines if line.startswith("## ")], {row[0]: row[1] for row in rows}


@pytest.mark.slow
@pytest.mark.usefixtures("small", "dead_proxy")
def test_a_report_has_everything_but_what_is_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.md"
    assert main(["doctor", "--report", str(path), "--seconds", "1"]) == 0
    assert f"No stage has failed: see {path}" in capsys.readouterr().out
    sections, results = written(path)
    assert sections == SECTIONS
    assert results == dict.fromkeys(STAGES, "passed")
    text = path.read_text()
    for word in ('"mlx-lm": ', '"chip": ', "decode 8 x 512", "blocks free at the end", "MLX's memory, peak"):
        assert word in text
    assert '"max_num_seqs": 17' in text
    assert "mlx_server.pool.model_pool: Loading" in text, "the log of the server"
    assert "answers equal to those given alone" in text
    for secret in ("sesame-42", str(tmp_path), str(Path.home()), str(Path.cwd())):
        assert secret not in text


def test_a_stage_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_bytes: int) -> None:
        raise ZeroDivisionError("no bytes | none")

    monkeypatch.setattr(machine_report, "measure_copy", fail)
    for stage in ("_chat", "_soak", "product_tests"):
        monkeypatch.setattr(machine_report, stage, lambda *_: machine_report.Finding("as it should be"))
    path = tmp_path / "report.md"
    assert main(["doctor", "--report", str(path)]) == 1
    sections, results = written(path)
    assert sections == SECTIONS
    assert results.pop("Timings of attention") == "ZeroDivisionError: no bytes / none"
    assert set(results.values()) == {"passed"}
    assert 'raise ZeroDivisionError("no bytes | none")' in path.read_text()


def test_a_file_that_cannot_be_written_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--report", "/nonexistent/report.md"]) == 2
    assert "--report: cannot write /nonexistent/report.md: No such file" in capsys.readouterr().err


def test_the_length_of_a_soak_is_refused_without_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "5"]) == 2
    printed = capsys.readouterr()
    assert "--seconds has no effect without --report" in printed.err
    assert printed.out == ""


def test_a_folder_in_place_of_a_file_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_report, "make_report", lambda *_: ("# minutes of work", True))
    assert main(["doctor", "--report", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert f"--report: cannot write {tmp_path}: Is a directory." in printed.err
    assert printed.out == ""


def test_an_embedding_model_is_loaded_and_not_asked_for_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVE_MODEL_MODEL", str(save_embedder(tmp_path / "embed").folder))
    for stage in ("self_tests", "_timings", "product_tests"):
        monkeypatch.setattr(machine_report, stage, lambda *_: machine_report.Finding("as it should be"))
    path = tmp_path / "report.md"
    assert main(["doctor", "--report", str(path), "--seconds", "1"]) == 0
    assert f"No stage has failed: see {path}" in capsys.readouterr().out
    _, results = written(path)
    assert (results["Machine"], results["A chat over HTTP"], results["Soak"]) == ("passed", "skipped", "skipped")
    text = path.read_text()
    assert text.count("is an embedding model, which generates no text. Configure another model in [model]") == 2
    assert "Traceback" not in text
    assert "mlx_server.pool.model_pool: Loading" in text, "the log of the server"


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_of_several_models_the_first_is_reported_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("self_tests", "_timings", "product_tests", "_soak"):
        monkeypatch.setattr(machine_report, stage, lambda *_: machine_report.Finding("as it should be"))
    config, path = tmp_path / "several.toml", tmp_path / "report.md"
    folders = (str(make_folder(tmp_path / "first")), str(tmp_path / "nothing"))
    config.write_text("".join(f"[[models]]\nmodel = {json.dumps(folder)}\n" for folder in folders))
    monkeypatch.delenv("MLX_SERVE_MODEL_MODEL")
    assert main(["doctor", "--config", str(config), "--report", str(path), "--seconds", "1"]) == 0
    text = path.read_text()
    assert "mlx_server.pool.model_pool: Loading first" in text
    assert "smollm2" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has this device")
def test_a_report_that_cannot_be_written_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_report, "make_report", lambda *_: ("# all of it", True))
    assert main(["doctor", "--report", "/dev/full"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "# all of it\n"
    assert printed.err == (
        "mlx-serve: error: --report: cannot write /dev/full: No space left on device. The report is printed instead.\n"
    )


def test_a_gpu_whose_kernels_are_not_used_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(machine_report, "choose_backend", lambda name, specs: ReferenceBackend())
    finding = self_tests()
    assert len(finding.problems) == 3 * (len(HEAD_DIMS) + 3)
    assert finding.problems[0].endswith("the reference backend is used on a GPU")
    assert "bfloat16 128 in 4 bits" in finding.text


def test_a_gpu_whose_shared_kernel_is_wrong_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Emulator(toolchain(), mutations={"paged_shared": (("base + at < highs[j]", "base + at <= highs[j]"),)})
    spec = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    monkeypatch.setattr(machine_report, "_specs", lambda is_cpu: [spec])
    monkeypatch.setattr(machine_report, "choose_backend", lambda *_: MetalBackend(emulator.metal_kernel, num_cores=4))
    (problem,) = self_tests().problems
    assert problem.startswith("float32 64: reads of K/V are not shared: attention over a context of ")


def test_a_product_that_is_wrong_on_this_gpu_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its test names the reason; the other form and MLX's products are timed all the same."""
    faulty = HostKernels(lambda form, y: y * (1 + (form == "matrix") * 0.01 * len(y)))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(machine_report, "_SIDE", 64)
    monkeypatch.setattr(ProductKernels, "of_metal", classmethod(lambda cls: cls(faulty)))
    finding = product_tests()
    assert len(finding.problems) == 3 * 2
    assert finding.problems[0].startswith("matrix form, 64 x 64, 4 bits in groups of 64, float16: it is off by ")
    assert len(re.findall(r"\| vector \| +passed", finding.text)) == 6
    assert re.search(r"\| 64 x 64, float32 +\| +32 ", finding.text)


def test_names_are_left_out_where_they_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "kay")
    monkeypatch.setattr("socket.gethostname", lambda: "kays-mac.local")
    text = f"kay at kays-mac: okay, kay-box {Path.home() / 'models'}"
    assert redact(text, Config()) == "<name> at <name>: okay, kay-box ~/models"


def test_folders_outside_the_users_home_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", "/Volumes/acme/cache")
    entries = (ModelEntry(id="a", model="/srv/acme/qwen"), ModelEntry(id="b", model="/opt/acme/gemma.gguf"))
    text = "/Volumes/acme/cache/models, /srv/acme/qwen/config.json, /opt/acme/gemma.gguf, mlx-community/acme"
    shown = "<mlx-serve>/models, <models>/qwen/config.json, <models>/gemma.gguf, mlx-community/acme"
    assert redact(text, Config(models=entries)) == shown
    config = Config(model=ModelConfig(model="/srv/acme/qwen"))
    assert redact("/srv/acme/qwen is no model", config) == "<models>/qwen is no model"


def test_models_beside_the_current_folder_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current = tmp_path / "acme" / "work"
    current.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "acme")
    monkeypatch.chdir(current)
    for name in ("../secret/qwen", "../../acme/secret/qwen", str(tmp_path / "link" / "secret" / "qwen")):
        config = Config(model=ModelConfig(model=name))
        text = f"{name}/config.json, {tmp_path}/acme/secret/qwen, {current}/log, mlx-community/acme"
        assert redact(text, config) == "<models>/qwen/config.json, <models>/qwen, ./log, mlx-community/acme"
    assert redact("../qwen/config.json", Config(model=ModelConfig(model="../qwen"))) == "../qwen/config.json"


def test_all_of_a_hosts_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "mac.lab.acme.example")
    assert redact("mac.lab.acme.example, mac", Config()) == "<name>, <name>"


def test_the_places_of_packages_and_of_the_hubs_cache_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/Volumes/acme/hub")
    monkeypatch.chdir("/")
    text = f"/Volumes/acme/hub/models--a--b/snapshots, {machine_report.__file__}"
    assert redact(text, Config()) == "<hub>/models--a--b/snapshots, <package>/mlx_server/bench/lab/machine_report.py"


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "aB3" * 11)
    monkeypatch.setenv("ACME_INDEX_PASSWORD", "correct horse")
    config = Config(server=ServerConfig(api_key="sesame-42"))
    token, key = "hf_" + "xY9" * 11, "mlxs_3f9c0a1b2c4d_" + "k-_7" * 11
    text = f"{os.environ['HF_TOKEN']} {token} {key} sesame-42 'correct horse' hf_hub_download"
    assert redact(text, config) == "<secret> <secret> <secret> <secret> '<secret>' hf_hub_download"
    text = "GET https://ada:p@ss@index.acme.example/simple/a?token=abc&x=1 (http://127.0.0.1:8000/v1/models)"
    shown = "GET https://<secret>@index.acme.example/simple/a?<secret> (http://127.0.0.1:8000/v1/models)"
    assert redact(text, Config()) == shown


def test_a_user_without_an_entry_has_no_name_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr(getpass, "getuser", fail)
    monkeypatch.setattr("socket.gethostname", lambda: "kays-mac.local")
    assert redact("kay at kays-mac", Config()) == "kay at <name>"


# ---- the soak


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_NUM_CASES", 4)
    monkeypatch.setattr(soak, "_SETTLE_S", 0.3)


@pytest.mark.usefixtures("short")
async def test_a_soak_of_a_sound_engine_finds_nothing(tmp_path: Path) -> None:
    result = await soak.soak(str(make_folder(tmp_path / "model")), 0.8)
    assert result.problems == []
    assert min(result.num_whole, result.num_aborted, len(result.samples)) > 0
    assert result.num_equal <= result.num_whole
    assert result.stats.num_prefix_hit_tokens > 0
    assert result.stats.num_free_blocks == result.stats.num_blocks


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = itertools.count(0, 64 * 2**20)
    monkeypatch.setattr(mx, "get_active_memory", lambda: next(grown))


def move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "check_moves", lambda cache: 3)


def hold(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = AsyncEngine.stats
    monkeypatch.setattr(
        AsyncEngine, "stats", lambda self: dataclasses.replace(stats(self), num_free_blocks=stats(self).num_blocks - 2)
    )


def forget_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seeds = AsyncEngine.submit, itertools.count()

    def reseeded(engine: AsyncEngine, generation: GenerationRequest) -> RequestStream:
        sampling = dataclasses.replace(generation.sampling, seed=next(seeds), temperature=1.0)
        return submit(engine, dataclasses.replace(generation, sampling=sampling))

    monkeypatch.setattr(AsyncEngine, "submit", reseeded)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (leak, "MLX's memory has grown by"),
        (move, "MLX has copied KV pools 3 times"),
        (hold, "2 blocks are held, 0 requests run and 0 wait"),
        (forget_seeds, "4 of 4 requests that ran alone had another answer afterwards"),
    ],
)
@pytest.mark.usefixtures("short")
async def test_a_soak_finds(fault, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    fault(monkeypatch)
    (problem,) = (await soak.soak(str(folder), 0.8)).problems
    assert words in problem


@pytest.mark.full
def test_the_bundled_model_is_reported_on(bundled_model: Path, tmp_path: Path) -> None:
    assert main(["doctor", "--report", str(tmp_path / "report.md"), "--seconds", "5"]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "What is 2 + 2?" in report
    assert "the answer does not contain" not in report
