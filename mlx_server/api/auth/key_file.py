"""The SQLite file of API keys. It stores no keys, only what is needed to verify them.

    key = mlxs_<id>_<secret>      the id finds the row; its digest is SHA-256 of the row's salt and the secret

A secret has 256 random bits, so it cannot be guessed and a fast hash is enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_server.environment import exists
from mlx_server.errors import ConfigError, InvalidRequestError

PREFIX = "mlxs"
_KEY = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([0-9a-f]{{64}})")
_FORMAT = 1
_MIN_FREE_BYTES = 2**17
"""SQLite needs less beside a file of keys, for its log and an index of it."""
_TABLE = """
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    tier TEXT NOT NULL,
    label TEXT NOT NULL,
    salt BLOB NOT NULL,
    digest BLOB NOT NULL,
    created_s REAL NOT NULL,
    revoked_s REAL,
    last_used_s REAL,
    num_requests INTEGER NOT NULL DEFAULT 0,
    num_prompt_tokens INTEGER NOT NULL DEFAULT 0,
    num_output_tokens INTEGER NOT NULL DEFAULT 0
) STRICT
"""
_COLUMNS = "id, tier, label, created_s, revoked_s, last_used_s, num_requests, num_prompt_tokens, num_output_tokens"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A row of `mlx-serve keys list`. Times are seconds since 1970."""

    key_id: str
    tier: str
    label: str
    created_s: float
    revoked_s: float | None
    last_used_s: float | None
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Usage:
    """What a key has used since usage was last written."""

    last_used_s: float = 0.0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Secret:
    """What verifies the secret of a key."""

    tier: str
    salt: bytes
    digest: bytes
    is_revoked: bool

    def matches(self, secret: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key in plain text. It is shown once and stored nowhere."""

    key_id: str
    secret: str

    @property
    def text(self) -> str:
        """The key as clients send it."""
        return f"{PREFIX}_{self.key_id}_{self.secret}"


def parse_key(text: str) -> KeyText | None:
    """None if the text is not formed like a key."""
    match = _KEY.fullmatch(text)
    return None if match is None else KeyText(match[1], match[2])


class KeyFile:
    """An open key file. Each method is one transaction, so that several processes may share the file.

    The write-ahead log keeps readers from waiting for writers: a server looks up keys while another process changes
    them.
    """

    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        """Opens an existing file. Raises `ConfigError` if it is not a key file of this version."""
        self._path = path
        with contextlib.ExitStack() as on_error:
            try:
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=timeout_s)
                on_error.callback(self._db.close)
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
            except sqlite3.Error as error:
                raise ConfigError(f"{path} cannot be read as a file of keys: {error}.{remedy(path)}") from error
            if version != _FORMAT:
                raise ConfigError(
                    f"{path} is not a file of keys that this version can read (format {version}).{remedy(path)}"
                )
            on_error.pop_all()

    @classmethod
    def create(cls, path: Path) -> KeyFile:
        """Opens the file at `path`, after creating it if it does not exist; then only its owner can read it. One that
        is empty is filled. One that cannot be written whole is not there afterwards, or empty: raises `OSError` or
        `sqlite3.Error`."""
        path = Path(os.path.realpath(path))  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        if not exists(path) or path.stat().st_size == 0:
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                if not exists(path):
                    _write_new(path)
                elif path.stat().st_size == 0:
                    _fill(path)
            finally:
                os.close(folder)
        return cls(path)

    def __enter__(self) -> KeyFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def add(self, tier: str, label: str, show: Callable[[KeyText], object] = lambda key: None) -> KeyText:
        """Creates a key. If `show` raises, so does this, and there is no key that nobody has seen."""
        key_id, secret, salt = secrets.token_hex(6), secrets.token_hex(32), secrets.token_bytes(16)
        with self._db:
            self._db.execute(
                "INSERT INTO keys (id, tier, label, salt, digest, created_s) VALUES (?, ?, ?, ?, ?, ?)",
                (key_id, tier, label, salt, _digest(salt, secret), time.time()),
            )
            show(key := KeyText(key_id, secret))
        return key

    def rotate(self, key_id: str, show: Callable[[KeyText], object] = lambda key: None) -> KeyText:
        """Gives a key a new secret; the old one stops working, unless `show` raises. The id, the tier and the usage
        stay. Raises `InvalidRequestError` for an unknown or revoked key, and what `show` raises."""
        record = self.record(key_id)
        if record.revoked_s is not None:
            raise InvalidRequestError(f"The key {key_id} is revoked for good; create a new key.")
        secret, salt = secrets.token_hex(32), secrets.token_bytes(16)
        with self._db:
            self._db.execute("UPDATE keys SET salt = ?, digest = ? WHERE id = ?", (salt, _digest(salt, secret), key_id))
            show(key := KeyText(key_id, secret))
        return key

    def revoke(self, key_id: str) -> None:
        """Revokes a key for good; its record stays. Raises `InvalidRequestError` for an unknown key."""
        self.record(key_id)
        with self._db:
            self._db.execute("UPDATE keys SET revoked_s = ? WHERE id = ? AND revoked_s IS NULL", (time.time(), key_id))

    def records(self) -> list[KeyRecord]:
        """All keys, oldest first."""
        return [KeyRecord(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_s, id")]

    def record(self, key_id: str) -> KeyRecord:
        """The record of a key. Raises `InvalidRequestError` for an unknown key."""
        row = self._db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
        if row is None:
            raise InvalidRequestError(f"There is no key with the id {key_id!r}; `mlx-serve keys list` shows all.")
        return KeyRecord(*row)

    def secret(self, key_id: str) -> Secret | None:
        """What verifies a key; None for an unknown key. One lookup by primary key."""
        row = self._db.execute("SELECT tier, salt, digest, revoked_s FROM keys WHERE id = ?", (key_id,)).fetchone()
        return None if row is None else Secret(row[0], row[1], row[2], row[3] is not None)

    def add_usage(self, usage: Mapping[str, Usage]) -> None:
        """Adds the usage of keys, by id. Unknown ids are ignored."""
        with self._db:
            self._db.executemany(
                "UPDATE keys SET last_used_s = ?, num_requests = num_requests + ?,"
                " num_prompt_tokens = num_prompt_tokens + ?, num_output_tokens = num_output_tokens + ? WHERE id = ?",
                [
                    (used.last_used_s, used.num_requests, used.num_prompt_tokens, used.num_output_tokens, key_id)
                    for key_id, used in usage.items()
                ],
            )


def _write_new(path: Path) -> None:
    """Puts a file without keys at `path`, in one step. One process at a time."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # left by a process that was killed
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        _fill(new)
        for leftover in ("-wal", "-shm"):  # SQLite would take the log of a deleted file for this one's
            path.with_name(path.name + leftover).unlink(missing_ok=True)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    """Makes an empty file one without keys, in one step."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(
            f"BEGIN IMMEDIATE; {_TABLE}; PRAGMA user_version = {_FORMAT}; COMMIT; PRAGMA journal_mode = WAL"
        )


def remedy(path: Path) -> str:
    """What helps against an error of SQLite, after a space, if the file's kind, disk or folder is the cause."""
    if os.path.exists(path) and not os.path.isfile(path):
        return " It is no regular file: name another with --key-file."
    if os.access(path.parent, os.F_OK) and shutil.disk_usage(path.parent).free < _MIN_FREE_BYTES:
        return f" The disk of {path.parent} is full: make room on it, or name another file with --key-file."
    if os.access(path.parent, os.W_OK) or not os.access(path, os.F_OK):
        return ""
    return (
        f" SQLite has to write beside it, and {path.parent} is not writable: copy it to a folder that is, and give the "
        "copy with --key-file."
    )


def _digest(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()
