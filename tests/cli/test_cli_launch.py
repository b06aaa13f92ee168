"""`mlx-serve launch`, with programs that write down how they were started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server.cli.launch import CLIENTS
from mlx_server.cli.main import main
from mlx_server.cli.remote import KEY_VARIABLE
from tests.cli.test_cli_remote import FakeServer

PROGRAM = """#!{python}
import json, os, signal, sys, time
files = {{}}
for text in [*sys.argv, *os.environ.values()]:
    if "mlx-serve-" in text and os.path.isfile(text):
        files[text] = open(text).read()
report = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files, "pid": os.getpid()}}
if os.environ.get("WAITS"):
    def stop(number, frame):
        report["signal"] = number
        json.dump(report, open(os.environ["REPORT"], "w"))
        sys.exit(7)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    open(os.environ["WAITS"], "w").close()
    time.sleep(30)
json.dump(report, open(os.environ["REPORT"], "w"))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


class Machine:
    """A PATH with all clients on it, and a server that they may use."""

    def __init__(self, folder: Path, server: FakeServer) -> None:
        self.folder = folder
        self.server = server
        self.programs = folder / "bin"
        self.programs.mkdir()
        for client in CLIENTS:
            program = self.programs / client
            program.write_text(PROGRAM.format(python=sys.executable))
            program.chmod(0o755)

    def launch(self, *words: str) -> tuple[int, dict[str, Any]]:
        """The exit status, and what the program saw."""
        status = main(["launch", words[0], "--url", self.server.url, *words[1:]])
        return status, self.report()

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    server = FakeServer()
    server.models = [{"id": "first", "max_model_len": 32768}, {"id": "second/one", "max_model_len": None}]
    made = Machine(tmp_path, server)
    monkeypatch.setenv("PATH", f"{made.programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("REPORT", str(tmp_path / "report.json"))
    yield made
    server.close()


def test_claude_gets_all_that_the_page_says(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    status, seen = machine.launch("claude", "--", "-p", "Say hello", "--", "x")
    environment = seen["environment"]
    assert status == 0
    assert environment["ANTHROPIC_BASE_URL"] == machine.server.url
    assert (environment["ANTHROPIC_MODEL"], environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"]) == ("first", "first")
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "unused"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert "ANTHROPIC_API_KEY" not in environment
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    assert all(name in page for name in environment if name.startswith(("ANTHROPIC_", "CLAUDE_CODE_")))
    option, path, *rest = seen["arguments"]
    assert (option, rest) == ("--settings", ["-p", "Say hello", "--", "x"])
    settings = json.loads(seen["files"][path])["env"]
    assert settings.items() <= environment.items()
    assert not Path(path).parent.exists(), "deleted afterwards"


@pytest.mark.parametrize(
    ("client", "context", "words"),
    [
        ("claude", 32_768, ""),
        (
            "claude",
            32_000,
            "first has a context of 32000 tokens, and the prompt and tools of claude alone have about 20000.",
        ),
        ("opencode", 16_384, ""),
        ("opencode", 8192, "have about 5000. Use a model with a longer context."),
        ("codex", 8192, ""),
        ("copilot", 16_384, "have about 12000. Use a model with a longer context."),
        ("pi", 12_288, ""),
        ("claude", None, ""),
    ],
)
def test_a_context_too_short_for_the_client_is_told_before_it_starts(
    machine: Machine, capsys: pytest.CaptureFixture[str], client: str, context: int | None, words: str
):
    machine.server.models = [{"id": "first", "max_model_len": context}]
    assert machine.launch(client)[0] == 0
    told = capsys.readouterr().err
    assert told.count("\n") == bool(words)
    assert words in told


def test_a_client_does_not_ask_a_server_on_this_machine_through_a_proxy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dead_proxy: str
):
    monkeypatch.setenv("no_proxy", "intern.example")
    environment = machine.launch("claude")[1]["environment"]
    assert environment["http_proxy"] == dead_proxy
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intern.example,127.0.0.1,localhost,::1"


def test_a_client_is_told_nothing_of_proxies_where_there_are_none_or_the_server_is_elsewhere(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dead_proxy: str
):
    monkeypatch.setenv("http_proxy", machine.server.url)
    assert main(["launch", "claude", "--url", "http://far.invalid"]) == 0
    assert "NO_PROXY" not in machine.report()["environment"]
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name)
    assert "NO_PROXY" not in machine.launch("claude")[1]["environment"]


def test_codex_gets_a_provider_on_its_command_line(machine: Machine):
    _, seen = machine.launch("codex", "--model", "second/one", "--", "exec", "Hi")
    *pairs, command, prompt = seen["arguments"]
    assert (command, prompt) == ("exec", "Hi")
    assert pairs[::2] == ["-c"] * (len(pairs) // 2)
    config = tomllib.loads("\n".join(pairs[1::2]))
    assert (config["model"], config["model_provider"]) == ("second/one", "mlx-serve")
    assert "model_context_window" not in config, "the model is not loaded"
    provider = config["model_providers"]["mlx-serve"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{machine.server.url}/v1", "responses")
    assert seen["environment"][provider["env_key"]] == "unused"


def test_opencode_gets_a_configuration_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    _, seen = machine.launch("opencode", "--", "run", "Hi")
    path = seen["environment"]["OPENCODE_CONFIG"]
    config = json.loads(seen["files"][path])
    assert config["model"] == "mlx-serve/first"
    provider = config["provider"]["mlx-serve"]
    assert provider["options"]["baseURL"] == f"{machine.server.url}/v1"
    assert provider["models"]["first"]["limit"] == {"context": 32768, "output": 8192}
    variable = provider["options"]["apiKey"].removeprefix("{env:").removesuffix("}")
    assert seen["environment"][variable] == "secret"
    assert "secret" not in seen["files"][path]
    assert machine.server.keys == ["Bearer secret"]
    assert seen["arguments"] == ["run", "Hi"]
    assert not Path(path).exists()


def test_aider_gets_options_and_what_the_model_is(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret\n")
    _, seen = machine.launch("aider")
    arguments = seen["arguments"]
    assert arguments[arguments.index("--model") + 1] == "openai/first"
    assert arguments[arguments.index("--openai-api-base") + 1] == f"{machine.server.url}/v1"
    (text,) = seen["files"].values()
    assert json.loads(text)["openai/first"]["max_input_tokens"] == 32768
    assert seen["environment"]["OPENAI_API_KEY"] == "secret"
    assert "secret" not in str(arguments)


def test_qwen_gets_settings_that_take_precedence(machine: Machine):
    _, seen = machine.launch("qwen", "--", "-p", "Hi")
    environment = seen["environment"]
    assert (environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]) == (f"{machine.server.url}/v1", "unused")
    settings = json.loads(seen["files"][environment["QWEN_CODE_SYSTEM_SETTINGS_PATH"]])
    assert settings["model"] == {"name": "first", "generationConfig": {"contextWindowSize": 32768}}
    assert seen["arguments"] == ["--auth-type", "openai", "-p", "Hi"]


def test_copilot_gets_a_provider_in_its_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COPILOT_PROVIDER_BEARER_TOKEN", "the user's own")
    _, seen = machine.launch("copilot")
    environment = seen["environment"]
    assert (environment["COPILOT_PROVIDER_BASE_URL"], environment["COPILOT_MODEL"]) == (
        f"{machine.server.url}/v1",
        "first",
    )
    assert "COPILOT_PROVIDER_BEARER_TOKEN" not in environment, "it would take precedence over the key"
    limits = [environment[f"COPILOT_PROVIDER_MAX_{kind}_TOKENS"] for kind in ("PROMPT", "OUTPUT")]
    assert limits == ["24576", "8192"]
    assert (
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS" not in machine.launch("copilot", "--model", "second/one")[1]["environment"]
    ), "the model is not loaded"


def test_pi_gets_an_extension_that_reads_the_key(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    _, seen = machine.launch("pi", "--model", "second/one", "--", "-p", "Hi")
    option, path, *rest = seen["arguments"]
    assert (option, rest) == ("--extension", ["--provider", "mlx-serve", "--model", "second/one", "-p", "Hi"])
    text = seen["files"][path]
    body, key = text.split("...")[1].rsplit(", apiKey: process.env.", 1)
    provider = json.loads(body)
    assert provider["baseUrl"] == f"{machine.server.url}/v1"
    assert [model["id"] for model in provider["models"]] == ["second/one"]
    assert seen["environment"][key.split()[0]] == "secret"
    assert "secret" not in text


@pytest.mark.parametrize("client", CLIENTS)
def test_the_users_files_are_left_alone(machine: Machine, client: str):
    machine.launch(client)
    assert list((machine.folder / "home").iterdir()) == []


def test_the_status_is_the_clients(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STATUS", "42")
    assert machine.launch("aider")[0] == 42


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_the_client(machine: Machine, number: signal.Signals):
    """Ctrl-C reaches all processes of the terminal; what ends only us is passed on."""
    ready = machine.folder / "ready"
    command = [sys.executable, "-m", "mlx_server", "launch", "claude", "--url", machine.server.url]
    process = subprocess.Popen(command, env={**os.environ, "WAITS": str(ready)}, start_new_session=True)
    try:
        wait_for(ready, process)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(20) == 7, "the client's own status"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seen = machine.report()
    assert seen["signal"] == number
    assert not Path(seen["arguments"][1]).parent.exists(), "deleted after the client's end"


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    import time

    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("client", CLIENTS)
def test_print_shows_all_but_the_key_and_starts_nothing(
    machine: Machine, client: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    words = ["launch", client, "--url", machine.server.url, "--print", "--", "--flag", "a b"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert machine.server.url in shown
    assert "first" in shown
    assert "secret" not in shown
    assert shown.splitlines()[-1].startswith(client)
    assert shown.splitlines()[-1].endswith("--flag 'a b'")
    assert not (machine.folder / "report.json").exists()


def test_what_is_wrong_is_said_in_one_line(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert main(["launch"]) == 2
    assert "the following arguments are required: client (see" in capsys.readouterr().err
    url = machine.server.url
    assert main(["launch", "claude", "--url", url, "--model", "frist"]) == 1
    assert "did you mean first? It has first, second/one." in capsys.readouterr().err
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9"]) == 1
    assert "start one with `mlx-serve serve`" in capsys.readouterr().err
    machine.server.models = []
    assert main(["launch", "claude", "--url", url]) == 1
    assert "no model" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(machine.folder))
    assert main(["launch", "claude", "--url", url]) == 1
    assert "npm install -g @anthropic-ai/claude-code" in capsys.readouterr().err
    assert main(["launch", "emacs"]) == 2
    assert "claude" in capsys.readouterr().err


def test_a_context_that_is_no_number_counts_as_unknown(machine: Machine) -> None:
    machine.server.models = [{"id": "first", "max_model_len": "long"}]
    status, report = machine.launch("claude")
    assert status == 0
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in report["environment"]
