"""Models of the hub: fetched on after a break, compared with their digests, listed while they are fetched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from mlx_server.cli.main import main
from mlx_server.engine.models.store import find_pulled
from mlx_server.errors import DownloadError, InsufficientStorageError
from mlx_server.runtime.models import hub_fetch
from mlx_server.runtime.models.progress import progress_of
from mlx_server.runtime.models.resolve import resolve_model
from tests.tiny_models import byte_tokenizer, describe_model_folder

COMMIT = "c" * 40
NAME = "owner/model"
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NUM_BYTES = 5 * 2**20
CONFIG = {"model_type": "llama", "hidden_size": 8}


class Hub(ThreadingHTTPServer):
    """Some files of one model, as the hub and its store of large files send them."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = files
        self.cut_after: int | None = None
        """Bytes of a large file after which a connection breaks off, once for each request while it is set."""
        self.spoilt: set[str] = set()
        self.digests: dict[str, str] = {}
        """Told in place of true ones."""
        self.knows_ranges = True
        self.most_at_once = 2**40
        """Bytes that one answer may have; more are a 400."""
        self.on_get: Any = None
        self.asked: list[tuple[str, str | None]] = []
        """Large files and the ranges that were asked for."""
        self.num_sent = 0
        """Bytes of large files."""


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/{NAME}" or path == f"/api/models/{NAME}/revision/main":
            siblings = [self._described(name, "rfilename") for name in self.server.files]
            self._json({"id": NAME, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self._json([{"type": "file", **self._described(name, "path")} for name in self.server.files])
        elif (found := re.fullmatch(rf"/{NAME}/resolve/\w+/(.+)", path)) and found[1] in self.server.files:
            self._file(found[1])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _described(self, name: str, key: str) -> dict[str, Any]:
        content = self.server.files[name]
        described: dict[str, Any] = {key: name, "size": len(content)}
        described["oid"] = described["blobId"] = hashlib.sha1(content).hexdigest()
        if name in WEIGHTS:
            digest = self.server.digests.get(name, hashlib.sha256(content).hexdigest())
            described["lfs"] = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 130}
        return described

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str) -> None:
        content, is_large, first = self.server.files[name], name in WEIGHTS, 0
        digest = (hashlib.sha256 if is_large else hashlib.sha1)(content).hexdigest()
        if name in self.server.spoilt:
            content = bytes(len(content))
        span = self.headers.get("Range")
        if span is not None and self.server.knows_ranges:
            first, last = map(int, re.findall(r"\d+", span))
            content = content[: last + 1]
        if self.command == "GET" and is_large and len(content) - first > self.server.most_at_once:
            self.send_error(400)
            return
        self.send_response(200 if span is None or not self.server.knows_ranges else 206)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_large:
            self.server.asked.append((name, span))
            if self.server.on_get is not None:
                self.server.on_get()
        rest = content[first:]
        if is_large and self.server.cut_after is not None and len(rest) > self.server.cut_after:
            rest = rest[: self.server.cut_after]
            self.close_connection = True
        self.wfile.write(rest)
        self.server.num_sent += len(rest) * is_large

    def log_message(self, *_: object) -> None:
        pass


def weights(fill: int) -> bytes:
    """A safetensors file of `NUM_BYTES`."""
    header = b" " * 6
    while True:  # until the header says its own length
        size = NUM_BYTES - 8 - len(header)
        text = json.dumps({f"x{fill}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        if len(text) == len(header):
            return len(header).to_bytes(8, "little") + text + bytes([fill]) * size
        header = text


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = describe_model_folder(CONFIG, tmp_path / "described")
    byte_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {name: weights(number) for number, name in enumerate(WEIGHTS)}
    index = {"weight_map": {f"x{number}": name for number, name in enumerate(WEIGHTS)}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["pytorch_model.bin"] = b"what is not fetched"
    with Hub(files) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_fetch, "_PAUSE_S", 0.0)
        monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
        yield server
        server.shutdown()


def check_whole(hub: Hub, folder: Path) -> None:
    for name, content in hub.files.items():
        assert (folder / name).exists() == (name != "pytorch_model.bin")
        if name != "pytorch_model.bin":
            assert (folder / name).read_bytes() == content, name
    leftovers = [path.name for path in folder.parents[1].rglob("*.incomplete")]
    assert leftovers == []


def test_a_model_comes_once_and_is_listed_while_it_does(hub: Hub) -> None:
    seen = []

    def look() -> None:
        found = progress_of(NAME)
        assert found is not None
        seen.append((found.stage, found.total_bytes))

    hub.on_get = look
    folder = resolve_model(NAME)
    check_whole(hub, folder)
    assert find_pulled(NAME) == folder, "files that are not wanted are not missing"
    wanted = sum(len(content) for name, content in hub.files.items() if name != "pytorch_model.bin")
    assert seen == [("fetching", wanted)] * 2
    assert progress_of(NAME) is None
    assert hub.num_sent == 2 * NUM_BYTES
    resolve_model(NAME)
    assert len(hub.asked) == 2, "what is here is not fetched again"


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(hub: Hub) -> None:
    hub.cut_after = 2 * 2**20
    check_whole(hub, resolve_model(NAME))
    spans = [span for name, span in hub.asked if name == WEIGHTS[0]]
    assert spans == [f"bytes={start * 2**20}-{NUM_BYTES - 1}" for start in (0, 2, 4)]
    assert hub.num_sent == 2 * NUM_BYTES


def test_files_beyond_what_one_answer_may_have_come_in_parts_and_go_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of more than 50 GB, which the hub's client refuses without another protocol."""
    hub.most_at_once = 2 * 2**20
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 3 * 2**20)
    monkeypatch.setattr(hub_fetch, "_PART_BYTES", 2 * 2**20)
    hub.cut_after = 2**20
    hub.on_get = lambda: setattr(hub, "cut_after", 0 if len(hub.asked) > 2 else 2**20)
    with pytest.raises(DownloadError, match="to continue there"):
        resolve_model(NAME)
    hub.cut_after = hub.on_get = None
    asked = len(hub.asked)
    check_whole(hub, resolve_model(NAME))
    assert hub.num_sent == 2 * NUM_BYTES, "no byte came twice"
    assert len(hub.asked) > asked


@pytest.mark.full
def test_a_file_of_more_than_50_gb_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse one, of which only the end is fetched; its length stands for its digest, since SHA-256 takes minutes."""
    num_bytes, rest = constants.MAX_HTTP_DOWNLOAD_SIZE + 12345, 2**20

    class Answer:
        status_code = 206

        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def iter_bytes(self, size: int) -> Iterator[bytes]:
            yield bytes(rest)

    class Session:
        asked: ClassVar[list[str]] = []

        def stream(self, method: str, url: str, headers: dict[str, str], **options: Any) -> Answer:
            self.asked.append(headers["Range"])
            return Answer()

    monkeypatch.setattr(hub_fetch, "sha256_of", lambda path: f"{path.stat().st_size:064x}")
    monkeypatch.setattr(hub_fetch, "get_session", Session)
    monkeypatch.setattr(hub_fetch, "hf_raise_for_status", lambda answer: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file = hub_fetch._File("big.gguf", num_bytes, f"{num_bytes:064x}", True)
    blobs = hub_fetch._blobs(NAME)
    blobs.mkdir(parents=True)
    with (blobs / f"{file.etag}.incomplete").open("wb") as part:
        part.truncate(num_bytes - rest)
    reports: list[tuple[int, bool]] = []
    hub_fetch._Downloads(NAME, lambda count, was_kept=False: reports.append((count, was_kept))).run([file])
    assert Session.asked == [f"bytes={num_bytes - rest}-{num_bytes - 1}"]
    assert (blobs / file.etag).stat().st_size == num_bytes
    assert sum(count for count, was_kept in reports if not was_kept) == rest


@pytest.mark.parametrize("sha256", ["../../outside", "", "A" * 64])
def test_no_digest_leads_out_of_the_cache(hub: Hub, sha256: str) -> None:
    """It names a file there, and whoever answers for the hub may say anything."""
    hub.digests = {WEIGHTS[0]: sha256}
    assert [file.is_large for file in hub_fetch._listed(NAME, WEIGHTS)] == [False, True]
    assert hub_fetch._listed(NAME, WEIGHTS)[0].etag == "none"


def test_a_later_run_goes_on_and_counts_what_was_kept(hub: Hub) -> None:
    """The first run ends by errors: every connection gives nothing after the first pieces."""
    first = hub.cut_after = 2**20
    hub.on_get = lambda: setattr(hub, "cut_after", 0 if len(hub.asked) > 2 else first)
    with pytest.raises(DownloadError, match=rf"of its {NUM_BYTES:,} bytes are kept: .*to continue there"):
        resolve_model(NAME)
    kept, hub.cut_after, hub.on_get = hub.num_sent, None, None
    assert kept > 0
    readings = []

    def look() -> None:
        found = progress_of(NAME)
        assert found is not None
        readings.append(found.kept_bytes)

    hub.on_get = look
    check_whole(hub, resolve_model(NAME))
    assert hub.num_sent == 2 * NUM_BYTES, "no byte came twice"
    assert max(readings) > 0


def test_what_was_kept_is_fetched_anew_where_no_rest_is_to_be_had(hub: Hub) -> None:
    hub.cut_after, hub.knows_ranges = 2**20, False
    hub.on_get = lambda: setattr(hub, "cut_after", None if len(hub.asked) > 2 else 2**20)
    check_whole(hub, resolve_model(NAME))


def test_a_corrupt_file_is_refused_with_both_digests_and_not_kept(hub: Hub) -> None:
    hub.spoilt.add(WEIGHTS[1])
    wanted, found = (hashlib.sha256(content).hexdigest() for content in (hub.files[WEIGHTS[1]], bytes(NUM_BYTES)))
    with pytest.raises(DownloadError, match=rf"{WEIGHTS[1]} of {NAME} is corrupt: .* {found}, expected {wanted}"):
        resolve_model(NAME)
    hub.spoilt.clear()
    check_whole(hub, resolve_model(NAME))


def test_a_part_that_was_damaged_meanwhile_is_noticed(hub: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(hub.files[WEIGHTS[0]]).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(b"something else" * 1000)
    with pytest.raises(DownloadError, match="is corrupt"):
        resolve_model(NAME)
    check_whole(hub, resolve_model(NAME))


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_fetched(hub: Hub, monkeypatch) -> None:
    class Usage:
        free = NUM_BYTES

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(
        InsufficientStorageError,
        match=r"has 0.01 GB free, and fetching owner/model needs up to 0.01 GB more.*HF_HUB_CACHE",
    ):
        resolve_model(NAME)
    assert hub.asked == []


@pytest.mark.parametrize("name", [WEIGHTS[0], "config.json"])
def test_a_disk_that_fills_up_meanwhile_is_named_with_the_remedy(hub: Hub, monkeypatch, name: str) -> None:
    """Files in LFS are written here, and the others by the hub's client."""

    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if name == "config.json":
        monkeypatch.setattr(hub_fetch.huggingface_hub, "snapshot_download", full)
    else:
        monkeypatch.setattr(hub_fetch.os, "fsync", full)
    with pytest.raises(
        InsufficientStorageError, match=r"Cannot keep owner/model in .*cache: No space left.*Make room.*HF_HUB_CACHE"
    ):
        resolve_model(NAME)


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(hub: Hub, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DownloadError, match=r"Cannot keep owner/model in .*/file.*: .*the right to write.*HF_HUB_CACHE"
    ):
        resolve_model(NAME)


def test_pull_prints_the_folder_and_the_list_what_it_is(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", NAME]) == 0
    folder = Path(capsys.readouterr().out.strip())
    check_whole(hub, folder)
    assert main(["pull", "owner/other"]) == 1
    assert "The hub has no model owner/other" in capsys.readouterr().err
