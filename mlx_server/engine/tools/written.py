"""Calls as a model would write them itself, for prompts whose chat template does not write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.engine.tools.formats import FORMATS, ITEM, JSON_TAGS, Notation, Parameter, ToolFormat, ToolParser
from mlx_server.engine.tools.values import kind_of


def written_calls(parser: ToolParser, functions: Sequence[Mapping[str, Any]]) -> str:
    """Writes calls, each with `name` and `arguments`, in the format that `parser` reads; as JSON between tags if that
    is not in `FORMATS`."""
    if parser.name not in FORMATS:
        parser = JSON_TAGS
    form = FORMATS[parser.name]
    calls = [_call(form, index, function["name"], function["arguments"]) for index, function in enumerate(functions)]
    if form.around is not None:
        before, after = form.around
        calls = [before + form.separator.join(calls) + after]
    return form.separator.join(f"{form.lead}{parser.start}{call}{parser.end}" for call in calls)


def _call(form: ToolFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    names = {"name": name, "json_name": json.dumps(name, ensure_ascii=False)}
    before = form.before.format(**names)
    if form.number is not None:
        before += f"{index}{form.number.format(**names)}"
    return before + _arguments(form, arguments) + form.after


def _arguments(form: ToolFormat, arguments: Mapping[str, Any]) -> str:
    if form.parameter is not None:
        return "".join(_parameter(form.parameter, key, value) for key, value in arguments.items())
    if form.notation is not None:
        return _members(form.notation, form.notation.argument, arguments)
    return _json(arguments)


def _parameter(parameter: Parameter, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    if parameter.namespace and isinstance(value, Mapping | list):
        inner = value.items() if isinstance(value, Mapping) else [(ITEM, item) for item in value]
        written = "".join(_parameter(parameter, *pair) for pair in inner)
        return parameter.begin(key, kind_of(value)) + written + parameter.end(key)
    text = value if is_text else _json(value)
    if parameter.has_cdata and is_text:
        text = f"<![CDATA[{text}]]>"
    return parameter.begin(key, kind_of(value)) + text + parameter.end(key)


def _members(notation: Notation, before: str, members: Mapping[str, Any]) -> str:
    written = [before.format(key=key) + noted(notation, value) for key, value in members.items()]
    return notation.separator.join(written)


def noted(notation: Notation, value: Any) -> str:
    """A value in a model's own notation."""
    if isinstance(value, str):
        return notation.quote + (_json(value)[1:-1] if notation.is_escaped else value) + notation.quote
    if isinstance(value, Mapping):
        return f"{{{_members(notation, notation.member, value)}}}"
    if isinstance(value, list):
        return f"[{notation.separator.join(noted(notation, item) for item in value)}]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
