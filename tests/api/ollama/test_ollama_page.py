"""docs/ollama.md and the bodies agree, field by field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_server.api.ollama.chat import ChatRequest, GenerateRequest
from mlx_server.api.ollama.request import Options
from mlx_server.api.openai.fields import GenerationFields
from tests.api.ollama.test_ollama_wire import ask
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (Path(__file__).parents[3] / "docs" / "ollama.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<field>\w+)` \| (?P<status>honoured|tolerated|refused) \|", re.MULTILINE)
ASKS: dict[str, Any] = {"typical_p": 0.5, "mirostat": 2}
"""Values that are refused where `x` is none."""

CHATS = {"/api/chat": {"messages": user("Hi")}, "/api/generate": {"prompt": "Hi"}}


def listed(heading: str) -> dict[str, str]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {row["field"]: row["status"] for row in ROW.finditer(section)}


FIELDS, OPTIONS = listed("POST /api/chat and /api/generate"), listed("Options")


async def test_every_field_and_option_is_listed():
    own = {*ChatRequest.model_fields, *GenerateRequest.model_fields} - set(GenerationFields.model_fields)
    assert FIELDS.keys() == own | {"model", "stream", "format"}
    assert OPTIONS.keys() == Options.model_fields.keys()


async def test_what_is_refused_is_named(world: World):
    for field in (name for name, status in FIELDS.items() if status == "refused"):
        answer = await world.http.post("/api/generate", json={"prompt": "Hi", field: ASKS.get(field, "x")})
        assert answer.status_code == 400, field
        assert field.removesuffix("s") in answer.json()["error"], field
    for option in (name for name, status in OPTIONS.items() if status == "refused"):
        answer = await world.http.post("/api/generate", json={"prompt": "Hi", "options": {option: ASKS[option]}})
        assert (answer.status_code, option in answer.json()["error"]) == (400, True), option


@pytest.mark.parametrize("path", CHATS)
async def test_what_is_tolerated_changes_nothing(world: World, path: str):
    await ask(world, path, **CHATS[path])
    for more in ({"truncate": True}, {"shift": False}, {"options": {"num_ctx": 2048}}, {"options": {"num_gpu": 0}}):
        await ask(world, path, **CHATS[path], **more)
    first, *others = world.engine.requests
    assert len(others) == 4
    for other in others:
        assert (other.prompt_token_ids, other.sampling) == (first.prompt_token_ids, first.sampling)
