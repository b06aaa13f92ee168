"""docs/endpoints.md and the server agree: every route and its other names, and the fields of those routes that have no
page of their own."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from mlx_server.api.app import create_app
from mlx_server.config import Config
from tests.api.fakes import FakeEngine, fake_pool
from tests.api.rich_worlds import ask
from tests.api.test_openapi import document
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text(encoding="utf-8")
ROUTES, _, FIELDS = PAGE.partition("## Parameters of the other routes")
ROUTE = re.compile(r"`([A-Z]+ /\S*)`")
FIELD = re.compile(r"^\| `([A-Z]+ /\S+)` \| `(\w+)` \| (\w+) \|", re.MULTILINE)
ELSEWHERE = ("parameters.md", "anthropic-and-responses.md", "ollama.md", "those of the ch", "those of the comp")
OF_THE_FRAMEWORK = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}

TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": user("Hi")}
# A value that changes the answer, and what else the request needs, in both requests that are compared.
TOKENIZING: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "/tokenize": {
        "model": ("nobody", {"prompt": "Hi"}),
        "prompt": ("Ho", {"prompt": "Hi"}),
        "add_special_tokens": (False, {"prompt": "Hi"}),
        "return_token_strs": (True, {"prompt": "Hi"}),
        "messages": (user("Ho"), CHAT),
        "tools": ([TOOL], CHAT),
        "add_generation_prompt": (False, CHAT),
        "continue_final_message": (True, CHAT),
        "chat_template_kwargs": ({"mood": "glad"}, CHAT),
        "reasoning_effort": ("low", CHAT),
        "reasoning": ({"effort": "low"}, CHAT),
        "enable_thinking": (False, CHAT),
        "thinking": ({"type": "disabled"}, CHAT),
        "documents": ([{"text": "x"}], CHAT),
    },
    "/detokenize": {"model": ("nobody", {"tokens": [5]}), "tokens": ([6], {"tokens": [5]})},
}


async def test_the_page_lists_every_route_with_all_its_names():
    app = create_app(fake_pool(FakeEngine()), Config())
    served = {
        f"{method} {route.path.replace(':path', '')}"
        for route in iter_route_contexts(app.routes)
        if route.path not in OF_THE_FRAMEWORK
        for method in route.methods or ()
    }
    listed = ROUTE.findall(ROUTES.partition("| route |")[2])
    assert len(listed) == len(set(listed))
    assert set(listed) == served


async def test_names_in_one_row_are_of_one_route():
    app = create_app(fake_pool(FakeEngine()), Config())
    endpoints = {
        f"{method} {route.path.replace(':path', '')}": route.endpoint  # type: ignore[attr-defined]
        for route in iter_route_contexts(app.routes)
        for method in route.methods or ()
    }
    for line in ROUTES.partition("| route |")[2].splitlines():
        cells = line.split(" | ")
        names = ROUTE.findall(" ".join(cells[:2]))
        assert len({endpoints[name] for name in names}) <= 1, line


async def test_the_page_lists_every_field_of_routes_without_a_page_of_their_own():
    listed = defaultdict(set)
    for route, field, status in FIELD.findall(FIELDS):
        assert status in ("honoured", "refused")
        assert field not in listed[route]
        listed[route].add(field)
    for line in ROUTES.splitlines():
        match = ROUTE.match(line.removeprefix("| "))
        if match is None or match[1].split()[1] not in _documented_paths():
            continue
        is_elsewhere = any(place in line for place in ELSEWHERE)
        declared = set() if is_elsewhere else _fields(match[1])
        assert listed[match[1]] == declared, match[1]
        assert is_elsewhere or ("| below |" in line) == bool(declared), line


def _documented_paths() -> set[str]:
    return set(document()["paths"])


def _fields(route: str) -> set[str]:
    """Those of the body, and of the query."""
    method, path = route.split()
    operation = document()["paths"][path][method.lower()]
    fields = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"}
    if "requestBody" in operation:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields |= document()["components"]["schemas"][reference.rpartition("/")[2]]["properties"].keys()
    return fields


@pytest.mark.parametrize("path", TOKENIZING)
async def test_honoured_fields_of_tokenizing_change_the_answer(rich_world: World, path: str):
    honoured = {
        field for route, field, status in FIELD.findall(FIELDS) if (route, status) == (f"POST {path}", "honoured")
    }
    assert honoured == TOKENIZING[path].keys()
    for field, (value, base) in TOKENIZING[path].items():
        without = await ask(rich_world, path, base)
        assert without[0] == 200
        assert await ask(rich_world, path, {**base, field: value}) != without, field
        assert await ask(rich_world, path, {**base, "not_on_the_page": "x"}) == without


async def test_refused_fields_are_named(world: World):
    for path, base, field in (("/tokenize", CHAT, "chat_template"),):
        assert (f"POST {path}", field, "refused") in FIELD.findall(FIELDS)
        answer = await world.http.post(path, json={**base, field: "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
