"""Chat templates that cannot be compiled, found when the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_server.config import ModelConfig
from mlx_server.engine.text.chat import TextTools
from mlx_server.errors import ModelLoadError
from tests.tiny_models import VOCAB_SIZE, byte_tokenizer

BROKEN = "{{ bos_token }}\n{% for message in messages %}\n{{ message.content | no_such_filter }}\n{% endfor %}"
FINE = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ raise_exception('never') }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def load(folder: Path) -> TextTools:
    return TextTools.load(folder, VOCAB_SIZE, ModelConfig())


def test_the_file_and_the_line_are_named(folder: Path):
    (folder / "chat_template.jinja").write_text(BROKEN)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert f"in {folder / 'chat_template.jinja'} is not valid, line 3: No filter named" in caught.value.message


def test_one_inside_of_a_configuration_is_found_too(folder: Path):
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "a\n{% if %}"}))
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not valid, line 2"):
        load(folder)


def test_one_of_several_is_named(folder: Path):
    (folder / "chat_template.jinja").write_text(FINE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(BROKEN)
    with pytest.raises(ModelLoadError, match=r"`tool_use` in .*tool_use\.jinja is not valid, line 3"):
        load(folder)


def test_what_can_be_compiled_is_not_run(folder: Path):
    (folder / "chat_template.jinja").write_text(FINE)
    load(folder)
