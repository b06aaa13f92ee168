"""docs/models-tested.md says what the code does: tools and reasoning of all templates, and some models of each kind."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from tests.architectures import ARCHITECTURES, BROKEN, LEVELS, NEEDS_METAL, REFUSED
from tests.models_tested import PAGE, UNSEEN, row_of, template_table, text_of

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {row.split(" ")[1]: row for row in re.findall(r"^\| .*", TEXT, re.MULTILINE) if row.count("|") == 7}
SOME = ("qwen3", "gemma3", "gemma3_text", "deepseek_v3", "mamba2", "qwen3_5", "qwen2_vl", "gemma4_unified", "phi3small")
REMEDY = "run `python -m tests.models_tested`"

on_cpu = pytest.mark.skipif(mx.metal.is_available(), reason="the page has results of a CPU")


def test_every_architecture_has_a_row_and_its_level() -> None:
    named = set(ROWS) - {"`model_type`", "---"}
    assert named == {*ARCHITECTURES, *NEEDS_METAL, *BROKEN, *UNSEEN}, REMEDY
    for name in ARCHITECTURES:
        text = "refused" if name in REFUSED else text_of(LEVELS.get(name, "ragged"))
        assert ROWS[name].split(" | ")[1] == text, REMEDY


def test_templates_are_read_as_the_page_says() -> None:
    assert template_table() in TEXT, REMEDY


@on_cpu
@pytest.mark.parametrize("name", SOME)
def test_some_of_each_kind_do_what_the_page_says(name: str) -> None:
    assert ROWS[name] == str(row_of(name)), REMEDY


@on_cpu
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ROWS if name in ARCHITECTURES])
def test_all_do_what_the_page_says(name: str) -> None:
    assert ROWS[name] == str(row_of(name)), REMEDY
