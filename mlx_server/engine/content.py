"""What a message says, whichever protocol's parts it is made of: text is read, everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.errors import InvalidRequestError

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_MEDIA = ("image", "audio", "video", "file", "document", "screenshot", "upload")
"""Words in the types of parts that are no text, in any protocol: `image_url`, `input_audio`, `computer_screenshot`."""


def text_of(content: Any, where: str) -> str:
    """The text of OpenAI's content: a string, or a list of parts, which are joined by line breaks. `where` is its path
    in the request. Raises `InvalidRequestError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where} must be a string or a list of parts.", where)
    return "\n".join([_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where} must be a part with a type.", where)
    if kind not in _TEXT_FIELDS:
        raise unreadable_part(kind, where)
    return string_in(part, _TEXT_FIELDS[kind], where)


def unreadable_part(kind: Any, where: str) -> InvalidRequestError:
    """The refusal of a part of type `kind`: what no model is given here so far, or what has no place at `where`."""
    if isinstance(kind, str) and any(word in kind for word in _MEDIA):
        return InvalidRequestError(
            f"{where} is of type {kind}: this server reads only text so far, whatever the model could see or hear. "
            "Leave the part out, or send what it says as a part of type text.",
            where,
        )
    return InvalidRequestError(f"{where} is of type {kind}, which cannot stand there; send parts of type text.", where)


def string_in(part: Mapping[str, Any], field: str, where: str) -> str:
    """The string that `part` must have there. Raises `InvalidRequestError`."""
    value = part.get(field)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{field} must be a string.", f"{where}.{field}")
    return value
