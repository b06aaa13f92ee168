"""Logs on standard error: text lines, or JSON, for all loggers. A standard stream that goes away (a pipe whose reader
has left, a closed terminal, a full disk) does not end the server."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_FIELDS = "fields"


def set_up_logging(level: str, form: str) -> None:
    """Writes every record of `level` and above to standard error, as `text` or `json`. Call it once per process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def log_event(logger: logging.Logger, event: str, fields: Mapping[str, Any]) -> None:
    """Logs an event with `fields`: members of the JSON object, or `name=value` after the text."""
    logger.info(event, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        return super().formatMessage(record) + "".join(f" {name}={_shown(value)}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """One object per line: `time` (UTC), `level`, `logger`, `message`, the record's fields, and `exception` with the
    traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = str(value)
    return json.dumps(text) if not text.isprintable() or " " in text or '"' in text else text


def leave(status: int) -> NoReturn:
    """Ends the process at once, without waiting for threads."""
    logging.shutdown()
    os._exit(status)


def survive_lost_streams() -> None:
    """From now on, writing to `sys.stdout` or `sys.stderr` never fails: a server does not end because nobody reads its
    log. Call it once, after `open_streams`."""
    sys.stdout = _surviving(sys.stdout, 1)
    sys.stderr = _surviving(sys.stderr, 2)


class _Surviving(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def _surviving(stream: TextIO, descriptor: int) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    file = io.BufferedWriter(_Surviving(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
