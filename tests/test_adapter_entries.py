"""How adapters are written in files, flags and the environment, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_server.cli.main import main
from mlx_server.config import Config, load_config
from mlx_server.errors import ConfigError, ModelNotFoundError
from mlx_server.model_entries import Adapter, parse_adapters
from mlx_server.pool.catalog import Catalog

TWO = (Adapter("terse", "adapters/terse"), Adapter("formal", "/data/v2"))


def read(tmp_path: Path, text: str, **sources: object) -> Config:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return load_config(path, **{"environ": {}, **sources})


@pytest.mark.parametrize(
    "text",
    [
        '["adapters/terse", "formal=/data/v2"]',
        '{ terse = "adapters/terse", formal = "/data/v2" }',
        '"adapters/terse:formal=/data/v2"',
    ],
)
def test_a_file_has_a_list_or_a_table_or_a_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f"[model]\nadapter = {text}\n").model.adapters == TWO
    several = read(tmp_path, f'[[models]]\nmodel = "a"\nadapter = {text}\n[[models]]\nmodel = "b"\n')
    assert [several.for_model(entry).model.adapters for entry in several.models] == [TWO, ()]


def test_the_flag_may_be_repeated_and_the_variable_joins_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--adapter", "adapters/terse", "--adapter", "formal=/data/v2"]) == 0
    assert 'adapter = "adapters/terse:formal=/data/v2"\n' in capsys.readouterr().out
    joined = load_config(environ={"MLX_SERVE_MODEL_ADAPTER": "adapters/terse:formal=/data/v2"})
    assert joined.model.adapters == TWO
    assert load_config(environ={}, flags={"adapter": ["adapters/terse/"]}).model.adapters[0].name == "terse"


def test_a_folder_may_have_an_equals_sign_in_it() -> None:
    assert parse_adapters("/data/rank=8/terse") == (Adapter("terse", "/data/rank=8/terse"),)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a/x", "b/x"], "a/x and b/x are both called x; give one of them another name, as OTHER=b/x"),
        ("x=a:x=b", "a and b are both called x"),
        ("=a", "'' in 'a' is not an adapter; write NAME=FOLDER"),
        ("x=", "'x' in '' is not an adapter"),
        ("a\u2028b=/data", "'a\\u2028b' in '/data' is not an adapter; write NAME=FOLDER, with none of `:/=`"),
        ("/", "'' in '/' is not an adapter"),
        ("/data/rank=8", "'rank=8' in '/data/rank=8' is not an adapter"),
    ],
)
def test_what_names_no_adapter_is_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, flags={"adapter": value})
    assert words in caught.value.message
    assert caught.value.message.startswith("--adapter: ")


@pytest.mark.parametrize("name", ["te:rse", "te=rse", "te/rse"])
@pytest.mark.parametrize("section", ["[model]", '[[models]]\nmodel = "a"'])
def test_names_in_tables_are_those_that_clients_use(section: str, name: str, tmp_path: Path) -> None:
    """Not others, as which the joined list would be read."""
    with pytest.raises(ConfigError, match=f"adapter is .*'{name}' is not an adapter's name; write one with none of"):
        read(tmp_path, f'{section}\nadapter = {{ formal = "/x", "{name}" = "/y" }}\n')


def test_names_of_adapters_are_no_other_models(tmp_path: Path) -> None:
    text = '[[models]]\nid = "a"\nmodel = "m"\naliases = ["c"]\nadapter = ["x"]\n[[models]]\nid = "{}"\nmodel = "n"\n'
    read(tmp_path, text.format("b:x"))
    for name in ("a:x", "c:x"):
        with pytest.raises(ConfigError, match=f"the name {name} is that of two"):
            read(tmp_path, text.format(name))


def test_several_models_have_adapters_of_their_own_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter is x, and there are .*: give either one model or several"):
        read(tmp_path, '[[models]]\nmodel = "a"\n', flags={"adapter": "x"})


def test_one_that_is_merged_names_its_model(tmp_path: Path) -> None:
    """Files say that it cannot differ by request; the model without it is not there."""
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "adapter_config.json").write_text('{"fine_tune_type": "dora"}')
    catalog = Catalog(load_config(environ={}, flags={"model": "a/base", "adapter": [str(tmp_path / "odd")]}))
    assert [offer.name for offer in catalog.offered()] == ["base:odd"]
    assert {catalog.offer(name).name for name in (None, "base:odd", "a/base:odd")} == {"base:odd"}
    assert catalog.offer("base:odd").adapter is None
    for name in ("base", "a/base", "base:other"):
        with pytest.raises(ModelNotFoundError, match=f"`{name}` does not exist. There is base:odd"):
            catalog.offer(name)
