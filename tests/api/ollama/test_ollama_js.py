"""The ollama client for JavaScript, over the real engine and the bundled model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.api.programs import output_of
from tests.api.real_worlds import RealWorld

FOLDER = Path(__file__).parent / "ollama_js"

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "ollama").is_dir(),
        reason="the ollama package of npm is not installed: npm install --prefix tests/api/ollama/ollama_js",
    ),
]


async def test_its_examples_work(real: RealWorld):
    seen = json.loads(await output_of("node", "examples.js", real.url, "smollm2", cwd=FOLDER))
    assert seen["chat"]["message"]["content"]
    text = "".join(part["message"]["content"] for part in seen["parts"])
    assert text == seen["chat"]["message"]["content"]
    assert seen["parts"][-1]["done"]
    assert seen["parts"][-1]["eval_count"] == seen["chat"]["eval_count"]
    assert seen["answered"]["prompt_eval_count"] > seen["called"]["prompt_eval_count"]
    assert "Paris" in seen["generated"]["response"]
    assert "".join(part["response"] for part in seen["more"])
    assert seen["more"][-1]["context"]
    assert json.loads(seen["structured"]["message"]["content"])["city"] in ("Rome", "Oslo")
    assert [model["name"] for model in seen["list"]["models"]] == ["smollm2:latest"]
    assert seen["show"]["details"]["family"] == "llama"
    assert [model["name"] for model in seen["ps"]["models"]] == ["smollm2:latest"]
    assert seen["version"]["version"]
    assert [part["status"] for part in seen["pulled"]] == ["pulling manifest", "success"]
    assert [error["status"] for error in seen["errors"]] == [404, 501, 403]
    assert all(error["message"] for error in seen["errors"])
    assert seen["aborted"] == "AbortError"
    await real.settled()
