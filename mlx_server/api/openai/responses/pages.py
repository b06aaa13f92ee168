"""Lists of kept items, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query
from pydantic_core import to_json
from starlette.responses import Response

from mlx_server.api.openai.responses.store import KeptItem, written
from mlx_server.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class _Page:
    after: str | None = None
    limit: Annotated[int, Query(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"

    def of(self, items: Sequence[KeptItem]) -> Response:
        """The page of items that are in ascending order. Raises `InvalidRequestError`."""
        in_order = items if self.order == "asc" else items[::-1]
        ids = [item.id for item in in_order]
        if self.after is not None and self.after not in ids:
            raise InvalidRequestError(f"after names {self.after}, which is not an item of this list.", "after")
        start = 0 if self.after is None else ids.index(self.after) + 1
        return item_list(in_order[start : start + self.limit], has_more=start + self.limit < len(items))


Page = Annotated[_Page, Depends()]


def item_list(items: Sequence[KeptItem], *, has_more: bool = False) -> Response:
    head = {
        "object": "list",
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
    return as_json(b'%b,"data":%b}' % (to_json(head)[:-1], written(items)))


def as_json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
