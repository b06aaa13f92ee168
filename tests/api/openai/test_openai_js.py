"""The openai client for JavaScript, over the real engine and the bundled model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.api.programs import output_of
from tests.api.real_worlds import RealWorld

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
FOLDER = Path(__file__).parent / "openai_js"

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "openai").is_dir(),
        reason="the openai package of npm is not installed: npm install --prefix tests/api/openai/openai_js",
    ),
]


async def run(program: str, *arguments: str) -> str:
    """What `program`, a module's source, prints, in the folder where it finds its packages."""
    return await output_of("node", "--input-type=module", "-", *arguments, cwd=FOLDER, given=program.encode())


async def test_a_streamed_tool_call_is_understood(real: RealWorld):
    program = (FOLDER / "streamed_tool_call.js").read_text(encoding="utf-8")
    seen = json.loads(await run(program, f"{real.url}/v1"))
    first, *others = seen["deltas"]
    assert first["function"]["name"] == "get_weather"
    assert first["id"]
    assert others, "the arguments come in pieces"
    assert all(delta["index"] == 0 and "name" not in delta["function"] for delta in others)
    streamed = "".join(delta["function"]["arguments"] for delta in seen["deltas"])
    (choice,) = seen["final"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["arguments"] == seen["arguments"] == streamed
    assert json.loads(streamed)["city"] in ("Rome", "Oslo")
    assert seen["final"]["usage"]["completion_tokens"] > 0


async def test_the_program_on_the_clients_page_runs(real: RealWorld):
    (program,) = re.findall(r"```js\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert (await run(program.replace("http://127.0.0.1:8000", real.url))).strip()
