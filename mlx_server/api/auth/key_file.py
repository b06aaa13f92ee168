"""The SQLite file of API keys. It holds no key: only what tells whether a key that comes is one of them.

    key = mlxs_<id>_<secret>      the id finds the row; SHA-256 of the row's salt and the secret must be its digest

A secret has 256 random bits, so a fast hash is as good as a slow one: there is nothing to guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mlx_server.errors import ConfigError, InvalidRequestError

PREFIX = "mlxs"
_KEY = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([0-9a-f]{{64}})")
_FORMAT = 1
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
    """What is known of a key, as `mlx-serve keys list` shows it. Times are seconds since 1970."""

    key_id: str
    tier: str
    label: str
    created_s: float
    revoked_s: float | None
    last_used_s: float | None
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a key has used since it was last written down."""

    last_used_s: float
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Secret:
    """What proves a key: a row's salt and digest."""

    tier: str
    salt: bytes
    digest: bytes
    is_revoked: bool

    def matches(self, secret: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key as its owner has it. It is shown once, and kept nowhere."""

    key_id: str
    secret: str

    @property
    def text(self) -> str:
        """What is sent."""
        return f"{PREFIX}_{self.key_id}_{self.secret}"


def parse_key(text: str) -> KeyText | None:
    """None for what cannot be one of our keys."""
    match = _KEY.fullmatch(text)
    return None if match is None else KeyText(match[1], match[2])


class KeyFile:
    """An open file. Each method is a transaction of its own, so that several processes may share the file.

    Readers never wait for writers (write-ahead log): a server looks keys up while others change them.
    """

    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        """Opens a file that is there. Raises `ConfigError` if it has another format."""
        self._path = path
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=timeout_s)
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be read as a file of keys: {error}.") from error
        if version != _FORMAT:
            self._db.close()
            raise ConfigError(f"{path} is not a file of keys that this version can read (format {version}).")

    @classmethod
    def create(cls, path: Path) -> KeyFile:
        """Opens the file at `path`, after making it if there is none. Only its owner may read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # what SQLite left beside a file that was deleted would be taken for this one's
            for leftover in ("-wal", "-shm"):
                path.with_name(path.name + leftover).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.DatabaseError):
            if db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(_TABLE)
                db.execute(f"PRAGMA user_version = {_FORMAT}")
                db.commit()
        return cls(path)

    def __enter__(self) -> KeyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def add(self, tier: str, label: str) -> KeyText:
        """A new key."""
        key_id, secret, salt = secrets.token_hex(6), secrets.token_hex(32), secrets.token_bytes(16)
        with self._db:
            self._db.execute(
                "INSERT INTO keys (id, tier, label, salt, digest, created_s) VALUES (?, ?, ?, ?, ?, ?)",
                (key_id, tier, label, salt, _digest(salt, secret), time.time()),
            )
        return KeyText(key_id, secret)

    def rotate(self, key_id: str) -> KeyText:
        """A new secret for a key, which keeps its id, tier and usage; the old one is worthless from now on. Raises
        `InvalidRequestError` for an unknown or revoked key."""
        record = self.record(key_id)
        if record.revoked_s is not None:
            raise InvalidRequestError(f"The key {key_id} is revoked for good; create a new one.")
        secret, salt = secrets.token_hex(32), secrets.token_bytes(16)
        with self._db:
            self._db.execute("UPDATE keys SET salt = ?, digest = ? WHERE id = ?", (salt, _digest(salt, secret), key_id))
        return KeyText(key_id, secret)

    def revoke(self, key_id: str) -> None:
        """Refuses a key for good; its record stays. Raises `InvalidRequestError` for an unknown one."""
        self.record(key_id)
        with self._db:
            self._db.execute("UPDATE keys SET revoked_s = ? WHERE id = ? AND revoked_s IS NULL", (time.time(), key_id))

    def records(self) -> list[KeyRecord]:
        """All keys, the oldest first."""
        return [KeyRecord(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_s, id")]

    def record(self, key_id: str) -> KeyRecord:
        """One key's record. Raises `InvalidRequestError` for an unknown one."""
        row = self._db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
        if row is None:
            raise InvalidRequestError(f"There is no key with the id {key_id}; `mlx-serve keys list` shows all.")
        return KeyRecord(*row)

    def secret(self, key_id: str) -> Secret | None:
        """What proves the key; None for an unknown one. One lookup by primary key."""
        row = self._db.execute("SELECT tier, salt, digest, revoked_s FROM keys WHERE id = ?", (key_id,)).fetchone()
        return None if row is None else Secret(row[0], row[1], row[2], row[3] is not None)

    def add_usage(self, usage: Mapping[str, Usage]) -> None:
        """Adds what keys, by id, have used; unknown ids are passed over."""
        with self._db:
            self._db.executemany(
                "UPDATE keys SET last_used_s = ?, num_requests = num_requests + ?,"
                " num_prompt_tokens = num_prompt_tokens + ?, num_output_tokens = num_output_tokens + ? WHERE id = ?",
                [
                    (used.last_used_s, used.num_requests, used.num_prompt_tokens, used.num_output_tokens, key_id)
                    for key_id, used in usage.items()
                ],
            )


def _digest(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()
