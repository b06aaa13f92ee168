"""The models on this machine: pulled into the home folder or the hub's cache, or in folders of models; and those that
are being fetched.

Names are compared with what is there and never made into paths, so no name leads to another place.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError

from mlx_server.config import home
from mlx_server.engine.fair_slots import in_daemon_thread, take_error
from mlx_server.errors import OverloadedError
from mlx_server.model_entries import hub_id
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.folder import HUB_FILES
from mlx_server.runtime.models.gguf import native_weight_format
from mlx_server.runtime.models.progress import Progress, progress_of
from mlx_server.runtime.models.resolve import resolve_model

_SHUTDOWN = "The server is shutting down; pull the model again when it is back, to fetch the rest."
_SHUTDOWN_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk. `place` is `home` or `hub`."""

    name: str
    place: str
    folder: Path
    num_bytes: int


def stored_models() -> list[StoredModel]:
    """All pulled models, sorted by name."""
    homes = (StoredModel(name, "home", folder, _num_bytes(folder)) for name, folder in _home_folders())
    return sorted([*homes, *_hub_models()], key=lambda model: (model.name, model.folder))


def pulled_names() -> list[str]:
    """The names of all pulled models, sorted, also of those of the hub that are stored in part."""
    prefix = "models--"
    hub = Path(constants.HF_HUB_CACHE)
    stored = [folder.name for folder in hub.iterdir()] if hub.is_dir() else []
    ids = (name.removeprefix(prefix).replace("--", "/") for name in stored if name.startswith(prefix))
    return sorted({*(name for name, _ in _home_folders()), *ids})


def find_pulled(name: str) -> Path | None:
    """The folder of a pulled model, by its name or its page's address; nothing is fetched. If the bundled model is
    there in several weight formats, the one that suits this machine is returned."""
    folders = sorted(folder for known, folder in _home_folders() if known == name)
    found = folders[0] if folders else None
    if len(folders) > 1:
        native = f"{SMOLLM2.name}-{native_weight_format()}"
        found = min(folders, key=lambda folder: (folder.name != native, folder))
    if found is None and (repo := hub_id(name)) is not None:
        try:
            # Its client knows which files a model has on the hub, and takes one without all that match for incomplete.
            found = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, allow_patterns=list(HUB_FILES)))
        except (LocalEntryNotFoundError, HFValidationError):
            return None
        if not (found / "config.json").is_file():  # an adapter
            return None
    return found


def find_in(folder: Path, name: str) -> Path | None:
    """The model folder of that name directly inside `folder`."""
    try:
        found = next((child for child in folder.iterdir() if child.name == name), None)
        return found if found is not None and (found / "config.json").is_file() else None
    except OSError:
        return None


def models_in(folder: Path) -> list[str]:
    """The names of the models directly inside `folder`."""
    try:
        return sorted(child.name for child in folder.iterdir() if (child / "config.json").is_file())
    except OSError:
        return []


def remove_stored(name: str) -> int:
    """Deletes a pulled model, and returns the number of freed bytes; 0 if there is no such model."""
    num_bytes = 0
    for model in stored_models():
        if model.name == name:
            if model.folder.is_symlink():
                model.folder.unlink()
            else:
                shutil.rmtree(model.folder)
            num_bytes += model.num_bytes
    download = home() / "downloads" / SMOLLM2.file_name
    if name == SMOLLM2.name and download.exists():
        num_bytes += download.stat().st_size
        download.unlink()
    return num_bytes


def _home_folders() -> Iterator[tuple[str, Path]]:
    for folder in (home() / "models").glob("*"):
        if (folder / "config.json").is_file():
            is_bundled = folder.name.startswith(f"{SMOLLM2.name}-") and (folder / "origin.json").is_file()
            yield SMOLLM2.name if is_bundled else folder.name, folder


def _hub_models() -> Iterator[StoredModel]:
    try:
        cache = huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            yield StoredModel(repo.repo_id, "hub", repo.repo_path, repo.size_on_disk)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class Fetch:
    """A model that is being fetched, by its name or its id on the hub. `done` fails with a `ServeError` if the model
    cannot be fetched for a known reason, or the server stops."""

    name: str
    done: asyncio.Task[None]

    def reading(self) -> dict[str, Any]:
        """Its stage, bytes, rate and the time left."""
        return {"model": self.name, **(progress_of(self.name) or Progress("fetching")).reading()}


class Fetches:
    """The fetches in progress. Event-loop thread only. A fetch continues when nobody waits for it any more, or what is
    already here would be lost."""

    def __init__(self) -> None:
        self._running: dict[str, Fetch] = {}
        self._is_stopping = False

    def join(self, name: str) -> Fetch:
        """The fetch of a model by its configured name or its hub id; starts it unless it is in progress. Raises
        `OverloadedError` once `stop` was called."""
        if self._is_stopping:
            raise OverloadedError(_SHUTDOWN, _SHUTDOWN_RETRY_S)
        name = hub_id(name) or name
        running = self._running.get(name)
        if running is None:
            task = asyncio.create_task(self._fetch(name), name=f"fetch {name}")
            task.add_done_callback(take_error)
            running = self._running[name] = Fetch(name, task)
        return running

    def running(self) -> Iterator[Fetch]:
        yield from self._running.values()

    async def stop(self) -> None:
        """Fails all fetches with an `OverloadedError`, since the server is shutting down. Their threads end with the
        process."""
        self._is_stopping = True
        await asyncio.sleep(0)  # a task that is cancelled before it starts would run none of its code
        for fetch in self._running.values():
            fetch.done.cancel()

    async def _fetch(self, name: str) -> None:
        try:
            await in_daemon_thread(lambda: resolve_model(name))
        except asyncio.CancelledError:
            raise OverloadedError(_SHUTDOWN, _SHUTDOWN_RETRY_S) from None
        finally:
            del self._running[name]


def can_be_fetched(name: str) -> bool:
    """Whether such a name can be fetched: the bundled model's, or a hub id or its page. The hub may not have it."""
    return name == SMOLLM2.name or hub_id(name) is not None
