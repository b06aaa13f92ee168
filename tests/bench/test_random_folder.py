"""A random model on disk, with a tokenizer that shows every id."""

from __future__ import annotations

import argparse
import random
import resource

import pytest

from mlx_server.bench import random_folder
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError, ServeError
from mlx_server.runtime.models.loader import load


def test_the_folder_loads_and_every_id_is_a_word(tmp_path):
    folder = tmp_path / "mini"
    parser = argparse.ArgumentParser()
    random_folder.add_arguments(parser)
    assert random_folder.run(parser.parse_args(["random:mini", str(folder)])) == 0
    loaded = load(str(folder))
    assert loaded.vocab_size == 16384
    tokenizer = Tokenizer.from_folder(folder)
    ids = random.Random(0).sample(range(2, 16384), 500)
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert len(tokenizer.encode("time river stone", add_special_tokens=False)) == 3
    with pytest.raises(ConfigError, match="exists"):
        random_folder.run(parser.parse_args(["random:mini", str(folder)]))


def test_ctrl_c_leaves_nothing_that_is_in_the_way(tmp_path, monkeypatch):
    args = argparse.Namespace(name="random:mini", folder=tmp_path / "new" / "mini")
    with monkeypatch.context() as patch:
        patch.setattr(random_folder, "save_config", interrupt)
        with pytest.raises(KeyboardInterrupt):
            random_folder.run(args)
    assert list((tmp_path / "new").iterdir()) == []
    assert random_folder.run(args) == 0
    assert (args.folder / "config.json").exists()


def interrupt(*_):
    raise KeyboardInterrupt


def test_on_a_full_disk_nothing_is_left(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(ServeError, match=r"mini cannot be written: .* Make room and check the rights"):
            random_folder.run(argparse.Namespace(name="random:mini", folder=tmp_path / "mini"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
