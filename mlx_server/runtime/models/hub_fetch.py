"""Fetches models of the hub into the hub's own cache: continues after an interruption, and checks digests.

The hub's client keeps nothing of an interrupted file, and compares lengths only. So this module fetches the files whose
SHA-256 the hub gives (files in LFS: weights, large tokenizers) and puts them where the client looks for them. The
client fetches the rest, and links all files into a snapshot.

The hub's file servers send at most 50 GB in one answer, so large files are requested in parts.

    blobs/<sha256>              complete, with that digest
    blobs/<sha256>.incomplete   the beginning of the file; the next run continues after it
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, filter_repo_objects  # type: ignore[attr-defined]  # it lacks an __all__
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status
from tqdm.auto import tqdm

from mlx_server.environment import run_all
from mlx_server.errors import DownloadError
from mlx_server.runtime.models.folder import sha256_of
from mlx_server.runtime.models.made_folders import check_space, storage_error
from mlx_server.runtime.models.progress import Report, shown

_ASK_S = 10.0
_READ_S = 30.0
_NUM_CONNECTIONS = 4
_MAX_FAILURES = 5
"""Attempts in a row without a single byte."""
_PAUSE_S = 1.0
_PIECE_BYTES = 2**20
_PART_BYTES = 8 * 2**30
_PARTIAL, _BUSY, _SERVER_ERROR = 206, 429, 500
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _File:
    """A file on the hub. `etag` is its name in the cache: its SHA-256 if it `is_large`, otherwise git's digest or
    `none`."""

    name: str
    num_bytes: int
    etag: str
    is_large: bool


class _Quiet(tqdm):  # type: ignore[type-arg]  # it cannot be subscripted when it runs
    """Hides the progress bars of the hub's client, because there is one of ours."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **{**options, "disable": True})


def fetch_snapshot(model: str, repo: str, patterns: Sequence[str]) -> Path:
    """The folder with a hub model's files whose names match `patterns`. Uses the network only for missing files.
    Reports progress under `model`, the user's name for it. Raises `DownloadError`, and whatever the hub's client
    raises."""
    files = [file for file in _listed(repo, patterns) if not (_blobs(repo) / file.etag).exists()]
    if not files:
        return _linked(repo, patterns)
    num_bytes = sum(file.num_bytes for file in files)
    large = [file for file in files if file.is_large]
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    check_space(cache, f"fetching {model}", num_bytes - sum(_num_kept(repo, file) for file in large), "HF_HUB_CACHE")
    with shown(model, "fetching", num_bytes) as report:
        _Downloads(repo, report).run(large)
        folder = _linked(repo, patterns)
        report(num_bytes - sum(file.num_bytes for file in large))
    return folder


def _listed(repo: str, patterns: Sequence[str]) -> list[_File]:
    """The model's files; empty if the hub cannot be asked. Then its client finds the cached files, or says what is
    wrong."""
    try:
        found = huggingface_hub.HfApi().model_info(repo, files_metadata=True, timeout=_ASK_S).siblings or []
    except Exception:  # of the client or of its HTTP library
        return []
    files = []
    for file in filter_repo_objects(found, allow_patterns=list(patterns), key=lambda file: file.rfilename):
        etag = (file.blob_id if file.lfs is None else file.lfs.sha256) or ""
        if _DIGEST.fullmatch(etag) is None:  # it becomes the name of a file
            etag = "none"
        is_large = bool(file.size) and file.lfs is not None and etag != "none"
        files.append(_File(file.rfilename, file.size or 0, etag, is_large))
    return files


def _linked(repo: str, patterns: Sequence[str]) -> Path:
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(patterns), tqdm_class=_Quiet))


def _blobs(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"


def _incomplete(repo: str, file: _File) -> Path:
    return _blobs(repo) / f"{file.etag}.incomplete"


def _num_kept(repo: str, file: _File) -> int:
    try:
        return _incomplete(repo, file).stat().st_size
    except FileNotFoundError:
        return 0


def cache_error(name: str, error: OSError) -> DownloadError:
    """The error for a model or file that cannot be written to the hub's cache."""
    return storage_error(name, error, folder=constants.HF_HUB_CACHE, variable="HF_HUB_CACHE")


class _Downloads:
    """Downloads several files of a model at a time."""

    def __init__(self, repo: str, report: Report) -> None:
        self._repo = repo
        self._headers = build_hf_headers()
        self._report = report
        self._reporting = threading.Lock()
        self._stop = threading.Event()

    def run(self, files: Sequence[_File]) -> None:
        """Waits until all files are complete. The first failure ends all downloads; what has arrived is kept."""
        run_all([partial(self._fetch, file) for file in files], _NUM_CONNECTIONS, self._stop)

    def _fetch(self, file: _File) -> None:
        """Holds the lock of the hub's client, so one process at a time works on a file."""
        blob, incomplete = _blobs(self._repo) / file.etag, _incomplete(self._repo, file)
        lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{file.etag}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                self._count(file.num_bytes, was_kept=True)
                return
            with incomplete.open("ab") as target:
                self._count(target.tell(), was_kept=True)
                self._complete(file, target)
                target.flush()
                os.fsync(target.fileno())
                if target.tell() < file.num_bytes:
                    return  # another file has failed
            digest = sha256_of(incomplete)
            if digest != file.etag:
                incomplete.unlink()
                raise DownloadError(
                    f"{file.name} of {self._repo} is corrupt: its SHA-256 is {digest}, expected {file.etag}. Nothing "
                    "of it was kept; try again, and check HF_ENDPOINT and proxies if it happens again."
                )
            incomplete.rename(blob)

    def _complete(self, file: _File, target: BinaryIO) -> None:
        """Receives the rest of a file, unless the failure of another file ends all downloads."""
        num_failures = 0
        while target.tell() < file.num_bytes and not self._stop.is_set():
            before = target.tell()
            try:
                self._receive(file, target)
                reason = "the answer was empty"
            except (DownloadError, HfHubHTTPError):
                raise
            except Exception as error:  # of the HTTP library: the connection has ended
                reason = str(error) or type(error).__name__
            if target.tell() > before:
                num_failures = 0
                continue
            num_failures += 1
            if num_failures == _MAX_FAILURES:
                raise DownloadError(
                    f"{file.name} of {self._repo} cannot be received ({reason}). {target.tell():,} of its "
                    f"{file.num_bytes:,} bytes are kept: check the connection and try again to continue there."
                )
            time.sleep(_PAUSE_S)

    def _receive(self, file: _File, target: BinaryIO) -> None:
        """Appends what arrives over one connection."""
        start = target.tell()
        last = min(file.num_bytes, start + _PART_BYTES) - 1
        headers = {**self._headers, "Range": f"bytes={start}-{last}", "Accept-Encoding": "identity"}
        url = huggingface_hub.hf_hub_url(self._repo, file.name)
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_READ_S) as answer:
            if answer.status_code == _BUSY or answer.status_code >= _SERVER_ERROR:
                raise OSError(f"status {answer.status_code}")
            hf_raise_for_status(answer)
            if start and answer.status_code != _PARTIAL:  # the server sends whole files only
                target.truncate(0)
                target.seek(0)
                self._count(-start, was_kept=True)
            for piece in answer.iter_bytes(_PIECE_BYTES):
                try:
                    target.write(piece)
                except OSError as error:
                    raise cache_error(file.name, error) from error
                self._count(len(piece))
                if self._stop.is_set() or target.tell() > file.num_bytes:
                    return

    def _count(self, num_bytes: int, *, was_kept: bool = False) -> None:
        with self._reporting:
            self._report(num_bytes, was_kept=was_kept)
