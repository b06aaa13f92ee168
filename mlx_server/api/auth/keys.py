"""Identifies callers by their keys, and records what keys use: collected on the event loop, and written to the key file
every few seconds by a thread."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx_server.api.auth.key_file import KeyFile, KeyText, Usage, parse_key
from mlx_server.config import Config, ServerConfig, home
from mlx_server.environment import exists, expanded, read_settings
from mlx_server.errors import AuthenticationError, ConfigError, OverloadedError, PermissionDeniedError
from mlx_server.request import Priority
from mlx_server.tiers import Tier

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Usage is written this often; a crash loses at most this much."""

_LOOKUP_TIMEOUT_S = 0.1
ADMIN_REMEDY = "set MLX_SERVE_SERVER_ADMIN_KEY, or declare a tier with `admin = true` and give its keys to admins"
_HOW = "send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"

ANONYMOUS = "anonymous"
SHARED = "shared"
ADMIN = "admin"
DISCOVERY = "discovery"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Quotas, usage and cache isolation go by `identity`, which does not change when a key is
    rotated: the public id of a key, or one of the four names above."""

    identity: str = ANONYMOUS
    tier: Tier = field(default_factory=Tier)
    is_admin: bool = False

    @property
    def key_id(self) -> str | None:
        """The id of the caller's own key; None if it has none."""
        return None if self.identity in (ANONYMOUS, SHARED, ADMIN, DISCOVERY) else self.identity

    def priority_at(self, path: str, requested: int | None = None) -> Priority:
        """The priority of a request to `path`, lowered by the `requested` levels; a number below 0 has no effect."""
        return Priority(min(self.tier.priority_at(path) + max(0, requested or 0), max(Priority)))

    def cache_keys(self, isolation: str) -> tuple[str, ...]:
        """What separates the cached prefixes of callers: the tier (`tier`), the key (`key`), or nothing (`none`)."""
        if isolation == "none":
            return ()
        return (f"{isolation}:{self.tier.name if isolation == 'tier' else self.identity}",)


class UsageLog:
    """Usage of keys that is not yet in the key file. Event-loop thread only. Call `flush` at the end, so that nothing
    is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: dict[str, Usage] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def add(
        self, key_id: str, *, num_requests: int = 0, num_prompt_tokens: int = 0, num_output_tokens: int = 0
    ) -> None:
        """Adds to the usage of a key, and marks it as used now."""
        used = self._unwritten.setdefault(key_id, Usage())
        used.last_used_s = time.time()
        used.num_requests += num_requests
        used.num_prompt_tokens += num_prompt_tokens
        used.num_output_tokens += num_output_tokens
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._start_flush)

    async def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._unwritten = self._unwritten, {}
        if batch:
            await asyncio.to_thread(self._write, batch)

    def _start_flush(self) -> None:
        self._writing = asyncio.create_task(self.flush(), name="usage of keys")

    def _write(self, batch: Mapping[str, Usage]) -> None:
        try:
            with KeyFile(self._path) as file:
                file.add_usage(batch)
        except (ConfigError, sqlite3.Error) as error:
            logger.warning("The usage of %d keys is lost: %s", len(batch), error)


class KeyRing:
    """All keys of a server: the shared key, the admin key, the discovery key and those of the key file. Event-loop
    thread only.

    The file is read on each request (one indexed lookup), so a change takes effect with the next request. Once there is
    a key of any kind, keys are always required: revoking the last key or losing the file does not open the server.
    """

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` for a file that cannot be read."""
        server = config.server
        path = key_file_path(server)
        try:
            is_there = exists(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read as a file of keys: {error}.") from error
        if is_there:
            KeyFile(path).close()
        elif server.key_file is not None:
            raise ConfigError(f"key_file: {path} does not exist; `mlx-serve keys create --key-file {path}` makes it.")
        api_key = _secret("api_key", server.api_key, server.api_key_file)
        admin_key = _secret("admin_key", server.admin_key, server.admin_key_file)
        discovery_key = _secret("discovery_key", config.fleet.discovery_key, config.fleet.discovery_key_file)
        if discovery_key is not None and discovery_key in (api_key, admin_key):
            raise ConfigError("discovery_key equals api_key or admin_key, which may do more. Choose another one.")
        self.usage = UsageLog(path)
        self.has_admin_key = admin_key is not None
        self._has_api_key = api_key is not None
        self._file = _WatchedFile(path)
        self._tiers = config.tiers
        tier = self._shared_tier = config.tiers[server.api_key_tier]
        configured = (
            (admin_key, Caller(ADMIN, tier, is_admin=True)),
            (api_key, Caller(SHARED, tier, is_admin=tier.admin)),
            (discovery_key, Caller(DISCOVERY)),
        )
        self._configured = [(_digest(key), caller) for key, caller in configured if key is not None]

    @property
    def requires_keys(self) -> bool:
        """Whether requests without a key are refused."""
        return self._has_api_key or self._file.was_seen()

    def identify(self, key: str | None, *, is_local: bool) -> Caller:
        """The caller that a key identifies; `key` None is a request without one. Keys of tiers with `admin` are admins.
        While no key is required, callers that are `is_local` are admins.

        Raises `AuthenticationError` for a missing, wrong or revoked key, and `PermissionDeniedError` for a key whose
        tier is not declared.
        """
        sent = b"" if key is None else _digest(key)
        for digest, caller in self._configured:
            if hmac.compare_digest(sent, digest):
                return caller
        if not self.requires_keys:
            return Caller(ANONYMOUS, self._shared_tier, is_admin=is_local and not self.has_admin_key)
        parsed = None if key is None else parse_key(key)
        tier_name = None if parsed is None else self._file.tier_of(parsed)
        if parsed is None or tier_name is None:
            raise AuthenticationError(f"The API key is missing or wrong; {_HOW}.")
        tier = self._tiers.get(tier_name)
        if tier is None:
            raise PermissionDeniedError(
                f"The key {parsed.key_id} is of the tier {tier_name}, which this server does not have."
            )
        self.usage.add(parsed.key_id)
        return Caller(parsed.key_id, tier, is_admin=tier.admin)

    def close(self) -> None:
        """Closes the key file. The next request with a key would open it again."""
        self._file.close()

    def revoked(self, key_ids: Iterable[str]) -> frozenset[str]:
        """Which of these keys have been revoked. Empty while the key file is missing or cannot be read."""
        return frozenset(key_id for key_id in key_ids if self._file.is_revoked(key_id))

    def admins(self) -> str:
        """A sentence that says who may use the admin routes."""
        who = ["the admin key"] if self.has_admin_key else []
        if self.requires_keys:
            who += [f"keys of the tier {tier.name}" for tier in self._tiers.values() if tier.admin]
        elif not self.has_admin_key:
            who = ["all programs on this machine, until there is a key"]
        return f"Admin routes are open to {' and '.join(who) or f'nobody: {ADMIN_REMEDY}'}."


class _WatchedFile:
    """The key file. It may be created, deleted or replaced while the server runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: KeyFile | None = None
        self._inode: tuple[int, int] | None = None
        self._was_seen = False
        self._fault: str | None = None

    def was_seen(self) -> bool:
        """Whether the file exists or has existed. If its folder cannot be read, it counts as existing."""
        if not self._was_seen:
            try:
                self._was_seen = exists(self._path)
            except OSError:  # the folder is not readable
                self._was_seen = True
        return self._was_seen

    def tier_of(self, key: KeyText) -> str | None:
        """The tier of a key; None if the key is not in the file. Raises `AuthenticationError` for a revoked key, and
        `OverloadedError` when the file cannot be read."""
        try:
            file = self._current()
            secret = None if file is None else file.secret(key.key_id)
        except (ConfigError, OSError, sqlite3.Error) as error:
            if self._fault != str(error):  # once, not for each request
                self._fault = str(error)
                logger.error("The key file cannot be read: %s", error)
            raise OverloadedError("Keys cannot be checked now; the server's log has the details.") from error
        self._fault = None
        if secret is None or not secret.matches(key.secret):
            return None
        if secret.is_revoked:
            raise revocation(key.key_id)
        return secret.tier

    def is_revoked(self, key_id: str) -> bool:
        """Whether a key that was in the file is revoked or gone. False if the file is missing or unreadable."""
        try:
            file = self._current()
            if file is None:
                return False
            secret = file.secret(key_id)
        except (ConfigError, OSError, sqlite3.Error):
            return False  # logged at the next request
        return secret is None or secret.is_revoked

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _current(self) -> KeyFile | None:
        """The open file at the path; None if there is none."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        inode = (status.st_dev, status.st_ino)
        if self._file is None or self._inode != inode:
            self.close()
            self._file, self._inode = KeyFile(self._path, timeout_s=_LOOKUP_TIMEOUT_S), inode
        return self._file


def revocation(key_id: str) -> AuthenticationError:
    return AuthenticationError(f"The key {key_id} has been revoked; ask for a new one.")


def key_file_path(server: ServerConfig) -> Path:
    """The path of the key file: as configured, or in the home folder."""
    return home() / "keys.sqlite" if server.key_file is None else expanded(server.key_file)


def _secret(name: str, value: str | None, file: str | None) -> str | None:
    if file is not None:
        if value is not None:
            raise ConfigError(f"{name} and {name}_file are both set; keep one of them.")
        name = f"{name}_file: {file}"
        try:
            value = read_settings(expanded(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read: {error}.") from error
    if value is None:
        return None
    key = value.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"{name} must hold the key, one line of printable ASCII: clients can send no other.")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
