"""The programs on docs/clients.md run as they stand."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api.fakes import say
from tests.api.worlds import ALL_ERRORS, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
PROGRAMS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "langchain" not in code]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: None)
async def test_a_program_runs(world: World, program: str, capsys: pytest.CaptureFixture[str]):
    world.engine.script = say('{"name": "Hello world", "country": "Utopia"}')  # whatever a program asks for
    here = program.replace("http://127.0.0.1:8000", world.url).replace("smollm2", "fake")
    code = compile(here, "clients.md", "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        await asyncio.to_thread(exec, code, names)
    finally:  # a program's end would close its client
        names["client"].close()
    assert "Hello world" in capsys.readouterr().out


async def test_settings_are_well_formed():
    (toml,), (yml,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("toml", "yaml"))
    codex = tomllib.loads(toml)
    assert codex["model_providers"][codex["model_provider"]]["wire_api"] == "responses"
    continued = yaml.safe_load(yml)
    assert {"name", "version", "schema", "models"} == continued.keys()
    assert {"name", "provider", "model", "apiBase"} <= continued["models"][0].keys()


async def test_there_are_programs():
    assert len(PROGRAMS) == 5


async def test_the_page_lists_the_errors_of_the_table():
    listed = re.findall(r"\| (\d{3}) \| `(\w+)` \|", PAGE)
    assert {(int(status), kind) for status, kind in listed} >= {(row[1], row[2]) for row in ALL_ERRORS}
