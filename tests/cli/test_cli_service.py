"""`mlx-serve service`: a launchd agent, started and ended by a fake launchctl."""

from __future__ import annotations

import os
import plistlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlx_server.api.server import uvicorn_config
from mlx_server.cli import serve
from mlx_server.cli.main import main
from mlx_server.config import ServerConfig
from mlx_server.engine.prefixes import model_on_disk


def test_the_agents_file_starts_this_server_with_these_options(tmp_path, capsys) -> None:
    path = tmp_path / "agents" / "agent.plist"
    options = ["--model", "random:mini", "--port", "9000", "--drain-timeout-s", "12"]
    assert main(["service", "install", "--output", str(path), "--", *options]) == 0
    assert str(path) in capsys.readouterr().out
    agent = plistlib.loads(path.read_bytes())
    assert agent["Label"] == serve.LABEL
    assert agent["ProgramArguments"][1:] == ["-P", "-m", "mlx_server", "serve", *options]
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] > 12
    assert "MLX_SERVE_HOME" in agent["EnvironmentVariables"]
    started = subprocess.run([*agent["ProgramArguments"], "--help"], capture_output=True, text=True, check=True)
    assert "Serves a model over HTTP" in started.stdout


def test_the_agent_starts_homebrews_python_by_the_link_that_upgrades_keep(monkeypatch, tmp_path) -> None:
    lasting = tmp_path / "opt" / "mlx-serve" / "libexec" / "bin" / "python"
    versioned = tmp_path / "Cellar" / "mlx-serve" / "0.2.0" / "libexec" / "bin" / "python"
    monkeypatch.setattr(serve.sys, "executable", str(versioned))
    path = tmp_path / "agent.plist"
    for is_linked in (False, True):
        if is_linked:
            lasting.parent.mkdir(parents=True)
            lasting.touch()
        assert main(["service", "install", "--output", str(path)]) == 0
        (program, *_) = plistlib.loads(path.read_bytes())["ProgramArguments"]
        assert program == str(lasting if is_linked else versioned)


def test_an_interpreter_in_uvs_cache_is_no_place_for_an_agent(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(serve.sys, "executable", str(tmp_path / "archive-v0" / "x9" / "bin" / "python"))
    path = tmp_path / "agent.plist"
    assert main(["service", "install", "--output", str(path)]) == 0, "a folder of the user's with such a name"
    path.unlink()
    (tmp_path / "CACHEDIR.TAG").touch()  # as uv marks its cache
    assert main(["service", "install", "--output", str(path)]) == 1
    assert "uv's cache" in (error := capsys.readouterr().err)
    assert "uv tool install ." in error
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--prot", "9000"], "unknown argument --prot; did you mean --port? (see `mlx-serve serve --help`)"),
        (["--port", "99999"], "less than or equal to 65535"),
        (["--api-key", "secret"], "Every user could read --api-key"),
    ],
)
def test_wrong_options_are_refused_now(tmp_path, capsys, options, reason) -> None:
    path = tmp_path / "agent.plist"
    assert main(["service", "install", "--output", str(path), "--", *options]) != 0
    assert reason in capsys.readouterr().err
    assert not path.exists()


def test_elsewhere_than_on_macos_only_the_file_is_written(monkeypatch, capsys) -> None:
    monkeypatch.setattr(serve.sys, "platform", "linux")
    assert main(["service", "install"]) == 1
    assert "launchd is part of macOS" in capsys.readouterr().err


class FakeLaunchd:
    """Runs agents in the domains of sessions, and is the clock. Asked to end an agent, it lets it live for `end_s`, or
    until it kills it, and accepts no other meanwhile."""

    def __init__(self) -> None:
        self.sessions = {f"gui/{os.getuid()}": "Aqua", f"user/{os.getuid()}": "Background"}
        self.actions: list[list[str]] = []
        self.agents: dict[str, dict[str, Any]] = {}
        self.end_s = 2.0
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        for target in [target for target, end_s in self._ends.items() if self._now >= end_s]:
            del self._ends[target], self.agents[target]

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        _, action, target, *_ = command
        if action == "print":
            return subprocess.CompletedProcess(command, 0 if target in (*self.sessions, *self.agents) else 113)
        self.actions.append(command)
        return subprocess.CompletedProcess(command, getattr(self, f"_{action}")(*command[2:]))

    def _bootstrap(self, domain: str, path: str) -> int:
        agent = plistlib.loads(Path(path).read_bytes())
        target = f"{domain}/{agent['Label']}"
        if domain not in self.sessions:
            return 125
        if target in self.agents or agent["LimitLoadToSessionType"] != self.sessions[domain]:
            return 5
        self.agents[target] = agent
        return 0

    def _bootout(self, target: str) -> int:
        if target not in self.agents:
            return 3
        self._ends[target] = self._now + min(self.end_s, self.agents[target]["ExitTimeOut"])
        return 36


@pytest.fixture
def launchd(monkeypatch, tmp_path) -> FakeLaunchd:
    fake = FakeLaunchd()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(serve.sys, "platform", "darwin")
    monkeypatch.setattr(serve.subprocess, "run", fake.run)
    monkeypatch.setattr(serve, "time", fake)
    return fake


def test_on_macos_the_agent_is_started_and_ended(launchd, tmp_path, capsys) -> None:
    for _ in range(2):  # the second one takes the first one's place
        assert main(["service", "install", "--", "--port", "9001"]) == 0
        assert "127.0.0.1:9001" in capsys.readouterr().out
    path = serve.agent_path()
    assert path.is_relative_to(tmp_path)
    assert list(launchd.agents) == [f"gui/{os.getuid()}/{serve.LABEL}"]
    assert [action[-1] for action in launchd.actions if action[1] == "bootstrap"] == [str(path)] * 2
    assert main(["service", "uninstall"]) == 0
    assert not path.exists()
    assert not launchd.agents
    assert main(["service", "uninstall"]) == 1
    assert "There is no agent" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_refused_before_the_agent_fails_again_and_again(launchd, tmp_path, capsys) -> None:
    assert main(["service", "install", "--", str(tmp_path / "nowhere")]) == 1
    assert "There is no model" in capsys.readouterr().err
    assert not launchd.agents


def test_without_a_desktop_session_the_agent_is_one_of_the_background(launchd) -> None:
    desktop = launchd.sessions.popitem(), launchd.sessions.popitem()
    launchd.sessions.update(desktop[:1])
    assert main(["service", "install"]) == 0
    assert list(launchd.agents) == [f"user/{os.getuid()}/{serve.LABEL}"]
    launchd.sessions.update(desktop)
    assert main(["service", "install"]) == 0, "now somebody has logged in"
    assert list(launchd.agents) == [f"gui/{os.getuid()}/{serve.LABEL}"]
    assert main(["service", "uninstall"]) == 0
    assert not launchd.agents


def test_a_new_installation_waits_for_the_old_servers_drain(launchd, capsys) -> None:
    launchd.end_s = 900.0
    assert main(["service", "install", "--", "--drain-timeout-s", "600"]) == 0
    assert main(["service", "install", "--", "--drain-timeout-s", "1"]) == 0
    assert "up to 63" in capsys.readouterr().out
    (agent,) = launchd.agents.values()
    assert agent["ProgramArguments"][-1] == "1"
    serve.agent_path().write_bytes(b"edited by hand")
    assert main(["service", "install"]) == 0


def test_launchd_leaves_time_for_all_that_follows_the_drain(tmp_path) -> None:
    path = tmp_path / "agent.plist"
    assert main(["service", "install", "--output", str(path), "--", "--drain-timeout-s", "12.5"]) == 0
    after_s = plistlib.loads(path.read_bytes())["ExitTimeOut"] - 12.5
    connections_s = uvicorn_config(None, ServerConfig(), None).timeout_graceful_shutdown
    kv_events_s, disk_threads_s = 5.0, 2 * 2.0
    assert after_s > model_on_disk.FLUSH_S + kv_events_s + disk_threads_s + connections_s


@pytest.mark.parametrize(
    ("what", "folder"),
    [
        ("interpreter", "Documents"),
        ("current folder", "Desktop"),
        ("config", "Downloads"),
        ("its model", "Library/Mobile Documents"),
        ("variable", "Documents"),
    ],
)
def test_what_lies_where_macos_lets_no_service_read_is_refused(
    launchd, monkeypatch, tmp_path, capsys, what, folder
) -> None:
    protected = tmp_path / folder / "project"
    protected.mkdir(parents=True)
    place, options = protected / "x", []
    monkeypatch.chdir(protected if what == "current folder" else tmp_path)
    if what == "interpreter":
        monkeypatch.setattr(serve.sys, "executable", str(place))
    elif what == "current folder":
        place = protected
    elif what == "variable":
        monkeypatch.setenv("HF_HOME", str(place))
    elif what == "config":
        place.write_text("[server]\n")
        (tmp_path / "link").symlink_to(protected)
        options = ["--config", "link/x"]
    else:
        (tmp_path / "own.toml").write_text(f"[[models]]\nid = 'a'\nmodel = '~/{folder}/project/x'\n")
        options = ["--config", "own.toml"]
    assert main(["service", "install", "--", *options]) == 1
    error = capsys.readouterr().err
    assert f"lets no service read {place}" in error
    assert "uv tool install ." in error
    assert not launchd.agents
    assert not serve.agent_path().exists()
    output = tmp_path / "agent.plist"
    assert main(["service", "install", "--output", str(output), "--", *options]) == 0, "for those who know better"


def test_the_agent_has_the_settings_of_this_shell_and_its_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLX_SERVE_SERVER_PORT", "9002")
    monkeypatch.setenv("HF_HOME", "/models/hub")
    others = {
        "MLX_SERVE_CPU_THREADS": "2",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "https_proxy": "http://proxy:3128",
        "SSL_CERT_FILE": "/etc/own.pem",
        "REQUESTS_CA_BUNDLE": "/etc/own.pem",
        "XDG_CACHE_HOME": "/models/cache",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("[server]\n")
    assert main(["service", "install", "--output", "agent.plist", "--", "random:mini", "--config", "my.toml"]) == 0
    agent = plistlib.loads((tmp_path / "agent.plist").read_bytes())
    environ = agent["EnvironmentVariables"]
    assert (environ["MLX_SERVE_SERVER_PORT"], environ["HF_HOME"]) == ("9002", "/models/hub")
    assert others.items() <= environ.items()
    assert agent["WorkingDirectory"] == str(tmp_path)


def test_a_key_of_this_shell_is_not_written_into_the_agent(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("MLX_SERVE_SERVER_API_KEY", "sesame")
    assert main(["service", "install", "--output", str(tmp_path / "agent.plist")]) == 1
    error = capsys.readouterr().err
    assert "MLX_SERVE_SERVER_API_KEY is set, and every user" in error
    assert "sesame" not in error
    assert not (tmp_path / "agent.plist").exists()


def test_a_proxys_password_is_not_written_into_the_agent(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:sesame@proxy:3128")
    assert main(["service", "install", "--output", str(tmp_path / "agent.plist")]) == 1
    error = capsys.readouterr().err
    assert "HTTPS_PROXY names a user" in error
    assert "sesame" not in error
