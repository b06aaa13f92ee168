"""`mlx-serve` from the outside: exit statuses, one-line errors, and what each command prints."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server import config, environment
from mlx_server.api.http import listener
from mlx_server.cli import main as cli
from mlx_server.cli.main import Command, Group, main, run
from mlx_server.config import Config, ServerConfig, load_config, settings
from mlx_server.errors import ConfigError, EngineDeadError, ModelLoadError, ServeError
from tests.homes import with_kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def probe(monkeypatch):
    """A command that does what its `act` says, under the name `probe`; `seen` are the arguments it got."""
    module = types.ModuleType("probe_command", "Does as told.")
    module.act = lambda: 0
    module.seen = []
    module.add_arguments = lambda parser: parser.add_argument("--level", type=int)
    module.run = lambda args: (module.seen.append(args.level), module.act())[1]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setattr(cli, "commands", lambda: Group("top", {"probe": Command("probe_command", "probes")}))
    return module


def raising(error: BaseException):
    def fail() -> int:
        raise error

    return fail


def test_the_status_of_a_command_is_the_exit_status(probe):
    probe.act = lambda: 3
    assert main(["probe", "--level", "7"]) == 3
    assert probe.seen == [7]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("wrong port"), 2),
        (ModelLoadError("no such folder"), 1),
        (EngineDeadError("the thread\ndied"), 1),
    ],
)
def test_an_error_is_one_line_without_a_traceback(probe, capsys, error, status):
    probe.act = raising(error)
    assert main(["probe"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"mlx-serve: error: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/locked/x"), "/locked/x: Permission denied."),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "A file or the output cannot be written: No space left on device.",
        ),
        (OSError("status 500"), "status 500"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_the_files_name(probe, capsys, error, line):
    probe.act = raising(error)
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == f"mlx-serve: error: {line}\n"


def test_a_current_folder_that_is_deleted_is_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["service", "install", "--output", str(tmp_path / "agent.plist")]) == 1
    assert capsys.readouterr().err == "mlx-serve: error: the current folder: No such file or directory.\n"


@pytest.mark.parametrize(
    "argv", [["keys", "create", "--key-file", "~nosuch/x"], ["pull", "~nosuch/x"], ["cache", "ls"]], ids=" ".join
)
def test_a_home_folder_that_is_unknown_is_a_wrong_setting(monkeypatch, capsys, argv):
    monkeypatch.setenv("MLX_SERVE_HOME", "~nosuch/x")
    assert main(argv) == 2
    assert "error: ~nosuch/x: the home folder ~nosuch is unknown. Write the path in full" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["MLX_SERVE_HOME", "HOME"])
@pytest.mark.parametrize("argv", [["pull"], ["cache", "ls"]], ids=" ".join)
def test_a_home_folder_that_is_not_utf_8_is_a_wrong_setting(monkeypatch, capsys, variable, argv):
    monkeypatch.delenv("MLX_SERVE_HOME", raising=False)
    monkeypatch.setenv(variable, "/a\udcff")
    assert main(argv) == 2
    assert "is not UTF-8, as libraries that read models need it. Rename it, or name another" in capsys.readouterr().err


def test_our_own_bugs_are_not_hidden(probe):
    probe.act = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


def test_an_interrupt_ends_quietly(probe, capsys):
    probe.act = raising(KeyboardInterrupt())
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["prob"], "unknown command prob; did you mean probe?"),
        (["start"], "unknown command start; there are probe (see"),
        (["--nope"], "unknown argument --nope"),
        (["probe", "--lvel", "1"], "unknown argument --lvel; did you mean --level?"),
        (["probe", "--lev", "1"], "unknown argument --lev; did you mean --level?"),
        (["probe", "--le", "1"], "unknown argument --le (see"),
        (["probe", "extra"], "unknown argument extra"),
        (["probe", "--level", "x"], "argument --level: invalid int value: 'x'"),
        (["probe", "--level"], "argument --level: expected one argument"),
    ],
)
def test_a_wrong_command_line_is_status_2_and_names_the_help(probe, capsys, argv, words):
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"mlx-serve: error: {words}")
    assert message.endswith("--help`)\n")
    assert message.count("\n") == 1
    assert probe.seen == []


def test_groups_nest_and_help_lists_their_commands(capsys):
    tree = Group("top", {"inner": Group("inside", {"leaf": Command("no.such.module", "the leaf")})})
    assert run(tree, ["inner"]) == 0
    assert "leaf  the leaf" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError):
        run(tree, ["inner", "leaf"])


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"], ["serve", "--help"], ["config", "--help"]])
def test_help_and_version_end_with_status_0(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "mlx-serve" in capsys.readouterr().out


def leaves(prog: list[str], group: Group) -> list[list[str]]:
    found = []
    for name, node in group.commands.items():
        found += leaves([*prog, name], node) if isinstance(node, Group) else [[*prog, name]]
    return found


@pytest.mark.parametrize("argv", leaves([], cli.commands()), ids=" ".join)
def test_every_command_explains_itself(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: mlx-serve {' '.join(argv)}" in shown
    assert shown.index("\n\n") < 500  # the usage does not push the explanation off the screen


def test_serve_has_a_flag_for_every_setting_and_examples(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for setting in settings():
        assert f"  {setting.flag}" in text
    assert "(default: )" not in text
    assert "--no-prefix-caching" in text
    assert "mlx-serve serve mlx-community" in text


@pytest.fixture
def served(monkeypatch):
    """What `serve` was called with, instead of serving."""
    calls: list[Config] = []
    server = types.ModuleType("mlx_server.api.server")
    server.serve = lambda loaded, listeners, make_pool: (calls.append(loaded), 5)[1]
    monkeypatch.setitem(sys.modules, "mlx_server.api.server", server)
    monkeypatch.setattr("mlx_server.cli.serve.listen_all", lambda server: [contextlib.nullcontext()])
    monkeypatch.setattr("mlx_server.cli.serve.survive_lost_streams", lambda: None)
    return calls


def test_serve_passes_on_the_settings_and_the_status(served, tmp_path, monkeypatch):
    path = tmp_path / "my.toml"
    path.write_text('[model]\nmodel = "from/file"\n[server]\nport = 1\n')
    monkeypatch.setenv("MLX_SERVE_SERVER_HOST", "0.0.0.0")
    assert main(["serve", "--config", str(path), "--port", "9", "--no-prefix-caching", "--aging-rate", "0.5"]) == 5
    assert served == [
        load_config(
            path,
            environ={"MLX_SERVE_SERVER_HOST": "0.0.0.0"},
            flags={"port": 9, "prefix_caching": False, "aging_rate": 0.5},
        )
    ]
    assert served[0].model.model == "from/file"
    assert served[0].cache.prefix_caching is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "--port: port is '70000'; it should be less than or equal to 65535."),
        (["--dtype", "int4"], "argument --dtype: invalid choice: 'int4' (choose from"),
        (["--config", "/no/such.toml"], "Cannot read /no/such.toml"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(served, capsys, argv, words):
    assert main(["serve", *argv]) == 2
    assert words in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(("held", "asked"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("::1", "::")])
def test_an_occupied_port_is_noticed_where_the_system_gives_it_twice(held, asked, monkeypatch):
    """As macOS does for another address of the port, with SO_REUSEADDR."""

    class Generous(socket.socket):
        def bind(self, address):
            with contextlib.suppress(OSError):
                super().bind(address)

    monkeypatch.setattr(listener, "is_mac", lambda: True)
    monkeypatch.setattr(listener.socket, "socket", Generous)
    family = socket.AF_INET6 if ":" in held else socket.AF_INET
    with socket.create_server((held, 0), family=family) as holder:
        server = ServerConfig(host=asked, port=holder.getsockname()[1])
        with pytest.raises(ServeError, match=r"Address already in use\. Stop what listens there"):
            listener.listen(server)
    with listener.listen(server) as free:
        assert free.getsockname()[1] == server.port


def test_serve_takes_the_model_as_a_bare_word(served, capsys):
    assert main(["serve", "owner/name", "--port", "9"]) == 5
    assert main(["serve", "owner/name", "--model", "owner/name"]) == 5
    assert [config.model.model for config in served] == ["owner/name"] * 2
    assert main(["serve", "owner/name", "--model", "other"]) == 2
    assert "The model is owner/name, and --model is other" in capsys.readouterr().err


def test_config_check_shows_what_results(capsys, monkeypatch):
    monkeypatch.setenv("MLX_SERVE_SERVER_PORT", "9001")
    assert main(["config", "check", "--api-key", "sesame", "--max-num-seqs", "3"]) == 0
    shown = capsys.readouterr().out
    assert "port = 9001\n" in shown
    assert "max_num_seqs = 3\n" in shown
    assert "sesame" not in shown


def test_config_check_takes_the_file_as_a_bare_word(capsys, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[server]\nport = 9003\n")
    assert main(["config", "check", str(path)]) == 0
    assert "port = 9003\n" in capsys.readouterr().out
    assert main(["config", "check", str(path), "--config", "other.toml"]) == 2
    assert "and --config is other.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "did you mean port?"),
        ('tls_cert = "x"', "tls_cert is set and tls_key is not"),
        ('tls_cert = "x"\ntls_key = "x"', "tls_cert: x cannot be read"),
        ('admin_key_file = "x"', "admin_key_file: x cannot be read"),
        ('key_file = "x"', "key_file: x does not exist"),
        ("ollama_port = 8000", "--ollama-port is 8000, and so is --port"),
    ],
)
def test_config_check_refuses_what_serve_would(capsys, tmp_path, text, words):
    (tmp_path / "bad.toml").write_text(f"[server]\n{text}\n")
    assert main(["config", "check", "--config", str(tmp_path / "bad.toml")]) == 2
    assert words in capsys.readouterr().err


def test_config_default_prints_the_file(capsys):
    assert main(["config", "default"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "default.toml").read_text()


def test_pull_prints_the_folder_alone(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mlx_server.runtime.models.resolve.resolve_model", lambda name: tmp_path / name)
    assert main(["pull"]) == 0
    assert main(["pull", "other"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'}\n{tmp_path / 'other'}\n"


def test_doctor_tells_what_is_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_SERVE_HOME", str(with_kernels(tmp_path)))
    (config.home() / "models" / "mine").mkdir(parents=True)
    (config.home() / "models" / "mine" / "config.json").touch()
    (config.home() / "models" / "mine" / "model.safetensors").write_bytes(bytes(10_000_000))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    topics = [line.split()[0] for line in shown.splitlines() if not line.startswith(" ")]
    assert topics == [
        "system",
        "memory",
        "python",
        "mlx",
        "compiler",
        "native",
        "attention",
        "port",
        "admins",
        "models",
    ]
    assert "open to all programs on this machine, until there is a key." in shown
    assert "GFLOP/s" in shown
    assert "its results are MLX's" in shown or mx.default_device() != mx.cpu
    assert "reference: yes" in shown
    assert "mine: 0.01 GB" in shown


@pytest.mark.parametrize(("name", "words"), [("", "cannot be read as a file of keys"), ("x" * 300, "name too long")])
def test_doctor_goes_on_after_a_key_file_that_cannot_be_read(capsys, monkeypatch, tmp_path, name, words):
    monkeypatch.setenv("MLX_SERVE_SERVER_KEY_FILE", str(tmp_path / name))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"\nadmins     .*{words}", shown)
    assert "\nmodels " in shown


@pytest.mark.parametrize(("wire", "words"), [("off", "memory is not wired: "), ("on", "memory is wired (--")])
def test_doctor_tells_on_a_mac_whether_memory_is_wired(capsys, monkeypatch, wire, words):

    assert main(["doctor"]) == 0
    assert "wired" not in capsys.readouterr().out or mx.metal.is_available()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setenv("MLX_SERVE_MEMORY_WIRE_MEMORY", wire)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "kernel panics" in shown


def test_doctor_tells_when_the_port_is_taken(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        monkeypatch.setenv("MLX_SERVE_SERVER_PORT", str(taken_port))
        assert main(["doctor"]) == 0
    assert f"Cannot listen on 127.0.0.1:{taken_port}: Address already in use." in capsys.readouterr().out


def in_a_process(*argv: str, closed: int | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with one of the standard streams closed."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_server", *argv],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        check=False,
        timeout=60,
        preexec_fn=None if closed is None else lambda: os.close(closed),
    )


INTERRUPTED_AT = """
    import os, runpy, signal, sys

    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == LIBRARY:
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, Interrupt())
    sys.argv[1:] = ["config", "default"]
    runpy.run_module("mlx_server", run_name="__main__")
"""


@pytest.mark.parametrize(
    "library", ["mlx_server.environment", "mlx_server.cli.main", "mlx_server.cli.config", "pydantic"]
)
def test_an_interrupt_while_commands_are_imported_ends_quietly(library: str):
    program = f"LIBRARY = {library!r}\n{textwrap.dedent(INTERRUPTED_AT)}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode in (130, -signal.SIGINT)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [(["bogus"], 2, "unknown command bogus"), (["pull", "bogus"], 1, "There is no model bogus")],
)
def test_the_module_is_the_command_and_says_one_line(argv, status, words):
    process = in_a_process(*argv)
    assert (process.returncode, process.stdout) == (status, "")
    assert process.stderr.startswith(f"mlx-serve: error: {words}")
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("from mlx_server.cli.main import main; main([])", "mlx numpy transformers pydantic fastapi uvicorn httpx"),
        ("import mlx_server.cli.keys, mlx_server.cli.cache", "mlx mlx_lm transformers fastapi uvicorn"),
        ("import mlx_server.cli.serve", "mlx numpy transformers fastapi uvicorn httpx"),  # until the port is taken
        (
            "import mlx_server.api.server",
            "mlx mlx_lm numpy transformers huggingface_hub redis",
        ),  # until probes are answered
    ],
)
def test_what_takes_long_is_imported_late(statement: str, absent: str):
    script = f"import sys; {statement}; print('loaded:', *(name for name in {absent.split()} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "loaded:"


def test_the_library_is_imported_without_a_word():
    script = "from mlx_server import LLM, SamplingParams"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert (ended.stdout, ended.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("closed", "argv", "status", "line"),
    [
        (0, ["cache", "warm", "-"], 1, "mlx-serve: error: Standard input has no entries.\n"),
        (0, ["chat", "--url", "http://127.0.0.1:9", "hi"], 1, "mlx-serve: error: No server answers at .*\n"),
        (1, ["config", "default"], 0, ""),
        (2, ["bogus"], 2, ""),
    ],
)
def test_a_standard_stream_may_be_closed(closed, argv, status, line):
    process = in_a_process(*argv, closed=closed)
    assert (process.returncode, process.stdout) == (status, "")
    assert re.fullmatch(line, process.stderr)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero")
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("cache warm /dev/zero", "/dev/zero has more than 1,000,000 bytes; name a file of prompts."),
        ("cache warm -", "Standard input has more than 1,000,000 characters; send less at a time."),
        ("chat hello", "Standard input has more than 1,000,000 characters; send less at a time."),
        (
            "config check --tls-cert /dev/zero --tls-key /dev/zero",
            "tls_cert: /dev/zero is no regular file; name a PEM file.",
        ),
        (
            "config check --key-file /dev/zero",
            "/dev/zero is not a file of keys that this version can read (format 0). It is no regular file: "
            "name another with --key-file.",
        ),
    ],
)
def test_files_without_end_are_refused(argv, line, monkeypatch, capsys):
    monkeypatch.setattr(environment, "MAX_INPUT", 1_000_000)
    monkeypatch.setattr("mlx_server.cli.cache.MAX_INPUT", 1_000_000)
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        assert main(argv.split()) == 2
    assert capsys.readouterr().err == f"mlx-serve: error: {line}\n"


_UNNAMED = "A file or the output cannot be written: "


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has this device")
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["config", "default"], _UNNAMED),
        (["--help"], _UNNAMED),
        (["serve", "--help"], _UNNAMED),
        (["--version"], _UNNAMED),
        (["keys", "create"], r"The key \w{12} cannot be printed: "),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(argv, reason, unbuffered, tmp_path):
    with open("/dev/full", "w") as full:
        process = in_a_process(
            *argv, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "MLX_SERVE_HOME": str(tmp_path)}
        )
    assert process.returncode == 1
    assert re.search(f"(^|\n)mlx-serve: error: {reason}No space left on device.*\n$", process.stderr)
    assert "Exception" not in process.stderr


def test_text_that_the_terminal_cannot_show_is_escaped():
    process = in_a_process(
        *("config", "check", "--served-model-name", "Zoë"), env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert r'served_model_name = "Zo\xeb"' in process.stdout


@pytest.mark.parametrize("argv", [["config", "default"], ["serve", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(argv, unbuffered):
    script = f"from mlx_server.cli.main import main; import sys; sys.exit(main({argv}))"
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (cli.EXIT_BROKEN_PIPE, "")
