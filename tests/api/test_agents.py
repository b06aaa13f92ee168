"""Coding agents themselves, headless, over a scripted model: with the settings of docs/clients.md, and started by
`mlx-serve launch`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.request_stream import GenerationRequest
from tests.api.programs import output_of
from tests.api.worlds import World

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
FOLDER = Path(__file__).parent / "agents"
INSTALL = {
    "node_modules": "npm install --ignore-scripts --prefix tests/api/agents",
    ".venv": "python -m venv tests/api/agents/.venv && tests/api/agents/.venv/bin/pip install aider-chat",
}
CONTEXT = 1_000_000
"""In tokens of the tests' tokenizer, which are short: clients with less begin to shorten their prompts."""

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@dataclass(frozen=True)
class Setup:
    """How an agent learns of the server: on its command line, in its environment, in files under its work and home."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """`program` is a pattern under tests/api/agents, where the package of this platform has it: the packages' own
    scripts did not run. `by_hand` makes a setup of the agent's section of the page. `answers` are the model's to the
    requests for which it may call tools, or to all from agents that give it none; {work} is the working folder."""

    program: str
    section: str
    by_hand: Callable[[str], Setup]
    arguments: Sequence[str]
    answers: Sequence[str]
    has_tools: bool = True

    def installed(self) -> Path:
        """The program. Skips the test where it has not been installed."""
        found = sorted(FOLDER.glob(self.program), key=lambda path: len(str(path)))
        if not found:
            pytest.skip(f"not installed: {INSTALL[self.program.partition('/')[0]]}")
        return found[0]


def block(section: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def file(text: str) -> str:
    """As aider wants files of models that it does not know."""
    return f"made.txt\n```\n{text}\n```"


def claude(section: str) -> Setup:
    return Setup(environment=dict(re.findall(r"\b([A-Z_]+)=(\S+)", block(section, "sh"))))


def codex(section: str) -> Setup:
    return Setup(files={"home/config.toml": block(section, "toml")})


def opencode(section: str) -> Setup:
    return Setup(files={"work/opencode.json": block(section, "json")})


def aider(section: str) -> Setup:
    return Setup(shlex.split(block(section, "sh"))[1:])


DONE = "All done."
SLOW = ("opencode", "aider")
"""Agents that take seconds to start."""

AGENTS = {
    "claude": Agent(
        "node_modules/@anthropic-ai/claude-code-*/claude",
        "Claude Code",
        claude,
        ("-p", "Make a file.", "--allowedTools", "Bash", "Read"),
        (
            call("Bash", command="echo one > made.txt", description="Make it"),
            call("Read", file_path="{work}/made.txt"),
            DONE,
        ),
    ),
    "codex": Agent(
        "node_modules/.bin/codex",
        "Codex",
        codex,
        ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Make a file."),
        (call("exec_command", cmd="echo one > made.txt"), call("exec_command", cmd="cat made.txt"), DONE),
    ),
    "opencode": Agent(
        "node_modules/opencode-*-*/bin/opencode",
        "opencode",
        opencode,
        ("run", "Make a file."),
        (
            call("bash", command="echo one > made.txt", description="Make it"),
            call("read", filePath="{work}/made.txt"),
            DONE,
        ),
    ),
    # It has no tools: files come in the text, and what its test of them prints goes back to the model.
    "aider": Agent(
        ".venv/bin/aider",
        "Aider",
        aider,
        (
            *("--message", "Make a file.", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable"),
            *(
                "--no-show-release-notes",
                "--auto-test",
                "--test-cmd",
                "grep one made.txt || (echo It has no one; false)",
            ),
        ),
        (file("two"), f"{DONE}\n{file('one')}"),
        has_tools=False,
    ),
}


def play(world: World, agent: Agent, work: Path) -> list[str]:
    """The model gives these answers, each when it has seen what became of those before; the prompts that it saw.
    Requests without tools are for titles and the like."""
    world.engine.max_model_len = CONTEXT
    prompts: list[str] = []

    def script(request: GenerationRequest) -> str:
        prompt = world.engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if agent.has_tools and "You can call functions." not in prompt:
            return "A title"
        prompts.append(prompt)
        turn = len(re.findall(r"\n</tool_response>", prompt)) if agent.has_tools else len(prompts) - 1
        return agent.answers[min(turn, len(agent.answers) - 1)].replace("{work}", str(work))

    world.engine.script = script
    return prompts


def by_hand(name: str, url: str) -> Setup:
    agent = AGENTS[name]
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {agent.section}\n")[2].partition("\n## ")[0]
    for ours, here in (
        ("http://127.0.0.1:8000", url),
        ("smollm2", "fake"),
        ("my-model", "fake"),
        ("32768", str(CONTEXT)),
    ):
        text = text.replace(ours, here)
    return agent.by_hand(text)


async def run(command: Sequence[str | Path], setup: Setup, folder: Path) -> str:
    """What the program prints. It has a home of its own, and nothing that others have set."""
    for name in ("work", "home"):
        (folder / name).mkdir()
    for name, text in setup.files.items():
        (folder / name).write_text(text)
    home, work = folder / "home", folder / "work"
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR", "TERM")}
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "CODEX_HOME"), str(home))
    return await output_of(*command, cwd=work, env={**kept, **homes, **setup.environment})


def launched(name: str, program: Path, url: str, folder: Path) -> tuple[Sequence[str | Path], Setup]:
    """The agent without any configuration, started by our command, which finds it on PATH."""
    (folder / "bin").mkdir()
    (folder / "bin" / name).symlink_to(program)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = (sys.executable, "-m", "mlx_server", "launch", name, "--url", url, "--")
    return command, Setup(environment={"PATH": path, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param(name, start, marks=[pytest.mark.full] if start == "by_hand" and name in SLOW else [])
        for name in AGENTS
        for start in ("by_hand", "launched")
    ],
)
async def test_a_session_of_two_tools(world: World, tmp_path: Path, name: str, start: str):
    agent = AGENTS[name]
    program = agent.installed()
    if program.parent.name == ".bin" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    work = tmp_path / "work"
    prompts = play(world, agent, work)
    if start == "launched":
        command, setup = launched(name, program, world.url, tmp_path)
    else:
        setup = by_hand(name, world.url)
        command = (program, *setup.arguments)
    said = await run((*command, *agent.arguments), setup, tmp_path)
    assert (work / "made.txt").read_text() == "one\n"
    assert DONE in said
    assert len(prompts) == len(agent.answers), "the model was asked once for each answer"
    if name == "codex":
        assert "multi_agent_v1__spawn_agent" in prompts[0], "functions of a namespace are shown to the model"
