"""README and docs/ are true: links lead somewhere, commands are accepted as written, and settings exist."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client.core import CounterMetricFamily

from mlx_server.api.auth.authentication import DISCOVERY_PATHS, FREE_PATHS
from mlx_server.cli import main as cli
from mlx_server.cli.main import Command, Group
from mlx_server.cli.remote import KEY_VARIABLE, URL_VARIABLE
from mlx_server.config import Config, load_config, settings
from mlx_server.engine.library.options import EngineOptions
from mlx_server.observability.series import OWN_SERIES, SERVER_SERIES
from mlx_server.runtime.kernels.cpu.build import ISA_VARIABLE
from mlx_server.runtime.kernels.cpu.native import THREADS_VARIABLE
from mlx_server.tiers import Tier

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = {"./scripts/serve": "serve", "./scripts/bench-peers": "bench peers"}
OTHER_VARIABLES = {"MLX_SERVE_HOME", KEY_VARIABLE, URL_VARIABLE, THREADS_VARIABLE, ISA_VARIABLE}
VARIABLES = {setting.env for setting in settings()} | OTHER_VARIABLES
PACKAGE = ROOT / "mlx_server"
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"mlx_server", "tests", "scripts", "configs"}
SOURCES = {".py", ".h", ".cpp", ".msl", ".css", ".html", ".js", ".jinja"}
_OF_SMG = (
    *("--balance-abs-threshold", "--worker-overload-waiting-requests"),
    *("--health-check-interval-secs", "--cb-timeout-duration-secs"),
)
FOREIGN_FLAGS = {"--reload", "--user", *_OF_SMG}
"""Of other programs, in running text."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


class Parser(cli.Parser):
    """Raises what it would end the program for."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def blocks_of(language: str, text: str) -> list[str]:
    """The contents of the fenced blocks of a language, also of those in lists."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [content for name, content in blocks if name == language]


def words_of_commands(text: str) -> Iterator[list[str]]:
    """Every command line of ours, in blocks of shell and in running text, without the program's name."""
    lines = [line for block in blocks_of("sh", text) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*lines, *inline]:
        words = (
            shlex.split(line.removesuffix(" &")) if any(name in line for name in ("mlx-serve", "./scripts/")) else []
        )
        for place, word in enumerate(words):  # behind variables and programs that start it
            if Path(word).name == "mlx-serve":
                yield words[place + 1 : words.index(">") if ">" in words else None]
                break
            if word in SCRIPTS:
                yield [*SCRIPTS[word].split(), *words[place + 1 :]]
                break


def test_every_block_of_shell_is_found() -> None:
    text = "".join(map(text_of, PAGES))
    assert text.count("```sh\n") == len(blocks_of("sh", text)) > 20
    assert not re.search(r"```(bash|console|shell|zsh)", text)


@pages
def test_blocks_of_shell_have_no_comments(page: Path) -> None:
    """A Mac's shell takes `#` and what follows as words when a command is pasted into it."""
    lines = [line for block in blocks_of("sh", text_of(page)) for line in block.splitlines()]
    assert [line for line in lines if re.search(r"(^|\s)#", line)] == []


def parser_of(words: list[str]) -> tuple[Parser | None, list[str]]:
    """The parser of the command that `words` name, and what is left for it; None for a group of commands."""
    _, node, rest = cli.find("mlx-serve", cli.commands(), words)
    if isinstance(node, Group):
        assert not rest or rest[0].startswith("-")
        return None, []
    parser = Parser()
    node.add_to(parser)
    return parser, list(rest)


def all_parsers(node: Command | Group) -> Iterator[argparse.ArgumentParser]:
    if isinstance(node, Group):
        for child in node.commands.values():
            yield from all_parsers(child)
    else:
        parser = argparse.ArgumentParser()
        node.add_to(parser)
        yield parser


@pytest.fixture(scope="module")
def flags() -> set[str]:
    actions = (action for parser in all_parsers(cli.commands()) for action in parser._actions)
    return {option for action in actions for option in action.option_strings}


@pages
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def paths_in(text: str) -> Iterator[str]:
    """Files and folders of the repository, in blocks of shell and in running text."""
    blocks = blocks_of("sh", text)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for word in " ".join([*blocks, *inline]).split():
        module = re.fullmatch(r"(?:tests|mlx_server)(?:\.\w+)+", word)
        path = word.replace(".", "/") if module else word.removeprefix("./")
        is_ours = ("/" in path and path.split("/")[0] in FOLDERS) or path.endswith(".py")
        if is_ours and re.fullmatch(r"[\w*./-]+", path):
            yield path


@pages
def test_files_exist(page: Path) -> None:
    for path in paths_in(text_of(page)):
        found = [*ROOT.glob(path), *PACKAGE.glob(path), *ROOT.glob(f"{path.rstrip('/')}.py")]
        assert found, path


def test_files_are_named() -> None:
    assert sum(len(list(paths_in(text_of(page)))) for page in PAGES) > 100


def test_tree_has_every_file_of_the_package() -> None:
    tree = re.search(r"```\nmlx_server/\n(.*?)```", text_of(ROOT / "docs" / "architecture.md"), re.DOTALL)
    assert tree is not None
    folders: list[str] = []
    named: list[str] = []
    for line in tree[1].splitlines():
        names = re.split(r"  +", line.strip())[0]
        del folders[(len(line) - len(line.lstrip())) // 2 - 1 :]
        if names.endswith("/"):
            folders.append(names)
            assert (PACKAGE / "".join(folders)).is_dir(), line
        else:
            named += ["".join([*folders, name]) for name in names.split(", ")]
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
    assert sorted(named) == sorted(str(path) for path in files if path.name != "__init__.py")


def test_there_are_commands() -> None:
    assert sum(len(list(words_of_commands(text_of(page)))) for page in PAGES) > 30


def check_command(words: list[str]) -> None:
    parser, rest = parser_of(words)
    if parser is None or "--help" in rest:
        return
    try:
        _, extra = parser.parse_known_args(rest)
    except ValueError as error:
        if "required" not in str(error):
            raise
        # Running text leaves out what is required; what it has must be right all the same.
        known = {option for action in parser._actions for option in action.option_strings}
        extra = [word for word in rest if word.startswith("--") and word not in known]
    assert not extra, f"mlx-serve {' '.join(words)}: {extra}"


@pages
def test_commands_are_accepted_as_they_are_written(page: Path) -> None:
    for words in words_of_commands(text_of(page)):
        check_command(words)


def test_examples_of_help_are_accepted() -> None:
    texts = [parser.description for parser in all_parsers(cli.commands()) if "example" in (parser.description or "")]
    blocks = [f"```sh\n{re.split('examples?:', text, maxsplit=1)[-1]}\n```" for text in texts]
    examples = [words for block in blocks for words in words_of_commands(block)]
    assert len(examples) > 20
    for words in examples:
        check_command(words)


@pages
def test_flags_in_running_text_exist(page: Path, flags: set[str]) -> None:
    for flag in re.findall(r"`(--[a-z][\w-]*)[^`]*`", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)):
        assert flag in flags | FOREIGN_FLAGS, flag


@pages
def test_variables_exist(page: Path) -> None:
    named = set(re.findall(r"\bMLX_SERVE_[A-Z_]+\b", text_of(page)))
    assert named <= VARIABLES | {"MLX_SERVE_KEY"}  # the last one is a name that the reader chooses


def test_variables_that_are_no_settings_are_explained() -> None:
    text = "".join(map(text_of, PAGES))
    assert [name for name in sorted(OTHER_VARIABLES) if f"`{name}" not in text] == []


@pages
def test_examples_of_configurations_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks_of("toml", text_of(page))):
        if "model_providers" in block:  # Codex's
            continue
        (tmp_path / f"{number}.toml").write_text(block)
        assert load_config(tmp_path / f"{number}.toml", environ={}) != Config()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_configurations_are_valid(path: Path) -> None:
    load_config(path, environ={})


@pages
def test_defaults_in_tables_are_the_defaults(page: Path) -> None:
    by_flag = {setting.flag: setting.default for setting in settings()}
    for flag, shown in re.findall(r"^\| `(--[\w-]+)` \| `?([^|`]+?)`? \|", text_of(page), re.MULTILINE):
        default = by_flag[flag]
        assert shown == {None: "none", False: "off", True: "on"}.get(default, str(default)), flag


def test_every_limit_of_a_tier_is_explained() -> None:
    text = text_of(ROOT / "docs" / "keys-and-tiers.md")
    table = set(re.findall(r"^\| .*", text, re.MULTILINE))
    named = {name for row in table for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {name for name in Tier.__dataclass_fields__ if name != "name"} <= named


def test_free_paths_are_those_that_are_reported() -> None:
    stated = "`/health`, `/ping`, `/version`, `/metrics` and the live page's static files"
    assert stated in text_of(ROOT / "docs" / "keys-and-tiers.md")
    assert stated in text_of(ROOT / "SECURITY.md")
    assert {path for path in FREE_PATHS if "dashboard" not in path} == {
        "/health", "/ping", "/version", "/metrics", "/"
    }  # fmt: skip


def test_every_path_of_the_discovery_key_is_named() -> None:
    text = text_of(ROOT / "docs" / "scale-out.md")
    assert [path for path in sorted(DISCOVERY_PATHS) if f"`{path}`" not in text] == []


def test_every_option_of_the_library_is_named() -> None:
    text = text_of(ROOT / "docs" / "library.md")
    assert [name for name in EngineOptions.__annotations__ if f"`{name}`" not in text] == []


def test_every_series_of_our_own_is_in_the_table_with_its_labels() -> None:
    rows = [row.split("|") for row in re.findall(r"^\| `.*", text_of(ROOT / "docs" / "observability.md"), re.MULTILINE)]
    shown = {name: row[2] for row in rows for name in re.findall(r"`([\w:]+)`", row[1])}
    for family in (*OWN_SERIES, *(family for families in SERVER_SERIES.values() for family in families)):
        name, _, labels = family.name.rstrip("}").partition("{")
        name += "_total" if family.kind is CounterMetricFamily else ""
        if not name.startswith(("vllm:", "process_")):
            assert name in shown
            own = set(filter(None, labels.split(","))) - {"model_name"}
            assert set(re.findall(r"`(\w+)`", shown[name])) - {"engine"} == own, name
