"""`[[models]]`: several models, each with settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_server.cli.config import effective_document
from mlx_server.config import Config, load_config
from mlx_server.errors import ConfigError

EXAMPLE = Path(__file__).parents[1] / "configs" / "models.toml"


def load(tmp_path: Path, text: str, **more: Any) -> Config:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return load_config(path, environ=more.pop("environ", {}), **more)


def test_an_entry_overrides_what_it_names_and_nothing_else(tmp_path):
    config = load(
        tmp_path,
        '[model]\ndtype = "float16"\nmax_model_len = 512\n[cache]\nprefix_caching = false\n'
        '[[models]]\nid = "a"\nmodel = "x/a"\naliases = ["one"]\nmax_model_len = 64\nnum_kv_blocks = 8\npinned = true\n'
        '[[models]]\nmodel = "/models/b/"\nidle_ttl_s = 5\n',
    )
    a, b = config.models
    assert (a.id, a.names, a.pinned, a.idle_ttl_s) == ("a", ("a", "one", "x/a"), True, None)
    assert (b.id, b.names, b.pinned, b.idle_ttl_s) == ("b", ("b", "/models/b/"), False, 5.0)
    own = config.for_model(a)
    assert (own.model.model, own.model.served_model_name) == ("x/a", "a")
    assert (own.model.dtype, own.model.max_model_len) == ("float16", 64)
    assert (own.cache.num_kv_blocks, own.cache.prefix_caching) == (8, False)
    assert own.scheduler == config.scheduler
    assert config.for_model(b).model.max_model_len == 512
    assert config.for_model(b).cache.num_kv_blocks is None


def test_the_example_is_valid_and_shown_as_it_is_read(tmp_path):
    config = load_config(EXAMPLE, environ={})
    assert [entry.id for entry in config.models] == ["small", "coder", "writer"]
    assert load(tmp_path, effective_document(config)) == config


def test_a_setting_that_an_entry_leaves_empty_is_shown_as_it_is_read(tmp_path):
    config = load(tmp_path, '[[models]]\nmodel = "a"\nadapter = ""\n')
    assert load(tmp_path, effective_document(config)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[models]\nmodel = "a"', r"models must be written as \[\[models\]\]"),
        ('[[models]]\nid = "a"', r"\[\[models\]\] 1: model is missing"),
        ('[[models]]\nmodel = "a"\n[[models]]\nmodel = "x/a"', "the name a is that of two"),
        ('[[models]]\nmodel = "a"\naliases = ["b"]\n[[models]]\nmodel = "b"', "the name b is that of two"),
        ('[[models]]\nmodel = "a"\naliases = "b"', "aliases is 'b'; it should be a valid list"),
        ('[[models]]\nmodel = "a"\naliases = [""]', r"aliases\[0\] is ''; it should have at least 1 char"),
        ("[[models]]\nmodel = 3", "model is 3; it should be a valid string"),
        ('[[models]]\nmodel = "a"\npined = true', r"\[\[models\]\] 1: unknown key pined; did you mean pinned\?"),
        ('[[models]]\nmodel = "a"\nmax_model_len = 1', "max_model_len is 1; it should be greater than or equal to 2"),
        ('[[models]]\nmodel = "a"\nport = 1', "unknown key port"),
        ('[[models]]\nmodel = "a"\nserved_model_name = "b"', "served_model_name is not allowed in .*; use id"),
        ('[[models]]\nmodel = "a"\nidle_ttl_s = -1', "idle_ttl_s is -1; it should be greater than or equal to 0"),
        (
            '[[models]]\nmodel = "a"\npinned = true\nidle_ttl_s = 9',
            r"\[\[models\]\] 1: idle_ttl_s is 9, and pinned is true",
        ),
        ('[model]\nmodel = "b"\n[[models]]\nmodel = "a"', "give either one model or several"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


@pytest.mark.parametrize("more", [{"flags": {"model": "b"}}, {"environ": {"MLX_SERVE_MODEL_MODEL": "b"}}])
def test_one_model_and_several_contradict_each_other_from_wherever_they_come(tmp_path, more):
    with pytest.raises(ConfigError, match="give either one model or several"):
        load(tmp_path, '[[models]]\nmodel = "a"\n', **more)
