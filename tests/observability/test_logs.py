"""What stands in the log: one line a request, in text and in JSON, for every logger alike."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from mlx_server.observability.logs import JsonFormatter, TextFormatter, log_event


def written(formatter: logging.Formatter, *, fields: dict[str, object] | None = None) -> str:
    logger, stream = logging.Logger("mlx_server.test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    if fields is None:
        logger.warning("%d of %s", 3, "four")
    else:
        log_event(logger, "happened", fields)
    return stream.getvalue()


def test_json_has_one_object_a_line_with_the_records_own_fields():
    entry = json.loads(written(JsonFormatter(), fields={"n": 3, "text": 'a "b"\nc', "none": None}))
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info",
        "logger": "mlx_server.test",
        "message": "happened",
        "n": 3,
        "text": 'a "b"\nc',
        "none": None,
    }
    plain = written(JsonFormatter())
    assert plain.count("\n") == 1
    assert json.loads(plain)["message"] == "3 of four"


def test_json_holds_the_traceback_in_the_same_line():
    try:
        raise ValueError("no luck")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: no luck" in json.loads(line)["exception"]


@pytest.mark.parametrize(
    ("value", "shown"), [(3, "3"), (None, "-"), ("a", "a"), ("a b", '"a b"'), ("a\nb", r'"a\nb"'), ('"', r'"\""')]
)
def test_text_has_the_fields_behind_it_and_they_cannot_forge_lines(value: object, shown: str):
    line = written(TextFormatter("%(levelname)s %(message)s"), fields={"key": value, "last": 1})
    assert line == f"INFO happened key={shown} last=1\n"
